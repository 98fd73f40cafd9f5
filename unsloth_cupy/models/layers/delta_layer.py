"""A layer with a gated delta rule in place of attention, on arrays or on a tape.

    q, k, v = conv(x A_qkv)        split into heads; q and k of each head have length 1
    y = gated_norm(rule(q, k, v, decay, beta), x A_z) A_out
    decay = -exp(A_log) softplus(x A_a + dt_bias)      beta = sigmoid(x A_b)

If every channel has its own decay, the gate is a sigmoid, and A_a and A_z may each be the product
of two matrices.  With a bound, decay = bound sigmoid(exp(A_log) (x A_a + dt_bias)).

Ranks that divide the tokens exchange them for heads: each rank computes all tokens of some heads.

A cache stores the last inputs of the convolution and the state of the rule.  Padding before a text
changes neither.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.arrays import rounded
from ...core.dtypes import FLOAT32
from ...ops.activations.swiglu import sigmoid
from ...ops.norms.gated_rms_norm import gated_rms_norm
from ...ops.norms.rms_norm import rms_norm
from ...ops.recurrence.causal_conv import causal_conv
from ...ops.recurrence.gated_delta_rule import gated_delta_rule
from ...parallel.taped import taped, value_of
from ...placement import to_device_of
from ..configs.config import Config, Delta
from .context import Context
from .elements import beside, gated, split, taken, without_padding


def delta_layer(call: Any, rule: Delta, layer: int, module: str, x: Any) -> Any:
    """Return the output of the layer for normalised x."""
    config: Config = call.config
    parameters, (batch, tokens, _) = call.parameters, x.shape
    states, mask, offsets = call.recurrence
    x = x if mask is None else without_padding(x, mask)
    mixed, z, beta, decay = _projected(call, rule, module, x)
    taps = parameters[f"{module}conv1d.weight"]
    taps = taps.reshape(taps.shape[0], taps.shape[2])  # (channels, taps)
    decay = _decays(rule, decay, parameters, module)
    beta, own = _shares(beta, rule.most), rule
    if call.context is not None:
        own, offsets = _of_rank(rule, call.context), call.context.offsets
        offsets = None if offsets is None else to_device_of(offsets, value_of(x))
        mixed, taps, beta, decay = _by_heads(call.context, rule, mixed, taps, beta, decay)
    inputs, state = states(layer)
    mixed, inputs = causal_conv(mixed, taps, initial=inputs, offsets=offsets)
    keys, every = own.key_heads * own.key_dim, mixed.shape[:2]
    *both, v = split(mixed, (keys, keys, own.value_heads * own.value_dim))
    shape, eps = (*every, own.key_heads, own.key_dim), config.inner_eps
    q, k = (_of_length_1(part.reshape(shape), eps) for part in both)
    v = v.reshape(*every, own.value_heads, own.value_dim)
    y, state = gated_delta_rule(q, k, v, decay, beta, initial=state, offsets=offsets)
    states(layer, tokens, inputs, state)
    y = y if call.context is None else call.context.by_tokens(y)
    z = z.reshape(batch, tokens, rule.value_heads, rule.value_dim)
    norm, output = rule.after
    eps = config.eps if rule.eps is None else rule.eps
    weight = parameters[f"{module}{norm}.weight"]
    if rule.by_channel:
        y = gated(rms_norm(y, weight, eps=eps), z)
    else:
        y = gated_rms_norm(y, z, weight, eps=eps)
    y = y.reshape(batch, tokens, rule.value_heads * rule.value_dim)
    return call.project(parameters, [f"{module}{output}"], y)[0]  # (batch, tokens, hidden)


def _projected(call: Any, rule: Delta, module: str, x: Any) -> list[Any]:
    """Return q, k and v in one array, then z, and the inputs of beta and decay."""
    names = [f"{module}{name}" for name in rule.projections]
    projected: list[Any] = call.project(call.parameters, names, x)
    if rule.stored == "split":
        return projected
    if rule.stored in ("apart", "whole"):
        return [beside(*projected[:3]), *projected[3:]]
    if rule.stored == "short":
        q, k, v, gate, beta, decay = projected
        (gate,) = call.project(call.parameters, [f"{module}g_b_proj"], gate)
        (decay,) = call.project(call.parameters, [f"{module}forget_gate.f_b_proj"], decay)
        return [beside(q, k, v), gate, beta, decay]
    many, few = projected  # rows by key head: q, k, v, z of one head are neighbours
    rows, groups = x.shape[:2], rule.value_heads // rule.key_heads
    many = many.reshape(*rows, rule.key_heads, many.shape[-1] // rule.key_heads)
    few = few.reshape(*rows, rule.key_heads, 2 * groups)
    values = groups * rule.value_dim
    q, k, v, z = split(many, (rule.key_dim, rule.key_dim, values, values))
    b, a = split(few, (groups, groups))
    q, k, v, z, b, a = (
        each.reshape(*rows, rule.key_heads * each.shape[-1]) for each in (q, k, v, z, b, a)
    )  # (batch, tokens, heads * dim) each
    return [beside(q, k, v), z, b, a]


def _of_rank(rule: Delta, context: Context) -> Delta:
    """Return the sizes of the rule on one rank, which computes some of the heads."""
    heads = rule.key_heads // context.comm.size, rule.value_heads // context.comm.size
    return replace(rule, key_heads=heads[0], value_heads=heads[1])


def _by_heads(
    context: Context, rule: Delta, mixed: Any, taps: Any, beta: Any, decay: Any
) -> list[Any]:
    """Return convolution inputs, taps, beta and decay: all tokens of this rank's heads."""
    rows, keys = mixed.shape[:2], rule.key_heads * rule.key_dim
    parts = (  # first channel, heads and dimension of q, k and v
        (0, rule.key_heads, rule.key_dim),
        (keys, rule.key_heads, rule.key_dim),
        (2 * keys, rule.value_heads, rule.value_dim),
    )
    channels, chosen = [], []
    for start, heads, dim in parts:
        part = mixed[..., start : start + heads * dim].reshape(*rows, heads, dim)
        part = context.by_heads(part)
        channels.append(part.reshape(*part.shape[:2], part.shape[2] * dim))
        first = start + context.comm.rank * part.shape[2] * dim
        chosen.append(np.arange(first, first + part.shape[2] * dim))
    taps = taken(taps, to_device_of(np.concatenate(chosen), value_of(taps)), 0)
    beta, decay = (
        context.by_heads(each) if each.ndim == 4 else _of_heads(context, each)
        for each in (beta, decay)
    )
    return [beside(*channels), taps, beta, decay]


