"""Output of ``finetune`` besides the messages of a run: profiles of steps, results as JSON."""

import json
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from ..files import atomic_path
from ..finetune.run.loop import Loop
from ..finetune.run.printer import Printer
from ..finetune.run.results import results_of
from ..finetune.run.trainer import Run
from ..machine import echo
from ..profiling.profile import Profile
from ..profiling.watch import watching

FIRST = 2  # first steps are not profiled: they measure memory, and on a GPU compile kernels


class Steps:
    """Returns the context of each step: a profile for ``count`` steps, else an empty context.

    The first steps are skipped if enough steps remain.
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
        """Print the profile; save it and a trace in the run folder."""
        if not self.profile.records:
            return
        folder, last = self.loop.run.folder, self.first + self.done - 1
        table = f"profile of steps {self.first} to {last}; times of an op exclude the ops that it"
        table += f" calls\n{self.profile.report()}"
        with atomic_path(folder / "profile.txt") as partial:
            partial.write_text(table, encoding="utf-8")
        self.profile.save_trace(folder / "trace.json")
        echo(f"\n{table}saved in {folder}/profile.txt and trace.json")


class CommandPrinter(Printer):
    """Prints a run like ``Printer``; also profiles ``profile`` steps, or prints only JSON."""

    def __init__(self, profile: int | None, *, quiet: bool, as_json: bool) -> None:
        super().__init__(quiet=quiet)
        self.profile, self.as_json = profile, as_json
        self.profiled: Steps | None = None

    def prepared(self, run: Run) -> None:
        """Import modules that the end of the run needs, to fail early; start the profile."""
        super().prepared(run)
        if run.loop is not None and run.loop.ranks.first:
            for module in ("matplotlib.figure", "rich.table"):
                import_module(module)
            if self.profile is not None:
                self.profiled = run.loop.step_context = Steps(run.loop, self.profile)

    def finished(self, run: Run) -> None:
        """Print the results, in words or as JSON."""
        if self.as_json:
            echo(json.dumps(results_of(run.files)))
        else:
            super().finished(run)

    def close(self) -> None:
        """Print the profile, also after an error."""
        if self.profiled is not None:
            self.profiled.report()
