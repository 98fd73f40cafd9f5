"""Gradients of functions of a model: of a preference loss, of the model's own loss and of both."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, LossScaler, cross_entropy
from unsloth_cupy.errors import ConfigError, GradientError
from unsloth_cupy.models import Transformer, create
from unsloth_cupy.models.objective import next_token
from unsloth_cupy.training.tape import Tape

from .peers import CONFIGS, SIZES

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(3, 97, (4, 9))  # two pairs: the chosen texts, then the rejected ones
LABELS = np.where(RNG.random(TOKENS.shape) < 0.3, -100, TOKENS)
COMPLETIONS = np.arange(9) > np.array([[3], [2], [3], [4]])
REAL = np.arange(9) < np.array([[9], [7], [8], [9]])


def log_probs(model: Any, tokens: Any, mask: Any, completions: Any) -> Any:
    """Return the log probability of each text's completion."""
    losses = cross_entropy(model.logits(tokens, mask=mask)[:, :-1], tokens[:, 1:])
    return -(losses * (completions & (mask == 1))[:, 1:].astype(losses.dtype)).sum(axis=1)


def preference(
    model: Any, tokens: Any, mask: Any, completions: Any, reference: Any, beta: float = 0.5
) -> Any:
    """Return -log sigmoid(beta (r_chosen - r_rejected)), r = log_probs - reference (DPO)."""
    r = log_probs(model, tokens, mask, completions) - reference
    pairs = len(tokens) // 2
    margin = (r[:pairs] - r[pairs:]) * beta
    return ((-margin).exp() + 1.0).log().mean()


BATCH: dict[str, Any] = {"tokens": TOKENS, "mask": REAL, "completions": COMPLETIONS}


def model_of(label: str, dtype: str = "float32", rank: int | None = None) -> Transformer:
    model = create(SIZES | CONFIGS[label], seed=0, dtype=dtype)
    if rank is not None:
        model.add_adapter(rank, seed=1, dropout=0.2)
        for name, array in model.trainable.items():
            drawn = array + np.random.default_rng(1).standard_normal(array.shape) / 8
            model.trainable[name] = drawn.astype(dtype)
    return model


def check(function: Any, model: Transformer, **options: Any) -> None:
    """Compare gradients with the function's differences along a random direction."""
    value, gradients = model.value_and_gradients(function, **options)
    step = {n: RNG.standard_normal(array.shape) for n, array in gradients.items()}
    slope = sum((step[name] * gradient).sum() for name, gradient in gradients.items())
    ends = []
    for size in (1e-5, -2e-5):
        for name, direction in step.items():
            model.trainable[name] += size * direction
        ends.append(model.value_and_gradients(function, **options)[0])
    for name, direction in step.items():
        model.trainable[name] += 1e-5 * direction
    np.testing.assert_allclose(np.mean(ends), value, rtol=1e-7)
    np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, slope, rtol=1e-6)


def test_a_preference_loss_has_the_gradients_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    functional, model = torch.nn.functional, model_of("llama", "float64")
    reference = log_probs(model_of("llama", "float64"), **BATCH) * RNG.uniform(0.9, 1.1, 4)
    loss, gradients = model.value_and_gradients(partial(preference, **BATCH, reference=reference))

    peer = model.to_torch()
    tokens = torch.from_numpy(TOKENS)
    logits = peer(input_ids=tokens, attention_mask=torch.from_numpy(REAL.astype(int))).logits
    each = functional.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    r = (each * torch.from_numpy((COMPLETIONS & REAL)[:, 1:])).sum(1) - torch.from_numpy(reference)
    expected = -functional.logsigmoid(0.5 * (r[:2] - r[2:])).mean()
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)  # its norms are of float32
    leaves = dict(peer.named_parameters())
    assert gradients.keys() == model.trainable.keys()
    for name, gradient in gradients.items():
        of_torch = leaves[name].grad.numpy()
        most = np.abs(of_torch).max()
        np.testing.assert_allclose(gradient, of_torch, rtol=0, atol=1e-5 * most, err_msg=name)


