"""Calls with quantized weights, for the arrays of any library."""

from collections.abc import Callable
from typing import Any

import numpy as np

import unsloth_cupy as uc
from unsloth_cupy.models.quantizer import KINDS

SIZE = 64
SHAPES = {"x": (2, 3, SIZE), "a": (4, SIZE), "b": (SIZE, 4), "bias": (SIZE,), "magnitude": (SIZE,)}
Call = Callable[..., Any]
MADE = {name: kind.make for name, kind in KINDS.items() if kind.in_folders}


def weight(kind: str, seed: int = 0) -> Any:
    """Return a random quantized weight of a kind."""
    return MADE[kind](np.random.default_rng(seed).standard_normal((SIZE, SIZE), np.float32))


def drawn(*names: str) -> list[Any]:
    """Return NumPy arrays with these names; some rows of x have outliers."""
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(shape, np.float32) for n, shape in SHAPES.items()}
    arrays["x"][0, 1, 5] = 9
    return [arrays[name] for name in names]


def _layers(x: Any, w: Any, a: Any, b: Any, magnitude: Any) -> Any:
    ys = uc.lora_linears(x, [(w, a, b, 0.5), (w, a, b, 0.5, None, magnitude)])
    return uc.add(*ys)


# what a call is given beside its weight, and the call
CALLS: dict[str, tuple[str, Call]] = {
    "linear": ("x", lambda w, x: uc.linear(x, w)),
    "linear with a bias": ("x bias", lambda w, x, bias: uc.linear(x, w, bias)),
    "lora_linear": (
        "x a b bias",
        lambda w, x, a, b, bias: uc.lora_linear(x, w, a, b, scale=0.5, bias=bias),
    ),
    "lora_linear that drops": (
        "x a b",
        lambda w, x, a, b: uc.lora_linear(x, w, a, b, dropout=0.5, seed=7),
    ),
    "lora_linear with magnitudes": (
        "x a b magnitude",
        lambda w, x, a, b, magnitude: uc.lora_linear(x, w, a, b, magnitude=magnitude),
    ),
    "lora_linears": ("x a b magnitude", lambda w, *given: _layers(given[0], w, *given[1:])),
    "swiglu_mlp": ("x", lambda w, x: uc.swiglu_mlp(x, w, w, w)),
}
# calls of one kind of weights
OWN: dict[str, tuple[str, str, Call]] = {
    "nf4_linear": ("nf4", "x bias", lambda w, x, bias: uc.nf4_linear(x, w, bias)),
    "int8_linear": ("int8", "x", lambda w, x: uc.int8_linear(x, w)),
    "int8_linear with outliers": ("int8", "x", lambda w, x: uc.int8_linear(x, w, threshold=6.0)),
    "ternary_linear": ("ternary", "x bias", lambda w, x, bias: uc.ternary_linear(x, w, bias=bias)),
    "ternary_linear of integers": (
        "ternary",
        "x",
        lambda w, x: uc.ternary_linear(x, w, activations="int8"),
    ),
}
EVERY = [(kind, *call) for call in CALLS.values() for kind in MADE] + [*OWN.values()]
NAMES = [f"{call}-{kind}" for call in CALLS for kind in MADE] + [*OWN]


def gradients(call: Call, given: list[Any]) -> tuple[Any, list[Any]]:
    """Return the result of a call on the library's own tape, and the gradients of its sum."""
    tape = uc.Tape()
    watched = [tape.watch(array) for array in given]
    y = call(*watched)
    return y.value, tape.gradients(y, watched, np.ones_like(y.value))
