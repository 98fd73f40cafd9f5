"""Runs of several ranks: equal to one process, in any grid, and on from one grid in another."""

import json
import re
import signal
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import AdamW
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core.arrays import Unwritten
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.text import Batch
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.finetune.run.executor import squares
from unsloth_cupy.finetune.run.ranks import Ranks, alone
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.models import create
from unsloth_cupy.ops.common.dynamic_codes import decode
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.training.averages import (
    in_one_form,
    scale_per_code,
    stored_form,
    wide_moments,
)

from ..harness.sampling import Sample
from ..models.peers import MIXTURES
from ..models.peers import SIZES as MODEL
from .grids import STEPS, STOP, WRONG, is_stopped, todays
from .ranks import by_sockets, close, needs_mpi, run
from .threads import by_threads

SIZES = (
    "--batch", "4", "--tokens", "16", "--layers", "2", "--hidden", "64", "--vocabulary", "300",
    "--evaluate-every", "6", "--save-every", "2", "--lr", "0.01", "--steps", "6",
)  # fmt: skip
WHOLE = "tests.parallel.commands"
OWN = (
    "deep",
    "lora",
    "bits",
    "muon",
    "factor",
    "free",
    "mixture",
    "adapted",
)  # with a run of one rank
REFUSED = {  # before ranks have met, and after
    "--pipeline-schedule zigzag": "Invalid value for '--pipeline-schedule'",
    "--epochs 2": "--steps and --epochs both set the length of the run",
    "--tensor-parallel 3": "--tensor-parallel 3 --pipeline-parallel 1",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(120)))
    return path


def asked(text: Path, out: Path, *more: str) -> tuple[str, ...]:
    return ("finetune", "--text", str(text), "--out", str(out), *SIZES, *more)


def invoke(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, [*arguments])


def same(out: Path, one: Path) -> None:
    """Compare the numbers of a run with one rank's, and the weights and averages at its end."""
    texts = [(run / "log.jsonl").read_text() for run in (out, one)]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for line, other in zip(*logs, strict=True):
        compared = {"loss", "held_out_loss", "gradient_norm", "expert_tokens", "expert_load"}
        for key in compared & other.keys():
            close(line[key], other[key])
    for name in ("model/*model", f"checkpoint-{STEPS:08d}/optimizer"):
        actual, expected = (load_file(*run.glob(f"{name}.safetensors")) for run in (out, one))
        equal(actual, expected, bound_of(out.name))


def bound_of(run_name: str) -> float:
    """Return 1e-5; more for schedule-free AdamW, which divides small gradients by their size."""
    return 1e-4 if run_name.startswith("free") else 1e-5  # 5e-5 was seen