def _of_heads(context: Context, x: Any) -> Any:
    """Return this rank's heads of x, (rows, tokens, heads)."""
    x = context.by_heads(x.reshape(*x.shape, 1))  # (rows, tokens, heads, 1)
    return x.reshape(*x.shape[:3])


def _of_length_1(x: Any, eps: float) -> Any:
    """Return x / sqrt(sum(x**2) + eps) of each head.

    It is an RMS norm with the weight 1 / sqrt(dim): sum(x**2) = dim mean(x**2).
    """
    dim = x.shape[-1]
    kind = np.promote_types(x.dtype, FLOAT32)
    unit = np.full_like(value_of(x), dim**-0.5, kind, shape=(dim,))
    return rms_norm(x, unit, eps=eps / dim)


def _decays(rule: Delta, a: Any, parameters: Mapping[str, Any], module: str) -> Any:
    """Return the logarithms of decays, in float32 or wider, for each head or channel."""
    if rule.by_channel:
        module += "forget_gate."
    log, bias = parameters[f"{module}A_log"], parameters[f"{module}dt_bias"]
    if rule.by_channel:
        a = a.reshape(*a.shape[:2], rule.key_heads, rule.key_dim)
        log, bias = log.reshape(rule.key_heads, 1), bias.reshape(rule.key_heads, rule.key_dim)
    arrays = tuple(map(value_of, (a, log, bias)))
    wide = np.promote_types(arrays[0].dtype, FLOAT32)
    x, rate = arrays[0].astype(wide) + arrays[2].astype(wide), np.exp(arrays[1].astype(wide))
    bound = None if rule.bound is None else wide.type(rule.bound)
    y = -rate * np.logaddexp(x, wide.type(0)) if bound is None else bound * sigmoid(rate * x)

    def back(dy: Any, wanted: Any) -> Mapping[str, Any]:
        if bound is None:
            dx, dlog = -dy * rate * sigmoid(x), dy * y
        else:
            dx = dy * y * (1 - y / bound) * rate
            dlog = dx * x
        gradients = {"a": dx, "log": dlog.sum(axis=(0, 1)), "bias": dx.sum(axis=(0, 1))}
        if dy.ndim == 4:  # channels of a head share one log
            gradients["log"] = gradients["log"].sum(axis=-1, keepdims=True)
        dtypes = zip(gradients.items(), arrays, strict=True)
        return {name: rounded(each, array.dtype) for (name, each), array in dtypes}

    return taped("delta_layer", y, back, a=a, log=log, bias=bias)


def _shares(b: Any, most: float) -> Any:
    """Return most * sigmoid(b)."""
    value = value_of(b)
    wide = np.promote_types(value.dtype, FLOAT32)
    y, factor = sigmoid(value.astype(wide)), wide.type(most)

    def back(dy: Any, wanted: Any) -> Mapping[str, Any]:
        return {"b": rounded(dy.astype(wide) * factor * y * (1 - y), value.dtype)}

    return taped("delta_layer", rounded(factor * y, value.dtype), back, b=b)
