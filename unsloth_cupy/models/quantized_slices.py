"""Rows and columns of quantized weights in files: the bytes that they need, and few more.

Of int8, rows and columns; of 4 bits, rows of whole blocks, with double quantization of 256 of
them; of ternary, columns, and rows of whole bytes, which hold rows r, r + rows / 4 and so on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..ops.quantized.int8 import Int8
from ..ops.quantized.nf4 import BLOCKS, KINDS, NESTED, Nf4
from ..ops.quantized.ternary import Ternary
from ..ops.quantized.weight import Quantized
from ..parallel.communicator import along

Tensors = Mapping[str, Any]  # by what follows a layer's name: each has a shape, and reads slices
CODES, ABSMAX, NESTED_ABSMAX = "weight", "weight.absmax", "weight.nested_absmax"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS)


class Narrow(NamedTuple):
    """What is read of a weight: its state, and the rows or columns that lie in it end to end."""

    state: Mapping[str, Array]
    kept: Sequence[slice]

    def places(self, wanted: Sequence[slice]) -> list[slice]:
        """Return where rows or columns of the whole weight lie in what is read."""
        found = []
        for where in wanted:
            before = 0
            for kept in self.kept:
                first, stop = max(where.start, kept.start), min(where.stop, kept.stop)
                if first < stop:
                    found.append(slice(before + first - kept.start, before + stop - kept.start))
                before += kept.stop - kept.start
        return found


def narrow(
    kind: type[Quantized], tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]
) -> Narrow | None:
    """Return what rows or columns need of a weight of a shape.

    None: that is all of it, or the tensors are not of the shape, which shows when all are read.
    """
    found = READ[kind](tensors, tuple(shape), axis, places)
    if found is None:
        return None
    rest = {key: tensor[...] for key, tensor in tensors.items() if key not in found.state}
    return found._replace(state={**rest, **found.state})


def _int8(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    if not _fit(tensors, {CODES: shape, "SCB": shape[:1]}):
        return None
    cut = (CODES,) if axis else (CODES, "SCB")
    return Narrow({key: _taken(tensors[key], axis, places) for key in cut}, places)


def _four_bits(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    name, facts = _facts(tensors, STATES)
    block, (rows, columns) = facts.get("blocksize"), shape
    if axis or block not in BLOCKS or facts.get("shape") != [rows, columns]:
        return None  # the columns of a rank are a few bytes of each row: a disk reads them all
    values = {CODES: 2, ABSMAX: block, NESTED_ABSMAX: block * NESTED}  # that an element stands for
    values = {key: count for key, count in values.items() if key in tensors}
    sizes = {key: (-(-rows * columns // count),) for key, count in values.items()}
    turned = _fit(tensors, {ABSMAX: (columns // block, rows)})  # as bitsandbytes has it on CPUs
    sizes |= {CODES: (*sizes[CODES], 1)} | ({ABSMAX: (columns // block, rows)} if turned else {})
    if not _fit(tensors, sizes):
        return None
    unit = max(values.values())
    kept = _widened(places, unit // gcd(unit, columns), rows)
    state = {name: _told(facts, _length(kept), columns)}
    for key, count in values.items():
        ends = [(where.start * columns, where.stop * columns) for where in kept]
        flat = [slice(start // count, -(-stop // count)) for start, stop in ends]
        by_columns = turned and key == ABSMAX
        state[key] = _taken(tensors[key], int(by_columns), kept if by_columns else flat)
    return Narrow(state, kept)


def _ternary(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    name, facts = _facts(tensors, ("weight_form",))
    (rows, columns), quarter = shape, shape[0] // 4
    grouped = facts.get("group") is not None
    scale = tensors.get("weight_scale")
    told = facts.get("shape", [rows, columns]) == [rows, columns]
    if rows % 4 or not told or scale is None or not _fit(tensors, {CODES: (quarter, columns)}):
        return None
    by_row = len(scale.shape) == 2
    if (by_row and scale.shape[0] != rows) or (axis and grouped):
        return None
    state = {}
    if axis:
        state[CODES], kept = _taken(tensors[CODES], 1, places), places
    else:
        bits = [slice(quarter * n, quarter * (n + 1)) for n in range(4)]
        held = [_within(where, bit) for where in places for bit in bits]
        packed = _widened([where for where in held if where.start < where.stop], 1, quarter)
        kept = [slice(b.start + w.start, b.start + w.stop) for b in bits for w in packed]
        state[CODES] = _taken(tensors[CODES], 0, packed)
        if by_row:
            state["weight_scale"] = _taken(scale, 0, kept)
    if name:
        size = _length(kept)
        state[name] = _told(facts, *((rows, size) if axis else (size, columns)))
    return Narrow(state, kept)


READ: Mapping[type[Quantized], Callable[..., Narrow | None]] = {
    Int8: _int8,
    Nf4: _four_bits,
    Ternary: _ternary,
}


def _fit(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Say whether tensors are there, of these shapes."""
    return all(key in tensors and tensors[key].shape == shape for key, shape in shapes.items())


def _facts(tensors: Tensors, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return which of these names there is, and the facts that its bytes say as JSON."""
    name = next((name for name in names if name in tensors), "")
    try:
        facts = json.loads(bytes(tensors[name][...])) if name else {}
    except (UnicodeDecodeError, ValueError):
        return name, {}
    return name, facts if isinstance(facts, dict) else {}


def _told(facts: Mapping[str, Any], *shape: int) -> Array:
    text = json.dumps({**facts, "shape": shape})
    return np.frombuffer(text.encode(), np.uint8)


def _within(where: slice, outer: slice) -> slice:
    """Return a slice counted from the start of another, of which it is cut to be a part."""
    first, stop = max(where.start, outer.start), min(where.stop, outer.stop)
    return slice(first - outer.start, stop - outer.start)


def _widened(places: Sequence[slice], step: int, size: int) -> list[slice]:
    """Return slices at multiples of a step, or at the end, that cover others; no two meet."""
    found: list[slice] = []
    for where in sorted(places, key=lambda each: each.start):
        first, stop = where.start // step * step, min(-(-where.stop // step) * step, size)
        if found and first <= found[-1].stop:
            first, stop = found[-1].start, max(stop, found.pop().stop)
        found.append(slice(first, stop))
    return found


def _length(places: Sequence[slice]) -> int:
    return sum(where.stop - where.start for where in places)


def _taken(tensor: Any, axis: int, places: Sequence[slice]) -> Array:
    """Read slices of a tensor along an axis, and return them end to end."""
    parts = [tensor[along(axis, where)] for where in places]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
