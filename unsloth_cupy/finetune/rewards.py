"""Rewards of answers: functions in Python files, FILE.py:FUNCTION, perhaps with a weight behind.

    def right(completions, answer):
        return [float(each.strip() == wanted) for each, wanted in zip(completions, answer)]

A function takes lists by name, as those of TRL do: ``prompts``, ``completions`` (in chats lists of
messages), ``completion_ids``, and columns of the data.  It returns a number for each answer, or
None for an answer that it does not judge.
"""

import functools
import hashlib
import inspect
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..files import path_of, regular
from .messages import shown
from .naming import named

GIVEN = ("prompts", "completions", "completion_ids")  # what a function may take beside columns


class Reward(NamedTuple):
    """A function that rewards answers, and its weight in their sum."""

    name: str
    function: Callable[..., Any]
    weight: float
    path: Path

    def given(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function takes.

        Raises
        ------
        ConfigError
            It needs others.
        """
        kinds = inspect.Parameter
        each = inspect.signature(self.function).parameters.values()
        if any(one.kind is kinds.VAR_KEYWORD for one in each):
            return dict(columns)
        by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        takes = [one for one in each if one.kind in by_name]
        needs = [one.name for one in takes if one.default is kinds.empty]
        if absent := [name for name in needs if name not in columns]:
            there = ", ".join(shown(name) for name in columns if name not in GIVEN)
            problem = f"takes {', '.join(absent)}, and the data have {there or 'no columns'} for it"
            cure = f"let it take {', '.join(GIVEN)} or columns"
            raise ConfigError(f"the reward {self.name} {problem}; {cure}")
        return {one.name: columns[one.name] for one in takes if one.name in columns}


def rewards_of(words: Sequence[str]) -> tuple[Reward, ...]:
    """Return the functions that words name, each FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT.

    Raises
    ------
    ConfigError
        One of them is written in another way, or its file has no such function; or two have one
        name.
    """
    rewards = tuple(map(_reward, words))
    names = [each.name for each in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        problem = f"{named('reward')}: two functions are named {twice[0]}"
        raise ConfigError(f"{problem}, as the log names them; rename one")
    return rewards


def _reward(word: str) -> Reward:
    shown_word = named(reward=word)
    parts, weight = str(word).split(":"), 1.0
    if len(parts) > 2:  # the last one is not a function
        with suppress(ValueError):
            weight = float(parts[-1])
            parts.pop()
    if len(parts) < 2 or not math.isfinite(weight):
        cure = "write FILE.py:FUNCTION, or FILE.py:FUNCTION:WEIGHT"
        raise ConfigError(f"{shown_word} names no function of a file; {cure}")
    path, name = path_of("reward", ":".join(parts[:-1])), parts[-1]
    if not path.is_file():
        raise ConfigError(f"{shown_word}: {path} is not a file; name a Python file")
    function = _contents(path.resolve(), fingerprint(path)).get(name)
    if not callable(function):
        raise ConfigError(f"{shown_word}: {path} has no function {name}; write it, or name another")
    return Reward(name, function, weight, path)


def fingerprint(path: Path) -> str:
    """Return what tells one content of a file from another."""
    return hashlib.sha256(regular(path).read_bytes()).hexdigest()


@functools.lru_cache(maxsize=16)  # settings are checked more than once
def _contents(path: Path, digest: str) -> dict[str, Any]:
    """Return the names of a Python file with this content."""
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except (Exception, SystemExit) as error:
        problem = f"{path} cannot be run: {type(error).__name__}: {error}"
        raise ConfigError(f"{problem}; mend it") from error


def scores(
    rewards: Sequence[Reward], columns: Mapping[str, Sequence[Any]], place: Callable[[int], str]
) -> Array:
    """Return the reward of each answer by each function, (answers, functions), NaN for none.

    ``columns`` are lists of one item for each answer; ``place`` says where the question of an
    answer is.

    Raises
    ------
    ConfigError
        A function raised, or returned something else; the message names the answer.
    """
    return np.stack([_numbers(each, columns, place) for each in rewards], axis=1)


def _numbers(
    reward: Reward, columns: Mapping[str, Sequence[Any]], place: Callable[[int], str]
) -> Array:
    """Return what a function gives for each answer."""
    given, count = reward.given(columns), len(columns["completions"])

    def said(number: int, problem: str) -> ConfigError:
        answer = f"for the answer {shown(columns['completions'][number])}"
        return ConfigError(
            f"{place(number)}: the reward {reward.name} {problem} {answer}; mend {reward.path}"
        )

    try:
        found = reward.function(**given)
    except Exception as error:
        for number in range(count):  # which answer it was
            try:
                reward.function(**{name: [each[number]] for name, each in given.items()})
            except Exception as own:
                raise said(number, f"raised {type(own).__name__}: {own}") from own
        problem = f"the reward {reward.name} raised {type(error).__name__}: {error}"
        raise ConfigError(f"{problem}, for no answer alone; mend {reward.path}") from error
    if not hasattr(found, "__len__") or len(found) != count:
        has = f"{len(found)} items" if hasattr(found, "__len__") else f"{shown(repr(found))}"
        problem = f"the reward {reward.name} returned {has} for {count} answers"
        raise ConfigError(f"{problem}; let it return a list of as many numbers")
    result = np.full(count, np.nan)
    for number, value in enumerate(found):
        if value is None:
            continue
        try:
            result[number] = float(value)
        except (TypeError, ValueError):
            raise said(number, f"gave {shown(repr(value))}, no number,") from None
        if not math.isfinite(result[number]):
            raise said(number, f"gave {result[number]:g}")
    return result
