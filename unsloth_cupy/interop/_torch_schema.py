"""Options of ops as the schemas of torch have them.

A schema knows numbers, text and lists of them; a list holds no None, and an integer has 64 bits
with a sign.  So

    window: tuple[int | None, int | None]    SymInt[]     None in it is ABSENT
    axis: int | tuple[int, ...]              SymInt[]     a number is a list of one
    wanted: Set[str]                         str[]
    key: slice, None, ..., int, or a tuple   SymInt[]     four for each
"""

import inspect
import types
import typing
from collections.abc import Callable, Set
from typing import Any, NamedTuple

ABSENT = -(2**62)
KINDS = {bool: "bool", int: "SymInt", float: "float", str: "str"}  # an int would be a constant


class Codec(NamedTuple):
    """How an option travels: its kind in a schema, and both ways where it is another value."""

    kind: str
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


def codec_of(parameter: inspect.Parameter) -> Codec:
    """Return how the values of an option travel, by its annotation."""
    given = parameter.annotation
    kinds = [*typing.get_args(given)] if isinstance(given, types.UnionType) else [given]
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
    return None if value is None else sorted(value)


def _set_decoded(value: Any) -> Any:
    return None if value is None else frozenset(value)


def _list_encoded(value: Any) -> Any:
    if value is None:
        return None
    listed = value if isinstance(value, tuple | list) else (value,)
    return [ABSENT if each is None else each for each in listed]


def _list_decoded(value: Any) -> Any:
    return None if value is None else tuple(None if each == ABSENT else each for each in value)


def _key_encoded(key: Any) -> Any:
    found: list[Any] = []
    for each in key if isinstance(key, tuple) else (key,):
        if isinstance(each, slice):
            bounds = [ABSENT if n is None else n for n in (each.start, each.stop, each.step)]
            found += [1, *bounds]
        elif each is ... or each is None:
            found += [2 if each is ... else 3, 0, 0, 0]
        else:
            found += [0, each, 0, 0]
    return found


def _key_decoded(listed: Any) -> Any:
    found: list[Any] = []
    for at in range(0, len(listed), 4):
        kind, *bounds = listed[at : at + 4]
        start, stop, step = (None if n == ABSENT else n for n in bounds)
        found.append((start, slice(start, stop, step), ..., None)[kind])
    return tuple(found)
