"""A few rows times a 4-bit weight, whose codes are read once and decoded inside the product.

out[n, o] = sum over d of x[n, d] * level[code[o, d]] * absmax        + out, with add
"""

from functools import cache
from typing import Any

from ...core.arrays import contiguous, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import limits
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ..common.strides import spanned
from . import _four_bits
from .nf4_dequantize import check_held, sizes_of

FEW = 16  # most rows; of more, cuBLAS multiplies chunks that are decoded once for all rows
MANY_OUTPUTS = 2048  # from here on blocks of 32 outputs keep all SMs busy
UNITS = (64, 32)  # aligned columns that always share an absmax
WARPS, RESIDENT = 8, 2  # warps of a block, blocks of an SM


@op(
    "out(few, outputs): param, x(few, inputs), packed(bytes): byte, absmax(scales): scale,"
    " absmax_codes?(blocks): byte -> product(few, outputs): param = out",
    widen=False,
    no_gradient="it changes an array; linear has a gradient",
    traffic=lambda a: sum(each.nbytes for each in a.values() if each is not None),
    operations=lambda a: 2 * a["x"].size * a["out"].shape[1],
)
def nf4_product_(
    out: Array,
    x: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None = None,
    *,
    block: int = 64,
    kind: str = "nf4",
    add: bool = False,
) -> Array:
    """Write ``x @ w.T`` to out, or add it; ``nf4_dequantize_`` describes the arrays of w."""
    outputs, inputs = out.shape[1], x.shape[1]
    whole = slice(0, outputs), slice(0, inputs)
    sizes = sizes_of(absmax, absmax_codes)
    w = _four_bits.decode(packed, sizes, *whole, inputs, block, kind)
    return gemm(x, w.astype(x.dtype, copy=False).T, out=out, add=add)


@nf4_product_.require
def _check(
    call: str,
    out: Array,
    x: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    block: int,
    kind: str,
) -> None:
    """Raise ShapeError unless the arrays store the whole weight."""
    inputs = x.shape[1]
    check_held(call, packed, absmax, absmax_codes, inputs, out.shape[1] * inputs, block, kind)


def has_kernel(x: Array, out: Array) -> bool:
    """Return whether the kernel supports x and out: few rows, whole units, dense rows of out."""
    known = x.dtype in KERNEL_DTYPES and out.dtype in (x.dtype, FLOAT32)
    size, (rows, outputs), (down, right) = out.dtype.itemsize, out.shape, out.strides
    dense = outputs == 1 or right == size
    separate = rows == 1 or (down >= outputs * size and down % size == 0)
    few = 0 < rows <= FEW
    return known and few and dense and separate and x.shape[1] % UNITS[-1] == 0


@nf4_product_.kernel
def _launch(
    out: Array,
    x: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    block: int,
    kind: str,
    add: bool,
) -> Any:
    """Write or add the product to out by the kernel, and return out."""
    whole = all(a is None or a.flags.c_contiguous for a in (packed, absmax, absmax_codes))
    if not whole:
        return no_kernel("codes or absmax are not contiguous")
    if not has_kernel(x, out):
        sizes = f"{len(x)} rows of {x.shape[1]} in {x.dtype}"
        takes = f"takes up to {FEW} contiguous rows of a multiple of {UNITS[-1]} columns"
        return no_kernel(f"{sizes}, to {out.dtype}: the kernel {takes}")
    size = x.dtype.itemsize
    if x.strides[1] != size or not 0 < x.strides[0] < 2**28:  # the kernel counts in 32 bits
        x = contiguous(x)
    x_stride = x.strides[0] // size
    (rows, outputs), inputs = out.shape, x.shape[1]
    unit = next(u for u in UNITS if inputs % u == 0 and u <= block)
    # a lane reads unit / 8 bytes of codes in one access; rows of x in accesses of 16 bytes
    wide, x_wide = lanes(unit // 8, packed) == unit // 8, lanes(x_stride, x) * size == 16
    double = absmax_codes is not None and kind not in _four_bits.EXPONENTS
    scales = absmax if absmax_codes is None else absmax_codes
    # neighbouring units have neighbouring absmax: this many of them in one access
    side = lanes(inputs // unit, scales) if block == unit else 1
    chosen = _constants(
        *(
            x.dtype,
            out.dtype,
            absmax.dtype,
            unit,
            rows,
            outputs >= MANY_OUTPUTS,
            wide,
            side,
            x_wide,
            kind,
        ),
        *(double, add),
    )
    kernel = load("nf4_product.cu", "nf4_product_", x, chosen)
    out_stride = out.strides[0] // out.dtype.itemsize
    tasks = -(-outputs // (16 * chosen["TILES"])) * -(-rows // chosen["ROWS"])
    # persistent blocks: each builds its table of levels once
    blocks = min(tasks, limits(x).processors * RESIDENT)
    kernel[blocks, 32 * WARPS](
        *(spanned(out), spanned(x), packed, absmax, absmax_codes, rows, outputs, inputs),
        *((block // unit).bit_length() - 1, x_stride, out_stride),
    )
    return out


@cache
def _constants(
    dtype: Any,
    out: Any,
    absmax: Any,
    unit: int,
    rows: int,
    many: bool,
    wide: bool,
    side: int,
    x_wide: bool,
    kind: str,
    double: bool,
    add: bool,
) -> Constants:
    """Return the constants of nf4_product.cu.

        rows       TILES, UNITS   a lane reads
        <= 4       1, 4           64 bytes of codes, while 64 more are in flight
        <= 8       2, 2           64 bytes, too; 4 rows of x have as many bytes as the codes of 16
                                  outputs, so a block of 32 outputs reads less; few outputs: 1, 2
        <= 16      2, 1           32 bytes: x, sums and codes fill the registers
        float32    1, 1           levels are decoded one by one, and each is multiplied by all rows;
                                  the sums of 4 rows fill the registers

    Eight warps share the columns: the 256 tasks of 4096 outputs keep all SMs busy.
    """
    exact = dtype == FLOAT32  # tensor cores would round x to fewer bits
    tiles = 2 if rows > 4 and many and not exact else 1
    units = 1 if exact or rows > 8 else 2 if rows > 4 else 4
    return Constants(
        T=dtype,
        O=out,
        S=absmax,
        UNIT=unit,
        UNITS=units,
        ROWS=4 if exact else 8 if rows <= 8 else 16,
        TILES=tiles,
        WARPS=WARPS,
        RESIDENT=RESIDENT,
        WIDE=wide,
        SIDE_BY_SIDE=units > 1 and side % units == 0,
        X_WIDE=x_wide,
        KIND=_four_bits.KINDS.index(kind),
        DOUBLE=double,
        ADD=add,
    )
