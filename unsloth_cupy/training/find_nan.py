"""Finds the first op that returns a NaN or an infinity.

with find_nan(model.parameters):
    loss, gradients = model.loss_and_gradients(tokens, labels)      raises NonFiniteError
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.call import check_options
from ..core.dtypes import FLOAT32, FLOATS, Array
from ..core.gpu import device_of
from ..errors import UnslothCupyError
from . import tape


class NonFiniteError(UnslothCupyError, FloatingPointError):
    """An op returned a NaN or an infinity.

    Attributes
    ----------
    op, result : str
        The names of the op and the result.
    parameter : str or None
        The parameter that was used last, which shows the layer.
    """

    def __init__(self, message: str, op: str, result: str, parameter: str | None) -> None:
        super().__init__(message)
        self.op, self.result, self.parameter = op, result, parameter


@contextmanager
@check_options
def find_nan(
    parameters: Mapping[str, Array] | None = None, *, gradients: bool = True
) -> Iterator[None]:
    """Check every result of ops on a tape, forward and backward, inside a ``with`` block.

    Parameters
    ----------
    parameters : {name: array}, optional
        The parameters of a model: the error names the layer, and a weight that is not finite.
    gradients : bool
        False: check only the forward pass, for example if a ``LossScaler`` handles overflow of
        gradients.

    Raises
    ------
    NonFiniteError
        Inside the block, from the call whose op returned the first NaN or infinity.

    Notes
    -----
    An ``lse`` of -inf is accepted: it is the value for a row without keys.  Each result is read
    once more, and on a GPU the host waits for it.  Ops without a tape, and ops of other threads,
    are not checked.
    """
    names = {id(array): name for name, array in (parameters or {}).items()}
    outer_watch = tape.watch_results.get()
    last: str | None = None

    def look(op: Any, values: Sequence[Any], result: Any) -> None:
        nonlocal last
        if outer_watch is not None:
            outer_watch(op, values, result)
        last = next((names[id(array)] for array in values if id(array) in names), last)
        gradients_of = {"d" + name for name in op.names}  # an op may return both at once
        back = op.__name__.endswith("_backward")
        results = result if type(result) is tuple else (result,)
        for operand, array in zip(op.contract.outputs, results, strict=True):
            gradient = back or operand.name in gradients_of
            if array is None or (gradient and not gradients):
                continue
            with device_of(array):
                if not fine(operand.name, array):
                    raise _error(op, operand.name, array, values, last, names)

    token = tape.watch_results.set(look)
    try:
        yield
    finally:
        tape.watch_results.reset(token)


def fine(name: str, array: Any) -> bool:
    """Return whether all values of an array are finite; an lse may be -inf."""
    if array.dtype not in FLOATS:
        return True
    wide = array if array.dtype.itemsize > 2 else array.astype(FLOAT32)
    return bool((wide < np.inf).all() if name == "lse" else np.isfinite(wide).all())


def _error(
    op: Any,
    name: str,
    array: Any,
    values: Sequence[Any],
    parameter: str | None,
    names: Mapping[int, str],
) -> NonFiniteError:
    """Return the error: the result, the layer, and the arguments that were already not finite."""
    place = f" at {parameter}" if parameter else ""
    bad = [
        f"{argument} ({names[id(value)]})" if id(value) in names else argument
        for argument, value in zip(op.names, values, strict=True)
        if hasattr(value, "dtype") and not fine(argument, value)
    ]
    before = f"not finite before: {', '.join(bad)}" if bad else "all its arguments are finite"
    where = f"{op.__name__}{place} returned the first value that is not finite"
    message = f"{where}: {name} {tuple(array.shape)} {array.dtype} holds {_count(array)}; {before}"
    return NonFiniteError(message, op.__name__, name, parameter)


def _count(array: Any) -> str:
    """Return in words how many values are not finite, and the index of the first one."""
    wide = array.astype(FLOAT32) if array.dtype.itemsize < FLOAT32.itemsize else array
    bad = ~np.isfinite(wide)
    first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    nans = int(np.isnan(wide).sum())
    return f"{nans} NaN and {int(bad.sum()) - nans} infinities of {bad.size}, the first at {first}"
