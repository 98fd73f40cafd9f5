"""Run the finetune command in many grids of one set of ranks; each must equal a run of one rank.

As many grids run concurrently as there are ranks for.  Next to the folder of a run are the
gradients of its first and last step, and tokens that its model generates.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from unsloth_cupy import AdamW, ScheduleFreeAdamW
from unsloth_cupy.cli import profiled
from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.run import loop, printer, ranks
from unsloth_cupy.models import create, optimizers
from unsloth_cupy.models.ranks import parts
from unsloth_cupy.models.ranks.parts import ONE_FILE
from unsloth_cupy.parallel import Communicator
from unsloth_cupy.placement import to_numpy

from ..harness.sampling import Sample

STEPS, STOP = 10, 4
NEW = ("--layers", "2", "--hidden", "64", "--vocabulary", "300")
SIZES = (
    "--batch", "3", "--tokens", "8",
    "--accumulate", "2", "--evaluate-every", str(STEPS), "--save-every", "100", "--lr", "0.003",
    "--steps", str(STEPS),
)  # fmt: skip
# above what sums in another order differ by, which Adam would make as large as the rate
EPS = 1e-3
MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}


class Run(NamedTuple):
    """A number of ranks and their grid; the run that they continue, or whose model they adapt."""

    ranks: int
    grid: str
    of: str = ""
    base: str = ""


INTERLEAVED = "--layers 4 --pipeline-parallel 2 --pipeline-schedule interleaved"
BITS = "--tensor-parallel 2 --state-bits 8"
MUON, FACTOR = "--optimizer muon", "--optimizer adafactor --lr 0.03"
FREE = "--optimizer schedulefree"
LORA = "--quantize nf4 --lora 8"
RUNS = {
    "one": Run(1, ""),
    "stopped": Run(4, "--tensor-parallel 2 --data-parallel 2 --zero 3"),
    "data": Run(3, "--data-parallel 3"),
    "zero-1": Run(2, "--data-parallel 2 --zero 1"),
    "zero-3": Run(2, "--data-parallel 2 --zero 3"),
    "tensor": Run(2, "--tensor-parallel 2"),
    "pipeline": Run(2, "--pipeline-parallel 2"),
    "context": Run(2, "--context-parallel 2"),
    "ulysses": Run(2, "--context-parallel 2 --context-attention ulysses"),
    "on-one": Run(1, "", "stopped"),
    "on-three": Run(3, "--data-parallel 3 --zero 1", "stopped"),
    "on-four": Run(
        4, "--tensor-parallel 2 --pipeline-parallel 2 --pipeline-schedule gpipe", "stopped"
    ),
    "on-3-contexts": Run(3, "--context-parallel 3", "stopped"),
    "on-contexts": Run(4, "--context-parallel 2 --pipeline-parallel 2 --zero 1", "stopped"),
    "deep-one": Run(1, "--layers 4"),
    "deep-stopped": Run(2, INTERLEAVED),
    "deep-on-one": Run(1, "--layers 4", "deep-stopped"),
    "deep-on-four": Run(4, f"--tensor-parallel 2 {INTERLEAVED}", "deep-stopped"),
    "lora-one": Run(1, LORA, base="one"),
    "lora-zero-3": Run(2, f"{LORA} --zero 3", base="one"),
    "bits-one": Run(2, BITS),
    "bits-stopped": Run(2, BITS),
    "bits-on-two": Run(2, BITS, "bits-stopped"),
    "muon-one": Run(1, MUON),
    "muon-all": Run(4, f"{MUON} --pipeline-parallel 2 --data-parallel 2"),
    "factor-one": Run(1, FACTOR),
    "factor-all": Run(4, f"{FACTOR} --pipeline-parallel 2 --context-parallel 2"),
    "free-one": Run(1, FREE),
    "free-stopped": Run(2, f"{FREE} --tensor-parallel 2"),
    "free-on-two": Run(2, f"{FREE} --pipeline-parallel 2", "free-stopped"),
    "mixture-one": Run(1, "", base="experts"),
    "mixture-stopped": Run(3, "--expert-parallel 3", base="experts"),
    "mixture-on-two": Run(2, "--expert-parallel 2", "mixture-stopped", "experts"),
    "mixture-slices": Run(2, "--tensor-parallel 2", base="experts"),
    "mixture-stages": Run(2, "--pipeline-parallel 2", base="experts"),
    "mixture-contexts": Run(2, "--context-parallel 2", base="experts"),
    "mixture-on-four": Run(
        4, "--pipeline-parallel 2 --context-parallel 2 --zero 1", "mixture-stopped", "experts"
    ),
    "mixture-on-zero": Run(2, "--expert-parallel 2 --zero 1", "mixture-stopped", "experts"),
    "mixture-stages-stopped": Run(
        4, "--expert-parallel 2 --pipeline-parallel 2 --zero 1", base="experts"
    ),
    "mixture-on-slices": Run(
        4, "--expert-parallel 2 --tensor-parallel 2 --zero 1", "mixture-stages-stopped", "experts"
    ),
    "mixture-on-all": Run(
        8,
        "--expert-parallel 2 --tensor-parallel 2 --pipeline-parallel 2",
        "mixture-stages-stopped",
        "experts",
    ),
    "adapted-one": Run(1, LORA, base="experts"),
    "adapted-stages": Run(2, f"{LORA} --pipeline-parallel 2", base="experts"),
    "adapted-two": Run(2, f"{LORA} --expert-parallel 2", base="experts"),
    "adapted-four": Run(4, f"{LORA} --expert-parallel 2 --pipeline-parallel 2", base="experts"),
    "both": Run(4, "--context-parallel 2 --tensor-parallel 2"),
    "all": Run(8, "--tensor-parallel 2 --pipeline-parallel 2 --data-parallel 2 --zero 1"),
    "wrong-layers": Run(2, "--pipeline-parallel 2 --layers 1"),
    "wrong-grid": Run(3, "--tensor-parallel 2"),
}
ALWAYS = ("one", "stopped", "wrong")
TURNS = (  # of each a third in a run, others in the next one; by how names begin
    ("data", "zero-3", "zero-1", "tensor", "pipeline", "context", "ulysses"),
    ("on-one", "on-three", "on-four", "on-3-contexts", "on-contexts"),
    ("deep", "lora", "bits", "both", "all", "muon", "factor", "free", "mixture", "adapted"),
)
WRONG = (  # said once
    "1 layers are not enough for 2 stages; use at most 1 in all",
    "--expert-parallel 1 --data-parallel 1 needs 2 ranks, but 3 run",
)


def is_stopped(name: str) -> bool:
    """Return whether only the last rank stops a run, in the middle of a step."""
    return name.endswith("stopped")


def todays() -> dict[str, Run]:
    """Return the runs of this sample."""
    begins = (*ALWAYS, *(name for turns in TURNS for name in Sample.one_in(3, turns)))
    return {name: run for name, run in RUNS.items() if name.startswith(begins)}


def rounds(ranks: int) -> Iterator[dict[str, Run]]:
    """Yield the runs of this sample in groups that fit into the number of ranks."""
    left = todays()
    while left:
        now: dict[str, Run] = {}
        for name, run in left.items():
            free = ranks - sum(other.ranks for other in now.values())
            base = "one" if run.base == "experts" else run.base  # whose tokenizer it has
            if run.ranks <= free and not {run.of, base} & left.keys():
                now[name] = run
        yield now
        left = {name: run for name, run in left.items() if name not in now}


def gradients(self: Any, before: Any) -> Any:
    """Return the gradients of a step; rank 0 writes those of a run's first and last step."""
    folder = self.run.folder
    comm = self.ranks.comm
    if is_stopped(folder.name) and self.step == STOP and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGINT)
    loss, count, sums = before(self)
    if self.step in (0, STEPS - 1):
        whole = sums if self.executor.states is None else self.executor.states.gathered(sums)
        gathered = self.executor.gathered(whole)
        if self.ranks.first:
            named = {name: to_numpy(array) for name, array in gathered.items()}
            np.savez(folder.parent / f"{folder.name}-{self.step}.npz", **named)
    return loss, count, sums


