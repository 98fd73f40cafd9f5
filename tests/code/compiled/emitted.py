"""Check the text of kernels' PTX without running it.

    python -m tests.code.compiled.emitted [--arch 100] [KERNELS]    lists the faults of each variant

It checks all variants of all kernels on all architectures, or some.
Registers are traced back to the kernel's parameters, which shows the arrays of an access, and to
the power of two that divides all of their values, which shows its alignment.
"""

import argparse
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from ...harness.tracked import tracked
from ..programs.ptx import SIZE, WIDTH, Body, functions, instruction, operands, ptx
from ..programs.sass import alignment, whole
from ..programs.variants import ARCHITECTURES, Variant, constants, declared, variants
from .uniform import unproved_barriers

# Kernels that compute in float64 on purpose, and the reason.
DOUBLE = {
    "adamw_step": "1 - beta^step, which float32 would lose",
    "measure": "a sum of squares of all gradients",
    "loss_scaler": "a scale that grows over many steps",
    "schedule_free_step": "1 - beta^step, and a sum of weights over all steps",
    "rope": "half turns are subtracted from angles, at any position",
}
# Kernels, and files, whose vector accesses cannot be proved aligned from the launch, and what
# aligns them.
ALIGNED_OTHERWISE = {
    "attention_gradient.cuh": "rows of numbers beside scores are padded to whole tiles",
    "cross_entropy_forward": "`cut` moves the begin of a row to an aligned address",
    "cross_entropy_backward": "`cut` moves the begin of a row to an aligned address",
    "cross_entropy_over_": "`cut` moves the begin of a row to an aligned address",
    "log_probs_forward": "`lead` moves the begin of a row to an aligned address",
    "log_probs_backward": "`lead` moves the begin of a row to an aligned address",
    "divergence_forward": "`lead` moves the begin of a row to an aligned address",
    "divergence_backward": "`lead` moves the begin of a row to an aligned address",
    "top_k_divergence_forward": "`lead` moves the begin of a row to an aligned address",
    "top_k_divergence_backward": "`lead` moves the begin of a row to an aligned address",
    "delta_states": "LANES divides the distance of rows; a workspace has rows of 256 bytes",
    "delta_state_gradients": "LANES divides the distance of rows, as in delta_states",
    "ssd_chunks": "LANES divides the distances of tokens, which Strides has",
    "ssd_states": "LANES divides the distances of tokens; a workspace has rows of 256 bytes",
    "ssd_state_gradients": "LANES divides the distances of tokens, as in ssd_states",
    "rounded_sum_": "A_LANES gives the alignment of a, and LANES that of weights of a wider dtype",
    "nf4_rounded_sum_": "A_LANES gives the alignment of a, whatever LANES is",
    "rescale": "a table of addresses also has the alignment of each array",
    "measure": "a table of addresses also has the alignment of each array",
    "adamw_step": "a table of addresses also has the alignment of each array",
    "lion_step": "a table of addresses also has the alignment of each array",
    "schedule_free_step": "a table of addresses also has the alignment of each array",
    "nf4_product_": "the begin of a row of codes is a quotient, which the proof does not follow",
    "int8_linear": "a pair of columns begins at an even column, which PAIRS asserts",
    "ternary_codes": "codes are a new array, in chunks of 16 bytes",
    "ternary_linear": "WIDE and X_WIDE give the alignment of rows of words and of x, not LANES",
}
OTHER_WIDTHS = (  # they read workspaces or another array by 16 bytes, whatever LANES is
    *("delta_states", "delta_state_gradients"),
    *("ssd_states", "ssd_state_gradients"),
    *("rounded_sum_", "nf4_rounded_sum_", "ternary_codes"),
    *("divergence_forward", "divergence_backward"),
)
SPLIT = {  # kernels with stores side by side that are not joined, and why
    "causal_conv": "the inputs that a text leaves, once a text: side by side with one tap before",
    "causal_conv_backward": "sums of taps, once a tile: side by side where there are four",
    "rounded_sum_": "four columns of a thread, one by one where w is not aligned",
    "nf4_rounded_sum_": "as rounded_sum_",
}
COPIES = ("mov", "cvta", "cvt", "add", "sub", "or", "selp", "mad", "and", "xor", "min", "max")
WRITES = ("st", "red", "atom")


class Statement(NamedTuple):
    """An instruction of PTX: its guard, the parts of its name, operands, source location."""

    guard: str
    words: tuple[str, ...]
    ops: tuple[str, ...]
    place: str

    @property
    def name(self) -> str:
        return self.words[0]


class Kernel:
    """The statements of an entry function; ``arrays`` has the origins of its registers."""

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
        origins: dict[str, frozenset[str]] = {}
        grows = True
        while grows:
            grows = False
            for s in self.statements:
                if s.name == "ld" and "param" in s.words and s.words[-1].endswith("64"):
                    base, _, offset = s.ops[1].strip("[]").partition("+")
                    more = frozenset([base] if not offset else [])
                elif s.name in COPIES and s.ops and not s.ops[0].startswith("{"):
                    more = frozenset().union(*(origins.get(o, frozenset()) for o in s.ops[1:]))
                else:
                    continue
                before = origins.get(s.ops[0], frozenset())
                if not more <= before:
                    origins[s.ops[0]] = before | more
                    grows = True
        return origins

    def of(self, address: str) -> frozenset[str]:
        """Return the arrays that an address may point into."""
        return self.arrays.get(address.strip("[]").partition("+")[0].strip(), frozenset())


