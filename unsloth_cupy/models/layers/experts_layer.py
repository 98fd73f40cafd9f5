"""A layer of a mixture of experts, on arrays or on a tape: its router, its experts, its loss.

    logits = router(x)        y = sum over k of weights[k] * expert[k](x)

Equal logits: the expert with the lower index comes first, on every device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, rounded
from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import is_planned
from ...ops.activations.geglu import geglu
from ...ops.activations.softmax import softmax
from ...ops.activations.swiglu import swiglu
from ...ops.elements.arithmetic import add, scale
from ...ops.elements.cast import cast
from ...ops.experts.experts_mlp import experts_mlp
from ...ops.experts.grouped_linear import grouped_linear
from ...ops.experts.route import Routes, route, route_backward, weights_of
from ...ops.experts.router_losses import balance_loss, balance_loss_backward
from ...ops.experts.sort_by_expert import sort_by_expert
from ...ops.linear.linear import linear
from ...parallel.communicator import Communicator, part
from ...parallel.taped import taped, value_of
from ...parallel.tensor import all_to_all_rows
from ...placement import to_numpy
from ..adapters.adapter_stacks import Adapted
from ..adapters.outer_weights import made_of
from ..adapters.through import through_stack
from ..configs.config import CORRECTION, STACKS, Experts
from .call import Call
from .elements import clamped_swiglu, stacked


class Routed(NamedTuple):
    """What a router said of the tokens of a call."""

    logits: Any  # (batch, tokens, experts)
    experts: Array  # (batch, tokens, k)


def experts_of_tokens(call: Call, layer: int, module: str, x: Any) -> Any:
    """Return the weighted sum of what the chosen experts make of each token of normalised x."""
    parameters, stacks = call.parameters, call.stacks
    experts: Any = call.config.experts
    logits, given = router_logits(parameters, experts, module, x), None
    if call.routes is not None:
        given = call.routes[..., sum(experts.sparse[:layer]), :]
    correction = parameters.get(f"{module}{experts.correction_in}{CORRECTION}")
    routes = routes_of(experts, logits, correction, given)
    if call.routers is not None:
        call.routers.append(Routed(logits, value_of(routes.experts)))
    gate_up, down = (f"{module}experts.{name}" for name in STACKS)

    def computed(x: Any, routes: Routes) -> Any:
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

    if call.expert_ranks is None:
        return computed(x, routes)
    return at_their_ranks(call.expert_ranks, experts, x, routes, computed)


def at_their_ranks(
    comm: Communicator,
    experts: Experts,
    x: Any,
    routes: Routes,
    computed: Callable[[Any, Routes], Any],
) -> Any:
    """Return what ``computed`` makes of rows at the ranks that hold their experts.

    A row goes to the rank of each of its k experts, and the results come back to be added in the
    order of k.  A rank gets its rows in the order of ranks, then of experts, then of their places.
    """
    chosen = value_of(routes.experts)
    sorted_rows, offsets = by_expert(chosen, experts.count)
    local = part(experts.count, comm)
    counts = rows_of_ranks(offsets, comm, experts, chosen)
    arrived, came = all_to_all_rows(sorted_rows.gathered(x.reshape(-1, x.shape[-1])), counts, comm)
    numbers, _ = comm.all_to_all_rows(chosen.reshape(-1)[sorted_rows.order], counts)
    ones = np.ones_like(value_of(arrived), shape=(len(numbers), 1))
    made = computed(arrived, Routes((numbers - local.start)[:, None], ones))
    back, _ = all_to_all_rows(made, came, comm)
    return sorted_rows.summed(back, routes.weights.reshape(-1, experts.k)).reshape(*x.shape)


def rows_of_ranks(offsets: Array, comm: Communicator, experts: Experts, chosen: Array) -> list[int]:
    """Return how many of the sorted rows go to each rank; the host waits for a GPU here.

    In a plan as many as can be go to the first: a token of each of its experts.
    """
    if is_planned(offsets):
        most = chosen.size // experts.k * min(experts.k, part(experts.count, comm, 0).stop)
        return [most, chosen.size - most, *[0] * (comm.size - 2)]
    ends = to_numpy(offsets)
    parts = (part(experts.count, comm, rank) for rank in range(comm.size))
    return [int(ends[own.stop] - ends[own.start]) for own in parts]


def adapted_experts(
    parameters: Mapping[str, Any],
    stacks: Mapping[str, Adapted],
    experts: Experts,
    names: tuple[str, str],
    x: Any,
    routes: Routes,
) -> Any:
    """Return what ``experts_mlp`` does, with low-rank terms in the products of the stacks."""
    rows = x.reshape(-1, x.shape[-1])
    chosen = value_of(routes.experts)
    sorted_rows, offsets = by_expert(chosen, parameters[names[0]].shape[0])
    product = partial(_product, parameters, stacks, offsets)
    both = product(names[0], sorted_rows.gathered(rows))
    gate, up = both[..., : experts.inner], both[..., experts.inner :]
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
    """Return the grouped product of sorted rows with a stack, and its adapter's term."""
    adapted = stacks.get(name)
    if adapted is not None and adapted.into is not None:
        pair, bias = adapted.pair(parameters), parameters.get(f"{name}_bias")
        how: Any = {"scale": adapted.scale, "make": partial(adapted.into, name)}
        return through_stack(x, parameters[name], *pair, offsets, bias, **how)
    y = grouped_linear(x, parameters[name], offsets, parameters.get(f"{name}_bias"))
    if adapted is None:
        return y
    a, b = (made_of([each], x.dtype, contiguous) for each in adapted.pair(parameters))
    low = grouped_linear(grouped_linear(x, a, offsets), b, offsets)
    return add(y, scale(low, factor=adapted.scale))


