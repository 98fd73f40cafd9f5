"""Predict the time of an attention tile on a Hopper warpgroup by counting its instructions.

python -m tests.code.programs.warpgroups --write      rewrites the tables of docs/performance.md

A quarter of an SM runs one warp of every warpgroup.  It issues one instruction a cycle.  The CUDA
C++ Programming Guide (throughput of native arithmetic instructions, 9.0) has the throughput of its
pipes: a warp of FMAs takes 1 cycle; of comparisons, integers and conversions 2; of exp2 8.  The
tensor cores of the four quarters compute 4,096 operations a cycle, which is 989 TFLOP/s at 1.83 GHz
and 132 SMs (H100 data sheet).  Shared memory reads or writes 128 bytes a cycle for an SM, 4 in each
of 32 banks: operands that are not in registers, and what TMA writes.

    bound     the busiest pipe is never idle
    estimate  each instruction that is not a product delays the products by a fraction of a cycle:
              the fraction that a peer's measured time shows
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unsloth_cupy import AttentionConfig, attention_backward, attention_forward
from unsloth_cupy.files import atomic_path

from ...machines.stand_in import gpu
from . import budget, sass
from .variants import Variant, constants

KERNEL, ROWS = "attention_forward_sm90", 64
BACK = "attention_backward_sm90"
PEAK, PER_CYCLE = 989.0, 4096  # TFLOP/s; operations of an SM a cycle
BANKS = 128  # bytes of shared memory a cycle
PIPES = "products", "FMA", "ALU", "exp2", "shared"
FMA = {"FADD", "FMUL", "FFMA"}
UNIFORM = r"U[A-Z]|R2UR|S2UR|VOTEU"
OTHER = {"HGMMA", "MUFU", "WARPGROUP", "SYNCS", "BAR", "BRA", "SHFL", "BSSY", "BSYNC", "WARPSYNC"}


class Tile(NamedTuple):
    """The instructions of a warp for a tile of 64 queries, by name, and its products."""

    counts: Counter[str]
    shapes: Counter[int]  # products m64nNk16, by N
    kept: Counter[int]  # of these, the ones whose first operand is in registers
    moved: int  # other bytes of shared memory: a warpgroup's share of what TMA copies

    @property
    def operations(self) -> int:
        """Return the operations of the products."""
        return sum(2 * ROWS * 16 * columns * count for columns, count in self.shapes.items())

    def cycles(self) -> dict[str, float]:
        """Return the cycles of each pipe of a quarter."""
        own = {name: n for name, n in self.counts.items() if name not in FMA | OTHER}
        alu = sum(n for name, n in own.items() if not re.match(UNIFORM, name))
        return {
            "products": self.operations / PER_CYCLE,
            "issue": self.counts.total(),
            "FMA": sum(self.counts[name] for name in FMA),
            "ALU": 2 * alu,
            "exp2": 8 * self.counts["MUFU"],
            "shared": (self.operands + self.moved) / BANKS,
        }

    @property
    def operands(self) -> int:
        """Return the bytes of shared memory that products read: 16 values of 64 and of N rows."""
        first = sum(ROWS * 32 * (count - self.kept[n]) for n, count in self.shapes.items())
        return first + sum(n * 32 * count for n, count in self.shapes.items())

    def speed(self, cycles: float) -> float:
        """Return TFLOP/s."""
        return PEAK * self.operations / PER_CYCLE / cycles


def peer(**counts: int) -> Counter[str]:
    """Return the instruction counts of a kernel that is not part of this repository."""
    return Counter(counts)


# The forward kernels of head dim 128 and 64 that cudnn-frontend publishes as source, in
# generated/sdpa/sm90/prefill/full_seqlens, compiled by NVRTC 12.9 for sm_90a, counted the same way.
SHARED = {"FADD": 130, "FMNMX": 68, "MUFU": 66, "SEL": 64, "ISETP": 35, "F2FP": 32, "UISETP": 9}
SHARED |= {"IADD3": 7, "SYNCS": 6, "BRA": 6, "WARPGROUP": 4, "SHFL": 4, "BAR": 4, "USEL": 3}
SHARED |= {"ULOP3": 2, "PLOP3": 2, "FSETP": 2, "FSEL": 2, "FFMA": 2, "ULEA": 1, "USHF": 1}
PEERS = {
    128: Tile(
        peer(FMUL=130, VIADD=31, UIADD3=25, UMOV=19, R2UR=16, HGMMA=16, IMAD=13, MOV=4, **SHARED),
        Counter({128: 16}),
        Counter({128: 8}),
        128 * 2 * 256 // 2,
    ),
    64: Tile(
        peer(FMUL=98, VIADD=27, UIADD3=21, UMOV=8, R2UR=8, HGMMA=12, IMAD=11, MOV=2, **SHARED),
        Counter({128: 4, 64: 8}),
        Counter({64: 8}),
        128 * 2 * 128 // 2,
    ),
}
# TFLOP/s of cuDNN 9.19 on an H200: 8k tokens, 64 and 8 heads of 128, bfloat16, without a mask, as
# cudnn-frontend's benchmark/sdpa_benchmark_training publishes it
MEASURED = 691.0


def exposed() -> float:
    """Return the cycles that the peer loses for each instruction that is not a product."""
    tile = PEERS[128]
    products = tile.cycles()["products"]
    return (products * PEAK / MEASURED - products) / (tile.counts.total() - tile.counts["HGMMA"])


def shown(tile: Tile) -> float:
    """Return the cycles of a tile that loses as many for each other instruction as the peer."""
    cycles = tile.cycles()
    beside = tile.counts.total() - tile.counts["HGMMA"]
    return max(cycles["products"] + exposed() * beside, *cycles.values())


def estimate(tile: Tile) -> float:
    """Return the TFLOP/s of a tile by ``shown``."""
    return tile.speed(shown(tile))


def variant(dim: int, causal: bool = False) -> Variant:
    """Return the variant that a call in bfloat16 launches."""
    with gpu("90") as machine, AttentionConfig(warpgroups=True).use():
        q, k = (machine.array((1, 1024, heads, dim), "bfloat16") for heads in (4, 2))
        attention_forward(q, k, k, causal=causal)
        (launch,) = machine.launches
    assert launch.kernel == KERNEL
    return Variant(KERNEL, f"dim={dim}", "90", launch)


def variants_back(dim: int, one_pass: bool = False) -> list[Variant]:
    """Return the variants of its backward pass: one by queries and one by keys, or one pass."""
    with gpu("90") as machine, AttentionConfig(warpgroups=True, one_pass=one_pass).use():
        q, k = (machine.array((1, 1024, heads, dim), "bfloat16") for heads in (4, 2))
        out, lse = attention_forward(q, k, k)
        machine.launches.clear()
        attention_backward(out, q, k, k, out, lse)
        launches = [launch for launch in machine.launches if launch.kernel == BACK]
    assert len(launches) == 2 - one_pass
    return [Variant(BACK, f"dim={dim}", "90", launch) for launch in launches]


@functools.cache
def disassembled(dim: int, causal: bool = False) -> str:
    """Return the SASS of the forward kernel for a head dim."""
    return sass.disassembled(variant(dim, causal))


def forward(dim: int, causal: bool = False) -> tuple[Tile, int]:
    """Return the tile of the forward kernel, and its seldom instructions: see ``tile_of``."""
    return tile_of(disassembled(dim, causal), constants(variant(dim, causal).launch.source))


@functools.cache
def backward(dim: int, one_pass: bool = False) -> tuple[tuple[dict[str, str], Tile, int, int], ...]:
    """Return constants, tile, seldom instructions and registers of each backward kernel."""
    kernels = []
    for own in variants_back(dim, one_pass):
        values = constants(own.launch.source)
        kernels.append((values, *tile_of(sass.disassembled(own), values), budget.numbers(own)[0]))
    return tuple(kernels)


def busy(tile: Tile) -> dict[str, float]:
    """Return the percentage of the estimate's cycles in which each pipe is busy."""
    return {pipe: 100 * n / shown(tile) for pipe, n in tile.cycles().items()}


