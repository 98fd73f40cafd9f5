"""The transformer block, on arrays or on a tape.

    h = x + norm(attention(norm(x)))
    y = h + norm(mlp(norm(h)))          the config says which of the four norms exist
    y = x + attention(norm(x)) + mlp(norm(x))                   in parallel blocks

A residual sum and the norm after it are one op, so a block returns (branch, stream), the terms of
the sum.  Parameters are looked up by Hugging Face names; a bias only where there is one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError, naming
from ...ops.activations.geglu import geglu
from ...ops.activations.relu2 import relu2
from ...ops.activations.swiglu import swiglu
from ...ops.activations.swiglu_mlp import swiglu_mlp
from ...ops.elements.arithmetic import add, multiply, scale
from ...ops.norms.layer_norm import layer_norm, layer_norm_forward
from ...ops.norms.rms_norm import rms_norm, rms_norm_forward
from ...ops.position.qk_norm_rope import qk_norm_rope
from ...ops.position.rope import rope
from ...ops.position.rope_qk import rope_qk
from ...ops.position.rope_tables import rope_tables
from ...parallel.taped import value_of
from ...parallel.vocabulary import vocab_parallel_embedding
from ...placement import stream
from ...training.checkpoint import CheckpointConfig, checkpoint
from ..adapters.adapter import PREFIX, Adapter
from ..adapters.adapter_stacks import Adapted
from ..adapters.outer_weights import embedding_of
from ..configs.config import BUFFERS, Config, Rope
from ..ranks.division import Division, entered, joined
from .delta_layer import delta_layer
from .elements import clip, gated, gelu, scaled_heads, stacked, xielu
from .experts_layer import experts_of_tokens
from .latent_attention import latent_heads

Attend = Callable[..., Array]  # (layer, q, k, v, **options of attention): see attending.py
Turn = Callable[..., tuple[Any, Any]]  # (layer, q, k, v, cos, sin, positions)
Project = Callable[[Mapping[str, Any], Sequence[str], Any], list[Any]]  # (parameters, names, x)
Gather = Callable[[Mapping[str, Any]], dict[str, Any]]


def unkept(*_: Any) -> tuple[None, None]:
    """Return that a layer has no state before the first token; keep none."""
    return None, None


class Call(NamedTuple):
    """The inputs that all blocks of one call share.

    ``tables`` are cos and sin by layer type, and those of queries where they differ.
    """

    config: Config
    parameters: Mapping[str, Any]  # also those of an adapter
    tables: Mapping[str, tuple[Any, ...]]
    attend: Attend  # the attention of these tokens: to each other, or to a cache as well
    project: Project  # the outputs of linear layers: plain, adapted or rounded
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    chunked_mlp: bool = False
    division: Division | None = None  # among ranks; config and parameters are this rank's part
    turn: Turn | None = None  # rotates q and k, in place of rope_qk; returns None for a stored k
    gather: Gather | None = None  # gathers the parameters of a block from the parts of all ranks
    stacks: Mapping[str, Adapted] = {}  # those of experts that have an adapter
    mask: Any = None  # of tokens that are not padding
    offsets: Any = None  # of packed texts
    states: Any = unkept  # of layers without attention: (layer) -> two, (layer, tokens, *two)
    routers: list[Any] | None = None  # takes the logits of every router; None: nobody reads them


def rope_rows(rope: Rope, like: Array) -> Callable[[int], tuple[Array, ...]]:
    """Return a function from a length to cos and sin tables of at least that many positions.

    With ``growth`` those of queries follow, which contain its factors.
    """

    def scaled(size: int) -> tuple[Array, ...]:
        cos, sin = rope_tables(size, rope.dim, base=rope.base, scaling=rope.scaling, like=like)
        if rope.growth is None:
            return cos, sin
        beta, length = rope.growth
        steps = np.floor(np.arange(size, like=cos) / length)
        factors = (1 + beta * np.log1p(steps)).astype(cos.dtype)[:, None]
        return cos, sin, cos * factors, sin * factors

    @lru_cache(maxsize=64)
    def on_stream(stream: Any) -> Callable[[int], tuple[Array, ...]]:
        return lru_cache(maxsize=8)(scaled)

    def tables(length: int) -> tuple[Array, ...]:
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
    run: Callable[..., tuple[Any, Any, Any]] = _part
    if checkpoints is not None and checkpoints.enabled:
        size, keep, offload = checkpoints.checkpoint_every, checkpoints.keep, checkpoints.offload
        if "attention_forward" in keep:
            keep = (*keep, "attention_varlen_forward")  # attention of packed texts
        run = partial(checkpoint, _part, keep=keep, offload=offload)
    for first in range(layers.start, layers.stop, size):
        group = range(first, min(first + size, layers.stop))
        prefixes = tuple(f"{a}model.layers.{n}." for n in group for a in ("", PREFIX))
        needed = {n: value for n, value in call.parameters.items() if n.startswith(prefixes)}
        routers = None if call.routers is None else list[Any]()
        part = call._replace(parameters=needed, routers=routers)
        branch, stream, found = run(part, group, branch, stream)
        if call.routers is not None:
            call.routers.extend(found)
    return branch, stream


def _part(call: Call, layers: range, branch: Any, stream: Any) -> tuple[Any, Any, Any]:
    """Return the output of some blocks as (branch, stream), and the logits of their routers.

    Their parameters are gathered first.
    """
    if call.gather is not None:
        call = call._replace(parameters=call.gather(call.parameters))
    for layer in layers:
        branch, stream = block(call, layer, branch, stream)
    return branch, stream, call.routers


def block(call: Call, layer: int, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return the output of a block as (branch, stream), which the next op adds."""
    norms, prefix, config = call.config.norms, f"model.layers.{layer}.", call.config
    x, stream = join(call, prefix, norms.before_attention, branch, stream)
    ranks = call.division
    if config.parallel:
        x = entered(ranks, x)
        branch = add(_attention(call, layer, prefix, x), _mlp(call, layer, prefix, x))
        return _scaled(joined(ranks, branch), config.residual_scale), stream
    branch = joined(ranks, _attention(call, layer, prefix, entered(ranks, x)))
    branch = _scaled(_norm(call, prefix, norms.after_attention, branch), config.residual_scale)
    x, stream = join(call, prefix, norms.before_mlp, branch, stream)
    branch = joined(ranks, _mlp(call, layer, prefix, entered(ranks, x)))
    branch = _scaled(_norm(call, prefix, norms.after_mlp, branch), config.residual_scale)
    return branch, stream


