"""Store weights with the same input (q, k, v; gate, up) as rows of one matrix on a GPU.

One product then computes all of their outputs.  Each weight keeps its name and can be changed in
place.
"""

from functools import cached_property
from typing import Any

from ...core.arrays import empty
from ...core.dtypes import Stored
from ...core.gpu import is_cupys
from ...ops.quantized.weight import Quantized, beside
from ..configs.config import Config
from ..ranks.division import Division

GROUPS = (
    [f"self_attn.{n}_proj.weight" for n in "qkv"],
    *([f"{module}.{n}_proj.weight" for n in ("gate", "up")] for module in ("mlp", "feed_forward")),
)


class Joined:
    """Moves GPU parameters into the matrix of their group when they are created."""

    def __init__(self, config: Config, division: Division | None) -> None:
        self.config, self.division = config, division
        self.matrices: dict[str, Any] = {}  # by the first parameter of a group

    def __call__(self, name: str, value: Any) -> Any:
        """Return rows of the group's matrix, or the value if it is in no group."""
        group = next((g for g in GROUPS if name.endswith(tuple(g))), None)
        if group is None or isinstance(value, Stored) or not self.on_gpu(value):
            return value
        own = next(part for part in group if name.endswith(part))
        names = [name.removesuffix(own) + part for part in group]
        if not all(each in self.shapes for each in names):  # an MLP without a gate
            return value
        rows = [self.shapes[each][0] for each in names]
        if names[0] not in self.matrices:
            shape = sum(rows), value.shape[1]
            self.matrices[names[0]] = empty(shape, value.dtype, like=value)
        start = sum(rows[: group.index(own)])
        part = self.matrices[names[0]][start : start + len(value)]
        part[...] = value
        return part

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's parameters, by name."""
        shapes, division = self.config.shapes(), self.division
        return shapes if division is None else {name: division.shape(name) for name in shapes}

    @staticmethod
    def on_gpu(value: Any) -> bool:
        """Return whether a value is a GPU array; in NumPy separate products are as fast."""
        return is_cupys(value.__class__)


def join_quantized(parameters: dict[str, Any]) -> dict[str, Any]:
    """Move the quantized weights of each group on a GPU into the arrays of one matrix."""
    for first, *others in GROUPS:
        for name in [name for name in parameters if name.endswith(first)]:
            names = [name, *(name.removesuffix(first) + other for other in others)]
            group: list[Any] = [parameters.get(each) for each in names]
            quantized = all(isinstance(each, Quantized) for each in group)
            if quantized and Joined.on_gpu(group[0].home):
                parameters.update(zip(names, beside(group), strict=True))
    return parameters
