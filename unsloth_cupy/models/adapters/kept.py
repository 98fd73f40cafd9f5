"""How much of an adapter's change is in weights that were rounded after the merge.

kept = <merged - weight, change> / <change, change>    change = what the adapter adds, unrounded

1: all of it.  A light change of weights that are quantized again stays below half a step of theirs,
and is rounded away: ``merged`` is then ``weight``, and kept is 0.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array

AT_ONCE = 1 << 22  # numbers that are compared at a time
ENOUGH = 0.9  # of the change; below it a merge warns


@dataclass
class Kept:
    """The share of an adapter's change that is in the merged weights, of those that were rounded.

    Attributes
    ----------
    layers : dict of str to float
        The share of each weight that has an adapter.
    share : float
        That of all of them; 1.0 if none was rounded, or nothing was changed.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> dict[str, float]:
        """The share of each weight."""
        return {name: each / whole for name, (each, whole) in self.sums.items() if whole}

    @property
    def share(self) -> float:
        """The share of all weights together."""
        whole = sum(whole for _, whole in self.sums.values())
        return sum(each for each, _ in self.sums.values()) / whole if whole else 1.0

    def __str__(self) -> str:
        line = f"{self.share:.1%} of the adapter's change is kept"
        if not self.layers:
            return line
        least = min(self.layers, key=self.layers.__getitem__)
        return f"{line}; least in {least.removesuffix('.weight')}: {self.layers[least]:.1%}"

    def measure(
        self, name: str, weight: Any, exact: Array, merged: Callable[[slice], Array]
    ) -> None:
        """Add a weight: before, merged without rounding, and rows of it as merged and rounded.

        Of a stack, the matrices of all experts are added.
        """
        if exact.ndim == 3:
            matrix: Any = merged
            for expert in range(len(exact)):
                self.measure(name, weight[expert], exact[expert], matrix(expert).__getitem__)
            return
        kept, whole = self.sums.get(name, (0.0, 0.0))
        wide = np.promote_types(exact.dtype, FLOAT32)
        step = max(1, AT_ONCE // max(1, exact.shape[1]))
        for top in range(0, exact.shape[0], step):
            rows = slice(top, top + step)
            before = weight[rows].astype(wide)
            change = exact[rows].astype(wide) - before
            kept += float(((merged(rows).astype(wide) - before) * change).sum(dtype="f8"))
            whole += float((change * change).sum(dtype="f8"))
        self.sums[name] = kept, whole

    def warn(self, call: str, rounded: str, cure: str) -> None:
        """Warn if less than nine tenths are kept."""
        if self.share < ENOUGH:
            text = f"{call}: {self}; the rest is lost in rounding to {rounded}: {cure}"
            warnings.warn(text, stacklevel=3)
