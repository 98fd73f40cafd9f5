"""Dtypes by policy, and a float16 step beside a float32 one."""

import contextlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    CheckpointConfig,
    LossScaler,
    MixedPrecisionConfig,
    Tape,
    TrainingConfig,
    attention,
    cross_entropy,
    linear,
    measure_gradients,
    models,
    rms_norm,
)
from unsloth_cupy.bench.cases import forward_ops
from unsloth_cupy.errors import ConfigError, DTypeError
from unsloth_cupy.training.precision import Autocast, autocast_ops, compute_copies

from ..harness.parity import emulator

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_ops_that_are_read_as_numbers_are_wide() -> None:
    """All are cast but casts, backward ops, and those that change their arguments."""
    own = re.compile(r".*_|cast_to_.*|.*_gradients")
    named = {n.removesuffix("_forward") for n in forward_ops() if not own.fullmatch(n)}
    known = autocast_ops()
    assert named <= known.keys()
    wide = {name for name, op in known.items() if op.facts.get("autocast") == "float32"}
    assert wide == {"softmax", "cross_entropy", "scale_by", "dora_factor"} | {
        *("sum", "mean", "divide", "power", "exp", "log"),
        *("route", "balance_loss", "router_z_loss"),
    }


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_ops_get_operands_by_policy(name: str) -> None:
    dtype, cast = np.dtype(getattr(ml_dtypes, name, name)), Autocast(name)
    x, weight, gain = draw(2, 3, 8), draw(8, 8), draw(8)
    tape = Tape()
    w, g = tape.watch(weight), tape.watch(gain)
    y = cast(linear, x, w)
    assert y.dtype == dtype
    z = cast(rms_norm, y, g, eps=1e-5)
    assert z.dtype == dtype
    heads = z.reshape(2, 3, 2, 4)
    assert cast(attention, heads, k=heads, v=heads, causal=True).dtype == dtype
    loss = cast(cross_entropy, z.reshape(6, 8), np.arange(6))
    assert loss.dtype == np.float32
    dw, dg = tape.gradients(loss, [w, g], np.ones(6, np.float32))
    assert (dw.dtype, dg.dtype) == (np.float32, np.float32)  # of the masters
    plain = Tape()
    w, g = plain.watch(weight), plain.watch(gain)
    exact = cross_entropy(rms_norm(linear(x, w), g, eps=1e-5).reshape(6, 8), np.arange(6))
    for actual, expected in zip(
        (dw, dg), plain.gradients(exact, [w, g], np.ones(6, np.float32)), strict=True
    ):
        limit = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[name]
        assert np.linalg.norm(actual - expected) <= limit * np.linalg.norm(expected)


def test_wide_ops_get_wide_operands() -> None:
    loss = Autocast("float16")(cross_entropy, draw(3, 5, dtype=np.float16), np.arange(3))
    np.testing.assert_array_equal(
        loss, cross_entropy(draw(3, 5, dtype=np.float16).astype(np.float32), np.arange(3))
    )


def test_what_is_no_op_is_not_cast() -> None:
    with pytest.raises(ConfigError, match="Autocast: len is not an op; choose from add, "):
        Autocast("float16")(len, [])


def step(dtype: str, steps: int = 1) -> tuple[list[float], dict[str, np.ndarray], LossScaler]:
    """Train a small Llama; return loss and norm of the last step, the masters, the scaler."""
    config = MixedPrecisionConfig(dtype)
    model = models.create(LLAMA, seed=0, dtype="float32", device=None)
    masters, scaler = dict(model.parameters), config.scaler()
    optimizer, copies = AdamW(masters, lr=1e-3, eps=1e-5), compute_copies(masters, dtype)
    optimizer.keep_copies(copies)
    model.parameters = masters | copies
    tokens = np.random.default_rng(1).integers(0, 96, (4, 32))
    for _ in range(steps):
        loss, gradients = model.loss_and_gradients(tokens, tokens, scaler=scaler)
        norm, finite, factor = measure_gradients(gradients, 1.0, scaler=scaler)
        optimizer.step(gradients, finite=finite, factor=factor)
        scaler.update(finite)
    return [float(loss), float(norm)], masters, scaler


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_a_whole_step_is_near_float32(dtype: str, limit: float) -> None:
    """Loss, norm of the gradients, and every parameter after the step; 8 bits of a bfloat16."""
    (numbers, masters, scaler), (wide, exact, _) = step(dtype), step("float32")
    np.testing.assert_allclose(numbers, wide, rtol=limit)
    for name, parameter in masters.items():
        assert parameter.dtype == np.float32
        error = np.linalg.norm(parameter - exact[name])
        assert error <= limit * np.linalg.norm(exact[name]), name
    assert scaler.skipped == 0


