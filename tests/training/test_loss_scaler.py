import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import LossScaler, Tape, multiply
from unsloth_cupy.errors import ConfigError, DTypeError

from ..conftest import FOLDER
from ..golden.golden import op_cases


def test_equals_torch_step_by_step() -> None:
    (peer,) = (c for c in op_cases(FOLDER / "ops", "training") if c.name == "grad_scaler")
    options = peer.params
    scaler = LossScaler(
        options["init_scale"],
        growth=options["growth_factor"],
        backoff=options["backoff_factor"],
        interval=options["growth_interval"],
    )
    parameter = np.zeros(2, np.float32)
    for step, overflow in enumerate(peer.inputs["overflow"]):
        gradient = scaler.scale(peer.inputs["gradient"].astype(np.float32))
        gradient[0] = np.inf if overflow else gradient[0]
        actual, finite = scaler.unscale({"w": gradient})
        if finite:
            parameter -= actual["w"]
        scaler.update(finite)
        np.testing.assert_array_equal(parameter, peer.outputs["parameter"][step])
        assert scaler.value == peer.outputs["scale"][step]
        assert scaler.good == peer.outputs["growth_tracker"][step]
    assert scaler.skipped == peer.inputs["overflow"].sum()


def test_bounds() -> None:
    scaler = LossScaler(2.0**30, interval=1)
    for _ in range(3):
        scaler.update(True)
    assert scaler.value == 2.0**31
    for _ in range(40):
        scaler.update(False)
    assert scaler.value == 1


def test_a_fixed_scale_counts_what_it_skips() -> None:
    scaler = LossScaler(8.0, dynamic=False, interval=1)
    scaler.update(True)
    scaler.update(False)
    assert (scaler.value, scaler.skipped) == (8.0, 1)


def test_scaling_saves_what_float16_would_lose() -> None:
    """float16 holds nothing below 2**-24: this gradient of 2**-28 is 0 there."""

    def gradient(scaler: LossScaler) -> np.ndarray:
        tape = Tape()
        w = tape.watch(np.ones((), np.float16))
        small = multiply(multiply(w, np.float16(2**-20)), np.float16(2**-8))
        (actual,) = tape.gradients(scaler.scale(small), [w])
        return scaler.unscale({"w": actual})[0]["w"]

    assert gradient(LossScaler(1.0)) == 0
    assert gradient(LossScaler(1024.0)) == 2**-28


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=str)
def test_unscale_leaves_its_arguments(dtype) -> None:
    gradient = np.array([1.0, -3.0], dtype)
    gradient.flags.writeable = False
    actual, finite = LossScaler(4.0).unscale({"w": gradient, "empty": gradient[:0]})
    assert finite is True
    np.testing.assert_array_equal(actual["w"], [0.25, -0.75])
    assert actual["w"].dtype == np.promote_types(dtype, np.float32)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_value_anywhere_is_told(bad: float) -> None:
    gradients = {"a": np.ones(3), "b": np.array([1.0, bad])}
    assert LossScaler().unscale(gradients)[1] is False


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0},
        {"scale": 0.5},
        {"scale": np.nan},
        {"growth": 0.5},
        {"backoff": 0},
        {"backoff": 1.5},
        {"interval": 0},
        {"minimum": 0},
        {"maximum": 0.5},
        {"growth": "2"},
    ],
    ids=str,
)
def test_bad_options_raise(options) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"LossScaler\({name}="):
        LossScaler(**options)


def test_bad_gradients_raise() -> None:
    with pytest.raises(ConfigError, match=r"finite=.*; pass True or False"):
        LossScaler().update(np.ones(2, bool))
    with pytest.raises(DTypeError, match="pass float arrays"):
        LossScaler().unscale({"w": np.ones(2, int)})
    with pytest.raises(DTypeError, match=r"pass \{name: array\}"):
        LossScaler().unscale([np.ones(2)])
