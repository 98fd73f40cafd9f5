"""Converts between tensors of TensorFlow and arrays of NumPy or CuPy.

TensorFlow's kernels need memory aligned to 64 bytes, which NumPy's seldom is: results on a CPU are
copied.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record

from ..core.frameworks import cupy
from ..errors import FrameworkError
from . import _waiting

CURE = "wrap the call in tf.custom_gradient and tf.numpy_function"


def adopt(tensor: Any) -> Any:
    """Return a tensor as an array of NumPy or CuPy; raise if the call would break a gradient."""
    tensor = _value(tensor)
    if not isinstance(tensor, tf.Tensor):
        raise FrameworkError(f"is {type(tensor).__name__} of TensorFlow; pass a dense tensor")
    if not hasattr(tensor, "__dlpack__"):
        raise FrameworkError(
            f"is a symbol of tf.function, which this call does not support: {CURE}"
        )
    if record.should_record_backprop([tensor]):
        raise FrameworkError(f"is watched by tf.GradientTape, which does not see this call: {CURE}")
    if forwardprop_util.pack_tangents([tensor]).tangents:
        problem = "is watched by ForwardAccumulator, and there is no forward mode"
        raise FrameworkError(f"{problem}; take the gradient by tf.GradientTape: {CURE}")
    return cupy().from_dlpack(tensor) if _on_gpu(tensor) else np.asarray(tensor)


def give_back(array: Any, operand: Any) -> Any:
    """Return a result as a tensor on the device of an operand."""
    if not isinstance(array, np.ndarray):
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device(operand.device):
        return tf.convert_to_tensor(array)


def stream(tensor: Any) -> AbstractContextManager[None]:
    """Wait for the GPU after the block if a tensor is on one."""
    return _waiting.stream(_value(tensor))


def _value(tensor: Any) -> Any:
    """Return the tensor of a variable, any other object as it is."""
    return tensor.value() if isinstance(tensor, tf.Variable) else tensor


def _on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is on a CUDA GPU."""
    return bool(tensor.__dlpack_device__()[0] == 2)
