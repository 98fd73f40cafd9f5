"""The transformer block, on arrays or on a tape.

    h = x + norm(attention(norm(x)))
    y = h + norm(mlp(norm(h)))          the config says which of the four norms exist

A residual sum and the norm after it are one op, so a block returns (branch, stream), the terms of
the sum.  Parameters are looked up by Hugging Face names; a bias only where there is one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError, naming
from ..ops.activations.geglu import geglu
from ..ops.activations.relu2 import relu2
from ..ops.activations.swiglu import swiglu
from ..ops.activations.swiglu_mlp import swiglu_mlp
from ..ops.elements.arithmetic import add, multiply, scale
from ..ops.norms.rms_norm import rms_norm, rms_norm_forward
from ..ops.position.qk_norm_rope import qk_norm_rope
from ..ops.position.rope_qk import rope_qk
from ..ops.position.rope_tables import rope_tables
from ..parallel.vocabulary import vocab_parallel_embedding
from ..placement import stream
from ..training.checkpoint import CheckpointConfig, checkpoint
from .adapter import PREFIX, Adapter
from .config import Config, Rope
from .division import Division, entered, joined
from .outer_weights import embedding_of

Attend = Callable[..., Array]  # (layer, q, k, v, **options of attention): see attending.py
Turn = Callable[..., tuple[Any, Any]]  # (layer, q, k, v, cos, sin, positions)
Project = Callable[[Mapping[str, Any], Sequence[str], Any], list[Any]]  # (parameters, names, x)
Gather = Callable[[Mapping[str, Any]], dict[str, Any]]


class Call(NamedTuple):
    """The inputs that all blocks of one call share; cos and sin are by layer type."""

    config: Config
    parameters: Mapping[str, Any]  # also those of an adapter
    tables: Mapping[str, tuple[Any, Any]]
    attend: Attend  # the attention of these tokens: to each other, or to a cache as well
    project: Project  # the outputs of linear layers: plain, adapted or rounded
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    chunked_mlp: bool = False
    division: Division | None = None  # among ranks; config and parameters are this rank's part
    turn: Turn | None = None  # rotates q and k, in place of rope_qk; returns None for a stored k
    gather: Gather | None = None  # gathers the parameters of a block from the parts of all ranks


def rope_rows(rope: Rope, like: Array) -> Callable[[int], tuple[Array, Array]]:
    """Return a function from a length to cos and sin tables of at least that many positions."""

    @lru_cache(maxsize=64)
    def on_stream(stream: Any) -> Callable[[int], tuple[Array, Array]]:
        options: Any = {"base": rope.base, "scaling": rope.scaling, "like": like}
        return lru_cache(maxsize=8)(lambda size: rope_tables(size, rope.dim, **options))

    def tables(length: int) -> tuple[Array, Array]:
        size = max(256, 1 << (length - 1).bit_length())  # few sizes while decoding
        if rope.original is not None:
            size = min(size, rope.original) if length <= rope.original else length
        return on_stream(stream(like))(size)

    return tables


@naming("Transformer", "embedding", "vocab_parallel_embedding")
def embedded(
    config: Config, parameters: Mapping[str, Any], tokens: Array, division: Division | None = None
) -> Any:
    """Return the embeddings of tokens, the input of the first block."""
    table = parameters["model.embed_tokens.weight"]
    x = (
        embedding_of(tokens, table)
        if division is None
        else vocab_parallel_embedding(tokens, table, config.vocab, comm=division.comm)
    )
    if config.embedding_scale != 1:  # the factor is rounded to the dtype of the embedding
        x = scale(x, factor=float(np.asarray(config.embedding_scale, x.dtype)))
    return x


def blocks(
    call: Call, branch: Any, checkpoints: CheckpointConfig | None, layers: range | None = None
) -> tuple[Any, Any]:
    """Return the output of all blocks as (branch, stream), with activation checkpointing."""
    layers = range(call.config.layers) if layers is None else layers
    size, stream = call.config.layers, None
    run: Callable[..., tuple[Any, Any]] = _part
    if checkpoints is not None and checkpoints.enabled:
        size, keep, offload = checkpoints.checkpoint_every, checkpoints.keep, checkpoints.offload
        if "attention_forward" in keep:
            keep = (*keep, "attention_varlen_forward")  # attention of packed texts
        run = partial(checkpoint, _part, keep=keep, offload=offload)
    for first in range(layers.start, layers.stop, size):
        group = range(first, min(first + size, layers.stop))
        prefixes = tuple(f"{a}model.layers.{n}." for n in group for a in ("", PREFIX))
        needed = {n: value for n, value in call.parameters.items() if n.startswith(prefixes)}
        branch, stream = run(call._replace(parameters=needed), group, branch, stream)
    return branch, stream


def _part(call: Call, layers: range, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return the output of some blocks as (branch, stream); their parameters are gathered first."""
    if call.gather is not None:
        call = call._replace(parameters=call.gather(call.parameters))
    for layer in layers:
        branch, stream = block(call, layer, branch, stream)
    return branch, stream


