import functools
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.ops.linear import _lora_gradients
from unsloth_cupy.ops.linear.lora import lora_linear_backward
from unsloth_cupy.ops.linear.lora_linears import lora_up_backward

from ..harness.parity import Arrays, Case, KernelCompared, _shifted, emulator, within_rule
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import gpu


def drawn(rows: int, outputs: int, rank: int, dtype: Any) -> list[np.ndarray]:
    """Return dy, low and b, rounded to float16 before."""
    rng = np.random.default_rng(0)
    shapes = (rows, outputs), (rows, rank), (outputs, rank)
    return [rng.standard_normal(shape).astype(np.float16).astype(dtype) for shape in shapes]


def gradients(dy: np.ndarray, low: np.ndarray, b: np.ndarray, scale: float = 1.0) -> Arrays:
    x, weight = (np.full_like(dy, 1, shape=(len(array), 1)) for array in (low, b))
    wanted = {"low", "b"}
    *_, dlow, db, _, _ = lora_up_backward(
        dy, x, weight, low, b, None, None, scale=scale, wanted=wanted
    )
    return {"dlow": dlow, "db": db}


class TestLoraGradients(KernelCompared):
    """Both products of dy with the low rank, from one launch."""

    op = "lora_up"
    cases = (
        Case("one tile", rows=5, outputs=7, rank=1, scale=0.5),
        Case("a slab and a bit", rows=33, outputs=264, rank=8),
        Case("odd rows of dy", rows=40, outputs=261, rank=16),
        Case("tiles in turn", rows=130, outputs=40, rank=33),
        Case("off alignment", rows=64, outputs=64, rank=32, shift=1),
        Case("slabs and groups", rows=160, outputs=520, rank=64, scale=2.0, processors=3),
        Case("float32 b", rows=33, outputs=24, rank=4, wide=True),
        Case("beyond the table", rows=9, outputs=8, rank=65, launches=0),
    )

    def prove(self, case: Case, dtype: Any) -> None:
        """Equal to two products, twice with equal bits."""
        processors = case.both.get("processors", 1)
        self.compare(case, dtype, np.asarray, functools.partial(emulator, processors=processors))

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        rows, outputs, rank, scale, shift, launches = (
            case.both.get(name, default)
            for name, default in (
                *(("rows", 0), ("outputs", 0), ("rank", 0)),
                *(("scale", 1.0), ("shift", 0), ("launches", 1)),
            )
        )
        inputs = drawn(rows, outputs, rank, dtype)
        if case.both.get("wide"):
            inputs[2] = inputs[2].astype(np.float32)
        plain = gradients(*inputs, scale)
        exact = gradients(*(array.astype(np.float64) for array in inputs), scale)
        there = [place(_shifted(array) if shift else array) for array in inputs]
        load = mock.patch.object(_lora_gradients, "load", wraps=_lora_gradients.load)
        with running(), load as loaded:
            first, second = gradients(*there, scale), gradients(*there, scale)
        kernels = [call.args[1] for call in loaded.call_args_list]
        assert kernels.count("lora_gradients") == 2 * launches
        within_rule(plain, exact, first)
        for name, array in first.items():
            assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("gap", [0, 5], ids=["beside each other", "apart"])
