"""Run all that needs a GPU: ``python -m tests.code.hardware FOLDER``, in the steps of ``session``.

README.md says in which order to ask for the steps.  Primitives that agree with plain arithmetic bit
by bit are written to fixtures.json, with date, device and a digest of the launch.
"""

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .fixtures import ROOT
from .primitives import Launch, Tile
from .session import STEPS, everything

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


def main() -> None:
    """Run the steps that are named, or all, and write their results to a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.code.hardware", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="the folder of results; a session continues")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="steps to run")
    parser.add_argument("--minutes", type=float, default=13, help="time limit (13)")
    arguments = parser.parse_args()
    try:
        import cupy

        cupy.cuda.Device().compute_capability  # noqa: B018 -- raises without a GPU
    except (ImportError, RuntimeError) as error:
        sys.exit(f"tests.code.hardware needs a GPU and CuPy: {error}")
    everything(arguments.folder.resolve(), arguments.minutes, arguments.only)


if __name__ == "__main__":
    main()
