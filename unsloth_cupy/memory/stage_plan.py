"""Plans one pipeline stage of a grid of ranks: memory, messages and operations of its first rank.

The steps of the schedule run in order on planned arrays, with the collectives of real ranks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOAT32
from ..models.adapters.adapter import Adapter
from ..models.configs.config import Config
from ..models.objective import TrainingStep, next_token
from ..models.quantizer import Quantizer
from ..models.ranks.division import Division, divided_adapter
from ..models.ranks.pipeline_stages import Stages
from ..models.ranks.stages import ModelStage
from ..parallel.data import BUCKET_BYTES, Buckets
from ..parallel.schedule import Step, pipeline_schedule
from ..parallel.zero import Zero1
from ..training.checkpoint import CheckpointConfig
from .ledger import GRADIENTS, MASTER, OPTIMIZER, ROLLOUTS, Ledger, MemoryPlan
from .planned import placed_inputs, recording_in
from .planned_model import DEVICES, frozen_model, new_adapter, planned_training
from .planned_ranks import Calls, Inbox, PlannedRanks, Sent
from .stage_products import products

SPARE = 2  # microbatches beyond those that fill a pipeline: later ones need the same as these
ROUNDS = 4  # of as many microbatches as stages: the same, if stages have chunks


class Layout(NamedTuple):
    """A grid of ranks, numbered as in ``parallel.grid``."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    node: int = 8  # ranks that are joined by the faster link
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.alike

    @property
    def alike(self) -> int:
        """The number of ranks that hold the same weights, but for experts, for other tokens."""
        return self.data * self.context * self.expert

    def rank(self, tensor: int, stage: int, data: int, context: int = 0, expert: int = 0) -> int:
        """Return the number of a rank."""
        place = (data * self.pipeline + stage) * self.context + context
        return (place * self.expert + expert) * self.tensor + tensor

    def column(self, stage: int, tensor: int = 0, data: int | None = None) -> list[int]:
        """Return the ranks of the same weights, but for experts, of all or ``data`` data ranks."""
        replicas = range(self.data if data is None else data)
        places = product(replicas, range(self.context), range(self.expert))
        return [self.rank(tensor, stage, *place) for place in places]

    def joined(self, ranks: Sequence[int]) -> bool:
        """Return whether ranks belong to one node."""
        return len({rank // self.node for rank in ranks}) == 1


class Job(NamedTuple):
    """The settings of a step: ``rank`` of new adapters, or an adapter, or neither.

    ``objective`` and ``inputs``, of a pass in one data rank, are as in ``plan_memory``.
    """

    batch: int
    tokens: int
    dtype: Any
    state_bits: int = 32
    checkpoint_every: int | CheckpointConfig | None = None
    device: str = "cuda"
    rank: int | None = None
    adapter: Adapter | None = None
    quantization: str | None = None
    chunked_mlp: bool = False
    chunks: int = 1
    context_attention: str = "ring"
    objective: Any = next_token
    optimizer: str = "adamw"
    inputs: Mapping[str, Any] | None = None

    @property
    def rows(self) -> int:
        """The rows of a microbatch: pairs and answers have several."""
        return self.batch if self.inputs is None else len(self.inputs["tokens"])

    def as_arrays(self, arrays: Any) -> dict[str, Any]:
        """Return what a pass takes: inputs, on a GPU without their values, or else full rows."""
        if self.inputs is None:
            rows = arrays.of((self.batch, self.tokens), np.int64)
            return {"tokens": rows, "labels": rows, "count": 1}
        return {**placed_inputs(self.inputs, arrays), "count": 1}


class StagePlan(NamedTuple):
    """Memory and messages of the first tensor rank of a stage, which has the largest parts.

    Attributes
    ----------
    memory : MemoryPlan
    begin : int
        Bytes held before a step.
    before : tuple of (int, int)
        Bytes that are added before its passes, at the peak and at its end: to draw answers.
    held : list of (int, int)
        Bytes that each step adds, at its peak and at its end; for the steps that were run.
    after : tuple of (int, int)
        The same for the sums of gradients and the optimizer.
    calls : dict of str to list of dict
        For each group of ranks, ``tensor``, ``expert``, ``context`` and ``data`` (ranks that divide
        the weights by ZeRO), and each chunk of blocks: the bytes that are sent in a microbatch,
        forward and backward, by name of the call.
    passes : int
        Bytes of a message to the next stage.
    gradients : int
        Bytes that are sent for the sums of gradients, and with ZeRO for the parameters.
    products : list of (float, float)
        Operations of each chunk in a microbatch, forward and backward.
    """

    memory: MemoryPlan
    begin: int
    before: tuple[int, int]
    held: Sequence[tuple[int, int]]
    after: tuple[int, int]
    calls: Mapping[str, Sequence[Calls]]
    passes: int
    gradients: int
    products: Sequence[tuple[float, float]]

    def sent(self, group: str) -> Calls:
        """Return the ``calls`` of a group, all chunks added up."""
        chunks = self.calls[group]
        names = sorted({name for calls in chunks for name in calls})
        every = {name: [calls.get(name, (0, 0)) for calls in chunks] for name in names}
        return {n: (sum(f for f, _ in of), sum(b for _, b in of)) for n, of in every.items()}


def plan_stages(
    config: Config, layout: Layout, job: Job, microbatches: int, kind: str, chunks: int | None
) -> list[StagePlan]:
    """Run each stage on planned arrays, for as few microbatches as determine what others need."""
    run = microbatches  # gpipe keeps all of them to the end
    if kind != "gpipe":
        most = ROUNDS * layout.pipeline if kind == "interleaved" else layout.pipeline + SPARE
        run = min(run, most)
    short = pipeline_schedule(layout.pipeline, run, kind, chunks=chunks)
    return [plan_stage(config, layout, stage, steps, job) for stage, steps in enumerate(short)]


def plan_stage(
    config: Config, layout: Layout, stage: int, steps: Sequence[Step], job: Job
) -> StagePlan:
    """Run the steps of a stage on planned arrays."""
    arrays, granule = DEVICES[job.device]
    ledger, stops = Ledger(granule), list[int]()  # changes before each step, and before the sums
    inbox = Inbox(ledger) if job.device == "cpu" else None
    tensor, pipeline, context, expert = (
        PlannedRanks(*each, inbox=inbox)
        for each in (
            (0, layout.tensor, max(1, layout.tensor // config.kv_heads)),
            (stage, layout.pipeline, 2), (0, layout.context), (0, layout.expert),
        )
    )  # fmt: skip
    same = layout.data * layout.context  # ranks with the same experts
    data = PlannedRanks(0, layout.alike, same, ahead=job.device == "cuda", inbox=inbox)
    stages = Stages(config, pipeline, job.chunks) if layout.pipeline > 1 else None
    whole = layout.tensor == layout.pipeline == layout.expert == 1
    division = None if whole else Division(config, tensor, stages, expert)
    shapes = {
        name: shape if division is None else division.shape(name)
        for name, shape in config.shapes().items()
        if division is None or division.holds(name)
    }
    rows, kind = (job.rows, job.tokens), job.quantization
    codes = None if kind is None else Quantizer("plan_ranks", kind, division)
    read = {n: config.shapes()[n] if codes and codes.wants_whole(n) else shapes[n] for n in shapes}
    own = _tokens_of_rank(job, layout.context)
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
        job = _with_models(job, ledger, stage == 0, stages is None or stages.last)
        runs = _Runs(model, job.as_arrays(arrays), job)
        if zero == 3:
            runs.learn_the_order()
        begin = len(ledger.changes)
        ledger.begin()
        _draw(ledger, model, job, layout.context)
        stops.append(len(ledger.changes))
        groups = {"tensor": tensor, "expert": expert, "context": context, "data": data}
        sent = {name: Sent(group, job.chunks) for name, group in groups.items()}
        for step in steps:
            runs.run(step)
            ledger.note("backward" if step.backward else "forward")
            stops.append(len(ledger.changes))
            for each in sent.values():
                each.note(step)
        data.sent.clear()
        ledger.enter(GRADIENTS, runs.sums)
        alone = layout.alike == 1 or zero == 3
        summed = runs.sums if alone else _sums(runs.sums, data, states, division)
        if not alone:
            ledger.note("sums of gradients")
        steps_by: Any = optimizer if states is None else states
        steps_by.step(summed, finite=True, factor=0.5)
        ledger.note(f"{steps_by.call}.step")
        drawn, *held, after = (  # once the sizes of messages are known
            ledger.between(*pair) for pair in pairwise([begin, *stops, len(ledger.changes)])
        )
        return StagePlan(
            ledger.plan(),
            ledger.between(0, begin)[1],
            drawn,
            held,
            after,
            {name: each.by_call() for name, each in sent.items()},
            _passed(config, job, own) if layout.pipeline > 1 else 0,
            sum(data.sent.values()),
            products(
                config, shapes, {} if adapter is None else adapter.parameters, division, rows, own,
                job.checkpoint_every is not None,
            ),
        )  # fmt: skip


def _adapter(config: Config, division: Division | None, job: Job) -> Adapter | None:
    """Return this rank's part of the adapter that is trained."""
    whole = job.adapter if job.rank is None else new_adapter(config, job.rank)
    if whole is None:
        return None
    with recording_in(Ledger(1)):
        return divided_adapter(whole, division)


def _passed(config: Config, job: Job, tokens: int) -> int:
    """Return the bytes of a message to the next stage: hidden states, sums of the router's loss."""
    hidden = job.rows * tokens * config.hidden * job.dtype.itemsize
    if config.experts is None or not config.balanced:
        return hidden
    return hidden + 2 * config.experts.count * np.dtype(np.float64).itemsize


def _divided(ledger: Ledger, adamw: Any, data: PlannedRanks, division: Division | None) -> Zero1:
    """Return an optimizer that holds a part of the states and of the float32 masters."""
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
    """Return the sums of gradients that this rank's step uses, over ranks with other tokens."""
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
    """Runs the steps of a stage, and sums their gradients."""

    def __init__(self, model: Any, batch: Mapping[str, Any], job: Job) -> None:
        self.model, self.batch, self.objective = model, batch, job.objective
        every = job.checkpoint_every
        every = CheckpointConfig(True, every) if isinstance(every, int) else every
        self.how = TrainingStep(checkpoint=every)
        self.learns = model if model.gather is None else model.gather.__self__
        division = model.division
        staged = division is not None and division.stages is not None
        stage = ModelStage(model, model.trainable, self.how, job.objective) if staged else None
        self.stage = stage
        self.sums: dict[str, Any] = {} if self.stage is None else self.stage.sums

    def learn_the_order(self) -> None:
        """Run a step from which Zero3 learns the order of blocks, as in the first step of a run."""
        self._gradients()

    def run(self, step: Step) -> None:
        """Run a step forward or backward; with a single stage the backward step does both."""
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
        _, gradients = self.learns.value_and_gradients(function, **self.how._asdict())
        return gradients

    def _add(self, gradients: dict[str, Any]) -> None:
        for name in [*gradients]:
            if name not in self.sums:
                self.sums[name] = gradients.pop(name).astype(FLOAT32)
            else:
                del gradients[name]


def _tokens_of_rank(job: Job, ranks: int) -> int:
    """Return the tokens of a row that a rank has, whose rows are padded to equal parts."""
    parts = ranks * (2 if ranks > 1 and job.context_attention == "ring" else 1)
    return -(-job.tokens // parts) * parts // ranks


def _with_models(job: Job, ledger: Ledger, first: bool, last: bool) -> Job:
    """Return a job with the other models of its objective, which one stage has."""
    if not hasattr(job.objective, "planned"):
        return job
    create = partial(frozen_model, ledger, arrays=DEVICES[job.device][0], kind=job.dtype)
    here = first if job.objective.draws else last
    return job._replace(objective=job.objective.planned(create if here else lambda _: None))


def _draw(ledger: Ledger, model: Any, job: Job, ranks: int) -> None:
    """Draw answers, of which ranks draw a share each."""
    if getattr(job.objective, "draws", False):
        whole = model.on_tape(model.parameters, model.step)
        whole.context = None  # texts are of this rank alone
        job.objective.rehearse(whole, -(-job.batch // ranks) * job.objective.samples, job.tokens)
        ledger.note(ROLLOUTS)


def _place(model: Any, division: Division | None, context: Any, dtype: Any) -> None:
    """Set the part of a model that this rank has."""
    model.division, model.context = division, context if context.size > 1 else None
    if division is not None and model.gather is not None:
        division.kept = model.gather.__self__.kept
    if division is not None and division.stages is not None:
        division.stages.dtype = dtype
