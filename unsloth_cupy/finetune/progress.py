"""Shows the progress of a run: a bar on a terminal, or a line from time to time elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from ..machine import format_bytes

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BEFORE_A_BAR = 1.0
PieceT = TypeVar("PieceT", bound=tuple[Any, ...])
NEWEST = 0.1  # weight of the newest step in the running means of loss and speed


class Progress:
    """Prints the lines of the log to standard error; a bar only if that is a terminal."""

    def __init__(self, step: int, steps: int) -> None:
        from tqdm import tqdm

        self.steps, self.terminal = steps, sys.stderr.isatty()
        self.bar = tqdm(
            total=steps, initial=step, unit=" steps", disable=not self.terminal, dynamic_ncols=True
        )
        self.loss: float | None = None
        self.speed: float | None = None
        self.printed = 0.0

    def __enter__(self) -> "Progress":
        """Show the bar."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar where it is."""
        self.bar.close()

    def step(self, line: dict[str, Any]) -> None:
        """Show one step."""
        self.loss = _mean(self.loss, line["loss"])
        speed = line["tokens_per_second"]
        self.speed = self.speed if speed is None else _mean(self.speed, speed)
        pace = "" if self.speed is None else f", {self.speed:.0f} tokens/s"
        now = f"loss {self.loss:.3f}{pace}, process {format_bytes(line['memory_bytes'])}"
        if self.terminal:
            self.bar.set_postfix_str(now, refresh=False)
            self.bar.update()
        elif time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self._print(f"step {line['step']}/{self.steps}: {now}")

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show one evaluation."""
        self._print(
            f"step {line['step']}/{self.steps}: held-out loss {line['held_out_loss']:.3f}"
            f" (unigram baseline {line['unigram_baseline']:.3f})"
        )

    def _print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.printed = time.monotonic()
        if self.terminal:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _mean(mean: float | None, new: float) -> float:
    """Return a running mean with a new value; None: there was no value before."""
    return new if mean is None else (1 - NEWEST) * mean + NEWEST * new


def reading(pieces: Iterable[PieceT], size: int, what: str) -> Iterator[PieceT]:
    """Yield pieces, tuples that start with bytes; show the progress if it takes longer than 1 s.

    ``size`` is the total number of bytes, ``what`` the label of the bar.
    """
    from tqdm import tqdm

    terminal, done, began = sys.stderr.isatty(), 0, time.monotonic()
    printed = began
    with tqdm(
        total=size, desc=what, unit="B", unit_scale=True, disable=not terminal, leave=False,
        delay=SECONDS_BEFORE_A_BAR, dynamic_ncols=True,
    ) as bar:  # fmt: skip
        for piece in pieces:
            yield piece
            done += len(piece[0])
            bar.update(len(piece[0]))
            now = time.monotonic()
            if not terminal and now - printed > SECONDS_BETWEEN_LINES:
                printed, speed = now, format_bytes(done / (now - began))
                share = f"{format_bytes(done)} of {format_bytes(size)}"
                print(f"{what}: {share}, {speed}/s", file=sys.stderr, flush=True)
