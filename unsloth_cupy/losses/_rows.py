"""Checks, masks and functions that the losses share; rows are completions, columns their tokens."""

from typing import Any

import numpy as np

from ..core.dtypes import Array, holds_numbers
from ..errors import ConfigError, DTypeError, NotFiniteError, ShapeError

LARGEST = 80.0  # the largest exponent: exp(80) is finite in float32
# A log-probability may exceed 0 by this much.  It is the difference of a logit and its lse, which
# float32 rounds by less for logits of up to 2**12, as it does the mean of such differences.
ROUNDED = 1e-3


def as_mask(call: str, mask: Any) -> Any:
    """Return a mask of 0 and 1, of any library, as bool.

    Raises
    ------
    ConfigError
        The mask holds other numbers, as labels do; the host does not read arrays of a GPU.
    DTypeError
        The mask is not an array of booleans or numbers.
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
    """Return weights, of any library, as floats; True becomes 1."""
    if str(getattr(weights, "dtype", "")).endswith("bool"):
        return weights * np.float32(1)
    return weights


def refuse_unused(call: str, choice: str, **unused: bool) -> None:
    """Raise ConfigError if an option is passed that the choice does not use."""
    if names := [name for name, is_unused in unused.items() if is_unused]:
        raise ConfigError(f"{call}: {choice} does not use {' and '.join(names)}; leave it out")


def check_pairs(call: str, rows: int) -> None:
    """Raise ShapeError unless rows can be chosen completions and as many rejected completions."""
    if rows % 2:
        raise ShapeError(
            f"{call}: {rows} rows are not pairs; the first half are the chosen completions, the"
            " second half the rejected completions, in the same order",
            expected="an even number of rows",
            actual=rows,
        )


def check_some(call: str, rows: int, count: float | None) -> None:
    """Raise ShapeError for a mean over no rows; with a count, a part of a batch may be empty."""
    if not rows and count is None:
        cure = "leave the batch out, or pass count if it is a part of a batch"
        raise ShapeError(f"{call}: no rows have no mean; {cure}", expected="a row", actual=0)


def check_positive(call: str, **options: float) -> None:
    """Raise ConfigError for an option that is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(f"{call}({name}={value}): {name} must be above 0")


def check_share(call: str, below: float, **options: float) -> None:
    """Raise ConfigError for an option outside of [0, below)."""
    for name, value in options.items():
        if not 0 <= value < below:
            raise ConfigError(f"{call}({name}={value}): {name} must be in [0, {below:g})")


def masked(call: str, array: Array, mask: Array, name: str) -> Array:
    """Return numbers of tokens, with 0 for the tokens that the mask hides.

    Raises
    ------
    NotFiniteError
        The number of a token that counts is not finite; the host does not read arrays of a GPU.
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
    """Return log-probabilities of tokens, with 0 for the tokens that the mask hides.

    Raises
    ------
    NotFiniteError
        As in ``masked``.
    ConfigError
        A log-probability that counts is above 0 by more than rounding.  The host does not read
        arrays of a GPU: there it becomes NaN.
    """
    counted: Any = masked(call, array, mask, name)
    above = counted > ROUNDED
    if type(counted) is not np.ndarray:
        return np.where(above, counted.dtype.type(np.nan), counted)
    if above.any():
        row, token = np.argwhere(above)[0]
        raise ConfigError(
            f"{call}: {name} holds {counted[row, token]:.3g} at row {row}, token {token}, above 0:"
            " it is not a log-probability; pass the log-probabilities of model.log_probs"
        )
    return counted


def check_finite(call: str, **arrays: Any) -> None:
    """Raise NotFiniteError for a number that is not finite, in NumPy arrays only."""
    for name, array in arrays.items():
        if type(array) is np.ndarray and not np.isfinite(array).all():
            place = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            where = f" at {', '.join(map(str, place))}" if place else ""
            cure = "leave out the completion, and look for the cause"
            raise NotFiniteError(f"{call}: {name} holds {array[place]}{where}; {cure}")


def lengths(mask: Array, dtype: Any) -> Array:
    """Return the number of tokens of each row, at least 1: (rows,)."""
    return np.maximum(mask.sum(axis=1), 1).astype(dtype)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow for any x."""
    return np.exp(log_sigmoid(x))


def log_sigmoid(x: Array) -> Array:
    """Return log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(x.dtype.type(0), -x)


def exp(x: Array) -> Array:
    """Return exp(min(x, LARGEST))."""
    return np.exp(np.minimum(x, LARGEST))
