"""Parameters in open files; only the requested parts are read."""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...machine import format_bytes
from ...ops.quantized.ternary import Ternary
from ...ops.quantized.weight import Quantized
from .expert_files import Stack
from .quantized_slices import narrow
from .quantized_weights import assembled


class StoredTensor(NamedTuple):
    """Where a parameter is stored: file, name and dtype in the file, and the whole shape.

    ``dense`` computes the parameter from tensors in another ``format``; with a ``kind`` the result
    is quantized.
    """

    file: str
    stored: str
    shape: tuple[int, ...]  # the shape that config.json implies
    dtype: np.dtype[Any] | None  # None: the codes of a quantized weight
    kind: type[Quantized] | None = None  # class of a quantized weight
    parts: Mapping[str, tuple[str, str]] = {}  # its other tensors: file and name
    inverse: bool = False  # the weight is codes / scale
    stack: Stack | None = None  # experts, in tensors of another form
    wide: tuple[Any, ...] = ()  # dtypes that are read as float32
    dense: Callable[[Mapping[str, Array]], Array] | None = None
    format: str = ""  # the name of the format
    bytes: int = 0  # size of its tensors

    @property
    def computed(self) -> bool:
        """Whether the parameter, or a part of it, is computed from tensors in another format."""
        return self.dense is not None or (self.stack is not None and bool(self.stack.dense))

    @property
    def files(self) -> set[str]:
        """The names of the files that hold the parameter."""
        homes = () if self.stack is None else self.stack.homes
        return {self.file, *(file for file, _ in (*self.parts.values(), *homes))}


def formats_of(homes: Mapping[str, StoredTensor]) -> str | None:
    """Return the other formats of a checkpoint's tensors as a line; None if it has none."""
    sizes, counts = Counter[str](), Counter(home.format for home in homes.values())
    for home in homes.values():
        sizes[home.format] += home.bytes
    counts.pop("", None)
    whole = max(1, sizes.total())
    parts = (f"{n} {each} ({sizes[each] / whole:.1%})" for each, n in counts.most_common())
    others = [home for home in homes.values() if home.format and home.dtype]
    kinds = {home.dtype.name for home in others if home.dtype and home.kind is None}
    packed = sum(home.kind is not None for home in others)
    size = f"{packed} stay packed, others are" * (packed > 0) or "read as"
    size = f"{format_bytes(sizes.total())}, {size} {' and '.join(sorted(kinds))}"
    return f"tensors: {', '.join(parts)}; {size}" if counts else None


