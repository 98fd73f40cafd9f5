"""Tensor-parallel layers: ranks divide their weights; gradients are on the tape.

    h = column_parallel_linear(x, shard(w, 0, comm), comm=comm)      h: this rank's columns
    y = row_parallel_linear(h, shard(v, 1, comm), comm=comm)         y: whole, equal in all ranks

An array that is equal in all ranks has equal gradients in all ranks.  (Shoeybi et al., Megatron-LM,
2019; sequence parallelism: Korthikanti et al., 2022.)
"""

from collections.abc import Sequence
from typing import Any

from ..core.arrays import contiguous
from ..core.signature import check
from ..errors import ShapeError, naming
from ..ops.linear.linear import linear
from .communicator import Communicator, along, check_axes, check_axis, check_communicator, part
from .taped import taped, values_of


def shard(x: Any, axis: int, comm: Communicator) -> Any:
    """Return this rank's part of an array that is equal in all ranks; backward gathers gradients.

    Raises
    ------
    ShapeError
        The array does not have this axis.
    """
    check_communicator("shard", comm)
    (value,) = values_of("shard", x=x)
    axis = check_axis("shard", value, axis)
    y = value[along(axis, part(value.shape[axis], comm))].copy()
    return taped("shard", y, lambda dy, wanted: {"x": comm.all_gather(dy, axis)}, x=x)


def all_reduce(x: Any, comm: Communicator) -> Any:
    """Return the sum over ranks, equal in all ranks; backward passes the gradient on unchanged."""
    check_communicator("all_reduce", comm)
    (value,) = values_of("all_reduce", x=x)
    y = comm.all_reduce(value)
    return taped("all_reduce", y, lambda dy, wanted: {"x": dy}, x=x)


def all_gather(x: Any, axis: int, comm: Communicator) -> Any:
    """Return the concatenated parts of all ranks, equal in all ranks.

    Raises
    ------
    ShapeError
        A rank does not pass the part that ``shard`` returns.
    """
    check_communicator("all_gather", comm)
    (value,) = values_of("all_gather", x=x)
    axis = check_axis("all_gather", value, axis)
    y = comm.all_gather(value, axis)
    where = _own_part("all_gather", y.shape[axis], value.shape[axis], axis, comm)
    return taped(
        "all_gather", y, lambda dy, wanted: {"x": contiguous(dy[along(axis, where)]).copy()}, x=x
    )


def reduce_scatter(x: Any, axis: int, comm: Communicator) -> Any:
    """Return this rank's part of the sum over ranks; backward gathers gradients."""
    check_communicator("reduce_scatter", comm)
    (value,) = values_of("reduce_scatter", x=x)
    axis = check_axis("reduce_scatter", value, axis)
    y = comm.reduce_scatter(value, axis)
    return taped("reduce_scatter", y, lambda dy, wanted: {"x": comm.all_gather(dy, axis)}, x=x)


def all_to_all(x: Any, divided: int, joined: int, comm: Communicator) -> Any:
    """Return this rank's part along ``divided`` of all ranks' arrays, joined along ``joined``.

    Backward exchanges gradients in the opposite direction.

    Raises
    ------
    ShapeError
        A rank does not pass the part along ``joined`` that ``shard`` returns, or the axes are
        equal.
    """
    (value,) = values_of("all_to_all", x=x)
    cut, end = check_axes("all_to_all", value, divided, joined)
    y = comm.all_to_all(value, cut, end)
    _own_part("all_to_all", y.shape[end], value.shape[end], end, comm)
    return taped("all_to_all", y, lambda dy, wanted: {"x": comm.all_to_all(dy, end, cut)}, x=x)


def all_to_all_rows(x: Any, counts: Sequence[int], comm: Communicator) -> tuple[Any, list[int]]:
    """Return the rows that all ranks send to this one, in rank order, and their counts.

    The first ``counts[0]`` rows of x go to rank 0, the next ``counts[1]`` to rank 1, and so on.
    Backward sends gradients the opposite way.

    Raises
    ------
    ShapeError
        counts does not have one number for each rank, or its sum is not the number of rows.
    """
    check_communicator("all_to_all_rows", comm)
    (value,) = values_of("all_to_all_rows", x=x)
    y, came = comm.all_to_all_rows(value, counts)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"x": comm.all_to_all_rows(dy, came)[0]}

    return taped("all_to_all_rows", y, back, x=x), came


@naming("column_parallel_linear", "linear", "all_gather")
def column_parallel_linear(
    x: Any, weight: Any, bias: Any = None, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return this rank's columns of ``x @ weight.T + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Equal in all ranks, or this rank's part along sequence_axis.
    weight : (this rank's outputs, inputs) float, or a quantized weight
        ``shard(weight, 0, comm)``.
    bias : (this rank's outputs,) float, optional
    comm : Communicator
    sequence_axis : int, optional
        Axis along which x is gathered first; backward sums its gradient over ranks and divides it.

    Returns
    -------
    y : (*rows, this rank's outputs) float

    Raises
    ------
    ShapeError, DTypeError
        Shapes or dtypes contradict each other; the message shows the whole call.
    """
    return linear(entered(x, comm, sequence_axis), weight, bias)


@naming("row_parallel_linear", "linear", "reduce_scatter")
def row_parallel_linear(
    x: Any, weight: Any, bias: Any = None, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return ``x @ weight.T + bias`` where ranks divide the inputs.

    Parameters
    ----------
    x : (*rows, this rank's inputs) float
    weight : (outputs, this rank's inputs) float, or a quantized weight
        ``shard(weight, 1, comm)``.
    bias : (outputs,) float, optional
        Equal in all ranks; added once, after the sum over ranks.
    comm : Communicator
    sequence_axis : int, optional
        Axis along which only this rank's part is returned.

    Returns
    -------
    y : (*rows, outputs) float
        Equal in all ranks, or this rank's part.

    Raises
    ------
    ShapeError, DTypeError
        Shapes or dtypes contradict each other; the message shows the whole call.
    """
    present = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    values = values_of("row_parallel_linear", **present)
    check("row_parallel_linear", linear.contract, [*values, None][:3])
    y = linear(x, weight)
    if sequence_axis is None:
        y = all_reduce(y, comm)
        return y if bias is None else y + bias
    y = reduce_scatter(y, sequence_axis, comm)
    # Ranks add the bias to different rows, so backward must sum its gradient over ranks.
    return y if bias is None else y + entered(bias, comm, None)


def entered(x: Any, comm: Communicator, sequence_axis: int | None) -> Any:
    """Return x, gathered if it is divided; backward sums its gradient over all ranks."""
    check_communicator("all_gather", comm)
    (value,) = values_of("all_gather", x=x)
    if sequence_axis is None:
        return taped("all_reduce", value, lambda dy, wanted: {"x": comm.all_reduce(dy)}, x=x)
    axis = check_axis("all_gather", value, sequence_axis)
    y = comm.all_gather(value, axis)
    _own_part("all_gather", y.shape[axis], value.shape[axis], axis, comm)
    return taped("all_gather", y, lambda dy, wanted: {"x": comm.reduce_scatter(dy, axis)}, x=x)


def _own_part(call: str, whole: int, own: int, axis: int, comm: Communicator) -> slice:
    """Return this rank's part of an axis; raise if its array has another size."""
    own_part = part(whole, comm)
    expected = own_part.stop - own_part.start
    if own != expected:
        problem = f"{call}: rank {comm.rank} has {own} of {whole} on axis {axis}, not {expected}"
        cure = "divide arrays with shard"
        raise ShapeError(f"{problem}; {cure}", expected=expected, actual=own)
    return own_part
