"""One stage of a grid of ranks, run on shapes alone: what its first rank holds, sends, multiplies.

The steps go in the order of the schedule, with the collectives that ranks run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOAT32
from ..memory.ledger import GRADIENTS, MASTER, OPTIMIZER, Ledger, MemoryPlan
from ..memory.plan import DEVICES, trained
from ..memory.planned import keeping
from ..memory.planned_ranks import PlannedRanks
from ..models.config import Config
from ..models.division import Division
from ..models.layers import EMBEDDING, HEAD, Stages
from ..models.stages import ModelStage
from ..parallel.data import BUCKET_BYTES, Buckets
from ..parallel.schedule import Step
from ..parallel.zero import Zero1
from ..training.checkpoint import CheckpointConfig


class Layout(NamedTuple):
    """A grid of ranks, numbered as those of ``parallel.grid`` are."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    node: int = 8  # ranks that the faster link joins
    context: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline * self.alike

    @property
    def alike(self) -> int:
        """How many hold the same part of the weights, and have other tokens."""
        return self.data * self.context

    def rank(self, tensor: int, stage: int, data: int, context: int = 0) -> int:
        """Return the number of a rank."""
        return ((data * self.pipeline + stage) * self.context + context) * self.tensor + tensor

    def column(self, stage: int, tensor: int = 0, data: int | None = None) -> list[int]:
        """Return the ranks that are alike, of all data ranks or of so many."""
        replicas = range(self.data if data is None else data)
        places = ((each, context) for each in replicas for context in range(self.context))
        return [self.rank(tensor, stage, each, context) for each, context in places]

    def joined(self, ranks: Sequence[int]) -> bool:
        """Say whether ranks are of one node."""
        return len({rank // self.node for rank in ranks}) == 1


class StagePlan(NamedTuple):
    """What the first tensor rank of a stage, which has the largest parts, holds and sends.

    Attributes
    ----------
    memory : MemoryPlan
    begin : int
        Bytes held before a step.
    held : dict of Step to (int, int)
        What each step adds: most at a time, and in the end; of the steps that were run.
    after : tuple of (int, int)
        The same of the sums of gradients and the optimizer.
    sent : dict of str to (int, int)
        Bytes sent by the call, in a microbatch forward and back, to ranks that divide weights.
    shared : dict of str to dict
        The same of other groups: ``context``, and ``data``, of ranks that divide the weights by
        ZeRO.
    passes, gradients : int
        Bytes of a message to the next stage; sent for the sums of gradients, and with ZeRO for
        the parameters.
    operations : (float, float)
        Of products, in a microbatch forward and back.
    """

    memory: MemoryPlan
    begin: int
    held: Mapping[Step, tuple[int, int]]
    after: tuple[int, int]
    sent: Mapping[str, tuple[int, int]]
    shared: Mapping[str, Mapping[str, tuple[int, int]]]
    passes: int
    gradients: int
    operations: tuple[float, float]


def plan_stage(
    config: Config,
    layout: Layout,
    stage: int,
    steps: Sequence[Step],
    rows: tuple[int, int],
    kind: Any,
    state_bits: int,
    checkpoint_every: int | None,
    device: str,
) -> StagePlan:
    """Run the steps of a stage on shapes alone."""
    arrays, granule = DEVICES[device]
    times = max(1, layout.tensor // config.kv_heads)
    tensor = PlannedRanks(0, layout.tensor, times)
    pipeline = PlannedRanks(stage, layout.pipeline, 2)
    data, context = PlannedRanks(0, layout.alike), PlannedRanks(0, layout.context)
    stages = Stages(config, pipeline) if layout.pipeline > 1 else None
    alone = layout.tensor == layout.pipeline == 1
    division = None if alone else Division(config, tensor, stages)
    shapes = {n: _own(n, s, division) for n, s in config.shapes().items() if _held(n, division)}
    halves = 2 * layout.context if layout.context > 1 else 1
    own = -(-rows[1] // halves) * halves // layout.context  # tokens of a row
    ledger, held = Ledger(granule), dict[Step, tuple[int, int]]()
    parts = None if checkpoint_every is None else CheckpointConfig(True, checkpoint_every)
    with keeping(ledger), ledger.watching_ops():
        here = config if division is None else division.config
        zero = layout.zero if layout.alike > 1 else 0
        given = (ledger, here, arrays, kind, "adamw", state_bits)
        model, adamw = trained(*given, None, None, shapes, data if zero == 3 else None)
        _place(model, division, context)
        states = _divided(ledger, adamw, data) if zero == 1 else None
        tokens = arrays.of(rows, np.int64)
        batch = {"tokens": tokens, "labels": tokens}
        begin = ledger.since(0)[1]
        ledger.begin()
        runs = _Runs(model, batch, parts)
        groups = {"tensor": tensor, "context": context, "data": data}
        sent = {name: _Sent(group) for name, group in groups.items()}
        for step in steps:
            start = len(ledger.changes)
            runs.run(step)
            ledger.note("backward" if step.backward else "forward")
            held[step] = ledger.since(start)
            for each in sent.values():
                each.note(step.backward)
        data.sent.clear()
        start = len(ledger.changes)
        ledger.enter(GRADIENTS, runs.sums)
        alone = layout.alike == 1 or zero == 3
        summed = runs.sums if alone else _sums(runs.sums, data, states)
        if not alone:
            ledger.note("sums of gradients")
        steps_by: Any = adamw if states is None else states
        steps_by.step(summed, finite=True, factor=0.5)
        ledger.note("AdamW.step")
        after = ledger.since(start)
        return StagePlan(
            ledger.plan(),
            begin,
            held,
            after,
            sent["tensor"].by_call(),
            {
                name: found
                for name, each in sent.items()
                if name != "tensor" and (found := each.by_call())
            },
            rows[0] * own * config.hidden * kind.itemsize if layout.pipeline > 1 else 0,
            sum(data.sent.values()),
            _operations(config, shapes, division, rows, own, checkpoint_every is not None),
        )


def _divided(ledger: Ledger, adamw: Any, data: PlannedRanks) -> Zero1:
    """Return an optimizer that keeps a part of the states, and of the masters of 16 bits."""
    made = Zero1(adamw, data)
    inner = made.inner
    ledger.enter(OPTIMIZER, inner.state())
    masters = (name for name, tensor in inner.tensors.items() if tensor.copy is not None)
    ledger.enter(MASTER, {name: inner.parameters[name] for name in masters})
    return made


def _sums(gradients: Mapping[str, Any], data: PlannedRanks, states: Zero1 | None) -> dict[str, Any]:
    """Return what this rank steps by, of the gradients of ranks that have other tokens."""
    if states is not None:
        return states.sums(gradients)
    buckets = Buckets(gradients, data, BUCKET_BYTES)
    for array in [*gradients.values()][::-1]:
        buckets.take(array, array)
    return buckets.sums()


class _Sent:
    """Bytes that a group has sent in the last step forward, and in the last one back."""

    def __init__(self, group: PlannedRanks) -> None:
        self.group = group
        group.sent.clear()
        self.before, self.ways = dict[str, int](), {False: Counter[str](), True: Counter[str]()}

    def note(self, backward: bool) -> None:
        """Take down what a step has sent."""
        now = dict(self.group.sent)
        self.ways[backward] = Counter({n: v - self.before.get(n, 0) for n, v in now.items()})
        self.before = now

    def by_call(self) -> dict[str, tuple[int, int]]:
        """Return bytes forward and back, by the call."""
        forward, back = self.ways[False], self.ways[True]
        return {n: (forward[n], back[n]) for n in sorted(forward.keys() | back.keys())}


class _Runs:
    """The steps of a stage, with the gradients that they sum."""

    def __init__(self, model: Any, batch: Mapping[str, Any], parts: Any) -> None:
        self.model, self.batch, self.parts = model, batch, parts
        self.learns = model if model.gather is None else model.gather.__self__
        division = model.division
        staged = division is not None and division.stages is not None
        self.stage = ModelStage(model, model.trainable, 1, None, parts) if staged else None
        self.sums: dict[str, Any] = {} if self.stage is None else self.stage.sums

    def run(self, step: Step) -> None:
        """Go forward, or back; where there is one stage both are done on the way back."""
        stage = self.stage
        if stage is None:
            if step.backward:
                found = self.learns.loss_and_gradients(**self.batch, checkpoint=self.parts, count=1)
                self._add(found[1])
            return
        of = stage.stages
        if step.backward:
            stage.backward(step, None if of.last else stage.like(self.batch))
        else:
            stage.forward(step, self.batch, None if of.first else stage.like(self.batch))

    def _add(self, gradients: dict[str, Any]) -> None:
        for name in [*gradients]:
            if name not in self.sums:
                self.sums[name] = gradients.pop(name).astype(FLOAT32)
            else:
                del gradients[name]


def _held(name: str, division: Division | None) -> bool:
    return division is None or division.holds(name)


def _place(model: Any, division: Division | None, context: Any) -> None:
    """Say which part of a model this rank has."""
    model.division, model.context = division, context
    if division is not None and model.gather is not None:
        division.kept = model.gather.__self__.kept


def _own(name: str, shape: tuple[int, ...], division: Division | None) -> tuple[int, ...]:
    """Return the shape of this rank's part of a parameter."""
    found = None if division is None else division.cut(name)
    if found is None:
        return shape
    size = sum(where.stop - where.start for where in found[1])
    return (*shape[: found[0]], size, *shape[found[0] + 1 :])


def _operations(
    config: Config,
    shapes: Mapping[str, Any],
    division: Division | None,
    rows: tuple[int, int],
    own: int,
    again: bool,
) -> tuple[float, float]:
    """Return the operations of products, forward and back, of own tokens of each row."""
    batch, tokens = rows
    heads = (config if division is None else division.config).heads
    stages = None if division is None else division.stages
    layers = range(config.layers) if stages is None else stages.layers[0]
    last = stages is None or stages.last
    used = [n for n in shapes if len(shapes[n]) == 2 and n not in (EMBEDDING, HEAD)]
    head = shapes[EMBEDDING if config.tied else HEAD] if last else (0, 0)
    weights = sum(int(np.prod(shapes[name])) for name in used)
    seen = 0
    for layer in layers:
        window = config.window_of(layer) or tokens
        seen += sum(min(query + 1, window) for query in range(tokens))
    products = 2.0 * batch * own * weights
    scores = 4.0 * batch * heads * config.dim * seen * own / tokens
    loss = 2.0 * batch * own * head[0] * head[1]
    forward = products + scores + loss
    return forward, 2 * (products + loss) + 2.5 * scores + (products + scores) * again