# ---- faults: each check yields those of a kernel ----------------------------------------------
def read_only_cache(kernel: Kernel) -> Iterator[str]:
    """No ld.global.nc of memory that the launch writes, as that cache does not see stores."""
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
    """No sum or product in float64, in which graphics GPUs have 1/64 of the throughput."""
    for s in kernel.statements:
        if "f64" in s.words and s.name not in ("mov", "ld", "st", "cvt"):
            yield f"{s.place}: {'.'.join(s.words)}"
            return


def reciprocals(kernel: Kernel) -> Iterator[str]:
    """No multiplication by a rounded reciprocal where the source divides."""
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


def constant_divisors(kernel: Kernel) -> Iterator[str]:
    """No division by a constant: see ``divided_by`` of common/math.cuh, which all round alike.

    From sm_100 on, NVRTC compiles one to a multiplication by the rounded reciprocal.
    """
    for s in kernel.statements:
        if s.name == "div" and s.words[-1] == "f32" and re.fullmatch(r"0[fF]\w{8}", s.ops[-1]):
            yield f"{s.place}: divided_by<N>(x) is rounded once on every architecture"


def source_of(place: str) -> str:
    """Return the source line of a location, without its comment; "" if it is not in kernels_cu."""
    file, line = place.partition(" in ")[0].rsplit(":", 1)
    path = next(iter(tracked(f"kernels_cu/**/{file}")), None)
    return path.read_text().splitlines()[int(line) - 1].partition("//")[0] if path else ""


def split_stores(kernel: Kernel) -> Iterator[str]:
    """No store of 16 bytes that is split into four: see ``store`` of common/vector.cuh."""
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
    """No barrier under a predicate: either all threads of a warp execute it, or they branch."""
    for s in kernel.statements:
        if s.guard and (s.name in ("bar", "barrier") and s.words[1] != "red"):
            yield f"{s.place}: @{s.guard} {'.'.join(s.words)}"


# ---- alignment ----------------------------------------------------------------------------------
ANY = 1 << 30  # stands for every power of two, of which 0 is a multiple


def twos(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number if number else ANY


def multiples(kernel: Kernel, aligned: int, lanes: int) -> dict[str, int]:
    """Return the power of two that divides every value of each register.

    Pointer parameters have the alignment that the launch gives; other parameters, such as strides,
    are multiples of the values in a thread's access.
    """
    known: dict[str, int] = {}
    pointers = {s.ops[1] for s in kernel.statements if s.name == "cvta"}
    for s in reversed(kernel.statements):  # pointers between which the kernel chooses
        if s.name in ("mov", "selp") and s.ops[0] in pointers:
            pointers |= {*s.ops[1:3]}

    def of(operand: str) -> int:
        if re.fullmatch(r"-?\d+", operand):
            return twos(int(operand))
        return known.get(operand, ANY if operand.startswith("%r") else 1)

    def result(s: Statement) -> int:  # noqa: PLR0911
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
                return ANY  # the sign of an index, which a division by 2 adds; it is 0
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
                value = result(s) if s.name not in ("bfi", "bfe") else 1
                if value < known.get(target, ANY + 1):
                    known[target] = value
                    shrinks = True
    return known


def unproved(kernel: Kernel, aligned: int, lanes: int) -> Iterator[str]:
    """Yield vector accesses of global memory that are not provably aligned."""
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
    "constant divisors": constant_divisors,
    "split stores": split_stores,
    "guarded barriers": guarded_barriers,
    "uniform barriers": lambda kernel: iter(unproved_barriers(kernel.body)),
}


def kernel_of(variant: Variant) -> Kernel:
    """Return the PTX of a variant's kernel, parsed."""
    arch = f"{variant.arch}{'a' * (variant.arch == '90')}"
    compiled = ptx(variant.launch.source, variant.kernel, arch)
    bodies = functions(compiled.text)[1]
    return Kernel(next(body for body in bodies if body.name == compiled.entry))


def faults(variant: Variant) -> list[str]:
    """Return the faults of a variant by all checks."""
    kernel, messages = kernel_of(variant), []
    for name, check in CHECKS.items():
        if name == "double precision" and variant.kernel in DOUBLE:
            continue
        if name != "split stores" or variant.kernel not in SPLIT:
            messages += [f"{variant}: {name}: {fault}" for fault in check(kernel)]
    lanes = int(constants(variant.launch.source).get("LANES", 1))
    known = ALIGNED_OTHERWISE if whole(variant) or variant.kernel in OTHER_WIDTHS else {}
    if variant.kernel not in known:
        accesses = unproved(kernel, alignment(variant), lanes)
        accesses = (access for access in accesses if access.partition(":")[0] not in known)
        messages += [f"{variant}: alignment: {access}" for access in accesses]
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.code.compiled.emitted", description=__doc__
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, action="append", help="all by default")
    parser.add_argument("kernels", nargs="*", help="names of kernels; all by default")
    args = parser.parse_args()
    every = (v for arch in args.arch or ARCHITECTURES for v in variants(arch))
    chosen = [v for v in every if v.kernel in (args.kernels or declared())]
    bad = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for messages in pool.map(faults, chosen, chunksize=8):
            bad += len(messages)
            for message in messages:
                print(message, flush=True)
    print(f"{len(chosen)} variants, {bad} faults")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
