"""Check on every path of a kernel's SASS that it waits for its copies before it reads them.

    unwaited(text)        the reads that some path reaches without a wait for the copy
    waited_in_sass(text)  the number of waits before each operation of warpgroups, which must equal
                          that in the PTX (waited_in_ptx)

Two branches on the same predicate, or on the same comparison of registers that nothing writes in
between, go the same way.  A walk along the paths remembers only the comparisons that a later branch
may test.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from ..compiled.uniform import lines
from .ptx import Compiled, functions

# Methods of copying into shared memory, each with the instructions that copy, that request a new
# copy, that wait for a copy, and that read the copied data.
METHODS = {
    "cp.async": (r"LDGSTS", r"LDGSTS", r"DEPBAR\.LE", r"LDS\b|LDSM"),
    "TMA": (r"UTMALDG", r"SYNCS\.ARRIVE", r"SYNCS\.PHASECHK", r"HGMMA"),
}
# Without a predicate, no instruction follows these; nor does one follow BRA.
ENDS = re.compile("EXIT|RET|KILL")
NAMES = re.compile(r"\b(?:UR|R|UP|P)\d+\b")  # registers and predicates
COMPARES = re.compile(r"U?ISETP|PLOP3\.LUT$")
COPIES = re.compile(r"U?MOV|R2UR|IMAD\.(MOV|U32|MOV\.U32)")
LABEL = re.compile(r"\s*([.$\w]+):")
LINE = re.compile(r"\s*/\*\w+\*/\s+(?:@(!?\w+) )?([A-Z][\w.]*)\s*([^;]*);")
JUMPS = re.compile(r"BRA|CALL|JMP|WARPSYNC\.COLLECTIVE")
PREDICATES = {f"{kind}{n}" for kind in ("P", "UP") for n in range(8)}


class Step(NamedTuple):
    """An instruction: name, operands, the numbers of its possible successors, guard."""

    name: str
    operands: str
    follow: tuple[int, ...]
    guard: str

    @property
    def parts(self) -> list[str]:
        """The operands, one by one."""
        return [op.strip().removesuffix(".reuse") for op in self.operands.split(",")]

    @property
    def size(self) -> int:
        """The number of registers of the result."""
        if sums := re.match(r"HGMMA\.64x(\d+)", self.name):
            return int(sums[1]) // 2
        if re.match("U?SHF", self.name):
            return 1  # one, although the name may contain 64: it shifts a pair
        if "128" in self.name or self.name.startswith("LDSM"):
            return 4
        return 2 if re.search("64|WIDE|CS2R", self.name) else 1

    @property
    def writes(self) -> set[str]:
        """The registers and predicates that the instruction may write."""
        if self.name.startswith("R2P"):
            return PREDICATES
        ops = self.parts
        carries = 1
        while carries < len(ops) and re.fullmatch(r"U?P[T\d]", ops[carries]):
            carries += 1  # the carry predicates of an addition follow its result
        own = ops[: 2 if re.fullmatch(r"U?P[T\d]", ops[0]) else carries]
        written = {op for op in own if op in PREDICATES}
        for kind, first in (m.groups() for op in own if (m := re.fullmatch(r"(U?R)(\d+)", op))):
            written |= {f"{kind}{int(first) + i}" for i in range(self.size)}
        return written

    @property
    def defines(self) -> tuple[str, str] | None:
        """A predicate that it writes, and the comparison or predicate that it sets it to.

        An exclamation mark before the latter negates it.
        """
        if self.guard or "64" in self.name or not COMPARES.match(self.name):
            return None
        ops = self.parts
        if self.name != "PLOP3.LUT" and (*ops[1:2], *ops[4:]) in (("PT",) * 2, ("UPT",) * 2):
            return ops[0], f"{self.name.lstrip('U')} {ops[2]} {ops[3]}"
        if self.name == "PLOP3.LUT" and [*ops[1:4], *ops[6:]] == [*["PT"] * 3, "0x0"]:
            known = {"0x80": ops[4], "0x40": f"!{ops[4]}"}.get(ops[5])
            return (ops[0], known.removeprefix("!!")) if known is not None else None
        return None

    @property
    def copies(self) -> tuple[str, ...]:
        """The destination and source register of a plain copy; empty for other instructions."""
        if self.guard or not COPIES.fullmatch(self.name):
            return ()
        ops = self.parts
        if self.name.startswith("IMAD") and ops[1:3] == ["RZ", "RZ"]:
            ops = [ops[0], *ops[3:]]
        return (*ops,) if len(ops) == 2 and all(map(NAMES.fullmatch, ops)) else ()

    @property
    def tests(self) -> str:
        """The predicate on which it branches; empty if it does not branch on one."""
        own = self.name == "BRA" and re.fullmatch(r"`\([^)]*\)\s*", self.operands)
        return self.guard.lstrip("!") if own else ""


class Known(NamedTuple):
    """What is known on a path.

    ``means`` has predicates with the comparisons that they stand for; ``holds`` has comparisons, or
    predicates, with their truth.
    """

    means: frozenset[tuple[str, str]] = frozenset()
    holds: frozenset[tuple[str, bool]] = frozenset()

    def after(self, step: Step, gone: Collection[str], same: Mapping[str, str]) -> "Known":
        """Return what is known after an instruction.

        ``gone`` are the predicates and comparisons that it makes unknown; ``same`` maps comparisons
        of a register that it copies to the same comparisons of the copy.
        """
        means, defined = dict(self.means), step.defines
        kept = {p: t for p, t in means.items() if p not in gone and t.lstrip("!") not in gone}
        if defined is not None:
            sign, of = "!" * defined[1].startswith("!"), defined[1].lstrip("!")
            kept[defined[0]] = f"{sign}{means.get(of, of)}".removeprefix("!!")
        holds = {each for each in self.holds if each[0] not in gone}
        holds |= {(same[text], true) for text, true in self.holds if text in same}
        return Known(frozenset(kept.items()), frozenset(holds))

    def answers(self, step: Step, jumps: bool) -> set[tuple[str, bool]]:
        """Return the truth of predicates and comparisons if a branch jumps, or does not."""
        own, true = dict(self.means).get(step.tests, step.tests), jumps != (step.guard[0] == "!")
        text, true = own.lstrip("!"), true != own.startswith("!")
        same = {(p, true != t.startswith("!")) for p, t in self.means if t.lstrip("!") == text}
        return {(text, true), *same}

    def taken(self, step: Step, jumps: bool) -> "Known | None":
        """Return what is known if a branch jumps, or does not; None if that is a contradiction."""
        if not step.tests:
            return self
        answers = self.answers(step, jumps)
        if any((text, not true) in self.holds for text, true in answers):
            return None
        return self._replace(holds=self.holds | answers)

    def only(self, live: Collection[str], watched: Collection[str]) -> "Known":
        """Return the part that a later branch may test and that is watched."""
        means = (each for each in self.means if each[0] in live and each[1].lstrip("!") in watched)
        holds = (each for each in self.holds if each[0] in live and each[0] in watched)
        return Known(frozenset(means), frozenset(holds))


class State(NamedTuple):
    """A state of a walk.

    It has the instruction, what is known, whether a new copy was requested since the last read, and
    how often the read has run after such a request.
    """

    number: int
    known: Known
    copied: bool
    count: int


class Kernel:
    """The instructions of a kernel, and the paths between them."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    @classmethod
    def of(cls, text: str) -> "Kernel":
        """Parse the output of nvdisasm; instructions under @!PT never run and become NOP."""
        lines, labels = list[tuple[str, str, str]](), dict[str, int]()
        for line in text.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(lines)
            elif m := LINE.match(line):
                lines.append((m[1] or "", m[2], m[3]))
        steps = []
        for number, (guard, name, operands) in enumerate(lines):
            named = re.findall(r"`\(([^)]*)\)", operands) if JUMPS.match(name) else ()
            to = [labels[label] for label in named if label in labels]
            sure = name.startswith("BRA") and re.fullmatch(r"`\([^)]*\)\s*", operands)
            ends = not guard and (sure or ENDS.match(name))
            to += [] if ends or number + 1 == len(lines) else [number + 1]
            steps.append(Step("NOP" if guard == "!PT" else name, operands, (*to,), guard))
        return cls(steps)

    def named(self, pattern: str) -> list[int]:
        """Return the numbers of the instructions whose names start with the pattern."""
        return [n for n, step in enumerate(self.steps) if re.match(pattern, step.name)]

    @cached_property
    def texts(self) -> dict[str, set[str]]:
        """The comparisons, and the predicates that branches test, with the registers in them."""
        texts = {m[1].lstrip("!") for step in self.steps if (m := step.defines) is not None}
        texts |= {step.tests for step in self.steps if step.tests}
        return {text: {text, *NAMES.findall(text)} for text in texts}

    @cached_property
    def gone(self) -> list[set[str]]:
        """For each instruction: the predicates and comparisons that its writes make unknown."""
        every = set().union(*self.texts.values(), (s.defines[0] for s in self.steps if s.defines))
        writes = [step.writes & every for step in self.steps]
        return [
            own | {text for text, of in self.texts.items() if own and not own.isdisjoint(of)}
            for own in writes
        ]

    @cached_property
    def same(self) -> list[dict[str, str]]:
        """For each instruction: comparisons of the register that it copies, and of the copy."""
        maps = list[dict[str, str]]()
        for step in self.steps:
            to, source = step.copies or ("", "")
            texts = (text for text, of in self.texts.items() if source in of and to not in of)
            pairs = ((text, re.sub(rf"\b{source}\b", to, text)) for text in texts)
            maps.append({text: other for text, other in pairs if other in self.texts})
        return maps

    @cached_property
    def live(self) -> list[set[str]]:
        """For each instruction: what it, or a branch after it, may test."""
        means = dict[str, set[str]]()  # all that a predicate may stand for, anywhere in the kernel
        for predicate, text in (pair for s in self.steps if (pair := s.defines) is not None):
            means.setdefault(predicate, {predicate}).add(text.lstrip("!"))
        for _ in means:  # predicates may be copies of copies
            for texts in means.values():
                texts |= {each for text in [*texts] for each in means.get(text, ())}
        before = list[list[int]]([] for _ in self.steps)
        live, left = list[set[str]](), list[int]()
        for number, step in enumerate(self.steps):
            for to in step.follow:
                before[to].append(number)
            own = {step.tests, *means.get(step.tests, ())} - {""}
            live.append(own | {step.defines[1].lstrip("!")} if step.defines is not None else own)
            left += [number] if live[number] else []
        while left:
            number = left.pop()
            for last in before[number]:
                named = {text for text, to in self.same[last].items() if to in live[number]}
                more = (live[number] - self.gone[last] | named) - live[last]
                if more:
                    live[last] |= more
                    left.append(last)
        return live

    def reached(self, starts: Iterable[int], stop: Collection[int]) -> set[int]:
        """Return the instructions that paths from ``starts`` reach without passing a ``stop``."""
        visited, left = set[int](), [*starts]
        while left:
            number = left.pop()
            if number not in visited and number not in stop:
                visited.add(number)
                left += self.steps[number].follow
        return visited

    def late(self, read: int, again: set[int], waits: Collection[int], ahead: int) -> bool:
        """Return whether a read may run more than ``ahead`` times after a new copy, without a wait.

        The first walk ignores the conditions of branches.  If the path that it finds contradicts
        itself, the next walk also watches the comparisons that contradict each other.
        """
        watched = set[str]()
        while (path := self.path(read, again, waits, ahead, watched)) is not None:
            if not (more := self.contradiction(path)):
                return True
            watched |= more if not more <= watched else {*self.texts}
        return False

    def path(
        self,
        read: int,
        again: set[int],
        waits: Collection[int],
        ahead: int,
        watched: Collection[str],
    ) -> list[int] | None:
        """Return a path on which a read runs that often after a new copy without a wait, or None.

        Of consecutive instructions that change nothing, the path has only the first.
        """
        seen = dict[State, tuple[State | None, int]]()  # the state before, and the next instruction
        left: list[tuple[int, Known, bool, int, State | None]] = [
            (to, Known(), False, 0, None) for to in self.steps[read].follow
        ]
        stops = {read, *again, *waits}
        while left:
            to, known, copied, count, last = left.pop()
            number = to
            while number not in stops and self.passed[number]:
                number += 1
            known = known.only(self.live[number], watched)
            state = State(number, known, copied, count)
            if state in seen or number in waits:
                continue
            seen[state] = last, to
            if number == read and copied:
                count += 1
                if count > ahead:
                    break
            copied = number in again or (copied and number != read)
            step = self.steps[number]
            for to in step.follow:
                branch = known.taken(step, to != number + 1)
                if branch is not None:
                    then = branch.after(step, self.gone[number], self.same[number])
                    left.append((to, then, copied, count, state))
        else:
            return None
        path = list[int]()
        at: State | None = state
        while at is not None:
            at, to = seen[at]
            path.append(to)
        return path[::-1]

    def contradiction(self, path: list[int]) -> set[str]:
        """Return the comparisons in which a path contradicts itself, and their copies, if any."""
        known = Known()
        for number, to in pairwise(path):
            at = number
            while not self.steps[at].tests and self.steps[at].follow == (at + 1,) and at + 1 != to:
                known = known.after(self.steps[at], self.gone[at], self.same[at])
                at += 1
            step = self.steps[at]
            branch = known.taken(step, to != at + 1)
            if branch is None:
                texts = {text for text, _ in known.answers(step, to != at + 1)}
                while more := {t for s in self.same for t, o in s.items() if o in texts} - texts:
                    texts |= more
                return texts
            known = branch.after(step, self.gone[at], self.same[at])
        return set()

    @cached_property
    def passed(self) -> list[bool]:
        """For each instruction: whether it changes nothing that is known and goes to the next."""
        return [
            step.follow == (number + 1,)
            and not (self.gone[number] or self.same[number] or step.defines)
            for number, step in enumerate(self.steps)
        ]

    def firsts(self, reads: list[int], again: set[int]) -> list[int]:
        """Return the first read of each basic block, and the first after each new copy in it."""
        begins = {to for n, step in enumerate(self.steps) for to in step.follow if to != n + 1}
        begins |= again | {n + 1 for n, s in enumerate(self.steps) if s.follow != (n + 1,)}
        pairs = zip([-1, *reads], reads, strict=False)
        return [
            n
            for before, n in pairs
            if before < 0 or not begins.isdisjoint(range(before + 1, n + 1))
        ]


