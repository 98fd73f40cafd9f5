"""Training on conversations with an environment: rows as one text, files, resuming, refusals."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.finetune.methods.environments import environment_of, word_of
from unsloth_cupy.finetune.methods.policy_methods import Policy

from ..models.peers import MIXTURES
from ..models.test_conversations import model_of

ROWS = [
    {"messages": [{"role": "user", "content": f"Who sees {n}?"}], "answer": str(n)}
    for n in range(24)
]
SOURCE = """
class Game:
    def reset(self, answer, prompt):
        self.answer, self.count = answer, 0
        return f" ({prompt[0]['content'][-2:]})"

    def step(self, text):
        self.count += 1
        if self.answer == "3":
            raise KeyError(text[:0] + "lost")
        return "The dog.", len(set(text)) / 10, self.count == 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    model_of(path)
    (path.parent / "game.py").write_text(SOURCE)
    return path


def settings_of(folder, out, **changed):
    usual = {
        "method": "grpo", "environment": f"{folder.parent}/game.py:Game", "samples": 4, "batch": 2,
        "max_new_tokens": 60, "steps": 3, "lr": 1e-3, "out": str(out), "evaluate_every": 3,
    }  # fmt: skip
    return Settings(**usual | changed)


@pytest.mark.parametrize("changed", [{}, {"method": "rloo"}, {"invariant": True}, {"lora": 4}])
def test_methods_train_on_conversations(folder, tmp_path, monkeypatch, changed):
    rows, texts = [], Policy._texts

    def noted(self, *arguments):
        result = texts(self, *arguments)
        rows.extend(result[0])
        return result

    monkeypatch.setattr(Policy, "_texts", noted)
    settings = settings_of(folder, tmp_path / "run", **changed)
    run = Trainer(str(folder), ROWS, settings, quiet=True).train()
    lines = [line for line in run.files.lines() if "loss" in line]
    assert len(lines) == 3
    for line in lines:
        assert np.isfinite(line["loss"])
        assert line["reward"] is None or line["reward"] > 0
        if changed == {"invariant": True}:
            assert line["ratio"] == 1.0
        assert line["ratio"] == pytest.approx(1.0, abs=1e-4)
    tokenizer = models.Tokenizer(folder)
    several = 0
    for text in rows:
        trained = [*np.flatnonzero(text.labels >= 0)]
        spans = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)
        between = [text.tokens[a[-1] + 1 : b[0]] for a, b in pairwise(spans)]
        for each in between:
            expected = "\n<|im_start|>user\nThe dog.<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(each, special_tokens=True).endswith(expected)
        several += len(spans) == 2
        assert "?  (" not in tokenizer.decode(text.tokens)
        assert (np.asarray(text.reference)[text.labels < 0] == 0).all()
    assert several


@pytest.mark.parametrize("changed", [{}, {"pack": False}])
def test_a_mixture_trains_with_the_experts_of_its_conversations(tmp_path, monkeypatch, changed):
    """They are those of the whole text, for trained tokens and for observations."""
    model_of(tmp_path / "model", **MIXTURES["qwen3_moe"] | {"initializer_range": 0.2})
    (tmp_path / "game.py").write_text(SOURCE)
    batches, inputs = [], Policy.inputs

    def noted(self, batch):
        arrays = inputs(self, batch)
        batches.extend([arrays] * ("routes" in arrays))
        return arrays

    monkeypatch.setattr(Policy, "inputs", noted)
    settings = settings_of(tmp_path / "model", tmp_path / "run", steps=1, **changed)
    run = Trainer(str(tmp_path / "model"), ROWS, settings, quiet=True).train()
    (line,) = [line for line in run.files.lines() if "loss" in line]
    assert np.isfinite(line["loss"])
    assert line["ratio"] == pytest.approx(1.0, abs=1e-4)
    model = models.load(tmp_path / "model")
    checked = 0
    for arrays in batches:
        own, seen = {n: arrays[n] for n in ("offsets", "mask") if n in arrays}, []
        model.hidden(model.parameters, arrays["tokens"], routers=seen, **own)
        expected, actual = np.stack([each.experts for each in seen], axis=2), arrays["routes"]
        known = actual >= 0
        np.testing.assert_array_equal(actual[known], expected.reshape(actual.shape)[known])
        trained = np.asarray(arrays["labels"]) >= 0  # a label stands at its own token
        before = np.roll(trained, -1, axis=-1)
        assert known.all(axis=(-1, -2))[before].all()
        checked += before.sum()
    assert checked > 100


