"""Runs that train through the quantizer of the file that they are merged into."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Mxfp4, models, mxfp4_quantize
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Run, Settings, Trainer
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.models.adapters.into import CHOICES, IN_FOLDERS
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.ops.quantized.weight import Quantized

from ..cli.test_cli import assert_one_clear_error
from ..cli.test_cli import run as command
from ..models.peers import MIXTURES, SIZES
from .test_lora import StopsAfter

SMALL: dict[str, Any] = {"batch": 2, "tokens": 16, "steps": 4, "lr": 0.02, "evaluate_every": 2}
__all__ = ["text"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


@pytest.fixture(scope="module")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"layers": 1, "hidden": 32, "vocabulary": 300}
    out = tmp_path_factory.mktemp("base")
    return Trainer(None, text, Settings(**SMALL | size, out=out)).train().files.model


def trained(model: Any, text: Path, out: Path, **settings: Any) -> Run:
    return Trainer(model, text, Settings(**SMALL | {"out": out, "lora": 4} | settings)).train()


def held_out(run: Run, model: models.Transformer) -> float:
    """Return the held-out loss of a run, of another model."""
    total = count = 0.0
    assert run.loop is not None
    for batch in run.loop.training_data.held_out:
        loss = float(model.loss(batch.tokens, batch.labels, offsets=batch.offsets))
        total, count = total + loss * batch.label_count, count + batch.label_count
    return total / count


def reported(run: Run) -> list[float]:
    return [line["held_out_loss"] for line in run.files.lines() if "held_out_loss" in line]


def merged(run: Run, kind: str, **options: Any) -> Any:
    """Return the report and the model of the file that a run was trained for."""
    if kind in IN_FOLDERS:
        report: Any = models.merge(run.files.model, run.folder / "merged")
    else:
        report = models.export_gguf(run.files.model, run.folder / "m.gguf")
    place = "merged" if kind in IN_FOLDERS else "m.gguf"
    return report, models.load(run.folder / place, **{"dtype": "float32"} | options)


@pytest.mark.parametrize(("kind", "quantize"), [("nf4", "nf4"), ("q4_0", "nf4"), ("q8_0", None)])
def test_the_reported_loss_is_that_of_the_file(
    kind: str, quantize: str | None, base: Path, text: Path, tmp_path: Path
) -> None:
    run = trained(base, text, tmp_path / "run", merge_into=kind, quantize=quantize)
    losses = reported(run)
    assert losses[-1] < losses[0]
    report, model = merged(run, kind)
    assert report.kept.share == 1.0
    assert held_out(run, model) == losses[-1]
    assert held_out(run, models.load(run.files.model, dtype="float32")) == losses[-1]
    steps = [line for line in run.files.lines() if "peak_bytes" in line]
    for line in steps:
        own = line["peak_bytes"] - line["planned_bytes"]  # Python's own objects
        assert 0 <= own < 12_000
    assert steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CHOICES if kind != "mxfp4"])
def test_so_it_is_of_all_kinds(kind: str, base: Path, text: Path, tmp_path: Path) -> None:
    run = trained(base, text, tmp_path / "run", merge_into=kind, merge_from=2, quantize="nf4")
    assert held_out(run, merged(run, kind)[1]) == reported(run)[-1]


@pytest.mark.parametrize("packed", [False, True])  # the base
def test_so_it_is_of_experts_in_mxfp4(packed: bool, base: Path, text: Path, tmp_path: Path) -> None:
    """The file has the bits of the last step's weights, which another op multiplies by."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300, "num_hidden_layers": 1}
    mixture = tmp_path / "mixture"
    model = models.create(SIZES | MIXTURES["gpt_oss"] | sizes, seed=0)
    for name in [n for n in model.parameters if is_stack(n) and packed]:
        model.parameters[name] = mxfp4_quantize(model.parameters[name])
    model.save(mixture)
    (mixture / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    run = trained(mixture, text, tmp_path / "run", merge_into="mxfp4", merge_from=2)
    report, model = merged(run, "mxfp4")
    assert report.kept.share == 1.0
    expected = run.model.settled().parameters
    for name, weight in model.parameters.items():
        assert isinstance(weight, Mxfp4) == is_stack(name)
        actual, used = (
            each.dequantize() if isinstance(each, Quantized) else each
            for each in (weight, expected[name])
        )
        np.testing.assert_array_equal(actual, used, err_msg=name)
    assert held_out(run, model) == pytest.approx(reported(run)[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "is not byte-level"),
        ({"normalizer": {"type": "Lowercase"}}, "changes texts"),
    ],
)
def test_a_file_without_such_a_tokenizer_is_refused_before_training(
    change: dict[str, Any], problem: str, base: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "m")
    words = tmp_path / "m/tokenizer.json"
    words.write_text(json.dumps(json.loads(words.read_text()) | change))
    settings = Settings(**SMALL | {"lora": 4, "out": tmp_path / "run", "merge_into": "q4_0"})
    with pytest.raises(ConfigError, match=f"q4_0.*: export_gguf: the tokenizer {problem}"):
        Trainer(tmp_path / "m", text, settings).train()
    assert not (tmp_path / "run").exists()
    trained(tmp_path / "m", text, tmp_path / "run", merge_into="nf4", steps=1)  # a folder has it


def test_without_it_a_light_change_is_lost(base: Path, text: Path, tmp_path: Path) -> None:
    """A run of 4 small steps is rounded away by a merge after it, and kept by one through it."""
    plain = trained(base, text, tmp_path / "plain", quantize="nf4", lr=1e-3)
    after = plain.model
    with pytest.warns(UserWarning, match="rounding preserves"):
        kept = after.merge_adapter(requantize=True)
    assert kept.share < 0.5
    through = trained(base, text, tmp_path / "run", quantize="nf4", merge_into="nf4", lr=1e-3)
    assert merged(through, "nf4")[0].kept.share == 1.0


