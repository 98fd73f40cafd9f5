"""The tokenizer of a folder, as llama.cpp's own tokenizers read it.

Byte-level BPE ("gpt2" there) cuts text into words by a rule that is known by a name; BPE over
characters with bytes for the rest ("llama") merges the pair whose token has the highest score.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf import TokenType

from ...errors import ConfigError
from ...files import read_json
from ..config import Config
from ._metadata import Values
from ._words import prefix_of, words_of

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPACE = "\u2581"
ROLES = ("unk", "pad", "sep", "mask")  # special tokens by the keys of tokenizer_config.json
ENDS = ("eos", "eot", "eom")  # tokens that end a text: llama.cpp has three places for them
LOOKED_AT = 100  # tokens among which one is that makes a text of a token
ALTERS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # no file can say them


class Vocabulary(NamedTuple):
    """A tokenizer.json, its settings and its folder."""

    folder: Path
    values: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        """The part that turns words into tokens."""
        found: Mapping[str, Any] = self.values["model"]
        return found

    @property
    def added(self) -> dict[int, Mapping[str, Any]]:
        """Tokens that are found in a text before it is cut into words, by id."""
        return {token["id"]: token for token in self.values.get("added_tokens") or ()}

    def id_of(self, role: str) -> int | None:
        """Return the id of a special token that the settings name."""
        given = self.settings.get(f"{role}_token")
        text = given.get("content") if isinstance(given, Mapping) else given
        ids = {token["content"]: number for number, token in self.added.items()}
        return ids.get(text, self.model["vocab"].get(text)) if isinstance(text, str) else None


def tokenizer(folder: Path, config: Config, begin: int | None) -> tuple[Values, list[str]]:
    """Return what a file says of a folder's tokenizer, and what llama.cpp will do otherwise.

    Where the tokenizer names no token that begins a text, it is the model's.

    Raises
    ------
    ConfigError
        There is no tokenizer.json, it is broken, or llama.cpp has none like it.
    """
    words, around = read(folder), _around(folder)
    characters = bool(words.model.get("byte_fallback"))
    values: Values = {"model": "llama" if characters else "gpt2"}
    texts, types = _tokens(words, config.vocab, characters)
    values |= {"tokens": texts, "token_type": types}
    merges = [_pair(merge) for merge in words.model["merges"]]
    if characters:
        values["pre"] = "default"
        values["add_space_prefix"], notes = prefix_of(words.values)
        values["scores"] = _scores(texts, merges)
        notes += _other_cuts(words.model["vocab"], merges)
    else:
        values["pre"], notes = words_of(words.values)
        values["merges"] = [" ".join(merge) for merge in merges]
    stripped = [t["content"] for t in words.added.values() if t.get("lstrip") or t.get("rstrip")]
    if stripped:
        notes.append(f"llama.cpp may keep the spaces beside {', '.join(stripped)}")
    special, more = _special(words, config, begin, around)
    values |= special | _template(words)
    return {f"tokenizer.{_key(name)}": value for name, value in values.items()}, notes + more


def read(folder: Path) -> Vocabulary:
    """Return the tokenizer of a folder, or raise a ConfigError for one that is not BPE."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"export_gguf: {folder} holds no {FILE}; copy it from the model's page into the folder,"
            " or name the folder that holds it, as in tokenizer='folder'"
        )
    values = read_json(path)
    model = values.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, Mapping) else None
        raise ConfigError(f"{path}: the tokenizer is {kind}; export_gguf knows BPE alone")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not (isinstance(vocab, Mapping) and isinstance(merges, list) and merges):
        raise ConfigError(
            f"{path} has no merges, without which llama.cpp reads no BPE; copy it from the model's"
            " page"
        )
    if odd := [key for key in ALTERS if model.get(key)]:
        raise ConfigError(f"{path}: {odd[0]} is {model[odd[0]]!r}, which llama.cpp does not know")
    settings = folder / CONFIG
    return Vocabulary(folder, values, read_json(settings) if settings.is_file() else {})


def _key(name: str) -> str:
    return name if name == "chat_template" else f"ggml.{name}"


