"""A PTX emulator: a Target that runs the PTX that NVRTC compiles, on NumPy arrays.

    with using(PtxEmulator(architecture=90)):
        rms_norm(x, weight)              the real launch code, the real PTX of sm_90a

``cuda_on_cpu`` compiles the source with g++, and other headers for the inline assembly.  Here the
assembly itself runs on the same machine, as does code under ``__CUDA_ARCH__`` and whatever the
compiler moved, fused or replaced.  PTX is translated to C++.

=================  =============================================================
``function.py``    translates a function; the language of the tables
``arithmetic.py``  arithmetic, logic, comparisons, conversions
``machine.py``     control, memory, barriers, warps, tensor cores, copies
``ptx.hpp``        C++ functions that translated code calls, besides the machine
=================  =============================================================

A message names both lines: ``PTX 287, ptx.cuh:61 in tile.cuh:113``.  Traffic is counted by the line
of the source.  An unsupported instruction raises ``UnknownError``: the tables have all that NVRTC
12.0, 12.9 and 13.5 emit for the kernels and the primitives, and carries and pairs of float32.

Limits: ptxas may still change the code.  Approximations are glibc's; within ``jitter(1)`` ex2, rcp,
rsqrt and div have the errors that PTX documents.  NaN has the CPU's bits.  Floats flush denormals
only with .ftz.  Bounds are checked of shared memory, not of static arrays.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from unsloth_cupy.core.source import source_root

from ...code.programs.ptx import Compiled, UnknownError, functions, ptx
from ..cuda_on_cpu import Emulator, Module, build
from . import arithmetic, machine  # noqa: F401  they register their instructions
from .function import Function, variable

__all__ = ["PtxEmulator", "UnknownError"]

FLAGS = [
    *(flag for flag in build.COMMON if not flag.startswith(("-g1", "-ffp-contract"))),
    "-O0",  # a kernel runs for less time than g++ takes to optimise it
    "-Werror=frame-larger-than=200000",  # of a thread's stack of 256 KiB
    "-ffp-contract=off",  # PTX has explicit fma instructions
    "-fno-extern-tls-init",
    "-Wno-narrowing",
]


def unit(text: str, name: str) -> str:
    """Return the C++ of an entry function of a PTX module, and of the functions it may call."""
    declared, bodies = functions(text)
    variables = [variable(statement) for statement in declared]
    places: dict[tuple[str, int], int] = {("?", 0): 0}
    chosen = [body for body in bodies if not body.entry or body.name == name]
    if not chosen or not chosen[-1].entry:
        raise UnknownError(f"no entry {name}")
    translated = [Function(b, {n: space for space, n, _ in variables}, places) for b in chosen]
    lines = [
        *(code for *_, code in variables),
        "static const Where W[] = {",
        *(f'  {{"{file}", {line}}},' for file, line in places),
        "};",
        *(f"static void {f.name}(void **a);" for f in translated[:-1]),
        'extern "C" {',
        f"extern const int emu_arity = {len(chosen[-1].parameters)};",
        *(line for f in translated for line in f.code),
        "}",
    ]
    buffers = [line.split()[-1].rstrip("[];") for line in lines if line.startswith("extern thread")]
    return "\n".join([*lines, build.frame(buffers, ", ".join(map(str, chosen[-1].cluster)))])


def jitter(times: float) -> None:
    """Let approximations have so many times the errors that PTX documents, in this process."""
    FLAGS[:] = [flag for flag in FLAGS if "JITTER" not in flag]
    FLAGS.extend([f"-DJITTER={times}"] * bool(times))
    header.cache_clear()
    _module.cache_clear()


@functools.cache
def header() -> Path:
    """Return ptx.hpp, precompiled with its includes: it takes most of a small unit's time."""
    text, folder = (Path(__file__).parent / "ptx.hpp").read_text(), build.HERE / "include"
    key = "\n".join([*FLAGS, *build._included(text, (folder,), set())])
    flags = (*FLAGS, f"-I{folder}", "-x", "c++-header")
    return build.compiled("ptx", text, key, *flags, suffix=".hpp.gch").with_suffix("")


def library(compiled: Compiled) -> Path:
    """Return the library of a kernel."""
    flags = (*FLAGS, "-include", header(), "-shared", "-nostdlib")  # the process has loaded them
    name = f"ptx_{compiled.entry[:40]}"
    return build.compiled(name, unit(*compiled), header().name, *flags)


class PtxModule(Module):
    """A kernel compiled from PTX; traffic is counted by the line of the CUDA source."""

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
    """The emulator with NVRTC and the translator instead of g++ and its own headers."""

    def __eq__(self, other: object) -> bool:  # the library caches kernels by target
        return type(other) is PtxEmulator and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(("ptx", *self))

    def compile(self, name: str, source: str) -> Callable[..., None]:
        arch = f"{self.architecture}{'a' * (self.architecture == 90)}"
        module = _module(name, source, self.check, self.folders, arch, self.fuse)
        return functools.partial(module.launch, self.order, self.shared_memory)