def _scaled(branch: Any, factor: float) -> Any:
    """Return the output of a branch times a factor."""
    return branch if factor == 1 else scale(branch, factor=factor)


def join(call: Call, prefix: str, norm: str | None, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return (normalised sum, sum) of branch and stream; stream is None before the first block."""
    if norm is None:
        total = branch if stream is None else add(branch, stream)
        return total, total
    config = call.config
    if config.norms.kind == "layer":
        parameters = _layer_norm_parameters(call, prefix + norm, branch)
        y, total, *_ = layer_norm_forward(branch, *parameters, stream, eps=config.eps)
        return y, total
    y, total, _ = rms_norm_forward(
        branch,
        call.parameters[f"{prefix}{norm}.weight"],
        stream,
        eps=config.eps,
        offset=config.norm_offset,
    )
    return y, total


def _norm(call: Call, prefix: str, norm: str | None, x: Any) -> Any:
    """Return a norm of x; x itself if there is no such norm."""
    if norm is None:
        return x
    config = call.config
    if config.norms.kind == "layer":
        return layer_norm(x, *_layer_norm_parameters(call, prefix + norm, x), eps=config.eps)
    weight = call.parameters[f"{prefix}{norm}.weight"]
    return rms_norm(x, weight, eps=config.eps, offset=config.norm_offset)


def _layer_norm_parameters(call: Call, name: str, x: Any) -> tuple[Any, Any]:
    """Return the weight of a layer norm, ones if it has none, and its bias or None."""
    config, weight = call.config, call.parameters.get(f"{name}.weight")
    if weight is None:
        weight = np.ones_like(value_of(x), shape=x.shape[-1:])
    weight = weight + config.norm_offset if config.norm_offset else weight
    return weight, call.parameters.get(f"{name}.bias")


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
    if config.delta is not None and not config.attends(layer):
        return delta_layer(call, config.delta, layer, f"{prefix}linear_attn.", x)
    if config.latent is not None:
        return _attended(call, layer, module, *latent_heads(call, config.latent, layer, module, x))
    if "qkv" in config.fused:
        (fused,) = call.project(call.parameters, [module + "qkv_proj"], x)
        q, k, v = (
            fused[..., :queries],
            fused[..., queries : queries + keys],
            fused[..., queries + keys :],
        )
    else:
        names = [f"{module}{name}_proj" for name in "qkv"]
        q, k, v = call.project(call.parameters, names, x)
    if config.query_key_norm == "projection":
        q, k = (_divided_norm(call, module, f"{n}_norm", each) for n, each in (("q", q), ("k", k)))
    if config.clip is not None:
        q, k, v = (clip(each, config.clip) for each in (q, k, v))
    q, gate = q.reshape(batch, tokens, config.heads, q.shape[-1] // config.heads), None
    if config.gated:
        q, gate = q[..., : config.dim], q[..., config.dim :]
    k = k.reshape(batch, tokens, config.kv_heads, config.dim)
    v = v.reshape(batch, tokens, config.kv_heads, config.dim)
    q, k = _placed(call, layer, module, q, k, v)
    return _attended(call, layer, module, q, k, v, gate)


def _attended(call: Call, layer: int, module: str, q: Any, k: Any, v: Any, gate: Any = None) -> Any:
    """Return the output of the attention of heads, times the sigmoid of a gate if there is one."""
    config = call.config
    window = config.window_of(layer)  # it counts the query itself
    options: dict[str, Any] = {"causal": True, "scale": config.scale, "softcap": config.softcap}
    options["window"] = None if window is None else (window - 1, 0)
    if config.sinks:
        options["sinks"] = call.parameters[module + "sinks"]
    out = call.attend(layer, q, k, v, **options)
    if config.latent is not None:
        out = out[..., : config.latent.value]
    out = out if gate is None else gated(out, gate)
    out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3])
    if config.sub_norms:
        out = _divided_norm(call, module, "attn_sub_norm", out)
    return call.project(call.parameters, [module + config.names.output], out)[0]


def _placed(call: Call, layer: int, module: str, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Return q and k by heads, normalised and rotated; None for a k that is stored already."""
    config, tables, positions = call.config, call.tables, call.positions
    cos, sin, *of_queries = tables[config.layer_types[layer]]
    names, rotates = config.names, config.rotates(layer)
    by_head = config.query_key_norm not in (None, "projection")
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
        q, k = (_head_norm(call, module + name, x) for name, x in pairs)
        return q, k

    if by_head and not config.rotated_first:
        q, k = normalised(q, k)
    if rotates and of_queries:
        q_cos, q_sin = of_queries
        q, k = rope(q, q_cos, q_sin, positions), rope(k, cos, sin, positions)
    elif rotates and call.turn is not None and not (config.interleaved or config.rotated_first):
        q, k = call.turn(layer, q, k, v, cos, sin, positions)
    elif rotates:
        q, k = rope_qk(q, k, cos, sin, positions, interleaved=config.interleaved)
    return normalised(q, k) if config.rotated_first else (q, k)


def _head_norm(call: Call, name: str, x: Any) -> Any:
    """Return the norm of each head of x, (batch, tokens, heads, dim)."""
    config, parameters = call.config, call.parameters
    if config.norms.kind == "rms":
        return rms_norm(x, parameters[f"{name}.weight"], eps=config.eps, offset=config.norm_offset)
    bias = parameters.get(f"{name}.bias")
    if config.query_key_norm == "head":
        return layer_norm(x, parameters[f"{name}.weight"], bias, eps=config.eps)
    if config.query_key_norm == "heads":
        weight = parameters[f"{name}.weight"]
    else:
        heads = range(x.shape[2])
        weight = stacked([parameters[f"{name}.norms.{head}.weight"] for head in heads])
    ones = np.ones_like(value_of(x), shape=x.shape[-1:])
    return scaled_heads(layer_norm(x, ones, eps=config.eps), weight)


def _mlp(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the MLP branch of normalised x, or that of a mixture of experts."""
    experts = call.config.experts
    if experts is None or not experts.sparse[layer]:
        return _dense_mlp(call, prefix + "mlp.", x)
    module = f"{prefix}{experts.module}."
    y = experts_of_tokens(call.parameters, call.stacks, call.routers, experts, module, x)
    if not experts.shared:
        return y
    shared = _dense_mlp(call, f"{module}{experts.shared_in}.", x)
    if experts.shared_gate:
        (gate,) = call.project(call.parameters, [f"{module}{experts.shared_in}_gate"], x)
        shared = gated(shared, gate)
    return add(y, shared)


def _dense_mlp(call: Call, module: str, x: Any) -> Any:
    """Return the output of an MLP of normalised x."""
    config, names, parameters = call.config, call.config.names, call.parameters
    if call.chunked_mlp:
        return swiglu_mlp(x, *_mlp_weights(call, module))
    if "mlp" in config.fused:
        (fused,) = call.project(parameters, [module + "gate_up_proj"], x)
        gate, up = fused[..., : config.inner], fused[..., config.inner :]
    elif config.gate:
        gate, up = call.project(parameters, [module + "gate_proj", module + names.up], x)
    else:
        (gate,) = call.project(parameters, [module + names.up], x)
    match config.activation:
        case "silu":
            y = swiglu(gate, up)
        case "relu2":
            y = multiply(relu2(gate), up) if config.gate else relu2(gate)
        case "xielu":
            parts = ("alpha_p", "alpha_n", *BUFFERS)
            y = xielu(gate, *(parameters[f"{module}act_fn.{part}"] for part in parts))
        case name if config.gate:
            y = geglu(gate, up, approximate=name == "gelu_tanh")
        case name:
            y = gelu(gate, approximate=name == "gelu_tanh")
    if config.sub_norms:
        y = _divided_norm(call, module, "ffn_sub_norm", y)
    return call.project(parameters, [module + names.down], y)[0]


def _mlp_weights(call: Call, module: str) -> tuple[Any, Any, Any]:
    """Return the weights of gate, up and down; fused checkpoints store gate and up in one."""
    config, parameters = call.config, call.parameters
    down = parameters[f"{module}{config.names.down}.weight"]
    if "mlp" not in config.fused:
        up = parameters[f"{module}{config.names.up}.weight"]
        return parameters[module + "gate_proj.weight"], up, down
    shape, size = (config.inner, config.hidden), config.inner * config.hidden
    fused = parameters[module + "gate_up_proj.weight"].reshape(1, -1)  # tapes only split last axes
    return fused[..., :size].reshape(*shape), fused[..., size:].reshape(*shape), down


def check_chunked(config: Config, adapter: Adapter | None) -> None:
    """Raise a ConfigError unless ``swiglu_mlp`` can compute the MLP of such a model."""
    adapted = [] if adapter is None else [name for name in adapter.scales if ".mlp." in name]
    kind = f"the MLP of a {config.model_type} model"
    if config.experts is not None:
        problem = f"{kind} has experts"
    elif config.bit_layers:
        problem = f"{kind} rounds its weights as BitNet does"
    elif not config.gate:
        problem = f"{kind} has no gate"
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
