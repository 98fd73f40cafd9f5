"""Grouped products on a GPU: the list of their tiles, their launches, and sums of groups.

    tiles = list_tiles(offsets, rows, height)
    multiply(FORWARD, x, weight, y, groups, ...)

The host knows how many rows and groups there are, but not which rows are in which group.
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
MOST = 1023  # groups of the kernel that lists tiles
COLUMNS, DEPTH, STAGES = 128, 64, 3  # of a block in 16 bits: 96 KiB with 128 rows, sm_86 has 99
SMALL, SMALL_DEPTH = 64, 16  # rows and columns, and depth, of a block in float32
THREADS, HOPPER_THREADS = 256, 384
LARGE = 128  # rows of a tile of groups that have 64 or more


class Groups(NamedTuple):
    """Sorted rows and their groups."""

    offsets: Any
    experts: int
    rows: int
    height: int  # rows of a tile
    tiles: Any
    order: Any = None  # which assignment comes p-th
    top: int = 0  # assignments of a row of x; 0: rows are sorted themselves


def tile_height(dtype: Any, rows: int, experts: int) -> int:
    """Return the rows of a tile: about as many as a group has, so that few are padding.

    In 16 bits groups of 64 rows and more have tiles of 128, which read least from shared memory;
    of fewer than 24, tiles of 16, as such a group reads its matrix once in any case.  In a fixed
    order all have 64.
    """
    if dtype == FLOAT32 or is_fixed():
        return SMALL
    mean = rows / experts
    return LARGE if mean >= 64 else 64 if mean >= 24 else 16


def groups_of(
    dtype: Any, offsets: Array, experts: int, rows: int, order: Any = None, top: int = 0
) -> Groups:
    """Return the groups of a product, with a list of tiles that is made on the device."""
    height = tile_height(dtype, rows, experts)
    most = rows // height + experts + 1
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

    Rows of an operand that is not ``in_order`` are read where the assignments say they are.
    """
    a_top, b_top = (0 if in_order else groups.top for in_order in (a_in_order, b_in_order))
    narrow = a.dtype != FLOAT32
    n = out.shape[-1]
    m, k = (out.shape[1], 0) if form == WEIGHTS else (0, a.shape[-1])
    wide = n % 8 == m % 8 == k % 8 == 0 and lanes(8, a, b, out) == 8
    key = a.dtype, None if bias is None else bias.dtype, groups.offsets.dtype, form, a_top, b_top
    hopper = wide and narrow and groups.height == LARGE and warpgroups(a)
    if hopper:
        file, chosen = "grouped_linear_sm90.cu", _on_warpgroups(*key, n > COLUMNS)
    else:
        file = "grouped_linear.cu" if narrow else "grouped_float32.cu"
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
    if hopper:  # blocks are persistent
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
    """Return the bytes of the ring, or of the result if that is larger."""
    return 2 * max(STAGES * DEPTH * (rows + COLUMNS), rows * COLUMNS)


def _hopper_bytes(chosen: Constants) -> int:
    """Return the bytes of the ring of grouped_linear_sm90.cu and of its barriers."""
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
    """Return the constants of grouped_linear.cu, or in float32 those of grouped_float32.cu.

    In 16 bits eight warps take 64 x 32 results each of 128 rows, 32 x 32 of 64, 16 x 16 of 16;
    dweight has as many rows as the weight has, whatever the groups are.  Up to sm_90 two blocks
    share an SM, with 128 registers of a thread; from sm_100 on these do not suffice.
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
        DOWN=1 if rows == 16 else 2,
        RESIDENT=resident,
        WIDE=wide,
    )


@cache
def _on_warpgroups(
    dtype: Any, bias: Any, offsets: Any, form: int, a_top: int, b_top: int, wide: bool
) -> Constants:
    """Return the constants of grouped_linear_sm90.cu.

    Two warpgroups have 64 x 256 sums each, or 64 x 128 of a narrow c: 128 registers of a thread, or
    64.  The ring fills 192 KiB.
    """
    return Constants(
        **{"T": dtype, "B": bias or dtype, "I": offsets, "FORM": form},
        **{"A_TOP": a_top, "B_TOP": b_top, "BIAS": bias is not None},
        ROWS=LARGE,
        COLUMNS=2 * COLUMNS if wide else COLUMNS,
        STAGES=4 if wide else 6,
        CONSUMERS=LARGE // 64,
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