def sample(loop: Any) -> None:
    """Generate a few tokens in all ranks; rank 0 writes them to a file."""
    model, folder = loop.model, loop.run.folder
    tokens = model.generate(np.array([loop.training_data.prompt[:5]]), max_new_tokens=4, stop=())
    if loop.ranks.first:
        np.savez(folder.parent / f"{folder.name}-sample.npz", tokens)


def all_runs(world: Communicator, text: Path, folder: Path) -> None:
    """Run all grids."""
    whole = loop.Loop._gradients
    loop.Loop._gradients = lambda self: gradients(self, whole)  # type: ignore[method-assign]
    for kind in (AdamW, ScheduleFreeAdamW):
        setattr(optimizers, kind.__name__, partial(kind, eps=EPS))
    printer.draw_curve = lambda *_: None  # type: ignore[assignment]
    profiled.import_module = lambda _: None  # type: ignore[assignment]
    printer.sample = sample  # type: ignore[assignment]
    for runs in rounds(world.size):
        names = [name for name, run in runs.items() for _ in range(run.ranks)]
        name = names[world.rank] if world.rank < len(names) else ""
        comm = world.split([*runs, ""].index(name))
        if name:
            one_run(comm, runs[name], text, folder / name)
        world.barrier()
        if world.rank == 0 and not (folder / "experts").exists():
            create(MIXTURE, seed=0).save(folder / "experts")
            shutil.copy(folder / "one" / "model" / "tokenizer.json", folder / "experts")
        world.barrier()


def one_run(comm: Communicator, run: Run, text: Path, folder: Path) -> None:
    if run.of and comm.rank == 0:
        shutil.copytree(folder.parent / run.of, folder)
    comm.barrier()
    ranks._started = lambda *_: comm  # type: ignore[assignment]
    parts.ONE_FILE = 0 if is_stopped(folder.name) else ONE_FILE  # read in another grid
    asked = ("finetune", "--text", str(text), "--out", str(folder), *SIZES)
    asked += (str(folder.parent / run.base),) if run.base else NEW
    try:
        group([*asked, *run.grid.split()], standalone_mode=False)
    except click.ClickException as error:
        error.show()
    except SystemExit as end:  # of one that is stopped, or wrong
        if not end.code:
            raise
