"""The ranks of a run: which of them divide the weights, the blocks and the rows of a batch.

    ranks = start(tensor=2, pipeline=1, data=2, device=None)       mpiexec, torchrun or srun
    ranks = ALONE                                                  one process

A step takes the same rows whatever the grid is, so a run that 4 ranks saved goes on with 1 or 2.
Rank 0 writes the files of the run and says how far it is.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..core import gpu
from ..errors import CommunicationError, ConfigError, DeviceError, UnslothCupyError
from ..parallel.communicator import Communicator, SingleCommunicator, part
from ..parallel.grid import Grid, grid
from ..parallel.mpi import MpiCommunicator
from ..parallel.nccl import NcclCommunicator
from ..parallel.sockets import SocketCommunicator, first_of
from .interrupt import Interrupted, Stop
from .text import Batch

MOMENT = 1.0  # seconds in which ranks that fail alike have failed
MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
UNDER_MPI = ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class Ranks:
    """All ranks of a run, and the groups in which they share its work."""

    def __init__(
        self,
        comm: Communicator,
        groups: Grid,
        device: str | None = None,
        zero: int = 0,
        schedule: str | None = None,
        chunks: int | None = None,
        context_attention: str | None = None,
    ) -> None:
        self.comm, self.groups, self.device, self.zero = comm, groups, device, zero
        self.schedule, self.chunks, self.context_attention = schedule, chunks, context_attention
        self.alone, self.first = comm.size == 1, comm.rank == 0
        self.alike = groups.data  # ranks with the same part of the weights, and other tokens
        if groups.context.size > 1:
            self.alike = comm.split(groups.pipeline.rank * groups.tensor.size + groups.tensor.rank)
        divided = groups.tensor.size * groups.pipeline.size > 1
        self.whole = not divided and zero < 3  # each rank has all weights
        self.failing: Any = None if self.alone else getattr(comm, "host", comm).split(0)

    @property
    def placing(self) -> dict[str, Any]:
        """Options of ``models.load`` and ``models.create``."""
        tensor, pipeline = self.groups.tensor, self.groups.pipeline
        return {
            "communicator": tensor if tensor.size > 1 else None,
            "pipeline": pipeline if pipeline.size > 1 else None,
            "chunks": chunks_of(self.schedule, self.chunks),
            "parts": self.alike if self.zero == 3 else None,
        }

    def check(
        self,
        batch: int,
        accumulate: int,
        *,
        limited: bool,
        offload: bool,
        find_nan: bool,
        packed: bool = False,
    ) -> None:
        """Raise a ConfigError for what such ranks do not do; texts of packed rows are divided."""
        if batch < self.groups.data.size and not packed:
            cure = f"give --batch {self.groups.data.size} or more"
            problem = f"--batch {batch} is not enough for {self.groups.data.size} ranks"
            raise ConfigError(f"{problem} of --data-parallel; {cure}")
        groups = self.groups
        check_options(
            groups.pipeline.size, groups.context.size, self.zero, self.schedule, self.chunks,
            self.context_attention, accumulate,
        )  # fmt: skip
        if self.zero == 3 and find_nan:
            cure = "look with --zero 1, which has the same numbers"
            problem = "a block is whole for a moment alone, and has no name"
            raise ConfigError(f"--zero 3 is not for --find-nan: {problem}; {cure}")
        if not self.alone and (limited or offload):
            name = "--limit-memory" if limited else "offload"
            raise ConfigError(f"{name} is not for a run of several ranks; leave it out")

    def told(self, value: Any) -> Any:
        """Return a number, or a text, of rank 0."""
        if self.alone:
            return value
        if not isinstance(value, str):
            return type(value)(self.comm.broadcast(np.array(float(value)))[()])
        data = np.frombuffer(value.encode(), np.uint8)
        size = int(self.comm.broadcast(np.array(data.size))[()])
        own = data if self.first else np.empty(size, np.uint8)
        return bytes(self.comm.broadcast(own)).decode()

    def agree(self, stop: Stop) -> None:
        """Raise in all ranks if one of them was asked to stop."""
        if self.alone:
            return
        asked = self.comm.all_reduce(np.array(stop.signal or 0), "max")
        if int(asked[()]):
            stop.signal = int(asked[()])
            raise Interrupted

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Let an error end all ranks; those but the first say nothing else.

        What can be mended is one line, of the first rank alone where all have met it.
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
                mends = isinstance(error, UnslothCupyError | OSError | MemoryError)
                mends = mends or isinstance(error, click.ClickException)
                of_another = error if isinstance(error, CommunicationError) else None
                alike = mends and of_another is None and self._all_fail()
                if of_another is None or not of_another.told:
                    stack.close()
                if alike and self.first:
                    raise
                if not alike:  # and the hook ends all
                    sys.excepthook(type(error), error, None if mends else error.__traceback__)
                raise SystemExit(1) from None

    def _all_fail(self) -> bool:
        """Say whether all ranks come here, in a moment."""
        if self.failing is None:
            return False
        self.failing.timeout = MOMENT
        try:
            self.failing.barrier()
        except CommunicationError:
            return False
        return True

    def rows(self, batch: Batch) -> Batch:
        """Return this rank's rows of a batch; of texts end to end, those that begin in its part."""
        data, tokens, labels, starts = self.groups.data, batch.tokens, batch.labels, batch.offsets
        if data.size == 1:
            return batch
        if starts is None:
            rows = part(len(tokens), data)
            return batch._replace(tokens=tokens[rows], labels=labels[rows])
        share = part(tokens.size, data)
        first, last = np.searchsorted(starts, (share.start, share.stop))
        own = slice(starts[first], starts[last])
        tokens, labels = (array.reshape(1, -1)[:, own] for array in (tokens, labels))
        return batch._replace(
            tokens=tokens, labels=labels, offsets=starts[first : last + 1] - starts[first]
        )


