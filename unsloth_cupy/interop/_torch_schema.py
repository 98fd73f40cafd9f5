"""Encodes options of ops as the types of torch's operator schemas.

A schema has numbers, strings and lists of these; a list cannot contain None, and integers have 64
bits with a sign.  So

    window: tuple[int | None, int | None]    SymInt[]     None in it is ABSENT
    axis: int | tuple[int, ...]              SymInt[]     a number is a list with one item
    wanted: Set[str]                         str[]
    key: slice, None, ..., int, or a tuple   SymInt[]     four integers for each item
"""

import inspect
import types
import typing
from collections.abc import Callable, Set
from typing import Any, NamedTuple

ABSENT = -(2**62)  # no valid window, axis or index
# SymInt: an int would be a constant of a compiled graph, which another value would recompile
KINDS = {bool: "bool", int: "SymInt", float: "float", str: "str"}


class Codec(NamedTuple):
    """The schema type of an option, and functions that encode and decode its values, or None."""

    kind: str
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


def codec_of(parameter: inspect.Parameter) -> Codec:
    """Return the codec of an option for its annotation."""
    note = parameter.annotation
    kinds = [*typing.get_args(note)] if isinstance(note, types.UnionType) else [note]
    optional = "?" * (types.NoneType in kinds)
    if slice in kinds:
        return Codec("SymInt[]", _key_encoded, _key_decoded)
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    origins = [typing.get_origin(kind) for kind in kinds]
    if Set in origins:
        return Codec("str[]" + optional, _set_encoded, _set_decoded)
    if tuple in origins:
        return Codec("SymInt[]" + optional, _list_encoded, _list_decoded)
    return Codec(KINDS[kinds[0]] + optional)


def _set_encoded(value: Any) -> Any:
    """Return a set of strings as a sorted list."""
    return None if value is None else sorted(value)


def _set_decoded(value: Any) -> Any:
    """Return a list of strings as a set."""
    return None if value is None else frozenset(value)


def _list_encoded(value: Any) -> Any:
    """Return an integer, or a tuple of integers and None, as a list of integers."""
    if value is None:
        return None
    items = value if isinstance(value, tuple | list) else (value,)
    return [ABSENT if each is None else each for each in items]


def _list_decoded(value: Any) -> Any:
    """Return a list of integers as a tuple of integers and None."""
    return None if value is None else tuple(None if each == ABSENT else each for each in value)


def _key_encoded(key: Any) -> Any:
    """Return an index key as integers: for each item a kind (0 to 3) and three values.

    The kinds are an integer, a slice, an ellipsis and None.
    """
    numbers: list[Any] = []
    for each in key if isinstance(key, tuple) else (key,):
        if isinstance(each, slice):
            bounds = [ABSENT if n is None else n for n in (each.start, each.stop, each.step)]
            numbers += [1, *bounds]
        elif each is ... or each is None:
            numbers += [2 if each is ... else 3, 0, 0, 0]
        else:
            numbers += [0, each, 0, 0]
    return numbers


def _key_decoded(numbers: Any) -> Any:
    """Return the index key of encoded integers, as a tuple."""
    key: list[Any] = []
    for at in range(0, len(numbers), 4):
        kind, *bounds = numbers[at : at + 4]
        start, stop, step = (None if n == ABSENT else n for n in bounds)
        key.append((start, slice(start, stop, step), ..., None)[kind])
    return tuple(key)
