"""A watchdog thread that ends the process if an exchange on a GPU does not finish in time.

A kernel of NCCL waits for other ranks without a limit, and so does the host when it reads a
result.  The process ends because results computed after an aborted exchange must not be saved.
"""

import os
import sys
import threading
import time
from collections import deque
from typing import Any

from ..core.gpu import cupy
from ..errors import printable

PAUSE = 0.1  # seconds between checks


class Watchdog:
    """The exchanges of one NCCL communicator that were launched and have not finished."""

    def __init__(self, rank: int, timeout: float, comm: Any, agreed: bool) -> None:
        self.rank, self.timeout, self.comm = rank, timeout, comm
        self.agreed = agreed  # whether the hosts compare a call before it is launched
        self.device = cupy().cuda.runtime.getDevice()
        self.waiting: deque[tuple[Any, str]] = deque()  # (event after a call, the call)
        self.since = 0.0  # time since when the oldest call waits
        self.thread: threading.Thread | None = None

    def watch(self, call: str) -> None:
        """Record a call that was launched on the current stream, unless a graph captures it."""
        cuda = cupy().cuda
        stream = cuda.get_current_stream()
        if cuda.runtime.streamIsCapturing(stream.ptr):
            return
        event = cuda.Event(disable_timing=True)
        event.record(stream)
        self.since = self.since if self.waiting else time.monotonic()
        self.waiting.append((event, call))
        if self.thread is None:
            self.thread = threading.Thread(target=self._look, daemon=True)
            self.thread.start()

    def failed(self, rank: int, why: str) -> None:
        """End the process because another rank has failed."""
        self._end(f"rank {rank} has failed: {why}")

    def _look(self) -> None:
        """Check for overdue calls forever; the body of the thread."""
        with cupy().cuda.Device(self.device):
            while True:
                self.look()
                time.sleep(PAUSE)

    def look(self) -> None:
        """Remove finished calls; end the process if a call is overdue."""
        while self.waiting and self.waiting[0][0].done:
            self.waiting.popleft()
            self.since = time.monotonic()
        if self.waiting and time.monotonic() - self.since > self.timeout:
            cure = "a communicator with a host and checked=True names the late rank"
            if self.agreed:
                cure = "all ranks made this call: a GPU is busy or has failed; see what they print"
            self._end(f"{self.waiting[0][1]} waited {self.timeout:g} s for other ranks; {cure}")

    def _end(self, problem: str) -> None:
        """Print the problem, abort NCCL and end the process."""
        print(printable(f"rank {self.rank}: {problem}"), file=sys.stderr, flush=True)
        self.comm.abort()
        os._exit(1)
