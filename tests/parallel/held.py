"""The memory of ranks in a step equals the plan, for tensor, pipeline and data parallelism."""

import importlib
from typing import Any
from unittest import mock

import numpy as np

from unsloth_cupy import AdamW
from unsloth_cupy.memory import stage_plan
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models import create, quantize
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.ranks.stages import ModelStage, pipeline_gradients, schedule_of
from unsloth_cupy.ops.quantized.weight import held_arrays
from unsloth_cupy.parallel import Communicator, DataParallel, Zero1, Zero3, grid
from unsloth_cupy.training.gradients import sum_gradients

from ..harness.sampling import Sample

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
CASES: tuple[tuple[Layout, dict[str, Any]], ...] = (
    (Layout(2), {}),
    (Layout(data=2, zero=1), {}),
    (Layout(data=2, zero=3), {}),
    (Layout(pipeline=2), {}),
    (Layout(pipeline=2), {"schedule": "interleaved", "rank": 4}),
    (Layout(data=2, zero=3), {"rank": 4, "quantization": "nf4"}),
    (Layout(data=2), {"rank": 4, "quantization": "int8"}),
    (Layout(2), {"rank": 4, "quantization": "nf4"}),
    (Layout(context=2), {}),
)
OBJECTS = 2**17  # bytes of Python objects, which are measured too
COPIES = 3  # copies of pending messages, which a host sends
ROWS, PARTS = (2, 64), 4  # of a microbatch, and how many of them
HIDDEN = 2 * 64 * 128 * 4  # bytes of the hidden states of a microbatch


def all_checks(comm: Communicator) -> None:
    for name in ("scipy.sparse", "scipy.special"):  # a first step imports them: not an array
        importlib.import_module(name)
    for layout, options in Sample.one_in(4, CASES):
        with mock.patch.object(stage_plan, "Inbox", return_value=None):  # MPI's are not seen
            plans = plan_ranks(
                CONFIG, layout, batch=ROWS[0], tokens=ROWS[1], dtype="float32", microbatches=PARTS,
                device="cpu", **options,
            )  # fmt: skip
        stage, measured = peak(comm, layout, **options)
        planned, copies = plans[stage].total, COPIES * HIDDEN * (layout.pipeline > 1)
        assert abs(measured - planned) <= OBJECTS + copies, (layout, options, measured, planned)


def peak(
    comm: Communicator, layout: Layout, *, schedule: str = "1f1b", rank: int = 0,
    quantization: str = "",
) -> tuple[int, int]:  # fmt: skip
    """Return the stage of this rank, and the peak of a step's arrays in bytes."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context}
    place = grid(comm, data=layout.data, **sizes)
    parts: dict[str, Any] = {} if layout.tensor == 1 else {"communicator": place.tensor}
    chunks = 2 if schedule == "interleaved" else 1
    parts |= {} if layout.pipeline == 1 else {"pipeline": place.pipeline, "chunks": chunks}
    model = create(CONFIG, seed=0, **parts)
    if quantization:
        quantize(model, quantization)
    if rank:
        model.add_adapter(rank, seed=0)
    model.context = place.context
    learns: Any = model if layout.zero < 3 else Zero3(model, place.data)
    optimizer = AdamW(model.trainable)
    alike = place.data if layout.data > 1 else place.context
    many: Any = DataParallel(learns, alike) if layout.alike > 1 > layout.zero else None
    if layout.zero == 1:
        optimizer = many = Zero1(optimizer, alike)
    tokens = np.zeros(ROWS, np.int64)
    batches = [{"tokens": tokens, "labels": tokens, "count": 100}] * PARTS

    def step() -> None:
        if layout.pipeline > 1:
            stage = ModelStage(model, model.trainable, TrainingStep())
            _, sums = pipeline_gradients(stage, schedule_of(stage.stages, PARTS), batches)
        else:
            passes = (learns.loss_and_gradients(**each) for each in batches)
            _, sums = sum_gradients(passes, PARTS)
        optimizer.step(sums if many is None else many.sums(sums), factor=0.5)

    step()
    states = optimizer.inner if layout.zero == 1 else optimizer
    weights = model.parameters | (model.adapter.parameters if rank else {})
    held = [*(array for _, array in held_arrays(weights)), *states.state().values()]
    with memory_pool(held=held) as pool:
        step()  # ops make the routes of calls that are watched: objects, which the next step keeps
        pool.reset_peak()
        step()
        return place.pipeline.rank, pool.peak
