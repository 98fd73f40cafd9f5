"""What a call of a model chooses once for all blocks: its attention and its linear layers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...core.dtypes import Array
from ...inference.kv_cache import KVCache
from ...inference.paged_rows import PagedRows
from ...ops.attention.attention import attention
from ...ops.attention.attention_varlen import attention_varlen
from ...ops.linear.linear import linear
from ...ops.linear.linears import linears, rows_of_one
from ...training.variable import Var
from ..adapters.adapter import Adapter
from ..adapters.many import ByRows
from ..configs.config import Config
from ..ranks.division import Division, bits
from .call import Attend, Project
from .context import Context


def attend_of(
    cache: KVCache | PagedRows | None, mask: Any, offsets: Any, context: Context | None
) -> Attend:
    """Return the attention of the tokens of a call; a cache knows which of them are padding."""
    if context is not None:
        return context.attend
    if offsets is not None:
        return partial(_packed, offsets)
    return partial(_masked, mask) if cache is None else cache.attend


def _masked(mask: Any, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Return the attention of tokens to each other, except to padding."""
    return attention(q, k, v, mask=mask, **options)


def _packed(offsets: Array, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Return the attention of the tokens of packed texts, each to those of its own text."""
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return attention_varlen(q, k, v, offsets, offsets, **options).reshape(shape)


def project_of(
    config: Config,
    adapter: Adapter | None,
    seed: int | None,
    division: Division | None,
    tokens: Any,
    offsets: Any = None,
) -> Project:
    """Return the linear layers of a call on some tokens, as ``(parameters, names, x)``."""
    if isinstance(adapter, ByRows):
        return adapter.project(tokens, offsets, seed, _plain)
    if adapter is not None:
        return partial(adapter.linears, seed=seed)
    return partial(_rounded, division) if config.bit_layers else _plain


def _plain(parameters: Mapping[str, Any], names: Sequence[str], x: Any) -> list[Any]:
    """Return the outputs of dense or quantized layers for one input."""
    weights = [parameters[f"{n}.weight"] for n in names]
    arrays = [weight.value if type(weight) is Var else weight for weight in weights]
    if len(names) > 1 and f"{names[0]}.bias" not in parameters and rows_of_one(arrays) is not None:
        return [*linears(x, *weights)[: len(names)]]
    return [linear(x, parameters[f"{n}.weight"], parameters.get(f"{n}.bias")) for n in names]


def _rounded(
    division: Division | None, parameters: Mapping[str, Any], names: Sequence[str], x: Any
) -> list[Any]:
    """Return the outputs of layers whose weights and inputs are rounded, as in BitNet."""
    layers = [(f"{n}.weight", parameters.get(f"{n}.bias")) for n in names]
    return [bits(division, weight, x, parameters[weight], bias) for weight, bias in layers]
