"""Conversion of a folder's tokenizer to the keys of llama.cpp's tokenizers.

Two of llama.cpp's kinds are supported: byte-level BPE ("gpt2"), which splits text by a rule that
the file names, and BPE over characters with byte fallback ("llama"), which merges the pair whose
token has the highest score.  For Gemma 4, the kind "gemma4" has the merges themselves; every text
begins with a token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf import TokenType

from ...errors import ConfigError
from ...files import TOKENIZER, of_library, read_json, read_text
from ..configs.config import Config
from ..text.tokenizer import has_tokenizer, tokenizer_text
from ._families import known_as
from ._metadata import Values
from ._wordpiece import pieces_of
from ._words import SPACE, parts_of, prefix_of, words_of

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
ROLES = ("unk", "pad", "sep", "mask")  # special tokens by the keys of tokenizer_config.json
ENDS = ("eos", "eot", "eom")  # tokens that end a text: llama.cpp has three keys for them
# tokens that end a turn if a chat template contains them: the names that llama.cpp recognizes
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|endofturn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "<turn|>"),
)
SHOWN = 3  # most tokens in a note
PROBED = 100  # ids to decode, to find a text that encodes to tokens
UNSUPPORTED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # without a GGUF key


class Vocabulary(NamedTuple):
    """A tokenizer.json, its settings and its folder."""

    folder: Path
    values: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        """The entry of the BPE model, with its vocabulary and merges."""
        model: Mapping[str, Any] = self.values["model"]
        return model

    @property
    def added(self) -> dict[int, Mapping[str, Any]]:
        """Added tokens by id; they are matched before a text is split into words."""
        return {token["id"]: token for token in self.values.get("added_tokens") or ()}

    def id_of(self, role: str) -> int | None:
        """Return the id of the special token for a role in the settings, or None."""
        token = self.settings.get(f"{role}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        ids = {entry["content"]: number for number, entry in self.added.items()}
        return ids.get(text, self.model["vocab"].get(text)) if isinstance(text, str) else None


def tokenizer(
    folder: Path, config: Config, begin: int | None, stop: int | None = None
) -> tuple[Values, list[str]]:
    """Return the keys of a folder's tokenizer, and notes about differences in llama.cpp.

    ``begin`` is the model's begin-of-text token, for a tokenizer without one.  ``stop`` is the
    token that ends an answer in a chat.

    Raises
    ------
    ConfigError
        tokenizer.json is missing or broken, or llama.cpp has no equivalent tokenizer.
    """
    words, affixes = read(folder), _around(folder)
    words, beyond = _without_beyond(words, config.vocab, [*affixes[0], *affixes[1]])
    characters = bool(words.model.get("byte_fallback"))
    pieces = words.model.get("type") == "WordPiece"
    values: Values = {"model": "llama" if characters else "gpt2"}
    texts, types = _tokens(words, config.vocab, characters or pieces)
    values |= {"tokens": texts, "token_type": types}
    merges = [_pair(merge) for merge in words.model.get("merges") or ()]
    if pieces:
        values |= pieces_of(words.values, texts, types)
        notes = list[str]()
        if not (affixes[0] and affixes[1]):
            problem = "the tokenizer adds no tokens around a text"
            raise ConfigError(f"export_gguf: {problem}, and llama.cpp's WordPiece adds two")
    elif characters:
        values["pre"] = "default"
        values["add_space_prefix"], notes = prefix_of(words.values)
        values["scores"] = _scores(texts, merges)
        kind = known_as("export_gguf", config).words
        if kind != "llama" and affixes[0] and not values["add_space_prefix"]:
            values |= {"model": kind, "merges": [" ".join(merge) for merge in merges]}
            notes += _across_lines(merges)
        elif other := _other_cuts(words.model["vocab"], merges):
            notes += other
            values["merges"] = [" ".join(merge) for merge in merges]  # for readers that use them
    else:
        values["pre"], notes = words_of(words.values)
        values["merges"] = [" ".join(merge) for merge in merges]
    notes += _of_added(words)
    template = _template(words)
    turns = [] if stop is None else [stop]
    turns += _turn_ends(words, template.get("chat_template", ""))
    special, more = _special(words, config, begin, affixes, turns)
    values |= special | template
    if pieces:  # llama.cpp adds them whatever the keys are
        values |= {"seperator_token_id": affixes[1][0], "add_eos_token": False}
        unknown = words.model["vocab"].get(words.model.get("unk_token"))
        values |= {} if unknown is None else {"unknown_token_id": unknown}
    notes = [*beyond, *notes, *more]
    return {f"tokenizer.{_key(name)}": value for name, value in values.items()}, notes


def _of_added(words: Vocabulary) -> Iterator[str]:
    """Yield notes about added tokens, which llama.cpp matches wherever their text occurs."""
    steps = parts_of(words.values.get("normalizer"), "normalizers")
    prefixed = any(step.get("type") == "Prepend" for step in steps)
    for keys, note in (
        (("lstrip", "rstrip"), "llama.cpp may keep the spaces around"),
        (("single_word",), "unlike this tokenizer, llama.cpp matches inside of a word:"),
        (
            ("normalized",) * prefixed,
            "unlike this tokenizer, llama.cpp matches without a space in front:",
        ),
    ):
        texts = [t["content"] for t in words.added.values() if any(map(t.get, keys))]
        if texts:
            yield f"{note} {', '.join(texts[:SHOWN])}{', ...' * (len(texts) > SHOWN)}"


def _without_beyond(
    words: Vocabulary, size: int, affixes: Sequence[int]
) -> tuple[Vocabulary, list[str]]:
    """Return a vocabulary without added tokens beyond the embedding table, and a note.

    Text models share tokenizers with multimodal models, whose image tokens they never get.  Raise
    for other tokens beyond the table, and for tokens that the tokenizer adds to every text.
    """
    vocab = words.model["vocab"]
    texts = {number: text for text, number in vocab.items()}
    texts |= {number: token["content"] for number, token in words.added.items()}
    beyond = sorted(number for number in texts if number >= size)
    if wrong := [number for number in beyond if number not in words.added or number in affixes]:
        raise ConfigError(
            f"export_gguf: the tokenizer's token {wrong[-1]} ({texts[wrong[-1]]!r}) is beyond the"
            f" model's vocabulary of {size}; copy tokenizer and model from the same place"
        )
    if not beyond:
        return words, []
    listed = ", ".join(repr(texts[number]) for number in beyond[:SHOWN])
    listed += ", ..." if len(beyond) > SHOWN else ""
    within = {text: number for text, number in vocab.items() if number < size}
    added = [token for number, token in words.added.items() if number < size]
    values = {**words.values, "added_tokens": added, "model": {**words.model, "vocab": within}}
    note = f"tokens beyond the model's vocabulary of {size} are left out: {listed}"
    return words._replace(values=values), [note]


def read(folder: Path) -> Vocabulary:
    """Return the tokenizer of a folder; raise a ConfigError unless it is BPE."""
    if not has_tokenizer(folder):
        raise ConfigError(
            f"export_gguf: {folder} has no {FILE}; copy it from the model's page into the folder,"
            " or pass the folder that has it, as in tokenizer='folder'"
        )
    if (path := folder / FILE).is_file():
        values = read_json(path, TOKENIZER)
    else:
        path, text = tokenizer_text(folder)
        values = json.loads(text)
    model = values.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") not in ("BPE", "WordPiece"):
        kind = model.get("type") if isinstance(model, Mapping) else None
        raise ConfigError(
            f"{path}: the tokenizer is {kind}; export_gguf supports BPE and WordPiece"
        )
    settings = folder / CONFIG
    if model.get("type") == "WordPiece":
        return Vocabulary(folder, values, read_json(settings) if settings.exists() else {})
    vocab, merges = model.get("vocab"), model.get("merges")
    if not (isinstance(vocab, Mapping) and isinstance(merges, list) and merges):
        raise ConfigError(
            f"{path} has no merges, which llama.cpp needs for BPE; copy it from the model's page"
        )
    if wrong := [key for key in UNSUPPORTED if model.get(key)]:
        key = wrong[0]
        raise ConfigError(f"{path}: {key} is {model[key]!r}, which llama.cpp does not support")
    return Vocabulary(folder, values, read_json(settings) if settings.exists() else {})


def _key(name: str) -> str:
    """Return the key of a value after "tokenizer."."""
    return name if name == "chat_template" else f"ggml.{name}"


def _pair(merge: Any) -> Sequence[str]:
    """Return the two parts of a merge, which is a list, or a string in older files."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _tokens(words: Vocabulary, size: int, characters: bool) -> tuple[list[str], list[int]]:
    """Return text and type of the token for each row of the embedding table."""
    by_id: dict[int, tuple[str, TokenType]] = {
        number: (text, TokenType.NORMAL) for text, number in words.model["vocab"].items()
    }
    unknown = words.model.get("unk_token")
    for number, token in words.added.items():
        text, special = token["content"], token.get("special")
        if not special and characters:
            text = text.replace(SPACE, " ")
        by_id[number] = (text, TokenType.CONTROL if special else TokenType.USER_DEFINED)
    for number, (text, kind) in by_id.items():
        if characters and text == unknown:
            by_id[number] = (text, TokenType.UNKNOWN)
        elif characters and kind == TokenType.NORMAL and _byte(text):
            by_id[number] = (text, TokenType.BYTE)
    rows = [by_id.get(n, (f"[PAD{n}]", TokenType.UNUSED)) for n in range(size)]
    return [text for text, _ in rows], [int(kind) for _, kind in rows]


