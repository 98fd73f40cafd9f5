"""A layer of a mixture of experts, on arrays or on a tape: its router, its experts, its loss.

    logits = router(x)        y = sum over k of weights[k] * expert[k](x)

If logits are equal, the expert with the lower index comes first, on every device.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, rounded
from ...core.dtypes import FLOAT32, Array
from ...ops.activations.geglu import geglu
from ...ops.activations.relu2 import relu2
from ...ops.activations.swiglu import swiglu
from ...ops.elements.arithmetic import add, scale
from ...ops.elements.cast import cast
from ...ops.experts.experts_mlp import experts_mlp
from ...ops.experts.grouped_linear import grouped_linear
from ...ops.experts.route import Routes, route, route_backward, weights_of
from ...ops.experts.router_losses import balance_loss
from ...parallel.communicator import Communicator
from ...parallel.taped import taped, value_of
from ...training.chunks import chunk_of, in_chunks
from ..adapters.adapter_stacks import Adapted
from ..adapters.outer_weights import made_of
from ..adapters.through import through_stack
from ..configs.config import CORRECTION, LATENT, Experts
from .call import Call, parameters_of
from .elements import clamped_swiglu, split, stacked
from .expert_ranks import at_their_ranks, balance_of, sums_of_balance
from .sorted_rows import by_expert


class Routed(NamedTuple):
    """The output of a router for the tokens of a call."""

    logits: Any  # (batch, tokens, experts)
    experts: Array  # (batch, tokens, k)


def experts_of_tokens(call: Call, layer: int, module: str, x: Any, unread: bool = False) -> Any:
    """Return the weighted sum of the chosen experts' outputs for each token of normalised x.

    ``unread``: see ``in_chunks``.
    """
    parameters, (stacks, routers, chosen, ranks) = call.parameters, call.experts
    experts: Any = call.config.experts
    logits = router_logits(call, module, x)
    if chosen is not None:
        chosen = chosen[..., sum(experts.sparse[:layer]), :]  # (batch, tokens, k)
    correction = parameters.get(f"{module}{experts.correction_in}{CORRECTION}")
    routes = routes_of(experts, logits, correction, chosen)
    if routers is not None:
        routers.append(Routed(logits, value_of(routes.experts)))
    gate_up, down = (f"{module}experts.{name}" for name in experts.names)
    into, back = (f"{module}{name}" for name in LATENT)
    if experts.latent is not None:
        (x,) = call.project(parameters, [into], x)

    own = parameters_of(call, f"{module}experts")

    def of_rows(parameters: Mapping[str, Any], part: slice, rows: Sequence[Any]) -> Any:
        x, chosen, weights = rows
        routes = Routes(chosen, weights)
        if gate_up in stacks or down in stacks:
            return adapted_experts(parameters, stacks, experts, (gate_up, down), x, routes)
        return experts_mlp(
            x,
            parameters[gate_up],
            parameters[down],
            routes,
            parameters.get(f"{gate_up}_bias"),
            parameters.get(f"{down}_bias"),
            activation=experts.activation,
            **experts.clamps,
        )

    def computed(x: Any, routes: Routes) -> Any:
        k, inner = routes.experts.shape[-1], parameters[down].shape[-1]
        size = chunk_of(call.chunked_mlp, x, own.values(), k * inner)
        if size is None:
            return of_rows(own, slice(None), (x, *routes))
        last = unread and ranks is None and experts.latent is None
        return in_chunks(of_rows, (x, *routes), own, size, unread=last)

    if ranks is None:
        y = computed(x, routes)
    else:
        y = at_their_ranks(ranks, experts, x, routes, computed)
    if experts.latent is not None:
        (y,) = call.project(parameters, [back], y)
    return y


def adapted_experts(
    parameters: Mapping[str, Any],
    stacks: Mapping[str, Adapted],
    experts: Experts,
    names: tuple[str, str],
    x: Any,
    routes: Routes,
) -> Any:
    """Return the result of ``experts_mlp`` with low-rank terms in the products of the stacks."""
    rows = x.reshape(-1, x.shape[-1])  # (batch * tokens, hidden)
    chosen = value_of(routes.experts)
    sorted_rows, offsets = by_expert(chosen, parameters[names[0]].shape[0])
    product = partial(_product, parameters, stacks, offsets)
    both = product(names[0], sorted_rows.gathered(rows))
    if experts.activation == "relu2":
        act = relu2(both)
    else:
        gate, up = split(both, (experts.inner, experts.inner))
        match experts.activation:
            case "swiglu_clamped":
                act = clamped_swiglu(gate, up, **experts.clamps)
            case "swiglu":
                act = swiglu(gate, up)
            case name:
                act = geglu(gate, up, approximate=name == "geglu_tanh")
    out = product(names[1], act)
    weights = routes.weights.reshape(-1, chosen.shape[-1])
    return sorted_rows.summed(out, weights).reshape(*x.shape)


def _product(
    parameters: Mapping[str, Any], stacks: Mapping[str, Adapted], offsets: Array, name: str, x: Any
) -> Any:
    """Return the grouped product of sorted rows with a stack, plus the adapter's term."""
    adapted = stacks.get(name)
    if adapted is not None and adapted.into is not None:
        pair, bias = adapted.pair(parameters), parameters.get(f"{name}_bias")
        how: Any = {"scale": adapted.scale, "make": partial(adapted.into.of_sum, name)}
        return through_stack(x, parameters[name], *pair, offsets, bias, **how)
    y = grouped_linear(x, parameters[name], offsets, parameters.get(f"{name}_bias"))
    if adapted is None:
        return y
    a, b = (made_of([each], x.dtype, contiguous) for each in adapted.pair(parameters))
    low = grouped_linear(grouped_linear(x, a, offsets), b, offsets)
    return add(y, scale(low, factor=adapted.scale))


