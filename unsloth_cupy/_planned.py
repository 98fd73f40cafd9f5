"""Arrays that are a shape and a dtype alone, for plans of memory."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ._signature import Bound, Contract, Operand, parts, size_of


class Planned(np.ndarray[Any, Any]):
    """A shape and a dtype that ops compute with instead of numbers; it takes no memory."""

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> "Planned":
        """Return zeros whose strides are all 0, on a base of their own."""
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)


def run_of(contract: Contract, bound: Bound) -> Callable[..., Any] | None:
    """Return what makes the planned results of a call; None where a shape is not bound."""
    shapes = [shape_of(operand, bound.sizes) for operand in contract.outputs]
    return None if None in shapes else functools.partial(_results, shapes, bound.outputs)


def _results(shapes: Any, dtypes: Any, *call: Any) -> Any:
    made = tuple(map(Planned.of, shapes, dtypes))
    return made if len(made) > 1 else made[0]


def shape_of(operand: Operand, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of an operand whose axes are bound; None where one of them is not."""
    shape: tuple[int, ...] = ()
    for axis in operand.axes:
        name = parts(axis)[0]
        if name.isdigit() or name in sizes:
            size = size_of(axis, sizes)
            shape += size if isinstance(size, tuple) else (size,)
        elif not axis.endswith("?"):
            return None
    return shape
