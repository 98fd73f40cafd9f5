"""TCP connections between all pairs of processes, each with a thread that receives messages.

If a process ends with an error, it sends a failure to all others, and they end too.  They also end
if a connection closes without a farewell, transmits an invalid message, or loses its machine.
"""

import atexit
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import CommunicationError, printable

HEAD = struct.Struct("!QHH")  # bytes of the message, bytes of its key, kind of message
CHECK = struct.Struct("!I")  # CRC-32 of the head, which follows the head
DATA, FAREWELL, FAILURE = range(3)  # kinds of messages
GRACE = 0.5  # seconds in which this process can print its own error before it ends
STEP = 2**26  # most bytes that are allocated for a message before they arrive
SHORT = 2**14  # a message of at most this many bytes is copied, to send it together with its head
SILENT = 25  # seconds after which a connection is lost if its machine or the cable fails
# If it is idle: after 4 unanswered probes.  If data is on its way: TCP_USER_TIMEOUT, in ms.
ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
ALIVE["TCP_USER_TIMEOUT"] = 1000 * SILENT
PAUSE = 0.05  # seconds between attempts to connect
LOST = "its connection ended"


class Peers:
    """The connections of this process to all others, and the received messages, by key."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.links: dict[int, socket.socket] = {}
        self.hosts: dict[int, str] = {}  # the address of each rank's machine
        self.arrival: dict[int, float] = {}  # the time at which the last bytes of a rank arrived
        self.inbox: dict[tuple[int, str], deque[np.ndarray]] = defaultdict(deque)
        self.gone: dict[int, str] = {}  # why each rank's connection ended; "" after a farewell
        self.on_failure: Callable[[int, str], None] | None = None  # None: not all are connected
        self.misfit: CommunicationError | None = None  # why these ranks cannot form a run
        self.changed = threading.Condition()
        self.sending = threading.Lock()
        self.failing, self.before = False, sys.excepthook

    def add(self, other: int, link: socket.socket) -> None:
        """Start to receive the messages of a rank."""
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            with suppress(AttributeError, OSError):  # each operating system has some of them
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self.changed:
            self.links[other], self.arrival[other] = link, time.monotonic()
            self.hosts[other] = "".join(link.getpeername()[:1])
            self.changed.notify_all()
        threading.Thread(target=self._receive, args=(other, link), daemon=True).start()

    def start(self) -> None:
        """From now on, when all are connected, end all ranks if one of them fails."""
        sys.excepthook = self._fail
        atexit.register(self.leave)
        with self.changed:
            self.on_failure, failed = self._end, self.failed()
        if failed:
            self._end(*failed)

    def close(self) -> None:
        """Close all connections without a farewell; other ranks treat this as a failure."""
        for link in self.links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def wait_for(self, ranks: set[int], limit: float) -> set[int]:
        """Wait until these ranks are connected; return the ranks that are missing at the limit.

        Raises
        ------
        CommunicationError
            The connection of a rank has ended.
        """
        with self.changed:
            while (missing := ranks - self.links.keys()) and (left := limit - time.monotonic()) > 0:
                self.check()
                self.changed.wait(left)
        return missing

    def check(self) -> None:
        """Raise CommunicationError if ranks cannot form a run, or one has ended during setup."""
        if self.misfit is not None:
            raise self.misfit
        if failed := self.failed():
            problem = f"rank {self.rank}: rank {failed[0]} ended before all ranks were connected"
            cure = "see what the others printed"
            raise CommunicationError(f"{problem}: {failed[1]}; {cure}", rank=failed[0])

    def send(self, to: int, key: str, data: Any) -> None:
        """Send bytes to a rank, whose thread receives them immediately."""
        name, view = key.encode(), memoryview(data).cast("B")
        head = head_of(len(view), len(name), DATA) + name
        try:
            with self.sending:
                if len(view) <= SHORT:
                    self.links[to].sendall(head + view)
                else:
                    self.links[to].sendall(head)
                    self.links[to].sendall(view)
        except OSError as error:
            self._lost(to, self._reason(to, error))

    def take(self, source: int, key: str, limit: float) -> np.ndarray | None:
        """Return the next message of a rank; None after the time limit, or if the rank is gone."""
        with self.changed:
            queue = self.inbox[source, key]
            while not queue:
                left = limit - time.monotonic()
                if left <= 0 or source in self.gone:
                    return None
                self.changed.wait(left)
            return queue.popleft()

    def failed(self) -> tuple[int, str] | None:
        """Return the first rank that ended with an error, and the error; None if none did."""
        with self.changed:
            return next(((rank, why) for rank, why in self.gone.items() if why), None)

    def is_reported(self, rank: int, why: str) -> bool:
        """Return whether another rank prints a failure, so that this one need not.

        The failed rank prints it.  If its connection was lost, rank 0 prints it, or rank 1 if the
        lost rank is 0.
        """
        return not why.startswith(LOST) or self.rank != (rank == 0)

    def silence(self, rank: int) -> str:
        """Return for how long nothing has arrived from a rank, and the host of the rank."""
        seconds = time.monotonic() - self.arrival[rank]
        return f"nothing arrived from its host {self.hosts[rank]} for {seconds:.0f} s"

    def _reason(self, rank: int, error: Exception) -> str:
        """Return why the connection of a rank ended."""
        is_silent = time.monotonic() - self.arrival[rank] > SILENT - 5  # timers are coarse
        if isinstance(error, TimeoutError) or (isinstance(error, OSError) and is_silent):
            return f"{LOST}: {self.silence(rank)}; its process or the network may be gone"
        return f"{LOST} (host {self.hosts[rank]})"

    def leave(self) -> None:
        """Send a farewell to all others, unless an error ends this process."""
        if not self.failing:
            self._send_to_all(FAREWELL, "")

    def abandon(self, error: BaseException) -> None:
        """Send an error of the setup to all ranks that are connected, and close all connections."""
        self._send_to_all(FAILURE, f"{type(error).__name__}: {error}")
        self.close()

    def _fail(self, *error: Any) -> None:
        """Print an uncaught error, and send it to all others."""
        self.failing = True
        try:
            if error[2] is None:  # an error without a traceback: print its message alone
                why = printable(str(error[1]))
                print(f"rank {self.rank} failed: {why}", file=sys.stderr, flush=True)
            else:
                self.before(*error)
        finally:
            self._send_to_all(FAILURE, f"{error[0].__name__}: {error[1]}")

    def _send_to_all(self, kind: int, text: str) -> None:
        """Send a message of this kind to all others; ignore closed connections."""
        data = text.encode()
        for link in self.links.values():
            with suppress(OSError):
                link.sendall(head_of(len(data), 0, kind) + data)

    def _end(self, rank: int, why: str) -> None:
        """End the process, which may be waiting for the failed rank."""
        time.sleep(GRACE)
        if not self.failing:
            problem = printable(f"rank {rank} has failed: {why}")
            print(f"rank {self.rank}: {problem}", file=sys.stderr, flush=True)
        os._exit(1)

    def _receive(self, other: int, link: socket.socket) -> None:
        """Receive the messages of a rank until its connection ends; runs in a thread."""

        def progress() -> None:
            self.arrival[other] = time.monotonic()

        try:
            while True:
                head = bytes(received(link, HEAD.size + CHECK.size, progress=progress))
                size, named, kind = HEAD.unpack_from(head)
                if head != head_of(size, named, kind):
                    raise ConnectionResetError
                key = bytes(received(link, named)).decode()
                data = received(link, size, progress=progress)
                if kind != DATA:
                    self._lost(other, bytes(data).decode())
                    return
                with self.changed:
                    self.inbox[other, key].append(data)
                    self.changed.notify_all()
                del data  # otherwise it stays in memory until the next message arrives
        except (OSError, ValueError, MemoryError) as error:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # so that the other end fails now, too
            self._lost(other, self._reason(other, error))

    def _lost(self, other: int, why: str) -> None:
        """Record that a rank is gone; call ``on_failure`` once for each failed rank."""
        with self.changed:
            first = other not in self.gone
            self.gone.setdefault(other, why)
            act = self.on_failure
            self.changed.notify_all()
        if first and why and act and not self.failing:
            act(other, why)


def head_of(size: int, named: int, kind: int) -> bytes:
    """Return the head of a message, followed by the checksum of the head."""
    head = HEAD.pack(size, named, kind)
    return head + CHECK.pack(zlib.crc32(head))


def received(
    link: socket.socket,
    size: int,
    limit: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Return exactly ``size`` bytes; raise OSError if the connection or the time ends before.

    ``progress`` is called whenever bytes arrive.  The result is an array, which memory pools count.

    Memory beyond STEP bytes is allocated as bytes arrive, whatever size the other end claims.
    """
    data, filled = np.empty(min(size, STEP), np.uint8), 0
    while filled < size:
        if filled == len(data):
            data.resize(filled + min(size - filled, filled), refcheck=False)
        if limit is not None:
            link.settimeout(max(0.0, limit - time.monotonic()))
        with data.data as view:
            count = link.recv_into(view[filled:])
        if not count:
            raise ConnectionResetError
        filled += count
        progress()
    return data
