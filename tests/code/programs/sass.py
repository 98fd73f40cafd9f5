"""Count the SASS instructions of compiled kernels with nvdisasm.

python -m tests.code.programs.sass --write    rewrites attention's loops in docs/performance.md
"""

import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unsloth_cupy.files import atomic_path

from ...machines.cuda_on_cpu.build import kept_file
from . import budget
from .variants import ARCHITECTURES, Variant, constants, of_kernel

BEGIN, END = "<!-- loops: begin -->", "<!-- loops: end -->"
PRODUCT = r"HMMA\.16816"  # of tensor cores
ANY_PRODUCT, ACCESS = r"\w*MMA\b", r"LD|ST|ATOM|RED|UTMA"
PLAIN = re.compile(r"(attention_forward )?bfloat16 queries=\d+ dim=(\d+) value_dim=\2( again)?")
LOOPS = ("attention_forward", "attention_backward", "attention_decode")


SIZES = {"__half": 2, "__nv_bfloat16": 2, "float": 4}
SUMS = ("bit_gradient",)  # kernels that read float32 beside the types that their constants name


class Loop(NamedTuple):
    """A loop of a kernel: the number of its instructions, and of those its tensor-core products."""

    instructions: int
    products: int


def whole(variant: Variant) -> bool:
    """Return whether a variant accesses 16 bytes at a time: addresses and row length allow it."""
    values = constants(variant.launch.source)
    size = SIZES[values.get("T", "float")]
    if values.get("RAGGED") == "true" and int(values["COLUMNS"]) * size < 16:
        return False  # every access is a part of 16 bytes
    if "false" in (values.get("WIDE"), values.get("X_WIDE")):
        return False
    return int(values.get("LANES", 16 // size)) * size == 16


def alignment(variant: Variant) -> int:
    """Return the alignment of a launch's addresses in bytes: 16 if the variant is ``whole``."""
    values = constants(variant.launch.source)
    sizes = [SIZES[values[name]] for name in "TUG" if values.get(name) in SIZES]
    sizes += [SIZES["float"]] * (variant.kernel in SUMS)
    access = int(values.get("LANES", 1)) * max(sizes, default=4)
    return 16 if whole(variant) else min(access, 16)


@functools.cache
def wheel() -> importlib.metadata.Distribution:
    """Return the wheel with the disassembler; raise LookupError without it."""
    try:
        return importlib.metadata.distribution("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("needs nvidia-cuda-nvdisasm, of the extra `test`") from None


def nvdisasm() -> Path:
    """Return the path of the disassembler; raise LookupError without it."""
    files = wheel().files or []
    return Path(str(next(f.locate() for f in files if f.name in ("nvdisasm", "nvdisasm.exe"))))


def disassembled(variant: Variant) -> str:
    """Return the SASS of a variant's kernel."""
    launch = variant.launch
    return text_of(variant.kernel, launch.source, launch.options, variant.arch)


def text_of(kernel: str, source: str, options: tuple[str, ...], arch: str) -> str:
    """Return the SASS of one kernel of a unit; cached on disk by the sources that it includes."""

    def build(folder: Path) -> Path:
        unit, text = folder / "unit.cubin", folder / "text"
        unit.write_bytes(budget.cubin(source, options, arch)[0])
        # -ndf: without an analysis of branches by stack, which takes a quarter of the time
        with open(text, "w", encoding="utf-8") as file:
            command = [nvdisasm(), "-c", "-ndf", unit]
            subprocess.run(command, stdout=file, stderr=subprocess.PIPE, check=True)
        return text

    key = budget.cache_key(source, options, arch, wheel().version)
    text = kept_file("sass", key, build, ".txt").read_text(encoding="utf-8")
    section = re.search(rf"\.text\.{kernel}:\n(.*?)(?=^\.text\.|\Z)", text, re.M | re.S)
    assert section is not None, text[:1000]
    return section[1]


def instructions(text: str) -> list[str]:
    """Return the names of the instructions, with modifiers and without operands."""
    return re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)", text, re.M)


def bodies(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each loop, from a label to a branch back to it: where it begins, and its body."""
    begins, names = dict[str, int](), list[str]()
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begins[label[1]] = len(names)
        names += instructions(line)
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in begins:
            yield begins[branch[1]], names[begins[branch[1]] :]


def count(pattern: str, names: list[str]) -> int:
    """Return how many of the instruction names start with the pattern."""
    return sum(bool(re.match(pattern, name)) for name in names)


def loops(text: str) -> list[Loop]:
    """Return the loops of a kernel's SASS."""
    return [Loop(len(body), count(PRODUCT, body)) for _, body in bodies(text)]


def hot_loop(text: str) -> int:
    """Return the number of instructions of the loop that a kernel spends its time in.

    That is the shortest loop among those with the most tensor-core products; without products, the
    innermost loop with the most memory accesses; without a loop, the whole kernel.
    """
    # a loop of BRA alone is the padding behind the last EXIT
    candidates = [(begin, body) for begin, body in bodies(text) if {*body} != {"BRA"}]
    if not candidates:
        return len([name for name in instructions(text) if not re.match("NOP|BRA$", name)])
    if not any(count(ANY_PRODUCT, body) for _, body in candidates):
        spans = [(begin, begin + len(body)) for begin, body in candidates]
        candidates = [
            each
            for each, (begin, end) in zip(candidates, spans, strict=True)
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
        ]
    parts = ((count(ANY_PRODUCT, body), count(ACCESS, body), body) for _, body in candidates)
    return -max(
        (products, accesses if not products else 0, -len(body))
        for products, accesses, body in parts
    )[2]


def tile_loop(text: str) -> Loop:
    """Return the shortest of the loops with the most products: a warp's work for one tile."""
    return max(loops(text), key=lambda loop: (loop.products, -loop.instructions))


def shown() -> list[Variant]:
    """Return the variants that have a line in the table."""
    several = [v for arch in ARCHITECTURES for kernel in LOOPS for v in of_kernel(kernel, arch)]
    known = ((v, PLAIN.fullmatch(v.label)) for v in several)
    return [variant for variant, label in known if label and label[2] in ("64", "128")]


def row(variant: Variant) -> str:
    """Return the line of a variant."""
    values = constants(variant.launch.source)
    by = {"true": " by keys", "false": " by queries"}.get(values.get("BY_KEYS", ""), "")
    registers, _, _, share = budget.numbers(variant)
    loop = tile_loop(disassembled(variant))
    dim = PLAIN.fullmatch(variant.label)[2]  # type: ignore[index]
    cells = [f"sm_{variant.arch}", f"`{variant.kernel}`{by}", dim, variant.launch.threads // 32]
    cells += [values.get("TILE") or values["TILE_KEYS"], registers, f"{share} %", *loop]
    return f"| {' | '.join(map(str, cells))} |"


def write() -> None:
    """Rewrite the table."""
    text = budget.PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    lines = [
        "| architecture | kernel | head dim | warps | tile | registers | occupancy |"
        " instructions of a tile | `mma` |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(row, shown()),
    ]
    with atomic_path(budget.PAGE) as partial:
        partial.write_text("\n".join([f"{head}{BEGIN}", *lines, tail]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
