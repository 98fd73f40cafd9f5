"""The matrix products of attention's definition in a fixed order: see ``common/fixed_order.py``.

Blocks of 64 keys begin at key 0, the last one is padded with zeros, and sums run from block to
block.  Keys that a query does not see add zeros, so its bits do not depend on how many follow.
"""

from typing import Any

import numpy as np

from ...core.dtypes import Array
from ..common.fixed_order import COLUMNS, TILE, check_form, in_tiles


def by_keys(a: Array, b: Array) -> Array:
    """Return (batch, kv_heads, rows, d) @ (batch, keys, kv_heads, d).T, a column for each key."""
    rows, keys = a.shape[2], b.shape[1]
    check_form(a.shape[3], COLUMNS, "F", a.dtype)
    # both (batch, kv_heads, tile, TILE or COLUMNS, d)
    left, right = in_tiles(a, TILE), in_tiles(b.transpose(0, 2, 1, 3), COLUMNS)
    # (batch, kv_heads, tile, block, TILE, COLUMNS)
    products = np.matmul(left[:, :, :, None], right.swapaxes(-1, -2)[:, :, None])
    batch, kv_heads, tiles, blocks = products.shape[:4]
    # (batch, kv_heads, padded rows, padded keys)
    wide = products.swapaxes(3, 4).reshape(batch, kv_heads, tiles * TILE, blocks * COLUMNS)
    return np.ascontiguousarray(wide[:, :, :rows, :keys])


def over_keys(p: Array, b: Array) -> Array:
    """Return (batch, kv_heads, rows, keys) @ (batch, keys, kv_heads, d)."""
    rows = p.shape[2]
    check_form(COLUMNS, b.shape[3], "C", p.dtype)
    right = in_tiles(b.transpose(0, 2, 1, 3), COLUMNS)  # (batch, kv_heads, block, COLUMNS, d)
    left = in_tiles(_in_blocks(p), TILE)  # (batch, kv_heads, block, tile, TILE, COLUMNS)
    total: Any = 0
    for block in range(right.shape[2]):
        total = total + np.matmul(left[:, :, block], right[:, :, block, None])
    # (batch, kv_heads, rows, d)
    return np.ascontiguousarray(total.reshape(*p.shape[:2], -1, b.shape[3])[:, :, :rows])


def row_sums(p: Array) -> Array:
    """Return the sum of each row of (batch, kv_heads, rows, keys)."""
    return np.cumsum(_in_blocks(p).sum(axis=-1), axis=2)[:, :, -1]


def _in_blocks(p: Array) -> Array:
    """Copy (batch, kv_heads, rows, keys) as (batch, kv_heads, blocks, rows, 64)."""
    return np.ascontiguousarray(in_tiles(p.swapaxes(2, 3), COLUMNS).swapaxes(3, 4))
