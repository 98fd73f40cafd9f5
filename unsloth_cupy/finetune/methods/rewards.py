"""Rewards of answers: functions in Python files, and reward models, optionally with a weight.

    FILE.py:FUNCTION    FILE.py:FUNCTION:0.5    FOLDER    FOLDER:0.5

    def correct(completions, answer):
        return [float(text.strip() == target) for text, target in zip(completions, answer)]

As in TRL, a function receives lists by keyword: ``prompts``, ``completions`` (lists of messages in
chats), ``completion_ids``, and columns of the data.  It returns a number for each answer, or None
for an answer without a reward.  A function in a file runs in a separate process; a function passed
in Python (``Trainer(reward=)``) runs in the process of the trainer.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import numpy as np

from ...core.call import is_number
from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import path_of
from ..data.messages import shown
from ..data.prompts import ARGUMENTS
from ..listener import announce
from ..naming import named
from .reward_models import RewardModel
from .reward_pool import SECONDS, EndedError, LateError, Worker, fingerprint, worker_of
from .reward_process import judged, taken

LARGEST = 1e15  # limit of a reward: sums of squared gradients stay in the range of float32
ENOUGH = 3  # the run ends if the first 3 answers all exceed the time limit


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A reward function in a file, and its weight in the total reward.

    Attributes
    ----------
    takes : (bool, list of (str, bool))
        Whether the function has ``**kwargs``; its parameters, and whether each is required.
    seconds : float
        Time limit of a call.
    """

    name: str
    weight: float
    path: Path
    digest: str
    takes: Any
    seconds: float = SECONDS

    @property
    def place(self) -> str:
        """What to fix after an error, for messages."""
        return str(self.path)

    def arguments(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Return the columns that the function takes."""
        takes_all, names = self.takes
        if takes_all:
            return dict(columns)
        return {name: columns[name] for name, _ in names if name in columns}

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raise a ConfigError if a required parameter is no column of the data."""
        needs = [name for name, is_needed in self.takes[1] if is_needed]
        if absent := [name for name in needs if name not in columns]:
            names = ", ".join(shown(name) for name in columns if name not in ARGUMENTS)
            has = f"the data have {names or 'no other columns'}"
            problem = f"requires {', '.join(absent)}, but {has}"
            cure = f"name its parameters {', '.join(ARGUMENTS)} or as columns"
            raise ConfigError(f"the reward {self.name} {problem}; {cure}")

    def begin(
        self,
        columns: Mapping[str, Sequence[Any]],
        place: Callable[[int], str],
        late: list[int] | None = None,
        **more: Any,
    ) -> Callable[[], Array]:
        """Start the call; return a function that waits for the rewards, (answers,).

        Answers that exceed the time limit are appended to ``late``.
        """
        arguments, count = self.arguments(columns), len(columns["completions"])
        if not count:
            return lambda: np.empty(0)
        worker = worker_of(self.path, self.digest, self.name)
        worker.send(_request(arguments, range(count)))
        until = time.monotonic() + self.seconds
        call = _Call(self, columns, place, arguments, [] if late is None else late)

        def finish() -> Array:
            result = np.full(count, np.nan)
            call.judge(result, range(count), _reply(worker, until - time.monotonic()))
            return result

        return finish


@dataclasses.dataclass(frozen=True)
class CalledFunction(RewardFunction):
    """A reward function of this process; its calls have no time limit."""

    function: Any = None
    bound: Collection[str] = ()  # keywords that a functools.partial has set

    @property
    def place(self) -> str:
        """What to fix after an error, for messages."""
        return "this function"

    def begin(
        self,
        columns: Mapping[str, Sequence[Any]],
        place: Callable[[int], str],
        late: list[int] | None = None,
        **more: Any,
    ) -> Callable[[], Array]:
        """Return a function that calls the reward function and returns the rewards, (answers,).

        An exception of the reward function becomes the cause of the ConfigError.
        """
        free = {name: each for name, each in columns.items() if name not in self.bound}
        arguments, count = self.arguments(free), len(columns["completions"])
        errors = list[Exception]()

        def called(**own: Any) -> Any:
            try:
                return self.function(**json.loads(json.dumps(own)))  # a copy: it may change lists
            except Exception as error:
                errors.append(error)
                raise

        def finish() -> Array:
            result = np.full(count, np.nan)
            try:
                if count:
                    call = _Call(self, columns, place, arguments, [])
                    call.judge(result, range(count), judged(called, count, arguments))
            except ConfigError as error:
                raise error from (errors[-1] if errors else None)
            return result

        return finish


class FunctionWord(str):
    """The text of a reward setting for a function of this process: NAME or NAME:WEIGHT."""

    __slots__ = ("function", "weight")
    function: Any
    weight: float

    def __new__(cls, function: Any, weight: float = 1.0) -> "FunctionWord":
        """Return the text of the setting for a function."""
        shown_weight = f":{weight!r}".removesuffix(".0")  # all digits: settings are compared
        name = _named(function).__name__ + shown_weight * (weight != 1)
        word = super().__new__(cls, name)
        word.function, word.weight = function, weight
        return word

    def __reduce__(self) -> Any:
        """Pickle the function with its name."""
        return FunctionWord, (self.function, self.weight)


def words_of(rewards: Any) -> tuple[str, ...]:
    """Return rewards as the texts of the setting ``reward``.

    ``rewards`` is a function, "FILE.py:FUNCTION" or "FOLDER", a tuple (one of these, weight), or a
    list of such values.

    Raises
    ------
    ConfigError
        A reward is none of these.
    """
    several = isinstance(rewards, list) or (
        isinstance(rewards, tuple) and not (len(rewards) == 2 and is_number(rewards[1]))
    )
    words = list[str]()
    for each in rewards if several else [rewards]:
        reward, weight = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        if not (callable(reward) or isinstance(reward, str | PathLike)):
            cure = "pass a function, FILE.py:FUNCTION, FOLDER, or (one of these, its weight)"
            raise ConfigError(f"{named(reward=repr(each))}: {cure}")
        if not (weight is None or (is_number(weight) and math.isfinite(weight))):
            raise ConfigError(f"{named(reward=repr(each))}: its weight is not a number; pass one")
        if callable(reward):
            words.append(FunctionWord(reward, 1.0 if weight is None else float(weight)))
        else:
            words.append(fspath(reward) + (f":{weight}" if weight is not None else ""))
    return tuple(words)


def _named(function: Any) -> Any:
    """Return the object that has name and source of a callable: a function, or a class."""
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) or isinstance(function, type) else type(function)


