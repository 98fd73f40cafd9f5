"""What kernels met that no host could look at before: a label outside the vocabulary, say.

A launch does not wait for its kernel, so a wrong number cannot raise where it is passed.  The
kernel gives NaN there and writes down where it was; ``check_errors`` reads that and raises.
"""

from typing import Any, NamedTuple

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...core.replay import lasting
from ...core.stand_in import StandIn
from ...errors import RangeError

WORDS = 4  # as faults.cuh lays them out


class Reporter(NamedTuple):
    """Who may report: an operand of an op, the axis that it selects from, and what else it may be.

    Ops that share a kernel share a reporter.
    """

    op: str
    operand: str
    axis: str
    otherwise: str = ""


_reporters: list[Reporter] = []
_records: dict[int | None, Any] = {}  # of the host, None, and of every GPU by number


def reporter(op: str, operand: str, axis: str, otherwise: str = "") -> int:
    """Return the number by which a kernel names itself; call it once, when a module is imported."""
    _reporters.append(Reporter(op, operand, axis, otherwise))
    return len(_reporters)


def record(like: Any) -> Array:
    """Return the words that kernels report to where ``like`` lives.

    They are allocated once for each device, and zero before any stream can ask for them.
    """
    like = like.form if isinstance(like, StandIn) else like
    device = None if isinstance(like, np.ndarray) else like.device.id
    found: Array | None = _records.get(device)
    if found is None:
        found = _records.setdefault(device, _new(like))
        lasting.append(found)
    return found


def _new(like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(WORDS, np.int64)
    with gpu.at(like), gpu.cupy().cuda.Stream(non_blocking=True) as side:
        words = gpu.cupy().zeros(WORDS, np.int64)
        side.synchronize()  # of this stream alone: the one that asks may be captured
    return words


def check_errors() -> None:
    """Wait for all kernels and raise for what the first of them reported since the last call.

    Call it where the program reads a result anyway, such as a loss: waiting costs nothing there.
    What was reported is forgotten, so the next call raises for what comes after.

    Raises
    ------
    RangeError
        A label of ``cross_entropy`` or ``linear_cross_entropy``, or a token of ``embedding``, was
        outside the vocabulary, or a position of an op that turns heads outside
        the tables.  The message names op, row and number.
    """
    for device, words in [*_records.items()]:
        found = _taken(words) if device is None else _taken_from(device, words)
        if found[0]:
            who, (place, number, end) = _reporters[found[0] - 1], found[1:]
            problem = _explain(who, place, number, end)
            raise RangeError(problem, expected=range(end), actual=number)


def _taken(words: Any) -> list[int]:
    found: list[int] = words.tolist()
    words[...] = 0
    return found


def _taken_from(device: int, words: Any) -> list[int]:
    with gpu.cupy().cuda.Device(device) as there:
        there.synchronize()  # every stream: any of them may have been launched on
        return _taken(words)


def _explain(who: Reporter, place: int, number: int, end: int) -> str:
    return (
        f"{who.op}: {who.operand} holds {number} in row {place}; it must be in 0 .. {end - 1}, the"
        f" {who.axis} axis{who.otherwise}. Results of that row are NaN"
    )
