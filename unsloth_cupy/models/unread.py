"""Parameters in opened files, of which no more is read than is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..core.dtypes import Array
from ..ops.quantized.ternary import Ternary
from ..ops.quantized.weight import Quantized
from .quantized_slices import narrow
from .quantized_weights import assembled


class Home(NamedTuple):
    """Where a parameter is: the file, its name there, its dtype there."""

    file: str
    stored: str
    shape: tuple[int, ...]  # as config.json asks
    dtype: np.dtype[Any] | None  # None: the codes of a quantized weight
    kind: type[Quantized] | None = None  # of that weight
    parts: Mapping[str, tuple[str, str]] = {}  # its other tensors: file and name there
    inverse: bool = False  # its scale divides


class Unread:
    """A parameter in opened files, of which nothing is read yet, in a dtype or in its own."""

    def __init__(
        self, name: str, home: Home, files: Mapping[str, Any], dtype: np.dtype[Any] | None = None
    ) -> None:
        self.name, self.home, self.files, self.dtype = name, home, files, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is stored."""
        return tuple(self.files[self.home.file].get_slice(self.home.stored).get_shape())

    def __getitem__(self, key: Any) -> Any:
        """Return a part, all that is read; with an ellipsis, the whole."""
        if key is ...:
            return self.whole()
        return self._cast(self.files[self.home.file].get_slice(self.home.stored)[key])

    def whole(self) -> Any:
        """Return all of it, which may be a quantized weight."""
        home = self.home
        if home.kind is None:
            return self._cast(self.files[home.file].get_tensor(home.stored))
        return self._assembled({key: each[...] for key, each in self.tensors().items()}, home.shape)

    def some(self, axis: int, places: Sequence[slice]) -> tuple[Quantized, Sequence[slice]]:
        """Return a quantized weight that has these rows or columns of it, and where there."""
        home, kind = self.home, cast(type[Quantized], self.home.kind)
        found = narrow(kind, self.tensors(), home.shape, axis, places)
        if found is None:
            return self.whole(), places
        shape = [*home.shape]
        shape[axis] = sum(kept.stop - kept.start for kept in found.kept)
        return self._assembled(found.state, shape), found.places(places)

    def rows(self, rows: slice) -> Quantized:
        """Return rows of a quantized weight."""
        made, places = self.some(0, [rows])
        return made.cut(0, places)

    def step(self) -> int | None:
        """Return at multiples of how many rows a quantized weight is cut, if it is read so."""
        kind, shape = cast(type[Quantized], self.home.kind), self.home.shape
        found = None if kind is Ternary else narrow(kind, self.tensors(), shape, 0, [slice(0, 1)])
        return None if found is None else found.kept[0].stop

    def tensors(self) -> dict[str, "Unread"]:
        """Return what a quantized weight is stored in, by what follows its layer's name."""
        home = self.home
        places = {**home.parts, "weight": (home.file, home.stored)}
        at = {key: Home(file, stored, (), None) for key, (file, stored) in places.items()}
        return {key: Unread(self.name, each, self.files) for key, each in at.items()}

    def _assembled(self, state: Mapping[str, Array], shape: Sequence[int]) -> Quantized:
        kind: Any = self.home.kind
        return assembled(self.name, kind, state, shape, self.dtype, self.home.inverse)

    def _cast(self, read: Array) -> Array:
        dtype = self.dtype or self.home.dtype
        return _owned(read if dtype is None else read.astype(dtype, copy=False))


def _owned(array: Array) -> Array:
    return array if array.flags.writeable else array.copy()
