"""Errors that kernels report in the data of a GPU, such as a label outside the vocabulary.

A launch does not wait for its kernel, so a call with a wrong value cannot raise.  The kernel writes
NaN to the row of the result and records the position of the value; ``check_errors`` reads the
record and raises.
"""

from typing import Any, NamedTuple

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...core.replay import persistent_arrays
from ...core.stand_in import StandIn
from ...errors import RangeError

WORDS = 4  # a record: reporter, row, value and end of the valid range; see faults.cuh


class Reporter(NamedTuple):
    """An operand of an op that a kernel checks; ops that share a kernel share a reporter."""

    op: str
    operand: str
    axis: str  # the axis that the operand's values index
    otherwise: str = ""  # further values that are valid, for the message


_reporters: list[Reporter] = []
_records: dict[int | None, Any] = {}  # by number of the GPU; None is the host


def reporter(op: str, operand: str, axis: str, otherwise: str = "") -> int:
    """Return a number for the reports of a kernel; call it once, when a module is imported."""
    _reporters.append(Reporter(op, operand, axis, otherwise))
    return len(_reporters)


def record(like: Any) -> Array:
    """Return the record in which kernels on the device of ``like`` report.

    It is allocated once for each device, and is zero before any stream can use it.
    """
    like = like.form if isinstance(like, StandIn) else like
    device = None if isinstance(like, np.ndarray) else like.device.id
    words: Array | None = _records.get(device)
    if words is None:
        words = _records.setdefault(device, _new(like))
        persistent_arrays.append(words)
    return words


def _new(like: Any) -> Any:
    """Return a new record of zeros on the device of ``like``."""
    if isinstance(like, np.ndarray):
        return np.zeros(WORDS, np.int64)
    with gpu.device_of(like), gpu.cupy().cuda.Stream(non_blocking=True) as side:
        words = gpu.cupy().zeros(WORDS, np.int64)
        side.synchronize()  # not the current stream, which may be under capture
    return words


def check_errors() -> None:
    """Wait for all kernels; raise the first error that a kernel reported since the last call.

    Call it where the program reads a result anyway, such as a loss: waiting costs nothing there.
    It clears the report, so the next call raises only for later errors.

    Raises
    ------
    RangeError
        A label of ``cross_entropy`` or ``linear_cross_entropy``, or a token of ``embedding``, was
        outside the vocabulary, or a position of a rotary op (``rope`` and its variants) was outside
        the tables.  The message names the op, the row and the value.
    """
    for device, words in [*_records.items()]:
        report = _take(words) if device is None else _take_from(device, words)
        if report[0]:
            who, (row, number, end) = _reporters[report[0] - 1], report[1:]
            problem = _explain(who, row, number, end)
            raise RangeError(problem, expected=range(end), actual=number)


def _take(words: Any) -> list[int]:
    """Return the words of a record as a list, and clear the record."""
    report: list[int] = words.tolist()
    words[...] = 0
    return report


def _take_from(device: int, words: Any) -> list[int]:
    """Wait for all work on a GPU, then return its record and clear it."""
    with gpu.cupy().cuda.Device(device) as active:
        active.synchronize()  # all streams, as the kernel may have run on any of them
        return _take(words)


def _explain(who: Reporter, row: int, number: int, end: int) -> str:
    """Return the message of a report."""
    return (
        f"{who.op}: {who.operand} holds {number} in row {row}; it must be in 0 .. {end - 1}, the"
        f" {who.axis} axis{who.otherwise}. Results of that row are NaN"
    )
