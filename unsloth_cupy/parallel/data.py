"""Ranks that take each a part of a batch: gradients are summed while the way back still runs.

loss = sum over ranks of (sum of the losses of the rank's labels) / labels of all ranks
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ..core.arrays import empty
from ..core.call import is_integer
from ..core.gpu import at, cupy, is_cupys
from ..errors import ConfigError
from ..training.tape import take_gradients
from .communicator import Communicator

BUCKET_BYTES = 32 * 2**20
IGNORE = -100  # the label of a token that does not count


class Model(Protocol):
    """What learns: arrays by name, and their gradients."""

    @property
    def trainable(self) -> dict[str, Any]:
        """The parameters that have gradients."""

    def loss_and_gradients(
        self, tokens: Any, labels: Any, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the loss, and its gradient with respect to each of ``trainable``."""


class DataParallel:
    """A model that every rank holds whole, and that learns from the parts of a batch.

    Parameters
    ----------
    model : Transformer, or what has ``trainable`` and ``loss_and_gradients`` as it has
        Its trainable arrays become those of rank 0.
    comm : Communicator
    bucket_bytes : int
        Gradients are summed together in buckets of at most so many bytes, each as soon as it is
        full, on a GPU by a second stream.  Results have equal bits for every size.

    Raises
    ------
    ConfigError
        bucket_bytes is below 1.
    """

    def __init__(
        self, model: Model, comm: Communicator, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if not is_integer(bucket_bytes, 1):
            problem = f"DataParallel(bucket_bytes={bucket_bytes!r}) is not a size"
            raise ConfigError(f"{problem}; pass 1 or more")
        self.model, self.comm, self.bucket_bytes = model, comm, bucket_bytes
        self.beside = Beside(comm)
        for array in model.trainable.values():
            array[...] = comm.broadcast(array)

    def loss_and_gradients(
        self, tokens: Any, labels: Any, *, count: Any = None, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mean loss over the labels of all ranks, and its gradients, alike in all.

        Arguments are this rank's rows and the options of ``Transformer.loss_and_gradients``;
        ``count`` is what sums are divided by, None: the labels of all ranks that count.
        """
        if count is None:
            count = counted_by_all(self.model, labels, options.get("offsets"), self.comm)
        buckets = Buckets(self.model.trainable, self.comm, self.bucket_bytes, self.beside)
        token = take_gradients.set(buckets.take)
        try:
            loss, _ = self.model.loss_and_gradients(tokens, labels, count=count, **options)
        finally:
            take_gradients.reset(token)
        sums = buckets.sums()
        return self.comm.all_reduce(loss), sums

    def sums(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sums over ranks of gradients by name, such as those of several batches."""
        buckets = Buckets(gradients, self.comm, self.bucket_bytes, self.beside)
        for array in gradients.values():
            buckets.take(array, array)
        return buckets.sums()


class Beside:
    """Sums over ranks that, on a GPU, a second stream makes beside the work of the current one."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.stream: Any = None  # one for all steps: memory goes back to the stream that took it
        self.read: list[Any] = []  # what it reads, which nobody else may be given

    def sum(self, flat: Any) -> Any:
        """Return the sum over ranks, to be used after ``join``."""
        kind: Any = type(flat)
        if not is_cupys(kind):
            return self.comm.all_reduce(flat)
        with at(flat):
            cuda = cupy().cuda
            self.stream = self.stream or cuda.Stream(non_blocking=True)
            self.stream.wait_event(cuda.get_current_stream().record())
            self.read.append(flat)
            with self.stream:
                return self.comm.all_reduce(flat)

    def join(self) -> None:
        """Let later work on the current stream come after all sums."""
        if self.read:
            with at(self.read[0]):
                cupy().cuda.get_current_stream().wait_event(self.stream.record())
            self.read.clear()


class Buckets:
    """Sums of gradients under way: buckets go in one order in all ranks, whichever is full first.

    Parameters go in from the last to the first, as the way back reaches them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        comm: Communicator,
        most: int,
        beside: Beside | None = None,
    ) -> None:
        self.beside = Beside(comm) if beside is None else beside
        self.names = {id(array): name for name, array in parameters.items()}
        self.shapes = {name: array.shape for name, array in parameters.items()}
        self.own: dict[str, Any] = {}  # gradients that wait for others of their bucket
        self.most, self.waiting = most, [*parameters][::-1]
        self.found: dict[str, Any] = {}

    def take(self, parameter: Any, gradient: Any) -> None:
        """Take the gradient of a parameter; sum the buckets that are full."""
        self.own[self.names[id(parameter)]] = gradient
        while (names := self._next()) and all(name in self.own for name in names):
            self._sum(names)

    def sums(self) -> dict[str, Any]:
        """Return all sums by name, which later work on the current stream may use."""
        self.beside.join()
        return {name: self.found[name] for name in self.shapes}

    def _next(self) -> list[str]:
        """Return the names of the next bucket: of one dtype, as far as the first is known."""
        names: list[str] = []
        size, dtype = 0, None
        for name in self.waiting:
            known = self.own.get(name)
            if known is None:
                return []
            size += known.nbytes
            if names and (size > self.most or known.dtype != dtype):
                break
            names, dtype = [*names, name], known.dtype
            if size >= self.most:
                break
        return names

    def _sum(self, names: list[str]) -> None:
        arrays = [self.own.pop(name) for name in names]
        del self.waiting[: len(names)]
        flat = empty((sum(array.size for array in arrays),), arrays[0].dtype, arrays[0])
        places, start = [], 0
        for array in arrays:
            places.append(slice(start, start + array.size))
            flat[places[-1]] = array.reshape(-1)
            start += array.size
        total = self.beside.sum(flat)
        for name, place in zip(names, places, strict=True):
            self.found[name] = total[place].reshape(self.shapes[name])


def counted_by_all(model: Model, labels: Any, offsets: Any, comm: Communicator) -> Any:
    """Return how many labels of all ranks count, each once where ranks divide its row."""
    total = comm.all_reduce(counted(labels, offsets))
    context = getattr(model, "context", None)
    return (total if context is None else total // context.size).clip(1)


def counted(labels: Any, offsets: Any = None) -> Any:
    """Return how many labels count: those of first tokens are predicted by none."""
    if offsets is None:
        return (labels[:, 1:] != IGNORE).sum()
    flat = labels.reshape(-1)
    counts = np.zeros_like(flat, dtype=bool, shape=flat.size + 1)
    counts[:-1] = flat != IGNORE
    counts[offsets[:-1]] = False
    return counts.sum()
