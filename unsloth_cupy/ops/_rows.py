"""How the threads of a block share out rows, where a kernel reduces along them."""

from functools import cache
from typing import Any

from .._jit import Constants


@cache
def constants(dtype: Any, columns: int, lanes: int, held: int, **more: Any) -> Constants:
    """Return the constants of such a kernel, whose threads hold ``held`` registers of a value.

    A thread takes 16 values of a row: two 16-byte accesses in flight for 16-bit dtypes, four for
    float32.

        columns <= 512     a power of two of threads a row, several rows a block: no barrier
        columns <= 8192    the block takes a row
        beyond             512 threads where they then hold 32 registers or fewer, else 1024
        KEEP               a row stays in registers: up to 32 of a thread
    """
    wanted = -(-columns // 16)
    if wanted <= 32:
        row_threads = 1 << (wanted - 1).bit_length()
    elif wanted <= 512:
        row_threads = -(-wanted // 32) * 32
    else:
        row_threads = 512 if _registers(columns, 512, lanes, held) <= 32 else 1024
    return Constants(
        T=dtype,
        COLUMNS=columns,
        LANES=lanes,
        ROW_THREADS=row_threads,
        THREADS=row_threads if row_threads > 32 else 128,
        KEEP=_registers(columns, row_threads, lanes, held) <= 32,
        **more,
    )


def _registers(columns: int, threads: int, lanes: int, held: int) -> int:
    """Return how many registers a thread fills with its values of a row."""
    return -(-columns // (threads * lanes)) * lanes * held
