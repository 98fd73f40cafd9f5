"""Connection setup: rank 0 listens at its own address, and every pair proves a common key by HMAC.

    caller     hello = magic, its rank, world size, port at which it listens, 32 random bytes
    listener   challenge = 32 random bytes
    caller     HMAC-SHA256(key, rank of the listener, hello, challenge)
    listener   answer, HMAC-SHA256(key, rank of the listener, hello, challenge, answer)

All of these messages have fixed sizes, and the listener reads nothing else from a caller before its
proof.  Callers are served concurrently, each for a limited time.  Later messages are not encrypted.
"""

import errno
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from ..errors import CommunicationError
from ._authkey import AUTHKEY, authkey
from ._peers import PAUSE, Peers, received

HELLO = struct.Struct("!8sIIH32s")
MAGIC, RANDOM, PROOF = b"ranks\0\0\1", 32, 32
MET, REFUSED = b"\0", b"\1"  # answers
HELLO_LIMIT = 10.0  # seconds within which a caller must prove its key
CALLERS = 64  # most strangers served at a time besides ranks; with more, the oldest is dropped
TABLE = "table"  # key of the message with the addresses at which ranks listen
ONE_KEY = f"set {AUTHKEY} to the same secret in all ranks"


class Door:
    """A listening socket, with a thread that admits all ranks above this one."""

    def __init__(self, peers: Peers, size: int, key: bytes, host: str, port: int) -> None:
        self.peers, self.size, self.key, self.name = peers, size, key, host
        self.expected = set(range(peers.rank + 1, size))
        self.homes: dict[int, tuple[str, int]] = {}  # host and port at which each rank listens
        self.wrong = 0  # number of callers with another key
        self.listener = listening(peers.rank, host, port, CALLERS + size)
        self.host, self.port = self.listener.getsockname()[:2]
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._admit, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.closing.set()
        self.thread.join()

    def _admit(self) -> None:
        """Serve callers concurrently, and admit those that prove the key; the thread's body."""
        callers: dict[socket.socket, Caller] = {}
        with selectors.DefaultSelector() as selector, self.listener:
            selector.register(self.listener, selectors.EVENT_READ)
            while self.expected - self.homes.keys() and not self.closing.is_set():
                for ready, _ in selector.select(PAUSE):
                    link: Any = ready.fileobj
                    if link is not self.listener:
                        callers[link].read()
                        continue
                    with suppress(OSError):  # the caller has left, or too many files are open
                        link = self.listener.accept()[0]
                        callers[link] = Caller(link, self._answering(link))
                        selector.register(link, selectors.EVENT_READ)
                crowd = len(callers) - CALLERS - self.size
                for place, (link, caller) in enumerate([*callers.items()]):
                    if caller.ended or place < crowd or time.monotonic() > caller.limit:
                        selector.unregister(link)
                        del callers[link]
                        if caller.rank is None:
                            link.close()
                        else:
                            self.peers.add(caller.rank, link)
        for link in callers:
            link.close()

    def _answering(self, link: socket.socket) -> Generator[int, bytes, int]:
        """Yield the number of bytes to read next; return the caller's rank.

        Raise an OSError for a caller that is not an expected rank with the key.
        """
        hello = yield HELLO.size
        magic, rank, size, port, _ = HELLO.unpack(hello)
        if magic != MAGIC:
            raise ConnectionRefusedError
        challenge = os.urandom(RANDOM)
        link.sendall(challenge)
        known = hmac.compare_digest((yield PROOF), self._proof(hello, challenge))
        self.wrong += not known
        met = known and size == self.size and rank in self.expected - self.homes.keys()
        answer = MET if met else REFUSED
        link.sendall(answer + (self._proof(hello, challenge, answer) if known else bytes(PROOF)))
        if not met:
            raise ConnectionRefusedError
        self.homes[rank] = link.getpeername()[0], port
        return int(rank)

    def _proof(self, *messages: bytes) -> bytes:
        return proof(self.key, self.peers.rank, *messages)


class Caller:
    """A connection whose other end has not proved the key yet."""

    def __init__(self, link: socket.socket, steps: Generator[int, bytes, int]) -> None:
        link.setblocking(False)
        self.link, self.steps, self.size, self.message = link, steps, next(steps), b""
        self.limit = time.monotonic() + HELLO_LIMIT
        self.ended = False
        self.rank: int | None = None

    def read(self) -> None:
        """Read available bytes, but not beyond the end of the current message."""
        try:
            data = self.link.recv(self.size - len(self.message))
            self.message += data
            self.ended = not data
            if len(self.message) == self.size:
                self.size, self.message = self.steps.send(self.message), b""
        except StopIteration as end:
            self.ended, self.rank = True, end.value
        except OSError:
            self.ended = True


