"""Text to tokens and back, and what a model writes after a text or as an answer."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.models.text.chat import CHATML, CHATML_TOKENS
from unsloth_cupy.serving.texts import TextStream

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ASKED = [{"role": "user", "content": "Who sees the cat?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer("Who sees the cat? The dog does. " * 9, 300, CHATML_TOKENS)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    models.create(config, seed=0).save(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def test_text_goes_to_tokens_and_back(folder: Path) -> None:
    tokenizer = models.Tokenizer(folder)
    text = "The dog\n\n sees  the \N{CAT FACE}."
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == text
    marked = tokenizer.encode("<|im_start|>The")
    assert tokenizer.decode(marked) == "The"
    assert tokenizer.decode(marked, special_tokens=True) == "<|im_start|>The"
    assert len(tokenizer) > marked.max()
    with pytest.raises(ConfigError, match=r"shape \(1, 3\); pass one row"):
        tokenizer.decode(np.ones((1, 3), np.int64))
    begun = "<|im_start|>user\nWho sees the cat?<|im_end|>\n"
    assert tokenizer.chat(ASKED, answer=False) == begun
    assert tokenizer.chat(ASKED) == begun + "<|im_start|>assistant\n"


def test_a_text_goes_on_as_its_tokens_do(folder: Path) -> None:
    model = models.load(folder)
    options: Any = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    for prompt, text in (("The dog", "The dog"), (ASKED, model.tokenizer.chat(ASKED))):
        tokens = model.tokenizer.encode(text)
        whole = model.generate(tokens[None], **options)[0]
        expected = model.tokenizer.decode(whole)[len(model.tokenizer.decode(tokens)) :]
        assert model.generate_text(prompt, **options) == expected
        assert "".join(model.stream_text(prompt, **options)) == expected
        assert len(expected) > 6
        stop = expected[4:6]
        actual = model.generate_text(prompt, stop=stop, **options)
        assert (
            actual
            == expected.partition(stop)[0]
            == model.generate_text(prompt, stop=["#", stop], **options)
        )


def test_many_tokens_are_added_by_default(folder: Path) -> None:
    model = models.load(folder)
    room = model.config.positions - len(model.tokenizer.encode("The"))
    assert model.generate_text("The") == model.generate_text("The", max_new_tokens=room)


@pytest.fixture
def older(folder: Path, tmp_path: Path) -> Path:
    """Return a folder whose tokenizer is in vocab.json and merges.txt, as of Qwen2."""
    shutil.copytree(folder, tmp_path / "older", ignore=shutil.ignore_patterns("tokenizer.json"))
    values = json.loads((folder / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"] | {t["content"]: t["id"] for t in values["added_tokens"]}
    (tmp_path / "older" / "vocab.json").write_text(json.dumps(vocab))
    merges = "".join(" ".join(pair) + "\n" for pair in values["model"]["merges"])
    (tmp_path / "older" / "merges.txt").write_text("#version: 0.2\n" + merges)
    settings = json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"})
    (tmp_path / "older" / "tokenizer_config.json").write_text(settings)
    return tmp_path / "older"


def test_a_tokenizer_without_a_file_of_its_own_is_converted(older: Path, tmp_path: Path) -> None:
    """By transformers, whose class says how it splits texts; a run then has the whole file."""
    transformers = pytest.importorskip("transformers", reason="which converts it")
    expected = transformers.AutoTokenizer.from_pretrained(older)
    text = "The dog's 123 cats\n\n see <|im_start|>the dog."
    tokens = expected(text)["input_ids"]
    assert models.load(older).tokenizer.encode(text).tolist() == tokens
    data = tmp_path / "data.txt"
    data.write_text("The dog sees the cat. " * 40)
    settings = Settings(steps=1, batch=2, tokens=16, out=tmp_path / "run")
    run = Trainer(older, data, settings).train()
    again = models.Tokenizer(run.files.model)
    assert again.encode(text).tolist() == expected(text)["input_ids"]
    models.merge(older, tmp_path / "merged")
    assert (
        models.load(tmp_path / "merged").tokenizer.encode(text).tolist() == expected(text).input_ids
    )
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    models.export_gguf(older, tmp_path / "model.gguf")
    exported = models.load(tmp_path / "model.gguf").tokenizer
    assert exported.encode(text).tolist() == expected(text).input_ids


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("files", [("tokenizer.model",), ("vocab.json", "merges.txt")])
def test_what_is_not_converted_has_the_call_in_its_error(
    files: tuple[str, ...], known: bool, folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    if known:
        pytest.importorskip("transformers", reason="which finds them broken")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("tokenizer.json"))
    for name in files:
        (other / name).write_bytes(b"\n\x0e\n\x05<unk>")
    said = rf"cannot convert {' and '.join(files)} .*AutoTokenizer.from_pretrained\('{other}'\)"
    with pytest.raises(ConfigError, match=said):
        models.Tokenizer(other)


def test_a_model_has_the_tokenizer_of_its_folder(folder: Path, tmp_path: Path) -> None:
    model = models.load(folder)
    assert copy.deepcopy(model).tokenizer is not None
    model.add_adapter(2, seed=0)
    model.save_adapter(tmp_path / "adapter")
    assert models.load(folder, lora=tmp_path / "adapter").tokenizer.chat(ASKED).count("<|im_end|>")
    shutil.copy(folder / "tokenizer.json", tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("own")
    tuned = models.load(folder, lora=tmp_path / "adapter")
    assert tuned.tokenizer.chat(ASKED) == "own"

    bare = models.create(CONFIG | {"vocab_size": 300}, seed=0)
    assert bare.tokenizer is None
    with pytest.raises(ConfigError, match=r"no tokenizer.*set model\.tokenizer = models\.Token"):
        bare.generate_text("The", max_new_tokens=1)
    bare.tokenizer = models.Tokenizer(folder)
    assert bare.generate_text("The", max_new_tokens=3, temperature=0.0) is not None


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("a", {"stop": ""}, "stop='' must be a text"),
        ("a", {"stop": [3]}, r"stop=\[3\] must be a text, or a list of texts"),
        ("a", {"stop": 3}, "CALL: stop=3 must be a text, or a list of texts"),
        ([], {}, r"CALL: prompt=\[\] contains no message; pass"),
        ("The cat. " * 99, {}, "leaves no room for new tokens"),
        ("a", {"temperature": -1}, "CALL: temperature=-1 must be"),
        ([{"role": "assistant"}], {"tools": [{}]}, "has no attribute|does not take|undefined"),
        ([{"role": "user"}], {}, r"prompt\[0\] has no content; pass a text, or \[{"),
        ([*ASKED, {"role": "user", "content": None}], {}, r"prompt\[1\] has no content; pass"),
        ([{"content": "a"}], {}, r"prompt\[0\] has no role; pass a text"),
        (
            {"role": "user", "content": "a"},
            {},
            "prompt={'role': 'user', 'content': 'a'} is not a",
        ),
        (None, {}, "prompt=None is not a chat; pass"),
        (["a", "b"], {}, r"prompt=\['a', 'b'\] is not a chat; pass"),
    ],
)
def test_wrong_calls(prompt: Any, options: Any, said: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    strict = "{{ messages[0].content + '' }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(strict)
    model = models.load(tmp_path / "model")
    with pytest.raises(ConfigError, match=said.replace("CALL", "^generate_text")):
        model.generate_text(prompt, max_new_tokens=2, **options)
    # at the call, not at the first piece
    with pytest.raises(ConfigError, match=said.replace("CALL", "^stream_text")):
        model.stream_text(prompt, max_new_tokens=2, **options)


def test_a_text_ends_where_the_positions_do(folder: Path) -> None:
    model = models.load(folder)
    tokens = model.tokenizer.encode("The dog " * 12)
    text = model.tokenizer.decode(tokens)
    pieces = [*model.stream_text(text, max_new_tokens=999, temperature=1.0, seed=0)]
    assert len(pieces) - 1 <= 64 - len(tokens)


def metaspace(*special: str) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds

    tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        ["the theory of the thing, hello"] * 3,
        trainers.BpeTrainer(
            vocab_size=100, special_tokens=["<unk>", *special], show_progress=False
        ),
    )
    return tokenizer


@pytest.mark.parametrize("marks", [1, 2, 5, 9])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_space_after_special_tokens_is_streamed(marks: int, before: int) -> None:
    tokenizer = metaspace("<|mark|>")
    mark, words = tokenizer.token_to_id("<|mark|>"), tokenizer.encode("the theory of").ids
    for tokens in ([*words, *[mark] * marks, *words], [*[mark] * marks, *words, mark, *words]):
        stream = TextStream(tokenizer, tokens[:before])
        actual = "".join(map(stream.push, tokens[before:])) + stream.flush() + stream.flush()
        assert tokenizer.decode(tokens[:before]) + actual == tokenizer.decode(tokens)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        models.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(ConfigError, match="is broken"):
        models.Tokenizer(tmp_path)
