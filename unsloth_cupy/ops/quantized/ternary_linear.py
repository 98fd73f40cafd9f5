"""A linear layer whose weight is ternary.

y = x w^T + bias        w[o, d] = codes[o, d] * scale

With int8 activations, x[n] is rounded to integers times a scale, as in int8_quantize, and
y[n, o] = scale[o] * x_scale[n] * sum over d of integers; the gradient of x ignores the rounding.
"""

import copy
import math
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes, native
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.op import Traced, op
from ...core.source import Constants
from ...core.stand_in import representative_steps
from ...core.target import limits
from ...errors import ConfigError, DTypeError, ShapeError, naming
from ..common.gemm import gemm
from ..common.int8_codes import quantized
from ..common.no_kernel import no_kernel
from ..linear.linear import linear
from ._int8_rows import launch_quantize
from ._int8_tiles import launch_product
from ._planes import row_blocks, row_bytes, scales_by_row
from .ternary import ACTIVATIONS, FEW, GROUP_STEP, Ternary
from .ternary_dense import CHUNK, dense_part, launch_codes

COLUMNS = 512  # columns that a warp processes at a time, as in the kernel
# Most rows for which the planes are read; for more, they are converted to codes of one byte in each
# call.  On sm_90 a product of 16 x 8 x 32 takes 3.4 instructions of a warp instead of 7.6, which is
# what the conversion takes at 152 rows; at 268 rows it is the time that memory takes for the codes.
MANY = 256
PAD = 4  # floats of padding per row of sums, as in the kernel: no two lanes share a bank


@naming("ternary_linear", "linear")
def ternary_linear(
    x: Array, weight: Any, *, bias: Array | None = None, activations: str | None = None
) -> Array:
    """Multiply rows by a ternary weight: ``y = x @ weight.T + bias``.

    On a CPU, up to 16 rows of x are multiplied by a CSR form if 88 % of the codes or more are 0.
    The first such product creates the CSR form, which stays with the weight and takes 8 bytes for
    each nonzero code beside ``weight.nbytes``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows; any number of leading axes.
    weight : Ternary
        (outputs, inputs); frozen.
    bias : (outputs,) dtype of x or float32, optional
        Added to each row.
    activations : str, optional
        ``"int8"`` rounds each row of x to integers -127 .. 127 times a scale, so that the product
        is a product of integers; the gradient of x ignores the rounding.

    Returns
    -------
    y : (*rows, outputs) float

    Raises
    ------
    DTypeError
        weight is not a Ternary, or the dtypes of x and bias do not match.
    ConfigError
        activations is neither None nor "int8".
    ShapeError
        The arrays do not fit each other; the message shows the whole call.
    """
    w: Any = weight
    if not isinstance(w, Ternary):
        problem = f"ternary_linear: weight is {type(weight).__name__}, not a Ternary"
        raise DTypeError(f"{problem}; pass ternary_quantize(weight), or call linear")
    rounded: Any = activations
    if not isinstance(rounded, str | None) or activations not in ACTIVATIONS:
        raise ConfigError(f"ternary_linear: activations={activations!r}; choose None or 'int8'")
    if activations is not None and bias is None and (native([x]) or isinstance(x, Traced)):
        scale, group = w.scales.astype(np.float32, copy=False), w.group or GROUP_STEP
        return ternary_linear_forward(x, w.planes, scale, w.marks, group=group, int8=True)
    if activations is not None:
        w = copy.copy(w)
        w.activations = activations
    return linear(x, w, bias)


