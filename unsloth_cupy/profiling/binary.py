"""Kernels compiled by NVRTC for an architecture, with no GPU, and what ptxas says of them."""

import functools
import re
from typing import NamedTuple

from ..core import gpu
from ..errors import KernelError

VERBOSE = ("--ptxas-options=-v",)
# Of an SM: threads, blocks, bytes of shared memory; all have 65,536 registers.
PROCESSOR = {
    80: (2048, 32, 164 << 10),
    86: (1536, 16, 100 << 10),
    89: (1536, 24, 100 << 10),
    90: (2048, 32, 228 << 10),
    100: (2048, 32, 228 << 10),
    120: (1536, 24, 100 << 10),
}


class Resources(NamedTuple):
    """What ptxas says of a kernel: registers of a thread, and bytes."""

    registers: int
    shared: int
    local: int
    spilled: int


def version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises
    ------
    ImportError, RuntimeError
        There is no CuPy, or no NVRTC.
    """
    major, minor = gpu.cupy().cuda.nvrtc.getVersion()
    return major, minor


def compiled(
    source: str,
    architecture: int,
    more: tuple[str, ...] = VERBOSE,
    options: tuple[str, ...] | None = None,
) -> tuple[bytes, str]:
    """Return the cubin of a translation unit, as ``cupy.RawModule`` makes it, and ptxas's log.

    Options are those that the library compiles it with, unless others are given.

    Raises
    ------
    KernelError
        It does not compile.
    """
    cupy = gpu.cupy()
    nvrtc, core = cupy.cuda.nvrtc, cupy._core.core
    options = gpu.compiler_options(source) if options is None else options
    given = core.assemble_cupy_compiler_options((*options, *more))
    own = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(source, "unit.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*given, *own))
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)  # CuPy drops a byte
    except nvrtc.NVRTCError as error:
        raise KernelError(f"{nvrtc.getProgramLog(program)}\n{source}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.lru_cache(maxsize=1024)
def resources(source: str, kernel: str, architecture: int) -> Resources | None:
    """Return what a kernel of a translation unit takes; None where NVRTC is not installed."""
    try:
        version()
    except (ImportError, RuntimeError):
        return None
    return read_log(compiled(source, architecture)[1]).get(kernel)


def read_log(log: str) -> dict[str, Resources]:
    """Return the resources of every kernel that ptxas speaks of."""
    pattern = (
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores,"
        r" (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
    )
    table = {}
    for name, stack, stores, loads, registers, rest in re.findall(pattern, log, re.S):
        shared = re.search(r"(\d+) bytes smem", rest)
        bytes_shared = int(shared[1]) if shared else 0
        table[name] = Resources(int(registers), bytes_shared, int(stack), int(stores) + int(loads))
    return table


def occupancy(architecture: int, registers: int, shared: int, threads: int) -> int:
    """Return the share of an SM's threads that can be resident, in percent, rounded down.

    ``shared`` is the static and the dynamic shared memory of a block in bytes.
    """
    most, blocks, per_sm = PROCESSOR[architecture]
    warps = -(-threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps  # 256 at a time
    by_shared = per_sm // (-(-(shared + 1024) // 128) * 128)  # 1 KiB of a block is the system's
    resident = min(blocks, most // 32 // warps, by_registers, by_shared)
    return 100 * resident * warps * 32 // most
