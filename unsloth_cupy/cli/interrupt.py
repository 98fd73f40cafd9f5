"""How a run that is asked to stop finishes its step first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):  # noqa: N818 -- a request, no error
    """Ctrl-C came; the state is saved."""


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C sets; the second one ends the program at once."""
    stop = threading.Event()

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
