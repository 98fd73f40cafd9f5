"""Prints a run: its words and progress to standard error, its results to standard output.

Progress is a bar on a terminal, or a line from time to time elsewhere.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from ..errors import printable
from ..finetune.listener import Listener
from ..finetune.run.curve import draw_curve
from ..finetune.run.routing import draw_routing
from ..finetune.run.trainer import Run
from ..machine import format_bytes
from .echo import echo
from .profiled import Steps
from .results import report, results_of, sample, what_follows

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BEFORE_A_BAR = 1.0
SHOWN = (  # of what a method measures, in progress
    *("reward", "accuracy", "margin", "f1", "mrr", "error", "kl"),
    *("entropy", "ratio", "clipped", "length", "expert_load", "idle_experts"),
)
MINUTE = 60
NEWEST = 0.1  # weight of the newest step in the running means of loss and speed


class Printer(Listener):
    """Prints what it hears, and profiles ``profile`` of the steps, if that is a number.

    If it is quiet, it prints only the results, and these only as JSON.
    """

    def __init__(
        self, profile: int | None = None, *, quiet: bool = False, as_json: bool = False
    ) -> None:
        self.profile, self.quiet, self.as_json = profile, quiet, as_json
        self.profiled: Steps | None = None
        self.terminal = sys.stderr.isatty() and not quiet
        self.bar: Any = None  # of training
        self.steps = 0
        self.first: float | None = None  # held-out loss of a model that existed
        self.began_at, self.first_step, self.of_new_model = 0.0, 0, True
        self.loss: float | None = None
        self.speed: float | None = None
        self.printed = 0.0

    def announce(self, text: str) -> None:
        """Print a message."""
        if not self.quiet:
            echo(text, err=True)

    def reading(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how much of a file is read, if it takes longer than 1 s."""
        return self._counting(what, size, "B", format_bytes)

    def computing(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how many tokens a model has read, if it takes longer than 1 s."""
        return self._counting(what, size, " tokens", lambda count: f"{count:,.0f} tokens")

    @contextmanager
    def _counting(
        self, what: str, size: int, unit: str, shown: Callable[[float], str]
    ) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        what = printable(what)
        done, began = 0, time.monotonic()
        printed = began
        with tqdm(
            total=size, desc=what, unit=unit, unit_scale=True, disable=not self.terminal,
            leave=False, delay=SECONDS_BEFORE_A_BAR, dynamic_ncols=True,
        ) as bar:  # fmt: skip

            def read(count: int) -> None:
                nonlocal done, printed
                done += count
                bar.update(count)
                now = time.monotonic()
                if not (self.terminal or self.quiet) and now - printed > SECONDS_BETWEEN_LINES:
                    printed, speed = now, shown(done / (now - began))
                    share = f"{shown(done)} of {shown(size)}"
                    echo(f"{what}: {share}, {speed}/s", err=True)

            yield read

    def prepared(self, run: Run) -> None:
        """Import what the end of the run needs, so that it fails now; begin to profile."""
        if run.loop is not None and run.loop.ranks.first:
            for needed in ("matplotlib.figure", "rich.table"):
                import_module(needed)
            self.of_new_model = run.files.of_new_model
            evaluations = (line.get("held_out_loss") for line in run.files.lines())
            self.first = next(filter(None, evaluations), None)
            if self.profile is not None:
                self.profiled = run.loop.step_context = Steps(run.loop, self.profile)

    def began(self, step: int, steps: int) -> None:
        """Show the bar."""
        from tqdm import tqdm

        self.steps, self.began_at, self.first_step = steps, time.monotonic(), step
        self.bar = tqdm(
            total=steps, initial=step, unit=" steps", disable=not self.terminal, dynamic_ncols=True
        )

    def step(self, line: dict[str, Any]) -> None:
        """Show one step."""
        self.loss = _mean(self.loss, line["loss"])
        speed = line["tokens_per_second"]
        self.speed = self.speed if speed is None else _mean(self.speed, speed)
        pace = "" if self.speed is None else f", {self.speed:.0f} tokens/s of text"
        now = f"loss {self.loss:.3f}{measured(line)}{pace}"
        now += f", process {format_bytes(line['memory_bytes'])}"
        if self.terminal:
            self.bar.set_postfix_str(now, refresh=False)
            self.bar.update()
        elif time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            done = line["step"] - self.first_step
            left = (time.monotonic() - self.began_at) / done * (self.steps - line["step"])
            self._print(f"step {line['step']}/{self.steps}: {now}, {duration(left)} left")

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show one evaluation."""
        text = f"step {line['step']}/{self.steps}: held-out loss {line['held_out_loss']:.3f}"
        if self.of_new_model and "unigram_baseline" in line:
            text += f" (unigram baseline {line['unigram_baseline']:.3f})"
        elif self.first is None:
            self.first = line["held_out_loss"]
        else:
            text += f" ({self.first:.3f} at first)"
        self._print(text + measured(line, "held_out_"))

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Show the text that continues a prompt."""
        self._print(f"step {step}/{self.steps}: {prompt!r} goes on: {text!r}")

    def ended(self, run: Run) -> None:
        """Leave the bar where it is, and draw the loss curve."""
        if self.bar is not None:
            self.bar.close()
        lines = run.files.lines()
        if lines and run.loop is not None and run.loop.ranks.first:
            try:
                draw_curve(run.files.curve, lines, run.name)
                path = run.files.routing
                if path.exists() and (routes := [*run.files.beside(path)]):
                    draw_routing(run.files.routing_picture, routes, run.name)
            except Exception as error:  # of matplotlib: the model is still to be saved
                self.announce(f"the pictures of {run.folder} are not drawn: {error}")

    def finished(self, run: Run) -> None:
        """Print the results, and a sample of a model that was trained now."""
        if self.as_json:
            echo(json.dumps(results_of(run.files)))
        if self.as_json or self.quiet:
            return
        if run.loop is None:
            echo(f"{run.folder} is finished; more --steps or --epochs continue it,")
            echo("and another --out starts a new run\n")
        report(run.files)
        if run.loop is not None and run.loop.method.head is None:
            with run.loop.stop.interruptible_block("the sample"):
                sample(run.loop)
        what_follows(run.files)

    def close(self) -> None:
        """Print the profile, also of a run that an error has ended."""
        if self.profiled is not None:
            self.profiled.report()

    def _print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.printed = time.monotonic()
        if self.terminal:
            self.bar.write(text, file=sys.stderr)
        else:
            self.announce(text)


def duration(seconds: float) -> str:
    """Return a time in words: 42 s, 3:05 min, 2:15 h."""
    whole, unit = round(seconds), "min"
    if whole < MINUTE:
        return f"{whole} s"
    if whole >= MINUTE**2:
        whole, unit = round(whole / MINUTE), "h"
    return f"{whole // MINUTE}:{whole % MINUTE:02d} {unit}"


def measured(line: dict[str, Any], kind: str = "") -> str:
    """Return in words what a line says of answers."""
    values = ((name, line.get(kind + name)) for name in SHOWN)
    known = ((n, f"{v:.3f}" if isinstance(v, float) else v) for n, v in values if v is not None)
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in known)


def _mean(mean: float | None, new: float) -> float:
    """Return a running mean with a new value; None: there was no value before."""
    return new if mean is None else (1 - NEWEST) * mean + NEWEST * new
