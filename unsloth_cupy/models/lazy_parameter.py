"""Parameters in open files, which are read only as far as requested."""

import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..core.dtypes import Array
from ..ops.quantized.ternary import Ternary
from ..ops.quantized.weight import Quantized
from .quantized_slices import narrow
from .quantized_weights import assembled


class StoredTensor(NamedTuple):
    """Where a parameter is stored: the file, its name and dtype there; and its whole shape."""

    file: str
    stored: str
    shape: tuple[int, ...]  # the shape that config.json implies
    dtype: np.dtype[Any] | None  # None: the codes of a quantized weight
    kind: type[Quantized] | None = None  # class of a quantized weight
    parts: Mapping[str, tuple[str, str]] = {}  # its other tensors: file and name there
    inverse: bool = False  # the weight is codes / scale


class LazyParameter:
    """A parameter in open files that is not read yet; dtype is that of results, None: as stored."""

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
        return tuple(self.files[self.home.file].get_slice(self.home.stored).get_shape())

    def __getitem__(self, key: Any) -> Any:
        """Return a part, and read no more than it; with an ellipsis, the whole."""
        if key is ...:
            return self.whole()
        return self._cast(self.files[self.home.file].get_slice(self.home.stored)[key])

    def whole(self) -> Any:
        """Return the whole parameter, an array or a quantized weight."""
        home = self.home
        if home.kind is None:
            return self._cast(self.files[home.file].get_tensor(home.stored))
        return self._assembled({key: each[...] for key, each in self.tensors().items()}, home.shape)

    def some(self, axis: int, places: Sequence[slice]) -> tuple[Quantized, Sequence[slice]]:
        """Return a quantized weight with at least these rows or columns, and where they are."""
        home, kind = self.home, cast(type[Quantized], self.home.kind)
        part = narrow(kind, self.tensors(), home.shape, axis, places)
        if part is None:
            return self.whole(), places
        shape = [*home.shape]
        shape[axis] = sum(kept.stop - kept.start for kept in part.kept)
        return self._assembled(part.state, shape), part.places(places)

    def rows(self, rows: slice) -> Quantized:
        """Return rows of a quantized weight."""
        weight, places = self.some(0, [rows])
        return weight.cut(0, places)

    def step(self) -> int | None:
        """Return the smallest number of rows that can be read alone; None if rows cannot."""
        kind, shape = cast(type[Quantized], self.home.kind), self.home.shape
        part = None if kind is Ternary else narrow(kind, self.tensors(), shape, 0, [slice(0, 1)])
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

    def _cast(self, read: Array) -> Array:
        """Return an array that was read, in the dtype of results, writeable."""
        dtype = self.dtype or self.home.dtype
        return owned(read if dtype is None else read.astype(dtype, copy=False))


def owned(array: Array) -> Array:
    """Return a writeable array that was read from a file: a copy of one that is not.

    Also a copy of one in other memory than NumPy's where a ``memory_pool`` counts that.
    """
    counted = array.base is None or not tracemalloc.is_tracing()
    return array if counted and array.flags.writeable else array.copy()
