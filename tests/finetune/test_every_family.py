"""A step of training with every family of models: what a run saves is the model that it trained."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models, plan_memory
from unsloth_cupy.finetune import Lora, Settings, Trainer
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.ops.quantized.weight import Quantized

from ..harness.sampling import Sample
from ..memory.test_memory import peak_of_a_step
from ..models.peers import CONFIGS, MIXTURES, RELATIVES, SIZES
from ..parallel.ranks import by_sockets

EVERY = CONFIGS | RELATIVES | MIXTURES
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))
TURNS = 7  # days in which every family has its turn


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a text and a tokenizer of it."""
    text = tmp_path_factory.mktemp("words") / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["a", "tree", "walks"], 400)))
    return text, train_tokenizer(iter([text.read_text()]), 300)


def folder(path: Path, label: str, words: tuple[Path, Any]) -> Path:
    """Write a new model of a family, with the tokenizer of a text."""
    _, tokenizer = words
    own = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    models.create(SIZES | EVERY[label] | own, seed=0).save(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_every_family_has_a_case() -> None:
    assert {config["model_type"] for config in EVERY.values()} == FAMILIES.keys()


@pytest.mark.parametrize("way", ["full", "lora", "memory"])
@pytest.mark.parametrize("label", Sample.one_in(TURNS, EVERY))
def test_a_saved_model_computes_what_was_trained(
    label: str, way: str, words: tuple[Path, Any], tmp_path: Path
) -> None:
    base = folder(tmp_path / "base", label, words)
    settings = Settings(steps=1, batch=2, tokens=8, lr=0.01, out=tmp_path / "run")
    model = models.load(base) if way == "memory" else base
    run = Trainer(model, words[0], settings, lora=Lora(2) if way == "lora" else None).train()
    expected = run.model.logits(TOKENS)
    assert (expected != models.load(base).logits(TOKENS)).any()
    for saved in (run.files.model, *run.files.checkpoints()):
        np.testing.assert_array_equal(models.load(saved).logits(TOKENS), expected)


@pytest.mark.parametrize("label", Sample.one_in(TURNS, EVERY))
def test_a_run_that_is_given_more_steps_has_the_bits_of_one_run(
    label: str, words: tuple[Path, Any], tmp_path: Path
) -> None:
    """Weights, buffers, optimizer and data go on where the first run ended."""
    base = folder(tmp_path / "base", label, words)
    options: dict[str, Any] = {"batch": 2, "tokens": 8, "lr": 0.01, "decay": "constant"}
    runs = [
        Trainer(base, words[0], Settings(steps=steps, out=tmp_path / out, **options)).train()
        for steps, out in ((2, "whole"), (1, "parts"), (2, "parts"))
    ]
    whole, one, both = (run.model.parameters for run in runs[:1] + runs[1:])
    assert any((each != one[name]).any() for name, each in whole.items())
    for name, expected in whole.items():
        np.testing.assert_array_equal(both[name], expected, err_msg=name)


@pytest.mark.parametrize("label", Sample.one_in(TURNS, EVERY))
def test_a_plan_is_near_what_a_step_uses(label: str) -> None:
    """On a CPU, to 3 %; of experts, plan the most memory that any choice of experts uses."""
    config = SIZES | EVERY[label] | {"vocab_size": 512}
    ids = np.random.default_rng(0).integers(3, 97, (2, 48))
    plan = plan_memory(config, batch=2, tokens=48, dtype="float32", device="cpu")
    peak = peak_of_a_step(config, ids)
    assert abs(plan.total - peak) < 0.03 * peak


@pytest.mark.parametrize("label", Sample.one_in(TURNS, EVERY))
def test_adapters_over_4_bits_have_gradients(label: str) -> None:
    model = models.create(SIZES | EVERY[label], seed=0)
    models.quantize(model, "nf4", least=0)
    assert any(isinstance(value, Quantized) for value in model.parameters.values())
    model.add_adapter(2, seed=0)
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    assert np.isfinite(loss)
    assert all(np.isfinite(value).all() for value in gradients.values())
    assert any(np.asarray(value).any() for value in gradients.values())


SHORT = ("--steps", 1, "--batch", 2, "--tokens", 16)
GRIDS = (
    "--data-parallel 2 --zero 1",
    "--data-parallel 2 --zero 3",
    "--tensor-parallel 2",
    "--pipeline-parallel 2",
    "--expert-parallel 2",
)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["glm4_moe", "ernie4_5_moe", "apertus"])
def test_ranks_save_what_has_no_gradients(
    label: str, words: tuple[Path, Any], tmp_path: Path
) -> None:
    """A model that ranks gather has all parameters, equal to those of one process."""
    base = folder(tmp_path / "base", label, words)
    grids = [grid for grid in GRIDS if "expert" not in grid or label != "apertus"]
    command = ("finetune", base, "--text", words[0], *SHORT)
    asked = [
        [*map(str, command), "--out", str(tmp_path / str(number)), *grid.split(), "--"]
        for number, grid in enumerate(grids)
    ]
    words_of_all = [*chain.from_iterable(asked)][:-1]
    ended = by_sockets(2, "tests.parallel.commands", *words_of_all, limit=300)
    assert [each.code for each in ended] == [0, 0], ended[0].said
    whole = models.load(base)
    frozen = whole.parameters.keys() - whole.trainable.keys()
    assert frozen
    for number, grid in enumerate(grids):
        for saved in (f"{number}/model", f"{number}/checkpoint-00000001"):
            parameters = models.load(tmp_path / saved).parameters
            for name in frozen:
                np.testing.assert_array_equal(
                    parameters[name], whole.parameters[name], f"{grid} {name}"
                )