def alone() -> Ranks:
    """Return the ranks of a run in one process."""
    one = SingleCommunicator()
    return Ranks(one, Grid(one, one, one, one))


def start(
    *,
    tensor: int | None,
    pipeline: int | None,
    data: int | None,
    context: int | None = None,
    device: str | None,
    zero: int = 0,
    **options: Any,
) -> Ranks:
    """Return the ranks that mpiexec, torchrun or srun started; where nobody did, this one alone.

    ``options`` are those of Ranks that ``check_options`` looks at.

    Raises
    ------
    ConfigError
        The product of the sizes is not the number of ranks, or ZeRO has no data ranks.
    """
    asked = any(size is not None for size in (tensor, pipeline, data, context))
    sizes = {"tensor": tensor or 1, "pipeline": pipeline or 1, "context": context or 1}
    comm: Communicator | None = None
    try:
        comm = _started(asked, device)
        return _ranks(comm, sizes, data, device, zero, options)
    except (ConfigError, DeviceError):
        if comm.rank if comm is not None else not said_here(asked=asked):
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
    """Return ranks in a grid."""
    if comm.size > 1 and device is not None:
        device = f"cuda:{gpu.cupy().cuda.runtime.getDevice()}"
    wanted = math.prod(sizes.values()) * (data or 1)
    if comm.size % wanted or (data is not None and comm.size != wanted):
        every = {**sizes, "data": data or 1}
        listed = " ".join(f"--{name}-parallel {size}" for name, size in every.items())
        cure = f"start it with mpiexec -n {wanted} unsloth-cupy, torchrun or srun"
        raise ConfigError(f"{listed} is not a grid of {comm.size} ranks; {cure}")
    groups = grid(comm, data=data, **sizes)
    if zero and groups.data.size * groups.context.size == 1:
        cure = "start more ranks, with --data-parallel"
        raise ConfigError(f"--zero {zero} is not for one data rank; {cure}")
    return Ranks(comm, groups, device, zero, **options)


def chunks_of(schedule: str | None, chunks: int | None) -> int:
    """Return the parts of the blocks in each stage of a pipeline."""
    return (chunks or 2) if schedule == "interleaved" else 1


def check_options(
    stages: int,
    contexts: int,
    zero: int,
    schedule: str | None,
    chunks: int | None,
    context_attention: str | None,
    accumulate: int,
) -> None:
    """Raise a ConfigError for options of a command that do not go with its ranks."""
    if schedule is not None and stages == 1:
        cure = "give --pipeline-parallel 2 or more"
        raise ConfigError(f"--schedule {schedule} is not for one stage; {cure}")
    if chunks is not None and schedule != "interleaved":
        cure = "give --schedule interleaved too"
        raise ConfigError(f"--chunks {chunks} is not for a stage that is whole; {cure}")
    if schedule == "interleaved" and accumulate % stages:
        cure = f"give --accumulate {-(-accumulate // stages) * stages}"
        problem = f"--accumulate {accumulate} is not a multiple of {stages} ranks"
        raise ConfigError(f"{problem} of --pipeline-parallel, as interleaved asks; {cure}")
    if context_attention is not None and contexts == 1:
        cure = "give --context-parallel 2 or more"
        problem = f"--context-attention {context_attention} is not for tokens that are whole"
        raise ConfigError(f"{problem}; {cure}")
    if zero == 3 and stages > 1:
        cure = "use --zero 1, which divides the averages"
        problem = "the weights of a stage would be gathered for each microbatch"
        raise ConfigError(f"--zero 3 is not for --pipeline-parallel: {problem}; {cure}")


def said_here(*, asked: bool) -> bool:
    """Say whether this rank, as its starter numbers it, is the one to say what all have met."""
    names = ("RANK",) * ("WORLD_SIZE" in os.environ) + MPI_RANKS + ("SLURM_PROCID",) * asked
    return int(first_of(os.environ, names) or 0) == 0


def _started(asked: bool, device: str | None) -> Communicator:
    """Return the communicator of all ranks."""
    by_name = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not by_name and any(name in os.environ for name in UNDER_MPI):
        return MpiCommunicator() if device is None else NcclCommunicator.from_mpi()
    if by_name or (asked and "SLURM_PROCID" in os.environ):
        kind: Any = SocketCommunicator if device is None else NcclCommunicator
        made: Communicator = kind.from_environment()
        return made
    return SingleCommunicator()
