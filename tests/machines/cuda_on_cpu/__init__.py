"""A CUDA emulator: a Target that runs the unchanged kernels of kernels_cu on NumPy arrays.

    with using(Emulator()):
        rms_norm(x, weight)                      the real launch code, the real .cu file

g++ compiles the translation unit that NVRTC would get; ``include/`` implements CUDA's language in
C++, ``src/`` the machine.  ``Emulator(check=True)`` reports errors that would be undefined
behaviour or a crash on a GPU as ``EmulatorError``, with file:line, block and thread.  ``seed``
selects another schedule of threads and blocks.  Builds are cached by content in
$UNSLOTH_CUPY_EMULATOR_CACHE, or in the user's cache folder.
"""

import contextlib
import ctypes
import functools
import math
import platform
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unsloth_cupy.core import source as core_source
from unsloth_cupy.core.target import Limits
from unsloth_cupy.ops.common.strides import spanned

from . import build, traffic
from .build import DYNAMIC_SHARED, HERE

PATIENCE = 50_000_000  # the most accesses of a block between two collectives; takes seconds
SECONDS = 60  # the most CPU time of a launch
KEPT = 30 * 86400  # seconds until a build is deleted from the cache
ONE = threading.Lock()  # one launch at a time, as kernels and the runtime share their memory
GRID, BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)  # the largest sizes, by axis
WITHOUT_LEAVE = 48 << 10  # bytes of shared memory without opt-in; the limit of static memory
ALIGNED = 128  # bytes: dynamic shared memory begins at a multiple of this
GAP = 1 << 16  # bytes around every buffer, so that a stray index reaches no other buffer
GUARD = 0xCB
HUGE = 1 << 26  # bytes: larger buffers are not copied, so that untouched pages take no memory


class EmulatorError(AssertionError):
    """An error of a kernel: undefined behaviour or a fault on a GPU."""


class TensorMap(NamedTuple):
    """A TMA descriptor of an array; box is innermost first, as the driver takes it."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 128

    def packed(self, address: int) -> np.ndarray:
        """Return the descriptor: 128 bytes, aligned to 64, in the format of async_copy.cpp."""
        shape, strides = self.array.shape[::-1], self.array.strides[::-1]
        size = self.array.itemsize
        fits = 1 <= len(shape) == len(self.box) <= 5 and address % 16 == 0 and strides[0] == size
        fits &= all(0 < count < 2**32 for count in shape)
        outer = zip(shape[1:], strides[1:], strict=True)  # an axis of size 1 has any stride
        fits &= all(n == 1 or (0 < step < 2**40 and step % 16 == 0) for n, step in outer)
        fits &= all(0 < side <= 256 for side in self.box) and self.box[0] * size % 16 == 0
        if not fits:
            array = f"{self.array.dtype} {self.array.shape} with strides {self.array.strides}"
            raise EmulatorError(f"no tensor map of {array} and box {self.box}")
        padded = [[*values, 0, 0, 0, 0, 0, 0] for values in (shape, self.box, strides[1:])]
        mode = {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]
        numbers = ("", "float32", "float16", "bfloat16", "int32")  # dtypes that a reduction adds
        number = numbers.index(name) if (name := self.array.dtype.name) in numbers else 0
        head = (0x544D4150, len(shape), self.array.itemsize, mode, number, address)
        raw = struct.pack(
            "=I4BQ5I6H4Q", *head, *padded[0][:5], *padded[1][:6], *padded[2][:4]
        ).ljust(128, b"\0")
        buffer = np.zeros(192, np.uint8)
        buffer = buffer[-buffer.ctypes.data % 64 :][:128]
        buffer[:] = np.frombuffer(raw, np.uint8)
        return buffer


class Emulator(NamedTuple):
    """A Target that owns NumPy arrays and compiles for the CPU, with checks or without (faster)."""

    check: bool = True
    seed: int = 0  # 0: threads take turns; otherwise a random schedule
    folders: tuple[Path, ...] = ()  # searched for #include before kernels_cu
    shared_memory: int = DYNAMIC_SHARED  # the most bytes of a block
    architecture: int = 90  # selects rows of the launch tables
    clusters: bool = True  # False: a GPU before sm_90
    processors: int = 1
    last: int = 0  # run only this many clusters, at the end of the grid; 0: all
    fuse: bool = True  # the compiler may contract a * b + c, which then rounds once
    together: int = 1  # blocks that run concurrently, if the number divides the grid: up to 8

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def compile(self, name: str, source: str) -> Callable[..., None]:
        roots = (*self.folders, core_source.source_root())
        module = _module(name, source, self.check, roots, self.fuse)
        return functools.partial(module.launch, self.order, self.shared_memory)

    @property
    def order(self) -> tuple[int, int, int]:
        """The schedule: seed, clusters to run, blocks that run concurrently."""
        return self.seed, self.last, self.together

    def limits(self, array: Any) -> Limits:
        return Limits(self.architecture, self.shared_memory, self.processors, self.clusters)

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        return np.empty(shape, dtype)

    def tensor_map(self, box: tuple[int, ...], array: np.ndarray) -> "TensorMap":
        """Return the argument for a kernel's TensorMap parameter."""
        return TensorMap(array[(None,) * (len(box) - array.ndim)], box)