def loop(text: str) -> list[str]:
    """Return the lines of the shortest loop with products: the one for tiles without a mask."""
    lines, begins, loops = text.splitlines(), dict[str, int](), list[list[str]]()
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begins[label[1]] = number
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in begins:
            body = lines[begins[branch[1]] : number + 1]
            products = [name for name in sass.instructions("\n".join(body)) if "HGMMA" in name]
            loops += [body] * (len(products) > 1)
    return min(loops, key=len)


def seldom(body: list[str]) -> tuple[list[str], list[str]]:
    """Split a loop into the lines that always run and its longest branch: the rescaling."""
    best = 0, 0
    for number, line in enumerate(body):
        if branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line):
            ends = [n for n, other in enumerate(body) if other.strip() == f"{branch[1]}:"]
            spans = [best, *((number + 1, end) for end in ends)]
            best = max(spans, key=lambda span: span[1] - span[0])
    return body[: best[0]] + body[best[1] :], body[best[0] : best[1]]


def tile_of(text: str, values: dict[str, str]) -> tuple[Tile, int]:
    """Return the work of a warp for a tile, and the extra instructions when a maximum grows."""
    body, branch = seldom(loop(text))
    names, more = (sass.instructions("\n".join(part)) for part in (body, branch))
    products = re.findall(r"HGMMA\.64x(\d+)x16\.\S+ R\d+, (R\d+)?", "\n".join(body))
    shapes = Counter(int(n) for n, _ in products)
    kept = Counter(int(n) for n, register in products if register)
    row = sum(-(-int(values[name]) // 64) * 128 for name in ("DIM", "VALUE_DIM"))
    moved = int(values["TILE"]) * row // int(values["CONSUMERS"])
    if values.get("SUM_DQ") == "true":  # ds is written; half of dq is written, and read by TMA
        moved += ROWS * (ROWS * 2 + 2 * 4 * (32 if values["DIM"] == "64" else 64))
    counts = Counter(name.partition(".")[0] for name in names)
    return Tile(counts, shapes, kept, moved), len(more)


def rows() -> Iterator[str]:
    """Yield the lines of the forward table."""
    for dim in (64, 128, 192, 256):
        own = variant(dim)
        text, registers = disassembled(dim), budget.numbers(own)[0]
        tile, more = forward(dim)
        copies = sum(name.startswith("UTMALDG") for name in sass.instructions(text))
        yield line(f"`{KERNEL}.cu`", dim, tile, f"+{more}", f"{registers}", f"{copies}")
        if dim in PEERS:
            yield line("cuDNN's", dim, PEERS[dim], "-", "-", "-")


def rows_back(dims: tuple[int, ...] = (64, 128)) -> Iterator[str]:
    """Yield the lines of the backward table."""
    for dim in dims:
        bound = likely = 0.0  # cycles of 64 x 64 pairs, summed over both launches
        for values, tile, more, registers in backward(dim):
            columns, cycles = int(values["TILE"]), tile.cycles()
            bound += max(cycles.values()) * ROWS / columns
            likely += shown(tile) * ROWS / columns
            owns = "keys" if values["BY_KEYS"] == "true" else "queries"
            yield line_back(f"by {owns}", dim, columns, tile, more, registers, "-", "-")
        # five products; both launches compute two of them, which count once
        useful = 5 * 2 * ROWS * ROWS * dim / PER_CYCLE
        speeds = (f"{PEAK * useful / total:.0f}" for total in (bound, likely))
        yield f"| both | {dim} |{' - |' * 10} {' | '.join(speeds)} |"
        ((_, tile, more, registers),) = backward(dim, one_pass=True)
        bound, likely = tile.speed(max(tile.cycles().values())), estimate(tile)
        speeds = f"{bound:.0f}", f"{likely:.0f}"
        yield line_back("in one pass", dim, ROWS, tile, more, registers, *speeds)


def line_back(
    what: str, dim: int, columns: int, tile: Tile, more: int, registers: int, *speeds: str
) -> str:
    """Return a line of the backward table."""
    cells = [f"`{BACK}.cu` {what}", dim, f"64 x {columns}", shapes_of(tile)]
    cells += [tile.counts.total(), f"+{more}"]
    cells += [f"{tile.cycles()[pipe]:.0f}" for pipe in PIPES]
    return f"| {' | '.join(map(str, [*cells, registers, *speeds]))} |"


def shapes_of(tile: Tile) -> str:
    """Return the products of a tile as text."""
    return ", ".join(f"{count} of n{columns}" for columns, count in sorted(tile.shapes.items()))


def line(name: str, dim: int, tile: Tile, more: str, registers: str, copies: str) -> str:
    """Return a line of the forward table."""
    cycles = tile.cycles()
    cells = [name, dim, shapes_of(tile), tile.counts.total(), more]
    cells += [f"{cycles[pipe]:.0f}" for pipe in PIPES]
    cells += [registers, copies, f"{tile.speed(max(cycles.values())):.0f}", f"{estimate(tile):.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


def put(name: str, columns: str, lines: Iterator[str], page: Path = budget.PAGE) -> None:
    """Rewrite the table of this name on a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    head, tail = text[: text.index(begin)], text[text.index(end) :]
    ruled = [f"| {columns} |", "|" + "---|" * (columns.count("|") + 1), *lines]
    with atomic_path(page) as partial:
        partial.write_text("\n".join([f"{head}{begin}", *ruled, tail]), encoding="utf-8")


def write() -> None:
    """Rewrite both tables."""
    cycles = "cycles of products | of FMA | of ALU | of exp2 | of shared memory | registers"
    speeds = "bound, predicted TFLOP/s | estimate, predicted TFLOP/s"
    first = "kernel | head dim | `HGMMA` | instructions | where a maximum grows"
    put("warpgroups", f"{first} | {cycles} | `UTMALDG` | {speeds}", rows())
    first = "kernel | head dim | tile | `HGMMA` | instructions | where pairs are hidden"
    put("warpgroups backward", f"{first} | {cycles} | {speeds}", rows_back())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
