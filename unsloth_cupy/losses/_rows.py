"""Sums over the tokens of texts, and the functions of them that losses are made of."""

from typing import Any

import numpy as np

from ..core.dtypes import Array, holds_numbers
from ..errors import ConfigError, DTypeError, NotFiniteError, ShapeError

LARGEST = 80.0  # of an exponent: exp of it is finite in float32
# Of a log-probability above 0: float32 rounds a logit of up to 2**12 and its lse, whose difference
# it is, by less, and a sum of them to a mean too.
ROUNDED = 1e-3


def as_mask(call: str, mask: Any) -> Any:
    """Return a mask of 0 and 1 as one of bool, of any library.

    Raises
    ------
    ConfigError
        It holds something else, as labels do; arrays of a GPU are not read.
    DTypeError
        It is no array of booleans or numbers.
    """
    kind = str(getattr(mask, "dtype", type(mask).__name__))
    if kind.endswith("bool"):
        return mask
    if not holds_numbers(mask):
        raise DTypeError(f"{call}: mask is {kind}; pass an array of True and False, or of 1 and 0")
    if isinstance(mask, np.ndarray) and not ((mask == 0) | (mask == 1)).all():
        wrong = mask[(mask != 0) & (mask != 1)].flat[0]
        raise ConfigError(
            f"{call}: mask holds {wrong}; pass True or 1 for tokens that count, else 0"
        )
    return mask != 0


def as_weights(weights: Any) -> Any:
    """Return weights as floats, of any library; True is 1."""
    if str(getattr(weights, "dtype", "")).endswith("bool"):
        return weights * np.float32(1)
    return weights


def refuse_unused(call: str, choice: str, **unused: bool) -> None:
    """Raise ConfigError for an option that was given though a choice does not use it."""
    if names := [name for name, is_unused in unused.items() if is_unused]:
        raise ConfigError(f"{call}: {choice} does not use {' and '.join(names)}; leave that out")


def check_pairs(call: str, rows: int) -> None:
    """Raise ShapeError unless rows are chosen texts, then as many rejected ones."""
    if rows % 2:
        raise ShapeError(
            f"{call}: {rows} rows are not pairs; the first half are the chosen texts, the second"
            " half their rejected ones, in the same order",
            expected="an even number of rows",
            actual=rows,
        )


def check_some(call: str, rows: int, count: float | None) -> None:
    """Raise ShapeError for a mean over no rows; with a count, no rows are a part of a batch."""
    if not rows and count is None:
        cure = "leave that batch out, or pass count for a part of one"
        raise ShapeError(f"{call}: no rows have no mean; {cure}", expected="a row", actual=0)


def check_positive(call: str, **options: float) -> None:
    """Raise ConfigError for an option that is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(f"{call}({name}={value}): {name} must be above 0")


def check_share(call: str, below: float, **options: float) -> None:
    """Raise ConfigError for an option outside of 0 (included) to ``below`` (excluded)."""
    for name, value in options.items():
        if not 0 <= value < below:
            raise ConfigError(f"{call}({name}={value}): {name} must be in [0, {below:g})")


def masked(call: str, array: Array, mask: Array, name: str) -> Array:
    """Return numbers of tokens, with 0 where the mask hides what they are.

    Raises
    ------
    NotFiniteError
        One that counts is not finite; arrays of a GPU are not read.
    """
    counted: Any = np.where(mask, array, 0)
    if type(counted) is np.ndarray and not np.isfinite(counted).all():
        row, token = np.argwhere(~np.isfinite(counted))[0]
        raise NotFiniteError(
            f"{call}: {name} holds {counted[row, token]} at row {row}, token {token}, which mask"
            " counts; mask tokens that cannot be predicted, and look for what broke the model"
        )
    return counted


def log_probabilities(call: str, array: Array, mask: Array, name: str = "log_probs") -> Array:
    """Return log-probabilities of tokens, with 0 where the mask hides what they are.

    Raises
    ------
    NotFiniteError
        As ``masked``.
    ConfigError
        One that counts is above 0, by more than rounding; arrays of a GPU are not read, and hold
        NaN there.
    """
    counted: Any = masked(call, array, mask, name)
    above = counted > ROUNDED
    if type(counted) is not np.ndarray:
        return np.where(above, counted.dtype.type(np.nan), counted)
    if above.any():
        row, token = np.argwhere(above)[0]
        raise ConfigError(
            f"{call}: {name} holds {counted[row, token]:.3g} at row {row}, token {token}, above 0:"
            " it is no log-probability; pass those of model.log_probs"
        )
    return counted


def check_finite(call: str, **arrays: Any) -> None:
    """Raise NotFiniteError for a number that is not finite; arrays of a GPU are not read."""
    for name, array in arrays.items():
        if type(array) is np.ndarray and not np.isfinite(array).all():
            place = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            where = f" at {', '.join(map(str, place))}" if place else ""
            cure = "leave that text out, and look for what gave it"
            raise NotFiniteError(f"{call}: {name} holds {array[place]}{where}; {cure}")


def lengths(mask: Array, dtype: Any) -> Array:
    """Return the number of tokens of each row, at least 1."""
    return np.maximum(mask.sum(axis=1), 1).astype(dtype)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), which no x overflows."""
    return np.exp(log_sigmoid(x))


def log_sigmoid(x: Array) -> Array:
    """Return log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(x.dtype.type(0), -x)


def exp(x: Array) -> Array:
    """Return exp(x), of exponents of at most LARGEST."""
    return np.exp(np.minimum(x, LARGEST))
