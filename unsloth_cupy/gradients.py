"""What happens to gradients between the backward pass and the optimizer."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _arrays
from ._options import is_number
from ._signature import FLOATS
from ._typing import Array
from .errors import ConfigError, DTypeError, FrameworkError

BLOCK = 65536  # elements widened at a time: they stay in the cache


def clip_gradients(gradients: Mapping[str, Array], max_norm: float) -> float:
    """Scale gradients in place so that their common norm is at most max_norm.

    ``norm = sqrt(sum of all squares)``, accumulated in float64;
    ``gradient *= max_norm / norm`` where norm is above max_norm.

    Parameters
    ----------
    gradients : {name: array}
        NumPy or CuPy arrays of a float dtype, writable.
    max_norm : float
        Above 0; infinity only measures.

    Returns
    -------
    norm : float
        The norm before scaling.  Where it is not finite, no gradient has changed: skip the step.

    Raises
    ------
    ConfigError
        max_norm is not above 0, or a gradient is read-only.
    DTypeError, FrameworkError
        A gradient is no float array of NumPy or CuPy.

    Notes
    -----
    Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
    networks, 2013.
    """
    if not is_number(max_norm) or not max_norm > 0:
        raise ConfigError(f"clip_gradients: max_norm={max_norm}; pass a number above 0")
    check_in_place("clip_gradients", gradients)
    norm = math.sqrt(float(sum(_square_sum(gradient) for gradient in gradients.values())))
    if max_norm < norm < math.inf:
        for gradient in gradients.values():
            wide = np.promote_types(gradient.dtype, np.float32)  # a 16-bit factor would be off
            np.multiply(gradient, max_norm / norm, out=gradient, dtype=wide, casting="same_kind")
    return norm


def check_mapping(what: str, arrays: Any) -> None:
    """Raise for anything but arrays by name."""
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"{what}: pass {{name: array}}, not {type(arrays).__name__}")


def check_floats(what: str, arrays: Mapping[str, Array]) -> None:
    """Raise unless these are float arrays of NumPy or CuPy, by name."""
    check_mapping(what, arrays)
    for name, array in arrays.items():
        library = _arrays.framework_of(array, f"{what}: {name}")
        if library not in ("numpy", "cupy"):
            raise FrameworkError(f"{what}: {name} comes from {library}; pass NumPy or CuPy arrays")
        if array.dtype not in FLOATS:
            raise DTypeError(f"{what}: {name} is {array.dtype}; pass float arrays only")


def check_in_place(what: str, arrays: Mapping[str, Array]) -> None:
    """Raise unless these are float arrays of NumPy or CuPy that may be changed in place."""
    check_floats(what, arrays)
    for name, array in arrays.items():
        if not getattr(array.flags, "writeable", True):  # CuPy's arrays have no such flag
            raise ConfigError(f"{what}: {name} is read-only; pass a copy of it")


def _square_sum(gradient: Any) -> Any:
    flat = gradient.reshape(-1)
    size = BLOCK if isinstance(flat, np.ndarray) else max(flat.size, 1)
    total = np.zeros_like(flat, np.float64, shape=())
    for start in range(0, flat.size, size):
        wide = flat[start : start + size].astype(np.float64, copy=False)
        total += np.dot(wide, wide)
    return total
