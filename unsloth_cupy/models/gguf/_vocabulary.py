"""The tokenizer files of a GGUF file, from its keys: the inverse of ``_tokenizer.py``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf import TokenType

from ...errors import ConfigError
from ._wordpiece import KIND, model_of_pieces, words_of_pieces
from ._words import ALIASES, BEGUN, DIGITS, GPT2, NORMALISED, SPACE, rule_of
from .reading import GgufFile

KINDS = ("gpt2", "llama", "gemma4", KIND)  # of bytes, two of characters, of word pieces
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
SPECIAL = {
    **{"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"},
    **{"sep": "seperator", "mask": "mask"},
}
ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises
    ------
    ConfigError
        The file has no tokens; its tokenizer is neither byte-level BPE nor BPE over characters; or
        it splits texts by an unknown rule.
    """
    keys = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.values.items()
        if name.startswith("tokenizer.ggml.")
    }
    kind, texts = keys.get("model"), keys.get("tokens") or []
    if not texts or kind not in KINDS:
        _refuse(file, f"its tokenizer is {kind!r}, none of {', '.join(KINDS)}")
    pieces, characters = kind == KIND, kind not in ("gpt2", KIND)
    types = keys.get("token_type") or [TokenType.NORMAL] * len(texts)
    merges = [tuple(_cut(merge)) for merge in keys.get("merges") or ()]
    parts = words_of_pieces(keys, texts, types) if pieces else (texts, {})
    texts = parts[0]
    vocab, added = _tokens(texts, types, characters)
    if characters and not merges:
        merges = [*_merges(vocab, added, keys.get("scores") or [0.0] * len(texts))]
    elif not (merges or pieces) and "tokenizer.huggingface.json" not in file.values:
        _refuse(file, "tokenizer.ggml.merges is missing, without which words are single bytes")
    name = str(keys.get("pre") or "default")
    words = parts[1] or (_characters(keys) if characters else _bytes(file, name))
    begins = keys.get("add_bos_token", characters or ALIASES.get(name, name) in BEGUN)
    begins |= kind in ("gemma4", KIND)  # whatever the key says
    ids = {role: keys.get(f"{theirs}_token_id") for role, theirs in SPECIAL.items()}
    named = {role: texts[n] for role, n in ids.items() if n is not None and 0 <= n < len(texts)}
    flags = {"bos": bool(begins), "eos": bool(keys.get("add_eos_token"))}
    flags |= {"sep": True} if pieces else {}
    unknown = named.get("unk") if characters else None
    ignored = words.pop("ignore_merges", False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **words,
        "post_processor": _template({r: (named[r], ids[r]) for r in named if flags.get(r)}),
        "model": model_of_pieces(vocab, named.get("unk", "[UNK]")) if pieces else {
            "type": "BPE", "dropout": None, "unk_token": unknown,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": characters,
            "byte_fallback": characters, "ignore_merges": ignored, "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": text for role, text in named.items()},
        **{f"add_{role}_token": adds for role, adds in flags.items()},
    }
    if isinstance(template := file.values.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _cut(merge: str) -> tuple[str, str]:
    """Return the two parts of a merge; the first may be a space."""
    place = merge.find(" ", 1)
    return merge[:place], merge[place + 1 :]


def _tokens(
    texts: Sequence[str], types: Sequence[int], characters: bool
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the vocabulary of the BPE model, and the tokens that are matched before it."""
    vocab: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    for number, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        spaces = characters and kind == TokenType.USER_DEFINED and not text.strip(" ")
        own = text.replace(" ", SPACE) if spaces else text
        if kind in ADDED:
            special = kind != TokenType.USER_DEFINED
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": own, **flags, "special": special})
        vocab.setdefault(own, number)  # the package invents ids for tokens that are absent here
    return vocab, added


def _merges(
    vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens that form a token, in order of decreasing score."""
    special = {each["content"] for each in added if each["special"]}
    merges = []
    for text, number in vocab.items():
        if text in special:
            continue
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], number, left, right, cut, text))
    for *_, cut, text in sorted(merges):
        yield text[:cut], text[cut:]


def _characters(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return normalizer and decoder of BPE over characters, in which spaces are U+2581."""
    prefix = keys.get("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}] * prefix + [spaces]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
    }


def _bytes(file: GgufFile, name: str) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer and decoder of byte-level BPE, by llama.cpp's rule name."""
    try:
        rule, ignored = rule_of(name)
    except KeyError:
        return _refuse(file, f"it splits texts by an unknown rule, {name!r}")
    steps: list[dict[str, Any]] = [BYTE_LEVEL]
    if rule == DIGITS:
        steps = [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]
    elif rule != GPT2:
        split = {"pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
        steps = [{"type": "Split", **split}, {**BYTE_LEVEL, "use_regex": False}]
    normalizer = {"type": "NFC"} if name in NORMALISED else None
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": BYTE_LEVEL,
        "ignore_merges": ignored,
    }


def _template(special: Mapping[str, tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens before and after a text."""
    if not special:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {}
    for role, (text, number) in special.items():
        tokens[text] = {"id": text, "ids": [number], "tokens": [text]}
        step = {"SpecialToken": {"id": text, "type_id": 0}}
        single, pair = (
            [step, *each] if role == "bos" else [*each, step] for each in (single, pair)
        )
    return {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens,
    }  # fmt: skip


def _refuse(file: GgufFile, problem: str) -> Any:
    """Raise a ConfigError; its cure is a folder with the model's own tokenizer.json."""
    cure = f"put {file.path.name} and the model's tokenizer.json into a new folder"
    raise ConfigError(f"{file.path}: {problem}; {cure}, and pass the folder")
