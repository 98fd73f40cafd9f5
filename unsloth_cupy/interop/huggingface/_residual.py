"""A residual and the norm after it in one pass: layers that add a branch and normalize the sum."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ._changes import Changes, own_forward
from ._trials import Call, Refused, Texts, check_alone, near

ATTENTION, MLP = "self_attn", "mlp"
BEFORE = {"input_layernorm", "post_attention_layernorm", ATTENTION, MLP}
# True: forward itself must checkpoint; from transformers 5.0 on ``__call__`` does
CHECKPOINTS_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)
CACHES = ("cache", "past_key_values", "layer_past")  # names of one argument, by release and layer
AROUND = BEFORE | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # as in Gemma 2


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a layer with the parts BEFORE or AROUND; None for other modules."""
    names = {
        name for name, child in module.named_children() if any(True for _ in child.parameters())
    }
    if names == BEFORE:
        return _layer("post_attention_layernorm", None, None)
    if names == AROUND:
        return _layer(
            "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
        )
    return None


def take(
    changes: Changes, layer: nn.Module, forward: Callable[..., Any], call: Call | None, texts: Texts
) -> None:
    """Replace a layer's forward; raise Refused if its norm is not replaced, or results differ."""
    middle: Any = (
        getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
    )
    if call is None:
        raise Refused("it was not called")
    if own_forward(middle):
        raise Refused("its norm was not replaced")
    if not own_forward(layer):
        raise Refused("another library replaced its forward")
    check_alone(layer, AROUND, lambda: texts.kept(call.again(layer)), texts.kept(call.result))
    changes.forward(layer, forward)
    result, expected = call.again(layer), call.result
    if type(result) is not type(expected) or not near(
        texts.kept(result), texts.kept(expected), texts.kept(expected).dtype
    ):
        raise Refused("it does more than add two branches")


def _layer(middle: str, after_attention: str | None, after_mlp: str | None) -> Callable[..., Any]:
    """Return the forward of a layer; ``middle`` is the norm before the MLP, which also adds."""

    def added(self: Any, hidden_states: Any, **options: Any) -> Any:
        branch = self.input_layernorm(hidden_states)
        branch = self.self_attn(hidden_states=branch, **options)
        branch = branch[0] if isinstance(branch, tuple) else branch  # a recurrence has no scores
        if after_attention:
            branch = getattr(self, after_attention)(branch)
        branch, stream = getattr(self, middle)(branch, residual=hidden_states)
        branch = self.mlp(branch)
        return stream + (getattr(self, after_mlp)(branch) if after_mlp else branch)

    def forward(self: Any, hidden_states: Any, **options: Any) -> Any:
        if not _checkpoints(self):
            return added(self, hidden_states, **options)
        cached = any(options.get(name) is not None for name in CACHES)
        if cached or options.get("use_cache"):
            own = type(self).forward  # transformers' forward warns, and drops the cache
            return own(self, hidden_states, **options)
        return self._gradient_checkpointing_func(partial(added, self, **options), hidden_states)

    return forward


def _checkpoints(layer: Any) -> bool:
    """Return whether a layer's forward must apply gradient checkpointing itself."""
    return (
        CHECKPOINTS_FORWARD
        and isinstance(layer, GradientCheckpointingLayer)
        and layer.gradient_checkpointing
        and layer.training
    )