def unwaited(text: str, ahead: int = 0) -> list[str]:
    """Return the reads of copied data that some path reaches without a wait for the copy.

    There are two kinds of paths: from the kernel's start (for cp.async, through a copy), and around
    a loop that copies and reads, or that lets another warp copy; elsewhere, a read may be of data
    that an earlier iteration waited for.  A kernel that waits ``ahead`` (1: for the data of the
    next iteration) may read that many times more.  A wait that leaves as many groups of copies
    pending as the kernel has does not count.
    """
    kernel, unsafe = Kernel.of(text), list[str]()
    groups = len(kernel.named("LDGDEPBAR$"))
    for method, (copy, again, wait, read) in METHODS.items():
        copies, more = kernel.named(copy), {*kernel.named(again)}
        reads = kernel.named(read) if copies else []
        waits = {n for n in kernel.named(wait) if not leaves(kernel.steps[n]) >= groups > 0}
        begin = kernel.reached([0], waits)
        if copies and method == "cp.async":
            begin = kernel.reached(begin.intersection(copies), waits)
        late = {n for n in kernel.firsts(reads, more) if kernel.late(n, more, waits, ahead)}
        steps = [kernel.steps[n] for n in reads if n in begin | late]
        unsafe += [f"{method}: {step.name} {step.operands.strip()}" for step in steps]
    return unsafe


