"""What a GPU would not have forgiven is reported: file and line, block and thread."""

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import KernelError

from ...harness.tracked import tracked
from ...machines import cuda_on_cpu
from ...machines.cuda_on_cpu import Emulator, EmulatorError, TensorMap
from ..hardware.primitives import launch
from . import LIMITS, RNG, flash, gemm, kernel, split_k

SOURCES = Path(cuda_on_cpu.__file__).parent / "src"
ORDER = (
    "; blocks are ordered by __threadfence, an atomic, "
    "then an atomic and __threadfence of the other"
)

# By kernel of faults.cu: mode, blocks, threads, message.
FAULTS: dict[str, list[tuple[int, int, int, str]]] = {
    "broken": [
        (0, 1, 128, r"deadlock: 64 thread\(s\) \[0-63\] wait at __syncthreads .*64 exited"),
        (1, 1, 128, r"divergent __syncthreads: \d+ thread\(s\) of this block wait at faults.cu"),
        (2, 1, 32, "deadlock: 16 thread|the mask names lane 20, which has exited"),
        (
            3,
            1,
            32,
            "divergent warp: this lane is at __(syncwarp|shfl_sync), "
            "others of the same mask wait at __(syncwarp|shfl_sync)",
        ),
        (4, 1, 32, r"address not aligned to 16 bytes for 'struct int4' \(out at byte \d+ of 256\)"),
        (5, 1, 32, r"index 32 out of bounds of 'int \[32\]'"),
        (6, 1, 32, r"read of uninitialised static shared memory byte \d+"),
        (7, 1, 64, r"race on static shared memory byte \d+: write here, unordered with write by"),
        (8, 1, 32, "out-of-bounds write of 4 bytes: out at byte 4000 of 256"),
        (
            9,
            2,
            1,
            r"race on out byte 0: write here, unordered with write by thread \(0,0,0\) of "
            r"block \(\d,0,0\) at faults.cu:\d+" + ORDER,
        ),
        (10, 1, 32, "watchdog: 100000 accesses since the block last met"),
        (12, 1, 8, "unordered with write by an unfinished cp.async|read of uninitialised"),
        (13, 1, 32, "watchdog: seconds without an end"),
        (14, 1, 1, "cp.async operand is not aligned to its size"),
        (15, 1, 32, "shuffle reads lane 20, which is not in the mask"),
        (16, 1, 1, "__shfl_sync: the calling lane is not in the mask"),
        (17, 1, 32, "__syncwarp: the mask names lane 5, which has exited or never existed"),
        (18, 1, 64, "barrier 1 used with two thread counts"),
        (19, 1, 32, "barrier thread count must be a multiple of 32"),
        (20, 1, 1, r"__trap\(\)"),
        (21, 1, 1, "shift exponent out of range"),
        (22, 1, 1, "not a pointer to the block's own shared memory"),
        (23, 1, 32, "ldmatrix row address of lane 1 is not 16-byte aligned"),
        (24, 1, 32, "race on static shared .*: (write|read) here, unordered with (read|write) by"),
        (25, 1, 32, "race on out byte 0: (read|atomic) here, unordered with (atomic|read) by"),
        (26, 1, 40, r"out-of-bounds write of 4 bytes: dynamic shared memory at byte \d+ of 128"),
        (27, 1, 64, r"race on out byte 4: read here, unordered with write by thread \(32,0,0\)"),
        (28, 1, 32, "race on static shared .*: (atomic|write) here, unordered with (atomic|write)"),
        (29, 1, 8, "thread exits before the cp.async.wait_group of this copy"),
        (30, 1, 8, "thread exits before the cp.async.wait_group of this copy"),
        (31, 1, 32, "block exits, and nobody has waited for the 32 arrivals at named barrier 1"),
        (32, 1, 64, "race on static shared .*: read here, unordered with write by thread"),
        (33, 1, 32, "barrier 16: a block has 16"),
    ],
    "broken_copy": [
        (0, 1, 1, "read of uninitialised static shared memory"),
        (1, 1, 1, "mbarrier used before mbarrier.init"),
        (2, 1, 1, "mbarrier is not 8-byte aligned"),
        (
            3,
            1,
            1,
            "TMA uses an mbarrier whose initialisation no fence.mbarrier_init "
            r"\(or fence.proxy.async\) published",
        ),
        (4, 1, 1, "mbarrier: more arrivals than its count of 1"),
        (5, 1, 1, "cp.async.bulk: addresses and size must be multiples of 16 bytes"),
        (6, 1, 1, "cp.async.bulk: size of 1 MiB or more"),
        (7, 1, 1, "shared-memory address 1024 is outside the block's"),
        (8, 1, 1, "TMA: not a tensor map"),
        (9, 1, 1, "TMA: tensor map of rank 2 used with a 3d copy"),
        (10, 1, 1, "TMA: shared address not aligned to 128 bytes"),
        (11, 1, 1, "TMA: inner box wider than the swizzle span"),
        (12, 1, 1, "TMA: multicast to ranks beyond the cluster of 1"),
        (13, 1, 1, "block exits before this copy into its shared memory"),
        (14, 1, 1, "race on static shared memory .*: read here, unordered with write by a TMA"),
        (15, 1, 1, "async proxy reads out written by .* no fence.proxy.async after the write"),
        (16, 1, 1, "async proxy reads static .* with no fence.proxy.async after the write"),
        (17, 1, 1, "TMA: no sums of this dtype"),
        (18, 1, 1, "thread exits before the cp.async.bulk.wait_group of this store"),
        (19, 1, 1, "thread exits before the cp.async.bulk.wait_group of this store"),
        (20, 1, 1, "race on static shared .*: write here, unordered with read by a TMA copy"),
        (21, 1, 1, "async proxy writes static .* with no fence.proxy.async after the write"),
        (22, 1, 1, "a copy to global memory behind an acquire with no fence.proxy.async between"),
        (23, 1, 1, "deadlock: nobody stores what is polled for"),
        (24, 2, 1, r"race on out byte 64: write here, unordered with write by a TMA copy of block"),
        (25, 1, 1, "race on out byte 64: read here, unordered with write by a TMA copy"),
    ],
    "broken_product": [
        (0, 1, 128, "async proxy reads dynamic shared memory written by thread"),
        (1, 1, 128, "wgmma: descriptors differ between threads of the warpgroup"),
        (2, 1, 128, "wgmma: descriptor base offset is not emulated"),
        (3, 1, 128, "wgmma.mma_async without wgmma.fence since the last commit"),
        (4, 1, 128, "thread exits before the wgmma.wait_group of this product"),
        (5, 1, 128, "accumulators of a wgmma before its wgmma.wait_group"),
        (6, 1, 128, "accumulators of a wgmma before its wgmma.wait_group"),
        (7, 1, 128, "write here, unordered with read by wgmma of warpgroup 0"),
        (8, 1, 128, "accumulators of a wgmma before its wgmma.wait_group"),
        (
            9,
            1,
            128,
            "wgmma: warps of one warpgroup ask from two places, "
            r"faults.cu:(\d+) and faults.cu:(?!\1 )\d+",
        ),
    ],
    "broken_cluster": [
        (0, 2, 32, r"barrier\.cluster\.wait without an arrive before"),
        (1, 2, 32, r"barrier\.cluster\.arrive twice without a wait between"),
        (2, 2, 32, "thread exits between barrier.cluster.arrive and its wait"),
        (3, 2, 32, "race on static shared memory byte .* of block rank"),
        (
            4,
            2,
            32,
            "block rank 0 exits unordered with a read|"
            "shared memory of block rank 0, which has exited",
        ),
        (5, 2, 32, "mapa: rank 2 in a cluster of 2"),
        (6, 2, 32, "deadlock: .* wait at barrier.cluster .* wait at mbarrier"),
        (7, 2, 32, "st.async operand is not aligned to its size"),
        (8, 2, 32, r"race on static shared .*: read here, unordered with write by .* block rank"),
    ],
}


