import itertools
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, int8_weight, linear, linear_backward, nf4_quantize
from unsloth_cupy.models import create, quantize
from unsloth_cupy.models.folders.joined import Joined
from unsloth_cupy.ops.linear.linears import columns_of_one, linears, linears_backward, rows_of_one
from unsloth_cupy.ops.quantized.weight import Quantized, beside

from ..harness.parity import Case, Parity
from ..machines.stand_in import gpu


class TestLinears(Parity):
    op = "linears"
    cases = (
        Case("three", rows=[2, 3], inputs=13, outputs=7, outputs2=3, outputs3=2, given=["weight3"]),
        Case("two", rows=[5], inputs=4, outputs=6, outputs2=6),
        Case("no rows", rows=[0], inputs=4, outputs=2, outputs2=3),
        Case("one row", rows=[], inputs=4, outputs=2, outputs2=3),
    )


def joined(*parts: np.ndarray, axis: int) -> list[np.ndarray]:
    """Return the parts as views of one array."""
    whole = np.concatenate(parts, axis=axis)
    stops = np.cumsum([part.shape[axis] for part in parts])
    spans = [slice(n - p.shape[axis], n) for n, p in zip(stops, parts, strict=True)]
    return [whole[span] if axis == 0 else whole[..., span] for span in spans]


@pytest.mark.parametrize("inputs", [4, 40])  # few: gradients are not moved side by side
@pytest.mark.parametrize("together", ["weights", "weights and gradients", "gradients"])
@pytest.mark.parametrize("outputs", [(16, 8, 8), (16, 8)])
def test_one_product_is_equal_to_several(outputs: Any, together: str, inputs: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, inputs))
    weights = [rng.standard_normal((n, inputs)) for n in outputs]
    dys = [rng.standard_normal((2, 3, n)) for n in outputs]
    expected = [linear_backward(dy, x, w) for dy, w in zip(dys, weights, strict=True)]
    if "weights" in together:
        weights = joined(*weights, axis=0)
    if "gradients" in together:
        dys = joined(*dys, axis=-1)
    ys = linears(x, *weights)
    for y, weight in zip(ys, weights, strict=False):
        np.testing.assert_allclose(y, linear(x, weight), rtol=1e-12, atol=1e-12)
    given = dys + [None] * (3 - len(dys))
    dx, *dweights = linears_backward(*given, x, *weights)
    np.testing.assert_allclose(dx, sum(e[0] for e in expected), rtol=1e-12, atol=1e-12)
    for actual, (_, dweight, _) in zip(dweights, expected, strict=False):
        np.testing.assert_allclose(actual, dweight, rtol=1e-12, atol=1e-12)
    only = linears_backward(*given, x, *weights, wanted=frozenset({"weight2"}))
    assert [each is not None for each in only] == [False, False, True, False]
    missing = [None, *given[1:]]
    dx, *_ = linears_backward(*missing, x, *weights)
    np.testing.assert_allclose(dx, sum(e[0] for e in expected[1:]), rtol=1e-12, atol=1e-12)


def test_parts_are_found_where_they_lie_in_order_alone() -> None:
    whole = np.zeros((6, 4))
    assert rows_of_one([whole[:2], whole[2:5], whole[5:]]) is whole
    assert columns_of_one([whole[:, :1], whole[:, 1:]]) is whole
    for parts in (
        [whole[2:], whole[:2]],
        [whole[:2], whole[2:5]],
        [whole[:2], whole[3:]],
        [whole[:3], whole[2:]],
        [whole[:2], whole[2:].copy()],
        [whole[:2, ::2], whole[2:, ::2]],
        [whole.T[:2], whole.T[2:]],
        [whole, whole],
    ):
        assert rows_of_one(parts) is None
    assert columns_of_one([whole[:2], whole[2:]]) is None


CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("kind", [{}, {"model_type": "qwen2"}, {"model_type": "gemma2"}])
def test_a_model_whose_weights_lie_together(
    kind: Any, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, gradients and a step of AdamW are those of weights that lie apart."""
    tokens, config = np.arange(24).reshape(2, 12), CONFIG | kind
    apart = create(config, seed=0, dtype="float64")
    assert whole_of(apart) is None, "NumPy's weights lie apart"
    monkeypatch.setattr(Joined, "on_gpu", staticmethod(lambda value: True))
    together = create(config, seed=0, dtype="float64")
    assert [*apart.parameters] == [*together.parameters]
    results = []
    for model in (apart, together):
        if rank is not None:
            model.add_adapter(rank)
            for name, array in model.adapter.parameters.items():
                array[...] = np.random.default_rng(len(name)).standard_normal(array.shape)
        loss, gradients = model.loss_and_gradients(tokens, tokens)
        AdamW(model.trainable, lr=0.1, eps=1e-3).step(gradients)
        results.append([loss, *gradients.values(), model.logits(tokens)])
    assert whole_of(together) is not None, "the step was in place"
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(results[1], 2))
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", "nf4-double"])
def test_a_quantized_model_whose_weights_lie_together(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of adapters, and logits, are those of weights that lie apart."""
    tokens, models = np.arange(24).reshape(2, 12), []
    for together in (False, True):
        monkeypatch.setattr(Joined, "on_gpu", staticmethod(lambda value, on=together: on))
        model = create(CONFIG | {"hidden_size": 64}, seed=0, dtype="float64")
        quantize(model, kind, least=0)
        models.append(model)
    (apart, together_), results = models, []
    assert (whole_of(apart), whole_of(together_) is None) == (None, kind == "nf4-double")
    for name, weight in apart.parameters.items():
        other = together_.parameters[name]
        assert type(weight) is type(other)
        if isinstance(weight, Quantized):
            np.testing.assert_array_equal(other.dequantize(), weight.dequantize())
            assert other.state().keys() == weight.state().keys()
    for model in models:
        plain = model.logits(tokens)
        model.add_adapter(2)
        loss, gradients = model.loss_and_gradients(tokens, tokens)
        results.append([plain, loss, *gradients.values()])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_quantized_matrices_that_do_not_stack_stay_apart() -> None:
    rng = np.random.default_rng(0)
    first, second, short = (rng.standard_normal((n, 32)) for n in (4, 6, 5))
    for group in (
        [nf4_quantize(first), nf4_quantize(short)],  # whose last block is short
        [nf4_quantize(first), nf4_quantize(second, block=32)],
        [nf4_quantize(first), nf4_quantize(second, kind="fp4")],
        [nf4_quantize(first), int8_weight(second)],
        [int8_weight(first), int8_weight(second[:, :16])],
        [int8_weight(first), int8_weight(second.astype(np.float32))],
    ):
        assert beside(group) is group
        assert rows_of_one(group) is None
    parts = beside([nf4_quantize(first), nf4_quantize(second), nf4_quantize(first)])
    assert rows_of_one(parts).shape == (14, 32)
    assert rows_of_one(parts[:2]) is None
    assert rows_of_one(parts[::-1]) is None
    assert rows_of_one([parts[0], parts[1], nf4_quantize(first)]) is None


def whole_of(model: Any) -> Any:
    """Return the matrix that holds q, k and v of the second layer."""
    names = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"]
    return rows_of_one([model.parameters[name] for name in names])


def test_weights_of_a_gpu_lie_together() -> None:
    with gpu("90", devices=1) as machine:
        machine.strict = False
        model = create(CONFIG, seed=0, dtype="bfloat16", device="cuda")
        assert whole_of(model).shape == (32 + 16 + 16, 32)
