"""Adapters merged into folders, which transformers loads beside peft."""

import json
import shutil
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.adapters.kept import Kept
from unsloth_cupy.models.folders import checkpoint_files
from unsloth_cupy.models.folders.stored import StoredModel

from .exported import make, read, write_tokenizer
from .peers import MIXTURES, SIZES

TOKENS = np.random.default_rng(3).integers(3, 97, (2, 12))
PEERS = "needs the extra `peers`"
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_alpha": 12},
    "rslora": {"lora_alpha": 5, "use_rslora": True},
    "dora": {"lora_alpha": 12, "use_dora": True},
}
WORDS = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}


def adapted(folder: Path, config: str = "llama biases", **options: Any) -> models.Transformer:
    """Save a model and an adapter that has learned; return the model with it."""
    make(folder / "base", config, dtype=options.pop("dtype", "float32"))
    model = models.load(folder / "base")
    draw = np.random.default_rng(4)
    model.add_adapter(4, base=str(folder / "base"), **options)
    for name, array in model.trainable.items():
        if "lora_B" in name:
            array[...] = 0.2 * draw.standard_normal(array.shape)
    model.save_adapter(folder / "adapter")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    torch, transformers, peft = (
        pytest.importorskip(name, reason=PEERS) for name in ("torch", "transformers", "peft")
    )
    make(tmp_path / "base", "qwen2")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    settings = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM",
        **KINDS[kind],
    )  # fmt: skip
    model = peft.get_peft_model(plain, settings).eval()
    model.save_pretrained(tmp_path / "adapter")
    report = models.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        expected, actual = (m(torch.from_numpy(TOKENS)).logits for m in (model, loaded))
    assert report.layers == 7 * SIZES["num_hidden_layers"]
    assert (actual - expected).abs().max() < 2e-4 * expected.abs().max()


def test_weights_are_those_of_the_method(tmp_path: Path) -> None:
    """In the dtype of the base they have the bits of ``merge_adapter``; files stay as they were."""
    model = adapted(tmp_path, dtype="bfloat16")
    write_tokenizer(tmp_path / "base", {}, **WORDS)
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    report = models.merge(tmp_path / "adapter", tmp_path / "out")
    model.merge_adapter()
    actual = models.load(tmp_path / "out")
    assert actual.adapter is None
    for name, expected in model.parameters.items():
        np.testing.assert_array_equal(actual.parameters[name], expected)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        "tokenizer_config.json",
    }
    for name in ("tokenizer_config.json", "generation_config.json"):
        texts = (json.loads((tmp_path / folder / name).read_text()) for folder in ("base", "out"))
        assert next(texts) == next(texts)
    assert (report.dtype, report.notes) == ("bfloat16", ())
    assert report.kept.share == pytest.approx(1, abs=0.01)  # three figures of bfloat16
    line = f"bfloat16, adapters of 21 layers merged ({report.kept.share:.1%} of the update)"
    assert str(report).endswith(line)


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_stands_for_its_model(finished: bool, tmp_path: Path) -> None:
    """As in the commands: for its result, or else for its newest checkpoint."""
    adapted(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "base", run / "checkpoint-00000002")
    shutil.copytree(tmp_path / "base", run / "checkpoint-00000003.partial")
    inside = run / ("model" if finished else "checkpoint-00000004")
    shutil.copytree(tmp_path / "adapter", inside)
    (run / "settings.json").write_text("{}")
    models.merge(inside, tmp_path / "expected")
    models.merge(run, tmp_path / "actual")
    expected, actual = (models.load(tmp_path / each) for each in ("expected", "actual"))
    np.testing.assert_array_equal(actual.logits(TOKENS), expected.logits(TOKENS))
    pytest.importorskip("gguf", reason="which writes the file")
    for source, file in ((inside, "expected.gguf"), (run, "actual.gguf")):
        models.export_gguf(source, tmp_path / file, kind="f32")
    read = (models.load(tmp_path / f"{each}.gguf") for each in ("expected", "actual"))
    np.testing.assert_array_equal(*(each.logits(TOKENS) for each in read))
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"config.json.* is missing|holds no"):
        models.merge(tmp_path / "none", tmp_path / "out")


