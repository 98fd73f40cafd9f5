"""Run all checks in one set of ranks: ``python -m tests.parallel.everything TEXT FOLDER SAMPLE``.

SAMPLE is the number of the sample, or all.  At the end one of three ranks misses a collective,
which ends all of them.
"""

import sys
from pathlib import Path

from unsloth_cupy.parallel import Communicator, MpiCommunicator

from ..harness.sampling import Sample
from . import collectives, faults, grids, layers, models, ring, training

GROUPS = ((8,), (4, 3, 1), (2, 6))  # sizes of the groups of ranks that run checks concurrently


def checks(comm: Communicator, folder: Path) -> None:
    """Run the checks for a group of this many ranks."""
    for checked in Sample.one_in(2, (True, False)):
        comm.checked = checked
        collectives.all_checks(comm)
    if comm.size == 6:
        return
    layers.all_checks(comm)
    ring.all_checks(comm)
    if comm.size not in Sample.one_in(2, (8, 4, 3, 2, 1)):
        return
    if comm.size < 5:
        training.all_checks(comm)
        models.all_checks(comm, folder)
    else:  # more ranks than heads of keys
        for family in Sample.one_in(3, ("llama", "phi3")):
            training.grids_equal_the_whole(comm, 4, family)


def main(text: str, folder: str, sample: str) -> None:
    Sample.all = sample == "all"
    Sample.day = 0 if Sample.all else int(sample)
    world = MpiCommunicator(timeout=60)
    for sizes in GROUPS:
        color = next(i for i in range(len(sizes)) if world.rank < sum(sizes[: i + 1]))
        comm = world.split(color)
        checks(comm, Path(folder) / f"models-{comm.size}")
        world.barrier()
    grids.all_runs(world, Path(text), Path(folder))
    world.barrier()
    comm = world.split(world.rank // 3)
    if world.rank < 3:
        faults.all_checks(comm)
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
