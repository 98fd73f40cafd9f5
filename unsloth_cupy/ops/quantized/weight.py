"""The base class of quantized weights: a frozen matrix that products accept like a dense one.

    y = linear(x, weight)           gemm(x, weight.T) calls the weight for x W^T
    dx = dy W                       gemm(dy, weight) calls the weight for dy W

A weight may also be a stack of matrices, which ``grouped_linear`` and ``experts_mlp`` accept.

Where no kernel multiplies codes, the weight is dequantized in chunks, and each chunk is multiplied
(by cuBLAS, on the host by NumPy) while it is still in cache: chunks of rows for x W^T, of columns
for dy W.  So every result is one sum, rounded once, and no whole dense weight ever exists.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, Array, Stored, float_dtype
from ...core.replay import is_fixed
from ...core.stand_in import is_planned, representative_steps
from ...core.target import target_of
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ...placement import adopted, on_gpu_of_attribute
from ..common.gemm import gemm

# Bytes of a dense chunk on the host, and on a GPU: a third of the L2 cache of an H200, 50 MB.
CHUNK_BYTES = {False: 4 * 2**20, True: 16 * 2**20}
CHUNK_STEP = 64  # a chunk with more rows or columns has a multiple of this number


@on_gpu_of_attribute("home")
class Chunked(Stored, ABC):
    """A matrix (outputs, inputs), or a stack, that products dequantize part by part."""

    shape: tuple[int, ...]
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    rows = property(lambda self: math.prod(self.shape[:-1]))  # rows of all matrices of a stack
    strides = ()  # a replay reads strides and address of each operand for its key
    device = property(lambda self: self.home.device)
    data = property(lambda self: self.home.data)
    ctypes = property(lambda self: self.home.ctypes)
    T = property(lambda self: Transposed(self))  # noqa: PLW0108 -- defined below
    least_step = 1  # a part has a multiple of this number of rows or columns

    @abstractmethod
    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        """Return a part of the dense weight as a new array; both slices have start and stop."""

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        """Write or add ``x @ W.T``, computed from the codes; return False if no kernel can."""
        return False

    def _rows(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return rows of the dense weight, counted through all matrices of a stack."""
        return self._dense(slice(start, stop), slice(0, self.shape[-1]), dtype)

    def dequantize(self, dtype: Any = None) -> Array:
        """Return the dense weight (outputs, inputs), in ``dtype`` or its own dtype.

        Raises
        ------
        ConfigError
            The dtype is not a float dtype.
        """
        call = f"{type(self).__name__}.dequantize"
        target = self.dtype if dtype is None else float_dtype(call, dtype)
        return self._rows(0, self.rows, target).reshape(self.shape)  # (..., outputs, inputs)

    def dense_where(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return a stack in ``dtype``; matrices of groups without rows may hold anything.

        ``offsets`` (experts + 1,) has the first row of each group.
        """
        return self.dequantize(dtype)

    def astype(self, dtype: Any) -> Array:
        """Return the dense weight, a new array."""
        return self.dequantize(dtype)

    def computed_in(self, dtype: Any) -> Self:
        """Return the same weight with another default dtype, without copying its arrays."""
        other = copy.copy(self)
        other.dtype = float_dtype(f"{type(self).__name__}.computed_in", dtype)
        return other

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DTypeError(f"{self!r} is not an array; pass its dequantize()")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | int) -> Array:
        kind: Any = rows
        if self.ndim == 3 and is_integer(kind):
            number, height = range(len(self))[kind], self.shape[1]
            return self._rows(number * height, (number + 1) * height, self.dtype)
        start, stop, step = kind.indices(len(self)) if isinstance(kind, slice) else (0, 0, 0)
        if step != 1 or self.ndim != 2:
            what = "a slice of rows in order" if self.ndim == 2 else "the index of one matrix"
            raise ConfigError(f"{self!r}: only {what} is supported; dequantize it for [{rows}]")
        return self._rows(start, max(start, stop), self.dtype)

    def product(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W`` to out, or add it, in chunks of columns of W."""
        for part in self._chunks(a, self.shape[1], self.shape[0]):
            chunk = self._dense(slice(0, self.shape[0]), part, a.dtype)
            gemm(a, chunk, out=out[:, part], add=add)
            del chunk  # frees the chunk before the next one is allocated

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it: a kernel for few rows, or chunks of rows of W."""
        # a kernel for few rows sums in another order than the product of many rows
        if not is_fixed() and self._few_rows(a, out, add):
            return
        for part in self._chunks(a, self.shape[0], self.shape[1]):
            chunk = self._dense(part, slice(0, self.shape[1]), a.dtype)
            gemm(a, chunk.T, out=out[:, part], add=add)
            del chunk

    def _chunks(self, like: Array, length: int, other: int) -> Any:
        """Yield the slices of an axis of ``length``; the other axis has length ``other``."""
        size = max(like.dtype.itemsize, 1 if on_gpu(like) else 4)  # NumPy computes in float32
        step = CHUNK_BYTES[on_gpu(like)] // max(1, other * size)
        unit = max(CHUNK_STEP, self.least_step)
        step = step - step % unit if step > unit else max(1, step, self.least_step)
        starts = representative_steps(like, range(0, length, step))
        return (slice(start, min(start + step, length)) for start in starts)


class Quantized(Chunked):
    """A frozen matrix (outputs, inputs) in few bits.

    It is the base class of ``Nf4``, ``Int8``, ``Ternary`` and all others.  ``linear``,
    ``lora_linear``, ``lora_linears``, ``lora_merge`` and ``swiglu_mlp`` accept it as their weight.
    ``shape``, ``ndim``, ``size``, ``len``, ``T`` and slices of rows equal those of the dense
    weight; ``dtype`` is the dtype of the dequantized weight by default.  ``nbytes`` counts all
    arrays that store the weight.

    All kinds except ``Ternary`` may be a stack (experts, outputs, inputs): ``grouped_linear`` and
    ``experts_mlp`` accept it, and ``stack[e]`` is a dense matrix.
    """

    KIND: ClassVar[str]  # the name of the kind in errors and in files
    IN_FOLDERS: ClassVar[bool] = True  # whether Hugging Face folders can store the kind
    OF_STACKS: ClassVar[bool] = False  # whether folders store it for stacks of experts alone
    # where the arrays are parts of a larger weight: that weight, the part's index, and their number
    part: tuple["Quantized", int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that store the weight."""
        return sum(int(array.nbytes) for array in self.held().values())

    @abstractmethod
    def held(self) -> dict[str, Any]:
        """Return the arrays that store the weight, by name."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the arguments of the constructor other than the arrays of ``held``."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the arrays from which ``from_state`` restores the weight.

        Their names follow the layer's name in a checkpoint: ``weight`` and others.
        """

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the weight from the arrays of ``state``."""

    @abstractmethod
    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint; products compute in ``dtype``."""

    @abstractmethod
    def requantized(self, w: Array) -> Self:
        """Return another matrix, quantized in the same way as this one."""

    def cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return slices along an axis, concatenated, with unchanged values.

        Raises
        ------
        ConfigError
            The cut would separate values that share a scale.
        """
        if self.ndim == 2:
            return self._cut(axis, places)
        count, rows, columns = self.shape
        shape = [count, rows, columns]
        shape[axis] = sum(where.stop - where.start for where in places)
        if axis < 2:  # rows of the matrices, one below another
            starts = [rows * expert for expert in range(count)] if axis else [0]
            step = 1 if axis else rows
            places = [
                slice(start + where.start * step, start + where.stop * step)
                for start in starts
                for where in places
            ]
        return self.shaped(count * rows, columns)._cut(axis // 2, places).shaped(*shape)

    @abstractmethod
    def _cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return rows, or with axis 1 columns, of a matrix: see ``cut``."""

    def shaped(self, *shape: int) -> Self:
        """Return the same values as a matrix, or as a stack of matrices, with equal columns."""
        arrays, facts = self.held(), self.facts()
        if "shape" in facts:  # flat arrays have no axes to change
            return type(self)(**arrays, **facts | {"shape": shape})
        rows, ndim = shape[:-1], self.ndim - 1
        # (*rows, columns or blocks)
        arrays = {name: array.reshape(*rows, *array.shape[ndim:]) for name, array in arrays.items()}
        return type(self)(**arrays, **facts)

    @property
    def stacks(self) -> bool:
        """True if arrays of two such matrices, concatenated, store the matrix of all rows."""
        return False

    def moved(self, place: Callable[[Any], Any]) -> Self:
        """Return the weight with each of its arrays replaced by ``place(array)``."""
        return type(self)(**{n: place(array) for n, array in self.held().items()}, **self.facts())

    def __repr__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        return f"{type(self).__name__}({sizes}, {self.nbytes} bytes)"


def beside(weights: Sequence[Quantized]) -> Sequence[Quantized]:
    """Return matrices with equal inputs whose arrays are parts of the arrays of one matrix.

    One product then serves all: ``rows_of_one`` returns the matrix of all rows.  Matrices that
    cannot be stacked are returned as they are.
    """
    first, count = weights[0], sum(map(len, weights))
    facts = [each.facts() | {"shape": None} for each in weights]
    same = all(type(each) is type(first) and each.shape[1:] == first.shape[1:] for each in weights)
    if not same or not all(each.stacks for each in weights) or facts != [facts[0]] * len(facts):
        return weights
    every = [each.held() for each in weights]
    arrays = {name: np.concatenate([held[name] for held in every]) for name in every[0]}
    shape = {"shape": (count, first.shape[1])} if "shape" in first.facts() else {}
    whole = type(first)(**arrays, **first.facts() | shape)
    parts, start = list[Quantized](), dict.fromkeys(arrays, 0)
    for number, (each, held) in enumerate(zip(weights, every, strict=True)):
        own = {n: array[start[n] : start[n] + len(held[n])] for n, array in arrays.items()}
        start = {name: at + len(held[name]) for name, at in start.items()}
        parts.append(type(first)(**own, **each.facts()))
        parts[-1].part = whole, number, len(weights)
    return parts


class Transposed(Stored):
    """The transpose of a quantized weight, as an operand of products."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.dtype, self.home = weight, weight.dtype, weight.home
        self.shape = weight.shape[::-1]

    ndim = 2
    T = property(lambda self: self.weight)

    def product(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it."""
        self.weight.product_transposed(a, out, add)


def on_gpu(array: Any) -> bool:
    """Return whether kernels run on an array, or on the array that a stand-in stands for."""
    return target_of(array) is not None


def dense_weight(call: str, w: Any, stacks: bool = False) -> Array:
    """Return a dense weight as an array of NumPy or CuPy.

    Raise unless it is a matrix of floats or, with ``stacks``, several matrices.
    """
    if isinstance(w, Stored):
        raise DTypeError(f"{call}: w is quantized already: {w!r}; pass the dense weight")
    w = adopted(call, "w", w)
    if w.dtype not in FLOATS:
        actual = w.dtype
        problem = f"{call}: w is {actual}; pass an array of {', '.join(d.name for d in FLOATS)}"
        raise DTypeError(problem, expected=FLOATS, actual=actual)
    if w.ndim != 2 and not (stacks and w.ndim == 3):
        cure = "pass a matrix (outputs, inputs)" + " or (experts, outputs, inputs)" * stacks
        problem = f"{call}: w has shape {tuple(w.shape)}; {cure}"
        raise ShapeError(problem, expected=("outputs", "inputs"), actual=tuple(w.shape))
    return w


def in_kernel_dtype(w: Array) -> Array:
    """Return a weight, float64 cast to float32; values beyond float32 become infinite."""
    with np.errstate(over="ignore"):
        return w if w.dtype in KERNEL_DTYPES else w.astype(FLOAT32)


def check_finite(call: str, w: Array, extremes: Array) -> None:
    """Raise RangeError for the first value of w that is not finite.

    ``extremes``, such as the absmax of blocks, are checked first, as there are fewer of them.
    """
    if is_planned(w) or bool(np.isfinite(extremes).all()):
        return
    place = tuple(int(index[0]) for index in np.nonzero(~np.isfinite(w)))
    where, value = ", ".join(map(str, place)), float(w[place])
    raise RangeError(f"{call}: w[{where}] is {value}; all must be finite in float32")


def in_blocks(shape: Sequence[int], axis: int, places: Sequence[slice], block: int) -> bool:
    """Return whether slices of rows or columns separate no block of ``block`` flattened values."""
    borders = [border for where in places for border in (where.start, where.stop)]
    if axis:
        return shape[1] % block == 0 and all(border % block == 0 for border in borders)
    return all(border * shape[1] % block == 0 or border == shape[0] for border in borders)


def cut_flat(
    flat: Array, shape: Sequence[int], axis: int, places: Sequence[slice], values: int
) -> Array:
    """Return the entries of a flat array that belong to slices of rows or columns of a matrix.

    Each entry belongs to ``values`` values of the flattened matrix.
    """
    if axis:
        rows = flat.reshape(shape[0], -1)  # (rows, entries of a row)
        parts = [rows[:, where.start // values : where.stop // values] for where in places]
        return np.concatenate(parts, 1).reshape(-1)
    ends = [(where.start * shape[1], where.stop * shape[1]) for where in places]
    return np.concatenate([flat[start // values : -(-stop // values)] for start, stop in ends])


def held_arrays(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays that store parameters, each with the name of its parameter."""
    for name, value in named.items():
        if hasattr(value, "held"):  # a quantized weight, or a part of one
            yield from ((name, array) for array in value.held().values())
        else:
            yield name, value
