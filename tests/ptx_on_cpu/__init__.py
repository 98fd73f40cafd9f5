"""PTX on the CPU: a Target that runs what NVRTC makes of the kernels, on NumPy arrays.

    with using(PtxEmulator(architecture=90)):
        rms_norm(x, weight)              the real launch code, the real PTX of sm_90a

``tests/cuda_on_cpu`` runs the source with g++ and has twins of the files with inline assembly.
Here its text is executed, code under ``__CUDA_ARCH__``, and whatever the compiler moved, fused or
replaced, on the same machine: fibers, checks, tensor cores, copies, clusters.

=================  =============================================================
``function.py``    a function of C++ of each function; how a line of a table is read
``arithmetic.py``  arithmetic, logic, comparisons, conversions
``machine.py``     control, memory, barriers, warps, tensor cores, copies
``ptx.hpp``        what the C++ calls beside the machine
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

from unsloth_cupy.core.source import source_root

from ..cuda_on_cpu import Emulator, Module, build
from ..ptx import Compiled, UnknownError, functions, ptx
from . import arithmetic, machine  # noqa: F401  they say what they know
from .function import Function, variable

__all__ = ["PtxEmulator", "UnknownError"]

FLAGS = [
    *(flag for flag in build.COMMON if not flag.startswith(("-g1", "-ffp-contract"))),
    "-Og",
    "-ffp-contract=off",  # what is fused says so
    "-fno-extern-tls-init",
    "-w",
]


def unit(text: str, name: str) -> str:
    """Return the C++ of an entry of a PTX module, and of the functions that it may call."""
    declared, bodies = functions(text)
    variables = [variable(statement) for statement in declared]
    places: dict[tuple[str, int], int] = {("?", 0): 0}
    wanted = [body for body in bodies if not body.entry or body.name == name]
    if not wanted or not wanted[-1].entry:
        raise UnknownError(f"no entry {name}")
    made = [Function(body, {n: space for space, n, _ in variables}, places) for body in wanted]
    lines = [
        *(code for *_, code in variables),
        "static const Where W[] = {",
        *(f'  {{"{file}", {line}}},' for file, line in places),
        "};",
        *(f"static void {f.name}(void **a);" for f in made[:-1]),
        'extern "C" {',
        f"extern const int emu_arity = {len(wanted[-1].parameters)};",
        *(line for f in made for line in f.code),
        "}",
    ]
    buffers = [line.split()[-1].rstrip("[];") for line in lines if line.startswith("extern thread")]
    return "\n".join([*lines, build.frame(buffers, ", ".join(map(str, wanted[-1].cluster)))])


@functools.cache
def header() -> Path:
    """Return ptx.hpp and what it includes, compiled: that takes longest of a small unit."""
    text, folder = (Path(__file__).parent / "ptx.hpp").read_text(), build.HERE / "include"
    key = "\n".join([*FLAGS, *build._included(text, (folder,), set())])
    how = (*FLAGS, f"-I{folder}", "-x", "c++-header")
    return build.made("ptx", text, key, *how, suffix=".hpp.gch").with_suffix("")


def library(compiled: Compiled) -> Path:
    """Return the library of a kernel."""
    how = (*FLAGS, "-include", header(), "-shared", "-nostdlib")  # what it calls is loaded
    name = f"ptx_{compiled.entry[:40]}"
    return build.made(name, unit(*compiled), header().name, *how)


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
