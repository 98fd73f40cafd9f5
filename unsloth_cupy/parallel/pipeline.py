"""Run a pipeline: pass microbatches through stages in the order of a schedule."""

import reprlib
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError
from .communicator import Communicator, check_communicator
from .schedule import Message, Schedule, Step, chunks_of, consumer, timetable


class Stage(Protocol):
    """The layers of one rank, in chunks; stages pass on one array, or a tuple of arrays."""

    def like(self, microbatch: Any) -> Any:
        """Return new arrays of the shapes and dtypes of those that stages pass on."""

    def forward(self, step: Step, microbatch: Any, x: Any) -> Any:
        """Return the output for the next stage; x is that of the stage before, None in the first.

        The outputs of the last stage are the results of the pipeline: losses.
        """

    def backward(self, step: Step, dy: Any) -> Any:
        """Return the gradient of x; dy is that of the output of forward, None in the last stage."""


def run_pipeline(
    stage: Stage, schedule: Schedule, microbatches: Sequence[Any], comm: Communicator
) -> list[Any]:
    """Run microbatches through the stages of all ranks, forward and backward.

    Parameters
    ----------
    stage : Stage
        The layers of this rank.
    schedule : list of list of Step
        What ``pipeline_schedule`` returns, equal in all ranks.
    microbatches : sequence
        As many as the schedule has, passed by all ranks; ``Stage.forward`` receives them.
    comm : Communicator
        As many ranks as stages.

    Returns
    -------
    results : list
        The results of forward in the last stage, by microbatch; empty in the others.

    Raises
    ------
    ConfigError
        The schedule is for another number of ranks or of microbatches.
    """
    check_communicator("run_pipeline", comm)
    try:
        count = 1 + max(step.microbatch for steps in schedule for step in steps)
        batches = len(microbatches)
    except (TypeError, ValueError, AttributeError):
        cure = "pass what pipeline_schedule returns, and a list of microbatches"
        raise ConfigError(f"run_pipeline(schedule={reprlib.repr(schedule)}): {cure}") from None
    if len(schedule) != comm.size or count != batches:
        actual = f"{len(schedule)} stages and {count} microbatches"
        expected = f"{comm.size} ranks and {batches}"
        cure = "make one with pipeline_schedule(ranks, microbatches)"
        raise ConfigError(f"run_pipeline: a schedule of {actual} is not one of {expected}; {cure}")
    stages, chunks, rank = len(schedule), chunks_of(schedule), comm.rank
    arrays: dict[tuple[int, Step], Any] = {}  # by the stage and the step that use the array
    results: dict[int, Any] = {}

    def exchange(messages: Sequence[Message]) -> None:
        for message in messages:
            if message.source == rank:
                send(comm, arrays.pop((message.to, message.step)), message.to)
            else:
                out = stage.like(microbatches[message.step.microbatch])
                arrays[rank, message.step] = receive(comm, out, message.source)

    before, *after = timetable(schedule).messages[rank]
    exchange(before)
    for step, messages in zip(schedule[rank], after, strict=True):
        x, target = arrays.pop((rank, step), None), consumer(stages, chunks, rank, step)
        if step.backward:
            y = stage.backward(step, x)
        else:
            y = stage.forward(step, microbatches[step.microbatch], x)
        if target is not None:
            arrays[target] = y
        elif not step.backward:
            results[step.microbatch] = y
        del x, y
        exchange(messages)
    return [results[number] for number in sorted(results)]


def send(comm: Communicator, arrays: Any, to: int) -> None:
    """Send an array, or each of a tuple."""
    for array in arrays if type(arrays) is tuple else (arrays,):
        comm.send(array, to)


def receive(comm: Communicator, like: Any, source: int) -> Any:
    """Receive an array, or a tuple of arrays, of these forms."""
    if type(like) is tuple:
        return tuple(comm.receive(each, source) for each in like)
    return comm.receive(like, source)
