"""A layer with the recurrence of Mamba2 in place of attention, or beside it.

    gate, x, b, c, dt = x A_in            x, b and c are convolved along the tokens
    y = norm(ssd(x, dt, b, c) silu(gate)) A_out

A cache stores the last inputs of the convolution and the states.  Padding before a text changes
neither.
"""

from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32
from ...ops.activations.swiglu import swiglu
from ...ops.elements.arithmetic import scale
from ...ops.norms.gated_rms_norm import gated_rms_norm
from ...ops.norms.rms_norm import rms_norm
from ...ops.recurrence.causal_conv import causal_conv
from ...ops.recurrence.ssd import ssd
from ...parallel.taped import taped, value_of
from ..configs.state_space import StateSpace
from .elements import scaled_heads, split, without_padding


def state_space_layer(call: Any, space: StateSpace, layer: int, module: str, x: Any) -> Any:
    """Return the output of the layer for normalised x."""
    parameters, (batch, tokens, _) = call.parameters, x.shape
    x = x if space.scale == 1 else scale(x, factor=space.scale)
    (projected,) = call.project(parameters, [f"{module}in_proj"], x)
    if space.scales:
        projected = _scaled(projected, space)
    gate, mixed, dt = split(projected, (space.inner, sum(space.sizes[1:4]), space.heads))
    taps = parameters[f"{module}conv1d.weight"]
    taps = taps.reshape(taps.shape[0], taps.shape[2])  # (channels, taps)
    states, mask, offsets = call.recurrence
    inputs, state = states(layer)
    mixed = mixed if mask is None else without_padding(mixed, mask)
    bias = parameters.get(f"{module}conv1d.bias")
    mixed, inputs = causal_conv(mixed, taps, bias, initial=inputs, offsets=offsets)
    mixed = mixed if mask is None else without_padding(mixed, mask)
    x, b, c = split(mixed, space.sizes[1:4])
    b, c = (each.reshape(batch, tokens, space.groups, space.state) for each in (b, c))
    y, state = ssd(
        x.reshape(batch, tokens, space.heads, space.dim),
        *(dt, parameters[f"{module}A_log"], b, c),
        *(parameters[f"{module}D"], parameters[f"{module}dt_bias"]),
        initial=state,
        offsets=offsets,
        dt_min=space.least,
        dt_max=space.most,
    )
    # Beside attention, the attention layer counts the tokens in the cache.
    states(layer, 0 if space.beside else tokens, inputs, state)
    y = _gated(call, space, module, y.reshape(batch, tokens, space.inner), gate)
    (y,) = call.project(parameters, [f"{module}out_proj"], y)
    return y if space.out_scale == 1 else scale(y, factor=space.out_scale)


def _gated(call: Any, space: StateSpace, module: str, y: Any, gate: Any) -> Any:
    """Return the norm of y times silu(gate); ``space.norm`` has the order of norm and gate."""
    if space.norm is None:
        return swiglu(gate, y)
    weight, eps = call.parameters[f"{module}norm.weight"], call.config.eps
    first = space.norm == "before"
    if space.groups == 1:
        if first:
            return gated_rms_norm(y, gate, weight, eps=eps)
        return rms_norm(swiglu(gate, y), weight, eps=eps)
    heads = *y.shape[:2], space.groups, space.inner // space.groups  # a norm for each group
    z = (y if first else swiglu(gate, y)).reshape(*heads)
    kind = np.promote_types(z.dtype, FLOAT32)
    z = rms_norm(z, np.ones_like(value_of(z), kind, shape=heads[3:]), eps=eps)
    z = scaled_heads(z, weight.reshape(*heads[2:])).reshape(*y.shape)
    return swiglu(gate, z) if first else z


def _scaled(projected: Any, space: StateSpace) -> Any:
    """Return a projection whose parts are each multiplied by a factor."""
    value = value_of(projected)
    factors = np.repeat(np.array(space.scales), np.array(space.sizes))
    factors = np.asarray(factors, value.dtype, like=value)
    return taped(
        "state_space_layer",
        value * factors,
        lambda dy, wanted: {"projected": dy * factors},
        projected=projected,
    )
