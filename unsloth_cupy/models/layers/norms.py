"""Norms of the residual stream, of heads, and over axes that ranks divide."""

from typing import Any

import numpy as np

from ...ops.elements.arithmetic import add
from ...ops.norms.layer_norm import layer_norm, layer_norm_forward
from ...ops.norms.rms_norm import rms_norm, rms_norm_forward
from ...parallel.taped import value_of
from .call import Call
from .elements import scaled_heads, stacked


def join(call: Call, prefix: str, norm: str | None, branch: Any, stream: Any) -> tuple[Any, Any]:
    """Return (normalised sum, sum) of branch and stream; stream is None before the first block."""
    if norm is None:
        total = branch if stream is None else add(branch, stream)
        return total, total
    config = call.config
    if config.norms.kind == "layer":
        parameters = _layer_norm_parameters(call, prefix + norm, branch)
        y, total, *_ = layer_norm_forward(branch, *parameters, stream, eps=config.eps)
        return y, total
    y, total, _ = rms_norm_forward(
        branch,
        call.parameters[f"{prefix}{norm}.weight"],
        stream,
        eps=config.eps,
        offset=config.norm_offset,
    )
    return y, total


def norm_of(call: Call, prefix: str, norm: str | None, x: Any) -> Any:
    """Return a norm of x; x itself if the block has no such norm."""
    if norm is None:
        return x
    config = call.config
    if config.norms.kind == "layer":
        return layer_norm(x, *_layer_norm_parameters(call, prefix + norm, x), eps=config.eps)
    weight = call.parameters[f"{prefix}{norm}.weight"]
    return rms_norm(x, weight, eps=config.eps, offset=config.norm_offset)


def _layer_norm_parameters(call: Call, name: str, x: Any) -> tuple[Any, Any]:
    """Return the weight of a layer norm, or ones without one, and its bias or None."""
    config, weight = call.config, call.parameters.get(f"{name}.weight")
    if weight is None:
        weight = np.ones_like(value_of(x), shape=x.shape[-1:])
    weight = weight + config.norm_offset if config.norm_offset else weight
    return weight, call.parameters.get(f"{name}.bias")


def divided_norm(call: Call, prefix: str, norm: str, x: Any) -> Any:
    """Return a norm over an axis that ranks may divide: heads or the inner size."""
    name = f"{prefix}{norm}.weight"
    if call.division is None:
        return norm_of(call, prefix, norm, x)
    return call.division.norm(name, x, call.parameters[name])


def head_norm(call: Call, name: str, x: Any) -> Any:
    """Return the norm of each head of x, (batch, tokens, heads, dim)."""
    config, parameters = call.config, call.parameters
    if config.query_key_norm == "ones":
        return rms_norm(x, np.ones_like(value_of(x), shape=x.shape[-1:]), eps=config.eps)
    if config.norms.kind == "rms":
        return rms_norm(x, parameters[f"{name}.weight"], eps=config.eps, offset=config.norm_offset)
    bias = parameters.get(f"{name}.bias")
    if config.query_key_norm == "head":
        return layer_norm(x, parameters[f"{name}.weight"], bias, eps=config.eps)
    if config.query_key_norm == "heads":
        weight = parameters[f"{name}.weight"]
    else:
        heads = range(x.shape[2])
        weight = stacked([parameters[f"{name}.norms.{head}.weight"] for head in heads])
    ones = np.ones_like(value_of(x), shape=x.shape[-1:])
    return scaled_heads(layer_norm(x, ones, eps=config.eps), weight)
