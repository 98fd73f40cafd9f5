"""Grouped products on a GPU: lists of tiles, launches, and sums of the rows of groups.

    groups = groups_of(dtype, offsets, experts, rows)
    multiply(FORWARD, x, weight, y, groups, ...)

The host knows the numbers of rows and groups, but not which rows are in which group: the offsets
are on the device.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.replay import is_fixed
from ...core.source import Constants
from ...core.target import limits
from .tensor_map import warpgroups

FORWARD, ROWS, WEIGHTS = 0, 1, 2  # FORM of groups.cuh: y, dx and dweight
MOST = 1023  # groups; the kernel that lists tiles has arrays of 1024, one for rows of no group
# A block in 16 bits: with 128 rows its ring has 96 KiB, of 99 KiB that a block has on sm_86.
COLUMNS, DEPTH, STAGES = 128, 64, 3
SMALL, SMALL_DEPTH = 64, 16  # rows and columns, and depth, of a block in float32
THREADS, HOPPER_THREADS = 256, 384  # eight warps; two warpgroups that multiply, and one that loads
LARGE = 128  # rows of a tile where groups have 64 rows or more


class Groups(NamedTuple):
    """Sorted rows and their groups."""

    offsets: Any  # (experts + 1,): the first row of each group
    experts: int
    rows: int
    height: int  # rows of a tile
    tiles: Any  # (tiles, 3): group, first row and end of each tile
    order: Any = None  # (rows,): the assignments in sorted order; assignment / top is a row of x
    top: int = 0  # assignments per row of x; 0: the rows themselves are sorted


def tile_height(dtype: Any, rows: int, experts: int) -> int:
    """Return the rows of a tile: about as many as a group has, so that few rows are padding.

    In 16 bits groups of 64 rows or more have tiles of 128, which read least from shared memory;
    groups of fewer than 24 have tiles of 16, as a small group reads its matrix once in any case.
    In a fixed order, and in float32, all tiles have 64 rows.
    """
    if dtype == FLOAT32 or is_fixed():
        return SMALL
    mean = rows / experts
    return LARGE if mean >= 64 else 64 if mean >= 24 else 16


def groups_of(
    dtype: Any, offsets: Array, experts: int, rows: int, order: Any = None, top: int = 0
) -> Groups:
    """Return the groups of a product, with a list of tiles that a kernel writes."""
    height = tile_height(dtype, rows, experts)
    most = rows // height + experts + 1  # each group, and the rows of no group, may end in a part
    tiles = empty((most, 3), np.int32, like=offsets)
    kernel = load("groups.cu", "group_tiles", offsets, _of_groups(offsets.dtype, height))
    kernel[1, 1024](offsets, tiles, experts, rows, most)
    return Groups(offsets, experts, rows, height, tiles, order, top)


def multiply(
    form: int,
    a: Array,
    b: Array,
    out: Array,
    groups: Groups,
    *,
    bias: Array | None = None,
    a_in_order: bool = True,
    b_in_order: bool = True,
) -> None:
    """Write a grouped product to out: one of the forms of groups.cuh.

    Rows of an operand that is not ``in_order`` are read through the assignments.
    """
    a_top, b_top = (0 if in_order else groups.top for in_order in (a_in_order, b_in_order))
    narrow = a.dtype != FLOAT32
    n = out.shape[-1]
    m, k = (out.shape[1], 0) if form == WEIGHTS else (0, a.shape[-1])
    # whether all rows allow accesses of 8 values, which are 16 bytes in 16 bits
    wide = n % 8 == m % 8 == k % 8 == 0 and lanes(8, a, b, out) == 8
    key = a.dtype, None if bias is None else bias.dtype, groups.offsets.dtype, form, a_top, b_top
    hopper = wide and narrow and groups.height == LARGE and warpgroups(a)
    if hopper:
        file, chosen = "grouped_linear_sm90.cu", _on_warpgroups(*key, n > COLUMNS)
    else:
        file = "grouped_linear.cu" if narrow else "grouped_float32.cu"
        # two blocks leave a thread 128 registers, from sm_100 on too few
        resident = 2 if wide and limits(a).architecture < 100 else 1
        chosen = _constants(*key, groups.height, wide if narrow else True, resident)
    rows, columns = chosen["ROWS"], chosen["COLUMNS"]
    across, down = -(-n // columns), -(-m // rows)
    jobs = across * (groups.experts * down if form == WEIGHTS else groups.tiles.shape[0])
    sizes = {"experts": groups.experts, "rows": groups.rows}
    sizes |= {"m": m, "n": n, "k": k, "across": across, "down": down}
    arrays = a, b, contiguous(bias), groups.order if groups.top else None
    listed = None if form == WEIGHTS else groups.tiles
    kernel = load(file, file.removesuffix(".cu"), a, chosen)
    if hopper:  # persistent blocks: one for each SM
        shape = min(jobs, limits(a).processors), HOPPER_THREADS, _hopper_bytes(chosen)
        kernel[shape](*arrays, listed, groups.offsets, out, sizes, jobs)
    else:
        shape = jobs, THREADS, _shared_bytes(rows) if narrow else 0
        kernel[shape](*arrays, listed, groups.offsets, out, sizes)


def add_rows(
    x: Array, out: Array, groups: Groups, *, in_order: bool = True, weights: Array | None = None
) -> None:
    """Write the sum of each group's rows to out (experts, columns)."""
    columns = x.shape[-1]
    chosen = _of_sums(
        *(groups.offsets.dtype, x.dtype, out.dtype, 0 if in_order else groups.top),
        None if weights is None else weights.dtype,
    )
    kernel = load("groups.cu", "group_sums", x, chosen)
    kernel[(-(-columns // 32), groups.experts), 256](
        x, None if in_order else groups.order, weights, groups.offsets, out, groups.rows, columns
    )


def _shared_bytes(rows: int) -> int:
    """Return the bytes of shared memory: of the ring, or of the result, which replaces it later."""
    return 2 * max(STAGES * DEPTH * (rows + COLUMNS), rows * COLUMNS)


def _hopper_bytes(chosen: Constants) -> int:
    """Return the bytes of the ring of grouped_linear_sm90.cu and of two barriers for each stage."""
    return int(chosen["STAGES"] * (2 * DEPTH * (chosen["ROWS"] + chosen["COLUMNS"]) + 16))


@cache
def _constants(
    dtype: Any,
    bias: Any,
    offsets: Any,
    form: int,
    a_top: int,
    b_top: int,
    height: int,
    wide: bool,
    resident: int,
) -> Constants:
    """Return the constants of grouped_linear.cu, or of grouped_float32.cu for float32.

    In 16 bits each of eight warps computes 64 x 32 results of a tile of 128 rows, 32 x 32 of 64, or
    16 x 16 of 16.  dweight has as many rows as the weight, whatever the groups are.  Up to sm_90
    two blocks share an SM, with 128 registers per thread, which are too few from sm_100 on.
    """
    narrow = dtype != FLOAT32
    rows = (128 if form == WEIGHTS else height) if narrow else SMALL
    shared = {"T": dtype, "B": bias or dtype, "I": offsets, "FORM": form}
    shared |= {"A_TOP": a_top, "B_TOP": b_top, "BIAS": bias is not None, "ROWS": rows}
    if not narrow:
        return Constants(**shared, COLUMNS=SMALL, DEPTH=SMALL_DEPTH)
    return Constants(
        **shared,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        DOWN=1 if rows == 16 else 2,  # warps along the rows: a product of tensor cores has 16
        RESIDENT=resident,
        WIDE=wide,
    )


@cache
def _on_warpgroups(
    dtype: Any, bias: Any, offsets: Any, form: int, a_top: int, b_top: int, wide: bool
) -> Constants:
    """Return the constants of grouped_linear_sm90.cu.

    Each of two warpgroups has 64 x 256 sums, or 64 x 128 of a narrow c: 128 or 64 registers per
    thread.  The ring fills 192 KiB.
    """
    return Constants(
        **{"T": dtype, "B": bias or dtype, "I": offsets, "FORM": form},
        **{"A_TOP": a_top, "B_TOP": b_top, "BIAS": bias is not None},
        ROWS=LARGE,
        COLUMNS=2 * COLUMNS if wide else COLUMNS,
        STAGES=4 if wide else 6,  # of 48 or 32 KiB
        CONSUMERS=LARGE // 64,
        # 2 * 128 * 208 + 128 * 88 registers are 168 for each of 384 threads: all of an SM
        REGISTERS=208,
        PRODUCER=88,
    )


@cache
def _of_groups(offsets: Any, height: int) -> Constants:
    """Return the constants of groups.cu for a list of tiles."""
    return _of_sums(offsets, FLOAT32, FLOAT32, 0, None, height)


@cache
def _of_sums(
    offsets: Any, dtype: Any, sums: Any, top: int, weights: Any, height: int = 1
) -> Constants:
    """Return the constants of groups.cu."""
    return Constants(
        I=offsets,
        T=dtype,
        B=sums,
        ROWS=height,
        TOP=top,
        WEIGHTED=weights is not None,
        W=weights or dtype,
    )
