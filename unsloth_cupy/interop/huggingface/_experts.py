"""Experts for transformers' registry of expert functions, which every mixture of experts uses.

A layer is one op if ``experts_mlp`` has its gate, and the rows of gate and up are two halves.  For
other layers, rows are sorted by expert, and the module's own gate runs between two grouped
products.
"""

from typing import Any

import torch
from torch import nn

from ..torch import embedding, experts_mlp, geglu, grouped_linear, sort_by_expert, swiglu
from ._changes import EXPERTS, Changes, own_forward
from ._trials import Refused, draw, near

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as REGISTRY
except ImportError:  # transformers before 5.0
    REGISTRY = None

NAME = "unsloth_cupy"
# attribute of a module: the options of ``experts_mlp``; None if the module's own gate runs
FORM = "_unsloth_cupy_experts"
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
# attributes that the registry's decorator sets
FLAGS = {"config", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed"} | {
    "is_concatenated",
    "_is_expert_parallel",
}
ROWS = 12  # rows of a trial


def experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Return the weighted sum of the results of each row's experts, (rows, hidden)."""
    first = self.gate_up_proj if self.has_gate else self.up_proj
    x = hidden_states if torch.is_autocast_enabled() else hidden_states.to(first.dtype)
    stacks = first, self.down_proj
    if self.is_transposed:
        stacks = first.transpose(1, 2), self.down_proj.transpose(1, 2)
    biases: Any = (None, None)
    if self.has_bias:
        biases = (
            self.gate_up_proj_bias if self.has_gate else self.up_proj_bias,
            self.down_proj_bias,
        )
    form = vars(self).get(FORM)
    if form is None:
        y = _by_its_gate(self, x, top_k_index, top_k_weights, stacks, biases)
    else:
        weights = top_k_weights.to(_wide_or_own(top_k_weights, x))
        y = experts_mlp(x, *stacks, (top_k_index, weights), *biases, **form)
    return y.to(hidden_states.dtype)


def _wide_or_own(weights: Any, x: Any) -> torch.dtype:
    """Return the dtype of weights for the op: float32, or the dtype of x."""
    dtype: torch.dtype = weights.dtype
    return dtype if dtype in (x.dtype, torch.float32) else torch.float32


def _by_its_gate(
    module: Any, x: Any, chosen: Any, weights: Any, stacks: Any, biases: Any
) -> torch.Tensor:
    """Compute ``experts`` with the module's own activation, gate and last norm."""
    k = chosen.shape[-1]
    order, offsets = sort_by_expert(chosen, module.num_experts)
    both = grouped_linear(embedding(order // k, x), stacks[0], offsets, biases[0])
    act = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    out = grouped_linear(act.to(both.dtype), stacks[1], offsets, biases[1])
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    places = torch.empty_like(order).scatter_(0, order.long(), _count(order))
    own = embedding(places, out).view(*chosen.shape, -1) * weights[..., None]  # (rows, k, hidden)
    return own.sum(dim=-2)


def _count(order: Any) -> Any:
    """Return 0, 1, 2, ... as a tensor like ``order``."""
    return torch.arange(len(order), dtype=order.dtype, device=order.device)


def asks(module: nn.Module) -> bool:
    """Return whether a module's experts are computed by a function of the registry."""
    return REGISTRY is not None and vars(module).keys() >= FLAGS


def own(module: nn.Module) -> bool:
    """Return whether a module has stacks of experts, and does not use the registry."""
    stacks = [p for p in module._parameters.values() if p is not None and p.ndim == 3]
    return "Experts" in type(module).__name__ and bool(stacks) and not asks(module)


def take(changes: Changes, modules: list[Any]) -> None:
    """Make modules with one config compute their experts here; raise Refused if one differs."""
    config, expected = modules[0].config, []
    for module in modules:
        if module._is_expert_parallel:
            raise Refused("ranks divide its experts")
        if not own_forward(module):
            raise Refused("another library replaced its forward")
        expected.append(_tried(module))
    changes.set(config, EXPERTS, NAME)
    for module, result in zip(modules, expected, strict=True):
        for form in (*_forms(module), None):
            count = len(changes)
            changes.set(module, FORM, form)
            if near(_tried(module), result, result.dtype):
                break
            changes.since(count)
        else:
            raise Refused("no formula known gives the same")


def _tried(module: Any) -> torch.Tensor:
    """Return the result of a module for random rows, with random biases and norms."""
    down = module.down_proj
    hidden, k = down.shape[2 if module.is_transposed else 1], min(3, module.num_experts)
    x = draw(ROWS, hidden, like=down)
    chosen = draw(ROWS, module.num_experts).topk(k).indices.to(down.device)
    weights = draw(ROWS, k, like=down).abs()
    random = {n: draw(*p.shape, like=p) for n, p in module.named_parameters() if p.ndim < 3}
    result: torch.Tensor = torch.func.functional_call(module, random, (x, chosen, weights))
    return result


def _forms(module: Any) -> list[dict[str, Any]]:
    """Return the options of ``experts_mlp`` for the gate of a module: one entry or none."""
    if module.has_post_expert_norm or (module.has_gate and not module.is_concatenated):
        return []
    both = 4 * draw(2, 1000)  # with values beyond the limits of a gate
    try:
        result = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    except Exception:  # the gate needs more arguments
        return []
    names = ("swiglu", "geglu", "geglu_tanh") if module.has_gate else ("relu2",)
    forms: list[dict[str, Any]] = [{"activation": name} for name in names]
    limits, alphas = (_number(module, names) for names in (LIMITS, ALPHAS))
    if module.has_gate and limits is not None and alphas is not None:
        forms.append({"activation": "swiglu_clamped", "limit": limits, "alpha": alphas})
    return [form for form in forms if near(_gated(both, **form), result, torch.float32)]


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    """Return the first of these attributes that is a number."""
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def _gated(both: torch.Tensor, activation: str, **numbers: float) -> torch.Tensor:
    """Compute the gate that ``experts_mlp`` has between its products."""
    if activation == "relu2":
        return torch.relu(both).square()
    gate, up = both.chunk(2, dim=-1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=numbers["limit"]), up.clamp(-numbers["limit"], numbers["limit"])
        return (up + 1) * gate * torch.sigmoid(numbers["alpha"] * gate)
    if activation == "swiglu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate=activation == "geglu_tanh")


if REGISTRY is not None:
    REGISTRY.register(NAME, experts)
