"""WordPiece tokenizers of encoders, both ways: llama.cpp's kind "bert".

A file marks the first piece of a word, by U+2581; tokenizer.json marks the other pieces, by ##.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType

from ...errors import ConfigError
from ._words import SPACE

KIND, MORE = "bert", "##"
LOWER = "normalizer.lowercase"


def pieces_of(
    values: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """Return the keys of a tokenizer.json's words, for the texts and types of its tokens.

    Raises
    ------
    ConfigError
        llama.cpp splits texts or words otherwise.
    """
    model, normal = values["model"], values.get("normalizer") or {}
    split = (values.get("pre_tokenizer") or {}).get("type")
    lower, accents = bool(normal.get("lowercase")), normal.get("strip_accents")
    known = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    problem = None
    if any(normal.get(key) != value for key, value in known.items()) or split != "BertPreTokenizer":
        problem = "splits texts otherwise than BERT"
    elif accents not in (None, lower):
        problem = f"has strip_accents={accents} and lowercase={lower}"
    elif model.get("continuing_subword_prefix", MORE) != MORE:
        problem = f"marks the parts of a word by {model['continuing_subword_prefix']!r}"
    if problem is not None:
        cure = "llama.cpp has no such tokenizer"
        raise ConfigError(f"export_gguf: the tokenizer {problem}; {cure}")
    marked = [
        text if kind != TokenType.NORMAL
        else text.removeprefix(MORE) if text.startswith(MORE)
        else SPACE + text
        for text, kind in zip(texts, types, strict=True)
    ]  # fmt: skip
    return {"model": KIND, "pre": "default", "tokens": marked, LOWER: lower}


def words_of_pieces(
    keys: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[list[str], dict[str, Any]]:
    """Return the texts of a file's tokens in tokenizer.json, and its parts that split texts."""
    own = [
        text if kind != TokenType.NORMAL
        else text.removeprefix(SPACE) if text.startswith(SPACE)
        else MORE + text
        for text, kind in zip(texts, types, strict=True)
    ]  # fmt: skip
    normalizer = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
        "strip_accents": None, "lowercase": bool(keys.get(LOWER, True)),
    }  # fmt: skip
    decoder = {"type": "WordPiece", "prefix": MORE, "cleanup": True}
    parts: dict[str, Any] = {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }
    return own, {**parts, "decoder": decoder}


def model_of_pieces(vocab: Mapping[str, int], unknown: str) -> dict[str, Any]:
    """Return the model of a tokenizer.json, whose token for unknown words is ``unknown``."""
    return {
        "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": MORE,
        "max_input_chars_per_word": 100, "vocab": vocab,
    }  # fmt: skip
