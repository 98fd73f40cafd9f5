"""Log-probabilities of a model, and a preference loss through it, beside transformers and TRL."""

import numpy as np
import pytest

from unsloth_cupy import losses
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, load

from ..conftest import FOLDER
from ..golden.golden import op_cases
from .peers import SIZES

CASES = {case.name: case for case in op_cases(FOLDER / "losses", "tokens")}
TOKENS = np.random.default_rng(0).integers(3, 97, (4, 9))


def test_values_are_those_of_transformers() -> None:
    case = CASES["log_probs"]
    folder, inputs = FOLDER / "losses" / case.params["base"], case.inputs
    model = load(folder, dtype="float32")
    result = model.log_probs(inputs["input_ids"], inputs["labels"], mask=inputs["attention_mask"])
    for name, expected in case.outputs.items():
        actual = getattr(result, name)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)


def test_a_preference_loss_has_the_gradients_of_trl() -> None:
    case = CASES["dpo_model"]
    folder, inputs = FOLDER / "losses" / case.params["base"], case.inputs
    model, reference = (load(folder, dtype="float32") for _ in range(2))
    for array in reference.parameters.values():
        array[...] = array * np.float32(case.params["reference_factor"])
    tokens, labels = inputs["input_ids"], inputs["labels"]
    mask = inputs["attention_mask"]
    completion = np.zeros(labels.shape, bool)
    completion[:, :-1] = labels[:, 1:] != -100
    known = reference.log_probs(tokens, labels, mask=mask).log_probs
    value, gradients = model.value_and_gradients(
        lambda model: losses.preference(
            model.log_probs(tokens, labels, mask=mask).log_probs, completion, known,
            beta=case.params["beta"],
        )
    )  # fmt: skip
    assert abs(float(value) - float(case.outputs["loss"])) < 1e-5
    assert gradients.keys() == case.grads.keys()
    for name, expected in case.grads.items():
        error = np.linalg.norm(gradients[name] - expected)
        assert error <= 1e-4 * max(np.linalg.norm(expected), 1e-30), name


def test_the_sum_is_the_loss() -> None:
    model = create(SIZES | {"model_type": "gemma2"}, seed=0)
    labels = np.where(np.arange(9) < 3, -100, TOKENS)
    result = model.log_probs(TOKENS, labels)
    loss = model.loss(TOKENS, labels, count=1)
    np.testing.assert_allclose(-result.log_probs.sum(), loss, rtol=1e-5)
    assert not result.entropy[:, [0, 1, -1]].any()
    flat = model.log_probs(TOKENS, labels, temperature=1e4)
    np.testing.assert_allclose(flat.entropy[:, 2:-1], np.log(97), rtol=1e-4)


def test_the_base_of_an_adapter_is_its_reference() -> None:
    model = create(SIZES | {"model_type": "llama"}, seed=0)
    before = model.log_probs(TOKENS, TOKENS).log_probs
    model.add_adapter(2, seed=1)
    assert model.adapter is not None
    for array in model.adapter.parameters.values():
        array[...] = array + 0.1
    assert np.abs(model.log_probs(TOKENS, TOKENS).log_probs - before).max() > 1e-3
    base = model.base
    np.testing.assert_array_equal(base.log_probs(TOKENS, TOKENS).log_probs, before)
    assert base.parameters is model.parameters
    mask = np.ones(TOKENS.shape, bool)
    _, gradients = model.value_and_gradients(
        lambda model: losses.preference(
            model.log_probs(TOKENS, TOKENS).log_probs, mask, before, kind="ipo"
        )
    )
    assert gradients.keys() == model.trainable.keys() == set(model.adapter.parameters)


def test_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `peers`")
    model = create(SIZES | {"model_type": "llama"}, seed=0)
    tokens = torch.from_numpy(TOKENS)
    result = model.log_probs(tokens, tokens)
    assert all(isinstance(each, torch.Tensor) for each in result)
    expected = model.log_probs(TOKENS, TOKENS).log_probs
    np.testing.assert_array_equal(result.log_probs.numpy(), expected)


def test_a_temperature_of_nothing() -> None:
    model = create(SIZES | {"model_type": "llama"}, seed=0)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        model.log_probs(TOKENS, TOKENS, temperature=0.0)
