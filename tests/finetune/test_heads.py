"""Methods that train a head: what they save is transformers' model, and predicts as trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Settings, Trainer
from unsloth_cupy.models import load

from ..cli.test_cli import assert_one_clear_error, run
from ..golden import generate_methods as golden
from .test_methods import model_times, write


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    model_times(1.0, folder / "model")
    write(folder / "pairs.jsonl", golden.pairs())
    return folder


def trained(
    home: Path, out: Path, method: str, data: Path, *, lora: Any = None, **more: Any
) -> Any:
    settings = {"eval": data, "lr": 1e-2, "steps": 3, "batch": 6, "tokens": 20} | more
    return Trainer(home / "model", data, Settings(method=method, out=out, **settings), lora=lora)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [None, Lora(2)])
def test_a_reward_model_is_that_of_transformers(lora: Any, home: Path, tmp_path: Path) -> None:
    """Saved with its head, also beside an adapter; each reward is that of the end of a text."""
    transformers = pytest.importorskip("transformers", reason="which reads the model")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    made = trained(home, tmp_path / "run", "reward", home / "pairs.jsonl", lora=lora).train()
    texts = [p["prompt"] + p["chosen"] + "</s>" for p in golden.pairs()]
    model = load(made.folder / "model")
    ours = [each["reward"] for each in model.predict(texts)]
    line = made.files.lines()[-1]
    others = [p["prompt"] + p["rejected"] + "</s>" for p in golden.pairs()]
    margins = [a - b["reward"] for a, b in zip(ours, model.predict(others), strict=True)]
    assert line["held_out_margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    if lora is not None:
        peft = pytest.importorskip("peft", reason="which reads the adapter")
        base = transformers.AutoModelForSequenceClassification.from_pretrained(
            home / "model", num_labels=1, dtype=torch.float32
        )
        theirs = peft.PeftModel.from_pretrained(base, made.folder / "model")
    else:
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
            made.folder / "model", dtype=torch.float32
        )
        assert theirs.config.id2label == {0: "reward"}
    with torch.no_grad():
        for text, expected in zip(texts, ours, strict=True):
            tokens = torch.tensor([golden.tokenizer().encode(text).ids])
            assert theirs(tokens).logits.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_what_does_not_fit_a_head_is_one_error(home: Path, tmp_path: Path) -> None:
    words = ("finetune", home / "model", "--data", home / "pairs.jsonl", "--tokens", 20)
    done = run(*words, "--method", "dpo", "--lora", 2, "--steps", 1, "--out", tmp_path / "adapter")
    assert done.exit_code == 0, done.output
    adapted = ("finetune", tmp_path / "adapter", *words[2:], "--method", "reward")
    cure = "holds adapters without the head of --method reward; merge it first: unsloth-cupy merge"
    assert_one_clear_error(run(*adapted, "--out", tmp_path / "run"), cure)
    sampled = run(*words, "--method", "reward", "--sample-prompt", "w1", "--out", tmp_path / "run")
    assert_one_clear_error(sampled, "is for a language model, which --method reward trains none")
    settings = Settings(method="reward", steps=1, out=tmp_path / "run", tokens=20)
    in_memory = Trainer(load(home / "model"), home / "pairs.jsonl", settings)
    with pytest.raises(ConfigError, match="another head than the model's, causal_lm; load it with"):
        in_memory.train()
    wrong = golden.scored()
    wrong[1]["margin"] = "much"
    data = write(tmp_path / "wrong.jsonl", wrong)
    with pytest.raises(ConfigError, match=r"wrong.jsonl:2: margin is much; write a number"):
        trained(home, tmp_path / "run", "reward", data).train()
    with pytest.raises(ConfigError, match=r"predict: .*causal_lm"):
        load(home / "model").predict(["w1"])
    assert not (tmp_path / "run").exists()


def test_a_run_says_how_its_head_is_used(home: Path, tmp_path: Path) -> None:
    words = ("finetune", home / "model", "--data", home / "pairs.jsonl", "--tokens", 20)
    done = run(*words, "--method", "reward", "--steps", 2, "--lora", 2, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert f'models.load("{tmp_path}/run/model"); print(model.predict(["a text"]))' in done.output
    assert "generate" not in done.output
    assert "held-out reward mean" in done.output
    values = json.loads((tmp_path / "run/model/config.json").read_text())
    assert values["id2label"] == {"0": "reward"}
