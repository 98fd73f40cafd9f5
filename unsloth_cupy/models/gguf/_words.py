"""How a tokenizer cuts a text before it merges, and the names that llama.cpp has for it."""

from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import ConfigError

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2, DIGITS = "gpt2", "digits, gpt2"  # ByteLevel has this rule built in

# The rule, and whether a word that is a token is taken whole (ignore_merges): llama.cpp's name.
NAMES = {
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", True): "llama-bpe",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", False): "dbrx",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}", False): "qwen2",
    (rf"{CASES[0]}|{CASES[1]}|\p{{N}}|{PATHS}", True): "tekken",
    (rf"{CASES[0]}{SHORT}?|{CASES[1]}{SHORT}?|\p{{N}}{{1,3}}|{PATHS}", False): "gpt-4o",
}


CASED = ("tekken", "gpt-4o")  # llama.cpp's rules are near to theirs


def words_of(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return llama.cpp's name for how a byte-level tokenizer cuts texts, and where they differ.

    Raises
    ------
    ConfigError
        It has none.
    """
    for normalizer in _parts(values.get("normalizer"), "normalizers"):
        if normalizer.get("type") != "NFC":
            _refuse(f"changes texts ({normalizer.get('type')})")
    rule = _rule(_parts(values.get("pre_tokenizer"), "pretokenizers"))
    whole = bool(values["model"].get("ignore_merges"))
    name = NAMES.get((rule, whole))
    if name is None:
        taken = ", and takes words that are tokens whole" if whole else ""
        _refuse(f"cuts texts by {rule!r}{taken}")
    notes = ["llama.cpp does not bring texts into the form NFC: give it such texts"]
    notes = notes if values.get("normalizer") else []
    if name in CASED:
        notes.append(
            "llama.cpp cuts some words otherwise: it knows the case of ASCII alone, and no marks"
        )
    return name, notes


def _rule(parts: list[Mapping[str, Any]]) -> str:
    """Return the regular expression of pre-tokenizers, or the name of the one built in."""
    kinds = [part.get("type") for part in parts]
    if not parts or kinds[-1] != "ByteLevel":
        _refuse(f"is not byte-level ({', '.join(map(str, kinds)) or 'no pre_tokenizer'})")
    if parts[-1].get("add_prefix_space"):
        _refuse("adds a space before a text")
    built_in = parts[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and built_in:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and built_in and parts[0].get("individual_digits"):
        return DIGITS
    if kinds == ["Split", "ByteLevel"] and not built_in:
        split = parts[0]
        kept = (split.get("behavior"), bool(split.get("invert")))
        pattern = split.get("pattern") or {}
        if kept in (("Isolated", False), ("Removed", True)) and "Regex" in pattern:
            return str(pattern["Regex"])
    return ", ".join(map(str, kinds))


def prefix_of(values: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a tokenizer over characters puts a space before a text, and where not.

    Raises
    ------
    ConfigError
        It does anything else to a text than to write its spaces as a character of their own.
    """
    prefix, spaces, notes = False, False, []
    parts = _parts(values.get("normalizer"), "normalizers")
    parts += _parts(values.get("pre_tokenizer"), "pretokenizers")
    for part in parts:
        kind, pattern = part.get("type"), part.get("pattern") or {}
        if kind == "Prepend" and part.get("prepend") == "\u2581":
            prefix = True
        elif kind == "Replace" and pattern.get("String") == " " and part["content"] == "\u2581":
            spaces = True
        elif kind == "Metaspace" and part.get("replacement") == "\u2581":
            old = "always" if part.get("add_prefix_space", True) else "never"
            prefix, spaces = part.get("prepend_scheme", old) != "never", True
            if prefix:
                notes.append("llama.cpp puts a space before a text that begins with one, too")
        elif not (
            kind == "Split" and pattern.get("String") == " " and spaces
        ):  # there is none left
            _refuse(f"changes texts ({kind})")
    if not spaces:
        _refuse("leaves the spaces of a text as they are")
    return prefix, notes


def _parts(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if value is None:
        return []
    if value.get("type") == "Sequence":
        return [inner for each in value.get(key, []) for inner in _parts(each, key)]
    return [value]


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"export_gguf: the tokenizer {what}; llama.cpp has no tokenizer like it, and would read"
        " other tokens"
    )
