"""Programs of many ranks replayed without arrays: what meets what, when, and what each holds.

    seen = replay([program of rank 0, program of rank 1, ...])
    seen.seconds, seen.peaks

A send and its receive must be alike, and so must the calls of a group; who waits for ever is named.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ..errors import CommunicationError
from .schedule import Schedule, Step, Timetable


class Work(NamedTuple):
    """Seconds of computing; bytes that are held from then on, or no more, and while it runs."""

    seconds: float
    holds: int = 0
    name: str = ""
    top: int = 0  # most that is held beyond what was held before


class Pass(NamedTuple):
    """A message sent and one received, both at once: (other rank, key, seconds on its way)."""

    send: tuple[int, Hashable, float] | None = None
    receive: tuple[int, Hashable, float] | None = None


class Together(NamedTuple):
    """A call of all ranks of a group: the ranks, what they call, and the seconds that it takes."""

    group: Sequence[int]
    key: Hashable
    seconds: float


Event = Work | Pass | Together


class Replay(NamedTuple):
    """What a replay has seen, by rank.

    Attributes
    ----------
    seconds : list of float
        When each rank has ended.
    busy : list of float
        Seconds in which each has computed.
    peaks : list of int
        Most bytes that each has held.
    spans : list of list of (str, float, float)
        What each has computed: name, begin and end.
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
        Whether who sends waits until the message has been received, as on a GPU; False: what is
        sent waits by itself, as messages of MPI and TCP do.

    Raises
    ------
    CommunicationError
        A message or a call is not alike in the ranks that it joins, or some wait for ever.
    """
    world = _World(programs, waits)
    ready = deque(range(len(programs)))
    while ready:
        ready.extend(world.advance(ready.popleft()))
    world.check_ended()
    return Replay(world.clock, world.busy, world.peaks, world.spans)


class _World:
    """All ranks: their clocks, and what each waits for."""

    def __init__(self, programs: Sequence[Iterable[Event]], waits: bool) -> None:
        count = len(programs)
        self.programs, self.waits = [iter(program) for program in programs], waits
        self.clock, self.busy = [0.0] * count, [0.0] * count
        self.held, self.peaks = [0] * count, [0] * count
        self.spans: list[list[tuple[str, float, float]]] = [[] for _ in range(count)]
        self.open = [0] * count  # halves of a pass that have not ended
        self.until = [0.0] * count
        self.sent: dict[tuple[int, int], deque[tuple[Hashable, float, float]]] = {}
        self.asked: dict[tuple[int, int], deque[tuple[Hashable, float]]] = {}
        self.called: dict[tuple[int, ...], list[tuple[int, Together, float]]] = {}
        self.ended = [False] * count
        self.at: list[Event | None] = [None] * count

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits; return who may go on because of that."""
        for event in self.programs[rank]:
            self.at[rank] = event
            if isinstance(event, Work):
                self._work(rank, event)
                continue
            freed = self._pass(rank, event) if isinstance(event, Pass) else self._call(rank, event)
            if rank not in freed:
                return freed
            others = [other for other in freed if other != rank]
            if others:  # they go first, and this one after them
                return [*others, rank]
        self.ended[rank] = True
        return []

    def _work(self, rank: int, event: Work) -> None:
        top = self.held[rank] + max(event.top, event.holds, 0)
        self.peaks[rank] = max(self.peaks[rank], top)
        self.held[rank] += event.holds
        begin = self.clock[rank]
        self.clock[rank] += event.seconds
        self.busy[rank] += event.seconds
        if event.name:
            self.spans[rank].append((event.name, begin, self.clock[rank]))

    def _pass(self, rank: int, event: Pass) -> list[int]:
        now, freed = self.clock[rank], list[int]()
        self.until[rank] = now
        self.open[rank] = (event.send is not None and self.waits) + (event.receive is not None)
        if event.send is not None:
            to, key, seconds = event.send
            self.sent.setdefault((rank, to), deque()).append((key, now, seconds))
            freed += self._match(rank, to)
        if event.receive is not None:
            source, key, _ = event.receive
            self.asked.setdefault((source, rank), deque()).append((key, now))
            freed += self._match(source, rank)
        return freed if rank in freed or self.open[rank] else [*freed, rank]

    def _match(self, source: int, to: int) -> list[int]:
        """Join the first send of a rank to another with that one's first receive."""
        sent, asked = self.sent.get((source, to)), self.asked.get((source, to))
        if not sent or not asked:
            return []
        (key, begun, seconds), (wanted, came) = sent.popleft(), asked.popleft()
        if key != wanted:
            problem = f"rank {source} sends {key}, which is not {wanted}, asked for by rank {to}"
            raise CommunicationError(f"replay: {problem}; let both name one message", rank=source)
        end = (max(begun, came) if self.waits else begun) + seconds
        return [rank for rank in ((source, to) if self.waits else (to,)) if self._half(rank, end)]

    def _half(self, rank: int, end: float) -> bool:
        """End one half of a pass; say whether the rank may go on."""
        self.open[rank] -= 1
        self.until[rank] = max(self.until[rank], end)
        if self.open[rank]:
            return False
        self.clock[rank] = self.until[rank]
        return True

    def _call(self, rank: int, event: Together) -> list[int]:
        calls = self.called.setdefault(tuple(event.group), [])
        calls.append((rank, event, self.clock[rank]))
        if len(calls) < len(event.group):
            return []
        for other, call, _ in calls:
            if call.key != event.key:
                problem = f"rank {rank} calls {event.key}, rank {other} {call.key}"
                raise CommunicationError(
                    f"replay: a call is not the same: {problem}; let all make one", rank=other
                )
        end = max(when for _, _, when in calls) + event.seconds
        del self.called[tuple(event.group)]
        for other, _, _ in calls:
            self.clock[other] = end
        return [other for other, _, _ in calls]

    def check_ended(self) -> None:
        """Raise for ranks that wait for ever, and for messages that nobody receives."""
        stuck = [rank for rank, ended in enumerate(self.ended) if not ended]
        if stuck:
            told = "; ".join(f"rank {rank} at {self.at[rank]}" for rank in stuck[:3])
            more = f" and {len(stuck) - 3} more" if len(stuck) > 3 else ""
            problem = f"replay: {told}{more} wait for ever, as their other side is not there"
            raise CommunicationError(f"{problem}; change the order of calls", rank=stuck[0])
        lost = next(((way, sent[0][0]) for way, sent in self.sent.items() if sent), None)
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
    """Yield the program of a stage: the work of each step, and the messages between.

    ``rank_of`` is the rank of a stage, and ``seconds`` what one message takes.
    """
    for number, after in enumerate(table.messages[stage]):
        if number:
            yield from work(schedule[stage][number - 1])
        for message in after:
            if message.source == stage:
                yield Pass(send=(rank_of(message.to), message.step, seconds))
            else:
                yield Pass(receive=(rank_of(message.source), message.step, seconds))
