"""What launches of the stand-in write where ``machine.runs``: numbers that depend on all they read.

A kernel's results are drawn by a digest of its source, grid, numbers and arrays, of their contents
too, so that any other number leads to other results; products are those of matrices.
"""

import ctypes
import functools
import hashlib
import math
import re
from typing import Any

import numpy as np

from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.source import with_headers

DTYPES = {
    2: np.dtype("float16"),
    14: BFLOAT16,
    0: np.dtype("float32"),
    1: np.dtype("float64"),
}


@functools.cache
def written(name: str, file: str) -> tuple[bool, ...]:
    """Return of each parameter of a kernel whether it is an array that it may change."""
    declared = re.search(rf"KERNEL\([^)]*\)\s*{name}\(\s*([^)]*)\)", with_headers(file))
    assert declared, f"{file} declares no {name}"
    every = re.split(r",\s*", declared[1])
    return tuple("*" in each and "const " not in each.partition("*")[0] for each in every)


def run(launch: Any, args: Any, places: Any) -> None:
    """Write the results of a kernel; ``places`` holds the buffers of all arrays."""
    file = re.findall(r'^#include "([^"]+\.cu)"', launch.source, re.M)[-1]
    digest = hashlib.blake2b(repr((launch.kernel, *launch[3:])).encode(), digest_size=8)
    digest.update(launch.source.partition("\n")[2].encode())
    changed = []
    for arg, changes in zip(args, written(launch.kernel, file), strict=True):
        values = getattr(arg, "values", None)
        if values is None:
            digest.update(repr(np.asarray(arg).tolist()).encode())
            continue
        fields = re.findall(r"^constexpr int (\w+) = (\d+);", launch.source, re.M)
        numbers = {name: int(number) for name, number in fields}
        if "FIELDS" in numbers and values.ndim == 2 and values.dtype == np.int64:
            changed += _behind(values, numbers, places, digest)
            continue
        digest.update(values.tobytes())
        changed += [values] * changes
    draw = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
    for values in changed:
        if values.dtype == np.bool_:
            values[...] = True
        elif values.dtype.kind not in "iu":  # places and counters stay
            values[...] = draw.uniform(0.5, 1.5, values.shape).astype(values.dtype)


def _start(root: np.ndarray) -> int:
    """Return the address of an array, as ``Pointer`` has it."""
    return int(root.ctypes.data) // 16 * 16


def _behind(
    table: np.ndarray, numbers: dict[str, int], places: Any, digest: Any
) -> list[np.ndarray]:
    """Return the arrays that a kernel changes of a table of many; digest what it reads."""
    changed = []
    for row in table.tolist():
        *addresses, size, first, kind = row
        digest.update(repr((size, first, kind)).encode())
        for field, address in enumerate(addresses):
            if address:
                root = next(r for r in places.values() if 0 <= address - _start(r) < r.nbytes)
                at = (address - _start(root)) // root.itemsize
                array = root.ravel(order="K")[at : at + size]  # scales of codes are fewer
                digest.update(array.tobytes())
                changed += [array] * (field != numbers["GRADIENT"])
    return changed


def product(name: str, args: Any) -> None:
    """Write a product of cuBLAS, whose arguments are C's: a column-major out = a b."""
    numbers = [getattr(each, "value", each) for each in args]
    flags, (m, n, k), step = numbers[1:3], numbers[3:6], 4 if "Strided" in name else 3
    factor, before = (float(args[at]._obj.value) for at in (6, 7 + 2 * step))
    places = 7, 7 + step, 8 + 2 * step
    a, b, out = (numbers[at : at + step] for at in places)
    count = numbers[8 + 3 * step] if step == 4 else 1
    shapes = [(k, m) if flags[0] else (m, k), (n, k) if flags[1] else (k, n), (m, n)]
    for batch in range(count):
        left, right, result = (
            _matrix(each, shape, batch) for each, shape in zip((a, b, out), shapes, strict=True)
        )
        wide = [each.astype(np.promote_types(each.dtype, "float32")) for each in (left, right)]
        wide = [each.T if flag else each for each, flag in zip(wide, flags, strict=True)]
        total = factor * (wide[0] @ wide[1])
        result[...] = total + before * result.astype(total.dtype) if before else total


def _matrix(operand: Any, shape: tuple[int, int], batch: int) -> np.ndarray:
    """Return a column-major matrix at an address."""
    address, dtype, pitch = operand[0], DTYPES[operand[1]], operand[2]
    size = dtype.itemsize
    address += batch * (operand[3] if len(operand) == 4 else 0) * size
    count = math.prod((pitch, max(shape[1] - 1, 0))) + shape[0]
    room = (ctypes.c_char * (count * size)).from_address(address)
    return np.ndarray(shape, dtype, room, 0, (size, pitch * size))
