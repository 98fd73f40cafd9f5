"""Progress on standard error: a bar on a terminal, else a line every 2 seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..machine import echo

SECONDS_BETWEEN_LINES = 2.0
T = TypeVar("T")


def progress(
    items: Iterable[T], count: int, doing: str, named: Callable[[T], str] = str
) -> Iterator[T]:
    """Yield ``count`` items and show the progress; the first line is printed before any work."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, doing, count, console=Console(stderr=True), transient=True)
        return
    last_time = -SECONDS_BETWEEN_LINES
    for number, item in enumerate(items, 1):
        if (now := time.monotonic()) - last_time >= SECONDS_BETWEEN_LINES:
            last_time = now
            echo(f"{doing} {number} of {count}: {named(item)}", err=True)
        yield item
