"""GGUF files of encoders, both ways, and their vectors beside llama.cpp's."""

import json
import shutil
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as kinds

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.configs.config import DenseModule
from unsloth_cupy.models.folders.pooling import pooling_files

from .exported import byte_level, read, write_tokenizer
from .peers import SIZES
from .planted import planted
from .test_encoders import ROOT

pytest.importorskip("gguf", reason="needs the extra `gguf`")
ARCHITECTURES = {
    "bert": "bert",
    "modernbert": "modern-bert",
    "embedding_gemma": "gemma-embedding",
}
TOKENS = np.random.default_rng(0).integers(3, 97, (1, 20))  # more than a window reaches
POOLINGS = {"mean": 1, "cls": 2, "last": 3}
ENDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = (
    "The inn, the tin!",
    "etain \u00e9TAIN  the\u4e16\u754cinn",
    "unseen thethe",
    "",
    "[SEP] x",
)


def folder_of(
    family: str, folder: Path, pooling: str = "mean", dense: tuple[DenseModule, ...] = ()
) -> Any:
    """Return an encoder that was loaded from a copy of its folder, with a tokenizer."""
    shutil.copytree(ROOT / family, folder)
    write_tokenizer(folder, byte_level(128))
    for name, text in pooling_files(48, pooling, dense).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    random = np.random.default_rng(0)
    for each in dense:
        tensors = {
            name.partition(".")[2]: random.standard_normal(shape).astype(np.float32) / 4
            for name, shape in each.shapes().items()
        }
        save_file(tensors, folder / each.path / "model.safetensors")
    return models.load(folder, dtype="float32")


