"""Connection setup: rank 0 listens at its own address, and every pair proves a common key by HMAC.

    caller     hello = magic, its rank, world size, port at which it listens, 32 random bytes
    listener   magic, challenge = 32 random bytes
    caller     run, HMAC-SHA256(key, rank of the listener, hello, challenge, run)
    listener   answer, HMAC-SHA256(key, rank of the listener, hello, challenge, run, answer)

The run is the identity that the launcher gave to all ranks.  The answer is the reason for which the
listener refuses the caller, and empty if it accepts the caller.  All of these messages have fixed
sizes, and the listener reads nothing else from a caller before its proof.  Callers are served
concurrently, each for a limited time.  Later messages are not encrypted.
"""

import errno
import hmac
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from ipaddress import ip_address
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import CommunicationError, printable
from ._authkey import AUTHKEY, authkey
from ._peers import PAUSE, Peers, received

HELLO = struct.Struct("!8sIIH32s")
MAGIC = b"ranks\0\0\2"  # a name and the version of these messages
RANDOM, RUN, ANSWER, PROOF = 32, 128, 512, 32  # bytes
HELLO_LIMIT = 10.0  # seconds within which a caller must prove its key
CALLERS = 64  # most strangers served at a time besides ranks; with more, the oldest is dropped
WARNINGS = 32  # most lines about refused callers: a flood of them does not fill the disk
NOTICE = 20.0  # seconds after which a line says who is waited for; later lines at doubled times
LINGER = 5.0  # seconds in which rank 0 explains to late ranks why they cannot form a run
STRANGE = 30.0  # seconds after which a listener that never answers, or a name, is not waited for
TABLE = "table"  # key of the message with the addresses at which ranks listen
ONE_KEY = f"set {AUTHKEY} to the same secret in all ranks"
COPY = f"{ONE_KEY}, or copy ~/.config/unsloth_cupy/authkey of rank 0 to all machines"


class Group(NamedTuple):
    """The properties that all ranks of a run have in common."""

    size: int
    key: bytes
    run: str = ""


class Waiting:
    """The time since a wait began."""

    def __init__(self, rank: int) -> None:
        self.rank, self.start, self.due = rank, time.monotonic(), NOTICE

    def report(self, text: str) -> None:
        """Print a line after NOTICE seconds, and again at doubled times."""
        if time.monotonic() - self.start >= self.due:
            self.due *= 2
            show(self.rank, f"waiting for {text}")


def show(rank: int, text: str) -> None:
    """Print a line of a rank to stderr."""
    print(f"rank {rank}: {printable(text)}", file=sys.stderr, flush=True)


def listed(ranks: Iterable[int]) -> str:
    """Return a text with the numbers of ranks: "rank 2", "ranks 1 and 3", "ranks 0, 2-5 and 9"."""
    groups = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    texts: list[str] = []
    for _, pairs in groups:
        numbers = [str(number) for _, number in pairs]
        texts += numbers if len(numbers) < 3 else [f"{numbers[0]}-{numbers[-1]}"]
    plural = "s" * (len(texts) > 1 or "-" in texts[0])
    *head, last = texts
    return f"rank{plural} {', '.join(head)} and {last}" if head else f"rank{plural} {last}"


