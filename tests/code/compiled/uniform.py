"""Prove from PTX that either all threads of a block reach a barrier, or none.

A value is uniform if it is the same in all threads of a block: parameters, block and grid indices,
votes of the block, votes of warps on the same question, loads from uniform addresses (the emulator
shows that nothing writes there at the same time), and values computed only from uniform values, on
paths that uniform branches choose.  A barrier is proved if all branches that decide whether it is
reached test uniform predicates.  A barrier with a thread count is for some warps: it is enough that
the lanes of a warp agree on the path to it, on its number and on its count.
"""

import functools
import re
from typing import NamedTuple

from ..programs.ptx import Body, instruction

THREAD, LANE = r"%(tid|warpid)", r"%lane"  # special registers that differ by thread; by lane only
# Instructions whose results differ between threads, whatever their operands are.
LANES = ("atom", "ldmatrix", "mma", "wgmma", "mbarrier", "call", "mapa")
ENDS = ("ret", "exit", "trap")


class Line(NamedTuple):
    """An instruction: guard, the parts of its name, operands, location, possible successors."""

    guard: str
    words: tuple[str, ...]
    ops: tuple[str, ...]
    place: str
    follow: tuple[int, ...]

    @property
    def is_counted(self) -> bool:
        """Whether this is a barrier with a thread count, for some warps."""
        return self.words in (("bar", "sync"), ("bar", "arrive")) and len(self.ops) == 2

    @property
    def is_barrier(self) -> bool:
        """Whether this is a barrier that all threads of the block or the cluster must reach."""
        whole = self.words[0] == "bar" and "warp" not in self.words and not self.is_counted
        return self.words[:2] == ("barrier", "cluster") or whole


def lines(body: Body) -> list[Line]:
    """Return the instructions of a function, and the paths between them."""
    labels, pieces = dict[tuple[str, int], int](), []
    for piece in body.pieces:
        if piece.kind == "label":
            labels[piece.text, piece.blocks[-1]] = len(pieces)
        elif piece.kind == "instruction":
            pieces.append(piece)
    parsed = []
    for number, piece in enumerate(pieces):
        guard, words, ops = instruction(piece.text)
        known = (labels.get((ops[0], block)) for block in reversed(piece.blocks)) if ops else ()
        jump = [next(at for at in known if at is not None)] if words[0] == "bra" else []
        ends = not guard and words[0] in ("bra", *ENDS)
        follow = (*jump, *([] if ends or number + 1 == len(pieces) else [number + 1]))
        place = f"{piece.place[0]}:{piece.place[1]}"
        parsed.append(Line(guard.lstrip("!"), words, ops, place, follow))
    return parsed


def deciding(several: list[Line]) -> list[int]:
    """Return for each line, as bits, the branches that determine whether it is reached."""
    end = len(several)
    before = [list[int]() for _ in range(end + 1)]
    for number, line in enumerate(several):
        for follow in line.follow or (end,):
            before[follow].append(number)
        if line.guard and line.words[0] in ENDS:
            before[end].append(number)
    after = [-1] * end + [1 << end]  # for each line, as bits: the lines on all paths to the end
    left = [end]
    while left:
        for number in before[left.pop()]:
            exits = not several[number].follow or several[number].words[0] in ENDS
            successors = [*several[number].follow, *([end] if exits else [])]
            passed = -1
            for successor in successors:
                passed &= after[successor]
            passed |= 1 << number
            if passed != after[number]:
                after[number] = passed
                left.append(number)
    decisions = [0] * end
    for number, line in enumerate(several):
        exits = line.guard and line.words[0] in ENDS
        if len(line.follow) + bool(exits) > 1:
            passed = 0
            for successor in (*line.follow, *([end] if exits else [])):
                passed |= after[successor]
            passed &= ~(after[number] & ~(1 << number)) & ((1 << end) - 1)
            while passed:
                low = passed & -passed
                decisions[low.bit_length() - 1] |= 1 << number
                passed ^= low
    return closed(decisions)