def test_layers_of_one_x_are_one_launch(gap: int, processors: int) -> None:
    """Each has its columns of one up, from its own columns of dy, and a db."""
    outputs, ranks, scales = (264, 24, 70), (8, 3, 20), [0.5, 1.0, 2.0]
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((2, 40, sum(outputs) + gap)).astype(np.float16)
    stops, lows_at = np.cumsum(outputs), np.cumsum(ranks)
    dys = [whole[..., stop - n : stop] for stop, n in zip(stops, outputs, strict=True)]
    low = rng.standard_normal((2, 40, sum(ranks))).astype(np.float16)
    lows = [low[..., stop - n : stop] for stop, n in zip(lows_at, ranks, strict=True)]
    bs = [rng.standard_normal(n).astype(np.float32) for n in zip(outputs, ranks, strict=True)]
    asked = [True] * 3

    def alike(arrays: list[np.ndarray]) -> Any:
        up, dbs = _lora_gradients.rank_gradients(arrays[:3], arrays[3:6], arrays[6:], scales, asked)
        return {"up": up} | {f"db{i}": db for i, db in enumerate(dbs)}

    inputs = [*dys, *bs, *lows]
    plain, exact = alike(inputs), alike([array.astype(np.float64) for array in inputs])
    load = mock.patch.object(_lora_gradients, "load", wraps=_lora_gradients.load)
    with emulator(processors=processors), load as loaded:
        actual = alike(inputs)
    kernels = [call.args[1] for call in loaded.call_args_list]
    assert kernels == ["lora_gradients", "lora_gradient_sums"]
    within_rule(plain, exact, actual)
    assert [actual[f"db{i}"].dtype for i in range(3)] == [np.dtype("float32")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_dy_is_read_once(dtype: Any) -> None:
    """Beside it low for every slab and b for every group, and sums of two slabs and two groups."""
    dy, low, b = drawn(96, 1024 // dtype.itemsize, 16, dtype)
    with counted() as traffic, emulator(processors=2):
        gradients(dy, low, b)
    sums = 2 * 4 * (low.size + b.size)
    read, written = (traffic.of("global", write=write) for write in (False, True))
    assert read.bytes == dy.nbytes + 2 * low.nbytes + 2 * b.nbytes + sums
    assert read.efficiency == 1
    assert written.bytes == sums + low.nbytes + b.nbytes


@pytest.mark.slow
def test_shared_memory_has_no_conflicts() -> None:
    dy, low, b = drawn(64, 256, 64, ml_dtypes.bfloat16)
    with counted() as traffic, emulator():
        gradients(dy, low, b)
    for write in (False, True):
        assert traffic.of("shared", write=write).efficiency == 1


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
def test_nothing_to_read(shape: tuple[int, int, int]) -> None:
    dy, low, b = drawn(*shape, np.float32)
    with emulator():
        actual = gradients(dy, low, b)
    assert [array.shape for array in actual.values()] == [low.shape, b.shape]
    assert not any(array.any() for array in actual.values())


@pytest.mark.parametrize(("whole", "part"), [(24, 17), (24, 16), (26, 16)])
def test_a_gap_between_rows(whole: int, part: int) -> None:
    """Columns of a wider array, as gradients of gate and up are, are read where they lie."""
    dy, low, b = drawn(12, whole, 3, np.float32)
    copied = mock.patch.object(_lora_gradients, "contiguous", wraps=_lora_gradients.contiguous)
    with emulator():
        expected = gradients(dy[:, :part].copy(), low, b[:part].copy())
        with copied as copies:
            actual = gradients(dy[:, :part], low, b[:part].copy())
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name])
    assert [call.args[0].shape for call in copies.mock_calls] == [(part, 3)], "b alone"


def test_one_launch_takes_the_place_of_two_products() -> None:
    """Where somebody wants both; for one alone there is nothing to share."""
    with gpu() as machine:
        dy, x, weight, a, b, low = (
            machine.array(shape, np.float16)
            for shape in ((64, 96), (64, 8), (96, 8), (4, 8), (96, 4), (64, 4))
        )
        inputs = dy, None, x, weight, a, b, None, None, low
        lora_linear_backward(*inputs, wanted={"b"})
        assert "lora_gradients" in [launch.kernel for launch in machine.launches]
        assert machine.products == []
        machine.launches.clear()
        lora_linear_backward(*inputs, wanted={"a"})
        assert machine.launches == []
        assert len(machine.products) == 2


def test_sums_fit_into_l2() -> None:
    """Twice the rows, and the float32 sums of up are more than a second pass over dy is worth."""
    with gpu() as machine:
        for rows, products in ((8192, 0), (16384, 2)):
            machine.products.clear()
            shapes = (rows, 4096), (4096, 64), (rows, 64)
            arrays = ([machine.array(shape, np.float16)] for shape in shapes)
            _lora_gradients.rank_gradients(*arrays, [1.0], [True])
            assert len(machine.products) == products
