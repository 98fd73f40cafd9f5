"""Methods beyond the next token: their first step is TRL's, on any batches, ranks and restarts."""

import dataclasses
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from threadpoolctl import threadpool_info, threadpool_limits

from unsloth_cupy import losses
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import (
    Callback,
    Listener,
    Lora,
    Run,
    Settings,
    Trainer,
    read_data,
    teach,
)
from unsloth_cupy.finetune.data.preferences import pair_of
from unsloth_cupy.finetune.data.records import Records
from unsloth_cupy.finetune.data.rows import KINDS
from unsloth_cupy.finetune.data.text import Batch
from unsloth_cupy.finetune.data.training_data import Example, Examples, Shape, consecutive
from unsloth_cupy.finetune.methods.distillation import Distill
from unsloth_cupy.finetune.methods.registry import METHODS, OPTIONS, Options
from unsloth_cupy.finetune.methods.taught import Taught
from unsloth_cupy.finetune.run import printer, reference, teaching
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.models import Transformer, create, load
from unsloth_cupy.parallel import SingleCommunicator

from ..cli.test_cli import assert_one_clear_error, run
from ..golden import generate_methods as golden
from ..harness.sampling import Sample
from ..models.peers import CONFIGS, SIZES
from ..parallel.ranks import by_sockets

LLAMA = Path(golden.__file__).parent / "models" / "llama"
OURS = {  # settings of the methods of golden.TRL
    "hinge": {"method": "dpo", "loss": "hinge"},
    "kto": {"method": "kto", "desirable_weight": 1.5},
    "reward": {"method": "reward", "center": 0.1},
}
NAMES = {"loss": "loss", "grad_norm": "gradient_norm", "rewards/margins": "margin",
         "rewards/accuracies": "accuracy", "kl": "kl", "accuracy": "accuracy", "margin": "margin",
         "min_reward": "reward_min", "mean_reward": "reward_mean",
         "max_reward": "reward_max"}  # fmt: skip
DATA = {"kto": "rated", "distill": "texts", "reward": "scored", "classify": "labelled",
        "embed": "related"}  # fmt: skip
API = "blas"
MEASURED = ("memory_bytes", "seconds", "tokens_per_second", "planned_bytes", "peak_bytes")


def write(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model_times(share: float, folder: Path) -> Path:
    """Save the golden model with its weights times a number, with the tokenizer of words."""
    model = load(LLAMA, dtype="float32")
    for name, weight in model.parameters.items():
        model.parameters[name] = weight * np.float32(share)
    model.save(folder)
    (folder / "tokenizer.json").write_text(golden.tokenizer().to_str())
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    for share in (1.0, 0.9, 1.1):
        model_times(share, folder / f"model-{share}")
    model = load(LLAMA, dtype="float32", head="sequence_classification", labels=1)
    model.parameters["score.weight"] = golden.head(1, model.config.hidden)
    model.save(folder / "model-scored")
    shutil.copy(folder / "model-1.0" / "tokenizer.json", folder / "model-scored")
    write(folder / "pairs.jsonl", golden.pairs())
    write(folder / "scored.jsonl", golden.scored())
    write(folder / "labelled.jsonl", golden.labelled())
    related = [{"query": p["prompt"], "document": p["chosen"]} for p in golden.pairs()]
    write(folder / "related.jsonl", related)
    write(folder / "rated.jsonl", golden.rated())
    rows = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in golden.pairs()]
    write(folder / "texts.jsonl", rows)
    return folder


def data_of(home: Path, method: str) -> Path:
    return home / f"{DATA.get(method, 'pairs')}.jsonl"


def model_of(home: Path, method: str) -> Path:
    return home / f"model-{'scored' if method == 'reward' else '1.0'}"


def trainer(home: Path, out: Path, *, lora: Any = None, **settings: Any) -> Trainer:
    method = settings["method"]
    if method == "distill":
        settings = {"teacher": home / "model-0.9"} | settings
    data = settings.pop("data", None) or data_of(home, method)
    settings = {"eval": data, "lr": 1e-3, "steps": 1, "batch": 6, "tokens": 20} | settings
    model = settings.pop("model", None) or model_of(home, method)
    return Trainer(model, data, Settings(out=out, **settings), lora=lora)


def log(run: Run, *, leave: tuple[str, ...] = MEASURED) -> list[dict[str, Any]]:
    return [{n: v for n, v in line.items() if n not in leave} for line in run.files.lines()]


def assert_as_trl(
    home: Path, out: Path, name: str, expected: dict[str, float], **more: Any
) -> None:
    settings = OURS.get(name, {"method": name}) | more
    if METHODS[settings["method"]].compares:
        settings["reference"] = home / f"model-{golden.SHARE.get(name, 0.9)}"
    (line,) = [
        line for line in trainer(home, out, **settings).train().files.lines() if "loss" in line
    ]
    for theirs, ours in NAMES.items():
        if theirs in expected and not (ours == "accuracy" and name == "kto"):
            assert line[ours] == pytest.approx(expected[theirs], rel=2e-5, abs=2e-6), (name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [True, False])
def test_the_first_step_is_that_of_trl(pack: bool, home: Path, tmp_path: Path) -> None:
    steps = json.loads((LLAMA.parents[1] / "methods.json").read_text())["steps"]
    assert steps.keys() == golden.TRL.keys()
    assert steps["kto"]["kl"] > 0
    for name, expected in steps.items():
        assert_as_trl(home, tmp_path / name, name, expected, pack=pack)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra `peers` (trl)")
@pytest.mark.filterwarnings("ignore")
def test_the_first_step_is_that_of_trl_itself(home: Path, tmp_path: Path) -> None:
    for name in golden.TRL:
        assert_as_trl(home, tmp_path / name, name, golden.first_step(name))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cpo", "orpo", "kto", "distill", "reward", "classify"])
def test_parts_of_a_batch_are_one_batch(method: str, home: Path, tmp_path: Path) -> None:
    """Sums over pairs, tokens and answers are divided by those of the whole step."""
    runs = [
        trainer(
            home, tmp_path / str(batch), method=method, batch=batch, accumulate=6 // batch,
            pack=False, steps=2, evaluate_every=1,
        ).train()
        for batch in (6, 2)
    ]  # fmt: skip
    logs = [log(run) for run in runs]
    assert [len(each) for each in logs] == [5, 5]
    for line, other in zip(*logs, strict=True):
        assert other == pytest.approx(line, rel=1e-4, abs=2e-6)


