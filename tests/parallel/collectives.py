"""Every exchange in every rank, against what NumPy says of the arrays of all ranks."""

import ml_dtypes
import numpy as np

from unsloth_cupy.parallel import Communicator, part

DTYPES = ("float16", ml_dtypes.bfloat16, "float32", "float64", "int32", "int64")


def of_rank(rank: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Return what a rank passes, which all ranks can make."""
    return (8 * np.random.default_rng(rank).standard_normal(shape)).astype(dtype)


def reductions(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in ((), (1,), (5, 7), (0, 3)):
            x = [of_rank(rank, shape, dtype) for rank in range(comm.size)]
            wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
            total = x[0].astype(wide)
            for other in x[1:]:
                total = total + other.astype(wide)  # in the order of the ranks, to the last bit
            found = comm.all_reduce(x[comm.rank])
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, total.astype(dtype), strict=True)
            most = comm.all_reduce(x[comm.rank], "max")
            np.testing.assert_array_equal(most, np.max(np.stack(x), axis=0))
            for axis in range(len(shape)):
                found = comm.reduce_scatter(x[comm.rank], axis)
                own = (slice(None),) * axis + (part(shape[axis], comm),)
                np.testing.assert_array_equal(found, total.astype(dtype)[own], strict=True)


def gathers(comm: Communicator) -> None:
    for axis in (0, 1, -1):
        shapes = [[2, 3, 4] for _ in range(comm.size)]
        for rank, shape in enumerate(shapes):
            shape[axis] = rank  # the first has none
        x = [of_rank(rank, tuple(shapes[rank]), "float32") for rank in range(comm.size)]
        found = comm.all_gather(x[comm.rank].transpose().copy().transpose(), axis)
        np.testing.assert_array_equal(found, np.concatenate(x, axis))


def messages(comm: Communicator) -> None:
    for root in range(comm.size):
        x = of_rank(comm.rank, (3, 2), ml_dtypes.bfloat16)
        found = comm.broadcast(x, root)
        np.testing.assert_array_equal(found, of_rank(root, (3, 2), ml_dtypes.bfloat16))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large = of_rank(comm.rank, (300, 1000), "float64")  # past what MPI sends without an answer
    out = np.empty_like(large)
    assert comm.exchange(large, after, out, before) is out
    np.testing.assert_array_equal(out, of_rank(before, large.shape, "float64"))
    if comm.size > 1:  # two messages to one rank keep their order
        comm.send(np.arange(3), after)
        comm.send(np.arange(3) + 10, after)
        for more in (0, 10):
            np.testing.assert_array_equal(
                comm.receive(np.empty(3, int), before), np.arange(3) + more
            )
    comm.barrier()


def groups(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    found = group.all_gather(np.array([comm.rank]))
    np.testing.assert_array_equal(found, members)


def all_checks(comm: Communicator) -> None:
    for check in (reductions, gathers, messages, groups):
        check(comm)
