"""``--invariant`` of sft: equal bits on 1, 2 and 4 ranks, and for each split into micro-batches."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from threadpoolctl import threadpool_info, threadpool_limits

from unsloth_cupy import machine, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Callback, Settings, Trainer
from unsloth_cupy.finetune.data.text import Example, texts_of
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer
from unsloth_cupy.finetune.data.training_data import Packed, Shape
from unsloth_cupy.finetune.methods.method import RANKS
from unsloth_cupy.models.objective import IGNORE
from unsloth_cupy.parallel import DataParallel, SingleCommunicator
from unsloth_cupy.parallel.data import in_halves
from unsloth_cupy.training import gradients
from unsloth_cupy.training.gradients import sum_in_halves

from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from ..machines.stand_in_devices import Stream, UnorderedError
from ..models.peers import CONFIGS, MIXTURES, RELATIVES, SIZES
from .one_order import RESUMED, WAYS
from .ranks import by_sockets
from .threads import by_threads

FAMILIES = CONFIGS | RELATIVES | MIXTURES
COMMON = (
    "--invariant", "--tokens", "12", "--lr", "0.01", "--steps", "2", "--evaluate-every", "2",
    "--save-every", "2",
)  # fmt: skip
FULL = (
    "",
    "--dtype bfloat16 --neftune 5",
    "--recompute-every 1 --pack",
    "--no-pack --state-bits 8",
)
LORA = "--lora 2 --lora-dropout 0.2"
# of a line of the log: they depend on the machine and on the number of ranks
MEASURED = {"seconds", "tokens_per_second", "memory_bytes", "planned_bytes", "peak_bytes"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, and rows of prompts and answers of unequal lengths."""
    folder, draw = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    words = ["a", "tree", "walks", "by", "night"]
    (folder / "text.txt").write_text(" ".join(draw.choice(words, 900)))
    rows = [
        {"prompt": "a tree", "completion": " ".join(draw.choice(words, draw.integers(1, 12)))}
        for _ in range(40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def model_in(folder: Path, config: Mapping[str, Any], text: str) -> Path:
    """Write a new model, with a tokenizer of the text."""
    tokenizer = train_tokenizer(iter([text]), 300)
    own = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    models.create(SIZES | dict(config) | own, seed=0).save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def numbers(run: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the log of a run without what was measured, and its model and optimizer as bytes."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    log = [{name: each for name, each in line.items() if name not in MEASURED} for line in lines]
    files = *run.glob("model/*model.safetensors"), *run.glob("checkpoint-*/optimizer.safetensors")
    assert len(files) == 2
    arrays = {
        f"{file.name}.{name}": np.frombuffer(array.tobytes(), np.uint8)
        for file in files
        for name, array in load_file(file).items()
    }
    return log, arrays


def assert_equal_runs(folder: Path, name: str) -> None:
    """Assert that the runs on 1, 2 and 4 ranks have equal logs, models and optimizer states."""
    (log, arrays), *others = (numbers(folder / f"{name}-{size}") for size in WAYS)
    assert {line["step"] for line in log if "loss" in line} == {1, 2}
    assert {line["step"] for line in log if "held_out_loss" in line} == {0, 2}
    for other_log, other in others:
        assert other_log == log, name
        assert other.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(other[key], array, err_msg=f"{name}: {key}")


def test_runs_end_in_equal_bits(home: Path, tmp_path: Path) -> None:
    """Full and LoRA, 32 and 16 bits, ZeRO-1 or not, packed or not, noise and dropout, by turns."""
    text, commands = (home / "text.txt").read_text(), {}
    for number, label in enumerate(Sample.one_in(len(FAMILIES), FAMILIES)):
        base = str(model_in(tmp_path / f"model-{number}", FAMILIES[label], text))
        full = FULL[(number + Sample.day) % len(FULL)].split()
        data = "rows.jsonl" if "pack" in " ".join(full) else "text.txt"
        commands[f"{number}-full"] = [base, "--data", str(home / data), *COMMON, *full]
        if label not in MIXTURES:  # stacks of experts have no dropout
            lora = ["--data", str(home / "rows.jsonl"), *COMMON, *LORA.split()]
            commands[f"{number}-lora"] = [base, *lora]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    place = str(tmp_path / "commands.json"), str(tmp_path)
    ended = by_sockets(4, "tests.parallel.one_order", *place, limit=300)
    assert [each.code for each in ended] == [0] * 4, ended[0].said
    assert "each text is computed alone, the 6 rows of a step as one batch" in ended[0].said
    for name in commands:
        assert_equal_runs(tmp_path, name)


@pytest.mark.slow
def test_a_resume_on_other_ranks_ends_in_equal_bits(home: Path, tmp_path: Path) -> None:
    """From 1 rank to 2, and from 4 ranks with ZeRO-1 to 1, in the middle of an epoch."""
    base = str(model_in(tmp_path / "model", CONFIGS["llama"], (home / "text.txt").read_text()))
    words = [base, "--data", str(home / "rows.jsonl"), *COMMON, "--decay", "constant"]
    more = {"full": ("--neftune", "5"), "lora": LORA.split()}
    commands = {name: [*words, *more[name]] for name in Sample.one_in(2, more)}
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    place = str(tmp_path / "commands.json"), str(tmp_path), "resumed"
    ended = by_sockets(4, "tests.parallel.one_order", *place, limit=300)
    assert [each.code for each in ended] == [0] * 4, ended[0].said
    for name in commands:
        (log, arrays), *others = (numbers(tmp_path / f"{name}-{label}") for label in RESUMED)
        assert [line["step"] for line in log if "loss" in line] == [1, 2, 3, 4]
        for other_log, other in others:
            assert other_log == log
            assert other.keys() == arrays.keys()
            for key, array in arrays.items():
                np.testing.assert_array_equal(other[key], array, err_msg=f"{name}: {key}")


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def summed(terms: np.ndarray) -> dict[str, np.ndarray]:
    return sum_in_halves(iter([{"x": each.copy()} for each in terms]), len(terms))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_add_halves(size: int) -> None:
    """In any number of ranks, also with fewer terms than ranks; the sign of zero is kept."""
    draw = np.random.default_rng(0)
    terms = (draw.standard_normal((17, 1000)) * 10.0 ** draw.integers(-6, 6, (17, 1000))).astype(
        np.float32
    )
    terms[:, 0] = -0.0

    def work(comm: Any) -> None:
        model = type("Model", (), {"trainable": {"x": terms[0].copy()}})()
        ranks = DataParallel(model, comm, halves=True)
        for count in range(1, 18):
            own = summed(terms[in_halves(count, comm)])
            own = own or {"x": np.full(1000, -0.0, np.float32)}
            same_bits(ranks.sums(own)["x"], summed(terms[:count])["x"])

    by_threads(size, work)
    assert (summed(terms)["x"] != np.add.reduce(terms)).any()  # else the test shows nothing


class Four(SingleCommunicator):
    """Rank 0 of four, whose peers have the same arrays."""

    size = 4

    def split(self, color: int) -> Any:
        pair = Four()
        pair.size = 2
        return pair

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        return x + x


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_sums_beside_computation_wait_for_it(
    missing: int | None, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buckets are summed on a second stream; without one of the events, work is unordered."""
    waits, wait_event = list[Any](), Stream.wait_event

    def wait(stream: Stream, event: Any) -> None:
        waits.append(stream)
        if len(waits) - 1 != missing:
            wait_event(stream, event)

    monkeypatch.setattr(Stream, "wait_event", wait)
    with gpu("90") as machine:
        trained = {name: machine.array((8,), "float32") for name in "ab"}
        model: Any = SimpleNamespace(trainable=trained)
        ranks = DataParallel(model, Four(), bucket_bytes=1, halves=halves)
        ordered = nullcontext() if missing is None else pytest.raises(UnorderedError)
        with ordered:
            gradients = {name: array * 3 for name, array in trained.items()}
            sums = ranks.sums(gradients)
            assert sums["a"] + sums["b"] is not None
        if missing is None:
            assert len(waits) == 3
            assert waits[0] is waits[1] is not waits[2]


def test_sums_in_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass makes a sum, and each addition of two sums frees one."""
    added, add = list[int](), gradients.add_gradients

    def counted(sums: Any, terms: Any) -> Any:
        added.append(bool(sums))
        return add(sums, terms)

    monkeypatch.setattr(gradients, "add_gradients", counted)
    for count in range(1, 18):
        actual = list[int]()

        def passes(count: int = count, actual: list[int] = actual) -> Any:
            for number in range(count):
                actual.append(number - sum(added))
                yield {"x": np.ones(1, np.float32)}

        added.clear()
        sum_in_halves(passes(), count)
        assert gradients.sums_held(count) == actual


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[3, 9], [8, 5], [4, 4]], [0]),  # the longest text has a sum beside it
        ([[9, 3], [8, 5], [4, 4]], [1, 0]),
        ([[1, 1, 1, 2], [7, 1, 1, 1], [2, 6, 1, 1]], [0, 2, 1]),
    ],
)
def test_the_steps_with_the_longest_texts(lengths: Any, expected: list[int]) -> None:
    zeros = [np.zeros(length, int) for each in lengths for length in each]
    examples = [Example(tokens, tokens, 0) for tokens in zeros]
    source = Packed(examples, Shape(len(lengths[0]), 10, False, 0), 0, "rows")
    source._order = lambda epoch: range(len(zeros))  # type: ignore[method-assign,assignment]
    assert source.largest(len(lengths), 1, by_text=True) == expected


