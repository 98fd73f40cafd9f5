"""Ops on XLA's buffers of a GPU: on stand-ins over memory of the host, then on a GPU."""

import contextlib
import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax", reason="needs the extra `peers` (jax)")
cupy = pytest.importorskip("cupy", reason="whose arrays they are on a GPU")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.interop import _jax_gpu as door  # noqa: E402


class Buffer:
    """A buffer of XLA on a GPU, over memory of the host that CuPy never reads."""

    def __init__(self, values, shift=0):
        self.values = np.zeros(values.size + 64, values.dtype)
        start = -self.values.ctypes.data % 64 // values.itemsize + shift
        self.values = self.values[start:][: values.size].reshape(values.shape)
        self.values[...] = values
        self.shape, self.dtype = values.shape, values.dtype
        self.address = self.values.ctypes.data
        self.__cuda_array_interface__ = {"data": (self.address, False)}

    def __dlpack_device__(self):
        return 2, 3


def seen(array):
    """Return NumPy's view of a CuPy array over memory of the host."""
    room = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.data.ptr)
    return np.frombuffer(room, array.dtype, array.size).reshape(array.shape)


class Machine:
    """What the door asks of CuPy, beside its arrays; copies are counted."""

    def __init__(self):
        self.entered, self.copies, self.capturing, self.rooms = [], 0, False, []
        self.ndarray, self.may_share_memory = cupy.ndarray, self._share
        self.cuda = SimpleNamespace(
            Device=lambda number: self._enter("device", number),
            Stream=SimpleNamespace(
                from_external=lambda own: self._enter("stream", own.__cuda_stream__())
            ),
            runtime=SimpleNamespace(streamIsCapturing=lambda stream: self.capturing),
            using_allocator=cupy.cuda.using_allocator,
            get_allocator=lambda: self.allocate,
            UnownedMemory=cupy.cuda.UnownedMemory,
            MemoryPointer=cupy.cuda.MemoryPointer,
        )

    @contextlib.contextmanager
    def _enter(self, what, value):
        self.entered.append((what, value))
        yield

    def _share(self, one, other):
        return np.may_share_memory(seen(one), seen(other))

    def allocate(self, size):
        room = np.zeros(size + 64, np.uint8)
        self.rooms.append(room)
        start = room.ctypes.data + -room.ctypes.data % 64
        memory = cupy.cuda.UnownedMemory(start, size, room, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def put(self, target, array):
        self.copies += 1
        seen(target)[...] = seen(array)

    def copy(self, array):
        self.copies += 1
        copied = cupy.ndarray(array.shape, array.dtype)
        seen(copied)[...] = seen(array)
        return copied


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(door, "cupy", lambda: made)
    monkeypatch.setattr(door, "put", made.put)
    monkeypatch.setattr(door, "copied", made.copy)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    return made


def double_and_halve(x):
    """Return 2 x and x / 2 as a launch does: both are allocated after scratch of their size."""
    scratch = cupy.ndarray(x.shape, x.dtype)
    results = cupy.ndarray(x.shape, x.dtype), cupy.ndarray(x.shape, x.dtype)
    seen(scratch)[...] = seen(x)
    for result, factor in zip(results, (2, 0.5), strict=True):
        seen(result)[...] = seen(scratch) * factor
    return results


CONTEXT = SimpleNamespace(stream=4096)


def test_results_are_made_in_the_buffers_from_the_second_call_on(machine):
    run = door.OnGpu(double_and_halve)
    for copies, shape in ((2, (3, 4)), (2, (3, 4)), (4, (5, 2)), (4, (3, 4))):
        x = Buffer(np.random.default_rng(0).standard_normal(shape).astype("f"))
        results = [Buffer(np.zeros(shape, "f")) for _ in range(2)]
        run(CONTEXT, results, [x])
        assert machine.copies == copies
        np.testing.assert_array_equal(results[0].values, 2 * x.values)
        np.testing.assert_array_equal(results[1].values, x.values / 2)
    assert machine.entered[:2] == [("device", 3), ("stream", (0, 4096))]


def test_results_that_lie_in_each_others_buffers_are_brought_apart(machine):
    run, x = door.OnGpu(double_and_halve), Buffer(np.ones((3, 4), "f"))
    run.places[((3, 4),)] = {0: 0, 1: 1}  # scratch, and the other result
    results = [Buffer(np.zeros((3, 4), "f")) for _ in range(2)]
    run(CONTEXT, results, [x])
    assert (results[0].values == 2).all()
    assert (results[1].values == 0.5).all()
    run(CONTEXT, results, [x])
    copies = machine.copies
    run(CONTEXT, results, [x])
    assert machine.copies == copies, "places are those of the last call"


def test_buffers_that_kernels_cannot_write_to_get_copies(machine):
    run, x = door.OnGpu(double_and_halve), Buffer(np.ones((3, 4), "f"))
    for _ in range(3):
        results = [Buffer(np.zeros((3, 4), "f"), shift=1) for _ in range(2)]
        run(CONTEXT, results, [x])
        assert (results[0].values == 2).all()
    assert machine.copies == 6


def test_what_is_an_operand_is_copied(machine):
    run, x = door.OnGpu(lambda x: (x,)), Buffer(np.ones((3, 4), "f"))
    for _ in range(2):
        result = Buffer(np.zeros((3, 4), "f"))
        run(CONTEXT, [result], [x])
        assert (result.values == 1).all()


def test_memory_of_a_captured_graph_is_kept_for_its_addresses(machine):
    run, x = door.OnGpu(double_and_halve), Buffer(np.ones((3, 4), "f"))
    results = [Buffer(np.zeros((3, 4), "f")) for _ in range(2)]
    run(CONTEXT, results, [x])
    assert not run.kept
    machine.capturing = True
    made = len(machine.rooms)
    for _ in range(3):
        run(CONTEXT, results, [x])
    assert len(machine.rooms) == made + 1, "scratch is made once"
    run(CONTEXT, results[::-1], [x])
    assert len(machine.rooms) == made + 2, "another graph has its own"
    assert len({memory.ptr for kept in run.kept.values() for memory in kept.values()}) == 2


def test_bfloat16_comes_by_dlpack(machine):
    machine.from_dlpack = lambda buffer: ("by DLPack", buffer)
    buffer = Buffer(np.ones(3, ml_dtypes.bfloat16))
    assert door.array_of(buffer, 0) == ("by DLPack", buffer)


@pytest.fixture
def jax():
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    return jax


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_on_a_gpu(jax, dtype):
    """A compiled function that runs again and again, as a graph too, beside JAX's own."""
    x = jax.random.normal(jax.random.key(0), (512, 1024), dtype)
    weight = jax.numpy.ones(1024, dtype)
    dy = jax.random.normal(jax.random.key(1), (512, 1024), "float32")  # not along the result

    def ours(x, weight):
        for _ in range(4):
            x = uc.rms_norm(uc.swiglu(x, x), weight)
        return (x.astype("float32") * dy).sum()

    def theirs(x, weight):
        x, weight = x.astype("float32"), weight.astype("float32")
        for _ in range(4):
            x = jax.nn.silu(x) * x
            x = x / jax.numpy.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
        return (x * dy).sum()

    step, judge = (jax.jit(jax.grad(f, (0, 1))) for f in (ours, theirs))
    for scale in (1, 2, 3, 1):
        for actual, expected in zip(step(scale * x, weight), judge(scale * x, weight), strict=True):
            far = abs(actual.astype("float32") - expected).max()
            near = 40 * float(jax.numpy.finfo(dtype).eps)
            assert far <= near * abs(expected).max()


@pytest.mark.gpu
def test_dropout_on_a_gpu_reads_its_seed(jax):
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 64), "float16")
    dropped = jax.jit(lambda seed: uc.attention(q, q, q, dropout=0.5, seed=seed))
    one, other = dropped(jax.numpy.uint32(1)), dropped(jax.numpy.uint32(2))
    assert (one == dropped(jax.numpy.uint32(1))).all()
    assert (one != other).any()
