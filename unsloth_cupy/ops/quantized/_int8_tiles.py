"""The tiles of an int8 matrix product, and its launch.

bytes = stages * (rows + outputs) * pitch        pitch = depth, plus 16 unless 128 divides depth
"""

from functools import cache
from typing import Any, NamedTuple

from ...core.arrays import lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import Limits, limits


class Tiles(NamedTuple):
    """The tile of a block, and how its warps divide it."""

    rows: int
    outputs: int
    depth: int  # inputs of a stage
    stages: int  # stages of the ring in shared memory
    down: int  # warps along rows
    right: int  # warps along outputs

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.down * self.right

    @property
    def bytes(self) -> int:
        """The shared memory of a block, in bytes."""
        # rows of 128 bytes are swizzled; others are padded, so that no two share a bank
        pitch = self.depth if self.depth % 128 == 0 else self.depth + 16
        return self.stages * (self.rows + self.outputs) * pitch


# Tiles, by the largest number of rows that uses them; of each, the first two of which fit into an
# SM: 228 KiB (sm_90, sm_100), 164 KiB (sm_80) or 100 KiB.
#
#   16     reading the weight is the limit: narrow tiles make many blocks, each with 24 KB in
#          flight, as much as an SM of an H200 needs
#   64     one tile has all rows: the weight is read once
#   more   a warp has 32 x 64 sums, in 64 registers, and reads 3 bytes per 64 products; there is a
#          barrier for each stage, so stages are deep
TABLE = (
    (16, (Tiles(16, 32, 256, 3, 1, 2),)),
    (64, (Tiles(64, 64, 128, 3, 2, 2),)),
    (
        2**63,
        (
            Tiles(128, 128, 128, 3, 4, 2),
            Tiles(128, 128, 128, 2, 4, 2),
            Tiles(128, 128, 64, 2, 4, 2),
        ),
    ),
)


@cache
def resolve(rows: int, outputs: int, limits: Limits) -> Tiles:
    """Return the tiles for a number of rows; not the largest ones if they would leave SMs idle."""
    fitting = (
        (most, next(each for each in tiles if 2 * (each.bytes + 1024) <= limits.shared + 1024))
        for most, tiles in TABLE
    )
    *others, (_, large) = fitting
    for most, tiles in others:
        if rows <= most:
            return tiles
    blocks = -(-rows // large.rows) * -(-outputs // large.outputs)
    return large if blocks >= limits.processors else others[-1][1]


@cache
def constants(
    tiles: Tiles,
    dtypes: tuple[Any, ...],
    wide: bool,
    outliers: bool,
    pairs: bool,
    one_scale: bool = False,
    largest: int = 127,
) -> Constants:
    """Return the constants of int8_linear.cu for the dtypes of y, absmax and bias (or None).

    Two blocks share an SM, so that one copies while the other multiplies.  With the largest tiles,
    outliers or bytewise copies (``wide`` False) need so many registers that there is only one.
    """
    dtype, absmax, bias = dtypes
    return Constants(
        T=dtype,
        A=absmax,
        B=dtype if bias is None else bias,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        DEPTH=tiles.depth,
        STAGES=tiles.stages,
        DOWN=tiles.down,
        RIGHT=tiles.right,
        RESIDENT=1 if tiles.threads == 256 and (outliers or not wide) else 2,
        WIDE=wide,
        OUTLIERS=outliers,
        PAIRS=pairs,
        LARGEST=largest,
        ONE=one_scale,
        BIAS=bias is not None,
    )


def launch_product(
    y: Array,
    x_codes: Array,
    scales: Array,
    codes: Array,
    absmax: Array,
    *,
    outliers: Any = None,
    one_scale: bool = False,
    largest: int = 127,
    bias: Array | None = None,
) -> None:
    """Write the scaled product of codes to y by the kernel.

    ``outliers`` is x, the list of its outlier columns and the length of that list.  absmax has the
    values of the code ``largest``.  With ``one_scale``, it is a single scale for all outputs, and
    there may be a bias.
    """
    outputs, inputs = codes.shape
    rows = x_codes.size // inputs
    tiles = resolve(rows, outputs, limits(y))
    dtypes = y.dtype, absmax.dtype, None if bias is None else bias.dtype
    # copies of 16 bytes; stores of two results
    wide, pairs = lanes(inputs, codes) == 16, outputs % 2 == 0
    chosen = constants(tiles, dtypes, wide, outliers is not None, pairs, one_scale, largest)
    kernel = load("int8_linear.cu", "int8_linear", y, chosen)
    blocks = -(-rows // tiles.rows) * -(-outputs // tiles.outputs)
    kernel[blocks, tiles.threads, tiles.bytes](
        *(x_codes, scales, codes, absmax, *(outliers or (None,) * 3), bias, y),
        *(rows, outputs, inputs),
    )


@cache
def outlier_constants(dtype: Any) -> Constants:
    """Return the constants of int8_outliers.cu."""
    return Constants(T=dtype)
