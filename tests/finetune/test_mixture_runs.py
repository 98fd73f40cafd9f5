"""``finetune`` and the commands around it with a mixture of experts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from unsloth_cupy import models, mxfp4_quantize
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.models.layers import experts_layer
from unsloth_cupy.models.layers.experts_layer import _product

from ..cli.test_cli import assert_one_clear_error, run
from ..models.peers import MIXTURES, SIZES
from ..parallel.ranks import by_sockets

WAYS = {
    "all": ("qwen2_moe", ()),
    "lora": ("mixtral", ("--lora", 4)),
    "nf4": ("mixtral", ("--lora", 4, "--quantize", "nf4")),
    "int8": ("mixtral", ("--lora", 4, "--quantize", "int8")),
    "mxfp4": ("gpt_oss", ("--lora", 4)),
}
LENGTH = ("--batch", 4, "--tokens", 32, "--lr", 0.01)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, and a small model of each family with a tokenizer."""
    root = tmp_path_factory.mktemp("bases")
    words = np.random.default_rng(0).choice(["a", "of", "the", "tree", "house", "walks"], 3000)
    (root / "text.txt").write_text(" ".join(words))
    tokenizer = train_tokenizer(iter([" ".join(words)]), 300)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "output_router_logits": True}
    for label in {label for label, _ in WAYS.values()}:
        model = models.create(SIZES | MIXTURES[label] | sizes, seed=0)
        for name in [n for n in model.parameters if is_stack(n) and label == "gpt_oss"]:
            model.parameters[name] = mxfp4_quantize(model.parameters[name])
        model.save(root / label)
        tokenizer.save(str(root / label / "tokenizer.json"))
    return root


def lines_of(run_folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_folder / "log.jsonl").read_text().splitlines()]


def held_out(lines: list[dict[str, float]]) -> list[float]:
    return [line["held_out_loss"] for line in lines if "held_out_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all", "lora", "nf4", "int8", "mxfp4"])
def test_a_run_of_each_kind(way: str, bases: Path, tmp_path: Path) -> None:
    """It learns; what a step takes was planned; it goes on, generates, is merged, and loads."""
    label, options = WAYS[way]
    out, merged = tmp_path / "run", tmp_path / "merged"
    command = ("finetune", bases / label, "--text", bases / "text.txt", *LENGTH, *options)
    done = run(*command, "--out", out, "--steps", 4, "--save-every", 2)
    assert done.exit_code == 0, done.output
    in_a_file = label == "mixtral"  # llama.cpp does not have the rules of the other two
    assert ("unsloth-cupy export" in done.output) == in_a_file
    counted = "adapters of 18 layers, all with a gradient, 6 of them of stacks of experts"
    assert (counted in " ".join(done.output.split())) == (way != "all")
    lines = lines_of(out)
    losses = held_out(lines)
    assert losses[-1] < losses[0] - 0.2
    counted = [line for line in lines if "peak_bytes" in line]
    assert counted
    for line in counted:  # without an adapter, the worst choice of experts is planned
        assert -0.01 < line["planned_bytes"] / line["peak_bytes"] - 1 < 0.05
    routed = [json.loads(line) for line in (out / "routing.jsonl").read_text().splitlines()]
    assert routed[-1]["step"] == 4
    steps = [line for line in lines if "expert_load" in line]
    assert len(steps) == 4
    layers, count = np.array(routed[-1]["tokens"]).shape
    taken = sum(np.array(line["tokens"]).sum() for line in routed)
    assert taken == pytest.approx(sum(line["expert_tokens"] for line in steps) * layers * count)
    assert (out / "routing.png").read_bytes().startswith(b"\x89PNG")
    more = run(*command, "--out", out, "--steps", 6, "--save-every", 2)
    assert more.exit_code == 0, more.output
    assert "resuming from" in more.output
    said = run("generate", out, "the tree", "--max-new-tokens", 3, "--temperature", 0)
    assert said.exit_code == 0, said.output
    assert run("merge", out, merged).exit_code == 0
    again = run("generate", merged, "the tree", "--max-new-tokens", 3, "--temperature", 0)
    assert again.exit_code == 0, again.output
    if way not in ("nf4", "int8"):  # their adapters were trained on rounded weights
        assert again.stdout == said.stdout
    assert models.load(merged).config.experts is not None
    for planned in ((out,), (bases / label, "--lora", 4)):
        assert run("plan", *planned, "--tokens", 64).exit_code == 0


def test_what_a_run_refuses(bases: Path, tmp_path: Path) -> None:
    def asked(label: str, *options: object) -> Result:
        command = ("finetune", bases / label, "--text", bases / "text.txt", *LENGTH, *options)
        return run(*command, "--steps", 1, "--out", tmp_path / "run")

    assert_one_clear_error(asked("gpt_oss"), "is quantized, which freezes the weights: add --lora")
    packed = asked("gpt_oss", "--lora", 4, "--quantize", "nf4")
    assert_one_clear_error(packed, "is quantized already, as mxfp4; leave --quantize out")
    rounded = asked("mixtral", "--lora", 4, "--quantize", "ternary")
    assert_one_clear_error(rounded, "ternary does not support the stacks of experts of")
    update = "--router-bias-update-rate", 0.001
    unbiased = asked("mixtral", *update)
    assert_one_clear_error(unbiased, "mixtral: none is in its files; leave it out")
    adapter = asked("mixtral", "--lora", 4, *update)
    assert_one_clear_error(adapter, "which the file of an adapter does not store; leave it out")
    assert not (tmp_path / "run" / "model").exists()


def test_experts_whose_adapters_do_nothing_end_the_run(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no gradient, and the run does not say that they learn."""

    def plain(parameters: Any, stacks: Any, offsets: Any, name: str, x: Any) -> Any:
        own = {} if name.endswith(".down_proj") else stacks
        return _product(parameters, own, offsets, name, x)

    monkeypatch.setattr(experts_layer, "_product", plain)
    command = ("finetune", bases / "mixtral", "--text", bases / "text.txt", *LENGTH, "--lora", 4)
    done = run(*command, "--steps", 2, "--out", tmp_path / "run")
    assert_one_clear_error(done, "layers.0.mlp.experts (and 2 more) is 0 everywhere")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lora", "nf4", "mxfp4"])
def test_two_ranks_learn_as_one(way: str, bases: Path, tmp_path: Path) -> None:
    """Each with half of the rows, and with ZeRO-3 half of each stack; without a router's loss."""
    label, options = WAYS[way]
    model = tmp_path / "model"
    model.mkdir()
    for file in (bases / label).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text()) | {"output_router_logits": False}
    (model / "config.json").write_text(json.dumps(config))
    command = ("finetune", model, "--text", bases / "text.txt", *LENGTH, "--steps", 3, *options)
    assert run(*command, "--out", tmp_path / "one").exit_code == 0
    words = [str(word) for word in command]
    for zero in ("0", "3"):
        grid = ("--data-parallel", "2", "--zero", zero, "--out", str(tmp_path / zero))
        ended = by_sockets(2, "tests.parallel.commands", *words, *grid)
        assert [each.code for each in ended] == [0, 0], ended[0].said
    losses = []
    for name in ("one", "0", "3"):
        losses.append(held_out(lines_of(tmp_path / name)))
    assert losses[1] == losses[2]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
