"""What a GPU would not have forgiven is reported: file and line, block and thread."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import KernelError

from .. import cuda_on_cpu
from ..cuda_on_cpu import Emulator, EmulatorError
from ..hardware.primitives import launch
from . import LIMITS, RNG, flash, gemm, kernel, split_k


@pytest.mark.parametrize(
    ("mode", "threads", "says"),
    [
        (0, 128, r"deadlock: 64 thread\(s\) \[0-63\] wait at __syncthreads .*64 exited"),
        (1, 128, "divergent __syncthreads: 64 thread"),
        (2, 32, "deadlock: 16 thread"),
        (3, 32, "divergent warp: this lane is at __syncwarp, others .* wait at __shfl_sync"),
        (4, 32, "not aligned to 16 bytes for 'struct int4' .out at byte 4 of 256"),
        (5, 32, r"index 32 out of bounds of 'int \[32\]'"),
        (6, 32, r"read of uninitialised static shared memory byte \d+"),
        (
            7,
            64,
            r"race on static shared memory byte \d+: write here, unordered with write by thread",
        ),
        (8, 32, "out-of-bounds write of 4 bytes: out at byte 4000 of 256"),
        (10, 32, "watchdog"),
        (13, 32, "watchdog: seconds without an end"),
        (11, 32, "read of uninitialised|mbarrier used before mbarrier.init"),
        (12, 8, "unordered with write by an unfinished cp.async"),
    ],
)
def test_a_broken_kernel(mode: int, threads: int, says: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_on_cpu, "PATIENCE", 100_000)
    monkeypatch.setattr(cuda_on_cpu, "SECONDS", 1)
    out = np.zeros(64, np.int32)
    with pytest.raises(EmulatorError, match=says) as caught:
        kernel("primitives.cu", "broken")((1,), (threads,), (out, np.int32(mode)), 0)
    where = r"broken: primitives\.cu:\d+: .*\[block \(0,0,0\) thread \(\d+,0,0\)\]$"
    assert re.search(where, str(caught.value), re.S)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (0, r"barrier\.cluster\.wait without an arrive before"),
        (1, r"barrier\.cluster\.arrive twice without a wait between"),
        (2, "thread exits between barrier.cluster.arrive and its wait"),
        (3, "race on static shared memory byte .* of block rank"),
        (4, "block rank 0 exits unordered with a read|rank 0, which has exited"),
        (5, "mapa: rank 2 in a cluster of 2"),
        (
            6,
            "deadlock: .* wait at barrier.cluster .* wait at mbarrier",
        ),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_broken_cluster(mode: int, says: str, seed: int) -> None:
    run = kernel("broken_cluster.cu", "broken_cluster", seed=seed)
    with pytest.raises(EmulatorError, match=says):
        run((2,), (32,), (np.zeros(32, np.int32), np.int32(mode)), 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "bug", "says"),
    [
        ("cp.async.bulk", "NO_PROXY_FENCE", "no fence.proxy.async after the write"),
        (
            "distributed shared memory, cluster of 2",
            "NO_FIRST_BARRIER",
            "before the first barrier.cluster: that block may not run yet",
        ),
        ("distributed shared memory, cluster of 4", "NO_LAST_BARRIER", "race on static shared"),
        ("st.async and arrivals of other blocks", "NO_WAIT", "race on|uninitialised"),
    ],
)
def test_a_planted_bug_of_a_copy(name: str, bug: str, says: str, seed: int) -> None:
    made = launch(name)
    run = kernel(made.file, made.kernel, bugs=[bug], seed=seed)
    with pytest.raises(EmulatorError, match=rf"cluster\.cu:\d+: .*({says})"):
        run((made.grid,), (made.block,), made.args, made.shared)


def test_a_grid_is_whole_clusters() -> None:
    run = kernel("broken_cluster.cu", "broken_cluster")
    with pytest.raises(EmulatorError, match=r"a grid of \(3,1,1\) blocks in clusters of \(2,1,1\)"):
        run((3,), (32,), (np.zeros(1, np.int32), np.int32(2)), 0)


def test_blocks_race() -> None:
    with pytest.raises(
        EmulatorError, match=r"also touched by block #0 with no ordering .block .1,"
    ):
        kernel("primitives.cu", "broken")((2,), (1,), (np.zeros(64, np.int32), np.int32(9)), 0)


def test_a_read_only_array_is_not_written() -> None:
    out = np.zeros(64, np.int32)
    out.flags.writeable = False
    with pytest.raises(EmulatorError, match="write to read-only out"):
        kernel("primitives.cu", "broken")((1,), (1,), (out, np.int32(9)), 0)


def test_the_fast_build_sees_writes_beside_a_buffer() -> None:
    launch = kernel("primitives.cu", "broken", check=False)
    with pytest.raises(EmulatorError, match="write beside out"):
        launch((1,), (32,), (np.zeros(64, np.int32), np.int32(8)), 0)


def test_a_compile_error_shows_log_and_source() -> None:
    source = '#include "common/device.cuh"\nKERNEL(32) k(int *x) { x[0] = nonsense; }\n'
    with pytest.raises(KernelError, match=r"(?s)k does not compile.*nonsense.*KERNEL\(32\) k"):
        Emulator().compile("k", source)


def test_arrays_that_share_memory_share_a_buffer() -> None:
    cells = RNG.integers(0, 9, 64).astype(np.int32)
    first = cells[0]
    kernel("primitives.cu", "warp_moves")((1,), (32,), (cells[:32], cells.repeat(4)), 0)
    source = '#include "common/device.cuh"\nKERNEL(1) k(int *x, int *y) { x[1] = y[0]; }\n'
    Emulator().compile("k", source)((1,), (1,), (cells[:8], cells[1:9]), 0)
    assert cells[0] == first
    Emulator().compile("k", source)((1,), (1,), (cells, cells[:1]), 0)
    assert cells[1] == first


@pytest.mark.parametrize(
    ("run", "bug", "says"),
    [
        (flash, "MISSING_SYNC", "race on dynamic shared memory"),
        (lambda **how: flash(100, **how), "OUT_OF_BOUNDS", "out-of-bounds read of 16 bytes: [qkv]"),
        (split_k, "PLAIN_ADD", "race on y .* with no ordering"),
        (gemm, "MISSING_SYNC", "mbarrier|uninitialised|race"),
        (gemm, "NO_EMPTY_WAIT", "race|more arrivals"),
        (gemm, "WRONG_TX", "deadlock"),
        (gemm, "NO_WGMMA_WAIT", "race|wgmma"),
        (gemm, "NO_PROXY_FENCE", "no fence.proxy.async after the write"),
    ],
)
def test_a_planted_bug(run: Callable[..., float], bug: str, says: str) -> None:
    with pytest.raises(EmulatorError, match=says):
        run(bugs=[bug], seed=3)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "fast"])
@pytest.mark.parametrize("seed", [0, 5])
def test_whole_kernels_are_right(check: bool, seed: int) -> None:
    how: dict[str, Any] = {"check": check, "seed": seed}
    assert flash(100, **how) < LIMITS[flash]
    assert gemm(**how) < LIMITS[gemm]
    assert gemm(100, 200, 264, nn=True, **how) < LIMITS[gemm]
    assert split_k(**how) < LIMITS[split_k]
    assert split_k(last=True, **how) < LIMITS[split_k]


@pytest.mark.parametrize("word", ["__half", "__nv_bfloat16", "float"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "fast"])
def test_static_shared_memory_of_any_type(word: str, check: bool) -> None:
    source = f"""#include "common/device.cuh"
KERNEL(32) k(float *out) {{
  __shared__ {word} tile[32];
  tile[threadIdx.x] = (float)threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = (float)tile[31 - threadIdx.x];
}}
"""
    out = np.zeros(32, np.float32)
    Emulator(check).compile("k", source)((1,), (32,), (out,), 0)
    np.testing.assert_array_equal(out, np.arange(32)[::-1])
    with pytest.raises(EmulatorError, match=r"uninitialised static shared memory|race"):
        Emulator().compile("k", source.replace("[threadIdx.x] = (float)", "[0] = (float)"))(
            (1,), (32,), (out,), 0
        )
