"""Sort the rows of a mixture of experts by expert.

order is stable: experts[order] does not decrease, and equal experts stay in their order
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, RangeError
from ..common import faults
from ..common.checks import refuse_number
from ..common.no_kernel import no_kernel

REPORTER = faults.reporter("sort_by_expert", "experts", "count")
MOST_GROUPS = 2**24  # a count of 8 bytes is allocated for each: 128 MiB
MOST = 1023  # experts of the kernel: counters of 8 warps and totals are 36 of 48 KiB shared memory
WARPS, STEPS = 8, 16  # a warp processes 32 * 16 = 512 assignments, a block 4096


class Sorted(NamedTuple):
    """Assignments of rows to experts, sorted by expert."""

    order: Any  # (assignments,) int32: sorted assignment p is the flattened assignment order[p]
    offsets: Any  # (count + 1,) int32: expert e has order[offsets[e]:offsets[e + 1]]
    places: Any  # (assignments,) int32, the inverse of order: order[places[i]] = i


def sort_by_expert(experts: Array, count: int) -> tuple[Array, Array]:
    """Return the stable order of assignments by expert, and where each expert's part begins.

    Parameters
    ----------
    experts : (*assigned) int32 or int64
        The expert of each assignment, in 0 .. count - 1: usually (rows, k).
    count : int
        The number of experts.

    Returns
    -------
    order : (assignments,) int32
        The sorted assignment p is element ``order[p]`` of the flattened ``experts``; with (rows,
        k), it belongs to row ``order[p] // k``.
    offsets : (count + 1,) int32
        The assignments of expert e are ``order[offsets[e]:offsets[e + 1]]``.

    Raises
    ------
    RangeError
        An expert is not in 0 .. count - 1.  On a GPU the host does not read the experts: such
        assignments come last, after the parts of all experts, and the next ``check_errors()``
        raises.
    ConfigError
        count is not positive.
    DTypeError
        experts is not an array of integers.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import sort_by_expert
    >>> experts = np.array([[2, 0], [0, 2]])
    >>> order, offsets = sort_by_expert(experts, 3)
    >>> assert order.tolist() == [1, 2, 0, 3] and offsets.tolist() == [0, 2, 2, 4]
    """
    order, offsets = sort_by_expert_forward(experts, count=count)
    return order, offsets


@op(
    "experts(*assigned): int -> order(assignments): int, offsets(count+1): int",
    no_gradient="its results are integers",
    widen=False,
    sizes=lambda shape, count: {"assignments": math.prod(shape), "count": count},
    traffic=lambda a: 2 * a["experts"].nbytes + a["order"].nbytes + a["offsets"].nbytes,
)
def sort_by_expert_forward(experts: Array, *, count: int) -> tuple[Array, Array]:
    """Return order and offsets of ``sort_by_expert``."""
    check_range("sort_by_expert", experts, count)
    return by_expert(experts, count)[:2]


def check_range(call: str, experts: Array, count: int) -> None:
    """Raise RangeError if an expert does not exist, in NumPy arrays only."""
    if isinstance(experts, np.ndarray):
        wrong = experts[(experts < 0) | (experts >= count)]
        if wrong.size:
            problem = f"{call}: experts holds {wrong.flat[0]}; it must be in 0 .. {count - 1}"
            raise RangeError(problem, expected=range(count), actual=int(wrong.flat[0]))


def by_expert(experts: Array, count: int) -> Sorted:
    """Return the sorted assignments by functions of NumPy or CuPy."""
    flat = experts.reshape(-1)
    narrow = np.uint16 if count <= 2**16 else np.int64  # NumPy sorts 16-bit integers faster
    order = np.argsort(flat.astype(narrow), kind="stable").astype(np.int32)
    counts = np.bincount(flat, minlength=count)
    offsets = np.zeros_like(order, shape=(count + 1,))
    np.cumsum(counts, out=offsets[1:], dtype=np.int32)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    return Sorted(order, offsets, places)


@sort_by_expert_forward.require
def _check(call: str, experts: Any, count: int) -> None:
    refuse_number(call, "experts", experts)
    if not 0 < count <= MOST_GROUPS:
        raise ConfigError(f"{call}(count={count}): count must be in 1 .. {MOST_GROUPS}")


@sort_by_expert_forward.kernel
def _launch(experts: Array, count: int) -> Any:
    if count > MOST:
        return no_kernel(f"{count} experts: the kernel supports up to {MOST}")
    return launch_sort(experts, count, places=False, who=REPORTER)[:2]


def launch_sort(experts: Array, count: int, *, places: bool, who: int) -> Sorted:
    """Return the sorted assignments by one launch, or by two for more than 4,096 assignments.

    With ``places``, order and places have the shape of experts; else places is None.
    """
    experts = contiguous(experts)
    size, shape = experts.size, experts.shape if places else (experts.size,)
    blocks = -(-size // (WARPS * STEPS * 32))
    chosen = _constants(experts.dtype, count, places, blocks > 1)
    order = empty(shape, np.int32, like=experts)
    offsets = empty((count + 1,), np.int32, like=experts)
    inverse = empty(shape, np.int32, like=experts) if places else None
    counts = empty((blocks, count + 1), np.int32, like=experts) if blocks > 1 else None
    if counts is not None:
        kernel = load("sort_by_expert.cu", "sort_counts", experts, chosen)
        kernel[blocks, 32 * WARPS](experts, counts, size)
    kernel = load("sort_by_expert.cu", "sort_by_expert", experts, chosen)
    kernel[blocks, 32 * WARPS](
        *(experts, counts, order, offsets, inverse, faults.record(experts), who, size)
    )
    return Sorted(order, offsets, inverse)


@cache
def _constants(experts: Any, count: int, places: bool, parts: bool) -> Constants:
    """Return the constants of sort_by_expert.cu."""
    return Constants(I=experts, COUNT=count, STEPS=STEPS, WARPS=WARPS, PLACES=places, PARTS=parts)