def _pair(merge: Any) -> Sequence[str]:
    """Return the two parts of a merge: a list, or in older files a text."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _tokens(words: Vocabulary, size: int, characters: bool) -> tuple[list[str], list[int]]:
    """Return the text and the type of each row of the embedding's table."""
    found: dict[int, tuple[str, TokenType]] = {
        number: (text, TokenType.NORMAL) for text, number in words.model["vocab"].items()
    }
    unknown = words.model.get("unk_token")
    for number, token in words.added.items():
        text, special = token["content"], token.get("special")
        if not special and characters:
            text = text.replace(SPACE, " ")
        found[number] = (text, TokenType.CONTROL if special else TokenType.USER_DEFINED)
    for number, (text, kind) in found.items():
        if characters and text == unknown:
            found[number] = (text, TokenType.UNKNOWN)
        elif characters and kind == TokenType.NORMAL and _byte(text):
            found[number] = (text, TokenType.BYTE)
    most = max(found)
    if most >= size:
        raise ConfigError(
            f"export_gguf: the tokenizer's token {most} ({found[most][0]!r}) is beyond the model's"
            f" vocabulary of {size}; they do not belong together: copy both from one place"
        )
    rows = [found.get(n, (f"[PAD{n}]", TokenType.UNUSED)) for n in range(size)]
    return [text for text, _ in rows], [int(kind) for _, kind in rows]


def _byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(texts: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return scores that make the merges that come first win."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(text, len(merges))) for text in texts]


def _other_cuts(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> list[str]:
    """Return a note where llama.cpp may make a token of two others that no merge names."""
    known = {tuple(pair) for pair in merges}
    for text in {"".join(pair) for pair in merges}:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab and (left, right) not in known:
                return [
                    f"llama.cpp also makes {text!r} of {left!r} and {right!r}, which is no merge of"
                    " this tokenizer: some texts may have other tokens"
                ]
    return []


def _special(
    words: Vocabulary, config: Config, begin: int | None, around: tuple[list[int], list[int]]
) -> tuple[Values, list[str]]:
    """Return the ids of special tokens, and whether a text begins and ends with one."""
    first, last = around
    notes = []
    if len(first) > 1 or len(last) > 1:
        notes.append(f"llama.cpp adds one token around a text; this tokenizer {first} and {last}")
    named = {role: words.id_of(role) for role in (*ROLES, "bos", "eos")}
    named["pad"] = config.pad_token if named["pad"] is None else named["pad"]
    named["bos"] = first[0] if first else begin if named["bos"] is None else named["bos"]
    ends = dict.fromkeys(
        n for n in (*last[:1], named.pop("eos"), *config.end_tokens) if n is not None
    )
    named |= dict(zip(ENDS, ends, strict=False))
    if len(ends) > len(ENDS):
        left = ", ".join(map(str, [*ends][len(ENDS) :]))
        notes.append(f"a file names three tokens that end a text; left out: {left}")
    if not ends:
        notes.append("neither model nor tokenizer names a token that ends a text")
    values: Values = {f"{_role(role)}_token_id": n for role, n in named.items() if n is not None}
    return values | {"add_bos_token": bool(first), "add_eos_token": bool(last)}, notes


def _role(role: str) -> str:
    """Return how llama.cpp calls a special token."""
    return {"unk": "unknown", "pad": "padding", "sep": "seperator"}.get(role, role)


def _around(folder: Path) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before a text and behind it."""
    from tokenizers import Tokenizer

    path = folder / FILE
    try:
        made = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        made.no_truncation()
        made.no_padding()
        texts = ("a", *(made.decode([number]) for number in range(LOOKED_AT)))
        encoded = {text: made.encode(text, add_special_tokens=False).ids for text in texts}
        text, plain = next((item for item in encoded.items() if item[1]), ("", []))
        whole = made.encode(text).ids
    except Exception as error:  # the package raises no narrower class
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None
    start = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), len(whole))
    return whole[:start], whole[start + len(plain) :]


def _template(words: Vocabulary) -> Values:
    """Return the chat template, which is a file or one of the settings."""
    path = words.folder / TEMPLATE
    found: Any = words.settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each for each in found if isinstance(each, Mapping)}
        found = named.get("default", {}).get("template")
    if path.is_file():
        try:
            found = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8; copy it again") from None
    return {"chat_template": found} if isinstance(found, str) and found else {}
