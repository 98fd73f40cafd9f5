"""A step of one parameter by a rule on float32 arrays, for NumPy and CuPy without kernels."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import Array, allowed
from ...core.stand_in import representative_steps

BLOCK = 32768  # elements: blocks of all arrays of a step and a temporary fit in a core's cache


def gradient_dtypes(tensor: Any) -> tuple[Any, Any]:
    """Return the dtypes that a gradient may have: the dtype of the model, and float32.

    ``tensor`` is a named tuple of a parameter, its 16-bit copy or None, and its states.
    """
    model = tensor.parameter if tensor.copy is None else tensor.copy
    return model.dtype, allowed("param", model.dtype)[-1]


def blocks(arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield views of blocks of elements of arrays of one size; None stays None.

    Arrays on a GPU, and arrays that are not in C order, are one block.
    """
    lead, operands = arrays[0], [array for array in arrays if array is not None]
    if not (isinstance(lead, np.ndarray) and all(a.flags.c_contiguous for a in operands)):
        if lead.size:
            yield [*arrays]
        return
    flat = [array if array is None else array.reshape(-1) for array in arrays]
    for start in representative_steps(lead, range(0, lead.size, BLOCK)):
        yield [array if array is None else array[start : start + BLOCK] for array in flat]


def host_step(
    rule: Callable[..., None],
    tensor: Any,
    gradient: Array,
    *,
    factor: float,
    whole: bool = False,
    **options: Any,
) -> None:
    """Call ``rule(parameter, gradient, *states, **options)``, which changes all but the gradient.

    The rule gets parameter and gradient in the dtype of the states, float32 or float64; a 16-bit
    parameter is rounded once, and so is its copy.  The rule gets blocks of elements, unless it
    needs the ``whole`` arrays.
    """
    arrays = [gradient, *tensor]
    for part, parameter, copy, *states in [arrays] if whole else blocks(arrays):
        wide = allowed("stat", parameter.dtype)[0]
        x, g = (array.astype(wide, copy=False) for array in (parameter, part))
        rule(x, g if factor == 1 else g * wide.type(factor), *states, **options)
        if x is not parameter:
            parameter[...] = x
        if copy is not None:
            with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
                copy[...] = x