def router_logits(call: Call, module: str, x: Any) -> Any:
    """Return the logits of the router, (batch, tokens, experts)."""
    experts: Any = call.config.experts
    name, parameters = f"{module}{experts.router}", call.parameters
    weight = parameters[f"{name}.weight"]
    if experts.wide:  # the router's own dtype is float32: see ``Experts.wide``
        x, wide = (each if each.dtype.itemsize > 2 else cast(each, FLOAT32) for each in (x, weight))
        parameters = parameters if wide is weight else {**parameters, f"{name}.weight": wide}
    return call.project(parameters, [name], x)[0]


def routes_of(experts: Experts, logits: Any, correction: Any, numbers: Any = None) -> Routes:
    """Return the experts of each token, and their weights.

    ``numbers`` are the experts of an earlier pass, -1 where the router chooses now.
    """
    if experts.jitter is not None:
        return sparse_mixer(logits, experts.jitter, numbers)
    options: dict[str, Any] = {
        "k": experts.k,
        "scores": experts.scores,
        "normalize": experts.normalize,
        "groups": experts.groups,
        "top_groups": experts.top_groups,
        "scale": experts.scale,
    }
    if numbers is None:
        return route(logits, bias=correction, **options)
    value, bias = value_of(logits), value_of(correction)
    own = route(value, bias=bias, **options).experts
    chosen = np.where(numbers < 0, own, numbers).astype(np.int32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"logits": route_backward(dy, value, bias, chosen, **options)[0]}

    weights = weights_of(value, bias, chosen, **options)
    return Routes(chosen, taped("replayed", weights, back, logits=logits))


def sparse_mixer(logits: Any, jitter: float, choices: Any = None) -> Routes:
    """Return the two experts with the largest logits, without the noise of pretraining.

    Where ``choices`` are not -1, they replace the experts with the largest logits.  The weight of
    an expert is its probability in a softmax over the logits that are nearly as large as its own:
    ``(own - logit) / max(abs(logit), own) <= 2 * jitter``.  The second softmax excludes the first
    expert.

    Liu and others, GRIN: GRadient-INformed MoE, 2024.
    """
    value = value_of(logits)
    wide = value.astype(np.promote_types(value.dtype, FLOAT32), copy=False)
    numbers, rest, parts = np.arange(wide.shape[-1], like=value), wide, []
    for number in range(2):
        first = rest.argmax(axis=-1)[..., None]
        if choices is not None:
            before = choices[..., number : number + 1]
            first = np.where(before < 0, first, before)
        top = np.take_along_axis(rest, first, axis=-1)
        near = (top - wide) / np.maximum(np.abs(wide), top) <= 2 * jitter
        masked = np.where(near, rest, -np.inf)
        p = np.exp(masked - top)
        parts.append((numbers == first, p / p.sum(axis=-1, keepdims=True), first))
        rest = np.where(numbers == first, -np.inf, rest)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dlogits = np.zeros_like(wide)
        for number, (own, p, first) in enumerate(parts):
            weight = np.take_along_axis(p, first, axis=-1)
            dlogits += dy[..., number : number + 1].astype(wide.dtype) * weight * (own - p)
        return {"logits": rounded(dlogits, value.dtype)}

    weights = np.concatenate([np.take_along_axis(p, first, axis=-1) for _, p, first in parts], -1)
    experts = np.concatenate([first for _, _, first in parts], axis=-1).astype(np.int32)
    return Routes(
        experts, taped("sparse_mixer", rounded(weights, value.dtype), back, logits=logits)
    )


def router_loss(
    experts: Experts,
    logits: Sequence[Any],
    mask: Array | None,
    groups: Sequence[Communicator] = (),
) -> Any:
    """Return ``balance_loss`` of the logits of all layers, without padding: (), a Var on a tape.

    With groups of ranks, the rows of all ranks count, and the result is this rank's term of a sum
    over ranks.  As in transformers, the counted experts are those with the largest logits, even
    where a correction has chosen others.
    """
    if groups:
        return balance_of(router_sums(experts, logits, mask), experts.k, groups)
    every = stacked(logits)
    return balance_loss(every, route(value_of(every), k=experts.k).experts, mask=mask)


def router_sums(
    experts: Experts, logits: Sequence[Any], mask: Array | None, before: Any = None
) -> Any:
    """Return the sums for ``balance_of``: the sums of these layers plus the sums ``before``."""
    if not logits:
        return before
    every = stacked(logits)
    return sums_of_balance(every, route(value_of(every), k=experts.k).experts, mask, before)