def digest_of(function: Any) -> str:
    """Return the digest of the source of a function, or of its bytecode without a source.

    It includes the arguments of a functools.partial: numbers and strings by value, others by type.
    """
    own = _named(function)
    code = getattr(own.__call__ if isinstance(own, type) else own, "__code__", None)
    try:
        source = _of_lambda(own) if own.__name__ == "<lambda>" else inspect.getsource(own)
    except (OSError, TypeError, IndexError, ValueError):  # also if the file was edited after import
        source = repr(_instructions(code)) if code else f"{own.__module__}.{own.__qualname__}"
    if isinstance(function, functools.partial):
        source += repr([*map(_plain, function.args)])
        source += repr({name: _plain(value) for name, value in function.keywords.items()})
    return hashlib.sha256(source.encode()).hexdigest()


def _of_lambda(function: Any) -> str:
    """Return the parameters and the expression of a lambda, without the rest of its lines."""
    lines, code = inspect.findsource(function)[0], function.__code__
    places = [each for each in code.co_positions() if None not in each and each[3]]
    first, start = min((line, column) for line, _, column, _ in places)
    last, end = max((line, column) for _, line, _, column in places)
    text = "".join(lines[first - 1 : last]).encode()
    tail = len(lines[last - 1].encode()) - end  # co_positions counts bytes
    each = inspect.signature(function).parameters.values()
    names = [(str(one.kind), one.name, _plain(one.default)) for one in each]
    return f"{names}: {text[start : len(text) - tail].decode()}"


