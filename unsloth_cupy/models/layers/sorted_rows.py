"""Sort rows by expert, and bring the results back into the order of the rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import rounded
from ...core.dtypes import FLOAT32, Array
from ...ops.experts.sort_by_expert import sort_by_expert
from ...parallel.taped import taped, value_of


def by_expert(chosen: Array, count: int) -> tuple["Sorted", Array]:
    """Return the order of rows sorted by expert, and the offset at which each expert begins."""
    order, offsets = sort_by_expert(chosen, count)
    places = np.zeros_like(order)
    places[order] = np.arange(len(order), dtype=order.dtype, like=order)
    return Sorted(order, places, chosen.shape[-1]), offsets


# (upstream gradient, weights of sorted rows) -> both on the ranks that computed the results
Moved = Callable[[Array, Array], tuple[Array, Array]]


class Sorted(NamedTuple):
    """The (row, expert) assignments sorted by expert: k for each row."""

    order: Array
    places: Array  # inverse of ``order``
    k: int  # experts per row

    def gathered(self, x: Any) -> Any:
        """Return x sorted by expert: one copy of a row for each of its k experts."""
        value = value_of(x)

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            wide = np.promote_types(dy.dtype, FLOAT32)  # k terms are added, then rounded once
            parts = dy[self.places].reshape(-1, self.k, dy.shape[-1])  # (rows, k, hidden)
            return {"x": rounded(parts.sum(axis=1, dtype=wide), dy.dtype)}

        return taped("gathered", value[self.order // self.k], back, x=x)

    def summed(self, out: Any, weights: Any, apart: tuple[Array, Moved] | None = None) -> Any:
        """Return the weighted sum of the k results of each row, in the order of k.

        If other ranks computed the results, ``apart`` is (results, function): the function maps
        the upstream gradient and the weights to the rows of ``out``.
        """
        value, factors = value_of(out) if apart is None else apart[0], value_of(weights)
        wide = np.promote_types(value.dtype, FLOAT32)
        shape = *factors.shape, value.shape[-1]

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            gradients = {}
            if "out" in wanted:
                own = factors.reshape(-1)[self.order][:, None]
                if apart is None:
                    rows = dy[self.order // self.k]
                else:
                    rows, own = apart[1](dy, own)
                moved = rows.astype(wide, copy=False) * own.astype(wide, copy=False)
                gradients["out"] = rounded(moved, value.dtype)
            if "weights" in wanted:
                results = value[self.places].reshape(shape).astype(wide, copy=False)
                slopes = (results * dy[:, None].astype(wide, copy=False)).sum(axis=-1)
                gradients["weights"] = rounded(slopes, factors.dtype)
            return gradients

        results = value[self.places].reshape(shape).astype(wide, copy=False)
        y = (results * factors.astype(wide, copy=False)[..., None]).sum(axis=1)
        return taped("summed", rounded(y, value.dtype), back, out=out, weights=weights)


def spread(x: Any, index: Array, most: int) -> Any:
    """Return ``x[index]``, where ``index`` has a row at most ``most`` times.

    Backward adds the gradients of a row in the order of ``index``, so that its bits are fixed.
    """
    value = value_of(x)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        order = np.argsort(index, kind="stable")
        numbers = np.arange(len(value) + 1, like=index)
        ends = np.searchsorted(index[order], numbers)
        total = np.zeros_like(value, np.promote_types(dy.dtype, FLOAT32))
        for number in range(most if len(order) else 0):
            at = ends[:-1] + number
            rows = dy[order[np.minimum(at, len(order) - 1)]]
            total += np.where((at < ends[1:])[:, None], rows, 0)
        return {"x": rounded(total, dy.dtype)}

    return taped("spread", value[index], back, x=x)
