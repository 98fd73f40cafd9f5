"""The merged weight of a base and its low-rank adapter, and DoRA's norms of the merged rows.

merged = factor * (weight + scale * b a)        factor = magnitude / norm; 1 without magnitude
norm = sqrt(sum((weight + scale * b a)**2)), for each row

``lora_add_`` adds in the same order on every device.  A weight that is quantized next is then
quantized from equal bits, here and when a file is written on another machine.

Hu et al., LoRA, 2021.  Liu et al., DoRA, 2024.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array, Stored
from ...core.kernel import load
from ...core.op import Traced, op
from ...core.source import Constants
from ...core.stand_in import representative_steps
from ...errors import DTypeError, ShapeError
from ..common.gemm import gemm, steps
from ..common.no_kernel import no_kernel
from ..elements.cast import cast

AT_ONCE = 2**15  # values that NumPy adds to at a time: 128 KiB in float32, which stay in cache
THREADS = 256  # of a block of the kernel
# Rows of a thread with 8 values of each row; others have 4.  With 16 sums at most, no card runs
# fewer than 62 % of its warps.
ROWS = {8: 2}
FACTOR = ("row_norms", "dora_factor")  # the ops that factor_of calls


@op(
    "weight(outputs, inputs): weight, a(rank, inputs): param, b(outputs, rank): param,"
    " magnitude?(outputs): param -> merged(outputs, inputs)",
    widen=False,  # products take 16-bit operands as they are
    no_gradient="adapters are merged after training",
)
def lora_merge(
    weight: Array, a: Array, b: Array, *, magnitude: Array | None = None, scale: float = 1.0
) -> Array:
    """Return ``weight + scale * b @ a``, its rows scaled to the norms in magnitude, if passed.

    ``linear`` with the merged weight computes the same as ``lora_linear`` with weight, a and b.

    Parameters
    ----------
    weight, a, b, magnitude, scale
        As in ``lora_linear``.

    Returns
    -------
    merged : (outputs, inputs) dtype of weight
        A new array, rounded once.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    wide = sum_dtype(weight)
    merged = weight.astype(wide)
    gemm(times(b, scale, wide), a.astype(wide, copy=False), out=merged, add=True)
    if magnitude is not None:
        norms = row_norms.definition(weight, a, b, scale=scale)
        merged *= (magnitude * _inverse(norms))[:, None]
    return merged.astype(weight.dtype, copy=False)


def lora_sum(weight: Any, a: Array, b: Array, scale: float) -> Array:
    """Return ``weight + scale b a`` by ``lora_add_``, in float32 or float64.

    For a stack (experts, outputs, inputs), the first axis of a and b is experts, too.
    """
    wide = np.promote_types(weight.dtype, FLOAT32)
    if len(weight.shape) == 3:
        total = empty(weight.shape, wide, like=a)
        for expert in range(len(weight)):
            total[expert] = lora_sum(weight[expert], a[expert], b[expert], scale)
        return total
    factors = (each.astype(wide, copy=False) for each in (a, b))
    return lora_add_(weight.astype(wide), *factors, scale=float(scale))