def test_in_another_dtype_it_is_rounded_once(tmp_path: Path) -> None:
    adapted(tmp_path, dtype="bfloat16")
    models.merge(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    wide = models.load(tmp_path / "base", dtype="float32", lora=tmp_path / "adapter")
    wide.merge_adapter()
    actual = models.load(tmp_path / "out")
    for name, expected in wide.parameters.items():
        np.testing.assert_array_equal(actual.parameters[name], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_quantized_weights_become_dense(tmp_path: Path) -> None:
    adapted(tmp_path, "llama biases")
    base = models.load(tmp_path / "base", quantize="nf4")
    base.save(tmp_path / "four")
    assert "quantization_config" in json.loads((tmp_path / "four" / "config.json").read_text())
    model = models.load(tmp_path / "four", lora=tmp_path / "adapter")
    report = models.merge(
        tmp_path / "adapter", tmp_path / "out", base=tmp_path / "four", dtype="bfloat16"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == report.dtype == "bfloat16"
    merged = models.load(tmp_path / "out", dtype="float32")
    expected = model.logits(TOKENS)
    assert np.abs(merged.logits(TOKENS) - expected).max() < 0.03 * np.abs(expected).max()
    dense = {array.dtype.name for array in load_file(tmp_path / "out/model.safetensors").values()}
    assert dense == {"bfloat16"}


@pytest.mark.slow
def test_transformers_loads_a_merge_of_four_bits(tmp_path: Path) -> None:
    torch, transformers = (
        pytest.importorskip(name, reason=PEERS) for name in ("torch", "transformers")
    )
    adapted(tmp_path, "llama biases")
    models.load(tmp_path / "base", quantize="nf4").save(tmp_path / "four")
    model = models.load(tmp_path / "four", lora=tmp_path / "adapter")
    models.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "four", dtype="float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        actual = loaded(torch.from_numpy(TOKENS)).logits.numpy()
    expected = model.logits(TOKENS)
    assert np.abs(actual - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_model_without_an_adapter_is_copied(dtype: str | None, tmp_path: Path) -> None:
    make(tmp_path / "base", "qwen3")
    report = models.merge(tmp_path / "base", tmp_path / "out", dtype=dtype)
    assert report.notes == (
        f"{tmp_path / 'base'} holds no adapter: the output is a copy of the model",
    )
    assert (report.layers, report.dtype) == (0, dtype or "float32")
    for path in (tmp_path / "base").iterdir():
        same = (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
        assert same == (dtype is None or path.name == "tokenizer.json"), path.name
    assert models.load(tmp_path / "out").table.dtype == np.dtype(dtype or "float32")


@pytest.mark.parametrize(("stored", "dtype"), [("float16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("config", ["llama biases", MIXTURES["deepseek_v3"]], ids=["llama", "v3"])
def test_from_16_bits_to_the_other_16(config: Any, stored: str, dtype: str, tmp_path: Path) -> None:
    """Also where a router's bias, which is float32 in memory, has 16 bits in the file."""
    model = adapted(tmp_path, config, dtype=stored)
    file = tmp_path / "base" / "model.safetensors"
    save_file({n: each.astype(model.dtype) for n, each in load_file(file).items()}, file)
    models.merge(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    models.merge(tmp_path / "adapter", tmp_path / "wide", dtype="float32")
    merged = models.load(tmp_path / "out")
    assert merged.table.dtype.name == dtype
    for name, expected in models.load(tmp_path / "wide").parameters.items():
        actual = merged.parameters[name]
        np.testing.assert_array_equal(actual, expected.astype(actual.dtype), err_msg=name)
    assert models.load(tmp_path / "base", dtype=dtype).table.dtype.name == dtype


def test_of_several_files_one_weight_is_in_memory(tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 512, "head_dim": 64}
    make(tmp_path / "whole", sizes | {"num_hidden_layers": 6})
    model = models.load(tmp_path / "whole")
    names = [*model.parameters]
    model.layout = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    model.save(tmp_path / "base")
    model.add_adapter(2, base=str(tmp_path / "base"))
    model.save_adapter(tmp_path / "adapter")
    largest, total = (f(a.nbytes for a in model.parameters.values()) for f in (max, sum))
    models.merge(tmp_path / "adapter", tmp_path / "warm")
    tracemalloc.start()
    try:
        models.merge(tmp_path / "adapter", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * largest + (4 << 20) < total / 2
    assert (tmp_path / "out" / checkpoint_files.INDEX).exists()
    actual = models.load(tmp_path / "out").parameters
    assert all((actual[name] == array).all() for name, array in model.parameters.items())


def test_the_adapters_words_go_before_those_of_the_base(tmp_path: Path) -> None:
    """A template in its settings is not replaced by the base's file; the vocabulary is of one."""
    adapted(tmp_path)
    base, own = tmp_path / "base", tmp_path / "adapter"
    (base / "chat_template.jinja").write_text("base")
    (base / "special_tokens_map.json").write_text("{}")
    (base / "vocab.json").write_text("{}")
    shutil.copyfile(base / "tokenizer.json", own / "tokenizer.json")
    models.merge(own, tmp_path / "first")
    assert (tmp_path / "first" / "chat_template.jinja").read_text() == "base"
    (own / "tokenizer_config.json").write_text(json.dumps(WORDS))
    models.merge(own, tmp_path / "second")
    second = {path.name for path in (tmp_path / "second").iterdir()}
    assert {"special_tokens_map.json", "tokenizer_config.json"} < second
    assert not second & {"chat_template.jinja", "vocab.json"}


def test_what_ends_a_text_is_what_the_adapters_folder_says(tmp_path: Path) -> None:
    """Of its model, of a merge and of a GGUF file."""
    adapted(tmp_path)
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert models.load(tmp_path / "adapter").config.end_tokens == (2, 9)
    models.merge(tmp_path / "adapter", tmp_path / "out")
    assert models.load(tmp_path / "out").config.end_tokens == (2, 9)
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    models.export_gguf(tmp_path / "adapter", tmp_path / "a.gguf")
    values = read(tmp_path / "a.gguf")[0]
    assert [values[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot")] == [2, 9]


def test_wrong_calls_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        models.merge(adapter, tmp_path / "base")
    with pytest.raises(ConfigError, match="is the name of a file; pass a folder"):
        models.merge(adapter, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="is a file; name a new folder"):
        models.merge(adapter, tmp_path / "base" / "config.json")
    with pytest.raises(ConfigError, match=r"is not a folder; pass one that holds config\.json"):
        models.merge(tmp_path / "none", out)
    with pytest.raises(ConfigError, match="dtype"):
        models.merge(adapter, out, dtype="int8")
    model.parameters["lm_head.weight"][0, 0] = 1e6
    model.adapter = None
    model.save(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"float16 does not hold 1e\+06; choose bfloat16"):
        models.merge(adapter, out, dtype="float16")
    model.parameters["lm_head.weight"][0, 0] = np.nan
    model.save(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"lm_head\.weight holds numbers that are not finite"):
        models.merge(adapter, out)
    assert sorted(tmp_path.iterdir()) == before


def test_ternary_weights_have_no_dense_form(tmp_path: Path) -> None:
    make(tmp_path / "base", "bitnet")
    models.load(tmp_path / "base", quantize="ternary").save(tmp_path / "packed")
    with pytest.raises(ConfigError, match="it has no dense form; leave dtype out"):
        models.merge(tmp_path / "packed", tmp_path / "out", dtype="float32")
    report = models.merge(tmp_path / "packed", tmp_path / "out")
    assert (report.layers, report.dtype) == (0, "ternary")


def test_the_command(tmp_path: Path) -> None:
    adapted(tmp_path)
    out = tmp_path / "out"
    words = ["merge", str(tmp_path / "adapter"), str(out), "--dtype", "bfloat16"]
    result = click.testing.CliRunner().invoke(group, words)
    assert result.exit_code == 0, result.output
    assert f"{out}: " in result.output
    assert models.load(out).table.dtype.name == "bfloat16"


@pytest.mark.parametrize("spoiled", ["q_proj.weight", "lm_head.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_that_computes_something_else_is_refused(
    spoiled: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: nothing is left in its place."""
    make(tmp_path / "base", "mistral")
    model = models.load(tmp_path / "base")
    model.add_adapter(2, base=str(tmp_path / "base"))
    model.save_adapter(tmp_path / "adapter")
    merged = StoredModel.merged

    def negated(self: Any, name: str, *given: Any, **options: Any) -> Any:
        weight = merged(self, name, *given, **options)
        return -weight if name.endswith(spoiled) else weight

    monkeypatch.setattr(StoredModel, "merged", negated)
    with pytest.raises(ConfigError, match="the outputs of the written model differ from those of"):
        models.merge(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "base"]
    monkeypatch.undo()
    models.merge(tmp_path / "adapter", tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("share", [0.89, 0.9, 0.91])
def test_a_merge_warns_if_less_than_nine_tenths_are_kept(share: float) -> None:
    kept = Kept({"w": (2 * share, 2.0)})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kept.warn("merge", "q4_0", "a cure")
    expected = "merge: rounding preserves 89.0 % of the LoRA update"
    assert [str(each.message).startswith(expected) for each in seen] == [True] * (share < 0.9)