def _plain(value: Any) -> Any:
    """Return a number or a string unchanged, else the type name: a repr may hold an address."""
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return the bytecode, names and constants of a function, without file and lines."""
    constants = (_instructions(e) if isinstance(e, CodeType) else e for e in code.co_consts)
    return code.co_code, code.co_names, *constants


def _called(word: FunctionWord) -> CalledFunction:
    """Return the reward of a Python function; raise a ConfigError if it cannot be called."""
    function, own = word.function, _named(word.function)
    call = own if inspect.isroutine(own) else own.__call__
    name, takes = own.__name__, taken(function)
    problem = ""
    if isinstance(function, type):
        problem = f"is a class; pass an object, {name}(...), whose __call__ returns rewards"
    elif inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        problem = "is async, and nothing awaits it; pass a function that runs it"
    elif isinstance(takes, str):
        problem = f"cannot be called by keyword ({takes}); pass a Python function that calls it"
    if problem:
        raise ConfigError(f"{named(reward=word)} {problem}")
    bound = getattr(function, "keywords", {}) if isinstance(function, functools.partial) else {}
    takes = takes[0], [each for each in takes[1] if each[0] not in bound]
    return CalledFunction(
        name, word.weight, Path(name), digest_of(function), takes, math.inf, function, {*bound}
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a reward function, and the handling of its errors and time limit."""

    reward: RewardFunction
    columns: Mapping[str, Sequence[Any]]
    place: Callable[[int], str]
    arguments: Mapping[str, Sequence[Any]]
    late: list[int]

    def judge(self, result: Array, part: Sequence[int], reply: Any) -> None:
        """Write the rewards of some answers into ``result``, from the reply of a call."""
        if isinstance(reply, LateError):
            late = self._late(part)
            rest = [number for number in part if number not in late]
            if not late or not rest:
                self._too_slow(part, late)
            for number in late:
                text = f"exceeded its limit of {self.reward.seconds:g} s {self._of(number)}"
                announce(f"the reward {self.reward.name} {text}; this answer gets no reward")
            self.late.extend(late)
            self.judge(result, rest, self._again(rest))
            return
        if isinstance(reply, EndedError):
            for number in part:
                if isinstance(own := self._again([number]), EndedError):
                    self._wrong(number, str(own))
            self._wrong(None, f"{reply}, but not for each answer alone")
        if "wrong" in reply:
            number, problem = reply["wrong"]
            self._wrong(None if number is None else part[number], problem)
        for number, value in zip(part, reply["values"], strict=True):
            if value is not None and abs(value) > LARGEST:
                self._wrong(number, f"returned {value:g}, beyond +-{LARGEST:g},")
            result[number] = math.nan if value is None else value

    def _late(self, part: Sequence[int]) -> list[int]:
        """Return the answers that exceed the time limit even in a call of their own."""
        late = list[int]()
        for done, number in enumerate(part):
            own = self._again([number])
            if isinstance(own, LateError):
                late.append(number)
            elif isinstance(own, EndedError):
                self._wrong(number, str(own))
            if len(late) == done + 1 == ENOUGH:
                self._too_slow(part[:ENOUGH], late)
        return late

    def _again(self, part: Sequence[int]) -> Any:
        """Call the function again for some answers, and return the reply."""
        reward = self.reward
        worker = worker_of(reward.path, reward.digest, reward.name)
        worker.send(_request(self.arguments, part))
        return _reply(worker, reward.seconds)

    def _of(self, number: int) -> str:
        """Return the answer, its prompt and its place in the data, as text."""
        prompt, answer = (self.columns[name][number] for name in ("prompts", "completions"))
        texts = (e[-1]["content"] if isinstance(e, list) and e else e for e in (answer, prompt))
        reply, question = (shown(text) for text in texts)
        return f"for the answer {reply!r} to {question!r} ({self.place(number)})"

    def _wrong(self, number: int | None, problem: str) -> NoReturn:
        """Raise a ConfigError for one answer, or for all answers if ``number`` is None."""
        where = "" if number is None else f" {self._of(number)}"
        raise ConfigError(
            f"the reward {self.reward.name} {problem}{where}; fix {self.reward.place}"
        )

    def _too_slow(self, part: Sequence[int], late: Sequence[int]) -> NoReturn:
        """Raise a ConfigError for a function that exceeds its time limit for every answer."""
        seconds, count = named(reward_seconds=self.reward.seconds), len(part)
        problem = f"the reward {self.reward.name} exceeds {seconds}"
        if late:
            problem += f" {self._of(late[0])}" + f", and for {count - 1} others" * (count > 1)
            raise ConfigError(f"{problem}; fix {self.reward.path}, or allow more seconds")
        each = f"for {count} answers, but not for each alone"
        raise ConfigError(f"{problem} {each}; allow more seconds, or use several processes in it")


