"""Plans the memory of the ranks of a grid in a training step, before anything is allocated.

    plans = plan_ranks(config, Layout(tensor=8, pipeline=4, data=64, zero=1), batch=1, tokens=4096,
                       dtype="bfloat16", microbatches=32)
    max(plan.total for plan in plans)

The steps of each pipeline stage run on planned arrays in the order of the schedule, with the real
collectives.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOAT32, KERNEL_DTYPES, float_dtype
from ..core.names import current_names
from ..errors import ConfigError
from ..models.adapters.adapter import Adapter
from ..models.configs.config import Config
from ..models.objective import TrainingStep, next_token
from ..models.parse import parse
from ..models.quantizer import Quantizer
from ..models.ranks.division import Division, divided_adapter
from ..models.ranks.pipeline_stages import Stages
from ..models.ranks.stages import ModelStage
from ..parallel.data import BUCKET_BYTES, Buckets
from ..parallel.schedule import Step, chunks_of, pipeline_schedule
from ..parallel.zero import Zero1
from ..training.checkpoint import CheckpointConfig
from .ledger import GRADIENTS, MASTER, OPTIMIZER, Ledger, MemoryPlan
from .planned import placed_inputs, recording_in
from .planned_model import (
    DEVICES,
    new_adapter,
    planned_training,
    rehearse,
    segments,
    with_planned_models,
)
from .planned_ranks import Inbox, PlannedRanks

SPARE = 2  # microbatches after the pipeline is full; later ones need the same memory
ROUNDS = 4  # with chunks: rounds of one microbatch per stage; later ones need the same memory


class Layout(NamedTuple):
    """The sizes of a grid of ranks, and the ZeRO stage: 1 divides the averages, 3 everything."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.alike

    @property
    def alike(self) -> int:
        """The number of ranks with the same weights (except experts) and different tokens."""
        return self.data * self.context * self.expert


class Job(NamedTuple):
    """The settings of a step: the LoRA ``rank`` of new adapters, an ``adapter``, or neither.

    ``objective`` and ``inputs`` (of one pass in a data rank) are as in ``plan_memory``.
    """

    batch: int
    tokens: int
    dtype: Any
    state_bits: int = 32
    recompute_every: int | CheckpointConfig | None = None
    device: str = "cuda"
    rank: int | None = None
    adapter: Adapter | None = None
    quantization: str | None = None
    chunked_mlp: bool | None = None
    chunks: int = 1
    context_attention: str = "ring"
    objective: Any = next_token
    optimizer: str = "adamw"
    inputs: Mapping[str, Any] | None = None

    @property
    def rows(self) -> int:
        """The rows of a microbatch: a pair or a rated answer may have several."""
        return self.batch if self.inputs is None else len(self.inputs["tokens"])

    def as_arrays(self, arrays: Any) -> dict[str, Any]:
        """Return the arguments of a pass: ``inputs`` as planned arrays, or full rows."""
        if self.inputs is None:
            rows = arrays.of((self.batch, self.tokens), np.int64)
            return {"tokens": rows, "labels": rows, "count": 1}
        return {**placed_inputs(self.inputs, arrays), "count": 1}


