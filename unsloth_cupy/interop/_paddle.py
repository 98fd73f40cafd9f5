"""Converts between tensors of PaddlePaddle and arrays of NumPy or CuPy."""

from typing import Any

import numpy as np
import paddle

from ..core.dtypes import BFLOAT16
from ..core.frameworks import cupy
from ..errors import FrameworkError
from . import _waiting

stream = _waiting.stream


def adopt(tensor: Any) -> Any:
    """Return a tensor as an array of NumPy or CuPy; raise if the call would break a gradient."""
    if not isinstance(tensor, paddle.Tensor):
        raise FrameworkError("is a symbol of a static graph, which this call does not support")
    if not tensor.stop_gradient and paddle.is_grad_enabled():
        raise FrameworkError(
            "requires a gradient, and Paddle's autograd does not see this call: wrap it in a"
            " paddle.autograd.PyLayer, or pass .detach()"
        )
    tensor = tensor.detach()
    if tensor.place.is_gpu_place():
        return cupy().from_dlpack(tensor)
    if tensor.dtype == paddle.bfloat16:  # NumPy's DLPack does not support it
        return np.from_dlpack(tensor.view("int16")).view(BFLOAT16)
    return np.from_dlpack(tensor)


def give_back(array: Any, operand: Any) -> Any:
    """Return a result as a tensor on the device of an operand."""
    if not isinstance(array, np.ndarray):
        return paddle.from_dlpack(array)
    if array.dtype == BFLOAT16:
        return paddle.to_tensor(array.view(np.int16), place=operand.place).view("bfloat16")
    return paddle.to_tensor(array, place=operand.place)
