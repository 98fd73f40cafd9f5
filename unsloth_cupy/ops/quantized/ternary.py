"""A matrix of -1, 0 and 1 times a scale, two bits a weight.

w[o, d] = codes[o, d] * scale
"""

from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array, float_dtype
from ...errors import ConfigError, RangeError, ShapeError
from ...placement import check_library, placed, to_numpy
from . import _ternary_bytes as layouts
from ._planes import (
    WORD,
    Statistics,
    check_codes,
    check_group,
    codes_of,
    count,
    planes_of,
    row_blocks,
    row_bytes,
    spread,
)
from ._ternary_sparse import SparseForms


class Ternary(SparseForms):
    """A frozen weight (outputs, inputs): codes -1, 0 and 1, and a scale a tensor, row or group.

    Parameters
    ----------
    planes : (2, outputs, bytes) uint8
        Where codes are 1, and where they are -1: bit ``d % 32`` of word ``d // 32`` of a row.
    scale : () or (outputs, 1) or (outputs, groups) float32
        Finite, 0 or more; float64 for a float64 weight.
    shape : (outputs, inputs)
    group : int, optional
        Columns that share a scale, where a row has several.
    dtype : float dtype
        What it computes in.
    errors : (mean, largest), optional
        Of ``abs(w - codes * scale)``, for ``statistics``.

    Raises
    ------
    RangeError
        A scale is NaN, infinite or negative.
    ShapeError, DTypeError, ConfigError
        The arrays do not fit each other.
    """

    def __init__(
        self,
        planes: Any,
        scale: Any,
        shape: tuple[int, int],
        *,
        group: int | None = None,
        dtype: Any = FLOAT32,
        errors: tuple[float, float] | None = None,
    ) -> None:
        rows, columns = self.shape = (int(shape[0]), int(shape[1]))
        self.dtype, self.group, self.planes = float_dtype("Ternary", dtype), group, planes
        self._errors = errors
        self._counts: tuple[int, int] | None = None
        check_library("Ternary: planes", planes)
        if group is not None:
            check_group("Ternary", group)
        wanted = (2, rows, row_bytes(columns))
        if planes.shape != wanted or planes.dtype != np.uint8:
            raise ShapeError(
                f"Ternary: planes are {planes.dtype} {planes.shape}; they must be uint8 {wanted}",
                expected=wanted,
                actual=tuple(planes.shape),
            )
        self.scale = self._checked(scale)

    def _checked(self, scale: Any) -> Any:
        rows, columns = self.shape
        wide = np.promote_types(self.dtype, FLOAT32)
        if isinstance(scale, float | int | np.generic):
            scale = placed(np.asarray(scale, wide), self.planes)
        scale = scale.astype(wide, copy=False)
        groups = 1 if self.group is None else -(-columns // self.group) or 1
        either = [(rows, groups)] if self.group else [(), (rows, 1)]
        if scale.shape not in either:
            raise ShapeError(
                f"Ternary: scale is {scale.shape}; it must be {' or '.join(map(str, either))}",
                expected=either[-1],
                actual=tuple(scale.shape),
            )
        good = np.isfinite(scale) & (scale >= 0)
        if not good.all():
            at = [int(axis[0]) for axis in np.nonzero(np.atleast_1d(~good))]
            found = float(np.atleast_1d(scale)[tuple(at)])
            place = at if scale.ndim else ""
            raise RangeError(f"Ternary: scale{place} is {found}; it must be 0 or more")
        return scale

    @classmethod
    def from_codes(
        cls, codes: Any, scale: Any, *, group: int | None = None, dtype: Any = FLOAT32
    ) -> Self:
        """Return the matrix of these int8 codes; RangeError where one is not -1, 0 or 1."""
        check_library("Ternary.from_codes: codes", codes)
        if codes.ndim != 2 or codes.dtype.kind not in "iub":
            raise ShapeError(
                f"Ternary.from_codes: codes are {codes.dtype} {codes.shape}; they must be integers,"
                " (outputs, inputs)"
            )
        check_codes("Ternary.from_codes", codes)
        return cls(planes_of(codes), scale, codes.shape, group=group, dtype=dtype)

    def __repr__(self) -> str:
        return f"<Ternary {self.shape} per {self.per}, {self.sparsity:.1%} zeros, {self.dtype}>"

    @property
    def per(self) -> str:
        """What shares a scale: the tensor, a row or a group."""
        if self.group is not None:
            return "group"
        return "row" if self.scale.ndim else "tensor"

    @property
    def nbytes(self) -> int:
        """Bytes of planes and scales."""
        return int(self.planes.nbytes + self.scale.nbytes)

    @property
    def codes(self) -> Array:
        """The int8 codes, made anew each time."""
        return codes_of(self.planes, self.shape[1])

    @property
    def scales(self) -> Array:
        """The scales as a matrix: (1 or outputs, groups)."""
        return self.scale.reshape(1, 1) if self.scale.ndim == 0 else self.scale

    @property
    def sparsity(self) -> float:
        """Share of codes that are 0."""
        return self.statistics.sparsity

    @property
    def statistics(self) -> Statistics:
        """Shares of 0, 1 and -1, and the errors against the weight it was made of.

        They follow ``set`` and ``prune``, after which the errors are None: what the weight was at
        these places is not kept.
        """
        if self._counts is None:
            self._counts = count(self.planes)
        size = self.shape[0] * self.shape[1] or 1
        plus, minus = (number / size for number in self._counts)
        mean, largest = self._errors or (None, None)
        return Statistics((size - sum(self._counts)) / size, plus, minus, mean, largest)

    def dequantize(self, dtype: Any = None) -> Array:
        """Return the dense weight (outputs, inputs), of its own dtype or another."""
        made = self.dtype if dtype is None else float_dtype("Ternary.dequantize", dtype)
        return self._dense(slice(0, self.shape[0]), slice(0, self.shape[1]), made)

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        """Return a part of the dense weight as a new array."""
        first, last = columns.start // WORD * WORD, max(columns.stop, columns.start)
        skip, held = columns.start - first, slice(first // 8, row_bytes(last))
        dense = np.empty_like(
            self.planes, dtype=dtype, shape=(rows.stop - rows.start, last - first)
        )
        for part in row_blocks(*dense.shape):
            there = slice(rows.start + part.start, rows.start + part.stop)
            scales = self.scales if len(self.scales) == 1 else self.scales[there]
            values = codes_of(self.planes[:, there, held], last - first).astype(scales.dtype)
            values *= spread(scales, self.group or 1, last)[:, -(last - first) :]
            dense[part] = values
        return dense[:, skip:]

    def set(self, row: int, column: int, value: int) -> Self:
        """Set a code to -1, 0 or 1, in place; return the matrix."""
        for name, given, size in (("row", row, self.shape[0]), ("column", column, self.shape[1])):
            if not 0 <= given < size:
                raise RangeError(
                    f"Ternary.set: {name}={given!r}; it must be in 0 .. {size - 1}",
                    expected=range(size),
                    actual=given,
                )
        if value not in (-1, 0, 1):
            raise RangeError(
                f"Ternary.set: value={value!r}; a code is -1, 0 or 1",
                expected=range(-1, 2),
                actual=value,
            )
        bit = np.uint8(1 << column % 8)
        for plane, sign in zip(self.planes, (1, -1), strict=True):
            byte = plane[row, column // 8 : column // 8 + 1]
            byte |= bit
            if value != sign:
                byte ^= bit
        self._errors, self._counts = None, None
        return self

    def prune(self, threshold: float) -> Self:
        """Set codes to 0 where their scale is below a threshold, in place; return the matrix."""
        if not threshold >= 0:
            raise RangeError(f"Ternary.prune: threshold={threshold!r}; it must be 0 or more")
        if (low := self.scales < threshold).any():
            for part in row_blocks(*self.shape):
                of_rows = low if len(low) == 1 else low[part]
                lost = spread(of_rows, self.group or 1, self.shape[1])
                kept = np.where(lost, np.int8(0), codes_of(self.planes[:, part], self.shape[1]))
                self.planes[:, part] = planes_of(kept)
            self._errors, self._counts = None, None
        return self

    def state(self) -> dict[str, Any]:
        """Return all it is made of as arrays by name."""
        numbers = np.array([*self.shape, self.group or 0], np.int64)
        return {
            "planes": self.planes,
            "scale": self.scale,
            "form": numbers,
            "like": np.empty(0, self.dtype),
        }

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Return what ``state`` was taken of; raise ConfigError for another state."""
        wanted = {"planes", "scale", "form", "like"}
        if set(state) != wanted or to_numpy(state["form"]).shape != (3,):
            raise ConfigError(
                f"Ternary.from_state: a state holds {sorted(wanted)}, of which form has 3 numbers;"
                f" this one holds {sorted(state)}"
            )
        rows, columns, group = (int(n) for n in to_numpy(state["form"]))
        planes = state["planes"]
        made = cls(
            planes, state["scale"], (rows, columns), group=group or None, dtype=state["like"].dtype
        )
        layouts.check_planes("Ternary.from_state", to_numpy(planes), columns)
        return made

    def pack(self, layout: str) -> bytes:
        """Return the codes as the bytes of a layout: planes, bitnet, gguf_tq1_0 or gguf_tq2_0.

        Those of gguf hold a float16 scale a block of 256 columns, and are what gguf makes of the
        dequantised weight; the others hold no scale.
        """
        layouts.check_layout("Ternary.pack", layout, self.shape[1])
        scales: Any = to_numpy(self.scales)
        if layout in layouts.BLOCK_BYTES and self.group not in (None, layouts.GGUF):
            raise ConfigError(
                f"Ternary.pack: {layout} has a scale for {layouts.GGUF} columns, this a scale for"
                f" {self.group}; quantize with group={layouts.GGUF}"
            )
        return layouts.pack(to_numpy(self.planes), scales, self.shape[1], layout).tobytes()

    @classmethod
    def unpack(
        cls,
        data: Any,
        layout: str,
        shape: tuple[int, int],
        *,
        scale: Any = None,
        dtype: Any = FLOAT32,
        like: Any = None,
    ) -> Self:
        """Return the matrix of bytes in a layout of ``pack``.

        Parameters
        ----------
        data : bytes, or uint8 of any shape
        layout : str
        shape : (outputs, inputs)
        scale : optional
            1 where absent; the layouts of gguf bring theirs.
        dtype : float dtype
            What it computes in.
        like : array, optional
            Where it lives.

        Raises
        ------
        ShapeError
            There are too few or too many bytes.
        RangeError
            They hold what is no code, or a scale that is NaN.
        """
        planes, found = layouts.unpack(data, layout, shape)
        group = layouts.GGUF if found is not None else None
        if found is None:
            found = np.ones((), np.float32) if scale is None else scale
        elif scale is not None:
            raise ConfigError(f"Ternary.unpack: {layout} brings its scales; leave scale out")
        if like is not None:
            planes = placed(planes, like)
            found = placed(found, like) if isinstance(found, np.ndarray) else found
        return cls(planes, found, shape, group=group, dtype=dtype)