def test_a_resumed_run_needs_the_same_environment(folder, tmp_path):
    (folder.parent / "other.py").write_text(SOURCE)
    word = f"{folder.parent}/other.py:Game"
    settings = settings_of(folder, tmp_path / "run", environment=word, save_every=1)
    Trainer(str(folder), ROWS, settings, quiet=True).train()
    stored = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert stored["max_turns"] == 8
    assert stored["environment"] == word
    (folder.parent / "other.py").write_text(SOURCE.replace("/ 10", "/ 9"))
    with pytest.raises(ConfigError, match="environment Game has changed since"):
        Trainer(str(folder), ROWS, settings, quiet=True).train()


def test_a_class_of_this_process_and_its_reward(folder, tmp_path):
    class Alone:
        def reset(self):
            self.count = 0

        def step(self, text):
            self.count += 1
            return "More", 0.0, self.count == 3

    lengths = []

    def talks(completions, answer):
        lengths.extend(len(each) for each in completions)
        return [float(len(each[0]["content"])) for each in completions]

    settings = settings_of(folder, tmp_path / "run", environment=None, max_turns=2, steps=1)
    run = Trainer(str(folder), ROWS, settings, reward=talks, environment=Alone, quiet=True).train()
    line = next(line for line in run.files.lines() if "loss" in line)
    assert {"reward_talks", "reward_Alone"} <= line.keys()
    assert set(lengths) <= {1, 2, 3}
    assert max(lengths) > 1


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"environment": "game.py"}, "names nothing in a Python file; write FILE.py:NAME"),
        ({"environment": "{}/none.py:Game"}, "names nothing in a Python file"),
        ({"environment": "{}/game.py:None_"}, "the file defines no callable None_"),
        ({"environment": "{}/broken.py:Game"}, "the file raised ZeroDivisionError"),
        ({"environment": None}, "needs a reward; give reward, .* or environment"),
        ({"tensor_parallel": 2}, "does not work with environment"),
        ({"max_turns": 0}, "max_turns=0: give a whole number of 1 or more"),
        ({"method": "dpo", "samples": None, "max_new_tokens": None}, "dpo does not use"),
        ({"method": "sft", "environment": None, "samples": None, "max_new_tokens": None,
          "max_turns": 4}, "does not use max_turns"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(folder, tmp_path, changed, match):
    (folder.parent / "broken.py").write_text("1 / 0")
    word = changed.get("environment")
    changed |= {"environment": word.format(folder.parent)} if word else {}
    with pytest.raises(ConfigError, match=match):
        settings_of(folder, tmp_path / "run", **changed).check(Path(folder), lines=True)


def test_texts_without_chats_are_refused(folder, tmp_path):
    rows = [{"prompt": f"Who? {n}", "answer": "1"} for n in range(9)]
    with pytest.raises(ConfigError, match="talks in chats, and this is a text"):
        Trainer(str(folder), rows, settings_of(folder, tmp_path / "run"), quiet=True).train()


def test_words_of_environments():
    class Alone:
        pass

    word = word_of(Alone)
    own = environment_of(word)
    assert (word, own.name, own.create, own.judges) == ("Alone", "Alone", Alone, False)
    assert environment_of(None) is None
    with pytest.raises(ConfigError, match="pass a class, a function that returns an object"):
        word_of(5)
    with pytest.raises(ConfigError, match="pass a class to Trainer"):
        Settings(environment=Alone)
