"""Queries, keys and values of latent attention (MLA), on arrays or on a tape.

    c = norm(x A_kv)[: rank]      k = (c B_k by heads, rope(rest of x A_kv))      v = c B_v by heads
    q = norm(x A_q) B_q           by heads, whose last elements are rotated

All heads share the rotated part of the keys.  Heads are padded with zeros to one length, so that
any attention takes them: DeepSeek-V2, arXiv 2405.04434.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ops.norms.rms_norm import rms_norm
from ...ops.position.rope_qk import rope_qk
from ...parallel.taped import taped, value_of
from ..configs.config import Config, Latent

EPS = 1e-6  # of the norms of the short vectors, whatever that of the others is


def latent_heads(
    call: Any, latent: Latent, layer: int, module: str, x: Any
) -> tuple[Any, Any, Any]:
    """Return q, k and v of normalised x, each (batch, tokens, heads, dim)."""
    config: Config = call.config
    parameters = call.parameters
    batch, tokens, _ = x.shape
    names = [
        f"{module}kv_a_proj_with_mqa",
        f"{module}{'q' if latent.queries is None else 'q_a'}_proj",
    ]
    both, q = call.project(parameters, names, x)
    if latent.queries is not None:
        q = rms_norm(q, parameters[f"{module}q_a_layernorm.weight"], eps=EPS)
        (q,) = call.project(parameters, [f"{module}q_b_proj"], q)
    q = q.reshape(batch, tokens, config.heads, latent.dim)
    short = rms_norm(
        both[..., : latent.rank], parameters[f"{module}kv_a_layernorm.weight"], eps=EPS
    )
    (kv,) = call.project(parameters, [f"{module}kv_b_proj"], short)
    rotated = both[..., latent.rank :].reshape(batch, tokens, 1, latent.rotated)
    turned = q[..., latent.plain :]
    if config.rotates(layer):
        cos, sin, *_ = call.tables[config.layer_types[layer]]
        turned, rotated = rope_qk(
            turned, rotated, cos, sin, call.positions, interleaved=config.interleaved
        )
    kv = kv.reshape(batch, tokens, config.heads, latent.plain + latent.value)
    k, v = _expanded(kv, rotated, latent, config.dim)
    return _padded(q, turned, latent, config.dim), k, v


def _padded(q: Any, turned: Any, latent: Latent, dim: int) -> Any:
    """Return heads of ``dim``: the plain part of q, the rotated one, and zeros."""
    values, plain, end = value_of(q), latent.plain, latent.dim
    y = np.zeros_like(values, shape=(*values.shape[:-1], dim))
    y[..., :plain], y[..., plain:end] = values[..., :plain], value_of(turned)

    def back(dy: Any, wanted: Any) -> Mapping[str, Any]:
        dq = np.zeros_like(values)
        dq[..., :plain] = dy[..., :plain]
        return {"q": dq, "turned": dy[..., plain:end].copy()}

    return taped("latent_attention", y, back, q=q, turned=turned)


def _expanded(kv: Any, rotated: Any, latent: Latent, dim: int) -> tuple[Any, Any]:
    """Return keys and values as heads of ``dim``; the rotated part of the keys is that of all."""
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
            shared[...] = dk[..., plain:end].sum(axis=2, keepdims=True, dtype=wide)
        if dv is not None:
            dkv[..., plain:] = dv[..., : latent.value]
        return {"kv": dkv, "rotated": shared}

    made: tuple[Any, Any] = taped("latent_attention", (k, v), back, kv=kv, rotated=rotated)
    return made
