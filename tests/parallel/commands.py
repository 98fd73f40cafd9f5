"""Run commands in a rank: ``python -m tests.parallel.commands ARGUMENTS -- FAULT -- ARGUMENTS``.

ARGUMENTS that start with the word ``wrong`` must be rejected.  FAULT is a fault of all later runs,
which save every two steps:

    killed    the last rank is killed in the middle of step 3
    stopped   the last rank receives SIGTERM in the middle of step 3
    lost      the same, in the first attempt of torchrun only
    full      the disk of rank 0 is full
    torn      rank 0 is killed when half of its second checkpoint is written
"""

import errno
import os
import signal
import sys
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.run import checkpoints
from unsloth_cupy.finetune.run.loop import Loop


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
    def write(path: Any, tensors: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    checkpoints.write_tensors = write


def torn() -> None:
    whole = checkpoints.write_tensors

    def write(path: Path, tensors: Any) -> None:
        whole(path, tensors)
        if tensors["steps"] == 4:
            path.write_bytes(path.read_bytes()[:99])
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.write_tensors = write


FAULTS = {"killed": killed, "stopped": stopped, "lost": lost, "full": full, "torn": torn}

if __name__ == "__main__":
    for ends, command in groupby(sys.argv[1:], "--".__eq__):
        asked = [*command]
        if asked[0] in FAULTS:
            FAULTS[asked[0]]()
        elif asked[0] == "wrong":
            with suppress(SystemExit):
                group(asked[1:])
        elif not ends:
            group(asked, standalone_mode=False)