def _byte(text: str) -> bool:
    """Return whether a token stands for a byte, such as <0x0A>."""
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(texts: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return scores that give earlier merges priority."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(text, len(merges))) for text in texts]


def _other_cuts(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> list[str]:
    """Return a note if llama.cpp may merge two tokens that the tokenizer does not merge."""
    known = {tuple(pair) for pair in merges}
    for text in {"".join(pair) for pair in merges}:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab and (left, right) not in known:
                return [
                    f"llama.cpp also merges {left!r} and {right!r} to {text!r}, unlike this"
                    " tokenizer: some texts may have other tokens"
                ]
    return []


def _across_lines(merges: Sequence[Sequence[str]]) -> list[str]:
    """Return a note if a token has a line break and other characters."""
    texts = ("".join(pair) for pair in merges)
    text = next((text for text in texts if "\n" in text and text.strip("\n")), None)
    if text is None:
        return []
    return [f"llama.cpp splits texts at line breaks, and does not merge tokens to {text!r}"]


def _turn_ends(words: Vocabulary, template: str) -> list[int]:
    """Return the tokens in a chat template that end a turn, by their usual names."""
    added = {token["content"]: number for number, token in words.added.items()}
    return [added[text] for text in TURN_ENDS if text in template and text in added]


def _special(
    words: Vocabulary,
    config: Config,
    begin: int | None,
    affixes: tuple[list[int], list[int]],
    turns: Sequence[int],
) -> tuple[Values, list[str]]:
    """Return notes, and keys of special tokens: ids, and whether texts begin and end with one."""
    first, last = affixes
    notes = []
    if len(first) > 1 or len(last) > 1:
        notes.append(
            f"llama.cpp adds one token before and after a text; this tokenizer {first} and {last}"
        )
    ids = {role: words.id_of(role) for role in (*ROLES, "bos", "eos")}
    ids["pad"] = config.pad_token if ids["pad"] is None else ids["pad"]
    ids["bos"] = first[0] if first else begin if ids["bos"] is None else ids["bos"]
    ids = {role: n for role, n in ids.items() if n is not None and n < config.vocab}
    ends = dict.fromkeys(
        n
        for n in (*last[:1], ids.pop("eos", None), *turns, *config.end_tokens)
        if n is not None and n < config.vocab
    )
    ids |= dict(zip(ENDS, ends, strict=False))
    if len(ends) > len(ENDS):
        unnamed = ", ".join(map(str, [*ends][len(ENDS) :]))
        notes.append(f"a file has at most three tokens that end a text; left out: {unnamed}")
    if turns and turns[0] >= config.vocab:
        notes.append(f"the model has no row for token {turns[0]}, which ends an answer of a chat")
    if not ends:
        notes.append("neither model nor tokenizer has a token that ends a text")
    values: Values = {f"{_role(role)}_token_id": n for role, n in ids.items()}
    return values | {"add_bos_token": bool(first), "add_eos_token": bool(last)}, notes


def _role(role: str) -> str:
    """Return llama.cpp's name for the role of a special token."""
    return {"unk": "unknown", "pad": "padding", "sep": "seperator"}.get(role, role)


def _around(folder: Path) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after a text."""
    from tokenizers import Tokenizer

    path, text = tokenizer_text(folder)
    try:
        loaded = Tokenizer.from_str(text)
        loaded.no_truncation()
        loaded.no_padding()
        texts = ("a", *(loaded.decode([number]) for number in range(PROBED)))
        encoded = {text: loaded.encode(text, add_special_tokens=False).ids for text in texts}
        text, plain = next((item for item in encoded.items() if item[1]), ("", []))
        ids = loaded.encode(text).ids
    except BaseException as error:
        if not of_library(error):
            raise
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None
    start = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), len(ids))
    return ids[:start], ids[start + len(plain) :]


def _template(words: Vocabulary) -> Values:
    """Return the key of the chat template, from its own file or from the settings."""
    path = words.folder / TEMPLATE
    template: Any = words.settings.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = (each for each in template if isinstance(each, Mapping))
        default = (each for each in named if each.get("name") == "default")
        template = next(default, {}).get("template")
    if path.exists():
        try:
            template = read_text(path)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8; copy it again") from None
    return {"chat_template": template} if isinstance(template, str) and template else {}
