"""Runs of several ranks: equal to one process, in any grid, and on from one grid in another."""

import json
import shutil
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.ranks import Ranks, alone
from unsloth_cupy.finetune.text import Batch
from unsloth_cupy.parallel import SingleCommunicator

from .ranks import by_sockets, close, needs_mpi, run

SIZES = (
    "--batch", "4", "--tokens", "16", "--layers", "2", "--hidden", "64", "--vocabulary", "300",
    "--evaluate-every", "3", "--save-every", "100", "--lr", "0.01", "--steps", "6",
)  # fmt: skip
WHOLE = "tests.parallel.commands"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(200)))
    return path


def asked(text: Path, out: Path, *more: str) -> tuple[str, ...]:
    return ("finetune", "--text", str(text), "--out", str(out), *SIZES, *more)


def invoke(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, [*arguments])


@pytest.fixture(scope="module")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    done = invoke(*asked(text, out))
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a grid of 4 whose last rank was asked to stop in step 3."""
    out = tmp_path_factory.mktemp("four") / "run"
    more = ("--tensor-parallel", "2", "--data-parallel", "2", "--zero", "1")
    done = run(4, WHOLE, "3", "--", *asked(text, out, *more))
    assert "go on with the same command" in done.stderr, done.stderr
    assert done.stderr.count("stopped after step 3") == 1, done.stderr
    return out


def same(out: Path, reference: Path) -> None:
    """Compare the numbers of runs, and the weights and averages that they end with."""
    texts = [(run / "log.jsonl").read_text() for run in (out, reference)]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for line, other in zip(*logs, strict=True):
        for key in ("loss", "held_out_loss", "gradient_norm"):
            if key in other:
                close(line[key], other[key], 1e-4)  # of weights that 6 steps have changed
    for name in ("model/model.safetensors", "checkpoint-00000006/optimizer.safetensors"):
        found, wanted = (load_file(run / name) for run in (out, reference))
        assert found.keys() == wanted.keys()
        for key, array in wanted.items():
            close(found[key], array, 2e-3)


@needs_mpi
def test_one_process_goes_on_with_a_run_of_four(stopped, text, tmp_path, reference) -> None:
    out = shutil.copytree(stopped, tmp_path / "run")
    done = invoke(*asked(text, out))
    assert done.exit_code == 0, done.output
    same(out, reference)


@needs_mpi
def test_two_stages_that_meet_by_sockets_go_on_with_it(stopped, text, tmp_path, reference) -> None:
    """As torchrun starts them; then one model of two ranks writes what one of one does."""
    out = shutil.copytree(stopped, tmp_path / "run")
    more = ("--pipeline-parallel", "2")
    ended = by_sockets(2, WHOLE, "0", "--", *asked(text, out, *more))
    assert [each.code for each in ended] == [0, 0], ended
    assert "held-out loss" in ended[0].said
    assert ended[1].said == ""
    same(out, reference)
    words = ("generate", str(out), "7 and", "--max-new-tokens", "8", "--temperature", "0")
    ended = by_sockets(2, WHOLE, "0", "--", *words, "--tensor-parallel", "2")
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].said.split("8 tokens in")[0] == invoke(*words).output.split("8 tokens in")[0]


@needs_mpi
def test_a_new_model_of_two_stages_is_written_whole(text, tmp_path, reference) -> None:
    out = tmp_path / "run"
    grid = ("--tensor-parallel", "2", "--pipeline-parallel", "2", "--steps", "1")
    done = run(4, WHOLE, "0", "--", *asked(text, out, *grid))
    assert done.returncode == 0, done.stderr
    wanted = load_file(reference / "model/model.safetensors")
    for folder in ("model", "checkpoint-00000001"):
        found = load_file(out / folder / "model.safetensors")
        assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in wanted.items()}


def test_a_full_disk_in_one_rank_ends_all(text: Path, tmp_path: Path) -> None:
    """The other one is told why, and no half of a checkpoint is there."""
    out = tmp_path / "run"
    ended = by_sockets(2, WHOLE, "full", "--", *asked(text, out, "--data-parallel", "2"))
    for each in ended:
        assert each.code, each
        assert "No space left on device" in each.said, each
    assert "rank 0 has failed" in ended[1].said
    assert not [*out.glob("checkpoint-*")]
    assert not (out / "model").exists()


def test_a_grid_that_does_not_fit_is_refused(text: Path, tmp_path: Path) -> None:
    done = invoke(*asked(text, tmp_path / "run", "--tensor-parallel", "2"))
    assert done.exit_code == 1
    assert "is not a grid of 1 ranks; start it with mpiexec -n 2" in done.output
    assert not (tmp_path / "run").exists()
    done = invoke(*asked(text, tmp_path / "run", "--zero", "1"))
    assert "--zero 1 is not for one data rank; start more ranks" in done.output


def two_of(data: int) -> Ranks:
    ranks, comm = alone(), SingleCommunicator()
    comm.size, comm.rank = 2, data
    return Ranks(comm, ranks.groups._replace(data=comm))


def test_rows_are_divided_at_the_ends_of_texts() -> None:
    tokens = np.arange(12).reshape(3, 4)
    batch = Batch(tokens, tokens, np.array([0, 3, 4, 8, 10, 12]), 9, 12)
    parts: list[Any] = [two_of(rank).rows(batch) for rank in range(2)]
    assert [part.tokens.tolist() for part in parts] == [tokens[:2].tolist(), tokens[2:].tolist()]
    assert [part.offsets.tolist() for part in parts] == [[0, 3, 4, 8], [0, 2, 4]]
    with pytest.raises(ConfigError, match="a text is not in one row"):
        two_of(0).rows(batch._replace(offsets=np.array([0, 3, 10, 12])))


def test_what_ranks_do_not_do_is_refused() -> None:
    fine: dict[str, Any] = {"state_bits": 32, "limited": False, "offload": False}
    two_of(0).check(2, **fine)
    with pytest.raises(ConfigError, match="--batch 1 is not enough for 2 ranks"):
        two_of(0).check(1, **fine)
    with pytest.raises(ConfigError, match="--limit-memory is not for"):
        two_of(0).check(2, **fine | {"limited": True})
    ranks = two_of(0)
    ranks.whole = False
    with pytest.raises(ConfigError, match="--state-bits 8 is not for divided weights"):
        ranks.check(2, **fine | {"state_bits": 8})
