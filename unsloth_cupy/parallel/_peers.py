"""Connections between processes: every pair has one, and a thread that hears what comes.

A process that ends with an error tells the others, and they end; so they do where a connection
ends without a farewell.
"""

import atexit
import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..errors import CommunicationError

HEAD = struct.Struct("!QHH")  # bytes of a message, of its key, and how it is meant
DATA, FAREWELL, FAILURE = range(3)
GRACE = 0.5  # seconds for an error that this process knows of to be printed
PAUSE = 0.05  # seconds between attempts to reach rank 0
HELLO = 30.0  # seconds in which who calls says its rank
MOST = 2**24  # bytes that ranks tell each other before all have met
LOST = "its connection ended"


class Peers:
    """The connections of this process to all others, and what came over them, by key."""

    def __init__(self, rank: int, links: dict[int, socket.socket]) -> None:
        self.rank, self.links = rank, links
        self.came: dict[tuple[int, str], deque[bytes]] = defaultdict(deque)
        self.gone: dict[int, str] = {}  # ranks whose connection ended, and why; "" as they said
        self.on_failure: Callable[[int, str], None] = self._end
        self.news = threading.Condition()
        self.sending = threading.Lock()
        for other, link in links.items():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._hear, args=(other, link), daemon=True).start()
        self.failing, self.before = False, sys.excepthook
        sys.excepthook = self._fail
        atexit.register(self.leave)

    def send(self, to: int, key: str, data: Any) -> None:
        """Send bytes to a rank, which hears them at once."""
        name, view = key.encode(), memoryview(data).cast("B")
        try:
            with self.sending:
                self.links[to].sendall(HEAD.pack(len(view), len(name), DATA) + name)
                self.links[to].sendall(view)
        except OSError:
            self._lost(to, LOST)

    def take(self, source: int, key: str, limit: float) -> bytes | None:
        """Return the next message of a rank; None where it does not come in time, or is gone."""
        with self.news:
            queue = self.came[source, key]
            while not queue:
                left = limit - time.monotonic()
                if left <= 0 or source in self.gone:
                    return None
                self.news.wait(left)
            return queue.popleft()

    def failed(self) -> tuple[int, str] | None:
        """Return the first rank that ended with an error, and the error."""
        with self.news:
            return next(((rank, why) for rank, why in self.gone.items() if why), None)

    def tells(self, rank: int, why: str) -> bool:
        """Say whether another rank prints it that one has failed: itself, or the first one left."""
        return why != LOST or self.rank != (rank == 0)

    def leave(self) -> None:
        """Say farewell, unless an error ends this process."""
        if not self.failing:
            self._say(FAREWELL, "")

    def _fail(self, *error: Any) -> None:
        """Print an error that nobody catches, and tell all others."""
        self.failing = True
        try:
            if error[2] is None:  # a message is all that there is to it
                print(f"rank {self.rank} failed: {error[1]}", file=sys.stderr, flush=True)
            else:
                self.before(*error)
        finally:
            self._say(FAILURE, f"{error[0].__name__}: {error[1]}")

    def _say(self, kind: int, text: str) -> None:
        data = text.encode()
        for link in self.links.values():
            try:
                link.sendall(HEAD.pack(len(data), 0, kind) + data)
            except OSError:
                continue

    def _end(self, rank: int, why: str) -> None:
        """End the process, which may wait for that rank, or compute in vain."""
        time.sleep(GRACE)
        if not self.failing:
            print(f"rank {self.rank}: rank {rank} has failed: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    def _hear(self, other: int, link: socket.socket) -> None:
        try:
            while True:
                size, named, kind = HEAD.unpack(received(link, HEAD.size))
                key = received(link, named).decode()
                data = received(link, size)
                if kind != DATA:
                    self._lost(other, data.decode())
                    return
                with self.news:
                    self.came[other, key].append(data)
                    self.news.notify_all()
        except OSError:
            self._lost(other, LOST)

    def _lost(self, other: int, why: str) -> None:
        with self.news:
            first = other not in self.gone
            self.gone.setdefault(other, why)
            self.news.notify_all()
        if first and why and not self.failing:
            self.on_failure(other, why)


def connected(
    rank: int, size: int, address: str, port: int, timeout: float
) -> dict[int, socket.socket]:
    """Return a connection to every other rank, by its number."""
    links: dict[int, socket.socket] = {}
    try:
        meet(links, rank, size, address, port, time.monotonic() + timeout)
    except (OSError, CommunicationError) as error:
        for link in links.values():
            link.close()
        if isinstance(error, CommunicationError):
            raise
        problem = f"rank {rank}: a connection ended before all {size} ranks had met ({error})"
        raise CommunicationError(f"{problem}; see what the others printed") from error
    return links


def meet(
    links: dict[int, socket.socket], rank: int, size: int, address: str, port: int, limit: float
) -> None:
    """Listen, call who listens, hear who calls; rank 0 tells the others where each one listens."""
    with listening(rank, port if rank == 0 else 0, size) as door:
        if rank == 0:
            accept(links, door, range(1, size), limit)
            places = [(r, links[r].getpeername()[0], told(links[r])) for r in sorted(links)]
        else:
            links[0] = reached(address, port, rank, limit)
            tell(links[0], door.getsockname()[1])
            for other, host, own in told(links[0])[: rank - 1]:
                links[other] = reached(host, own, rank, limit)
            accept(links, door, range(rank + 1, size), limit)
    if rank == 0:  # who is told may be done and meet anew at this port: nobody listens any more
        for link in links.values():
            tell(link, places)


def listening(rank: int, port: int, size: int) -> socket.socket:
    """Return a socket at which others call, at any free port for 0."""
    try:
        return socket.create_server(("", port), backlog=size)
    except OSError as error:
        problem = f"rank {rank} cannot listen at port {port} ({error.strerror})"
        raise CommunicationError(f"{problem}; set another MASTER_PORT", rank=rank) from error


def reached(address: str, port: int, rank: int, limit: float) -> socket.socket:
    """Return a connection to who listens there, tried until the limit, and say who calls."""
    while True:
        try:
            link = socket.create_connection((address, port), max(PAUSE, limit - time.monotonic()))
        except OSError as error:
            if time.monotonic() > limit:
                problem = f"rank {rank}: nobody listens at {address}:{port} ({error})"
                cure = "see whether rank 0 was started, and MASTER_ADDR"
                raise CommunicationError(f"{problem}; {cure}", rank=0) from error
            time.sleep(PAUSE)
        else:
            link.settimeout(None)
            tell(link, rank)
            return link


def accept(
    links: dict[int, socket.socket], door: socket.socket, ranks: range, limit: float
) -> None:
    """Add the connections of ranks that call, by their numbers; strangers are not heard."""
    while missing := [rank for rank in ranks if rank not in links]:
        door.settimeout(max(PAUSE, limit - time.monotonic()))
        try:
            link, _ = door.accept()
        except TimeoutError as error:
            known = ", ".join(str(rank) for rank in ranks if rank in links) or "nobody"
            problem = f"rank {ranks.start - 1}: {len(ranks)} ranks were to call, and {known} did"
            cure = f"see whether rank {missing[0]} was started"
            raise CommunicationError(f"{problem}; {cure}", rank=missing[0]) from error
        link.settimeout(HELLO)
        caller: Any = None
        with contextlib.suppress(OSError, ValueError, CommunicationError):
            caller = told(link)
        if caller in ranks:
            link.settimeout(None)
            links[caller] = link
        else:
            link.close()


def tell(link: socket.socket, what: Any) -> None:
    """Send numbers and names."""
    data = json.dumps(what).encode()
    link.sendall(HEAD.pack(len(data), 0, DATA) + data)


def told(link: socket.socket) -> Any:
    """Return what the other end tells."""
    size, *_ = HEAD.unpack(received(link, HEAD.size))
    if size > MOST:
        raise CommunicationError(f"{size} bytes are not a list of ranks; see who else calls here")
    return json.loads(received(link, size))


def received(link: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes, or raise OSError where the connection ends before."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = link.recv_into(view[filled:])
        if not count:
            raise ConnectionResetError
        filled += count
    return bytes(data)
