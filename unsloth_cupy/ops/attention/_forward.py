"""Launch of the forward kernel of attention."""

import math
from functools import cache
from typing import Any

from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.strides import in_chunks, key_strides
from ._hopper import empty_results, forward_tiles, launch_on_warpgroups
from ._options import CAUSAL, HIDING, Options, kernel_options, refused
from ._tiles import Tiles, requested_limits, resolve, slice_of


@cache
def _constants(tiles: Tiles, **named: Any) -> Constants:
    """Return the constants of attention_forward.cu."""
    return Constants(
        WARPS=tiles.warps,
        WARP_TILES=tiles.warp_tiles,
        TILE_KEYS=tiles.keys,
        STAGES=tiles.stages,
        RESIDENT=tiles.blocks,
        KEPT=tiles.kept,
        **named,
    )


def launch_forward(
    q: Array, k: Array, v: Array, options: Options, results: tuple[Array, Array] | None = None
) -> Any:
    """Launch the warpgroup kernel or the general one; return NotImplemented for dims without tiles.

    With offsets, q, k and v have no batch axis.  k and v may be the first tokens of longer arrays,
    or some of the columns of wider arrays.  out and lse are written to ``results``, or are new.
    """
    *batch, queries, heads, dim = q.shape
    size, value_dim = q.dtype.itemsize, v.shape[-1]
    call, sinks = kernel_options(q, v, options), options.sinks
    if call is not None and (own := forward_tiles(q, v, call)):
        return launch_on_warpgroups(q, k, v, sinks, call, own, results)
    # packed sequences take tiles that leave registers, as options that hide scores do
    level = call and max(call.level, HIDING if options.offsets else CAUSAL)
    tiles = call and resolve(size, dim, value_dim, level, limits(q), requested_limits())
    if call is None or tiles is None:
        return refused(q, v)
    k, v, batch_tokens, strides = key_strides(k, v)
    (q,) = in_chunks(q)
    out, lse = results or empty_results(q, value_dim)
    columns = slice_of(value_dim)  # of out that a block owns
    sinks_dtype = q.dtype if sinks is None else sinks.dtype
    constants = _constants(tiles, **call.constants, S=sinks_dtype, SLICE=columns)
    # of packed sequences, each may end in a block that is not full
    blocks = math.prod(batch) * heads * (-(-queries // tiles.rows) + call.numbers["sequences"])
    blocks *= -(-value_dim // columns)
    kernel = load("attention_forward.cu", "attention_forward", q, constants)
    kernel[blocks, tiles.threads, tiles.bytes(size, dim, value_dim)](
        *(q, k, v, sinks, out, lse, *call.operands, call.numbers, batch_tokens, *strides)
    )
    return out, lse
