"""A draft head's block: states that predict the token after the next.

    x_i = eh_proj [norm(e_{i+1}); norm(h_i)]
    y_i = norm(block(x)_i)

``configs.draft_heads`` has the names of the parameters.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...training.checkpoint import CheckpointConfig, checkpoint
from ..configs.config import Config
from ..configs.draft_heads import with_blocks
from ..configs.names import HEAD, TABLE
from .block import block
from .call import Call
from .elements import beside
from .head import head_weight
from .norms import join, norm_of


def draft_states(
    call: Call, head: int, states: Any, embeddings: Any, step: CheckpointConfig | None = None
) -> Any:
    """Return the normalised states of a head, (batch, tokens, hidden).

    ``states`` are those of the model, or of the head before; ``embeddings`` those of the tokens
    that follow.  With gradient checkpointing in ``step``, backward computes the block again.
    """
    layer = call.config.layers + head
    call = call._replace(config=with_blocks(call.config))
    needed = _of_layer(call.parameters, layer)
    call = call._replace(parameters=needed)
    if step is None or not step.enabled:
        return _computed(call, layer, states, embeddings)
    run = partial(checkpoint, _computed, keep=step.keep, offload=step.offload)
    return run(call, layer, states, embeddings)


def _computed(call: Call, layer: int, states: Any, embeddings: Any) -> Any:
    """Return the normalised output of a head's block."""
    if call.gather is not None:
        call = call._replace(parameters=call.gather(call.parameters))
    prefix = f"model.layers.{layer}."
    pair = norm_of(call, prefix, "enorm", embeddings), norm_of(call, prefix, "hnorm", states)
    (x,) = call.project(call.parameters, [f"{prefix}eh_proj"], beside(*pair))
    branch, stream = block(call, layer, x, None, last=True)
    return join(call, prefix, "shared_head.norm", branch, stream)[0]


def _of_layer(parameters: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the parameters of a head, without tables of its own."""
    prefix = f"model.layers.{layer}."
    ends = f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"
    return {n: each for n, each in parameters.items() if n.startswith(prefix) and n not in ends}


def with_tables(
    config: Config, head: int, parameters: Mapping[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Return config and parameters in which a head's own tables, if any, are the model's."""
    prefix = f"model.layers.{config.layers + head}."
    table = parameters.get(f"{prefix}embed_tokens.weight", parameters[TABLE])
    weight = parameters.get(f"{prefix}shared_head.head.weight", head_weight(config, parameters))
    return replace(config, tied=False), {**parameters, TABLE: table, HEAD: weight}
