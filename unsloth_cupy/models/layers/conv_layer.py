"""A layer with a short convolution in place of attention.

    b, c, v = x A_in
    y = (c conv(b v)) A_out             the convolution has no activation

A cache stores the last inputs of the convolution.  Padding before a text does not change them.
"""

from typing import Any

from ...ops.elements.arithmetic import multiply
from ...ops.recurrence.causal_conv import causal_conv
from .elements import split, without_padding


def conv_layer(call: Any, layer: int, module: str, x: Any) -> Any:
    """Return the output of the layer for normalised x."""
    parameters, hidden = call.parameters, x.shape[-1]
    (projected,) = call.project(parameters, [f"{module}in_proj"], x)
    b, c, v = split(projected, (hidden, hidden, hidden))
    taps = parameters[f"{module}conv.weight"]
    taps = taps.reshape(taps.shape[0], taps.shape[2])  # (channels, taps)
    states, mask, offsets = call.recurrence
    inputs, *_ = states(layer)
    v = multiply(b, v)
    v = v if mask is None else without_padding(v, mask)
    v, inputs = causal_conv(
        v,
        taps,
        parameters.get(f"{module}conv.bias"),
        initial=inputs,
        offsets=offsets,
        activation=None,
    )
    states(layer, x.shape[1], inputs)
    return call.project(parameters, [f"{module}out_proj"], multiply(c, v))[0]
