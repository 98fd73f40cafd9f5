"""Rewards that Python gives: functions that are called in the trainer's own process."""

import functools
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Run, Settings, Trainer, read_data
from unsloth_cupy.finetune.methods.policy_methods import Policy
from unsloth_cupy.finetune.methods.rewards import rewards_of, scores, words_of

from ..cli.test_cli import weights
from .test_methods import model_times, write

COLUMNS = {"prompts": [*"pqr"], "completions": [*"abc"], "completion_ids": [[1], [2], [3]],
           "other": [1, 2, 3]}  # fmt: skip
SOURCE = '''
import functools

def short(completions, other, **columns):
    """None for some."""
    return [None if c.endswith("1") else n - len(c) for c, n in zip(completions, other)]

def wrapped(function):
    @functools.wraps(function)
    def call(**columns):
        return function(**columns)
    return call

class Judge:
    def __init__(self, most=9):
        self.most = most

    def __call__(self, completions, other):
        return short(completions, other)

    def method(self, completions, other):
        return short(completions, other)

    @classmethod
    def of_class(cls, completions, other):
        return short(completions, other)

    @staticmethod
    def alone(completions, other):
        return short(completions, other)

def longer(completions, other, least):
    return short(completions, other)

KINDS = {
    "def": short,
    "lambda": lambda completions, other, **_: short(completions, other),
    "partial": functools.partial(longer, least=3),
    "partial of an object": functools.partial(Judge()),
    "object": Judge(),
    "method": Judge().method,
    "class method": Judge.of_class,
    "static method": Judge.alone,
    "wrapped": wrapped(short),
    "inner": (lambda: lambda completions, other: short(completions, other))(),
}
'''
NAMES = {
    "def": "short", "lambda": "<lambda>", "partial": "longer", "partial of an object": "Judge",
    "object": "Judge", "method": "method", "class method": "of_class", "static method": "alone",
    "wrapped": "short", "inner": "<lambda>",
}  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what imports a source anew, as another start of Python does."""
    monkeypatch.syspath_prepend(tmp_path)

    def read(source: str) -> Any:
        (tmp_path / "own_rewards.py").write_text(source)
        sys.modules.pop("own_rewards", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module("own_rewards")

    return read


def judged(function: Any, columns: Any = COLUMNS) -> Any:
    return scores(rewards_of(words_of(function)), columns, "row {}".format)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callables")
    model_times(1.0, folder / "model")
    rows = [{"prompt": f"w{number} w{number + 1}", "other": number} for number in range(4)]
    write(folder / "prompts.jsonl", rows)
    return folder


def train(home: Path, out: Path, reward: Any, **more: Any) -> Run:
    data, usual = home / "prompts.jsonl", {"batch": 4, "samples": 4, "max_new_tokens": 4}
    method = {"method": "grpo", "lr": 1e-2, "steps": 2, "eval": data, "out": out, "warmup": 0}
    settings = Settings(**usual | method | more)
    return Trainer(home / "model", data, settings, reward=reward).train()


@pytest.mark.parametrize("kind", NAMES)
def test_each_kind_of_callable_is_called_by_names(kind: str, module: Any) -> None:
    """Another source differs; another place of the same source in its file does not."""
    function = module(SOURCE).KINDS[kind]
    (reward,) = rewards_of(words_of((function, 0.5)))
    assert (reward.name, reward.weight) == (NAMES[kind], 0.5)
    assert judged(function)[:, 0].tolist() == [0, 1, 2]
    moved = "# a line\n\n" + SOURCE.replace("KINDS = {", "KINDS = {  # of all").replace(
        ": lambda", ":  lambda"
    )
    changed = SOURCE.replace("n - len(c)", "n - 2 * len(c)").replace("other)\n", "[*other])\n")
    changed = changed.replace("other),\n", "[*other]),\n").replace("other))()", "[*other]))()")
    digests = [
        rewards_of(words_of(module(source).KINDS[kind]))[0].digest for source in (moved, changed)
    ]
    assert digests[0] == reward.digest != digests[1]


def test_what_a_partial_fills_in_is_of_its_source_and_no_column(module: Any) -> None:
    own = module(SOURCE)
    digests = {
        rewards_of(words_of(functools.partial(own.longer, **each)))[0].digest
        for each in ({"least": 1}, {"least": 2}, {"least": own.Judge()}, {"least": own.Judge(3)})
    }
    assert len(digests) == 3, "objects are known by their type"
    bound = functools.partial(lambda completions, other, **more: other, other=[7, 8, 9])
    assert judged(bound)[:, 0].tolist() == [7, 8, 9]


def test_a_function_without_a_source_is_known_by_its_code(tmp_path: Path) -> None:
    digests = []
    for text in ("1", "1", "2"):
        names: dict[str, Any] = {}
        code = f"def own(completions): return [{text} for _ in completions]"
        exec(compile(code, str(tmp_path / f"{len(digests)}"), "exec"), names)
        (reward,) = rewards_of(words_of(names["own"]))
        digests.append(reward.digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_lambda_is_known_by_its_parameters_and_its_expression(module: Any) -> None:
    """Whatever stands in its lines, and wherever the objects are that it has as defaults."""
    digests = []
    for text in (
        "f = lambda completions, n=1, o=object(): [n\n    + len(c) for c in completions]",
        "é = 1; f = (lambda completions, n=1, o=object(): [n\n    + len(c) for c in completions])",
        "f = lambda completions, n=2, o=object(): [n\n    + len(c) for c in completions]",
        "f = lambda completions, n=1, o=object(): [n\n    - len(c) for c in completions]",
        "f = lambda completions, n=1, *, o=object(): [n\n    + len(c) for c in completions]",
    ):
        (reward,) = rewards_of(words_of(module(text).f))
        digests.append(reward.digest)
    assert digests[0] == digests[1]
    assert len({*digests}) == 4


async def waits(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


class Waits:
    async def __call__(self, completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]


def placed(completions: list[str], /) -> list[float]:
    return [0.0 for _ in completions]


def first(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (waits, "reward=waits is async, and nothing awaits it"),
        (Waits(), "reward=Waits is async"),
        (functools.partial(waits), "reward=waits is async"),
        (Waits, "reward=Waits is a class; pass an object, Waits(...)"),
        (placed, "reward=placed cannot be called by keyword (completions is positional-only)"),
        (max, "reward=max cannot be called by keyword"),
        (3, "reward=3: pass a function, FILE.py:FUNCTION, FOLDER, or (one of these, its weight)"),
        ([first, 3], "reward=3: pass a function"),
        ({"a": first}, "pass a function"),
        ((first, "much"), "reward=much names neither a function in a file nor a folder"),
        ([(first, "much")], "its weight is not a number; pass one"),
        ((first, float("nan")), "its weight is not a number"),
        (
            [first, (first, 2)],
            "two rewards are named first; the log needs different names",
        ),
        (
            [lambda completions: 0, lambda prompts: 1],
            "named <lambda>; the log needs different nam",
        ),
        ([functools.partial(first), first], "two rewards are named first"),
    ],
)
def test_what_is_no_reward_is_refused_before_the_run(
    reward: Any, said: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        train(home, tmp_path / "run", reward)
    assert not (tmp_path / "run").exists()


def test_a_reward_is_of_methods_that_draw(home: Path) -> None:
    data = home / "prompts.jsonl"
    with pytest.raises(ConfigError, match="method=sft does not use reward; leave it out, or cho"):
        Trainer(home / "model", data, Settings(), reward=first)
    settings = Settings(method="grpo", reward_seconds=3.0)
    with pytest.raises(ConfigError, match="reward_seconds limits functions in files, and rew"):
        Trainer(home / "model", data, settings, reward=first)
    with pytest.raises(ConfigError, match=r"reward=\('first',\) and the settings' \('a.py:b',\)"):
        Trainer(home / "model", data, Settings(method="grpo", reward=["a.py:b"]), reward=first)
    with pytest.raises(ConfigError, match="reward needs requires gold, but the data have other"):
        train(home, home / "none", needs)


@pytest.mark.parametrize("reward", [first, [first], ("a.py:b", first)], ids=["one", "list", "both"])
def test_settings_take_words_alone(reward: Any) -> None:
    with pytest.raises(ConfigError, match=r"pass a function to Trainer\(reward=\)"):
        Settings(method="grpo", reward=reward)


def needs(completions: list[str], gold: list[str]) -> list[float]:
    return [float(a == b) for a, b in zip(completions, gold, strict=True)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "the reward gives returned None for 3 answers; it must return one number per"),
        (0.5, "the reward gives returned 0.5 for 3 answers"),
        (np.array(1.0), "the reward gives returned array(1.) for 3 answers"),
        ([1], "the reward gives returned 1 items for 3 answers"),
        ("012", "the reward gives returned '012' for 3 answers"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "the reward gives returned {0: 1.0, 1: 1.0, 2: 1.0} for 3"),
        ({1, 2, 3}, "the reward gives returned {1, 2, 3} for 3 answers"),
        ((i for i in range(3)), "the reward gives returned <generator object"),
        (
            [0, "x", 0],
            "the reward gives returned 'x', not a number, for the answer 'b' to 'q'",
        ),
        ([0, float("nan"), 0], "the reward gives returned nan for the answer 'b'"),
        ([1e300, 0, 0], "the reward gives returned 1e+300, beyond +-1e+15, for the answer 'a'"),
    ],
)
def test_what_a_function_returns_wrongly(value: Any, said: str) -> None:
    def gives(completions: list[str]) -> Any:
        return value

    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        judged(gives)
    assert str(error.value).endswith("; fix this function")


@pytest.mark.parametrize(
    "value", [[None, True, 2], (None, "1.0", 2), np.array([None, 1, 2], dtype=object)]
)
def test_what_a_function_may_return(value: Any) -> None:
    np.testing.assert_array_equal(judged(lambda **_: value)[:, 0], [np.nan, 1, 2])
    none = {name: [] for name in COLUMNS}
    assert judged(lambda **_: value, none).shape == (0, 1)


def fails_inside(completions: list[str]) -> list[float]:
    return [deeper(each) for each in completions]


def deeper(text: str) -> float:
    if text != "a":
        raise LookupError(f"nothing is known about {text}")
    return 0.0


def test_an_error_has_the_traceback_of_the_function() -> None:
    expected = "fails_inside raised LookupError: nothing is known about b for the answer 'b' to 'q'"
    with pytest.raises(ConfigError, match=expected) as error:
        judged(fails_inside)
    shown = "".join(traceback.format_exception(error.value))
    assert "in fails_inside" in shown
    assert 'raise LookupError(f"nothing is known about {text}")' in shown
    assert isinstance(error.value.__cause__, LookupError)


def test_columns_are_lists_of_its_own() -> None:
    taken: dict[str, Any] = {}

    def changes(completions: list[str], **columns: Any) -> list[float]:
        taken.update(columns, process=os.getpid())
        completions.clear()
        return [1, 2, 3]

    before = json.dumps(COLUMNS)
    assert judged([changes, first]).shape == (3, 2)
    assert json.dumps(COLUMNS) == before
    expected = {n: v for n, v in COLUMNS.items() if n != "completions"}
    assert taken == {**expected, "process": os.getpid()}


def test_a_run_has_the_bits_of_the_same_functions_in_a_file(
    home: Path, tmp_path: Path, module: Any
) -> None:
    """Whether the data are a file or rows; some answers are not judged; weights count."""
    own = module(SOURCE + "def long(completions):\n    return [len(c) for c in completions]\n")
    path = Path(own.__file__)
    of_file = train(home, tmp_path / "file", [f"{path}:short", f"{path}:long:-0.25"])
    called = train(home, tmp_path / "called", [own.short, (own.long, -0.25)])
    mixed = train(home, tmp_path / "mixed", [f"{path}:short", (own.long, -0.25)])
    assert weights(called.folder) == weights(of_file.folder) == weights(mixed.folder)
    assert called.losses == of_file.losses
    line = called.files.lines()[1]
    assert {"reward", "reward_short", "reward_long"} <= line.keys()
    settings = json.loads(called.files.settings.read_text())
    assert settings["reward"] == ["short", "long:-0.25"]
    rows = read_data(home / "prompts.jsonl", method="grpo")
    again = Trainer(
        home / "model", rows, Settings(method="grpo", steps=1, out=tmp_path / "rows", samples=2,
                                       max_new_tokens=2),
        reward=own.short,
    ).train()  # fmt: skip
    assert isinstance(again.loop.method if again.loop else None, Policy)


def test_a_run_is_resumed_by_name_and_source(home: Path, tmp_path: Path, module: Any) -> None:
    out = tmp_path / "run"
    longer = SOURCE.replace("n - len(c)", "n - 2 * len(c)")
    more = {"steps": 3, "decay": "constant"}
    expected = train(home, tmp_path / "whole", module(SOURCE).short, **more)
    train(home, out, module(SOURCE).short, decay="constant")
    for source, kind, weight, said in (
        (longer, "def", 1, "holds a run with reward short has changed since. To resume"),
        (SOURCE, "method", 1, r"reward \['short'\] \(now \['method'\]\)"),
        (SOURCE, "def", 2, r"reward \['short'\] \(now \['short:2'\]\)"),
    ):
        reward = module(source).KINDS[kind], weight
        with pytest.raises(ConfigError, match=said):
            train(home, out, reward, **more)
    resumed = train(home, out, module("\n" + SOURCE).short, **more)
    assert weights(resumed.folder) == weights(expected.folder)
    assert resumed.losses == expected.losses
