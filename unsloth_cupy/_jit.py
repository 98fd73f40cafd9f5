"""From a source file and its compile-time constants to a launchable kernel."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ._signature import BFLOAT16
from .errors import KernelError

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
NULL = np.uintp(0)  # the pointer of an absent array
KERNEL_DTYPES = tuple(CTYPES)[:3]  # float64 runs the definition

Launch = Callable[[Any, Any, tuple[Any, ...], int], None]  # (grid, block, arguments, shared)


class Target(Protocol):
    """A place kernels run: it owns some arrays and compiles kernels for them."""

    def owns(self, array: Any) -> bool:
        """Say whether this target runs kernels on this array."""

    def compile(self, name: str, source: str) -> Launch:
        """Return kernel ``name`` of a translation unit as ``launch(grid, block, args, shared)``."""


def compiler_options(capability: str) -> tuple[str, ...]:
    """Return what NVRTC needs beside CuPy's own options: its header paths, -arch and -ftz=true.

    Float32 denormals are zero in kernels.  CuPy asks for sm_90; NVRTC keeps the first -arch it
    sees, and only sm_90a has wgmma and setmaxnreg.
    """
    arch = ("-arch=sm_90a",) if capability == "90" else ()
    return ("-std=c++17", f"-I{source_root()}", *arch)


class CupyTarget:
    """An NVIDIA GPU, by way of ``cupy.RawModule`` and NVRTC."""

    def owns(self, array: Any) -> bool:
        """Say whether array is a CuPy array."""
        return type(array).__module__.partition(".")[0] == "cupy"

    def compile(self, name: str, source: str) -> Launch:
        """Compile for the current device; CuPy keeps the result on disk."""
        import cupy

        options = compiler_options(cupy.cuda.Device().compute_capability)
        try:
            function = cupy.RawModule(code=source, options=options).get_function(name)
        except cupy.cuda.compiler.CompileException as error:
            raise KernelError(f"{name} does not compile\n{error}\n{source}") from error

        allowed = {0}

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared: int) -> None:
            if shared > 48 * 1024 and shared not in allowed:  # more than that asks for leave
                function.max_dynamic_shared_size_bytes = max(shared, *allowed)
                allowed.add(shared)
            function(grid, block, args, shared_mem=shared)

        return launch


targets: tuple[Target, ...] = (CupyTarget(),)


@contextmanager
def using(target: Target) -> Iterator[None]:
    """Ask this target first, inside a ``with`` block."""
    global targets  # noqa: PLW0603 -- the one seam between the library and the machine
    before = targets
    targets = (target, *before)
    try:
        yield
    finally:
        targets = before


def target_of(array: Any) -> Target | None:
    """Return the target that runs kernels on this array, if any does."""
    return next((target for target in targets if target.owns(array)), None)


@functools.cache
def source_root() -> Path:
    """Return kernels_cu/: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
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


class Constants(dict[str, Any]):
    """Compile-time constants of a launch by name: dtypes, ints and bools.  Hashed once.

    Make them in a cached function: a launch looks its kernel up by them on every call.
    """

    def __init__(self, **constants: Any) -> None:
        super().__init__(constants)
        self.hash = hash(tuple(constants.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        """Return the hash of the constants as they were made."""
        return self.hash


class Kernel:
    """A compiled kernel that knows its parameters: ``kernel[grid, block](*args)``.

    Neither CUDA nor CuPy checks the number or the type of arguments.  This class checks those of
    the first launch (later ones come from the same line, with arrays that an op has checked and
    packed), and turns Python scalars into the types that the source declares.
    """

    def __init__(self, target: Target, file: str, name: str, constants: Constants) -> None:
        self.name = f"{name} of {file} with {constants}"
        self.parameters = parameters(file, name, constants)
        self.casts = [None if pointer else dtype.type for dtype, pointer in self.parameters]
        self.checked = False
        self.launch = target.compile(name, translation_unit(file, constants))

    def __getitem__(self, shape: tuple[Any, ...]) -> Callable[..., None]:
        """Take the launch shape: blocks, threads and, where needed, bytes of shared memory."""
        grid, block, shared = shape if len(shape) == 3 else (*shape, 0)
        return functools.partial(self._run, grid, block, shared)

    def _run(self, grid: Any, block: Any, shared: int, *args: Any) -> None:
        if not self.checked:
            self._check(args)
        values = [
            NULL if arg is None else arg if cast is None else cast(arg)
            for cast, arg in zip(self.casts, args, strict=True)
        ]
        grid = grid if grid.__class__ is tuple else (grid,)
        block = block if block.__class__ is tuple else (block,)
        if 0 not in grid:  # nothing to do for an empty axis
            self.launch(grid, block, tuple(values), shared)

    def _check(self, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.parameters):
            raise KernelError(f"{self.name} takes {len(self.parameters)} arguments: {args}")
        for (dtype, pointer), arg in zip(self.parameters, args, strict=True):
            if pointer and arg is not None and (arg.dtype != dtype or not arg.flags.c_contiguous):
                raise KernelError(f"{self.name}: {arg.dtype} {arg.strides} is not packed {dtype}")
        self.checked = True


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


@functools.lru_cache(maxsize=4096)
def _compiled(target: Any, device: int, file: str, name: str, constants: Constants) -> Kernel:
    return Kernel(target, file, name, constants)


def load(file: str, name: str, like: Any, constants: Constants) -> Kernel:
    """Return kernel ``name`` of kernels_cu/``file`` for these constants, where ``like`` lives."""
    for target in targets:
        if target.owns(like):
            device = 0 if like.__class__ is np.ndarray else like.device.id
            return _compiled(cast(Any, target), device, file, name, constants)
    raise KernelError(f"{name}: no target runs kernels on {type(like).__name__}")
