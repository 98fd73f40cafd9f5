"""Checks of every collective in every rank against NumPy on the arrays of all ranks."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from unsloth_cupy.parallel import Communicator, grid, part
from unsloth_cupy.placement import to_numpy

DTYPES = ("float16", ml_dtypes.bfloat16, "float32", "float64", "int32", "int64")
Here = Callable[[Any], Any]  # places a NumPy array where the ranks have their arrays


def of_rank(rank: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Return the array that a rank passes, which every rank can compute."""
    return (8 * np.random.default_rng(rank).standard_normal(shape)).astype(dtype)


def reductions(comm: Communicator, here: Here = np.asarray) -> None:
    for dtype in DTYPES:
        large = [(600_001,)] * (np.dtype(dtype).itemsize == 2)  # rank by rank, not all at once
        for shape in ((), (1,), (5, 7), (0, 3), *large):
            x = [of_rank(rank, shape, dtype) for rank in range(comm.size)]
            wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
            total = x[0].astype(wide)
            for other in x[1:]:
                total = total + other.astype(wide)  # in the order of the ranks, to the last bit
            actual = comm.all_reduce(here(x[comm.rank]))
            assert actual.dtype == dtype
            np.testing.assert_array_equal(to_numpy(actual), total.astype(dtype), strict=True)
            most = to_numpy(comm.all_reduce(here(x[comm.rank]), "max"))
            np.testing.assert_array_equal(most, np.max(np.stack(x), axis=0))
            for axis in range(len(shape)):
                actual = to_numpy(comm.reduce_scatter(here(x[comm.rank]), axis))
                own = (slice(None),) * axis + (part(shape[axis], comm),)
                np.testing.assert_array_equal(actual, total.astype(dtype)[own], strict=True)


def infinities(comm: Communicator, here: Here = np.asarray) -> None:
    """Gradients that overflow are summed without a warning, as on a GPU."""
    own = np.array([np.inf, 6e4, 1], np.float16) * np.float16(-1 if comm.rank else 1)
    actual = to_numpy(comm.all_reduce(here(own)))
    if comm.size > 1:
        assert np.isnan(actual[0])
        assert actual[2] == 2 - comm.size


def gathers(comm: Communicator, here: Here = np.asarray) -> None:
    for axis in (0, 1, -1):
        shapes = [[2, 3, 4] for _ in range(comm.size)]
        for rank, shape in enumerate(shapes):
            shape[axis] = rank  # the first has none
        x = [of_rank(rank, tuple(shapes[rank]), "float32") for rank in range(comm.size)]
        own = here(x[comm.rank]).transpose().copy().transpose()
        actual = to_numpy(comm.all_gather(own, axis))
        np.testing.assert_array_equal(actual, np.concatenate(x, axis))


def transposes(comm: Communicator, here: Here = np.asarray) -> None:
    """Each rank passes a different number of rows, and gets its columns of all rows."""
    x = [of_rank(rank, (2, rank, 7), "float32") for rank in range(comm.size)]
    own = np.concatenate(x, 1)[..., part(7, comm)]
    actual = to_numpy(comm.all_to_all(here(x[comm.rank]), 2, -2))
    np.testing.assert_array_equal(actual, own, strict=True)


def rows(comm: Communicator, here: Here = np.asarray) -> None:
    """Rank r sends r + to rows to each rank, the first to rank 0; the last rank sends none."""
    counts = [[(rank + to) * (rank < comm.size - 1) for to in range(comm.size)]
              for rank in range(comm.size)]  # fmt: skip
    for dtype in (ml_dtypes.bfloat16, "int32"):
        x = [of_rank(rank, (sum(each), 3), dtype) for rank, each in enumerate(counts)]
        own = [np.split(a, np.cumsum(n)[:-1])[comm.rank] for a, n in zip(x, counts, strict=True)]
        sent, came = comm.all_to_all_rows(here(x[comm.rank]), counts[comm.rank])
        np.testing.assert_array_equal(to_numpy(sent), np.concatenate(own), strict=True)
        assert came == [len(each) for each in own]
        again, _ = comm.all_to_all_rows(sent, came)
        np.testing.assert_array_equal(to_numpy(again), x[comm.rank])


def messages(comm: Communicator, here: Here = np.asarray) -> None:
    for root in range(comm.size):
        x = here(of_rank(comm.rank, (3, 2), ml_dtypes.bfloat16))
        actual = to_numpy(comm.broadcast(x, root))
        np.testing.assert_array_equal(actual, of_rank(root, (3, 2), ml_dtypes.bfloat16))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large = here(
        of_rank(comm.rank, (300, 1000), "float64")
    )  # past what MPI sends without an answer
    out = large.copy()
    assert comm.exchange(large, after, out, before) is out
    np.testing.assert_array_equal(to_numpy(out), of_rank(before, large.shape, "float64"))
    in_line(comm, here)
    comm.barrier()


def in_line(comm: Communicator, here: Here) -> None:
    """From the first rank to the last: two messages to one rank keep their order."""
    numbers = here(np.arange(3) + comm.rank)
    if comm.rank:
        for more in (-1, 9):
            actual = comm.receive(here(np.empty(3, int)), comm.rank - 1)
            np.testing.assert_array_equal(to_numpy(actual), np.arange(3) + comm.rank + more)
    if comm.rank + 1 < comm.size:
        comm.send(numbers, comm.rank + 1)
        comm.send(numbers + 10, comm.rank + 1)


def groups(comm: Communicator, here: Here = np.asarray) -> None:
    group = comm.split(comm.rank % 2)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    actual = group.all_gather(here(np.array([comm.rank])))
    np.testing.assert_array_equal(to_numpy(actual), members)


def grids(comm: Communicator, here: Here = np.asarray) -> None:
    """Ranks of a group differ along one axis, and the groups of an axis hold all ranks."""
    tensor = 2 if comm.size % 2 == 0 else 1
    context = comm.size // tensor
    made = grid(comm, context=context, tensor=tensor)
    assert (made.expert.size, grid(comm, expert=context, tensor=tensor).expert.size) == (1, context)
    own = here(np.array([comm.rank]))
    pair = to_numpy(made.tensor.all_gather(own))
    np.testing.assert_array_equal(pair, comm.rank // tensor * tensor + np.arange(tensor))
    line = to_numpy(made.context.all_gather(own))
    np.testing.assert_array_equal(line, comm.rank % tensor + tensor * np.arange(context))
    assert (made.data.size, made.pipeline.size) == (1, 1)


CHECKS = (reductions, infinities, gathers, transposes, rows, messages, groups, grids)


def all_checks(comm: Communicator) -> None:
    for check in CHECKS:
        check(comm)