def fault(kernel_name: str, blocks: int, threads: int, mode: int, **how: Any) -> None:
    """Launch a kernel of faults.cu; the shared memory and the arrays that it needs."""
    out: list[Any] = [np.zeros(128 if kernel_name == "broken_product" else 64, np.int32)]
    shared = {"broken": 128, "broken_product": 16384}.get(kernel_name, 0)
    if kernel_name == "broken_copy":
        words = np.zeros((8, 64), np.uint16)
        out = [TensorMap(words, (16, 4), 0), TensorMap(words, (64, 2), 64), *out]
    run = kernel("faults.cu", kernel_name, **how)
    run((blocks,), (threads,), (*out, np.int32(mode)), shared)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "mode", "blocks", "threads", "says"),
    [(name, *row) for name, rows in FAULTS.items() for row in rows],
)
def test_a_fault(
    name: str, mode: int, blocks: int, threads: int, says: str, seed: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cuda_on_cpu, "PATIENCE", 100_000)
    monkeypatch.setattr(cuda_on_cpu, "SECONDS", 1)
    if mode == 13 and seed:
        pytest.skip("one second is enough")
    with pytest.raises(EmulatorError, match=says) as caught:
        fault(name, blocks, threads, mode, seed=seed)
    where = rf"^{name}: faults\.cu:\d+.*: .*\[block \(\d,0,0\) thread \(\d+,0,0\)\]$"
    assert re.search(where, str(caught.value), re.S)


