"""Rotary embeddings: modules whose forward calls a function that rotates queries and keys.

Such a forward is copied with other globals, in which that function calls an op.  The arguments that
the model passes to the function are recorded once; the layouts of its tables are tried on them.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..torch import rope_qk
from ._changes import Changes
from ._trials import Refused, agree

NAMES = ("apply_rotary_pos_emb", "apply_rotary_emb", "apply_rotary_pos_emb_interleave")
Turn = Callable[..., Any]
Rotation = Callable[..., Any]  # (op, *arguments that a model passes to its function)


def named(module: nn.Module) -> list[str]:
    """Return the rotary functions (of NAMES) that a module's forward calls."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return [name for name in NAMES if name in names and name in forward.__globals__]


def with_functions(forward: Any, functions: Mapping[str, Turn]) -> Callable[..., Any]:
    """Return a copy of a forward in which these names are other functions."""
    plain = inspect.unwrap(forward)
    scope = plain.__globals__ | {**functions}
    del scope["__name__"]  # with it, torch.compile would use the globals of the module
    code = plain.__code__.replace()  # a new object, as torch.compile caches by code
    copy: Any = types.FunctionType(code, scope, "forward", plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__, copy.__signature__ = plain.__kwdefaults__, inspect.signature(plain)
    return decorated_as(forward, copy)


def decorated_as(forward: Any, plain: Any) -> Callable[..., Any]:
    """Return a function with copies of a forward's decorators; raise Refused if one is unknown.

    A decorator made with ``functools.wraps`` has the function that it calls in ``__wrapped__`` and
    in its closure; the copy has the other function there.
    """
    if not hasattr(forward, "__wrapped__"):
        decorated: Callable[..., Any] = plain
        return decorated
    inner, before = decorated_as(forward.__wrapped__, plain), forward.__wrapped__
    cells = getattr(forward, "__closure__", None) or ()
    closure = tuple(
        types.CellType(inner) if cell.cell_contents is before else cell for cell in cells
    )
    if closure == cells:
        raise Refused("a decorator of its forward cannot be copied")
    copy: Any = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", forward.__defaults__, closure
    )
    copy.__kwdefaults__, copy.__wrapped__ = forward.__kwdefaults__, inner
    return copy


@functools.cache
def turning(forward: Any, name: str, rotation: Rotation) -> Callable[..., Any]:
    """Return a forward that rotates by the op; all layers share it, so it is compiled once."""
    return with_functions(forward, {name: partial(rotation, rope_qk)})


def record(changes: Changes, module: nn.Module) -> list[tuple[Any, ...]]:
    """Make a module record the calls of its rotary functions; return the list of these calls."""
    forward: Any = type(module).forward
    notes: list[tuple[Any, ...]] = []

    def noting(name: str) -> Turn:
        function = inspect.unwrap(forward).__globals__[name]

        def noted(*args: Any, **options: Any) -> Any:
            notes.append((name, function, args, options))
            return function(*args, **options)

        return noted

    changes.forward(module, with_functions(forward, {n: noting(n) for n in named(module)}))
    return notes


def take(changes: Changes, module: nn.Module, notes: list[tuple[Any, ...]]) -> Rotation:
    """Make a module rotate by the first of ROTATIONS that agrees with its function."""
    if len({name for name, *_ in notes}) != 1:
        raise Refused("it rotates in two ways" if notes else "it did not call its rotary function")
    name, function, args, options = notes[0]
    wide = [a.float() if a.is_floating_point() else a for a in args]
    for rotation in ROTATIONS:
        turn = partial(rotation, rope_qk)
        if agree(partial(function, **options), partial(turn, **options), wide, torch.float32):
            changes.forward(module, turning(type(module).forward, name, rotation))
            return rotation
    raise Refused(f"{function.__name__} rotates in another way")


def _split(table: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the table with each angle once; ``layout`` names the repetition of angles in it."""
    if layout == "whole":
        return table
    return table[..., ::2] if layout == "neighbours" else table[..., : table.shape[-1] // 2]


def _rotation(layout: str, interleaved: bool) -> Rotation:
    """Return a rotation for tables with this layout."""

    def turn(op: Turn, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = _split(cos, layout), _split(sin, layout)
        if unsqueeze_dim == 2:
            return _turned(op, q, k, cos, sin, interleaved)
        q, k = _turned(op, q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    return turn


def _alone(layout: str) -> Rotation:
    """Return a rotation of queries or keys alone, as Gemma 4 has layers without keys."""

    def turn(op: Turn, x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        no_heads = x[:, :, :0] if unsqueeze_dim == 2 else x[:, :0]
        return _rotation(layout, False)(op, x, no_heads, cos, sin, unsqueeze_dim)[0]

    return turn


def _sorted(op: Turn, q: Any, k: Any, cos: Any, sin: Any, **options: Any) -> Any:
    """Rotate neighbours; in the result the first values of all pairs come before the second."""
    q, k = (torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in (q, k))
    return _rotation("halves", False)(op, q, k, cos, sin, **options)


def _complex(op: Turn, q: Any, k: Any, angles: Any) -> Any:
    """Rotate neighbours by a table of complex numbers."""
    return _turned(op, q, k, angles.real, angles.imag, True)


def _turned(op: Turn, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate (batch, tokens, heads, dim) by tables of (batch or 1, tokens, half)."""
    batch, tokens, half = cos.shape
    positions = None
    if batch > 1:  # every text has its own rows of the table
        positions = torch.arange(batch * tokens, device=q.device).view(batch, tokens)
    cos, sin = cos.reshape(-1, half), sin.reshape(-1, half)  # (batch * tokens, half)
    return op(q, k, cos, sin, positions, interleaved=interleaved)


LAYOUTS = ("halves", "neighbours", "whole")  # angles twice in two halves or as pairs; or once
ROTATIONS = [*(_rotation(layout, pairs) for pairs in (False, True) for layout in LAYOUTS)]
ALONE = [*map(_alone, LAYOUTS)]
ROTATIONS += [_sorted, _complex, *ALONE]
