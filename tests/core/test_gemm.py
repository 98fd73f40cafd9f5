"""Matrix products: NumPy's against float64, and the calls of cuBLAS, answered by a stand-in.

The stand-in is reached as the library is, by address through C's calling convention, and computes
by columns, as cuBLAS documents: a wrong order of arguments, flag or stride gives wrong numbers.
"""

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest

from unsloth_cupy import linear, linear_backward
from unsloth_cupy.core import replay
from unsloth_cupy.core.dtypes import BFLOAT16, FLOATS
from unsloth_cupy.errors import DTypeError, KernelError, ShapeError
from unsloth_cupy.ops.common import gemm as common_gemm
from unsloth_cupy.ops.common.gemm import gemm
from unsloth_cupy.ops.linear.linears import linears, linears_backward
from unsloth_cupy.ops.linear.lora import lora_linear_backward, lora_linear_forward
from unsloth_cupy.ops.linear.lora_linears import (
    lora_down,
    lora_down_backward,
    lora_up,
    lora_up_backward,
)

from ..harness.parity import EPS, on_gpu
from ..machines.stand_in import Machine, gpu

NAMES = {number: dtype for dtype, number in common_gemm.DTYPES.items()}
NUMBERS = [pytest.param(dtype, id=dtype.name) for dtype in FLOATS]


DEFAULT_MODE = 0
ON_5 = ["stream 5 of 77", "workspace 100 of 32 MiB"]


class OnGpu:
    """An array that is not NumPy's, with an address."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.values.ctypes.data)

    def copy(self) -> "OnGpu":
        return OnGpu(self.values.copy())

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = getattr(value, "values", value)

    def __add__(self, other: "OnGpu") -> "OnGpu":
        return OnGpu(self.values + other.values)


OnGpu.__module__ = "cupy"  # by which its target knows it


def by_columns(address: int, dtype: Any, rows: int, columns: int, stride: int) -> np.ndarray:
    """Return a matrix of this size whose columns are ``stride`` elements apart."""
    if not rows * columns:
        return np.zeros((rows, columns), dtype)
    size = dtype.itemsize
    count = (columns - 1) * stride + rows
    flat = np.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (size, stride * size))


class Cublas:
    """The seven functions of cuBLAS with C's calling convention, computed by NumPy."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status, self.mode = 0, DEFAULT_MODE
        faces = types.SimpleNamespace()
        for name in (
            "GemmEx",
            "GemmStridedBatchedEx",
            "SetStream_v2",
            "SetWorkspace_v2",
            "SetMathMode",
            "Create_v2",
            "Destroy_v2",
        ):
            setattr(faces, f"cublas{name}", types.SimpleNamespace())
        common_gemm.declare(faces)
        for name, face in vars(faces).items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *face.argtypes)
            function = prototype(getattr(self, name))
            function.argtypes = face.argtypes
            setattr(self, name, function)

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:  # noqa: N802
        self.calls.append(f"stream {stream} of {handle}")
        return 0

    def cublasSetWorkspace_v2(self, handle: int, memory: int, size: int) -> int:  # noqa: N802
        self.calls.append(f"workspace {memory} of {size >> 20} MiB")
        return 0

    def cublasSetMathMode(self, handle: int, mode: int) -> int:  # noqa: N802
        self.mode = mode
        return 0

    def cublasCreate_v2(self, handle: Any) -> int:  # noqa: N802
        ctypes.c_void_p.from_address(handle).value = 77
        return 0

    def cublasDestroy_v2(self, handle: int) -> int:  # noqa: N802
        self.calls.append(f"destroyed {handle}")
        return 0

    def cublasGemmEx(self, handle: int, *args: Any) -> int:  # noqa: N802
        head, (a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, *tail) = args[:6], args[6:]
        whole = (a, a_type, lda, 0), (b, b_type, ldb, 0), beta, (c, c_type, ldc, 0), 1
        return self.multiply("gemm", handle, *head, *whole, *tail)

    def cublasGemmStridedBatchedEx(self, handle: int, *args: Any) -> int:  # noqa: N802
        head, a, b, beta, c = args[:6], args[6:10], args[10:14], args[14], args[15:19]
        return self.multiply("strided", handle, *head, a, b, beta, c, *args[19:])

    def multiply(
        self,
        name: str,
        handle: int,
        flag_a: int,
        flag_b: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: Any,
        b: Any,
        beta: int,
        c: Any,
        batch: int,
        compute: int,
        algorithm: int,
    ) -> int:
        self.calls.append(f"{name} {m}x{n}x{k} flags {flag_a}{flag_b}")
        assert self.mode == common_gemm.FULL_PRECISION
        assert (handle, algorithm) == (77, -1)
        scalar = {68: ctypes.c_float, 70: ctypes.c_double}[compute]
        sums = np.dtype({68: np.float32, 70: np.float64}[compute])
        old = scalar.from_address(beta).value
        factor = scalar.from_address(alpha).value
        assert old in (0, 1)
        assert a[1] == b[1], "cuBLAS takes operands of one dtype"
        assert a[2] >= (k if flag_a else m)
        assert b[2] >= (n if flag_b else k)
        assert c[2] >= m
        for i in range(batch):
            operands = []
            for (address, number, stride, step), flag, shape in (
                (a, flag_a, (m, k)),
                (b, flag_b, (k, n)),
            ):
                dtype = NAMES[number]
                lies = shape[::-1] if flag else shape
                matrix = by_columns(address + i * step * dtype.itemsize, dtype, *lies, stride)
                operands.append((matrix.T if flag else matrix).astype(sums))
            dtype = NAMES[c[1]]
            out = by_columns(c[0] + i * c[3] * dtype.itemsize, dtype, m, n, c[2])
            made = factor * (operands[0] @ operands[1])
            out[...] = made + out.astype(sums) if old else made
        return self.status


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> Cublas:
    library = Cublas()
    stream = lambda: types.SimpleNamespace(ptr=5)  # noqa: E731
    addresses = itertools.count(100, 100)
    monkeypatch.setattr(common_gemm, "workspaces", {})
    cuda = types.SimpleNamespace(
        get_current_stream=stream,
        is_available=lambda: True,
        Device=lambda: types.SimpleNamespace(compute_capability="90"),
        using_allocator=lambda allocator: contextlib.nullcontext(),
        alloc=lambda size: types.SimpleNamespace(ptr=next(addresses)),
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 1),
    )
    empty = lambda shape, dtype: OnGpu(np.full(shape, 9, dtype))  # noqa: E731
    monkeypatch.setitem(
        __import__("sys").modules, "cupy", types.SimpleNamespace(cuda=cuda, empty=empty)
    )
    monkeypatch.setattr(common_gemm, "cublas", lambda: library)
    return library