def by_expert(chosen: Array, count: int) -> tuple["Sorted", Array]:
    """Return the order of rows by their experts, and where the rows of each expert begin."""
    order, offsets = sort_by_expert(chosen, count)
    places = np.zeros_like(order)
    places[order] = np.arange(len(order), dtype=order.dtype, like=order)
    return Sorted(order, places, chosen.shape[-1]), offsets


class Sorted(NamedTuple):
    """Rows in the order of their experts: of each row k, one for each expert."""

    order: Array
    places: Array  # its inverse
    k: int

    def gathered(self, x: Any) -> Any:
        """Return a row of x for each assignment."""
        value = value_of(x)

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            wide = np.promote_types(dy.dtype, FLOAT32)
            parts = dy[self.places].reshape(-1, self.k, dy.shape[-1])
            return {"x": rounded(parts.sum(axis=1, dtype=wide), dy.dtype)}

        return taped("gathered", value[self.order // self.k], back, x=x)

    def summed(self, out: Any, weights: Any) -> Any:
        """Return the weighted sum of the k results of each row, in the order of k."""
        value, factors = value_of(out), value_of(weights)
        wide = np.promote_types(value.dtype, FLOAT32)
        shape = *factors.shape, value.shape[-1]

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            dy = dy.astype(wide, copy=False)
            gradients = {}
            if "out" in wanted:
                own = factors.reshape(-1)[self.order].astype(wide, copy=False)
                moved = dy[self.order // self.k] * own[:, None]
                gradients["out"] = rounded(moved, value.dtype)
            if "weights" in wanted:
                results = value[self.places].reshape(shape).astype(wide, copy=False)
                slopes = (results * dy[:, None]).sum(axis=-1)
                gradients["weights"] = rounded(slopes, factors.dtype)
            return gradients

        results = value[self.places].reshape(shape).astype(wide, copy=False)
        y = (results * factors.astype(wide, copy=False)[..., None]).sum(axis=1)
        return taped("summed", rounded(y, value.dtype), back, out=out, weights=weights)


def router_logits(parameters: Mapping[str, Any], experts: Experts, module: str, x: Any) -> Any:
    """Return the logits of the router, (batch, tokens, experts)."""
    name = f"{module}{experts.router}"
    weight = parameters[f"{name}.weight"]
    if experts.wide:
        x, weight = (
            each if each.dtype.itemsize > 2 else cast(each, FLOAT32) for each in (x, weight)
        )
    return linear(x, weight, parameters.get(f"{name}.bias"))


def routes_of(experts: Experts, logits: Any, correction: Any, given: Any = None) -> Routes:
    """Return the experts of each token, and their weights.

    ``given`` are experts that were chosen before, -1 where the router chooses now.
    """
    if experts.jitter is not None:
        return sparse_mixer(logits, experts.jitter, given)
    options: dict[str, Any] = {
        "k": experts.k,
        "scores": experts.scores,
        "normalize": experts.normalize,
        "groups": experts.groups,
        "top_groups": experts.top_groups,
        "scale": experts.scale,
    }
    if given is None:
        return route(logits, bias=correction, **options)
    value, bias = value_of(logits), value_of(correction)
    own = route(value, bias=bias, **options).experts
    chosen = np.where(given < 0, own, given).astype(np.int32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"logits": route_backward(dy, value, bias, chosen, **options)[0]}

    weights = weights_of(value, bias, chosen, **options)
    return Routes(chosen, taped("replayed", weights, back, logits=logits))


def sparse_mixer(logits: Any, jitter: float, given: Any = None) -> Routes:
    """Return the two experts with the largest logits, without the noise of pretraining.

    ``given`` are chosen instead, where they are not -1.  The weight of each is its share in the
    softmax of the logits that are nearly as large as its own: ``(own - logit) / max(abs(logit),
    own) <= 2 * jitter``, for the second without the first.

    Liu and others, GRIN: GRadient-INformed MoE, 2024.
    """
    value = value_of(logits)
    wide = value.astype(np.promote_types(value.dtype, FLOAT32), copy=False)
    numbers, rest, parts = np.arange(wide.shape[-1], like=value), wide, []
    for number in range(2):
        first = rest.argmax(axis=-1)[..., None]
        if given is not None:
            before = given[..., number : number + 1]
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
    routed: Sequence[Routed],
    mask: Array | None,
    comm: Communicator | None = None,
) -> Any:
    """Return ``balance_loss`` of all layers together, without padding: (), a Var on a tape.

    With a communicator it is that of the rows of all ranks, of which this rank has a term of the
    sum.  As in transformers, the experts that it counts are those with the largest logits, also
    where a correction has chosen others.
    """
    every = stacked([each.logits for each in routed])
    value = value_of(every)
    chosen = route(value, k=experts.k).experts
    if comm is None:
        return balance_loss(every, chosen, mask=mask)
    mask = np.ones_like(chosen, bool, shape=chosen.shape[1:-1]) if mask is None else mask != 0
    real = np.broadcast_to(mask, chosen.shape[:-1])[..., None]
    numbers = np.where(real, chosen, experts.count).reshape(-1)  # of padding: none
    assigned = np.bincount(numbers, minlength=experts.count + 1)[:-1]
    parts = [each.astype(np.float64) for each in (assigned, real.sum().reshape(1))]
    sums = comm.all_reduce(np.concatenate(parts))
    rows = sums[-1:].clip(1)
    slopes = sums[:-1] / rows * (experts.count / rows)
    p = np.where(real, softmax(value), 0).reshape(-1, experts.count).astype(np.float64)
    dtype = np.promote_types(value.dtype, FLOAT32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"logits": balance_loss_backward(dy, value, mask, slopes.astype(dtype))[0]}

    term = (p @ slopes).sum(keepdims=True).reshape(()).astype(dtype)
    return taped("balance", term, back, logits=every)