def closed(sets: list[int]) -> list[int]:
    """Add to the branches that decide a line those that decide these branches, and so on."""
    grows = True
    while grows:
        grows = False
        for number, own in enumerate(sets):
            whole, left = own, own
            while left:
                low = left & -left
                whole |= sets[low.bit_length() - 1]
                left ^= low
            grows |= whole != own
            sets[number] = whole
    return sets


@functools.cache
def registers(*texts: str) -> frozenset[str]:
    """Return the registers in operands, special registers included."""
    return frozenset(re.findall(r"%[\w.]+|\b[a-z]\w*\b", " ".join(texts)))


@functools.cache
def results(line: Line) -> frozenset[str]:
    """Return the registers that an instruction writes."""
    if (
        not line.ops
        or line.words[0] in ("st", "bra", "red")
        or line.is_counted
        or (line.is_barrier and "red" not in line.words)
    ):
        return frozenset()
    return registers(line.ops[0])


def sources(several: list[Line], doubted: set[int]) -> list[set[int]]:
    """Return for each line the lines that wrote the registers it reads, and its guard.

    If some writers of a register are doubted and others are not, paths decide which of them count.
    """
    makers = dict[str, list[int]]()
    for number, line in enumerate(several):
        for register in results(line):
            makers.setdefault(register, []).append(number)
    readers = dict[str, set[int]]()
    for number, line in enumerate(several):
        own = line.ops if not results(line) else line.ops[1:]
        for register in registers(*own, line.guard):
            readers.setdefault(register, set()).add(number)
    makers_of = [set[int]() for _ in several]
    for register, numbers in makers.items():
        asks = readers.get(register, set())
        mixed = not doubted.isdisjoint(numbers) and not doubted.issuperset(numbers)
        for maker in numbers:
            for reader in asks & until(several, maker, numbers) if mixed else asks:
                makers_of[reader].add(maker)
    return makers_of


def until(several: list[Line], start: int, others: list[int]) -> set[int]:
    """Return the lines that may run after a line, up to those that write the same register."""
    ends = {n for n in others if not several[n].guard}
    reached, left = set[int](), [*several[start].follow]
    while left:
        number = left.pop()
        if number not in reached:
            reached.add(number)
            left += () if number in ends else several[number].follow
    return reached


def spread(
    several: list[Line],
    made_by: list[set[int]],
    decide: list[int],
    starts: set[int],
    ends: set[int],
) -> set[int]:
    """Return the lines that depend on ``starts``: by a register, or by a deciding branch."""
    marked, size = starts - ends, -1
    while len(marked) > size:
        size = len(marked)
        asks = sum(1 << n for n in marked if several[n].guard)
        marked |= {n for n, made in enumerate(made_by) if made & marked or decide[n] & asks} - ends
    return marked


def undecided(several: list[Line], decide: list[int]) -> list[int]:
    """Return the result of ``deciding`` without branches that make no difference to a move.

    They make none if all paths from the branch copy the same register before any line reads it.
    """
    reads, writes = dict[str, set[int]](), dict[str, set[int]]()
    copies = dict[tuple[str, ...], set[int]]()
    for number, line in enumerate(several):
        for register in registers(*(line.ops[1:] if results(line) else line.ops), line.guard):
            reads.setdefault(register, set()).add(number)
        for register in results(line):
            writes.setdefault(register, set()).add(number)
        if line.words[0] == "mov":
            copies.setdefault(line.ops, set()).add(number)

    @functools.cache
    def on_all_paths(ops: tuple[str, ...], branch: int) -> bool:
        ends = reads.get(ops[0], set()) | writes.get(ops[1], set())
        reached, left = set[int](), [*several[branch].follow]
        while left:
            number = left.pop()
            if number in ends:
                return False
            if number not in reached:
                reached.add(number)
                left += () if number in copies[ops] else several[number].follow
        return True

    made = [*decide]
    for ops, numbers in copies.items():
        for number in numbers:
            branches = (n for n in range(len(several)) if decide[number] >> n & 1)
            made[number] = sum(1 << n for n in branches if not on_all_paths(ops, n))
    return made


