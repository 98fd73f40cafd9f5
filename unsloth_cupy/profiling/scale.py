"""Training on many ranks, planned: memory, bytes and time of each, and a replay of all of them.

    plan = plan_ranks(config, Layout(tensor=8, pipeline=4, data=64, zero=1), batch=1, tokens=4096,
                      dtype="bfloat16", microbatches=32, rate=400.0, interconnect=(900.0, 50.0))
    plan.seconds, plan.bubble, plan.stages[0].memory.total

A stage of the model runs on arrays that are shapes alone, in the order of its schedule, with the
collectives that ranks run: its memory and its bytes are what that takes and sends.  Seconds are
operations of products by a rate and bytes by a bandwidth, one after the other; sums of gradients
come at the end.  Other work and latencies count for nothing, so a step takes longer than this.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..memory.stage_plan import Job, Layout, StagePlan, plan_stages
from ..models.config import Config
from ..models.parse import parse
from ..parallel.schedule import Schedule, Step, Timetable, chunks_of, pipeline_schedule, timetable
from ..parallel.simulation import Event, Replay, Together, Work, pipeline_program, replay

Held = tuple[int, int]


class ScalePlan(NamedTuple):
    """A step of all ranks; ``seconds`` by the replay of one column of stages."""

    layout: Layout
    stages: list[StagePlan]
    schedule: Schedule
    table: Timetable
    seconds: float
    busy: float
    rates: tuple[float, float, float]  # operations/s, and bytes/s inside of a node and between
    microbatches: int

    @property
    def bubble(self) -> float:
        """The share of the step in which the ranks of a column neither compute nor exchange."""
        return 1 - self.busy / (self.seconds * len(self.stages)) if self.seconds else 0.0

    @property
    def messages(self) -> int:
        """How many the stage sends that sends most to others."""
        return max(
            sum(message.source == stage for messages in each for message in messages)
            for stage, each in enumerate(self.table.messages)
        )

    def bandwidth(self, ranks: Sequence[int]) -> float:
        """Return bytes per second among ranks."""
        return self.rates[1 if self.layout.joined(ranks) else 2]

    def exchanged(self, stage: int) -> float:
        """Return the seconds that the calls of a stage take in a step."""
        layout, mine = self.layout, self.stages[stage]
        groups = {
            "tensor": [layout.rank(each, stage, 0) for each in range(layout.tensor)],
            "context": [layout.rank(0, stage, 0, each) for each in range(layout.context)],
            "data": layout.column(stage),
        }
        sent = {name: self.microbatches * sum(ways(mine.sent(name))) for name in mine.calls}
        sent["data"] += mine.gradients
        return sum(size / self.bandwidth(groups[name]) for name, size in sent.items())

    def programs(self, data: int) -> Iterator[Iterator[Event]]:
        """Yield the programs of so many of the data ranks, in the order of ranks."""
        for replica in range(data):
            for stage in range(self.layout.pipeline):
                for context in range(self.layout.context):
                    for tensor in range(self.layout.tensor):
                        yield self._program(tensor, stage, (replica, context), data)

    def _program(
        self, tensor: int, stage: int, place: tuple[int, int], data: int
    ) -> Iterator[Event]:
        layout, mine = self.layout, self.stages[stage]
        columns, whole = (layout.column(stage, tensor, count) for count in (data, None))
        around = [layout.rank(tensor, stage, place[0], each) for each in range(layout.context)]
        group = [layout.rank(each, stage, *place) for each in range(layout.tensor)]
        calls = (  # who calls, and whose bandwidth that has
            ("tensor", group, group),
            ("context", around, around),
            ("data", columns, whole),
        )
        number = iter(range(2**62))
        held = iter(of_all(mine.held, self.schedule[stage], layout.pipeline))

        def work(step: Step) -> Iterator[Event]:
            top, added = next(held)
            seconds = mine.products[step.chunk][step.backward] / self.rates[0]
            yield Work(seconds, added, str(step), top)
            for name, callers, joined in calls:
                sent = mine.calls[name][step.chunk]
                if sent and len(joined) > 1:
                    taken = ways(sent)[step.backward] / self.bandwidth(joined)
                    yield Together(callers, (name, next(number)), taken)

        yield Work(0.0, mine.begin)
        near = [layout.rank(tensor, each, *place) for each in (stage, max(stage - 1, 0))]
        seconds = mine.passes / self.bandwidth(near)
        yield from pipeline_program(
            self.schedule, self.table, stage, work,
            rank_of=lambda other: layout.rank(tensor, other, *place), seconds=seconds,
        )  # fmt: skip
        if len(whole) > 1:
            key = ("gradients", mine.gradients)
            yield Together(columns, key, mine.gradients / self.bandwidth(whole))
        yield Work(0.0, mine.after[1], "", mine.after[0])

    def replay(self, data: int | None = None) -> Replay:
        """Replay the programs of all ranks, or of those of so many data ranks.

        Raises
        ------
        CommunicationError
            A message does not meet its receive, or ranks wait for ever.
        """
        return replay([*self.programs(self.layout.data if data is None else data)])


def ways(sent: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of all calls, forward and back."""
    return sum(each[0] for each in sent.values()), sum(each[1] for each in sent.values())


