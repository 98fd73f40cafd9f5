"""The ranks of a run, and the groups that split its weights, layers, tokens and rows.

    ranks = start(tensor=2, pipeline=1, data=2, device=None)       mpiexec, torchrun or srun
    ranks = alone()                                                one process

A step uses the same rows in any grid, so 1 or 2 ranks can resume a run that 4 ranks saved.
Rank 0 writes the files of the run and prints its progress.
"""

import hashlib
import json
import math
import os
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from ...core import gpu
from ...errors import CommunicationError, ConfigError, DeviceError, UnslothCupyError
from ...machine import gpus, resolve_device
from ...parallel.communicator import TIMEOUT, Communicator, SingleCommunicator, part
from ...parallel.grid import Grid, grid
from ...parallel.mpi import MpiCommunicator
from ...parallel.nccl import NcclCommunicator, local_rank
from ...parallel.sockets import SocketCommunicator, first_of
from ..data.text import Batch
from ..naming import named
from .interrupt import Interrupted, Stop

MOMENT = 1.0  # seconds within which all ranks raise an error that occurs on all ranks
MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
UNDER_MPI = ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class Ranks:
    """All ranks of a run, and the groups in which they share the work.

    Attributes
    ----------
    device : str or None
        The device of this rank; None: the CPU.
    problem : str
        Why "auto" does not use a GPU of this machine; empty: it does, or there is none.
    alone, first : bool
        Whether there is only one rank; whether this is rank 0.
    data : Communicator
        The ranks that process different rows.
    replicas : Communicator
        The ranks with the same part of the weights, except for experts, that process different
        tokens.
    same : Communicator
        The ranks of ``replicas`` that also have the same experts.
    whole : bool
        Whether each rank has all weights.
    losses, judges : bool
        Among the ranks that split a model: whether this rank computes the loss; whether this rank
        computes the rewards of answers (exactly one rank does).
    """

    def __init__(
        self,
        comm: Communicator,
        groups: Grid,
        device: str | None = None,
        zero: int = 0,
        schedule: str | None = None,
        chunks: int | None = None,
        context_attention: str | None = None,
        problem: str = "",
    ) -> None:
        self.comm, self.groups, self.device, self.zero = comm, groups, device, zero
        self.problem = problem
        self.schedule, self.chunks, self.context_attention = schedule, chunks, context_attention
        self.alone, self.first = comm.size == 1, comm.rank == 0
        self.data = self.replicas = self.same = groups.data
        place = groups.pipeline.rank * groups.tensor.size + groups.tensor.rank
        if groups.context.size * groups.expert.size > 1:
            self.replicas = self.same = comm.split(place)
        if groups.expert.size > 1:
            self.data = comm.split(place * groups.context.size + groups.context.rank)
            self.same = self.replicas.split(groups.expert.rank)
        self.losses = groups.pipeline.rank == groups.pipeline.size - 1
        self.judges = groups.tensor.rank == groups.pipeline.rank == 0
        divided = groups.tensor.size * groups.pipeline.size * groups.expert.size > 1
        self.whole = not divided and zero < 3
        self.failing: Any = None if self.alone else getattr(comm, "host", comm).split(0)

    @property
    def placing(self) -> dict[str, Any]:
        """Options of ``models.load`` and ``models.create`` that split a model."""
        tensor, pipeline, expert = self.groups.tensor, self.groups.pipeline, self.groups.expert
        return {
            "experts": expert if expert.size > 1 else None,
            "communicator": tensor if tensor.size > 1 else None,
            "pipeline": pipeline if pipeline.size > 1 else None,
            "chunks": chunks_of(self.schedule, self.chunks),
            "parts": self.replicas if self.zero == 3 else None,
        }

    def check(
        self,
        batch: int,
        accumulate: int,
        *,
        limited: bool,
        find_nan: bool,
        packed: bool = False,
    ) -> None:
        """Raise a ConfigError for options that these ranks do not support."""
        if batch < self.data.size and not packed:  # packed rows are split by texts
            cure = f"give {named(batch=self.data.size)} or more"
            problem = f"{named(batch=batch)} is too small for {self.data.size} ranks"
            by = "data_parallel" if self.groups.expert.size == 1 else "expert_parallel"
            raise ConfigError(f"{problem} of {named(by)}; {cure}")
        groups = self.groups
        check_options(
            groups.pipeline.size, groups.context.size, self.zero, self.schedule, self.chunks,
            self.context_attention, accumulate, groups.expert.size,
        )  # fmt: skip
        if self.zero == 3 and find_nan:
            cure = f"use {named(zero=1)}, which computes the same numbers"
            problem = "the whole weights of a block exist only briefly, and have no names"
            both = f"{named(zero=3)} does not support {named('find_nan')}"
            raise ConfigError(f"{both}: {problem}; {cure}")
        if not self.alone and limited:
            name = named("limit_memory")
            raise ConfigError(f"{name} is not supported on several ranks; leave it out")

    def beside(self) -> int:
        """Return the number of ranks on this machine; all ranks take part."""
        if self.alone:
            return 1
        own = np.array(zlib.crc32(platform.node().encode()), np.int64)
        return int((self.comm.all_gather(own.reshape(1)) == own).sum())

    def judged(self, array: Any) -> Any:
        """Broadcast an array from the rank that computes rewards to all ranks of the model."""
        for group in (self.groups.tensor, self.groups.pipeline):
            array = group.broadcast(array) if group.size > 1 else array
        return array

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0, a number or a text, on all ranks."""
        if self.alone:
            return value
        if not isinstance(value, str):
            return type(value)(self.comm.broadcast(np.array(float(value)))[()])
        data = np.frombuffer(value.encode(), np.uint8)
        size = int(self.comm.broadcast(np.array(data.size))[()])
        own = data if self.first else np.empty(size, np.uint8)
        return bytes(self.comm.broadcast(own)).decode()

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise a ConfigError on a rank whose facts differ from the facts on rank 0.

        All ranks take part.  ``facts`` has names, such as "data", and numbers or texts.
        """
        own = json.loads(json.dumps(facts, default=str))
        theirs = json.loads(self.broadcast(json.dumps(facts, default=str)))
        for name in own | theirs:
            if own.get(name) != theirs.get(name):
                where = f"rank {self.comm.rank} on {platform.node()}"
                problem = f"{name} is {own.get(name)} in {where}, but {theirs.get(name)} in rank 0"
                cure = "all ranks need the same options, files and version"
                raise ConfigError(f"{problem}; {cure}")

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare the exchanges of all ranks inside a ``with`` block, by call, shape and dtype."""
        comms: list[Any] = [self.comm, *self.groups, self.data, self.replicas, self.same]
        before = {id(each): (each, each.checked) for each in comms if hasattr(each, "checked")}
        for each, _ in before.values():
            each.checked = True
        try:
            yield
        finally:
            for each, checked in before.values():
                each.checked = checked

    def agree(self, stop: Stop) -> None:
        """Raise on all ranks if one rank was requested to stop."""
        if self.alone:
            return
        number = self.comm.all_reduce(np.array(stop.signal or 0), "max")
        if int(number[()]):
            stop.signal = int(number[()])
            raise Interrupted

    @contextmanager
    def ending(self, *others: type[Exception]) -> Iterator[None]:
        """End all ranks if one rank raises an error; apart from errors, only rank 0 prints.

        An error that the user can correct is one line; if all ranks raise it, only rank 0 prints
        it.  ``others`` are additional classes of such errors, besides OSError, MemoryError and the
        errors of this package.
        """
        if self.alone:
            yield
            return
        with ExitStack() as stack, Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            if not self.first:
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            try:
                yield
            except Exception as error:
                correctable = isinstance(error, (UnslothCupyError, OSError, MemoryError, *others))
                remote = error if isinstance(error, CommunicationError) else None
                on_all = correctable and remote is None and self._all_fail()
                if remote is None or not remote.told:
                    stack.close()
                if on_all and self.first:
                    raise
                if not on_all:  # the hook prints the error and ends all ranks
                    sys.excepthook(type(error), error, None if correctable else error.__traceback__)
                raise SystemExit(1) from None

    def _all_fail(self) -> bool:
        """Return whether all ranks fail within ``MOMENT``: all of them reach this barrier."""
        self.failing.timeout = MOMENT
        try:
            self.failing.barrier()
        except CommunicationError:
            return False
        return True

    def rows(self, batch: Batch, *, before: bool = False) -> Batch:
        """Return this rank's rows of a batch; for a packed batch, the texts that begin in its part.

        ``before``: return the rows of all lower ranks instead.
        """
        data, tokens, labels, starts = self.data, batch.tokens, batch.labels, batch.offsets
        if data.size == 1 and not before:
            return batch
        group, arrays = batch.group, {"tokens": tokens, "labels": labels, **batch.beside}
        share = part(len(tokens) // group if starts is None else tokens.size, data)
        share = slice(0, share.start) if before else share
        if starts is None:
            rows = slice(share.start * group, share.stop * group)
            own = {name: array[rows] for name, array in arrays.items()}
        else:  # texts of one group begin in the same part
            first, last = group * np.searchsorted(starts[::group], (share.start, share.stop))
            place = slice(starts[first], starts[last])
            own = {name: array.reshape(1, -1)[:, place] for name, array in arrays.items()}
            batch = batch._replace(offsets=starts[first : last + 1] - starts[first])
        return batch._replace(tokens=own.pop("tokens"), labels=own.pop("labels"), beside=own)


def alone() -> Ranks:
    """Return the ranks of a run with this process alone."""
    one = SingleCommunicator()
    return Ranks(one, Grid(one, one, one, one, one))


def start(
    *,
    tensor: int | None,
    pipeline: int | None,
    data: int | None,
    context: int | None = None,
    expert: int | None = None,
    device: str | None,
    zero: int = 0,
    timeout: float = TIMEOUT,
    **options: Any,
) -> Ranks:
    """Return the ranks that mpiexec, torchrun or srun started; without a launcher, one rank.

    ``device`` is as in ``resolve_device``; "auto" uses one GPU per rank, or the CPU for all ranks.
    A rank that waits for another one longer than ``timeout`` seconds ends the run.
    ``options`` are arguments of Ranks that ``check_options`` checks.

    Raises
    ------
    ConfigError
        The product of the sizes is not the number of ranks, or ZeRO has only one data rank.
    """
    parallel = any(size is not None for size in (tensor, pipeline, data, context, expert))
    sizes = {"tensor": tensor or 1, "pipeline": pipeline or 1, "context": context or 1}
    sizes["expert"] = expert or 1
    comm: Communicator | None = None
    try:
        comm = _started(parallel, timeout)
        device, problem = _device(device, comm)
        if device is not None and isinstance(comm, MpiCommunicator | SocketCommunicator):
            comm = NcclCommunicator.over(comm)
        return _ranks(comm, sizes, data, device, zero, {**options, "problem": problem})
    except (ConfigError, DeviceError):
        if comm.rank if comm is not None else not prints_errors(parallel=parallel):
            raise SystemExit(1) from None
        raise


def _ranks(
    comm: Communicator,
    sizes: dict[str, int],
    data: int | None,
    device: str | None,
    zero: int,
    options: dict[str, Any],
) -> Ranks:
    """Return the ranks of a communicator in a grid, or raise a ConfigError."""
    if comm.size > 1 and device is not None:
        device = f"cuda:{gpu.cupy().cuda.runtime.getDevice()}"
    count = math.prod(sizes.values()) * (data or 1)
    if comm.size % count or (data is not None and comm.size != count):
        every = {**sizes, "data": data or 1}
        listed = named(**{f"{name}_parallel": size for name, size in every.items()})
        cure = f"start the run with mpiexec -n {count} unsloth-cupy, torchrun or srun"
        here = f"{comm.size} runs" if comm.size == 1 else f"{comm.size} run"
        raise ConfigError(f"{listed} needs {count} ranks, but {here}; {cure}")
    groups = grid(comm, data=data, **sizes)
    if zero and groups.data.size * groups.context.size * groups.expert.size == 1:
        cure = f"start more ranks, with {named('data_parallel')}"
        raise ConfigError(f"{named(zero=zero)} needs several data ranks; {cure}")
    return Ranks(comm, groups, device, zero, **options)


def chunks_of(schedule: str | None, chunks: int | None) -> int:
    """Return the number of model parts per pipeline stage."""
    return (chunks or 2) if schedule == "interleaved" else 1


def check_options(
    stages: int,
    contexts: int,
    zero: int,
    schedule: str | None,
    chunks: int | None,
    context_attention: str | None,
    accumulate: int,
    experts: int = 1,
) -> None:
    """Raise a ConfigError for options that a grid of ranks does not support."""
    if zero == 3 and experts > 1:
        cure = f"use {named(zero=1)}, which splits the optimizer states"
        problem = "each rank holds all weights of its own experts"
        both = f"{named(zero=3)} does not support {named('expert_parallel')}"
        raise ConfigError(f"{both}: {problem}; {cure}")
    if schedule is not None and stages == 1:
        cure = f"give {named(pipeline_parallel=2)} or more"
        raise ConfigError(f"{named(pipeline_schedule=schedule)} needs several stages; {cure}")
    if chunks is not None and schedule != "interleaved":
        cure = f"give {named(pipeline_schedule='interleaved')} too"
        raise ConfigError(f"{named(chunks=chunks)} needs the interleaved schedule; {cure}")
    if schedule == "interleaved" and accumulate % stages:
        cure = f"give {named(accumulate=-(-accumulate // stages) * stages)}"
        problem = f"{named(accumulate=accumulate)} is not a multiple of {stages} ranks"
        raise ConfigError(
            f"{problem} of {named('pipeline_parallel')}, as interleaved requires; {cure}"
        )
    if context_attention is not None and contexts == 1:
        cure = f"give {named(context_parallel=2)} or more"
        option = named(context_attention=context_attention)
        problem = f"{option} needs several context ranks"
        raise ConfigError(f"{problem}; {cure}")
    if zero == 3 and stages > 1:
        cure = f"use {named(zero=1)}, which splits the optimizer states"
        problem = "each microbatch would gather the weights of the stage"
        both = f"{named(zero=3)} does not support {named('pipeline_parallel')}"
        raise ConfigError(f"{both}: {problem}; {cure}")


def prints_errors(*, parallel: bool) -> bool:
    """Return whether this is rank 0 by the environment; rank 0 prints the errors of all ranks.

    ``parallel``: the command has options for several ranks.  Otherwise Slurm variables are ignored.
    """
    names = ("RANK",) * ("WORLD_SIZE" in os.environ) + MPI_RANKS + ("SLURM_PROCID",) * parallel
    return int(first_of(os.environ, names) or 0) == 0


def _device(device: str | None, comm: Communicator) -> tuple[str | None, str]:
    """Return the device of the ranks, and why "auto" does not use an existing GPU."""
    result, problem = resolve_device(device)
    if device != "auto" or not isinstance(comm, MpiCommunicator | SocketCommunicator):
        return result, problem
    devices, local = gpus()[0], local_rank(comm)  # all ranks take part, also without a GPU
    own = devices[local % len(devices)] if devices else None
    place = b""
    if own is not None and own.is_usable:
        place = hashlib.sha256(f"{platform.node()} {own.address}".encode()).digest()[:8]
    places = comm.all_gather(np.frombuffer(place.ljust(8, b"\0"), np.int64))
    count = len({*places.tolist()} - {0})
    if 0 < count < comm.size:
        cure = f"start one rank per GPU, or set {named(device='cpu')} for all"
        problem = (
            f"the GPU is not used: {comm.size} ranks have {count} GPU{'s' * (count > 1)}; {cure}"
        )
    return "cuda" if count == comm.size else None, problem


def _started(parallel: bool, timeout: float) -> Communicator:
    """Return the communicator of all ranks in the environment."""
    by_name = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not by_name and any(name in os.environ for name in UNDER_MPI):
        return MpiCommunicator(timeout=timeout)
    if by_name or (parallel and "SLURM_PROCID" in os.environ):
        return SocketCommunicator.from_environment(timeout=timeout)
    return SingleCommunicator()