def test_parts_are_balanced() -> None:
    def work(comm: Any) -> Any:
        return [in_halves(count, comm) for count in range(40)]

    for count, parts in enumerate(zip(*by_threads(4, work), strict=True)):
        sizes = [part.stop - part.start for part in parts]
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, count)
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ConfigError, match="3 ranks are not a power of two; use 2, or 4"):
        by_threads(3, work)


def test_a_text_does_not_depend_on_its_batch() -> None:
    """Packed or padded, beside other texts or alone, without what comes after its last label."""
    draw, examples = np.random.default_rng(0), []
    for length in (5, 9, 2, 7):
        tokens = draw.integers(3, 90, length)
        labels = np.where(np.arange(length) < 1, IGNORE, tokens)
        examples.append(Example(tokens, labels, 0))
    examples[1].labels[6:] = IGNORE
    packed, rows = (Shape(4, 9, pack, 0).batch_of(examples) for pack in (True, False))
    alone = [text for each in examples for text in texts_of(Shape(1, 9, False, 0).batch_of([each]))]
    assert [each.tokens.shape[1] for each in alone] == [5, 6, 2, 7]
    assert [each.label_count for each in alone] == [4, 5, 1, 6]
    for batch in (packed, rows):
        for actual, expected in zip(texts_of(batch), alone, strict=True):
            np.testing.assert_array_equal(actual.tokens, expected.tokens)
            np.testing.assert_array_equal(actual.labels, expected.labels)
            assert actual.offsets is None
            assert actual[3:5] == expected[3:5]


