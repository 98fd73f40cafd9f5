"""Ranks in a grid: which of them share a weight, which a batch, which a text, which a stage."""

from typing import NamedTuple

from ..core.call import is_integer
from ..errors import ConfigError
from .communicator import Communicator


class Grid(NamedTuple):
    """Communicators of the ranks that differ from this one along one axis of a grid alone."""

    data: Communicator
    pipeline: Communicator
    context: Communicator
    tensor: Communicator


def grid(
    comm: Communicator, *, data: int | None = None, pipeline: int = 1, context: int = 1,
    tensor: int = 1,
) -> Grid:  # fmt: skip
    """Return the communicators of a grid; ranks of one ``tensor`` group lie side by side.

    ``rank = ((data * pipelines + pipeline) * contexts + context) * tensors + tensor``.

    Parameters
    ----------
    comm : Communicator
        Of data * pipeline * context * tensor ranks.
    data : int, optional
        Ranks with other parts of a batch; None: as many as there are for what the others say.
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
    whole = all(is_integer(size, 1) for size in sizes.values())
    if not whole or sizes["data"] * others != comm.size:
        cure = "let their product be that number"
        raise ConfigError(f"grid({listed}) is not a grid of {comm.size} ranks; {cure}")
    step, made = 1, dict[str, Communicator]()
    for name, size in [*sizes.items()][::-1]:
        place = comm.rank // step % size
        made[name] = comm.split(comm.rank - place * step)
        step *= size
    return Grid(**made)
