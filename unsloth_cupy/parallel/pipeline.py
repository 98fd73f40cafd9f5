"""A pipeline that runs: microbatches through stages, in the order of a schedule."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError
from .communicator import Communicator
from .schedule import Message, Schedule, Step, chunks_of, consumer, timetable


class Stage(Protocol):
    """The layers of one rank, in chunks; what goes from stage to stage is one array."""

    def like(self, microbatch: Any) -> Any:
        """Return a new array of the shape and dtype of what goes from stage to stage."""

    def forward(self, step: Step, microbatch: Any, x: Any) -> Any:
        """Return what the next stage takes, of what the one before left; x is None in the first.

        What the last stage returns is kept: a loss.
        """

    def backward(self, step: Step, dy: Any) -> Any:
        """Return the gradient of x, of that of what forward returned; dy is None in the last."""


def run_pipeline(
    stage: Stage, schedule: Schedule, microbatches: Sequence[Any], comm: Communicator
) -> list[Any]:
    """Run microbatches through the stages of all ranks, forward and back.

    Parameters
    ----------
    stage : Stage
        The layers of this rank.
    schedule : list of list of Step
        What ``pipeline_schedule`` returns, alike in all ranks.
    microbatches : sequence
        As many as the schedule has; all ranks pass them, and stages see each with its number.
    comm : Communicator
        As many ranks as stages.

    Returns
    -------
    results : list
        What forward returned in the last stage, by microbatch; empty in the others.

    Raises
    ------
    ConfigError
        The schedule is not one of so many ranks, or of so many microbatches.
    """
    count = 1 + max(step.microbatch for steps in schedule for step in steps)
    if len(schedule) != comm.size or count != len(microbatches):
        given = f"{len(schedule)} stages and {count} microbatches"
        wanted = f"{comm.size} ranks and {len(microbatches)}"
        cure = "make one with pipeline_schedule(ranks, microbatches)"
        raise ConfigError(f"run_pipeline: a schedule of {given} is not one of {wanted}; {cure}")
    stages, chunks, rank = len(schedule), chunks_of(schedule), comm.rank
    held: dict[tuple[int, Step], Any] = {}  # by the stage and the step that takes it
    results: dict[int, Any] = {}

    def exchange(messages: Sequence[Message]) -> None:
        for message in messages:
            if message.source == rank:
                comm.send(held.pop((message.to, message.step)), message.to)
            else:
                out = stage.like(microbatches[message.step.microbatch])
                held[rank, message.step] = comm.receive(out, message.source)

    before, *after = timetable(schedule).messages[rank]
    exchange(before)
    for step, messages in zip(schedule[rank], after, strict=True):
        x, left = held.pop((rank, step), None), consumer(stages, chunks, rank, step)
        if step.backward:
            y = stage.backward(step, x)
        else:
            y = stage.forward(step, microbatches[step.microbatch], x)
        if left is not None:
            held[left] = y
        elif not step.backward:
            results[step.microbatch] = y
        del x, y
        exchange(messages)
    return [results[number] for number in sorted(results)]
