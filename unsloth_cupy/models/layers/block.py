"""The transformer block, on arrays or on a tape.

    h = x + norm(attention(norm(x)))
    y = h + norm(mlp(norm(h)))          the config has which of the four norms exist
    y = x + attention(norm(x)) + mlp(norm(x))                   in parallel blocks
    y = x + branch(norm(x))                                     in blocks with a single branch
    h = norm(x), y = norm(a h + b attention(h)), a y + b mlp(y)     with lightning attention
    h = norm(x + attention(x))      y = norm(h + mlp(h))        in BERT
    y = h + mlp(norm(h)) + m        with experts(norm(h)) of the block before as m, in LongCat-Flash

A residual sum and the norm after it are one op, so a block returns the two terms of its sum:
(branch, stream).  Parameters have their Hugging Face names; biases are optional.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError, naming
from ...ops.activations.geglu import geglu
from ...ops.elements.arithmetic import add, scale, scale_by
from ...ops.linear.linear import linear
from ...ops.norms.rms_norm import rms_norm
from ...ops.position.rope_tables import rope_tables
from ...parallel.taped import value_of
from ...parallel.vocabulary import vocab_parallel_embedding
from ...placement import stream
from ...training.checkpoint import CheckpointConfig, checkpoint
from ..adapters.adapter import PREFIX
from ..adapters.outer_weights import embedding_of
from ..configs.config import MLP, OF_BERT, SCALAR, Config, Rope
from ..configs.names import INTO_LAYERS, NORM_OF_INPUTS, TABLE_OF_LAYERS
from ..ranks.division import Division, entered, joined
from .attention_branch import attention_branch
from .call import Call
from .elements import split
from .experts_layer import experts_of_tokens
from .mlp_branch import mlp_and_experts, mlp_branch
from .norms import join, norm_of


def rope_rows(rope: Rope, like: Array) -> Callable[[int], tuple[Array, ...]]:
    """Return a function from a length to cos and sin tables of at least that many positions.

    With ``rope.growth`` the function returns two more tables: cos and sin of queries, multiplied
    by the growth factors; if ``rope.whole``, one more: these factors, (length, 1).
    """

    def scaled(size: int) -> tuple[Array, ...]:
        cos, sin = rope_tables(size, rope.dim, base=rope.base, scaling=rope.scaling, like=like)
        if rope.growth is None:
            return cos, sin
        beta, length = rope.growth
        steps = np.floor((np.arange(size, like=cos) + rope.ahead) / length)
        factors = (1 + beta * np.log1p(steps)).astype(cos.dtype)[:, None]
        if rope.whole:
            return cos, sin, factors
        return cos, sin, cos * factors, sin * factors

    # Each stream has its own tables, at most 8 sizes of them: work on another stream may start
    # before they are written.
    @lru_cache(maxsize=64)
    def on_stream(stream: Any) -> Callable[[int], tuple[Array, ...]]:
        return lru_cache(maxsize=8)(scaled)

    def tables(length: int) -> tuple[Array, ...]:
        # Powers of 2 from 256 on: decoding, where length grows by 1, needs few sizes.
        size = max(256, 1 << (length - 1).bit_length())
        if rope.original is not None:
            # Beyond the original length, the angles depend on the length itself.
            size = min(size, rope.original) if length <= rope.original else length
        return on_stream(stream(like))(size)

    return tables


SHORTCUT = "shortcut"  # an output of experts, among what later blocks use


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


def inputs_of_layers(
    config: Config, parameters: Mapping[str, Any], tokens: Array, x: Any
) -> tuple[Any, ...]:
    """Return the input of each layer, (batch, tokens, size), for embeddings x; () without inputs.

    (norm(hidden^-1/2 x A) + size^1/2 table[token]) / 2^1/2         split among layers
    norm(hidden^-1/2 x A)                                           without a table
    """
    rows, size = config.layer_inputs
    if not size:
        return ()
    module = f"model.{config.names.inputs}"
    own = scale(linear(x, parameters[f"{module}{INTO_LAYERS}.weight"]), factor=config.hidden**-0.5)
    shape, own = own.shape, own.reshape(*own.shape[:-1], config.layers, size)
    own = rms_norm(own, parameters[f"{module}{NORM_OF_INPUTS}.weight"], eps=config.eps)
    own = own.reshape(*shape)
    if rows:
        table = scale(embedding_of(tokens, parameters[TABLE_OF_LAYERS]), factor=size**0.5)
        own = scale(add(own, table), factor=2**-0.5)
    return tuple(split(own, (size,) * config.layers))


def with_positions(call: Call, tokens: Any, x: Any) -> Any:
    """Return embeddings plus positions and token types, if the model has them, and their norm."""
    config, parameters = call.config, call.parameters
    if config.token_types:
        positions = call.attention.positions
        if positions is None:
            positions = np.broadcast_to(np.arange(tokens.shape[1], like=tokens), tokens.shape)
        if tokens.shape[1] > config.positions and call.recurrence.offsets is None:
            problem = f"{tokens.shape[1]} tokens, and the table has {config.positions} positions"
            raise ConfigError(f"Transformer: a row has {problem}; cut the text")
        places, types = (
            embedding_of(ids, parameters[name])
            for ids, name in zip((positions, np.zeros_like(tokens)), OF_BERT, strict=True)
        )
        x = add(add(x, types), places)
    return join(call, "model.", config.embedding_norm, x, None)[0]


def blocks(
    call: Call,
    branch: Any,
    checkpoints: CheckpointConfig | None,
    layers: range | None = None,
    inputs: Sequence[Any] = (),
) -> tuple[Any, Any]:
    """Return the output of all blocks as (branch, stream), with gradient checkpointing if enabled.

    Blocks run one at a time if their parameters are gathered from other ranks.  ``inputs`` are
    those of ``inputs_of_layers``.
    """
    shared = dict[str, Any]()
    layers = range(call.config.layers) if layers is None else layers
    pair = 1 + call.config.paired  # experts' outputs do not leave a checkpoint: see LongCat-Flash
    size, stream = call.config.layers if call.gather is None else pair, None
    run: Callable[..., tuple[Any, Any, Any, Any]] = group_of_blocks
    if checkpoints is not None and checkpoints.enabled:
        size, keep, offload = checkpoints.recompute_every, checkpoints.keep, checkpoints.offload
        size = -(-size // pair) * pair
        if "attention_forward" in keep:
            keep = (*keep, "attention_varlen_forward")  # the same op for packed texts
        run = partial(checkpoint, group_of_blocks, keep=keep, offload=offload)
    for first in range(layers.start, layers.stop, size):
        group = range(first, min(first + size, layers.stop))
        places = dict.fromkeys(map(call.config.prefix_of, group))
        prefixes = tuple(f"{a}{place}" for place in places for a in ("", PREFIX))
        needed = {n: value for n, value in call.parameters.items() if n.startswith(prefixes)}
        routers = None if call.experts.routers is None else list[Any]()
        part = call._replace(parameters=needed, experts=call.experts._replace(routers=routers))
        own = tuple(inputs[group.start : group.stop])
        branch, stream, routed, stored = run(part, group, branch, stream, own, shared)
        shared = shared | stored
        if call.experts.routers is not None:
            call.experts.routers.extend(routed)
    return branch, stream


def group_of_blocks(
    call: Call,
    layers: range,
    branch: Any,
    stream: Any,
    inputs: Sequence[Any] = (),
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any, Any, Any]:
    """Gather the parameters of some blocks; return their (branch, stream) and their routes.

    Also return the keys and values that later blocks share: ``shared`` are those of earlier blocks.
    """
    if call.gather is not None:
        call = call._replace(parameters=call.gather(call.parameters))
    known = {**shared}
    attention = call.attention
    keys = attention.keys._replace(shared=known)
    call = call._replace(attention=attention._replace(keys=keys))
    for layer in layers:
        branch, stream = block(call, layer, branch, stream, layer == layers[-1])
        if call.config.layer_inputs[1] or call.config.layer_scalar:
            x = branch if stream is None else add(branch, stream)
            own = inputs[layer - layers.start] if inputs else None
            branch, stream = _ended(call, call.config.prefix_of(layer), x, own), None
    new = {kind: pair for kind, pair in known.items() if pair is not shared.get(kind)}
    new.pop(SHORTCUT, None)  # the pair of blocks that uses it is in this part
    return branch, stream, call.experts.routers, new


def _ended(call: Call, prefix: str, x: Any, inputs: Any) -> Any:
    """Return the output of a block with the layer's inputs, times the block's number."""
    if inputs is not None:
        module = call.config.names.own_input
        (gate,) = call.project(call.parameters, [f"{prefix}{module}per_layer_input_gate"], x)
        y = geglu(gate, inputs, approximate=call.config.activation == "gelu_tanh")
        (y,) = call.project(call.parameters, [f"{prefix}{module}per_layer_projection"], y)
        x = add(x, norm_of(call, prefix, f"{module}post_per_layer_input_norm", y))
    if not call.config.layer_scalar:
        return x
    factor = value_of(call.parameters[prefix + SCALAR]).reshape(())
    return scale_by(x, factor.astype(x.dtype, copy=False))


def block(call: Call, layer: int, branch: Any, stream: Any, last: bool = False) -> tuple[Any, Any]:
    """Return the output of a block as (branch, stream); the next op computes their sum.

    ``last``: nothing reads the output within the same checkpoint.
    """
    config, norms = call.config, call.config.norms_of(layer)
    prefix = config.prefix_of(layer)
    x, stream = join(call, prefix, norms.before_attention, branch, stream)
    ranks = call.division
    if config.post_norm:  # x is the sum: there is no norm before the branches
        branch = attention_branch(call, layer, prefix, x)
        x, _ = join(call, prefix, norms.after_attention, branch, x)
        return join(call, prefix, norms.after_mlp, mlp_branch(call, layer, prefix, x), x)[0], None
    if config.lightning is not None:  # residual sums go around the normalised input
        stream_of, branch_of = config.lightning.scales[not config.attends(layer)]
        branch = _scaled(attention_branch(call, layer, prefix, x), branch_of)
        x, _ = join(call, prefix, norms.before_mlp, branch, _scaled(x, stream_of))
        stream_of, branch_of = config.lightning.scales[2]
        return _scaled(mlp_branch(call, layer, prefix, x), branch_of), _scaled(x, stream_of)
    if config.single:
        if config.layer_types[layer] == MLP:
            return mlp_branch(call, layer, prefix, x, last), stream
        return attention_branch(call, layer, prefix, x), stream
    if config.parallel:
        x = entered(ranks, x)
        branch = add(attention_branch(call, layer, prefix, x), mlp_branch(call, layer, prefix, x))
        return _scaled(joined(ranks, branch), config.residual_scale), stream
    # Latent attention calls ``entered`` after its short vectors, which every rank computes whole.
    entering = x if config.latent is not None else entered(ranks, x)
    branch = joined(ranks, attention_branch(call, layer, prefix, entering))
    branch = _scaled(norm_of(call, prefix, norms.after_attention, branch), config.residual_scale)
    x, stream = join(call, prefix, norms.before_mlp, branch, stream)
    unread = last and ranks is None and norms.after_mlp is None and config.residual_scale == 1
    if config.experts is not None and config.experts.beside:
        branch = mlp_and_experts(call, layer, prefix, x, stream)
    elif config.experts is not None and config.experts.shortcut:
        branch = _with_shortcut(call, layer, prefix, entered(ranks, x))
    else:
        branch = joined(ranks, mlp_branch(call, layer, prefix, entered(ranks, x), unread))
    branch = _scaled(norm_of(call, prefix, norms.after_mlp, branch), config.residual_scale)
    return branch, stream


def _with_shortcut(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the output of the MLP, plus the shortcut of the block before; store a new one."""
    experts: Any = call.config.experts
    known: Any = call.attention.keys.shared
    branch = joined(call.division, mlp_branch(call, layer, prefix, x))
    if not experts.sparse[layer]:
        return add(branch, known[SHORTCUT])
    y = experts_of_tokens(call, layer, prefix + experts.prefix, x)
    known[SHORTCUT] = joined(call.division, y)
    return branch


def _scaled(branch: Any, factor: float) -> Any:
    """Return the output of a branch times a factor."""
    return branch if factor == 1 else scale(branch, factor=factor)