class Door:
    """A listening socket, with a thread that admits all ranks above this one."""

    def __init__(self, peers: Peers, group: Group, host: str, port: int) -> None:
        self.peers, self.group, self.name = peers, group, host
        self.expected = set(range(peers.rank + 1, group.size))
        self.homes: dict[int, tuple[str, int]] = {}  # host and port at which each rank listens
        self.uninformed = set(self.expected)  # ranks that may call and do not know the misfit yet
        self.wrong = 0  # number of callers with another key
        self.warnings: set[str] = set()
        self.listener = listening(peers.rank, host, port, CALLERS + group.size)
        self.host, self.port = self.listener.getsockname()[:2]
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._admit, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening; if ranks cannot form a run, first explain it to ranks that still call."""
        if self.peers.misfit is not None:
            limit = time.monotonic() + LINGER
            while self.uninformed - self.homes.keys() and time.monotonic() < limit:
                time.sleep(PAUSE)
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
                crowd = len(callers) - CALLERS - self.group.size
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
        host = link.getpeername()[0]
        if magic != MAGIC:
            if magic[:5] == MAGIC[:5]:
                self._warn(f"a process at {host} has another version of unsloth_cupy")
            raise ConnectionRefusedError
        challenge = os.urandom(RANDOM)
        link.sendall(MAGIC + challenge)
        message = yield RUN + PROOF
        run, shown = message[:RUN], message[RUN:]
        if not hmac.compare_digest(shown, self._proof(hello, challenge, run)):
            self.wrong += 1
            self._warn(f"a process at {host} has another key, and was refused; {COPY}")
            link.sendall(bytes(ANSWER + PROOF))
            raise ConnectionRefusedError
        problem = self._refusal(rank, size, run.rstrip(b"\0").decode(errors="replace"), host)
        answer = problem.encode()[:ANSWER].ljust(ANSWER, b"\0")
        link.sendall(answer + self._proof(hello, challenge, run, answer))
        if problem:
            raise ConnectionRefusedError
        self.homes[rank] = host, port
        return int(rank)

    def _refusal(self, rank: int, size: int, run: str, host: str) -> str:
        """Return why a caller with the key is refused; "" if it is an expected rank."""
        own, place = self.peers.rank, f"{self.host}:{self.port}"
        problem = ""
        if run != self.group.run:
            problem = f"rank {rank} at {host} belongs to another run ({run or 'of no launcher'})"
            problem += f" than rank {own} at {place} ({self.group.run or 'of no launcher'})"
            problem += "; give each run its own MASTER_PORT"
            self._warn(problem)
            return problem
        if size != self.group.size:
            problem = f"rank {rank} was started with WORLD_SIZE={size}, rank {own} with"
            problem += f" {self.group.size}; start all ranks with the same WORLD_SIZE"
        elif rank not in self.expected - self.homes.keys():
            other = self.homes[rank][0] if rank in self.homes else self.host
            problem = f"two processes were started as rank {rank}, one at {other} and one at {host}"
            problem += "; give each process its own RANK, and each run its own MASTER_PORT"
        if problem:
            with self.peers.changed:
                if self.peers.misfit is None:
                    self.uninformed |= {*range(own + 1, min(size, 2**16))}
                    self.peers.misfit = CommunicationError(f"rank {own}: {problem}", rank=rank)
                self.uninformed.discard(rank)
                self.peers.changed.notify_all()
        return problem

    def _warn(self, text: str) -> None:
        """Print a line about a caller, once."""
        if text not in self.warnings and len(self.warnings) < WARNINGS:
            self.warnings.add(text)
            show(self.peers.rank, text)

    def _proof(self, *messages: bytes) -> bytes:
        return proof(self.group.key, self.peers.rank, *messages)


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


def meet(peers: Peers, size: int, host: str, port: int, timeout: float, run: str = "") -> None:
    """Connect this rank to all other ranks.

    All other ranks connect to rank 0, which sends them the addresses at which each rank listens.
    Then each rank connects to all lower ranks.

    Raises
    ------
    CommunicationError
        A rank did not connect in time, has another key, belongs to another run, or has ended; or
        the ranks were started with several world sizes, or two with the same rank.
    """
    rank, limit, group = peers.rank, time.monotonic() + timeout, Group(size, authkey(), run)
    place = host, port
    if rank:  # listen at the address from which this machine reaches rank 0
        with reached(peers, 0, host, port, limit) as link:
            place = link.getsockname()[0], 0
    try:
        door = Door(peers, group, *place)
    except CommunicationError as error:
        if rank == 0 and (answer := occupant(group, host, port, error.__cause__)):
            problem = f"rank 0 cannot listen at {host}:{port}: {answer}"
            raise CommunicationError(problem, rank=0) from error
        raise
    try:
        if rank:
            call(door, 0, host, port, limit)
            table = peers.take(0, TABLE, limit)
            peers.check()
            if table is None:
                problem = f"rank {rank}: rank 0 did not send the addresses of other ranks in time"
                cure = "check that all ranks were started"
                raise CommunicationError(f"{problem}; {cure}", rank=0)
            for other, (home, at) in enumerate(
                map(str.split, bytes(table).decode().splitlines()), 1
            ):
                if other < rank:
                    call(door, other, home, int(at), limit)
        waiting, pause = Waiting(rank), min(1.0, NOTICE)
        while missing := peers.wait_for(door.expected, min(limit, time.monotonic() + pause)):
            if time.monotonic() >= limit:
                raise late(door, missing, timeout)
            waiting.report(f"{listed(missing)} of {size} at {door.host}:{door.port}")
    finally:
        door.close()
    if rank == 0:  # the listener is closed first: a rank may finish now and reuse this port
        lines = [f"{home} {at}" for _, (home, at) in sorted(door.homes.items())]
        for other in door.expected:
            peers.send(other, TABLE, "\n".join(lines).encode())


def late(door: Door, missing: set[int], timeout: float) -> CommunicationError:
    """Return the error for ranks that did not connect in time."""
    known = ", ".join(map(str, sorted(door.expected - missing))) or "none"
    names, plural = listed(missing), len(missing) > 1
    problem = f"rank {door.peers.rank}: {names} of {door.group.size} did not connect to"
    problem += f" {door.host}:{door.port} within {timeout:g} s; connected: {known}"
    cure = f"check that {names} {'were' if plural else 'was'} started, with this MASTER_ADDR"
    if door.name not in (door.host, "localhost") and ip_address(door.host).is_loopback:
        cure += f"; MASTER_ADDR={door.name} is {door.host} here, which other machines cannot reach"
    if door.wrong:
        cure += f"; callers with another key: {door.wrong}; {COPY}"
    return CommunicationError(f"{problem}; {cure}", rank=min(missing))


def occupant(group: Group, host: str, port: int, error: BaseException | None) -> str:
    """Return what a rank 0 says that has the port of this one; "" if no such rank answers."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        with (
            suppress(OSError, CommunicationError),
            socket.create_connection((host, port), HELLO_LIMIT) as link,
        ):
            return introduced(link, group, 0, 0, 0, time.monotonic() + HELLO_LIMIT)
    return ""


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
    except (socket.gaierror, UnicodeError) as error:
        raise unknown(rank, host, error) from error
    cure = "set MASTER_ADDR to an address of rank 0"
    if problem.errno in (errno.EADDRINUSE, errno.EACCES):
        cure = "set another MASTER_PORT in all ranks"
    reason = os.strerror(problem.errno) if problem.errno else problem
    message = f"rank {rank} cannot listen at {host}:{port} ({reason}); {cure}"
    raise CommunicationError(message, rank=rank) from problem


