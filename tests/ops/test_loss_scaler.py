"""The kernel behind LossScaler.update; tests/training/test_loss_scaler.py judges the definition."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import LossScaler, Tape, multiply

from ..harness.parity import Case, KernelAlone, emulator


class TestLossScaler(KernelAlone):
    op = "scale_by"
    cases = (
        Case("grows", steps=[1] * 7, interval=3),
        Case("shrinks", steps=[0] * 4, scale=4.0),
        Case("both", steps=[1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], interval=2),
        Case("bounds", steps=[1, 1, 1, 0, 0, 0, 0], interval=1, maximum=40.0, minimum=9.0),
        Case("fixed", steps=[1, 1, 0, 1], interval=1, dynamic=False),
        Case("odd factors", steps=[1, 0, 1, 1], interval=1, growth=1.7, backoff=0.3),
    )

    def prove(self, case: Case, dtype: Any) -> None:
        """Scale and counts equal those of the host after every step, and so do scaled losses."""
        options = {"scale": 16.0} | {n: v for n, v in case.both.items() if n != "steps"}
        plain, loss = LossScaler(**options), np.array([0.25, 3.0], dtype)
        expected = []
        for finite in case.both["steps"]:
            plain.update(bool(finite))
            expected.append((plain.value, plain.good, plain.skipped, *plain.scale(loss).tolist()))
        with emulator():
            scaler = LossScaler(**options)
            scaler.scale(loss)
            assert scaler.device is not None
            for finite, wanted in zip(case.both["steps"], expected, strict=True):
                scaler.update(np.array(bool(finite)))
                actual = scaler.scale(loss).tolist()
                assert (scaler.value, scaler.good, scaler.skipped, *actual) == wanted


def test_a_state_set_by_hand_is_taken_up() -> None:
    with emulator():
        scaler = LossScaler()
        scaler.scale(np.ones(1, np.float32))
        scaler.value, scaler.good = 8.0, 1999
        scaler.update(np.array(True))  # on the host: the state is there now
        assert (scaler.value, scaler.good) == (16.0, 0)
        assert scaler.scale(np.ones(1, np.float32)) == 16


def test_the_gradient_of_a_scaled_loss_is_scaled() -> None:
    with emulator():
        tape = Tape()
        w = tape.watch(np.array([2.0, 3.0], np.float32))
        (actual,) = tape.gradients(
            LossScaler(4.0).scale(multiply(w, w)), [w], np.ones(2, np.float32)
        )
        np.testing.assert_array_equal(actual, [16.0, 24.0])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    import cupy

    scaler = LossScaler(16.0, interval=2)
    for bad in (False, True, False, False):
        gradient = cupy.ones(5, np.float16)
        gradient[0] = np.nan if bad else 1
        scaler.update(scaler.unscale({"w": gradient})[1])
    assert (scaler.value, scaler.good, scaler.skipped) == (16.0, 0, 1)
