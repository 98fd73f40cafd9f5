"""Steps of a training run, timed op by op."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import click

from ..files import written_beside
from ..finetune.trainer import Trainer
from ..profiling.profile import Profile
from ..profiling.watch import watching

FIRST = 2  # steps that count their arrays, and on a GPU compile kernels


@contextmanager
def profiled(trainer: Trainer, count: int | None) -> Iterator[None]:
    """Time so many steps of what a trainer does inside a ``with`` block, and report them."""
    if count is None or not trainer.ranks.first:
        yield
        return
    steps = Steps(trainer, count)
    trainer.around = steps
    try:
        yield
    finally:
        steps.report()


class Steps:
    """What is around each step: a profile, after the first ones, where enough are left."""

    def __init__(self, trainer: Trainer, count: int) -> None:
        self.trainer, self.count, self.done = trainer, count, 0
        self.seen = Profile(trainer.model.parameters | trainer.model.trainable, nvtx=False)
        self.waiting = max(0, min(FIRST, trainer.plan.steps - trainer.step - count))
        self.first = trainer.step + self.waiting + 1

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context of the next step."""
        if self.waiting:
            self.waiting -= 1
        elif self.done < self.count:
            self.done += 1
            return watching(self.seen)
        return nullcontext()

    def report(self) -> None:
        """Print the table of the steps, and keep it and a trace in the folder of the run."""
        if not self.seen.records:
            return
        folder, last = self.trainer.run.folder, self.first + self.done - 1
        table = f"steps {self.first} to {last}\n{self.seen.report()}"
        with written_beside(folder / "profile.txt") as partial:
            partial.write_text(table, encoding="utf-8")
        self.seen.save_trace(folder / "trace.json")
        click.echo(f"\n{table}kept in {folder}/profile.txt and trace.json")
