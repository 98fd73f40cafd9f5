"""The counter of sectors and bank conflicts against arithmetic, then on kernels of the library."""

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import rms_norm, softmax
from unsloth_cupy._jit import using

from ..cuda_on_cpu import Emulator
from ..cuda_on_cpu.traffic import Requests, counted

ONE = """#include "common/device.cuh"
KERNEL(32) k(const WORD *in, WORD *out) {
  __shared__ WORD tile[32 * STRIDE];
  tile[threadIdx.x * STRIDE] = in[threadIdx.x * STRIDE + FIRST];
  __syncwarp();
  out[threadIdx.x] = tile[(threadIdx.x ^ 1) * STRIDE];
}
"""


def one_warp(word: str, stride: int, first: int = 0) -> list[Requests]:
    names = {"WORD": word, "STRIDE": stride, "FIRST": first}
    source = "".join(f"#define {name} {value}\n" for name, value in names.items()) + ONE
    size = {"short": 1, "float": 1, "float2": 2, "float4": 4}[word]
    dtype = np.int16 if word == "short" else np.float32
    arrays = np.zeros((32 * stride + first) * size, dtype), np.zeros(32 * size, dtype)
    with counted() as traffic:
        Emulator().compile("k", source)((1,), (32,), arrays, 0)
    return [traffic.of(space, write=write) for space in ("global", "shared") for write in (0, 1)]


@pytest.mark.parametrize(
    ("word", "stride", "first", "sectors", "passes"),
    [
        ("float", 1, 0, 4, 1),
        ("float", 1, 1, 5, 1),  # off alignment: one sector more
        ("float", 2, 0, 8, 2),
        ("float", 32, 0, 32, 32),
        ("float", 33, 0, 32, 1),  # the padded row
        ("float2", 1, 0, 8, 2),
        ("float2", 2, 0, 16, 4),
        ("float4", 1, 0, 16, 4),
        ("float4", 2, 0, 32, 8),
        ("short", 1, 0, 2, 1),  # two lanes share a word
        ("short", 2, 0, 4, 1),
    ],
)
def test_one_warp(word: str, stride: int, first: int, sectors: int, passes: int) -> None:
    read, write, shared_read, shared_write = one_warp(word, stride, first)
    assert (read.requests, read.moved) == (1, sectors)
    assert shared_read.moved == shared_write.moved == passes
    assert write.efficiency == 1
    assert write.bytes == read.bytes == 32 * {"short": 2, "float": 4, "float2": 8}.get(word, 16)


def test_a_broadcast_is_one_pass() -> None:
    source = """#include "common/device.cuh"
KERNEL(32) k(float *out) {
  __shared__ float cell;
  if (threadIdx.x == 0) cell = 1;
  __syncwarp();
  out[threadIdx.x] = cell;
}
"""
    with counted() as traffic:
        Emulator().compile("k", source)((1,), (32,), (np.zeros(32, np.float32),), 0)
    assert traffic.of("shared", write=False).moved == 1
    assert all("unit.cpp:" in line.where for line in traffic)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("hidden", [512, 4096])
def test_rms_norm_moves_nothing_twice(dtype: type, hidden: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, hidden)).astype(dtype)
    weight = np.ones(hidden, dtype)
    with counted() as traffic, using(Emulator()):
        rms_norm(x, weight)
    for line in traffic:
        assert line.efficiency == 1, line
    wide = [line for line in traffic if line.space == "global" and line.bytes >= x.nbytes]
    assert {line.moved / line.requests for line in wide} == {16}  # 16 bytes a lane
    assert traffic.of("global", write=True).moved * 32 <= x.nbytes + 4 * 32  # y, rstd


def test_softmax_has_no_conflicts() -> None:
    with counted() as traffic, using(Emulator()):
        softmax(np.zeros((3, 1000), np.float32))
    assert traffic.of("shared").efficiency == 1
    assert traffic.of("global").efficiency == 1
