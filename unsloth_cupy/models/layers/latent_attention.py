"""Multi-head latent attention (MLA), on arrays or on a tape: DeepSeek-V2, arXiv 2405.04434.

    c = norm((x A_kv)[: rank])    k of a head = (c B_k, rope((x A_kv)[rank :]))    v = c B_v
    q = norm(x A_q) B_q           split into heads, whose last elements are rotated

All heads share the rotated part of the keys.  Queries, keys and values are padded with zeros to
one head dimension, so that any attention op can compute them.

A latent cache stores (c, rope((x A_kv)[rank :])) of each token.  The first tokens in a cache attend
to each other by heads.  Later tokens multiply q by B_k^T, attend to the latent rows, and multiply
the result by B_v.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...ops.attention.attention import attention
from ...ops.common.gemm import gemm
from ...ops.elements.arithmetic import scale
from ...ops.norms.rms_norm import rms_norm
from ...ops.position.rope_qk import rope_qk
from ...parallel.taped import taped, value_of
from ...placement import check_library
from ..configs.config import Config, Latent
from ..ranks.division import entered
from .elements import grown, split
from .indexer import chosen_keys


def latent_attention_heads(call: Any, latent: Latent, layer: int, module: str, x: Any) -> Any:
    """Return the attention outputs of all heads for normalised x: (batch, tokens, heads, value)."""
    config: Config = call.config
    parameters, (batch, tokens, _) = call.parameters, x.shape
    attend, tables, positions, *_ = call.attention
    latents = call.attention.keys.latents
    ranks = call.division  # ranks divide heads; every rank computes the short vectors whole
    names = [f"{module}kv_a_proj_with_mqa"]
    low = x
    if latent.queries is not None:
        both, q = call.project(parameters, [*names, f"{module}q_a_proj"], x)
        weight = parameters[f"{module}q_a_layernorm.weight"]
        q = entered(ranks, rms_norm(q, weight, eps=config.inner_eps))
        low = q
        (q,) = call.project(parameters, [f"{module}q_b_proj"], q)
    elif ranks is None:
        both, q = call.project(parameters, [*names, f"{module}q_proj"], x)
    else:
        (both,) = call.project(parameters, names, x)
        (q,) = call.project(parameters, [f"{module}q_proj"], entered(ranks, x))
    q = grown(call, layer, q.reshape(batch, tokens, config.heads, latent.dim))
    short, rotated = split(both, (latent.rank, latent.rotated))
    weight = parameters[f"{module}kv_a_layernorm.weight"]
    short = rms_norm(short, weight, eps=config.inner_eps)
    short = short if latent.scales[1] == 1 else scale(short, factor=latent.scales[1])
    short, rotated = entered(ranks, short), entered(ranks, rotated)
    rotated = rotated.reshape(batch, tokens, 1, latent.rotated)
    q, turned = split(q, (latent.plain, latent.rotated))
    if config.rotates(layer):
        cos, sin, *_ = tables[config.layer_types[layer]]
        turned, rotated = rope_qk(
            turned, rotated, cos, sin, positions, interleaved=config.interleaved
        )
    options, index, choice = call.options(layer), None, None
    if config.indexer is not None:
        index, choice = chosen_keys(call, config.indexer, layer, module, x, low)
    if choice is not None:
        options["mask"] = choice
        if call.recurrence.offsets is not None:  # the choice is within the texts of a pack
            attend = partial(_of_choice, attention)
    if latents is not None:
        check_library("KVCache.append: k", short)  # a cache has no gradient
        parts = [short[:, :, None], rotated]
        if config.indexer is not None:  # a layer that shares a choice has no keys of its own
            size = (batch, tokens, 1, config.indexer.dim)
            parts.append(np.zeros_like(short, shape=size) if index is None else index[:, :, None])
        row = np.concatenate(parts, axis=-1)
        if not latents.begins(layer):
            return _absorbed(call, latent, layer, module, q, turned, row, options)
        latents.append(layer, row, None)
    (kv,) = call.project(parameters, [f"{module}kv_b_proj"], short)
    kv = kv.reshape(batch, tokens, config.heads, latent.plain + latent.value)
    k, v = _expanded(kv, rotated, latent, config.dim)
    q = _padded(q, turned, latent, config.dim)
    return attend(layer, q, k, v, **options)[..., : latent.value]


def _of_choice(attention: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attention(q, k, v, **options)


def _absorbed(
    call: Any,
    latent: Latent,
    layer: int,
    module: str,
    q: Array,
    turned: Array,
    row: Array,
    options: Mapping[str, Any],
) -> Array:
    """Append rows to the latent cache; return the attention of q and turned to all its rows."""
    batch, tokens, heads, _ = q.shape
    rank, plain = latent.rank, latent.plain
    weight = call.attention.whole(call.parameters, f"{module}kv_b_proj.weight")
    weight = weight.reshape(heads, plain + latent.value, rank)  # B_k, then B_v, of each head
    query = empty((batch, tokens, heads, row.shape[-1]), q.dtype, like=q)
    query[..., rank : rank + latent.rotated] = turned
    query[..., rank + latent.rotated :] = 0  # the keys of an indexer
    gemm(_by_head(q), weight[:, :plain], out=_by_head(query)[..., :rank])
    sums = call.attention.keys.latents.attend(layer, query, row, None, **options)
    out = empty((batch, tokens, heads, latent.value), q.dtype, like=q)
    gemm(_by_head(sums), weight[:, plain:].swapaxes(1, 2), out=_by_head(out))
    return out


def _by_head(x: Array) -> Array:
    """View (batch, tokens, heads, dim) as (heads, batch * tokens, dim)."""
    view: Array = x.reshape(-1, *x.shape[2:]).swapaxes(0, 1)
    return view


def _padded(q: Any, turned: Any, latent: Latent, dim: int) -> Any:
    """Return queries with ``dim`` elements per head: plain part, rotated part, zeros."""
    values, plain, end = value_of(q), latent.plain, latent.dim
    y = np.zeros_like(values, shape=(*values.shape[:-1], dim))
    y[..., :plain], y[..., plain:end] = values, value_of(turned)

    def back(dy: Any, wanted: Any) -> Mapping[str, Any]:
        return {"q": dy[..., :plain], "turned": dy[..., plain:end]}

    return taped("latent_attention", y, back, q=q, turned=turned)


def _expanded(kv: Any, rotated: Any, latent: Latent, dim: int) -> tuple[Any, Any]:
    """Return keys and values with ``dim`` elements per head; all keys share the rotated part."""
    values, plain, end = value_of(kv), latent.plain, latent.dim
    k, v = (np.zeros_like(values, shape=(*values.shape[:-1], dim)) for _ in "kv")
    k[..., :plain], k[..., plain:end] = values[..., :plain], value_of(rotated)
    v[..., : latent.value] = values[..., plain:]

    def back(dk: Any, dv: Any, wanted: Any) -> Mapping[str, Any]:
        dkv = np.zeros_like(values)
        shared = np.zeros_like(value_of(rotated))
        if dk is not None:
            dkv[..., :plain] = dk[..., :plain]
            wide = np.promote_types(dk.dtype, np.float32)
            # summed over heads, which share it: (batch, tokens, 1, rotated)
            shared[...] = dk[..., plain:end].sum(axis=2, keepdims=True, dtype=wide)
        if dv is not None:
            dkv[..., plain:] = dv[..., : latent.value]
        return {"kv": dkv, "rotated": shared}

    heads: tuple[Any, Any] = taped("latent_attention", (k, v), back, kv=kv, rotated=rotated)
    return heads