def meet(peers: Peers, size: int, host: str, port: int, timeout: float) -> None:
    """Connect this rank to all other ranks.

    All other ranks connect to rank 0, which sends them the addresses at which each rank listens.
    Then each rank connects to all lower ranks.

    Raises
    ------
    CommunicationError
        A rank did not connect in time, has another key, or has ended.
    """
    rank, limit, key = peers.rank, time.monotonic() + timeout, authkey()
    place = host, port
    if rank:  # listen at the address from which this machine reaches rank 0
        with reached(peers, 0, host, port, limit) as link:
            place = link.getsockname()[0], 0
    door = Door(peers, size, key, *place)
    try:
        if rank:
            call(door, 0, host, port, limit)
            table = peers.take(0, TABLE, limit)
            peers.check()
            if table is None:
                problem = f"rank {rank}: rank 0 did not send the addresses of other ranks in time"
                cure = "check that all ranks were started"
                raise CommunicationError(f"{problem}; {cure}", rank=0)
            for other, (home, at) in enumerate(map(str.split, table.decode().splitlines()), 1):
                if other < rank:
                    call(door, other, home, int(at), limit)
        if missing := peers.wait_for(door.expected, limit):
            raise late(door, missing)
    finally:
        door.close()
    if rank == 0:  # the listener is closed first: a rank may finish now and reuse this port
        lines = [f"{home} {at}" for _, (home, at) in sorted(door.homes.items())]
        for other in door.expected:
            peers.send(other, TABLE, "\n".join(lines).encode())


def late(door: Door, missing: set[int]) -> CommunicationError:
    """Return the error for ranks that did not connect in time."""
    known = ", ".join(map(str, sorted(door.expected - missing))) or "none"
    problem = f"rank {door.peers.rank}: {len(door.expected)} ranks should connect to"
    problem += f" {door.host}:{door.port}; connected: {known}"
    cure = f"check that rank {min(missing)} was started"
    if door.name not in (door.host, "localhost") and ip_address(door.host).is_loopback:
        cure += f"; MASTER_ADDR={door.name} is {door.host} here, which other machines cannot reach"
    if door.wrong:
        cure += f"; {door.wrong} callers had another key: {ONE_KEY}"
    return CommunicationError(f"{problem}; {cure}", rank=min(missing))


def listening(rank: int, host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at an address of this machine; port 0: any free port."""
    problem: OSError = OSError("no such host")
    try:
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                return socket.create_server(place, family=family, backlog=backlog)
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
    except OSError as error:  # the name is unknown
        problem = error
    cure = "set MASTER_ADDR to an address of rank 0"
    if problem.errno in (errno.EADDRINUSE, errno.EACCES):
        cure = "set another MASTER_PORT"
    message = f"rank {rank} cannot listen at {host}:{port} ({problem.strerror or problem}); {cure}"
    raise CommunicationError(message, rank=rank) from problem


def reached(peers: Peers, other: int, host: str, port: int, limit: float) -> socket.socket:
    """Return a connection to a rank, retrying until the time limit."""
    while True:
        peers.check()
        left = limit - time.monotonic()
        try:
            return socket.create_connection((host, port), max(PAUSE, min(HELLO_LIMIT, left)))
        except OSError as error:
            if time.monotonic() > limit:
                problem = f"rank {peers.rank}: no process listens at {host}:{port} ({error})"
                cure = f"check that rank {other} was started, and MASTER_ADDR"
                raise CommunicationError(f"{problem}; {cure}", rank=other) from error
            time.sleep(PAUSE)


def call(door: Door, other: int, host: str, port: int, limit: float) -> None:
    """Connect to a rank and prove the key; without an answer, retry until the time limit."""
    rank = door.peers.rank
    hello = HELLO.pack(MAGIC, rank, door.size, door.port, os.urandom(RANDOM))
    where = f"rank {rank}: the process that listens at {host}:{port}"
    while True:
        link = reached(door.peers, other, host, port, limit)
        until = min(limit, time.monotonic() + 2 * HELLO_LIMIT)
        try:
            link.sendall(hello)
            challenge = bytes(received(link, RANDOM, until))
            link.sendall(proof(door.key, other, hello, challenge))
            answer, theirs = (bytes(received(link, size, until)) for size in (1, PROOF))
        except OSError as error:
            link.close()
            if time.monotonic() > limit:
                problem = f"{where} does not answer as rank {other} ({error})"
                cure = "check what runs there, or set another MASTER_PORT"
                raise CommunicationError(f"{problem}; {cure}", rank=other) from error
            time.sleep(PAUSE)
            continue
        if not hmac.compare_digest(theirs, proof(door.key, other, hello, challenge, answer)):
            link.close()
            problem = f"{where} has another key, or is not rank {other}"
            raise CommunicationError(f"{problem}; {ONE_KEY}", rank=other)
        if answer != MET:
            link.close()
            problem = f"rank {other} does not accept this process as rank {rank} of {door.size}"
            cure = "give each process its own RANK, and all processes the same WORLD_SIZE"
            raise CommunicationError(f"{problem}; {cure}", rank=rank)
        door.peers.add(other, link)
        return


def proof(key: bytes, listener: int, *messages: bytes) -> bytes:
    """Return the HMAC of messages to a listener; its answer is one more message than a caller's."""
    return hmac.digest(key, b"%d " % listener + b"".join(messages), "sha256")
