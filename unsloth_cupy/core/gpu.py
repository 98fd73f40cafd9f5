"""NVIDIA GPUs through CuPy: allocation, compilation, launches and limits.

CuPy allocates and launches on the GPU that is current for the thread, wherever the arrays of a call
are.  So ``on_current_gpu`` starts a kernel on the GPU where it was loaded, and code that creates
arrays or computes with them does so inside ``device_of(array)``.  With one GPU both do nothing.
"""

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..errors import KernelError
from ..kernel_cache import prepare, unit
from . import target
from .source import source_root
from .target import Limits

NO_SWITCH: AbstractContextManager[Any] = nullcontext()
capturing: ContextVar[bool] = ContextVar("capturing", default=False)  # launches into a graph


def cupy() -> Any:
    """Import CuPy, which is imported nowhere else; raise ImportError if it is missing."""
    prepare()
    import cupy

    return cupy


def imported() -> Any:
    """Return CuPy where it has been imported; an import, with nothing to do, takes 0.2 us."""
    return sys.modules["cupy"]


class CupyTarget:
    """The target of CuPy arrays: compiles with NVRTC through ``cupy.RawModule``."""

    def owns(self, array: Any) -> bool:
        """Return whether array is a CuPy array."""
        return is_cupys(array.__class__)

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Compile for the current device, or load the binary from the cache on disk."""
        cp = cupy()
        try:
            kernel = cp.RawModule(**unit(cp, source, compiler_options(source))).get_function(name)
        except cp.cuda.compiler.CompileException as error:
            raise KernelError(f"{name} does not compile\n{error}\n{source}") from error
        most = 48 * 1024 - kernel.shared_size_bytes  # static + dynamic; more needs opt-in
        lock = threading.Lock()  # else a thread that needs less could lower the limit of another

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared: int) -> None:
            nonlocal most
            if shared > most:
                with lock:
                    if shared > most:
                        kernel.max_dynamic_shared_size_bytes = most = shared
            kernel(grid, block, args, shared_mem=shared)

        return on_current_gpu(launch)

    def limits(self, array: Any) -> Limits:
        """Return the limits of the GPU that holds array."""
        return limits_of(array.device.id)

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new array on the GPU that holds ``like``."""
        with device_of(like):
            return cupy().empty(shape, dtype)

    def ready(self, scalar: Any) -> Any:
        """Return a NumPy scalar as CuPy passes it on: creating that takes longer than a launch."""
        if isinstance(scalar, np.void):  # a 0-d array: before CuPy 14.1 a CScalar is too small
            return sys.modules["cupy.cuda.function"].CNumpyArray(np.array(scalar))
        return sys.modules["cupy._core._scalar"].CScalar(scalar)


@functools.cache
def limits_of(device: int) -> Limits:
    """Return the limits of a GPU by its number."""
    runtime, gpu = cupy().cuda.runtime, cupy().cuda.Device(device)
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    clusters = bool(runtime.deviceGetAttribute(120, device))  # cudaDevAttrClusterLaunch
    return Limits(int(gpu.compute_capability), shared, processors, clusters)


@functools.cache
def is_cupys(kind: type[Any]) -> bool:
    """Return whether a class is one of CuPy's."""
    return kind.__module__.partition(".")[0] == "cupy"


def compiler_options(source: str = "") -> tuple[str, ...]:
    """Return NVRTC's options besides those that CuPy adds: header paths, -arch and -ftz=true.

    Float32 denormals are zero in kernels.  wgmma needs a second -arch, an error before NVRTC 12.9.
    """
    return ("-std=c++17", f"-I{source_root()}", *["-arch=sm_90a"] * ('_sm90.cu"' in source))


def on_one_device(op: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return make(); with several GPUs, a function that runs one make() per GPU of the arrays."""
    runtime = cupy().cuda.runtime
    if runtime.getDeviceCount() == 1:
        return make()
    run_on = functools.cache(lambda device: make())

    def run_there(arrays: list[Any], options: dict[str, Any]) -> Any:
        here = runtime.getDevice()
        present = [a for a in arrays if a is not None and type(a) is not int]
        if all(array.data.device_id == here for array in present):
            return run_on(here)(arrays, options)
        op.library_of(arrays)
        with present[0].device:
            return run_on(present[0].data.device_id)(arrays, options)

    return run_there


def count() -> int:
    """Return how many GPUs CuPy sees; 0 if it has not been imported."""
    known = sys.modules.get("cupy")
    return known.cuda.runtime.getDeviceCount() if known and known.cuda.is_available() else 0


_several: dict[int, bool] = {}


def several_gpus() -> bool:
    """Return whether CuPy sees more than one GPU; the driver is asked once, after its import."""
    known = id(sys.modules.get("cupy"))
    if known not in _several:  # no functools.cache, of which dynamo warns
        _several[known] = count() > 1
    return _several[known]


def number(array: Any) -> int:
    """Return the number of the GPU that holds an array; 0 on the host."""
    return 0 if array.__class__ is np.ndarray else int(array.device.id)


def device_of(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which the GPU that holds an array is the current one."""
    if array.__class__ is np.ndarray or not several_gpus() or not is_cupys(array.__class__):
        return NO_SWITCH
    return array.device


def on_current_gpu(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launch that starts on the GPU that is current now, whichever is current later."""
    if not several_gpus():
        return launch
    cuda = cupy().cuda
    device, current = cuda.Device(), cuda.runtime.getDevice

    def launch_there(*args: Any) -> None:
        if current() == device.id:
            launch(*args)
        else:
            with device:
                launch(*args)

    return launch_there


target.targets = (CupyTarget(), *target.targets)
