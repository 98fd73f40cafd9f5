"""Replacements for parts that are a single module: norms, gated MLPs, embeddings, LoRA layers.

Each function here checks the structure of a module.  It returns candidates for the forward, with
the trial that chooses between them; None if the module is another part; or it raises Refused with
the reason.  The new forwards contain only constants, so that a deep copy of a model calls its own
modules.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..quantized_layers import kind_of
from ..torch import (
    embedding,
    gated_rms_norm,
    geglu,
    layer_norm_forward,
    lora_linear,
    rms_norm,
    rms_norm_forward,
    swiglu,
)
from ._quantized import adapted_base, check, computed_in
from ._trials import Candidate, Refused, agree, check_alone, draw

Forward = Callable[..., Any]
GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
WIDTH = 16  # of the rows in the trial of a norm without weights, which has no width of its own
ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")


def norm(module: nn.Module, _: torch.dtype) -> Candidate | None:
    """Return the formulas that a norm may have, for a trial with random weights in float32."""
    eps = eps_of(module)
    named = "Norm" in type(module).__name__ and "Batch" not in type(module).__name__
    if module._modules or not (named or isinstance(eps, float)):
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if not module._parameters and isinstance(eps, float):  # as for the values of Gemma 4
        _check_arguments(module)
        return Candidate([_plain_rms_norm(eps)], (draw(2, 3, WIDTH),), {}, torch.float32)
    if weight is None or weight.ndim != 1 or not isinstance(eps, float):
        raise Refused("it does not have one vector of weights and an eps")
    gated = _other_arguments(module) == ["gate"]
    if not gated:
        _check_arguments(module)
    random = {
        n: draw(*p.shape).to(p.device) for n, p in module._parameters.items() if p is not None
    }
    forwards = [_layer_norm(eps)]
    if bias is None:
        forwards = [_rms_norm(eps, 0.0), _rms_norm(eps, 1.0), *forwards]
    arrays = draw(2, 3, *weight.shape).to(weight.device)
    if gated:
        forwards = [_gated_rms_norm(eps), _norm_of_gated(eps), _norm_by_sigmoid(eps)]
    return Candidate(forwards, (*arrays[: 1 + gated],), random, torch.float32)


def _other_arguments(module: nn.Module) -> list[str]:
    """Return the parameters of a module's forward after self and x."""
    return [*inspect.signature(type(module).forward).parameters][2:]


def _check_arguments(module: nn.Module) -> None:
    """Raise Refused if a forward has more than one argument, which a trial does not cover."""
    if others := _other_arguments(module):
        raise Refused(f"its forward also reads {', '.join(others)}")


def eps_of(module: nn.Module) -> Any:
    """Return the eps of a norm; None if it has no such attribute."""
    attributes = vars(module)
    return attributes.get("variance_epsilon", attributes.get("eps"))


def _rms_norm(eps: float, offset: float) -> Forward:
    """Return a forward that computes ``rms_norm`` with weights plus ``offset``."""

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        weight = _weight_for(self, x)
        y, h, _ = rms_norm_forward(x, weight, residual, eps=eps, offset=offset)
        return y if residual is None else (y, h)

    return forward


def _plain_rms_norm(eps: float) -> Forward:
    """Return a forward that computes ``rms_norm`` without weights."""

    def forward(_: Any, x: Any) -> Any:
        return rms_norm(x, x.new_ones(x.shape[-1]), eps=eps)

    return forward


def _weight_for(module: Any, x: Any) -> Any:
    """Return the weight of a norm for x; float32 for a float32 x, as residuals of Mamba2 are."""
    return module.weight.float() if x.dtype is torch.float32 else module.weight


def _gated_rms_norm(eps: float) -> Forward:
    """Return a forward that normalizes, then multiplies by the swish of a gate."""

    def forward(self: Any, x: Any, gate: Any = None) -> Any:
        weight = _weight_for(self, x)
        if gate is None:
            return rms_norm(x, weight, eps=eps)
        return gated_rms_norm(x, gate.to(x.dtype), weight, eps=eps)

    return forward


def _norm_of_gated(eps: float) -> Forward:
    """Return a forward that multiplies by the swish of a gate, then normalizes."""

    def forward(self: Any, x: Any, gate: Any = None) -> Any:
        wide = x if gate is None else swiglu(gate.float(), x.float())
        return rms_norm(wide, _weight_for(self, wide), eps=eps).to(x.dtype)

    return forward


def _norm_by_sigmoid(eps: float) -> Forward:
    """Return a forward that normalizes, then multiplies by the sigmoid of a gate; rounded once."""

    def forward(self: Any, x: Any, gate: Any) -> Any:
        wide = rms_norm(x.float(), self.weight.float(), eps=eps)
        return (wide * gate.float().sigmoid()).to(x.dtype)

    return forward


def _layer_norm(eps: float) -> Forward:
    """Return a forward that computes ``layer_norm``."""

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        bias = getattr(self, "bias", None)
        y, h, _, _ = layer_norm_forward(x, self.weight, bias, residual, eps=eps)
        return y if residual is None else (y, h)

    return forward


