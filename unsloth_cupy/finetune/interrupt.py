"""How a run that is asked to stop leaves what it does, and says so at once.

The signal is answered on a thread of its own, since Python calls no handler before the call that
runs has returned, and a product of large matrices takes long.  Work that changes nothing that is
kept is left where it stands; the rest, an update of weights or a file, is finished first.
"""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_TO_SAY = 1.0  # that a handler waits for the other thread, which may wait for a lock of ours


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came."""


class Stop:
    """Whether a run is asked to stop, and what it does meanwhile.

    Attributes
    ----------
    signal : int or None
        What asked.
    doing : str
        What is left, or finished first.
    together : bool
        Whether other processes wait for what this one does: it stops where all of them do.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.told = threading.Event()
        self.doing, self.leavable, self.together = "the preparation", True, False

    def check(self) -> None:
        """Raise if the run is asked to stop."""
        if self.signal is not None and not self.together:
            raise Interrupted

    @contextmanager
    def leaving(self, doing: str) -> Iterator[None]:
        """Let a request end a ``with`` block at once: nothing that is kept changes inside."""
        self.doing, self.leavable = doing, not self.together
        try:
            self.check()
            yield
        finally:
            self.leavable = False

    def finishing(self, doing: str) -> None:
        """Say what a request waits for from now on."""
        self.doing, self.leavable = doing, False

    def asked(self, number: int) -> None:
        """Take a request: end the block that may be left, or wait for its end."""
        first, self.signal = self.signal is None, number
        if first and self.leavable:
            raise Interrupted

    def said(self, number: int) -> str:
        """Return what a request does now."""
        how = "leaves" if self.leavable else "waits for"
        name = signal.Signals(number).name
        return f"\n{name} {how} {self.doing}; once more ends the program as it is"


@contextmanager
def stop_request() -> Iterator[Stop]:
    """Give a request that the first Ctrl-C or SIGTERM makes; the second ends the program."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, _: object) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop.told.wait(SECONDS_TO_SAY)
        stop.asked(number)

    def tell() -> None:
        while data := receives.recv(1):
            if data[0] in SIGNALS:
                print(stop.said(data[0]), file=sys.stderr, flush=True)
                stop.told.set()
                return

    receives, sends = socket.socketpair()
    sends.setblocking(False)
    watcher = threading.Thread(target=tell, daemon=True)
    watcher.start()
    woken = signal.set_wakeup_fd(sends.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        sends.close()
        watcher.join()
        receives.close()