def leaves(step: Step) -> int:
    """Return how many groups of cp.async a wait leaves pending; -1 for other instructions."""
    match = re.fullmatch(r"SB0, (0x\w+)\s*", step.operands)
    return int(match[1], 16) if match and step.name == "DEPBAR.LE" else -1


# ---- compared with PTX --------------------------------------------------------------------------
# Operations of warpgroups that come after waits, then the waits: patterns for SASS, and for PTX.
BEHIND = {
    r"HGMMA": r"wgmma\.mma_async",
    r"UTMALDG": r"cp\.async\.bulk\.tensor",
    r"SYNCS\.ARRIVE": r"mbarrier\.arrive",
    r"UTMAREDG|UBLKRED": r"cp\.reduce\.async\.bulk",
}
BEFORE = {
    r"SYNCS\.PHASECHK": r"mbarrier\.try_wait",
    r"WARPGROUP\.DEPBAR": r"wgmma\.wait_group",
}
ALONE = r"U"  # TMA's: SASS issues them in a loop over the requesting lanes, which PTX does not have
Waits = dict[str, list[tuple[int, ...]]]


def passed(
    follow: Sequence[Sequence[int]], starts: Iterable[int], waits: Mapping[int, int]
) -> list[int]:
    """Return for each instruction, as bits, the waits on every path to it from ``starts``.

    All bits are set for an instruction that no path reaches.
    """
    into, left = [-1] * len(follow), [*starts]
    for number in left:
        into[number] = 0
    while left:
        number = left.pop()
        behind = into[number] | waits.get(number, 0)
        for to in follow[number]:
            if into[to] & ~behind:
                into[to] &= behind
                left.append(to)
    return into


