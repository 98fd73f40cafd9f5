"""The memory, cores and GPUs of this machine; printing of text, tables and sizes."""

import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .core import gpu
from .core.call import is_number
from .core.stand_in import is_planned
from .errors import ConfigError, DeviceError, DeviceMemoryError, printable
from .files import say_once

THREADS_PAY = 512  # minimum hidden size at which a second BLAS thread is faster
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
CUPY_CURE = "pip install 'unsloth-cupy[cuda12]', or [cuda13] with a driver for CUDA 13"
OLDEST = 80  # minimum compute capability of the kernels, times 10
GPU_FILES = (  # exist if a driver is installed: on Linux, in WSL, on Windows
    "/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so.1", "/Windows/System32/nvcuda.dll",
)  # fmt: skip
WIDE = 120  # columns if the output is not a terminal, so that tables and paths do not wrap
SCREEN = 24, 100  # maximum lines and columns of a repr


class Gpu(NamedTuple):
    """One CUDA device."""

    name: str
    capability: str
    memory: int
    address: str = ""  # PCI address; two machines may have the same

    @property
    def is_usable(self) -> bool:
        """Whether the kernels support this GPU."""
        return int(self.capability.replace(".", "")) >= OLDEST


def echo(text: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text with escaped control characters, in any encoding of the output."""
    stream = sys.stderr if err else sys.stdout
    line = printable(str(text)) + "\n" * nl
    try:
        print(line, end="", file=stream, flush=True)
    except UnicodeEncodeError as error:
        escaped = line.encode(error.encoding, "backslashreplace").decode(error.encoding)
        print(escaped, end="", file=stream, flush=True)


def echo_next(*commands: Sequence[object], err: bool = True) -> None:
    """Print the next commands, ready to copy, to standard error or (err=False) output."""
    lines = [shlex.join(map(str, words)) for words in commands]
    if lines:
        echo("\n".join(["next:", *(f"  {line}" for line in lines)]), err=err)


def one_screen(head: str, parts: Iterable[str], end: str) -> str:
    """Return parts between a head and an end, in at most 24 lines of at most 100 columns.

    A part that is longer than a line is shortened in the middle.
    """
    each = [cut(printable(part), SCREEN[1] - 3) for part in parts]
    if len(line := f"{head}{', '.join(each)}{end}") <= SCREEN[1]:
        return line
    lines = [head.rstrip()]
    for number, part in enumerate(each):
        more = part + ("," if number < len(each) - 1 else end)
        if len(lines) > 1 and len(lines[-1]) + 1 + len(more) <= SCREEN[1]:
            lines[-1] += f" {more}"
        elif len(lines) == SCREEN[0] - 1:
            lines.append(f"  ... and {len(each) - number} more{end}")
            break
        else:
            lines.append(f"  {more}")
    return "\n".join(lines)


def cut(text: str, width: int) -> str:
    """Return a text of at most ``width`` characters; a longer text loses its middle."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def in_notebook() -> bool:
    """Return whether the code runs in a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", ())


def console(*, markup: bool = True) -> Any:
    """Return the console for tables: as wide as the terminal, or WIDE without a terminal.

    It escapes control characters, as text may contain names from downloaded files.
    """
    if tables_as_json.get():
        return JsonLines()
    from rich.console import Console

    result: Any = Console(highlight=False, markup=markup)
    rendered = result.render_str
    result.render_str = lambda text, **options: rendered(printable(text), **options)
    if not result.is_terminal and "COLUMNS" not in os.environ:
        result.width = WIDE
    return result


tables_as_json: ContextVar[bool] = ContextVar("tables_as_json", default=False)


class JsonLines:
    """A console that prints each table as a line of JSON, and no other text.

    A table is ``{"title": ..., "rows": [{heading: cell, ...}, ...]}``; the rows of a table without
    headings are an object of the first two columns.
    """

    def print(self, part: Any, **_: Any) -> None:
        """Print a table."""
        from rich.table import Table
        from rich.text import Text

        if not isinstance(part, Table):
            return
        columns = [[Text.from_markup(str(cell)).plain for cell in c.cells] for c in part.columns]
        names = [Text.from_markup(str(column.header)).plain for column in part.columns]
        rows: Any = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if not part.show_header:
            rows = {name: cell for name, cell in zip(*columns, strict=True) if name}
        title = None if part.title is None else Text.from_markup(str(part.title)).plain
        print(json.dumps({"title": title, "rows": rows} if title else rows), flush=True)


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit: ``format_bytes(3 << 29)`` is 1.50 GiB."""
    if not is_number(count):
        raise ConfigError(f"format_bytes({count!r}): pass a number of bytes")
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"


def bytes_requested(error: BaseException | None) -> int:
    """Return the bytes that CuPy could not allocate, from its error message; 0 if unknown."""
    match = re.search(r"allocating ([\d,]+)", str(error))
    return int(match[1].replace(",", "")) if match else 0


def machine_memory() -> int | None:
    """Return the memory available to this process in bytes, or None if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for limit in CGROUPS:  # the limit of a container
        with suppress(OSError, ValueError):
            total = min(total, int(limit.read_text(encoding="utf-8")))
    return total


def gpu_memory(number: int) -> tuple[int, int]:
    """Return the free and the total memory of GPU ``number`` in bytes."""
    with gpu.cupy().cuda.Device(number):
        return gpu.cupy().cuda.runtime.memGetInfo()


def array_bytes(shape: Iterable[int], itemsize: int) -> int:
    """Return the bytes of an array, counting empty axes as 1: NumPy limits these sizes too."""
    return math.prod(max(int(size), 1) for size in shape) * itemsize


def check_bytes(call: str, required: int, like: Any = None) -> None:
    """Raise a DeviceMemoryError before allocating arrays that exceed the whole memory.

    The arrays are for the device of ``like``, or the host; ``call`` shows the requested sizes.
    """
    if is_planned(like):
        return  # planned arrays need no memory
    if like is not None and gpu.is_cupys(like.__class__):
        available = gpu_memory(like.device.id)[1]
    else:
        available = machine_memory() or sys.maxsize
    if required > available:
        raise DeviceMemoryError(
            f"{call} needs {Decimal(int(required)) / 2**30:,.1f} GiB, but the memory has only"
            f" {available / 2**30:,.1f} GiB; pass smaller sizes",
            required,
            available,
        )


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; 0 if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, else KiB


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"model name\s*: (.*)", text):
            return match[1]
    return platform.processor() or platform.machine()


def blas_threads(hidden: int) -> AbstractContextManager[Any]:
    """Use one BLAS thread for small matrices inside a ``with`` block.

    BLAS threads wait for each other by spinning: with other load on the machine, a step of the
    default model took 15 times as long with two threads as with one.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1 if hidden < THREADS_PAY else None, user_api="blas")


