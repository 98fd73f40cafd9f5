"""The command line in a rank: ``python -m tests.parallel.commands FAULT -- ARGUMENTS``.

FAULT is the step in whose middle the last rank alone is asked to stop; 0: none; full: the disk is,
when rank 0 writes a checkpoint.
"""

import errno
import os
import signal
import sys
from typing import Any

from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune import saving
from unsloth_cupy.finetune.trainer import Trainer


def interrupted(step: int) -> None:
    whole = Trainer._gradients

    def gradients(self: Trainer) -> Any:
        if self.step + 1 == step and self.ranks.comm.rank == self.ranks.comm.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self)

    Trainer._gradients = gradients  # type: ignore[method-assign]


def full(path: Any, tensors: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


if __name__ == "__main__":
    if sys.argv[1] == "full":
        saving.write_tensors = full
    else:
        interrupted(int(sys.argv[1]))
    group(sys.argv[3:])
