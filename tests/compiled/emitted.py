"""What the text of a kernel's PTX shows, without running it.

    python -m tests.compiled.emitted [--arch 100] [KERNELS]     what is wrong with which variant

All variants of all kernels on all architectures, or some.
Registers are followed to the parameters that they come from, so that an access is known by its
arrays, and to what every value of theirs is a multiple of, so that its alignment is.
"""

import argparse
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from unsloth_cupy.core.source import source_root

from ..ptx import SIZE, WIDTH, Body, functions, instruction, operands, ptx
from ..sass import alignment, whole
from ..variants import ARCHITECTURES, Variant, constants, declared, variants
from .uniform import unproved_barriers

# Kernels that compute in float64, and where they mean to.
DOUBLE = {
    "adamw_step": "1 - beta^step, which float32 would lose",
    "measure": "a sum of squares of all gradients",
    "loss_scaler": "a scale that grows for long",
    "rope": "angles lose their half turns, for any position",
}
# Kernels, and files, whose vector accesses no launch alone proves, and what does.
ALIGNED_OTHERWISE = {
    "attention_gradient.cuh": "rows of numbers beside scores are padded to whole tiles",
    "cross_entropy_forward": "a row begins where `cut` says that it may",
    "cross_entropy_backward": "a row begins where `cut` says that it may",
    "cross_entropy_over_": "a row begins where `cut` says that it may",
    "rescale": "a table of addresses holds arrays of which each says what it allows",
    "measure": "a table of addresses holds arrays of which each says what it allows",
    "adamw_step": "a table of addresses holds arrays of which each says what it allows",
    "nf4_product_": "a row of codes begins behind a division that the proof does not follow",
    "int8_linear": "a pair of columns begins at an even one, which PAIRS asserts",
    "ternary_linear": "WIDE and X_WIDE say it of rows of words and of x, not LANES",
}
COPIES = ("mov", "cvta", "cvt", "add", "sub", "or", "selp", "mad", "and", "xor", "min", "max")
WRITES = ("st", "red", "atom")


class Statement(NamedTuple):
    """An instruction of PTX: its guard, words, operands, and place in the source."""

    guard: str
    words: tuple[str, ...]
    ops: tuple[str, ...]
    place: str

    @property
    def name(self) -> str:
        return self.words[0]


