"""Fine-tuning of encoders: embeddings and labels, with the pooling of sentence-transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Settings, Trainer
from unsloth_cupy.models import load
from unsloth_cupy.models.folders.pooling import pooling_files, pooling_of

ROOT = Path(__file__).parent.parent / "golden" / "encoders"
WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "tree", "walks", "and", "sings", "far")
TOKENS = np.array([[4, 5, 6]])
TEXTS = ["a tree walks", "a tree sings and walks far", "sings far", "walks and walks"]


def folder(path: Path, family: str, pooling: str | None = None) -> Path:
    """Write an encoder with a tokenizer that puts [CLS] and [SEP] around a text."""
    shutil.copytree(ROOT / family, path)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=around
    )
    tokenizer.save(str(path / "tokenizer.json"))
    own = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    own["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    if pooling is not None:
        state = json.loads((path / "config.json").read_text()).get("embedding_dim", 48)
        write(path, dict(pooling_files(state, pooling)))
    return path


def write(path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def data(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("lora", [None, Lora(2)])
@pytest.mark.parametrize("family", ["bert", "modernbert", "embedding_gemma", "embedding_gemma2"])
def test_embeddings_are_pooled_as_the_folder_says(
    family: str, lora: Lora | None, tmp_path: Path
) -> None:
    base = folder(tmp_path / "base", family, "cls")
    pairs = [{"query": q, "document": d} for q, d in zip(TEXTS, TEXTS[::-1], strict=True)]
    settings = Settings(steps=2, batch=2, tokens=16, lr=0.01, method="embed", out=tmp_path / "run")
    run = Trainer(base, data(tmp_path / "t.jsonl", pairs), settings, lora=lora).train()
    model = load(run.files.model)
    assert pooling_of(run.files.model) == "cls"
    written = json.loads((run.files.model / "1_Pooling" / "config.json").read_text())
    assert written["word_embedding_dimension"] == model.embeddings(TOKENS).shape[1]
    tokens = model.tokenizer.encode(TEXTS[0])[None]
    assert (tokens[0, 0], tokens[0, -1]) == (1, 2)
    actual = model.embeddings(tokens)
    np.testing.assert_array_equal(actual, model.embeddings(tokens, pooling="cls"))
    assert np.abs(actual - load(base, dtype="float32").embeddings(tokens)).max() > 1e-4
    assert np.abs(actual - model.embeddings(tokens, pooling="mean")).max() > 1e-2


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_labels(family: str, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", family)
    rows = [{"text": text, "label": str("tree" in text)} for text in TEXTS] * 8
    settings = Settings(steps=30, batch=8, tokens=16, lr=0.003, method="classify", seed=0,
                        out=tmp_path / "run")  # fmt: skip
    run = Trainer(base, data(tmp_path / "t.jsonl", rows), settings).train()
    model = load(run.files.model)
    assert model.head == "sequence_classification"
    labels = [max(each, key=each.__getitem__) for each in model.predict(TEXTS)]
    assert labels[0] == labels[1] != labels[3]  # the third text is held out
    transformers = pytest.importorskip("transformers", reason="reads the folder")
    import torch

    peer = transformers.AutoModelForSequenceClassification.from_pretrained(run.files.model)
    tokens = model.tokenizer.encode(TEXTS[0])[None]
    with torch.no_grad():
        expected = peer(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model.logits(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "embedding_gemma", "embedding_gemma2"])
def test_vectors_are_those_of_sentence_transformers(
    family: str, pooling: str, tmp_path: Path
) -> None:
    peers = pytest.importorskip("sentence_transformers", reason="computes the references")
    base = folder(tmp_path / "base", family, pooling)
    expected = peers.SentenceTransformer(str(base), device="cpu").encode(TEXTS)
    model = load(base)
    rows = [model.tokenizer.encode(text) for text in TEXTS]
    longest = max(map(len, rows))
    mask = np.arange(longest) < np.array([[len(row)] for row in rows])
    tokens = np.array([[*row, *[0] * (longest - len(row))] for row in rows])
    actual = model.embeddings(tokens, mask=mask)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_files_of_other_versions_and_poolings(tmp_path: Path) -> None:
    """The newer key names the mode; other poolings and modules are named."""
    assert pooling_of(tmp_path) is None
    assert pooling_of(None) is None
    for mode, expected in (("lasttoken", "last"), (["mean"], "mean"), ("cls", "cls")):
        write(tmp_path, {"1_Pooling/config.json": json.dumps({"pooling_mode": mode})})
        assert pooling_of(tmp_path) == expected
    for values in ({"pooling_mode": ["mean", "cls"]}, {"pooling_mode_max_tokens": True}):
        write(tmp_path, {"1_Pooling/config.json": json.dumps(values)})
        with pytest.raises(
            ConfigError, match=r"the pooling is .*; choose one of cls, mean, lastto"
        ):
            pooling_of(tmp_path)
    kinds = ("Transformer", "LSTM")
    modules = [{"path": str(n), "type": f"sentence_transformers.models.{k}"} for n, k in
               enumerate(kinds)]  # fmt: skip
    write(tmp_path, {"modules.json": json.dumps(modules)})
    with pytest.raises(ConfigError, match="has the module LSTM, which changes the embeddings"):
        pooling_of(tmp_path)
