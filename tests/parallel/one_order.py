"""Run each command of a file on 1, 2 and 4 of four ranks: ``python -m ... FILE.json FOLDER``.

The runs of a command are in FOLDER/NAME-1, -2 and -4.  All have 6 rows in a step, split otherwise.
"""

import json
import sys
from pathlib import Path

from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.run import printer, ranks
from unsloth_cupy.parallel import SocketCommunicator

WAYS = {  # by number of ranks
    1: "--batch 6",
    2: "--batch 2 --accumulate 3 --data-parallel 2",
    4: "--batch 3 --accumulate 2 --data-parallel 4 --zero 1",
}


def main(commands: str, folder: str) -> None:
    world = SocketCommunicator.from_environment(timeout=240)
    printer.draw_curve = lambda *_: None  # type: ignore[assignment]
    printer.sample = lambda *_: None  # type: ignore[assignment]
    for name, words in json.loads(Path(commands).read_text()).items():
        for size, way in WAYS.items():
            comm = world.split(int(world.rank >= size))
            ranks._started = lambda *_, comm=comm: comm  # type: ignore[assignment]
            if world.rank < size:
                out = ("--out", f"{folder}/{name}-{size}")
                group(["finetune", *words, *out, *way.split()], standalone_mode=False)
            world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