def draw(*shape: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def lying(array: np.ndarray, how: str) -> np.ndarray:
    """Return the same matrix, or matrices, in another memory layout."""
    if how == "transposed":
        return array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if how in ("padded", "padded transposed"):
        plain = array.swapaxes(-1, -2) if "transposed" in how else array
        room = np.zeros((*plain.shape[:-1], plain.shape[-1] + 3), array.dtype)
        room[..., 1:-2] = plain
        matrix = room[..., 1:-2]
        return matrix.swapaxes(-1, -2) if "transposed" in how else matrix
    if how == "strided":
        room = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        room[..., ::2] = array
        return room[..., ::2]
    return array


WAYS = ["plain", "transposed", "padded", "padded transposed", "strided"]


def check(actual: np.ndarray, exact: np.ndarray, k: int) -> None:
    eps = max(EPS[actual.dtype.name], k * 2.0**-23 if actual.dtype.itemsize < 8 else 0)
    np.testing.assert_allclose(actual.astype(np.float64), exact, atol=4 * eps * np.abs(exact).max())


def place(where: str) -> Any:
    return OnGpu if where == "cublas" else lambda array: array


@pytest.mark.parametrize("where", ["numpy", "cublas"])
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("how_a", WAYS)
@pytest.mark.parametrize("how_b", WAYS)
def test_every_layout(cublas: Cublas, where: str, dtype: Any, how_a: str, how_b: str) -> None:
    a, b = draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype, seed=1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    placed = place(where)
    actual = gemm(placed(lying(a, how_a)), placed(lying(b, how_b)))
    assert actual.dtype == dtype
    check(getattr(actual, "values", actual), exact, 7)
    if where == "cublas":
        flags = "".join(str(int("transposed" in how)) for how in (how_b, how_a))
        assert cublas.calls == [*ON_5, f"gemm 3x5x7 flags {flags}"]


@pytest.mark.parametrize("where", ["numpy", "cublas"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_adds_to_what_is_there(
    cublas: Cublas, where: str, wide: bool, how: str, dtype: Any
) -> None:
    if wide and dtype.itemsize > 4:
        pytest.skip("float64 is the widest there is")
    kind = np.dtype(np.float32) if wide else dtype
    a, b, before = draw(7, 5, dtype=dtype), draw(7, 3, dtype=dtype, seed=1), draw(5, 3, dtype=kind)
    exact = before.astype(np.float64) + a.T.astype(np.float64) @ b.astype(np.float64)
    placed, out = place(where), lying(before.copy(), how)
    total = placed(out)
    assert (
        gemm(placed(a).T if where == "numpy" else placed(a.T), placed(b), out=total, add=True)
        is total
    )
    check(out, exact, 7)


@pytest.mark.parametrize("where", ["numpy", "cublas"])
@pytest.mark.parametrize(
    "shapes", [((4, 5, 7), (4, 7, 3)), ((5, 7), (4, 7, 3)), ((4, 5, 7), (7, 3))]
)
@pytest.mark.parametrize("how", WAYS)
def test_batches(cublas: Cublas, where: str, shapes: Any, how: str) -> None:
    a, b = draw(*shapes[0], dtype=BFLOAT16), draw(*shapes[1], dtype=BFLOAT16, seed=1)
    exact, placed = a.astype(np.float64) @ b.astype(np.float64), place(where)
    out = np.zeros(exact.shape, np.float32)
    gemm(placed(lying(a, how)), placed(lying(b, how)), out=placed(out))
    check(out, exact, 7)
    if where == "cublas":
        assert [call.split()[0] for call in cublas.calls] == ["stream", "workspace", "strided"]


@pytest.mark.parametrize("where", ["numpy", "cublas"])
@pytest.mark.parametrize("shape", [(1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1)])
@pytest.mark.parametrize("how", WAYS)
def test_axes_of_one(cublas: Cublas, where: str, shape: tuple[int, int, int], how: str) -> None:
    m, k, n = shape
    a, b = draw(m, k, dtype=np.float32), draw(k, n, dtype=np.float32, seed=1)
    placed, out = place(where), np.ones((m, n), np.float32)
    gemm(placed(lying(a, how)), placed(lying(b, how)), out=placed(out), add=True)
    check(out, 1 + a.astype(np.float64) @ b, k)


@pytest.mark.parametrize("where", ["numpy", "cublas"])
def test_empty_axes(cublas: Cublas, where: str) -> None:
    placed = place(where)
    for m, k, n in ((0, 3, 2), (3, 2, 0), (3, 0, 2)):
        out = np.full((m, n), 5, np.float32)
        gemm(
            placed(np.ones((m, k), np.float32)),
            placed(np.ones((k, n), np.float32)),
            out=placed(out),
            add=True,
        )
        assert (out == 5).all()
        gemm(
            placed(np.ones((m, k), np.float32)),
            placed(np.ones((k, n), np.float32)),
            out=placed(out),
        )
        assert (out == 0).all()
    assert cublas.calls == []


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", WAYS)
def test_few_rows(
    monkeypatch: pytest.MonkeyPatch, how: str, dtype: Any, count: int, in_place: bool
) -> None:
    monkeypatch.setattr(common_gemm, "reads_in_place", lambda: in_place)
    monkeypatch.setattr(common_gemm, "SHARE", 2**12)
    monkeypatch.setattr(common_gemm.threads, "count", lambda: count)
    for m, k, n in ((2, 128, 257), (7, 1000, 131), (16, 515, 99), (32, 2500, 33), (33, 256, 256)):
        a, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
        before = draw(m, n, dtype=dtype, seed=2)
        for add in (False, True):
            out = lying(before.copy(), how)
            gemm(lying(a, how), lying(weight, how).T, out=out, add=add)
            check(out, before * add + a.astype(np.float64) @ weight.T.astype(np.float64), k)


@pytest.mark.parametrize("rows", [2, 5, 8, 17, 32])
@pytest.mark.parametrize("inputs", [200, 1000])
def test_parts_of_a_weight_for_few_rows(
    monkeypatch: pytest.MonkeyPatch, inputs: int, rows: int
) -> None:
    """OpenBLAS reads both operands of these parts in place: sgemm_small_kernel_permit_skylakex."""
    times, seen = common_gemm._times, list[Any]()

    def recorded(a: Any, b: Any, out: Any = None) -> Any:
        seen.append((len(a), *b.shape[-2:], 1 if b.ndim == 2 else len(b)))
        return times(a, b, out)

    monkeypatch.setattr(common_gemm, "_times", recorded)
    monkeypatch.setattr(common_gemm, "reads_in_place", lambda: True)
    x, weight = draw(rows, inputs, dtype=np.float32), draw(900, inputs, dtype=np.float32)
    linear(x, weight)
    assert sum(n * parts for _, _, n, parts in seen) == 900
    for m, k, n, _ in seen:
        assert m * n <= 1200
        assert m * k * n <= 10**6


@pytest.mark.parametrize(("core", "expected"), [("SkylakeX", True), ("Haswell", False)])
def test_kernels_that_read_in_place(core: str, expected: bool) -> None:
    """A process with OpenBLAS's kernels for a processor, unless NumPy's BLAS has no such name."""
    code = (
        "import threadpoolctl; from unsloth_cupy.ops.common.gemm import reads_in_place;"
        " print(threadpoolctl.threadpool_info()[0].get('architecture'), reads_in_place())"
    )
    environment = {**os.environ, "OPENBLAS_CORETYPE": core}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    name, actual = run.stdout.split()
    if name != core:
        pytest.skip(f"the BLAS here computes with {name}")
    assert actual == str(expected)


def test_sums_are_float32(cublas: Cublas) -> None:
    """4,096 ones and 4,096 halves of eps, each of which 16 bits would lose."""
    a = np.ones((1, 8192), np.float16)
    a[:, 4096:] = 2.0**-11
    for placed in (OnGpu, np.asarray):
        actual = gemm(placed(a), placed(np.ones((8192, 1), np.float16)), dtype=np.float32)
        assert getattr(actual, "values", actual)[0, 0] == 4098


@pytest.mark.slow
def test_wide_operands_in_steps() -> None:
    """A product of 16-bit matrices widens a few megabytes at a time, and rounds once."""
    a, b = draw(600, 9000, dtype=BFLOAT16), draw(9000, 500, dtype=BFLOAT16, seed=1)
    assert common_gemm.steps(600, 500, 9000) == (233, 233)
    tracemalloc.start()
    actual = gemm(a, b)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < actual.nbytes + 2.2 * common_gemm.BLOCK_BYTES < (a.size + b.size) * 4
    check(actual, a.astype(np.float64) @ b.astype(np.float64), 9000)


def test_adding_float32_takes_a_megabyte() -> None:
    a, b = draw(30, 4000, dtype=np.float32), draw(30, 500, dtype=np.float32, seed=1)
    out = np.ones((4000, 500), np.float32)
    tracemalloc.start()
    gemm(a.T, b, out=out, add=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * common_gemm.SUM_BYTES < out.nbytes / 4
    check(out, 1 + a.T.astype(np.float64) @ b, 30)


def test_a_float32_operand_meets_a_narrow_one_where_numpy_computes(cublas: Cublas) -> None:
    a, b = draw(5, 7, dtype=np.float32), draw(7, 3, dtype=BFLOAT16)
    check(gemm(a, b), a.astype(np.float64) @ b.astype(np.float64), 7)
    with pytest.raises(DTypeError, match="a is float32 and b is bfloat16; cast one"):
        gemm(OnGpu(a), OnGpu(b))


def test_a_handle_is_made_once_and_set_to_each_new_stream(
    cublas: Cublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = OnGpu(np.ones((2, 2), np.float32))
    streams = iter([5, 5, 6, 6, 5])
    current = lambda: types.SimpleNamespace(ptr=next(streams))  # noqa: E731
    monkeypatch.setattr(sys.modules["cupy"].cuda, "get_current_stream", current)
    for _ in range(5):
        gemm(a, a)
    product = "gemm 2x2x2 flags 00"
    on_6 = ["stream 6 of 77", "workspace 200 of 32 MiB"]
    assert cublas.calls == [*ON_5, product, product, *on_6, product, product, *ON_5, product]
    common_gemm.handles.by_device.clear()
    assert cublas.calls[-1] == "destroyed 77"


@pytest.mark.parametrize(("stream", "several"), [(5, 1), (2, 2)])
def test_threads_share_the_memory_of_a_stream(cublas: Cublas, stream: int, several: int) -> None:
    """Unless the address 2 stands for a stream of each thread."""
    cuda, made = sys.modules["cupy"].cuda, []
    meet = threading.Barrier(2)  # else the second thread may have the first one's number

    def ask() -> None:
        made.append(common_gemm._workspace(cuda, 0, stream)[0].ptr)
        meet.wait()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*made}) == several


def test_wrong_calls(cublas: Cublas) -> None:
    a, b = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
    with pytest.raises(ShapeError, match=r"\(2, 3\) @ \(4, 5\) does not make \(2, 5\)"):
        gemm(a, b)
    with pytest.raises(ShapeError, match=r"does not make \(5, 2\)"):
        gemm(a, b[:3], out=np.ones((5, 2), np.float32))
    cublas.status = 7
    with pytest.raises(KernelError, match=r"cuBLAS gave status 7 for \(2, 3\) @ \(3, 5\)"):
        gemm(OnGpu(a), OnGpu(b[:3]))


def test_a_library_gives_what_its_dependencies_hold() -> None:
    """As CuPy's module loads cuBLAS; here Python's ctypes loads functions of libc."""
    import _ctypes

    assert ctypes.CDLL(_ctypes.__file__).strlen(b"four") == 4


def test_cublas_is_found_where_cupy_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In NVIDIA's wheels, whose folders the loader does not search."""
    libraries = pytest.importorskip("cupy_backends.cuda.libs", reason="a part of CuPy")
    asked: list[str] = []
    monkeypatch.setattr(libraries._pathfinder, "load_nvidia_dynamic_lib", asked.append)
    monkeypatch.delitem(vars(libraries), "cublas", raising=False)
    with contextlib.suppress(ImportError):  # here it is not
        common_gemm.cublas.__wrapped__()
    assert asked == ["cublas"]


def operands(machine: Machine, apart: bool, seed: int) -> tuple[list[Any], list[Any]]:
    """Return x and two weights, rows of one matrix or not, and two gradients, columns of one."""
    x, whole, dy = (draw(*s, dtype=np.float32, seed=seed) for s in ((2, 4, 8), (24, 8), (2, 4, 24)))
    whole, dy = machine.place(whole), machine.place(dy)
    weights, dys = [whole[:16], whole[16:]], [dy[..., :16], dy[..., 16:]]
    if apart:
        weights, dys = ([machine.place(a.values.copy()) for a in each] for each in (weights, dys))
    return [machine.place(x), *weights], dys


@pytest.mark.parametrize("order", [[False] * 5, [True] * 5, [True, False] * 5])
def test_replayed_products_take_the_arrays_of_their_call(
    order: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that lie together or apart, in turns: both have the same strides."""
    with gpu("90") as machine:
        machine.strict = False
        library = Cublas()
        monkeypatch.setattr(common_gemm, "cublas", lambda: library)
        for seed, apart in enumerate(order):
            (x, *weights), dys = operands(machine, apart, seed)
            looked_up = common_gemm._product.cache_info().hits
            library.calls.clear()
            ys: Any = linears(x, *weights)[:2]
            dx, *dweights = linears_backward(*dys, None, x, *weights)[:3]
            one = linear(x, weights[0])
            back = linear_backward(dys[0], x, weights[0], wanted=frozenset({"weight"}))
            products = [call for call in library.calls if call[0] == "g"]
            assert len(products) == 2 + (6 if apart else 3)
            assert seed < 4 or looked_up == common_gemm._product.cache_info().hits, "not replayed"
            wide = x.values.astype(np.float64).reshape(8, 8)
            pairs = [(d.values.reshape(8, -1), w.values) for d, w in zip(dys, weights, strict=True)]
            exact = [wide @ w.T for _, w in pairs], [d.T @ wide for d, _ in pairs]
            for actual, expected in zip([*ys, *dweights], itertools.chain(*exact), strict=True):
                close(actual.values.reshape(expected.shape), expected)
            close(dx.values.reshape(8, 8), sum(d @ w for d, w in pairs))
            close(one.values, ys[0].values)
            close(back[1].values, dweights[0].values)
            assert back[0] is back[2] is None


@pytest.mark.parametrize("rank", [3, 65], ids=["one pass over dy", "two products"])
def test_an_adapter_is_replayed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the stand-in write nothing: up and db of one pass over dy stay zero."""
    shapes = {"x": (2, 4, 8), "weight": (6, 8), "a": (rank, 8), "b": (6, rank), "dy": (2, 4, 6)}
    with gpu("90") as machine:
        machine.strict = False
        library = Cublas()
        monkeypatch.setattr(common_gemm, "cublas", lambda: library)
        monkeypatch.setattr(replay, "_recorded", recorded := mock.Mock(wraps=replay._recorded))
        for seed in range(4):
            values = [
                draw(*each, dtype=np.dtype(np.float32), seed=seed) for each in shapes.values()
            ]
            x, weight, a, b, dy = values
            placed = [machine.place(value) for value in values]
            recorded.side_effect = None if seed < 2 else AssertionError("recorded again")
            y, low = lora_linear_forward(*placed[:4], scale=0.5)
            (down,) = lora_down(placed[0], placed[2])[:1]
            up = lora_up(placed[0], placed[1], down, placed[3], scale=0.5)
            expected = x @ weight.T + 0.5 * (x @ a.T) @ b.T
            for actual in (y, up):
                close(actual.values, expected)
            close(down.values, low.values)
            dx, _, da, db, *_ = lora_linear_backward(
                placed[4],
                None,
                *placed[:4],
                None,
                None,
                low,
                scale=0.5,
                wanted=frozenset({"x", "a", "b"}),
            )
            *_, dlow, _, _, _ = lora_up_backward(
                placed[4],
                placed[0],
                placed[1],
                down,
                placed[3],
                None,
                None,
                scale=0.5,
                wanted=frozenset({"low", "b"}),
            )
            of_low = np.zeros((2, 4, rank)) if rank == 3 else 0.5 * dy @ b
            close(dlow.values, of_low)
            close(dx.values, dy @ weight + of_low @ a)
            close(da.values, of_low.reshape(8, -1).T @ x.reshape(8, 8))
            close(db.values, 0.5 * dy.reshape(8, -1).T @ low.values.reshape(8, -1) * (rank > 3))
            da_of_down = lora_down_backward(dlow, None, None, placed[0], placed[2])[1]
            close(da_of_down.values, da.values)


def close(actual: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("how_a", WAYS)
@pytest.mark.parametrize("how_b", WAYS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_on_a_gpu(how_a: str, how_b: str, dtype: Any) -> None:
    a, b = draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype, seed=1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    actual = gemm(on_gpu(lying(a, how_a)), on_gpu(lying(b, how_b)))
    check(actual.get(), exact, 7)


@pytest.mark.gpu
def test_is_captured_into_a_graph() -> None:
    import cupy

    a, b = (cupy.asarray(draw(64, 64, dtype=np.float32, seed=seed)) for seed in (0, 1))
    out, stream = cupy.zeros((64, 64), np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        gemm(a, b, out=out)
        stream.begin_capture()
        gemm(a, b, out=out)
        graph = stream.end_capture()
        a *= 2
        graph.launch()
        exact = a.get().astype(np.float64) @ b.get()
    check(out.get(), exact, 64)
