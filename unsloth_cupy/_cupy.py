"""NVIDIA GPUs, by way of CuPy."""

import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _arrays, _jit
from ._planned import Shapes
from ._source import source_root
from .errors import KernelError
from .interop import exchange


class CupyTarget:
    """Where CuPy's arrays live: compiles with NVRTC through ``cupy.RawModule``."""

    def owns(self, array: Any) -> bool:
        """Say whether array is a CuPy array."""
        return _is_cupys(array.__class__)

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Compile for the current device; CuPy keeps the result on disk."""
        import cupy

        try:
            module = cupy.RawModule(code=source, options=compiler_options())
            function = module.get_function(name)
        except cupy.cuda.compiler.CompileException as error:
            raise KernelError(f"{name} does not compile\n{error}\n{source}") from error
        most = 48 * 1024 - function.shared_size_bytes  # both together; more asks for leave

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared: int) -> None:
            nonlocal most
            if shared > most:
                function.max_dynamic_shared_size_bytes = most = shared
            function(grid, block, args, shared_mem=shared)

        return launch

    def ready(self, scalar: Any) -> Any:
        """Return a NumPy scalar as CuPy hands it over: to make that takes longer than a launch."""
        return sys.modules["cupy._core._scalar"].CScalar(scalar)


@functools.cache
def _is_cupys(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] == "cupy"


def compiler_options() -> tuple[str, ...]:
    """Return what NVRTC needs beside CuPy's own options: its header paths, -arch and -ftz=true.

    Float32 denormals are zero in kernels.  A second -arch is an error for NVRTC before 12.9.
    """
    return ("-std=c++17", f"-I{source_root()}")


def on_one_device(op: Any, made: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return what made() makes: for each of several GPUs one, where its arrays' is the current."""
    runtime = sys.modules["cupy"].cuda.runtime
    if runtime.getDeviceCount() == 1:
        return made()
    run_on = functools.cache(lambda device: made())

    def run_there(arrays: list[Any], options: dict[str, Any]) -> Any:
        here = runtime.getDevice()
        given = [a for a in arrays if a is not None and type(a) is not int]
        if all(array.data.device_id == here for array in given):
            return run_on(here)(arrays, options)
        exchange.common(op.__name__, op.names, arrays)
        with given[0].device:
            return run_on(given[0].data.device_id)(arrays, options)

    return run_there


moved = {"to_host": 0, "to_device": 0}  # bytes, by checkpoints that offload


class OnHost:
    """An array that waits in pinned memory of the host, copied by a stream of its own."""

    last: "OnHost | None" = None  # the newest of all, whose array may still be read

    def __init__(self, array: Any) -> None:
        cuda = sys.modules["cupy"].cuda
        array = _arrays.packed(array)
        self.shape, self.dtype, self.size = array.shape, array.dtype, array.nbytes
        self.memory, self.side = cuda.alloc_pinned_memory(self.size), _side(array.device.id)
        here = cuda.get_current_stream()
        if OnHost.last is not None:  # its copy had a whole part of the model's time
            here.wait_event(OnHost.last.done)
            OnHost.last.array = None
        self.side.wait_event(here.record())
        self.done: Any = self._copied(self.memory.ptr, array.data.ptr, TO_HOST)
        moved["to_host"] += self.size
        self.array: Any = array
        OnHost.last = self

    def back(self) -> Any:
        """Return the array on its device again, for the current stream."""
        if self.array is not None:
            return self.array
        cupy = sys.modules["cupy"]
        array, here = cupy.empty(self.shape, self.dtype), cupy.cuda.get_current_stream()
        self.side.wait_event(here.record())
        here.wait_event(self._copied(array.data.ptr, self.memory.ptr, TO_DEVICE))
        moved["to_device"] += self.size
        return array

    def _copied(self, target: int, source: int, kind: int) -> Any:
        """Copy by the stream of its own; return the event after it."""
        runtime = sys.modules["cupy"].cuda.runtime
        runtime.memcpyAsync(target, source, self.size, kind, self.side.ptr)
        done = self.side.record()
        _copying.append((done, self.memory))  # or the pool gives it to the next who asks
        while _copying and _copying[0][0].done:
            _copying.popleft()
        return done


TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind
_copying: deque[tuple[Any, Any]] = deque()  # pinned memory, and the event that ends its copy


@functools.cache
def _side(device: int) -> Any:
    return sys.modules["cupy"].cuda.Stream(non_blocking=True)


def device_count() -> int:
    """Return how many GPUs CuPy sees; 0 where nobody has imported it."""
    cupy = sys.modules.get("cupy")
    return cupy.cuda.runtime.getDeviceCount() if cupy and cupy.cuda.is_available() else 0


def on_host(array: Any) -> Any:
    """Return an array of a GPU as one that waits on the host; any other as it is."""
    return OnHost(array) if _is_cupys(array.__class__) else array


_jit.targets = (CupyTarget(), Shapes())
