"""Rows of a mixture of experts on their way to the ranks that hold their experts, and back.

rows, sorted by expert -> all to all -> products of own experts -> all to all -> sums over k
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import is_planned
from ...ops.activations.softmax import softmax
from ...ops.experts.route import Routes
from ...ops.experts.router_losses import balance_loss_backward
from ...parallel.communicator import Communicator, part
from ...parallel.taped import taped, value_of
from ...parallel.tensor import all_to_all_rows
from ...placement import to_numpy
from ..configs.config import Experts
from .sorted_rows import by_expert


def at_their_ranks(
    comm: Communicator,
    experts: Experts,
    x: Any,
    routes: Routes,
    computed: Callable[[Any, Routes], Any],
) -> Any:
    """Return what ``computed`` makes of rows at the ranks that hold their experts.

    A row goes to the rank of each of its k experts, and the results come back to be added in the
    order of k.  A rank gets its rows in the order of ranks, then of experts, then of their places.
    """
    chosen = value_of(routes.experts)
    sorted_rows, offsets = by_expert(chosen, experts.count)
    local = part(experts.count, comm)
    counts = rows_of_ranks(offsets, comm, experts, chosen)
    arrived, came = all_to_all_rows(sorted_rows.gathered(x.reshape(-1, x.shape[-1])), counts, comm)
    numbers, _ = comm.all_to_all_rows(chosen.reshape(-1)[sorted_rows.order], counts)
    ones = np.ones_like(value_of(arrived), shape=(len(numbers), 1))
    made = computed(arrived, Routes((numbers - local.start)[:, None], ones))
    back, _ = all_to_all_rows(made, came, comm)
    return sorted_rows.summed(back, routes.weights.reshape(-1, experts.k)).reshape(*x.shape)


def rows_of_ranks(offsets: Array, comm: Communicator, experts: Experts, chosen: Array) -> list[int]:
    """Return how many of the sorted rows go to each rank; the host waits for a GPU here.

    In a plan as many as can be go to the first: a token of each of its experts.
    """
    if is_planned(offsets):
        most = chosen.size // experts.k * min(experts.k, part(experts.count, comm, 0).stop)
        return [most, chosen.size - most, *[0] * (comm.size - 2)]
    ends = to_numpy(offsets)
    parts = (part(experts.count, comm, rank) for rank in range(comm.size))
    return [int(ends[own.stop] - ends[own.start]) for own in parts]


def term_of_balance(comm: Communicator, logits: Any, chosen: Array, mask: Array | None) -> Any:
    """Return this rank's term of a sum over ranks, ``balance_loss`` of the rows of all of them.

    ``chosen`` are the experts that count, and ``mask`` the rows of each layer that do.
    """
    value, count = value_of(logits), logits.shape[-1]
    mask = np.ones_like(chosen, bool, shape=chosen.shape[1:-1]) if mask is None else mask != 0
    real = np.broadcast_to(mask, chosen.shape[:-1])[..., None]
    numbers = np.where(real, chosen, count).reshape(-1)  # of padding: none
    assigned = np.bincount(numbers, minlength=count + 1)[:-1]
    parts = [each.astype(np.float64) for each in (assigned, real.sum().reshape(1))]
    sums = comm.all_reduce(np.concatenate(parts))
    rows = sums[-1:].clip(1)
    slopes = sums[:-1] / rows * (count / rows)
    p = np.where(real, softmax(value), 0).reshape(-1, count).astype(np.float64)
    dtype = np.promote_types(value.dtype, FLOAT32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"logits": balance_loss_backward(dy, value, mask, slopes.astype(dtype))[0]}

    term = (p @ slopes).sum(keepdims=True).reshape(()).astype(dtype)
    return taped("balance", term, back, logits=logits)
