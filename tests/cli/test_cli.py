"""The command line on tiny runs: artefacts, resuming after SIGKILL, Ctrl-C, wrong input."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import click.testing
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from unsloth_cupy import machine
from unsloth_cupy.cli import plan_tables
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.chat import Chat
from unsloth_cupy.finetune.data.text import Batches, Text, held_out_rows, split, unigram_baseline
from unsloth_cupy.finetune.data.tokenizer import encode, load_tokenizer, train_tokenizer
from unsloth_cupy.finetune.run import printer, results
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.machine import format_bytes
from unsloth_cupy.memory.largest import Largest
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.models import create, load
from unsloth_cupy.models.generation import decoding
from unsloth_cupy.serving.texts import StopStrings, TextStream
from unsloth_cupy.training import adamw

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = GOLDEN / "models" / "llama"
STEPS = 40
SMALL = (
    "--steps", str(STEPS), "--batch", "4", "--tokens", "16", "--layers", "1", "--hidden", "32",
    "--vocabulary", "300", "--evaluate-every", "20", "--save-every", "7", "--lr", "0.01",
)  # fmt: skip
TIMES = ("seconds", "tokens_per_second", "memory_bytes", "planned_bytes", "peak_bytes")


def run(*arguments: object, given: str | bytes = "") -> click.testing.Result:
    """Run a command in this process: without a loss curve, and with a short sample at its end.

    They take longer than a small run.  ``start`` runs it as it is, in a process of its own.
    """
    with (
        mock.patch.object(printer, "draw_curve"),
        mock.patch.object(results, "SAMPLE_TOKENS", 8),
    ):
        return click.testing.CliRunner().invoke(group, [str(a) for a in arguments], input=given)


def start(
    *arguments: object, stdin: int | None = None, python: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    command = [sys.executable, *python, "-m", "unsloth_cupy", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"PYTHONIOENCODING": "utf-8"}
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a background job
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
            env=environment,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, ignored)


@pytest.mark.parametrize("after", ["unsloth_cupy.starting", "numpy", "unsloth_cupy.cli.check"])
def test_control_c_while_a_command_imports(after: str) -> None:
    process = start("check", "rms_norm", python=("-X", "importtime"))
    assert process.stderr is not None
    for line in process.stderr:  # a line for each module that is imported
        if line.split("|")[-1].strip() == after:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors


def wait_for_lines(log: Path, count: int, process: "subprocess.Popen[str]") -> None:
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < count):
        time.sleep(0.001)


def killed_and_ended(folder: Path, moments: list[int], *arguments: object) -> None:
    """Kill a run at each moment, in lines of its log, and start it again; then let it end."""
    command, kills = ("finetune", "--out", folder, *arguments), 0
    for lines in sorted(moments):
        process = start(*command)
        wait_for_lines(folder / "log.jsonl", lines, process)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert kills


@contextmanager
def stumbling(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Runs end with an error after so many steps, inside a ``with`` block."""
    step = Loop._one_step

    def stumble(self: Loop) -> None:
        if self.step == after:
            raise ConfigError("stumbled")
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_one_step", stumble)
        yield


