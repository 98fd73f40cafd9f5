"""A layer of a mixture of experts, on arrays or on a tape: its router, its experts, its loss.

    logits = router(x)        y = sum over k of weights[k] * expert[k](x)

If logits are equal, the expert with the lower index comes first, on every device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, rounded
from ...core.dtypes import FLOAT32, Array
from ...ops.activations.geglu import geglu
from ...ops.activations.relu2 import relu2
from ...ops.activations.softmax import softmax
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
from ..configs.config import LATENT, Experts
from .call import Call, parameters_of
from .elements import clamped_swiglu, split, stacked
from .expert_ranks import at_their_ranks, balance_of, sums_of_balance
from .sorted_rows import by_expert


class Routed(NamedTuple):
    """The output of a router for the tokens of a call."""

    logits: Any  # (batch, tokens, experts)
    experts: Array  # (batch, tokens, k); of layers with fewer, the number after the last expert


def experts_of_tokens(
    call: Call, layer: int, module: str, x: Any, unread: bool = False, of_router: Any = None
) -> Any:
    """Return the weighted sum of the chosen experts' outputs for each token of normalised x.

    ``unread``: see ``in_chunks``.  ``of_router`` is the router's input, if other than x.
    """
    parameters, (stacks, routers, chosen, ranks) = call.parameters, call.experts
    experts: Any = call.config.experts
    logits = router_logits(call, module, x if of_router is None else of_router)
    if chosen is not None:
        chosen = chosen[..., sum(experts.sparse[:layer]), : experts.k_of(layer)]
    prefix = module.removesuffix(experts.prefix)
    correction = parameters.get(prefix + experts.correction)
    k = experts.k_of(layer)
    own_experts = experts if k == experts.k else replace(experts, k=k)
    routes = routes_of(own_experts, logits, correction, chosen)
    if routers is not None:
        routers.append(Routed(logits, _filled(value_of(routes.experts), experts)))
    if experts.beside:
        routes = _times(routes, parameters[f"{module}router.per_expert_scale"])
    of_zero = None
    if experts.zero:
        ranks_of_inner = 1 if call.division is None else call.division.comm.size
        routes, of_zero = _zero_experts(x, routes, experts.count, ranks_of_inner)
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

    if experts.before:
        x, routes = _weighted(x, routes)
    if ranks is None:
        y = computed(x, routes)
    else:
        k_of_rows = value_of(routes.experts).shape[-1]
        y = at_their_ranks(ranks, replace(experts, k=k_of_rows), x, routes, computed)
    if experts.before and k > 1:
        y = _summed(y, k)
    if experts.latent is not None:
        (y,) = call.project(parameters, [back], y)
    return y if of_zero is None else add(y, of_zero)


def _zero_experts(x: Any, routes: Routes, count: int, parts: int) -> tuple[Routes, Any]:
    """Return routes without zero experts, and the sum of these experts' outputs: weights times x.

    Zero experts come after the first ``count``.  In the routes, others replace them with weight 0.
    The sum is divided by ``parts``, the number of ranks that add theirs.
    """
    chosen, value, weights = (value_of(each) for each in (routes.experts, x, routes.weights))
    zero, wide = chosen >= count, np.promote_types(value.dtype, FLOAT32)
    factors = np.where(zero, weights, 0).sum(axis=-1, keepdims=True, dtype=wide) / wide.type(parts)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.astype(wide, copy=False)
        slopes = (dy * value).sum(axis=-1, keepdims=True) / wide.type(parts)
        gradients = {"x": dy * factors, "weights": np.where(zero, slopes, 0)}
        dtypes = {"x": value.dtype, "weights": weights.dtype}
        return {name: rounded(gradients[name], dtype) for name, dtype in dtypes.items()}

    def back_of_others(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"weights": np.where(zero, 0, dy).astype(weights.dtype, copy=False)}

    y = taped("zeros", rounded(value * factors, value.dtype), back, x=x, weights=routes.weights)
    others = np.where(zero, 0, weights).astype(weights.dtype, copy=False)
    others = taped("others", others, back_of_others, weights=routes.weights)
    return Routes(np.where(zero, chosen % count, chosen), others), y


def _times(routes: Routes, factors: Any) -> Routes:
    """Return routes whose weights are multiplied by a number of each expert."""
    chosen, every = value_of(routes.experts), value_of(factors)
    weights, own = value_of(routes.weights), every[chosen]
    wide = np.promote_types(weights.dtype, FLOAT32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.astype(wide, copy=False)
        gradients = {"weights": rounded(dy * own, weights.dtype)}
        if "factors" in wanted:
            terms = (dy * weights).reshape(-1, 1)
            of_expert = chosen.reshape(-1, 1) == np.arange(len(every), like=chosen)
            total = np.where(of_expert, terms, 0).sum(axis=0)
            gradients["factors"] = rounded(total, every.dtype)
        return gradients

    y = rounded(weights.astype(wide, copy=False) * own, weights.dtype)
    return Routes(routes.experts, taped("times", y, back, weights=routes.weights, factors=factors))


def _weighted(x: Any, routes: Routes) -> tuple[Any, Routes]:
    """Return x times each of its k weights, (batch, k tokens, hidden), and routes of these rows.

    The k rows of a token are neighbours, and each has one expert with the weight 1.
    """
    value, weights = value_of(x), value_of(routes.weights)
    batch, tokens, hidden = value.shape
    k, wide = weights.shape[-1], np.promote_types(value.dtype, FLOAT32)
    rows, factors = value[:, :, None].astype(wide), weights[..., None].astype(wide)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.reshape(batch, tokens, k, hidden).astype(wide, copy=False)
        return {
            "x": rounded((dy * factors).sum(axis=2), value.dtype),
            "weights": rounded((dy * rows).sum(axis=-1), weights.dtype),
        }

    y = rounded(rows * factors, value.dtype).reshape(batch, tokens * k, hidden)
    chosen = value_of(routes.experts).reshape(batch, tokens * k, 1)
    own = Routes(chosen, np.ones_like(weights, shape=chosen.shape))
    return taped("weighted", y, back, x=x, weights=routes.weights), own


def _summed(y: Any, k: int) -> Any:
    """Return the sum of each token's k rows, (batch, tokens, hidden)."""
    value = value_of(y)
    wide = np.promote_types(value.dtype, FLOAT32)
    parts = value.reshape(value.shape[0], -1, k, value.shape[-1])

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        every = np.broadcast_to(dy[:, :, None], parts.shape)
        return {"rows": contiguous(every).reshape(value.shape)}

    return taped("summed", rounded(parts.sum(axis=2, dtype=wide), value.dtype), back, rows=y)


