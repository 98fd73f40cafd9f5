"""Models whose MLPs are computed by chunks of rows, and again on the way back."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, KVCache, swiglu_mlp
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create
from unsloth_cupy.models.layers import mlp_branch
from unsloth_cupy.training import tape

from ..harness.whole_models import allowed_error, judge_gradients, largest_error, widened
from ..machines.stand_in import gpu
from .peers import CONFIGS, SIZES
from .test_packed import model_of

TOKENS = np.random.default_rng(0).integers(3, 97, (6, 14))  # 84 rows: chunks of 32, 32 and 20
KINDS = ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2"]
OTHERS = ["gemma", "gemma gelu", "gemma2", "gemma3", "llama biases", "bitnet"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that swiglu_mlp was given, call by call."""
    calls: list[int] = []

    def counting(x: Any, *weights: Any) -> Any:
        calls.append(x.shape[0] * x.shape[1])
        return swiglu_mlp(x, *weights)

    monkeypatch.setattr(mlp_branch, "swiglu_mlp", counting)
    return calls


def chunked(model: Transformer) -> Transformer:
    model.chunked_mlp = True
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("label", KINDS)
def test_loss_and_gradients_are_those_of_the_whole(
    label: str, dtype: str, called: list[int]
) -> None:
    """Exactly but for the order of sums, and rounded no worse; checkpoints keep every bit."""
    model = model_of(label, dtype, None)
    plain_loss, plain = model.loss_and_gradients(TOKENS, TOKENS)
    wide = widened(model_of(label, dtype, None))
    exact_loss, exact = wide.loss_and_gradients(TOKENS, TOKENS)
    actual_loss, actual = chunked(wide).loss_and_gradients(TOKENS, TOKENS)
    assert called == [84] * wide.config.layers
    assert float(actual_loss) == pytest.approx(float(exact_loss), rel=1e-12)
    assert largest_error(actual, exact) < 1e-12
    first, gradients = chunked(model).loss_and_gradients(TOKENS, TOKENS)
    assert chunked(model).loss(TOKENS, TOKENS) == first
    judge_gradients(gradients, plain, exact, dtype)
    assert abs(float(first) - exact_loss) <= allowed_error(plain_loss, exact_loss, dtype=dtype)
    for config in (CheckpointConfig(), CheckpointConfig(recompute_every=2, keep=("swiglu_mlp",))):
        loss, again = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=config)
        assert loss == first
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(again[name], gradient, err_msg=name)


def test_texts_share_rows_and_generation_starts_from_them(called: list[int]) -> None:
    model = model_of("llama", "float64", None)
    offsets = np.array([0, 30, 41, 84])
    expected = model.loss(TOKENS, TOKENS, offsets=offsets)
    made = model.generate(TOKENS, max_new_tokens=3, stop=())
    assert not called
    assert float(chunked(model).loss(TOKENS, TOKENS, offsets=offsets)) == pytest.approx(
        float(expected), rel=1e-12
    )
    np.testing.assert_array_equal(model.generate(TOKENS, max_new_tokens=3, stop=()), made)
    assert called


def test_adapters_may_sit_beside_the_mlp(called: list[int]) -> None:
    model = create(SIZES | CONFIGS["llama"], seed=0, dtype="float64")
    model.add_adapter(3, targets=("q_proj", "o_proj"), dropout=0.5)
    expected = model.loss_and_gradients(TOKENS, TOKENS, seed=5)
    actual = chunked(model).loss_and_gradients(TOKENS, TOKENS, seed=5)
    assert len(called) == model.config.layers
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-12)
    assert largest_error(actual[1], expected[1]) < 1e-12


@pytest.mark.parametrize("target", ["gate_proj", "up_proj", "down_proj"])
def test_adapters_inside_the_mlp_are_refused(target: str) -> None:
    model = chunked(create(SIZES | CONFIGS["llama"], seed=0))
    model.add_adapter(3, targets=(target,))
    with pytest.raises(ConfigError, match=rf"adapter on model.layers.0.mlp.{target}"):
        model.loss_and_gradients(TOKENS, TOKENS)


@pytest.mark.parametrize("label", OTHERS)
def test_other_mlps_are_refused_before_anything_is_done(label: str) -> None:
    model = chunked(create(SIZES | CONFIGS[label], seed=0, dtype="float32"))
    config = model.config
    cache = KVCache(config.layers, 6, 32, config.kv_heads, config.dim, dtype="float32")
    mask = np.ones(TOKENS.shape, int)
    mask[0, 0] = 0
    why = "biases inside" if label == "llama biases" else f"activation {config.activation}"
    with pytest.raises(ConfigError, match=rf"chunked_mlp: .*{why}.*; leave it out"):
        model.logits(TOKENS, mask=mask, cache=cache)
    assert not cache.padded
    assert not cache.length


@pytest.mark.slow
def test_no_inner_activation_is_kept() -> None:
    """Of each block a plain step keeps three: gate, up, and what down reads."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8}
    model = create(SIZES | CONFIGS["llama"] | sizes, seed=0, dtype="float32")
    rows = np.arange(4 * 64).reshape(4, 64) % 97

    def peak() -> int:
        model.loss_and_gradients(rows[:, :2], rows[:, :2])
        tracemalloc.start()
        kept = model.loss_and_gradients(rows, rows)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(kept[1]) == len(model.parameters)
        return most

    whole = peak()
    chunked(model)
    assert whole - peak() >= 8 * 3 * rows.size * 176 * 4


@pytest.mark.parametrize("label", ["llama", "phi3"])
def test_a_step_on_a_gpu_is_launches_and_products(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "_owner", id)  # arrays that are played have no base to look at
    with gpu() as machine:
        machine.strict = False
        model = chunked(model_of(label, "float16", None))
        model.parameters = {name: machine.place(a) for name, a in model.parameters.items()}
        half = model.config.dim // 2
        model.tables = {
            kind: lambda length: tuple(machine.array((64, half), "float32") for _ in "cs")
            for kind in model.tables
        }
        tokens = machine.place(TOKENS)
        machine.strict = True
        model.loss_and_gradients(tokens, tokens, count=20)
    kernels = [launch.kernel for launch in machine.launches]
    layers = model.config.layers
    assert kernels.count("swiglu") == 2 * 3 * layers  # forward and back, by three chunks
    assert kernels.count("swiglu_backward") == 3 * layers
