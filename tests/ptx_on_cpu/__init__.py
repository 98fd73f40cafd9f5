"""PTX on the CPU: a Target that runs what NVRTC makes of the kernels, on NumPy arrays.

    with using(PtxEmulator(architecture=90)):
        rms_norm(x, weight)              the real launch code, the real PTX of sm_90a

``tests/cuda_on_cpu`` runs the source with g++ and has twins of the files with inline assembly.
Here its text is executed, code under ``__CUDA_ARCH__``, and whatever the compiler moved, fused or
replaced, on the same machine: fibers, checks, tensor cores, copies, clusters.

=================  =============================================================
``parse.py``       the text of a module, as statements with their places
``function.py``    a function of C++ of each function; how a line of a table is read
``arithmetic.py``  arithmetic, logic, comparisons, conversions
``machine.py``     control, memory, barriers, warps, tensor cores, copies
``translate.py``   a unit of C++
``ptx.hpp``        what the C++ calls
=================  =============================================================

A message names both lines: ``PTX 287, ptx.cuh:61 in tile.cuh:113``.  Traffic is counted by the line
of the source.  What is not known raises ``UnknownError`` with the instruction: the tables hold what
NVRTC 12.0, 12.9 and 13.5 make of the kernels and of the primitives, carries and pairs of float32.

Nobody knows here what ptxas makes of PTX.  Approximations are glibc's, and NaN has the CPU's bits.
Floats flush denormals where an instruction says .ftz, and only there.  A static array's own bounds
are not checked, only those of the block's shared memory.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_cupy.core.gpu import compiler_options
from unsloth_cupy.core.source import source_root

from ..cuda_on_cpu import Emulator, Module, build
from .parse import UnknownError
from .translate import unit

__all__ = ["PtxEmulator", "UnknownError", "ptx"]

HERE = Path(__file__).resolve().parent
SOURCES = build.HERE / "src"
FLAGS = [
    *(flag for flag in build.COMMON if not flag.startswith(("-g1", "-ffp-contract"))),
    "-Og",
    "-ffp-contract=off",  # what is fused says so
    "-fno-extern-tls-init",
    "-w",
]


class Compiled(NamedTuple):
    """A module of PTX, and the name of the kernel in it."""

    text: str
    entry: str


@functools.lru_cache(maxsize=1024)
def ptx(
    source: str, name: str, arch: str, folders: tuple[Path, ...] = (), fuse: bool = True
) -> Compiled:
    """Compile as cupy.RawModule does, to PTX; arch is 80, 90a, 100, ..."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import compiler

    # CuPy's own: -ftz and the execution space of RawModule, and the architecture
    own = ("-ftz=true", "-default-device", f"--gpu-architecture=compute_{arch}", "-lineinfo")
    fused = () if fuse else ("-fmad=false",)
    given = (*(f"-I{folder}" for folder in folders), *compiler_options(), *own, *fused)
    program = compiler._NVRTCProgram(source, "unit.cu", name_expressions=(name,), method="ptx")
    text, names = program.compile(assemble_cupy_compiler_options(given))
    text = text.decode() if isinstance(text, bytes) else text
    return Compiled(text.rstrip("\0"), names[name])


def made(name: str, suffix: str, text: str, *how: Any) -> Path:
    """Return what g++ makes of a text, built if need be."""

    def build_in(folder: Path) -> Path:
        (folder / "unit.hpp").write_text(text)
        build._compile(name, ["g++", *FLAGS, *how, "unit.hpp", "-o", f"unit{suffix}"], cwd=folder)
        return folder / f"unit{suffix}"

    key = "\0".join([*FLAGS, *map(str, how), text])
    return build._built(name, key, build_in, suffix=suffix)


@functools.cache
def header() -> Path:
    """Return ptx.hpp and what it includes, compiled: that takes longest of a small unit."""
    files = (*sorted(SOURCES.glob("*.hpp")), HERE / "ptx.hpp")
    text = "\n".join(re.sub(r'#(include "|pragma once).*', "", f.read_text()) for f in files)
    return made("ptx", ".hpp.gch", text, "-x", "c++-header").with_suffix("")


def library(compiled: Compiled) -> Path:
    """Return the library of a kernel."""
    code = unit(*compiled)
    how = ("-include", header(), "-shared", "-nostdlib", "-x", "c++")  # what it calls is loaded
    return made(f"ptx_{compiled.entry[:40]}", ".so", code, *how)


class PtxModule(Module):
    """A kernel of PTX; traffic goes by the line of the source."""

    def _line(self, file: int, line: int) -> str:
        return re.sub(r"^PTX \d+, ", "", super()._line(file, line))


@functools.lru_cache(maxsize=512)
def _module(
    name: str, source: str, check: bool, folders: tuple[Path, ...], arch: str, fuse: bool
) -> PtxModule:
    path = library(ptx(source, name, arch, folders, fuse))
    whole = "\n".join(build._included(source, (*folders, source_root()), set()))
    return PtxModule(name, path, build.runtime(), check, whole)


class PtxEmulator(Emulator):
    """The emulator, with NVRTC and the translator in the place of g++ and the twins."""

    def __eq__(self, other: object) -> bool:  # the library keeps kernels by target
        return type(other) is PtxEmulator and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(("ptx", *self))

    def compile(self, name: str, source: str) -> Callable[..., None]:
        arch = f"{self.architecture}{'a' * (self.architecture == 90)}"
        module = _module(name, source, self.check, self.folders, arch, self.fuse)
        return functools.partial(module.launch, self.order, self.shared_memory)
