"""Every primitive as PTX against plain arithmetic: the text of the inline assembly is executed."""

import itertools
import re

import numpy as np
import pytest

from unsloth_cupy import rms_norm
from unsloth_cupy.core.source import source_root
from unsloth_cupy.core.target import using

from ...harness.sampling import Sample
from ...machines.cuda_on_cpu import Emulator, EmulatorError, Module, build
from ...machines.cuda_on_cpu.traffic import counted
from ...machines.ptx_on_cpu import PtxEmulator, library, unit
from ...machines.ptx_on_cpu.function import spelled
from ...machines.ptx_on_cpu.machine import ATOMICS, MACHINE
from ..emulator import LIMITS as ERRORS
from ..emulator import flash, gemm, primitive, split_k
from ..emulator.test_faults import fault
from ..hardware.primitives import PRIMITIVES, launch, runs_on
from ..programs.ptx import Compiled, UnknownError
from . import ARCHITECTURES, on
from .mutants import FILES
from .plain import NAN, computed, decoded, encoded, signed

WHOLE = [  # primitives.cu as a whole needs sm_90
    (name, arch)
    for arch in ARCHITECTURES
    for name in PRIMITIVES
    if runs_on(name, arch) and (arch >= 90 or launch(name).file == "products.cu")
]
SHARE = 30


def sampled(day: int = Sample.day) -> list[tuple[str, int]]:
    """Return some primitives, others after each commit; all of them in SHARE commits."""
    return WHOLE if Sample.all else WHOLE[day % SHARE :: SHARE]


@pytest.mark.parametrize(("name", "arch"), sampled())
def test_primitive(name: str, arch: int) -> None:
    """Bit by bit, on two schedules, checked and fast: one library serves all."""
    for how in ({}, {"seed": 3}, {"check": False}):
        assert primitive(name, kind=on(arch), **how) == 0


@pytest.mark.slow
def test_products_of_warpgroups_that_are_still_in_flight() -> None:
    """A pipeline: TMA, mbarriers, setmaxnreg, wgmma whose sums move before they are waited for."""
    assert gemm(kind=on(90), seed=3) < ERRORS[gemm]


@pytest.mark.slow
def test_a_product_that_warps_ask_for_in_two_places() -> None:
    """By one function of the source, of which the compiler makes two instructions."""
    says = r"this lane is at wgmma, others .* in faults.cu:(\d+) in faults.cu:(?!\1 )\d+ \["
    with pytest.raises(EmulatorError, match=says):
        fault("broken_product", 1, 128, 9, kind=on(90))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 100])
def test_examples(arch: int) -> None:
    assert flash(kind=on(arch)) < ERRORS[flash]
    assert split_k(last=True, kind=on(arch)) < ERRORS[split_k]


@pytest.mark.slow
def test_a_message_names_the_lines_of_ptx_and_of_the_source() -> None:
    with pytest.raises(EmulatorError, match=r"flash_forward: PTX \d+, .*flash.cu:\d+: race on "):
        flash(kind=on(90), bugs=["MISSING_SYNC"])


def test_a_copy_that_reads_more_than_it_copies_is_refused() -> None:
    source = """#include "common/device.cuh"
KERNEL(1) k(const float *x, int n) {
  __shared__ float4 to;
  const unsigned at = __cvta_generic_to_shared(&to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(x), "r"(n));
  asm volatile("cp.async.wait_all;");
}
"""
    launch = on(80)().compile("k", source)
    for n in (0, 4, 16):
        launch((1,), (1,), (np.ones(4, np.float32), np.int32(n)), 0)
    for n in (-1, 17):
        with pytest.raises(EmulatorError, match=r"cp\.async reads more than it copies"):
            launch((1,), (1,), (np.ones(4, np.float32), np.int32(n)), 0)


