"""TCP connections between all pairs of processes, each with a thread that receives messages.

A process that ends with an error tells the others, and they end too; they also end if a connection
closes without a farewell.
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

from ..errors import CommunicationError, printable

HEAD = struct.Struct("!QHH")  # bytes of a message, bytes of its key, kind of message
DATA, FAREWELL, FAILURE = range(3)
GRACE = 0.5  # seconds for this process to print its own error before it ends
PAUSE = 0.05  # seconds between attempts to connect
HELLO = 30.0  # time limit in seconds for a new connection to send its rank
MOST = 2**24  # largest message in bytes while ranks connect
LOST = "its connection ended"


class Peers:
    """The connections of this process to all others, and the messages received, by key."""

    def __init__(self, rank: int, links: dict[int, socket.socket]) -> None:
        self.rank, self.links = rank, links
        self.inbox: dict[tuple[int, str], deque[bytes]] = defaultdict(deque)
        self.gone: dict[int, str] = {}  # ranks whose connection ended, and why; "" after a farewell
        self.on_failure: Callable[[int, str], None] = self._end
        self.changed = threading.Condition()
        self.sending = threading.Lock()
        for other, link in links.items():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._hear, args=(other, link), daemon=True).start()
        self.failing, self.before = False, sys.excepthook
        sys.excepthook = self._fail
        atexit.register(self.leave)

    def send(self, to: int, key: str, data: Any) -> None:
        """Send bytes to a rank, whose thread receives them at once."""
        name, view = key.encode(), memoryview(data).cast("B")
        try:
            with self.sending:
                self.links[to].sendall(HEAD.pack(len(view), len(name), DATA) + name)
                self.links[to].sendall(view)
        except OSError:
            self._lost(to, LOST)

    def take(self, source: int, key: str, limit: float) -> bytes | None:
        """Return the next message of a rank; None after the time limit or if the rank is gone."""
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

    def tells(self, rank: int, why: str) -> bool:
        """Return whether another rank reports a failure: the failed one or the first that is left.

        A rank whose connection was lost cannot print; then rank 0 does, or rank 1 if it is rank 0.
        """
        return why != LOST or self.rank != (rank == 0)

    def leave(self) -> None:
        """Send all others a farewell, unless an error ends this process."""
        if not self.failing:
            self._say(FAREWELL, "")

    def _fail(self, *error: Any) -> None:
        """Print an uncaught error, and tell all others."""
        self.failing = True
        try:
            if error[2] is None:  # there is no traceback, only a message
                why = printable(str(error[1]))
                print(f"rank {self.rank} failed: {why}", file=sys.stderr, flush=True)
            else:
                self.before(*error)
        finally:
            self._say(FAILURE, f"{error[0].__name__}: {error[1]}")

    def _say(self, kind: int, text: str) -> None:
        """Send a message of this kind to all others; ignore closed connections."""
        data = text.encode()
        for link in self.links.values():
            try:
                link.sendall(HEAD.pack(len(data), 0, kind) + data)
            except OSError:
                continue

    def _end(self, rank: int, why: str) -> None:
        """End the process, which may be waiting for the failed rank."""
        time.sleep(GRACE)
        if not self.failing:
            problem = printable(f"rank {rank} has failed: {why}")
            print(f"rank {self.rank}: {problem}", file=sys.stderr, flush=True)
        os._exit(1)

    def _hear(self, other: int, link: socket.socket) -> None:
        """Receive the messages of a rank until its connection ends; runs in a thread."""
        try:
            while True:
                size, named, kind = HEAD.unpack(received(link, HEAD.size))
                key = received(link, named).decode()
                data = received(link, size)
                if kind != DATA:
                    self._lost(other, data.decode())
                    return
                with self.changed:
                    self.inbox[other, key].append(data)
                    self.changed.notify_all()
        except OSError:
            self._lost(other, LOST)

    def _lost(self, other: int, why: str) -> None:
        """Record that a rank is gone; the first time call ``on_failure``, if it was a failure."""
        with self.changed:
            first = other not in self.gone
            self.gone.setdefault(other, why)
            self.changed.notify_all()
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
    """Connect this rank to all others, and add the connections to links.

    All others connect to rank 0, which sends them the addresses at which each rank listens; then
    each rank connects to those of lower number.
    """
    with listening(rank, port if rank == 0 else 0, size) as listener:
        if rank == 0:
            accept(links, listener, range(1, size), limit)
            addresses = [
                (r, links[r].getpeername()[0], receive_json(links[r])) for r in sorted(links)
            ]
        else:
            links[0] = connect(address, port, rank, limit)
            send_json(links[0], listener.getsockname()[1])
            for other, host, own in receive_json(links[0])[: rank - 1]:
                links[other] = connect(host, own, rank, limit)
            accept(links, listener, range(rank + 1, size), limit)
    if rank == 0:  # the listener is closed first: a rank may finish now and reuse this port
        for link in links.values():
            send_json(link, addresses)


def listening(rank: int, port: int, size: int) -> socket.socket:
    """Return a socket that listens at a port; 0 stands for any free port."""
    try:
        return socket.create_server(("", port), backlog=size)
    except OSError as error:
        problem = f"rank {rank} cannot listen at port {port} ({error.strerror})"
        raise CommunicationError(f"{problem}; set another MASTER_PORT", rank=rank) from error


def connect(address: str, port: int, rank: int, limit: float) -> socket.socket:
    """Return a connection to an address, tried until the time limit, and send this rank."""
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
            send_json(link, rank)
            return link


def accept(
    links: dict[int, socket.socket], listener: socket.socket, ranks: range, limit: float
) -> None:
    """Add the connections of these ranks to links; connections of others are closed."""
    while missing := [rank for rank in ranks if rank not in links]:
        listener.settimeout(max(PAUSE, limit - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            known = ", ".join(str(rank) for rank in ranks if rank in links) or "nobody"
            problem = f"rank {ranks.start - 1}: {len(ranks)} ranks were to connect, and {known} did"
            cure = f"see whether rank {missing[0]} was started"
            raise CommunicationError(f"{problem}; {cure}", rank=missing[0]) from error
        link.settimeout(HELLO)
        caller: Any = None
        with contextlib.suppress(OSError, ValueError, CommunicationError):
            caller = receive_json(link)
        if caller in ranks:
            link.settimeout(None)
            links[caller] = link
        else:
            link.close()


def send_json(link: socket.socket, what: Any) -> None:
    """Send a value as JSON."""
    data = json.dumps(what).encode()
    link.sendall(HEAD.pack(len(data), 0, DATA) + data)


def receive_json(link: socket.socket) -> Any:
    """Return the value that the other end sent with ``send_json``."""
    size, *_ = HEAD.unpack(received(link, HEAD.size))
    if size > MOST:
        raise CommunicationError(f"{size} bytes are not a list of ranks; see who connects here")
    return json.loads(received(link, size))


def received(link: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes; raise OSError if the connection ends before."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = link.recv_into(view[filled:])
        if not count:
            raise ConnectionResetError
        filled += count
    return bytes(data)