def pieces(lower: bool) -> Tokenizer:
    """Return a WordPiece tokenizer, as BERT's."""
    words = ["the", "in", "##n", "t", "##in", "e", "##t", "##ain", ",", "!", "x", "\u4e16", "T"]
    vocab = {text: n for n, text in enumerate([*ENDS, *words, "##the", "\u00e9", "##A", "##AIN"])}
    tokenizer = Tokenizer(kinds.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(ENDS)
    return tokenizer


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_was_exported_comes_back(family: str, kind: str, tmp_path: Path) -> None:
    """All parameters and vectors, with the pooling of the folder."""
    for pooling, number in POOLINGS.items():
        own = tmp_path / pooling
        model = folder_of(family, own, pooling)
        models.export_gguf(own, tmp_path / f"{pooling}.gguf", kind=kind)
        values, _, _ = read(tmp_path / f"{pooling}.gguf")
        arch = values["general.architecture"]
        assert arch == ARCHITECTURES[family]
        assert values[f"{arch}.pooling_type"] == number
        loaded = models.load(tmp_path / f"{pooling}.gguf")
        assert loaded.parameters.keys() == model.parameters.keys()
        assert (loaded.head, loaded.config.causal) == ("none", False)
        most = 1e-6 if kind == "f32" else 0.05
        expected = model.embeddings(TOKENS)
        np.testing.assert_allclose(loaded.embeddings(TOKENS), expected, rtol=0, atol=most)
        other = model.embeddings(TOKENS, pooling="mean" if pooling != "mean" else "cls")
        assert np.abs(other - expected).max() > most


def dense_of(**changes: Any) -> tuple[DenseModule, ...]:
    """Return two Dense modules as EmbeddingGemma's; changes are those of the second."""
    first = DenseModule("2_Dense", 48, 96, biased=False, tanh=False)
    second = {"path": "3_Dense", "inputs": 96, "outputs": 48, "biased": False, "tanh": False}
    return first, DenseModule(**second | changes)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_dense_modules_come_back(kind: str, tmp_path: Path) -> None:
    model = folder_of("embedding_gemma", tmp_path / "m", dense=dense_of())
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind=kind)
    values, _, _ = read(tmp_path / "m.gguf")
    sizes = [values[f"gemma-embedding.dense_{n}_feat_{end}"] for n in "23" for end in ("in", "out")]
    assert sizes == [48, 96, 96, 48]
    loaded = models.load(tmp_path / "m.gguf")
    assert loaded.config.modules == dense_of()
    expected, most = model.embeddings(TOKENS), 1e-6 if kind == "f32" else 0.05
    np.testing.assert_allclose(loaded.embeddings(TOKENS), expected, rtol=0, atol=most)
    models.load(tmp_path / "m.gguf", dtype="float32").save(tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert again.config.modules == dense_of()
    np.testing.assert_allclose(again.embeddings(TOKENS), expected, rtol=0, atol=most)


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("bert", {}, "has no Dense modules, and this model has 2_Dense and 3_Dense"),
        ("embedding_gemma", {"path": "4_Dense"}, "has the Dense modules 2_Dense and 3_Dense, not"),
        ("embedding_gemma", {"biased": True}, "has no biases and activations in Dense modules"),
        ("embedding_gemma", {"tanh": True}, "has no biases and activations in Dense modules"),
        ("embedding_gemma", {"outputs": 32}, "has 48 outputs of 3_Dense, not 32"),
    ],
)
def test_dense_modules_that_llama_cpp_lacks(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder_of(family, tmp_path / "m", dense=dense_of(**changes))
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", [*ARCHITECTURES, "embedding_gemma with Dense"])
def test_vectors_are_those_of_llama_cpp(family: str, pooling: str, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs `peers`", exc_type=ImportError)
    family, _, dense = family.partition(" with ")
    model = folder_of(family, tmp_path / "m", pooling, dense_of() if dense else ())
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    assert any("GELU" in note for note in report.notes) == (family != "embedding_gemma")
    options = xllamacpp.CommonParams()
    options.model.path = str(tmp_path / "m.gguf")
    options.n_ctx, options.n_parallel, options.verbosity, options.embedding = 256, 1, -1, True
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.warmup = options.fit_params = False
    asked = {"input": TOKENS[0].tolist(), "encoding_format": "float"}
    answer = xllamacpp.Server(options).handle_embeddings(asked)
    actual, expected = np.array(answer["data"][0]["embedding"]), model.embeddings(TOKENS)[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3)  # GELU by tanh in float16


def test_the_command_names_the_program_for_vectors(tmp_path: Path) -> None:
    folder_of("bert", tmp_path / "m")
    words = ["export", str(tmp_path / "m"), str(tmp_path / "m.gguf")]
    done = click.testing.CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    assert "llama-embedding -m" in done.output
    assert "is an encoder, without next tokens" in done.output
    assert "llama-cli" not in done.output


def test_files_without_a_pooler_are_read(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out, and writes no tensor of its own in BERT's place."""
    model = folder_of("bert", tmp_path / "m")
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    without = planted(
        tmp_path / "m.gguf", tmp_path / "n.gguf", tensors={"cls.weight": None, "cls.bias": None}
    )
    loaded = models.load(without)
    expected = model.embeddings(TOKENS)
    np.testing.assert_allclose(loaded.embeddings(TOKENS), expected, rtol=0, atol=1e-6)
    loaded.save(tmp_path / "again")


@pytest.mark.parametrize("lower", [False, True])
def test_word_pieces(lower: bool, tmp_path: Path) -> None:
    """Of a file as it is loaded, and in llama.cpp: the tokens of tokenizer.json."""
    folder_of("bert", tmp_path / "m")
    tokenizer = pieces(lower)
    tokenizer.save(str(tmp_path / "m" / "tokenizer.json"))
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    loaded = models.load(tmp_path / "m.gguf").tokenizer
    for text in TEXTS:
        expected = tokenizer.encode(text).ids
        assert loaded.encode(text).tolist() == expected, text
    again = json.loads((models.load(tmp_path / "m.gguf").folder / "tokenizer.json").read_text())
    assert again["model"]["vocab"].keys() >= tokenizer.get_vocab().keys()
    pytest.importorskip("xllamacpp", reason="needs the extra `peers`", exc_type=ImportError)
    from .test_gguf_in_llama_cpp import Loaded

    theirs = Loaded(tmp_path / "m.gguf")
    for text in TEXTS:
        assert theirs.tokens(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits texts otherwise than BERT"),
        ({"post_processor": None}, "adds no tokens around a text"),
    ],
)
def test_word_pieces_that_llama_cpp_lacks(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder_of("bert", tmp_path / "m")
    write_tokenizer(tmp_path / "m", json.loads(pieces(True).to_str()) | change)
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "modernbert", "norm_bias": True}, "has no biases in its norms"),
        ({"model_type": "modernbert", "mlp_bias": True}, "has no bias in its output projection"),
    ],
)
def test_what_llama_cpp_computes_otherwise(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    model = models.create(sizes | config | {"architectures": ["ModernBertModel"]}, seed=0)
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(model, tmp_path / "m.gguf")
