"""Texts that share rows: the numbers of each one alone, and none sees another."""

import importlib
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, LossScaler
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError
from unsloth_cupy.models import Transformer, create
from unsloth_cupy.training import tape

from ..harness.whole_models import allowed_error, judge_gradients, largest_error, widened
from ..machines.stand_in import gpu
from .peers import CONFIGS, RELATIVES, SIZES

ALL = CONFIGS | RELATIVES
LENGTHS = [5, 1, 11, 7]  # one goes on in the second row; one has nothing to predict
OFFSETS = np.cumsum([0, *LENGTHS])
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))
LABELS = np.where(np.arange(24) % 5 == 3, -100, TOKENS.ravel()).reshape(2, 12)


def model_of(label: str, dtype: str, rank: int | None) -> Transformer:
    model = create(SIZES | ALL[label], seed=0, dtype=dtype)
    if rank is not None:
        model.add_adapter(rank, dora=True)
        draw = np.random.default_rng(1)
        for name, array in model.trainable.items():
            if "magnitude" not in name:
                array[...] += draw.standard_normal(array.shape) / 8
    return model


def texts(array: np.ndarray) -> list[np.ndarray]:
    return [part[None] for part in np.split(array.ravel(), OFFSETS[1:-1])]


def one_by_one(model: Transformer) -> tuple[float, dict[str, np.ndarray]]:
    """Return the mean over all labels of all texts, and its gradients."""
    count, loss, total = 0, 0.0, {}
    for tokens, labels in zip(texts(TOKENS), texts(LABELS), strict=True):
        asked = int((labels[:, 1:] != -100).sum())
        one, gradients = model.loss_and_gradients(tokens, labels)
        count, loss = count + asked, loss + float(one) * asked
        for name, gradient in gradients.items():
            total[name] = total.get(name, 0) + gradient.astype(np.float64) * asked
    return loss / count, {name: gradient / count for name, gradient in total.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 3], ids=["all weights", "adapters"])
@pytest.mark.parametrize("label", ALL)
def test_loss_and_gradients_are_those_of_the_texts_one_by_one(label: str, rank: int | None) -> None:
    """Exactly but for the order of sums: float32 is off by no more than the texts alone are."""
    model = model_of(label, "float32", rank)
    loss, alone = one_by_one(model)
    wide = widened(model_of(label, "float32", rank))
    exact_loss, exact = one_by_one(wide)
    actual_loss, actual = wide.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS)
    assert float(actual_loss) == pytest.approx(exact_loss, rel=1e-12)
    assert largest_error(actual, exact) < 1e-12
    first, gradients = model.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS)
    allowed = allowed_error(loss, exact_loss)
    for actual_loss in (first, model.loss(TOKENS, LABELS, offsets=OFFSETS)):
        assert abs(float(actual_loss) - exact_loss) <= allowed
    judge_gradients(gradients, alone, exact)
    for config in (CheckpointConfig(), CheckpointConfig(recompute_every=2)):
        again = model.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS, checkpoint=config)
        assert again[0] == first
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(again[1][name], gradient, err_msg=name)


@pytest.mark.parametrize(("keep", "times"), [((), 2), (("attention_forward",), 1)])
def test_attention_that_is_kept_is_not_computed_again(
    keep: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    module = importlib.import_module("unsloth_cupy.ops.attention.attention_varlen")
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *args: called.append(1) or attend(*args))
    model = model_of("mistral", "float32", None)
    loss, gradients = model.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS)
    layers, called[:] = len(called), []
    config = CheckpointConfig(keep=keep)
    again = model.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS, checkpoint=config)
    assert len(called) == times * layers
    assert again[0] == loss
    assert all((again[1][name] == gradient).all() for name, gradient in gradients.items())


@pytest.mark.parametrize("label", ALL)
def test_no_text_sees_another(label: str) -> None:
    """Logits of the others keep every bit; those of each text are what it has alone."""
    model = model_of(label, "float32", None)
    wide = widened(model_of(label, "float32", None))
    actual = texts_of(wide.logits(TOKENS, offsets=OFFSETS))
    for logits, tokens in zip(actual, texts(TOKENS), strict=True):
        np.testing.assert_allclose(logits, wide.logits(tokens)[0], rtol=1e-11, atol=1e-11)
    before = texts_of(model.logits(TOKENS, offsets=OFFSETS))
    for number, tokens in enumerate(texts(TOKENS)):
        changed = TOKENS.copy()
        changed.reshape(-1)[OFFSETS[number] : OFFSETS[number + 1]] = 96 - tokens[0]
        after = texts_of(model.logits(changed, offsets=OFFSETS))
        for other in range(len(LENGTHS)):
            same = (after[other] == before[other]).all()
            assert same == (other != number)


def texts_of(logits: np.ndarray) -> list[np.ndarray]:
    assert logits.shape == (*TOKENS.shape, 97)
    return np.split(logits.reshape(-1, 97), OFFSETS[1:-1])


