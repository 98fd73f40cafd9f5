"""Models whose MLPs and experts are computed by chunks of rows, and again on the way back."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create, quantize
from unsloth_cupy.models.adapters.adapter import linear_layers
from unsloth_cupy.models.layers import experts_layer, mlp_branch
from unsloth_cupy.training import chunks, tape

from ..harness.sampling import Sample
from ..harness.whole_models import (
    allowed_error,
    in_float64,
    judge_gradients,
    largest_error,
    widened,
)
from ..machines.stand_in import gpu
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES
from .test_packed import model_of

TOKENS = np.random.default_rng(0).integers(3, 97, (6, 14))  # 84 rows: chunks of 32, 32 and 20
KINDS = ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2"]
FAMILIES = CONFIGS | RELATIVES | MIXTURES
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"rank": 3},
    "DoRA": {"rank": 3, "dora": True},
    "dropout": {"rank": 3, "dropout": 0.5},
    "nf4": {"rank": 3},
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of a chunk, for each MLP and each layer of experts in chunks."""
    calls: list[int] = []

    def counting(function: Any, rows: Any, parameters: Any, size: int, **options: Any) -> Any:
        calls.append(size)
        return chunks.in_chunks(function, rows, parameters, size, **options)

    for module in (mlp_branch, experts_layer):
        monkeypatch.setattr(module, "in_chunks", counting)
    return calls


def chunked(model: Transformer) -> Transformer:
    model.chunked_mlp = True
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", Sample.one_in(12, FAMILIES))
def test_every_mlp_in_chunks_is_the_whole_one(label: str, way: str, called: list[int]) -> None:
    """Loss and gradients differ by the order of sums alone, for every family and kind of layer."""
    model = create(SIZES | FAMILIES[label], seed=0, dtype="float32")
    if way == "nf4":
        quantize(model, "nf4", least=0)
    if WAYS[way]:
        layers = {name.rpartition(".")[2] for name in linear_layers(model.config)}
        only_rank = way in ("LoRA", "nf4")  # stacks of experts have neither DoRA nor dropout
        model.add_adapter(**WAYS[way], targets=None if only_rank else sorted(layers))
        for array in model.adapter.parameters.values():
            array[...] += np.random.default_rng(1).standard_normal(array.shape) / 8
    step: dict[str, Any] = {"tokens": TOKENS, "labels": TOKENS}
    step |= {"seed": 5} if way == "dropout" else {}
    model.chunked_mlp = False
    plain_loss, plain = model.loss_and_gradients(**step)
    assert not called
    with in_float64(model):
        exact_loss, exact = model.loss_and_gradients(**step)
    loss, gradients = chunked(model).loss_and_gradients(**step)
    assert called or model.config.model_type in ("mamba", "mamba2"), "which have no MLP"
    assert abs(float(loss) - exact_loss) <= allowed_error(plain_loss, exact_loss)
    judge_gradients(gradients, plain, exact)
    again, recomputed = model.loss_and_gradients(**step, checkpoint=CheckpointConfig())
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("every", [1, 2])
def test_rows_beyond_a_chunk_are_in_chunks_by_default(
    every: int, called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks are recomputed, and without a tape; rows within a chunk keep their bits."""
    model = create(SIZES | CONFIGS["llama"], seed=0, dtype="float32")
    model.add_adapter(3)
    parts = CheckpointConfig(recompute_every=every)
    plain = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=parts)
    model.logits(TOKENS)
    assert not called
    row = model.config.inner * 4
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 84 * row)
    model.loss_and_gradients(TOKENS, TOKENS, checkpoint=parts)
    assert not called, "84 rows are one chunk"
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 40 * row)
    model.loss_and_gradients(TOKENS, TOKENS)
    assert not called, "all activations are stored"
    adapters = 3 * 3 * (model.config.hidden + model.config.inner) * 4
    assert adapters < 40 * row
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=parts)
    assert called == [40] * 2 * model.config.layers
    assert float(loss) == pytest.approx(float(plain[0]), rel=1e-6)
    assert largest_error(gradients, plain[1]) < 1e-5
    called.clear()
    model.logits(TOKENS)
    assert called == [40] * model.config.layers
    model.chunked_mlp = False
    model.loss_and_gradients(TOKENS, TOKENS, checkpoint=parts)
    assert len(called) == model.config.layers


def test_sums_of_gradients_are_no_larger_than_a_chunk(
    called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights of an MLP have large float32 sums: then chunks are as large."""
    model = create(SIZES | CONFIGS["llama"], seed=0, dtype="float32")
    sums = 3 * model.config.hidden * model.config.inner * 4
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    model.loss_and_gradients(TOKENS, TOKENS, checkpoint=CheckpointConfig())
    size = sums // (model.config.inner * 4)
    assert called == ([size] * 2 * model.config.layers if size < TOKENS.size else [])


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
    assert called == [32] * wide.config.layers
    assert float(actual_loss) == pytest.approx(float(exact_loss), rel=1e-12)
    assert largest_error(actual, exact) < 1e-12
    first, gradients = chunked(model).loss_and_gradients(TOKENS, TOKENS)
    assert chunked(model).loss(TOKENS, TOKENS) == first
    judge_gradients(gradients, plain, exact, dtype)
    assert abs(float(first) - exact_loss) <= allowed_error(plain_loss, exact_loss, dtype=dtype)
    for config in (
        CheckpointConfig(),
        CheckpointConfig(recompute_every=2, keep=("attention_forward",)),
    ):
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


def test_rows_of_several_adapters_are_not_chunked(called: list[int]) -> None:
    model = create(SIZES | CONFIGS["llama"], seed=0)
    for name in ("one", "other"):
        model.add_adapter(3, name=name)
    rows = model.by_rows(["one", "other"] * 3)
    rows.logits(TOKENS)
    assert not called
    with pytest.raises(ConfigError, match="chunked_mlp: each row of the batch has its own adapter"):
        chunked(rows).logits(TOKENS)


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
    of_a_chunk = 6 * 32 * 176 * 4  # these and their gradients
    assert whole - peak() >= 8 * 3 * rows.size * 176 * 4 - of_a_chunk


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