def test_scaling_keeps_the_gradients_that_float16_would_lose() -> None:
    """With logits of a loss divided by 10^6, all but the largest gradients lie below 2^-24."""
    masters = {"w": draw(8, 8) * np.float32(1e-2)}
    x = draw(4, 8, dtype=np.float16)
    norms = {}
    for scale in (1.0, 65536.0):
        scaler, tape = LossScaler(scale), Tape()
        w = tape.watch(masters["w"].astype(np.float16))
        loss = cross_entropy(linear(x, w), np.arange(4))
        seed = scaler.scale(np.full(4, 1e-8, np.float32))
        gradients = {"w": tape.gradients(loss, [w], seed)[0]}
        norms[scale] = float(measure_gradients(gradients, scaler=scaler).norm)
    assert norms[1.0] == 0
    assert norms[65536.0] > 1e-9


@pytest.mark.slow
def test_training_goes_on_after_an_overflow() -> None:
    """A scale too large for float16 is halved until steps are finite; none of them is lost."""
    config = MixedPrecisionConfig("float16", loss_scale=2.0**31)
    model = models.create(LLAMA, seed=0, dtype="float32", device=None)
    masters, scaler = dict(model.parameters), config.scaler()
    optimizer, copies = AdamW(masters, lr=1e-3), compute_copies(masters, "float16")
    optimizer.keep_copies(copies)
    model.parameters = masters | copies
    tokens = np.random.default_rng(1).integers(0, 96, (2, 16))
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(24):
            before = {name: array.tobytes() for name, array in masters.items()}
            skipped = scaler.skipped
            _, gradients = model.loss_and_gradients(tokens, tokens, scaler=scaler)
            _, finite, factor = measure_gradients(gradients, 1.0, scaler=scaler)
            optimizer.step(gradients, finite=finite, factor=factor)
            scaler.update(finite)
            same = {name: array.tobytes() for name, array in masters.items()} == before
            assert same == (scaler.skipped > skipped)
    assert 0 < scaler.skipped < 24
    assert optimizer.steps == 24 - scaler.skipped
    assert scaler.value == 2.0 ** (31 - scaler.skipped)


def test_copies_are_of_matrices_alone() -> None:
    masters = {"w": draw(3, 4), "norm": draw(4)}
    copies = compute_copies(masters, "bfloat16")
    assert {name: array.dtype for name, array in copies.items()} == {"w": ml_dtypes.bfloat16}
    assert compute_copies(masters, "float32") == {}
    with pytest.raises(DTypeError, match="w is float16; masters must be float32"):
        compute_copies({"w": draw(3, 4, dtype=np.float16)}, "float16")
    with pytest.raises(ConfigError, match="choose from float16, bfloat16, float32"):
        compute_copies(masters, "int8")


@pytest.mark.slow
def test_the_emulated_optimizer_makes_the_same_step() -> None:
    """Masters and copies after a float16 step, by definition and by kernels."""
    ends = []
    for where in (contextlib.nullcontext, emulator):
        masters = {"w": draw(70, 64), "norm": draw(64)}
        gradients = {"w": draw(70, 64, dtype=np.float16, seed=3), "norm": draw(64, seed=4)}
        with where():
            optimizer, scaler = AdamW(masters, lr=1e-2), MixedPrecisionConfig("float16").scaler()
            copies = compute_copies(masters, "float16")
            optimizer.keep_copies(copies)
            _, finite, factor = measure_gradients(gradients, 0.5, scaler=scaler)
            optimizer.step(gradients, finite=finite, factor=factor)
        ends.append(masters | {"copy": copies["w"].astype(np.float32)})
    for name, array in ends[0].items():
        limit = 2.0**-10 if name == "copy" else 1e-6
        np.testing.assert_allclose(ends[1][name], array, rtol=limit, atol=1e-7)


def test_defaults() -> None:
    config = TrainingConfig()
    assert (config.batch_size, config.max_seq_len, config.gradient_accumulation_steps) == (
        *(4, 2048),
        4,
    )
    assert config.mixed_precision == MixedPrecisionConfig("float16", "float32", 65536.0, True)
    assert config.checkpoint == CheckpointConfig()
    assert config.tokens_per_step == 32768
    assert MixedPrecisionConfig(np.float16).compute_dtype == "float16"
    assert MixedPrecisionConfig(ml_dtypes.bfloat16).scaler().value == 1


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: MixedPrecisionConfig("int8"), "compute_dtype='int8'.*choose from float16"),
        (lambda: MixedPrecisionConfig(None), "compute_dtype=None"),
        (lambda: MixedPrecisionConfig("float16", "float16"), "choose from float32"),
        (lambda: MixedPrecisionConfig(loss_scale=0), "scale=0"),
        (lambda: MixedPrecisionConfig(dynamic_scaling=1), "must be True or False"),
        (lambda: TrainingConfig(batch_size=0), "batch_size=0.*pass an integer, 1 or more"),
        (lambda: TrainingConfig(max_seq_len="long"), "max_seq_len='long'"),
        (lambda: TrainingConfig(gradient_accumulation_steps=1.5), "steps=1.5"),
        (lambda: TrainingConfig(batch_size=float("nan")), "batch_size=nan"),
        (lambda: TrainingConfig(batch_size=float("inf")), "batch_size=inf"),
    ],
)
def test_bad_configurations_raise(make, cure) -> None:
    with pytest.raises(ConfigError, match=cure):
        make()