@op(
    "x(*rows, inputs), planes(outputs, signs, bytes): byte, scale(outputs|1, groups): table,"
    " marks?(outputs, mark_bytes): byte -> y(*rows, outputs)",
    traffic=lambda a: a["x"].nbytes + a["planes"].nbytes + a["scale"].nbytes,
    operations=lambda a: 2 * a["x"].size * len(a["planes"]),
    integers=True,  # products of codes
)
def ternary_linear_forward(
    x: Array,
    planes: Array,
    scale: Array,
    marks: Array | None = None,
    *,
    group: int = GROUP_STEP,
    int8: bool = False,
) -> Array:
    """Return ``x @ w.T`` from the arrays of a ``Ternary``.

    ``marks`` has a bit for every 256 columns of a row of w, set unless all their codes are 0.
    ``group`` is the number of columns that share a scale, if a row has several scales.
    """
    inputs, outputs, scale = x.shape[-1], len(planes), scales_by_row(scale)
    rows: Any = contiguous(x.reshape(math.prod(x.shape[:-1]), inputs))  # (all rows, inputs)
    scales = None
    if int8:
        rows, scales, _ = quantized(rows, np.abs(rows), None)
        rows = rows.astype(x.dtype)
    y = empty((len(rows), outputs), x.dtype, like=x)
    for part in representative_steps(x, row_blocks(outputs, inputs)):
        part_scale = scale if len(scale) == 1 else scale[part]
        w = dense_part(planes[part], part_scale, group, *_all(planes[part], inputs), x.dtype)
        gemm(rows, w.T, out=y[:, part])
    if scales is not None:
        y *= scales[:, None]
    return y.reshape(*x.shape[:-1], outputs)


@ternary_linear_forward.gradient
def ternary_linear_backward(
    dy: Array, x: Array, planes: Array, scale: Array, *, group: int = GROUP_STEP
) -> tuple[Array, None, None, None]:
    """Return dx, ``dy @ w``, computed in chunks of columns of w, which is frozen; and None."""
    rows = contiguous(dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1]))  # (all rows, outputs)
    dx = empty((len(rows), x.shape[-1]), dy.dtype, like=dy)
    for part in representative_steps(dy, row_blocks(x.shape[-1], len(planes))):
        w = dense_part(planes, scale, group, slice(0, len(planes)), part, dy.dtype)
        gemm(rows, w, out=dx[:, part])
    return dx.reshape(x.shape), None, None, None


def _all(planes: Array, columns: int) -> tuple[slice, slice]:
    """Return the slices of all rows and columns."""
    return slice(0, len(planes)), slice(0, columns)


