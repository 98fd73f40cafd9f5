"""What this machine has, what the process uses of it, and how sizes are written."""

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .core import gpu
from .core.call import is_number
from .errors import ConfigError, DeviceMemoryError

THREADS_PAY = 512  # hidden size from which a matrix product gains by a second thread
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
WIDE = 120  # columns of what is not a terminal: tables and paths stay whole


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


def format_bytes(count: float) -> str:
    """Return a number of bytes with its binary unit: ``format_bytes(3 << 29)`` is 1.50 GiB."""
    if not is_number(count):
        raise ConfigError(f"format_bytes({count!r}): pass a number of bytes")
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"


def bytes_asked(error: BaseException | None) -> int:
    """Return the bytes that CuPy was asked for when it raised for want of memory; 0: none said."""
    asked = re.search(r"allocating ([\d,]+)", str(error))
    return int(asked[1].replace(",", "")) if asked else 0


def machine_memory() -> int | None:
    """Return the bytes of memory that the machine lets this process have, if it says so."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for limit in CGROUPS:  # of a container
        with suppress(OSError, ValueError):
            whole = min(whole, int(limit.read_text(encoding="utf-8")))
    return whole


def gpu_memory(number: int) -> tuple[int, int]:
    """Return the bytes of the GPU of this number: those free now, and all of them."""
    with gpu.cupy().cuda.Device(number):
        return gpu.cupy().cuda.runtime.memGetInfo()


def check_bytes(call: str, required: int, like: Any = None) -> None:
    """Raise DeviceMemoryError for arrays that the whole memory does not hold, before they are made.

    They are to live where ``like`` does, or on the host; ``call`` shows the sizes asked for.
    """
    if like is not None and gpu.is_cupys(like.__class__):
        available = gpu_memory(like.device.id)[1]
    else:
        available = machine_memory() or sys.maxsize
    if required > available:
        raise DeviceMemoryError(
            f"{call} takes {required / 2**30:,.1f} GiB, and there are {available / 2**30:,.1f} GiB"
            " of memory; pass smaller sizes",
            required,
            available,
        )


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


def processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"model name\s*: (.*)", told):
            return found[1]
    return platform.processor() or platform.machine()


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
            lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
            free = int(next(n for n in lines if n.startswith("MemAvailable:")).split()[1]) * 1024
        return whole, free if whole is None or free is None else min(free, whole)
    found, _ = gpus()
    number = int(device.partition(":")[2] or 0)
    if number >= len(found):
        return None, None
    free, whole = gpu_memory(number)
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
        runtime = gpu.cupy().cuda.runtime
    except ImportError as error:
        reason = "CuPy is not installed" if error.name == "cupy" else f"CuPy fails: {error}"
        return [], reason
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
