"""What a GGUF file says of a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from tokenizers import models as kinds

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError

from .exported import ENDS, MERGES, byte_level, make, read, write_tokenizer

pytest.importorskip("gguf", reason="needs the extra `gguf`")

Values = dict[str, Any]
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def said(folder: Path, values: Values, **settings: Any) -> tuple[Values, tuple[str, ...]]:
    """Return the keys of an exported model with this tokenizer, and the notes."""
    make(folder / "m", "llama")
    write_tokenizer(folder / "m", values, **settings)
    report = models.export_gguf(folder / "m", folder / "m.gguf")
    read_back = read(folder / "m.gguf")[0]
    return {
        name.removeprefix(KEY): value for name, value in read_back.items() if "tokenizer" in name
    }, report.notes


def around(single: str) -> Values:
    """Return a post_processor that puts tokens around a text."""
    tokens = [(text, n) for n, text in enumerate(ENDS)]
    made = Tokenizer(kinds.BPE())
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    processor: Values = json.loads(made.to_str())["post_processor"]
    return processor


def characters() -> Values:
    """Return a tokenizer over characters, with bytes for those that it does not know."""
    values = byte_level(97)
    texts = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", *"theat", "th", "the", "\u2581the"]
    texts = [*dict.fromkeys(texts)]
    values["model"] |= {
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {text: n for n, text in enumerate(texts)},
        "merges": ["t h", "th e", "\u2581 the"],
    }
    values["added_tokens"][0]["content"] = "<unk>"
    values["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    values["pre_tokenizer"] = None
    return values


def test_tokens_types_and_merges(tmp_path: Path) -> None:
    values = byte_level(97)
    size = len(values["model"]["vocab"])
    values["model"]["unk_token"] = "<pad>"  # which is a special token here
    spare = {"id": 40, "content": "<tool>", "special": False, "lstrip": True, "rstrip": False,
             "single_word": False, "normalized": True}  # fmt: skip
    values["added_tokens"].append(spare)
    actual, notes = said(tmp_path, values)
    assert actual["model"] == "gpt2"
    assert actual["pre"] == "gpt-2"
    tokens, types = actual["tokens"], actual["token_type"]
    assert tokens[:size] == [*values["model"]["vocab"]]
    assert tokens[40] == "<tool>"
    assert tokens[size:40] + tokens[41:] == [f"[PAD{n}]" for n in range(size, 97) if n != 40]
    assert types == [
        CONTROL if n < 3 else NORMAL if n < size else USER if n == 40 else UNUSED for n in range(97)
    ]
    assert actual["merges"] == [" ".join(pair) for pair in MERGES]
    assert notes == ("llama.cpp may keep the spaces around <tool>",)


@pytest.mark.parametrize(
    ("single", "begin", "end"),
    [("$A", False, False), ("<s> $A", True, False), ("<s> $A </s>", True, True)],
)
def test_tokens_around_a_text(single: str, begin: bool, end: bool, tmp_path: Path) -> None:
    actual, _ = said(tmp_path, byte_level(97) | {"post_processor": around(single)})
    assert (actual["add_bos_token"], actual["add_eos_token"]) == (begin, end)
    assert (actual["bos_token_id"], actual["eos_token_id"]) == (1, 2)
    assert actual["padding_token_id"] == 0  # config.json's, as there are no settings


def test_what_stands_around_a_text_goes_before_the_settings(tmp_path: Path) -> None:
    """Lengths of an earlier call, which some files keep, mean nothing."""
    values = byte_level(97) | {
        "post_processor": around("</s> $A <pad>"),
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0,
                       "direction": "Right"},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Left", "pad_id": 1, "pad_token": "<s>",
                    "pad_type_id": 0, "pad_to_multiple_of": None},
    }  # fmt: skip
    actual, notes = said(tmp_path, values, bos_token="<s>", eos_token="</s>")
    assert [actual[f"{role}_token_id"] for role in ("bos", "eos", "eot")] == [2, 0, 2]
    assert actual["add_bos_token"] is actual["add_eos_token"] is True
    assert notes == ()


def test_a_vocabulary_without_the_letter_that_is_tried(tmp_path: Path) -> None:
    values = byte_level(97) | {"post_processor": around("<s> $A")}
    values["model"]["vocab"]["b"] = values["model"]["vocab"].pop("a")
    assert said(tmp_path, values)[0]["add_bos_token"] is True


def test_special_tokens(tmp_path: Path) -> None:
    """The settings go first; up to three tokens end a text; more are said."""
    values = byte_level(97)
    config = {"model_type": "llama", "eos_token_id": [2, 7, 8, 9]}
    make(tmp_path / "m", config)
    write_tokenizer(
        tmp_path / "m", values, eos_token="a", unk_token={"content": "<pad>"}, bos_token="</s>",
    )  # fmt: skip
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    actual = read(tmp_path / "m.gguf")[0]
    a = values["model"]["vocab"]["a"]
    assert [actual[f"{KEY}{role}_token_id"] for role in ("eos", "eot", "eom")] == [a, 2, 7]
    assert actual[KEY + "unknown_token_id"] == 0
    assert actual[KEY + "bos_token_id"] == 2
    assert report.notes == ("a file has at most three tokens that end a text; left out: 8, 9",)


def test_no_token_ends_a_text(tmp_path: Path) -> None:
    make(tmp_path / "m", {"model_type": "llama", "eos_token_id": None})
    report = models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert report.notes == ("neither model nor tokenizer has a token that ends a text",)
    assert KEY + "eos_token_id" not in read(tmp_path / "m.gguf")[0]


def test_chat_templates(tmp_path: Path) -> None:
    """A file goes before the settings; of several that is taken which is the default."""
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    for name, setting, expected in (
        ("none", None, None),
        ("one", "x", "x"),
        ("several", several, "d"),
    ):
        (tmp_path / name).mkdir()
        actual, _ = said(tmp_path / name, byte_level(97), chat_template=setting)
        assert actual.get("tokenizer.chat_template") == expected
    (tmp_path / "one" / "m" / "chat_template.jinja").write_text("file")
    models.export_gguf(tmp_path / "one" / "m", tmp_path / "file.gguf")
    assert read(tmp_path / "file.gguf")[0]["tokenizer.chat_template"] == "file"


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(rule: str) -> list[Values]:
    return [
        {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False},
        BYTES | {"use_regex": False},
    ]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = [{"type": "Digits", "individual_digits": True}, BYTES]


@pytest.mark.parametrize(
    ("steps", "whole", "name"),
    [
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "dbrx"),
        (split(LLAMA3.replace("{1,3}", "")), False, "qwen2"),
        ([split(LLAMA3)[0] | {"behavior": "Removed", "invert": True}, BYTES | {"use_regex": False}],
         False, "dbrx"),
        (DIGITS, False, "smollm"),
    ],
)  # fmt: skip
def test_rules_that_cut_words(steps: list[Values], whole: bool, name: str, tmp_path: Path) -> None:
    values = byte_level(97)
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    values["model"]["ignore_merges"] = whole
    values["normalizer"] = {"type": "NFC"} if name == "qwen2" else None
    actual, notes = said(tmp_path, values)
    assert actual["pre"] == name
    assert ["NFC" in note for note in notes] == [True] * (name == "qwen2")


def test_characters_with_bytes(tmp_path: Path) -> None:
    """Scores fall in the order of the merges; tokens that none makes come last."""
    values = characters()
    values["model"]["vocab"]["he"] = 12
    values["model"]["merges"] += ["h e", "t he"]  # the second to make "the"
    values["added_tokens"].append(values["added_tokens"][1] | {
        "id": 20, "content": "\u2581\u2581", "special": False})  # fmt: skip
    actual, notes = said(tmp_path, values)
    assert (actual["tokens"][20], actual["token_type"][20]) == ("  ", USER)
    assert (actual["model"], actual["pre"], actual["add_space_prefix"]) == (
        "llama",
        "default",
        True,
    )
    texts = actual["tokens"][:12]
    assert texts == ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", *"thea", "th", "the", "\u2581the"]
    assert actual["token_type"][:5] == [UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL]
    assert actual["scores"][9:13] == [0.0, -1.0, -2.0, -3.0]
    assert {*actual["scores"][:9], *actual["scores"][13:]} == {-5.0}
    assert "merges" not in actual
    assert notes == ()


def test_merges_that_llama_cpp_does_not_keep_to_are_said(tmp_path: Path) -> None:
    values = characters()
    values["model"]["vocab"]["he"] = 12
    _, notes = said(tmp_path, values)
    assert notes == (
        "llama.cpp also merges 't' and 'he' to 'the', unlike this tokenizer: some"
        " texts may have other tokens",
    )


def test_spaces_before_a_text(tmp_path: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    meta = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    gemma = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    for name, normalizer, steps, prefix in (
        ("replace", replace, gemma, False),
        ("meta", None, meta, True),
        ("never", None, meta | {"prepend_scheme": "never"}, False),
    ):
        (tmp_path / name).mkdir()
        values = characters() | {"normalizer": normalizer, "pre_tokenizer": steps}
        actual, notes = said(tmp_path / name, values)
        assert actual["add_space_prefix"] is prefix
        assert len(notes) == 2 * (name == "meta")


WAYS = {
    "plain": {}, "word": {"single_word": True}, "left": {"lstrip": True},
    "right": {"rstrip": True}, "normal": {"normalized": True},
}  # fmt: skip
SCHEMES = ("bytes", "prepend", "first", "always", "never")


def with_added(scheme: str, special: bool) -> Values:
    """Return a tokenizer that puts a space before texts, and has an added token of each kind."""
    values = byte_level(97) if scheme == "bytes" else characters()
    if scheme in ("first", "always", "never"):
        values["normalizer"] = None
        values["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False,
        }  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for n, (name, way) in enumerate(WAYS.items(), len(values["model"]["vocab"])):
        token = {"id": n, "content": f"<|{name}|>", "special": special, **flags, **way}
        values["added_tokens"].append(token)
    return values


def around_added() -> dict[str, list[str]]:
    """Return texts with each added token."""
    texts = ("the {}", "{} the", "the{}the", "the {} the", "{}", "  {}  the", "the{}", "{}{} t{}")
    return {name: [text.replace("{}", f"<|{name}|>") for text in texts] for name in WAYS}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_tokens_beside_an_added_one_are_said(
    scheme: str, special: bool, tmp_path: Path
) -> None:
    """What is read from a file splits texts as llama.cpp does: the same tokens, or a note."""
    values = with_added(scheme, special)
    _, notes = said(tmp_path, values)
    ours, theirs = (
        Tokenizer.from_str(json.dumps(values)),
        models.load(tmp_path / "m.gguf").tokenizer,
    )
    of_scheme = {"always": ["begins with a space"], "first": ["special token"]}.get(scheme, [])
    for name, texts in (around_added() | {"": ["the</s>the", "<s>the the", "the", ""]}).items():
        differ = [text for text in texts if ours.encode(text).ids != theirs.encode(text).tolist()]
        named = any(f"<|{name}|>" in note for note in notes)
        assert not differ or named or any(each in str(notes) for each in of_scheme), (differ, notes)
        assert named <= bool(differ), f"<|{name}|> has the same tokens"


def without(values: Values, key: str, value: Any) -> Values:
    """Return a tokenizer.json of which one value is another; "model.x" is inside of model."""
    if key.startswith("model."):
        return values | {"model": values["model"] | {key.removeprefix("model."): value}}
    return values | {key: value}


@pytest.mark.parametrize(
    ("make_values", "key", "value", "words"),
    [
        (byte_level, "model", {"type": "Unigram"}, "is Unigram; export_gguf supports BPE and"),
        (byte_level, "model.merges", [], "has no merges"),
        (byte_level, "model.dropout", 0.5, "dropout is 0.5, which llama.cpp does not support"),
        (byte_level, "normalizer", {"type": "Lowercase"}, r"changes texts \(Lowercase\)"),
        (byte_level, "pre_tokenizer", {"type": "Whitespace"}, r"not byte-level \(Whitespace\)"),
        (byte_level, "pre_tokenizer", None, r"not byte-level \(no pre_tokenizer\)"),
        (byte_level, "pre_tokenizer", BYTES | {"add_prefix_space": True},
         "adds a space before a text"),
        (byte_level, "pre_tokenizer", {"type": "Sequence", "pretokenizers": split("x+")},
         "splits texts by 'x\\+'; llama.cpp has no such tokenizer"),
        (byte_level, "pre_tokenizer",
         {"type": "Sequence", "pretokenizers": [split(LLAMA3)[0] | {"invert": True}, split("")[1]]},
         "splits texts by 'Split, ByteLevel'"),
        (byte_level, "model.ignore_merges", True, "does not split words that are tokens"),
        (characters, "normalizer", None, "does not replace the spaces of a text"),
        (characters, "normalizer", {"type": "NFKC"}, r"changes texts \(NFKC\)"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_know_is_refused(
    make_values: Callable[..., Values], key: str, value: Any, words: str, tmp_path: Path
) -> None:
    values = make_values(97) if make_values is byte_level else make_values()
    with pytest.raises(ConfigError, match=words):
        said(tmp_path, without(values, key, value))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    values = byte_level(97)
    values["model"]["vocab"]["zz"] = 97
    with pytest.raises(ConfigError, match=r"token 97 \('zz'\) is beyond .* vocabulary of 97"):
        said(tmp_path, values)


def test_added_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """As of a text model whose tokenizer also has the tokens of images."""
    values = byte_level(97)
    token = {**values["added_tokens"][0], "special": True}
    for number, text in ((97, "<image>"), (99, "<pad>!")):
        values["added_tokens"].append(token | {"id": number, "content": text})
    values["model"]["vocab"]["<image>"] = 97
    actual, notes = said(tmp_path, values, pad_token="<pad>!")
    assert len(actual["tokens"]) == len(actual["token_type"]) == 97
    assert not {"<image>", "<pad>!"} & {*actual["tokens"]}
    assert "padding_token_id" not in actual or actual["padding_token_id"] < 97
    assert "tokens beyond the model's vocabulary of 97 are left out: '<image>', '<pad>!'" in notes
    values["post_processor"] = around("<s> $A")
    for entry in values["post_processor"]["special_tokens"].values():
        entry["ids"] = [97]
    write_tokenizer(tmp_path / "m", values)
    with pytest.raises(ConfigError, match=r"token 97 \('<image>'\) is beyond"):
        models.export_gguf(tmp_path / "m", tmp_path / "again.gguf")


def test_broken_files(tmp_path: Path) -> None:
    make(tmp_path / "m", "llama")
    for text, words in (("{", "cannot be read as JSON"), ("{}", "is None; export_gguf supports")):
        (tmp_path / "m" / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    values = byte_level(97)
    values["model"]["merges"].append(["x", "y"])  # of no token
    write_tokenizer(tmp_path / "m", values)
    with pytest.raises(ConfigError, match=r"is broken: .* fetch it again"):
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
