"""Profiles some steps of a training run op by op, for ``finetune --profile``."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import click

from ..files import atomic_path
from ..finetune.loop import Loop
from ..profiling.profile import Profile
from ..profiling.watch import watching

FIRST = 2  # first steps, not profiled: they count array memory, and on a GPU compile kernels


@contextmanager
def profiled(trainer: Loop, count: int | None) -> Iterator[None]:
    """Profile ``count`` training steps inside a ``with`` block, then report them; None: none."""
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
    """Returns the context of each step: a profile for ``count`` steps, else an empty one.

    The first steps are not profiled, as far as enough steps remain after them.
    """

    def __init__(self, trainer: Loop, count: int) -> None:
        self.trainer, self.count, self.done = trainer, count, 0
        self.profile = Profile(trainer.model.parameters | trainer.model.trainable, nvtx=False)
        self.waiting = max(0, min(FIRST, trainer.plan.steps - trainer.step - count))
        self.first = trainer.step + self.waiting + 1

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context of the next step."""
        if self.waiting:
            self.waiting -= 1
        elif self.done < self.count:
            self.done += 1
            return watching(self.profile)
        return nullcontext()

    def report(self) -> None:
        """Print the table of the steps; save it and a trace in the folder of the run."""
        if not self.profile.records:
            return
        folder, last = self.trainer.run.folder, self.first + self.done - 1
        table = f"steps {self.first} to {last}\n{self.profile.report()}"
        with atomic_path(folder / "profile.txt") as partial:
            partial.write_text(table, encoding="utf-8")
        self.profile.save_trace(folder / "trace.json")
        click.echo(f"\n{table}kept in {folder}/profile.txt and trace.json")
