"""A linear layer with a weight for each group of rows.

y[p] = x[p] weight[e]^T + bias[e]        e is the group of p: offsets[e] <= p < offsets[e + 1]
"""

from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import Array, Stored
from ...core.op import op
from ...core.stand_in import is_planned
from ...errors import RangeError
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from ..common.grouped import FORWARD, MOST, ROWS, WEIGHTS, add_rows, groups_of, multiply
from ..common.no_kernel import no_kernel


@op(
    "x(assignments, inputs), weight(experts, outputs, inputs): weight, offsets(experts+1): int,"
    " bias?(experts, outputs): param -> y(assignments, outputs)",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[1],
    traffic=lambda a: traffic(a, len(a["x"])),
)
def grouped_linear(x: Array, weight: Array, offsets: Array, bias: Array | None = None) -> Array:
    """Multiply each group of rows by its own weight: ``y[p] = x[p] @ weight[e].T + bias[e]``.

    Parameters
    ----------
    x : (assignments, inputs) float
        Rows, sorted by group: group e has the rows ``x[offsets[e]:offsets[e + 1]]``.
    weight : (experts, outputs, inputs) float, or a quantized stack
        A matrix for each group.  A quantized stack is frozen.  On a CPU one matrix at a time is
        dequantized; on a GPU the matrices of all groups with rows, and all matrices of an ``Int8``.
    offsets : (experts + 1,) int32 or int64
        From 0 to the number of rows, as ``sort_by_expert`` returns them; groups may be empty.
    bias : (experts, outputs) dtype of x or float32, optional

    Returns
    -------
    y : (assignments, outputs) float
        Accumulated in float32 (float64 for float64 arrays) and rounded once.

    Raises
    ------
    RangeError
        offsets do not rise from 0 to the number of rows.  On a GPU the host does not read them, and
        rows that belong to no group give 0.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import grouped_linear, grouped_linear_backward
    >>> x, weight = np.ones((3, 4), np.float32), np.ones((2, 5, 4), np.float32)
    >>> weight[1] = 2
    >>> offsets = np.array([0, 1, 3])  # a row of the first group, two of the second
    >>> y = grouped_linear(x, weight, offsets)
    >>> np.testing.assert_array_equal(y[:, 0], [4, 8, 8])
    >>> dx, dweight, _, _ = grouped_linear_backward(np.ones_like(y), x, weight, offsets, None)
    >>> np.testing.assert_array_equal(dweight[:, 0, 0], [1, 2])
    """
    outputs, weight = weight.shape[1], stack_like(weight, x)
    dtype = x.dtype if bias is None else np.promote_types(x.dtype, bias.dtype)
    y = empty((len(x), outputs), dtype, like=x)
    for expert, part in parts("grouped_linear", offsets, len(x)):
        if bias is not None:
            y[part] = bias[expert]  # the product is added to it, in float32
        gemm(x[part], weight[expert].T, out=y[part], add=bias is not None)
    return y if y.dtype == x.dtype else y.astype(x.dtype)


@grouped_linear.kernel
def _launch(x: Array, weight: Array, offsets: Array, bias: Array | None) -> Any:
    """Return y by two launches: the first lists the tiles of the groups, the second multiplies."""
    if (reason := without_kernel(weight)) is not None:
        return no_kernel(reason)
    x, offsets = contiguous(x), contiguous(offsets)
    weight = dense_stack(weight, offsets, x.dtype)
    y = empty((x.shape[0], weight.shape[1]), x.dtype, like=x)
    groups = groups_of(x.dtype, offsets, weight.shape[0], x.shape[0])
    multiply(FORWARD, x, weight, y, groups, bias=bias)
    return y


