"""Stops a run on Ctrl-C or SIGTERM, and announces at once when the run will stop.

A separate thread announces it: Python calls a signal handler only when the running call has
returned, and a product of large matrices takes long.  Work that changes no weights or files is
abandoned at once; an update of weights or the writing of a file is finished first.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The handler waits no longer for the message: the thread that announces it may need a lock that
# the interrupted code holds.
SECONDS_TO_ANNOUNCE = 1.0


class Interrupted(KeyboardInterrupt):
    """The run received Ctrl-C or SIGTERM."""


class Stop:
    """The state of a stop request, and what a request does to the current work.

    Attributes
    ----------
    signal : int or None
        The signal of the request; None: there was none.
    announcement : threading.Event
        Set when the message about the request is announced.
    ending : str
        When a request stops the run, in words: "after step 3".
    interruptible : bool
        Whether a request abandons the current work.
    together : bool
        Whether the run has several ranks: a request then takes effect where all of them stop.
    saving : float
        Seconds to save the last step after the request.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.announcement = threading.Event()
        self.ending, self.interruptible, self.together = "before training", True, False
        self.saving = 0.0

    def check(self) -> None:
        """Raise if the run was requested to stop."""
        if self.signal is not None and not self.together:
            raise Interrupted

    @contextmanager
    def interruptible_block(self, abandoned: str, finished: str) -> Iterator[None]:
        """Let a request abandon a ``with`` block, which must not change weights or files.

        ``abandoned`` is the ``ending`` inside the block; ``finished`` is the one of several ranks,
        which finish the block.
        """
        self.ending = finished if self.together else abandoned
        self.interruptible = not self.together
        try:
            self.check()
            yield
        finally:
            self.interruptible = False

    def uninterruptible(self, ending: str) -> None:
        """Set the ``ending`` of work that a request does not abandon."""
        self.ending, self.interruptible = ending, False

    def request(self, number: int) -> None:
        """Record a request; raise if the current work is interruptible."""
        first, self.signal = self.signal is None, number
        if first and self.interruptible:
            raise Interrupted

    def message(self, number: int) -> str:
        """Return the message about a request: when the run stops, and how to quit at once."""
        again, name = "Press Ctrl-C again to quit", signal.Signals(number).name
        if number != signal.SIGINT:
            again = f"A second {name} quits"
        return f"\nStopping {self.ending}. {again} without saving."


@contextmanager
def stop_request(announce: Callable[[str], None]) -> Iterator[Stop]:
    """Yield a Stop.  The first Ctrl-C or SIGTERM is a request; a second one ends the program.

    On a request, another thread calls ``announce`` with the message.  Outside the main thread,
    signals are not handled.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, _: object) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop.announcement.wait(SECONDS_TO_ANNOUNCE)
        stop.request(number)

    def watch() -> None:
        while data := receiver.recv(1):
            if data[0] in SIGNALS:
                announce(stop.message(data[0]))
                stop.announcement.set()
                return

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        sender.close()
        watcher.join()
        receiver.close()
