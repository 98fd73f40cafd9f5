"""``finetune``, ``generate`` and ``plan`` with weights in fewer bits."""

import json
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import models, plan_memory
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.finetune.run.new_model import small_llama
from unsloth_cupy.machine import format_bytes
from unsloth_cupy.models.quantizer import CHOICES

from ..cli.test_cli import LLAMA, _one_card, assert_one_clear_error, run

QUANT = Path(__file__).parents[1] / "golden" / "quant"

__all__ = ["_one_card"]  # a fixture that the tests below ask for


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a small model with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.txt"
    words = np.random.default_rng(0).choice(["a", "of", "the", "tree", "house", "walks"], 4000)
    text.write_text(" ".join(words))
    tokenizer = train_tokenizer(iter([text.read_text()]), 300)
    model = models.create(small_llama(tokenizer, 64, 2, 64), seed=0, dtype="float32")
    model.save(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    return folder / "model", text


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHOICES)
def test_adapters_on_quantized_weights(kind: str, base: tuple[Path, Path], tmp_path: Path) -> None:
    """They learn; what a step takes is planned; the same command goes on; the result speaks."""
    folder, text = base
    out = tmp_path / "run"
    options = ("--text", text, "--lora", 4, "--batch", 4, "--tokens", 64, "--lr", 0.01)
    command = ("finetune", folder, "--quantize", kind, *options, "--out", out, "--save-every", 4)
    done = run(*command, "--steps", 8)
    assert done.exit_code == 0, done.output
    actual = lines(out)
    for line in actual:
        if "peak_bytes" in line:
            assert line["planned_bytes"] == pytest.approx(line["peak_bytes"], rel=0.02)  # a plan's
    losses = [line["held_out_loss"] for line in actual if "held_out_loss" in line]
    assert losses[-1] < losses[0]
    more = run(*command, "--steps", 12)
    assert more.exit_code == 0, more.output
    assert lines(out)[-1]["step"] == 12
    other = run(*command[:2], *options, "--out", out, "--steps", 12)
    assert f"taken from the earlier run: quantize {kind}" in other.output
    assert "is finished" in other.output
    for also in ((), ("--quantize", kind)):
        said = run("generate", out, "the", "--max-new-tokens", 3, *also)
        assert said.exit_code == 0, said.output