@grouped_linear.gradient(widen=False)
def grouped_linear_backward(
    dy: Array,
    x: Array,
    weight: Array,
    offsets: Array,
    bias: Array | None,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, None, Array | None]:
    """Return the gradients of x, weight and bias; None for a gradient that is not ``wanted``.

    The gradients of weight and bias are 0 for groups without rows.
    """
    call = "grouped_linear_backward"
    needed = requested_gradients(call, wanted, x=x, weight=weight, bias=bias)
    dx = empty(x.shape, dy.dtype, like=x) if "x" in needed else None
    dweight = empty(weight.shape, dy.dtype, like=x) if "weight" in needed else None
    dbias = np.empty_like(bias) if bias is not None and "bias" in needed else None
    weight = stack_like(weight, x)
    for expert, part in parts(call, offsets, len(x)):
        if dx is not None:
            gemm(dy[part], weight[expert], out=dx[part])
        if dweight is not None:
            gemm(dy[part].T, x[part], out=dweight[expert])
        if dbias is not None:
            wide = np.promote_types(dy.dtype, np.float32)
            dbias[expert] = dy[part].sum(axis=0, dtype=wide)
    return dx, dweight, None, dbias


@grouped_linear_backward.kernel
def _launch_backward(
    dy: Array,
    x: Array,
    weight: Array,
    offsets: Array,
    bias: Array | None,
    wanted: Set[str] | None,
) -> Any:
    if (reason := without_kernel(weight)) is not None:
        return no_kernel(reason)
    needed = requested_gradients("grouped_linear_backward", wanted, x=x, weight=weight, bias=bias)
    dy, x, offsets = (contiguous(a) for a in (dy, x, offsets))
    groups = groups_of(x.dtype, offsets, weight.shape[0], x.shape[0])
    dx = dweight = dbias = None
    if "x" in needed:
        dx = empty(x.shape, x.dtype, like=x)
        multiply(ROWS, dy, dense_stack(weight, offsets, x.dtype), dx, groups)
    if "weight" in needed:
        dweight = empty(weight.shape, weight.dtype, like=x)
        multiply(WEIGHTS, dy, x, dweight, groups)
    if bias is not None and "bias" in needed:
        dbias = empty(bias.shape, bias.dtype, like=x)
        add_rows(dy, dbias, groups)
    return dx, dweight, None, dbias


def traffic(arrays: dict[str, Any], assignments: int) -> int:
    """Return the bytes of all arrays; stacks count only as many experts as can have rows."""
    stacks, total = ("weight", "gate_up", "down"), 0
    for name, array in arrays.items():
        if array is not None:
            experts = array.shape[0] if name in stacks else 1
            total += array.nbytes // experts * min(experts, max(1, assignments))
    return total


def without_kernel(*weights: Any) -> str | None:
    """Return why no kernel multiplies by these stacks; None if a kernel does."""
    if weights[0].shape[0] > MOST:
        return f"{weights[0].shape[0]} experts: the kernel lists the tiles of up to {MOST}"
    return None


def stack_like(weight: Any, x: Array) -> Any:
    """Return a stack whose matrices are computed in the dtype of x; dense ones have it already."""
    return weight.computed_in(x.dtype) if isinstance(weight, Stored) else weight


def dense_stack(weight: Any, offsets: Array, dtype: np.dtype[Any]) -> Array:
    """Return a dense stack; of a quantized one, only the matrices of groups with rows are valid."""
    dense: Array = weight.dense_where(offsets, dtype) if isinstance(weight, Stored) else weight
    return contiguous(dense)


def parts(
    call: str, offsets: Array, rows: int, most: int | None = None
) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each group; raise RangeError if they do not cover all rows.

    A plan of memory, which has no values of offsets, gives ``most`` rows to the first groups.
    """
    if is_planned(offsets):
        most = rows if most is None else most
        ends = [min(rows, (group + 1) * most) for group in range(offsets.size - 1)]
    else:
        edges = offsets.tolist()
        if edges[0] != 0 or edges != sorted(edges) or edges[-1] != rows:
            problem = f"{call}: offsets are {edges}; they must rise from 0 to {rows}"
            raise RangeError(problem, expected=rows, actual=edges[-1])
        ends = edges[1:]
    start = 0
    for expert, end in enumerate(ends):
        yield expert, slice(start, end)
        start = end


grouped_linear_backward.facts["traffic"] = lambda a: traffic(a, len(a["x"]))
grouped_linear_backward.facts["operations"] = lambda a: (
    2 * a["x"].size * a["weight"].shape[1] * sum(a.get(n) is not None for n in ("dx", "dweight"))
)
