"""The counter of sectors and bank conflicts against arithmetic, then on kernels of the library."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import (
    accumulate_,
    apply_rotary_embedding,
    cast,
    relu2,
    relu2_backward,
    relu2_backward_,
    rms_norm,
    rope_qk,
    rope_qk_,
    rope_tables,
    softmax,
    softmax_backward,
)
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import using

from ...machines.cuda_on_cpu import Emulator
from ...machines.cuda_on_cpu.traffic import Requests, counted

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
    both = (False, True)
    return [traffic.of(space, write=write) for space in ("global", "shared") for write in both]


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
    assert (read.requests, read.moved, read.per_request) == (1, sectors, sectors)
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
def test_rms_norm_moves_nothing_twice(dtype: Any, hidden: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, hidden)).astype(dtype)
    weight = np.ones(hidden, dtype)
    with counted() as traffic, using(Emulator()):
        rms_norm(x, weight)
    for line in traffic:
        assert line.efficiency == 1, line
    wide = [line for line in traffic if line.space == "global" and line.bytes >= x.nbytes]
    assert {line.per_request for line in wide} == {16}  # sectors: 16 bytes a lane
    assert traffic.of("global", write=True).moved * 32 <= x.nbytes + 4 * 32  # y, rstd


@pytest.mark.slow
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("rows", "hidden"), [(64, 128), (5, 4096), (2, 16384)])
def test_norms_move_what_their_formula_says(op: str, rows: int, hidden: int) -> None:
    """Rows that share a warp, a block a row, two blocks a row: with everything that is optional."""
    size, centred = 2, op == "layer_norm"
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((rows, hidden)).astype(ml_dtypes.bfloat16)  # noqa: E731
    x, residual, dy, dh = draw(), draw(), draw(), draw()
    weight, bias = np.ones((2, hidden), ml_dtypes.bfloat16)
    forward, backward = OPS[f"{op}_forward"], OPS[f"{op}_backward"]
    with using(Emulator()):
        with counted() as traffic:
            _, h, *statistics = forward(x, weight, residual=residual, bias=bias)
        inputs = {"residual": residual, "bias": bias, "weight": weight}
        wired = inputs | {"dy": dy, "dh": dh, "h": h, "rstd": statistics[-1]}
        wired |= {"mean": statistics[0]} if centred else {}
        with counted() as back:
            backward.call([wired[name] for name in backward.names], {})
    own, statistics_of = rows * hidden * size, 4 * rows * (1 + centred)
    assert traffic.of("global", write=True).bytes == 2 * own + statistics_of
    parameters = 2 * own // max(1, 512 // hidden)  # out of L1, once for all rows of a warp
    assert traffic.of("global", write=False).bytes == 2 * own + parameters
    # sums of dweight and dbias: a row of each from every block, and both results from their sum
    written = back.of("global", write=True).bytes - own - 2 * size * hidden
    blocks = written // (2 * 4 * hidden)
    assert 1 <= blocks <= 4
    assert written == blocks * 2 * 4 * hidden
    read = back.of("global", write=False).bytes - written
    most = statistics_of * max(1, hidden // 256)  # every warp reads the statistics of its rows
    parameters = 2 * own // max(1, 256 // hidden)  # weight, twice; half as many rows share a warp
    assert 0 <= read - 3 * own - parameters <= most
    for line in (*traffic, *back):
        last = line.write and line.bytes == written  # 32 bytes a lane, in two stores
        assert line.efficiency == 1 or (last and line.efficiency == 0.5), line


def test_softmax_has_no_conflicts() -> None:
    with counted() as traffic, using(Emulator()):
        softmax(np.zeros((3, 1000), np.float32))
    assert traffic.of("shared").efficiency == 1
    assert traffic.of("global").efficiency == 1


def global_bytes(call: Callable[[], Any], **machine: Any) -> int:
    """Return the bytes that the requests of a call asked for; none may move more than asked."""
    with counted() as traffic, using(Emulator(**machine)):
        call()
    for line in traffic:
        assert line.space != "global" or line.efficiency == 1, line
    return traffic.of("global").bytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("columns", "clusters", "reads"), [(16384, False, 1), (131072, True, 1), (131072, False, 2)]
)
def test_softmax_moves_what_its_header_says(
    dtype: Any, columns: int, clusters: bool, reads: int
) -> None:
    """A long row is read once, by as many blocks as hold it: twice where they form no cluster."""
    x = np.zeros((1, columns), dtype)
    assert global_bytes(lambda: softmax(x), clusters=clusters) == (reads + 1) * x.nbytes
    back = global_bytes(lambda: softmax_backward(x, x), clusters=clusters)
    assert back == (2 * reads + 1) * x.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rope_moves_what_its_header_says(dtype: Any) -> None:
    """q and k once each way, the row of each table and the position once a token."""
    rng, tokens = np.random.default_rng(0), 16
    q, k = (rng.standard_normal((1, tokens, heads, 128)).astype(dtype) for heads in (4, 2))
    tables = [table.astype(dtype) for table in rope_tables(tokens, 128)]
    positions = np.arange(tokens)
    heads, numbers = 2 * (q.nbytes + k.nbytes), positions.nbytes
    expected = heads + sum(table.nbytes for table in tables) + numbers
    assert global_bytes(lambda: rope_qk(q, k, *tables, positions)) == expected
    assert global_bytes(lambda: rope_qk_(q, k, *tables, positions)) == expected
    expected = heads + 2 * numbers  # two warps work out the 64 angles of a token
    assert global_bytes(lambda: apply_rotary_embedding(q, k, positions)) == expected


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gates_move_what_their_headers_say(name: str) -> None:
    """Three arrays forward, five backward, in place too."""
    gate, up, dy = np.ones((3, 2, 512), np.float16)
    forward, backward, over = (OPS[name + part] for part in ("", "_backward", "_backward_over_"))
    assert global_bytes(lambda: forward(gate, up)) == 3 * gate.nbytes
    assert global_bytes(lambda: backward(dy, gate, up)) == 5 * gate.nbytes
    assert global_bytes(lambda: over(dy, gate.copy(), up.copy())) == 5 * gate.nbytes


def test_relu2_moves_what_its_header_says() -> None:
    x = np.ones((2, 512), np.float16)
    assert global_bytes(lambda: relu2(x)) == 2 * x.nbytes
    assert global_bytes(lambda: relu2_backward(x, x)) == 3 * x.nbytes
    assert global_bytes(lambda: relu2_backward_(x, x.copy())) == 3 * x.nbytes


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_casts_move_what_their_header_says(dtype: Any) -> None:
    x, total = np.ones(2048, dtype), np.ones(2048, np.float32)
    for to in KERNEL_DTYPES:
        moved = 0 if to == dtype else x.nbytes + 2048 * to.itemsize
        assert global_bytes(lambda to=to: cast(x, to)) == moved
    assert global_bytes(lambda: accumulate_(total, x)) == x.nbytes + 2 * total.nbytes