VOTES = """
.visible .entry k(.param .u64 out)
{
.reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<5>;
mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 64; setp.eq.u32 %p1, %r2, 0;
and.b32 %r3, %r1, 3; setp.eq.u32 %p2, %r3, 0;
@%p1 bra $low;
bar.red.popc.u32 %r4, 2, 64, %p2;
bar.red.popc.u32 %r4, 2, 64, %p2;
bra $all;
$low:
bar.red.or.pred %p3, 1, 64, %p1; bar.red.and.pred %p4, 1, 64, %p2;
selp.u32 %r4, 100, 0, %p3; selp.u32 %r5, 7, 0, %p4; add.u32 %r4, %r4, %r5;
$all:
bar.red.popc.u32 %r5, 0, !%p2; mad.lo.u32 %r4, %r5, 1000, %r4;
ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
st.global.u32 [%rd1], %r4;
ret;
}
"""


def barriers(text: str) -> np.ndarray:
    """Run 128 threads, of which each writes a number."""
    module = Module("k", library(Compiled(text, "k")), build.runtime(), True, "")
    out = np.zeros(128, np.uint32)
    module.launch((0, 0, 1), 1 << 16, (1,), (128,), (out,))
    return out


def test_each_barrier_counts_its_own_votes() -> None:
    low, high = np.split(barriers(VOTES), 2)
    assert {*low} == {96 * 1000 + 100}  # some of them, and not all; 16 of 64 there
    assert {*high} == {96 * 1000 + 16}


def test_a_block_has_16_barriers() -> None:
    with pytest.raises(EmulatorError, match="no barrier 16: a block has 16"):
        barriers(VOTES.replace("%r4, 2, 64", "%r4, 16, 64"))


# What the compiler writes by itself; all else of the machine is inline assembly, with primitives.
BY_ITSELF = ["bra", "ret", "trap", "cvta", "bar", "membar", "fence", "vote", "shfl"]


def test_the_machine_knows_what_inline_assembly_asks_for_and_no_more() -> None:
    headers = "".join((source_root() / file).read_text() for file in FILES)
    text = re.sub(r"\\[nt]", " ", re.sub(r'"\s*\n\s*"', "", headers))
    asked = {*re.findall(r"[\w.:]+", text), "cp.async.wait_all"}
    known = {name for name in spelled(MACHINE) if name.partition(".")[0] not in BY_ITSELF}
    assert known - asked == set()


ATOMIC = {  # what memory holds then, of x there and v, w given
    "add": (("u32", "s32", "u64", "f32"), lambda x, v, w: x + v),
    "inc": (("u32",), lambda x, v, w: 0 if x >= v else x + 1),
    "exch": (("b32", "b64"), lambda x, v, w: v),
    "min": (("u32", "s32", "u64", "s64"), lambda x, v, w: min(x, v)),
    "max": (("u32", "s32", "u64", "s64"), lambda x, v, w: max(x, v)),
    "and": (("b32", "b64"), lambda x, v, w: x & v),
    "or": (("b32", "b64"), lambda x, v, w: x | v),
    "xor": (("b32", "b64"), lambda x, v, w: x ^ v),
    "cas": (("b32", "b64"), lambda x, v, w: w if x == v else x),
}


