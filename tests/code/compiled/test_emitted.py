"""What is emitted, read: of some variants in every run, of all with ``--sample all``."""

from collections.abc import Sequence

import pytest

from ...harness.sampling import Sample
from ...harness.tracked import tracked
from ..programs.ptx import functions
from ..programs.sass import alignment
from ..programs.variants import ARCHITECTURES, Variant, declared, of_kernel
from . import emitted
from .emitted import (
    ALIGNED_OTHERWISE,
    CHECKS,
    DOUBLE,
    SPLIT,
    Kernel,
    faults,
    kernel_of,
    unproved,
)
from .uniform import unproved_barriers

SHARE = 3  # runs that look at every kernel
KERNELS = [k for n, k in enumerate(declared()) if Sample.all or (n + Sample.day) % SHARE == 0]


def asked(kernel: str, day: int = Sample.day) -> Sequence[Variant]:
    """Return one variant; architectures take turns."""
    number = declared().index(kernel)
    arch = ARCHITECTURES[(number + day // SHARE) % len(ARCHITECTURES)]
    several = of_kernel(kernel, arch) or of_kernel(kernel, "90")
    return several if Sample.all else several[day // SHARE % len(several) :][:1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_wrong_with_a_kernel(kernel: str) -> None:
    assert [said for variant in asked(kernel) for said in faults(variant)] == []


def test_reasons_are_of_kernels() -> None:
    files = {path.name for path in tracked("kernels_cu/**/*.cuh")}
    assert {*DOUBLE, *ALIGNED_OTHERWISE, *SPLIT} <= {*declared(), *files}


PLANTED = """
.visible .entry k(.param .u64 x, .param .u64 y)
{
.reg .b64 %rd<5>; .reg .b32 %f<5>; .reg .b64 %fd<2>; .reg .pred %p; .reg .b32 %r<3>;
.local .align 4 .b8 depot[8];
mov.u32 %r1, %tid.x; setp.eq.s32 %p, %r1, 0;
ld.param.u64 %rd1, [x]; cvta.to.global.u64 %rd2, %rd1;
ld.param.u64 %rd3, [y]; cvta.to.global.u64 %rd4, %rd3;
.loc 1 1 1
ld.global.nc.f32 %f1, [%rd2+4];
mul.ftz.f32 %f2, %f1, 0f3D2AAAAB;
div.rn.ftz.f32 %f2, %f1, 0f41C00000;
add.f64 %fd1, %fd1, %fd1;
st.global.f32 [%rd2], %f2;
st.global.f32 [%rd2+4], %f2;
st.global.f32 [%rd2+8], %f2;
st.global.f32 [%rd2+12], %f2;
@%p bar.sync 0;
ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd4+8];
ret;
}
.file 1 "unit.cu"
"""
SAYS = {
    "read-only cache": "unit.cu:1: ld.global.nc of x, which is written",
    "local memory": ".local .align 4 .b8 depot[8] lies in local memory",
    "double precision": "unit.cu:1: add.f64",
    "reciprocals": "unit.cu:1: x / 24 is a product: y = x / 24;",
    "constant divisors": "unit.cu:1: divided_by<N>(x) is rounded once on every architecture",
    "split stores": "unit.cu:1: four stores of 4 bytes side by side",
    "guarded barriers": "unit.cu:1: @%p bar.sync",
    "uniform barriers": "unit.cu:1: bar.sync by %p of unit.cu:1",
}


def test_every_check_says_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitted, "source_of", lambda place: "y = x / 24;")
    kernel = Kernel(functions(PLANTED)[1][0])
    assert {name: [*check(kernel)] for name, check in CHECKS.items()} == {
        name: [said] for name, said in SAYS.items()
    }
    assert [*unproved(kernel, 16, 4)] == ["unit.cu:1: ld.global.v4.f32 [%rd4+8]"]


@pytest.mark.slow
def test_a_launch_that_allows_less_proves_less() -> None:
    variants = of_kernel("add", "90")
    whole, narrow = (next(v for v in variants if alignment(v) == size) for size in (16, 2))
    kernel = kernel_of(whole)
    assert [*unproved(kernel, alignment(whole), 8)] == []
    assert len([*unproved(kernel, alignment(narrow), 1)]) == 3  # both terms, and the sum
    assert [*unproved(kernel_of(narrow), alignment(narrow), 1)] == []


@pytest.mark.parametrize(("address", "fine"), [("%rd3", True), ("%rd4", False)])
def test_a_signed_division_keeps_alignment(address: str, fine: bool) -> None:
    """As compilers write it: the sign is added, which is 0 of an index."""
    text = f"""
.visible .entry k(.param .u64 x)
{{
.reg .b64 %rd<9>; .reg .b32 %r<3>;
ld.param.u64 %rd1, [x]; cvta.to.global.u64 %rd2, %rd1; mov.u32 %r1, %tid.x;
mul.wide.u32 %rd5, %r1, 16; shr.u64 %rd6, %rd5, 63; add.s64 %rd7, %rd5, %rd6; shr.s64 %rd8, %rd7, 1;
add.s64 %rd3, %rd2, %rd8; shr.s64 %rd4, %rd7, 2; add.s64 %rd4, %rd2, %rd4;
ld.global.v2.u32 {{%r1, %r2}}, [{address}];
}}
.file 1 "unit.cu"
"""
    assert ([*unproved(Kernel(functions(text)[1][0]), 16, 1)] == []) == fine


def barriers(text: str) -> list[str]:
    """Return what is said of the barriers of a kernel that begins as here."""
    head = """
.visible .entry k(.param .u64 x, .param .u32 n)
{
.reg .b64 %rd<3>; .reg .b32 %r<9>; .reg .pred %p<5>;
ld.param.u32 %r1, [n]; ld.param.u64 %rd1, [x]; mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x;
and.b32 %r4, %r2, 31; shr.u32 %r5, %r2, 5;
"""
    return unproved_barriers(functions(f"{head}{text}\nret;\n}}\n")[1][0])


SKIPS = "setp.lt.s32 %p1, {}, %r1; @%p1 bra $end; bar.sync 0; $end:"
TURNS = (
    "mov.u32 %r6, {}; $top: bar.sync 0;"
    " add.s32 %r6, %r6, {}; setp.lt.s32 %p1, %r6, %r1; @%p1 bra $top;"
)
VOTES = "setp.eq.s32 %p2, {}, 0; vote.sync.any.pred %p1, %p2, -1; @%p1 bra $end; bar.sync 0; $end:"
LANE = "shfl.sync.idx.b32 %r6, %r4, {}, 31, -1; setp.eq.s32 %p1, %r6, %r1; @%p1 ret; bar.sync 0;"
LATER = (
    "mov.u32 %r6, 0; $top: add.s32 %r6, %r6, 1; setp.lt.s32 %p1, %r6, {}; @%p1 bra $top;"
    " setp.eq.s32 %p2, %r6, %r1; @%p2 bra $end; bar.sync 0; $end:"
)
AGAIN = (
    "mov.u32 %r6, {}; setp.lt.s32 %p1, %r6, %r1; mov.u32 %r6, {}; @%p1 bra $end; bar.sync 0; $end:"
)

WARPS = "setp.lt.s32 %p1, {}, %r1; @%p1 bra $end; bar.sync 1, 64; $end:"
NUMBERS = "setp.{} %p1, %r2, {}; @%p1 bra $end; bar.arrive 1, 64; $end:"
COPIES = (
    "mov.u32 %r6, %r3; setp.lt.s32 %p1, %r4, %r1; @%p1 bra $else; mov.u32 %r7, %r6; bra $join;"
    " $else: mov.u32 %r7, {}; $join: setp.lt.s32 %p2, %r7, %r1;"
    " @%p2 bra $end; bar.sync 1, 64; $end:"
)


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        (SKIPS.format("%r3"), True),
        (SKIPS.format("%r2"), False),
        (SKIPS.format("%r4"), False),
        (SKIPS.format("%r5"), False),
        (f"ld.global.u32 %r6, [%rd1]; {SKIPS.format('%r6')}", True),
        (f"atom.global.add.u32 %r6, [%rd1], 1; {SKIPS.format('%r6')}", False),
        (f"bar.red.popc.u32 %r6, 0, %p4; {SKIPS.format('%r6')}", True),
        (TURNS.format("%r3", "32"), True),
        (TURNS.format("%r2", "32"), False),
        (TURNS.format("0", "%r5"), False),
        (VOTES.format("%r4"), True),  # every warp asks its lanes the same
        (VOTES.format("%r5"), False),
        (LANE.format("7"), True),
        (LANE.format("%r3"), True),
        (LANE.format("%r2"), False),
        (LATER.format("%r3"), True),
        (LATER.format("%r2"), False),  # turns of a loop that threads leave one by one
        (AGAIN.format("%r3", "%r2"), True),  # a register that is another one later
        (AGAIN.format("%r2", "%r3"), False),
        (WARPS.format("%r3"), True),  # a barrier of some warps
        (WARPS.format("%r5"), True),
        (WARPS.format("%r2"), False),
        (WARPS.format("%r4"), False),
        (NUMBERS.format("lt.u32", "64"), True),
        (NUMBERS.format("lt.u32", "48"), False),
        (NUMBERS.format("gt.u32", "63"), True),
        (NUMBERS.format("gt.u32", "64"), False),
        ("bar.sync %r5, 64;", True),
        ("bar.sync %r4, 64;", False),
        ("bar.arrive 1, %r2;", False),
        (COPIES.format("%r6"), True),  # on both sides of a branch the same
        (COPIES.format("%r5"), False),
    ],
)
def test_a_barrier_that_threads_may_come_to_alone_is_found(text: str, fine: bool) -> None:
    assert (barriers(text) == []) == fine
