"""The ternary weight: codes -1, 0 and 1 times a scale, two bits per weight.

w[o, d] = codes[o, d] * scale
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from ...core.call import check_options, is_number
from ...core.dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, Array, float_dtype
from ...core.op import OPS
from ...core.stand_in import is_planned
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ...placement import check_library, to_device_of
from ..common.int8_codes import quantized
from ._planes import (
    MARKED_BYTES,
    WORD,
    Statistics,
    check_codes,
    check_group,
    codes_of,
    count_ones,
    marks_of,
    planes_of,
    row_blocks,
    row_bytes,
    scale_of_columns,
)
from ._state import matrix_shape
from ._ternary_bytes import ByteForms
from ._ternary_rules import parts_of
from ._ternary_sparse import SparseForms
from ._ternary_state import FolderForm
from .ternary_dense import dense_part
from .weight import Quantized, in_blocks, on_gpu

ACTIVATIONS = (None, "int8")
FEW = 16  # most rows for which a kernel reads the planes; more rows are multiplied by dense chunks
GROUP_STEP = 128  # that kernel needs groups of a multiple of 128 columns
SKIPPED = 1 / 8  # share of chunks of zeros from which on marks are stored, and zeros skipped


class Ternary(FolderForm, ByteForms, SparseForms, Quantized):
    """A frozen weight (outputs, inputs): codes -1, 0 and 1, and scales by tensor, row or group.

    Parameters
    ----------
    planes : (outputs, 2, bytes) uint8
        Bits of the codes 1, then of the codes -1: for column d, bit ``d % 32`` of word ``d // 32``
        of a row.
    scale : () or (outputs, 1) or (outputs, groups) float32
        Finite, 0 or more; float64 for a float64 weight.
    shape : (outputs, inputs)
    group : int, optional
        Columns that share a scale, if a row has several scales.
    dtype : float dtype
        The dtype in which products compute.
    errors : (mean, largest), optional
        Mean and largest ``abs(w - codes * scale)``, for ``statistics``.
    activations : str, optional
        ``"int8"``: products round rows of x to 8 bits, as BitNet does.
    largest : callable, optional
        For columns of a larger weight: returns ``max |x|`` of whole rows from ``max |x|`` of the
        columns.

    Raises
    ------
    RangeError
        A scale is NaN, infinite or negative, or 0 for a code other than 0.
    ShapeError, DTypeError, ConfigError
        The arrays do not fit each other.
    """

    KIND = "ternary"

    def __init__(
        self,
        planes: Any,
        scale: Any,
        shape: tuple[int, int],
        *,
        group: int | None = None,
        dtype: Any = FLOAT32,
        errors: tuple[float, float] | None = None,
        activations: str | None = None,
        largest: Callable[[Array], Array] | None = None,
    ) -> None:
        rows, columns = self.shape = matrix_shape("Ternary", shape)
        self.dtype, self.group, self.planes = float_dtype("Ternary", dtype), group, planes
        self.home = planes
        self._errors, self.activations, self.largest = errors, activations, largest
        self._counts: tuple[int, int] | None
        check_library("Ternary: planes", planes)
        if group is not None:
            check_group("Ternary", group)
        rounded: Any = activations
        if not isinstance(rounded, str | None) or activations not in ACTIVATIONS:
            problem = f"Ternary: activations={activations!r}; choose None or 'int8'"
            raise ConfigError(problem)
        expected = (rows, 2, row_bytes(columns))
        if planes.shape != expected or planes.dtype != np.uint8:
            raise ShapeError(
                f"Ternary: planes are {planes.dtype} {planes.shape}; they must be uint8 {expected}",
                expected=expected,
                actual=tuple(planes.shape),
            )
        self.scale = self._checked(scale)
        self._mark()

    def _mark(self) -> None:
        """Set ``marks``, by which a kernel skips chunks of zeros, if there are enough chunks."""
        self.marks: Any = None
        self._counts = self.sparse_parts = None
        if on_gpu(self.planes) and self.planes.size and not is_planned(self.planes):
            marks = marks_of(self.planes)
            chunks = len(marks) * -(-self.planes.shape[2] // MARKED_BYTES)
            if 1 - count_ones(marks) / chunks >= SKIPPED:
                self.marks = marks

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        if x.dtype not in KERNEL_DTYPES or not 0 < len(x) <= FEW or 0 in self.shape:
            return False
        whole = on_gpu(x) and (self.group or GROUP_STEP) % GROUP_STEP == 0
        y = self._multiplied(x) if whole else self.sparse_product(x)
        if y is not None:
            out[...] = out + y if add else y
        return y is not None

    def _checked(self, scale: Any) -> Any:
        """Return the scales as an array; raise unless they fit the shape and are 0 or more."""
        rows, columns = self.shape
        wide = np.promote_types(self.dtype, FLOAT32)
        if is_number(scale):
            scale = to_device_of(np.asarray(scale, wide), self.planes)
        check_library("Ternary: scale", scale)
        if scale.dtype not in FLOATS and scale.dtype.kind not in "iu":
            raise DTypeError(f"Ternary: scale is {scale.dtype}; it must hold numbers")
        scale = scale.astype(wide, copy=False)
        groups = 1 if self.group is None else -(-columns // self.group) or 1
        shapes = [(rows, groups)] if self.group else [(), (rows, 1)]
        if scale.shape not in shapes:
            raise ShapeError(
                f"Ternary: scale is {scale.shape}; it must be {' or '.join(map(str, shapes))}",
                expected=shapes[-1],
                actual=tuple(scale.shape),
            )
        good = np.isfinite(scale) & (scale >= 0)
        if not is_planned(scale) and not good.all():
            at = [int(axis[0]) for axis in np.nonzero(np.atleast_1d(~good))]
            value = float(np.atleast_1d(scale)[tuple(at)])
            index = at if scale.ndim else ""
            raise RangeError(f"Ternary: scale{index} is {value}; it must be 0 or more")
        if not is_planned(scale):
            self._check_zeros(scale.reshape(1, 1) == 0 if scale.ndim == 0 else scale == 0)
        return scale

    def _check_zeros(self, zero: Any) -> None:
        """Raise RangeError if a code with a scale of 0 is not 0.

        ``zero`` (1 or outputs, groups) is True where a scale is 0.
        """
        if not zero.any():
            return
        rows, columns = self.shape
        for part in row_blocks(rows, columns):
            hidden = scale_of_columns(
                zero[part if len(zero) > 1 else ...], self.group or 1, columns
            )
            if (hidden & (codes_of(self.planes[part], columns) != 0)).any():
                cure = "scales of codes 1 and -1 are positive"
                raise RangeError(f"Ternary: a scale is 0, and codes that it scales are not; {cure}")

    @classmethod
    def from_codes(
        cls, codes: Any, scale: Any, *, group: int | None = None, dtype: Any = FLOAT32
    ) -> Self:
        """Return the matrix with these codes; raise RangeError unless all are -1, 0 or 1."""
        check_library("Ternary.from_codes: codes", codes)
        if codes.ndim != 2 or codes.dtype.kind not in "iub":
            raise ShapeError(
                f"Ternary.from_codes: codes are {codes.dtype} {codes.shape}; they must be integers,"
                " (outputs, inputs)",
                expected=("outputs", "inputs"),
                actual=tuple(codes.shape),
            )
        check_codes("Ternary.from_codes", codes)
        return cls(planes_of(codes), scale, codes.shape, group=group, dtype=dtype)

    def __repr__(self) -> str:
        return f"<Ternary {self.shape} per {self.per}, {self.sparsity:.1%} zeros, {self.dtype}>"

    @property
    def per(self) -> str:
        """The weights that share a scale: "tensor", "row" or "group"."""
        if self.group is not None:
            return "group"
        return "row" if self.scale.ndim else "tensor"

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the weight, by name."""
        return {"planes": self.planes, "scale": self.scale}

    def facts(self) -> dict[str, Any]:
        """Return the arguments of the constructor other than the arrays of ``held``."""
        known = {"shape": self.shape, "group": self.group, "dtype": self.dtype}
        rounding = {"activations": self.activations, "largest": self.largest}
        return known | {"errors": self._errors, **rounding}

    @property
    def codes(self) -> Array:
        """The int8 codes, unpacked at each access."""
        return codes_of(self.planes, self.shape[1])

    @property
    def scales(self) -> Array:
        """The scales as a matrix, (1 or outputs, groups)."""
        return self.scale.reshape(1, 1) if self.scale.ndim == 0 else self.scale

    @property
    def sparsity(self) -> float:
        """The share of codes that are 0."""
        return self.statistics.sparsity

    @property
    def statistics(self) -> Statistics:
        """The shares of 0, 1 and -1, and the errors against the dense weight that was quantized.

        After ``set`` or ``prune`` the errors are None: the original weight is not stored.
        """
        if self._counts is None:
            self._counts = count_ones(self.planes[:, 0]), count_ones(self.planes[:, 1])
        size = self.shape[0] * self.shape[1] or 1
        plus, minus = (number / size for number in self._counts)
        mean, largest = self._errors or (None, None)
        return Statistics((size - sum(self._counts)) / size, plus, minus, mean, largest)

    def _cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return rows, or columns of whole groups; with activations, columns need ``largest``."""
        if axis and self.activations is not None and self.largest is None:
            problem = "its products round whole rows of x, but its columns see a part of a row"
            raise ConfigError(f"{self!r}: {problem}; cut it by rows")
        columns = self.shape[1]
        planes, scale = [self.planes[where] for where in places], [self.scale]
        if axis:
            codes = np.concatenate([self.codes[:, where] for where in places], 1)
            planes, columns = [planes_of(codes)], codes.shape[1]
        if self.group is not None and axis:
            if not in_blocks(self.shape, 1, places, self.group):
                cure = f"cut at multiples of {self.group}"
                raise ConfigError(f"{self!r}: columns split groups that share a scale; {cure}")
            size = self.group
            scale = [self.scale[:, where.start // size : where.stop // size] for where in places]
        elif self.scale.ndim and not axis:
            scale = [self.scale[where] for where in places]
        planes_of_all = np.concatenate(planes)
        scales = np.concatenate(scale, axis) if len(scale) > 1 else scale[0].copy()
        facts = self.facts() | {"shape": (len(planes_of_all), columns), "errors": None}
        return type(self)(planes_of_all, scales, **facts)

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        return dense_part(self.planes, self.scales, self.group or WORD, rows, columns, dtype)

    @check_options
    def set(self, row: int, column: int, value: int) -> Self:
        """Set a code to -1, 0 or 1, in place; return the matrix."""
        rows, columns = map(range, self.shape)
        checks = {"row": (row, rows), "column": (column, columns), "value": (value, range(-1, 2))}
        for name, (number, valid) in checks.items():
            if number not in valid:
                problem = f"Ternary.set: {name}={number!r}"
                cure = f"it must be in {valid.start} .. {valid.stop - 1}"
                raise RangeError(f"{problem}; {cure}", expected=valid, actual=number)
        bit = np.uint8(1 << column % 8)
        for plane, sign in zip(self.planes[row], (1, -1), strict=True):
            byte = plane[column // 8 : column // 8 + 1]  # a view, so that the planes change
            byte |= bit
            if value != sign:
                byte ^= bit
        self._errors = None
        self._mark()
        return self

    def prune(self, threshold: float) -> Self:
        """Set codes with a scale below a threshold to 0, in place; return the matrix."""
        if not is_number(threshold) or not threshold >= 0:
            raise RangeError(f"Ternary.prune: threshold={threshold!r}; it must be 0 or more")
        if (low := self.scales < threshold).any():
            for part in row_blocks(*self.shape):
                low_groups = low if len(low) == 1 else low[part]
                pruned = scale_of_columns(low_groups, self.group or 1, self.shape[1])
                codes = np.where(pruned, np.int8(0), codes_of(self.planes[part], self.shape[1]))
                self.planes[part] = planes_of(codes)
            self._errors = None
            self._mark()
        return self

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it; with ``activations``, a is rounded to int8."""
        if self.activations is None or 0 in self.shape:
            super().product_transposed(a, out, add)
            return
        y = self._multiplied(a, int8=True) if self.largest is None else self._of_columns(a)
        out[...] = out + y if add else y

    def _of_columns(self, a: Array) -> Array:
        """Return ``a @ W.T``, with a rounded by max |x| of the whole rows of which a is a part."""
        wide = a.astype(np.promote_types(a.dtype, FLOAT32), copy=False)
        tops: Any = self.largest
        codes, scales, _ = quantized(wide, tops(np.abs(wide).max(axis=-1, keepdims=True)))
        return self._multiplied(codes.astype(wide.dtype)) * scales[:, None]

    def _multiplied(self, a: Array, int8: bool = False) -> Array:
        """Return ``a @ W.T`` by ternary_linear_forward; ``int8`` rounds a."""
        multiply: Any = OPS["ternary_linear_forward"]
        scale, group = self.scales.astype(FLOAT32, copy=False), self.group or GROUP_STEP
        return multiply(a, self.planes, scale, self.marks, group=group, int8=int8)

    def requantized(self, w: Array) -> Self:
        """Return another matrix, quantized by absmean, with as many scales as this one."""
        planes, scale, errors = parts_of(w, self.per, self.group or GROUP_STEP)
        return type(self)(planes, scale, **self.facts() | {"shape": w.shape, "errors": errors})