def test_goes_on_with_the_same_bits(base: Path, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"merge_into": "q4_0", "merge_from": 2, "save_every": 1}
    whole = trained(base, text, tmp_path / "whole", **settings)
    stop = Stop()
    both = Settings(**SMALL | settings | {"lora": 4, "out": tmp_path / "parts"})
    with pytest.raises(Interrupted):
        Trainer(base, text, both, listener=StopsAfter(stop, 3)).train(stop)
    parts = Trainer(base, text, both).train()
    assert parts.losses == whole.losses
    names = (f"{each}/model/adapter_model.safetensors" for each in ("whole", "parts"))
    first, second = ((tmp_path / name).read_bytes() for name in names)
    assert first == second
    assert held_out(parts, merged(parts, "q4_0")[1]) == reported(whole)[-1]


def test_from_a_step_on(base: Path, text: Path, tmp_path: Path) -> None:
    """Before it the losses are those of a plain run, and after it those of the file."""
    plain = trained(base, text, tmp_path / "plain")
    late = trained(base, text, tmp_path / "late", merge_into="q4_0", merge_from=3)
    early = trained(base, text, tmp_path / "early", merge_into="q4_0")
    assert late.losses[:3] == plain.losses[:3]
    assert late.losses[3] != plain.losses[3]
    assert early.losses[0] != plain.losses[0]
    assert held_out(late, merged(late, "q4_0")[1]) == reported(late)[-1]


def test_dropout_and_16_bits(base: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"merge_into": "nf4", "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"float32, which bfloat16 would round; give dtype"):
        trained(base, text, tmp_path / "wide", **options)
    narrow = models.load(base, dtype="bfloat16")
    narrow.save(tmp_path / "base")
    for name in ("tokenizer.json",):
        (tmp_path / "base" / name).write_bytes((base / name).read_bytes())
    run = trained(tmp_path / "base", text, tmp_path / "run", lora_dropout=0.2, **options)
    actual = held_out(run, merged(run, "nf4", dtype="bfloat16")[1])
    assert actual == pytest.approx(reported(run)[-1], rel=1e-6)


def test_an_adapter_goes_on_through_its_quantizer(base: Path, text: Path, tmp_path: Path) -> None:
    first = trained(base, text, tmp_path / "first", merge_into="q4_0", quantize="nf4")
    start, rest = first.files.model, {"lora": None}
    again = trained(start, text, tmp_path / "again", **rest)
    assert again.model.adapter.into.kind == "q4_0"
    assert reported(again)[0] == reported(first)[-1]
    with pytest.raises(ConfigError, match="the adapter was trained through q4_0; leave merge_into"):
        trained(start, text, tmp_path / "other", merge_into="nf4", **rest)
    plain = trained(base, text, tmp_path / "plain")
    later = trained(plain.files.model, text, tmp_path / "later", merge_into="int8", **rest)
    assert held_out(later, merged(later, "int8")[1]) == reported(later)[-1]


def test_on_the_command_line(base: Path, text: Path, tmp_path: Path) -> None:
    """The run says that its adapter alone is not the model, and export writes its file."""
    out = tmp_path / "run"
    learn = ("finetune", base, "--text", text, "--lora", 2, "--batch", 2, "--tokens", 16)
    made = command(*learn, "--steps", 2, "--merge-into", "q4_0", "--out", out)
    assert made.exit_code == 0, made.output
    assert "training through the q4_0 quantizer: use the merged file, not the adapter" in (
        " ".join(made.output.split())
    )
    assert f"unsloth-cupy export {out} {out}.gguf --modelfile" in made.output
    assert "merge" not in made.output.partition("next:")[2]
    written = command("export", out, tmp_path / "m.gguf")
    assert written.exit_code == 0, written.output
    assert "q4_0" in written.output
    assert "rounding preserves 100.0 % of the LoRA update" in written.output
    folder = command(*learn, "--steps", 2, "--merge-into", "nf4", "--out", tmp_path / "nf4")
    assert "unsloth-cupy merge" in folder.output.partition("next:")[2]
    assert ".gguf" not in folder.output.partition("next:")[2]
    config = json.loads((base / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    planned = command("plan", base, "--lora", 2, "--merge-into", "nf4", "--tokens", 16)
    assert "merged into nf4" in " ".join(planned.output.split())
    ranks = ("--data-parallel", 2)
    assert_one_clear_error(
        command("plan", base, "--lora", 2, "--merge-into", "nf4", *ranks), "leave the ranks out"
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"merge_from": 3}, "merge_from requires merge_into; give both"),
        ({"merge_into": "nf4", "merge_from": 4}, "the run has only 4 steps, so it would"),
        ({"merge_into": "nf4", "lora": None}, "merge_into=nf4 requires adapters; add lora"),
        ({"merge_into": "nf4", "dora": True}, "leave dora=True out"),
        ({"merge_into": "nf4", "save_dtype": "bfloat16"}, "leave save_dtype=bfloat16 out"),
        ({"merge_into": "nf4", "merge_from": 2, "keep_best": True}, "leave merge_from=2, keep_be"),
        ({"merge_into": "q4"}, "merge_into=q4 is not known; choose from nf4"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], problem: str, base: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        trained(base, text, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", ["tensor_parallel=2", "pipeline_parallel=2", "zero=3"])
def test_ranks_that_divide_weights_are_refused(ranks: str, base: Path) -> None:
    name, number = ranks.split("=")
    settings = Settings(lora=4, merge_into="nf4", **{name: int(number)})
    with pytest.raises(ConfigError, match=f"ranks would split the quant.*; leave {ranks} out"):
        settings.check(base, lines=False)
