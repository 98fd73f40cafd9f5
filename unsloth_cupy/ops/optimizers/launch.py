"""A step of all tensors of an optimizer in one launch, if kernels can process them as they are."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.source import Constants
from ...placement import stream
from ..common import many
from .host import gradient_dtypes

KEPT_TABLES = 8  # by stream and addresses of gradients, which seldom change; beyond it all go


class Flags(enum.IntFlag):
    """Flags of a tensor for a kernel; the lower two bits are the number of its dtype."""

    COPIED = 4  # the parameter is float32 and has a 16-bit copy
    WIDE = 8  # the gradient is float32, the model is not


class Rates(NamedTuple):
    """Learning rate and weight decay of the tensors of a step."""

    lr: float
    weight_decay: float
    of_step: float  # the learning rate of the step, for all tensors


class Launch:
    """Steps of tensors by one kernel; a tensor is a named tuple of parameter, copy and states."""

    flags: type[enum.IntFlag] = Flags

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)
        self.lead = next(iter(tensors.values())).parameter
        self.tables: dict[Any, many.Table] = {}

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Replace the tensors, whose copies are new arrays; the number of steps stays."""
        self.tensors = {name: tensors[name] for name in self.tensors}
        self.tables.clear()  # tables have the addresses of the old copies

    def numbers(self) -> dict[str, float]:
        """Return the number of steps, and other numbers that steps change; wait for the device."""
        raise NotImplementedError

    def launch(self, table: many.Table, factor: Any, finite: Any, rates: Rates) -> None:
        """Launch the step of all tensors; factor and finite are on the device, or None."""
        raise NotImplementedError

    def __call__(
        self, gradients: Sequence[Array], rates: Rates, *, finite: Any, factor: Any
    ) -> None:
        """Update all tensors, unless ``finite``, a bool or an array, is False."""
        if isinstance(finite, bool | np.bool_):
            if not finite:
                return
            finite = None
        if isinstance(factor, float | int | np.generic):
            same, value = factor == 1, float(factor)
            factor = None if same else np.full_like(self.lead, value, np.float32, shape=(1,))
            # CuPy takes shape=() in full_like for the shape of the array
            factor = factor if same else factor.reshape(())  # ()
        self.launch(self._table([contiguous(g) for g in gradients]), factor, finite, rates)

    def constants(self, table: many.Table) -> Constants:
        """Return the constants of the kernel."""
        return table.constants(**self.flags.__members__)

    def kind(self, tensor: Any, gradient: Any) -> int:
        """Return the number of the dtype and the flags of a tensor as one integer."""
        model = gradient_dtypes(tensor)[0]
        copied, wide = tensor.copy is not None, gradient.dtype != model
        return KERNEL_DTYPES.index(model) | Flags.COPIED * copied | Flags.WIDE * wide

    def _table(self, gradients: Sequence[Any]) -> many.Table:
        """Return the table of the tensors with these gradients, from a cache."""
        key = stream(self.lead), *((many.address(g), g.dtype) for g in gradients)
        table = self.tables.get(key)
        if table is None:
            if len(self.tables) >= KEPT_TABLES:
                self.tables.clear()
            tensors = self.tensors.values()
            fields = next(iter(tensors))._fields
            arrays = zip(*tensors, strict=True)
            columns: dict[str, Any] = dict(zip(fields, arrays, strict=True))
            columns["gradient"] = gradients
            kinds = map(self.kind, tensors, gradients)
            table = self.tables[key] = many.table(columns, [*kinds])
        return table
