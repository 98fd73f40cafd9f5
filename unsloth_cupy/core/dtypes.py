"""The dtypes that operands of each kind may have."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from ..errors import ConfigError

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]  # or an array of another library
else:
    Array = np.ndarray  # help() prints this short name

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64"))
FLOAT32 = FLOATS[2]


class Stored:
    """A matrix stored in fewer bits than its dtype; matrix products accept it as it is."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # dtype of products, unless the other operand has another one
    home: Any  # one of the arrays that store the matrix: its library and device
    computed_in: Callable[[Any], Any]  # (dtype): the same matrix with that dtype
    product: Callable[[Any, Any, bool], None]  # (a, out, add): out = a @ self, or out += a @ self
    dense_where: Callable[[Any, Any], Any]  # (offsets, dtype) of a stack: matrices of the groups
    trained = False  # whether the matrix has a gradient


NOT_ARRAYS = (int, Stored, type(None))  # accepted in place of an array
KINDS: Mapping[str, tuple[np.dtype[Any], ...]] = {
    "float": FLOATS,  # the dtype of the call
    "weight": FLOATS,  # the dtype of the call, or a Stored matrix
    "param": FLOATS,  # the dtype of the call, or float32
    "table": FLOATS,  # as param, but a constant: it has no gradient
    "constant": FLOATS,  # any float; it has no gradient
    "scale": (FLOATS[2], FLOATS[0], FLOATS[3]),  # scales of a quantized weight; no gradient
    "stat": FLOATS[2:],  # float32; float64 where the dtype of the call is float64
    "int": (np.dtype("int32"), np.dtype("int64")),
    "bool": (np.dtype("bool"),),
    "byte": (np.dtype("uint8"),),
    "code": (np.dtype("int8"),),
    # results of casts; float64 too, in which tests compare gradients with finite differences
    **{dtype.name: (dtype, FLOATS[3]) for dtype in FLOATS[:3]},
    "none": (),  # an output that is always None: the gradient of an integer
}
LEADING = ("float", "weight")  # the first operand of these kinds sets the dtype of the call
DIFFERENTIABLE = ("float", "weight", "param", "stat")
KERNEL_DTYPES = FLOATS[:3]  # float64 runs the definition, in checks of gradients


NUMBERS = re.compile(r"(torch\.)?(u?int|b?float)\d+")  # str() of such a dtype in any library


def holds_numbers(array: Any) -> bool:
    """Return whether an array of any library has a dtype of integers or floats."""
    return NUMBERS.fullmatch(str(getattr(array, "dtype", ""))) is not None


def allowed(kind: str, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes that an operand of this kind may have in a call of this dtype."""
    if kind in LEADING:
        return (dtype,) if dtype in FLOATS else FLOATS
    if kind in ("param", "table"):
        return (dtype,) if dtype == FLOAT32 else (dtype, FLOAT32)
    if kind == "stat":
        return (FLOATS[3],) if dtype == FLOATS[3] else (FLOAT32,)
    return KINDS[kind]


def float_dtype(call: str, value: Any, known: Sequence[np.dtype[Any]] = FLOATS) -> np.dtype[Any]:
    """Return an option ``dtype`` as a NumPy dtype; raise ConfigError if it is not in ``known``."""
    try:
        dtype = np.dtype(value if isinstance(value, str | np.dtype | type) else object)
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype not in known:
        names = ", ".join(each.name for each in known)
        raise ConfigError(f"{call}: dtype={value!r}; choose from {names}")
    return dtype
