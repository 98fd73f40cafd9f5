import contextlib

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import AdamW, Tape, add, clip_gradients, measure_gradients, multiply, rms_norm
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..machines.stand_in import gpu

PEERS = [c for c in op_cases(FOLDER / "ops", "training") if c.name.startswith("clip_norm")]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_equals_torch(peer: OpCase) -> None:
    gradients = {name: array.copy() for name, array in peer.inputs.items()}
    norm = clip_gradients(gradients, peer.params["max_norm"])
    assert type(norm) is float
    assert norm == pytest.approx(peer.outputs["total_norm"], rel=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, peer.outputs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=str)
def test_scales_in_place_and_rounds_once(dtype) -> None:
    start = np.random.default_rng(0).standard_normal((50, 3000)).astype(dtype)
    gradients = {"strided": start[:, ::-1], "empty": start[:0], "scalar": np.array(2, dtype)}
    before = {name: array.astype(np.float64) for name, array in gradients.items()}
    norm = clip_gradients(gradients, 1.5)
    exact = np.sqrt(sum((array**2).sum() for array in before.values()))
    assert norm == pytest.approx(exact, rel=1e-12)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, array in gradients.items():
        np.testing.assert_allclose(
            array.astype(np.float64), before[name] * 1.5 / exact, rtol=2 * eps, atol=2**-24
        )
    assert gradients["strided"].base is start


def test_squares_beyond_float32_are_summed() -> None:
    gradients = {"w": np.full(4, 1e30, np.float32)}
    assert clip_gradients(gradients, 2.0) == pytest.approx(2e30)
    np.testing.assert_allclose(gradients["w"], 1, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_norm_that_is_not_finite_leaves_the_gradients(bad: float) -> None:
    gradients = {"a": np.array([3.0, bad]), "b": np.array([4.0])}
    assert not np.isfinite(clip_gradients(gradients, 1.0))
    assert gradients["a"][0] == 3
    assert gradients["b"][0] == 4


def test_no_gradients_have_norm_0() -> None:
    assert clip_gradients({}, 1.0) == 0.0
    assert clip_gradients({"w": np.zeros(3)}, 1.0) == 0.0


def test_an_infinite_limit_measures() -> None:
    gradients = {"w": np.array([3.0, 4.0])}
    assert clip_gradients(gradients, np.inf) == 5.0
    assert gradients["w"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("limit", [0.0, -1.0, np.nan, None, "1", True])
def test_bad_limit_raises(limit: object) -> None:
    with pytest.raises(ConfigError, match="pass a number above 0"):
        clip_gradients({"w": np.ones(3)}, limit)


def test_bad_gradients_raise_before_anything_changes() -> None:
    good, frozen = np.array([3.0, 4.0]), np.ones(3)
    frozen.flags.writeable = False
    for bad, error, cure in (
        (frozen, ConfigError, "b is read-only; pass a copy"),
        (np.arange(3), DTypeError, "b is int64; pass float arrays"),
        ([1.0], DTypeError, "b is not an array but list"),
        (None, DTypeError, "b is not an array but NoneType"),
    ):
        with pytest.raises(error, match=cure):
            clip_gradients({"a": good, "b": bad}, 1.0)
        assert good.tolist() == [3.0, 4.0]


def test_one_array_has_one_name() -> None:
    good = np.array([3.0, 4.0])
    with pytest.raises(ConfigError, match="a and c are one array, which would be changed twice"):
        clip_gradients({"a": good, "b": good.copy(), "c": good}, 1.0)
    with pytest.raises(ConfigError, match="AdamW: a and c are one array"):
        AdamW({"a": good, "b": good.copy(), "c": good})
    assert good.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "device"])
def test_arrays_that_change_share_no_memory(on_gpu: bool) -> None:
    """An element would be changed twice; arrays side by side, or in gaps of another, are apart."""
    with gpu() if on_gpu else contextlib.nullcontext() as machine:
        there = machine.array((4, 6), "float32") if on_gpu else np.zeros((4, 6), np.float32)
        apart = machine.array((3,), "float32") if on_gpu else np.zeros(3, np.float32)
        if on_gpu:
            machine.strict = False
        for one, other in (
            (there[:2], there[1:]),
            (there[1:], there[:2]),
            (there, there.T),
            (there[:, ::2], there[:, 2:3]),
            (there[::-1], there[3]),
            (there[2:], there.reshape(-1)[-1:]),
        ):
            with pytest.raises(ConfigError, match=r"a and c share memory, .* twice; pass a copy"):
                AdamW({"a": one, "b": apart, "c": other})
            with pytest.raises(ConfigError, match="clip_gradients: a and c share memory"):
                clip_gradients({"a": one, "b": apart, "c": other}, 1.0)
        for one, other in (
            (there[:2], there[2:]),
            (there[:, ::2], there[:, 1::2]),
            (there[:, :2], there[:, 2:]),
            (there[::-2], there[::2]),
            (there[:0], there),
        ):
            AdamW({"a": one, "b": apart, "c": other})
        optimizer = AdamW({"a": there})
        halves = there.reshape(-1).view(np.float16).reshape(2, 4, 6)
        with pytest.raises(ConfigError, match="the copy of a and a share memory"):
            optimizer.keep_copies({"a": halves[1]})


def test_an_array_that_changes_has_each_element_once() -> None:
    for shape, steps in (((3, 2), (0, 4)), ((3, 2), (4, 4))):
        window = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), shape, steps)
        with pytest.raises(ConfigError, match="AdamW: elements of a share memory"):
            AdamW({"a": window})


def test_gradients_come_by_name() -> None:
    with pytest.raises(ConfigError, match=r"scaler=2\.0\): pass a LossScaler"):
        measure_gradients({}, scaler=2.0)
    with pytest.raises(DTypeError, match=r"clip_gradients: pass \{name: array\}, not list"):
        clip_gradients([np.ones(3)], 1.0)


def test_gradients_of_torch_raise() -> None:
    torch = pytest.importorskip("torch", reason="torch is the peer")
    with pytest.raises(FrameworkError, match="comes from torch; pass NumPy or CuPy"):
        clip_gradients({"w": torch.ones(3)}, 1.0)


def test_accumulating_n_rows_of_1_equals_1_batch_of_n() -> None:
    """The loss is a sum over rows: gradients of micro-batches add up to those of the batch."""
    rng = np.random.default_rng(0)
    weight, shift = (rng.standard_normal(16).astype(np.float32) for _ in range(2))
    batch = rng.standard_normal((8, 5, 16)).astype(np.float32)

    def gradients(rows: np.ndarray) -> list[np.ndarray]:
        tape = Tape()
        w, s = tape.watch(weight), tape.watch(shift)
        h = rms_norm(rows, w, bias=s)
        return tape.gradients(multiply(add(h, rows), h), [w, s], np.ones_like(rows) / 8)

    whole = gradients(batch)
    parts = [gradients(batch[row : row + 1]) for row in range(8)]
    for one, several in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.abs(sum(several) - one).max() <= 1e-6 * np.abs(one).max()
