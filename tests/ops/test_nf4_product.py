"""Few rows times a weight of 4 bits."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.memory.ledger import Ledger
from unsloth_cupy.memory.planned import Planned, PlannedOnHost, recording_in
from unsloth_cupy.ops.quantized import nf4, nf4_dequantize, nf4_product
from unsloth_cupy.ops.quantized.nf4_dequantize import double_absmax, powers_of_two
from unsloth_cupy.ops.quantized.nf4_product import FEW, nf4_product_

from ..harness.parity import Case, KernelInPlace, _compare_kernels, _shifted, emulator
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import gpu


def case(label: str, rows: int, outputs: int, inputs: int, **how: Any) -> Case:
    """Return a product with a matrix, plain or with absmax in 8 bits."""
    block, double = how.get("block", 64), how.pop("double", False)
    blocks = -(-outputs * inputs // block)
    arrays: dict[str, Any] = {
        "packed": lambda rng: rng.integers(0, 256, outputs * inputs // 2, np.uint8),
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
    return Case(label, few=rows, outputs=outputs, inputs=inputs, arrays=arrays, **how)


FORM = {"outputs": 2048, "inputs": 256, "bytes": 2048 * 128, "blocks": 8192, "scales": 8192}
NARROW = {"outputs": 33, "inputs": 96, "bytes": 33 * 48, "blocks": 50, "scales": 258}


class TestNf4Product(KernelInPlace):
    op = "nf4_product_"
    sizes = (
        {**FORM, "few": 4},
        {**FORM, "few": 8},
        {**FORM, "few": 16},
        {**NARROW, "few": 1},
        {**NARROW, "few": 16, "shift": 1},
    )
    options = ({"add": False}, {"add": True, "kind": "fp4"})
    cases = (
        case("one row", 1, 33, 64),
        case("an odd number of rows", 3, 17, 192, double=True, add=True),
        case("a short row", 5, 40, 32, kind="fp4"),
        case("units of 32", 7, 19, 96, block=128, double=True),
        case("blocks of 32", 2, 16, 128, block=32, add=True),
        case("more columns than the warps take at once", 4, 21, 2240, double=True, kind="fp4"),
        case("8 rows", 8, 50, 1088, block=256),
        case("9 rows", 9, 15, 64, add=True),
        case("16 rows", 16, 37, 704, double=True),
        case("one row of mxfp4", 1, 33, 96, block=32, kind="mxfp4"),
        case("rows of mxfp4", 7, 40, 1088, block=32, kind="mxfp4", add=True),
        case("16 rows of mxfp4", 16, 19, 64, block=32, kind="mxfp4"),
        case("two tiles of mxfp4", 6, 2049, 32, block=32, kind="mxfp4"),
        case("one row of q4_0", 1, 33, 96, block=32, kind="q4_0"),
        case("rows of q4_0", 7, 40, 1088, block=32, kind="q4_0", add=True),
        case("two tiles", 6, 2050, 64, add=True),
        case("two tiles of 16 rows", 13, 2048, 96, kind="fp4", double=True),
        case("blocks beyond a row", 2, 3, 64, block=4096),
        case("rows beside each other", 3, 16, 64, gaps=True, add=True),
        case("too many rows", 17, 8, 64),
        case("no whole units", 2, 8, 48),
        case("no rows", 0, 8, 64),
        case("no columns", 2, 8, 0, add=True),
    )


class TestNf4ProductOffAlignment(KernelInPlace):
    """No array begins where one access could read more than one of its values."""

    op = "nf4_product_"
    cases = (
        case("units of 64", 3, 33, 128),
        case("units of 32", 11, 20, 96, double=True, add=True),
    )

    @pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        """As on whole addresses."""
        _compare_kernels(OPS[self.op], case, dtype, self._emulated, _shifted, self.sides)


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_linear_takes_it(dtype: Any, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a few rows, with a bias of either dtype; for more, chunks."""
    rng = np.random.default_rng(0)
    weight = uc.nf4_quantize(rng.standard_normal((40, 96)).astype(dtype), double=double)
    dense, seen = weight.dequantize(np.float64), []

    counting = lambda *a, **more: seen.append(len(a[1])) or nf4_product_(*a, **more)  # noqa: E731
    monkeypatch.setattr(nf4, "nf4_product_", counting)
    for rows in (1, 2, FEW - 1, FEW, FEW + 1):
        x = rng.standard_normal((rows, 1, 96)).astype(dtype)
        for bias in (None, np.ones(40, dtype), np.ones(40, np.float32)):
            with emulator():
                y = uc.linear(x, weight, bias)
            assert y.dtype == dtype
            exact = x.astype(np.float64) @ dense.T + (0 if bias is None else 1)
            plain = uc.linear(x, weight.dequantize(), bias)
            error = np.abs(y - exact).max()
            eps = np.finfo(dtype).eps if dtype.kind == "f" else 2.0**-7
            assert error <= 2 * np.abs(plain - exact).max() + 4 * eps * np.abs(exact).max()
    assert seen == [rows for rows in (1, 2, FEW - 1, FEW) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out", "x", "packed", "absmax", "absmax_codes"])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_one_array_off_alignment(dtype: Any, rows: int, name: str) -> None:
    """Equal bits wherever the arrays lie."""
    rng = np.random.default_rng(0)
    arrays = {
        "out": np.zeros((rows, 20), dtype),
        "x": rng.standard_normal((rows, 64)).astype(dtype),
        "packed": rng.integers(0, 256, 640, np.uint8),
        "absmax": double_absmax(np.ones(1, np.float32), 2.0),
        "absmax_codes": rng.integers(0, 256, 40, np.uint8),
    }
    with emulator():
        expected = nf4_product_(**arrays, block=32).copy()
        arrays["out"][...] = 0
        held = arrays[name]
        room = np.zeros(held.size + 1, held.dtype)
        arrays[name] = room[1:].reshape(held.shape)
        arrays[name][...] = held
        assert nf4_product_(**arrays, block=32).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_into_columns_of_float32(dtype: Any) -> None:
    """What lies between the columns stays."""
    rng = np.random.default_rng(0)
    x, packed = rng.standard_normal((3, 64)).astype(dtype), rng.integers(0, 256, 640, np.uint8)
    room = np.ones((3, 50), np.float32)
    out, absmax = room[:, 7:27], np.ones(20, np.float32)
    expected = nf4_product_(out.copy(), x, packed, absmax, add=True)
    with emulator():
        nf4_product_(out, x, packed, absmax, add=True)
    eps = np.finfo(dtype).eps if dtype.kind == "f" else 2.0**-7
    np.testing.assert_allclose(out, expected, rtol=0, atol=4 * eps * np.abs(expected).max())
    assert (room[:, :7] == 1).all()
    assert (room[:, 27:] == 1).all()


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 512])
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize(
    ("kind", "rest"), [(Planned, 16), (PlannedOnHost, 16)], ids=["gpu", "host"]
)
def test_no_dense_copy_is_planned(kind: Any, rest: int, double: bool, rows: int) -> None:
    """Forward and dx of a layer hold the result and 16 MiB at most; few rows on a GPU nothing."""
    outputs, inputs, chunk = 8192, 8192, 16 * 2**20
    packed, blocks = kind.of((outputs * inputs // 2,), np.uint8), outputs * inputs // 64
    given: dict[str, Any] = {"absmax": kind.of((blocks,), np.float32)}
    if double:
        given = {"absmax_codes": kind.of((blocks,), np.uint8), "absmax_offset": 0.5}
        given["absmax_scale"] = kind.of((blocks // 256,), np.float32)
    weight = uc.Nf4(packed, (outputs, inputs), dtype=BFLOAT16, **given)
    x, dy = kind.of((rows, inputs), BFLOAT16), kind.of((rows, outputs), BFLOAT16)

    def spent(run: Any) -> int:
        ledger = Ledger(1)
        with recording_in(ledger):
            result = run()
        held = [0]
        for number in ledger.changes:
            size = ledger.sizes[number if number >= 0 else ~number]
            held.append(held[-1] + (size if number >= 0 else -size))
        return max(held) - result.nbytes

    few = kind is Planned and rows <= FEW
    limit = 0 if few else chunk
    assert spent(lambda: uc.linear(x, weight)) <= limit
    assert spent(lambda: uc.linear_backward(dy, x, weight, None, wanted={"x"})[0]) <= chunk


@pytest.mark.parametrize("seed", range(1, 5))
def test_random_schedules(seed: int) -> None:
    """Any order of threads and blocks gives equal bits."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((40, 640)), rng.standard_normal((5, 640)).astype(np.float16)

    def bits() -> list[bytes]:
        weight = uc.nf4_quantize(w.astype(np.float16), double=True, block=1024)
        return [weight.packed.tobytes(), weight[3:9].tobytes(), uc.linear(x, weight).tobytes()]

    with emulator():
        expected = bits()
    with emulator(seed=seed):
        assert bits() == expected


def test_a_weight_moves_once_and_no_bank_waits() -> None:
    """Each of four tasks reads x too; an access to absmax or x takes half a sector."""
    rng = np.random.default_rng(0)
    x, out = rng.standard_normal((1, 1024)).astype(np.float16), np.zeros((1, 64), np.float16)
    packed, absmax = rng.integers(0, 256, 32768, np.uint8), np.ones(1024, np.float32)
    with emulator(), counted() as traffic:
        nf4_product_(out, x, packed, absmax)
    assert traffic.of("shared").efficiency == 1
    actual = 32 * traffic.of("global", write=False).moved
    assert actual == packed.nbytes + 2 * absmax.nbytes + 2 * 4 * x.nbytes


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_a_layer_on_a_gpu_starts_kernels_alone(double: bool) -> None:
    """No value is read or sent, so that a graph can hold the call; few rows take one kernel."""
    with gpu("90") as machine:
        machine.strict = False  # while the weight is made
        blocks = 4096 * 64
        inputs: dict[str, Any] = {"absmax": machine.array((blocks,), "float32")}
        if double:
            scale = machine.array((blocks // 256,), "float32")
            inputs = {"absmax_codes": machine.array((blocks,), "uint8"), "absmax_scale": scale}
            inputs["absmax_offset"] = 0.5
        packed = machine.array((4096 * 2048,), "uint8")
        weight = uc.Nf4(packed, (4096, 4096), dtype="float16", **inputs)
        machine.strict = True
        machine.functions.clear()
        for rows, kernels, products in (
            (FEW, ["nf4_product_"], 0),
            (FEW + 1, ["nf4_dequantize_"] * 2, 2),
        ):
            x = machine.array((rows, 4096), "float16")
            for _ in range(3):  # the third is replayed
                machine.launches.clear()
                machine.products.clear()
                uc.linear(x, weight, machine.array((4096,), "float16"))
                assert [launch.kernel for launch in machine.launches] == kernels
                assert len(machine.products) == products
        assert not machine.functions


@pytest.mark.parametrize(("rows", "module"), [(3, nf4_product), (FEW + 1, nf4_dequantize)])
def test_the_third_call_is_replayed(
    rows: int, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, loads = uc.nf4_quantize(np.ones((40, 64), np.float16), double=True), []
    real = module.load
    monkeypatch.setattr(module, "load", lambda *how: loads.append(how) or real(*how))
    with emulator():
        for _ in range(4):
            uc.linear(np.ones((rows, 64), np.float16), weight)
    assert len(loads) == 2
