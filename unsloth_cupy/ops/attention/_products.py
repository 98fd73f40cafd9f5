"""The matrix products of attention's NumPy definition, for one block of scores.

Query heads that share a key head are rows of one product: ``rows`` below is group * queries.
With ``width``, a product is cut into runs of that many keys, small enough for BLAS to compute on
the calling thread: several blocks then run in parallel instead of waiting for BLAS threads.
"""

from typing import Any

import numpy as np

from ...core.dtypes import Array

SINGLE = 2**18  # up to this rows * columns * inner size, OpenBLAS computes on one thread
PARTIAL = 2**20  # elements of the partial sums in memory at a time: 4 MiB in float32


def by_keys(a: Array, b: Array, width: int | None) -> Array:
    """Return (batch, kv_heads, rows, d) @ (batch, keys, kv_heads, d).T, a column for each key."""
    if width is None:
        return a @ b.transpose(0, 2, 3, 1)  # (batch, kv_heads, rows, keys)
    batch, keys, kv_heads, _ = b.shape
    result = np.empty_like(a, shape=(batch, kv_heads, a.shape[2], keys), order="C")
    even = keys - keys % width
    tiles = (  # (batch, kv_heads, tile, rows, width)
        result[..., :even].reshape(*result.shape[:3], even // width, width).transpose(0, 1, 3, 2, 4)
    )
    np.matmul(a[:, :, None], _tiled(b, width).swapaxes(3, 4), out=tiles)
    np.matmul(a, b[:, even:].transpose(0, 2, 3, 1), out=result[..., even:])
    return result


def over_keys(p: Array, b: Array, width: int | None) -> Array:
    """Return (batch, kv_heads, rows, keys) @ (batch, keys, kv_heads, d)."""
    if width is None:
        return p @ b.transpose(0, 2, 1, 3)  # (batch, kv_heads, rows, d)
    batch, kv_heads, rows, keys = p.shape
    even = keys - keys % width
    result = p[..., even:] @ b[:, even:].transpose(0, 2, 1, 3)
    step = max(1, PARTIAL // max(1, batch * kv_heads * rows * b.shape[3])) * width
    for start in range(0, even, step):
        stop = min(start + step, even)
        tiles = p[..., start:stop].reshape(batch, kv_heads, rows, (stop - start) // width, width)
        # (batch, kv_heads, tile, rows, width) @ (batch, kv_heads, tile, width, d)
        result += (tiles.transpose(0, 1, 3, 2, 4) @ _tiled(b[:, start:stop], width)).sum(axis=2)
    return result


def for_keys(p: Array, a: Array, width: int | None) -> Array:
    """Return (batch, kv_heads, rows, keys).T @ (batch, kv_heads, rows, d), a row for each key."""
    if width is None:
        return (p.swapaxes(2, 3) @ a).transpose(0, 2, 1, 3)  # (batch, keys, kv_heads, d)
    batch, kv_heads, rows, keys = p.shape
    result = np.empty_like(p, shape=(batch, kv_heads, keys, a.shape[3]), order="C")
    even = keys - keys % width
    count = even // width
    # (batch, kv_heads, tile, width, rows) @ (batch, kv_heads, 1, rows, d)
    tiles = p[..., :even].reshape(batch, kv_heads, rows, count, width).transpose(0, 1, 3, 4, 2)
    out = result[:, :, :even].reshape(batch, kv_heads, count, width, a.shape[3])
    np.matmul(tiles, a[:, :, None], out=out)
    np.matmul(p[..., even:].swapaxes(2, 3), a, out=result[:, :, even:])
    return result.transpose(0, 2, 1, 3)  # (batch, keys, kv_heads, d)


def stacked(array: Array, block: Any, group: int) -> Array:
    """Return a block's (batch, queries, heads, d) as (batch, kv_heads, rows, d)."""
    # (batch, heads, queries, d)
    part = array[block.batch, block.rows, block.heads].transpose(0, 2, 1, 3)
    batch, heads, rows, d = part.shape
    # (batch, kv_heads, group * queries, d)
    return part.reshape(batch, heads // group, group * rows, d)


def unstacked(array: Array, group: int) -> Array:
    """Return (batch, kv_heads, rows, d) as (batch, queries, heads, d)."""
    batch, kv_heads, rows, d = array.shape
    # (batch, heads, queries, d), then (batch, queries, heads, d)
    return array.reshape(batch, kv_heads * group, rows // group, d).transpose(0, 2, 1, 3)


def _tiled(b: Array, width: int) -> Array:
    """View the whole tiles of (batch, keys, kv_heads, d) as (batch, kv_heads, tile, width, d)."""
    batch, keys, kv_heads, d = b.shape
    count = keys // width
    tiles = b[:, : count * width].reshape(batch, count, width, kv_heads, d)
    return tiles.transpose(0, 3, 1, 2, 4)  # (batch, kv_heads, tile, width, d)


def operations(a: dict[str, Any]) -> int:
    """Return the operations of q @ k.T and p @ v, for the keys that causal and window allow."""
    batch, queries, heads, dim = a["q"].shape
    pairs = _pairs(queries, a["k"].shape[1], a.get("causal"), a.get("window"))
    return int(2 * batch * heads * pairs * (dim + a["v"].shape[3]))


def operations_varlen(a: dict[str, Any]) -> int:
    """Return the operations of packed sequences of equal lengths; of others there are more."""
    (tokens, heads, dim), sequences = a["q"].shape, max(1, a["k_offsets"].shape[0] - 1)
    sizes = tokens // sequences, a["k"].shape[0] // sequences
    pairs = sequences * _pairs(*sizes, a.get("causal"), a.get("window"))
    return int(2 * heads * pairs * (dim + a["v"].shape[2]))


def operations_paged(a: dict[str, Any]) -> int:
    """Return the operations of queries at the end of full rows of pages."""
    batch, queries, heads, dim = a["q"].shape
    keys = a["page_table"].shape[1] * a["k_pages"].shape[1]
    pairs = _pairs(queries, keys, a.get("causal", True), a.get("window"))
    return int(2 * batch * heads * pairs * (dim + a["v_pages"].shape[3]))


def _pairs(queries: int, keys: int, causal: Any, window: Any) -> int:
    """Return the pairs of a query and a key that causal and window allow."""
    left, right = window or (None, None)
    right = 0 if causal else right
    position = np.arange(queries) + keys - queries
    last = np.full(queries, keys - 1) if right is None else np.minimum(position + right, keys - 1)
    first = 0 if left is None else np.maximum(position - left, 0)
    return int(np.maximum(last - first + 1, 0).sum())
