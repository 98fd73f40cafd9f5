"""Arrange ranks in a grid for several kinds of parallelism at the same time."""

import math
import reprlib
from typing import NamedTuple

from ..core.call import is_integer
from ..errors import ConfigError
from .communicator import Communicator, check_communicator


class Grid(NamedTuple):
    """One communicator for each axis of a grid: the ranks that differ from this one only there."""

    data: Communicator
    pipeline: Communicator
    context: Communicator
    expert: Communicator
    tensor: Communicator


def grid(
    comm: Communicator, *, data: int | None = None, pipeline: int = 1, context: int = 1,
    expert: int = 1, tensor: int = 1,
) -> Grid:  # fmt: skip
    """Return the communicators of a grid; ranks of a ``tensor`` group are consecutive.

    ``rank = (((data * pipelines + pipeline) * contexts + context) * experts + expert) * tensors +
    tensor``.

    Parameters
    ----------
    comm : Communicator
        Its world size must be data * pipeline * context * expert * tensor.
    data : int, optional
        Parts of a batch; None: world size / (pipeline * context * expert * tensor).
    pipeline : int
        Number of pipeline stages.
    context : int
        Parts of a text.
    expert : int
        Parts of the experts of a layer, and of a data rank's batch.
    tensor : int
        Parts of a weight.

    Raises
    ------
    ConfigError
        The product of the sizes is not the number of ranks.
    """
    check_communicator("grid", comm)
    known = {"pipeline": pipeline, "context": context, "expert": expert}
    known |= {"tensor": tensor}
    valid = all(is_integer(size, 1) for size in known.values())
    others = math.prod(map(int, known.values())) if valid else 1
    sizes = {"data": comm.size // others if data is None else data} | known
    listed = ", ".join(f"{name}={reprlib.repr(size)}" for name, size in sizes.items())
    valid = valid and is_integer(sizes["data"], 1)
    if not valid or int(sizes["data"]) * others != comm.size:
        cure = "choose sizes whose product is that number"
        raise ConfigError(f"grid({listed}) is not a grid of {comm.size} ranks; {cure}")
    step, communicators = 1, dict[str, Communicator]()
    for name, size in [*sizes.items()][::-1]:
        place = comm.rank // step % size
        communicators[name] = comm.split(comm.rank - place * step)
        step *= size
    return Grid(**communicators)
