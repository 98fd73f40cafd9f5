"""The check for a number passed as an array of integers, which the signature of an op accepts."""

from typing import Any

from ...errors import DTypeError


def refuse_number(call: str, name: str, value: Any) -> None:
    """Raise DTypeError for a Python int: a kernel needs an array, and a backward op its shape."""
    if isinstance(value, int):
        raise DTypeError(f"{call}: {name} is the number {value}; pass np.array({value})")