@pytest.mark.parametrize(("name", "threads"), [("broken", 64), ("broken_copy", 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_surrounds_the_faults_is_sound(name: str, threads: int, seed: int) -> None:
    fault(name, 1, threads, -1, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_products_around_the_faults_are_sound(seed: int) -> None:
    fault("broken_product", 1, 128, -1, seed=seed)
    fault("broken_cluster", 2, 32, -1, seed=seed)


def test_every_message_is_asked_for() -> None:
    """Each text of a fail() in the sources stands, in its longest part, in this file."""
    asked = re.sub(r'\\|"\s+r?"', "", Path(__file__).read_text())
    calls = [
        re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'"\s+"', "", call))
        for path in tracked("tests/machines/cuda_on_cpu/src/*.cpp")
        for call in re.findall(r"\bfail\((.*?)\);", path.read_text(), re.S)
    ]
    texts = [max(literals, key=len).strip() for literals in calls if literals]
    assert len(texts) > 45
    assert not [text for text in texts if text not in asked]


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
        *(
            ("the last of several blocks", bug, r"race on left .* by thread \(\d+,0,0\) of block")
            for bug in ("NO_BARRIER", "NO_FENCE", "NO_FENCE_BEHIND")
        ),
    ],
)
def test_a_planted_bug_of_a_primitive(name: str, bug: str, says: str, seed: int) -> None:
    made = launch(name)
    run = kernel(made.file, made.kernel, bugs=[bug], seed=seed)
    with pytest.raises(EmulatorError, match=rf"{made.file}:\d+: .*({says})"):
        run((made.grid,), (made.block,), made.args, made.shared)


WORDS = np.zeros((8, 64), np.uint16)


@pytest.mark.parametrize(
    ("words", "box"),
    [
        (WORDS[:, 4:], (16, 4)),
        (WORDS[:, ::2], (16, 4)),
        (np.zeros((8, 68), np.uint16)[:, :64], (16, 4)),
        (np.zeros((300, 64), np.uint16), (16, 257)),
        (WORDS, (16, 0)),
        (WORDS, (12, 4)),
        (WORDS, (16, 4, 1)),
        (WORDS[:0], (16, 4)),
    ],
)
def test_a_tensor_map_that_no_driver_makes(words: np.ndarray, box: tuple[int, ...]) -> None:
    """By its address, strides, box, rank or sizes; without such a fault it is made."""
    made = TensorMap(WORDS, (16, 4), 0)
    rest = TensorMap(WORDS, (64, 2), 64), np.zeros(64, np.int32), np.int32(-1)
    run = kernel("faults.cu", "broken_copy")
    run((1,), (1,), (made, *rest), 0)
    with pytest.raises(EmulatorError, match=r"no tensor map of uint16 .* and box \("):
        run((1,), (1,), (TensorMap(words, box, 0), *rest), 0)