def unknown(rank: int, host: str, error: Exception) -> CommunicationError:
    """Return the error for a name without an address."""
    problem = f"rank {rank}: MASTER_ADDR={host} does not resolve"
    reason = getattr(error, "strerror", None) or error
    cure = "set MASTER_ADDR to a name or an address of rank 0 that this machine knows"
    return CommunicationError(f"{problem} ({reason}); {cure}", rank=0)


def reached(peers: Peers, other: int, host: str, port: int, limit: float) -> socket.socket:
    """Return a connection to a rank, retrying until the time limit."""
    waiting = Waiting(peers.rank)
    named = min(limit, waiting.start + STRANGE)  # a cluster may need time to publish a name
    while True:
        peers.check()
        left = limit - time.monotonic()
        try:
            return socket.create_connection((host, port), max(PAUSE, min(HELLO_LIMIT, left)))
        except UnicodeError as error:
            raise unknown(peers.rank, host, error) from error
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() > named:
                raise unknown(peers.rank, host, error) from error
            if time.monotonic() > limit:
                problem = f"rank {peers.rank}: no process listens at {host}:{port} ({error})"
                cure = f"check that rank {other} was started, and MASTER_ADDR"
                raise CommunicationError(f"{problem}; {cure}", rank=other) from error
            waiting.report(f"rank {other} at {host}:{port} ({error.strerror or error})")
            time.sleep(PAUSE)


def call(door: Door, other: int, host: str, port: int, limit: float) -> None:
    """Connect to a rank and prove the key; without an answer, retry for a limited time."""
    rank = door.peers.rank
    patience = 0.0  # time after which the listener must have answered; 0: it has not failed yet
    while True:
        link = reached(door.peers, other, host, port, limit)
        until = min(limit, time.monotonic() + 2 * HELLO_LIMIT)
        try:
            answer = introduced(link, door.group, other, rank, door.port, until)
        except OSError as error:
            link.close()
            patience = patience or min(limit, time.monotonic() + STRANGE)
            if time.monotonic() > patience:
                problem = f"rank {rank}: the process that listens at {host}:{port} does not answer"
                cure = "check what runs there, or set another MASTER_PORT in all ranks"
                text = f"{problem} as rank {other} ({str(error) or 'it hangs up'}); {cure}"
                raise CommunicationError(text, rank=other) from error
            time.sleep(PAUSE)
            continue
        except CommunicationError:
            link.close()
            raise
        if answer:
            link.close()
            raise CommunicationError(f"rank {other} refuses rank {rank}: {answer}", rank=rank)
        door.peers.add(other, link)
        return


def introduced(
    link: socket.socket, group: Group, other: int, rank: int, port: int, until: float
) -> str:
    """Prove the key to a rank that listens, as a caller; return its answer, "" if it accepts.

    Raises
    ------
    CommunicationError
        The process at the other end is not this rank, or has another key.
    OSError
        It does not answer in time.
    """
    hello = HELLO.pack(MAGIC, rank, group.size, port, os.urandom(RANDOM))
    run = group.run.encode().ljust(RUN, b"\0")
    host, at = link.getpeername()[:2]
    link.sendall(hello)
    magic = bytes(received(link, len(MAGIC), until))
    if magic != MAGIC:
        problem = f"rank {rank}: another program listens at {host}:{at}, not rank {other}: it sent"
        cure = "set another MASTER_PORT in all ranks"
        if magic[:5] == MAGIC[:5]:
            cure = "install the same version of unsloth_cupy on all machines"
        raise CommunicationError(f"{problem} {magic!r}; {cure}", rank=other)
    challenge = bytes(received(link, RANDOM, until))
    link.sendall(run + proof(group.key, other, hello, challenge, run))
    answer, shown = (bytes(received(link, size, until)) for size in (ANSWER, PROOF))
    if not hmac.compare_digest(shown, proof(group.key, other, hello, challenge, run, answer)):
        problem = f"rank {rank}: its key differs from the key of the process at {host}:{at}, which"
        raise CommunicationError(f"{problem} should be rank {other}; {COPY}", rank=other)
    return answer.rstrip(b"\0").decode(errors="replace")


def proof(key: bytes, listener: int, *messages: bytes) -> bytes:
    """Return the HMAC of messages to a listener; its answer is one more message than a caller's."""
    return hmac.digest(key, b"%d " % listener + b"".join(messages), "sha256")