def between(follow: Sequence[Sequence[int]], kept: Collection[int]) -> list[list[int]]:
    """Return the successors of each instruction, without those that one other always follows.

    Instructions in ``kept`` stay.
    """
    ends = [*range(len(follow))]
    for number, to in reversed([*enumerate(follow)]):
        if number not in kept and len(to) == 1 and to[0] > number:
            ends[number] = ends[to[0]]
    return [[ends[to] for to in each] for each in follow]


def waited(names: Sequence[str], follow: Sequence[Sequence[int]], language: int) -> Waits:
    """Return how many waits of each kind come before each product, copy and arrival.

    They are counted on every path from the kernel's start; then, except for TMA's instructions, on
    every path from the instruction back to itself: -1 where no loop leads back.  Language is 0 for
    SASS, 1 for PTX.
    """

    def named(pair: tuple[str, str]) -> list[int]:
        return [n for n, name in enumerate(names) if re.match(pair[language], name)]

    kinds, operations = [*map(named, BEFORE.items())], [*map(named, BEHIND.items())]
    waits = {number: 1 << bit for bit, number in enumerate(chain(*kinds))}
    masks = [sum(waits[number] for number in kind) for kind in kinds]
    follow = between(follow, {*waits, *chain(*operations)})
    first = passed(follow, [0], waits)

    def counts(number: int, alone: bool) -> tuple[int, ...]:
        before = [first[number]]
        before += [] if alone else [passed(follow, follow[number], waits)[number]]
        return tuple((b & mask).bit_count() if b >= 0 else -1 for b in before for mask in masks)

    return {
        name: sorted(
            counts(number, re.match(ALONE, name) is not None)
            for number in several
            if first[number] >= 0
        )
        for name, several in zip(BEHIND, operations, strict=True)
    }


def waited_in_sass(text: str) -> Waits:
    """Return ``waited`` for the output of nvdisasm."""
    steps = Kernel.of(text).steps
    return waited([step.name for step in steps], [step.follow for step in steps], 0)


def waited_in_ptx(compiled: Compiled) -> Waits:
    """Return ``waited`` for a kernel's PTX."""
    body = next(body for body in functions(compiled.text)[1] if body.name == compiled.entry)
    parsed = lines(body)
    return waited([".".join(line.words) for line in parsed], [x.follow for x in parsed], 1)