def mlp(module: nn.Module, dtype: torch.dtype) -> Candidate | None:
    """Return the candidates for a gated MLP; activations are compared first, on -8 .. 8."""
    names = module._modules.keys()
    if "Experts" in type(module).__name__ and module._parameters:
        return None  # the part "experts"
    acts: list[Any] = [getattr(module, name, None) for name in ACTIVATIONS]
    act = next(filter(callable, acts), None)
    if act is None or not any(
        isinstance(m, nn.Linear) or hasattr(m, "in_features") for m in module.children()
    ):
        return None
    if not any(gated <= names for gated in GATED):
        raise Refused("it has no gate and up with one activation")
    _check_arguments(module)
    fused = "gate_up_proj" in names
    first: Any = module.gate_up_proj if fused else module.gate_proj
    gates = [gate for gate in (swiglu, _geglu(True), _geglu(False)) if _is_gate(act, gate)]
    if not gates:
        raise Refused(f"its activation is {type(act).__name__}")
    device = next(module.parameters()).device
    sample = draw(1, first.in_features).to(device, dtype)
    check_alone(module, {*GATED[0], *GATED[1]}, partial(module, sample), module(sample))
    return Candidate([_gated(gate, fused) for gate in gates], (sample,), {}, dtype)


def _geglu(approximate: bool) -> Forward:
    """Return ``geglu`` with the exact or the approximate GELU."""
    return lambda gate, up: geglu(gate, up, approximate=approximate)


def _is_gate(act: Any, gate: Forward) -> bool:
    """Return whether an activation is the activation of a gate."""
    numbers = torch.linspace(-8, 8, 999)  # a range in which the activations differ
    return agree(act, lambda x: gate(x, torch.ones_like(x)), [numbers], torch.float32)


def _gated(gate: Forward, fused: bool) -> Forward:
    """Return the forward of a gated MLP; ``fused`` if gate and up are one projection."""

    def forward(self: Any, x: Any) -> Any:
        if fused:
            return self.down_proj(gate(*self.gate_up_proj(x).chunk(2, -1)))
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))

    return forward


def table(module: nn.Module, dtype: torch.dtype) -> Candidate | None:
    """Return the candidate for an embedding that only looks up rows of a table."""
    if not isinstance(module, nn.Embedding):
        return None
    scale = module._buffers.get("embed_scale")
    scaled = scale is not None and scale.numel() == 1
    if type(module).forward is not nn.Embedding.forward and not scaled:
        raise Refused("it does more than look up")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise Refused("its gradient is sparse or scaled, or its rows are bounded")
    tokens = torch.arange(min(5, module.num_embeddings), device=module.weight.device)
    return Candidate([_lookup(module.padding_idx, scaled)], (tokens,), {}, dtype)


def _lookup(padding: int | None, scaled: bool) -> Forward:
    """Return the forward of an embedding; the row of the padding token has no gradient.

    ``scaled``: rows are multiplied by ``embed_scale``, rounded to their dtype, as in Gemma.
    """

    def forward(self: Any, tokens: Any) -> Any:
        x = embedding(tokens, self.weight)
        if padding is not None and x.requires_grad:
            x = torch.where((tokens == padding)[..., None], x.detach(), x)
        return x * self.embed_scale.to(x.dtype) if scaled else x

    return forward


def lora(module: nn.Module, dtype: torch.dtype) -> Candidate | None:
    """Return the candidate for a linear layer of peft with LoRA or DoRA; random adapters."""
    if not {"base_layer", "lora_A", "lora_B"} <= module._modules.keys():
        return None
    layer: Any = module
    base: Any = layer.base_layer
    frozen = kind_of(base) is not None
    if frozen:
        check(base)
    elif type(base) is not nn.Linear:
        raise Refused(f"its base layer is {type(base).__name__}, not a linear layer")
    if layer.lora_variant.keys() - layer.lora_magnitude_vector or any(layer.lora_bias.values()):
        raise Refused("it is a variant of LoRA, or has biases")
    random = {
        f"{side}.{name}.weight": draw(*each.weight.shape, like=each.weight)
        for side in ("lora_A", "lora_B")
        for name, each in getattr(layer, side).items()
    }
    random |= {
        f"lora_magnitude_vector.{name}.weight": draw(*each.weight.shape, like=each.weight)
        for name, each in layer.lora_magnitude_vector.items()
    }
    sample = draw(2, layer.in_features).to(base.weight.device)
    sample = sample.to(dtype if frozen else base.weight.dtype)
    least_exact = computed_in(base, dtype) if frozen else dtype
    return Candidate([_adapted(type(layer).forward)], (sample,), random, least_exact)


def _adapted(plain: Forward) -> Forward:
    """Return the forward of a layer with one active adapter; other calls run ``plain``."""

    def forward(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or args or options or self.disable_adapters or self.merged:
            return plain(self, x, *args, **options)
        base, a, b = self.base_layer, self.lora_A[active[0]], self.lora_B[active[0]]
        weight = base.weight if type(base) is nn.Linear else adapted_base(base, x)
        if weight is None:
            return plain(self, x)
        magnitude = None
        if active[0] in self.lora_magnitude_vector:
            magnitude = self.lora_magnitude_vector[active[0]].weight
        elif active[0] in self.lora_variant:
            return plain(self, x)
        dora = magnitude is not None and tuple(magnitude.shape) != tuple(weight.shape[:1])
        if dora or a.weight.ndim != 2 or weight.ndim != 2:
            return plain(self, x)  # ZeRO gathers weights only for the forward of their own layer
        bias = base.bias if base.bias is None or weight is base.weight else base.bias.to(x.dtype)
        dropout = self.lora_dropout[active[0]]
        share = dropout.p if self.training and isinstance(dropout, nn.Dropout) else 0.0
        seed = torch.randint(2**62, ()) if share else None
        return lora_linear(
            x, weight, a.weight, b.weight, scale=self.scaling[active[0]], bias=bias,
            magnitude=magnitude, dropout=share, seed=seed,
        )  # fmt: skip

    return forward
