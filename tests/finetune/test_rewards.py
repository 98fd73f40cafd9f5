"""Rewards of answers: functions in a process of their own, and reward models."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Lora, Settings, Trainer
from unsloth_cupy.finetune.listener import hearing
from unsloth_cupy.finetune.methods.reward_models import RewardModel
from unsloth_cupy.finetune.methods.reward_pool import LateError, ending_workers
from unsloth_cupy.finetune.methods.reward_process import judged as judge
from unsloth_cupy.finetune.methods.reward_process import taken
from unsloth_cupy.finetune.methods.rewards import LARGEST, _Call, rewards_of, scores
from unsloth_cupy.models import load

from ..golden import generate_methods as golden
from .test_methods import log, model_times, write

FUNCTIONS = """
import os, subprocess, sys, time
from pathlib import Path
from beside import double
print("not a reply")
def one(completions): return [1 / (each != "b") for each in completions]
def few(completions): return [1]
def none(completions): return None
def text(completions): return [each for each in completions]
def nan(completions): return [float("nan")] * len(completions)
def huge(completions): return [-1e308] * len(completions)
def largest(completions): return [1e15, -1e15, 0.5]
def together(completions): return [1 / (len(completions) == 1)] * len(completions)
def gold(completions, gold=None, *, answer): return [1.0] * len(completions)
def exits(completions): sys.exit(3)
def crash(completions): return [os.abort() if each == "c" else 1 for each in completions]
def many(completions): return [1.0] * (len(completions) < 3 or os.abort())
def hangs(completions):
    while "b" in completions: pass
    print("not a reply", flush=True)
    return [float(len(completions)) for each in completions]
def ever(completions): time.sleep(99)
def slow(completions): time.sleep(0.3 * len(completions)); return [1] * len(completions)
def place(completions): return [double(len(each)) for each in completions]
def mean(prompts, completions):
    return [sum(len(c) for p, c in zip(prompts, completions) if p == q) / 3 for q in prompts]
