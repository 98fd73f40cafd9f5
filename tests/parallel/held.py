"""What ranks hold in a step is what is planned, by tensor, pipeline and data."""

import importlib
from typing import Any

import numpy as np

from unsloth_cupy import AdamW
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.models import create
from unsloth_cupy.models.stages import ModelStage, pipeline_gradients, schedule_of
from unsloth_cupy.parallel import Communicator, DataParallel, Zero1, Zero3, grid
from unsloth_cupy.profiling.scale import plan_ranks
from unsloth_cupy.profiling.stage_plan import Layout
from unsloth_cupy.training.gradients import sum_gradients

from ..sample import Sample

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
LAYOUTS = (
    Layout(2), Layout(pipeline=2), Layout(data=2), Layout(data=2, zero=1), Layout(data=2, zero=3),
    Layout(context=2),
)  # fmt: skip
ROWS, PARTS = (2, 64), 3  # of a microbatch, and how many of them


def all_checks(comm: Communicator) -> None:
    for name in ("scipy.sparse", "scipy.special"):  # a first step imports them, which is no array
        importlib.import_module(name)
    for layout in Sample.one_in(3, LAYOUTS):
        plan = plan_ranks(
            CONFIG, layout, batch=ROWS[0], tokens=ROWS[1], dtype="float32", microbatches=PARTS,
            rate=1.0, interconnect=(1.0, 1.0), device="cpu",
        )  # fmt: skip
        stage, measured = peak(comm, layout)
        planned = plan.stages[stage].memory.total
        # a host sends a copy, and a call has some kilobytes of its own
        assert abs(measured - planned) <= 0.01 * planned, (layout, measured, planned)


def peak(comm: Communicator, layout: Layout) -> tuple[int, int]:
    """Return the stage of this rank, and the most bytes of arrays that a step holds."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context}
    place = grid(comm, data=layout.data, **sizes)
    parts: dict[str, Any] = {} if layout.tensor == 1 else {"communicator": place.tensor}
    parts |= {} if layout.pipeline == 1 else {"pipeline": place.pipeline}
    model = create(CONFIG, seed=0, **parts)
    model.context = place.context
    learns: Any = model if layout.zero < 3 else Zero3(model, place.data)
    optimizer = AdamW(model.trainable)
    alike = place.data if layout.data > 1 else place.context
    many: Any = DataParallel(learns, alike) if layout.alike > 1 > layout.zero else None
    if layout.zero == 1:
        optimizer = many = Zero1(optimizer, alike)
    tokens = np.zeros(ROWS, np.int64)
    batches = [{"tokens": tokens, "labels": tokens}] * PARTS

    def step() -> None:
        if layout.pipeline > 1:
            stage = ModelStage(model, model.trainable, 100)
            _, sums = pipeline_gradients(stage, schedule_of(stage.stages, PARTS), batches)
        else:
            passes = (learns.loss_and_gradients(**each, count=100) for each in batches)
            _, sums = sum_gradients(passes, PARTS)
        optimizer.step(sums if many is None else many.sums(sums), factor=0.5)

    step()
    states = optimizer.inner if layout.zero == 1 else optimizer
    held = [*model.parameters.values(), *states.state().values()]
    with memory_pool(held=held) as pool:
        pool.reset_peak()
        step()
        return place.pipeline.rank, pool.peak
