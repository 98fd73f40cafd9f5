"""The source text of a kernel: where it lies, its compile-time constants, its parameters."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KernelError
from .dtypes import BFLOAT16

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


class Constants(dict[str, Any]):
    """Compile-time constants of a launch by name: dtypes, ints and bools.  Hashed once.

    Make them in a cached function: a launch looks its kernel up by them on every call.
    """

    def __init__(self, **constants: Any) -> None:
        super().__init__(constants)
        self.hash = hash(tuple(constants.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self.hash


@functools.cache
def source_root() -> Path:
    """Return kernels_cu/: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (root / "common").is_dir():
            return root
    raise KernelError(f"kernels_cu is neither in {package} nor beside it; reinstall the package")


@functools.cache
def digest() -> str:
    """Return a hash of every kernel source: CuPy's cache key does not follow #include."""
    files = sorted(source_root().rglob("*.cu*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def translation_unit(file: str, constants: Mapping[str, Any]) -> str:
    """Return shared headers, typed constants, then the file itself."""
    lines = [f"// kernels_cu {digest()}", '#include "common/device.cuh"']
    for name, value in constants.items():
        match value:
            case bool():
                lines.append(f"constexpr bool {name} = {str(value).lower()};")
            case int():
                lines.append(f"constexpr int {name} = {value};")
            case _:
                lines.append(f"using {name} = {CTYPES[np.dtype(value)]};")
    return "\n".join([*lines, f'#include "{file}"', ""])


def parameters(
    file: str, name: str, constants: Mapping[str, Any]
) -> tuple[tuple[np.dtype[Any], bool], ...]:
    """Return (dtype, is a pointer) of every parameter that the source declares."""
    known = {ctype: dtype for dtype, ctype in CTYPES.items()} | {"size_t": np.dtype("uint64")}
    known |= {k: np.dtype(v) for k, v in constants.items() if not isinstance(v, int)}
    text = with_headers(file)
    declared = re.search(rf"KERNEL\([^)]*\)\s*{name}\(([^)]*)\)", text)
    if declared is None:
        raise KernelError(f"{file} declares no KERNEL(...) {name}(...)")
    found = []
    for parameter in " ".join(declared[1].split()).split(","):
        bare = re.sub("const |__grid_constant__ |__restrict__ ", "", parameter).strip()
        words = re.fullmatch(r"([\w ]+?) ?(\*?) ?\w+", bare)
        dtype = words and dtype_of(words[1], known, text)
        if words is None or dtype is None:
            raise KernelError(
                f"{file}: {name} has a parameter of unknown type: {parameter.strip()}"
            )
        found.append((dtype, words[2] == "*"))
    return tuple(found)


def with_headers(file: str) -> str:
    """Return the text of a source after that of the headers it includes."""
    text = (source_root() / file).read_text()
    headers = re.findall(r'^#include "(.+)"', text, re.M)
    return "".join([*map(with_headers, headers), text])


def dtype_of(ctype: str, known: Mapping[str, np.dtype[Any]], text: str) -> np.dtype[Any] | None:
    """Return the dtype of a number or of a struct of numbers, laid out as in C; else None."""
    body = re.search(rf"^struct {ctype} {{(.*?)}};", text, re.M | re.S)
    if ctype in known or body is None:
        return known.get(ctype)
    fields: list[tuple[str, Any, tuple[int, ...]]] = []
    for member in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        words = re.fullmatch(r"((?:\w+ )*\w+) (\w[\w, \[\]]*)", " ".join(member.split()))
        dtype = words and dtype_of(words[1], known, text)
        if words is None or dtype is None:
            return None
        names = re.findall(r"(\w+)(?:\[(\d+)\])?(?:, |$)", words[2])
        fields += [(name, dtype, (int(count),) if count else ()) for name, count in names]
    return np.dtype(fields, align=True)


def fields(struct: Any, dtype: np.dtype[Any]) -> Any:
    """Return a tuple of a dict with the fields of a struct, and so of each dict in it."""
    if type(struct) is not dict:
        return struct
    if struct.keys() != {*(dtype.names or ())}:
        raise KernelError(f"{dtype.names} are not the fields of {struct}")
    return tuple([fields(struct[name], dtype[name]) for name in dtype.names or ()])


def check_arguments(
    kernel: str, declared: Sequence[tuple[np.dtype[Any], bool]], args: Sequence[Any]
) -> None:
    """Raise KernelError where arguments are not what the source declares."""
    if len(args) != len(declared):
        raise KernelError(f"{kernel} takes {len(declared)} arguments: {args}")
    for (dtype, pointer), arg in zip(declared, args, strict=True):
        if pointer and arg is not None and (arg.dtype != dtype or not arg.flags.c_contiguous):
            raise KernelError(f"{kernel}: {arg.dtype} {arg.strides} is not packed {dtype}")
