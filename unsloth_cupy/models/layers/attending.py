"""The attention and the linear layers of a call, which are chosen once for all blocks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...core.replay import is_fixed
from ...errors import ConfigError
from ...inference.kv_cache import KVCache
from ...inference.paged_rows import PagedRows
from ...ops.attention.attention import attention
from ...ops.attention.attention_varlen import attention_varlen
from ...ops.linear.linear import linear
from ...ops.linear.linears import linears, rows_of_one
from ...ops.quantized.weight import Quantized
from ...placement import to_device_of, to_numpy
from ...training.variable import Var
from ..adapters.adapter import BIAS, Adapter
from ..adapters.many import ByRows
from ..configs.config import Config
from ..ranks.division import Division, bits
from .call import Attend, Latents, Project, Whole
from .context import Context, token_numbers


def attend_of(
    cache: KVCache | PagedRows | None, mask: Any, offsets: Any, context: Context | None
) -> Attend:
    """Return the attention function of a call; a cache masks padding itself."""
    if context is not None:
        return context.attend
    if offsets is not None:
        longest = None
        # Texts are padded to the longest one; reading it makes the host wait for the GPU.
        if is_fixed() and not isinstance(offsets, np.ndarray):
            longest = int(np.diff(to_numpy(offsets)).max(initial=0))
        return partial(packed, offsets, longest)
    if cache is None or latents_of(cache) is not None:
        return partial(_masked, mask)
    return cache.attend


def chunks_of(
    size: int, attend: Attend, cache: Any, mask: Any, offsets: Any, tokens: Array
) -> Attend:
    """Return the attention function of layers whose queries see keys of the same chunk only.

    Chunks have ``size`` positions, which do not count padding.  Without padding and cache, chunks
    are texts of a pack.
    """
    if isinstance(cache, PagedRows):
        return partial(cache.attend, chunk=size)
    if cache is None and mask is None:
        return partial(packed, chunk_offsets(size, tokens, offsets), min(size, tokens.size))
    new = tokens.shape[1]
    if mask is None:
        places = np.arange(cache.length + new, like=tokens)[None]
    else:
        places = mask[:, 0, 0].cumsum(axis=1) - 1  # of keys, (batch, keys)
    own = places // size
    same = own[:, None, -new:, None] == own[:, None, None]  # (batch, 1, new, keys)
    if cache is None:
        attend, same = partial(_masked, None), same & mask
    return partial(_in_chunks, attend, cache, same)


def chunk_offsets(size: int, tokens: Array, offsets: Any) -> Array:
    """Return the first token of each chunk, then the number of tokens; later ones may be equal."""
    if offsets is None:
        rows, length = tokens.shape
        starts = np.arange(rows)[:, None] * length + np.arange(0, max(length, 1), size)
        return to_device_of(np.append(starts, rows * length).astype(np.int32), tokens)
    index = np.arange(tokens.size, dtype=offsets.dtype, like=offsets)
    places = index - offsets[np.searchsorted(offsets[1:], index, side="right")]
    chunk = (places % size == 0).cumsum() - 1
    most = tokens.size // size + len(offsets) - 1  # at most one of a text is not full
    starts = np.searchsorted(chunk, np.arange(most + 1, like=offsets))
    return starts.astype(offsets.dtype)


def _in_chunks(
    attend: Attend, cache: Any, same: Array, layer: int, q: Any, k: Any, v: Any, **options: Any
) -> Array:
    if cache is not None and cache.windows[layer] is not None:
        cure = "make the cache without window"
        raise ConfigError(f"Transformer: chunked attention does not work with a window; {cure}")
    return attend(layer, q, k, v, mask=same, **options)


def latents_of(cache: KVCache | PagedRows | None) -> Latents | None:
    """Return the functions of a cache that stores latent rows; None for other caches."""
    if isinstance(cache, PagedRows):
        if cache.cache.latent is not None:
            begins = lambda layer: not any(cache.starts(layer))  # noqa: E731
            return Latents(begins, cache.append, cache.attend, cache.index_keys)
    elif cache is not None and cache.latent is not None:
        begins = lambda layer: not cache.filled[layer]  # noqa: E731
        return Latents(begins, cache.append, cache.attend, partial(_index_keys, cache))
    return None


def _index_keys(
    cache: KVCache, layer: int, new: Array, most: int
) -> Iterator[tuple[Any, Any, Any, bool]]:
    """Yield the keys that an indexer stores in a latent cache: see ``PackedRows.index_keys``."""
    if cache.windows[layer] is not None:
        cure = "make the cache without window"
        raise ConfigError(f"Transformer: sparse attention does not work with a window; {cure}")
    held, tokens = cache.filled[layer], new.shape[1]
    if held + tokens > most:
        keys = np.concatenate([cache.keys[layer][:, :held, 0, -new.shape[2] :], new], axis=1)
        key = np.arange(held + tokens, like=new)
        yield slice(None), keys, (key[held:, None] >= key)[None], False


def absorbs(adapter: Adapter | None) -> bool:
    """Return whether queries and outputs can absorb ``kv_b_proj``, so that a cache holds latents.

    They cannot if an adapter of peft adds a bias to ``kv_b_proj``, nor if rows of a batch have
    different adapters of this layer.
    """
    names = () if adapter is None else adapter.parameters
    different = ".kv_b_proj." if isinstance(adapter, ByRows) else f".kv_b_proj.{BIAS}"
    return not any(different in name for name in names)


def whole_of(adapter: Adapter | None) -> Whole:
    """Return a function that returns a dense weight with its adapter merged."""
    # The caller needs kv_b_proj alone, which adapters by rows do not change: see ``absorbs``.
    if adapter is None or isinstance(adapter, ByRows):
        return _dense
    return partial(_merged, adapter)


def _dense(parameters: Mapping[str, Any], name: str) -> Any:
    weight = parameters[name]
    return weight.dequantize() if isinstance(weight, Quantized) else weight


def _merged(adapter: Adapter, parameters: Mapping[str, Any], name: str) -> Any:
    return adapter.merge(name, parameters[name])


def _masked(padding: Any, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Return the attention of the tokens in each row; the mask excludes padding."""
    return attention(q, k, v, **{"mask": padding, **options})


