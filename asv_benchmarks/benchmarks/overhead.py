"""Overhead of a call beyond its arithmetic, after a first call of the same form."""

import contextlib
import ctypes
import functools
import timeit
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from unsloth_cupy import add, machine, rms_norm_forward
from unsloth_cupy.bench.cases import Scale, draw
from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.common import gemm

CALLS, ROUNDS = 200, 100


class CheckedCall:
    """The op and its bare definition in alternating calls, on arrays too small to matter."""

    unit, version = "us", "2"
    param_names = ("operands",)
    params = (2, 4)  # add(a, b); rms_norm_forward with every array and option: three results

    def setup(self, operands: int) -> None:
        """Make the first call, which records the checks."""
        rows, columns = np.ones((2, 8), np.float32), np.ones(8, np.float32)
        if operands == 2:
            self.op, self.arrays, self.options = add, (rows, rows), {}
        else:
            self.op, self.arrays = rms_norm_forward, (rows, columns, rows, columns)
            self.options = {"eps": 1e-6, "offset": 0.0}
        self.op(*self.arrays, **self.options)

    def time_call(self, operands: int) -> None:
        self.op(*self.arrays, **self.options)

    def track_microseconds_beyond_the_definition(self, operands: int) -> float:
        """Return the difference of the shortest times, which contain the least noise."""
        checked = timeit.Timer(lambda: self.op(*self.arrays, **self.options))
        bare = timeit.Timer(lambda: self.op.definition(*self.arrays, **self.options))
        rounds = [(checked.timeit(CALLS), bare.timeit(CALLS)) for _ in range(ROUNDS)]
        least, least_bare = (min(column) for column in zip(*rounds, strict=True))
        return (least - least_bare) / CALLS * 1e6


class LaunchCost:
    """Host time of a small ``rms_norm`` on a GPU: checks, allocation, launch."""

    unit, version = "us", "1"
    params = ("unsloth_cupy", "torch", "Liger")
    param_names = ("library",)

    def setup(self, library: str) -> None:
        """Compile; there are so few rows that the host takes longer than the GPU."""
        gpus, reason = machine.gpus()
        if not gpus:
            raise NotImplementedError(f"needs a GPU: {reason}")
        import cupy

        self.wait = cupy.cuda.Device().synchronize
        call = draw(rms_norm_forward, Scale(tokens=4, hidden=256)).cast(np.float16)
        call = call.mapped(cupy.asarray)
        self.call = lambda: rms_norm_forward(*call.arrays.values())
        if library != "unsloth_cupy":
            from unsloth_cupy.bench.peers import contestants

            peers, notes = contestants(call, None, True)
            if library not in peers:
                raise NotImplementedError(" ".join(notes) or f"{library} is not installed")
            self.call = peers[library]
        self.call()
        self.wait()

    def track_microseconds(self, library: str) -> float:
        """Return the shortest time of a call over all rounds, without waiting for the GPU."""
        timer, rounds = timeit.Timer(self.call), []
        for _ in range(ROUNDS):
            rounds.append(timer.timeit(CALLS) / CALLS * 1e6)
            self.wait()
        return min(rounds)


class PythonAloneWithoutGpu:
    """Python's time for a small call up to the launch, without a GPU.

    It is not a figure of a GPU: CuPy's arrays use host memory, nothing is launched, and the pool,
    the driver and cuBLAS are left out.
    """

    unit, version = "us", "2"
    params = ("rms_norm_forward", "swiglu", "softmax", "rope_qk", "attention_forward", "linear")
    param_names = ("op",)

    def setup(self, op: str) -> None:
        """Patch CuPy so that it reports a GPU, although there is none."""
        self.stack = contextlib.ExitStack()
        if machine.gpus()[0]:
            raise NotImplementedError("there is a GPU: see LaunchCost")
        try:
            import cupy
        except ImportError as error:
            raise NotImplementedError("needs CuPy, and no GPU") from error
        buffer = np.zeros(1 << 20, np.uint8)
        memory = cupy.cuda.UnownedMemory(-(-buffer.ctypes.data // 512) * 512, 1 << 19, buffer, 0)
        lent, device = cupy.cuda.MemoryPointer(memory, 0), SimpleNamespace(compute_capability="90")
        module = SimpleNamespace(get_function=lambda name: not_launched)
        for owner, name, value in (
            (cupy.cuda.runtime, "getDeviceCount", lambda: 1),
            (cupy.cuda.runtime, "deviceGetAttribute", lambda attribute, device: 227 << 10),
            (cupy.cuda, "Device", lambda number=0: device),
            (cupy, "RawModule", lambda code, options: module),
            (cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0)),
            (gemm, "cublas", lambda: Cublas),
            (gemm, "handles", gemm.Handles()),
            (gemm, "_workspace", lambda cuda, device, stream: (lent, 0)),
        ):
            self.stack.enter_context(mock.patch.object(owner, name, value))
        self.stack.enter_context(cupy.cuda.using_allocator(lambda size: lent))
        drawn = draw(OPS[op], Scale(tokens=4, hidden=256)).cast(np.float16)
        placed = drawn.mapped(lambda array: cupy.empty(array.shape, array.dtype))
        arrays = [*placed.arrays.values()][: OPS[op].positional]
        self.call = functools.partial(OPS[op], *arrays, **placed.options)
        for _ in range(3):  # later calls are replayed
            self.call()

    def teardown(self, op: str) -> None:
        """Undo the patches of CuPy."""
        self.stack.close()

    def track_microseconds_of_python(self, op: str) -> float:
        """Return the shortest time of a call over all rounds."""
        return min(timeit.repeat(self.call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


class Cublas:
    """Functions that take any arguments and return 0."""

    cublasGemmEx = ctypes.PyDLL(None).PyErr_Occurred  # noqa: N815 -- cuBLAS's names
    cublasCreate_v2 = cublasDestroy_v2 = cublasSetMathMode = cublasGemmEx  # noqa: N815
    cublasSetStream_v2 = cublasSetWorkspace_v2 = cublasGemmEx  # noqa: N815


def not_launched(grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
    """Take the arguments of a kernel and launch nothing."""


not_launched.shared_size_bytes = 0  # type: ignore[attr-defined]  # as CuPy's kernels have it