GRIDS = {  # of two ranks
    "data": "--data-parallel 2",
    "zero-1": "--data-parallel 2 --zero 1",
    "zero-3": "--data-parallel 2 --zero 3",
    "tensor": "--tensor-parallel 2",
    "context": "--context-parallel 2",
    "pipeline": "--pipeline-parallel 2",
    "chunks": "--pipeline-parallel 2 --pipeline-schedule interleaved --chunks 1",
}


OFFLOADED = (
    ("sft", "", "--accumulate 2"), ("sft", "", "--lora 4 --quantize nf4 --no-pack"),
    ("dpo", "", "--reference {home}/model-0.9 --accumulate 2"), ("dpo", "", "--lora 4 --no-pack"),
    ("kto", "", "--lora 4 --lora-dropout 0.3"), ("distill", "", ""), ("reward", "", "--neftune 5"),
    ("sft", "data", "--lora 4"), ("dpo", "zero-1", "--accumulate 2"), ("sft", "zero-3", ""),
    ("orpo", "tensor", "--lora 4"), ("sft", "context", ""), ("dpo", "pipeline", "--accumulate 2"),
    ("sft", "chunks", "--accumulate 2"), ("sft", "tensor", "--no-pack"), ("kto", "data", ""),
)  # fmt: skip


@pytest.mark.slow
def test_offload_changes_no_bit(home: Path, tmp_path: Path) -> None:
    """In one process and in ranks, of which each moves its own inputs of blocks."""
    runs = Sample.one_in(2, OFFLOADED)

    def asked(number: int, offload: bool) -> list[str]:
        method, grid, more = runs[number]
        data = data_of(home, "orpo" if method == "sft" else method)
        data = home / "texts.jsonl" if method == "sft" else data
        given = {
            "--data": data, "--eval": data, "--method": method, "--batch": 4, "--tokens": 20,
            "--out": tmp_path / f"{number}-{offload}", "--steps": 2, "--lr": 1e-3,
            "--evaluate-every": 9, "--recompute-every": 1,
        }  # fmt: skip
        words = [str(word) for pair in given.items() for word in pair]
        words += ["--teacher", str(home / "model-0.9")] if method == "distill" else []
        words += [*more.format(home=home).split(), *GRIDS.get(grid, "").split()]
        words += ["--offload"] if offload else ["--no-offload"]
        return ["finetune", str(model_of(home, method)), *words, "--"]

    for grids in (False, True):
        own = [number for number, each in enumerate(runs) if bool(each[1]) is grids]
        commands = [word for offload in (False, True) for n in own for word in asked(n, offload)]
        many = by_sockets(
            1 + grids, "tests.parallel.commands", "moved", "--", *commands[:-1], limit=240
        )
        for ended in many if own else ():
            assert ended.code == 0, ended.said
            assert int(re.search(r"moved (\d+) arrays", ended.said)[1]) > 0  # type: ignore[index]
    for number, run_ in enumerate(runs):
        folders = [tmp_path / f"{number}-{offload}" / "model" for offload in (False, True)]
        expected, actual = (load_file(*each.glob("*model.safetensors")) for each in folders)
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_array_equal(actual[name], weight, err_msg=f"{run_} {name}")


@pytest.mark.slow
def test_ranks_are_one_process(home: Path, tmp_path: Path) -> None:
    """A pair stays in one rank, k is that of all ranks, and the reference is shared.

    Dropout and noise are of tokens, not of ranks.
    """
    many, adapted = "--batch 2 --accumulate 2", "--lora 2 --recompute-every 1"
    drawn = "--neftune 5 --lora 2 --lora-dropout 0.3"
    runs = [("dpo", "data", drawn), ("orpo", "zero-1", f"--no-pack {drawn} --accumulate 2")]
    runs += [("orpo", "context", drawn), ("kto", "context", f"--no-pack {drawn}")]
    runs += [("dpo", "data", ""), ("orpo", "data", "--no-pack"), ("kto", "zero-1", "")]
    runs += [("kto", "data", "--neftune 5"), ("orpo", "zero-3", f"{drawn} --recompute-every 1")]
    runs += [("orpo", "zero-3", "--batch 1")]  # of which some steps leave a rank without texts
    runs += [(name, "data", "") for name in ("distill", "reward", "classify")]
    runs += [("kto", "chunks", many), ("reward", "pipeline", adapted)]
    runs += [("distill", "pipeline", many), ("dpo", "pipeline", adapted)]
    runs += [(name, "zero-3", "") for name in ("kto", "dpo", "reward", "distill", "cpo")]
    runs += [(name, "zero-3", "--lora 2") for name in ("classify", "kto")]
    runs += [(name, "tensor", adapted) for name in ("dpo", "classify")]
    runs += [(name, "tensor", "") for name in ("kto", "distill", "embed")]
    runs += [(name, "context", "--no-pack") for name in ("reward", "embed")]
    runs += [(name, "context", "") for name in ("ipo", "orpo", "kto", "distill", "classify")]
    runs += [(name, "pipeline", "--no-pack") for name in ("orpo", "embed", "classify")]
    runs = [*runs[:4], *Sample.one_in(4, runs[4:])]

    def folder(method: str, grid: str, more: str, ranks: int) -> Path:
        return tmp_path / f"{method}-{grid}{'-lora' * ('--lora' in more)}-{ranks}"

    def asked(method: str, grid: str, more: str, ranks: int) -> list[str]:
        given = {
            "--data": data_of(home, method), "--eval": data_of(home, method), "--method": method,
            "--out": folder(method, grid, more, ranks), "--batch": 3, "--tokens": 20,
            "--steps": 2, "--lr": 1e-3, "--evaluate-every": 1,
        }  # fmt: skip
        words = [str(word) for pair in given.items() for word in pair]
        words += ["--teacher", str(home / "model-0.9")] if method == "distill" else []
        # else rewards are 0 but for rounding, and so is their order
        if METHODS[method].compares and (method, grid) != ("kto", "zero-3"):
            words += ["--reference", str(home / "model-0.9")]
        words += [*more.split(), *(GRIDS[grid].split() if ranks > 1 else ())]
        return ["finetune", str(model_of(home, method)), *words, "--"]

    both = [word for each in runs for word in asked(*each, 2)]
    for ended in by_sockets(2, "tests.parallel.commands", *both[:-1], limit=240):
        assert ended.code == 0, ended.said
    for method, grid, more in runs:
        done = run(*asked(method, grid, more, 1)[:-1])
        assert done.exit_code == 0, done.output
        folders = [folder(method, grid, more, ranks) for ranks in (1, 2)]
        logs = [log(Run("", RunFolder(each), None)) for each in folders]
        assert len(logs[0]) == 5
        for line, other in zip(*logs, strict=True):
            same = line
            if method == "distill":  # ranks that divide tokens or blocks count no right ones
                same = {name: value for name, value in line.items() if name in other}
            assert other == pytest.approx(same, rel=1e-4, abs=2e-6), (method, grid)
        expected, actual = (
            load_file(*(each / "model").glob("*model.safetensors")) for each in folders
        )
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():  # steps of small gradients may differ
            assert np.abs(actual[name] - weight).mean() < 1e-6, (method, grid, name)


