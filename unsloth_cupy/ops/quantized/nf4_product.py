"""Few rows times a weight of 4 bits, which is read packed, once.

out[n, o] = sum over d of x[n, d] * level[code[o, d]] * absmax        + out, where it is added
"""

from functools import cache
from typing import Any

from ...core.arrays import lanes
from ...core.arrays import packed as in_order
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ..common.strides import spanned
from . import _four_bits
from .nf4_dequantize import check_held, sizes_of

FEW = 16  # rows; with more, cuBLAS reads chunks whose levels are made once for all of them
MANY_OUTPUTS = 2048  # so many give the SMs enough to read where a block has 32
UNITS = (64, 32)  # columns that share an absmax wherever they lie
WARPS = 8


@op(
    "out(few, outputs): param, x(few, inputs), packed(bytes): byte, absmax(scales): stat,"
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
    fp4: bool = False,
    add: bool = False,
) -> Array:
    """Write ``x @ w.T`` over out, or add it; ``nf4_dequantize_`` says what a weight is kept in."""
    outputs, inputs = out.shape[1], x.shape[1]
    whole = slice(0, outputs), slice(0, inputs)
    sizes = sizes_of(absmax, absmax_codes)
    w = _four_bits.decode(packed, sizes, *whole, inputs, block, fp4)
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
) -> None:
    inputs = x.shape[1]
    check_held(call, packed, absmax, absmax_codes, inputs, out.shape[1] * inputs, block)


def has_kernel(x: Array, out: Array) -> bool:
    """Say whether the kernel multiplies these rows: a few, of whole units, side by side in out."""
    known = x.dtype in KERNEL_DTYPES and out.dtype in (x.dtype, FLOAT32)
    size, (rows, outputs), (down, right) = out.dtype.itemsize, out.shape, out.strides
    dense = outputs == 1 or right == size
    apart = rows == 1 or (down >= outputs * size and down % size == 0)
    few = 0 < rows <= FEW
    return known and few and dense and apart and x.shape[1] % UNITS[-1] == 0


@nf4_product_.kernel
def _launch(
    out: Array,
    x: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    block: int,
    fp4: bool,
    add: bool,
) -> Any:
    whole = all(a is None or a.flags.c_contiguous for a in (packed, absmax, absmax_codes))
    if not whole:
        return no_kernel("codes or absmax are not packed")
    if not has_kernel(x, out):
        sizes = f"{len(x)} rows of {x.shape[1]} in {x.dtype}"
        units = f"takes up to {FEW} rows of whole {UNITS[-1]}, packed"
        return no_kernel(f"{sizes}, to {out.dtype}: the kernel {units}")
    size = x.dtype.itemsize
    if x.strides[1] != size or not 0 < x.strides[0] < 2**28:  # a kernel counts in 32 bits
        x = in_order(x)
    x_apart = x.strides[0] // size
    (rows, outputs), inputs = out.shape, x.shape[1]
    unit = next(u for u in UNITS if inputs % u == 0 and u <= block)
    wide, x_wide = lanes(unit // 8, packed) == unit // 8, lanes(x_apart, x) * size == 16
    double = absmax_codes is not None
    chosen = _constants(
        x.dtype, out.dtype, unit, rows, outputs >= MANY_OUTPUTS, wide, x_wide, fp4, double, add
    )
    kernel = load("nf4_product.cu", "nf4_product_", x, chosen)
    apart = out.strides[0] // out.dtype.itemsize
    blocks = -(-outputs // (16 * chosen["TILES"])) * -(-rows // chosen["ROWS"])
    kernel[blocks, 32 * WARPS](
        *(spanned(out), spanned(x), packed, absmax, absmax_codes, rows, outputs, inputs),
        *((block // unit).bit_length() - 1, x_apart, apart),
    )
    return out


@cache
def _constants(
    dtype: Any,
    out: Any,
    unit: int,
    rows: int,
    many: bool,
    wide: bool,
    x_wide: bool,
    fp4: bool,
    double: bool,
    add: bool,
) -> Constants:
    """Return the constants of nf4_product.cu.

        rows       TILES, UNITS   a lane reads
        <= 4       1, 4           64 bytes of codes, and as many are under way meanwhile
        <= 8       2, 2           the same; 4 rows of x are as much as the codes of 16 outputs, so
                                  that a block of 32 reads less, and 1, 2 with few outputs
        <= 16      2, 1           half of it: x, sums and codes fill the registers
        float32    1, 1           levels are made one by one, and each is multiplied by every row,
                                  of which the sums of 4 fill the registers

    Eight warps share the columns: 256 blocks, of 4096 outputs, have all SMs at work.
    """
    exact = dtype == FLOAT32
    tiles = 2 if rows > 4 and many and not exact else 1
    return Constants(
        T=dtype,
        O=out,
        UNIT=unit,
        UNITS=1 if exact or rows > 8 else 2 if rows > 4 else 4,
        ROWS=4 if exact else 8 if rows <= 8 else 16,
        TILES=tiles,
        WARPS=WARPS,
        RESIDENT=2,
        WIDE=wide,
        X_WIDE=x_wide,
        FP4=fp4,
        DOUBLE=double,
        ADD=add,
    )
