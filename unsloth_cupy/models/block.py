"""The transformer block, on arrays or on a tape.

    h = x + norm(attention(norm(x)))
    y = h + norm(mlp(norm(h)))          which of the four norms there are, the config says

Sums and the norms that follow them are one op, so blocks hand on (branch, stream): x before the
sum.  A parameter is looked up by its Hugging Face name, a bias only where there is one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import (
    add,
    attention,
    geglu,
    linear,
    multiply,
    relu2,
    rms_norm,
    rms_norm_forward,
    rope_qk,
    swiglu,
)
from ..kv_cache import KVCache
from .config import Config


class Call(NamedTuple):
    """What all blocks of one call share; cos and sin are by layer type."""

    config: Config
    parameters: Mapping[str, Any]
    tables: Mapping[str, tuple[Any, Any]]
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    mask: Any = None  # (batch, 1, 1, keys)
    cache: KVCache | None = None


def block(call: Call, layer: int, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return the output of a block as (branch, stream), to be added by what follows."""
    norms, prefix = call.config.norms, f"model.layers.{layer}."
    x, stream = join(call, prefix, norms.before_attention, branch, stream)
    branch = _norm(call, prefix, norms.after_attention, _attention(call, layer, prefix, x))
    x, stream = join(call, prefix, norms.before_mlp, branch, stream)
    return _norm(call, prefix, norms.after_mlp, _mlp(call, prefix, x)), stream


def join(call: Call, prefix: str, norm: str | None, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return (normed, sum) of branch and stream; stream is None before the first block."""
    if norm is None:
        total = branch if stream is None else add(branch, stream)
        return total, total
    weight, config = call.parameters[f"{prefix}{norm}.weight"], call.config
    y, total, _ = rms_norm_forward(
        branch, weight, stream, eps=config.eps, offset=config.norm_offset
    )
    return y, total


def _norm(call: Call, prefix: str, norm: str | None, x: Any) -> Any:
    if norm is None:
        return x
    weight = call.parameters[f"{prefix}{norm}.weight"]
    return rms_norm(x, weight, eps=call.config.eps, offset=call.config.norm_offset)


def _project(call: Call, name: str, x: Any) -> Any:
    parameters = call.parameters
    return linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _attention(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the attention branch of normed x."""
    config, here = call.config, prefix + "self_attn."
    batch, tokens, _ = x.shape
    queries, keys = config.heads * config.dim, config.kv_heads * config.dim
    if config.fused:
        both = _project(call, here + "qkv_proj", x)
        q, k, v = (
            both[..., :queries],
            both[..., queries : queries + keys],
            both[..., queries + keys :],
        )
    else:
        q, k, v = (_project(call, f"{here}{name}_proj", x) for name in "qkv")
    whole = config.query_key_norm == "projection"
    if whole:
        q, k = _norm(call, here, "q_norm", q), _norm(call, here, "k_norm", k)
    q = q.reshape(batch, tokens, config.heads, config.dim)
    k = k.reshape(batch, tokens, config.kv_heads, config.dim)
    v = v.reshape(batch, tokens, config.kv_heads, config.dim)
    if config.query_key_norm and not whole:
        q, k = _norm(call, here, "q_norm", q), _norm(call, here, "k_norm", k)
    cos, sin = call.tables[config.layer_types[layer]]
    q, k = rope_qk(q, k, cos, sin, call.positions)
    if call.cache is not None:
        k, v = call.cache.append(layer, k, v)
    window = config.window_of(layer)
    out = attention(
        q,
        k,
        v,
        causal=True,
        window=None if window is None else (window - 1, 0),  # a window counts the query itself
        scale=config.scale,
        softcap=config.softcap,
        mask=call.mask,
    )
    out = out.reshape(batch, tokens, queries)
    if config.sub_norms:
        out = _norm(call, here, "attn_sub_norm", out)
    return _project(call, here + "o_proj", out)


def _mlp(call: Call, prefix: str, x: Any) -> Any:
    """Return the gated MLP branch of normed x."""
    config, here = call.config, prefix + "mlp."
    if config.fused:
        both = _project(call, here + "gate_up_proj", x)
        gate, up = both[..., : config.inner], both[..., config.inner :]
    else:
        gate, up = _project(call, here + "gate_proj", x), _project(call, here + "up_proj", x)
    match config.activation:
        case "silu":
            y = swiglu(gate, up)
        case "relu2":
            y = multiply(relu2(gate), up)
        case name:
            y = geglu(gate, up, approximate=name == "gelu_tanh")
    if config.sub_norms:
        y = _norm(call, here, "ffn_sub_norm", y)
    return _project(call, here + "down_proj", y)
