"""Run commands in a rank: ``python -m tests.parallel.commands ARGUMENTS -- FAULT -- ARGUMENTS``.

ARGUMENTS that start with the word ``wrong`` must be rejected.  FAULT is a fault of all later runs,
which save every two steps:

    killed    the last rank is killed in the middle of step 3
    stopped   the last rank receives SIGTERM in the middle of step 3
    lost      the same, in the first attempt of torchrun only
    full      the disk of rank 0 is full
    torn      rank 0 is killed when half of its second checkpoint is written
    parts     no fault: each rank writes a part of checkpoints and models, as of large ones
    weighed   no fault: a save may not need more memory than two arrays
    KILLS     a rank is killed in the second save: in its part, before or after the index, ...
    moved     none: arrays of checkpoints with offload are moved, as on a GPU
"""

import errno
import os
import signal
import sys
import tracemalloc
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.run import checkpoints
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.models.folders.tensor_file import TensorFile
from unsloth_cupy.models.ranks import parts

from ..harness.moving import moving


def killed(number: int = signal.SIGKILL) -> None:
    whole = Loop._gradients

    def gradients(self: Loop) -> Any:
        result = whole(self)
        if self.step == 2 and self.ranks.comm.rank == self.ranks.comm.size - 1:
            os.kill(os.getpid(), number)
        return result

    Loop._gradients = gradients  # type: ignore[method-assign]


def stopped() -> None:
    killed(signal.SIGTERM)


def lost() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        killed()


def full() -> None:
    def append(self: Any, array: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    TensorFile.append = append  # type: ignore[method-assign]


def torn() -> None:
    whole = TensorFile.append

    def append(self: Any, array: Any) -> int:
        if self.path.name.startswith("optimizer") and "-00000004." in self.path.parent.name:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, array)

    TensorFile.append = append  # type: ignore[method-assign]


def in_parts() -> None:
    parts.ONE_FILE = 0


def weighed() -> None:
    """Compare the memory of a save with the largest array and a buffer of its exchange."""
    whole = parts.Parts.write

    def write(self: Any, folder: Path, stem: str, entries: Any, *more: Any) -> Any:
        tracemalloc.start()
        result = whole(self, folder, stem, entries, *more)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        largest, every = max(each.bytes for each in entries), parts.size_of(entries)
        assert every > 4 * largest
        print(f"{stem} {peak / largest:.2f} of the largest array of {largest} bytes")
        assert peak < 2 * largest + OBJECTS, (stem, peak, largest)
        return result

    parts.Parts.write = write  # type: ignore[method-assign]


def killed_in_save(where: str) -> None:
    """Kill a rank at a place of the save after step 4."""
    own, after = KILLS[where]
    whole = getattr(*own)

    def call(*arguments: Any, **options: Any) -> Any:
        paths = [each for each in arguments if isinstance(each, Path)]
        paths += [getattr(each, "path", None) for each in arguments]
        is_due = any("checkpoint-00000004" in str(path) for path in paths)
        result = whole(*arguments, **options) if after or not is_due else None
        if is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if where != "rank-1" or os.environ["RANK"] == "1":
        setattr(*own, call)


KILLS: dict[str, tuple[tuple[Any, str], bool]] = {
    "rank-1": ((TensorFile, "append"), True),
    "unindexed": ((TensorFile, "__exit__"), True),
    "uncommitted": ((checkpoints, "_in_place_of"), False),
    "committed": ((checkpoints, "_in_place_of"), True),
}
OBJECTS = 2**20  # bytes of Python objects, and of what a save imports


def moved() -> None:
    sizes = stack.enter_context(moving())
    stack.callback(lambda: print(f"moved {len(sizes)} arrays"))


FAULTS = {
    "killed": killed,
    "stopped": stopped,
    "lost": lost,
    "full": full,
    "torn": torn,
    "parts": in_parts,
    "moved": moved,
}
FAULTS |= {"weighed": weighed} | {kill: partial(killed_in_save, kill) for kill in KILLS}

if __name__ == "__main__":
    stack = ExitStack()
    for ends, command in groupby(sys.argv[1:], "--".__eq__):
        asked = [*command]
        if asked[0] in FAULTS:
            FAULTS[asked[0]]()
        elif asked[0] == "wrong":
            with suppress(SystemExit):
                group(asked[1:])
        elif not ends:
            group(asked, standalone_mode=False)
    stack.close()