@functools.cache
def missing() -> str | None:
    """Return the reason why the emulator cannot run here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the CUDA emulator needs Linux on x86-64"
    for program in ("g++", "addr2line", "nm", "readelf"):
        if shutil.which(program) is None:
            return f"the CUDA emulator needs {program}: apt-get install g++"
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    if lacking := {"avx2", "fma", "f16c"} - flags:
        return f"the CUDA emulator needs a CPU with {', '.join(sorted(lacking))}"
    return None


# ---- running ------------------------------------------------------------------------------------
@functools.cache
def _sweep() -> None:
    """Delete builds older than KEPT from the cache, as every change of a kernel leaves some."""
    for path in build.cache_folder().iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - KEPT:
                path.unlink()


@functools.lru_cache(maxsize=512)
def _module(name: str, source: str, check: bool, roots: tuple[Path, ...], fuse: bool) -> "Module":
    _sweep()
    path, text = build.module(name, source, check, roots, fuse)
    return Module(name, path, build.runtime(), check, text)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("thunk", ctypes.c_void_p),
        ("image", ctypes.c_void_p),
        ("dynamic_size", ctypes.c_size_t),
        ("dynamic_capacity", ctypes.c_size_t),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int),
        ("checks", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("patience", ctypes.c_uint64),
        ("seconds", ctypes.c_uint),
        ("last", ctypes.c_uint),
    )


class _Allocation:
    """Device memory of arrays that overlap on the host: their bytes, between two guard gaps."""

    def __init__(self, names: list[str], arrays: list[np.ndarray]) -> None:
        self.name, self.arrays = " and ".join(names), arrays
        self.writable = any(array.flags.writeable for array in arrays)
        self.start = min(array.ctypes.data for array in arrays)
        self.size = max(array.ctypes.data + array.nbytes for array in arrays) - self.start
        if self.size >= HUGE:
            self.base = self.start
            return
        self.slab = np.full(self.size + 2 * GAP + 256, GUARD, np.uint8)
        # an array aligned to 16 bytes gets the alignment of cudaMalloc, 256; others stay misaligned
        self.first = GAP + (self.start % 16 - self.slab.ctypes.data - GAP) % 256
        self.base = self.slab.ctypes.data + self.first
        for array, copy in self._pairs():
            copy[:] = array

    def _pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for array in self.arrays:
            at = self.first + array.ctypes.data - self.start
            yield array.reshape(-1).view(np.uint8), self.slab[at : at + array.nbytes]

    def read_back(self) -> None:
        """Copy the values to writable arrays; raise if the kernel wrote outside of the buffer."""
        if self.size >= HUGE:
            return
        outside = self.slab[: self.first], self.slab[self.first + self.size :]
        if any((gap != GUARD).any() for gap in outside):
            raise EmulatorError(f"write beside {self.name}")
        for array, copy in self._pairs():
            if array.flags.writeable:
                array[:] = copy


def _guards(path: Path) -> Any:
    """Return the offsets in shared memory of g++'s guard bytes: is a variable constructed?"""
    offsets = []
    if b"_ZGV" in path.read_bytes():
        command = ["nm", str(path)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        offsets = re.findall(r"^(\w+) [bBdDW] _ZGV", symbols, re.M)
    return (ctypes.c_size_t * len(offsets))(*(int(offset, 16) for offset in offsets))


class _Memory:
    """The device memory of a launch: its arrays, and those whose addresses are in a table."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        tables: dict[str, Any] = {
            n: array for n, array in arrays.items() if hasattr(array, "places")
        }
        addressed = {
            f"{name}[{at}]": array
            for name, table in tables.items()
            for at, array in table.places.items()
        }
        self.homes = list(_allocate(arrays | addressed))
        for table in tables.values():
            numbers = ctypes.cast(self.address(table), ctypes.POINTER(ctypes.c_int64))
            for at, array in table.places.items():
                numbers[at] = self.address(array)

    def address(self, array: np.ndarray) -> int:
        """Return the device address of an array; 0 for an empty one."""
        for home in self.homes:
            if array.size and 0 <= (offset := array.ctypes.data - home.start) < home.size:
                return home.base + offset
        return 0


class Module:
    """One kernel, compiled."""

    def __init__(self, name: str, path: Path, runtime: Any, check: bool, text: str) -> None:
        self.name, self.path, self.runtime, self.check = name, path, runtime, check
        self.library = ctypes.CDLL(str(path))
        self.library.emu_dynamic.restype = ctypes.c_void_p
        self.cluster = tuple((ctypes.c_uint * 3).in_dll(self.library, "emu_cluster"))
        self.arity = ctypes.c_int.in_dll(self.library, "emu_arity").value
        self.guards = _guards(path) if check else (ctypes.c_size_t * 0)()
        declared = re.search(rf"\b{re.escape(name.partition('<')[0])}\(([^)]*)\)", text)
        self.names = re.findall(r"(\w+)\s*(?:,|$)", declared[1]) if declared else []

    @functools.cached_property
    def static(self) -> int:
        """Bytes of static shared memory (thread-local variables of the library), rounded up."""
        command = ["readelf", "--wide", "--syms", str(self.path)]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        symbols = re.findall(r": (\w+) +(\d+) TLS +\w+ +\w+ +\d+ (?!_ZL9emu_first|_ZGV)", table)
        return -(-sum(int(size) for _, size in {*symbols}) // ALIGNED) * ALIGNED

    @functools.cached_property
    def base(self) -> int:
        """The address at which the library is loaded."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return min(int(line.partition("-")[0], 16) for line in maps if str(self.path) in line)

    def launch(
        self,
        order: tuple[int, int, int],
        most: int,
        grid: Any,
        block: Any,
        args: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Run every block; arrays are copied to guarded buffers and back, scalars by value."""
        if len(args) != self.arity:
            raise TypeError(f"{self.name} takes {self.arity} arguments, not {len(args)}")
        sides = zip((*grid, 1, 1)[:3], (*block, 1, 1)[:3], GRID, BLOCK, strict=True)
        fits = all(1 <= g <= most and 1 <= b <= side for g, b, most, side in sides)
        total = shared + self.static if shared + WITHOUT_LEAVE > most else shared
        if not fits or math.prod(block) > BLOCK[0] or total > most:
            raise EmulatorError(
                f"{self.name}: no GPU takes a grid of {grid} blocks of {block} threads"
                f" with {shared} bytes of dynamic shared memory, {total} with the static ones, of"
                f" {most}"
            )
        args = [
            spanned(arg) if isinstance(arg, np.ndarray) and not arg.flags.c_contiguous else arg
            for arg in args
        ]
        names = (
            self.names if len(self.names) == self.arity else [f"argument {i}" for i in range(99)]
        )
        arrays = {
            name: array if array.flags.c_contiguous else spanned(array)
            for name, arg in zip(names, args, strict=False)
            if isinstance(array := getattr(arg, "array", arg), np.ndarray)
        }
        memory = _Memory(arrays)
        cells = [
            arg.packed(memory.address(arg.array))
            if isinstance(arg, TensorMap)
            else np.array(memory.address(arg), np.uintp)
            if isinstance(arg, np.ndarray)
            else np.array(arg)
            for arg in args
        ]
        values = (ctypes.c_void_p * max(self.arity, 1))(*(cell.ctypes.data for cell in cells))
        with ONE:
            self._run(order, grid, block, memory, values, shared)

    def _run(
        self, order: Any, grid: Any, block: Any, memory: _Memory, values: Any, shared: int
    ) -> None:
        seed, last, together = order
        cluster = self.cluster
        if cluster == (1, 1, 1) and len(grid) == 1:
            cluster = math.gcd(grid[0], together), 1, 1
        buffers = (_Buffer * max(len(memory.homes), 1))(
            *(_Buffer(a.base, a.size, a.name.encode(), a.writable) for a in memory.homes)
        )
        dynamic = self.library.emu_dynamic()
        sizes = [(ctypes.c_uint * 3)(*(*shape, 1, 1)[:3]) for shape in (grid, block, cluster)]
        self.runtime.emu_guards(self.guards, len(self.guards))
        counting = self.check and bool(traffic.open_counts)
        self.runtime.emu_count(counting)
        error = self.runtime.emu_launch(
            ctypes.byref(
                _Launch(
                    ctypes.cast(self.library.emu_entry, ctypes.c_void_p),
                    ctypes.cast(self.library.emu_dynamic, ctypes.c_void_p),
                    shared if dynamic else 0,
                    DYNAMIC_SHARED if dynamic else 0,
                    *sizes,
                    values,
                    buffers,
                    len(memory.homes),
                    self.check,
                    seed,
                    PATIENCE if self.check else 0,
                    SECONDS,
                    last,
                )
            )
        )
        if error:
            raise EmulatorError(
                f"{self.name}: {re.sub(r'<pc (0x[0-9a-f]+)>', self._place, error.decode())}"
            )
        for home in memory.homes:
            home.read_back()
        if counting:
            traffic.collect(self.runtime, self._line)

    def _line(self, file: int, line: int) -> str:
        """Return file:line from the runtime's numbers: file name and line, or a code address."""
        if line < 0:
            return self._source(file)
        return f"{Path(ctypes.string_at(file).decode()).name}:{line}"

    def _place(self, match: re.Match[str]) -> str:
        return self._source(int(match[1], 16))

    def _source(self, address: int) -> str:
        """Return file:line of a code address, with the lines that inlined calls come from."""
        command = ["addr2line", "-i", "-e", str(self.path), hex(address - 1 - self.base)]
        frames = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ours = [line.split(" ")[0] for line in frames.splitlines() if str(HERE) not in line]
        return " in ".join(Path(frame).name for frame in dict.fromkeys(ours)) or frames


def _allocate(arrays: dict[str, np.ndarray]) -> Iterator[_Allocation]:
    """Yield one allocation for every group of arrays that overlap in memory."""
    names: list[str] = []
    end = -1
    for name in sorted(
        (n for n in arrays if arrays[n].nbytes), key=lambda n: arrays[n].ctypes.data
    ):
        array = arrays[name]
        if names and array.ctypes.data >= end:
            yield _Allocation(names, [arrays[n] for n in names])
            names = []
        names.append(name)
        end = max(end, array.ctypes.data + array.nbytes)
    if names:
        yield _Allocation(names, [arrays[n] for n in names])
