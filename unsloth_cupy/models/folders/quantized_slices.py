"""Read rows or columns of quantized weights from files, with few other bytes.

int8: any rows or columns.  4 bits: rows that are whole blocks, or whole groups of 256 blocks with
double quantization.  Ternary: any columns, and rows that are whole bytes; a byte holds rows r,
r + rows / 4, r + rows / 2 and r + 3 * rows / 4.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...ops.quantized.int8 import Int8
from ...ops.quantized.nf4 import BLOCKS, NESTED, Nf4
from ...ops.quantized.nf4_quantize import KINDS
from ...ops.quantized.ternary import Ternary
from ...ops.quantized.weight import Quantized
from ...parallel.communicator import along

Tensors = Mapping[str, Any]  # by name after the layer's name: objects with a shape that read slices
CODES, ABSMAX, NESTED_ABSMAX = "weight", "weight.absmax", "weight.nested_absmax"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS)


class Narrow(NamedTuple):
    """The part of a weight that is read: its state, and the rows or columns that it contains."""

    state: Mapping[str, Array]
    kept: Sequence[slice]

    def places(self, pieces: Sequence[slice]) -> list[slice]:
        """Return where rows or columns of the whole weight are in the part that is read."""
        result = []
        for piece in pieces:
            before = 0
            for kept in self.kept:
                first, stop = max(piece.start, kept.start), min(piece.stop, kept.stop)
                if first < stop:
                    result.append(slice(before + first - kept.start, before + stop - kept.start))
                before += kept.stop - kept.start
        return result


def narrow(
    kind: type[Quantized], tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]
) -> Narrow | None:
    """Return the part of a stored weight that some rows or columns need.

    None: they need the whole weight, or the tensors do not fit the shape; reading the whole weight
    then reports the error.
    """
    read = READ.get(kind)
    part = None if read is None else read(tensors, tuple(shape), axis, places)
    if part is None:
        return None
    rest = {key: tensor[...] for key, tensor in tensors.items() if key not in part.state}
    return part._replace(state={**rest, **part.state})


def _int8(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    """Return rows or columns of an ``Int8`` weight; see ``narrow``."""
    if not _fit(tensors, {CODES: shape, "SCB": shape[:1]}):
        return None
    cut = (CODES,) if axis else (CODES, "SCB")
    return Narrow({key: _taken(tensors[key], axis, places) for key in cut}, places)


def _four_bits(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    """Return rows of an ``Nf4`` weight; see ``narrow``."""
    name, quant_state = _facts(tensors, STATES)
    block, (rows, columns) = quant_state.get("blocksize"), shape
    stored = quant_state.get("shape")
    if isinstance(stored, list) and len(stored) == 3:  # a stack, whose rows follow each other
        stored = [stored[0] * stored[1], stored[2]]
    if axis or block not in BLOCKS or stored != [rows, columns]:
        return None  # a rank's columns are a few bytes of each row, so a disk would read everything
    values = {CODES: 2, ABSMAX: block, NESTED_ABSMAX: block * NESTED}  # per stored element
    values = {key: count for key, count in values.items() if key in tensors}
    sizes = {key: (-(-rows * columns // count),) for key, count in values.items()}
    transposed = _fit(tensors, {ABSMAX: (columns // block, rows)})  # bitsandbytes on CPUs
    sizes |= {CODES: (*sizes[CODES], 1)} | (
        {ABSMAX: (columns // block, rows)} if transposed else {}
    )
    if not _fit(tensors, sizes):
        return None
    unit = max(values.values())
    kept = _widened(places, unit // gcd(unit, columns), rows)
    state = {name: _encoded(quant_state, _length(kept), columns)}
    for key, count in values.items():
        ends = [(where.start * columns, where.stop * columns) for where in kept]
        flat = [slice(start // count, -(-stop // count)) for start, stop in ends]
        by_columns = transposed and key == ABSMAX
        state[key] = _taken(tensors[key], int(by_columns), kept if by_columns else flat)
    return Narrow(state, kept)


def _ternary(tensors: Tensors, shape: Any, axis: int, places: Sequence[slice]) -> Narrow | None:
    """Return rows or columns of a packed ``Ternary`` weight; see ``narrow``."""
    name, form = _facts(tensors, ("weight_form",))
    (rows, columns), quarter = shape, shape[0] // 4
    grouped = form.get("group") is not None
    scale = tensors.get("weight_scale")
    fits = form.get("shape", [rows, columns]) == [rows, columns]
    if rows % 4 or not fits or scale is None or not _fit(tensors, {CODES: (quarter, columns)}):
        return None
    by_row = len(scale.shape) == 2
    if (by_row and scale.shape[0] != rows) or (axis and grouped):
        return None
    state = {}
    if axis:
        state[CODES], kept = _taken(tensors[CODES], 1, places), places
    else:
        bits = [slice(quarter * n, quarter * (n + 1)) for n in range(4)]
        within = [_within(piece, bit) for piece in places for bit in bits]
        packed = _widened([piece for piece in within if piece.start < piece.stop], 1, quarter)
        kept = [slice(b.start + w.start, b.start + w.stop) for b in bits for w in packed]
        state[CODES] = _taken(tensors[CODES], 0, packed)
        if by_row:
            state["weight_scale"] = _taken(scale, 0, kept)
    if name:
        size = _length(kept)
        state[name] = _encoded(form, *((rows, size) if axis else (size, columns)))
    return Narrow(state, kept)


READ: Mapping[type[Quantized], Callable[..., Narrow | None]] = {
    Int8: _int8,
    Nf4: _four_bits,
    Ternary: _ternary,
}


def _fit(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether all these tensors exist and have these shapes."""
    return all(key in tensors and tensors[key].shape == shape for key, shape in shapes.items())


def _facts(tensors: Tensors, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return which of these names exists, and the dict that its bytes encode as JSON."""
    name = next((name for name in names if name in tensors), "")
    try:
        facts = json.loads(bytes(tensors[name][...])) if name else {}
    except (UnicodeDecodeError, ValueError):
        return name, {}
    return name, facts if isinstance(facts, dict) else {}


def _encoded(facts: Mapping[str, Any], *shape: int) -> Array:
    """Return a dict with another shape as the bytes of JSON."""
    text = json.dumps({**facts, "shape": shape})
    return np.frombuffer(text.encode(), np.uint8)


def _within(piece: slice, outer: slice) -> slice:
    """Return the part of a slice inside of another, relative to the other's start."""
    first, stop = max(piece.start, outer.start), min(piece.stop, outer.stop)
    return slice(first - outer.start, stop - outer.start)


def _widened(places: Sequence[slice], step: int, size: int) -> list[slice]:
    """Return separate slices that cover others, with ends at multiples of a step or at size."""
    covers: list[slice] = []
    for piece in sorted(places, key=lambda each: each.start):
        first, stop = piece.start // step * step, min(-(-piece.stop // step) * step, size)
        if covers and first <= covers[-1].stop:
            first, stop = covers[-1].start, max(stop, covers.pop().stop)
        covers.append(slice(first, stop))
    return covers


def _length(places: Sequence[slice]) -> int:
    """Return the sum of the lengths of slices."""
    return sum(piece.stop - piece.start for piece in places)


def _taken(tensor: Any, axis: int, places: Sequence[slice]) -> Array:
    """Return slices of a tensor along an axis, concatenated."""
    parts = [tensor[along(axis, piece)] for piece in places]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