def packed(
    offsets: Array, longest: int | None, layer: int, q: Array, k: Array, v: Array, **options: Any
) -> Array:
    """Return the attention of packed texts; a token attends only within its own text."""
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))  # (tokens, heads, dim)
    options |= {"max_queries": longest, "max_keys": longest}
    return attention_varlen(q, k, v, offsets, offsets, **options).reshape(shape)


def project_of(
    config: Config,
    adapter: Adapter | None,
    seed: int | None,
    division: Division | None,
    tokens: Array,
    offsets: Any = None,
    context: Context | None = None,
    first: int = 0,
) -> Project:
    """Return the function ``(parameters, names, x)`` that computes the linear layers of a call.

    Its option ``part`` is a slice of all tokens, in order, if x has only these.

    ``tokens`` is (rows, tokens).  ``first`` is the number of the first token: see
    ``token_numbers``.
    """
    if isinstance(adapter, ByRows):
        return adapter.project(tokens, offsets, seed, _plain, context, first)
    if adapter is not None:
        numbers = None if seed is None else token_numbers(context, tokens, first)
        return partial(adapter.linears, seed=seed, numbers=numbers)
    return partial(_rounded, division) if config.bit_layers else _plain


def _plain(
    parameters: Mapping[str, Any], names: Sequence[str], x: Any, part: slice | None = None
) -> list[Any]:
    """Return the outputs of dense or quantized layers for one input.

    Weights that are rows of one stored matrix need one product instead of one per layer.
    """
    weights = [parameters[f"{n}.weight"] for n in names]
    arrays = [weight.value if type(weight) is Var else weight for weight in weights]
    if len(names) > 1 and f"{names[0]}.bias" not in parameters and rows_of_one(arrays) is not None:
        return [*linears(x, *weights)[: len(names)]]
    return [linear(x, parameters[f"{n}.weight"], parameters.get(f"{n}.bias")) for n in names]


def _rounded(
    division: Division | None,
    parameters: Mapping[str, Any],
    names: Sequence[str],
    x: Any,
    part: slice | None = None,
) -> list[Any]:
    """Return the outputs of BitNet layers, which round weights and inputs."""
    layers = [(f"{n}.weight", parameters.get(f"{n}.bias")) for n in names]
    return [bits(division, weight, x, parameters[weight], bias) for weight, bias in layers]
