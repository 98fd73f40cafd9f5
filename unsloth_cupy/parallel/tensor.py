"""Layers whose weights are divided among ranks, with gradients on the tape.

    h = column_parallel_linear(x, shard(w, 0, comm), comm=comm)      h is this rank's columns
    y = row_parallel_linear(h, shard(v, 1, comm), comm=comm)         y is whole, in all ranks

What all ranks hold alike has one gradient, which all ranks get alike.  (Shoeybi et al.,
Megatron-LM, 2019; along a sequence: Korthikanti et al., 2022.)
"""

from typing import Any

from ..core.arrays import packed
from ..errors import ShapeError
from ..ops.linear.linear import linear
from ._taped import taped, value_of
from .communicator import Communicator, along, check_axes, check_axis, part


def shard(x: Any, axis: int, comm: Communicator) -> Any:
    """Return this rank's part of an array that all ranks hold alike; its gradient is gathered.

    Raises
    ------
    ShapeError
        The array has no such axis.
    """
    value = value_of(x)
    axis = check_axis("shard", value, axis)
    y = value[along(axis, part(value.shape[axis], comm))].copy()
    return taped("shard", y, lambda dy, wanted: {"x": comm.all_gather(dy, axis)}, x=x)


def all_reduce(x: Any, comm: Communicator) -> Any:
    """Return the sum over ranks, which all hold alike; each gets the gradient of that sum."""
    y = comm.all_reduce(value_of(x))
    return taped("all_reduce", y, lambda dy, wanted: {"x": dy}, x=x)


def all_gather(x: Any, axis: int, comm: Communicator) -> Any:
    """Return the parts of all ranks end to end, which all hold alike.

    Raises
    ------
    ShapeError
        Ranks do not hold the parts that ``shard`` gives.
    """
    value = value_of(x)
    axis = check_axis("all_gather", value, axis)
    y = comm.all_gather(value, axis)
    where = _own_part("all_gather", y.shape[axis], value.shape[axis], axis, comm)
    return taped(
        "all_gather", y, lambda dy, wanted: {"x": packed(dy[along(axis, where)]).copy()}, x=x
    )


def reduce_scatter(x: Any, axis: int, comm: Communicator) -> Any:
    """Return this rank's part of the sum over ranks; the gradient is gathered."""
    value = value_of(x)
    axis = check_axis("reduce_scatter", value, axis)
    y = comm.reduce_scatter(value, axis)
    return taped("reduce_scatter", y, lambda dy, wanted: {"x": comm.all_gather(dy, axis)}, x=x)


def all_to_all(x: Any, divided: int, joined: int, comm: Communicator) -> Any:
    """Return this rank's part along one axis of what ranks hold along another; and back.

    Raises
    ------
    ShapeError
        Ranks do not hold the parts along ``joined`` that ``shard`` gives, or the axes are one.
    """
    value = value_of(x)
    cut, end = check_axes("all_to_all", value, divided, joined)
    y = comm.all_to_all(value, cut, end)
    _own_part("all_to_all", y.shape[end], value.shape[end], end, comm)
    return taped("all_to_all", y, lambda dy, wanted: {"x": comm.all_to_all(dy, end, cut)}, x=x)


def column_parallel_linear(
    x: Any, weight: Any, bias: Any = None, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return this rank's columns of ``x @ weight.T + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Alike in all ranks, or this rank's part along sequence_axis.
    weight : (this rank's outputs, inputs) float, or a quantized weight
        ``shard(weight, 0, comm)``.
    bias : (this rank's outputs,) float, optional
    comm : Communicator
    sequence_axis : int, optional
        Gather x along this axis first; its gradient is summed over ranks and divided again.

    Returns
    -------
    y : (*rows, this rank's outputs) float

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    return linear(entered(x, comm, sequence_axis), weight, bias)


def row_parallel_linear(
    x: Any, weight: Any, bias: Any = None, *, comm: Communicator, sequence_axis: int | None = None
) -> Any:
    """Return ``x @ weight.T + bias``, of inputs that are divided among ranks.

    Parameters
    ----------
    x : (*rows, this rank's inputs) float
    weight : (outputs, this rank's inputs) float, or a quantized weight
        ``shard(weight, 1, comm)``.
    bias : (outputs,) float, optional
        Alike in all ranks; added once, after the sum over ranks.
    comm : Communicator
    sequence_axis : int, optional
        Return this rank's part along this axis alone.

    Returns
    -------
    y : (*rows, outputs) float
        Alike in all ranks, or this rank's part.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    y = linear(x, weight)
    if sequence_axis is None:
        y = all_reduce(y, comm)
        return y if bias is None else y + bias
    y = reduce_scatter(y, sequence_axis, comm)
    return y if bias is None else y + entered(bias, comm, None)  # each adds it to other rows


def entered(x: Any, comm: Communicator, sequence_axis: int | None) -> Any:
    """Return x whole, for ranks that use it each in another way: gradients are summed."""
    if sequence_axis is None:
        y = value_of(x)
        return taped("all_reduce", y, lambda dy, wanted: {"x": comm.all_reduce(dy)}, x=x)
    value = value_of(x)
    axis = check_axis("all_gather", value, sequence_axis)
    y = comm.all_gather(value, axis)
    _own_part("all_gather", y.shape[axis], value.shape[axis], axis, comm)
    return taped("all_gather", y, lambda dy, wanted: {"x": comm.reduce_scatter(dy, axis)}, x=x)


def _own_part(call: str, whole: int, own: int, axis: int, comm: Communicator) -> slice:
    """Return this rank's part of a size; raise where it holds another."""
    where = part(whole, comm)
    wanted = where.stop - where.start
    if own != wanted:
        problem = f"{call}: rank {comm.rank} holds {own} of {whole} on axis {axis}"
        cure = f"its part is {wanted}: divide arrays with shard"
        raise ShapeError(
            f"{problem}, which is not as shard divides; {cure}", expected=wanted, actual=own
        )
    return where
