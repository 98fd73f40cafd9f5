"""Plans a training step on many ranks: memory, sent bytes and time, and a simulation of all ranks.

    plan = plan_ranks(config, Layout(tensor=8, pipeline=4, data=64, zero=1), batch=1, tokens=4096,
                      dtype="bfloat16", microbatches=32, rate=400.0, interconnect=(900.0, 50.0))
    plan.seconds, plan.bubble, plan.stages[0].memory.total

Each stage of the model runs on arrays without elements, in the order of its schedule, with the
collectives of its ranks: this gives its memory and its sent bytes.  Its seconds are the operations
of products over a rate plus bytes over a bandwidth, without overlap; gradients are summed at the
end.  Other work and latencies count as zero, so a real step takes longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..memory.ledger import MemoryPlan
from ..memory.stage_plan import Job, Layout, StagePlan, plan_stages
from ..models.configs.config import Config
from ..models.parse import parse
from ..parallel.schedule import Schedule, Step, Timetable, chunks_of, pipeline_schedule, timetable
from ..parallel.simulation import Collective, Compute, Event, Replay, pipeline_program, replay

Held = tuple[int, int]  # bytes that a step adds: at its peak, and at its end


class ScalePlan(NamedTuple):
    """A training step of all ranks; ``seconds`` is from the replay of the ranks of one data rank.

    A column is one rank of each stage, all with the same tensor, data and context rank.
    """

    layout: Layout
    stages: list[StagePlan]
    schedule: Schedule
    table: Timetable
    seconds: float
    busy: float  # seconds in which the ranks of a column compute or exchange, summed
    rates: tuple[float, float, float]  # operations/s, and bytes/s within a node and between nodes
    microbatches: int
    rows: int = 1  # of a microbatch in one data rank

    @property
    def memory(self) -> list[MemoryPlan]:
        """What a rank of each stage holds."""
        return [stage.memory for stage in self.stages]

    @property
    def bubble(self) -> float:
        """The share of the step in which the ranks of a column neither compute nor exchange."""
        return 1 - self.busy / (self.seconds * len(self.stages)) if self.seconds else 0.0

    @property
    def messages(self) -> int:
        """The largest number of messages that a stage sends to others."""
        return max(
            sum(message.source == stage for messages in each for message in messages)
            for stage, each in enumerate(self.table.messages)
        )

    def bandwidth(self, ranks: Sequence[int]) -> float:
        """Return bytes per second among ranks."""
        return self.rates[1 if self.layout.joined(ranks) else 2]

    def exchanged(self, stage: int) -> float:
        """Return the seconds that the collectives of a stage take in a step."""
        layout, plan = self.layout, self.stages[stage]
        groups = {
            "tensor": [layout.rank(each, stage, 0) for each in range(layout.tensor)],
            "expert": [layout.rank(0, stage, 0, 0, each) for each in range(layout.expert)],
            "context": [layout.rank(0, stage, 0, each) for each in range(layout.context)],
            "data": layout.column(stage),
        }
        sent = {name: self.microbatches * sum(both_passes(plan.sent(name))) for name in plan.calls}
        sent["data"] += plan.gradients
        return sum(size / self.bandwidth(groups[name]) for name, size in sent.items())

    def programs(self, data: int) -> Iterator[Iterator[Event]]:
        """Yield the programs of the ranks of ``data`` data ranks, in the order of ranks."""
        for replica in range(data):
            for stage in range(self.layout.pipeline):
                for place in product(range(self.layout.context), range(self.layout.expert)):
                    for tensor in range(self.layout.tensor):
                        yield self._program(tensor, stage, (replica, *place), data)

    def _program(
        self, tensor: int, stage: int, place: tuple[int, int, int], data: int
    ) -> Iterator[Event]:
        """Yield the events of one rank; ``place`` is its data, its context and its expert rank."""
        layout, plan = self.layout, self.stages[stage]
        simulated, all_data = (layout.column(stage, tensor, count) for count in (data, None))
        replica, _, own = place
        every = range(layout.context)
        context = [layout.rank(tensor, stage, replica, each, own) for each in every]
        expert = [layout.rank(tensor, stage, *place[:2], each) for each in range(layout.expert)]
        group = [layout.rank(each, stage, *place) for each in range(layout.tensor)]
        calls = (  # kind, ranks that call in the simulation, ranks that determine the bandwidth
            ("tensor", group, group),
            ("expert", expert, expert),
            ("context", context, context),
            ("data", simulated, all_data),
        )
        number = iter(range(2**62))
        held = iter(extend_steps(plan.held, self.schedule[stage], layout.pipeline))

        def work(step: Step) -> Iterator[Event]:
            top, added = next(held)
            seconds = plan.products[step.chunk][step.backward] / self.rates[0]
            yield Compute(seconds, added, str(step), top)
            for name, callers, joined in calls:
                sent = plan.calls[name][step.chunk]
                if sent and len(joined) > 1:
                    duration = both_passes(sent)[step.backward] / self.bandwidth(joined)
                    yield Collective(callers, (name, next(number)), duration)

        yield Compute(0.0, plan.begin)
        yield Compute(0.0, plan.before[1], "", plan.before[0])
        neighbours = [layout.rank(tensor, each, *place) for each in (stage, max(stage - 1, 0))]
        seconds = plan.passes / self.bandwidth(neighbours)
        yield from pipeline_program(
            self.schedule, self.table, stage, work,
            rank_of=lambda other: layout.rank(tensor, other, *place), seconds=seconds,
        )  # fmt: skip
        if len(all_data) > 1:
            key = ("gradients", plan.gradients)
            yield Collective(simulated, key, plan.gradients / self.bandwidth(all_data))
        yield Compute(0.0, plan.after[1], "", plan.after[0])

    def replay(self, data: int | None = None) -> Replay:
        """Simulate the programs of all ranks, or only of ``data`` data ranks.

        Raises
        ------
        CommunicationError
            A message does not meet its receive, or ranks wait forever.
        """
        return replay([*self.programs(self.layout.data if data is None else data)])


def both_passes(sent: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of all calls, in the forward pass and in the backward pass."""
    return sum(each[0] for each in sent.values()), sum(each[1] for each in sent.values())


