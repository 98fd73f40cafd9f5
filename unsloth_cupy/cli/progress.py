"""How far a run has come: a bar on a terminal, now and then a line in a log."""

import sys
import time
from types import TracebackType
from typing import Any

from ..memory import format_bytes

SECONDS_BETWEEN_LINES = 10.0
NEWEST = 0.1  # weight of the newest step in the loss and the speed that are shown


class Progress:
    """Says on standard error what the log says; control characters go to a terminal only."""

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
        self.speed = _mean(self.speed, line["tokens_per_second"])
        memory = format_bytes(line["memory_bytes"])
        now = f"loss {self.loss:.3f}, {self.speed:.0f} tokens/s, process {memory}"
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
        self.printed = time.monotonic()
        if self.terminal:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _mean(mean: float | None, new: float) -> float:
    return new if mean is None else (1 - NEWEST) * mean + NEWEST * new