def numbers(folder: Path) -> list[dict[str, float]]:
    """The log, which must be whole, without what depends on the machine."""
    text = (folder / "log.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of sentences that a small model can learn, none of them twice."""
    draw = random.Random(0)
    nouns, verbs = ["cat", "dog", "fish", "bird", "horse"], ["sees", "hears", "likes", "finds"]
    lines = [
        f"{i}. The {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}."
        for i in range(300)
    ]
    path = tmp_path_factory.mktemp("text") / "animals.txt"
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nothing stopped, and what it printed; its folder's name need not be UTF-8."""
    folder = tmp_path_factory.mktemp("runs") / os.fsdecode(b"wh\xf6le")
    try:
        folder.mkdir()
    except OSError:  # the disk takes no such name
        folder = folder.with_name("whole")
    process = start("finetune", "--text", text, "--out", folder, *SMALL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert not {"\x1b", "\r", "\b"} & {*output, *errors}, "a pipe is not a terminal"
    return folder, output


def trained(text: Text) -> str:
    """What of a text is trained on."""
    return "".join(part for _, part in text.blocks())


class TestText:
    def test_the_parts_share_no_paragraph(self) -> None:
        said_twice = "What is said twice."
        paragraphs = [f"Paragraph {i}." for i in range(50)]
        paragraphs[3] = paragraphs[48] = said_twice
        parts = split("name", "\n\n".join(paragraphs))
        assert said_twice in trained(parts)
        assert said_twice not in parts.held_out
        assert "Paragraph 49." in parts.held_out
        assert "Paragraph 49." not in trained(parts)

    def test_one_long_paragraph_is_split_too(self) -> None:
        parts = split("name", "word " * 1000)
        assert len(trained(parts)) == 4500
        assert len(parts.held_out) == 500

    def test_batches_depend_on_seed_and_step_alone(self) -> None:
        tokens = np.arange(1000)
        first, second = (Batches(tokens, batch=4, length=10, seed=7) for _ in range(2))
        second.at(200)
        np.testing.assert_array_equal(first.at(50).tokens, second.at(50).tokens)
        other = Batches(tokens, batch=4, length=10, seed=8)
        assert (first.at(50).tokens != other.at(50).tokens).any()

    def test_an_epoch_takes_every_window_once(self) -> None:
        batches = Batches(np.arange(1000), batch=1, length=10, seed=0)
        starts = sorted(batches.at(step).tokens[0, 0] for step in range(batches.windows))
        assert np.diff(starts).tolist() == [10] * (batches.windows - 1)

    def test_held_out_rows_ask_for_every_token_but_the_first_once(self) -> None:
        tokens = np.arange(100, 195)
        asked: list[int] = []
        for rows, labels, offsets, count, *_ in held_out_rows(tokens, batch=3, length=8):
            assert offsets is None
            assert count == (labels[:, 1:] != -100).sum()
            assert rows.shape == labels.shape
            assert len(rows) == 3 or asked
            assert (labels[:, 1:] != -100).any(axis=1).all(), "a row of padding"
            assert (labels[:, -1] != -100).any(), "a column of padding"
            asked += labels[:, 1:][labels[:, 1:] != -100].tolist()
            counted = labels != -100
            np.testing.assert_array_equal(rows[counted], labels[counted])
        assert asked == tokens[1:].tolist()

    def test_the_baseline_is_the_entropy_of_what_was_seen(self) -> None:
        train = np.array([0] * 7 + [1] * 1)  # with one added: 8 and 2 of 10
        assert unigram_baseline(train, np.array([0, 1]), 2) == pytest.approx(
            -(np.log(0.8) + np.log(0.2)) / 2
        )


class TestTextStream:
    WORDS = "Grüße, 漢字 and 👩‍👧: fin"

    def test_characters_of_many_tokens_come_whole(self) -> None:
        tokenizer = train_tokenizer("nothing but ASCII", 257)
        stream = TextStream(tokenizer)
        pieces = [stream.push(int(token)) for token in encode(tokenizer, self.WORDS)]
        assert "".join(pieces) + stream.flush() == self.WORDS
        assert not any("\ufffd" in piece for piece in pieces)
        assert len(pieces) > len(self.WORDS)

    def test_bytes_that_are_no_text_are_not_held_back_for_ever(self) -> None:
        tokenizer = train_tokenizer("nothing but ASCII", 257)
        broken = int(encode(tokenizer, "漢")[1])  # the middle of a character
        stream = TextStream(tokenizer)
        assert "\ufffd" in "".join(stream.push(broken) for _ in range(8))


class TestStopStrings:
    @pytest.mark.parametrize(
        "stops", [(), ("x",), ("aab",), ("abac",), ("bc", "abcd"), ("👩‍👧", "字 u")]
    )
    @pytest.mark.parametrize(
        "text", ["aaab", "ababacab", "xabcd", "aa", "", "Grüße, 漢字 und 👩‍👧."]
    )
    def test_pieces_say_what_the_whole_says(self, text: str, stops: tuple[str, ...]) -> None:
        ends = [text[:n] for n in range(len(text) + 1) if text[:n].endswith(stops)] if stops else []
        expected = text
        if ends:
            expected = ends[0].removesuffix(max((s for s in stops if ends[0].endswith(s)), key=len))
        for seed in range(20):
            draw, rest, stream, shown = random.Random(seed), text, StopStrings(stops), ""
            while rest and not stream.has_match:
                size = draw.randint(1, 4)
                shown += stream.push(rest[:size])
                rest = rest[size:]
                assert expected.startswith(shown)
            assert stream.has_match == bool(ends)
            assert shown + stream.flush() == expected

    def test_nothing_waits_that_begins_no_string(self) -> None:
        stream = StopStrings(["</s>", "\n\n"])
        assert [stream.push(c) for c in "a<b\nc</s"] == ["a", "", "<b", "", "\nc", "", "", ""]
        assert stream.flush() == "</s"


class TestFinetune:
    def test_what_a_run_leaves_and_prints(self, finished: tuple[Path, str]) -> None:
        folder, output = finished
        names = {path.name for path in folder.iterdir()}
        assert names == {"settings.json", "log.jsonl", "curve.png", "model", "checkpoint-00000040"}
        assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert {p.name for p in (folder / "model").iterdir()} == {
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        lines = numbers(folder)
        assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
        held_out = [line for line in lines if "held_out_loss" in line]
        assert [line["step"] for line in held_out] == [0, 20, 40]
        last = held_out[-1]
        assert last["held_out_loss"] < held_out[0]["held_out_loss"] - 1
        for said in (
            f"{last['unigram_baseline']:.3f}",
            f"{last['held_out_loss']:.3f}",
            "--- sample: ",
        ):
            assert said in output

    @pytest.mark.slow
    def test_equal_bits_after_sigkill(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "killed"
        killed_and_ended(folder, random.sample(range(1, STEPS), 2), "--text", text, *SMALL)
        assert weights(folder) == weights(finished[0])
        assert numbers(folder) == numbers(finished[0])

    @pytest.mark.slow
    def test_control_c_saves_and_says_how_to_go_on(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "stopped"
        arguments = ("finetune", "--text", text, "--out", folder, *SMALL)
        process = start(*arguments)
        wait_for_lines(folder / "log.jsonl", 11, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
        assert "resume with the same command" in errors
        assert "Traceback" not in errors
        assert (folder / "curve.png").exists()
        stopped = RunFolder(folder).newest_checkpoint()
        assert stopped is not None
        assert (
            numbers(folder)[-1]["step"]
            == json.loads((stopped / "trainer.json").read_text())["step"]
        )
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert f"resuming from {stopped}" in result.stderr
        assert weights(folder) == weights(finished[0])
        assert numbers(folder) == numbers(finished[0])

    def test_a_finished_run_is_left_alone(self, finished: tuple[Path, str], text: Path) -> None:
        folder = finished[0]
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        result = run("finetune", "--text", text, "--out", folder, *SMALL)
        assert result.exit_code == 0
        assert "is finished" in result.output
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    def test_other_settings_ask_for_another_folder(
        self, finished: tuple[Path, str], text: Path
    ) -> None:
        result = run("finetune", "--text", text, "--out", finished[0], *SMALL, "--seed", "5")
        assert_one_clear_error(result, "seed 0 (now 5)", "--out")

    def test_what_failed_before_its_first_checkpoint_claims_no_folder(
        self, text: Path, tmp_path: Path
    ) -> None:
        options = ("--text", text, "--out", tmp_path / "run", *SMALL)
        assert_one_clear_error(run("finetune", *options, "--tokens", 9999), "too short")
        assert run("finetune", *options, "--steps", 1).exit_code == 0

    def test_two_runs_do_not_share_a_folder(self, text: Path, tmp_path: Path) -> None:
        with RunFolder(tmp_path / "run").claimed({}):
            result = run("finetune", "--text", text, "--out", tmp_path / "run", *SMALL)
        assert_one_clear_error(result, "is in use by another run")

    @pytest.mark.slow
    def test_from_a_model_folder(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        options = ("--steps", 3, "--batch", 2, "--tokens", 16, "--text", text)
        result = run("finetune", finished[0], *options, "--out", tmp_path / "more")
        assert result.exit_code == 0, result.output
        first, last = (numbers(folder) for folder in (tmp_path / "more", finished[0]))
        assert first[0]["held_out_loss"] == pytest.approx(last[-1]["held_out_loss"], abs=1e-5)

    @pytest.mark.slow
    def test_adapters_of_a_model_folder(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        options = ("--text", text, "--lora", 4, "--steps", 4, "--batch", 2, "--tokens", 8)
        often = ("--save-every", 2, "--evaluate-every", 4)
        done = run("finetune", finished[0], *options, *often, "--out", out)
        assert done.exit_code == 0, done.output
        assert "trainable (LoRA)" in done.output
        made = {path.name for path in (out / "model").iterdir()}
        assert made == {
            "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
            "tokenizer_config.json",
        }  # fmt: skip
        said = run("generate", out, "the", "--max-new-tokens", 3)
        assert said.exit_code == 0, said.output
        settings = out / "model" / "adapter_config.json"
        settings.write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
        assert_one_clear_error(run("generate", out, "the"), "base_model_name_or_path is")

    @pytest.mark.slow
    def test_adapters_go_on_to_learn(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        options = ("--text", text, "--steps", 2, "--batch", 8, "--tokens", 64)
        first = ("finetune", finished[0], "--lora", 4, *options, "--out", tmp_path / "first")
        assert run(*first).exit_code == 0
        more = ("finetune", tmp_path / "first", *options, "--out", tmp_path / "more")
        again = run(*more)
        assert again.exit_code == 0, again.output
        assert "trainable (LoRA)" in again.output
        for folder in ("first", "more"):
            for line in (tmp_path / folder / "log.jsonl").read_text().splitlines():
                if "peak_bytes" in line:
                    actual = json.loads(line)
                    assert actual["planned_bytes"] == pytest.approx(
                        actual["peak_bytes"],
                        rel=0.02,  # what plans promise
                    )
        assert_one_clear_error(run(*more[:-1], tmp_path / "other", "--lora", 4), "leave --lora out")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changed", "written"),
        [
            (("--lora", 2), "adapter_model.safetensors"),
            (("--state-bits", 8), "model.safetensors"),
            (("--chunked-mlp",), "model.safetensors"),
        ],
    )
    def test_other_states_go_on_with_equal_bits(
        self,
        changed: tuple[Any, ...],
        written: str,
        finished: tuple[Path, str],
        text: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(adamw, "SMALL", 256)  # of which this model's matrices have more
        options = ("--text", text, *changed, "--batch", 2, "--tokens", 8, "--steps", 6)
        often = ("--save-every", 2, "--evaluate-every", 6)
        command = ("finetune", finished[0], *options, *often, "--out")
        assert run(*command, tmp_path / "whole").exit_code == 0
        with stumbling(monkeypatch, 5):
            assert_one_clear_error(run(*command, tmp_path / "half"), "stumbled")
        (state,) = (tmp_path / "half").glob("checkpoint-*/optimizer.safetensors")
        kinds = {array.dtype for array in load_file(state).values()}
        assert (np.dtype(np.uint8) in kinds) == ("--state-bits" in changed)
        again = run(*command, tmp_path / "half")
        assert "resuming from" in again.output
        actual = [(tmp_path / name / "model" / written).read_bytes() for name in ("whole", "half")]
        assert actual[0] == actual[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_sixteen_bits_learn_what_thirty_two_do(
        self,
        dtype: str,
        finished: tuple[Path, str],
        text: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The same held-out loss within 1 %; a run that goes on has equal bits, and its scale."""
        options = ("finetune", "--text", text, *SMALL, "--dtype", dtype, "--out")
        result = run(*options, tmp_path / "whole")
        assert result.exit_code == 0, result.output
        log, wide = numbers(tmp_path / "whole"), numbers(finished[0])
        for mine, theirs in zip(log, wide, strict=True):
            if "held_out_loss" in mine:
                promised = pytest.approx(theirs["held_out_loss"], rel=1e-2)  # by tuning.md
                assert mine["held_out_loss"] == promised
        steps = [line for line in log if "loss" in line]
        if dtype == "float16":
            assert (steps[-1]["loss_scale"], steps[-1]["skipped_steps"]) == (65536, 0)
        assert {
            array.dtype for array in load_file(tmp_path / "whole/model/model.safetensors").values()
        } == {np.dtype(np.float32)}
        with stumbling(monkeypatch, 11):
            assert_one_clear_error(run(*options, tmp_path / "stopped"), "stumbled")
        again = run(*options, tmp_path / "stopped")
        assert f"resuming from {tmp_path / 'stopped' / 'checkpoint-00000007'}" in again.stderr
        assert numbers(tmp_path / "stopped") == log
        assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")

    @pytest.mark.slow
    def test_chunked_mlps_learn_the_same(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        """The switch is a setting of the run, of every family, and works with adapters."""
        out, options = tmp_path / "run", ("finetune", "--text", text, *SMALL)
        assert run(*options, "--chunked-mlp", "--out", out).exit_code == 0
        last, plain = numbers(out)[-1], numbers(finished[0])[-1]
        assert last["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-2)  # as others
        again = run(*options, "--out", out)
        assert again.exit_code == 0
        assert "chunked_mlp" in again.stderr, again.stderr
        more = ("finetune", finished[0], "--text", text, "--steps", 2, "--lora", 2)
        logs = []
        for switch in ("--chunked-mlp", "--no-chunked-mlp"):
            assert run(*more, switch, "--out", tmp_path / switch).exit_code == 0
            logs.append([line["loss"] for line in numbers(tmp_path / switch) if "loss" in line])
        assert logs[0] == pytest.approx(logs[1], rel=1e-5)
        assert run("plan", GOLDEN / "models" / "gemma2", "--chunked-mlp").exit_code == 0

    def test_adapters_need_a_model(self, tmp_path: Path) -> None:
        done = run("finetune", "--lora", 4, "--out", tmp_path / "out")
        assert_one_clear_error(done, "--lora requires an existing model")

    @pytest.mark.slow
    def test_accumulated_batches_and_checkpoints_learn_the_same(
        self, text: Path, tmp_path: Path
    ) -> None:
        """Two batches of 2 are one of 4; blocks computed twice are blocks computed once."""
        small = ("--tokens", "16", "--layers", "2", "--hidden", "32", "--vocabulary", "300")
        options = ("--text", text, *small, "--steps", "5", "--evaluate-every", 5, "--lr", "0.01")
        losses = []
        for number, more in enumerate(
            (("--batch", "4"), ("--batch", "4", "--recompute-every", "1"))
        ):
            out = tmp_path / str(number)
            assert run("finetune", *options, *more, "--out", out).exit_code == 0
            losses.append(numbers(out))
        assert losses[0] == losses[1]
        out = tmp_path / "parts"
        more = ("--batch", "2", "--accumulate", "2")
        assert run("finetune", *options, *more, "--out", out).exit_code == 0
        lines = [line for line in numbers(out) if "loss" in line]
        assert len(lines) == 5
        assert lines[-1]["loss"] < lines[0]["loss"]

    def test_a_loss_that_explodes_stops_the_run(self, text: Path, tmp_path: Path) -> None:
        with np.errstate(all="ignore"):
            result = run(
                "finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--lr", "1e30"
            )
        assert_one_clear_error(result, "smaller --lr")


class TestGenerate:
    def test_the_text_goes_on_and_the_speed_to_stderr(self, finished: tuple[Path, str]) -> None:
        options = ("--max-new-tokens", 20, "--seed", 3)
        first, again = (run("generate", finished[0], "The cat", *options) for _ in range(2))
        assert first.exit_code == 0, first.output
        assert first.stdout.startswith("The cat")
        assert len(first.stdout) > len("The cat\n")
        assert first.stdout == again.stdout
        drawn = [run("generate", finished[0], "The cat", *options[:2]).stdout for _ in range(3)]
        assert len({first.stdout, *drawn}) > 2  # without a seed, another text with each call
        assert re.search(r"20 tokens in .* tokens/s", first.stderr)

    def test_greedy_tokens_are_those_of_the_model(self, finished: tuple[Path, str]) -> None:
        from unsloth_cupy import models

        folder = finished[0] / "model"
        tokenizer = load_tokenizer(folder)
        prompt = tokenizer.encode("The dog").ids
        tokens = models.load(folder).generate(np.array([prompt]), max_new_tokens=12)
        result = run("generate", folder, "The dog", "--temperature", 0, "--max-new-tokens", 12)
        assert result.stdout == tokenizer.decode(tokens[0].tolist()) + "\n"

    def test_its_folder_is_exported(self, finished: tuple[Path, str], tmp_path: Path) -> None:
        result = run("export", finished[0] / "model", tmp_path / "m.gguf")
        assert result.exit_code == 0, result.output

    def test_it_stops_at_the_end_token(self, finished: tuple[Path, str], tmp_path: Path) -> None:
        folder = shutil.copytree(finished[0] / "model", tmp_path / "model")
        written = run("generate", folder, "The dog", "--temperature", 0, "--max-new-tokens", 3)
        tokens = load_tokenizer(folder).encode(written.stdout).ids
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tokens}))
        result = run("generate", folder, "The dog", "--temperature", 0)
        assert result.stderr.startswith("1 tokens")
        result = run("generate", folder, "The dog", "--temperature", 0, "--seed", 3, "--top-k", 5)
        assert_one_clear_error(result, "leave --top-k, --seed out, or raise")

    @pytest.mark.parametrize("prompt", [(), ("-",)])
    def test_a_prompt_from_standard_input(
        self, finished: tuple[Path, str], prompt: tuple[str, ...]
    ) -> None:
        options = ("--max-new-tokens", 9, "--temperature", 0)
        expected = run("generate", finished[0], "Der Hund heißt Ölaf\nund", *options)
        for end in ("", "\n", "\r\n"):
            typed = "Der Hund heißt Ölaf\nund" + end
            actual = run("generate", finished[0], *prompt, *options, given=typed)
            assert actual.stdout == expected.stdout
        assert run("generate", finished[0], "", *options).stdout != expected.stdout
        assert run("generate", finished[0], *prompt, *options).exit_code == 0  # of nothing

    def test_bytes_that_are_no_text(self, finished: tuple[Path, str]) -> None:
        odd = os.fsdecode("Grüße".encode("latin-1"))
        for arguments in ((odd,), ("x", "--stop", odd), ("x", "--chat", "--system", odd)):
            result = run("generate", finished[0], *arguments)
            assert_one_clear_error(result, "it is not UTF-8: byte 2 is 0xfc; convert it")
        for dash in ((), ("-",)):
            result = run("generate", finished[0], *dash, given="Grüße".encode("latin-1"))
            assert_one_clear_error(result, "standard input is not UTF-8: byte 2 is 0xfc")

    def test_it_stops_at_the_models_positions(
        self, finished: tuple[Path, str], text: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(finished[0] / "model", tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": 8, "eos_token_id": None})
        )
        count = len(load_tokenizer(folder).encode("The dog").ids)
        result = run("generate", folder, "The dog")
        assert result.stderr.startswith("The text ends at the model's 8 positions.\n")
        assert f"{8 - count} tokens in" in result.stderr
        fits = run("generate", folder, "The dog", "--max-new-tokens", 8 - count)
        assert "ends at" not in fits.stderr
        result = run("generate", folder, "The dog sees the dog and the dog sees the dog.")
        assert_one_clear_error(result, "the model has 8 positions, which leaves no room")
        assert not result.stdout
        sizes = ("--tokens", 8, "--batch", 8, "--steps", 1)
        learned = run("finetune", folder, "--text", text, "--out", tmp_path / "run", *sizes)
        assert learned.exit_code == 0, learned.output  # with its sample

    def test_it_stops_before_a_text(self, finished: tuple[Path, str]) -> None:
        write = partial(run, "generate", finished[0])
        options = ("--temperature", 0, "--max-new-tokens", 30)
        whole = write("The dog", *options).stdout[:-1]
        rest = whole.removeprefix("The dog")
        for stop in (rest[:1], rest[7:12], rest[-1:], rest[5:]):
            actual = run(
                "generate", finished[0], "The dog", *options, "--stop", "\0", "--stop", stop
            )
            assert actual.stdout == "The dog" + rest[: rest.find(stop)] + "\n"
        assert write("The dog", *options, "--stop", "\0").stdout[:-1] == whole

    def test_options_reach_the_model(self, finished: tuple[Path, str]) -> None:
        write = partial(run, "generate", finished[0])
        plain = ("--max-new-tokens", 20, "--temperature", 1, "--seed", 0)
        greedy = write("The dog", "--temperature", 0, *plain[:2])
        drawn = write("The dog", *plain)
        least = write("The dog", *plain, "--min-p", 1)
        assert least.stdout == greedy.stdout != drawn.stdout
        penalty = ("--repetition-penalty", 1e9)
        assert write("The dog", *plain, *penalty).stdout != drawn.stdout
        with mock.patch.object(decoding, "PagedKVCache", wraps=decoding.PagedKVCache) as made:
            write("The dog", "--max-new-tokens", 2, "--cache-dtype", "int8")
        assert made.call_args.kwargs["dtype"] == "int8"

    @pytest.mark.slow
    def test_a_system_message(self, finished: tuple[Path, str]) -> None:
        write = partial(run, "generate", finished[0])
        system, asked = (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        )
        text = Chat(finished[0] / "model").text([system, asked], answer=True)
        options = ("--temperature", 0, "--max-new-tokens", 9)
        answer = write("Hi", "--chat", "--system", "Be brief.", *options)
        assert write(text, *options).stdout == text + answer.stdout
        piped = run(
            "generate", finished[0], "--chat", "--system", "Be brief.", *options, given="Hi\n"
        )
        assert piped.stdout == answer.stdout
        assert_one_clear_error(write("Hi", "--system", "x"), "add --chat")

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["control-d", "control-c"])
    def test_a_conversation(self, finished: tuple[Path, str], end: str) -> None:
        """Every answer is one to all that was said, and both ways out are quiet."""
        pty = pytest.importorskip("pty", reason="needs a terminal, which Windows gives otherwise")
        options = ("--temperature", 0, "--max-new-tokens", 12)
        said, expected = [{"role": "system", "content": "Be brief."}], []
        for question in ("Wer bellt schön?", "Who else?"):
            said.append({"role": "user", "content": question})
            text = Chat(finished[0] / "model").text(said, answer=True)
            answer = run("generate", finished[0], text, *options).stdout.removeprefix(text)
            expected.append(answer)
            said.append({"role": "assistant", "content": answer[:-1]})
        keyboard, terminal = pty.openpty()
        command = ("generate", finished[0], "--chat", "--system", "Be brief.", *options)
        process = start(*command, stdin=terminal)
        for line, answer in zip(
            (b"Wer bellt sch\xff?\n\nWer bellt sch\xc3\xb6n?\n", b"Who else?\n"),
            expected,
            strict=True,
        ):
            os.write(keyboard, line)
            shown = ""
            while not shown.endswith(answer):
                more = process.stdout.read(1)
                assert more, process.stderr.read()
                shown += more
        assert process.stdout.read(2) == "> "
        if end == "control-d":
            os.write(keyboard, b"\4")
        while end == "control-c" and process.poll() is None:
            process.send_signal(signal.SIGINT)  # the first may come before it waits for a line
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        rest, errors = process.communicate(timeout=60)
        os.close(keyboard), os.close(terminal)
        assert (process.returncode, rest) == (0, "\n")
        first, *others = errors.splitlines()
        assert re.fullmatch(
            r".+ on the CPU, float32\. Ctrl-C ends an answer, Ctrl-D the conversation\.", first
        )
        assert others == ["The line is not UTF-8; type it again."]


@pytest.fixture
def _one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of what fits has one card: each takes a few plans."""
    monkeypatch.setattr(plan_tables, "CARDS", (24,))


class TestPlan:
    @pytest.mark.slow
    @pytest.mark.parametrize("config", [LLAMA, LLAMA / "config.json"])
    def test_it_says_what_fits(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan_tables, "CARDS", (141,))
        plot = tmp_path / "plan.png"
        result = run("plan", config, "--batch", 2, "--tokens", 64, "--plot", plot)
        assert result.exit_code == 0, result.output
        for said in ("weights", "activations", "layer 1", "total", "141 GB", "fits"):
            assert said in result.output
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]

    @pytest.mark.slow
    @pytest.mark.usefixtures("_one_card")
    @pytest.mark.parametrize(("name", "begins"), [("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
    def test_a_picture_has_the_format_of_its_name(
        self, name: str, begins: bytes, tmp_path: Path
    ) -> None:
        result = run("plan", LLAMA, "--tokens", 16, "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(begins)

    @pytest.mark.parametrize("name", ["a.jpg", "a", ".png", "a.png.txt"])
    def test_a_picture_of_no_known_format_is_refused(self, name: str, tmp_path: Path) -> None:
        for command in (("plan", LLAMA), ("bench", "scale")):
            result = run(*command, "--plot", tmp_path / name)
            assert_one_clear_error(result, f"{name} is not a picture", ".png, .pdf, .svg")
            assert [*tmp_path.iterdir()] == []

    @pytest.mark.slow
    @pytest.mark.usefixtures("_one_card")
    def test_a_picture_is_drawn_where_one_is_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So a plan needs no folder that can be written to."""
        monkeypatch.chdir(tmp_path)
        tmp_path.chmod(0o500)
        result = run("plan", LLAMA, "--tokens", 16)
        tmp_path.chmod(0o700)
        assert result.exit_code == 0, result.output
        assert "timeline" not in result.output
        assert not [*tmp_path.iterdir()]

    @pytest.mark.usefixtures("_one_card")
    def test_an_adapter_is_planned_as_it_is(self, tmp_path: Path) -> None:
        model = load(LLAMA, dtype="float32")
        model.add_adapter(3, seed=0, targets=("q_proj",), base=str(LLAMA))
        model.save_adapter(tmp_path)
        options = ("--tokens", 16, "--dtype", "float32", "--device", "cpu")
        result = run("plan", tmp_path, *options)
        assert result.exit_code == 0, result.output
        assert f"the adapter in {tmp_path}" in " ".join(result.output.split())
        expected = plan_memory(
            model.config, batch=1, tokens=16, dtype="float32", adapter=model.adapter, device="cpu"
        )
        assert f"total │ │ {format_bytes(expected.total)}" in " ".join(result.output.split())
        assert_one_clear_error(run("plan", tmp_path, "--lora", 4), "leave --lora out")

    @pytest.mark.slow
    @pytest.mark.usefixtures("_one_card")
    def test_the_machine_is_among_the_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "device_memory", lambda _: (3 * 2**29, 0))
        assert "here: 1.5 GB" in run("plan", LLAMA, "--tokens", 16, "--device", "cpu").output

    @pytest.mark.slow
    @pytest.mark.usefixtures("_one_card")
    def test_rows_beyond_the_positions_of_a_model_are_planned_with_a_warning(
        self, tmp_path: Path
    ) -> None:
        """As in finetune; rows that nobody asked for have 2048 tokens, or all positions."""
        config = json.loads((LLAMA / "config.json").read_text())
        for positions, tokens in ((96, 96), (4096, 2048)):
            written = json.dumps(config | {"max_position_embeddings": positions})
            (tmp_path / "config.json").write_text(written)
            assert f"1 x {tokens} tokens" in run("plan", tmp_path).output
            said = f"--tokens {positions + 1} exceeds the {positions} positions that the model"
            with pytest.warns(UserWarning, match=said):
                done = run("plan", tmp_path, "--tokens", positions + 1)
            assert f"1 x {positions + 1} tokens" in done.output

    @pytest.mark.slow
    def test_a_large_model_does_not_fit(self, tmp_path: Path) -> None:
        config = json.loads((LLAMA / "config.json").read_text())
        large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 20}
        large |= {"max_position_embeddings": 8192}
        (tmp_path / "config.json").write_text(json.dumps(config | large | {"head_dim": 128}))
        result = run("plan", tmp_path, "--tokens", 8192)
        assert result.exit_code == 0, result.output
        assert result.output.count("too large") == 6

    @pytest.mark.slow
    def test_savings_fit_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_tables, "CARDS", (16,))
        config = json.loads((LLAMA / "config.json").read_text())
        wider = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4}
        wider |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
        wider |= {"max_position_embeddings": 512}
        (tmp_path / "config.json").write_text(json.dumps(config | wider))
        actual = []
        for more in ([], ["--lora", 8, "--recompute-every", 1, "--state-bits", 8]):
            result = run("plan", tmp_path, "--tokens", 512, *more)
            assert result.exit_code == 0, result.output
            line = next(line for line in result.output.splitlines() if "16 GB" in line)
            actual.append(int(line.split("│")[3].replace("-", "0")))
        assert actual[0] < actual[1]

    def test_the_largest_fits_and_no_larger_one_does(self) -> None:
        asked = []

        def total(number: int) -> int:
            asked.append(number)
            return 1000 + 70 * number + 30 * min(number, 40)

        largest = Largest(total, step=2, most=900)
        for limit in (1099, 1100, 1199, 1200, 3000, 8000, 50_000, 10**6):
            actual = largest(limit)
            assert actual == 2 * max((n for n in range(451) if total(2 * n) <= limit), default=0)
        assert largest(1000) == 0


def test_info_says_what_is_here() -> None:
    result = run("info")
    assert result.exit_code == 0, result.output
    for said in ("NumPy arrays", f"numpy {np.__version__}", "GPU", "kernel"):
        assert said in result.output


@pytest.mark.parametrize("command", ["info", "check", "bench", "finetune", "generate", "plan"])
def test_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_shows_60_options_at_most() -> None:
    """The others are marked as rare where they are declared, and shown by --help-all."""
    shown, every = (
        set(re.findall(r"^  (--[a-z-]+)", run("finetune", each).output, re.M))
        for each in ("--help", "--help-all")
    )
    assert len(shown) <= 60
    parameters = group.commands["finetune"].params
    expected = {each.opts[0] for each in parameters if isinstance(each, click.Option)}
    assert every == {*expected, "--help-all"}
    assert shown < every


def assert_one_clear_error(result: click.testing.Result, *said: str) -> None:
    assert result.exit_code not in (0, None)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.count("Error:") == 1
    assert "Traceback" not in result.output
    flat = " ".join(result.stderr.split())
    for words in said:
        assert words in flat, flat


def test_an_adapter_whose_base_has_moved(tmp_path: Path) -> None:
    """The base is named to every command; the tokenizer is the base's, as peft saves none."""
    base, adapter, text = tmp_path / "base", tmp_path / "adapter", tmp_path / "text.txt"
    shutil.copytree(LLAMA, base)
    letters = train_tokenizer("the cat sat on the mat. ", 300)
    letters.save(str(base / "tokenizer.json"))
    config = json.loads((base / "config.json").read_text())
    create({**config, "vocab_size": 320}, seed=0).save(base)
    model = load(base)
    model.add_adapter(2)
    model.save_adapter(adapter)
    moved = base.rename(tmp_path / "moved")
    text.write_text("".join(f"the cat {n} sat on the mat. " for n in range(300)))
    tiny = ("--text", text, "--steps", 1, "--batch", 2, "--tokens", 8, "--out", tmp_path / "run")
    commands = (
        ("generate", adapter, "the", "--max-new-tokens", 2),
        ("export", adapter, tmp_path / "m.gguf"),
        ("finetune", adapter, *tiny),
    )
    for command in commands:
        assert_one_clear_error(run(*command), "base_model_name_or_path is", "--base FOLDER")
        done = run(*command, "--base", moved)
        assert done.exit_code == 0, done.output
    said = run("generate", tmp_path / "run", "the", "--max-new-tokens", 2)
    assert said.exit_code == 0, said.output  # the run names the base where it is now
    assert_one_clear_error(run("generate", moved, "the", "--base", moved), "leave it out")
    assert_one_clear_error(run("finetune", *tiny, "--base", moved), "--base requires an existing")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A folder full of input that makes no sense."""
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").write_text("years of work")
    (tmp_path / "thesis.json").write_text("years of work")
    (tmp_path / "orphan").mkdir()
    orphan = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"}
    (tmp_path / "orphan" / "adapter_config.json").write_text(json.dumps(orphan))
    shutil.copytree(LLAMA, tmp_path / "no-tokenizer")
    for name, config in {
        "broken": "{",
        "unknown": '{"model_type": "rwkv"}',
        "list": "[]",
    }.items():
        shutil.copytree(LLAMA, tmp_path / name)
        (tmp_path / name / "config.json").write_text(config)
        shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", tmp_path / name)
    shutil.copytree(LLAMA, tmp_path / "bad-tokenizer")
    (tmp_path / "bad-tokenizer" / "tokenizer.json").write_text("{}")
    shutil.copytree(LLAMA, tmp_path / "truncated")
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", tmp_path / "truncated")
    whole = (LLAMA / "model.safetensors").read_bytes()
    (tmp_path / "truncated" / "model.safetensors").write_bytes(whole[:-100])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("info --nonsense", "No such option"),
        ("finetune --epoch 1", "Did you mean '--epochs'?"),
        ("finetune --text missing.txt --out run", "missing.txt: No such file"),
        ("finetune --text full --out run", "full: Is a directory"),
        ("finetune --text empty.txt --out run", "is empty"),
        ("finetune --text short.txt --out run", "too short"),
        ("finetune --text thesis.json --out run", "one object per line in a .jsonl file"),
        ("finetune --text latin.txt --out run", "is not UTF-8: byte 2 is 0xfc"),
        ("finetune --out full", "full is not empty and holds no run"),
        ("finetune --out empty.txt", "is a file"),
        ("finetune --out empty.txt/run", "empty.txt/run: Not a directory; name another folder"),
        ("finetune --steps 0", "--steps"),
        ("finetune --lr -1", "--lr"),
        ("finetune --lr nan --out run", "--lr"),
        ("finetune --vocabulary 100 --out run", "--vocabulary 100 is too small"),
        ("finetune --hidden 33 --out run", "--hidden 33 is odd"),
        ("finetune missing --out run", "missing does not exist"),
        ("finetune full --out run", "holds no config.json"),
        ("finetune broken --out run", "config.json cannot be read as JSON"),
        ("finetune unknown --out run", "'rwkv'"),
        ("finetune no-tokenizer --out run", "has no tokenizer.json"),
        ("finetune bad-tokenizer --out run", "tokenizer.json is broken"),
        ("finetune truncated --out run", "model.safetensors"),
        ("finetune truncated --hidden 64 --out run", "leave them out"),
        ("generate missing", "missing does not exist"),
        ("generate meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B --local-dir Ll"),
        ("finetune a/b", "a/b does not exist; to download a model of huggingface.co: hf"),
        ("finetune full/b", "full/b does not exist; pass a folder that contains config.json"),
        ("plan orphan", "is not a folder here; to download a model of huggingface.co: hf"),
        ("plan a/b", "hf download a/b --local-dir b, then pass b here"),
        ("generate empty.txt", "is a file"),
        ("generate no-tokenizer", "has no tokenizer.json"),
        ("generate truncated Hi", "model.safetensors"),
        ("generate unknown Hi", "'rwkv'"),
        ("generate full --top-p 2", "--top-p"),
        ("generate full --temperature nan", "--temperature"),
        ("plan missing", "missing does not exist"),
        ("plan empty.txt", "empty.txt cannot be read as JSON"),
        ("plan list", "must hold a JSON object"),
        ("plan unknown", "which is not supported; the nearest known family is"),
        ("plan no-tokenizer --dtype int8", "'int8' is not one of"),
        ("plan no-tokenizer --batch 0", "--batch"),
        ("plan no-tokenizer --plot no/a.png", "no is not a folder; make it, or name another file"),
        ("plan no-tokenizer --plot full", "full is a folder; name a file"),
        ("bench relu2 --json no/a.json", "no is not a folder"),
        ("bench relu2 --plot no/a.png", "no is not a folder"),
    ],
)
def test_wrong_input_is_one_clear_error(
    wrong: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(wrong)
    assert_one_clear_error(run(*arguments.split()), said)
    assert not (wrong / "run").exists()


def test_a_run_that_never_began_takes_back_what_it_made_alone(wrong: Path) -> None:
    there = wrong / "there"
    there.mkdir()
    for out in (there, there / "a" / "b"):
        result = run("finetune", wrong / "broken", "--out", out)
        assert_one_clear_error(result, "copy it again")
        assert not list(there.iterdir())


@pytest.mark.slow
def test_a_full_disk_is_one_clear_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("No space left on device")

    command = ("finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--steps", 8)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", full)
        assert_one_clear_error(run(*command), "No space left on device; make room on its disk")
    assert run(*command).exit_code == 0


def test_a_disk_too_small_for_the_run_is_known_before_the_first_step(
    finished: tuple[Path, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("finetune", "--text", text, "--out", tmp_path / "run", *SMALL)
    with monkeypatch.context() as patch:
        used = shutil.disk_usage(tmp_path)._replace(free=4 * len(weights(finished[0])))
        patch.setattr(shutil, "disk_usage", lambda path: used)
        said = "the run, with two checkpoints, needs"
        assert_one_clear_error(run(*command), said)
    assert not (tmp_path / "run").exists()


def test_a_loss_above_the_baseline_is_called_so(text: Path, tmp_path: Path) -> None:
    sizes = ("--layers", 1, "--hidden", 32, "--vocabulary", 300, "--tokens", 16)
    result = run("finetune", "--text", text, "--out", tmp_path / "run", "--steps", 1, *sizes)
    assert re.search(
        r"evaluation loss .* nats per token \(\d\.\d{3} above the baseline\)", result.output
    )


def test_weights_that_explode_are_no_warnings(text: Path, tmp_path: Path) -> None:
    """Here a warning would be another error, as in every test."""
    command = ("finetune", "--text", text, "--out", tmp_path / "run", *SMALL)
    result = run(*command, "--lr", 1e6, "--max-norm", 1e9)
    assert result.exit_code == 1
    assert_one_clear_error(result, "try a smaller --lr")


def test_tables_stay_whole_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert machine.console().width == machine.WIDE
    monkeypatch.setenv("COLUMNS", "77")
    assert machine.console().width == 77


@pytest.mark.parametrize("command", ["finetune --out run", "generate full hello"])
def test_a_device_that_is_not_there_is_named_with_its_cure(
    wrong: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    shutil.copytree(LLAMA, wrong / "full", dirs_exist_ok=True)
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", wrong / "full")
    monkeypatch.chdir(wrong)
    choices = "choose auto, cpu, cuda or cuda:1"
    assert_one_clear_error(run(*command.split(), "--device", "gpu"), choices)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        said = "needs CuPy: pip install 'unsloth-cupy[cuda12]', or leave device out"
        assert_one_clear_error(run(*command.split(), "--device", "cuda"), said)
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    result = run(*command.split(), "--device", "cuda:1")
    assert_one_clear_error(result, "device='cuda:1', but CuPy sees 0 GPUs; choose 'cpu'")
    assert not (wrong / "run").exists()


@pytest.mark.slow
def test_a_missing_extra_is_named_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('No click', name='click')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "unsloth_cupy", "info"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "Error: the command line needs the package click;"
        " install it with pip install 'unsloth_cupy[cli]'\n"
    )


@pytest.mark.parametrize("package", ["matplotlib", "rich"])
def test_what_the_end_of_a_run_needs_is_asked_before_its_first_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    said = f"the command line needs the package {package}"
    assert_one_clear_error(run("finetune", "--text", text, "--out", tmp_path, *SMALL), said)
    assert not (tmp_path / "log.jsonl").exists()
    if package == "matplotlib":
        numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.svg"
        command = ("bench", "scale", "--json", numbers, "--plot", picture)
        assert_one_clear_error(run(*command), said)
        assert not numbers.exists()


@pytest.mark.slow
def test_a_notebook_around_a_command_chooses_no_backend_for_its_pictures(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "of_a_notebook"}
    command = ("plan", LLAMA, "--tokens", "16", "--plot", tmp_path / "plan.svg")
    done = subprocess.run(
        [sys.executable, "-m", "unsloth_cupy", *command],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.svg").exists()


def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fonts, settings and variables of the environment matplotlib does not take."""

    def fails(*args: Any) -> None:
        raise ValueError("invalid literal")

    monkeypatch.setattr("unsloth_cupy.finetune.run.printer.draw_curve", fails)
    sizes = ("--layers", "1", "--hidden", "32", "--vocabulary", "300", "--tokens", "16")
    words = ("finetune", "--text", str(text), "--out", str(tmp_path / "run"), "--steps", "1")
    done = click.testing.CliRunner().invoke(group, [*words, *sizes])
    assert done.exit_code == 0, done.output
    assert ": invalid literal" in done.output
    assert (tmp_path / "run" / "model").is_dir()


def test_a_tokenizer_of_another_model_is_refused(
    finished: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(LLAMA, tmp_path / "llama")
    shutil.copy(finished[0] / "model" / "tokenizer.json", tmp_path / "llama")
    result = run("finetune", tmp_path / "llama", "--text", text, "--out", tmp_path / "run")
    assert_one_clear_error(result, "copy tokenizer and model from")
    result = run("generate", tmp_path / "llama", "The dog")
    assert_one_clear_error(result, "copy tokenizer and model from")
    assert not result.stdout


def test_a_token_that_nobody_says_may_have_no_row(
    finished: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished[0] / "model", tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    rest = ("--text", text, "--out", tmp_path / "run", "--steps", 1, "--tokens", 16)
    assert run("finetune", folder, *rest).exit_code == 0
    assert run("generate", folder, "The dog", "--max-new-tokens", 1).exit_code == 0
    result = run("generate", folder, "The <image>")
    assert_one_clear_error(result, "'<image>'", "copy tokenizer and model from")


def test_a_checkpoint_that_lost_its_optimizer_is_named(
    finished: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(finished[0] / "settings.json", folder)
    shutil.copytree(finished[0] / "model", folder / "checkpoint-00000007")
    result = run("finetune", "--text", text, "--out", folder, *SMALL)
    assert_one_clear_error(result, "cannot be resumed from", "delete it to start over")


def test_line_of_a_log_that_was_torn_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    folder.trim(2)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 bytes"):
        train_tokenizer("text", 256)


@pytest.mark.parametrize("words", [["finetune"], ["finetune", "--fit"], ["plan", "x"]])
def test_out_of_memory_names_fit_where_it_helps(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("3 GiB")

    monkeypatch.setattr(sys, "argv", ["unsloth-cupy", *words])
    monkeypatch.setattr(group.commands[words[0]], "invoke", fails)
    done = run(*words)
    assert_one_clear_error(done, "out of memory (3 GiB); ")
    assert ("--fit chooses settings that fit it; or try" in done.output) == (words == ["finetune"])


def test_a_warning_is_one_line_without_code() -> None:
    command = [sys.executable, "-m", "unsloth_cupy", "plan", str(LLAMA), "--tokens", "999999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    (line,) = (line for line in done.stderr.splitlines() if "max_position_embeddings" in line)
    assert line.startswith("warning: ")
    assert ".py" not in done.stderr
    assert "UserWarning" not in done.stderr
