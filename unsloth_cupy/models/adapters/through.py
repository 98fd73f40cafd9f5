"""Layers and stacks of experts that compute with rounded weights, on arrays or on a tape.

    y = x Q(W + scale B A)^T + bias + scale (dropout(x) - x) A^T B^T
    dx = dy Q + the term of dropout  dA, dB: as without rounding (straight-through)

Products compute the rounded weight part by part (``SummedWeight``), again in the backward pass.  If
the blocks of a kind cannot be rounded separately, each product computes the whole weight and frees
it afterwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.arrays import contiguous, rounded
from ...core.dtypes import FLOAT32, Array
from ...ops.common.gemm import gemm
from ...ops.elements.cast import in_dtype
from ...ops.experts.grouped_linear import grouped_linear
from ...ops.linear.dropout import dropped_rows
from ...ops.linear.linear import linear
from ...ops.linear.lora_merge import lora_sum
from ...ops.linear.lora_straight import straight_gradients
from ...ops.quantized.summed_weight import SummedWeight
from ...ops.quantized.weight import Chunked, Quantized
from ...parallel.taped import taped, value_of
from ..configs.names import TABLE
from .kept import Kept

# (weight, a, b, scale) -> the weight of the file
Make = Callable[[Any, Array, Array, float], Any]
_linear_backward: Any = linear.backward
_grouped_backward: Any = grouped_linear.backward


def through_linear(
    x: Any,
    weight: Any,
    a: Any,
    b: Any,
    bias: Any,
    *,
    scale: float,
    make: Make,
    dropout: float = 0.0,
    seed: int | None = None,
    numbers: Array | None = None,
) -> Any:
    """Return the output of a layer whose weight is its rounded sum with an adapter."""
    rows, low, up, added = (value_of(each) for each in (x, a, b, bias))
    flat = rows.reshape(-1, rows.shape[-1])
    merged_weight = _maker(make, weight, low, up, scale, rows.dtype)
    y: Array = linear(rows, merged_weight(), added)
    if dropout:
        change = dropped_rows(flat, dropout, seed, numbers=numbers) - flat
        short = gemm(change, in_dtype(low, rows.dtype).T)
        gemm(
            short,
            in_dtype(up, rows.dtype).T,
            out=y.reshape(-1, y.shape[-1]),
            add=True,
            factor=scale,
        )

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        gradients: dict[str, Any] = {}
        names = frozenset({"x", "bias"} & wanted)
        if names:
            dx, _, dbias = _linear_backward(dy, rows, merged_weight(), added, wanted=names)
            gradients |= {"x": dx, "bias": dbias}
        read = dropped_rows(flat, dropout, seed, numbers=numbers)
        gradients["a"], gradients["b"], dlow = straight_gradients(dy, read, low, up, scale)
        if dropout and "x" in wanted:
            change = gemm(dlow, in_dtype(low, rows.dtype))
            change = dropped_rows(change, dropout, seed, numbers=numbers) - change
            gradients["x"] = gradients["x"] + change.reshape(rows.shape)
        return gradients

    return taped("through_linear", y, back, x=x, a=a, b=b, bias=bias)


def through_stack(
    x: Any, weight: Any, a: Any, b: Any, offsets: Array, bias: Any, *, scale: float, make: Make
) -> Any:
    """Return the grouped product of sorted rows with the rounded sums of a stack.

    a is (experts, rank, in), b (experts, out, rank).
    """
    rows, low, up, added = (value_of(each) for each in (x, a, b, bias))
    down, out = (contiguous(each.astype(rows.dtype, copy=False)) for each in (low, up))

    merged_weight = _maker(make, weight, low, up, scale, rows.dtype)
    y: Array = grouped_linear(rows, merged_weight(), offsets, added)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        gradients: dict[str, Any] = {}
        if "x" in wanted:
            only = frozenset({"x"})
            gradients["x"] = _grouped_backward(
                dy, rows, merged_weight(), offsets, None, wanted=only
            )[0]
        if {"a", "b"} & wanted:
            both, weights = frozenset({"x", "weight"}), frozenset({"weight"})
            short = grouped_linear(rows, down, offsets)
            dlow, db, *_ = _grouped_backward(dy, short, out, offsets, None, wanted=both)
            da = _grouped_backward(dlow, rows, down, offsets, None, wanted=weights)[1]
            wide = np.promote_types(rows.dtype, FLOAT32)
            for name, part, like in (("a", da, low), ("b", db, up)):
                gradients[name] = rounded(part.astype(wide) * wide.type(scale), like.dtype)
        return gradients

    return taped("through_stack", y, back, x=x, a=a, b=b)


def _maker(
    make: Make, weight: Any, a: Array, b: Array, scale: float, dtype: Any
) -> Callable[[], Any]:
    """Return a function that computes the weight for products with arrays of a dtype.

    A ``SummedWeight``, which stores no dense array, is stored for the backward pass.
    """
    kept: list[SummedWeight] = []

    def merged_weight() -> Any:
        if kept:
            return kept[0]
        weight_of_file = make(weight, a, b, scale)
        if isinstance(weight_of_file, SummedWeight):
            kept.append(weight_of_file)
        coded = isinstance(weight_of_file, Chunked)
        return weight_of_file if coded else weight_of_file.astype(dtype, copy=False)

    return merged_weight


def file_weight(
    adapter: Any, name: str, weight: Any, requantize: bool, kept: Kept | None, exact: bool
) -> Any:
    """Return a weight rounded as in the file that an adapter is trained for.

    The result is dense unless ``requantize``; with ``exact`` it is not rounded.
    """
    adapted, into = adapter.adds_to(name), adapter.into
    if not adapted and (exact or not into.rounds(name, weight)):
        coded = isinstance(weight, Quantized) and not requantize
        return weight.dequantize() if coded else weight
    total = weight
    if name in adapter.stacks:
        total = adapter.stacks[name].sums(weight, adapter.parameters)
    elif adapted:
        scale = adapter.scales[name.removesuffix(".weight")]
        a, b = adapter.low_rank(name)
        total = lora_sum(weight, a, b, scale)
    if exact:
        return total
    value = into(name, total)
    coded = isinstance(value, Quantized)
    dense = value.dequantize(FLOAT32) if coded and kept is not None else value
    result = value.computed_in(weight.dtype) if coded and requantize else value.astype(weight.dtype)
    if kept is not None and adapted:
        before = weight.computed_in(FLOAT32) if isinstance(weight, Quantized) else weight
        rounded_to = dense if isinstance(result, Quantized) else result
        kept.measure(name, before, dense, rounded_to.__getitem__)
    return result


def file_weights(adapter: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters rounded as in the file; dense ones in the dtype of the model."""
    dtype, result = parameters[TABLE].dtype, {}
    for name, weight in parameters.items():
        value = adapter.merge(name, weight, requantize=True)
        dense = isinstance(weight, Quantized) and not isinstance(value, Quantized)
        result[name] = value.astype(dtype) if dense else value
    return result
