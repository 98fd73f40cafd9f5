"""The kernels that see all gradients; tests/training/test_gradients.py judges the definition."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, LossScaler, clip_gradients, measure_gradients
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.ops.common import dynamic_codes, many
from unsloth_cupy.ops.optimizers import adamw_step
from unsloth_cupy.ops.optimizers import gradients as launches
from unsloth_cupy.training import loss_scaler

from ..harness.parity import EPS, Case, KernelCompared, emulator
from ..machines import stand_in
from ..machines.cuda_on_cpu.traffic import counted

# several chunks for a block, tails in a span and in an access, one value, none
SHAPES = {"many": (11, 6200), "span": (1100,), "few": (3,), "one": (), "none": (0, 4)}


def drawn(case: Case, dtype: Any, place: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
    """Return gradients; of three dtypes where the case is mixed."""
    rng, both = np.random.default_rng(0), case.both
    arrays = {}
    for index, (name, shape) in enumerate(both.get("shapes", SHAPES).items()):
        kind = KERNEL_DTYPES[index % 3] if both.get("mixed") else dtype
        size = both.get("size", 1.0) ** (0.1 if kind == np.float16 else 1)  # what it holds
        values = (rng.standard_normal(shape) * size).astype(kind)
        if both.get("offset"):
            room = np.empty(values.size + 1, kind)
            room[1:] = values.ravel()
            values = room[1:].reshape(shape)
        arrays[name] = place(values)
    return arrays


def host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array)


class TestGradients(KernelCompared):
    op = "adamw_"
    cases = (
        Case("many"),
        Case("three dtypes", mixed=True),
        Case("off alignment", offset=True, shapes={"a": (700,), "b": ()}),
        Case("large", size=1e30, shapes={"a": (700,)}),  # squares beyond float32
        Case("small", size=1e-30, shapes={"a": (700,)}),
    )

    def prove(self, case: Case, dtype: Any) -> None:
        """Norm, factor, scaled and divided gradients equal those of the definition."""
        super().prove(case, dtype)
        gradients = drawn(case, dtype)
        next(iter(gradients.values())).reshape(-1)[-1] = np.inf
        before = {name: array.tobytes() for name, array in gradients.items()}
        with emulator():
            assert clip_gradients(gradients, 1.0) == np.inf
        assert {name: array.tobytes() for name, array in gradients.items()} == before

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        wide = {n: g.astype(np.float64) for n, g in drawn(case, dtype).items()}
        norm = math.sqrt(sum((g**2).sum() for g in wide.values()))
        for limit in (norm * 0.37, norm * 2):
            with running():
                clipped, kept = drawn(case, dtype, place), drawn(case, dtype, place)
                actual = clip_gradients(clipped, limit)
                scaler = LossScaler(1024.0)
                measure = measure_gradients(kept, limit / 1024, scaler=scaler)
                divided, finite = scaler.unscale(kept)
                assert actual.dtype == np.float64
                assert float(host(actual)) == pytest.approx(norm, rel=1e-6)
                assert float(host(measure.norm)) == pytest.approx(norm / 1024, rel=1e-6)
                factor = min(1, limit / norm)
                assert float(host(measure.factor)) == pytest.approx(factor / 1024, rel=1e-6)
                assert host(finite)
                assert host(measure.finite)
                again = [host(a) for a in (clip_gradients(kept, limit), *kept.values())]
            for one, other in zip([actual, *clipped.values()], again, strict=True):
                assert host(one).tobytes() == other.tobytes()  # two runs, equal bits
            for name, exact in wide.items():
                array = host(clipped[name])
                least = 2.0**-24 if array.dtype == np.float16 else 0
                eps = 2 * EPS[array.dtype.name]
                np.testing.assert_allclose(
                    array.astype(np.float64), exact * factor, rtol=eps, atol=least
                )
                array = host(divided[name])
                assert array.dtype == np.float32
                np.testing.assert_allclose(array, exact / 1024, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 4095, 8191, 8192, 68_199])
def test_a_bad_value_anywhere_is_told_and_nothing_is_scaled(bad: float, at: int) -> None:
    with emulator():
        gradients = drawn(Case("", shapes={"a": (68_200,), "b": (5,)}), np.float16)
        gradients["a"][at] = bad
        before = {name: array.copy() for name, array in gradients.items()}
        scaler = LossScaler()
        _, finite = scaler.unscale(gradients)
        measure = measure_gradients(gradients, 1.0, scaler=scaler)
        assert not finite
        assert not measure.finite
        assert not np.isfinite(clip_gradients(gradients, 1.0))
        for name, array in gradients.items():
            assert array.tobytes() == before[name].tobytes()


def test_a_whole_step_skips_and_grows_as_on_the_host() -> None:
    """Overflow, then good steps: parameters, scale and counts of both ways are the same."""

    def run() -> tuple[list[Any], dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        parameters = {"w": rng.standard_normal(5000).astype(np.float32)}
        optimizer, scaler = AdamW(parameters, state_bits=8), LossScaler(16.0, interval=2)
        numbers = []
        for step in range(7):
            loss = scaler.scale(np.array([0.5], np.float32))
            gradients = {"w": loss * rng.standard_normal(5000).astype(np.float16)}
            if step in (1, 4):
                gradients["w"][step] = np.inf
            actual = measure_gradients(gradients, 3.0, scaler=scaler)
            optimizer.step(gradients, finite=actual.finite, factor=actual.factor)
            scaler.update(actual.finite)
            numbers.append((scaler.value, scaler.good, scaler.skipped, optimizer.steps))
        return numbers, parameters

    numbers, parameters = run()
    with emulator():
        there, actual = run()
    assert there == numbers
    assert [value for value, *_ in numbers] == [16, 8, 8, 16, 8, 8, 16]
    assert numbers[-1][2:] == (2, 5)
    np.testing.assert_allclose(actual["w"], parameters["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32], ids=str)
def test_moves_what_the_header_says_and_nothing_twice(dtype: Any) -> None:
    elements = 4 * 8192
    gradients = drawn(Case("", shapes={"a": (elements,)}), dtype)
    size = gradients["a"].itemsize
    for call, traffic_of in (
        (lambda: measure_gradients(gradients, 1.0), size),
        (lambda: LossScaler().unscale(gradients), size + 4),
        (lambda: clip_gradients(gradients, 1.0), 3 * size),
    ):
        with emulator(), counted() as traffic:
            call()
        big = [r for r in traffic if r.space == "global" and r.bytes >= elements]
        assert sum(line.bytes for line in big) == elements * traffic_of
        assert all(line.efficiency == 1 for line in big), big


def test_a_step_is_a_few_launches_and_no_word_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in.gpu() as machine:
        sent: list[Any] = []
        send = lambda array, like: sent.append(array) or machine.place(array)  # noqa: E731
        for module in (adamw_step, dynamic_codes, many, loss_scaler):
            monkeypatch.setattr(module, "to_device_of", send)
        monkeypatch.setattr(launches, "tables", {})
        make = machine.array
        parameters = {f"w{i}": make((65 + i, 128), np.float32) for i in range(40)}
        copies = {name: make(array.shape, BFLOAT16) for name, array in parameters.items()}
        gradients = {name: make(array.shape, BFLOAT16) for name, array in parameters.items()}
        optimizer, scaler = AdamW(parameters), LossScaler()
        optimizer.keep_copies(copies)
        before = 0
        for _ in range(3):
            before = len(sent)
            machine.launches.clear()
            scaler.scale(make((), np.float32))
            norm, finite, factor = measure_gradients(gradients, 1.0, scaler=scaler)
            optimizer.step(gradients, lr=1e-3, finite=finite, factor=factor)
            scaler.update(finite)
            clip_gradients(gradients, 1.0)
            scaler.unscale(gradients)
            assert norm.shape == ()
        assert [launch.kernel for launch in machine.launches] == [
            *("measure", "adamw_step", "loss_scaler"),
            *("measure", "rescale", "measure"),
        ]
        assert len(sent) <= before + 2  # the table of new arrays, in two parts
        with pytest.raises(stand_in.HostReadError):
            scaler.value  # noqa: B018 -- what its docstring says
