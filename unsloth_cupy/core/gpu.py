"""NVIDIA GPUs, by way of CuPy.

CuPy allocates and launches on the GPU that is current for the thread, wherever the arrays of a call
lie.  So a kernel starts where it was loaded: ``bound``; and whoever makes arrays, or computes with
them, does so ``at`` one.  Of both nothing is left where there is one GPU, or none.
"""

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..compiled.cache import prepare, unit
from ..errors import KernelError
from . import target
from .source import source_root
from .target import Limits

HERE: AbstractContextManager[Any] = nullcontext()
_seen: tuple[Any, bool] = (None, False)  # CuPy, and whether it sees several GPUs
CLUSTER_LAUNCH = 120  # in cudaDeviceAttr; CuPy has no name for it


def cupy() -> Any:
    """Return CuPy, which is asked for here alone; raise ImportError where it is missing."""
    prepare()
    import cupy

    return cupy


class CupyTarget:
    """Where CuPy's arrays live: compiles with NVRTC through ``cupy.RawModule``."""

    def owns(self, array: Any) -> bool:
        """Say whether array is a CuPy array."""
        return is_cupys(array.__class__)

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Compile for the current device, or take what is kept on disk."""
        cp = cupy()
        try:
            kernel = cp.RawModule(**unit(cp, source, compiler_options(source))).get_function(name)
        except cp.cuda.compiler.CompileException as error:
            raise KernelError(f"{name} does not compile\n{error}\n{source}") from error
        most = 48 * 1024 - kernel.shared_size_bytes  # both together; more asks for leave
        asking = threading.Lock()  # or a thread that needs less would take leave from another

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared: int) -> None:
            nonlocal most
            if shared > most:
                with asking:
                    if shared > most:
                        kernel.max_dynamic_shared_size_bytes = most = shared
            kernel(grid, block, args, shared_mem=shared)

        return bound(launch)

    def limits(self, array: Any) -> Limits:
        """Return the limits of the GPU that holds array."""
        return limits_of(array.device.id)

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new array on the GPU that holds ``like``."""
        with at(like):
            return cupy().empty(shape, dtype)

    def ready(self, scalar: Any) -> Any:
        """Return a NumPy scalar as CuPy hands it over: to make that takes longer than a launch."""
        if isinstance(scalar, np.void):  # an array without axes: before CuPy 14.1 scalars are small
            return sys.modules["cupy.cuda.function"].CNumpyArray(np.array(scalar))
        return sys.modules["cupy._core._scalar"].CScalar(scalar)


@functools.cache
def limits_of(device: int) -> Limits:
    """Return the limits of the GPU of this number."""
    runtime, there = cupy().cuda.runtime, cupy().cuda.Device(device)
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    clusters = bool(runtime.deviceGetAttribute(CLUSTER_LAUNCH, device))
    return Limits(int(there.compute_capability), shared, processors, clusters)


@functools.cache
def is_cupys(kind: type[Any]) -> bool:
    """Say whether a class is one of CuPy's."""
    return kind.__module__.partition(".")[0] == "cupy"


def compiler_options(source: str = "") -> tuple[str, ...]:
    """Return what NVRTC needs beside CuPy's own options: its header paths, -arch and -ftz=true.

    Float32 denormals are zero in kernels.  A second -arch, as wgmma needs, is an error before 12.9.
    """
    return ("-std=c++17", f"-I{source_root()}", *["-arch=sm_90a"] * ('_sm90.cu"' in source))


def on_one_device(op: Any, made: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return what made() makes: for each of several GPUs one, where its arrays' is the current."""
    runtime = cupy().cuda.runtime
    if runtime.getDeviceCount() == 1:
        return made()
    run_on = functools.cache(lambda device: made())

    def run_there(arrays: list[Any], options: dict[str, Any]) -> Any:
        here = runtime.getDevice()
        given = [a for a in arrays if a is not None and type(a) is not int]
        if all(array.data.device_id == here for array in given):
            return run_on(here)(arrays, options)
        op.library_of(arrays)
        with given[0].device:
            return run_on(given[0].data.device_id)(arrays, options)

    return run_there


def count() -> int:
    """Return how many GPUs CuPy sees; 0 where nobody has imported it."""
    known = sys.modules.get("cupy")
    return known.cuda.runtime.getDeviceCount() if known and known.cuda.is_available() else 0


def several() -> bool:
    """Say whether there is a choice of GPUs."""
    global _seen  # noqa: PLW0603 -- asked once of a driver
    known = sys.modules.get("cupy")
    if known is not _seen[0]:
        _seen = known, count() > 1
    return _seen[1]


def number(array: Any) -> int:
    """Return the number of the GPU that holds an array; 0 on the host."""
    return 0 if array.__class__ is np.ndarray else int(array.device.id)


def at(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which the GPU that holds an array is the current one."""
    if array.__class__ is np.ndarray or not several() or not is_cupys(array.__class__):
        return HERE
    return array.device


def bound(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launch that starts on the GPU that is current now, whichever is later."""
    if not several():
        return launch
    cuda = cupy().cuda
    device, current = cuda.Device(), cuda.runtime.getDevice

    def launch_there(*given: Any) -> None:
        if current() == device.id:
            launch(*given)
        else:
            with device:
                launch(*given)

    return launch_there


target.targets = (CupyTarget(), *target.targets)
