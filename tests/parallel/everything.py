"""All checks, ranks started once: ``python -m tests.parallel.everything TEXT FOLDER``."""

import sys
from pathlib import Path

from unsloth_cupy.parallel import Communicator, MpiCommunicator

from . import collectives, grids, layers, models, ring, training

GROUPS = ((8,), (4, 3, 1), (2, 6))  # ranks that share the checks at a time


def checks(comm: Communicator) -> None:
    """Check what so many ranks compute."""
    for room in (collectives, layers, ring) if comm.size < 5 else (collectives, layers):
        room.all_checks(comm)
    if comm.size < 5:
        training.all_checks(comm)
    else:  # more ranks than heads of keys
        for family in ("llama", "phi3"):
            training.grids_equal_the_whole(comm, 4, family)


def main(text: str, folder: str) -> None:
    world = MpiCommunicator(timeout=60)
    for sizes in GROUPS:
        color = next(i for i in range(len(sizes)) if world.rank < sum(sizes[: i + 1]))
        comm = world.split(color)
        comm.checked = True
        if comm.size != 6:
            checks(comm)
        if comm.size < 5:
            models.all_checks(comm, Path(folder) / f"models-{comm.size}")
        comm.checked = False
        collectives.all_checks(comm)
        world.barrier()
    grids.all_runs(world, Path(text), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