@op(
    "w(outputs, inputs), a(rank, inputs), b(outputs, rank) -> sum(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, which is quantized next; straight_gradients has the gradient",
    traffic=lambda a: 2 * a["w"].nbytes + a["a"].nbytes + a["b"].nbytes,
    operations=lambda a: 2 * a["w"].size * a["a"].shape[0],
)
def lora_add_(w: Array, a: Array, b: Array, *, scale: float = 1.0) -> Array:
    """Add ``scale b a`` to w and return w; its bits depend on no device, BLAS or threads.

    Each value is ``((b[0] a[0] + b[1] a[1]) + ...) + w``, with b multiplied by the scale first;
    every product and sum is rounded.
    """
    wide = np.promote_types(w.dtype, FLOAT32)
    columns = b.astype(wide, copy=False) * wide.type(scale)
    rows = a.astype(wide, copy=False)
    step = max(1, AT_ONCE // max(1, w.shape[1]))
    for top in representative_steps(w, range(0, len(w), step)):
        part = slice(top, min(top + step, len(w)))
        total, term = (empty(w[part].shape, wide, like=w) for _ in range(2))
        total[...] = 0
        for rank in representative_steps(w, range(len(rows))):
            np.multiply(columns[part, rank, None], rows[rank], out=term)
            np.add(total, term, out=total)
        w[part] = total + w[part].astype(wide, copy=False)
    return w


@lora_add_.kernel
def _launch(w: Array, a: Array, b: Array, scale: float) -> Any:
    """Launch the kernel that adds to w, and return w."""
    if not w.flags.c_contiguous:
        return no_kernel("w is not contiguous")
    a, b, (outputs, inputs) = contiguous(a), contiguous(b), w.shape
    width = lanes(inputs, w, a)
    tiles = -(-inputs // (THREADS * width))  # width divides inputs, or is 1
    chosen = _constants(w.dtype, width)
    kernel = load("lora_add.cu", "lora_add_", w, chosen)
    blocks = tiles * -(-outputs // chosen["ROWS"])
    kernel[blocks, THREADS](w, a, b, outputs, inputs // width, a.shape[0], tiles, scale)
    return w


@cache
def _constants(dtype: Any, lanes: int) -> Constants:
    """Return the constants of lora_add.cu."""
    return Constants(T=dtype, LANES=lanes, ROWS=ROWS.get(lanes, 4), THREADS=THREADS)


@op(
    "weight(outputs, inputs): weight, a(rank, inputs): param, b(outputs, rank): param"
    " -> norm(outputs): stat",
    widen=False,
    no_gradient="DoRA treats the norms as constants",
    constant=True,
)
def row_norms(weight: Array, a: Array, b: Array, *, scale: float = 1.0) -> Array:
    """Return the norm of each row of ``weight + scale * b @ a``."""
    wide, (outputs, inputs) = sum_dtype(weight), weight.shape
    norms = empty((outputs,), wide, like=a)  # weight may be quantized
    if not weight.size:
        norms[...] = 0
        return norms
    step = steps(outputs, inputs, inputs)[0]
    for top in range(0, outputs, step):
        part = slice(top, top + step)
        rows = gemm(times(b[part], scale, a.dtype), a, dtype=wide)
        rows += weight[part]
        norms[part] = np.sqrt(np.square(rows, out=rows).sum(axis=1))
    return norms


@op("magnitude(outputs), norm(outputs): table -> factor(outputs)", autocast="float32")
def dora_factor(magnitude: Array, norm: Array) -> Array:
    """Return ``magnitude / norm``, DoRA's factor of each column of y; 0 where the norm is 0."""
    return magnitude * _inverse(norm)


@dora_factor.gradient
def dora_factor_backward(dfactor: Array, norm: Array) -> tuple[Array, None]:
    """Return the gradient of the magnitude; the norm is a constant."""
    return dfactor * _inverse(norm), None


def factor_of(call: str, weight: Any, a: Any, b: Any, scale: float, magnitude: Any) -> Any:
    """Return DoRA's factor, on a tape if magnitude is on a tape; None without a magnitude.

    It is also None if weight, a and b do not fit each other: the op that is called next raises.
    """
    if magnitude is None:
        return None
    shapes = [tuple(getattr(array, "shape", ())) for array in (weight, a, b)]
    if [*map(len, shapes)] != [2, 2, 2] or shapes[2] + shapes[1] != (
        shapes[0][0], shapes[1][0], shapes[1][0], shapes[0][1],
    ):  # fmt: skip
        return None
    shape, rows = getattr(magnitude, "shape", None), shapes[0][:1]
    if shape is None:
        kind = type(magnitude).__name__
        raise DTypeError(f"{call}: magnitude is not an array but {kind}; pass one of shape {rows}")
    if tuple(shape) != rows:
        problem = f"magnitude has shape {tuple(shape)}; it must be {rows}"
        cure = "one number for each row of weight"
        raise ShapeError(f"{call}: {problem}, {cure}", expected=rows, actual=tuple(shape))
    base: Any = _plain(weight)
    dtype = str(a.dtype).rpartition(".")[2]  # torch.float16 -> float16
    if isinstance(base, Stored) and base.dtype.name != dtype:
        base = base.computed_in(dtype)
    norms: Any = row_norms(base, _plain(a), _plain(b), scale=scale)
    narrow = str(getattr(magnitude, "dtype", "")).endswith("float32")
    return dora_factor(magnitude, cast(norms, "float32") if narrow else norms)


def sum_dtype(array: Any) -> Any:
    """Return the dtype for sums over an array: float32, or float64 for float64."""
    return np.promote_types(array.dtype, FLOAT32)


def times(array: Array, factor: Array | float, dtype: Any = None) -> Array:
    """Return the product, computed in float32 and rounded once."""
    product = array.astype(sum_dtype(array), copy=False) * factor
    return product.astype(array.dtype if dtype is None else dtype, copy=False)


def _plain(array: Any) -> Any:
    """Return the array of a variable on a tape; return any other array as it is."""
    return array.value if isinstance(array, Traced) else array


def _inverse(norm: Array) -> Array:
    """Return 1 / norm; 0 where norm is 0."""
    return np.where(norm > 0, 1, 0) / np.where(norm > 0, norm, 1)
