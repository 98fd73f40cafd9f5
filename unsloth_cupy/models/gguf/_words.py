"""Rules by which tokenizers split texts before BPE merges, and llama.cpp's names for them."""

from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import ConfigError

SPACE = "\u2581"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2, DIGITS = "gpt2", "digits, gpt2"  # built into ByteLevel; after a split of single digits

# (rule, ignore_merges: whether a word that is a token is not split) -> llama.cpp's name
NAMES = {
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", True): "llama-bpe",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", False): "dbrx",
    (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}", False): "qwen2",
    (rf"{CASES[0]}|{CASES[1]}|\p{{N}}|{PATHS}", True): "tekken",
    (rf"{CASES[0]}{SHORT}?|{CASES[1]}{SHORT}?|\p{{N}}{{1,3}}|{PATHS}", False): "gpt-4o",
}
# other names of these rules, which llama.cpp's own converter writes
ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), "gpt-2"),
    **dict.fromkeys(("granite-docling", "gigachat", "a.x-4.0", "mellum"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), "qwen2"),
    **dict.fromkeys(("solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe", "glm4"), "dbrx"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
}
NORMALISED = ("qwen2", "deepseek-r1-qwen")  # Qwen's tokenizers, whose NFC llama.cpp leaves out
BEGUN = ("llama-bpe", "tekken")  # rules of tokenizers that add a begin token by default

CASED = ("tekken", "gpt-4o")  # rules that llama.cpp only approximates


def words_of(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return llama.cpp's name for the split rule of a byte-level tokenizer, and notes.

    Raises
    ------
    ConfigError
        llama.cpp has no such rule.
    """
    for normalizer in parts_of(values.get("normalizer"), "normalizers"):
        if normalizer.get("type") != "NFC":
            _refuse(f"changes texts ({normalizer.get('type')})")
    rule = _rule(parts_of(values.get("pre_tokenizer"), "pretokenizers"))
    ignores_merges = bool(values["model"].get("ignore_merges"))
    name = NAMES.get((rule, ignores_merges))
    if name is None:
        suffix = ", and does not split words that are tokens" if ignores_merges else ""
        _refuse(f"splits texts by {rule!r}{suffix}")
    notes = ["llama.cpp does not normalise texts to NFC: pass it normalised texts"]
    notes = notes if values.get("normalizer") else []
    if name in CASED:
        notes.append(
            "llama.cpp splits some words differently: it distinguishes case only in ASCII, and no"
            " combining marks"
        )
    return name, notes


def rule_of(name: str) -> tuple[str, bool]:
    """Return (rule, ignore_merges) for one of llama.cpp's names of rules.

    Raises
    ------
    KeyError
        The name is unknown.
    """
    return {known: rule for rule, known in NAMES.items()}[ALIASES.get(name, name)]


def _rule(parts: list[Mapping[str, Any]]) -> str:
    """Return the regular expression of pre-tokenizers, or the name of a built-in rule."""
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
        behavior = (split.get("behavior"), bool(split.get("invert")))
        pattern = split.get("pattern") or {}
        if behavior in (("Isolated", False), ("Removed", True)) and "Regex" in pattern:
            return str(pattern["Regex"])
    return ", ".join(map(str, kinds))


def prefix_of(values: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a tokenizer over characters puts a space before a text, and notes.

    Raises
    ------
    ConfigError
        The tokenizer changes a text in another way than replacing spaces by U+2581.
    """
    prefix, spaces, notes = False, False, []
    parts = parts_of(values.get("normalizer"), "normalizers")
    parts += parts_of(values.get("pre_tokenizer"), "pretokenizers")
    for part in parts:
        kind, pattern = part.get("type"), part.get("pattern") or {}
        if kind == "Prepend" and part.get("prepend") == SPACE:
            prefix = True
        elif kind == "Replace" and pattern.get("String") == " " and part["content"] == SPACE:
            spaces = True
        elif kind == "Metaspace" and part.get("replacement") == SPACE:
            default = "always" if part.get("add_prefix_space", True) else "never"
            scheme = part.get("prepend_scheme", default)
            prefix, spaces = scheme != "never", True
            if prefix:
                notes.append("llama.cpp also puts a space before a text that begins with a space")
            if scheme == "first":
                notes.append(
                    "llama.cpp also puts a space after every special token, this tokenizer only at"
                    " the start of a text: chats have other tokens"
                )
        elif not (
            kind == "Split" and pattern.get("String") == " " and spaces
        ):  # no space is left to split at
            _refuse(f"changes texts ({kind})")
    if not spaces:
        _refuse("does not replace the spaces of a text")
    return prefix, notes


def parts_of(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer; a sequence is flattened."""
    if value is None:
        return []
    if value.get("type") == "Sequence":
        return [inner for each in value.get(key, []) for inner in parts_of(each, key)]
    return [value]


def _refuse(what: str) -> NoReturn:
    """Raise a ConfigError for a tokenizer that llama.cpp does not support."""
    raise ConfigError(
        f"export_gguf: the tokenizer {what}; llama.cpp has no such tokenizer, and would produce"
        " other tokens"
    )
