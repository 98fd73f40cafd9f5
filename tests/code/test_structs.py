"""Structs of numbers that kernels take by value: as NumPy lays them out, so do g++ and NVRTC."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.core import source

from ..harness.tracked import tracked
from ..machines.cuda_on_cpu import missing
from .programs import budget


def parameters() -> Iterator[tuple[str, str, list[str]]]:
    """Yield file, name and parameters of each kernel."""
    for path in tracked("kernels_cu/*.cu"):
        for name, declared in re.findall(r"KERNEL\([^)]*\)\s*(\w+)\(([^)]*)\)", path.read_text()):
            yield path.name, name, [" ".join(word.split()) for word in declared.split(",")]


def layouts() -> str:
    """Return a source that compiles where every struct lies as its dtype says."""
    asked = {
        (words[-2], file)
        for file, _, declared in parameters()
        for words in map(str.split, declared)
        if "__grid_constant__" in words and "TensorMap" not in words  # which is the driver's
    }
    known: dict[str, Any] = {ctype: dtype for dtype, ctype in source.CTYPES.items()}

    def lines(name: str, text: str) -> Iterator[str]:
        dtype = source.dtype_of(name, known, text)
        assert dtype is not None, name
        assert dtype.fields is not None, name
        body = re.search(rf"^struct {name} {{.*?}};", text, re.M | re.S)
        assert body is not None
        for nested in re.findall(r"^ *([A-Z]\w+) \w", body[0], re.M):
            yield from lines(nested, text)
        yield from (body[0], f"static_assert(sizeof({name}) == {dtype.itemsize});")
        for field, (_, offset, *_) in dtype.fields.items():
            yield f"static_assert(__builtin_offsetof({name}, {field}) == {offset});"

    assert asked
    units = {(n, f): dict.fromkeys(lines(n, source.with_headers(f))) for n, f in sorted(asked)}
    spaces = [
        "\n".join([f"namespace {n}_{f[:-3]} {{", *unit, "}"]) for (n, f), unit in units.items()
    ]
    return "\n".join([*spaces, ""])


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_g_plus_plus_lays_structs_out_as_numpy_does() -> None:
    words = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(words, input=layouts(), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    wrong = re.sub(r"== (\d+)", lambda match: f"== {int(match[1]) + 4}", layouts())
    done = subprocess.run(words, input=wrong, text=True, capture_output=True, check=False)
    assert done.stderr.count("static assertion failed") == layouts().count("static_assert")


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_nvrtc_lays_structs_out_as_numpy_does() -> None:
    offset = r"__builtin_offsetof\((\w+), (\w+)\)"  # which NVRTC does not know
    source = re.sub(offset, r"__INTADDR__(&((\1 *)0)->\2)", layouts())
    budget.cubin(source, ("-std=c++17",), "90")


def test_no_kernel_takes_more_than_8_single_numbers() -> None:
    """Numbers that belong together are one struct.

    Arrays are parameters of their own, as a replay picks them by position.  Not every kernel gains
    by a struct: those that take several numbers here needed more registers with one.
    """
    single = {
        name: [each for each in declared if "*" not in each and "__grid_constant__" not in each]
        for _, name, declared in parameters()
    }
    assert {name: numbers for name, numbers in single.items() if len(numbers) > 8} == {}


def test_a_struct_is_read_where_it_lies() -> None:
    """A copy of it, which CUDA C++ else makes, costs registers."""
    numbers = {*source.CTYPES.values(), "size_t"}
    copied = [
        (name, parameter)
        for _, name, declared in parameters()
        for parameter in declared
        if "*" not in parameter
        and parameter.removeprefix("const ").rpartition(" ")[0] not in numbers
        and not parameter.startswith("const __grid_constant__ ")
    ]
    assert copied == []


def test_cupy_takes_a_struct_of_any_size_by_value() -> None:
    """The scalars of CuPy 14.0 hold less than 64 bytes."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    import ctypes

    from unsloth_cupy.core.gpu import CupyTarget

    struct = np.array((1, [2] * 20), np.dtype([("a", "u1"), ("b", "i8", (20,))], align=True))[()]
    ready = CupyTarget().ready(struct)
    assert isinstance(ready, cupy.cuda.function.CNumpyArray)
    actual = np.frombuffer(ctypes.string_at(ready.ptr, struct.nbytes), struct.dtype)
    assert str(actual[0]) == str(struct)
