"""Profiles some steps of a training run op by op, for ``finetune --profile``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..files import atomic_path
from ..finetune.run.loop import Loop
from ..profiling.profile import Profile
from ..profiling.watch import watching
from .echo import echo

FIRST = 2  # first steps, not profiled: they count array memory, and on a GPU compile kernels


class Steps:
    """Returns the context of each step: a profile for ``count`` steps, else an empty one.

    The first steps are not profiled, as far as enough steps remain after them.
    """

    def __init__(self, loop: Loop, count: int) -> None:
        self.loop, self.count, self.done = loop, count, 0
        self.profile = Profile(loop.model.parameters | loop.model.trainable, nvtx=False)
        self.waiting = max(0, min(FIRST, loop.plan.steps - loop.step - count))
        self.first = loop.step + self.waiting + 1

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
        folder, last = self.loop.run.folder, self.first + self.done - 1
        table = f"steps {self.first} to {last}\n{self.profile.report()}"
        with atomic_path(folder / "profile.txt") as partial:
            partial.write_text(table, encoding="utf-8")
        self.profile.save_trace(folder / "trace.json")
        echo(f"\n{table}kept in {folder}/profile.txt and trace.json")