class Kernel:
    """The statements of an entry, and what its registers come from."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.parameters = body.parameters
        self.declared = [p.text for p in body.pieces if p.kind == "declaration"]
        self.statements = [
            Statement(*instruction(p.text), f"{p.place[0]}:{p.place[1]}")
            for p in body.pieces
            if p.kind == "instruction"
        ]
        self.arrays = self._follow()

    def _follow(self) -> dict[str, frozenset[str]]:
        """Return the parameters that each register may point into."""
        found: dict[str, frozenset[str]] = {}
        grows = True
        while grows:
            grows = False
            for s in self.statements:
                if s.name == "ld" and "param" in s.words and s.words[-1].endswith("64"):
                    base, _, offset = s.ops[1].strip("[]").partition("+")
                    made = frozenset([base] if not offset else [])
                elif s.name in COPIES and s.ops and not s.ops[0].startswith("{"):
                    made = frozenset().union(*(found.get(o, frozenset()) for o in s.ops[1:]))
                else:
                    continue
                before = found.get(s.ops[0], frozenset())
                if not made <= before:
                    found[s.ops[0]] = before | made
                    grows = True
        return found

    def of(self, address: str) -> frozenset[str]:
        """Return the arrays that an address may lie in."""
        return self.arrays.get(address.strip("[]").partition("+")[0].strip(), frozenset())


# ---- what may not be --------------------------------------------------------------------------
def read_only_cache(kernel: Kernel) -> Iterator[str]:
    """No ld.global.nc of memory that the launch writes: that cache does not see stores."""
    written = frozenset().union(
        *(kernel.of(op) for s in kernel.statements if s.name in WRITES for op in s.ops[:2]),
        *(kernel.of(s.ops[0]) for s in kernel.statements if "bulk_group" in s.words and s.ops),
    )
    for s in kernel.statements:
        if s.name == "ld" and "nc" in s.words and (both := kernel.of(s.ops[1]) & written):
            yield f"{s.place}: ld.global.nc of {', '.join(sorted(both))}, which is written"


def local_memory(kernel: Kernel) -> Iterator[str]:
    """No array in local memory."""
    yield from (f"{text} lies in local memory" for text in kernel.declared if ".local" in text)


def double_precision(kernel: Kernel) -> Iterator[str]:
    """No float64: a GPU for graphics does one for 64 of float32."""
    for s in kernel.statements:
        if "f64" in s.words and s.name not in ("mov", "ld", "st"):
            yield f"{s.place}: {'.'.join(s.words)}"
            return


def reciprocals(kernel: Kernel) -> Iterator[str]:
    """No product with a rounded reciprocal where the source divides."""
    for s in kernel.statements:
        number = re.fullmatch(r"0[fF](\w{8})", s.ops[-1]) if s.name == "mul" and s.ops else None
        if number is None or "f32" not in s.words:
            continue
        bits = int(number[1], 16) & 0x7FFFFFFF
        exponent, fraction = (bits >> 23) - 127, 1 + (bits & 0x7FFFFF) / 2**23
        divisor = 2.0**-exponent / fraction
        is_whole = bits and abs(divisor - round(divisor)) < 1e-6 * divisor and divisor > 2
        if is_whole and round(divisor) & (round(divisor) - 1) and "/" in source_of(s.place):
            yield f"{s.place}: x / {round(divisor)} is a product: {source_of(s.place).strip()}"


def source_of(place: str) -> str:
    """Return the line of the source, without its comment; nothing where it is not ours."""
    file, line = place.partition(" in ")[0].rsplit(":", 1)
    path = next((p for p in source_root().rglob(file)), None)
    return path.read_text().splitlines()[int(line) - 1].partition("//")[0] if path else ""


def split_stores(kernel: Kernel) -> Iterator[str]:
    """No store of 16 bytes that falls into four: see ``store`` of common/vector.cuh."""
    run = 0
    last = ("", 0)
    for s in kernel.statements:
        if s.name != "st" or "global" not in s.words or s.words[-1] not in ("f32", "u32", "b32"):
            run = 0
            continue
        base, _, offset = s.ops[0].strip("[]").partition("+")
        at = base, int(offset or 0)
        whole = not {"v2", "v4"} & {*s.words}
        run = run + 1 if whole and run and at == (last[0], last[1] + 4) else int(whole)
        last = at
        if run == 4:
            yield f"{s.place}: four stores of 4 bytes side by side"


def guarded_barriers(kernel: Kernel) -> Iterator[str]:
    """No barrier under a predicate: all threads of a warp come to it, or branch around it."""
    for s in kernel.statements:
        if s.guard and (s.name in ("bar", "barrier") and s.words[1] != "red"):
            yield f"{s.place}: @{s.guard} {'.'.join(s.words)}"


# ---- alignment ----------------------------------------------------------------------------------
ANY = 1 << 30  # what 0 is a multiple of


def twos(number: int) -> int:
    """Return the power of two that divides a number."""
    return number & -number if number else ANY


def multiples(kernel: Kernel, aligned: int, lanes: int) -> dict[str, int]:
    """Return the power of two that divides each register.

    Pointers are aligned as the launch says, and its strides are multiples of what a thread takes.
    """
    known: dict[str, int] = {}
    pointers = {s.ops[1] for s in kernel.statements if s.name == "cvta"}
    for s in reversed(kernel.statements):  # one of several, which the kernel chooses
        if s.name in ("mov", "selp") and s.ops[0] in pointers:
            pointers |= {*s.ops[1:3]}

    def of(operand: str) -> int:
        if re.fullmatch(r"-?\d+", operand):
            return twos(int(operand))
        return known.get(operand, ANY if operand.startswith("%r") else 1)

    def made(s: Statement) -> int:  # noqa: PLR0911
        a = [of(o) for o in s.ops[1:]]
        match s.name:
            case "ld" if "param" in s.words:
                return aligned if s.ops[0] in pointers else lanes
            case "mov" | "cvta" | "neg" | "abs":
                return a[0]
            case "cvt" if not {"f32", "f16", "f64"} & {*s.words}:
                return a[0]
            case "add" if s.ops[1] == s.ops[2]:
                return min(2 * a[0], ANY)
            case "add" | "sub" | "or" | "xor" | "min" | "max":
                return min(a[0], a[1])
            case "and":
                return max(a[0], a[1])
            case "selp":
                return min(a[0], a[1])
            case "mul" if {"lo", "wide"} & {*s.words}:
                return min(a[0] * a[1], ANY)
            case "mad" if {"lo", "wide"} & {*s.words}:
                return min(a[0] * a[1], a[2], ANY)
            case "shl" if s.ops[2].isdigit():
                return min(a[0] << int(s.ops[2]), ANY)
            case "shr" if s.ops[2] == str(8 * SIZE[WIDTH[s.words[-1]]] - 1):
                return ANY  # the sign of an index, which a division by 2 adds: 0
            case "shr" if s.ops[2].isdigit():
                return max(a[0] >> int(s.ops[2]), 1)
        return 1

    shrinks = True
    while shrinks:
        shrinks = False
        for s in kernel.statements:
            if not s.ops or not s.ops[0].startswith("%"):
                continue
            for target in operands(s.ops[0].strip("{}")):
                value = made(s) if s.name not in ("bfi", "bfe") else 1
                if value < known.get(target, ANY + 1):
                    known[target] = value
                    shrinks = True
    return known


def unproved(kernel: Kernel, aligned: int, lanes: int) -> Iterator[str]:
    """Yield vector accesses of global memory that are aligned by no proof from the launch."""
    known = multiples(kernel, aligned, lanes)
    for s in kernel.statements:
        if s.name not in ("ld", "st") or "global" not in s.words:
            continue
        count = next((int(w[1]) for w in s.words if re.fullmatch(r"v[248]", w)), 1)
        size = SIZE[WIDTH[s.words[-1]]] * count
        address = s.ops[0] if s.name == "st" else s.ops[1]
        base, _, offset = address.strip("[]").partition("+")
        if count > 1 and min(known.get(base, 1), twos(int(offset or 0))) < size:
            yield f"{s.place}: {'.'.join(s.words)} {address}"


CHECKS: dict[str, Callable[[Kernel], Iterator[str]]] = {
    "read-only cache": read_only_cache,
    "local memory": local_memory,
    "double precision": double_precision,
    "reciprocals": reciprocals,
    "split stores": split_stores,
    "guarded barriers": guarded_barriers,
    "uniform barriers": lambda kernel: iter(unproved_barriers(kernel.body)),
}


def kernel_of(variant: Variant) -> Kernel:
    """Return what NVRTC makes of a variant's kernel."""
    arch = f"{variant.arch}{'a' * (variant.arch == '90')}"
    made = ptx(variant.launch.source, variant.kernel, arch)
    bodies = functions(made.text)[1]
    return Kernel(next(body for body in bodies if body.name == made.entry))


def faults(variant: Variant) -> list[str]:
    """Return what is wrong with a variant."""
    kernel, found = kernel_of(variant), []
    for name, check in CHECKS.items():
        if name == "double precision" and variant.kernel in DOUBLE:
            continue
        found += [f"{variant}: {name}: {said}" for said in check(kernel)]
    lanes = int(constants(variant.launch.source).get("LANES", 1))
    known = ALIGNED_OTHERWISE if whole(variant) else {}
    if variant.kernel not in known:
        several = unproved(kernel, alignment(variant), lanes)
        several = (said for said in several if said.partition(":")[0] not in known)
        found += [f"{variant}: alignment: {said}" for said in several]
    return found


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m tests.compiled.emitted", description=__doc__)
    words.add_argument("--arch", choices=ARCHITECTURES, action="append", help="all by default")
    words.add_argument("kernels", nargs="*", help="names of kernels; all by default")
    given = words.parse_args()
    every = (v for arch in given.arch or ARCHITECTURES for v in variants(arch))
    several = [v for v in every if v.kernel in (given.kernels or declared())]
    bad = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for found in pool.map(faults, several, chunksize=8):
            bad += len(found)
            for said in found:
                print(said, flush=True)
    print(f"{len(several)} variants, {bad} faults")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