def of_all(known: Sequence[Held], steps: Sequence[Step], stages: int) -> list[Held]:
    """Return what each step takes, from what those of a schedule of fewer microbatches take.

    Behind those that fill the pipeline come rounds that take alike; the first of them begins the
    sums of gradients.
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
    """Return what a step of training takes on a grid of ranks.

    Parameters
    ----------
    config : dict
        Of a Hugging Face config.json, or a Config.
    layout : Layout
    batch, tokens : int
        Rows of a microbatch in one data rank, and tokens in a row.
    dtype : dtype or its name
    microbatches : int
        In a step, of each data rank.
    rate : float
        TFLOP/s of products that a rank reaches.
    interconnect : (float, float)
        GB/s that a rank sends, inside of a node and between nodes.
    schedule, chunks
        As in ``pipeline_schedule``.
    options
        As in ``plan_memory``: state_bits, rank, adapter, quantization, checkpoint_every,
        chunked_mlp, device; and context_attention, as a model has it.

    Raises
    ------
    ConfigError
        The model does not divide among such ranks, or a number makes no sense.
    """
    sizes = {**layout._asdict(), "microbatches": microbatches, "zero": layout.zero + 1}
    wrong = next((name for name, size in sizes.items() if size < 1), None)
    if wrong is not None or layout.zero not in (0, 1, 3):
        cure = "pass sizes from 1 on, and zero 0, 1 or 3"
        raise ConfigError(f"plan_ranks({layout}, {microbatches=}) is not a grid; {cure}")
    if layout.zero == 3 and layout.pipeline > 1:
        problem = "would gather the weights of a stage for each microbatch"
        raise ConfigError(f"plan_ranks({layout}): zero=3 {problem}; pass zero=1, or pipeline=1")
    if not (rate > 0 and min(interconnect) > 0):
        raise ConfigError(f"plan_ranks({rate=}, {interconnect=}) is not positive; pass rates")
    parsed = config if isinstance(config, Config) else parse(config)
    kind = float_dtype("plan_ranks", dtype, KERNEL_DTYPES)
    whole = pipeline_schedule(layout.pipeline, microbatches, schedule, chunks=chunks)
    job = Job(batch, tokens, kind, chunks=chunks_of(whole), **options)
    stages = plan_stages(parsed, layout, job, microbatches, schedule, chunks)
    rates = (rate * 1e12, interconnect[0] * 1e9, interconnect[1] * 1e9)
    made = ScalePlan(layout, stages, whole, timetable(whole), 0.0, 0.0, rates, microbatches)
    column = made.replay(1)
    exchanged = sum(made.exchanged(stage) for stage in range(layout.pipeline))
    busy = sum(column.busy[:: layout.tensor * layout.context]) + exchanged
    return made._replace(seconds=max(column.seconds), busy=busy)
