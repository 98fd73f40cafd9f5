"""Execution of a pipeline: microbatches pass through stages in the order of a schedule."""

import reprlib
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError
from .communicator import Communicator, check_communicator
from .schedule import Message, Schedule, Step, chunks_of, consumer, timetable


class Stage(Protocol):
    """The layers of one rank, in chunks; stages exchange one array, or a tuple of arrays."""

    def like(self, microbatch: Any) -> Any:
        """Return new arrays with the shapes and dtypes of the arrays that stages exchange."""

    def forward(self, step: Step, microbatch: Any, x: Any) -> Any:
        """Return the output of this stage; x is the previous stage's output, None in the first.

        The outputs of the last stage are the results of the pipeline, such as losses.
        """

    def backward(self, step: Step, dy: Any) -> Any:
        """Return the gradient of x; dy is the upstream gradient, None in the last stage."""


def run_pipeline(
    stage: Stage, schedule: Schedule, microbatches: Sequence[Any], comm: Communicator
) -> list[Any]:
    """Run microbatches through the stages of all ranks, forward and backward.

    Parameters
    ----------
    stage : Stage
        The layers of this rank.
    schedule : list of list of Step
        The result of ``pipeline_schedule``, equal in all ranks.
    microbatches : sequence
        All microbatches of the schedule, in every rank; ``Stage.forward`` receives them.
    comm : Communicator
        Its world size is the number of stages.

    Returns
    -------
    results : list
        The outputs of the last stage, by microbatch; empty in other ranks.

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
        expected = f"{comm.size} ranks and {batches} microbatches"
        cure = "make one with pipeline_schedule(ranks, microbatches)"
        raise ConfigError(f"run_pipeline: the schedule has {actual}, not {expected}; {cure}")
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
    """Send an array, or all arrays of a tuple."""
    for array in arrays if type(arrays) is tuple else (arrays,):
        comm.send(array, to)


def receive(comm: Communicator, like: Any, source: int) -> Any:
    """Receive into new arrays: one, or a tuple, as in ``like``."""
    if type(like) is tuple:
        return tuple(comm.receive(each, source) for each in like)
    return comm.receive(like, source)
