"""NVIDIA GPUs through CuPy: allocation, compilation, launches and limits.

CuPy allocates and launches on the current GPU of the thread, even if the arrays are on another one.
So ``on_current_gpu`` starts a kernel on the GPU where it was loaded, and code that creates or uses
arrays runs inside ``device_of(array)``.  With one GPU both do nothing.
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
# True while launches are captured into a CUDA graph
capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def cupy() -> Any:
    """Import CuPy, here alone, after its environment is set; raise ImportError if it is missing."""
    prepare()
    import cupy

    return cupy


def imported() -> Any:
    """Return CuPy, which has been imported; a repeated import statement would take 0.2 us."""
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
        # CUDA allows 48 KB of static and dynamic shared memory together; more needs opt-in
        most = 48 * 1024 - kernel.shared_size_bytes
        lock = threading.Lock()  # or a thread that needs less could lower another thread's limit

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
        """Return CuPy's object for a NumPy scalar: to create it takes longer than a launch."""
        if isinstance(scalar, np.void):  # a struct: scalars of CuPy 14.0 hold less than 64 bytes
            return sys.modules["cupy.cuda.function"].CNumpyArray(np.array(scalar))
        return sys.modules["cupy._core._scalar"].CScalar(scalar)


@functools.cache
def limits_of(device: int) -> Limits:
    """Return the limits of the GPU with this number."""
    runtime, gpu = cupy().cuda.runtime, cupy().cuda.Device(device)
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    # cudaDevAttrClusterLaunch, for which CuPy has no name
    clusters = bool(runtime.deviceGetAttribute(120, device))
    return Limits(int(gpu.compute_capability), shared, processors, clusters)


@functools.cache
def is_cupys(kind: type[Any]) -> bool:
    """Return whether a class is one of CuPy's."""
    return kind.__module__.partition(".")[0] == "cupy"


def compiler_options(source: str = "") -> tuple[str, ...]:
    """Return options of NVRTC; CuPy itself adds paths of its headers, -arch and -ftz=true.

    With -ftz=true float32 denormals are zero in kernels.  Sources named ``_sm90.cu`` use wgmma,
    which needs sm_90a.  NVRTC before 12.9 refuses the second -arch.
    """
    return ("-std=c++17", f"-I{source_root()}", *["-arch=sm_90a"] * ('_sm90.cu"' in source))


def on_one_device(op: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return make(); with several GPUs a function that runs one make() for each GPU.

    It runs on the GPU of the arrays.  A run is not shared between GPUs, as it may be a replay with
    kernels of one GPU.
    """
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
    """Return whether CuPy sees more than one GPU; calls the driver once, after CuPy's import."""
    known = id(sys.modules.get("cupy"))
    if known not in _several:  # not functools.cache: torch's dynamo warns of it
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
    """Return a launch that always starts on the GPU that is current now."""
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
