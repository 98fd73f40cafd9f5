"""Ownership of results' memory, and the stream that computes them."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
cupy = pytest.importorskip("cupy", reason="whose arrays they are on a GPU")

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.errors import FrameworkError  # noqa: E402
from unsloth_cupy.interop import _torch_memory as memory  # noqa: E402


@pytest.fixture
def on_host(monkeypatch):
    """Let torch allocate on the host where it would on a GPU: CuPy never reads what it holds."""
    monkeypatch.setattr(memory, "current_device", lambda: (0, torch.device("cpu")))
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)


def test_results_are_memory_of_torchs_allocator(on_host, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(
        memory.torch, "empty", lambda *a, **o: made.append(empty(*a, **o)) or made[-1]
    )
    with cupy.cuda.using_allocator(memory.allocate):
        array = cupy.ndarray((2, 3), np.float32)
    owner = made[0]
    assert (owner.dtype, owner.numel()) == (torch.uint8, 24)
    assert array.data.ptr == owner.data_ptr()
    tensor = memory.tensor_of(array, (), ())
    assert tensor.untyped_storage().data_ptr() == owner.data_ptr()
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (torch.float32, (2, 3), (3, 1))
    part = memory.tensor_of(array[1:, ::2], (), ())
    assert (part.storage_offset(), part.shape, part.stride()) == (3, (1, 2), (3, 2))


def test_results_in_the_memory_of_an_operand_are_views_of_it(on_host):
    with cupy.cuda.using_allocator(memory.allocate):
        array = cupy.ndarray((4, 3), np.float32)
    tensor = torch.zeros(4, 3)
    assert memory.tensor_of(array, (None, array), (None, tensor)) is tensor
    part = memory.tensor_of(array[1:, 1], (None, array), (None, tensor))
    assert part._base is tensor
    assert (part.storage_offset(), part.shape, part.stride()) == (4, (3,), (3,))


def test_ops_work_on_torchs_stream_in_torchs_memory(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def enter(what, value):
        entered.append((what, value))
        yield
        entered.append((what, None))

    stream = SimpleNamespace(from_external=lambda stream: enter("stream", stream.address))
    cuda = SimpleNamespace(
        Device=lambda number: enter("device", number),
        Stream=stream,
        using_allocator=lambda allocate: enter("memory", allocate),
    )
    monkeypatch.setattr(memory, "cupy", lambda: SimpleNamespace(cuda=cuda))
    current = SimpleNamespace(cuda_stream=4096)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    tensor = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=3))
    with memory.stream(tensor):
        assert entered == [("device", 3), ("stream", 4096), ("memory", memory.allocate)]
    assert [what for what, value in entered if value is None] == ["memory", "stream", "device"]
    with memory.stream(torch.ones(1)):
        assert len(entered) == 6  # on the host there is nothing to enter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_in_a_group_of_processes_memory_may_be_freed_after_a_call(monkeypatch, dtype):
    monkeypatch.setattr(memory, "in_group", lambda: True)
    tensor = torch.arange(6).reshape(2, 3).to(dtype).T
    array = memory.array_of(tensor)
    assert array.flags.writeable
    assert array.ctypes.data == tensor.data_ptr()
    assert np.array_equal(array.astype(float), tensor.double().numpy())
    tensor.untyped_storage().resize_(0)


def test_views_that_flip_signs_are_refused_on_every_device():
    flipped = torch.imag(torch.tensor([1j, 2j]).conj())
    on_gpu = SimpleNamespace(is_neg=flipped.is_neg, is_cuda=True)  # whose DLPack loses the signs
    for tensor in (flipped, torch._neg_view(torch.ones(2).bfloat16()), on_gpu):
        with pytest.raises(FrameworkError, match=r"flipped, such as .*; pass \.resolve_neg\(\)"):
            memory.array_of(tensor)
    with pytest.raises(FrameworkError, match="softmax: x is a view with signs flipped"):
        uc.softmax(flipped)
    assert uc.softmax(flipped.resolve_neg())[0] > 0.7


@pytest.fixture
def gpu():
    """Skip where torch sees no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda")


@pytest.mark.gpu
def test_torch_counts_what_results_take(gpu):
    x = torch.randn(1024, 1024, device=gpu, requires_grad=True)
    uc.relu2(x)  # compiled
    before = torch.cuda.memory_allocated()
    y = uc.relu2(x)
    assert torch.cuda.memory_allocated() - before == y.numel() * 4
    y.record_stream(torch.cuda.Stream())
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.relu(x.detach()))


@pytest.mark.gpu
def test_calls_are_captured_in_graphs_of_torch(gpu):
    x, weight = torch.randn(64, 256, device=gpu), torch.ones(256, device=gpu, requires_grad=True)

    def step():
        (slope,) = torch.autograd.grad(uc.rms_norm(x, weight).sum(), weight)
        return slope

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # from then on launches are replayed
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, step())


@pytest.mark.gpu
def test_compiled_calls_on_a_gpu(gpu):
    x, weight = torch.randn(64, 256, device=gpu), torch.ones(256, device=gpu, requires_grad=True)
    compiled = torch.compile(lambda x: uc.swiglu(uc.rms_norm(x, weight), x), fullgraph=True)
    actual, expected = compiled(x), uc.swiglu(uc.rms_norm(x, weight), x)
    torch.testing.assert_close(actual, expected)
    slopes = [torch.autograd.grad(y.sum(), weight)[0] for y in (actual, expected)]
    torch.testing.assert_close(*slopes)