def equal(actual: Mapping[str, Any], expected: Mapping[str, Any], relative: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        close(actual[key], array, relative)


@pytest.mark.slow
@needs_mpi
def test_ranks_equal_numpy_and_one_device(text: Path, tmp_path: Path) -> None:
    """All exchanges, layers, models and trainings of 1, 2, 3, 4 and 8 ranks; runs in grids; faults.

    One test, as one start of processes takes longer than most checks: losses, all gradients and
    weights of 10 steps are those of one rank.
    """
    sample = "all" if Sample.all else str(Sample.day)
    done = run(8, "tests.parallel.everything", str(text), str(tmp_path), sample, limit=300)
    assert done.returncode, "the last check lets a rank fail"
    assert re.search(r"rank [01] failed: .*waited 1 s for rank [01, ]*2", done.stderr), done.stderr
    assert [done.stderr.count(line) for line in WRONG] == [1, 1], done.stderr
    runs = {name: run for name, run in todays().items() if not name.startswith("wrong")}
    stopped = {*filter(is_stopped, runs)}
    assert done.stderr.count(f"stopped after step {STOP + 1}") == len(stopped), done.stderr
    for name, asked_for in runs.items():
        own = (f"{kind}-one" for kind in OWN if name.startswith(kind))
        one = next(own, "one")
        if name not in stopped:
            same(tmp_path / name, tmp_path / one)
            made = (np.load(tmp_path / f"{run}-sample.npz")["arr_0"] for run in (name, one))
            np.testing.assert_array_equal(*made)
        for step in {0} if name in stopped else {STEPS - 1, STEPS - 1 if asked_for.of else 0}:
            actual, expected = (np.load(tmp_path / f"{run}-{step}.npz") for run in (name, one))
            equal(actual, expected, bound_of(name))


@pytest.mark.slow
def test_two_ranks_that_meet_by_sockets(text: Path, tmp_path: Path) -> None:
    """As torchrun starts them: a run of two stages, and what its model says, divided both ways.

    Then the disk of one is full, which it says alone, and no half of a checkpoint is there.
    """
    out, wrong = tmp_path / "run", tmp_path / "full"
    words = ("generate", "--max-new-tokens", "8", "--temperature", "0", str(out))
    staged = (
        "--pipeline-parallel 2 --pipeline-schedule interleaved --chunks 1 --accumulate 2 --steps 2"
    )
    first = asked(text, out, *staged.split())  # two chunks would take 4 layers
    last = asked(text, wrong, "--data-parallel", "2")
    ways = ("--tensor-parallel", "2", "7 and"), ("--pipeline-parallel", "2", "-")
    more = chain.from_iterable((*words, *way, "--") for way in ways)
    refused = chain.from_iterable(("wrong", *last, *each.split(), "--") for each in REFUSED)
    ended = by_sockets(2, WHOLE, *first, "--", *more, *refused, "full", "--", *last, told="7 and")
    fine, _, rest = ended[0].said.partition("Usage: ")
    for said in REFUSED.values():
        assert rest.count(f"Error: {said}") == 1, rest
    assert "evaluation loss" in fine
    *both, _ = re.split(r"8 tokens in .*\n", fine)
    expected = invoke(*words, "7 and").output.split("8 tokens in")[0]
    assert [each.endswith(expected) for each in both] == [True, True], (both, expected)
    assert [each.code for each in ended] == [1, 1]
    assert re.search(r"\nrank 0 failed: .*cannot be written: No space left.*\n$", ended[0].said)
    assert not ended[1].said, "one message in all"
    assert not [*wrong.glob("checkpoint-*")]
    assert not (wrong / "model").exists()


GPU_GRIDS = (
    "--data-parallel 2", "--data-parallel 2 --zero 1", "--data-parallel 2 --zero 3",
    "--tensor-parallel 2", "--pipeline-parallel 2",
    "--pipeline-parallel 2 --pipeline-schedule interleaved --chunks 1",
    "--context-parallel 2", "--context-parallel 2 --context-attention ulysses",
)  # fmt: skip


def equal_one(text: Path, folder: Path, *options: str) -> None:
    """Two ranks in each grid, started once, end as one process does."""
    flags = ("--accumulate", "2", *options)
    done = invoke(*asked(text, folder / "one", *flags))
    assert done.exit_code == 0, done.output
    outs = {grid: folder / f"run-{number}" for number, grid in enumerate(GPU_GRIDS)}
    all_asked = (asked(text, out, *flags, *grid.split()) for grid, out in outs.items())
    commands = [word for each in all_asked for word in (*each, "--")]
    ended = by_sockets(2, WHOLE, *commands[:-1], limit=300)
    assert [each.code for each in ended] == [0, 0], ended
    logs = {
        out: [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        for out in (folder / "one", *outs.values())
    }
    for out in outs.values():
        for line, other in zip(logs[out], logs[folder / "one"], strict=True):
            for key in {"loss", "held_out_loss"} & other.keys():
                close(line[key], other[key], 1e-4)


@pytest.mark.slow
def test_biases_of_routers_are_those_of_one_process(text: Path, tmp_path: Path) -> None:
    """Grids of two ranks, and a resumed run: equal biases in the model's file."""
    base, one, resumed = (tmp_path / name for name in ("base", "one", "resumed"))
    tokenizer = train_tokenizer(iter([text.read_text()]), 300)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "num_hidden_layers": 4}
    create(MODEL | MIXTURES["glm4_moe"] | sizes, seed=0).save(base)
    tokenizer.save(str(base / "tokenizer.json"))

    def command(out: Path, *more: str) -> tuple[str, ...]:
        data = "--text", str(text), "--out", str(out), "--batch", "4", "--tokens", "16"
        rates = "--lr", "0.01", "--warmup", "0", "--decay", "constant"
        biased = "--router-bias-update-rate", "0.0625", "--accumulate", "2"
        return ("finetune", str(base), *data, *rates, *biased, *more)

    for out, steps in (one, "4"), (resumed, "2"), (resumed, "4"):
        done = invoke(*command(out, "--steps", steps))
        assert done.exit_code == 0, done.output
    grids = (
        "--data-parallel 2 --zero 3",
        "--expert-parallel 2 --zero 1",
        "--tensor-parallel 2",
        "--pipeline-parallel 2",
        "--context-parallel 2",
    )
    outs = [tmp_path / str(number) for number in range(len(grids))]
    each = (command(out, *g.split(), "--steps", "4") for g, out in zip(grids, outs, strict=True))
    commands = [word for one_run in each for word in (*one_run, "--")]
    ended = by_sockets(2, WHOLE, *commands[:-1], limit=300)
    assert [each.code for each in ended] == [0, 0], ended
    start, expected = biases(base), biases(one / "model")
    assert expected
    for name, bias in expected.items():
        moved = (bias - start[name]) / 0.0625
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)
        assert 0 < np.abs(moved).max() < 4.01
    for out in (resumed, *outs):
        actual = biases(out / "model")
        for name, bias in expected.items():
            np.testing.assert_array_equal(actual[name], bias, f"{out} {name}")


