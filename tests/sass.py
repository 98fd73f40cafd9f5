"""The instructions of compiled kernels, as nvdisasm shows them (the extra ``sass`` has it).

python -m tests.sass --write      renews what docs/performance.md says of attention's loops
"""

import functools
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from unsloth_cupy.files import written_beside

from . import budget
from .variants import ARCHITECTURES, Variant, constants, of_kernel

BEGIN, END = "<!-- loops: begin -->", "<!-- loops: end -->"
PRODUCT = r"HMMA\.16816"  # of tensor cores
ANY_PRODUCT, ACCESS = r"\w*MMA\b", r"LD|ST|ATOM|RED|UTMA"
PLAIN = re.compile(r"(attention_forward )?bfloat16 queries=\d+ dim=(\d+) value_dim=\2( again)?")
LOOPS = ("attention_forward", "attention_backward", "attention_decode")


SIZES = {"__half": 2, "__nv_bfloat16": 2, "float": 4}


class Loop(NamedTuple):
    """A loop of a kernel: all its instructions, and those that are products of tensor cores."""

    instructions: int
    products: int


def whole(variant: Variant) -> bool:
    """Say whether a variant accesses 16 bytes at a time: addresses and its row allow it."""
    given = constants(variant.launch.source)
    size = SIZES[given.get("T", "float")]
    if given.get("RAGGED") == "true" and int(given["COLUMNS"]) * size < 16:
        return False  # all accesses are cut
    if "false" in (given.get("WIDE"), given.get("X_WIDE")):
        return False
    return int(given.get("LANES", 16 // size)) * size == 16


@functools.cache
def nvdisasm() -> Path:
    """Return the disassembler of the wheel; raise LookupError without it."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("needs the extra `sass` (nvidia-cuda-nvdisasm)") from None
    return Path(str(next(f.locate() for f in files if f.name in ("nvdisasm", "nvdisasm.exe"))))


def disassembled(variant: Variant) -> str:
    """Return the text of a variant's kernel."""
    made, _ = budget.cubin(variant.launch.source, variant.launch.options, variant.arch)
    return text_of(made, variant.kernel)


def text_of(binary: bytes, kernel: str) -> str:
    """Return the text of a kernel of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "unit.cubin"
        cubin.write_bytes(binary)
        command = [nvdisasm(), "-c", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = re.search(rf"\.text\.{kernel}:\n(.*?)(?=^\.text\.|\Z)", text, re.M | re.S)
    assert section is not None, text[:1000]
    return section[1]


def instructions(text: str) -> list[str]:
    """Return the instructions, with their modifiers and without their operands."""
    return re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)", text, re.M)


def bodies(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the loops, from a label to a branch back to it: where each begins, and its body."""
    begins, so_far = dict[str, int](), list[str]()
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begins[label[1]] = len(so_far)
        so_far += instructions(line)
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in begins:
            yield begins[branch[1]], so_far[begins[branch[1]] :]


def count(pattern: str, names: list[str]) -> int:
    """Return how many instructions have a name that begins like this."""
    return sum(bool(re.match(pattern, name)) for name in names)


def loops(text: str) -> list[Loop]:
    """Return the size of each loop, and its products."""
    return [Loop(len(body), count(PRODUCT, body)) for _, body in bodies(text)]


def hot_loop(text: str) -> int:
    """Return the instructions of the loop that a kernel spends its time in.

    That is the shortest of those with most products; where nothing is multiplied, the innermost one
    with most accesses to memory; where there is no loop, the whole kernel.
    """
    found = [(begin, body) for begin, body in bodies(text) if {*body} != {"BRA"}]  # behind the end
    if not found:
        return len([name for name in instructions(text) if not re.match("NOP|BRA$", name)])
    if not any(count(ANY_PRODUCT, body) for _, body in found):
        spans = [(begin, begin + len(body)) for begin, body in found]
        found = [
            each
            for each, (begin, end) in zip(found, spans, strict=True)
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
        ]
    parts = ((count(ANY_PRODUCT, body), count(ACCESS, body), body) for _, body in found)
    return -max(
        (products, accesses if not products else 0, -len(body))
        for products, accesses, body in parts
    )[2]


# ---- waits --------------------------------------------------------------------------------------
# What copies into shared memory; what asks for a new copy; what waits for one; what reads it.
WAYS = {
    "cp.async": (r"LDGSTS", r"LDGSTS", r"DEPBAR\.LE", r"LDS\b|LDSM"),
    "TMA": (r"UTMALDG", r"SYNCS\.ARRIVE", r"SYNCS\.PHASECHK", r"HGMMA"),
}
ENDS = r"EXIT|RET|KILL"  # where they stand without a predicate, nothing follows; so too BRA


class Step(NamedTuple):
    """An instruction: name, operands, the numbers of those that may come next, guard."""

    name: str
    operands: str
    follow: tuple[int, ...]
    guard: str

    @property
    def writes(self) -> int:
        """Registers, from the first operand on."""
        if sums := re.match(r"HGMMA\.64x(\d+)", self.name):
            return int(sums[1]) // 2
        if "128" in self.name or self.name.startswith("LDSM"):
            return 4
        return 2 if re.search("64|WIDE|CS2R", self.name) else 1


class Known(NamedTuple):
    """What holds on a path: what predicates compare, and which comparisons, or predicates, hold."""

    means: frozenset[tuple[str, str]] = frozenset()
    holds: frozenset[tuple[str, bool]] = frozenset()

    def after(self, step: Step) -> "Known":
        """Return what holds behind an instruction: nothing of what it writes."""
        ops = [op.strip().removesuffix(".reuse") for op in step.operands.split(",")]
        means, made = dict(self.means), dict[str, str]()
        alone = ops[1::3] in (["PT", "PT"], ["UPT", "UPT"])
        if re.match("U?ISETP", step.name) and alone and not step.guard:
            made[ops[0]] = f"{step.name} {ops[2]} {ops[3]}"
        if step.name == "PLOP3.LUT" and [*ops[1:4], *ops[5:]] == [*["PT"] * 3, "0x80", "0x0"]:
            made[ops[0]] = means.get(ops[4], ops[4])
        own = ops[: 2 if re.fullmatch(r"U?P[T\d]", ops[0]) else 1]
        gone = {op for op in own if re.fullmatch(r"U?P\d", op)}
        for kind, number in (m.groups() for op in own if (m := re.fullmatch(r"(U?R)(\d+)", op))):
            gone |= {f"{kind}{int(number) + i}" for i in range(step.writes)}
        kept = {p: text for p, text in means.items() if gone.isdisjoint([p, *text.split()])}
        holds = {(text, so) for text, so in self.holds if gone.isdisjoint(text.split())}
        return Known(frozenset((kept | made).items()), frozenset(holds))

    def taken(self, step: Step, jumps: bool) -> "Known | None":
        """Return what holds where a branch is taken, or not; None if it cannot be so."""
        if step.name != "BRA" or not step.guard:
            return self
        predicate = step.guard.lstrip("!")
        text, so = dict(self.means).get(predicate, predicate), jumps != (step.guard[0] == "!")
        return (
            None if (text, not so) in self.holds else self._replace(holds=self.holds | {(text, so)})
        )


def steps(text: str) -> list[Step]:
    """Return the instructions with the paths between them; those under @!PT never run."""
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
    return made


def reached(several: list[Step], starts: Iterable[int], stop: str) -> set[int]:
    """Return the instructions that may run from some on, with none before them that stops."""
    found, left = set[int](), [*starts]
    while left:
        number = left.pop()
        if number not in found and not re.match(stop, several[number].name):
            found.add(number)
            left += several[number].follow
    return found


def turns(several: list[Step], read: int, again: set[int], wait: str) -> int:
    """Return how often a read may run once more behind a new copy, with no wait; 2 is the most.

    Two branches by one predicate, or comparison, of what nothing writes in between, go one way.
    """
    most, seen = 0, set[tuple[int, Known, bool, int]]()
    left = [(number, Known(), False, 0) for number in several[read].follow]
    while left and most < 2:
        state = left.pop()
        number, known, copied, count = state
        step = several[number]
        if state in seen or re.match(wait, step.name):
            continue
        seen.add(state)
        count += number == read and copied
        most = max(most, count)
        copied = number in again or (copied and number != read)
        known = known.after(step)
        ways = ((to, known.taken(step, to != number + 1)) for to in step.follow)
        left += [(to, held, copied, count) for to, held in ways if held is not None]
    return most


def unwaited(text: str, ahead: int = 0) -> list[str]:
    """Return the reads of copied data to which a path leads that waits for no copy.

    Two kinds of path: from the kernel's begin, for cp.async by way of a copy, and around a loop
    that copies and reads, or that lets another warp copy; in between, a read may be of what an
    earlier turn waited for.  A kernel that waits ``ahead``, for the next turn, reads once more.  A
    wait that leaves as many groups of copies on their way as the kernel has is none.
    """
    several, found = steps(text), list[str]()
    groups = sum(step.name == "LDGDEPBAR" for step in several)
    for way, (copy, again, wait, read) in WAYS.items():
        own = [s._replace(name="NOP") if leaves(s) >= groups > 0 else s for s in several]
        copies, more = (
            [n for n, step in enumerate(own) if re.match(name, step.name)] for name in (copy, again)
        )
        begin = reached(own, [0], wait)
        if copies and way == "cp.async":
            begin = reached(own, begin.intersection(copies), wait)
        reads = [n for n, step in enumerate(own) if copies and re.match(read, step.name)]
        late = {n for n in firsts(own, reads, {*more}) if turns(own, n, {*more}, wait) > ahead}
        found += [
            f"{way}: {own[n].name} {own[n].operands.strip()}" for n in reads if n in begin | late
        ]
    return found


def firsts(several: list[Step], reads: list[int], again: set[int]) -> list[int]:
    """Return the first read of each row of instructions without branches."""
    begins = {to for n, step in enumerate(several) for to in step.follow if to != n + 1} | again
    begins |= {n + 1 for n, step in enumerate(several) if step.follow != (n + 1,)}
    pairs = zip([-1, *reads], reads, strict=False)
    return [
        n for before, n in pairs if before < 0 or not begins.isdisjoint(range(before + 1, n + 1))
    ]


def leaves(step: Step) -> int:
    """Return how many groups of cp.async a wait leaves on their way; of others -1."""
    found = re.fullmatch(r"SB0, (0x\w+)\s*", step.operands)
    return int(found[1], 16) if found and step.name == "DEPBAR.LE" else -1


def tile_loop(text: str) -> Loop:
    """Return the shortest of the loops with most products: what a warp does for each tile."""
    return max(loops(text), key=lambda loop: (loop.products, -loop.instructions))


def rows(arch: str) -> Iterator[str]:
    """Return the lines of the table for an architecture."""
    for kernel in LOOPS:
        for variant in of_kernel(kernel, arch):
            known = PLAIN.fullmatch(variant.label)
            if known is None or known[2] not in ("64", "128"):
                continue
            given = constants(variant.launch.source)
            by = {"true": " by keys", "false": " by queries"}.get(given.get("BY_KEYS", ""), "")
            registers, _, _, share = budget.numbers(variant)
            loop = tile_loop(disassembled(variant))
            cells = [f"sm_{arch}", f"`{kernel}`{by}", known[2], variant.launch.threads // 32]
            cells += [given.get("TILE") or given["TILE_KEYS"], registers, f"{share} %", *loop]
            yield f"| {' | '.join(map(str, cells))} |"


def write() -> None:
    """Renew the table."""
    text = budget.PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    lines = [
        "| architecture | kernel | head dim | warps | tile | registers | occupancy |"
        " instructions of a tile | `mma` |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line for arch in ARCHITECTURES for line in rows(arch)),
    ]
    with written_beside(budget.PAGE) as partial:
        partial.write_text("\n".join([f"{head}{BEGIN}", *lines, tail]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
