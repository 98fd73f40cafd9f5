"""The source text of a kernel: its file, its compile-time constants and its parameters."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KernelError
from .dtypes import BFLOAT16

# dtype: its type in CUDA C
CTYPES: Mapping[np.dtype[Any], str] = {
    np.dtype("float16"): "__half",
    BFLOAT16: "__nv_bfloat16",
    np.dtype("float32"): "float",
    np.dtype("float64"): "double",
    np.dtype("int8"): "signed char",
    np.dtype("uint8"): "unsigned char",
    np.dtype("int32"): "int",
    np.dtype("uint32"): "unsigned",
    np.dtype("int64"): "long long",
    np.dtype("bool"): "bool",
}
_search = functools.cache(re.search)  # each set of constants searches the same few files


class Constants(dict[str, Any]):
    """Compile-time constants of a launch by name: dtypes, ints and bools.

    Their hash is computed once.  Create them in a cached function: every call of a launch looks up
    its kernel by them.
    """

    def __init__(self, **constants: Any) -> None:
        super().__init__(constants)
        self.hash = hash(tuple(constants.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self.hash


@functools.cache
def source_root() -> Path:
    """Return kernels_cu/: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (root / "common").is_dir():
            return root
    raise KernelError(f"kernels_cu is neither in {package} nor next to it; reinstall the package")


@functools.cache
def digest() -> str:
    """Return a hash of all kernel sources.

    CuPy's cache key has the text of a source, but not the text of the files that it includes.
    """
    files = sorted(source_root().rglob("*.cu*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@functools.cache
def code_digest(file: str) -> str | None:
    """Return a hash of a source and its headers without comments; None if the file is missing."""
    if not (source_root() / file).exists():
        return None
    text = with_headers("common/device.cuh") + with_headers(file)
    return hashlib.sha256(" ".join(re.sub(r"//.*", "", text).split()).encode()).hexdigest()[:12]


def translation_unit(file: str, constants: Mapping[str, Any]) -> str:
    """Return the text to compile: shared headers, typed constants, then the file itself."""
    lines = [f"// kernels_cu {digest()}", '#include "common/device.cuh"']
    for name, value in constants.items():
        if isinstance(value, int):  # a bool too
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
        else:
            lines.append(f"using {name} = {CTYPES[np.dtype(value)]};")
    return "\n".join([*lines, f'#include "{file}"', ""])


def parameters(
    file: str, name: str, constants: Mapping[str, Any]
) -> tuple[tuple[np.dtype[Any], bool], ...]:
    """Return (dtype, is a pointer) of every parameter that the source declares."""
    known = {ctype: dtype for dtype, ctype in CTYPES.items()} | {"size_t": np.dtype("uint64")}
    known["TensorMap"] = np.dtype("V128")  # the driver's CUtensorMap has 128 bytes
    known |= {k: np.dtype(v) for k, v in constants.items() if not isinstance(v, int)}
    text = with_headers(file)
    declared = _search(rf"KERNEL\([^)]*\)\s*{name}\(\s*([^)]*)\)", text)
    if declared is None:
        raise KernelError(f"{file} declares no KERNEL(...) {name}(...)")
    result = []
    for parameter in re.split(r",\s*", declared[1]):
        bare = re.sub("const |__grid_constant__ |__restrict__ ", "", parameter)
        dtype = dtype_of(re.sub(r"[ *]+\w+$", "", bare), known, text)
        if dtype is None:
            raise KernelError(f"{file}: {name} has a parameter of unknown type: {parameter}")
        result.append((dtype, "*" in bare))
    return tuple(result)


@functools.cache
def with_headers(file: str) -> str:
    """Return the texts of the headers that a source includes, then its own text."""
    text = (source_root() / file).read_text(encoding="utf-8")
    return "".join(map(with_headers, re.findall(r"^#include <(common/.+)>", text, re.M))) + text


def dtype_of(ctype: str, known: Mapping[str, np.dtype[Any]], text: str) -> np.dtype[Any] | None:
    """Return the dtype of a C number, or of a struct of numbers with C's layout; else None."""
    if ctype in known:
        return known[ctype]
    struct = _search(rf"^struct {ctype} {{(.*?)}};", text, re.M | re.S)
    body = re.sub(r"//.*", "", struct[1]) if struct else "*"
    if "*" in body:
        return None
    members: list[Any] = []
    for kind, names in re.findall(r"((?:\w+ )+)(\w[^;]*);", body):
        if (dtype := dtype_of(kind.strip(), known, text)) is None:
            return None
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            members.append((name, dtype, (int(count),) if count else ()))
    return np.dtype(members, align=True)


def fields(struct: Any, dtype: np.dtype[Any]) -> Any:
    """Return a dict with the fields of a struct, also of nested ones, as a tuple in their order."""
    if type(struct) is dict and struct.keys() == {*(dtype.names or ())}:
        return tuple([fields(struct[name], dtype[name]) for name in dtype.names or ()])
    return struct  # for a dict with other keys NumPy raises


def check_arguments(
    kernel: str, declared: Sequence[tuple[np.dtype[Any], bool]], args: Sequence[Any]
) -> None:
    """Raise KernelError if arguments do not match what the source declares."""
    if len(args) != len(declared):
        raise KernelError(f"{kernel} takes {len(declared)} arguments: {args}")
    for (dtype, pointer), arg in zip(declared, args, strict=True):
        if pointer and arg is not None and (arg.dtype != dtype or not arg.flags.c_contiguous):
            raise KernelError(f"{kernel}: {arg.dtype} {arg.strides} is not contiguous {dtype}")
