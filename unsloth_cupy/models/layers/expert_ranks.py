"""Expert parallelism: rows are sent to the ranks that hold their experts, and results back.

rows -> all to all -> sorted by expert -> products of own experts -> all to all -> sums over k
"""

from collections.abc import Callable, Sequence
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
from ...placement import to_device_of, to_numpy
from ..configs.config import Experts
from .sorted_rows import by_expert, spread


def at_their_ranks(
    comm: Communicator,
    experts: Experts,
    x: Any,
    routes: Routes,
    computed: Callable[[Any, Routes], Any],
) -> Any:
    """Return the weighted sums of ``computed``, which runs on the ranks that hold the experts.

    A row is sent once to each rank that holds some of its k experts.  The k results come back and
    are added in the order of k.  A gradient is sent once to a rank, and comes back once.  A rank
    sorts rows by the rank they come from, then by expert, then by their index.
    """
    chosen = value_of(routes.experts)
    sorted_rows, offsets = by_expert(chosen, experts.count)
    counts = rows_of_ranks(offsets, comm, experts, chosen)
    rows = x.reshape(-1, x.shape[-1])  # (batch * tokens, hidden)
    count = rows.shape[0]
    owners = to_device_of(np.repeat(np.arange(comm.size), counts), chosen)
    pairs, places, once = pairs_of(owners * count + sorted_rows.order // experts.k, comm, count)
    arrived, came = all_to_all_rows(spread(rows, pairs % count, comm.size), once, comm)
    starts = to_device_of(np.cumsum([0, *once[:-1]]), chosen)
    assignments = np.stack([chosen.reshape(-1)[sorted_rows.order], places - starts[owners]], axis=1)
    assignments, from_ranks = comm.all_to_all_rows(assignments.astype(np.int32), counts)
    before = to_device_of(np.repeat(np.cumsum([0, *came[:-1]]), from_ranks), chosen)
    own = spread(arrived, assignments[:, 1] + before, experts.k)
    ones = np.ones_like(value_of(own), shape=(len(assignments), 1))
    numbers = assignments[:, :1] - part(experts.count, comm).start
    outputs = computed(own, Routes(numbers, ones))
    results, _ = comm.all_to_all_rows(value_of(outputs), from_ranks)

    def returned(dy: Array, factors: Array) -> tuple[Array, Array]:
        factors, _ = comm.all_to_all_rows(factors, counts)
        dy, _ = comm.all_to_all_rows(dy[pairs % count], once)
        return dy[assignments[:, 1] + before], factors

    weights = routes.weights.reshape(-1, experts.k)
    return sorted_rows.summed(outputs, weights, (results, returned)).reshape(*x.shape)


def pairs_of(every: Array, comm: Communicator, count: int) -> tuple[Array, Array, list[int]]:
    """Return the distinct numbers rank * count + row, their inverse index, and counts by rank.

    A plan has no values: it assumes the worst case, that all rows go to the first two ranks.
    """
    if is_planned(every):
        once = [count, count, *[0] * (comm.size - 2)]
        return np.zeros_like(every, shape=(2 * count,)), np.zeros_like(every), once
    pairs, places = np.unique(every, return_inverse=True)
    ends = to_numpy(np.searchsorted(pairs, np.arange(comm.size + 1, like=every) * count))
    return pairs, places, np.diff(ends).tolist()


def rows_of_ranks(offsets: Array, comm: Communicator, experts: Experts, chosen: Array) -> list[int]:
    """Return the number of sorted rows that go to each rank; the host waits for the GPU here.

    A plan has no values: it assumes the worst case, that the first rank gets as many rows as it
    can, one per token and expert.
    """
    if is_planned(offsets):
        most = chosen.size // experts.k * min(experts.k, part(experts.count, comm, 0).stop)
        return [most, chosen.size - most, *[0] * (comm.size - 2)]
    ends = to_numpy(offsets)
    parts = (part(experts.count, comm, rank) for rank in range(comm.size))
    return [int(ends[own.stop] - ends[own.start]) for own in parts]


def sums_of_balance(logits: Any, chosen: Array, mask: Array | None, before: Any = None) -> Any:
    """Return the rows that chose each expert, and the sum of its probabilities: (2, experts).

    ``chosen`` are the experts to count, and ``mask`` is True for the rows to count.  The sums
    ``before``, of other layers, are added.
    """
    value, count = value_of(logits), logits.shape[-1]
    mask = np.ones_like(chosen, bool, shape=chosen.shape[1:-1]) if mask is None else mask != 0
    real = np.broadcast_to(mask, chosen.shape[:-1])[..., None]
    numbers = np.where(real, chosen, count).reshape(-1)  # padding: one past the last expert
    assigned = np.bincount(numbers, minlength=count + 1)[:-1]
    p = np.where(real, softmax(value), 0).reshape(-1, count).sum(axis=0, dtype=np.float64)
    sums = np.stack([assigned.astype(np.float64), p])
    sums = sums if before is None else sums + value_of(before)
    dtype = np.promote_types(value.dtype, FLOAT32)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        gradients = {"before": dy}
        if "logits" in wanted:
            one, slopes = np.ones_like(value, dtype, shape=()), dy[1].astype(dtype)
            gradients["logits"] = balance_loss_backward(one, value, mask, slopes)[0]
        return gradients

    return taped("sums of balance", sums, back, logits=logits, before=before)


def balance_of(sums: Any, k: int, groups: Sequence[Communicator] = ()) -> Any:
    """Return ``balance_loss`` from the sums of ``sums_of_balance``: (), float64.

    With groups of ranks, the rows of all ranks count, and the result is this rank's term of a sum
    over ranks.
    """
    value = value_of(sums)
    assigned, p = value[0], value[1]
    for comm in groups:
        assigned = comm.all_reduce(assigned)
    rows = (assigned.sum(keepdims=True) / k).clip(1)  # at least 1: all rows may be padding
    slopes = assigned / rows * (assigned.size / rows)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"sums": np.stack([np.zeros_like(slopes), dy * slopes])}

    return taped("balance", (p * slopes).sum(keepdims=True).reshape(()), back, sums=sums)
