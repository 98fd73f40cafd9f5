"""A layer with the recurrence of Mamba in place of attention.

    x, gate = h A_in            x = silu(conv(x))            short, b, c = norms(x A_x)
    y = (selective_scan(x, short A_dt, b, c) silu(gate)) A_out

A cache stores the last inputs of the convolution and the states.  Padding before a text changes
neither.
"""

from typing import Any

from ...ops.activations.swiglu import swiglu
from ...ops.norms.rms_norm import rms_norm
from ...ops.recurrence.causal_conv import causal_conv
from ...ops.recurrence.selective_scan import selective_scan
from ..configs.mamba import NORMS, Mamba
from .call import parameters_of
from .elements import split, without_padding


def mamba_layer(call: Any, rule: Mamba, layer: int, module: str, x: Any) -> Any:
    """Return the output of the layer for normalised x."""
    parameters, tokens = call.parameters, x.shape[1]
    (projected,) = call.project(parameters, [f"{module}in_proj"], x)
    x, gate = split(projected, (rule.inner, rule.inner))
    taps = parameters[f"{module}conv1d.weight"]
    taps = taps.reshape(taps.shape[0], taps.shape[2])  # (channels, taps)
    states, mask, offsets = call.recurrence
    inputs, state = states(layer)
    x = x if mask is None else without_padding(x, mask)
    bias = parameters.get(f"{module}conv1d.bias")
    x, inputs = causal_conv(x, taps, bias, initial=inputs, offsets=offsets)
    x = x if mask is None else without_padding(x, mask)
    (short,) = call.project(parameters, [f"{module}x_proj"], x)
    parts = split(short, rule.sizes)
    if rule.normed:
        weights = [parameters[f"{module}{name}.weight"] for name in NORMS]
        parts = [
            rms_norm(part, weight, eps=call.config.eps)
            for part, weight in zip(parts, weights, strict=True)
        ]
    short, b, c = parts
    own = parameters_of(call, f"{module}dt_proj.")
    bias = own.pop(f"{module}dt_proj.bias")  # it is added in float32
    (dt,) = call.project(own, [f"{module}dt_proj"], short)
    y, state = selective_scan(
        *(x, dt, parameters[f"{module}A_log"], b, c, parameters[f"{module}D"], bias),
        initial=state,
        offsets=offsets,
    )
    states(layer, tokens, inputs, state)
    return call.project(parameters, [f"{module}out_proj"], swiglu(gate, y))[0]