def test_labels_of_a_next_text_are_not_asked_for() -> None:
    model = model_of("llama", "float32", None)
    loss, gradients = model.loss_and_gradients(TOKENS, LABELS, offsets=OFFSETS)
    other = LABELS.copy()
    other.reshape(-1)[OFFSETS[:-1]] = 50  # the first token of each text: nothing comes before it
    again = model.loss_and_gradients(TOKENS, other, offsets=OFFSETS)
    assert again[0] == loss
    assert all((again[1][name] == gradient).all() for name, gradient in gradients.items())


def test_a_part_of_a_batch_is_divided_by_the_labels_of_all() -> None:
    model = model_of("llama", "float64", None)
    labels = np.where(np.arange(12) < 7, -100, TOKENS)
    labels[1, 3:] = -100
    count = int((labels[:, 1:] != -100).sum())
    loss, gradients = model.loss_and_gradients(TOKENS, labels)
    parts = [
        model.loss_and_gradients(TOKENS[[row]], labels[[row]], count=count) for row in range(2)
    ]
    assert sum(float(part[0]) for part in parts) == pytest.approx(float(loss), rel=1e-12)
    sums = {name: parts[0][1][name] + parts[1][1][name] for name in gradients}
    assert largest_error(sums, gradients) < 1e-12


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
def test_an_overflow_of_scaled_gradients_is_silent(offsets: Any) -> None:
    """The scaler deals with it; without one, the gradients say it, and NumPy warns of nothing."""
    model = model_of("llama", "float16", None)
    _, gradients = model.loss_and_gradients(
        TOKENS, LABELS, offsets=offsets, scaler=LossScaler(2.0**30)
    )
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())
    model = model_of("llama", "float32", None)
    model.parameters["model.norm.weight"] *= np.float32(3e38)
    _, gradients = model.loss_and_gradients(TOKENS, LABELS, offsets=offsets)
    assert not all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("offsets", "options", "error", "message"),
    [
        ([0, 5, 24], {"mask": np.ones((2, 12), int)}, ConfigError, "leave mask out"),
        ([[0, 24]], {}, ShapeError, r"\(texts \+ 1,\)"),
        ([], {}, ShapeError, r"\(texts \+ 1,\)"),
        (np.array([0.0, 24.0]), {}, DTypeError, "must be int32 or int64"),
        (np.array([0, 24], np.uint64), {}, DTypeError, "must be int32 or int64"),
        ([0, 5, 23], {}, RangeError, "rise from 0 to 24"),
        ([1, 5, 24], {}, RangeError, "rise from 0 to 24"),
        ([0, 9, 5, 24], {}, RangeError, "falls in between"),
    ],
)
def test_wrong_offsets(offsets: Any, options: Any, error: Any, message: str) -> None:
    model = model_of("llama", "float32", None)
    array = offsets if isinstance(offsets, np.ndarray) else np.array(offsets, int)
    with pytest.raises(error, match=message):
        model.loss(TOKENS, LABELS, offsets=array, **options)


@pytest.mark.parametrize("lengths", [[24], [0, 10, 0, 14, 0], [24, 0]])
def test_empty_texts_change_nothing(lengths: list[int]) -> None:
    model = model_of("llama dynamic", "float64", None)
    offsets, parts = np.cumsum([0, *lengths]), [n for n in lengths if n]
    whole = model.loss(TOKENS, LABELS, offsets=np.cumsum([0, *parts]))
    assert model.loss(TOKENS, LABELS, offsets=offsets) == whole
    if len(parts) == 1:
        assert whole == pytest.approx(
            float(model.loss(TOKENS.reshape(1, -1), LABELS.reshape(1, -1)))
        )


def test_texts_without_a_token_have_no_loss() -> None:
    model, none = model_of("llama", "float32", None), np.zeros((1, 0), int)
    loss, gradients = model.loss_and_gradients(none, none, offsets=np.array([0, 0, 0]))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen3"])
def test_a_step_on_a_gpu_is_launches_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is read and none is sent, and attention goes by offsets, both ways, in kernels."""
    monkeypatch.setattr(tape, "_owner", id)  # arrays that are played have no base to look at
    with gpu() as machine:
        machine.strict = False
        model = model_of(kind, "float32", None)
        model.parameters = {name: machine.place(a) for name, a in model.parameters.items()}
        half = model.config.dim // 2
        model.tables = {
            kind: lambda length: tuple(machine.array((64, half), "float32") for _ in "cs")
            for kind in model.tables
        }
        tokens, offsets = machine.place(TOKENS), machine.place(OFFSETS)
        machine.strict = True
        model.loss_and_gradients(tokens, tokens, offsets=offsets, count=20)
    kernels = [launch.kernel for launch in machine.launches]
    assert kernels.count("attention_forward") == model.config.layers
    assert kernels.count("attention_backward") >= model.config.layers