@pytest.mark.slow
def test_the_loss_begins_as_that_of_the_quantized_model(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, text = base
    options = ("--text", text, "--lora", 4, "--batch", 4, "--tokens", 32, "--steps", 1)
    begun = {}
    for kind in ("", "nf4"):
        out = tmp_path / f"run{kind}"
        quantize = ("--quantize", kind) if kind else ()
        assert run("finetune", folder, *quantize, *options, "--out", out).exit_code == 0
        begun[kind] = lines(out)[0]["held_out_loss"]
    assert begun["nf4"] != begun[""]
    assert begun["nf4"] == pytest.approx(begun[""], rel=0.02)  # what 4 bits lose


@pytest.mark.slow
def test_nothing_would_learn(base: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = base
    learn = ("finetune", folder, "--text", text, "--out", tmp_path / "run")
    assert_one_clear_error(run(*learn, "--quantize", "nf4"), "add --lora")
    assert_one_clear_error(run("finetune", "--quantize", "nf4"), "pass MODEL_FOLDER")
    assert_one_clear_error(run("plan", folder, "--quantize", "nf4"), "add --lora")
    assert run(*learn, "--quantize", "int5").exit_code == 2
    stored = tmp_path / "stored"
    model = models.load(folder, quantize="nf4")
    model.save(stored)
    (stored / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    said = "is quantized, which freezes the weights: add --lora"
    learn = ("finetune", stored, "--text", text, "--out", tmp_path / "other")
    assert_one_clear_error(run(*learn), said)
    assert_one_clear_error(run("plan", stored), said)
    assert_one_clear_error(run(*learn, "--lora", 4, "--quantize", "nf4"), "quantized already")
    small = ("--lora", 4, "--steps", 1, "--batch", 2, "--tokens", 16)
    assert run(*learn, *small).exit_code == 0


def test_a_file_of_packed_weights_is_named(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Not the temporary folder in which its settings lie."""
    (folder, text), file = base, tmp_path / "m.gguf"
    models.export_gguf(folder, file, kind="q8_0")
    said = f"{file} is quantized, which freezes the weights: add --lora"
    learn = ("finetune", file, "--text", text, "--out", tmp_path / "run")
    for asked in (learn, (*learn, "--quantize", "nf4"), ("plan", file)):
        assert_one_clear_error(run(*asked), said)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.usefixtures("_one_card")
def test_plan(kind: str, device: str) -> None:
    options = ("--tokens", 64, "--dtype", "float32", "--device", device, "--lora", 4)
    result = run("plan", LLAMA, *options, "--quantize", kind)
    assert result.exit_code == 0, result.output
    config = json.loads((LLAMA / "config.json").read_text())
    sizes = {"batch": 1, "tokens": 64, "dtype": "float32", "rank": 4, "device": device}
    dense = plan_memory(config, **sizes)
    made = plan_memory(config, **sizes, quantization=kind)
    shown = " ".join(result.output.split())
    assert f"total │ │ {format_bytes(made.total)}" in shown
    assert f"--quantize {kind} --lora 4 │ {format_bytes(made.total)}" in shown
    assert f"--lora 4 │ {format_bytes(dense.total)}" in shown
    assert made.weights < 0.6 * dense.weights
    assert made.activations == dense.activations


@pytest.mark.slow
def test_plan_of_quantized_folders() -> None:
    folder = QUANT / "llama_nf4_double"
    result = run("plan", folder, "--tokens", 16, "--lora", 4)
    assert result.exit_code == 0, result.output
    assert "quantized to nf4-double" in " ".join(result.output.split())


@pytest.mark.slow
def test_plan_of_layers_that_are_rounded_at_every_call() -> None:
    result = run("plan", QUANT / "bitnet-online", "--tokens", 16)
    assert result.exit_code == 0, result.output
    assert "--lora" not in result.output
    assert_one_clear_error(
        run("plan", QUANT / "bitnet-online", "--tokens", 16, "--lora", 4), "rounded at every call"
    )


def test_plan_says_what_quantization_asks() -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    sizes = {"batch": 1, "tokens": 8, "dtype": "float32"}
    with pytest.raises(ConfigError, match="frozen: pass a rank"):
        plan_memory(config, **sizes, quantization="nf4")
    with pytest.raises(ConfigError, match="kind 'nf3' is unknown"):
        plan_memory(config, **sizes, rank=2, quantization="nf3")


@pytest.mark.slow
def test_a_ternary_model_from_nothing(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dense weights learn, rounded at every call; the same command goes on with them."""
    text, out = base[1], tmp_path / "run"
    sizes = ("--layers", 1, "--hidden", 32, "--vocabulary", 300, "--batch", 4, "--tokens", 32)
    command = ("finetune", "--text", text, *sizes, "--out", out, "--quantize", "ternary")
    assert_one_clear_error(run(*command, "--steps", 4), "pass MODEL_FOLDER")
    for steps in (20, 24):
        done = run(*command, "--train-weights", "--steps", steps)
        assert done.exit_code == 0, done.output
    actual = lines(out)
    losses = [line["held_out_loss"] for line in actual if "held_out_loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert actual[-1]["step"] == 24
    for line in actual:
        if "peak_bytes" in line:
            assert line["planned_bytes"] == pytest.approx(line["peak_bytes"], rel=0.02)  # a plan's
    made = models.load(out / "model")
    assert made.config.bit_layers
    assert not any(hasattr(array, "dequantize") for array in made.parameters.values())
    assert_one_clear_error(run(*command, "--steps", 24), "pass MODEL_FOLDER")
    wrong = ("finetune", base[0], "--train-weights", "--quantize", "ternary", "--out", out)
    assert_one_clear_error(
        run(*wrong), "--train-weights is for a new model with --quantize ternary"
    )
    assert_one_clear_error(run(*command[:-1], "nf4", "--train-weights"), "with --quantize ternary")
