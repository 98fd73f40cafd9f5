"""Pipeline schedules: the order in which stages compute microbatches.

    gpipe          all forward, then all backward: a stage stores activations of all microbatches
    1f1b           one forward, one backward, once the pipeline is full: a stage stores activations
                   of as many microbatches as there are stages from it to the end
    interleaved    1f1b with several chunks of layers per stage: a microbatch passes all stages
                   once for each chunk

The share of idle time is (stages - 1) / (chunks * microbatches + stages - 1).  (Huang et al.,
GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training, 2021.)
"""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from ..core.call import is_integer
from ..errors import ConfigError
from ..machine import check_bytes
from ..ops.common.checks import check_choice

KINDS = ("gpipe", "1f1b", "interleaved")


class Step(NamedTuple):
    """The forward or backward pass of one microbatch through one chunk of a stage."""

    microbatch: int
    chunk: int = 0
    backward: bool = False

    def __str__(self) -> str:
        """Return a short form, such as F3 or B3; with the chunk if it is not the first: F3.1."""
        return f"{'FB'[self.backward]}{self.microbatch}" + f".{self.chunk}" * bool(self.chunk)


class Message(NamedTuple):
    """A transfer of a step's output: source and target ranks, and the step that uses it."""

    source: int
    to: int
    step: Step


Schedule = Sequence[Sequence[Step]]
REFERENCE = 8  # bytes of a reference in a list


def pipeline_schedule(
    stages: int, microbatches: int, kind: str = "1f1b", *, chunks: int | None = None
) -> list[list[Step]]:
    """Return the steps of each stage, in order.

    Parameters
    ----------
    stages, microbatches : int
    kind : str
        gpipe, 1f1b or interleaved.
    chunks : int, optional
        Chunks of layers in each stage; None: 2 for interleaved, otherwise 1.  The layers are
        divided into chunk 0 of all stages, then chunk 1 of all stages and so on.

    Returns
    -------
    schedule : list of list of Step
        Every stage computes each microbatch forward and backward through each of its chunks.  The
        backward steps are in the order of the microbatches.

    Raises
    ------
    ConfigError
        A number is invalid; or microbatches of interleaved are not a multiple of stages.
    DeviceMemoryError
        The machine has too little memory for all steps.
    """
    call = f"pipeline_schedule({stages!r}, {microbatches!r}, {kind!r}, chunks={chunks!r})"
    check_choice(call, "kind", kind, KINDS)
    chunks = (2 if kind == "interleaved" else 1) if chunks is None else chunks
    if not all(is_integer(size, 1) for size in (stages, microbatches, chunks)):
        raise ConfigError(f"{call}: a size is not a positive integer; pass 1 or more")
    check_bytes(call, REFERENCE * 2 * stages * microbatches * chunks)
    if chunks > 1 and kind != "interleaved":
        raise ConfigError(f"{call}: {kind} does not have chunks; choose 'interleaved'")
    if kind == "interleaved" and microbatches % stages:
        problem = f"{microbatches} microbatches are not a multiple of {stages} stages"
        raise ConfigError(f"{call}: {problem}; pass {-(-microbatches // stages) * stages}")
    forward = list(_order(stages, microbatches, chunks))
    backward = [Step(m, chunks - 1 - c, backward=True) for m, c, _ in forward]
    return [
        _merged(forward, backward, _ahead(kind, stages, stage, chunks, len(forward)))
        for stage in range(stages)
    ]


def _order(stages: int, microbatches: int, chunks: int) -> Iterator[Step]:
    """Yield the forward steps: groups of as many microbatches as stages, chunk by chunk."""
    for first in range(0, microbatches, stages):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + stages, microbatches)):
                yield Step(microbatch, chunk)


def _ahead(kind: str, stages: int, stage: int, chunks: int, steps: int) -> int:
    """Return the number of forward steps of a stage before its first backward step."""
    if kind == "gpipe":
        return steps
    if chunks == 1:
        return min(stages - stage, steps)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, steps)


def _merged(forward: list[Step], backward: list[Step], ahead: int) -> list[Step]:
    """Return ``ahead`` forward steps, then alternating backward and forward steps."""
    turns = zip_longest(backward, forward[ahead:])
    rest = [step for step in chain.from_iterable(turns) if step is not None]
    return forward[:ahead] + rest


