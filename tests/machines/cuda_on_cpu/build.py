"""Compile a translation unit to a shared library for the CPU; libraries are cached by content."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unsloth_cupy.errors import KernelError

from ...harness.tracked import tracked

HERE = Path(__file__).resolve().parent
COMMON = [
    "-std=c++17",
    "-g1",  # line numbers, for addr2line
    "-fPIC",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-ffp-contract=fast",  # a * b + c rounds once, as on a GPU
    "-fno-gnu-unique",  # otherwise two builds of one template would share its static variables
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-math-errno",
    "-ftrivial-auto-var-init=pattern",  # registers hold NaN until they are written
]
FAST = ["-O2"]
CHECKED = [
    "-Og",
    "-fsanitize=thread,bounds,alignment,shift",
    "-fno-sanitize-recover=all",  # nothing lives on after a report, which saves registers
    "-fira-region=one",  # allocates registers to a function as a whole, which takes less time
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
]
DYNAMIC_SHARED = 232448  # the most bytes of a block on sm_90


@functools.cache
def cache_folder() -> Path:
    """Return a writable folder outside the repository, which is created if needed."""
    chosen = os.environ.get("UNSLOTH_CUPY_EMULATOR_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    shared = Path(tempfile.gettempdir()) / f"unsloth_cupy-{os.getuid()}"
    for folder in [Path(chosen)] if chosen else [Path(home) / "unsloth_cupy", shared]:
        with contextlib.suppress(OSError):
            (folder / "emulator").mkdir(parents=True, exist_ok=True)
            if os.access(folder / "emulator", os.W_OK):
                return folder / "emulator"
    raise OSError(f"{chosen or home} cannot be written; set UNSLOTH_CUPY_EMULATOR_CACHE")


@functools.cache
def _recipe() -> bytes:
    """Return the part of the key that all builds share: the compiler's version and this file."""
    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, check=True).stdout
    return version + Path(__file__).read_bytes()


def _compile(name: str, command: Sequence[Any], cwd: Path) -> None:
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise KernelError(f"{name} does not compile\n{done.stderr}")


def kept_file(name: str, key: bytes, build: Callable[[Path], Path], suffix: str) -> Path:
    """Return the cached file of a key; if missing, build it in a temporary folder and rename it."""
    digest = hashlib.sha256(key).hexdigest()[:24]
    path = cache_folder() / f"{re.sub(r'[^a-z0-9_]+', '_', name)}-{digest}{suffix}"
    if not path.exists():
        with open(path.with_suffix(".lock"), "wb") as lock:  # only one of several processes builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    build(Path(folder)).rename(path)
    return path


def _built(name: str, key: str, build: Callable[[Path], Path], suffix: str = ".so") -> Path:
    return kept_file(name, _recipe() + key.encode(), build, suffix)


def compiled(name: str, text: str, key: str, *flags: Any, suffix: str = ".so") -> Path:
    """Return the compiled file of a C++ text; the key has all else that its content depends on."""

    def build(folder: Path) -> Path:
        (folder / "unit.cpp").write_text(text, encoding="utf-8")
        try:
            _compile(name, ["g++", *flags, "unit.cpp", "-o", f"unit{suffix}"], cwd=folder)
        except KernelError as error:
            raise KernelError(f"{error}\n{text}") from None
        return folder / f"unit{suffix}"

    return _built(name, f"{key}\0{text}", build, suffix)


def frame(buffers: Iterable[str], cluster: str) -> str:
    """Return C++ that every unit needs: its dynamic shared memory under all names, its clusters."""
    names = sorted(buffers)
    labels = [f".globl {b}; .type {b}, @object; {b}:" for b in ("emu_buffer", *names)]
    section = '.section .tbss, \\"awT\\", @nobits; .balign 1024'
    lines = [section, *labels, f".zero {DYNAMIC_SHARED}; .text"]
    memory = "".join(f'"{line}\\n"' for line in lines)
    return f"""
static thread_local volatile char emu_first;
extern thread_local __attribute__((aligned(1024))) unsigned char emu_buffer[{DYNAMIC_SHARED}];
extern "C" void *emu_dynamic() {{ emu_first = 0; return {"emu_buffer" if names else "nullptr"}; }}
extern "C" {{ extern const unsigned emu_cluster[3] = {{{cluster}}}; }}
{f"asm({memory});" if names else ""}
"""


