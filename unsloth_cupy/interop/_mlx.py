"""Converts between arrays of MLX and of NumPy."""

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
    """Return a NumPy view of an array; raise if the call would break a gradient.

    An evaluated array has no graph, unless a gradient is being traced.
    """
    try:
        mx.eval(array)
    except ValueError as error:
        problem = "is traced by mx.compile or mx.vmap, which this call does not support"
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
