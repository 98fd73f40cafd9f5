"""The first value that is not finite is found: by op, result and layer."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    CheckpointConfig,
    LossScaler,
    NonFiniteError,
    Tape,
    find_nan,
    linear,
    relu2,
    rms_norm,
)
from unsloth_cupy.models import Transformer, create

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(dtype: str = "float32") -> Transformer:
    return create(CONFIG, seed=0, dtype=dtype)


def first_error(model: Transformer, **options: Any) -> NonFiniteError:
    with (
        np.errstate(all="ignore"),
        pytest.raises(NonFiniteError) as raised,
        find_nan(model.parameters | model.trainable),
    ):
        model.loss_and_gradients(TOKENS, TOKENS, **options)
    return raised.value


@pytest.mark.parametrize("checkpoint", [None, CheckpointConfig()], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    ("name", "op", "result"),
    [
        ("model.embed_tokens.weight", "embedding", "x"),
        ("model.layers.0.input_layernorm.weight", "rms_norm_forward", "y"),
        ("model.layers.1.self_attn.k_proj.weight", "linear", "y"),
        ("model.layers.2.mlp.down_proj.weight", "linear", "y"),
        ("lm_head.weight", "linear_cross_entropy_gradients", "loss"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_broken_is_named(
    name: str, op: str, result: str, value: float, checkpoint: Any
) -> None:
    model = model_of()
    row = int(TOKENS[0, 0]) if name.startswith(("model.embed", "lm_head")) else 0
    model.parameters[name][(row, 0)[: model.parameters[name].ndim]] = value
    error = first_error(model, checkpoint=checkpoint)
    assert (error.op, error.result, error.parameter) == (op, result, name)
    assert f"weight ({name})" in str(error)


def test_an_adapter_that_is_broken_is_named() -> None:
    model = model_of()
    model.add_adapter(2)
    name = next(name for name in model.trainable if ".1." in name and "up_proj.lora_B" in name)
    model.trainable[name][3, 1] = np.nan
    error = first_error(model)
    assert error.op.startswith("lora")
    assert error.parameter is not None
    assert ".layers.1.mlp." in error.parameter
    assert f"b2 ({name})" in str(error)  # of the second layer of one input


def test_a_value_that_grows_too_large_is_found_where_it_does() -> None:
    """An op without weights is located by the weight before it."""
    model = model_of()
    for name in ("gate", "up"):
        model.parameters[f"model.layers.1.mlp.{name}_proj.weight"] *= np.float32(1e22)
    error = first_error(model)
    assert (error.op, error.result) == ("swiglu", "y")
    assert error.parameter == "model.layers.1.mlp.up_proj.weight"
    assert "all its arguments are finite" in str(error)


def test_gradients_are_looked_at_unless_a_scaler_is() -> None:
    model, scaler = model_of("float16"), LossScaler(2.0**30)
    error = first_error(model, scaler=scaler)
    assert error.result[0] == "d"
    with find_nan(model.parameters, gradients=False):
        _, gradients = model.loss_and_gradients(TOKENS, TOKENS, scaler=scaler)
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_what_is_finite_passes_with_equal_bits() -> None:
    """Rows that see no key have an lse of -inf: padding on the left."""
    model, mask = model_of(), np.ones((2, 9), int)
    mask[1, :4] = 0
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS, mask=mask)
    with find_nan(model.parameters):
        again, same = model.loss_and_gradients(TOKENS, TOKENS, mask=mask)
    assert again == loss
    assert all((same[name] == gradient).all() for name, gradient in gradients.items())


def test_blocks_stand_inside_each_other_and_end() -> None:
    x, weight = np.ones((2, 4), np.float32), np.full((4, 4), np.inf, np.float32)

    def run() -> Any:
        return relu2(linear(Tape().watch(x), weight))

    with find_nan({"outer": weight}):
        with find_nan():
            rms_norm(Tape().watch(x), x[0])
        with pytest.raises(NonFiniteError) as raised:
            run()
        assert raised.value.parameter == "outer"
        assert "(2, 4) float32 holds 0 NaN and 8 infinities of 8, the first at (0, 0)" in str(
            raised.value
        )
    assert np.isinf(run().value).all()


def test_each_thread_looks_at_its_own_ops() -> None:
    """The blocks of two threads may end in any order; none stays active."""
    inside, left, bad = Event(), Event(), np.array([1, np.nan], np.float32)

    def another() -> None:
        with find_nan():
            inside.set()
            left.wait(10)
            with pytest.raises(NonFiniteError):
                relu2(Tape().watch(bad))

    with ThreadPoolExecutor(1) as threads:
        with find_nan():
            done = threads.submit(another)
            assert inside.wait(10)
        relu2(Tape().watch(bad))
        left.set()
        done.result(10)
    relu2(Tape().watch(bad))
