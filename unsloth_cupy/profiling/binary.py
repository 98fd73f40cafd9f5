"""Compiles kernels with NVRTC, without a GPU, and reads their resources from the ptxas log."""

import functools
import re
from typing import NamedTuple

from ..core import gpu
from ..errors import KernelError

VERBOSE = ("--ptxas-options=-v",)
# Limits per SM: threads, blocks, bytes of shared memory.  All SMs have 65,536 registers.
PROCESSOR = {
    80: (2048, 32, 164 << 10),
    86: (1536, 16, 100 << 10),
    87: (1536, 16, 164 << 10),
    89: (1536, 24, 100 << 10),
    90: (2048, 32, 228 << 10),
    100: (2048, 32, 228 << 10),
    103: (2048, 32, 228 << 10),
    120: (1536, 24, 100 << 10),
    121: (1536, 24, 100 << 10),
}


class Resources(NamedTuple):
    """The resources of a compiled kernel, as ptxas reports them."""

    registers: int  # registers per thread
    shared: int  # bytes of static shared memory per block
    local: int  # bytes of the stack frame per thread
    spilled: int  # bytes of register spill stores and loads


def version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises
    ------
    ImportError, RuntimeError
        CuPy or NVRTC is not installed.
    """
    major, minor = gpu.cupy().cuda.nvrtc.getVersion()
    return major, minor


def compiled(
    source: str,
    architecture: int,
    more: tuple[str, ...] = VERBOSE,
    options: tuple[str, ...] | None = None,
) -> tuple[bytes, str]:
    """Return the cubin of a translation unit, compiled like ``cupy.RawModule``, and the ptxas log.

    ``options`` defaults to the options of the library for this source; ``more`` are added.

    Raises
    ------
    KernelError
        The source does not compile.
    """
    cupy = gpu.cupy()
    nvrtc, core = cupy.cuda.nvrtc, cupy._core.core
    options = gpu.compiler_options(source) if options is None else options
    with_includes = core.assemble_cupy_compiler_options((*options, *more))
    cupy_options = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(source, "unit.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*with_includes, *cupy_options))
        # getCUBIN of CuPy drops the last byte
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise KernelError(f"{nvrtc.getProgramLog(program)}\n{source}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.lru_cache(maxsize=1024)
def resources(source: str, kernel: str, architecture: int) -> Resources | None:
    """Return the resources of a kernel in a translation unit; None if NVRTC is not installed."""
    try:
        version()
    except (ImportError, RuntimeError):
        return None
    return read_log(compiled(source, architecture)[1]).get(kernel)


def read_log(log: str) -> dict[str, Resources]:
    """Return the resources of each kernel in a ptxas log, by name."""
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
    """Return the occupancy in percent, rounded down: the resident share of the threads of an SM.

    ``shared`` is the static plus dynamic shared memory per block in bytes.
    """
    most, blocks, per_sm = PROCESSOR[architecture]
    warps = -(-threads // 32)
    # a warp's registers are allocated in units of 256
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    # the system reserves 1 KiB of shared memory for each block
    by_shared = per_sm // (-(-(shared + 1024) // 128) * 128)
    resident = min(blocks, most // 32 // warps, by_registers, by_shared)
    return 100 * resident * warps * 32 // most