@ternary_linear_forward.require
@ternary_linear_backward.require
def _check(call: str, x: Array, planes: Array, scale: Array, group: int) -> None:
    """Raise ShapeError unless planes and scale fit x and group."""
    row = 2, row_bytes(x.shape[-1])
    if planes.shape[1:] != row:
        raise ShapeError(
            f"{call}: planes are {tuple(planes.shape)}; {x.shape[-1]} columns take {row} per row",
            expected=(len(planes), *row),
            actual=tuple(planes.shape),
        )
    groups = scale.shape[-1]
    if groups != 1 and groups != -(-x.shape[-1] // max(group, 1)):
        problem = f"{call}: scale has {groups} groups; they do not have {group} columns each"
        raise ShapeError(problem, expected=-(-x.shape[-1] // max(group, 1)), actual=groups)


@ternary_linear_forward.kernel
def _launch(
    x: Array, planes: Array, scale: Array, marks: Array | None, group: int, int8: bool
) -> Any:
    """Return y from the kernel; with ``int8`` another kernel rounds x first."""
    outputs, (inputs, groups), plane_bytes = (
        planes.shape[0],
        (x.shape[-1], scale.shape[-1]),
        planes.shape[2],
    )
    rows = x.size // inputs
    aligned = lanes(plane_bytes, planes)
    unsupported = (rows > FEW and not int8) or (groups > 1 and group % GROUP_STEP != 0)
    if unsupported:
        many = f"cuBLAS multiplies {rows} rows, as activations are not int8"
        step = f"the {group} columns of a group are not a multiple of {GROUP_STEP}"
        return no_kernel(many if rows > FEW and not int8 else step)
    if aligned < 4 or x.ndim * outputs == 0:
        return no_kernel("rows of the planes are not aligned to 4 bytes")
    factors: Any = None
    values = x
    if int8:
        values, factors, _ = launch_quantize(x)
    y = empty((*x.shape[:-1], outputs), x.dtype, like=x)
    if rows > MANY and groups == 1 and inputs % CHUNK == 0:
        weight, factor = launch_codes(planes, inputs), scale.reshape(scale.size)
        one = scale.size == 1
        launch_product(y, values, factors, weight, factor, one_scale=one, largest=1)
        return y
    device, wide = limits(x), lanes(inputs, values) * values.dtype.itemsize >= 16
    chosen, shared = _constants(
        *(values.dtype, x.dtype, scale.dtype, rows if rows <= FEW else None, inputs, device.shared),
        *(groups > 1, aligned >= 16, wide, marks is not None),
    )
    tiles, warps = -(-rows // (8 * chosen["N_TILES"])), chosen["WM"] * chosen["WK"]
    blocks = -(-outputs // (16 * chosen["WM"])) * tiles
    if chosen["WHOLE"]:
        blocks = min(blocks, device.processors * chosen["RESIDENT"])
    kernel = load("ternary_linear.cu", "ternary_linear", x, chosen)
    kernel[blocks, 32 * warps, shared](
        *(values, factors, planes, scale, marks, y, rows, inputs, outputs, plane_bytes // 4),
        *(group, groups, groups if scale.size > groups else 0, tiles),
    )
    return y


@cache
def _constants(
    x: Any, y: Any, scale: Any, rows: int | None, inputs: int, sm_bytes: int, *flags: bool
) -> tuple[Constants, int]:
    """Return the constants, and the bytes of shared memory for x and the sums of warps.

    N_TILES, WM and WK:

        rows     integers    16 bits    float32     a block has 16 outputs at a time, and its warps
        <= 8     1, 1, 8     1, 1, 8    1, 1, 4     share the columns: all SMs have loads in flight,
        <= 16    2, 1, 8     2, 1, 4    2, 1, 2     even for few outputs
        more     8, 8, 1                            64 rows by 128 outputs: weights are decoded
                                                    once for 64 rows; up to MANY rows, if
                                                    int8_linear.cu can take more

    Few rows stay in shared memory for all outputs of a block (WHOLE), if they take less than half
    of the shared memory of an SM, ``sm_bytes``.  Then 24 warps of an SM read ahead, or 16 where
    they need more registers; with scales of groups reading ahead spills registers.  Otherwise,
    with less than 128 KiB of shared memory, half as many warps share the columns.
    """
    grouped, wide, x_wide, marked = flags
    # bytes of a value in shared memory: float32 is split into three parts of 16 bits
    size, cell = x.itemsize, 6 if x.itemsize == 4 else x.itemsize
    n_tiles, wm, wk, held, whole, resident = 8, 8, 1, 64, False, 0
    shared = 64 * max(COLUMNS * cell, (16 * wm + PAD) * 4)
    if rows is not None:
        n_tiles, wm, held = 1 if rows <= 8 else 2, 1, 1 << (rows - 1).bit_length()
        needed = 1 << (-(-inputs // COLUMNS) - 1).bit_length()
        wk = min(8, 16 // size // n_tiles, needed)
        turn, sums = wk * held * COLUMNS * cell, 2 * wk * held * (16 + PAD) * 4
        shared = -(-inputs // (wk * COLUMNS)) * turn + sums
        whole = not grouped and shared <= sm_bytes // 2 - 1024  # two blocks fit
        if not whole:
            wk = min(wk, (16 if sm_bytes >= 2**17 else 8) // size // n_tiles)
            shared = wk * held * max(COLUMNS * cell, (16 + PAD) * 4)
            # float32: 2 blocks, else ptxas spills to save registers for blocks that shared memory
            # does not allow; 0: ptxas chooses
            resident = 2 if size == 4 else 0
        else:
            warps = 24 if n_tiles == 1 and size < 4 and wide else 16
            resident = max(1, min(warps // wk, sm_bytes // (shared + 1024)))  # 1 KiB is reserved
    chosen = Constants(
        X=x,
        T=y,
        S=scale,
        N_TILES=n_tiles,
        ROWS=held,
        WHOLE=whole,
        RESIDENT=resident,
        WM=wm,
        WK=wk,
        GROUPED=grouped,
        WIDE=wide,
        X_WIDE=x_wide,
        MARKED=marked,
    )
    return chosen, shared
