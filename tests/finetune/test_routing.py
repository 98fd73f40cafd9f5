"""What a run of a mixture says of its experts: the log, progress, a file and a picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.finetune.run import routing
from unsloth_cupy.finetune.run.printer import measured
from unsloth_cupy.finetune.run.routing import Routing, draw_routing
from unsloth_cupy.models import create, load
from unsloth_cupy.models.parse import parse

from ..models.peers import MIXTURES, SIZES

TOKENS = np.random.default_rng(0).integers(3, 97, (4, 16))


def same(array: Any) -> Any:
    return array


def counted(label: str, **options: Any) -> tuple[Any, Routing]:
    model = create(SIZES | MIXTURES[label], seed=0)
    own = Routing(model)
    with own.counting():
        model.loss_and_gradients(TOKENS, TOKENS, **options)
    return model, own


@pytest.mark.parametrize("checkpoint", [None, CheckpointConfig()], ids=["kept", "recomputed"])
@pytest.mark.parametrize("label", ["qwen2_moe types", "gpt_oss", "phimoe"])
def test_tokens_of_every_expert_are_counted_once(label: str, checkpoint: Any) -> None:
    model, own = counted(label, checkpoint=checkpoint)
    seen: list[Any] = []
    model.hidden(model.parameters, TOKENS, routers=seen)
    count = model.config.experts.count
    expected = [np.bincount(each.experts.reshape(-1), minlength=count) for each in seen]
    measures = own.measures(own.counts(same))
    line = own.line(7)
    assert line == {"step": 7, "layers": own.layers, "tokens": np.array(expected).tolist()}
    assert [model.config.experts.sparse[layer] for layer in line["layers"]] == [True] * len(seen)
    mean = TOKENS.size * model.config.experts.k / count
    assert measures["expert_tokens"] == pytest.approx(mean)
    assert measures["expert_load"] == pytest.approx(np.max(expected) / mean)
    assert measures["idle_experts"] == (np.array(expected) == 0).sum()
    assert own.measures(own.counts(same)) == {}
    assert own.line(8) is None


def test_an_expert_of_one_token_is_not_idle() -> None:
    _, own = counted("qwen3_moe")
    actual = own.measures(own.counts(lambda _: np.array([[0, 1, 3], [4, 0, 0]])))
    expected = {"expert_tokens": 8 / 6, "expert_load": 3.0, "idle_experts": 3}
    assert actual == pytest.approx(expected)


def test_nothing_is_counted_outside_of_a_block_nor_of_a_dense_model() -> None:
    model, own = counted("mixtral")
    before = own.measures(own.counts(same))
    model.loss(TOKENS, TOKENS)
    assert own.measures(own.counts(same)) == {}
    with pytest.raises(KeyError), own.counting():
        raise KeyError
    assert model.seen is None
    assert before["expert_load"] >= 1
    dense = create({**SIZES, "model_type": "llama"}, seed=0)
    silent = Routing(dense)
    with silent.counting():
        dense.loss(TOKENS, TOKENS)
    assert silent.measures(silent.counts(same)) == {}


def test_passes_of_a_step_are_added() -> None:
    model, whole = counted("qwen3_moe")
    own, expected = Routing(model), whole.measures(whole.counts(same))
    with own.counting():
        for rows in (TOKENS[:2], TOKENS[2:]):
            model.loss(rows, rows)
    assert own.measures(own.counts(same)) == pytest.approx(expected)
    assert own.line(1) == whole.line(1)


def test_counts_of_ranks_are_added() -> None:
    """Each rank says what all of them counted."""
    _, whole = counted("qwen3_moe")
    expected, parts = whole.measures(whole.counts(same)), []
    for rows in (TOKENS[:2], TOKENS[2:]):
        model = create(SIZES | MIXTURES["qwen3_moe"], seed=0)
        parts.append(Routing(model))
        with parts[-1].counting():
            model.loss(rows, rows)
    others = [np.array(part.newest) for part in parts]
    for part, other in zip(parts, others[::-1], strict=True):
        assert part.measures(part.counts(lambda own, other=other: own + other)) == pytest.approx(
            expected
        )
        assert part.line(1) == {"step": 1, "layers": part.layers, "tokens": sum(others).tolist()}


def test_a_picture_shows_layers_and_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [[40, 0, 10, 14], [16, 16, 16, 16]]
    lines = [{"step": 1, "layers": [1, 3], "tokens": [[1, 1, 1, 1]] * 2}]
    lines.append({"step": 9, "layers": [1, 3], "tokens": tokens})
    kept: list[Any] = []
    monkeypatch.setattr(routing, "save_picture", lambda figure, path: kept.append(figure))
    draw_routing(tmp_path / "routing.png", lines, "a run")
    axes = kept[0].axes[0]
    shown = axes.images[0].get_array()
    np.testing.assert_allclose(shown[1], 0)
    np.testing.assert_allclose(shown[0], np.log2([40 / 16, 1 / 16, 10 / 16, 14 / 16]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "3"]
    assert axes.get_title(loc="left") == "a run: experts up to step 9"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("expert", "layer")
    assert axes.images[0].get_clim() == (-3, 3), "an eighth to eight times an equal share"
    ticks = axes.get_xticks()
    assert (ticks == ticks.round()).all()
    bar = kept[0].axes[1]
    assert bar.get_yticks().tolist() == [-3, -1, 0, 1, 3]
    texts = [label.get_text() for label in bar.get_yticklabels()]
    assert texts == ["1/8 or less", "1/2", "1", "2", "8 or more"]
    assert bar.get_ylabel() == "tokens relative to an equal share"


def test_a_picture_of_many_layers_names_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(routing, "save_picture", lambda figure, path: kept.append(figure))
    for count, named in ((1, ["0"]), (9, ["0", "10", "20", "30", "40", "50", "60", "80"]),
                         (15, [str(20 * n) for n in range(8)])):  # fmt: skip
        line = {"step": 1, "layers": [*range(0, 10 * count, 10)], "tokens": [[1, 0]] * count}
        draw_routing(tmp_path / "routing.png", [line], "a run")
        axes = kept[-1].axes[0]
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == named
        assert [10 * place for place in axes.get_yticks()] == [*map(int, named)]
        assert kept[-1].get_size_inches().tolist() == [8, 1.8 + 0.16 * max(6, count)]
        assert axes.images[0].get_array().tolist()[0] == [1, -4], "no logarithm of 0"


def test_progress_says_the_load() -> None:
    line = {"step": 3, "loss": 1.0, "expert_tokens": 8.0, "expert_load": 1.25, "idle_experts": 2}
    assert measured(line) == ", expert load 1.250, idle experts 2"


PARSED = {label: parse(SIZES | keys).experts for label, keys in MIXTURES.items()}
CORRECTED = [label for label, experts in PARSED.items() if experts and experts.corrected]


@pytest.mark.parametrize("label", CORRECTED)
def test_biases_move_toward_an_equal_load(label: str) -> None:
    """A copy of each bias is to change by the rate: those of a file may be read-only."""
    model = create(SIZES | MIXTURES[label], seed=0)
    before = model.parameters
    own = Routing(model, 0.125)
    with own.counting():
        model.loss(TOKENS, TOKENS)
    counts = own.counts(same)
    biases = "e_score_correction_bias", "expert_bias"
    names = [name for name in model.parameters if name.endswith(biases)]
    actual = own.bias_updates(counts)
    assert [*actual] == names
    for update, tokens in zip(actual.values(), counts, strict=True):
        expected = 0.125 * np.sign(tokens.mean() - tokens)
        np.testing.assert_array_equal(update, expected)
        assert expected.any()
    assert own.bias_updates(own.counts(same)) == {}
    assert Routing(model).bias_updates(counts) == {}
    assert [name for name in before if model.parameters[name] is not before[name]] == names


@pytest.mark.parametrize("scale", [1.0, 2.0**31])
def test_a_step_that_is_not_finite_leaves_biases(scale: float, tmp_path: Path) -> None:
    """Gradients of float16 overflow with the larger scale, so the optimizer skips the step."""
    text = tmp_path / "text.txt"
    text.write_text("the tree of a house walks " * 60)
    tokenizer = train_tokenizer(iter([text.read_text()]), 280)
    sizes = {"vocab_size": tokenizer.get_vocab_size()}
    model = create(SIZES | MIXTURES["glm4_moe"] | sizes, seed=0)
    model.save(tmp_path / "base")
    tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    settings = Settings(
        out=str(tmp_path / "run"), batch=2, tokens=16, steps=1,
        dtype="float16", loss_scale=scale, router_bias_update_rate=0.5, device="cpu",
    )  # fmt: skip
    Trainer(tmp_path / "base", text, settings, quiet=True).train()
    trained = load(tmp_path / "run" / "model").parameters
    names = [name for name in trained if name.endswith("e_score_correction_bias")]
    equal = [np.array_equal(trained[name], model.parameters[name]) for name in names]
    assert equal == [scale > 1] * len(names)
    assert names
