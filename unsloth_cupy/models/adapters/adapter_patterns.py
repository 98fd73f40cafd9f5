"""The layers that adapter_config.json targets, and their rank and alpha, by peft's patterns.

Names of layers are those in the adapter's file after ``base_model.model.``: names of the model for
which the adapter was trained.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from . import matching

SECONDS = 1.5  # limit of processor time for the patterns of one setting
PAIRS = 1 << 18  # most pairs of a pattern and a name that are matched in this process
SLOW = re.compile(r"[*+?{(]")  # a pattern without these characters is always fast
NUMBER = r"\.(?P<idx>\d+)\."
ANY_LAYERS = rf".*?\.[^.]*{NUMBER}"  # without layers_pattern, the first number of a name counts


def by_pattern(
    path: Any, settings: Mapping[str, Any], key: str, names: Sequence[str], default: Any
) -> list[Any]:
    """Return for each name the value of the first pattern in a setting that matches its end."""
    patterns = settings.get(key) or {}
    matches = _matches(f"{path}: {key}", "match", r"(.*\.)?({})$", [*patterns], names)
    values = [*patterns.values()]
    return [default if match is None else values[match[0]] for match in matches]


def targeted(path: Any, settings: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the names of the layers that get an adapter; all, if target_modules is not set."""
    excluded = _chosen(path, settings, "exclude_modules", names)
    names = [name for name in names if name not in excluded]
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if targets is None or str(targets).lower() == "all-linear":
        return names
    chosen = _chosen(path, settings, "target_modules", names)
    if not isinstance(targets, str) and layers not in (None, []):
        patterns = settings.get("layers_pattern") or []
        form = rf"(?:^|.*?\.){{}}{NUMBER}" if patterns else "{}"
        patterns = [patterns] if isinstance(patterns, str) else patterns or [ANY_LAYERS]
        if not isinstance(patterns, list):
            raise ConfigError(
                f"{path}: layers_pattern is {patterns!r}; it must be a list or a text"
            )
        matches = _matches(f"{path}: layers_pattern", "match", form, patterns, names)
        layer_numbers = {str(n) for n in (layers if isinstance(layers, list) else [layers])}
        numbers = {name: str(int(m[1])) for name, m in zip(names, matches, strict=True) if m}
        chosen = {n for n in chosen if n in targets or numbers.get(n) in layer_numbers}
    return [name for name in names if name in chosen]


def _chosen(path: Any, settings: Mapping[str, Any], key: str, names: Sequence[str]) -> set[str]:
    """Return the names whose ends a setting lists, or that match its pattern."""
    value = settings.get(key) or []
    if isinstance(value, str):
        matches = _matches(f"{path}: {key}", "fullmatch", "{}", [value], names)
        return {name for name, match in zip(names, matches, strict=True) if match}
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a list of names or a pattern")
    ends = tuple(f".{each}" for each in value)
    return {name for name in names if f".{name}".endswith(ends)}


def _matches(
    setting: str, method: str, form: str, patterns: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    """Return the first match of each name; raise a ConfigError for a pattern that takes too long.

    ``form`` is the regular expression into which each pattern is inserted.
    """
    wrong = next((each for each in patterns if not isinstance(each, str)), None)
    if wrong is not None:
        raise ConfigError(f"{setting} has the pattern {wrong!r}; it must be a text")
    request = method, [form.replace("{}", each) for each in patterns], names
    plain = not any(map(SLOW.search, patterns)) or patterns == [ANY_LAYERS]
    if plain and len(patterns) * len(names) <= PAIRS:
        results = matching.matches(*request)
    else:
        results = _in_time(setting, json.dumps(request))
    if len(results) == 2 and isinstance(results[1], str):
        pattern, problem = patterns[results[0]], results[1]
        raise ConfigError(f"{setting} has the pattern {pattern[:80]!r}: {problem}; correct it")
    return results


def _in_time(setting: str, request: str) -> list[Any]:
    """Return the matches that a separate process computes; raise if they take too long."""
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", matching.__file__, str(SECONDS)],
            input=request, capture_output=True, check=True, encoding="ascii",
            timeout=None if hasattr(signal, "setitimer") else SECONDS,
        )  # fmt: skip
    except subprocess.SubprocessError:
        cure = "nested repetitions, as in (a+)+, can take forever: simplify the pattern"
        raise ConfigError(f"{setting}: matching takes too long; {cure}") from None
    results: list[Any] = json.loads(answer.stdout)
    return results
