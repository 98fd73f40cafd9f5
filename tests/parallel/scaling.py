"""Print the table of the page Scaling: ``mpiexec -n 2 python -m tests.parallel.scaling``.

Each kind of parallelism of two ranks takes the same rows.  The plan's bytes and seconds are
computed from the rate of products and the bandwidth that the same ranks reach just before.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_cupy.memory.stage_plan import Layout
from unsloth_cupy.models import create
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.ranks.stages import ModelStage, pipeline_gradients, schedule_of
from unsloth_cupy.parallel import DataParallel, MpiCommunicator, SingleCommunicator
from unsloth_cupy.profiling.scale import plan_ranks

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
ROWS, TOKENS, PARTS = 8, 128, 4  # rows in a step, in as many microbatches
TIMES = 7
SIZE, MESSAGE = 1024, 2**22  # the sizes of the product and the message that are measured


def shortest(comm: Any, call: Callable[[], Any]) -> float:
    """Return the shortest time of a call, from its start in all ranks to its end in all."""
    call()
    times = []
    for _ in range(TIMES):
        comm.barrier()
        started = time.perf_counter()
        call()
        comm.barrier()
        times.append(time.perf_counter() - started)
    return min(times)


def rates(comm: Any) -> tuple[float, float]:
    """Return TFLOP/s of products while all ranks multiply, and GB/s that each sends."""
    a, x = np.ones((SIZE, SIZE), np.float32), np.ones(MESSAGE, np.uint8)
    out, other = np.empty_like(x), (comm.rank + 1) % comm.size
    seconds = (
        shortest(comm, lambda: a @ a),
        shortest(comm, lambda: comm.exchange(x, other, out, other)),
    )
    return 2 * SIZE**3 / seconds[0] / 1e12, MESSAGE / seconds[1] / 1e9


def ways(comm: Any) -> dict[str, tuple[Layout, int, Callable[[], Any]]]:
    """Return layouts, rows of a microbatch, and steps, by name."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4096, (ROWS, TOKENS))
    parts = [{"tokens": each, "labels": each} for each in np.split(tokens, PARTS)]
    count = ROWS * (TOKENS - 1)

    def passes(model: Any, batches: Any) -> None:
        for each in batches:
            model.loss_and_gradients(**each, count=count)

    alone = create(CONFIG, seed=0)
    passes_by_name: dict[str, Any] = {"one process": (Layout(), 2, lambda: passes(alone, parts))}
    if comm.size == 1:
        return passes_by_name
    tensor = create(CONFIG, seed=0, communicator=comm)
    staged = create(CONFIG, seed=0, pipeline=comm)
    many: Any = DataParallel(alone, comm)  # type: ignore[arg-type]
    half = [{name: array[comm.rank :: 2] for name, array in each.items()} for each in parts]

    def data() -> None:
        sums: dict[str, Any] = {}
        for each in half:
            _, gradients = alone.loss_and_gradients(**each, count=count)
            sums = {n: g + sums[n] if sums else g for n, g in gradients.items()}
        many.sums(sums)

    def pipeline() -> None:
        stage = ModelStage(staged, staged.trainable, TrainingStep())
        counted = [each | {"count": count} for each in parts]
        pipeline_gradients(stage, schedule_of(stage.stages, PARTS), counted)

    return passes_by_name | {
        "--data-parallel 2": (Layout(data=2), 1, data),
        "--tensor-parallel 2": (Layout(tensor=2), 2, lambda: passes(tensor, parts)),
        "--pipeline-parallel 2": (Layout(pipeline=2), 2, pipeline),
    }


def main() -> None:
    comm = MpiCommunicator()
    rate, bandwidth = rates(comm)
    if comm.rank == 0:
        print(f"products: {1000 * rate:.1f} GFLOP/s a rank; messages: {bandwidth:.2f} GB/s")
    for name, (layout, rows, step) in ways(comm).items():
        one = name == "one process"
        if one and comm.rank:
            comm.barrier()
            continue
        seconds = shortest(SingleCommunicator() if one else comm, step)
        if one:
            comm.barrier()
        if comm.rank:
            continue
        plan = plan_ranks(
            CONFIG, layout, batch=rows, tokens=TOKENS, dtype="float32", microbatches=PARTS,
            rate=rate, interconnect=(bandwidth, bandwidth), device="cpu",
        )  # fmt: skip
        ways_there = [
            PARTS * sum(map(sum, s.sent("tensor").values())) + s.gradients + PARTS * s.passes
            for s in plan.stages
        ]
        held = max(s.memory.total for s in plan.stages)
        print(
            f"| {name} | {max(ways_there) / 2**20:.1f} | {held / 2**20:.0f} | {plan.bubble:.0%}"
            f" | {plan.seconds:.2f} | {seconds:.2f} |"
        )


if __name__ == "__main__":
    main()