def block(call: Call, layer: int, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return the output of a block as (branch, stream), which the next op adds."""
    norms, prefix = call.config.norms, f"model.layers.{layer}."
    x, stream = join(call, prefix, norms.before_attention, branch, stream)
    ranks = call.division
    branch = joined(ranks, _attention(call, layer, prefix, entered(ranks, x)))
    branch = _norm(call, prefix, norms.after_attention, branch)
    x, stream = join(call, prefix, norms.before_mlp, branch, stream)
    branch = joined(ranks, _mlp(call, prefix, entered(ranks, x)))
    return _norm(call, prefix, norms.after_mlp, branch), stream


def join(call: Call, prefix: str, norm: str | None, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return (normalised sum, sum) of branch and stream; stream is None before the first block."""
    if norm is None:
        total = branch if stream is None else add(branch, stream)
        return total, total
    weight, config = call.parameters[f"{prefix}{norm}.weight"], call.config
    y, total, _ = rms_norm_forward(
        branch, weight, stream, eps=config.eps, offset=config.norm_offset
    )
    return y, total


def _norm(call: Call, prefix: str, norm: str | None, x: Any) -> Any:
    """Return an RMS norm of x; x itself if there is no such norm."""
    if norm is None:
        return x
    weight = call.parameters[f"{prefix}{norm}.weight"]
    return rms_norm(x, weight, eps=call.config.eps, offset=call.config.norm_offset)


def _divided_norm(call: Call, prefix: str, norm: str, x: Any) -> Any:
    """Return a norm over an axis that may be divided among ranks: heads or the inner size."""
    name = f"{prefix}{norm}.weight"
    if call.division is None:
        return _norm(call, prefix, norm, x)
    return call.division.norm(name, x, call.parameters[name])


def _attention(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the attention branch of normalised x."""
    config, module = call.config, prefix + "self_attn."
    batch, tokens, _ = x.shape
    queries, keys = config.heads * config.dim, config.kv_heads * config.dim
    if config.fused:
        (fused,) = call.project(call.parameters, [module + "qkv_proj"], x)
        q, k, v = (
            fused[..., :queries],
            fused[..., queries : queries + keys],
            fused[..., queries + keys :],
        )
    else:
        names = [f"{module}{name}_proj" for name in "qkv"]
        q, k, v = call.project(call.parameters, names, x)
    all_heads = config.query_key_norm == "projection"
    if all_heads:
        q, k = (_divided_norm(call, module, f"{n}_norm", each) for n, each in (("q", q), ("k", k)))
    q = q.reshape(batch, tokens, config.heads, config.dim)
    k = k.reshape(batch, tokens, config.kv_heads, config.dim)
    v = v.reshape(batch, tokens, config.kv_heads, config.dim)
    cos, sin = call.tables[config.layer_types[layer]]
    if config.query_key_norm and not all_heads:
        q, k = qk_norm_rope(
            q,
            k,
            call.parameters[module + "q_norm.weight"],
            call.parameters[module + "k_norm.weight"],
            cos,
            sin,
            call.positions,
            eps=config.eps,
            offset=config.norm_offset,
        )
    elif call.turn is not None:
        q, k = call.turn(layer, q, k, v, cos, sin, call.positions)
    else:
        q, k = rope_qk(q, k, cos, sin, call.positions)
    window = config.window_of(layer)  # it counts the query itself
    options: dict[str, Any] = {"causal": True, "scale": config.scale, "softcap": config.softcap}
    options["window"] = None if window is None else (window - 1, 0)
    out = call.attend(layer, q, k, v, **options)
    out = out.reshape(batch, tokens, queries)
    if config.sub_norms:
        out = _divided_norm(call, module, "attn_sub_norm", out)
    return call.project(call.parameters, [module + "o_proj"], out)[0]


def _mlp(call: Call, prefix: str, x: Any) -> Any:
    """Return the gated MLP branch of normalised x."""
    config, module = call.config, prefix + "mlp."
    if call.chunked_mlp:
        return swiglu_mlp(x, *_mlp_weights(call, module))
    if config.fused:
        (fused,) = call.project(call.parameters, [module + "gate_up_proj"], x)
        gate, up = fused[..., : config.inner], fused[..., config.inner :]
    else:
        names = [module + "gate_proj", module + "up_proj"]
        gate, up = call.project(call.parameters, names, x)
    match config.activation:
        case "silu":
            y = swiglu(gate, up)
        case "relu2":
            y = multiply(relu2(gate), up)
        case name:
            y = geglu(gate, up, approximate=name == "gelu_tanh")
    if config.sub_norms:
        y = _divided_norm(call, module, "ffn_sub_norm", y)
    return call.project(call.parameters, [module + "down_proj"], y)[0]


def _mlp_weights(call: Call, module: str) -> tuple[Any, Any, Any]:
    """Return the weights of gate, up and down; fused checkpoints store gate and up in one."""
    config, parameters = call.config, call.parameters
    down = parameters[module + "down_proj.weight"]
    if not config.fused:
        return parameters[module + "gate_proj.weight"], parameters[module + "up_proj.weight"], down
    shape, size = (config.inner, config.hidden), config.inner * config.hidden
    fused = parameters[module + "gate_up_proj.weight"].reshape(1, -1)  # tapes only split last axes
    return fused[..., :size].reshape(*shape), fused[..., size:].reshape(*shape), down


def check_chunked(config: Config, adapter: Adapter | None) -> None:
    """Raise a ConfigError unless ``swiglu_mlp`` can compute the MLP of such a model."""
    adapted = [] if adapter is None else [name for name in adapter.scales if ".mlp." in name]
    kind = f"the MLP of a {config.model_type} model"
    if config.bit_layers:
        problem = f"{kind} rounds its weights as BitNet does"
    elif config.activation != "silu":
        problem = f"{kind} has the activation {config.activation}, not silu"
    elif config.sub_norms or config.mlp_bias:
        problem = f"{kind} has {'a norm' if config.sub_norms else 'biases'} inside"
    elif adapted:
        problem = f"there is an adapter on {adapted[0]}, inside the MLP"
    else:
        return
    raise ConfigError(
        f"chunked_mlp: {problem}, which swiglu_mlp does not compute; leave it out, and checkpoint"
        " every block instead"
    )
