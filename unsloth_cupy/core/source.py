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
    text = (source_root() / file).read_text()
    declared = re.search(rf"KERNEL\([^)]*\)\s*{name}\(([^)]*)\)", text)
    if declared is None:
        raise KernelError(f"{file} declares no KERNEL(...) {name}(...)")
    found = []
    for parameter in " ".join(declared[1].split()).split(","):
        words = re.fullmatch(r" ?(?:const )?([\w ]+?) ?(\*?) ?(?:__restrict__ )?\w+ ?", parameter)
        if words is None or words[1] not in known:
            raise KernelError(
                f"{file}: {name} has a parameter of unknown type: {parameter.strip()}"
            )
        found.append((known[words[1]], words[2] == "*"))
    return tuple(found)


def check_arguments(
    kernel: str, declared: Sequence[tuple[np.dtype[Any], bool]], args: Sequence[Any]
) -> None:
    """Raise KernelError where arguments are not what the source declares."""
    if len(args) != len(declared):
        raise KernelError(f"{kernel} takes {len(declared)} arguments: {args}")
    for (dtype, pointer), arg in zip(declared, args, strict=True):
        if pointer and arg is not None and (arg.dtype != dtype or not arg.flags.c_contiguous):
            raise KernelError(f"{kernel}: {arg.dtype} {arg.strides} is not packed {dtype}")
