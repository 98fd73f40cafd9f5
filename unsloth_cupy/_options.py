"""What the options of an op may be, read off the annotations of its definition.

    eps: float                  a finite number
    softcap: float | None       a finite number or None
    chunk: int | None           an integer or None
    interleaved: bool           True or False

Bounds, and options annotated otherwise, are the op's own to check.
"""

import functools
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .errors import ConfigError


class Option(NamedTuple):
    """What one option may be: a bool, an int or a float, or None too."""

    kind: type[Any]
    optional: bool


KINDS: Mapping[type[Any], tuple[str, tuple[type[Any], ...]]] = {
    bool: ("True or False", (bool, np.bool_)),
    int: ("an integer", (int, np.integer)),
    float: ("a finite number", (float, int, np.floating, np.integer)),
}


@functools.cache
def options_of(definition: Callable[..., Any]) -> dict[str, Option]:
    """Return the parameters that are annotated with one of KINDS, alone or with None."""
    found = {}
    for parameter in inspect.signature(definition).parameters.values():
        kinds = {parameter.annotation}
        if isinstance(parameter.annotation, types.UnionType):
            kinds = {*typing.get_args(parameter.annotation)}
        optional = types.NoneType in kinds
        kinds.discard(types.NoneType)
        if len(kinds) == 1 and kinds <= KINDS.keys():
            found[parameter.name] = Option(kinds.pop(), optional)
    return found


def check(definition: Callable[..., Any], options: dict[str, Any]) -> None:
    """Turn NumPy's numbers into Python's, in place; raise ConfigError for anything else."""
    known = options_of(definition)
    for name, value in options.items():
        if name in known:
            kind, optional = known[name]
            exact = value.__class__ is kind and (kind is not float or -math.inf < value < math.inf)
            if not exact and not (optional and value is None):
                options[name] = _plain(definition.__name__, name, value, known[name])


def is_number(value: Any) -> bool:
    """Say whether value is a real number of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(op: str, name: str, value: Any, option: Option) -> Any:
    """Return the value as an instance of the option's kind."""
    words, classes = KINDS[option.kind]
    boolean = isinstance(value, bool | np.bool_)  # which Python counts among the integers
    fits = isinstance(value, classes) and boolean == (option.kind is bool)
    if fits and (option.kind is not float or -math.inf < value < math.inf):
        return value.item() if isinstance(value, np.generic) else value
    words += " or None" * option.optional
    raise ConfigError(f"{op}({name}={reprlib.repr(value)}): {name} must be {words}")