def plan_ranks(
    config: Mapping[str, Any] | Config,
    layout: Layout,
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    microbatches: int = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    offload: bool = False,
    **options: Any,
) -> list[MemoryPlan]:
    """Plan the memory of one rank per pipeline stage: the rank with the largest parts.

    Parameters
    ----------
    config : dict or Config
        Content of a Hugging Face config.json, or a Config.
    layout : Layout
        The grid of ranks.
    batch, tokens : int
        Rows of a microbatch per data rank, and tokens per row.
    dtype : dtype or its name
        Dtype of the computation.
    microbatches : int
        Microbatches per step in each data rank.
    schedule, chunks
        As in ``pipeline_schedule``.
    offload, options
        As in ``plan_memory``: offload, optimizer, state_bits, rank, adapter, quantization,
        recompute_every, chunked_mlp, device, objective; ``context_attention``, as in a model; and
        ``inputs``, of one pass in a data rank.

    Returns
    -------
    plans : list of MemoryPlan
        Sizes in bytes, one plan per stage.

    Raises
    ------
    ConfigError
        The model cannot be divided among these ranks, or a number is invalid.
    """
    sizes = {**layout._asdict(), "microbatches": microbatches, "zero": layout.zero + 1}
    if min(sizes.values()) < 1 or layout.zero not in (0, 1, 3):
        cure = "pass sizes >= 1, and zero 0, 1 or 3"
        raise ConfigError(f"plan_ranks({layout}, {microbatches=}) is not a grid; {cure}")
    if layout.zero == 3 and layout.pipeline > 1:
        problem = "would gather the weights of a stage for each microbatch"
        raise ConfigError(f"plan_ranks({layout}): zero=3 {problem}; pass zero=1, or pipeline=1")
    parsed = config if isinstance(config, Config) else parse(config)
    kind = float_dtype("plan_ranks", dtype, KERNEL_DTYPES)
    steps = pipeline_schedule(layout.pipeline, microbatches, schedule, chunks=chunks)
    if schedule != "gpipe":  # gpipe holds all microbatches; otherwise later ones need no more
        most = ROUNDS * layout.pipeline if schedule == "interleaved" else layout.pipeline + SPARE
        run = min(microbatches, most)
        steps = pipeline_schedule(layout.pipeline, run, schedule, chunks=chunks)
    options = current_names("plan_ranks", options, Job._fields)
    job = Job(batch, tokens, kind, chunks=chunks_of(steps), **options)
    every = segments("plan_ranks", job.recompute_every, offload=offload, device=job.device)
    job = job._replace(recompute_every=every)
    if job.inputs is None and hasattr(job.objective, "full"):
        job = job._replace(inputs=job.objective.full(batch, tokens))
    return [plan_stage(parsed, layout, stage, own, job) for stage, own in enumerate(steps)]


