"""Arrange ranks in a grid for data, pipeline, context and tensor parallelism at the same time."""

from typing import NamedTuple

from ..core.call import is_integer
from ..errors import ConfigError
from .communicator import Communicator


class Grid(NamedTuple):
    """Communicators, each of the ranks that differ from this one along only one axis of a grid."""

    data: Communicator
    pipeline: Communicator
    context: Communicator
    tensor: Communicator


def grid(
    comm: Communicator, *, data: int | None = None, pipeline: int = 1, context: int = 1,
    tensor: int = 1,
) -> Grid:  # fmt: skip
    """Return the communicators of a grid; ranks of one ``tensor`` group are consecutive.

    ``rank = ((data * pipelines + pipeline) * contexts + context) * tensors + tensor``.

    Parameters
    ----------
    comm : Communicator
        Of data * pipeline * context * tensor ranks.
    data : int, optional
        Parts of a batch; None: the number of ranks / (pipeline * context * tensor).
    pipeline : int
        Stages of blocks.
    context : int
        Parts of a text.
    tensor : int
        Parts of a weight.

    Raises
    ------
    ConfigError
        The product of the sizes is not the number of ranks.
    """
    known = {"pipeline": pipeline, "context": context, "tensor": tensor}
    others = pipeline * context * tensor
    sizes = {"data": comm.size // max(others, 1) if data is None else data} | known
    listed = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
    valid = all(is_integer(size, 1) for size in sizes.values())
    if not valid or sizes["data"] * others != comm.size:
        cure = "choose sizes whose product is that number"
        raise ConfigError(f"grid({listed}) is not a grid of {comm.size} ranks; {cure}")
    step, communicators = 1, dict[str, Communicator]()
    for name, size in [*sizes.items()][::-1]:
        place = comm.rank // step % size
        communicators[name] = comm.split(comm.rank - place * step)
        step *= size
    return Grid(**communicators)