@pytest.mark.parametrize("n", [32, 64])
def test_atomics(n: int) -> None:
    """Each in every type, on numbers that wrap and signs that differ; the old value comes back."""
    assert {*ATOMIC} == {*ATOMICS.split()}
    size, forms = n // 8, [(a, k) for a, (kinds, _) in ATOMIC.items() for k in kinds if str(n) in k]
    edges = [0, 1, 2, 2 ** (n - 1) - 1, 2 ** (n - 1), 2**n - 1, 0x3F800000, 0xBFC00000]
    rows = np.array([*itertools.product(edges, repeat=3)], f"u{size}")
    cells = np.tile(rows, (len(forms), 1, 1))
    lines = [
        f".visible .entry k(.param .u64 cells) {{ .reg .b{n} %o, %v, %w;",
        ".reg .b32 %r; .reg .b64 %at, %i; mov.u32 %r, %ctaid.x; ld.param.u64 %i, [cells];",
        f"mul.wide.u32 %at, %r, {3 * size}; add.u64 %i, %i, %at;",
        f"ld.global.b{n} %v, [%i+{size}]; ld.global.b{n} %w, [%i+{2 * size}];",
    ]
    for name, kind in forms:
        operands = "%v, %w" if name == "cas" else "%v"
        lines.append(f"atom.global.{name}.{kind} %o, [%i], {operands};")
        lines.append(f"st.global.b{n} [%i+{size}], %o; add.u64 %i, %i, {rows.nbytes};")
    module = Module(
        "k", library(Compiled("\n".join([*lines, "ret; }", ""]), "k")), build.runtime(), True, ""
    )
    module.launch((0, 0, 1), 1 << 16, (len(rows),), (1,), (cells,))
    for (name, kind), actual in zip(forms, cells, strict=True):
        number = signed if kind[0] == "s" else lambda bits, n: bits
        for (x, v, w), (left, old, _) in zip(rows.tolist(), actual.tolist(), strict=True):
            if kind == "f32":  # in global memory denormals are flushed
                both = [decoded(bits, kind, flush=True) for bits in (x, v)]
                expected = encoded(computed("add", both, "n"), kind, flush=True)
                assert left == expected or (expected is None and decoded(left, kind) == NAN), (x, v)
            else:
                expected = ATOMIC[name][1](number(x, n), number(v, n), w)
                assert left == expected & (2**n - 1), (name, kind, x, v, w)
            assert old == x, (name, kind)


@pytest.mark.parametrize("kind", [PtxEmulator, Emulator])
def test_an_atomic_off_alignment_is_refused(kind: type[Emulator]) -> None:
    source = """#include "common/device.cuh"
KERNEL(1) k(char *x, int n) { atomicAdd((int *)(x + n), 1); }
"""
    launch, x = on(80, kind)().compile("k", source), np.zeros(8, np.uint8)
    launch((1,), (1,), (x, np.int32(4)), 0)
    assert x.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    with pytest.raises(EmulatorError, match="address not aligned to 4 bytes"):
        launch((1,), (1,), (x, np.int32(2)), 0)


@pytest.mark.parametrize("kind", [PtxEmulator, Emulator])
def test_edges_of_functions_that_are_one_instruction(kind: type[Emulator]) -> None:
    source = """#include "common/device.cuh"
KERNEL(1) k(float *x) {
  x[0] = __saturatef(x[0]);
  x[1] = __fdividef(1.0f, x[1]);
  x[2] = fminf(x[2], -x[2]);
  x[3] = fmaxf(x[3], -x[3]);
  x[4] = fmaxf(x[0], x[4]);
}
"""
    x = np.array([np.nan, -(2.0**127), 0, -0.0, np.nan], np.float32)
    on(80, kind)().compile("k", source)((1,), (1,), (x,), 0)
    assert x.tolist() == [0, 0, 0, 0, 0]
    assert np.signbit(x[1:4]).tolist() == [True, True, False]


def test_an_unknown_instruction_names_itself() -> None:
    text = ".visible .entry odd()\n{\n.reg .b32 %r<2>;\ntex.1d %r0, %r1;\nret;\n}\n"
    with pytest.raises(UnknownError, match=re.escape("PTX line 4: tex.1d %r0, %r1")):
        unit(text, "odd")


@pytest.mark.slow
def test_traffic_goes_by_lines_of_the_source() -> None:
    x = np.ones((4, 256), np.float32)
    counts = []
    for target in (on(80)(), Emulator(architecture=80, clusters=False)):
        with counted() as traffic, using(target):
            rms_norm(x, x[0])
        counts.append(traffic)
    compiled, written = counts
    lines = [[row.where.partition(" in ")[2] for row in rows] for rows in counts]
    assert len({*lines[0]}) == len(lines[0])  # all copies of a line count as one
    assert {*lines[0]} == {*lines[1]}
    for space in ("global", "shared"):  # of 16 bytes each: stores too, which may be split
        assert compiled.of(space)[3:] == written.of(space)[3:]