class Halts(Callback):
    """Requests a stop after some steps."""

    def __init__(self, stop: Stop, step: int) -> None:
        self.stop, self.step = stop, step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            self.stop.signal = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lora"),
    [
        ("dpo", None),
        ("kto", Lora(2)),
        ("distill", Lora(2)),
        ("reward", Lora(2)),
        ("classify", None),
        ("embed", Lora(2)),
    ],
)
def test_a_run_that_goes_on_has_equal_bits(
    method: str, lora: Any, home: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"method": method, "steps": 4, "batch": 2, "evaluate_every": 2}
    options |= {"model": home / "model-1.0"}  # a head is new
    stop, out = Stop(), tmp_path / "run"
    halted = trainer(home, out, lora=lora, **options)
    halted.callbacks = [Halts(stop, 2)]
    with pytest.raises(Interrupted):
        halted.train(stop)
    known = out / "reference.safetensors"
    assert known.exists() == METHODS[method].compares
    again = trainer(home, out, lora=lora, **options).train()
    expected = trainer(home, tmp_path / "whole", lora=lora, **options).train()
    assert log(again) == log(expected)
    both = [
        load_file(*(each / "model").glob("*.safetensors")) for each in (out, tmp_path / "whole")
    ]
    assert both[0].keys() == both[1].keys()
    for name, weight in both[1].items():
        np.testing.assert_array_equal(both[0][name], weight)
    other = {"center": None} if method == "reward" else {"beta": None}
    other = {"seed": 0} if method in ("classify", "embed") else other
    (name, before), *_ = other.items()
    with pytest.raises(ConfigError, match=f"holds a run with {name} {before}"):
        trainer(home, out, lora=lora, **options, **{name: 1}).train()


