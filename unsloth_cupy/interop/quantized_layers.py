"""Reads the quantized weights of bitsandbytes layers in place, without a copy."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import ConfigError
from ..ops.quantized.int8 import Int8
from ..ops.quantized.nf4 import Nf4
from ._torch_memory import array_of

LIBRARY = "bitsandbytes"
FOUR, EIGHT = "Linear4bit", "Linear8bitLt"
# by layer: the addresses of the weight's arrays, and the weight
weights: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def kind_of(layer: Any) -> str | None:
    """Return the name of a layer's bitsandbytes class; None for other layers."""
    for kind in type(layer).__mro__:
        if kind.__module__.partition(".")[0] == LIBRARY and kind.__name__ in (FOUR, EIGHT):
            return kind.__name__
    return None


def weight_of(layer: Any) -> Any:
    """Return the weight of a layer: an ``Nf4`` or ``Int8`` over its memory.

    Raises
    ------
    ConfigError
        The weight is not quantized yet, or its layout is not the layout of files.
    """
    places = _places(layer)
    known = weights.get(layer)
    if known is None or known[0] != places:
        known = weights[layer] = places, _read(layer)
    return known[1]


def _places(layer: Any) -> tuple[int, ...]:
    """Return the addresses of a weight's arrays; raise if their layout is not that of files."""
    weight, scales = layer.weight, _scales(layer)
    if scales is None:
        problem = f"its weight is {weight.dtype}, and not quantized yet"
        raise ConfigError(f"{problem}; move it: .to('cpu')")
    state = getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError("bitsandbytes has packed its weight for this CPU; load the model again")
    return weight.data_ptr(), *(scale.data_ptr() for scale in scales)


def _scales(layer: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the scales of a weight; None if it is not quantized."""
    if kind_of(layer) == FOUR:
        state = getattr(layer.weight, "quant_state", None) or layer.quant_state
        if state is None:
            return None
        return (state.absmax, state.state2.absmax) if state.nested else (state.absmax,)
    scale = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    unrounded = layer.state.has_fp16_weights or scale is None or layer.weight.dtype != torch.int8
    return None if unrounded else (scale,)


def _read(layer: Any) -> Any:
    """Return the weight of a layer as an ``Nf4`` or ``Int8`` over its memory."""
    parts = {n: tensor.detach() for n, tensor in layer.state_dict().items() if n != "bias"}
    if kind_of(layer) == FOUR:
        parts["weight"] = parts["weight"].reshape(-1).view(torch.uint8)[:, None]
        return Nf4.from_state({name: array_of(tensor) for name, tensor in parts.items()})
    return Int8.from_state({name: array_of(tensor) for name, tensor in parts.items()})