def biases(folder: Path) -> dict[str, Any]:
    arrays = load_file(folder / "model.safetensors")
    return {n: a for n, a in arrays.items() if n.endswith("e_score_correction_bias")}


@pytest.mark.gpu
def test_two_gpus_train_as_one(text: Path, tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if cupy.cuda.runtime.getDeviceCount() < 2 or not cupy.cuda.nccl.available:
        pytest.skip("needs two GPUs and NCCL")
    equal_one(text, tmp_path, "--device", "cuda")


@pytest.mark.slow
@needs_mpi
def test_one_rank_goes_on_from_the_last_checkpoint_of_a_killed_run(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = run(2, WHOLE, "killed", "--", *asked(text, out, "--data-parallel", "2"))
    assert done.returncode == signal.SIGKILL, done.stderr
    whole_after_two(text, out)


@pytest.mark.slow
def test_a_rank_that_is_killed_when_it_writes(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = by_sockets(2, WHOLE, "torn", "--", *asked(text, out, "--data-parallel", "2"))
    assert [each.code for each in ended] == [-signal.SIGKILL, 1], ended
    assert "rank 0 has failed: its connection ended" in ended[1].said
    whole_after_two(text, out)


def whole_after_two(text: Path, out: Path) -> None:
    """Assert that a run goes on from its only checkpoint, and nothing of another one is left."""
    assert [path.name for path in RunFolder(out).checkpoints()] == ["checkpoint-00000002"]
    done = invoke(*asked(text, out))
    assert done.exit_code == 0, done.output
    assert "resuming from" in done.output
    assert {path.name for path in out.iterdir()} == {
        "checkpoint-00000006", "curve.png", "log.jsonl", "model", "settings.json",
    }  # fmt: skip


def test_a_grid_that_does_not_fit_is_refused(text: Path, tmp_path: Path) -> None:
    done = invoke(*asked(text, tmp_path / "run", "--tensor-parallel", "2"))
    assert done.exit_code == 1
    assert "needs 2 ranks, but 1 runs; start the run with mpiexec -n 2" in done.output
    assert not (tmp_path / "run").exists()
    done = invoke(*asked(text, tmp_path / "run", "--zero", "1"))
    assert "--zero 1 needs several data ranks; start more ranks" in done.output
    done = invoke(*asked(text, tmp_path / "run", "--pipeline-schedule", "interleaved"))
    assert (
        "--pipeline-schedule interleaved needs several stages; give --pipeline-parallel"
        in done.output
    )
    done = invoke(*asked(text, tmp_path / "run", "--context-attention", "ulysses"))
    assert "needs several context ranks; give --context-parallel 2" in done.output
    done = invoke(*asked(text, tmp_path / "run", "--chunks", "3"))
    assert (
        "--chunks 3 needs the interleaved schedule; give --pipeline-schedule inter" in done.output
    )


def two_of(data: int) -> Ranks:
    ranks, comm = alone(), SingleCommunicator()
    comm.size, comm.rank = 2, data
    return Ranks(comm, ranks.groups._replace(data=comm))


def test_rows_are_divided_at_the_ends_of_texts() -> None:
    tokens = np.arange(12).reshape(3, 4)
    batch = Batch(tokens, tokens, np.array([0, 3, 4, 8, 10, 12]), 9, 12)
    parts: list[Any] = [two_of(rank).rows(batch) for rank in range(2)]
    assert [part.tokens.tolist() for part in parts] == [[[*range(8)]], [[*range(8, 12)]]]
    assert [part.offsets.tolist() for part in parts] == [[0, 3, 4, 8], [0, 2, 4]]
    one = [two_of(rank).rows(batch._replace(offsets=np.array([0, 12]))) for rank in range(2)]
    assert [part.tokens.shape for part in one] == [(1, 12), (1, 0)]


def test_what_ranks_do_not_do_is_refused() -> None:
    fine: dict[str, Any] = {"limited": False, "find_nan": False}
    two_of(0).check(2, 1, **fine)
    with pytest.raises(ConfigError, match="batch=1 is too small for 2 ranks"):
        two_of(0).check(1, 1, **fine)
    two_of(0).check(1, 1, **fine, packed=True)
    with pytest.raises(ConfigError, match="limit_memory is not supported on"):
        two_of(0).check(2, 1, **fine | {"limited": True})
    ranks = two_of(0)
    ranks.schedule, ranks.groups = "interleaved", ranks.groups._replace(pipeline=ranks.groups.data)
    with pytest.raises(ConfigError, match=r"accumulate=3 is not a multiple of 2.*accumulate=4"):
        ranks.check(2, 3, **fine)
    ranks = two_of(0)
    ranks.zero = 3
    with pytest.raises(ConfigError, match="zero=3 does not support find_nan"):
        ranks.check(2, 1, **fine | {"find_nan": True})
    ranks.groups = ranks.groups._replace(pipeline=ranks.groups.data)
    with pytest.raises(
        ConfigError, match="zero=3 does not support pipeline_parallel: each microbatch"
    ):
        ranks.check(2, 1, **fine)


def test_averages_of_8_bits_are_kept_for_any_grid() -> None:
    """With a scale of each code they are the same codes again; a part has blocks of its own."""
    rng = np.random.default_rng(0)
    learned = {"wide": rng.standard_normal((90, 64)), "small": rng.standard_normal(5)}
    optimizer = AdamW({n: a.astype(np.float32) for n, a in learned.items()}, state_bits=8)
    for _ in range(3):
        optimizer.step({n: rng.standard_normal(a.shape, np.float32) for n, a in learned.items()})
    states = optimizer.state()
    whole = scale_per_code(states)
    assert whole["mean_scale.wide"].shape == (90, 64)
    for arrays in (whole, states):
        again = stored_form(arrays, {"wide"})
        assert again.keys() == states.keys()
        for name, array in states.items():
            np.testing.assert_array_equal(again[name], array, name)
        wide = stored_form(arrays, ())
        assert wide.keys() == {"steps", "mean.wide", "square.wide", "mean.small", "square.small"}
        close(wide["mean.wide"].reshape(-1), decode(states["mean.wide"].reshape(-1),
              states["mean_scale.wide"], signed=True))  # fmt: skip
    part = {n: a[:, 7:] if a.ndim == 2 else a for n, a in whole.items()}  # of blocks of its own
    actual, expected = stored_form(stored_form(part, {"wide"}), ()), stored_form(part, ())
    assert stored_form(part, {"wide"})["mean_scale.wide"].shape == (-(-90 * 57 // 256),)
    close(actual["mean.wide"], expected["mean.wide"], 0.02)  # a step of the codes near 1


def test_averages_of_uneven_parts_have_one_form() -> None:
    """The parts of some ranks are so small that they have no codes: float32 of all ranks."""
    rng = np.random.default_rng(0)
    sizes = {"uneven": (4608, 3072), "even": (4096, 4096), "small": (5, 4)}
    states = []
    for rank in range(2):
        learned = {n: np.zeros(size[rank], np.float32) for n, size in sizes.items()}
        optimizer = AdamW(learned, state_bits=8)
        gradients = {n: rng.standard_normal(a.size, np.float32) for n, a in learned.items()}
        optimizer.step(gradients)
        states.append(optimizer.state())

    def rank(comm: Any) -> dict[str, Any]:
        state = {n: Unwritten(a.dtype, a.shape, a.copy) for n, a in states[comm.rank].items()}
        wide = wide_moments(state.keys(), [comm])
        assert wide == {"uneven", "small"}
        forms = {name: in_one_form(name, state, wide) for name in state}
        return {name: form.read() for name, form in forms.items() if form is not None}

    actual = by_threads(2, rank)
    assert actual[0].keys() == actual[1].keys() == states[1].keys()
    for state, one_form in zip(states, actual, strict=True):
        for name, array in stored_form(state, ()).items():
            np.testing.assert_array_equal(stored_form(one_form, ())[name], array, name)
        again = stored_form(one_form, {n.partition(".")[2] for n in state if "_scale" in n})
        assert again.keys() == state.keys()
        for name, array in stored_form(state, ()).items():
            close(stored_form(again, ())[name], array, 0.02)  # a step of the codes near 1


def test_squares_of_parts_add_up_by_the_shares_of_rows() -> None:
    array = np.random.default_rng(0).standard_normal((6, 5))
    shares = [(slice(0, 2), 1.0), (slice(2, None), 0.25)]
    expected = sum(share * np.square(array[rows]).sum() for rows, share in shares)
    parts = (squares(array.reshape(-1)[at : at + 7], at, array.shape, shares) for at in (0, 7, 14))
    rest = squares(np.append(array.reshape(-1)[21:], np.zeros(4)), 21, array.shape, shares)
    assert sum(parts) + rest == pytest.approx(expected)