@functools.cache
def runtime() -> Any:
    """Return the runtime of src/, compiled and loaded."""
    flags = [*(flag for flag in COMMON if not flag.startswith("-g")), "-O2", "-shared"]
    files = tracked("tests/machines/cuda_on_cpu/src/*")
    sources = [path for path in files if path.suffix == ".cpp"]  # others are headers

    def build(folder: Path) -> Path:
        whole = "".join(f'#include "{path}"\n' for path in sources)  # the headers are parsed once
        (folder / "runtime.cpp").write_text(whole, encoding="utf-8")
        libraries = ("-ldl", "-pthread")
        _compile(
            "runtime", ["g++", *flags, "runtime.cpp", "-o", "runtime.so", *libraries], cwd=folder
        )
        return folder / "runtime.so"

    texts = [path.read_text(encoding="utf-8") for path in files]
    path = _built("runtime", "\0".join(texts), build)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emu_launch.restype = ctypes.c_char_p
    return library


@functools.cache
def _includes(text: str) -> list[str]:
    """Return the files that a source includes."""
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)', text, re.M)


@functools.cache
def _buffers(text: str) -> frozenset[str]:
    """Return the names of dynamic shared memory, which a source may declare under any type."""
    arrays = re.findall(r"extern __shared__ (?:__align__\(\d+\) )?[\w ]+?(\w+)\[\]", text)
    return frozenset(arrays + re.findall(r"^(?!#).*\bDYNAMIC_SHARED\([^,]+,\s*(\w+)\)", text, re.M))


def _included(text: str, folders: Sequence[Path], seen: set[Path]) -> Iterator[str]:
    """Yield a source and then, in order, all sources that it includes from the folders."""
    yield text
    for file in _includes(text):
        path = next((f / file for f in folders if (f / file).is_file()), None)
        if path is not None and path not in seen:
            seen.add(path)
            yield from _included(path.read_text(encoding="utf-8"), folders, seen)


def _cluster(name: str, text: str) -> str:
    """Return the sizes in CLUSTER_KERNEL or __cluster_dims__ of a kernel, as a C initializer."""
    bare = re.escape(name.partition("<")[0])
    dims = rf"__cluster_dims__\(([^()]*)\)\s*{bare}\s*\("
    match = re.search(dims, text) or re.search(
        rf"CLUSTER_KERNEL\(([^(),]*)[^()]*\)\s*{bare}\s*\(", text
    )
    return ", ".join([*(match[1].split(",") if match else []), "1", "1", "1"][:3])


def module(
    name: str, source: str, check: bool, roots: tuple[Path, ...], fuse: bool = True
) -> tuple[Path, str]:
    """Return the library of one kernel, built if needed, and its source with all includes."""
    folders = (HERE / "include", *roots)
    text = re.sub(r"^// kernels_cu \w+\n", "", source)  # the digest of all files of kernels_cu
    texts = [*_included(f'#include "cuda_on_cpu.hpp"\n{text}', folders, set())]
    whole, buffers = "\n".join(texts), set().union(*map(_buffers, texts))
    unit = f"{text}\n{frame(buffers, _cluster(name, whole))}EMU_ENTRY({name})\n"
    flags = [*COMMON, *(CHECKED if check else FAST), "-fno-extern-tls-init", "-w"]
    flags += [] if fuse else ["-ffp-contract=off"]
    # -nostdlib: src/hooks.cpp replaces the sanitiser's libraries, and the process has loaded all
    # others; linking with them would take four times as long as everything else
    flags += [*(f"-I{path}" for path in folders), "-include", "cuda_on_cpu.hpp"]
    key = f"{check}\0{fuse}\0{whole}"
    return compiled(name, unit, key, *flags, "-shared", "-nostdlib"), whole