def device_memory(device: str | None) -> tuple[int | None, int | None]:
    """Return the total and the free memory in bytes of a device, or of the machine for None."""
    if device is None:
        total, free = machine_memory(), None
        with suppress(OSError, StopIteration, ValueError):
            lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
            free = int(next(n for n in lines if n.startswith("MemAvailable:")).split()[1]) * 1024
        return total, free if total is None or free is None else min(free, total)
    devices, _ = gpus()
    number = int(device.partition(":")[2] or 0)
    if number >= len(devices):
        return None, None
    free, total = gpu_memory(number)
    return total, free


def version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution, or None."""
    from importlib import metadata  # slow, and rarely needed

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def blas() -> str:
    """Return the name and version of the BLAS library that NumPy uses."""
    library = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{library['name']} {library['version']}"


def resolve_device(device: str | None) -> tuple[str | None, str]:
    """Return the device for ``models.load``, and the reason why no GPU is used.

    "auto" selects the first GPU that the kernels support, else None for the CPU.  The reason
    includes a cure.  It is empty without a GPU, with a hidden GPU, and for other devices.
    """
    if device != "auto":
        return None if device == "cpu" else device, ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None, ""
    devices, problem = gpus()
    for number, each in enumerate(devices):
        if each.is_usable:
            return f"cuda:{number}" if number else "cuda", ""
    if devices:
        name, capability = devices[0].name, devices[0].capability.replace(".", "")
        problem = f"{name} is sm_{capability}, and kernels need sm_{OLDEST} (Ampere) or newer"
        cure = "use a newer GPU"
    elif not any([*Path("/").glob(file.lstrip("/"))] for file in GPU_FILES):
        return None, ""
    elif problem.startswith("CuPy"):
        cure = CUPY_CURE
    else:
        cure = f"update the driver, or install CuPy for the one that nvidia-smi shows: {CUPY_CURE}"
    return None, f"the GPU is not used: {problem}; {cure}"


@contextmanager
def on_device(call: str, device: Any) -> Iterator[Callable[[Any], Any]]:
    """Make the device the current one, and yield a function that copies an array to it."""
    if isinstance(device, str) and device == "auto":
        device, problem = resolve_device(device)
        if problem:
            say_once(f"{call}: {problem}")
    name = device if isinstance(device, str) else ""
    if device is None or name == "cpu":
        yield lambda array: array
        return
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        cure = "choose 'cpu' (NumPy, as None), 'auto', 'cuda' or 'cuda:1'"
        raise ConfigError(f"{call}: device={device!r}; {cure}")
    try:
        cupy = gpu.cupy()
    except ImportError:
        cure = "pip install 'unsloth-cupy[cuda12]', or leave device out"
        raise DeviceError(f"{call}: device={device!r} needs CuPy: {cure}") from None
    count, number = gpu.count(), int(match[1] or 0)
    if number >= count:
        names = " or ".join(["'cpu'", *(f"'cuda:{i}'" for i in range(count))])
        raise DeviceError(f"{call}: device={device!r}, but CuPy sees {count} GPUs; choose {names}")
    with cupy.cuda.Device(number):
        yield cupy.asarray
        cupy.cuda.get_current_stream().synchronize()  # any stream may read the parameters


def device_title(device: str | None) -> str:
    """Return the name of a device for a message: the GPU name, or "the CPU" for None."""
    if device is None:
        return "the CPU"
    return gpus()[0][int(device.partition(":")[2] or 0)].name


def gpus() -> tuple[list[Gpu], str]:
    """Return the CUDA devices, and the reason if there are none."""
    try:
        runtime = gpu.cupy().cuda.runtime
    except ImportError as error:
        reason = "CuPy is not installed" if error.name == "cupy" else f"CuPy fails: {error}"
        return [], reason
    try:
        devices = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        return [], str(error)
    return [
        Gpu(
            p["name"].decode(), f"{p['major']}.{p['minor']}", p["totalGlobalMem"],
            f"{p['pciDomainID']:x}:{p['pciBusID']:x}:{p['pciDeviceID']:x}",
        )
        for p in devices
    ], "" if devices else "CUDA sees no device"  # fmt: skip
