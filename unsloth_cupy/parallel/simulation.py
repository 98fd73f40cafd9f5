"""Simulate programs of many ranks without arrays: the time and the peak memory of each rank.

    result = replay([program of rank 0, program of rank 1, ...])
    result.seconds, result.peaks

A send and its receive must match, and so must the calls of a group; ranks in a deadlock are named.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ..errors import CommunicationError
from .schedule import Schedule, Step, Timetable


class Compute(NamedTuple):
    """Seconds of computation, with the bytes that it allocates or (if negative) frees."""

    seconds: float
    holds: int = 0
    name: str = ""
    top: int = 0  # peak bytes during the computation, beyond those held before


class Exchange(NamedTuple):
    """A message sent and one received at the same time: (other rank, key, seconds of transfer)."""

    send: tuple[int, Hashable, float] | None = None
    receive: tuple[int, Hashable, float] | None = None


class Collective(NamedTuple):
    """A collective call of a group: its ranks, a key that must be equal in all, and seconds."""

    group: Sequence[int]
    key: Hashable
    seconds: float


Event = Compute | Exchange | Collective


class Replay(NamedTuple):
    """The results of a replay, by rank.

    Attributes
    ----------
    seconds : list of float
        Time at which the rank ends.
    busy : list of float
        Seconds in which it computes.
    peaks : list of int
        Most bytes that it holds.
    spans : list of list of (str, float, float)
        Name, begin and end of its named computations.
    """

    seconds: list[float]
    busy: list[float]
    peaks: list[int]
    spans: list[list[tuple[str, float, float]]]


def replay(programs: Sequence[Iterable[Event]], *, waits: bool = True) -> Replay:
    """Run the programs of all ranks.

    Parameters
    ----------
    programs : sequence of iterables of Event
        One for each rank.
    waits : bool
        Whether a sender waits until the message has been received, as on a GPU; False: messages
        are buffered, as those of MPI and TCP are.

    Raises
    ------
    CommunicationError
        A message or a call does not match between ranks, or some ranks wait for ever.
    """
    world = _World(programs, waits)
    ready = deque(range(len(programs)))
    while ready:
        ready.extend(world.advance(ready.popleft()))
    world.check_ended()
    return Replay(world.clock, world.busy, world.peaks, world.spans)


class _World:
    """The state of all ranks: their clocks, memory, and pending messages and calls."""

    def __init__(self, programs: Sequence[Iterable[Event]], waits: bool) -> None:
        count = len(programs)
        self.programs, self.waits = [iter(program) for program in programs], waits
        self.clock, self.busy = [0.0] * count, [0.0] * count
        self.held, self.peaks = [0] * count, [0] * count
        self.spans: list[list[tuple[str, float, float]]] = [[] for _ in range(count)]
        self.open = [0] * count  # halves (send, receive) of the current Exchange left
        self.until = [0.0] * count  # end of the current Exchange so far
        self.sends: dict[tuple[int, int], deque[tuple[Hashable, float, float]]] = {}
        self.receives: dict[tuple[int, int], deque[tuple[Hashable, float]]] = {}
        self.calls: dict[tuple[int, ...], list[tuple[int, Collective, float]]] = {}
        self.ended = [False] * count
        self.at: list[Event | None] = [None] * count  # current event

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits; return the ranks that can now continue."""
        for event in self.programs[rank]:
            self.at[rank] = event
            if isinstance(event, Compute):
                self._compute(rank, event)
                continue
            if isinstance(event, Exchange):
                freed = self._exchange(rank, event)
            else:
                freed = self._collective(rank, event)
            if rank not in freed:
                return freed
            others = [other for other in freed if other != rank]
            if others:  # they continue first, then this one
                return [*others, rank]
        self.ended[rank] = True
        return []

    def _compute(self, rank: int, event: Compute) -> None:
        """Advance the clock and the memory of a rank by a computation."""
        top = self.held[rank] + max(event.top, event.holds, 0)
        self.peaks[rank] = max(self.peaks[rank], top)
        self.held[rank] += event.holds
        begin = self.clock[rank]
        self.clock[rank] += event.seconds
        self.busy[rank] += event.seconds
        if event.name:
            self.spans[rank].append((event.name, begin, self.clock[rank]))

    def _exchange(self, rank: int, event: Exchange) -> list[int]:
        """Begin a send and a receive of a rank; return the ranks that can now continue."""
        now, freed = self.clock[rank], list[int]()
        self.until[rank] = now
        self.open[rank] = (event.send is not None and self.waits) + (event.receive is not None)
        if event.send is not None:
            to, key, seconds = event.send
            self.sends.setdefault((rank, to), deque()).append((key, now, seconds))
            freed += self._match(rank, to)
        if event.receive is not None:
            source, key, _ = event.receive
            self.receives.setdefault((source, rank), deque()).append((key, now))
            freed += self._match(source, rank)
        return freed if rank in freed or self.open[rank] else [*freed, rank]

    def _match(self, source: int, to: int) -> list[int]:
        """Match the first send of a rank to another with that one's first receive, if any."""
        sends, receives = self.sends.get((source, to)), self.receives.get((source, to))
        if not sends or not receives:
            return []
        (key, sent, seconds), (expected, received) = sends.popleft(), receives.popleft()
        if key != expected:
            problem = f"rank {source} sends {key}, and rank {to} expects {expected}"
            raise CommunicationError(f"replay: {problem}; use one key in both", rank=source)
        end = (max(sent, received) if self.waits else sent) + seconds
        return [rank for rank in ((source, to) if self.waits else (to,)) if self._half(rank, end)]

    def _half(self, rank: int, end: float) -> bool:
        """End one half of an Exchange; return whether the rank can continue."""
        self.open[rank] -= 1
        self.until[rank] = max(self.until[rank], end)
        if self.open[rank]:
            return False
        self.clock[rank] = self.until[rank]
        return True

    def _collective(self, rank: int, event: Collective) -> list[int]:
        """Add a rank to a collective call; return the group once all its ranks have called."""
        calls = self.calls.setdefault(tuple(event.group), [])
        calls.append((rank, event, self.clock[rank]))
        if len(calls) < len(event.group):
            return []
        for other, call, _ in calls:
            if call.key != event.key:
                problem = f"rank {rank} calls {event.key}, rank {other} {call.key}"
                raise CommunicationError(
                    f"replay: a call is not the same: {problem}; use one key in all", rank=other
                )
        end = max(when for _, _, when in calls) + event.seconds
        del self.calls[tuple(event.group)]
        for other, _, _ in calls:
            self.clock[other] = end
        return [other for other, _, _ in calls]

    def check_ended(self) -> None:
        """Raise for ranks that wait for ever, and for messages that are not received."""
        stuck = [rank for rank, ended in enumerate(self.ended) if not ended]
        if stuck:
            listed = "; ".join(f"rank {rank} at {self.at[rank]}" for rank in stuck[:3])
            more = f" and {len(stuck) - 3} more" if len(stuck) > 3 else ""
            problem = f"replay: {listed}{more} wait for ever: no other rank makes a matching call"
            raise CommunicationError(f"{problem}; change the order of calls", rank=stuck[0])
        lost = next(((ranks, sent[0][0]) for ranks, sent in self.sends.items() if sent), None)
        if lost is not None:
            (source, to), key = lost
            problem = f"rank {source} sends {key} to rank {to}, which is not received"
            raise CommunicationError(f"replay: {problem}; receive it", rank=source)


def pipeline_program(
    schedule: Schedule,
    table: Timetable,
    stage: int,
    work: Callable[[Step], Iterable[Event]],
    *,
    rank_of: Callable[[int], int] = lambda stage: stage,
    seconds: float = 0.0,
) -> Iterable[Event]:
    """Yield the program of a stage: the work of each step, and the messages between steps.

    ``rank_of`` returns the rank of a stage, and ``seconds`` is the duration of a message.
    """
    for number, after in enumerate(table.messages[stage]):
        if number:
            yield from work(schedule[stage][number - 1])
        for message in after:
            if message.source == stage:
                yield Exchange(send=(rank_of(message.to), message.step, seconds))
            else:
                yield Exchange(receive=(rank_of(message.source), message.step, seconds))