def _reply(worker: Worker, seconds: float) -> Any:
    """Return the reply of a process, or the LateError or EndedError in place of a reply."""
    try:
        return worker.reply(seconds)
    except (LateError, EndedError) as error:
        return error


def _request(arguments: Mapping[str, Sequence[Any]], part: Sequence[int]) -> tuple[int, Any]:
    """Return the request for the rewards of some answers."""
    return len(part), {name: [each[n] for n in part] for name, each in arguments.items()}


Reward = RewardFunction | RewardModel


def rewards_of(words: Sequence[str], seconds: float = SECONDS) -> tuple[Reward, ...]:
    """Return the rewards of the setting: FILE.py:FUNCTION or FOLDER, each with an optional :WEIGHT.

    ``seconds`` is the time limit of a call of a function.

    Raises
    ------
    ConfigError
        A text has another form, a file has no such function, or two rewards have the same name.
    """
    rewards = tuple(_reward(word, seconds) for word in words)
    names = [each.name for each in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        problem = f"{named('reward')}: two rewards are named {twice[0]}"
        cure = "define one with def" if twice[0] == "<lambda>" else "rename one"
        raise ConfigError(f"{problem}; the log needs different names; {cure}")
    return rewards


def _reward(word: str, seconds: float) -> Reward:
    if isinstance(word, FunctionWord):
        return _called(word)
    shown_word = named(reward=word)
    parts, weight = str(word).split(":"), 1.0
    if len(parts) > 2 or Path(":".join(parts[:-1]) or "-").is_dir():  # may end in a weight
        with suppress(ValueError):
            weight = float(parts[-1])
            parts.pop()
    cure = "write FILE.py:FUNCTION, FILE.py:FUNCTION:WEIGHT, or FOLDER of a reward model"
    if not math.isfinite(weight):
        raise ConfigError(f"{shown_word} has the weight {weight}; {cure}")
    path = path_of("reward", ":".join(parts))
    if path.is_dir():
        return RewardModel(path.resolve().name, weight, path)
    if len(parts) < 2:
        raise ConfigError(f"{shown_word} names neither a function in a file nor a folder; {cure}")
    path, name = path_of("reward", ":".join(parts[:-1])), parts[-1]
    if not path.is_file():
        raise ConfigError(f"{shown_word}: {path} is not a file; name a Python file")
    digest = fingerprint(path)
    takes = _taken(path, digest, name)
    return RewardFunction(name, weight, path, digest, takes, seconds)


@functools.lru_cache(maxsize=64)  # settings are checked more than once
def _taken(path: Path, digest: str, name: str) -> Any:
    """Return the parameters of a function; this starts its process, which then waits for calls."""
    return worker_of(path, digest, name).takes


def scores(
    rewards: Sequence[Reward],
    columns: Mapping[str, Sequence[Any]],
    place: Callable[[int], str],
    **more: Any,
) -> Array:
    """Return the reward of each answer by each function, (answers, functions), NaN for none.

    ``columns`` are lists with one item per answer; ``place(number)`` returns the file and line of
    the question.  Functions run at the same time.

    Raises
    ------
    ConfigError
        A function raised an exception or returned no number; the message names the answer.
    """
    waiting = [each.begin(columns, place, **more) for each in rewards]
    return np.stack([finish() for finish in waiting], axis=1)
