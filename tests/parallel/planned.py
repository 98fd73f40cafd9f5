"""Run finetune commands in ranks, each of which compares the memory of a step with its plan.

``python -m tests.parallel.planned ARGUMENTS -- ARGUMENTS`` writes ``planned-RANK.json`` into the
folder of each run: for each step after the first, which imports modules, the bytes that are planned
without and with messages that arrive early, and those that arrays held at most.
"""

import json
import sys
from itertools import groupby
from typing import Any
from unittest import mock

import numpy as np

from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.memory.planned_model import new_adapter
from unsloth_cupy.memory.planned_ranks import Inbox
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.ops.quantized.weight import held_arrays


def planned(loop: Loop) -> int:
    """Return the bytes that a rank holds at most in the step that has ended, as planned."""
    groups, plan, model = loop.ranks.groups, loop.plan, loop.model
    sizes = groups.tensor.size, groups.pipeline.size, groups.data.size
    layout = Layout(*sizes, loop.ranks.zero, context=groups.context.size)
    first = loop.method.first(loop.step - 1, plan.accumulate)
    method = loop.method
    if hasattr(method, "planned"):  # some ranks have the other model, all know its config
        method = method.planned(lambda model: getattr(model, "config", model))
    batch = (
        loop.checkpoints.answers[0] if method.is_on_policy else loop.training_data.batches.at(first)
    )
    config = model.config if model.division is None else model.division.whole
    adapter = None
    if plan.adapters is not None:
        adapter = new_adapter(config, **plan.adapters.options(config))
    prompts = -(-plan.batch // groups.data.size)
    stages = plan_ranks(
        config, layout, batch=prompts, tokens=loop.training_data.largest[1] + method.max_new_tokens,
        dtype=plan.dtype, microbatches=plan.accumulate, schedule=loop.ranks.schedule or "1f1b",
        chunks=loop.ranks.chunks, recompute_every=plan.recompute_every, device="cpu",
        adapter=adapter, context_attention=loop.ranks.context_attention or "ring",
        objective=method, optimizer=plan.kind, inputs=method.inputs(loop.ranks.rows(batch)),
    )  # fmt: skip
    return stages[groups.pipeline.rank].total


def bounds(loop: Loop) -> tuple[int, int]:
    """Return what is planned if no message arrives early, and if all do."""
    most = planned(loop)
    with mock.patch.object(Inbox, "empty"):
        return planned(loop), most


def measured(self: Loop) -> None:
    """Run a step, and write what it held."""
    others = [getattr(each, "parameters", {}) for each in self.method.other_models]
    arrays = self.model.parameters, self.model.trainable, self.checkpoints.part().averages, *others
    held = [array for each in arrays for _, array in held_arrays(each)]
    masters = held_arrays(self.checkpoints.part().trained)  # with ZeRO, some are views of others
    held += [a for _, a in masters if not any(np.may_share_memory(a, each) for each in held)]
    with memory_pool(held=held) as pool:
        pool.reset_peak()
        step(self)
    path = self.run.folder / f"planned-{self.ranks.comm.rank}.json"
    known = json.loads(path.read_text()) if self.step > 2 else []
    path.write_text(json.dumps([*known, (*bounds(self), pool.peak)]))


step: Any = Loop._one_step

if __name__ == "__main__":
    Loop._one_step = measured  # type: ignore[method-assign]
    for ends, command in groupby(sys.argv[1:], "--".__eq__):
        if not ends:
            group([*command], standalone_mode=False)