def different(
    several: list[Line],
    decide: list[int],
    parameters: tuple[str, ...],
    doubted: set[int],
    in_warps: bool,
) -> set[int]:
    """Return the lines whose results or guards may differ between threads of a block, or a warp.

    If lanes differ in the same way in each warp, a vote, or a shuffle from one lane, is uniform.
    """
    reads, made_by = [registers(*line.ops[1:]) for line in several], sources(several, doubted)
    own, lanes, mixed, block = set[int](), set[int](), set[int](), set[int]()
    by_lane = [*made_by]  # of votes nothing, of shuffles only the lines that select the lane
    for n, (_, words, ops, _, _) in enumerate(several):
        if words[:2] == ("bar", "red"):
            block.add(n)
        elif words[0] == "vote":
            by_lane[n] = set()
        elif words[0] == "shfl" and "idx" in words:
            by_lane[n] = {made for made in made_by[n] if ops[2] in results(several[made])}
        elif (
            words[0] in LANES
            or (words[0] == "ld" and not same_for_all(words, ops, parameters))
            or any(re.match(THREAD, register) for register in reads[n])
        ):
            own.add(n)
        elif words[0] == "shfl" or any(re.match(LANE, register) for register in reads[n]):
            mixed.add(n)
    ids = {n for n in own if "%tid.x" in reads[n] and several[n].words[0] == "mov"}
    for n, made in enumerate(made_by):
        if made and made <= ids and several[n].words[0] == "and" and several[n].ops[2] == "31":
            lanes.add(n)  # the lane index: a thread's number in its warp
    if in_warps:
        alike = {
            n for n, made in enumerate(made_by) if made and made <= ids and by_warp(several[n])
        }
        alike |= {n for n in own if several[n].words[0] == "mov" and "%warpid" in reads[n]}
        return spread(several, by_lane, decide, own | lanes | mixed, block | alike)
    warps = spread(several, made_by, decide, own, lanes | block)
    return warps | spread(several, by_lane, decide, own | lanes | mixed, block)


def by_warp(line: Line) -> bool:
    """Return whether a line turns a thread's index into a value that is uniform in a warp."""
    if not re.fullmatch(r"-?\d+", line.ops[-1]):
        return False
    match line.words[:2], int(line.ops[-1]) % 32:
        case ("shr", _), _:
            return int(line.ops[-1]) >= 5
        case (("and", _), 0) | (("setp", "lt" | "ge"), 0) | (("setp", "gt" | "le"), 31):
            return True
    return False


def same_for_all(words: tuple[str, ...], ops: tuple[str, ...], parameters: tuple[str, ...]) -> bool:
    """Return whether a load from one address is uniform: results of a call are not."""
    base = ops[1].strip("[] ").partition("+")[0].strip()
    own = "param" in words and base[0] != "%" and base not in parameters
    return not own and "local" not in words


def unproved_barriers(body: Body) -> list[str]:
    """Return the barriers that a part of a block's, or of a warp's, threads may reach alone."""
    several, messages = lines(body), list[str]()
    for in_warps in (False, True):
        own = {n for n, line in enumerate(several) if (line.is_barrier, line.is_counted)[in_warps]}
        if own:
            messages += unproved(several, body.parameters, own, in_warps)
    return messages


def unproved(
    several: list[Line], parameters: tuple[str, ...], barriers: set[int], in_warps: bool
) -> list[str]:
    """Return those of some barriers; in a warp, threads must also agree on their operands."""
    decide = deciding(several)
    paths = undecided(several, decide) if in_warps else decide
    doubted, messages = set[int](), list[str]()
    for _ in range(2):  # the first round ignores paths, which proves most barriers
        doubted, messages = different(several, paths, parameters, doubted, in_warps), []
        made_by = sources(several, doubted)
        for number in sorted(barriers):
            line = several[number]
            branches = decide[number] | bool(line.guard) << number
            by = {n for n in doubted if branches >> n & 1} | (
                doubted & made_by[number] if in_warps else set()
            )
            messages += [
                f"{line.place}: {'.'.join(line.words)} by {b.guard or b.ops[0]} of {b.place}"
                for b in (several[n] for n in sorted(by))
            ]
        if not messages:
            break
    return messages
