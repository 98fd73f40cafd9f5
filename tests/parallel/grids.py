"""Runs of the command in many grids of ranks that were started once; each shall equal one rank's.

In each round 8 ranks run other grids at a time.  Beside the folder of a run lie the gradients of
its first and its last step, and tokens that its model writes.
"""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from unsloth_cupy import AdamW
from unsloth_cupy.cli import finetune as command
from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune import ranks, trainer
from unsloth_cupy.parallel import Communicator
from unsloth_cupy.placement import to_numpy

STEPS, STOP = 20, 9
NEW = ("--layers", "2", "--hidden", "64", "--vocabulary", "300")
SIZES = (
    "--batch", "3", "--tokens", "8",
    "--accumulate", "2", "--evaluate-every", "20", "--save-every", "100", "--lr", "0.003",
    "--steps", str(STEPS),
)  # fmt: skip
# above what sums in another order differ by, which Adam would make as large as the rate
EPS = 1e-3


class Run(NamedTuple):
    """So many ranks, and their grid; the run that they go on with, or whose model they adapt."""

    ranks: int
    grid: str
    of: str = ""
    base: str = ""


STOPPED = (
    "stopped",
    "deep-stopped",
    "bits-stopped",
)  # in the middle of a step, by the last rank alone
INTERLEAVED = "--layers 4 --pipeline-parallel 2 --schedule interleaved"
BITS = "--tensor-parallel 2 --state-bits 8"
LORA = "--quantize nf4 --lora 8"
ROUNDS: tuple[dict[str, Run], ...] = (
    {
        "one": Run(1, ""),
        "data": Run(3, "--data-parallel 3"),
        "stopped": Run(4, "--tensor-parallel 2 --data-parallel 2 --zero 3"),
    },
    {
        "zero": Run(2, "--data-parallel 2 --zero 1"),
        "tensor": Run(2, "--tensor-parallel 2"),
        "pipeline": Run(2, "--pipeline-parallel 2"),
        "on-one": Run(1, "", "stopped"),
        "deep-one": Run(1, "--layers 4"),
    },
    {
        "on-four": Run(4, "--tensor-parallel 2 --pipeline-parallel 2 --schedule gpipe", "stopped"),
        "deep-stopped": Run(2, INTERLEAVED),
        "zero-3": Run(2, "--data-parallel 2 --zero 3"),
    },
    {
        "on-three": Run(3, "--data-parallel 3 --zero 1", "stopped"),
        "deep-on-four": Run(4, f"--tensor-parallel 2 {INTERLEAVED}", "deep-stopped"),
        "deep-on-one": Run(1, "--layers 4", "deep-stopped"),
    },
    {
        "lora-one": Run(1, LORA, base="one"),
        "lora-zero-3": Run(2, f"{LORA} --zero 3", base="one"),
        "context": Run(2, "--context-parallel 2"),
        "context-3": Run(3, "--context-parallel 3", "stopped"),
    },
    {
        "bits-one": Run(2, BITS),
        "bits-stopped": Run(2, BITS),
    },
    {"bits-on-two": Run(2, BITS, "bits-stopped")},
    {
        "context-tensor": Run(4, "--context-parallel 2 --tensor-parallel 2"),
        "context-all": Run(4, "--context-parallel 2 --pipeline-parallel 2 --zero 1", "stopped"),
    },
    {
        "wrong-layers": Run(2, "--pipeline-parallel 2 --layers 1"),
        "wrong-grid": Run(3, "--tensor-parallel 2"),
    },
    {"all": Run(8, "--tensor-parallel 2 --pipeline-parallel 2 --data-parallel 2 --zero 1")},
)
RUNS = {name: run for runs in ROUNDS for name, run in runs.items() if "wrong" not in name}
WRONG = (  # said once
    "1 layers are not enough for 2 stages; use at most 1 in all",
    "--context-parallel 1 --data-parallel 1 is not a grid of 3 ranks",
)


def gradients(self: Any, before: Any) -> Any:
    """Return what a step learns by; rank 0 writes it down at the ends of a run."""
    folder = self.run.folder
    comm = self.ranks.comm
    if folder.name in STOPPED and self.step == STOP and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGINT)
    loss, count, sums = before(self)
    if self.step in (0, STEPS - 1):
        whole = sums if self.engine.states is None else self.engine.states.gathered(sums)
        found = self.engine.gathered(whole)
        if self.ranks.first:
            named = {name: to_numpy(array) for name, array in found.items()}
            np.savez(folder.parent / f"{folder.name}-{self.step}.npz", **named)
    return loss, count, sums


def sample(trainer: Any, _: int) -> None:
    """Let all ranks write a few tokens; rank 0 keeps them."""
    model, folder = trainer.model, trainer.run.folder
    found = model.generate(np.array([trainer.lessons.prompt[:5]]), max_new_tokens=4, stop=())
    if trainer.ranks.first:
        np.savez(folder.parent / f"{folder.name}-sample.npz", found)


def all_runs(world: Communicator, text: Path, folder: Path) -> None:
    """Run all grids."""
    whole = trainer.Trainer._gradients
    trainer.Trainer._gradients = lambda self: gradients(self, whole)  # type: ignore[method-assign]
    trainer.AdamW = partial(AdamW, eps=EPS)  # type: ignore[misc, assignment]
    command.draw_curve = lambda *_: None  # type: ignore[assignment]
    command.sample = sample  # type: ignore[assignment]
    for runs in ROUNDS:
        names = [name for name, run in runs.items() for _ in range(run.ranks)]
        assert len(names) <= world.size
        name = names[world.rank] if world.rank < len(names) else ""
        comm = world.split([*runs, ""].index(name))
        if name:
            one_run(comm, runs[name], text, folder / name)
        world.barrier()


def one_run(comm: Communicator, run: Run, text: Path, folder: Path) -> None:
    if run.of and comm.rank == 0:
        shutil.copytree(folder.parent / run.of, folder)
    comm.barrier()
    ranks._started = lambda *_: comm  # type: ignore[assignment]
    asked = ("finetune", "--text", str(text), "--out", str(folder), *SIZES)
    asked += (str(folder.parent / run.base),) if run.base else NEW
    try:
        group([*asked, *run.grid.split()], standalone_mode=False)
    except click.ClickException as error:
        error.show()
    except SystemExit as end:  # of one that is stopped, or wrong
        if not end.code:
            raise
