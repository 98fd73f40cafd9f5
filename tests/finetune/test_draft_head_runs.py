"""``finetune`` with draft heads (multi-token prediction), and what becomes of them elsewhere."""

import json
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import Result

from unsloth_cupy import Settings, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer

from ..cli.test_cli import assert_one_clear_error, run
from ..harness.moving import moving
from ..models.peers import MIXTURES, SIZES
from ..parallel.ranks import by_sockets

LENGTH = ("--batch", 4, "--tokens", 32, "--lr", 0.01)
WEIGHT = ("--mtp-weight", 0.3)
LABELS = {"deepseek_v3": "model.layers.3.", "qwen3_next": "mtp."}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, and a small model of each layout with a tokenizer."""
    root = tmp_path_factory.mktemp("bases")
    words = np.random.default_rng(0).choice(["a", "of", "the", "tree", "house", "walks"], 3000)
    (root / "text.txt").write_text(" ".join(words))
    tokenizer = train_tokenizer(iter([" ".join(words)]), 300)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_nextn_predict_layers": 1}
    for label in LABELS:
        dense = {"decoder_sparse_step": 1} if label == "qwen3_next" else {}
        models.create(SIZES | MIXTURES[label] | sizes | dense, seed=0).save(root / label)
        tokenizer.save(str(root / label / "tokenizer.json"))
    return root


def heads_of(folder: Path, prefix: str) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    every = {n: a for file in files for n, a in safetensors.numpy.load_file(file).items()}
    return {name: array for name, array in every.items() if name.startswith(prefix)}


def finetune(bases: Path, label: str, out: Path, *options: object) -> Result:
    command = ("finetune", bases / label, "--text", bases / "text.txt", *LENGTH, *options)
    return run(*command, "--out", out)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_a_run_trains_heads_goes_on_with_equal_bits_and_was_planned(
    label: str, bases: Path, tmp_path: Path
) -> None:
    options = (*WEIGHT, "--save-every", 3, "--decay", "constant", "--warmup", 0)
    done = finetune(bases, label, tmp_path / "whole", *options, "--steps", 6)
    assert done.exit_code == 0, done.output
    assert "draft heads (multi-token prediction) are trained with weight 0.3" in done.output
    lines = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "peak_bytes" in line]
    assert counted
    for line in counted:
        assert -0.03 < line["planned_bytes"] / line["peak_bytes"] - 1 < 0.03
    first = finetune(bases, label, tmp_path / "parts", *options, "--steps", 3)
    assert first.exit_code == 0, first.output
    more = finetune(bases, label, tmp_path / "parts", *options, "--steps", 6)
    assert more.exit_code == 0, more.output
    assert "resuming from" in more.output
    actual, expected = (
        heads_of(tmp_path / each / "model", LABELS[label]) for each in ("parts", "whole")
    )
    before = heads_of(bases / label, LABELS[label])
    assert actual.keys() == expected.keys() == before.keys()
    fixed = {name for name in before if name.endswith("correction_bias")}
    for name, array in expected.items():
        assert np.array_equal(actual[name], array), name
        assert (array != before[name]).any() == (name not in fixed), name
    drafted = run(
        "generate", tmp_path / "whole", "the tree", "--max-new-tokens", 9, "--draft", "mtp"
    )
    plain = run(
        "generate", tmp_path / "whole", "the tree", "--max-new-tokens", 9, "--temperature", 0
    )
    assert drafted.exit_code == plain.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert "drafts accepted" in drafted.stderr
    assert "drafts accepted" not in plain.stderr


@pytest.mark.parametrize("way", ["full", "bfloat16", "lora"])
@pytest.mark.parametrize("label", LABELS)
def test_other_runs_save_heads_as_they_are(
    way: str, label: str, bases: Path, tmp_path: Path
) -> None:
    options = {"full": (), "bfloat16": ("--dtype", "bfloat16"), "lora": ("--lora", 2)}[way]
    done = finetune(bases, label, tmp_path / "run", *options, "--steps", 2)
    assert done.exit_code == 0, done.output
    output = " ".join(done.output.split())
    assert "draft heads (multi-token prediction) are saved as they are" in output
    assert ("--mtp-weight 0.1 trains them" in output) == (way != "lora")
    folder = tmp_path / "run" / "model"
    if way == "lora":
        folder = tmp_path / "merged"
        assert run("merge", tmp_path / "run", folder).exit_code == 0
    actual, expected = heads_of(folder, LABELS[label]), heads_of(bases / label, LABELS[label])
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(actual[name], array), name


def test_the_loss_of_an_evaluation_has_no_drafts(bases: Path, tmp_path: Path) -> None:
    held_out = []
    for place, weight in enumerate(((), WEIGHT)):
        out = tmp_path / str(place)
        done = finetune(bases, "deepseek_v3", out, *weight, "--steps", 1, "--lr", 1e-9)
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        held_out.append([line["held_out_loss"] for line in lines if "held_out_loss" in line])
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-6)


def command_of(bases: Path, out: Path, *options: object) -> list[str]:
    command = ("finetune", bases / "deepseek_v3", "--text", bases / "text.txt", *LENGTH, *WEIGHT)
    return [*map(str, (*command, "--out", out, *options))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data_ranks_train_heads_as_one_process(dtype: str, bases: Path, tmp_path: Path) -> None:
    """The heads of several ranks, of recomputed blocks, and of runs that are killed.

    Sums of ranks have another order; everything else has equal bits.
    """
    heads, options = "model.layers.3.", ("--steps", 4, "--save-every", 2, "--dtype", dtype)
    ranks = {f"zero {zero}": ("--data-parallel", 2, "--zero", zero) for zero in (0, 1, 3)}
    ways = {**ranks, "killed": ranks["zero 1"]}
    done = run(*command_of(bases, tmp_path / "one", *options))
    assert done.exit_code == 0, done.output
    commands = {
        name: command_of(bases, tmp_path / name, *options, *way) for name, way in ways.items()
    }
    ended = by_sockets(2, "tests.parallel.commands", "killed", "--", *commands["killed"])
    assert ended[1].code == -signal.SIGKILL, ended
    every = chain.from_iterable((*each, "--") for each in commands.values())
    ended = by_sockets(2, "tests.parallel.commands", *every, limit=240)
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].said.count("resuming from") == 1
    before = heads_of(bases / "deepseek_v3", heads)
    one, *others = (heads_of(tmp_path / name / "model", heads) for name in ("one", *ways))
    share = {"float32": 1e-3, "bfloat16": 0.2}[dtype]  # rounded sums: 0.11 was seen
    for name, expected in one.items():
        moved = np.linalg.norm(expected - before[name])
        assert moved or name.endswith("correction_bias"), name
        for each in others:
            off = np.linalg.norm(each[name] - expected)
            assert off <= share * moved, name
        np.testing.assert_array_equal(others[-1][name], others[1][name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_recomputed_blocks_and_of_a_killed_run_have_equal_bits(
    dtype: str, bases: Path, tmp_path: Path
) -> None:
    options = ("--steps", 4, "--save-every", 2, "--dtype", dtype)
    again = ("--recompute-every", 1)
    ways = {"one": (), "recomputed": again, "offload": (*again, "--offload"), "killed": ()}
    killed = command_of(bases, tmp_path / "killed", *options)
    (ended,) = by_sockets(1, "tests.parallel.commands", "killed", "--", *killed)
    assert ended.code == -signal.SIGKILL, ended
    for name, way in ways.items():
        with moving() as moved:
            done = run(*command_of(bases, tmp_path / name, *options, *way))
        assert done.exit_code == 0, done.output
        assert bool(moved) == (name == "offload")
        assert ("resuming from" in done.output) == (name == "killed")
    before = heads_of(bases / "deepseek_v3", "model.layers.3.")
    one, *others = (heads_of(tmp_path / name / "model", "model.layers.3.") for name in ways)
    for name, expected in one.items():
        assert (expected != before[name]).any() or name.endswith("correction_bias"), name
        for each in others:
            np.testing.assert_array_equal(each[name], expected, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lora", 2), "draft heads are not trained with --lora 2; leave --mtp-weight 0.3 out"),
        (("--invariant",), "draft heads are not trained with --invariant"),
    ],
)
def test_what_does_not_train_heads_is_refused(
    options: Any, words: str, bases: Path, tmp_path: Path
) -> None:
    done = finetune(bases, "deepseek_v3", tmp_path / "run", *WEIGHT, "--steps", 1, *options)
    assert_one_clear_error(done, words)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert", "context"])
def test_ranks_that_do_not_train_heads_are_refused(name: str, bases: Path) -> None:
    ranks = {f"{name}_parallel": 2}
    settings = Settings(mtp_weight=0.3, **ranks)
    with pytest.raises(ConfigError, match=f"draft heads are not trained with .*{name}.* as they"):
        settings.check(bases / "deepseek_v3", lines=False)


def test_a_model_without_heads_is_refused(bases: Path, tmp_path: Path) -> None:
    values = SIZES | {"model_type": "llama", "vocab_size": 300}
    models.create(values, seed=0).save(tmp_path / "llama")
    words = (bases / "deepseek_v3" / "tokenizer.json").read_bytes()
    (tmp_path / "llama" / "tokenizer.json").write_bytes(words)
    command = ("finetune", tmp_path / "llama", "--text", bases / "text.txt", *LENGTH, *WEIGHT)
    done = run(*command, "--steps", 1, "--out", tmp_path / "run")
    assert_one_clear_error(done, "trains draft heads, and the model's files have none")
    drafted = run("generate", tmp_path / "llama", "the tree", "--draft", "mtp")
    assert_one_clear_error(drafted, "this llama has no draft head")
