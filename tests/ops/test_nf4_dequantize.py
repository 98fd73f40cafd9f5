"""A weight of 4 bits made dense, part by part."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.quantized.nf4_dequantize import double_absmax, nf4_dequantize_, powers_of_two

from ..harness.parity import Case, KernelInPlace, emulator
from ..machines.cuda_on_cpu.traffic import counted

SHAPE = 9, 150


def case(label: str, rows: int, columns: int, *, at: tuple[int, int] = (0, 0), **how: Any) -> Case:
    """Return a part of a matrix, plain or with absmax in 8 bits."""
    shape, block, double = how.pop("shape", SHAPE), how.pop("block", 64), how.pop("double", False)
    blocks = -(-shape[0] * shape[1] // block)
    ends = how.pop("offsets", None)
    arrays: dict[str, Any] = {
        "packed": lambda rng: rng.integers(0, 256, -(-shape[0] * shape[1] // 2), np.uint8),
        "absmax": lambda rng: rng.random(blocks) + 0.5,
    }
    if double:
        arrays["absmax_codes"] = lambda rng: rng.integers(0, 256, blocks, np.uint8)
        arrays["absmax"] = lambda rng: double_absmax(
            rng.random(-(-blocks // 256)).astype(np.float32) + 0.5, 3.0
        )
    if how.get("kind") == "mxfp4":
        arrays["absmax_codes"] = lambda rng: rng.integers(120, 130, blocks, np.uint8)
        arrays["absmax"] = np.clip(powers_of_two(), 2.0**-14, 2.0**14)  # in float16
    if ends is not None:
        arrays["offsets"] = np.array(ends)
    start = at[0] * shape[1] + at[1]
    options = {"columns": shape[1], "start": start, "block": block} | how
    return Case(label, outputs=rows, inputs=columns, arrays=arrays, **options)


WHOLE = {"outputs": 64, "inputs": 64, "bytes": 2048, "blocks": 64, "scales": 258}


class TestNf4Dequantize(KernelInPlace):
    op = "nf4_dequantize_"
    sizes = ({**WHOLE, "inputs": 62, "shift": 1}, {**WHOLE, "groups+1": 5})
    options = tuple({"columns": 64, "kind": kind} for kind in ("nf4", "fp4"))
    apart = ("offsets",)
    cases = (
        case("all", 9, 150),
        case("all of fp4", 9, 150, kind="fp4", double=True),
        case("rows", 3, 150, at=(4, 0), double=True),
        case("columns", 9, 32, at=(0, 64), shape=(9, 128), block=32),
        case("columns of fp4", 9, 64, at=(0, 40), shape=(9, 136), kind="fp4", double=True),
        case("odd", 5, 13, at=(2, 7), shape=(9, 149), block=32, double=True),
        case("even", 5, 12, at=(2, 6), double=True, block=128),
        case("one row", 1, 77, at=(8, 1), block=4096),
        case("the last value", 1, 1, at=(8, 148), shape=(9, 149)),
        case("several blocks of threads", 9, 1030, shape=(9, 1031), double=True, block=32),
        case("long rows", 2, 9000, at=(1, 200), shape=(3, 9200), double=True, block=32),
        case("all of mxfp4", 9, 160, shape=(9, 160), kind="mxfp4", block=32),
        case("columns of mxfp4", 7, 33, at=(2, 31), shape=(9, 160), kind="mxfp4", block=32),
        case("all of q4_0", 9, 160, shape=(9, 160), kind="q4_0", block=32),
        case("columns of q4_0", 7, 33, at=(2, 31), shape=(9, 160), kind="q4_0", block=32),
        case("nothing", 0, 150),
        case("groups", 9, 150, offsets=[0, 2, 2, 5]),
        case(
            "groups of mxfp4", 8, 96, shape=(8, 96), kind="mxfp4", block=32, offsets=[0, 0, 3, 3, 4]
        ),
        case("odd groups", 6, 13, shape=(6, 13), double=True, offsets=[0, 0, 1, 1]),
        case("no rows at all", 6, 64, shape=(6, 64), offsets=[0, 0, 0]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_part_is_that_of_the_definition(dtype: Any, kind: str, double: bool) -> None:
    """To the bit: products and sums of absmax are rounded one by one."""
    rng = np.random.default_rng(0)
    for shape in ((6, 128), (7, 50), (5, 33)):
        w = rng.standard_normal(shape).astype(dtype)
        weight = uc.nf4_quantize(w, kind=kind, double=double, block=32)
        dense = weight.dequantize()
        for rows in ((0, shape[0]), (1, 3), (2, 2)):
            for columns in ((0, shape[1]), (1, 4), (3, 3), (0, 32), (16, 24)):
                top, left = slice(*rows), slice(*columns)
                with emulator():
                    part = weight._dense(top, left, np.dtype(dtype))
                assert part.tobytes() == dense[top, left].tobytes(), (rows, columns)


@pytest.mark.parametrize("name", ["w", "packed", "absmax", "absmax_codes"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_one_array_off_alignment(dtype: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "w": np.zeros((4, 64), dtype),
        "packed": rng.integers(0, 256, 128, np.uint8),
        "absmax": double_absmax(np.ones(1, np.float32), 2.0),
        "absmax_codes": rng.integers(0, 256, 8, np.uint8),
    }
    expected = nf4_dequantize_(**arrays, columns=64, block=32).copy()
    arrays["w"][...] = 0
    held = arrays[name]
    room = np.zeros(held.size + 1, held.dtype)
    arrays[name] = room[1:].reshape(held.shape)
    arrays[name][...] = held
    with emulator():
        actual = nf4_dequantize_(**arrays, columns=64, block=32)
    assert actual.tobytes() == expected.tobytes()


def test_all_that_moves_is_wanted() -> None:
    w, absmax = np.empty((16, 1024), np.float16), np.ones(256, np.float32)
    packed = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    with emulator(), counted() as traffic:
        nf4_dequantize_(w, packed, absmax, columns=1024)
    assert traffic.of("global").efficiency == 1
    assert traffic.of("shared").efficiency == 1
