"""Muon, Adafactor, Lion and schedule-free AdamW: the numbers of others, and what all must do."""

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from unsloth_cupy import Adafactor, Lion, Muon, ScheduleFreeAdamW
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases

KINDS: dict[str, Any] = {
    "muon": Muon,
    "adafactor": Adafactor,
    "lion": Lion,
    "schedule_free": ScheduleFreeAdamW,
}
ALL = pytest.mark.parametrize("kind", [*KINDS.values()], ids=[*KINDS])
CASES = [c for c in op_cases(FOLDER / "optimizers", "optimizers") if "rate" not in c.outputs]
OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
SHAPES = {"wide": (6, 9), "tall": (9, 6)}
NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def draw(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def drawn(dtype=np.float32, seed=0):
    return {name: draw(shape, dtype, seed + n) for n, (name, shape) in enumerate(SHAPES.items())}


def all_bytes(optimizer, *others):
    arrays = {f"{n}{name}": a for n, each in enumerate(others) for name, a in each.items()}
    return {n: a.tobytes() for n, a in (optimizer.parameters | optimizer.state() | arrays).items()}


# ---- numbers of others --------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("peer", CASES, ids=lambda peer: peer.name)
def test_every_step_equals_the_peers(peer: OpCase, dtype: type) -> None:
    """Muon: products in float32 or float64; beside them, torch's in bfloat16 are 1e-3 off."""
    starts = {n.removeprefix("start."): a for n, a in peer.inputs.items() if n.startswith("start.")}
    parameters = {name: array.astype(dtype) for name, array in starts.items()}
    kind = next(made for name, made in KINDS.items() if peer.name.startswith(name))
    renamed = {{"warmup_steps": "warmup"}.get(n, n): value for n, value in peer.params.items()}
    optimizer, bfloat16 = kind(parameters, **renamed), 0.0
    own = f"{np.dtype(dtype).name}." if kind is Muon else ""
    for step in range(6):
        optimizer.step({n: peer.inputs[f"grads.{n}"][step].astype(dtype) for n in starts})
        for name, actual in parameters.items():
            expected = peer.outputs[own + name][step]
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=2e-6)
            bfloat16 = max(bfloat16, float(np.abs(actual - peer.outputs[name][step]).max()))
    if kind is Muon:
        assert 1e-4 < bfloat16 < 2e-3
    if kind is ScheduleFreeAdamW:
        with optimizer.averages():
            for name, actual in parameters.items():
                expected = peer.outputs[f"average.{name}"]
                np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=2e-6)


def test_a_step_of_muon_is_orthogonal() -> None:
    """The singular values of a step are near 1, whatever those of its gradient are."""
    gradient = draw((40, 30), np.float64) * np.logspace(0, -2, 30)
    parameters = {"w": np.zeros((40, 30))}
    Muon(parameters, lr=1.0).step({"w": gradient})
    sizes = np.linalg.svd(parameters["w"] / np.sqrt(40 / 30), compute_uv=False)
    assert 0.6 < sizes.min() < sizes.max() < 1.3
    assert np.linalg.cond(gradient) > 100


def test_matrices_that_are_stored_as_one() -> None:
    """Each part is stepped as a matrix of its own, with the adjustment of its own shape."""
    gradient, parts = draw((12, 5), seed=1), (6, 4, 2)
    together = {"qkv": draw((12, 5)), "other": draw((3, 5))}
    alone = dict(zip("qkv", np.split(together["qkv"].copy(), np.cumsum(parts)[:-1]), strict=True))
    Muon(together, lr=0.1, parts={"qkv": parts}).step({"qkv": gradient, "other": draw((3, 5))})
    pieces = np.split(gradient, np.cumsum(parts)[:-1])
    Muon(alone, lr=0.1).step(dict(zip("qkv", pieces, strict=True)))
    np.testing.assert_allclose(together["qkv"], np.concatenate([*alone.values()]), rtol=1e-6)


