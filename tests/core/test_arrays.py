"""Arrays of other libraries go in and come back as what they were, over the same memory."""

import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import accumulate_, add, reshape, rms_norm
from unsloth_cupy.core.arrays import common, framework_of
from unsloth_cupy.core.frameworks import FRAMEWORKS
from unsloth_cupy.core.gpu import on_one_device
from unsloth_cupy.core.op import Op, op
from unsloth_cupy.errors import DTypeError, FrameworkError
from unsloth_cupy.placement import full_like

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture
def seen() -> tuple[Op, list[np.ndarray]]:
    """Return an op that hands its argument back, and a list of what its definition was given."""
    inputs: list[np.ndarray] = []

    @op("x(*axes) -> y(*axes)", widen=False)
    def same(x):
        inputs.append(x)
        return x

    return same, inputs


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class TestTorch:
    @pytest.fixture(autouse=True)
    def _peer(self) -> None:
        self.torch = pytest.importorskip("torch", reason="whose arrays go in and come back")

    @pytest.mark.parametrize("shape", [(3, 4), (), (0, 3)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_both_ways_share_memory(self, seen, dtype: str, shape: tuple[int, ...]) -> None:
        same, inputs = seen
        tensor = self.torch.ones(shape, dtype=getattr(self.torch, dtype))
        result = same(tensor)
        assert type(result) is self.torch.Tensor
        assert (result.dtype, tuple(result.shape)) == (tensor.dtype, shape)
        assert inputs[0].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert address(inputs[0]) == tensor.data_ptr() or tensor.numel() == 0
        assert result.data_ptr() == tensor.data_ptr()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_strides_are_kept(self, seen, dtype: str) -> None:
        same, inputs = seen
        tensor = self.torch.arange(12).reshape(3, 4).to(getattr(self.torch, dtype)).T[1:, ::2]
        result = same(tensor)
        assert result.stride() == tensor.stride()
        assert result.data_ptr() == address(inputs[0]) == tensor.data_ptr()
        assert self.torch.equal(result, tensor)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_results_that_torch_cannot_hold_are_copied(self, dtype: str) -> None:
        @op("x(n) -> y(n), z(n, n)", widen=False)
        def views(x):
            return x[::-1], np.broadcast_to(x, (len(x), len(x)))

        tensor = self.torch.arange(3).to(getattr(self.torch, dtype))
        reverse, broad = views(tensor)
        assert reverse.tolist() == [2, 1, 0]
        assert broad.tolist() == [[0, 1, 2]] * 3
        broad += 1  # writable, and its own
        assert tensor.tolist() == [0, 1, 2]

    def test_a_gradient_that_torch_would_lose_raises(self) -> None:
        x = self.torch.ones(3, requires_grad=True)
        with pytest.raises(FrameworkError, match=r"accumulate_: x requires a gradient.*detach"):
            accumulate_(self.torch.ones(3), x)
        with self.torch.no_grad():
            assert accumulate_(self.torch.ones(3), x).tolist() == [2, 2, 2]

    def test_what_torch_does_not_lend_raises(self) -> None:
        with pytest.raises(FrameworkError, match=r"add: a .*Sparse"):
            add(*[self.torch.ones(3, 3).to_sparse()] * 2)
        with pytest.raises(FrameworkError, match=r"add: a .*meta"):
            add(*[self.torch.ones(3, device="meta")] * 2)

    def test_mixing_with_numpy_raises(self) -> None:
        with pytest.raises(FrameworkError, match="a from torch cpu, b from numpy cpu"):
            add(self.torch.ones(3), np.ones(3))

    def test_integers_may_be_python_numbers(self) -> None:
        @op("x(n), start: int -> y(n)")
        def shifted(x, start):
            return x + start

        assert shifted(self.torch.ones(2), 3).tolist() == [4, 4]

    def test_full_like(self) -> None:
        tensor = self.torch.ones(2, 3, dtype=self.torch.bfloat16)
        assert self.torch.equal(full_like(tensor, 2), tensor * 2)
        assert full_like(tensor, 2).dtype == tensor.dtype


class TestJax:
    @pytest.fixture(autouse=True)
    def _peer(self) -> None:
        self.jax = pytest.importorskip("jax", reason="whose arrays go in and come back")

    @pytest.mark.parametrize("shape", [(3, 4), (), (0, 3)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES[:3])
    def test_both_ways_share_memory(self, seen, dtype: str, shape: tuple[int, ...]) -> None:
        """A result over memory that XLA allocated, so that its address suits XLA."""
        same, inputs = seen
        array = self.jax.numpy.ones(shape, dtype)
        result = same(array)
        assert isinstance(result, self.jax.Array)
        assert (result.dtype, result.shape, result.device) == (array.dtype, shape, array.device)
        assert not inputs[0].flags.writeable
        assert inputs[0].dtype == array.dtype
        if array.size:
            assert address(inputs[0]) == array.unsafe_buffer_pointer()
            assert result.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()

    @pytest.mark.parametrize("dtype", DTYPES[:3])
    def test_results_in_memory_of_numpy(self, dtype: str) -> None:
        array = self.jax.numpy.arange(6, dtype=dtype).reshape(2, 3)
        result = add(array, array)
        assert result.dtype == array.dtype
        assert (result == 2 * array).all()

    def test_mixing_raises(self) -> None:
        with pytest.raises(FrameworkError, match=r"a from jax .*, b from numpy cpu"):
            add(self.jax.numpy.ones(3), np.ones(3, np.float32))

    def test_full_like(self) -> None:
        array = self.jax.numpy.ones((2, 3), "bfloat16")
        assert (full_like(array, 2) == 2 * array).all()


def test_streams_of_torch_are_taken_by_cupy() -> None:
    cupy = pytest.importorskip("cupy", reason="it is what takes them")
    pytest.importorskip("torch", reason="whose streams they are")
    from unsloth_cupy.interop._torch_memory import Stream

    assert cupy.cuda.Stream.from_external(Stream(4096)).ptr == 4096


class TestNumPy:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_go_in_as_they_are(self, seen, dtype: str) -> None:
        same, inputs = seen
        base = np.arange(12).astype(getattr(ml_dtypes, dtype, dtype)).reshape(3, 4)
        frozen = base.copy()
        frozen.flags.writeable = False
        for array in (base, base[:, ::-1], base.T, base[:0], frozen, base[0, 0, ...]):
            assert same(array) is array
            assert inputs.pop() is array

    def test_a_memmap_is_read_where_it_lies(self, seen, tmp_path: Path) -> None:
        same, inputs = seen
        np.arange(6, dtype=np.float32).tofile(tmp_path / "w")
        mapped = np.memmap(tmp_path / "w", np.float32, "r")
        assert type(same(mapped)) is np.ndarray
        assert address(inputs[0]) == address(mapped)
        assert add(mapped, np.ones(6, np.float32)).tolist() == [1, 2, 3, 4, 5, 6]

    def test_other_subclasses_lose_their_arithmetic(self) -> None:
        from unsloth_cupy import multiply

        class Odd(np.ndarray):
            def __mul__(self, other):
                raise AssertionError

        odd = np.full(2, 3.0).view(Odd)
        assert multiply(odd, np.ones(2)).tolist() == [3, 3]

    def test_a_mask_would_be_lost(self) -> None:
        with pytest.raises(FrameworkError, match=r"add: a has a mask.*\.filled"):
            add(np.ma.ones(3), np.ones(3))

    def test_scalars_of_numpy_are_arrays(self) -> None:
        result = add(np.float32(1), np.ones((), np.float32))
        assert type(result) is np.ndarray
        assert result == 2

    def test_swapped_bytes_raise(self) -> None:
        swapped = np.ones(3, np.dtype("f4").newbyteorder())
        with pytest.raises(
            DTypeError, match=r"a is float32 with swapped bytes; pass a\.astype\('float32'\)"
        ):
            add(swapped, swapped)

    @pytest.mark.parametrize(
        "bad", [[1.0], 1.0, True, "x", object()], ids=lambda bad: type(bad).__name__
    )
    def test_what_is_no_array_raises(self, bad) -> None:
        with pytest.raises(DTypeError, match=r"add: b is not an array but \w+; wrap it in numpy"):
            add(np.ones(1), bad)

    def test_none_raises(self) -> None:
        with pytest.raises(DTypeError, match=r"add: b is missing; pass b\(\*axes\)"):
            add(np.ones(1), None)
        with pytest.raises(DTypeError, match="add: b is missing"):
            add(np.ones(1))

    def test_an_integer_is_no_float(self) -> None:
        with pytest.raises(DTypeError, match="a is int64; it must be float16 or"):
            add(1, 2)


class Lent:
    """An array of an unknown library: DLPack, a shape and a dtype."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Spaced(Lent):
    """The same with a namespace, as the array API standard asks."""

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: Spaced(np.from_dlpack(array)))


class TestDlpack:
    def test_results_go_back_through_the_namespace(self, seen) -> None:
        same, inputs = seen
        lent = Spaced(np.arange(3.0))
        result = same(lent)
        assert type(result) is Spaced
        assert address(result.array) == address(inputs[0]) == address(lent.array)

    def test_without_a_namespace_results_are_numpy(self) -> None:
        lent = Lent(np.arange(3.0))
        assert add(lent, lent).tolist() == [0, 2, 4]

    def test_mixing_raises(self) -> None:
        with pytest.raises(FrameworkError, match="a from tests, b from numpy cpu"):
            add(Lent(np.ones(3)), np.ones(3))


class OnGpu:
    """What the rules on devices ask of a CuPy array."""

    def __init__(self, device: "Device") -> None:
        self.device, self.data = device, types.SimpleNamespace(device_id=device.number)


OnGpu.__module__ = "cupy"


class Device:
    """A CuPy device: a context manager that makes itself the current one."""

    entered: list[int]

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.entered.append(self.number)

    def __exit__(self, *error: object) -> None: ...

    def __str__(self) -> str:
        return f"<CUDA Device {self.number}>"


def test_arrays_on_two_devices_raise_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    Device.entered = []
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 2, getDevice=lambda: 0)
    cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    made = []

    def make() -> object:
        number = len(made)
        made.append(number)
        return lambda arrays, options: number

    run = on_one_device(add, make)
    zero, one = OnGpu(Device(0)), OnGpu(Device(1))
    assert run([zero, zero], {}) == 0
    assert Device.entered == [], "theirs is the current one"
    assert run([one, one], {}) == 1, "what is kept of one device is not taken for another"
    assert Device.entered == [1]
    assert (run([zero, zero], {}), run([one, one], {})) == (0, 1)
    with pytest.raises(FrameworkError, match=r"a from cupy <CUDA Device 1>, b .*Device 0>"):
        run([one, zero], {})
    runtime.getDeviceCount = lambda: 1
    assert on_one_device(add, make)([one, one], {}) == 2


def test_common_names_the_library() -> None:
    assert common("f", ("x", "y", "z"), (np.ones(1), None, 3)) == "numpy"
    assert common("f", ("x",), (OnGpu(Device(0)),)) == "cupy"
    assert common("f", (), ()) == "numpy"
    assert framework_of(np.float32(1), "x") == "numpy"
    assert set(FRAMEWORKS) == {"numpy", "torch", "jax"}


def test_reshape_of_a_torch_view_is_a_view() -> None:
    torch = pytest.importorskip("torch", reason="whose arrays go in and come back")
    x = torch.arange(6.0)
    assert reshape(x, shape=(2, 3)).data_ptr() == x.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_torch_on_a_gpu(dtype: str) -> None:
    """On torch's stream, whichever it is: nobody waits for another."""
    torch = pytest.importorskip("torch", reason="whose arrays go in and come back")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x = torch.randn((4096, 1024), device="cuda", dtype=getattr(torch, dtype))
    weight = torch.ones(1024, device="cuda", dtype=x.dtype)
    expected = rms_norm(x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = torch.zeros_like(x)
        for _ in range(20):
            made += x
        made /= 20
        actual = rms_norm(made - made + x, weight)
    stream.synchronize()
    assert (actual.device, actual.dtype) == (x.device, x.dtype)
    assert torch.equal(actual, expected)