def test_a_read_only_array_is_not_written() -> None:
    out = np.zeros(64, np.int32)
    out.flags.writeable = False
    with pytest.raises(EmulatorError, match="write to read-only out"):
        kernel("faults.cu", "broken")((1,), (1,), (out, np.int32(9)), 128)


def test_the_fast_build_sees_writes_beside_a_buffer() -> None:
    launch = kernel("faults.cu", "broken", check=False)
    with pytest.raises(EmulatorError, match="write beside out"):
        launch((1,), (16,), (np.zeros(64, np.int32), np.int32(8)), 128)  # 60 KB: in the gap


@pytest.mark.slow
def test_the_fast_build_ends_a_block_that_spins(monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_on_cpu, "SECONDS", 1)
    launch = kernel("faults.cu", "broken", check=False)
    with pytest.raises(EmulatorError, match=r"faults.cu:\d+.*: watchdog: seconds without an end"):
        launch((1,), (1,), (np.zeros(64, np.int32), np.int32(10)), 128)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_signal_to_a_thread_that_waits_ends_a_block_that_spins(seed: int) -> None:
    """The watchdog's signal may reach any thread: here the main one, beside that of a cluster."""
    says = r"faults.cu:\d+.*: watchdog: seconds without an end \[block \(1,0,0\)"
    signal.signal(signal.SIGVTALRM, signal.SIG_IGN)  # until the launch sets its own handler
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(fault, "broken_cluster", 2, 32, 9, seed=seed)
        while wait([launched], 0.02).not_done:
            signal.raise_signal(signal.SIGVTALRM)
    with pytest.raises(EmulatorError, match=says):
        launched.result()
    fault("broken_cluster", 2, 32, -1, seed=seed)


def test_old_builds_are_forgotten(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_on_cpu.build, "cache_folder", lambda: tmp_path)
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    cuda_on_cpu._sweep.__wrapped__()
    assert list(tmp_path.iterdir()) == [new]


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
        (split_k, "PLAIN_ADD", "race on y .* blocks are ordered by __threadfence"),
        (gemm, "MISSING_SYNC", "mbarrier|uninitialised|race"),
        (gemm, "NO_EMPTY_WAIT", "race|more arrivals"),
        (gemm, "WRONG_TX", "deadlock"),
        (gemm, "NO_WGMMA_WAIT", "accumulators of a wgmma before|unordered with read by wgmma"),
        (gemm, "NO_PROXY_FENCE", "no fence.proxy.async after the write"),
    ],
)
def test_a_planted_bug(run: Callable[..., float], bug: str, says: str) -> None:
    with pytest.raises(EmulatorError, match=says):
        run(bugs=[bug], seed=3)


FLAG = """#include "common/device.cuh"
KERNEL(64) k(int *flag, int *value, int *out) {
  if (threadIdx.x == 32) {
    *value = 5;
    FIRST;
    *(volatile int *)flag = 1;
  }
  if (threadIdx.x == 0) {
    while (*(volatile int *)flag == 0) {}
    SECOND;
    *out = *value;
  }
}
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("__threadfence()", "__threadfence()"),
        ("__threadfence_block()", "__threadfence_block()"),
        ("__threadfence()", ""),
        ("", "__threadfence()"),
    ],
)
def test_a_flag_orders_behind_two_fences(first: str, second: str, seed: int) -> None:
    source = FLAG.replace("FIRST", first).replace("SECOND", second)
    flag, value, out = np.zeros((3, 1), np.int32)
    run = Emulator(seed=seed).compile("k", source)
    if first and second:
        run((1,), (64,), (flag, value, out), 0)
        assert out[0] == 5
    else:
        with pytest.raises(EmulatorError, match=r"race on value byte 0: read here, unordered with"):
            run((1,), (64,), (flag, value, out), 0)


@pytest.mark.parametrize(("scope", "ordered"), [("", True), ("_block", False)])
def test_a_fence_of_the_block_orders_no_others(scope: str, ordered: bool) -> None:
    source = f"""#include "common/device.cuh"
