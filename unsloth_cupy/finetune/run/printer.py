"""Prints a run: messages and progress to standard error, results to standard output.

Progress is a bar on a terminal, otherwise a line every 10 seconds.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

from ...errors import printable
from ...machine import echo, format_bytes, in_notebook
from ..listener import Listener
from ..naming import named
from .curve import draw_curve
from .results import print_next_commands, report, sample
from .routing import draw_routing

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BEFORE_A_BAR = 1.0
SHOWN = (  # measures of a method that progress lines show
    *("reward", "accuracy", "margin", "f1", "mrr", "error", "kl"),
    *("entropy", "ratio", "clipped", "length", "expert_load", "idle_experts"),
)
MINUTE = 60
SAMPLE_ENDINGS = "without the sample; the model is saved", "after the sample; the model is saved"
NEWEST = 0.1  # weight of the newest step in the running means of loss and speed


class Printer(Listener):
    """Prints the messages, progress and results of a run; if it is quiet, only errors.

    In a notebook everything goes to standard output, because notebooks show standard error as an
    error.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet, self.err = quiet, not in_notebook()
        terminal = not self.err or getattr(sys.stderr, "isatty", bool)()
        self.terminal = terminal and not quiet and find_spec("tqdm") is not None
        self.bar: Any = None  # progress bar of training
        self.steps = 0
        self.first: float | None = None  # evaluation loss before training
        self.began_at, self.first_step, self.of_new_model = 0.0, 0, True
        self.loss: float | None = None
        self.speed: float | None = None
        self.printed = 0.0

    def announce(self, text: str) -> None:
        """Print a message."""
        if not self.quiet:
            echo(text, err=self.err)

    def reading(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how much of a file is read, if reading takes longer than 1 s."""
        return self._counting(what, size, "B", format_bytes)

    def computing(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how many tokens are computed, if the computation takes longer than 1 s."""
        return self._counting(what, size, " tokens", lambda count: f"{count:,.0f} tokens")

    @contextmanager
    def _counting(
        self, what: str, size: int, unit: str, shown: Callable[[float], str]
    ) -> Iterator[Callable[[int], None]]:
        what = printable(what)
        done, began = 0, time.monotonic()
        printed = began
        form = {"unit": unit, "unit_scale": True, "leave": False, "delay": SECONDS_BEFORE_A_BAR}
        with self._bar(total=size, desc=what, **form) as bar:

            def read(count: int) -> None:
                nonlocal done, printed
                done += count
                if bar is not None:
                    bar.update(count)
                now = time.monotonic()
                if not (self.terminal or self.quiet) and now - printed > SECONDS_BETWEEN_LINES:
                    printed, speed = now, shown(done / (now - began))
                    share = f"{shown(done)} of {shown(size)}"
                    echo(f"{what}: {share}, {speed}/s", err=self.err)

            yield read

    def prepared(self, run: Any) -> None:
        """Read the first evaluation loss from the log of a resumed run."""
        if run.loop is not None and run.loop.ranks.first:
            self.of_new_model = run.files.of_new_model
            evaluations = (line.get("held_out_loss") for line in run.files.lines())
            self.first = next(filter(None, evaluations), None)

    def began(self, step: int, steps: int) -> None:
        """Show the bar."""
        self.steps, self.began_at, self.first_step = steps, time.monotonic(), step
        if self.terminal:
            self.bar = self._bar(total=steps, initial=step, unit=" steps")

    def step(self, line: dict[str, Any]) -> None:
        """Show one step."""
        self.loss = _mean(self.loss, line["loss"])
        speed = line["tokens_per_second"]
        self.speed = self.speed if speed is None else _mean(self.speed, speed)
        pace = "" if self.speed is None else f", {self.speed:,.0f} tokens/s"
        now = f"loss {self.loss:.3f}{measured(line)}{pace}"
        now += f", process memory {format_bytes(line['memory_bytes'])}"
        if self.terminal:
            self.bar.set_postfix_str(now, refresh=False)
            self.bar.update()
        elif time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            done = line["step"] - self.first_step
            left = (time.monotonic() - self.began_at) / done * (self.steps - line["step"])
            self._print(f"step {line['step']}/{self.steps}: {now}, {duration(left)} left")

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show one evaluation."""
        text = f"step {line['step']}/{self.steps}: evaluation loss {line['held_out_loss']:.3f}"
        if self.of_new_model and "unigram_baseline" in line:
            text += f" (unigram baseline {line['unigram_baseline']:.3f})"
        text += measured(line, "held_out_")
        if self.first is None:
            self.first = line["held_out_loss"]
        elif not self.of_new_model or "unigram_baseline" not in line:
            text += f" (initially {self.first:.3f})"
        self._print(text)

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Show a sample."""
        self._print(f"step {step}/{self.steps}: sample {prompt!r} -> {text!r}")

    def ended(self, run: Any) -> None:
        """Close the bar, and draw the loss curve."""
        if self.bar is not None:
            self.bar.close()
        lines = run.files.lines()
        if lines and run.loop is not None and run.loop.ranks.first:
            try:
                draw_curve(run.files.curve, lines, run.name)
                path = run.files.routing
                if path.exists() and (routes := [*run.files.beside(path)]):
                    draw_routing(run.files.routing_picture, routes, run.name)
            except Exception as error:  # matplotlib may fail: the model must still be saved
                self.announce(f"could not draw the plots in {run.folder}: {error}")

    def finished(self, run: Any) -> None:
        """Print the results, and a sample if this call trained the model."""
        if self.quiet:
            return
        if run.loop is None:
            echo(f"the run in {run.folder} is finished")
            more = f"to continue it, increase {named('steps')} or {named('epochs')}"
            echo(f"{more}; to start a new run, change {named('out')}\n")
        if find_spec("rich") is None:
            echo(run)
        else:
            report(run.files)
        if run.loop is not None and run.loop.method.head is None:
            with run.loop.stop.interruptible_block(*SAMPLE_ENDINGS):
                sample(run.loop)
        print_next_commands(run.files, err=self.err)

    def _bar(self, **options: Any) -> Any:
        """Return a tqdm bar on a terminal or in a notebook; elsewhere a context of None."""
        if not self.terminal:
            return nullcontext()
        with warnings.catch_warnings(
            action="ignore"
        ):  # tqdm warns in a notebook without ipywidgets
            from tqdm.auto import tqdm
        return tqdm(file=sys.stderr if self.err else sys.stdout, dynamic_ncols=True, **options)

    def _print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.printed = time.monotonic()
        if self.terminal:
            self.bar.write(text, file=sys.stderr if self.err else sys.stdout)
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
    """Return in words the measures of a method in a line."""
    values = ((name, line.get(kind + name)) for name in SHOWN)
    known = ((n, f"{v:.3f}" if isinstance(v, float) else v) for n, v in values if v is not None)
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in known)


def _mean(mean: float | None, new: float) -> float:
    """Return the running mean after a new value; ``mean`` is None before the first value."""
    return new if mean is None else (1 - NEWEST) * mean + NEWEST * new