class LazyParameter:
    """A parameter in open files; ``dtype`` is the dtype of results, None: as stored."""

    def __init__(
        self,
        name: str,
        home: StoredTensor,
        files: Mapping[str, Any],
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.name, self.home, self.files, self.dtype = name, home, files, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        if self.home.stack is not None or self.home.dense is not None:
            return self.home.shape
        return tuple(self.files[self.home.file].get_slice(self.home.stored).get_shape())

    def __getitem__(self, key: Any) -> Any:
        """Read and return a part; with an ellipsis, the whole."""
        if key is ...:
            return self.whole()
        if self.home.stack is not None:
            first, *rest = key if isinstance(key, tuple) else (key,)
            return self._stacked(self.home.stack, first, *rest)
        if self.home.dense is not None:
            return owned(self.whole()[key])
        return self._cast(self.files[self.home.file].get_slice(self.home.stored)[key])

    def whole(self) -> Any:
        """Return the whole parameter, an array or a quantized weight."""
        home = self.home
        if home.stack is not None and home.kind is not None:
            return home.stack.packed(self.name, self.files, self._dtype)
        if home.stack is not None:
            return self._stacked(home.stack, ...)
        if home.dense is not None:
            return self.computed(...)
        if home.kind is None:
            return self._cast(self.files[home.file].get_tensor(home.stored))
        return self._assembled({key: each[...] for key, each in self.tensors().items()}, home.shape)

    def computed(self, rows: Any) -> Any:
        """Return rows of a parameter in another format, if they are rows of its tensors.

        Those of tables are.  With an ellipsis, return the whole.
        """
        dense = cast(Callable[..., Any], self.home.dense)
        weight = dense({key: each[rows] for key, each in self.tensors().items()})
        return self._cast(weight) if self.home.kind is None else weight.computed_in(self._dtype)

    def some(self, axis: int, places: Sequence[slice]) -> tuple[Quantized, Sequence[slice]]:
        """Return a quantized weight with at least these slices along an axis, and their places.

        A stack has these experts, or all experts if the axis is not 0.
        """
        home, kind = self.home, cast(type[Quantized], self.home.kind)
        if len(home.shape) > 2:
            if axis or len(places) > 1:
                return self.whole(), places
            return self._experts(places[0]), [slice(0, places[0].stop - places[0].start)]
        part = narrow(kind, self.tensors(), home.shape, axis, places)
        if part is None:
            return self.whole(), places
        shape = [*home.shape]
        shape[axis] = sum(kept.stop - kept.start for kept in part.kept)
        return self._assembled(part.state, shape), part.places(places)

    def _experts(self, own: slice) -> Quantized:
        """Return some experts of a quantized stack, and read as little as possible."""
        home, kind = self.home, cast(type[Quantized], self.home.kind)
        if home.stack is not None:
            return home.stack.packed(self.name, self.files, self._dtype, own)
        count, rows, columns = home.shape
        places = [slice(own.start * rows, own.stop * rows)]
        part = narrow(kind, self.tensors(), (count * rows, columns), 0, places)
        if part is None:
            return cast(Quantized, self.whole()).cut(0, [own])
        size = sum(kept.stop - kept.start for kept in part.kept)
        matrix = self._assembled(part.state, (size, columns)).cut(0, part.places(places))
        return matrix.shaped(own.stop - own.start, rows, columns)

    def rows(self, rows: slice) -> Quantized:
        """Return rows of a quantized weight."""
        weight, places = self.some(0, [rows])
        return weight.cut(0, places)

    def step(self) -> int | None:
        """Return the smallest number of rows that can be read separately; None if none can."""
        kind, shape = cast(type[Quantized], self.home.kind), self.home.shape
        if kind is Ternary or len(shape) > 2:
            return None
        part = narrow(kind, self.tensors(), shape, 0, [slice(0, 1)])
        return None if part is None else part.kept[0].stop

    def tensors(self) -> dict[str, "LazyParameter"]:
        """Return the tensors of a quantized weight, by their names after the layer's name."""
        home = self.home
        places = {**home.parts, "weight": (home.file, home.stored)}
        homes = {key: StoredTensor(*place, (), None) for key, place in places.items()}
        return {key: LazyParameter(self.name, each, self.files) for key, each in homes.items()}

    def _assembled(self, state: Mapping[str, Array], shape: Sequence[int]) -> Quantized:
        """Return the quantized weight of these arrays."""
        kind: Any = self.home.kind
        return assembled(self.name, kind, state, shape, self.dtype, self.home.inverse)

    @property
    def _dtype(self) -> np.dtype[Any] | None:
        """The dtype of results."""
        dtype = self.dtype or self.home.dtype
        return FLOAT32 if dtype in self.home.wide else dtype

    def _stacked(self, stack: Stack, first: Any, *rest: slice) -> Array:
        """Return the experts of a slice, or all, cut by the slices along other axes."""
        return stack.read(self.files, self.home.shape, self._dtype, first, *rest)

    def _cast(self, read: Array) -> Array:
        """Return a writeable array in the dtype of results."""
        dtype = self._dtype
        return owned(read if dtype is None else read.astype(dtype, copy=False))


def owned(array: Array) -> Array:
    """Return an array from a file as a writeable array, copied if it is read-only.

    It is also copied from memory outside of NumPy while a ``memory_pool`` counts NumPy's memory.
    """
    counted = array.base is None or not tracemalloc.is_tracing()
    return array if counted and array.flags.writeable else array.copy()
