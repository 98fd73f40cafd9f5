"""That a compiled kernel waits for what it copies before it reads it, on every path of its SASS.

    unwaited(text)        the reads to which a path leads that waits for no copy
    waited_in_sass(text)  how many waits stand before what warpgroups do, which PTX says too

Two branches by one predicate, or by one comparison of what nothing writes in between, go one way.
A walk along the paths keeps of what is known only what a later branch may ask.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .compiled.uniform import lines
from .ptx import Compiled, functions

# What copies into shared memory; what asks for a new copy; what waits for one; what reads it.
WAYS = {
    "cp.async": (r"LDGSTS", r"LDGSTS", r"DEPBAR\.LE", r"LDS\b|LDSM"),
    "TMA": (r"UTMALDG", r"SYNCS\.ARRIVE", r"SYNCS\.PHASECHK", r"HGMMA"),
}
ENDS = r"EXIT|RET|KILL"  # where they stand without a predicate, nothing follows; so too BRA
NAMES = re.compile(r"\b(?:UR|R|UP|P)\d+\b")  # of registers and predicates
PREDICATES = {f"{kind}{n}" for kind in ("P", "UP") for n in range(8)}


class Step(NamedTuple):
    """An instruction: name, operands, the numbers of those that may come next, guard."""

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
        """Registers of the result."""
        if sums := re.match(r"HGMMA\.64x(\d+)", self.name):
            return int(sums[1]) // 2
        if re.match("U?SHF", self.name):
            return 1  # of two
        if "128" in self.name or self.name.startswith("LDSM"):
            return 4
        return 2 if re.search("64|WIDE|CS2R", self.name) else 1

    @property
    def writes(self) -> set[str]:
        """Registers and predicates that it may write."""
        if self.name.startswith("R2P"):
            return PREDICATES
        ops = self.parts
        carries = 1
        while carries < len(ops) and re.fullmatch(r"U?P[T\d]", ops[carries]):
            carries += 1  # of a sum, behind it
        own = ops[: 2 if re.fullmatch(r"U?P[T\d]", ops[0]) else carries]
        found = {op for op in own if op in PREDICATES}
        for kind, first in (m.groups() for op in own if (m := re.fullmatch(r"(U?R)(\d+)", op))):
            found |= {f"{kind}{int(first) + i}" for i in range(self.size)}
        return found

    @property
    def makes(self) -> tuple[str, str] | None:
        """A predicate that it writes, with the comparison, or the predicate, that it then holds.

        It holds the opposite behind an exclamation mark.
        """
        ops = self.parts
        if self.guard or "64" in self.name:
            return None
        if re.match("U?ISETP", self.name) and (*ops[1:2], *ops[4:]) in (("PT",) * 2, ("UPT",) * 2):
            return ops[0], f"{self.name.lstrip('U')} {ops[2]} {ops[3]}"
        if self.name == "PLOP3.LUT" and [*ops[1:4], *ops[6:]] == [*["PT"] * 3, "0x0"]:
            known = {"0x80": ops[4], "0x40": f"!{ops[4]}"}.get(ops[5])
            return (ops[0], known.removeprefix("!!")) if known is not None else None
        return None

    @property
    def copies(self) -> tuple[str, ...]:
        """Two registers, the second of which it copies into the first, or none."""
        ops = self.parts
        if self.name.startswith("IMAD") and ops[1:3] == ["RZ", "RZ"]:
            ops = [ops[0], *ops[3:]]
        one = re.fullmatch(r"U?MOV|R2UR|IMAD\.(MOV|U32|MOV\.U32)", self.name) and not self.guard
        return (*ops,) if one and len(ops) == 2 and all(map(NAMES.fullmatch, ops)) else ()

    @property
    def asks(self) -> str:
        """The predicate by which it branches, or nothing."""
        own = self.name == "BRA" and re.fullmatch(r"`\([^)]*\)\s*", self.operands)
        return self.guard.lstrip("!") if own else ""


class Known(NamedTuple):
    """What holds on a path: what predicates compare, and which comparisons, or predicates, hold."""

    means: frozenset[tuple[str, str]] = frozenset()
    holds: frozenset[tuple[str, bool]] = frozenset()

    def after(self, step: Step, gone: Collection[str], same: Mapping[str, str]) -> "Known":
        """Return what holds behind an instruction that writes, makes a comparison, or copies."""
        means, made = dict(self.means), step.makes
        kept = {p: t for p, t in means.items() if p not in gone and t.lstrip("!") not in gone}
        if made is not None:
            sign, of = "!" * made[1].startswith("!"), made[1].lstrip("!")
            kept[made[0]] = f"{sign}{means.get(of, of)}".removeprefix("!!")
        holds = {each for each in self.holds if each[0] not in gone}
        holds |= {(same[text], so) for text, so in self.holds if text in same}
        return Known(frozenset(kept.items()), frozenset(holds))

    def answers(self, step: Step, jumps: bool) -> set[tuple[str, bool]]:
        """Return what holds of predicates and comparisons where a branch is taken, or not."""
        own, so = dict(self.means).get(step.asks, step.asks), jumps != (step.guard[0] == "!")
        text, so = own.lstrip("!"), so != own.startswith("!")
        same = {(p, so != t.startswith("!")) for p, t in self.means if t.lstrip("!") == text}
        return {(text, so), *same}

    def taken(self, step: Step, jumps: bool) -> "Known | None":
        """Return what holds where a branch is taken, or not; None if it cannot be so."""
        if not step.asks:
            return self
        answers = self.answers(step, jumps)
        if any((text, not so) in self.holds for text, so in answers):
            return None
        return self._replace(holds=self.holds | answers)

    def only(self, live: Collection[str], watched: Collection[str]) -> "Known":
        """Return what a later branch may ask, of what is watched."""
        means = (each for each in self.means if each[0] in live and each[1].lstrip("!") in watched)
        holds = (each for each in self.holds if each[0] in live and each[0] in watched)
        return Known(frozenset(means), frozenset(holds))


class State(NamedTuple):
    """Where a walk is, what it knows, whether there is a new copy, how often the read has run."""

    number: int
    known: Known
    copied: bool
    count: int


class Kernel:
    """The instructions of a kernel with the paths between them."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    @classmethod
    def of(cls, text: str) -> "Kernel":
        """Read a text of nvdisasm; instructions under @!PT never run."""
        found, labels = list[tuple[str, str, str]](), dict[str, int]()
        for line in text.splitlines():
            if label := re.match(r"\s*([.$\w]+):", line):
                labels[label[1]] = len(found)
            elif m := re.match(r"\s*/\*\w+\*/\s+(?:@(!?\w+) )?([A-Z][\w.]*)\s*([^;]*);", line):
                found.append((m[1] or "", m[2], m[3]))
        made = []
        for number, (guard, name, operands) in enumerate(found):
            jump = re.match(r"BRA|CALL|JMP|WARPSYNC\.COLLECTIVE", name)
            to = [labels[t] for t in re.findall(r"`\(([^)]*)\)", operands) if jump and t in labels]
            sure = name.startswith("BRA") and re.fullmatch(r"`\([^)]*\)\s*", operands)
            ends = not guard and (sure or re.match(ENDS, name))
            to += [] if ends or number + 1 == len(found) else [number + 1]
            made.append(Step("NOP" if guard == "!PT" else name, operands, (*to,), guard))
        return cls(made)

    def named(self, pattern: str) -> list[int]:
        """Return the numbers of the instructions whose name begins like this."""
        return [n for n, step in enumerate(self.steps) if re.match(pattern, step.name)]

    @cached_property
    def texts(self) -> dict[str, set[str]]:
        """Of each comparison, and each predicate that a branch asks, what must not be written."""
        texts = {m[1].lstrip("!") for step in self.steps if (m := step.makes) is not None}
        texts |= {step.asks for step in self.steps if step.asks}
        return {text: {text, *NAMES.findall(text)} for text in texts}

    @cached_property
    def gone(self) -> list[set[str]]:
        """What an instruction makes unknown: predicates, and comparisons of what it writes."""
        every = set().union(*self.texts.values(), (s.makes[0] for s in self.steps if s.makes))
        writes = [step.writes & every for step in self.steps]
        return [
            own | {text for text, of in self.texts.items() if own and not own.isdisjoint(of)}
            for own in writes
        ]

    @cached_property
    def same(self) -> list[dict[str, str]]:
        """Of an instruction that copies, comparisons of the source and the same of the result."""
        found = list[dict[str, str]]()
        for step in self.steps:
            to, source = step.copies or ("", "")
            texts = (text for text, of in self.texts.items() if source in of and to not in of)
            pairs = ((text, re.sub(rf"\b{source}\b", to, text)) for text in texts)
            found.append({text: other for text, other in pairs if other in self.texts})
        return found

    @cached_property
    def live(self) -> list[set[str]]:
        """What a branch behind an instruction, or itself, may ask: predicates and comparisons."""
        means = dict[str, set[str]]()  # of predicates, anywhere
        for predicate, text in (made for step in self.steps if (made := step.makes) is not None):
            means.setdefault(predicate, {predicate}).add(text.lstrip("!"))
        for _ in means:  # copies of copies
            for texts in means.values():
                texts |= {each for text in [*texts] for each in means.get(text, ())}
        before = list[list[int]]([] for _ in self.steps)
        live, left = list[set[str]](), list[int]()
        for number, step in enumerate(self.steps):
            for to in step.follow:
                before[to].append(number)
            own = {step.asks, *means.get(step.asks, ())} - {""}
            live.append(own | {step.makes[1].lstrip("!")} if step.makes is not None else own)
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
        """Return the instructions that may run from some on, with none before them that stops."""
        found, left = set[int](), [*starts]
        while left:
            number = left.pop()
            if number not in found and number not in stop:
                found.add(number)
                left += self.steps[number].follow
        return found

    def late(self, read: int, again: set[int], waits: Collection[int], ahead: int) -> bool:
        """Say whether a read may run more than ``ahead`` times behind a new copy, with no wait.

        At first a walk asks no branch; where the path that it finds contradicts itself, the next
        walk watches what the path contradicts itself in.
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
        """Return a path on which a read runs so often behind a new copy, with no wait, or None.

        Of instructions that follow each other and that nothing depends on, it has the first.
        """
        seen = dict[State, tuple[State | None, int]]()  # the state before, and how it went on
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
                way = known.taken(step, to != number + 1)
                if way is not None:
                    held = way.after(step, self.gone[number], self.same[number])
                    left.append((to, held, copied, count, state))
        else:
            return None
        path = list[int]()
        at: State | None = state
        while at is not None:
            at, to = seen[at]
            path.append(to)
        return path[::-1]

    def contradiction(self, path: list[int]) -> set[str]:
        """Return what a path holds to be so and not so, with what that follows from; or nothing."""
        known = Known()
        for number, to in pairwise(path):
            at = number
            while not self.steps[at].asks and self.steps[at].follow == (at + 1,) and at + 1 != to:
                known = known.after(self.steps[at], self.gone[at], self.same[at])
                at += 1
            step = self.steps[at]
            way = known.taken(step, to != at + 1)
            if way is None:
                found = {text for text, _ in known.answers(step, to != at + 1)}
                while more := {t for s in self.same for t, o in s.items() if o in found} - found:
                    found |= more
                return found
            known = way.after(step, self.gone[at], self.same[at])
        return set()

    @cached_property
    def passed(self) -> list[bool]:
        """Whether an instruction changes nothing of what is known, and the next one follows."""
        return [
            step.follow == (number + 1,)
            and not (self.gone[number] or self.same[number] or step.makes)
            for number, step in enumerate(self.steps)
        ]

    def firsts(self, reads: list[int], again: set[int]) -> list[int]:
        """Return the first read of each row of instructions without branches."""
        begins = {to for n, step in enumerate(self.steps) for to in step.follow if to != n + 1}
        begins |= again | {n + 1 for n, s in enumerate(self.steps) if s.follow != (n + 1,)}
        pairs = zip([-1, *reads], reads, strict=False)
        return [
            n
            for before, n in pairs
            if before < 0 or not begins.isdisjoint(range(before + 1, n + 1))
        ]


def unwaited(text: str, ahead: int = 0) -> list[str]:
    """Return the reads of copied data to which a path leads that waits for no copy.

    Two kinds of path: from the kernel's begin, for cp.async by way of a copy, and around a loop
    that copies and reads, or that lets another warp copy; in between, a read may be of what an
    earlier turn waited for.  A kernel that waits ``ahead``, for the next turn, reads once more.  A
    wait that leaves as many groups of copies on their way as the kernel has is none.
    """
    kernel, found = Kernel.of(text), list[str]()
    groups = len(kernel.named("LDGDEPBAR$"))
    for way, (copy, again, wait, read) in WAYS.items():
        copies, more = kernel.named(copy), {*kernel.named(again)}
        reads = kernel.named(read) if copies else []
        waits = {n for n in kernel.named(wait) if not leaves(kernel.steps[n]) >= groups > 0}
        begin = kernel.reached([0], waits)
        if copies and way == "cp.async":
            begin = kernel.reached(begin.intersection(copies), waits)
        late = {n for n in kernel.firsts(reads, more) if kernel.late(n, more, waits, ahead)}
        steps = [kernel.steps[n] for n in reads if n in begin | late]
        found += [f"{way}: {step.name} {step.operands.strip()}" for step in steps]
    return found


def leaves(step: Step) -> int:
    """Return how many groups of cp.async a wait leaves on their way; of others -1."""
    found = re.fullmatch(r"SB0, (0x\w+)\s*", step.operands)
    return int(found[1], 16) if found and step.name == "DEPBAR.LE" else -1


# ---- as PTX has them ----------------------------------------------------------------------------
# What comes behind waits, and waits, of warpgroups: as SASS has them, and as PTX has.
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
ALONE = r"U"  # TMA is told by a loop over the lanes that ask for it, which PTX does not have
Waits = dict[str, list[tuple[int, ...]]]


def passed(follow: Sequence[Sequence[int]], starts: Iterable[int], waits: int) -> list[int]:
    """Return which waits, as bits, every path from some instructions to each one has passed.

    Where no path leads, all bits are set.
    """
    into, left = [-1] * len(follow), [*starts]
    for number in left:
        into[number] = 0
    while left:
        number = left.pop()
        behind = into[number] | (waits & 1 << number)
        for to in follow[number]:
            if into[to] & ~behind:
                into[to] &= behind
                left.append(to)
    return into


def waited(names: Sequence[str], follow: Sequence[Sequence[int]], language: int) -> Waits:
    """Return how many waits of each kind come before a product, a copy or an arrival.

    On every path since the kernel's begin; and since that instruction itself, but for TMA's, -1
    where no loop leads back to it.  Language is 0 for SASS, 1 for PTX.
    """

    def bits(pattern: str) -> int:
        return sum(1 << n for n, name in enumerate(names) if re.match(pattern, name))

    kinds = [bits(pair[language]) for pair in BEFORE.items()]
    first = passed(follow, [0], sum(kinds))

    def counts(number: int, alone: bool) -> tuple[int, ...]:
        ways = [first[number]]
        ways += [] if alone else [passed(follow, follow[number], sum(kinds))[number]]
        return tuple((w & kind).bit_count() if w >= 0 else -1 for w in ways for kind in kinds)

    return {
        pair[0]: sorted(
            counts(number, re.match(ALONE, pair[0]) is not None)
            for number, name in enumerate(names)
            if re.match(pair[language], name) and first[number] >= 0
        )
        for pair in BEHIND.items()
    }


def waited_in_sass(text: str) -> Waits:
    """Return what ``waited`` says of a text of nvdisasm."""
    steps = Kernel.of(text).steps
    return waited([step.name for step in steps], [step.follow for step in steps], 0)


def waited_in_ptx(made: Compiled) -> Waits:
    """Return what ``waited`` says of a kernel's PTX."""
    body = next(body for body in functions(made.text)[1] if body.name == made.entry)
    several = lines(body)
    return waited([".".join(line.words) for line in several], [x.follow for x in several], 1)