class Timetable(NamedTuple):
    """Begin and end of each step of a schedule, and the messages between steps, by stage.

    Attributes
    ----------
    spans : list of list of (float, float)
        Begin and end of each step, assuming that messages take no time.
    messages : list of list of list of Message
        The messages of a stage before its first step and after each of its steps.
    """

    spans: list[list[tuple[float, float]]]
    messages: list[list[list[Message]]]

    @property
    def bubble(self) -> float:
        """The share of time in which stages are idle."""
        total = max(end for spans in self.spans for _, end in spans) * len(self.spans)
        return 1 - sum(end - begin for spans in self.spans for begin, end in spans) / total


def timetable(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> Timetable:
    """Return begin and end of all steps from their durations, and the messages between them.

    The messages of all stages are ordered by time, and each stage sends and receives its messages
    in that order, so that no deadlock can occur.

    Raises
    ------
    ConfigError
        A step depends on a step that never runs.
    """
    chunks = chunks_of(schedule)
    ends: dict[tuple[int, Step], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule]
    waiting: dict[tuple[int, Step], int] = {}  # the stage that waits for a step of another one
    ready = [*range(len(schedule))]
    while ready:
        stage = ready.pop()
        steps, done = schedule[stage], spans[stage]
        while len(done) < len(steps):
            step = steps[len(done)]
            source = producer(len(schedule), chunks, stage, step)
            if source is not None and source not in ends:
                waiting[source] = stage
                break
            begin = max(done[-1][1] if done else 0.0, ends[source] if source else 0.0)
            ends[stage, step] = begin + (backward if step.backward else forward)
            done.append((begin, ends[stage, step]))
            if (stage, step) in waiting:
                ready.append(waiting.pop((stage, step)))
    if waiting:
        (stage, step), late = next(iter(waiting.items()))
        problem = f"stage {late} waits for {step} of stage {stage}, which never runs"
        raise ConfigError(f"timetable: {problem}; make the schedule with pipeline_schedule")
    return Timetable(spans, _messages(schedule, spans, ends))


def _messages(
    schedule: Schedule, spans: list[list[tuple[float, float]]], ends: dict[tuple[int, Step], float]
) -> list[list[list[Message]]]:
    """Return the messages of each stage, by the step after which they are exchanged."""
    chunks, timed = chunks_of(schedule), list[tuple[float, Message]]()
    for stage, steps in enumerate(schedule):
        for step in steps:
            source = producer(len(schedule), chunks, stage, step)
            if source is not None and source[0] != stage:
                timed.append((ends[source], Message(source[0], stage, step)))
    timed.sort(key=lambda each: each[0])
    result: list[list[list[Message]]] = [[[] for _ in range(len(s) + 1)] for s in schedule]
    positions = [0] * len(schedule)
    for time, message in timed:
        for stage in (message.source, message.to):
            while positions[stage] < len(spans[stage]) and spans[stage][positions[stage]][0] < time:
                positions[stage] += 1
            result[stage][positions[stage]].append(message)
    return result


def chunks_of(schedule: Schedule) -> int:
    """Return the number of chunks per stage."""
    return 1 + max(step.chunk for step in schedule[0])


def producer(stages: int, chunks: int, stage: int, step: Step) -> tuple[int, Step] | None:
    """Return the stage and the step whose output a step uses; None for the first step of a pass."""
    return _neighbor(stages, chunks, stage, step, 1 if step.backward else -1)


def consumer(stages: int, chunks: int, stage: int, step: Step) -> tuple[int, Step] | None:
    """Return the stage and the step that use a step's output; None for the last step of a pass."""
    return _neighbor(stages, chunks, stage, step, -1 if step.backward else 1)


def _neighbor(stages: int, chunks: int, stage: int, step: Step, by: int) -> tuple[int, Step] | None:
    """Return the stage and the step that are ``by`` chunks further along the layers, or None."""
    place = step.chunk * stages + stage + by
    if not 0 <= place < stages * chunks:
        return None
    return place % stages, step._replace(chunk=place // stages)


def most_held(steps: Sequence[Step]) -> int:
    """Return the most microbatches that a stage stores at a time, counted for each chunk."""
    count = most = 0
    for step in steps:
        count += -1 if step.backward else 1
        most = max(most, count)
    return most
