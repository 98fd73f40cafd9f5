"""The options of an attention call, and how they are passed to its kernels."""

import functools
import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import Array
from ...core.replay import is_fixed
from ...errors import ConfigError
from ..common import philox
from ..common.fixed_order import refuse
from ..common.no_kernel import no_kernel
from ..common.strides import broadcast_strides

Window = tuple[int | None, int | None]

TILE = 128  # queries and keys that one element of block_mask stands for
ROUNDED = 8  # a probability within ROUNDED * eps of 1 counts as 1: rounding moves it so far
FARTHEST = 2**29  # kernels hold positions as 32-bit integers, and the sum of two must fit
LOG2E = 1 / math.log(2)  # kernels compute exp(x) as exp2(x * LOG2E)
# Levels of options, by the registers that they take: causal and key lengths alone; also options
# that hide scores (window, mask, block_mask, dropout); also options that change scores.
CAUSAL, HIDING, ANY = range(3)


class Options(NamedTuple):
    """The optional arguments of a call, as ``attention`` documents them."""

    mask: Array | None = None
    bias: Array | None = None
    alibi: Array | None = None
    sinks: Array | None = None
    key_lengths: Array | None = None
    query_start: Array | int | None = None
    block_mask: Array | None = None
    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | None = None
    offsets: tuple[Array, Array] | None = None  # q_offsets and k_offsets of packed sequences

    @property
    def reach(self) -> Window:
        """Return how many keys a query sees before and after its own position."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right


def check_options(
    call: str, window: Any, softcap: float | None, dropout: float, seed: int | None
) -> None:
    """Raise ConfigError for an invalid window, softcap, dropout or seed."""
    pair = isinstance(window, tuple | list) and len(window) == 2
    fits = pair and all(n is None or is_integer(n) for n in window)
    if window is not None and not fits:
        cure = "pass (left, right): keys seen before and after the query's position, None for all"
        raise ConfigError(f"{call}: window={window!r}; {cure}")
    if softcap is not None and not 0 < softcap < math.inf:
        cure = "must be above 0, or None for no cap"
        raise ConfigError(f"{call}: softcap={softcap} {cure}")
    philox.check(call, dropout, seed)


def warn_of_heads_first(call: str, q: Any, k: Any, query_start: Any) -> None:
    """Warn once if q and k seem to be (batch, heads, tokens, dim), with axes 1 and 2 swapped.

    With grouped heads, such arrays seem to have more queries than keys, a multiple of them, and as
    many heads of k as of q.  Symbolic shapes of a traced graph are not compared, nor are parts of a
    text, which have a ``query_start``: a rank may have more queries than keys of another one.
    """
    (queries, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    sizes = type(queries) is type(keys) is int and heads == kv_heads
    if sizes and queries > keys > 0 and queries % keys == 0 and query_start is None:
        _warn_of_heads_first(call, queries, keys, heads)


@functools.cache
def _warn_of_heads_first(call: str, queries: int, keys: int, heads: int) -> None:
    problem = f"{call}: q has {queries} tokens and k {keys}, with {heads} heads each"
    cure = "swap axes 1 and 2, as in q.transpose(1, 2) of torch"
    warnings.warn(f"{problem}; if they have heads before tokens, {cure}", stacklevel=7)


class KernelOptions(NamedTuple):
    """The options of a call in the form that kernels expect: see common/attention.cuh."""

    constants: dict[str, Any]
    operands: tuple[Array | None, ...]  # in the order of the kernels' parameters
    numbers: dict[str, Any]  # the fields of the struct Options
    level: int  # CAUSAL, HIDING or ANY
    scale: float


def refused(q: Array, v: Array) -> Any:
    """Return NotImplemented, and record why no attention kernel supports a call."""
    if is_fixed():
        refuse(f"no kernel supports heads of {q.shape[-1]} and {v.shape[-1]} columns in {q.dtype}")
    for name, dim in (("head dim", q.shape[-1]), ("value dim", v.shape[-1])):
        if dim % 8:
            return no_kernel(f"{name} {dim} is not a multiple of 8")
    dims = f"head dim {q.shape[-1]} and value dim {v.shape[-1]} in {q.dtype}"
    return no_kernel(f"no tiles on this GPU for {dims}, or for this number of tokens")


def kernel_options(
    q: Array, v: Array, options: Options, keys: int | None = None
) -> KernelOptions | None:
    """Return the options in the form that kernels expect; None if no kernel supports them.

    For a paged cache, keys is the number of keys that a row of page_table has room for.
    """
    *_, queries, heads, dim = q.shape
    tokens, kv_heads, value_dim = v.shape[-3:]
    keys = tokens if keys is None else keys
    (left, right), dropout, seed = options.reach, options.dropout, options.seed or 0
    mask, bias, alibi, block_mask = options.mask, options.bias, options.alibi, options.block_mask
    scale = 1 / math.sqrt(dim) if options.scale is None else options.scale
    fold, factor, cap = factors_of(scale, options)
    hiding = left is not None or mask is not None or block_mask is not None or dropout > 0
    drop_threshold = round(dropout * 2**32)  # random words below it are dropped; it has 32 bits
    # limits of the kernels: FARTHEST, a threshold of 32 bits, groups of 8 columns
    if max(queries, keys) >= FARTHEST or drop_threshold == 2**32 or dim % 8 or value_dim % 8:
        return None
    starts: Any = options.query_start
    starts, start = (None, starts) if type(starts) is int else (starts, None)
    lengths, sequences, padded = options.key_lengths, 0, (0, 0)
    constants: dict[str, Any] = {"LENGTHS": lengths is not None, "STARTS": starts is not None}
    if options.offsets is not None:
        starts, lengths = options.offsets
        sequences = starts.size - 1
        padded = _padded(-2, options), _padded(-1, options)
    constants |= {
        "T": q.dtype,
        "B": q.dtype if bias is None else bias.dtype,
        "A": q.dtype if alibi is None else alibi.dtype,
        "L": np.dtype("int32") if lengths is None else lengths.dtype,
        "P": np.dtype("int32") if starts is None else starts.dtype,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "BLOCK_MASK": block_mask is not None,
        "MASK": mask is not None,
        "BIAS": bias is not None,
        "ALIBI": alibi is not None,
        "SOFTCAP": options.softcap is not None,
        "DROPOUT": dropout > 0,
        "FOLD": fold,
        "VARLEN": options.offsets is not None,
    }
    numbers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "queries": queries,
        "keys": keys,
        "factor": factor,
        "cap": cap,
        "left": near(left),
        "right": near(right),
        "has_start": start is not None,
        "start": near(start),
        "starts_batch": broadcast_strides(starts, 1)[0],
        "mask_strides": broadcast_strides(mask),
        "bias_strides": broadcast_strides(bias),
        "block_mask_strides": broadcast_strides(block_mask),
        "alibi_batch": broadcast_strides(alibi, 2)[0],
        "seed_low": seed & 0xFFFFFFFF,
        "seed_high": seed >> 32,
        "drop_threshold": drop_threshold,
        "keep_scale": 1 / (1 - dropout),
        "sequences": sequences,
        "padded_queries": padded[0],
        "padded_keys": padded[1],
    }
    operands = lengths, starts, mask, bias, alibi, block_mask
    level = ANY if not fold else HIDING if hiding else CAUSAL
    return KernelOptions(constants, operands, numbers, level, scale)


def factors_of(scale: float, options: Options) -> tuple[bool, float, float]:
    """Return FOLD (whether exp2 applies the factor of the scores), that factor, and the cap."""
    # With FOLD the kernel multiplies scores by the factor after it has hidden pairs, whose -inf
    # must stay -inf: the factor may not be 0 or negative, nor so small that float32 flushes it.
    plain = options.softcap is None and options.bias is None and options.alibi is None
    fold = plain and scale > 1e-30
    return fold, scale * LOG2E if fold else scale / (options.softcap or 1), options.softcap or 0


def _padded(axis: int, options: Options) -> int:
    """Return the longest sequence that mask, bias and block_mask have room for on an axis."""
    arrays, block_mask = (options.mask, options.bias), options.block_mask
    sizes = [a.shape[axis] for a in arrays if a is not None and a.ndim >= -axis]
    sizes = [size for size in sizes if size != 1]  # an axis of 1 broadcasts to any length
    sizes += [] if block_mask is None else [TILE * block_mask.shape[axis]]
    return min(sizes, default=FARTHEST)


def row_bytes(columns: int, itemsize: int) -> int:
    """Return the bytes of a row in shared memory, in the layout of Tile of common/tile.cuh."""
    chunks = -(-columns // 16) * itemsize  # of 16 bytes
    # A row of a multiple of 8 chunks fills all banks, and an xor swizzles it.  Others have an odd
    # number of chunks, so that eight neighbouring rows begin in different banks.
    return 16 * (chunks if chunks % 8 == 0 else chunks | 1)


def near(offset: Any) -> int:
    """Return a number of positions, 0 for None, clipped so that the sum of three is below 2**63."""
    return max(-(2**61), min(2**61, int(offset or 0)))
