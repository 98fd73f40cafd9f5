"""What the kernels of attention are told of the options of a call: common/attention.cuh."""

import math
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import lanes, packed
from ...core.dtypes import Array
from ..common.rows import spanned
from ._blocks import FARTHEST, TILE, Window

LOG2E = 1 / math.log(2)
CAUSAL, HIDING, ANY = range(3)  # options of a call: causal; what hides scores; what changes them


class Told(NamedTuple):
    """Constants, and arguments in the order of the kernels' parameters."""

    constants: dict[str, Any]
    arguments: tuple[Any, ...]
    level: int  # CAUSAL, HIDING or ANY
    scale: float


def told(
    q: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    key_lengths: Array | None = None,
    query_start: Array | int | None = None,
    block_mask: Array | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    keys: int | None = None,
) -> Told | None:
    """Return what kernels are told; None where they cannot run these options.

    With keys, so many of them lie in the pages of v.
    """
    *_, queries, heads, dim = q.shape
    tokens, kv_heads, value_dim = v.shape[-3:]
    keys = tokens if keys is None else keys
    left, right = window or (None, None)
    right = 0 if causal else right
    scale = 1 / math.sqrt(dim) if scale is None else scale
    fold, *factors = factors_of(scale, softcap, bias, alibi)
    hiding = left is not None or mask is not None or block_mask is not None or dropout > 0
    dropped = round(dropout * 2**32)
    if max(queries, keys) >= FARTHEST or dropped == 2**32 or dim % 8 or value_dim % 8:
        return None
    constants: dict[str, Any] = {
        "T": q.dtype,
        "B": q.dtype if bias is None else bias.dtype,
        "A": q.dtype if alibi is None else alibi.dtype,
        "L": np.dtype("int32") if key_lengths is None else key_lengths.dtype,
        "P": getattr(query_start, "dtype", np.dtype("int32")),
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "LENGTHS": key_lengths is not None,
        "STARTS": type(query_start) is not int and query_start is not None,
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "BLOCK_MASK": block_mask is not None,
        "MASK": mask is not None,
        "BIAS": bias is not None,
        "ALIBI": alibi is not None,
        "SOFTCAP": softcap is not None,
        "DROPOUT": dropout > 0,
        "FOLD": fold,
    }
    starts, first = (None, query_start) if type(query_start) is int else (query_start, None)
    arguments = (
        *(heads, kv_heads, queries, keys),
        *factors,
        *(near(left), near(right), key_lengths),
        *(starts, strides(starts, 1)[0], first is not None, near(first)),
        *(mask, *strides(mask), bias, *strides(bias)),
        *(alibi, strides(alibi, 2)[0], block_mask, *strides(block_mask)[:2]),
        *((seed or 0) & 0xFFFFFFFF, (seed or 0) >> 32, dropped, 1 / (1 - dropout)),
    )
    return Told(constants, arguments, ANY if not fold else HIDING if hiding else CAUSAL, scale)


def factors_of(
    scale: float, softcap: float | None, bias: Any, alibi: Any
) -> tuple[bool, float, float]:
    """Return whether exp2 takes the factor of the scores, that factor, and the cap."""
    # scores that are hidden stay -inf: the factor may not become 0, nor turn their sign
    fold = softcap is None and bias is None and alibi is None and scale > 1e-30
    return fold, scale * LOG2E if fold else scale / (softcap or 1), softcap or 0


def laid_out(
    constants: dict[str, Any],
    offsets: tuple[Array, Array] | None,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: Array | None = None,
    **_: Any,
) -> tuple[dict[str, Any], tuple[Any, Any, int, int, int]]:
    """Return constants and last arguments that say whether sequences lie end to end."""
    if offsets is None:
        return constants | {"VARLEN": False}, (None, None, 0, 0, 0)
    dtypes = {"P": offsets[0].dtype, "L": offsets[1].dtype}
    rows, columns = (padded(axis, mask, bias, block_mask) for axis in (-2, -1))
    ends = (*offsets, offsets[0].size - 1, rows, columns)
    return constants | {"VARLEN": True} | dtypes, ends


def padded(axis: int, mask: Any, bias: Any, block_mask: Any) -> int:
    """Return how long the longest sequence may be, by what is given for a padded batch."""
    sizes = [a.shape[axis] for a in (mask, bias) if a is not None and a.ndim >= -axis]
    sizes = [size for size in sizes if size != 1]  # 1 is for all
    sizes += [] if block_mask is None else [TILE * block_mask.shape[axis]]
    return min(sizes, default=FARTHEST)


def in_chunks(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays that can be copied 16 bytes at a time, themselves where that is so."""
    return tuple(a if _in_chunks(a) else a.copy() for a in arrays)


def _in_chunks(array: Array) -> bool:
    return lanes(8, array) * array.dtype.itemsize == 16


def by_batch(k: Array, v: Array) -> tuple[Array, Array, int]:
    """Return the memory of k and v, and how many tokens lie from a batch to the next, in both.

    Both can be copied 16 bytes at a time.  The first tokens of longer arrays, such as a cache,
    are read where they lie.
    """
    apart = _room(k)
    if apart is None or apart != _room(v):
        k, v = in_chunks(packed(k), packed(v))
        return k, v, k.shape[-3]
    k, v = (a if a.flags.c_contiguous else spanned(a) for a in (k, v))
    return k, v, apart


def _room(array: Array) -> int | None:
    """Return the tokens of a batch of the array that this is a part of; None where it is none."""
    if not _in_chunks(array):
        return None
    if array.flags.c_contiguous:
        return int(array.shape[-3])
    size, (heads, dim) = array.dtype.itemsize, array.shape[2:]
    token = heads * dim * size
    apart, more = divmod(array.strides[0], token)
    side_by_side = array.strides[1:] == (token, dim * size, size)
    return apart if side_by_side and apart >= array.shape[1] and not more else None


def row_bytes(columns: int, itemsize: int) -> int:
    """Return what a row takes in shared memory, as Tile of common/tile.cuh lays it out."""
    chunks = -(-columns // 16) * itemsize
    return 16 * (chunks if chunks % 8 == 0 else chunks | 1)


def near(offset: Any) -> int:
    """Return a number of positions, 0 for None; sums of three stay below 2**63."""
    return max(-(2**61), min(2**61, int(offset or 0)))


def strides(array: Any, axes: int = 4) -> tuple[int, ...]:
    """Return the elements between neighbours on each of the last axes; 0 where it is broadcast."""
    shape = () if array is None else array.shape
    shape = (1,) * (axes - len(shape)) + shape
    return tuple(0 if size == 1 else math.prod(shape[i + 1 :]) for i, size in enumerate(shape))
