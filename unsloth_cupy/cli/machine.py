"""What the process uses of the machine it runs on, and what that machine has."""

import importlib.metadata
import os
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._devices import machine_memory

THREADS_PAY = 512  # hidden size from which a matrix product gains by a second thread
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
WIDE = 120  # columns of what is no terminal: tables and paths stay whole


class Gpu(NamedTuple):
    """One CUDA device."""

    name: str
    capability: str
    memory: int


def console(*, markup: bool = True) -> Any:
    """Return where tables go: as wide as the terminal, or wide enough where there is none."""
    from rich.console import Console

    made = Console(highlight=False, markup=markup)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = WIDE
    return made


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held so far; 0 if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas_threads(hidden: int) -> AbstractContextManager[Any]:
    """Multiply small matrices on one thread inside a ``with`` block.

    BLAS threads wait for each other by spinning: beside any other load, two of them took 15
    times as long as one for a step of the default model.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1 if hidden < THREADS_PAY else None, user_api="blas")


def device_memory(device: str | None) -> tuple[int | None, int | None]:
    """Return the bytes of a device, or of the machine for None: all of them, and those free now."""
    if device is None:
        whole, free = machine_memory(), None
        with suppress(OSError, StopIteration, ValueError):
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = int(next(n for n in lines if n.startswith("MemAvailable:")).split()[1]) * 1024
        return whole, free if whole is None or free is None else min(free, whole)
    found, _ = gpus()
    number = int(device.partition(":")[2] or 0)
    if number >= len(found):
        return None, None
    import cupy

    with cupy.cuda.Device(number):
        free, whole = cupy.cuda.runtime.memGetInfo()
    return whole, free


def version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def blas() -> str:
    """Return the library that multiplies NumPy's matrices."""
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found['name']} {found['version']}"


def gpus() -> tuple[list[Gpu], str]:
    """Return the CUDA devices and, where there is none, the reason."""
    try:
        import cupy
    except ImportError as error:
        reason = "CuPy is not installed" if error.name == "cupy" else f"CuPy fails: {error}"
        return [], reason
    runtime = cupy.cuda.runtime
    try:
        found = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        return [], str(error)
    return [
        Gpu(p["name"].decode(), f"{p['major']}.{p['minor']}", p["totalGlobalMem"]) for p in found
    ], "" if found else "CUDA sees no device"


def kernel_cache() -> Path:
    """Return the folder where CuPy keeps compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
