"""The attention branch of a block: projections, norms and rotations of heads, the gate."""

from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...ops.elements.arithmetic import add, scale
from ...ops.elements.elementwise import clip
from ...ops.norms.rms_norm import rms_norm
from ...ops.position.qk_norm_rope import qk_norm_rope
from ...ops.position.rope import rope
from ...ops.position.rope_qk import rope_qk
from ...parallel.taped import value_of
from ..configs.config import CHUNKED, Config
from .call import Call
from .conv_layer import conv_layer
from .delta_layer import delta_layer
from .elements import gated, grown, split
from .latent_attention import latent_attention_heads
from .lightning_layer import lightning_layer
from .mamba_layer import mamba_layer
from .norms import divided_norm, head_norm
from .state_space_layer import state_space_layer


def attention_branch(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the output of the attention branch for normalised x."""
    config, module = call.config, f"{prefix}{call.config.attention_in(layer)}"
    recurrent = f"{prefix}{config.names.recurrent}."
    if config.delta is not None and not config.attends(layer):
        return delta_layer(call, config.delta, layer, recurrent, x)
    if config.lightning is not None and not config.attends(layer):
        return lightning_layer(call, layer, recurrent, x)
    if config.conv is not None and not config.attends(layer):
        return conv_layer(call, layer, recurrent, x)
    if config.mamba is not None and not config.attends(layer):
        return mamba_layer(call, config.mamba, layer, recurrent, x)
    if config.space is not None and (config.beside or not config.attends(layer)):
        y = state_space_layer(call, config.space, layer, recurrent, x)
        return add(y, _attention(call, layer, module, x)) if config.attends(layer) else y
    return _attention(call, layer, module, x)


def _attention(call: Call, layer: int, module: str, x: Any) -> Any:
    """Return the output of an attention layer for normalised x."""
    config = call.config
    batch, tokens, _ = x.shape
    kv_heads, dim = config.heads_of(layer)
    queries, keys = config.heads * dim, kv_heads * dim
    before = config.attention_scales[0]
    x = x if before == 1 else scale(x, factor=before)
    gate = None
    if config.head_gate:
        (gate,) = call.project(call.parameters, [f"{module}g_proj"], x)
        gate = gate.reshape(batch, tokens, config.heads, 1)
    if config.latent is not None:
        out = latent_attention_heads(call, config.latent, layer, module, x)
        return _output(call, module, out if gate is None else gated(out, gate))
    if "qkv" in config.fused:
        (fused,) = call.project(call.parameters, [module + config.names.qkv], x)
        q, k, v = split(fused, (queries, keys, keys))
    else:
        letters, modules = config.projections_of(layer), config.names.projections
        names = [f"{module}{modules['qkv'.index(letter)]}" for letter in letters]
        projected = call.project(call.parameters, names, x)
        if letters == "q":
            q = projected[0].reshape(batch, tokens, config.heads, dim)
            return _with_shared(call, layer, module, q)
        q, k, v = projected if letters == "qkv" else (*projected, projected[-1])
    if config.query_key_norm == "projection":
        q, k = (divided_norm(call, module, f"{n}_norm", each) for n, each in (("q", q), ("k", k)))
    if config.clip is not None:
        q, k, v = (clip(each, bound=config.clip) for each in (q, k, v))
    # (batch, tokens, heads, dim), or 2 * dim with a gate
    q = q.reshape(batch, tokens, config.heads, q.shape[-1] // config.heads)
    if config.gated:  # query and gate of a head are neighbours in the projection
        q, gate = split(q, (dim, dim))
    k, v = (each.reshape(batch, tokens, kv_heads, dim) for each in (k, v))
    if config.value_norm:
        v = rms_norm(v, np.ones_like(value_of(v), shape=(dim,)), eps=config.eps)
    q, k = _placed(call, layer, module, q, k, v)
    q = grown(call, layer, q)
    if config.shared_layers and call.attention.keys.shared is not None:
        call.attention.keys.shared[config.layer_types[layer]] = k, v
    return _attended(call, layer, module, q, k, v, gate)


def _attended(call: Call, layer: int, module: str, q: Any, k: Any, v: Any, gate: Any = None) -> Any:
    """Return the projected attention of heads, which a sigmoid gate may multiply."""
    config = call.config
    options = call.options(layer)
    if config.sinks:
        options["sinks"] = call.parameters[module + "sinks"]
    heads, attend = config.heads_of(layer), call.attention.attend
    if config.layer_types[layer] == CHUNKED:
        attend = call.attention.of_chunks
    if call.attention.keys.cached and heads != (config.kv_heads, config.dim):
        q, k, v = _as_in_cache(config, q, k, v)
        out = attend(layer, q, k, v, **options)[..., : heads[1]]
    else:
        out = attend(layer, q, k, v, **options)
    return _output(call, module, out if gate is None else gated(out, gate))


def _with_shared(call: Call, layer: int, module: str, q: Any) -> Any:
    """Return the output of a layer that uses the keys and values of an earlier one.

    Each layer of a cache stores them again.
    """
    config, (_, tables, positions, *_) = call.config, call.attention
    q = head_norm(call, module + config.names.query_norm, q)
    if config.rotates(layer):
        cos, sin, *_ = tables[config.layer_types[layer]]
        q = rope(q, cos, sin, positions, interleaved=config.interleaved)
    k, v = (call.attention.keys.shared or {})[config.layer_types[layer]]
    return _attended(call, layer, module, q, k, v)


def _as_in_cache(config: Config, *arrays: Array) -> list[Array]:
    """Return queries, keys and values with the heads of a cache, which has one size for all layers.

    Zeros do not change scores.  A KV head is repeated for a part of its query heads.
    """
    wide = []
    for array, heads in zip(arrays, (None, config.kv_heads, config.kv_heads), strict=True):
        own = np.zeros_like(array, shape=(*array.shape[:-1], config.dim))
        own[..., : array.shape[-1]] = array
        if heads is not None:
            batch, tokens, few, dim = own.shape
            shape = (batch, tokens, few, heads // few, dim)
            own = np.broadcast_to(own[:, :, :, None], shape).reshape(batch, tokens, heads, dim)
        wide.append(own)
    return wide


def _output(call: Call, module: str, out: Any) -> Any:
    """Return the output projection of heads, (batch, tokens, heads, dim)."""
    config = call.config
    out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3])  # (batch, tokens, heads * dim)
    if config.sub_norms:
        out = divided_norm(call, module, "attn_sub_norm", out)
    (out,) = call.project(call.parameters, [module + config.names.output], out)
    after = config.attention_scales[1]
    return out if after == 1 else scale(out, factor=after)


def _placed(call: Call, layer: int, module: str, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Return normalised and rotated q and k; None as k if the cache stores it already."""
    config, (_, tables, positions, *_) = call.config, call.attention
    turn = call.attention.keys.turn
    cos, sin, *of_queries = tables[config.layer_types[layer]]
    names, rotates = config.names, config.rotates(layer)
    by_head = config.query_key_norm not in (None, "projection")
    # One launch normalises and rotates both; other norms and orders need separate ops.
    if by_head and rotates and config.norms.kind == "rms" and not config.rotated_first:
        return qk_norm_rope(
            q,
            k,
            call.parameters[f"{module}{names.query_norm}.weight"],
            call.parameters[f"{module}{names.key_norm}.weight"],
            cos,
            sin,
            positions,
            eps=config.eps,
            offset=config.norm_offset,
            interleaved=config.interleaved,
        )

    def normalised(q: Any, k: Any) -> tuple[Any, Any]:
        pairs = (names.query_norm, q), (names.key_norm, k)
        q, k = (head_norm(call, module + name, x) for name, x in pairs)
        return q, k

    if by_head and not config.rotated_first:
        q, k = normalised(q, k)
    if rotates and len(of_queries) == 2:
        q_cos, q_sin = of_queries
        q, k = rope(q, q_cos, q_sin, positions), rope(k, cos, sin, positions)
    elif rotates and turn is not None and not (config.interleaved or config.rotated_first):
        q, k = turn(layer, q, k, v, cos, sin, positions)
    elif rotates:
        q, k = rope_qk(q, k, cos, sin, positions, interleaved=config.interleaved)
    after = config.rotated_first and (rotates or config.query_key_norm != "ones")
    return normalised(q, k) if after and by_head else (q, k)
