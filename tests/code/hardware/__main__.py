"""Run every primitive on the GPU at hand: ``python -m tests.code.hardware [NAME ...]``.

With ``--all FOLDER``, it runs all that needs a GPU, in the steps of ``session``, or the steps that
``--only`` names; README.md says in which order to ask for them.

A bare checkout with NumPy and CuPy is enough.  Each primitive runs in its own process, so that a
fault or a hang is one line of the output.  The GPU's result must equal that of plain arithmetic bit
by bit, as the emulator's must in its own tests; if g++ is installed, the emulator runs here too.
Primitives that agree are written to fixtures.json, with date, device and a digest of the launch.
"""

import argparse
import ctypes
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from .fixtures import ROOT, Fixture, digest, read, write
from .primitives import PRIMITIVES, Launch, Tile, launch, runs_on
from .processes import finished
from .session import STEPS, everything

SECONDS = 120  # for one primitive, including its compilation

# CUtensorMapDataType
KINDS = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7}
KINDS |= {"bfloat16": 9}


def tensor_map(tile: Tile, address: int) -> np.ndarray:
    """Return a TMA descriptor from the driver: one item of 128 bytes, to be passed by value."""
    buffer = np.zeros(256, np.uint8)
    descriptor = buffer[-buffer.ctypes.data % 64 :][:128]
    shape, strides = tile.array.shape[::-1], tile.array.strides[::-1]
    rank = len(shape)
    longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(descriptor.ctypes.data),
        ctypes.c_int(KINDS[tile.number or tile.array.dtype.name]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        longs(*shape),
        longs(*strides[1:]),
        words(*tile.box),
        words(*[1] * rank),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int({0: 0, 32: 1, 64: 2, 128: 3}[tile.swizzle]),
        ctypes.c_int(0),  # L2 promotion
        ctypes.c_int(0),  # zeros outside
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {status}")
    return descriptor.view("V128")  # CuPy passes arrays of one item by value


def run(primitive: Launch) -> dict[int, np.ndarray]:
    """Launch a primitive on the GPU; return the arrays that it wrote, by position of argument."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    source = f'#include "common/device.cuh"\n#include "{primitive.file}"\n'
    options = [
        "-std=c++17",
        f"-I{ROOT / 'kernels_cu'}",
        f"-I{ROOT / 'tests/code/emulator/kernels'}",
    ]
    if capability == "90":
        options.append("-arch=sm_90a")  # NVRTC from 12.9 on uses the first one; CuPy adds another
    template = [primitive.kernel] if "<" in primitive.kernel else None
    module = cupy.RawModule(code=source, options=tuple(options), name_expressions=template)
    function = module.get_function(primitive.kernel)
    if primitive.shared:  # the 48 KiB without opt-in are the sum of static and dynamic memory
        function.max_dynamic_shared_size_bytes = primitive.shared
    arrays: dict[int, Any] = {}
    args: list[Any] = []
    for position, arg in enumerate(primitive.args):
        host = arg.array if isinstance(arg, Tile) else arg
        if isinstance(host, np.ndarray):
            arrays[position] = cupy.asarray(host)
        if isinstance(arg, Tile):
            args.append(tensor_map(arg, arrays[position].data.ptr))
        else:
            args.append(arrays.get(position, arg))
    function((primitive.grid,), (primitive.block,), tuple(args), shared_mem=primitive.shared)
    cupy.cuda.Device().synchronize()
    return {position: arrays[position].get() for position in primitive.expected}


def emulated(name: str) -> str:
    """Run a primitive on the emulator if possible; return the outcome, or exit on a difference."""
    try:
        from ...machines.cuda_on_cpu import missing
        from ..emulator import primitive
    except ImportError as error:
        return f"agrees with arithmetic (no emulator here: {error})"
    if (reason := missing()) is not None:
        return f"agrees with arithmetic ({reason})"
    if wrong := primitive(name):
        sys.exit(f"the GPU agrees with arithmetic; {wrong} words of the emulator do not")
    return "agrees with arithmetic and the emulator"


def confirm(name: str) -> None:
    """Run one primitive and store its fixture; exit with the first difference."""
    import cupy

    primitive = launch(name)
    for position, actual in run(primitive).items():
        expected = np.ascontiguousarray(primitive.expected[position])
        bits = np.dtype(f"u{expected.itemsize}")
        pairs = actual.view(bits).reshape(-1), expected.view(bits).reshape(-1)
        wrong = np.flatnonzero(pairs[0] != pairs[1])
        if wrong.size:
            first = wrong[0]
            sys.exit(
                f"{wrong.size} of {expected.size} differ in argument {position}; "
                f"word {first} is {pairs[0][first]:#x}, not {pairs[1][first]:#x}"
            )
    print(emulated(name))
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    write({**read(), name: Fixture(date.today().isoformat(), device, digest(primitive))})


def main() -> None:
    """Run the primitives that are named, or all, each in its own process."""
    parser = argparse.ArgumentParser(prog="python -m tests.code.hardware", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a primitive; default: all")
    parser.add_argument("--one", action="store_true", help="run it in this process")
    text = "run all tests that need a GPU, then time the ops; write results to FOLDER"
    parser.add_argument("--all", type=Path, metavar="FOLDER", help=text)
    text = "steps of --all to run; default: all of them"
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help=text)
    parser.add_argument("--minutes", type=float, default=60, help="time limit of --all (60)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PRIMITIVES):
        sys.exit(f"no primitive is called {sorted(unknown)}; there are: {', '.join(PRIMITIVES)}")
    if arguments.one:
        return confirm(arguments.names[0])
    try:
        import cupy

        capability = int(cupy.cuda.Device().compute_capability)
    except (ImportError, RuntimeError) as error:
        sys.exit(f"tests.code.hardware needs a GPU and CuPy: {error}")
    if arguments.all:
        return everything(arguments.all.resolve(), arguments.minutes, arguments.only)
    failed = 0
    for name in arguments.names or PRIMITIVES:
        if not runs_on(name, capability):
            print(f"{name}: needs compute capability {PRIMITIVES[name][0]}, skipped", flush=True)
            continue
        command = [sys.executable, "-m", "tests.code.hardware", "--one", name]
        status, text = finished(command, SECONDS, cwd=ROOT)
        lines = text.strip().splitlines() or [f"ended with {status}"]
        outcome = f"no end in {SECONDS} s" if status is None else lines[-1]
        failed += not outcome.startswith("agrees")
        print(f"{name}: {outcome}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