def test_blas_has_one_thread(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the model: two threads add in another order than one."""
    monkeypatch.setattr(machine, "THREADS_PAY", 1)
    seen = []

    class Threads(Callback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            libraries = [each for each in threadpool_info() if each["user_api"] == "blas"]
            seen.append({each["num_threads"] for each in libraries})

    settings = Settings(
        steps=1, batch=1, tokens=8, layers=1, hidden=32, vocabulary=300, out=tmp_path / "run",
        invariant=True, device="cpu",
    )  # fmt: skip
    with threadpool_limits(2, user_api="blas"):
        Trainer(None, home / "text.txt", settings, callbacks=[Threads()], quiet=True).train()
    assert seen == [{1}]


def test_a_resume_with_or_without_it_is_named(home: Path, tmp_path: Path) -> None:
    """A run goes on with the setting that it has, or not at all."""
    sizes: dict[str, Any] = {"layers": 1, "hidden": 32, "vocabulary": 300, "tokens": 8, "batch": 1}

    def train(name: str, steps: int, **more: Any) -> Any:
        settings = Settings(steps=steps, out=tmp_path / name, device="cpu", **sizes, **more)
        return Trainer(None, home / "text.txt", settings, quiet=True).train()

    train("usual", 1)
    with pytest.raises(ConfigError, match=r"invariant False \(now True\)"):
        train("usual", 2, invariant=True)
    train("invariant", 1, invariant=True)
    assert train("invariant", 2).loop.plan.by_text


def test_what_is_refused() -> None:
    def refused(match: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            Settings(invariant=True, **more).check(Path("model"), lines=True)

    for name in RANKS:
        refused(
            f"invariant needs an undivided model; use data_parallel in place of {name}", **{name: 2}
        )
    refused("invariant does not support zero=3 with method=sft; leave", zero=3, data_parallel=2)
    refused("invariant does not support graph=True", graph=True)
    refused("halves of the data ranks, and 3 are not a power of two; start 2 or 4", data_parallel=3)
    refused(
        "method=dpo does not use invariant; leave it out, or choose sft, grpo or rloo", method="dpo"
    )
