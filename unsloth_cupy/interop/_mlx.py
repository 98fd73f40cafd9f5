"""Arrays of MLX over the memory of NumPy, and back."""

import io
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.dtypes import BFLOAT16
from ..errors import FrameworkError

stream: Any = nullcontext
CURE = "wrap the call in mx.custom_function, and take numpy.asarray of its arguments"


def adopt(array: Any) -> Any:
    """Return NumPy's view of an array; raise where a gradient would pass it by.

    An array that is evaluated has no graph behind it, but where a gradient is to go back.
    """
    try:
        mx.eval(array)
    except ValueError as error:
        problem = "is traced by mx.compile or mx.vmap, which this call does not enter"
        raise FrameworkError(f"{problem}: {CURE}") from error
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    if "label" in graph.getvalue():
        raise FrameworkError(f"is traced by mx.grad, which does not see this call: {CURE}")
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(BFLOAT16)
    return np.asarray(array)


def give_back(array: Any, operand: Any) -> Any:
    """Return a result as an array of MLX."""
    if array.dtype == BFLOAT16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)
