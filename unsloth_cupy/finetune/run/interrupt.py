"""Stops a run on Ctrl-C or SIGTERM, and says at once what the run is waiting for.

A separate thread says it: Python calls a signal handler only when the running call has
returned, and a product of large matrices takes long.  Work that changes no weights or files is
abandoned at once; an update of weights or the writing of a file is finished first.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The handler waits no longer for the message: the thread that says it may need a lock that the
# interrupted code holds.
SECONDS_TO_SAY = 1.0


class Interrupted(KeyboardInterrupt):
    """The run received Ctrl-C or SIGTERM."""


class Stop:
    """Whether a run was requested to stop, and what it is doing.

    Attributes
    ----------
    signal : int or None
        The signal of the request; None: there was none.
    announcement : threading.Event
        Set when the message about the request is announced.
    doing : str
        The current work, which a request abandons or waits for.
    interruptible : bool
        Whether a request abandons the current work.
    together : bool
        Whether the run has several ranks: a request then takes effect where all of them stop.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.announcement = threading.Event()
        self.doing, self.interruptible, self.together = "the preparation", True, False

    def check(self) -> None:
        """Raise if the run was requested to stop."""
        if self.signal is not None and not self.together:
            raise Interrupted

    @contextmanager
    def interruptible_block(self, doing: str) -> Iterator[None]:
        """Let a request abandon a ``with`` block, which must not change weights or files."""
        self.doing, self.interruptible = doing, not self.together
        try:
            self.check()
            yield
        finally:
            self.interruptible = False

    def uninterruptible(self, doing: str) -> None:
        """Set the work that a request waits for from now on."""
        self.doing, self.interruptible = doing, False

    def request(self, number: int) -> None:
        """Record a request; raise if the current work is interruptible."""
        first, self.signal = self.signal is None, number
        if first and self.interruptible:
            raise Interrupted

    def message(self, number: int) -> str:
        """Return the message that says what the run does on a request."""
        how = "leaves" if self.interruptible else "waits for"
        name = signal.Signals(number).name
        return f"\n{name} {how} {self.doing}; once more ends the program as it is"


@contextmanager
def stop_request(announce: Callable[[str], None]) -> Iterator[Stop]:
    """Yield a Stop, on which the first Ctrl-C or SIGTERM is a request; a second ends the program.

    ``announce`` is called in another thread with what the run does on a request.  In a thread other
    than the main thread, signals are not handled.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, _: object) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop.announcement.wait(SECONDS_TO_SAY)
        stop.request(number)

    def tell() -> None:
        while data := receiver.recv(1):
            if data[0] in SIGNALS:
                announce(stop.message(data[0]))
                stop.announcement.set()
                return

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    watcher = threading.Thread(target=tell, daemon=True)
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
