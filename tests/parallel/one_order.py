"""Run each command of a file on 1, 2 and 4 of four ranks: ``python -m ... FILE.json FOLDER``.

The runs of a command are in FOLDER/NAME-1, -2 and -4.  All have 6 rows in a step, split otherwise.
With a third argument, each run has 4 steps, some of them on other ranks after a resume: the runs of
a command are in FOLDER/NAME-whole, -more and -fewer.
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


RESUMED = {"whole": (1,), "more": (1, 2), "fewer": (4, 1)}  # the ranks of each half


def main(commands: str, folder: str, resumed: str = "") -> None:
    world = SocketCommunicator.from_environment(timeout=240)
    printer.draw_curve = lambda *_: None  # type: ignore[assignment]
    printer.sample = lambda *_: None  # type: ignore[assignment]

    def run(size: int, *words: str) -> None:
        comm = world.split(int(world.rank >= size))
        ranks._started = lambda *_: comm  # type: ignore[assignment]
        if world.rank < size:
            group(["finetune", *words, *WAYS[size].split()], standalone_mode=False)
        world.barrier()

    for name, words in json.loads(Path(commands).read_text()).items():
        for size in () if resumed else WAYS:
            run(size, *words, "--out", f"{folder}/{name}-{size}")
        for label, sizes in RESUMED.items() if resumed else ():
            for number, size in enumerate(sizes, 1):
                steps = str(4 * number // len(sizes))
                run(size, *words, "--out", f"{folder}/{name}-{label}", "--steps", steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