KERNEL(1) k(int *ticket, int *left) {{
  left[blockIdx.x] = 1;
  __threadfence{scope}();
  const int turn = atomicAdd(ticket, 1);
  __threadfence{scope}();
  if (turn == 1) left[0] += left[1];
}}
"""
    ticket, left = np.zeros(1, np.int32), np.zeros(2, np.int32)
    run = Emulator().compile("k", source)
    if ordered:
        run((2,), (1,), (ticket, left), 0)
        assert left[0] == 2
    else:
        with pytest.raises(EmulatorError, match="race on left"):
            run((2,), (1,), (ticket, left), 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [("__threadfence()", "__threadfence()"), ("__threadfence()", ""), ("", "__threadfence()")],
)
def test_the_last_block_may_write_what_all_have_read(first: str, second: str) -> None:
    """It has read it too, which does not hide the others' reads."""
    source = f"""#include "common/device.cuh"
KERNEL(1) k(unsigned *ticket, int *state, int *out) {{
  out[blockIdx.x] = state[0];
  {first};
  const bool last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  {second};
  if (last) state[0] = 7;
}}
"""
    arrays = np.zeros(1, np.uint32), np.array([5], np.int32), np.zeros(3, np.int32)
    run = Emulator().compile("k", source)
    if first and second:
        run((3,), (1,), arrays, 0)
        assert (arrays[1][0], arrays[2].tolist()) == (7, [5, 5, 5])
    else:
        with pytest.raises(EmulatorError, match=r"race on state byte 0: write here, .* read by"):
            run((3,), (1,), arrays, 0)


def test_an_atomic_meets_no_plain_read_of_another_block() -> None:
    source = """#include "common/device.cuh"
KERNEL(1) k(int *cell, int *out) {
  if (blockIdx.x == 0) atomicAdd(cell, 1);
  else out[0] = cell[0];
}
"""
    with pytest.raises(EmulatorError, match=r"race on cell byte 0: .* unordered with"):
        Emulator().compile("k", source)((2,), (1,), (*np.zeros((2, 1), np.int32),), 0)


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0,), (32,), 0),
        ((1, 65536), (32,), 0),
        ((1,), (0,), 0),
        ((1,), (1025,), 0),
        ((1,), (1, 1, 65), 0),
        ((1,), (64, 32), 0),
        ((1,), (32,), 232449),
        ((1,), (32,), 232448),  # beside static memory
    ],
)
def test_a_launch_that_no_gpu_takes(grid: Any, block: Any, shared: int) -> None:
    run = kernel("faults.cu", "broken")
    with pytest.raises(EmulatorError, match=rf"broken: no GPU takes .* with {shared} bytes"):
        run(grid, block, (np.zeros(64, np.int32), np.int32(-1)), shared)


def test_what_python_can_tell() -> None:
    run = kernel("faults.cu", "broken")
    with pytest.raises(TypeError, match="broken takes 2 arguments, not 1"):
        run((1,), (1,), (np.zeros(64, np.int32),), 128)
    with pytest.raises(EmulatorError, match=r"a grid of \(3,1,1\) blocks in clusters of \(2,1,1\)"):
        kernel("faults.cu", "broken_cluster")((3,), (32,), (np.zeros(1, np.int32), np.int32(2)), 0)


@pytest.mark.slow
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