@pytest.mark.parametrize("label", ["llama", "gemma2"])
def test_a_preference_loss_of_an_adapter(label: str) -> None:
    """Against differences: with soft-capped logits, dropout, and the model without it before."""
    model = model_of(label, "float64", rank=2)
    adapter, model.adapter = model.adapter, None
    reference = log_probs(model, **BATCH)
    model.adapter = adapter
    function = partial(preference, **BATCH, reference=reference)
    check(function, model)
    check(function, model, seed=3)
    value, expected = model.value_and_gradients(function, seed=3)
    assert value != model.value_and_gradients(function)[0], "dropout is on"
    for config in (CheckpointConfig(), CheckpointConfig(keep=("attention_forward",))):
        _, actual = model.value_and_gradients(function, seed=3, checkpoint=config)
        for name, gradient in expected.items():
            np.testing.assert_array_equal(actual[name], gradient)
    plain, scaled = (model.value_and_gradients(function, scaler=s) for s in (None, LossScaler(64)))
    assert scaled[0] == plain[0]
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(scaled[1][name], 64 * gradient)


@pytest.mark.parametrize("label", ["llama", "gemma2"])
@pytest.mark.parametrize("rank", [None, 2])
def test_the_loss_itself_has_the_bits_of_loss_and_gradients(label: str, rank: int | None) -> None:
    model = model_of(label, rank=rank)
    seed = None if rank is None else 3
    for arrays in ({"mask": REAL}, {"offsets": np.array([0, 5, 20, 36])}):
        for options in ({}, {"checkpoint": CheckpointConfig(), "scaler": LossScaler(64)}):
            how: Any = {**options, "seed": seed}
            loss, expected = model.loss_and_gradients(TOKENS, LABELS, **arrays, **how, count=7)
            function = partial(next_token, tokens=TOKENS, labels=LABELS, **arrays, count=7)
            value, actual = model.value_and_gradients(function, **how)
            assert (value, value.dtype) == (loss, np.float64)
            for name, gradient in expected.items():
                np.testing.assert_array_equal(actual[name], gradient)
            if rank is None:
                np.testing.assert_allclose(function(model), value, rtol=1e-6)


@pytest.mark.parametrize("scaler", [None, LossScaler(2.0**12)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_loss_may_be_a_term(dtype: str, scaler: LossScaler | None) -> None:
    """A sum with it has the sum of the gradients, each times its factor."""
    model = model_of("llama", dtype)
    dpo = partial(preference, **BATCH, reference=np.zeros(4, np.float32))

    def both(model: Any) -> Any:
        loss = model.loss(TOKENS, LABELS, mask=REAL)
        return loss * 0.5 + loss + dpo(model) * 3.0

    value, actual = model.value_and_gradients(both, scaler=scaler)
    loss, of_loss = model.loss_and_gradients(TOKENS, LABELS, mask=REAL, scaler=scaler)
    other, of_other = model.value_and_gradients(dpo, scaler=scaler)
    np.testing.assert_allclose(value, 1.5 * loss + 3 * other, rtol=1e-6)
    error = 2.0**-8 if dtype == "float16" else 1e-5
    for name, gradient in actual.items():
        expected = 1.5 * of_loss[name].astype(float) + 3 * of_other[name].astype(float)
        most = np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=error * most, err_msg=name)


def test_arrays_of_torch_inside() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    model, (tokens, labels) = model_of("llama"), map(torch.from_numpy, (TOKENS, LABELS))
    loss, expected = model.loss_and_gradients(TOKENS, LABELS)
    value, actual = model.value_and_gradients(lambda m: m.loss(tokens, labels))
    assert value == loss
    for name, gradient in expected.items():
        np.testing.assert_array_equal(actual[name], gradient)


def test_wrong_functions() -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match=r"value_and_gradients\(3\): pass a function of a model"):
        model.value_and_gradients(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"value_and_gradients\(scaler=8\): pass a LossScaler"):
        model.value_and_gradients(lambda m: m.loss(TOKENS, TOKENS), scaler=8)  # type: ignore
    with pytest.raises(ConfigError, match=r"loss_and_gradients\(scaler=8\): pass a LossScaler"):
        model.loss_and_gradients(TOKENS, TOKENS, scaler=8)  # type: ignore[arg-type]
    for count in (0, -1, "many"):
        with pytest.raises(ConfigError, match=r"loss_and_gradients\(count=.*pass the number of"):
            model.loss_and_gradients(TOKENS, TOKENS, count=count)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"loss\(count=.*pass the number of"):
            model.loss(TOKENS, TOKENS, count=count)  # type: ignore[arg-type]
    for wrong in (lambda m: 1.0, lambda m: m.logits(TOKENS), lambda m: model.loss(TOKENS, TOKENS)):
        with pytest.raises(GradientError, match=r"returned .*; return a Var of shape \(\)"):
            model.value_and_gradients(wrong)
    other = Tape().watch(np.zeros((), np.float32))
    with pytest.raises(GradientError, match="pass Vars of this tape"):
        model.value_and_gradients(lambda m: other)
