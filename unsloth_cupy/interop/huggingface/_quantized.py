"""Replacements for layers of bitsandbytes; their weights are read in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...ops.quantized.int8_linear import Rounding
from ..quantized_layers import EIGHT, FOUR, kind_of, weight_of
from ..torch import linear, outside_of_graphs
from ._trials import Candidate, Refused, draw

Forward = Callable[..., Any]


def quantized(module: nn.Module, dtype: torch.dtype) -> Candidate | None:
    """Return the candidate for a layer of bitsandbytes in 4 or 8 bits; None for other modules."""
    kind = kind_of(module)
    if kind is None:
        return None
    layer: Any = module
    check(layer)
    sample = draw(2, layer.in_features).to(layer.weight.device, dtype)
    forward = {FOUR: _four_bits, EIGHT: _eight_bits}[kind](type(layer).forward)
    return Candidate([forward], (sample,), {}, computed_in(layer, dtype))


def check(layer: Any) -> None:
    """Raise Refused for a layer with a weight that the library cannot read."""
    try:
        weight_of(layer)
    except ConfigError as error:
        raise Refused(str(error)) from None


def computed_in(layer: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the least exact of the dtypes in which a layer computes."""
    own = torch.float16 if kind_of(layer) == EIGHT else getattr(layer, "compute_dtype", None)
    return dtype if own is None else max(own, dtype, key=lambda each: torch.finfo(each).eps)


def _four_bits(plain: Forward) -> Forward:
    """Return the forward of a 4-bit layer; it calls ``plain`` if the weight cannot be read."""

    @outside_of_graphs
    def forward(self: Any, x: Any) -> Any:
        weight = base_of(self, x)
        if weight is None:
            return plain(self, x)
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        cast = x if self.compute_dtype is None else x.to(self.compute_dtype)
        return linear(cast, weight, _bias(self, cast)).to(x.dtype)

    return forward


def _eight_bits(plain: Forward) -> Forward:
    """Return the forward of an 8-bit layer; it calls ``plain`` if the weight cannot be read."""

    @outside_of_graphs
    def forward(self: Any, x: Any) -> Any:
        weight = base_of(self, x)
        return plain(self, x) if weight is None else linear(x, weight, _bias(self, x))

    return forward


def _bias(layer: Any, x: Any) -> Any:
    """Return the bias of a layer in the dtype of x, or None."""
    return None if layer.bias is None else layer.bias.to(x.dtype)


def base_of(layer: Any, x: Any) -> Any:
    """Return the weight by which a layer multiplies x; None if the layer must run its own forward.

    An 8-bit layer also rounds rows of x, except in training on a CPU, as bitsandbytes does.
    """
    try:
        weight = weight_of(layer)
    except ConfigError:
        return None
    if kind_of(layer) == FOUR or (layer.training and not x.is_cuda):
        return weight
    return Rounding(weight, float(layer.state.threshold) or None)


@outside_of_graphs
def adapted_base(layer: Any, x: Any) -> Any:
    """Return the weight of an adapter's base layer; None if the layer must run its own forward.

    Outside autocast, a 4-bit layer may compute in another dtype than its adapters: then None.
    """
    own = getattr(layer, "compute_dtype", None)
    if own not in (None, x.dtype) and not torch.is_autocast_enabled(x.device.type):
        return None
    return base_of(layer, x)
