"""The share of an adapter's update that rounding preserves after a merge.

kept = <merged - weight, change> / <change, change>    change = the update without rounding

1: all of the update.  If weights are quantized again, an update below half a quantization step is
lost: ``merged`` is then ``weight``, and kept is 0.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array

AT_ONCE = 1 << 22  # number of elements that are compared at a time
ENOUGH = 0.9  # share of the update below which a merge warns


@dataclass
class Kept:
    """The share of an adapter's update that rounding preserves in the merged weights.

    Attributes
    ----------
    layers : dict of str to float
        The share in each rounded weight that has an adapter.
    share : float
        The share in all of these weights; 1.0 if none was rounded or changed.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> dict[str, float]:
        """The share in each weight."""
        return {name: each / whole for name, (each, whole) in self.sums.items() if whole}

    @property
    def share(self) -> float:
        """The share in all weights together."""
        whole = sum(whole for _, whole in self.sums.values())
        return sum(each for each, _ in self.sums.values()) / whole if whole else 1.0

    def __str__(self) -> str:
        line = f"rounding preserves {100 * self.share:.1f} % of the LoRA update"
        if not self.layers:
            return line
        worst = min(self.layers, key=self.layers.__getitem__)
        share = f"{100 * self.layers[worst]:.1f} %"
        return f"{line} (worst: {worst.removesuffix('.weight')}, {share})"

    def measure(
        self, name: str, weight: Any, exact: Array, merged: Callable[[slice], Array]
    ) -> None:
        """Add a weight: before the merge, merged without rounding, and merged and rounded.

        ``merged`` returns rounded rows.  For a stack, the matrices of all experts are added.
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
        """Warn if rounding preserves less than 90 % of the update."""
        if self.share < ENOUGH:
            text = f"{call}: {self}; the rest is lost by rounding to {rounded}: {cure}"
            warnings.warn(text, stacklevel=3)
