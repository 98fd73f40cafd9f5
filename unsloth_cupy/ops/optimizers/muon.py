"""Muon: the step of a matrix is its momentum, made orthogonal.

mean = momentum * mean + (1 - momentum) * gradient
u = momentum * mean + (1 - momentum) * gradient     with nesterov, else mean
parameter = parameter * (1 - lr * weight_decay) - lr * adjustment * orthogonal(u)

``orthogonal`` moves all singular values of a matrix near 1, by five steps of Newton and Schulz in
float32 from ``x = u / norm(u)``:

x = a x + (b s + c s s) x     s = x x^T,     (a, b, c) = (3.4445, -4.775, 2.0315)

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; the adjustment
"match_rms_adamw": Liu et al., Muon is Scalable for LLM Training, 2025.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..common.gemm import gemm

COEFFICIENTS = 3.4445, -4.775, 2.0315  # these, STEPS and SMALLEST from Jordan et al.
STEPS = 5
SMALLEST = 1e-7  # least norm by which a matrix is divided
ADJUSTMENTS: Mapping[str, Callable[[int, int], float]] = {  # factor of lr, by the matrix's shape
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Tensor(NamedTuple):
    """A matrix and the other arrays that a step of Muon changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    mean: Any


def muon(
    parameter: Any,
    gradient: Any,
    mean: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    adjust: str,
    parts: Sequence[int],
) -> None:
    """Update a matrix and its mean in place; all are float32, or float64.

    ``parts`` are the numbers of rows of the matrices that are stored as one; each of them is made
    orthogonal by itself.
    """
    if not parameter.size:
        return
    change = gradient * (1 - momentum)
    mean *= momentum
    mean += change
    if nesterov:
        change += mean * momentum
    else:
        change = mean
    parameter *= 1 - lr * weight_decay
    start = 0
    for rows in parts:
        part = slice(start, start + rows)
        step = orthogonal(change[part])
        step *= lr * ADJUSTMENTS[adjust](rows, parameter.shape[1])
        parameter[part] -= step
        start += rows


def orthogonal(matrix: Any) -> Any:
    """Return a matrix with equal singular vectors, and with singular values near 1."""
    rows, columns = matrix.shape
    x: Any = matrix.T if rows > columns else matrix  # the smaller of x x^T and x^T x
    a, b, c = COEFFICIENTS
    x = x / np.maximum(np.sqrt(np.sum(np.square(x))), SMALLEST)
    for _ in range(STEPS):
        square = gemm(x, x.T)
        weight = square * b
        square *= math.sqrt(c)  # twice in the product, so that weight is b s + c s s
        gemm(square, square, out=weight, add=True)
        wide = x * a
        gemm(weight, x, out=wide, add=True)
        x = wide
    return x.T if rows > columns else x