def plan_stage(
    config: Config, layout: Layout, stage: int, steps: Sequence[Step], job: Job
) -> MemoryPlan:
    """Plan a stage: run its steps on planned arrays, as its first tensor rank."""
    arrays, granule = DEVICES[job.device]
    ledger = Ledger(granule)
    inbox = Inbox(ledger) if job.device == "cpu" else None
    tensor, pipeline, context, expert = (
        PlannedRanks(*each, inbox=inbox)
        for each in (
            (0, layout.tensor, max(1, layout.tensor // config.kv_heads)),
            (stage, layout.pipeline, 2), (0, layout.context), (0, layout.expert),
        )
    )  # fmt: skip
    same = layout.data * layout.context  # number of ranks with the same experts
    data = PlannedRanks(0, layout.alike, same, ahead=job.device == "cuda", inbox=inbox)
    stages = Stages(config, pipeline, job.chunks) if layout.pipeline > 1 else None
    whole = layout.tensor == layout.pipeline == layout.expert == 1
    division = None if whole else Division(config, tensor, stages, expert)
    shapes = {
        name: shape if division is None else division.shape(name)
        for name, shape in config.shapes().items()
        if division is None or division.holds(name)
    }
    kind = job.quantization
    codes = None if kind is None else Quantizer("plan_ranks", kind, division)
    read = {n: config.shapes()[n] if codes and codes.wants_whole(n) else shapes[n] for n in shapes}
    adapter = _adapter(config, division, job)
    with recording_in(ledger), ledger.watching_ops():
        zero = layout.zero if layout.alike > 1 else 0
        own_config = config if division is None else division.config
        arguments = (ledger, own_config, arrays, job.dtype, job.optimizer, job.state_bits)
        model, optimizer = planned_training(
            *arguments, adapter, codes, read, data if zero == 3 else None
        )
        model.chunked_mlp, model.context_attention = job.chunked_mlp, job.context_attention
        _place(model, division, context, job.dtype)
        states = _divided(ledger, optimizer, data, division) if zero == 1 else None
        # the first stage rewards answers before the passes; the last stage computes the loss
        first = hasattr(job.objective, "rehearse")
        here = stage == 0 if first else stages is None or stages.last
        objective = with_planned_models(ledger, job.objective, arrays, job.dtype, here)
        several = sum(step.backward for step in steps) > 1
        batch, own_job = job.as_arrays(arrays), job._replace(objective=objective)
        runs = _Runs(model, batch, own_job, casts=several)
        if zero == 3:
            runs.record_order()
        ledger.begin()
        drawing = model.on_tape(model.parameters, model.step)
        drawing.context = None  # each context rank samples its share of the answers alone
        rows = -(-job.batch // layout.context) * (job.rows // job.batch)
        rehearse(ledger, objective, drawing, rows, job.tokens)
        del drawing
        for step in steps:
            runs.run(step)
            ledger.note("backward" if step.backward else "forward")
        ledger.enter(GRADIENTS, runs.sums)
        alone = layout.alike == 1 or zero == 3
        summed = runs.sums if alone else _sums(runs.sums, data, states, division)
        if not alone:
            ledger.note("sums of gradients")
        steps_by: Any = optimizer if states is None else states
        steps_by.step(summed, finite=True, factor=0.5)
        ledger.note(f"{steps_by.call}.step")
        return ledger.plan()


def _adapter(config: Config, division: Division | None, job: Job) -> Adapter | None:
    """Return the part of the trained adapter that this rank holds."""
    whole = job.adapter if job.rank is None else new_adapter(config, job.rank)
    if whole is None:
        return None
    with recording_in(Ledger(1)):
        return divided_adapter(whole, division)


def _divided(ledger: Ledger, adamw: Any, data: PlannedRanks, division: Division | None) -> Zero1:
    """Return an optimizer that holds a share of the states and of the float32 masters."""
    apart = None
    if division is not None and division.experts is not None:
        apart = division.of_experts, data.split(0)
    result = Zero1(adamw, data, apart)
    inner = result.inner
    ledger.enter(OPTIMIZER, inner.state())
    masters = (name for name, tensor in inner.tensors.items() if tensor.copy is not None)
    ledger.enter(MASTER, {name: inner.parameters[name] for name in masters})
    return result


def _sums(
    gradients: Mapping[str, Any],
    data: PlannedRanks,
    states: Zero1 | None,
    division: Division | None,
) -> dict[str, Any]:
    """Return the gradients summed over ranks with other tokens, for the step of this rank."""
    if states is not None:
        return states.sums(gradients)
    sums: dict[str, Any] = {}
    apart = None if division is None or division.experts is None else division.of_experts
    for has, ranks in ((False, data), (True, data.split(0))):
        own = {n: a for n, a in gradients.items() if bool(apart and apart(n)) is has}
        buckets = Buckets(own, ranks, BUCKET_BYTES)
        for array in [*own.values()][::-1]:
            buckets.take(array, array)
        sums |= buckets.sums()
    return {name: sums[name] for name in gradients}


class _Runs:
    """Runs the steps of a stage and sums their gradients."""

    def __init__(self, model: Any, batch: Mapping[str, Any], job: Job, *, casts: bool) -> None:
        self.model, self.batch, self.objective = model, batch, job.objective
        every: Any = job.recompute_every  # a CheckpointConfig, or None
        self.how = TrainingStep(checkpoint=every)
        self.trainer = model if model.gather is None else model.gather.__self__
        division = model.division
        staged = division is not None and division.stages is not None
        stage = ModelStage(model, model.trainable, self.how, job.objective) if staged else None
        self.stage = stage
        self.sums: dict[str, Any] = {} if self.stage is None else self.stage.sums
        self.casts = casts

    def record_order(self) -> None:
        """Run a step in which Zero3 records the order of blocks, as in the first step of a run."""
        self._gradients()

    def run(self, step: Step) -> None:
        """Run a forward or backward step; with a single stage, the backward step runs both."""
        stage = self.stage
        if stage is None:
            if step.backward:
                self._add(self._gradients())
            return
        of = stage.stages
        if step.backward:
            stage.backward(step, None if of.ends_with(step.chunk) else stage.like(self.batch))
        else:
            stage.forward(
                step, self.batch, None if of.first and not step.chunk else stage.like(self.batch)
            )

    def _gradients(self) -> dict[str, Any]:
        """Return the gradients of a single stage."""
        function = partial(self.objective, **self.batch)
        gradients: dict[str, Any]
        _, gradients = self.trainer.value_and_gradients(function, **self.how._asdict())
        return gradients

    def _add(self, gradients: dict[str, Any]) -> None:
        for name in [*gradients]:
            if name not in self.sums:
                own = gradients.pop(name)  # of a single pass, gradients are not cast
                self.sums[name] = own.astype(FLOAT32) if self.casts else own
            else:
                del gradients[name]


def _place(model: Any, division: Division | None, context: Any, dtype: Any) -> None:
    """Set the part of a model that this rank holds."""
    model.division, model.context = division, context if context.size > 1 else None
    if division is not None and model.gather is not None:
        division.kept = model.gather.__self__.kept
    if division is not None and division.stages is not None:
        division.stages.dtype = dtype