def extend_steps(known: Sequence[Held], steps: Sequence[Step], stages: int) -> list[Held]:
    """Return the bytes of each step, from those of a schedule of fewer microbatches.

    After the steps that fill the pipeline come rounds of equal steps, of which more are inserted;
    the first round starts the gradient sums.
    """
    more = len(steps) - len(known)
    if not more:
        return [*known]
    chunks = 1 + max(step.chunk for step in steps)
    round_ = 2 * chunks * (stages if chunks > 1 else 1)
    filled = next(i for i, step in enumerate(steps) if step.backward) + 2 * round_
    again = [*known[filled - round_ : filled]] * (more // round_)
    return [*known[:filled], *again, *known[filled:]]


def plan_ranks(
    config: Mapping[str, Any] | Config,
    layout: Layout,
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    microbatches: int = 1,
    rate: float,
    interconnect: tuple[float, float],
    schedule: str = "1f1b",
    chunks: int | None = None,
    **options: Any,
) -> ScalePlan:
    """Return the plan of a training step on a grid of ranks.

    Parameters
    ----------
    config : dict or Config
        Content of a Hugging Face config.json, or a Config.
    layout : Layout
        The grid of ranks.
    batch, tokens : int
        Rows of a microbatch in one data rank, and tokens in a row.
    dtype : dtype or its name
        Dtype of the computation.
    microbatches : int
        Microbatches of each data rank in a step.
    rate : float
        TFLOP/s of products that a rank reaches.
    interconnect : (float, float)
        GB/s that a rank sends within a node, and between nodes.
    schedule, chunks
        As in ``pipeline_schedule``.
    options
        As in ``plan_memory``: state_bits, rank, adapter, quantization, checkpoint_every,
        chunked_mlp, device, objective; context_attention, as of a model; and ``inputs``, of one
        pass in a data rank.

    Returns
    -------
    plan : ScalePlan

    Raises
    ------
    ConfigError
        The model cannot be divided among these ranks, or a number is not valid.
    """
    sizes = {**layout._asdict(), "microbatches": microbatches, "zero": layout.zero + 1}
    wrong = next((name for name, size in sizes.items() if size < 1), None)
    if wrong is not None or layout.zero not in (0, 1, 3):
        cure = "pass sizes >= 1, and zero 0, 1 or 3"
        raise ConfigError(f"plan_ranks({layout}, {microbatches=}) is not a grid; {cure}")
    if layout.zero == 3 and layout.pipeline > 1:
        problem = "would gather the weights of a stage for each microbatch"
        raise ConfigError(f"plan_ranks({layout}): zero=3 {problem}; pass zero=1, or pipeline=1")
    if not (rate > 0 and min(interconnect) > 0):
        raise ConfigError(f"plan_ranks({rate=}, {interconnect=}) is not positive; pass rates")
    parsed = config if isinstance(config, Config) else parse(config)
    kind = float_dtype("plan_ranks", dtype, KERNEL_DTYPES)
    steps = pipeline_schedule(layout.pipeline, microbatches, schedule, chunks=chunks)
    job = Job(batch, tokens, kind, chunks=chunks_of(steps), **options)
    stages = plan_stages(parsed, layout, job, microbatches, schedule, chunks)
    rates = (rate * 1e12, interconnect[0] * 1e9, interconnect[1] * 1e9)
    rest = 0.0, 0.0, rates, microbatches, job.rows
    plan = ScalePlan(layout, stages, steps, timetable(steps), *rest)
    column = plan.replay(1)
    exchanged = sum(plan.exchanged(stage) for stage in range(layout.pipeline))
    busy = sum(column.busy[:: layout.tensor * layout.context * layout.expert]) + exchanged
    return plan._replace(seconds=max(column.seconds), busy=busy)