def test_a_reference_counts_tokens_on_one_thread(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads of BLAS that wait for each other took twenty times as long beside other work."""
    monkeypatch.setattr(printer, "SECONDS_BETWEEN_LINES", -1.0)
    threads = list[int]()

    def log_probs(model: Any, *args: Any, **options: Any) -> Any:
        if type(model.table) is np.ndarray:  # a plan has arrays without data
            pools = [each for each in threadpool_info() if each["user_api"] == API]
            threads.extend(each["num_threads"] for each in pools)
        return original(model, *args, **options)

    original = Transformer.log_probs
    monkeypatch.setattr(Transformer, "log_probs", log_probs)
    again = trainer(home, tmp_path / "run", method="dpo", steps=1)
    again.listener = printer.Printer()
    with threadpool_limits(2, user_api=API):
        run_of = again.train()
    assert threads
    assert {*threads} == {1}
    lines = [line for line in capsys.readouterr().err.splitlines() if "reference: " in line]
    assert re.fullmatch(r"reference: [\d,]+ tokens of ([\d,]+) tokens, [\d,]+ tokens/s", lines[0])
    examples = run_of.loop.training_data.examples[0]
    assert any(f" of {examples.ends[-1]:,} tokens" in line for line in lines)


def test_lines_of_a_log_file_have_the_speed_and_the_time_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printer, "SECONDS_BETWEEN_LINES", -1.0)
    run_of = trainer(home, tmp_path / "run", method="dpo", steps=4)
    run_of.listener = printer.Printer()
    run_of.train()
    lines = [line for line in capsys.readouterr().err.splitlines() if ": loss " in line]
    assert len(lines) == 4
    assert all(re.search(r", [\d:]+ (s|min|h) left$", line) for line in lines)
    assert re.search(r", [\d,]+ tokens/s, process memory ", lines[-1])
    assert lines[-1].endswith(", 0 s left")


def test_a_reference_pass_calls_the_model_once_for_a_batch(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights are gathered, if all ranks have the same number of batches."""
    compute, passes = reference._compute, list[int]()

    def noted(model: Any, part: Any, texts: Any, ranks: Any) -> None:
        calls = list[Any]()

        def log_probs(**batch: Any) -> Any:
            calls.append(batch)
            return model.log_probs(**batch)

        gathered = {"gather": True, "expert_ranks": None, "table": model.table}
        compute(SimpleNamespace(**gathered, log_probs=log_probs), part, texts, ranks)
        passes.append(len(calls))
        assert len(calls) == len([*reference.consecutive(part, texts)])

    monkeypatch.setattr(reference, "_compute", noted)
    trainer(home, tmp_path / "run", method="dpo", reference=home / "model-0.9", steps=1).train()
    assert sum(passes) > 1


def test_a_lost_reference_is_computed_from_the_model_again(home: Path, tmp_path: Path) -> None:
    """Of a run that trains all weights, the model in its checkpoint is another by then."""
    options: dict[str, Any] = {"method": "dpo", "steps": 2, "decay": "constant"}
    trainer(home, tmp_path / "run", **options | {"steps": 1}).train()
    (tmp_path / "run" / "reference.safetensors").unlink()
    again = trainer(home, tmp_path / "run", **options).train()
    expected = trainer(home, tmp_path / "whole", **options).train()
    losses_of_both = [made.losses for made in (again, expected)]
    assert losses_of_both[0] == pytest.approx(losses_of_both[1], rel=1e-6)
    assert abs(again.losses[1] - np.log(2)) > 1e-3


def test_the_reference_is_that_of_a_folder(home: Path, tmp_path: Path) -> None:
    """Its log-probabilities are what ``model.log_probs`` says, text after text."""
    other = load(home / "model-0.9", dtype="float32")
    loop = trainer(
        home, tmp_path / "run", method="dpo", reference=home / "model-0.9"
    ).train().loop  # fmt: skip
    assert loop is not None
    (train, _), words = loop.training_data.examples, golden.tokenizer()
    assert len(train) == 2 * len(golden.pairs())
    for number, pair in enumerate(golden.pairs()):
        for place, side in enumerate(("chosen", "rejected")):
            example = train[2 * number + place]
            tokens = [*words.encode(pair["prompt"] + pair[side]).ids, 2]
            asked = len(words.encode(pair["prompt"]).ids)
            assert example.tokens.tolist() == tokens
            labels = [-100] * asked + tokens[asked:]
            assert example.labels.tolist() == labels
            arrays = np.array([tokens]), np.array([labels])
            expected = np.append(0, other.log_probs(*arrays).log_probs[0, :-1])
            np.testing.assert_allclose(example.reference, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_the_library(home: Path, tmp_path: Path) -> None:
    """Loss and gradients of a packed step are those of ``losses`` on rows of the same pairs."""
    made = trainer(home, tmp_path / "run", method="cpo", beta=0.3, smoothing=0.1, nll=0.5)
    prepared: list[Any] = []

    class Keeps(Callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            prepared.append({n: a.copy() for n, a in more["model"].parameters.items()})

    made.callbacks = [Keeps()]
    result = made.train()
    model, words = load(home / "model-1.0", dtype="float32"), golden.tokenizer()
    texts = [(p["prompt"], p[side]) for side in ("chosen", "rejected") for p in golden.pairs()]
    tokens = np.zeros((12, 20), np.int64)
    labels = np.full_like(tokens, -100)
    for row, (asked, said) in enumerate(texts):
        each, start = [*words.encode(asked + said).ids, 2], len(words.encode(asked).ids)
        tokens[row, : len(each)], labels[row, start : len(each)] = each, each[start:]
    mask = np.append(labels[:, 1:] != -100, np.zeros((12, 1), bool), axis=1)

    def loss(model: Any) -> Any:
        rows = model.log_probs(tokens, labels).log_probs
        pairs = losses.preference(rows, mask, beta=0.3, smoothing=0.1)
        return pairs + losses.nll(rows[:6], mask[:6]) * 0.5

    value, gradients = model.value_and_gradients(loss)
    line = next(line for line in log(result) if "loss" in line)
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    assert line["loss"] == pytest.approx(float(value), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_kl_is_of_questions_with_the_answer_before(home: Path, tmp_path: Path) -> None:
    loop = trainer(home, tmp_path / "run", method="kto").train().loop
    assert loop is not None
    train, rows, words = loop.training_data.examples[0], golden.rated(), golden.tokenizer()
    assert len(train) == 2 * len(rows)
    for number, row in enumerate(rows):
        for place, said in enumerate((row["completion"], rows[number - 1]["completion"])):
            example = train[2 * number + place]
            assert example.tokens.tolist() == [*words.encode(row["prompt"] + said).ids, 2]
            assert example.desirable == row["label"]
    plain = trainer(home, tmp_path / "apo", method="kto", loss="apo_zero_unpaired").train()
    assert plain.loop is not None
    assert len(plain.loop.training_data.examples[0]) == len(rows)
    assert "kl" not in log(plain)[1]


def test_what_a_run_says(home: Path, tmp_path: Path) -> None:
    """Measures are in lines, progress, table, JSON and callbacks, by TRL's names there."""
    words = ("finetune", home / "model-1.0", "--data", home / "pairs.jsonl", "--method", "dpo")
    done = run(
        *words, "--steps", 2, "--tokens", 9, "--out", tmp_path / "run", "--evaluate-every", 1
    )
    assert done.exit_code == 0, done.output
    assert "training on 5 pairs (" in done.output
    assert "truncated at --tokens 9" in done.output
    assert "step 0/2: evaluation loss 0.693, accuracy 0.000, margin 0.000" in done.output
    assert "evaluation reward chosen" in done.output
    assert "unigram" not in done.output
    shown = run(*words, "--steps", 3, "--json", "--out", tmp_path / "json")
    result = json.loads(shown.stdout)
    names = {"accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen"}
    assert names | {f"held_out_{name}" for name in names} <= result.keys()
    assert result["held_out_pairs"] == 1
    heard: list[str] = []

    class Hears(Callback):
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            heard.extend(more["logs"])

    made = trainer(home, tmp_path / "heard", method="orpo")
    made.callbacks = [Hears()]
    made.train()
    assert {"rewards/accuracies", "nll_loss", "eval_rewards/margins", "eval_nll_loss"} <= {*heard}


def test_questions_that_fill_a_row_are_dropped_by_name(home: Path, tmp_path: Path) -> None:
    said: list[str] = []

    class Hears(Listener):
        def announce(self, text: str) -> None:
            said.append(text)

    long = {"prompt": "w1 " * 30, "chosen": " w2", "rejected": " w3"}
    same = {"prompt": "w1", "chosen": " w2", "rejected": " w2"}
    data = write(tmp_path / "pairs.jsonl", [*golden.pairs(), long, same])
    made = trainer(home, tmp_path / "run", method="dpo", data=data, eval=home / "pairs.jsonl")
    made.listener = Hears()
    made.train()
    expected = "training on 7 of 8 pairs (64 of 118 tokens); 1 dropped: the question fills"
    assert any(text.startswith(expected) for text in said), said[1]
    assert any("equal answers in 1 pair" in text for text in said)


@pytest.mark.parametrize(
    "method",
    [
        "embed",
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ("dpo", "orpo", "kto", "distill", "reward", "classify")
        ),
    ],
)
def test_steps_hold_what_is_planned(method: str, home: Path, tmp_path: Path) -> None:
    for lora in (None, Lora(4)):
        made = trainer(home, tmp_path / f"run{lora is None}", method=method, lora=lora, steps=2)
        lines = [line for line in made.train().files.lines() if "peak_bytes" in line]
        assert lines
        for line in lines[1:]:  # the first imports modules, whose objects count
            planned, peak = line["planned_bytes"], line["peak_bytes"]
            rel = 0.01 if method == "embed" else 0.03  # rotary tables are 1.2 % of embed's arrays
            assert planned == pytest.approx(peak, rel=rel)  # objects of Python count too


@pytest.mark.slow
def test_a_plan_of_a_method(home: Path) -> None:
    def total(*words: Any) -> dict[str, str]:
        done = run("plan", home / "model-1.0", "--tokens", 32, "--json", *words)
        assert done.exit_code == 0, done.output
        table = json.loads(done.output.splitlines()[0])
        return {row["memory"]: row["at the peak"] for row in table["rows"]} | {"": table["title"]}

    taught = total("--method", "distill", "--teacher", home / "model-0.9")
    plain, pairs = total("--batch", 4), total("--batch", 2, "--method", "orpo")
    assert "orpo on pairs" in pairs[""]
    assert pairs["weights"] == plain["weights"]
    assert taught["weights"] != plain["weights"]
    draws = ("plan", home / "model-1.0", "--method", "grpo", "--samples", 3, "--tokens", 32)
    done = run(*draws, "--batch", 2, "--max-new-tokens", 8, "--reward", home / "model-scored")
    assert "sampling 6 answers of 8 tokens for 2 prompts needs " in done.output
    for words, said in (
        ((*draws[2:], "--max-new-tokens", 32), "--max-new-tokens 32 leaves no prompt in --tokens"),
        (("--method", "distill"), "distill needs a teacher; give --teacher"),
        (("--teacher", LLAMA), "--method sft does not use --teacher; leave it out, or choose dis"),
    ):
        assert_one_clear_error(run("plan", home / "model-1.0", *words), said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "sft", "beta": 0.1}, "method=sft does not use beta; leave it out, or choose d"),
        ({"method": "dpo", "gamma": 1.0}, "method=dpo does not use gamma; leave it out, or choose"),
        ({"method": "orpo", "reference": "x"}, "does not use reference; .*choose dpo, ipo or kto"),
        ({"method": "dpo", "loss": "simpo"}, "method=dpo has no loss=simpo; choose from sigmoid"),
        ({"method": "dpo", "loss": "hinge", "smoothing": 0.1}, "'hinge' does not use smoothing"),
        ({"method": "dpo", "beta": 0.0}, "beta must be above 0"),
        ({"method": "kto", "beta": 0.0}, "beta must be above 0"),
        ({"method": "dpo", "loss": "aot", "accumulate": 2}, "loss=aot compares all pairs of a st"),
        ({"method": "distill", "teacher": None}, "needs a teacher; give teacher"),
        ({"method": "distill", "loss": "tvd", "beta": 0.5}, "does not use beta"),
        ({"method": "dop"}, "method=dop is not known; choose from sft, dpo"),
        ({"method": "dpo", "data": "rated"}, "rated.jsonl:1: has the columns prompt, completion"),
        ({"method": "kto", "data": "texts"}, "texts.jsonl:1: .*completion, but no label"),
        ({"method": "sft", "data": "pairs"}, "holds preference pairs .*choose the method dpo, i"),
        ({"method": "dpo", "reference": "other"}, "has another vocabulary: 'w199' is none there"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error(
    settings: dict[str, Any], said: str, home: Path, tmp_path: Path
) -> None:
    if settings.get("data"):
        settings = settings | {"data": home / f"{settings['data']}.jsonl"}
    if settings.get("reference") == "other":
        shutil.copytree(home / "model-0.9", tmp_path / "other")
        words = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
        del words["model"]["vocab"]["w199"]
        (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
        settings = settings | {"reference": tmp_path / "other"}
    with pytest.raises(ConfigError, match=said):
        trainer(home, tmp_path / "run", **settings).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_beyond_the_positions_train_with_a_warning(
    method: str, home: Path, tmp_path: Path
) -> None:
    """As in generate; so do those of a reference, which has as few positions."""
    texts = [" ".join(f"w{(first + n) % 100}" for n in range(150)) for first in range(6)]
    pairs = [{"prompt": text, "chosen": "w1", "rejected": "w2"} for text in texts]
    rows = pairs if method == "dpo" else [{"text": text} for text in texts]
    data = write(tmp_path / "long.jsonl", rows)
    options: dict[str, Any] = {"reference": home / "model-0.9"} if method == "dpo" else {}
    with pytest.warns(UserWarning, match="tokens=160 exceeds the 128 positions") as warned:
        run = trainer(
            home, tmp_path / "run", method=method, data=data, tokens=160, **options
        ).train()
    assert len({str(each.message) for each in warned}) == (2 if method == "dpo" else 1)
    assert np.isfinite(run.losses).all()


@pytest.mark.filterwarnings("ignore")
def test_numbers_that_are_not_finite_end_the_run(home: Path, tmp_path: Path) -> None:
    """Of a reference, the line is named; of the model, the step, and the last good state."""
    model = load(home / "model-0.9", dtype="float32")
    model.parameters["model.norm.weight"][3] = np.nan
    model.save(tmp_path / "broken")
    shutil.copy(home / "model-0.9" / "tokenizer.json", tmp_path / "broken")
    broken = tmp_path / "broken"
    for method in ("dpo", "kto"):
        said = r"line \d of the data: the log-probability of a token of the reference model is nan"
        with pytest.raises(ConfigError, match=said):
            trainer(home, tmp_path / method, method=method, reference=broken).train()
    for method in ("reward", "cpo", "embed"):
        options = {"lr": 1e30, "warmup": 0, "steps": 4, "save_every": 1, "evaluate_every": 9}
        with pytest.raises(ConfigError, match=r"step 2: .*; try a smaller lr than 1e\+30"):
            trainer(home, tmp_path / method, method=method, **options).train()


def test_data_are_read_for_their_method(home: Path, tmp_path: Path) -> None:
    pairs = read_data(home / "pairs.jsonl", method="dpo")
    assert isinstance(pairs, Records)
    assert pairs.note.endswith("6 rows with prompt/chosen/rejected")
    settings = Settings(method="simpo", steps=1, out=tmp_path / "run", tokens=20)
    Trainer(home / "model-1.0", pairs, settings).train()
    with pytest.raises(
        ConfigError, match=r"read for the method dpo; read it by read_data\(..., me"
    ):
        Trainer(home / "model-1.0", pairs, Settings(method="kto"))
    with pytest.raises(ConfigError, match="method=dpo needs rows; give text, a file of pai"):
        Trainer(home / "model-1.0", None, Settings(method="dpo"))
    with pytest.raises(ConfigError, match="method=dpo requires an existing model; pass model"):
        Trainer(None, pairs, Settings(method="dpo"))
    with pytest.raises(ConfigError, match="method=dpo has its own loss"):
        Trainer(home / "model-1.0", pairs, Settings(method="dpo"), objective=lambda model: 0)
    with pytest.raises(ConfigError, match="method='dop'"):
        read_data(home / "pairs.jsonl", method="dop")


ASK = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": said} for said in ("yes", "no"))
QUIET = GOOD | {"weight": 0}


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "a", "chosen": " b", "rejected": " c"}, ("a", " b"), " c"),
        ({"chosen": "it is blue", "rejected": "it is red"}, ("it is", " blue"), " red"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK, GOOD], [ASK, BAD]),
        ({"prompt": "hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK, GOOD], [ASK, BAD]),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, [ASK, GOOD], [ASK, BAD]),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK, GOOD], [ASK, BAD]),
        ({"prompt": [ASK], "chosen": "yes", "rejected": "no"}, [ASK, GOOD], [ASK, BAD]),
        ({"question": "hi", "chosen": "yes", "rejected": "no"}, [ASK, GOOD], [ASK, BAD]),
        ({"conversations": [{"from": "human", "value": "hi"}],
          "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
         [ASK, GOOD], [ASK, BAD]),
        ({"prompt": [ASK, GOOD, ASK], "chosen": [GOOD], "rejected": [BAD]},
         [ASK, QUIET, ASK, GOOD], [ASK, QUIET, ASK, BAD]),
        ({"Instruction": "hi", "Chosen": "yes", "Rejected": "no", "id": 3},
         [ASK, GOOD], [ASK, BAD]),
    ],
)  # fmt: skip
def test_pairs_of_every_form(row: Any, chosen: Any, rejected: Any, tmp_path: Path) -> None:
    rows = [row, {"prompt": "other", "chosen": "x", "rejected": "y"}]
    data = read_data(write(tmp_path / "pairs.jsonl", rows), method="dpo")
    assert isinstance(data, Records)
    (record,) = (each for each in (*data.train, *data.held_out) if each.line == 1)
    asked = isinstance(chosen, tuple)
    assert (record.prompt, record.answer) == (chosen if asked else ("", ""))
    assert record.messages == ([] if asked else chosen)
    assert record.rejected == rejected
    assert [side.desirable for side in record.sides] == [True, False]
    assert ("unused column: id" in data.note) == ("id" in row)


@pytest.mark.parametrize("prompt", [None, "hi", [ASK]])
def test_both_answers_of_a_pair_follow_one_question(prompt: Any) -> None:
    """Each is a text, a reply, or a chat that begins with the question: both alike, or refused."""
    forms = {
        kind: [form(answer) for answer in (GOOD, BAD)]
        for kind, form in (
            ("text", lambda m: m["content"]), ("reply", lambda m: [m]), ("one", lambda m: m),
            ("chat", lambda m: [ASK, m]), ("json", lambda m: json.dumps([ASK, m])),
        )
    }  # fmt: skip
    kinds = {"one": "reply", "json": "chat"}
    for kind, (chosen, _) in forms.items():
        for other, (_, rejected) in forms.items():
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            one, two = kinds.get(kind, kind), kinds.get(other, other)
            if one != two or (prompt is None and one == "reply"):
                with pytest.raises(ConfigError, match=r"alike|begin both with one|no question"):
                    pair_of(row)
                continue
            pair = pair_of(row)
            if one == "text" and prompt != [ASK]:
                assert (pair.prompt, pair.answer, pair.rejected) == (prompt or "", "yes", "no")
            else:
                assert (pair.messages, pair.rejected) == ([ASK, GOOD], [ASK, BAD])


def test_pairs_of_whole_texts_have_two_answers() -> None:
    """Also where one begins the other, be it up to its spaces: a character at least is said."""
    draws = np.random.default_rng(0)
    for _ in range(300):
        start, more, third = ("".join(draws.choice(list("ab \n"), draws.integers(1, 9)))
                              for _ in range(3))  # fmt: skip
        sides = [("a" + start, "a" + start + more), ("a" + start + third, "a" + start + more)]
        for chosen, rejected in (*sides, *((b, a) for a, b in sides)):
            if chosen == rejected:
                continue
            pair = pair_of({"chosen": chosen, "rejected": rejected})
            assert (pair.prompt + pair.answer, pair.prompt + pair.rejected) == (chosen, rejected)
            assert pair.answer.strip()
            assert pair.rejected.strip()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "has chosen but no rejected; write prompt, chosen and r"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty; write"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "has chosen but no rejected; write"),
        ({"prompt": "a", "chosen": "b", "rejected": [GOOD]}, "one is text, one is messages"),
        ({"text": "a"}, "has the columns text; write prompt, chosen and"),
        ({"prompt": "a", "completion": "b", "label": True}, "or choose the method kto"),
        ({"chosen": [ASK], "rejected": [ASK, GOOD]}, "no message has the role assistant"),
        ({"chosen": [ASK, GOOD], "rejected": [GOOD]}, "has no answer after the shared messages"),
        ({"chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"prompt": "b", "chosen": "a", "rejected": "c", "margin": 1}, "margin.*remove the column"),
        ({"prompt": "b", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "prompt differs from"),
        ({"prompt": "b", "chosen": 3, "rejected": 4}, "chosen is 3, not text"),
        ([1], "is \\[1\\], not an object"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_by_line(row: Any, said: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, row]
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ConfigError, match=f"pairs.jsonl:2: .*{said}"):
        read_data(path, method="dpo")


def test_answers_are_rated_in_every_form(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": " b", "label": True},
        {"prompt": [ASK], "completion": [GOOD], "label": 0},
        {"messages": [ASK, GOOD, ASK, BAD], "kto_tag": "False"},
        {"prompt": "a", "chosen": " c", "rejected": " d"},
        {"prompt": "a", "completion": " e", "label": "0"},
        {"prompt": "a", "completion": " f", "label": "1"},
    ]
    data = read_data(write(tmp_path / "rated.jsonl", rows), method="kto")
    assert isinstance(data, Records)
    records = sorted([*data.train, *data.held_out], key=lambda record: record.line)
    assert [each.desirable for each in records] == [True, False, False, None, False, True]
    assert [side.desirable for side in records[3].sides] == [True, False]
    assert records[2].messages == [ASK, QUIET, ASK, BAD]
    for row, said in (
        ({"prompt": "a", "completion": "b"}, "has the columns prompt, completion, but no label;"),
        ({"prompt": "a", "completion": "b", "label": 2}, "label is 2; write true"),
        ({"prompt": "a", "completion": "", "label": True}, "completion is empty"),
        ({"text": "a", "label": True}, "without a question"),
    ):
        path = write(tmp_path / "wrong.jsonl", [rows[0], row])
        with pytest.raises(ConfigError, match=f"wrong.jsonl:2: .*{said}"):
            read_data(path, method="kto")


@pytest.fixture(scope="module")
def stored(home: Path) -> Path:
    folder = home / "taught"
    words = ("--data", home / "texts.jsonl", "--tokens", 20, "--top-k", 256)
    done = run("teach", home / "model-0.9", *words, "--out", folder)
    assert done.exit_code == 0, done.output
    assert "stored tokens cover 100.00% of the probability" in done.output
    return folder


class TestTaught:
    """Predictions of a teacher that are stored."""

    @pytest.mark.slow
    def test_all_tokens_are_as_the_teacher_itself(
        self, stored: Path, home: Path, tmp_path: Path
    ) -> None:
        """Of a vocabulary that is stored as a whole; its rows are found in any order and batch."""
        for pack, folder in ((True, "packed"), (False, "rows")):
            both = [
                trainer(
                    home, tmp_path / f"{folder}{number}", method="distill", teacher=teacher,
                    pack=pack, batch=2, steps=2, evaluate_every=1,
                ).train()
                for number, teacher in enumerate((stored, home / "model-0.9"))
            ]  # fmt: skip
            for line, other in zip(*map(log, both), strict=True):
                assert line == pytest.approx(other, rel=1e-4, abs=2e-6)

    def test_some_tokens_are_a_lower_bound(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed: list[int] = []
        monkeypatch.setattr(teaching, "check_room", lambda *checked: needed.append(checked[2]))
        report = teach(
            home / "model-0.9", home / "texts.jsonl", tmp_path / "few", top_k=8, tokens=20
        )
        assert 0 < report.least_mass <= report.mean_mass < 1
        assert needed == [report.rows * 8 * (4 + 4)]
        rows, logs = (np.load(report.folder / f"{name}.npy") for name in ("tokens", "log_probs"))
        asked = golden.tokenizer().encode(golden.pairs()[0]["prompt"]).ids
        logits = load(home / "model-0.9").logits(np.array([asked]))[0, -1]
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:8]
        np.testing.assert_array_equal(rows[0], best)
        np.testing.assert_allclose(logs[0], expected[best], rtol=1e-5)
        assert (report.rows, 8) == rows.shape
        losses_of = [
            trainer(home, tmp_path / str(n), method="distill", teacher=teacher).train().losses[0]
            for n, teacher in enumerate((report.folder, home / "model-0.9"))
        ]
        assert 0 < losses_of[0] < losses_of[1]

    @pytest.mark.parametrize("offsets", [None, np.array([0, 3, 8])])
    def test_a_place_has_what_is_stored_of_the_token_after(self, offsets: Any) -> None:
        rows = np.array([[-1, 0, 1, 2], [-1, -1, 3, 4]])
        shape = (1, 8) if offsets is not None else rows.shape
        arrays = np.arange(10).reshape(5, 2), -np.arange(10, dtype=np.float32).reshape(5, 2)
        stored = Taught(Path(), {"temperature": 1.0}, np.zeros(0), *arrays)
        method = Settings(method="distill", teacher="x").learning
        assert isinstance(method, Distill)
        tokens = np.ones(shape, np.int64)
        batch = Batch(tokens, tokens, offsets, 8, 8, 1, {"taught": rows.reshape(shape)})
        actual = method.with_taught(stored).inputs(batch)
        after = rows.reshape(-1)[1:]
        for name, array in zip(("best", "logs"), arrays, strict=True):
            assert actual[name].shape == (*shape, 2)
            own = actual[name].reshape(8, 2)[:-1]
            np.testing.assert_array_equal(own[after >= 0], array[after[after >= 0]])

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"tokens": 9}, "texts.jsonl:.: .* has no predictions for this text; run teach"),
            ({"loss": "tvd"}, "most likely tokens, which suffice for the forward divergence; lea"),
            ({"beta": 1.0}, "which suffice for the forward divergence"),
            ({"temperature": 2.0}, "at the temperature 1; leave temperature out, or run teach"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_one_error(
        self, settings: dict[str, Any], said: str, stored: Path, home: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            trainer(home, tmp_path / "run", method="distill", teacher=stored, **settings).train()

    def test_a_run_does_not_go_on_with_other_predictions(
        self, stored: Path, home: Path, tmp_path: Path
    ) -> None:
        teacher = shutil.copytree(stored, tmp_path / "taught")
        trainer(home, tmp_path / "run", method="distill", teacher=teacher).train()
        logs = np.load(teacher / "log_probs.npy")
        np.save(teacher / "log_probs.npy", logs - 1)
        with pytest.raises(ConfigError, match=r"teacher log_probs\.npy has ch"):
            trainer(home, tmp_path / "run", method="distill", teacher=teacher, steps=2).train()
        (teacher / "tokens.npy").write_bytes(b"")
        with pytest.raises(ConfigError, match="is broken"):
            trainer(home, tmp_path / "other", method="distill", teacher=teacher).train()
        assert_one_clear_error(
            run("teach", home / "model-0.9", "--data", home / "texts.jsonl", "--out", teacher),
            f"--out {teacher} exists; name a new folder",
        )


MEANS = {  # of one text, or pair: what its sums measure
    "dpo": ([1, 1, 0.5, -0.25, -3, -4, 0], {"accuracy": 1, "margin": 0.75, "reward_chosen": 0.5,
            "reward_rejected": -0.25, "log_prob_chosen": -3, "log_prob_rejected": -4}),
    "kto": ([1, 0.5, 1, -0.25], {"margin": 0.75, "reward_desirable": 0.5,
            "reward_undesirable": -0.25, "kl": 3}),
    "reward": ([1, 1, 0.5, 2.5, -1, 1.5], {"accuracy": 1, "margin": 0.5, "reward_min": 1,
               "reward_mean": 1.25, "reward_max": 1.5}),
    "classify": ([1, 1, 1, 0, 1, 0, 1, 0], {"accuracy": 1, "f1": 1}),
    "embed": ([1, 0, 0.25], {"accuracy": 0, "mrr": 0.25}),
    "grpo": ([1, 1, 0.5, 0.25, 1.5, 0.125], {"k": 3, "entropy": 0.5, "clipped": 0.25,
             "ratio": 1.5, "kl": 0.125, "length": 1}),
    "rloo": ([1, 2, 0.5, 1, 1.5, 0], {"k": 3, "entropy": 0.25, "clipped": 1, "ratio": 1.5,
             "length": 2}),
}  # fmt: skip


@pytest.mark.parametrize("method", MEANS)
def test_measures_are_means(method: str) -> None:
    """Of one text as of many that are alike; a rank that has none changes no measure."""
    options = {"beta": 0.1} if method == "grpo" else {}
    learning = Settings(method=method, **options).learning
    sums, expected = MEANS[method]
    assert len(sums) == learning.sums
    for count in (1, 3):
        total = learning.joined([np.array(sums)] * count)
        alone = learning.joined([total, learning.joined([])])
        for each in (total, alone):
            assert learning.measures(each, k=3) == pytest.approx(expected), count
    none = np.where(np.arange(len(sums)) < len(sums) - learning.largest, 0.0, -1.0)
    for name, value in learning.measures(none, k=3).items():
        assert value is None or np.isfinite(value), name


def test_a_kind_of_rows_is_known_for_each_method() -> None:
    assert tuple(KINDS) == tuple(METHODS)


def test_options_of_methods_are_declared_where_methods_are() -> None:
    """``Settings`` adds none, each is used by a method, and the method itself comes first."""
    fields = dataclasses.fields(Settings)
    actual = [each.name for each in fields if each.metadata.get("group") == "method"]
    assert actual == [each.name for each in dataclasses.fields(Options)]
    assert sorted(actual) == sorted(["method", *OPTIONS])
    assert actual[:2] == ["method", "loss"]


# ---- log-probabilities under a reference model ---------------------------------------------------
class DataRanks(SingleCommunicator):
    """One of several data ranks; the others add nothing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank  # type: ignore[misc]


def examples_of(*lengths: int) -> Examples:
    draw, each = np.random.default_rng(0), Examples(np.dtype(np.uint16))
    for line, length in enumerate(lengths, 5):
        tokens = draw.integers(3, 90, length)
        each.append(Example(tokens, tokens, line))
    return each


def test_data_ranks_share_the_reference() -> None:
    """A token has the log-probability that the tokens of its own text before it give it."""
    model = create(CONFIGS["llama"] | SIZES, seed=0)
    part = examples_of(5, 3, 1, 6, 4)
    shape = Shape(1, 8, True, 0, METHODS["dpo"])
    expected = np.zeros(19)
    for n in range(5):
        logits = model.logits(part[n].tokens[None])[0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logs[np.arange(len(logits) - 1), part[n].tokens[1:]]
        expected[part.ends[n] + 1 : part.ends[n + 1]] = chosen
    for size in (1, 2, 3):
        total = np.zeros(19)
        for rank in range(size):
            ranks: Any = SimpleNamespace(data=DataRanks(size, rank))
            reference.compute(model, [part], shape, ranks)
            assert part.reference is not None
            total += part.reference
        np.testing.assert_allclose(total, expected, atol=1e-5)
    calls = list[int]()
    batches = [*consecutive(part, shape._replace(method=METHODS["sft"]))]
    for together in ("gather", "expert_ranks", None):
        counts = []
        for rank in range(2):
            calls.clear()

            def log_probs(tokens: Any, **_: Any) -> Any:
                calls.append(1)
                return SimpleNamespace(log_probs=np.zeros((1, tokens.size - 1)))

            fake: Any = SimpleNamespace(table=model.table, gather=None, expert_ranks=None,
                                        config=model.config, log_probs=log_probs)  # fmt: skip
            if together is not None:
                setattr(fake, together, 1)
            reference.compute(fake, [part], shape, SimpleNamespace(data=DataRanks(2, rank)))  # type: ignore[arg-type]
            counts.append(len(calls))
        odd = len(batches) % 2
        assert counts == [len(batches) // 2 + odd, len(batches) // 2 + odd * (together is not None)]
    broken: Any = SimpleNamespace(**vars(fake) | {"log_probs": lambda tokens, **_: SimpleNamespace(
        log_probs=np.where(tokens[:, 1:] == part[3].tokens[2], np.nan, 0.0))})  # fmt: skip
    with pytest.raises(
        ConfigError, match="line 8 of the data: the log-probability of a token of th"
    ):
        reference.compute(broken, [part], shape, SimpleNamespace(data=DataRanks(1, 0)))  # type: ignore[arg-type]


def test_a_stored_reference_is_of_these_texts_and_this_model(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    parts = [examples_of(3, 2), examples_of(4)]
    assert not reference.take_stored(files, parts, "model")
    for part in parts:
        part.reference = np.arange(part.ends[-1], dtype=np.float32)
    reference.store(files, parts, "model")
    again = [examples_of(3, 2), examples_of(4)]
    assert not reference.take_stored(files, again, "another")
    assert not reference.take_stored(files, [examples_of(3, 3), again[1]], "model")
    other = examples_of(3, 2)
    other.learned[0] ^= 1
    assert not reference.take_stored(files, [other, again[1]], "model")
    assert again[0].reference is None
    assert reference.take_stored(files, again, "model")
    for actual, expected in zip(again, parts, strict=True):
        np.testing.assert_array_equal(actual.reference, expected.reference)
    files.reference.write_bytes(files.reference.read_bytes()[:-4])
    assert not reference.take_stored(files, again, "model"), "it is computed again"


@pytest.mark.parametrize(
    ("goes_on", "stored", "origin", "folder", "expected", "computed"),
    [
        (True, True, "m", None, True, False), (False, True, "m", None, False, False),
        (True, False, "m", None, True, True), (False, False, "m", "r", True, True),
        (True, False, None, None, False, False), (False, False, None, None, False, False),
    ],
)  # fmt: skip
def test_where_a_reference_comes_from(
    goes_on: bool, stored: bool, origin: Any, folder: Any, expected: bool, computed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen = list[Any]()
    monkeypatch.setattr(reference, "take_stored", lambda *_: stored)
    monkeypatch.setattr(reference, "compute", lambda *given: seen.append(given))
    monkeypatch.setattr(reference, "frozen", lambda *given, **more: (*given, more))
    ranks: Any = SimpleNamespace(placing={"parts": 1, "pipeline": 2}, device=None)
    plan: Any = SimpleNamespace(reference=folder, dtype="float32")
    none: Any = None
    known = reference.reference_known(none, plan, [], origin, none, ranks, goes_on=goes_on)
    assert known == expected
    frozen = ("m", "float32", None, {"parts": None, "pipeline": 2})
    assert seen == ([(frozen, [], None, ranks)] if computed else [])