def _filled(chosen: Array, experts: Experts) -> Array:
    """Return the experts of tokens with k columns: see ``Routed``."""
    if chosen.shape[-1] == experts.k:
        return chosen
    whole = np.full_like(chosen, experts.choices, shape=(*chosen.shape[:-1], experts.k))
    whole[..., : chosen.shape[-1]] = chosen
    return whole


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
    if numbers is None and not experts.pairs:
        return route(logits, bias=correction, **options)
    value, bias = value_of(logits), value_of(correction)
    own = _of_pairs(experts, value) if experts.pairs else route(value, bias=bias, **options).experts
    chosen = own if numbers is None else np.where(numbers < 0, own, numbers)
    chosen = chosen.astype(np.int32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"logits": route_backward(dy, value, bias, chosen, **options)[0]}

    weights = weights_of(value, bias, chosen, **options)
    return Routes(chosen, taped("replayed", weights, back, logits=logits))


def _of_pairs(experts: Experts, logits: Array) -> Array:
    """Return the experts with the largest softmax in the groups with the best pairs: (..., k)."""
    scores = softmax(logits.astype(np.promote_types(logits.dtype, FLOAT32), copy=False))
    groups: Any = experts.groups
    by_group = scores.reshape(*scores.shape[:-1], groups, -1)
    pairs = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
    best = np.argsort(-pairs, axis=-1, kind="stable")[..., : experts.top_groups]
    kept = (best[..., None] == np.arange(groups, like=best)).any(axis=-2)  # (..., groups)
    choice = np.where(kept[..., None], by_group, 0).reshape(scores.shape)
    return np.argsort(-choice, axis=-1, kind="stable")[..., : experts.k]


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