def waits(completions):
    child = subprocess.Popen(["sleep", "99"])
    Path(completions[0]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(99)
number = 3
"""
COLUMNS = {"prompts": ["p", "q", "r"], "completions": ["a", "b", "c"], "other": [1, 2, 3]}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    with ending_workers():
        yield


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("def double(n): return 2 * n\n")
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
    return path


def judged(word: str, columns: Any = COLUMNS, **options: Any) -> Any:
    return scores(rewards_of([word], **options), columns, "row {}".format)


OF_B = "for the answer 'b' to 'q' (row 1)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", f"the reward one raised ZeroDivisionError: division by zero {OF_B}; fix {{path}}"),
        ("few", "the reward few returned 1 items for 3 answers; it must return one number per"),
        ("none", "the reward none returned None for 3 answers"),
        ("text", "returned 'a', not a number, for the answer 'a' to 'p' (row 0); fix {path}"),
        ("nan", "the reward nan returned nan for the answer 'a' to 'p' (row 0); fix {path}"),
        ("huge", "the reward huge returned -1e+308, beyond +-1e+15, for the answer 'a' to 'p' (r"),
        ("together", "raised ZeroDivisionError: division by zero, but not for each answer alone"),
        ("exits", "the reward exits raised SystemExit: 3 for the answer 'a' to 'p' (row 0)"),
        ("crash", "the reward crash ended its process by SIGABRT for the answer 'c' to 'r' (row 2"),
        (
            "many",
            "the reward many ended its process by SIGABRT, but not for each answer alone; fix",
        ),
    ],
)
def test_errors_name_the_answer(name: str, said: str, own: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said.format(path=own))):
        judged(f"{own}:{name}")


def fails_alone(completions: list[int]) -> list[float]:
    return [1 / each for each in completions]


def fails_together(completions: list[int]) -> list[float]:
    return [1 / (len(completions) == 1)] * len(completions)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completions: [None, True, 2, "0.5"], [None, 1.0, 2.0, 0.5]),
        (lambda completions: np.arange(4), [0.0, 1.0, 2.0, 3.0]),
        (lambda completions: [0, None, math.inf, 0], (2, "returned inf")),
        (lambda completions: [-math.inf, 0, 0, 0], (0, "returned -inf")),
        (lambda completions: [0, 1j, 0, 0], (1, "returned 1j, not a number,")),
        (lambda completions: [0, 0, 0, 10**400], (3, "returned 1000000000")),
        (lambda completions: [0] * 5, (None, "returned 5 items for 4 answers; it must")),
        (lambda completions: 4, (None, "returned 4 for 4 answers; it must return")),
        (fails_alone, (2, "raised ZeroDivisionError: division by zero")),
        (
            fails_together,
            (None, "raised ZeroDivisionError: division by zero, but not for each an"),
        ),
    ],
)
def test_what_a_function_returns(function: Any, expected: Any) -> None:
    """Numbers that are finite, or the first answer that has none."""
    actual = judge(function, 4, {"completions": [2, 1, 0, 0]})
    if isinstance(expected, list):
        assert actual == {"values": expected}
    else:
        number, problem = actual["wrong"]
        assert (number, problem[: len(expected[1])]) == expected


def test_the_names_that_a_function_takes() -> None:
    def function(a: Any = 0, /, *, b: Any, c: Any = 0, d: Any, e: Any = 0) -> None:
        pass

    names = [("b", True), ("c", False), ("d", True), ("e", False)]
    assert taken(function) == (False, names)
    assert taken(lambda **columns: None) == (True, [])
    assert taken(3) == "3 is not a callable object"
    assert taken(lambda a, /: None) == "a is positional-only"


def test_columns_that_a_function_needs(own: Path) -> None:
    (reward,) = rewards_of([f"{own}:gold"])
    with pytest.raises(ConfigError, match="gold requires answer, but the data have other; name"):
        reward.check(COLUMNS)
    reward.check({**COLUMNS, "answer": []})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{path}"], "names neither a function in a file nor a folder; write FILE.py:FUNCTION, or"),
        (["{path}:one:nan"], "has the weight nan; write FILE.py:FUNCTION"),
        (["{path}:other"], "own.py has no function other; define it, or name another"),
        (["{path}:number"], "own.py has no function number"),
        (["{path}.txt:one"], "own.py.txt is not a file; name a Python file"),
        (["{path}:one", "{path}:one:2"], "two rewards are named one"),
        (["{broken}:one"], "broken.py cannot be run: ModuleNotFoundError: No module named 'nowher"),
        (["{ends}:one"], "ends.py ended its process with 7 when it was run; fix it"),
    ],
)
def test_words_that_are_no_rewards_are_refused(words: Any, said: str, own: Path) -> None:
    (own.parent / "broken.py").write_text("import nowhere")
    (own.parent / "ends.py").write_text("import os\nos._exit(7)")
    places = {"path": own, "broken": own.parent / "broken.py", "ends": own.parent / "ends.py"}
    said = re.sub("FUNCTION, or$", "FUNCTION, FILE.py:FUNCTION:WEIGHT, or FOLDER", said)
    with pytest.raises(ConfigError, match=said):
        rewards_of([word.format(**places) for word in words])


def test_weights_and_answers_that_nobody_judges(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def a(completions): return [None, True, 3]\ndef b(**k): return k['n']\n")
    both = rewards_of([f"{path}:a:-0.5", f"{path}:b"])
    assert [each.weight for each in both] == [-0.5, 1.0]
    columns = {"completions": ["x", "y", "z"], "n": [0, 1, 2]}
    actual = scores(both, columns, str)
    np.testing.assert_array_equal(actual, [[np.nan, 0], [1, 1], [3, 2]])


def test_the_largest_reward(own: Path) -> None:
    assert judged(f"{own}:largest")[:, 0].tolist() == [LARGEST, -LARGEST, 0.5]


def test_a_file_that_changes_is_not_called(own: Path) -> None:
    """A process that starts anew would call another function than those before it."""
    with ending_workers():
        rewards = rewards_of([f"{own}:place"])
    own.write_text(FUNCTIONS.replace("double(len(each))", "0"))
    with pytest.raises(ConfigError, match=r"own\.py has changed since the run began"):
        scores(rewards, COLUMNS, str)


class Hears(Listener):
    def __init__(self) -> None:
        self.said = list[str]()

    def announce(self, text: str) -> None:
        self.said.append(text)


class TestTime:
    """Calls that take longer than they may."""

    def test_an_answer_that_takes_too_long_is_not_judged(self, own: Path) -> None:
        """The others are judged together, as they were; a new process is called."""
        said = f"the reward hangs exceeded its limit of 0.5 s {OF_B}; this answer gets no reward"
        columns = {"prompts": [*"pqrs"], "completions": [*"abcd"]}
        heard, late = Hears(), list[int]()
        with hearing(heard):
            rewards = rewards_of([f"{own}:hangs"], seconds=0.5)
            actual = scores(rewards, columns, "row {}".format, late=late)
        np.testing.assert_array_equal(actual[:, 0], [3, np.nan, 3, 3])
        assert (heard.said, late) == ([said], [1])

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("ever", "ever exceeds reward_seconds=0.4 for the answer 'a' to 'p' (row 0), and for 2 "
             "others; fix {path}, or allow more seconds"),
            ("slow", "slow exceeds reward_seconds=0.4 for 3 answers, but not for each alone; allo"
             "w more seconds, or use several processes in it"),
        ],
    )  # fmt: skip
    def test_a_function_that_is_too_slow_ends_the_run(
        self, name: str, said: str, own: Path
    ) -> None:
        with pytest.raises(ConfigError, match=re.escape(said.format(path=own))):
            judged(f"{own}:{name}", seconds=0.4)

    @pytest.mark.parametrize("late", [[0, 1], [1, 2, 3], [0, 1, 3, 4], [0, 1, 2]])
    def test_the_first_three_answers_that_are_late_end_the_run(
        self, late: list[int], own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        again = lambda _, part: LateError() if part[0] in late else {"values": [1]}  # noqa: E731
        monkeypatch.setattr(_Call, "_again", again)
        (reward,) = rewards_of([f"{own}:hangs"], seconds=0.5)
        columns = {"prompts": [*"pqrst"], "completions": [*"abcde"]}
        call = _Call(reward, columns, "row {}".format, columns, [])
        if late == [0, 1, 2]:
            with pytest.raises(ConfigError, match=r"for the answer 'a' .* and for 2 others"):
                call._late(range(5))
        else:
            assert call._late(range(5)) == late


def test_answers_are_judged_together(own: Path) -> None:
    """A function of a prompt's answers sees all of them; none are judged without a call."""
    columns = {"prompts": [*"aaabbb"], "completions": ["x" * n**2 for n in range(6)]}
    np.testing.assert_allclose(judged(f"{own}:mean", columns)[:, 0], np.repeat([5, 50], 3) / 3)
    assert judged(f"{own}:few", {name: [] for name in columns}).shape == (0, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes end with a run where they can fork")
def test_no_process_outlives_a_run_that_is_killed(own: Path) -> None:
    """Neither the function, which waits, nor what it has started."""
    told = own.parent / "processes"
    program = "import sys; from unsloth_cupy.finetune.methods.rewards import rewards_of, scores\n"
    program += "scores(rewards_of([sys.argv[1]]), {'prompts': [''], 'completions': [sys.argv[2]]}"
    program += ", str)"
    killed = subprocess.Popen([sys.executable, "-c", program, f"{own}:waits", str(told)])
    until = time.monotonic() + 60
    while not (told.exists() and len(told.read_text().split()) == 2):
        assert time.monotonic() < until
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    numbers = [*map(int, told.read_text().split())]
    while any(is_running(number) for number in numbers):
        assert time.monotonic() < until
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Return whether a process goes on; one that nobody waits for does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    model_times(1.0, folder / "model")
    write(folder / "pairs.jsonl", golden.pairs())
    write(folder / "prompts.jsonl", [{"prompt": f"w{number}"} for number in range(6)])
    usual: dict[str, Any] = {"method": "reward", "steps": 1, "lr": 1e-2, "tokens": 30}
    for name, lora in (("whole", None), ("adapter", Lora(2))):
        settings = Settings(eval=folder / "pairs.jsonl", out=folder / name, **usual)
        Trainer(folder / "model", folder / "pairs.jsonl", settings, lora=lora).train()
    return folder


class TestModels:
    """Models that ``--method reward`` has trained."""

    @pytest.mark.parametrize("name", ["whole", "adapter"])
    def test_a_text_is_rewarded_as_it_was_learned(self, name: str, home: Path) -> None:
        """With the end token; whole texts alone have the same rewards as those that share rows."""
        base = {} if name == "whole" else {"lora": home / name / "model"}
        model = load(home / ("model" if base else "whole/model"), dtype="float32", **base)
        (reward,) = rewards_of([f"{home / name}:0.5"])
        assert isinstance(reward, RewardModel)
        assert (reward.name, reward.weight) == (name, 0.5)
        pairs = [each for each in golden.pairs() for _ in range(2)]
        columns = {"prompts": [p["prompt"] for p in pairs], "completions": [
            p[("chosen", "rejected")[n % 2]] for n, p in enumerate(pairs)]}  # fmt: skip
        actual = scores([reward.with_model(lambda _: model)], columns, str)[:, 0]
        texts = zip(columns["prompts"], columns["completions"], strict=True)
        expected = [each["reward"] for each in model.predict([f"{a}{b} </s>" for a, b in texts])]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert np.ptp(actual) > 0.1

    def test_chats_are_written_by_its_own_template(self, home: Path, tmp_path: Path) -> None:
        model = load(home / "whole" / "model", dtype="float32")
        model.save(tmp_path / "own")
        template = "{% for m in messages %}<s> {{ m.content }} <pad> {% endfor %}"
        tokenizer = golden.tokenizer()
        tokenizer.post_processor = TemplateProcessing(  # adds tokens to a text, not to a chat
            single="<s> $A <s>", special_tokens=[("<s>", 1)]
        )
        files = {"tokenizer.json": tokenizer.to_str()}
        files["tokenizer_config.json"] = json.dumps({"chat_template": template})
        for name, text in files.items():
            (tmp_path / "own" / name).write_text(text)
        model = load(tmp_path / "own", dtype="float32")
        reward = RewardModel("own", 1.0, tmp_path / "own", model)
        asked, said = (
            [{"role": r, "content": c}] for r, c in (("user", "w1"), ("assistant", "w2"))
        )
        actual = scores([reward], {"prompts": [asked], "completions": [said]}, str)
        tokens = golden.tokenizer().encode("<s> w1 <pad> <s> w2 <pad>").ids
        expected = model.logits(np.array([tokens]))[0, 0]
        assert actual[0, 0] == pytest.approx(expected, rel=1e-5)

    def test_a_run_learns_from_it(self, home: Path, tmp_path: Path) -> None:
        """Its weights are planned, its files are those of the run, and its rewards grow."""

        def trainer(out: Path, **more: Any) -> Trainer:
            usual: dict[str, Any] = {"method": "grpo", "reward": [str(home / "whole")], "lr": 1e-2}
            usual |= {"eval": home / "prompts.jsonl", "batch": 6, "samples": 8, "warmup": 0}
            usual |= {"max_new_tokens": 12, "steps": 8, "decay": "constant", "out": out}
            return Trainer(home / "model", home / "prompts.jsonl", Settings(**usual | more))

        made = trainer(tmp_path / "run").train()
        lines = [line for line in log(made) if "loss" in line]
        assert lines[-1]["reward"] > lines[0]["reward"] + 0.1
        line = [line for line in made.files.lines() if "peak_bytes" in line][1]
        assert line["length"] > 11  # answers fill their rows
        planned, peak = line["planned_bytes"], line["peak_bytes"]
        assert planned == pytest.approx(peak, rel=0.03)  # objects of Python count too
        kept = made.files.settings.read_text()
        assert '"reward whole/model.safetensors"' in kept
        with pytest.raises(ConfigError, match="holds a model with the head causal_lm; pass one"):
            trainer(tmp_path / "none", reward=[str(home / "model")]).train()

    def test_a_text_that_is_too_long_is_one_error(self, home: Path) -> None:
        model = load(home / "whole" / "model", dtype="float32")
        reward = RewardModel("own", 1.0, home, model)
        most = model.config.positions
        fits = {"prompts": ["w1 " * (most - 2)], "completions": ["w2"]}  # and its end token
        assert scores([reward], fits, str).shape == (1, 1)
        columns = {"prompts": ["w1 " * (most - 1)], "completions": ["w2"]}
        with pytest.raises(ConfigError, match=r"row 0: the reward own: the text w1 .* has 129 tok"):
            scores([reward], columns, "row {}".format)
