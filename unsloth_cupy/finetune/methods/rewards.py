"""Rewards of answers: functions in Python files, and reward models; a weight may stand behind.

    FILE.py:FUNCTION    FILE.py:FUNCTION:0.5    FOLDER    FOLDER:0.5

    def right(completions, answer):
        return [float(each.strip() == wanted) for each, wanted in zip(completions, answer)]

A function takes lists by name, as those of TRL do: ``prompts``, ``completions`` (in chats lists of
messages), ``completion_ids``, and columns of the data.  It returns a number for each answer, or
None for an answer that it does not judge.  One of a file is called in a process of its own; one
that Python gives (``Trainer(reward=)``) is called where the trainer runs.
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

LARGEST = 1e15  # of a reward: the sum of many squares of gradients is in the range of float32
ENOUGH = 3  # answers that are all too late end the run


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A function that rewards answers, and its weight in their sum.

    Attributes
    ----------
    takes : (bool, list of (str, bool))
        Whether it takes all columns, and those that it names, with whether it needs them.
    seconds : float
        In which a call must end.
    """

    name: str
    weight: float
    path: Path
    digest: str
    takes: Any
    seconds: float = SECONDS

    @property
    def place(self) -> str:
        """What is to be mended if it is wrong."""
        return str(self.path)

    def arguments(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Return the columns that it takes."""
        takes_all, names = self.takes
        if takes_all:
            return dict(columns)
        return {name: columns[name] for name, _ in names if name in columns}

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raise a ConfigError if it needs other columns."""
        needs = [name for name, is_needed in self.takes[1] if is_needed]
        if absent := [name for name in needs if name not in columns]:
            there = ", ".join(shown(name) for name in columns if name not in ARGUMENTS)
            problem = f"takes {', '.join(absent)}, and the data have {there or 'no columns'} for it"
            cure = f"let it take {', '.join(ARGUMENTS)} or columns"
            raise ConfigError(f"the reward {self.name} {problem}; {cure}")

    def begin(
        self,
        columns: Mapping[str, Sequence[Any]],
        place: Callable[[int], str],
        late: list[int] | None = None,
        **more: Any,
    ) -> Callable[[], Array]:
        """Call the function; return what waits for the reward of each answer, (answers,).

        ``late`` gets the answers that take too long.
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
    """A function of this process that rewards answers; its calls have no limit of time."""

    function: Any = None
    bound: Collection[str] = ()  # the names that a functools.partial fills in

    @property
    def place(self) -> str:
        """What is to be mended if it is wrong."""
        return "this function"

    def begin(
        self,
        columns: Mapping[str, Sequence[Any]],
        place: Callable[[int], str],
        late: list[int] | None = None,
        **more: Any,
    ) -> Callable[[], Array]:
        """Return what calls the function for the reward of each answer, (answers,).

        An error of the function is the cause of the ConfigError that names the answer.
        """
        free = {name: each for name, each in columns.items() if name not in self.bound}
        arguments, count = self.arguments(free), len(columns["completions"])
        errors = list[Exception]()

        def called(**own: Any) -> Any:
            try:
                return self.function(**json.loads(json.dumps(own)))  # it may change them
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
    """The name of a function of this process, perhaps with :WEIGHT, among words of settings."""

    __slots__ = ("function", "weight")
    function: Any
    weight: float

    def __new__(cls, function: Any, weight: float = 1.0) -> "FunctionWord":
        """Return the word for a function."""
        shown_weight = f":{weight!r}".removesuffix(".0")  # with all digits, which are compared
        name = _named(function).__name__ + shown_weight * (weight != 1)
        word = super().__new__(cls, name)
        word.function, word.weight = function, weight
        return word

    def __reduce__(self) -> Any:
        """Copy the function with its name."""
        return FunctionWord, (self.function, self.weight)


def words_of(rewards: Any) -> tuple[str, ...]:
    """Return rewards as settings have them.

    ``rewards`` is a function, FILE.py:FUNCTION or FOLDER, one of these and its weight, or a list.

    Raises
    ------
    ConfigError
        One of them is something else.
    """
    several = isinstance(rewards, list) or (
        isinstance(rewards, tuple) and not (len(rewards) == 2 and is_number(rewards[1]))
    )
    words = list[str]()
    for each in rewards if several else [rewards]:
        reward, weight = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        if not (callable(reward) or isinstance(reward, str | PathLike)):
            cure = "give a function, FILE.py:FUNCTION, FOLDER, or (one of these, its weight)"
            raise ConfigError(f"{named(reward=repr(each))}: {cure}")
        if not (weight is None or (is_number(weight) and math.isfinite(weight))):
            raise ConfigError(f"{named(reward=repr(each))}: its weight is not a number; give one")
        if callable(reward):
            words.append(FunctionWord(reward, 1.0 if weight is None else float(weight)))
        else:
            words.append(fspath(reward) + (f":{weight}" if weight is not None else ""))
    return tuple(words)


def _named(function: Any) -> Any:
    """Return what has the name and the source of a callable: a function, or the class of it."""
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) or isinstance(function, type) else type(function)


def _digest(function: Any) -> str:
    """Return the digest of a function's source, or of its code if it has none.

    What a functools.partial fills in is a part of it: numbers and texts, others by their type.
    """
    own = _named(function)
    code = getattr(own.__call__ if isinstance(own, type) else own, "__code__", None)
    try:
        source = _of_lambda(own) if own.__name__ == "<lambda>" else inspect.getsource(own)
    except (OSError, TypeError, IndexError, ValueError):  # also of a file that was edited since
        source = repr(_instructions(code)) if code else f"{own.__module__}.{own.__qualname__}"
    if isinstance(function, functools.partial):
        source += repr([*map(_plain, function.args)])
        source += repr({name: _plain(value) for name, value in function.keywords.items()})
    return hashlib.sha256(source.encode()).hexdigest()


def _of_lambda(function: Any) -> str:
    """Return the parameters of a lambda and its expression, without the rest of its lines."""
    lines, code = inspect.findsource(function)[0], function.__code__
    places = [each for each in code.co_positions() if None not in each and each[3]]
    first, start = min((line, column) for line, _, column, _ in places)
    last, end = max((line, column) for _, line, _, column in places)
    text = "".join(lines[first - 1 : last]).encode()
    tail = len(lines[last - 1].encode()) - end  # columns are of bytes
    each = inspect.signature(function).parameters.values()
    names = [(str(one.kind), one.name, _plain(one.default)) for one in each]
    return f"{names}: {text[start : len(text) - tail].decode()}"


def _plain(value: Any) -> Any:
    """Return a number or a text; of others, whose repr may have an address, the type."""
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return what a compiled function computes, without the file and lines of it."""
    constants = (_instructions(e) if isinstance(e, CodeType) else e for e in code.co_consts)
    return code.co_code, code.co_names, *constants


def _called(word: FunctionWord) -> CalledFunction:
    """Return the reward that calls a function, or raise a ConfigError if it cannot be called."""
    function, own = word.function, _named(word.function)
    call = own if inspect.isroutine(own) else own.__call__
    name, takes = own.__name__, taken(function)
    problem = ""
    if isinstance(function, type):
        problem = f"is a class; give an object, {name}(...), whose __call__ rewards answers"
    elif inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        problem = "is async, and nothing awaits it; write a function that runs it"
    elif isinstance(takes, str):
        problem = f"cannot be called by names ({takes}); write a function of Python that calls it"
    if problem:
        raise ConfigError(f"{named(reward=word)} {problem}")
    bound = getattr(function, "keywords", {}) if isinstance(function, functools.partial) else {}
    takes = takes[0], [each for each in takes[1] if each[0] not in bound]
    return CalledFunction(
        name, word.weight, Path(name), _digest(function), takes, math.inf, function, {*bound}
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a function for answers, and what is done where it does not end well."""

    reward: RewardFunction
    columns: Mapping[str, Sequence[Any]]
    place: Callable[[int], str]
    arguments: Mapping[str, Sequence[Any]]
    late: list[int]

    def judge(self, result: Array, part: Sequence[int], reply: Any) -> None:
        """Write what a call for a part of the answers gave into ``result``."""
        if isinstance(reply, LateError):
            late = self._late(part)
            rest = [number for number in part if number not in late]
            if not late or not rest:
                self._too_slow(part, late)
            for number in late:
                text = f"did not end in {self.reward.seconds:g} s {self._of(number)}"
                announce(f"the reward {self.reward.name} {text}, which it does not judge")
            self.late.extend(late)
            self.judge(result, rest, self._again(rest))
            return
        if isinstance(reply, EndedError):
            for number in part:
                if isinstance(own := self._again([number]), EndedError):
                    self._wrong(number, str(own))
            self._wrong(None, f"{reply}, for no answer alone")
        if "wrong" in reply:
            number, problem = reply["wrong"]
            self._wrong(None if number is None else part[number], problem)
        for number, value in zip(part, reply["values"], strict=True):
            if value is not None and abs(value) > LARGEST:
                self._wrong(number, f"gave {value:g}, more than {LARGEST:g},")
            result[number] = math.nan if value is None else value

    def _late(self, part: Sequence[int]) -> list[int]:
        """Return the answers for which the function does not end even if it judges them alone."""
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
        """Return the reply to another call."""
        reward = self.reward
        worker = worker_of(reward.path, reward.digest, reward.name)
        worker.send(_request(self.arguments, part))
        return _reply(worker, reward.seconds)

    def _of(self, number: int) -> str:
        """Return in words which answer it is, to which prompt."""
        prompt, answer = (self.columns[name][number] for name in ("prompts", "completions"))
        texts = (e[-1]["content"] if isinstance(e, list) and e else e for e in (answer, prompt))
        reply, question = (shown(text) for text in texts)
        return f"for the answer {reply!r} to {question!r} ({self.place(number)})"

    def _wrong(self, number: int | None, problem: str) -> NoReturn:
        """Raise a ConfigError for an answer, or for all."""
        where = "" if number is None else f" {self._of(number)}"
        raise ConfigError(
            f"the reward {self.reward.name} {problem}{where}; mend {self.reward.place}"
        )

    def _too_slow(self, part: Sequence[int], late: Sequence[int]) -> NoReturn:
        """Raise a ConfigError for a call that takes too long, whatever the answers are."""
        seconds, count = named(reward_seconds=self.reward.seconds), len(part)
        problem = f"the reward {self.reward.name} does not end in {seconds}"
        if late:
            problem += f" {self._of(late[0])}" + f", and for {count - 1} others" * (count > 1)
            raise ConfigError(f"{problem}; mend {self.reward.path}, or give it more")
        each = f"for {count} answers, though for each of them alone"
        raise ConfigError(f"{problem} {each}; give it more, or let it start processes")


def _reply(worker: Worker, seconds: float) -> Any:
    """Return the reply of a process, or the error that says why there is none."""
    try:
        return worker.reply(seconds)
    except (LateError, EndedError) as error:
        return error


def _request(arguments: Mapping[str, Sequence[Any]], part: Sequence[int]) -> tuple[int, Any]:
    """Return the request to judge a part of the answers."""
    return len(part), {name: [each[n] for n in part] for name, each in arguments.items()}


Reward = RewardFunction | RewardModel


def rewards_of(words: Sequence[str], seconds: float = SECONDS) -> tuple[Reward, ...]:
    """Return the rewards that words name: FILE.py:FUNCTION or FOLDER, each perhaps with :WEIGHT.

    A call of a function must end in ``seconds``.

    Raises
    ------
    ConfigError
        One of them is written in another way, or its file has no such function; or two have one
        name.
    """
    rewards = tuple(_reward(word, seconds) for word in words)
    names = [each.name for each in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        problem = f"{named('reward')}: two rewards are named {twice[0]}"
        cure = "write one with def" if twice[0] == "<lambda>" else "rename one"
        raise ConfigError(f"{problem}, as the log names them; {cure}")
    return rewards


def _reward(word: str, seconds: float) -> Reward:
    if isinstance(word, FunctionWord):
        return _called(word)
    shown_word = named(reward=word)
    parts, weight = str(word).split(":"), 1.0
    if len(parts) > 2 or Path(":".join(parts[:-1]) or "-").is_dir():  # it may end in a weight
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
        raise ConfigError(f"{shown_word} names neither a function of a file nor a folder; {cure}")
    path, name = path_of("reward", ":".join(parts[:-1])), parts[-1]
    if not path.is_file():
        raise ConfigError(f"{shown_word}: {path} is not a file; name a Python file")
    digest = fingerprint(path)
    takes = _taken(path, digest, name)
    return RewardFunction(name, weight, path, digest, takes, seconds)


@functools.lru_cache(maxsize=64)  # settings are checked more than once
def _taken(path: Path, digest: str, name: str) -> Any:
    """Return what a function takes; its process, which knows that, waits for calls from then on."""
    return worker_of(path, digest, name).takes


def scores(
    rewards: Sequence[Reward],
    columns: Mapping[str, Sequence[Any]],
    place: Callable[[int], str],
    **more: Any,
) -> Array:
    """Return the reward of each answer by each function, (answers, functions), NaN for none.

    ``columns`` are lists of one item for each answer; ``place`` says where the question of an
    answer is.  Functions are called at the same time.

    Raises
    ------
    ConfigError
        A function raised, or returned something else; the message names the answer.
    """
    called = [each.begin(columns, place, **more) for each in rewards]
    return np.stack([finish() for finish in called], axis=1)
