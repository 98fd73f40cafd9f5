"""Data parallelism: each rank has a part of a batch; gradients are summed during backward.

loss = sum over ranks of (sum of the losses of the rank's labels) / labels of all ranks

Gradients of divided experts are summed over the ranks that store the same experts.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.arrays import empty
from ..core.call import is_integer
from ..core.gpu import cupy, device_of, is_cupys
from ..errors import ConfigError
from ..training.tape import take_gradients
from .communicator import Communicator, check_communicator

BUCKET_BYTES = 32 * 2**20  # default size of a bucket: 32 MiB
IGNORE = -100  # the label of a token without a loss


class Model(Protocol):
    """A model to train: trainable arrays by name, and their gradients."""

    @property
    def trainable(self) -> dict[str, Any]:
        """The trainable parameters by name."""

    def loss_and_gradients(
        self, tokens: Any, labels: Any, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the loss, and its gradient with respect to each trainable parameter."""


class DataParallel:
    """Data-parallel training of a model that every rank stores, except for divided experts.

    Parameters
    ----------
    model : Transformer, or an object with its ``trainable`` and ``loss_and_gradients``
        The trainable arrays are overwritten by those of rank 0.
    comm : Communicator
    bucket_bytes : int
        Largest size of a bucket.  Gradients are summed over ranks in buckets, each as soon as it is
        full, on a GPU in a second stream.  Results have equal bits for every size.
    halves : bool
        Whether ``sums`` adds the sum of the second half of the ranks to the sum of the first half,
        and so on, instead of one rank after another: see ``in_halves``.

    Raises
    ------
    ConfigError
        bucket_bytes is below 1; or ``halves``, and the number of ranks is not a power of two.
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        halves: bool = False,
    ) -> None:
        if not is_integer(bucket_bytes, 1):
            problem = f"DataParallel(bucket_bytes={bucket_bytes!r}) is not a size"
            raise ConfigError(f"{problem}; pass 1 or more")
        check_communicator("DataParallel", comm)
        if not hasattr(model, "trainable"):
            raise ConfigError(f"DataParallel: {reprlib.repr(model)} is not a model; pass one")
        self.model, self.comm, self.bucket_bytes = model, comm, bucket_bytes
        division: Any = getattr(model, "division", None)
        experts = None if division is None else division.experts
        replicas = comm if experts is None else comm.split(experts.rank)  # with the same experts
        is_expert = (lambda name: False) if experts is None else division.of_experts
        self.groups = (
            (
                ConcurrentSum(comm, pairs(comm) if halves else None),
                lambda name: not is_expert(name),
            ),
            (ConcurrentSum(replicas), is_expert),
        )
        for concurrent, has in self.groups:
            for name in filter(has, model.trainable):
                model.trainable[name][...] = concurrent.comm.broadcast(model.trainable[name])

    def loss_and_gradients(
        self, tokens: Any, labels: Any, *, count: Any = None, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mean loss over the labels of all ranks, and its gradients, equal in all ranks.

        Pass this rank's rows, and options of ``Transformer.loss_and_gradients``.  ``count`` is the
        divisor of the sums; None: the number of target tokens in all ranks.
        """
        if count is None:
            count = counted_by_all(self.model, labels, options.get("offsets"), self.comm)
        method = self.model.loss_and_gradients
        return self._summed(lambda: method(tokens, labels, count=count, **options))

    def value_and_gradients(
        self, function: Callable[[Any], Any], **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the sum over ranks of ``function(model)``, and its gradients, equal in all ranks.

        The function computes this rank's term of the sum.  ``Transformer.value_and_gradients``
        documents the options.
        """
        model: Any = self.model
        return self._summed(lambda: model.value_and_gradients(function, **options))

    def _summed(self, own: Callable[[], tuple[Any, dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
        """Return the sums over ranks of a value and of gradients; backward sums gradients."""
        take, sums = self._buckets(self.model.trainable)
        token = take_gradients.set(take)
        try:
            value, _ = own()
        finally:
            take_gradients.reset(token)
        summed = sums()
        return self.comm.all_reduce(value), summed

    def sums(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sums over ranks of gradients by name, such as accumulated gradients."""
        take, sums = self._buckets(gradients)
        for array in gradients.values():
            take(array, array)
        return sums()

    def _buckets(
        self, parameters: Mapping[str, Any]
    ) -> tuple[Callable[[Any, Any], None], Callable[[], dict[str, Any]]]:
        """Return a function to add a gradient, and a function that returns all sums in order."""
        every: list[Buckets] = []
        by_array: dict[int, Buckets] = {}
        for concurrent, has in self.groups:
            own = {name: array for name, array in parameters.items() if has(name)}
            every.append(Buckets(own, concurrent.comm, self.bucket_bytes, concurrent))
            by_array |= dict.fromkeys(every[-1].names, every[-1])

        def sums() -> dict[str, Any]:
            summed = {name: each for buckets in every for name, each in buckets.sums().items()}
            return {name: summed[name] for name in parameters}

        return lambda array, gradient: by_array[id(array)].take(array, gradient), sums


class ConcurrentSum:
    """Sums over ranks; on a GPU in a second stream, concurrent with the current stream."""

    def __init__(self, comm: Communicator, levels: Sequence[Communicator] | None = None) -> None:
        self.comm = comm
        self.levels = [comm] if levels is None else levels  # sums over one after another
        self.stream: Any = None  # one stream for all steps: every stream has its own memory pool
        self.read: list[Any] = []  # arrays that the stream reads: their memory must not be reused

    def sum(self, flat: Any) -> Any:
        """Return the sum over ranks, which is valid after ``join``."""
        kind: Any = type(flat)
        if not is_cupys(kind):
            return self._summed(flat)
        with device_of(flat):
            cuda = cupy().cuda
            self.stream = self.stream or cuda.Stream(non_blocking=True)
            self.stream.wait_event(cuda.get_current_stream().record())
            self.read.append(flat)
            with self.stream:
                return self._summed(flat)

    def _summed(self, flat: Any) -> Any:
        for level in self.levels:
            flat = level.all_reduce(flat)
        return flat

    def join(self) -> None:
        """Make later work on the current stream wait for all sums."""
        if self.read:
            with device_of(self.read[0]):
                cupy().cuda.get_current_stream().wait_event(self.stream.record())
            self.read.clear()


class Buckets:
    """Sums of gradients over ranks in buckets, in the same order in all ranks.

    Buckets contain the parameters from last to first, which is the order of backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        comm: Communicator,
        most: int,
        concurrent: ConcurrentSum | None = None,
    ) -> None:
        self.concurrent = ConcurrentSum(comm) if concurrent is None else concurrent
        self.names = {id(array): name for name, array in parameters.items()}
        self.shapes = {name: array.shape for name, array in parameters.items()}
        self.own: dict[str, Any] = {}  # gradients that wait for their bucket to fill
        self.most, self.waiting = most, [*parameters][::-1]
        self.summed: dict[str, Any] = {}

    def take(self, parameter: Any, gradient: Any) -> None:
        """Add the gradient of a parameter; sum the buckets that are full now."""
        self.own[self.names[id(parameter)]] = gradient
        while (names := self._next()) and all(name in self.own for name in names):
            self._sum(names)

    def sums(self) -> dict[str, Any]:
        """Return all sums by name; the current stream waits for them."""
        self.concurrent.join()
        return {name: self.summed[name] for name in self.shapes}

    def _next(self) -> list[str]:
        """Return the names in the next bucket, of one dtype; [] while a gradient is missing."""
        names: list[str] = []
        size, dtype = 0, None
        for name in self.waiting:
            gradient = self.own.get(name)
            if gradient is None:
                return []
            size += gradient.nbytes
            if names and (size > self.most or gradient.dtype != dtype):
                break
            names, dtype = [*names, name], gradient.dtype
            if size >= self.most:
                break
        return names

    def _sum(self, names: list[str]) -> None:
        """Sum the gradients of a bucket over ranks."""
        arrays = [self.own.pop(name) for name in names]
        del self.waiting[: len(names)]
        flat = empty((sum(array.size for array in arrays),), arrays[0].dtype, arrays[0])
        places, start = [], 0
        for array in arrays:
            places.append(slice(start, start + array.size))
            flat[places[-1]] = array.reshape(-1)
            start += array.size
        total = self.concurrent.sum(flat)
        for name, place in zip(names, places, strict=True):
            self.summed[name] = total[place].reshape(self.shapes[name])


def in_halves(count: int, comm: Communicator) -> slice:
    """Return this rank's part of ``count`` terms, so that ranks add up halves.

    The first half of the ranks has the first half of the terms (the larger one), and so on.  If
    each rank sums its part by ``sum_in_halves``, and ``DataParallel(halves=True)`` sums the ranks,
    the bits do not depend on the number of ranks.  A rank without a term adds -0.0, as +0.0 would
    change the sign of -0.0.

    Raises
    ------
    ConfigError
        The number of ranks is not a power of two.
    """
    check_halves(comm.size)
    start, stop, ranks = 0, count, comm.size
    while ranks > 1:
        ranks //= 2
        middle = stop - (stop - start) // 2
        start, stop = (middle, stop) if comm.rank & ranks else (start, middle)
    return slice(start, stop)


def pairs(comm: Communicator) -> list[Communicator]:
    """Return groups of two ranks: sums over one after another add up all ranks in halves."""
    check_halves(comm.size)
    bits = (1 << bit for bit in range(comm.size.bit_length() - 1))
    return [comm.split(comm.rank & ~bit) for bit in bits]  # ranks that differ in this bit


def check_halves(ranks: int) -> None:
    """Raise a ConfigError unless a number of ranks is a power of two."""
    if ranks & (ranks - 1):
        cure = f"use {1 << (ranks.bit_length() - 1)}, or {1 << ranks.bit_length()}"
        raise ConfigError(f"halves: {ranks} ranks are not a power of two; {cure}")


def counted_by_all(model: Model, labels: Any, offsets: Any, comm: Communicator) -> Any:
    """Return the number of target tokens in all ranks; ranks that share a row count it once."""
    causal = getattr(model, "head", "causal_lm") == "causal_lm"
    total = comm.all_reduce(counted(labels, offsets) if causal else (labels != IGNORE).sum())
    context = getattr(model, "context", None)
    return (total if context is None else total // context.size).clip(1)


def counted(labels: Any, offsets: Any = None) -> Any:
    """Return the number of target tokens; the first token of a text is not predicted."""
    if offsets is None:
        return (labels[:, 1:] != IGNORE).sum()
    flat = labels.reshape(-1)
    counts = np.zeros_like(flat, dtype=bool, shape=flat.size + 1)
    counts[:-1] = flat != IGNORE
    counts[offsets[:-1]] = False
    return counts.sum()