# ---- what all must do ---------------------------------------------------------------------------
@ALL
@pytest.mark.parametrize("dtype", [*NARROW, np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_a_resumed_run_has_equal_bits(kind: Any, dtype: np.dtype) -> None:
    """Through a safetensors file, as a checkpoint goes; with groups and rates of a schedule."""
    groups = [{"names": "tall", "weight_decay": 0.0, "lr": 0.02}]
    straight, first = drawn(dtype), drawn(dtype)
    whole, half = (kind(each, **OPTIONS, groups=groups) for each in (straight, first))
    for step in range(3):
        half.step(drawn(dtype, 10 + step), lr=0.1 / (step + 1))
    stored = load(save(half.state()))
    again = {name: array.copy() for name, array in first.items()}
    resumed = kind(again, **OPTIONS, groups=groups)
    resumed.load_state(stored)
    for step in range(6):
        whole.step(drawn(dtype, 10 + step), lr=0.1 / (step + 1))
        if step >= 3:
            resumed.step(drawn(dtype, 10 + step), lr=0.1 / (step + 1))
    assert resumed.steps == 6
    assert all_bytes(resumed) == all_bytes(whole)
    with pytest.raises(ConfigError, match="load_state: names differ in"):
        resumed.load_state({n: a for n, a in stored.items() if n != "steps"})
    with pytest.raises(ConfigError, match=r"names differ in \['mean.v'\]"):
        resumed.load_state(stored | {"mean.v": stored["steps"]})


@ALL
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sixteen_bits(kind: Any, dtype: np.dtype) -> None:
    """Parameters are rounded once; copies of float32 masters follow every step."""
    narrow, masters, alone = drawn(dtype), drawn(), drawn()
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    copies = {"wide": np.zeros(SHAPES["wide"], dtype)}
    optimizers = [kind(each, **OPTIONS) for each in (narrow, wide, masters, alone)]
    optimizers[2].keep_copies(copies)
    gradients = drawn(dtype, seed=5)
    as_float32 = {name: array.astype(np.float32) for name, array in gradients.items()}
    for optimizer, given in zip(optimizers, (gradients, as_float32) * 2, strict=True):
        more = {"tall": as_float32["tall"]} if optimizer is optimizers[2] else {}
        optimizer.step(given | more, factor=0.5)
    for name, array in wide.items():
        assert narrow[name].tobytes() == array.astype(dtype).tobytes()
        assert masters[name].tobytes() == alone[name].tobytes()
    assert copies["wide"].tobytes() == masters["wide"].astype(dtype).tobytes()


@ALL
def test_a_skipped_step_changes_no_bit_and_a_factor_scales(kind: Any) -> None:
    one, other = drawn(), drawn()
    first, second = kind(one, **OPTIONS), kind(other, **OPTIONS)
    first.step(drawn(seed=3), factor=np.float32(0.25))
    second.step({n: g * np.float32(0.25) for n, g in drawn(seed=3).items()})
    assert all_bytes(first) == all_bytes(second)
    broken = {n: g * np.nan for n, g in drawn(seed=4).items()}
    first.step(broken, finite=np.bool_(False), factor=np.nan)
    assert all_bytes(first) == all_bytes(second)
    assert first.steps == 1


@ALL
def test_any_layout_and_size_gives_the_same_numbers(kind: Any) -> None:
    """More elements than a block, in both orders; and none."""
    straight, turned = draw((260, 150)), np.array(draw((260, 150)), order="F")
    for parameter in (straight, turned):
        optimizer = kind({"w": parameter, "none": draw((0, 3))}, **OPTIONS)
        for step in range(2):
            optimizer.step({"w": draw((260, 150), seed=step + 1), "none": draw((0, 3))})
    np.testing.assert_allclose(turned, straight, rtol=1e-4, atol=1e-6)
    assert (straight != draw((260, 150))).all()


@ALL
def test_bad_gradients_raise_before_anything_changes(kind: Any) -> None:
    optimizer = kind(drawn(), **OPTIONS)
    before = all_bytes(optimizer)
    for gradients, error, cure in (
        ({"wide": draw((6, 9))}, ConfigError, r"missing \['tall'\]"),
        (drawn() | {"tall": draw((6, 9))}, ShapeError, "gradient of tall has shape"),
        (drawn() | {"tall": draw((9, 6), np.float64)}, DTypeError, "it must be float32"),
    ):
        with pytest.raises(error, match=f"{kind.__name__}.step.*{cure}"):
            optimizer.step(gradients)
    assert all_bytes(optimizer) == before


def test_muon_takes_matrices_alone() -> None:
    for shape in ((3,), (2, 3, 4), ()):
        with pytest.raises(ConfigError, match=r"Muon: b has shape .*; pass only matrices"):
            Muon({"w": draw((3, 4)), "b": draw(shape)})


@pytest.mark.parametrize(
    ("kind", "options", "cure"),
    [
        (Muon, {"momentum": 1.0}, "momentum=1.0; pass a number from 0 to below 1"),
        (Muon, {"adjust": "rms"}, "choose from original, match_rms_adamw|original"),
        (Muon, {"parts": {"wide": (2, 3)}}, r"parts=.*: pass \{name: rows of each"),
        (Muon, {"parts": {"v": (6,)}}, r"parts=.*: pass \{name: rows of each"),
        (Muon, {"parts": "wide"}, r"parts=.*: pass \{name: rows of each"),
        (Adafactor, {"beta2_decay": 0.1}, "beta2_decay=0.1; pass a number, 0 or less"),
        (Adafactor, {"d": 0.0}, "d=0.0; pass a finite number above 0"),
        (Adafactor, {"eps": 1e-3}, "eps=0.001; pass two numbers"),
        (Adafactor, {"eps": (None, None)}, "pass two numbers, 0 or more"),
        (Adafactor, {"eps": (-1, 1e-3)}, "pass two numbers, 0 or more"),
        (Lion, {"betas": (0.9, 1.0)}, "each from 0 to below 1"),
        (ScheduleFreeAdamW, {"betas": (0, 0.9)}, "pass a first one above 0"),
        (ScheduleFreeAdamW, {"warmup": -1}, "warmup=-1; pass a whole number, 0 or more"),
    ],
    ids=str,
)
def test_bad_options_raise(kind: Any, options: dict, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        kind(drawn(), **options)


# ---- averages -----------------------------------------------------------------------------------
@pytest.mark.parametrize("fails", [False, True])
def test_averages_come_and_go_without_a_trace(fails: bool) -> None:
    masters, copies = drawn(), {"wide": np.zeros(SHAPES["wide"], np.float16)}
    optimizer = ScheduleFreeAdamW(masters, lr=0.1, betas=(0.8, 0.9))
    optimizer.keep_copies(copies)
    for seed in range(3):
        optimizer.step(drawn(seed=seed))
    before, points = all_bytes(optimizer, copies), {n: a.copy() for n, a in masters.items()}
    other = ScheduleFreeAdamW(drawn(), betas=(0.8, 0.9), lr=0.1)
    with contextlib.suppress(KeyError), optimizer.averages():
        for name, actual in masters.items():
            base = optimizer.state()[f"base.{name}"]
            expected = (points[name] - (1 - 0.8) * base) / 0.8
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
        assert copies["wide"].tobytes() == masters["wide"].astype(np.float16).tobytes()
        inside = all_bytes(optimizer, copies)
        with optimizer.averages():  # they are the averages already
            assert all_bytes(optimizer, copies) == inside
        assert all_bytes(optimizer, copies) == inside
        for call, given in (("step", drawn()), ("load_state", optimizer.state())):
            with pytest.raises(ConfigError, match=f"{call}: the parameters are the averages now"):
                getattr(optimizer, call)(given)
        other.load_state(optimizer.state())  # goes on from the points
        with pytest.raises(ConfigError, match=r"names differ in \['point.tall'\]"):
            other.load_state({n: a for n, a in optimizer.state().items() if n != "point.tall"})
        if fails:
            raise KeyError
    assert all_bytes(optimizer, copies) == before
    assert inside != before
    assert all_bytes(other) == all_bytes(optimizer)


def test_the_average_is_that_of_all_bases() -> None:
    """Weighted by the square of the largest rate so far; a rate of 0 has no weight."""
    parameters = {"w": draw(5, np.float64)}
    optimizer = ScheduleFreeAdamW(parameters, betas=(0.7, 0.9), warmup=2)
    bases, weights = [], []
    for step, lr in enumerate((0.0, 0.2, 0.1, 0.3)):
        optimizer.step({"w": draw(5, np.float64, step + 1)}, lr=lr)
        bases.append(optimizer.state()["base.w"].copy())
        weights.append((0.0, 0.2, 0.2, 0.3)[step] ** 2)
    with optimizer.averages():
        expected = np.average(bases, axis=0, weights=weights)
        np.testing.assert_allclose(parameters["w"], expected, rtol=1e-12)
