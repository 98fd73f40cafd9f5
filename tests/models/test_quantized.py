"""Models of quantized weights: from dense folders, from bitsandbytes', on the tape and back."""

import contextlib
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError, GradientError, RangeError
from unsloth_cupy.models.quantizer import CHOICES, KINDS, LEAST
from unsloth_cupy.ops.quantized.weight import Quantized

from ..conftest import FOLDER
from ..harness.tracked import tracked

QUANT = FOLDER / "quant"
FAMILIES = ["llama", "qwen3", "gemma2", "phi3_longrope", "olmo2"]
EVERY = pytest.mark.parametrize("kind", CHOICES)


def small(**changes: object) -> models.Transformer:
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return models.create(config, seed=0)


TOKENS = np.random.default_rng(0).integers(3, 300, (2, 11))


def quantized_of(model: models.Transformer) -> dict[str, Quantized]:
    return {n: value for n, value in model.parameters.items() if isinstance(value, Quantized)}


def dense_twin(model: models.Transformer, dtype: object = None) -> models.Transformer:
    """Return the same model with its weights dequantized."""
    kept = {
        n: v.dequantize(dtype) if isinstance(v, Quantized) else v
        for n, v in model.parameters.items()
    }
    twin = models.Transformer(model.config, kept, model.texts)
    twin.adapter = model.adapter
    return twin


@pytest.mark.parametrize(
    "name", [path.parent.name for path in tracked("tests/golden/quant/*_*/config.json")]
)
def test_folder_of_bitsandbytes(name: str, tmp_path: Path) -> None:
    """Of 4 bits, what it rounds to bfloat16 when it writes is lost; logits are of before that.

    Of 8 bits, it rounds rows of x too, here they meet the weight as they are.
    """
    model = models.load(QUANT / name)
    with np.load(QUANT / name / "golden.npz") as golden:
        tokens, expected, greedy = (golden[key] for key in ("tokens", "logits", "greedy"))
    logits = model.logits(tokens)
    rounding = 2.0**-6 if name.endswith("int8") else 2 * 2.0**-8
    assert np.abs(logits - expected).max() <= rounding * np.abs(expected).max()
    actual = model.generate(greedy[:, :9], max_new_tokens=8, min_new_tokens=8)
    assert np.array_equal(actual, greedy)
    model.save(tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert np.array_equal(again.logits(tokens), logits)
    facts = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    before = json.loads((QUANT / name / "config.json").read_text())["quantization_config"]
    same = ("quant_method", "load_in_4bit", "load_in_8bit", "llm_int8_threshold")
    if not name.endswith("int8"):
        same = (*same[:3], "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    assert {key: facts[key] for key in same} == {key: before[key] for key in same}


@EVERY
@pytest.mark.parametrize("family", FAMILIES)
def test_load_quantizes(family: str, kind: str, tmp_path: Path) -> None:
    """Equal bits by load, by quantize and from what was saved; equal to the dequantized model."""
    folder = FOLDER / "models" / family
    loaded, made = models.load(folder, quantize=kind), models.load(folder)
    report = models.quantize(made, kind)
    assert quantized_of(loaded).keys() == {row.name for row in report.rows if not row.reason}
    assert len(quantized_of(loaded)) > 3
    vocab = loaded.config.vocab
    tokens = TOKENS % vocab
    logits = loaded.logits(tokens)
    assert np.array_equal(logits, made.logits(tokens))
    twin = dense_twin(loaded).logits(tokens)
    assert np.abs(logits - twin).max() <= 1e-5 * np.abs(twin).max()
    loaded.save(tmp_path / "saved")
    assert np.array_equal(models.load(tmp_path / "saved").logits(tokens), logits)
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]


@EVERY
@pytest.mark.parametrize("dora", [False, True])
def test_gradients_of_adapters(kind: str, dora: bool) -> None:
    model = small()
    models.quantize(model, kind)
    model.add_adapter(4, dora=dora, seed=1)
    rng = np.random.default_rng(2)
    for name, array in model.adapter.parameters.items():
        if "lora_B" in name:
            array[...] = 0.1 * rng.standard_normal(array.shape)
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    expected_loss, expected = dense_twin(model).loss_and_gradients(TOKENS, TOKENS)
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    assert gradients.keys() == expected.keys() == model.adapter.parameters.keys()
    for name, gradient in gradients.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-5 * np.abs(expected[name]).max(), name


def test_it_is_frozen() -> None:
    model = small()
    models.quantize(model, "nf4")
    with pytest.raises(GradientError, match="is quantized and frozen; call add_adapter"):
        model.loss_and_gradients(TOKENS, TOKENS)
    with pytest.raises(GradientError, match="frozen"):
        _ = model.trainable


def test_sixteen_bits() -> None:
    model = small()
    models.quantize(model, "nf4")
    folder_like = dense_twin(model)
    for name, value in model.parameters.items():
        model.parameters[name] = (
            value.computed_in(BFLOAT16) if isinstance(value, Quantized) else value.astype(BFLOAT16)
        )
    logits, expected = model.logits(TOKENS), folder_like.logits(TOKENS)
    assert logits.dtype == BFLOAT16
    assert np.abs(logits.astype(np.float32) - expected).max() <= 2.0**-5 * np.abs(expected).max()


@EVERY
def test_merging(kind: str, tmp_path: Path) -> None:
    model = small()
    models.quantize(model, kind)
    model.add_adapter(4, targets=["q_proj", "down_proj"], seed=1)
    for name, array in model.adapter.parameters.items():
        if "lora_B" in name:
            array[...] = 0.1
    logits = model.logits(TOKENS)
    again = models.Transformer(model.config, dict(model.parameters), model.texts)
    again.adapter = model.adapter
    model.merge_adapter()
    assert not quantized_of(model)
    assert np.abs(model.logits(TOKENS) - logits).max() <= 1e-5 * np.abs(logits).max()
    model.save(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    before = quantized_of(again)
    with pytest.warns(match="59.4 %") if kind == "ternary" else contextlib.nullcontext():
        again.merge_adapter(requantize=True)
    after = quantized_of(again)
    assert before.keys() == after.keys()
    for name in after:
        adapted = "q_proj" in name or "down_proj" in name
        assert (after[name] is before[name]) != adapted, name
        if adapted:
            anew = KINDS[kind].make(model.parameters[name])
            assert np.array_equal(after[name].dequantize(), anew.dequantize())


@EVERY
@pytest.mark.parametrize("size", [0.003, 0.5])
def test_what_is_kept_of_a_change(kind: str, size: float) -> None:
    """A change by 0.3 % of the weights is rounded away; by half of them, only in ternary ones."""
    model = small(head_dim=32)
    models.quantize(model, kind)
    model.add_adapter(4, targets=["q_proj", "down_proj"], seed=1)
    before = {name: each.dequantize() for name, each in quantized_of(model).items()}
    draw, changes = np.random.default_rng(2), {}
    for module in model.adapter.scales:
        name, prefix = f"{module}.weight", f"base_model.model.{module}.lora_"
        a, b = (model.adapter.parameters[f"{prefix}{each}.weight"] for each in "AB")
        b[...] = draw.standard_normal(b.shape)
        b *= size * np.linalg.norm(before[name]) / np.linalg.norm(b @ a)
        changes[name] = model.adapter.scales[module] * (b.astype("f8") @ a)
    warned = size < 0.1 or kind == "ternary"
    with pytest.warns(match="is lost by rounding to") if warned else contextlib.nullcontext():
        kept = model.merge_adapter(requantize=True)
    moved = {
        name: model.parameters[name].dequantize().astype("f8") - before[name] for name in changes
    }
    parts = {name: (moved[name] * change).sum() for name, change in changes.items()}
    sizes = {name: (change**2).sum() for name, change in changes.items()}
    assert kept.layers == pytest.approx({n: parts[n] / sizes[n] for n in parts}, rel=1e-4, abs=2e-5)
    share = sum(parts.values()) / sum(sizes.values())
    assert kept.share == pytest.approx(share, rel=1e-4, abs=2e-5)
    assert f"preserves {100 * share:.1f} % of the LoRA update (worst: model.layers." in str(kept)


def test_what_sixteen_bits_keep(tmp_path: Path) -> None:
    """A change of much less than the 8 bits of a bfloat16 is rounded away, too."""
    model = small(head_dim=32)
    model.save(tmp_path / "base")
    model = models.load(tmp_path / "base", dtype="bfloat16")
    model.save(tmp_path / "bf16")
    model = models.load(tmp_path / "bf16")
    model.add_adapter(4, seed=1)
    for name, each in model.trainable.items():
        if "lora_B" in name:
            each[...] = 1e-4 * np.random.default_rng(1).standard_normal(each.shape)
    model.save_adapter(tmp_path / "adapter")
    report = models.merge(tmp_path / "adapter", tmp_path / "out")
    assert report.notes[-1].endswith("; bfloat16 loses the rest, dtype='float32' preserves it")
    assert 0 < report.kept.share < 0.9
    assert f"merged ({report.kept.share:.1%} of the update)" in str(report)
    with pytest.warns(match=r"lost by rounding to bfloat16: load\(folder, dtype='float32'\)"):
        kept = model.merge_adapter()
    assert kept.layers == pytest.approx(report.kept.layers)
    wide = models.merge(tmp_path / "adapter", tmp_path / "wide", dtype="float32")
    assert (wide.kept.share, wide.kept.layers, len(wide.notes)) == (1.0, {}, 1)


@EVERY
def test_report(kind: str) -> None:
    model = small()
    dense = {name: array.copy() for name, array in model.parameters.items()}
    report = models.quantize(model, kind, skip=("embed", "norm", "lm_head", "o_proj"), least=4096)
    by_name = {row.name: row for row in report.rows}
    assert by_name.keys() == dense.keys()
    for name, row in by_name.items():
        value = model.parameters[name]
        assert row.before == dense[name].nbytes
        assert row.after == value.nbytes
        small_one = dense[name].size < 4096 or dense[name].ndim == 1
        left = small_one or any(word in name for word in ("embed", "lm_head", "o_proj"))
        assert bool(row.reason) == left == (value is not None and not isinstance(value, Quantized))
        if not left:
            lost = np.linalg.norm(value.dequantize() - dense[name]) / np.linalg.norm(dense[name])
            assert abs(row.error - lost) <= 1e-5
            assert row.sparsity == (value.dequantize() == 0).mean()
    assert report.before == sum(array.nbytes for array in dense.values())
    assert report.after == sum(value.nbytes for value in model.parameters.values())
    text = str(report)
    assert "layers.0.mlp.up_proj.weight" in text
    assert text.splitlines()[-1].startswith("all ")


def test_the_peak_of_loading_is_one_tensor_beyond(tmp_path: Path) -> None:
    """Of a checkpoint in two files, whose dense weights never lie side by side."""
    model = small(hidden_size=256, intermediate_size=768, num_hidden_layers=6, vocab_size=64)
    names = [*model.parameters]
    model.layout = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    model.save(tmp_path / "dense")
    models.load(tmp_path / "dense", quantize="nf4")
    tracemalloc.start()
    loaded = models.load(tmp_path / "dense", quantize="nf4")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(array.nbytes for array in model.parameters.values())
    assert held < sum(array.nbytes for array in model.parameters.values()) / 3
    assert peak - held < 2.6 * largest  # as stored, and what its codes take on the way
    assert len(quantized_of(loaded)) == 42


def test_wrong_calls(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ConfigError, match="kind 'int3' is unknown; choose from nf4"):
        models.quantize(model, "int3")
    with pytest.raises(ConfigError, match="skip='norm'"):
        models.quantize(model, "nf4", skip="norm")
    with pytest.raises(ConfigError, match="least=-1"):
        models.quantize(model, "nf4", least=-1)
    with pytest.raises(ConfigError, match="kind 4 is unknown"):
        models.load(QUANT / "llama_nf4", quantize=4)
    with pytest.raises(ConfigError, match="quantized already"):
        models.load(QUANT / "llama_nf4", quantize="nf4")
    broken = model.parameters["model.layers.1.mlp.up_proj.weight"]
    broken[3, 5] = np.nan
    with pytest.raises(RangeError, match=r"layers\.1\.mlp\.up_proj\.weight: .* w\[3, 5\] is nan"):
        models.quantize(model, "nf4")
    with pytest.raises(ConfigError, match="quantized already"):
        models.quantize(model, "nf4")
    assert LEAST == 1024


def damaged(tmp_path: Path, change: object) -> Path:
    """Return a copy of a folder in 4 bits whose tensors were changed."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "damaged"
    shutil.copytree(QUANT / "qwen3_nf4_double", folder)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o755)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


LAYER = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAYER + "weight.absmax"), "weight.absmax is missing"),
        (lambda t: t.pop(LAYER + "weight"), "up_proj.weight' is missing"),
        (lambda t: t.update({LAYER + "weight": t[LAYER + "weight"][:-1]}), "weight is"),
        (lambda t: t[LAYER + "weight.nested_absmax"].fill(np.nan), "not finite"),
        (
            lambda t: t.update({LAYER + "weight.strange": t[LAYER + "weight"]}),
            "strange' is not part",
        ),
        (
            lambda t: t.update({LAYER + "weight": np.zeros((4, 4), np.int8)}),
            r"weight is \(4, 4\) int8",
        ),
    ],
)
def test_damaged_folders(tmp_path: Path, change: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        models.load(damaged(tmp_path, change))


def test_another_shape_than_the_config_says(tmp_path: Path) -> None:
    folder = damaged(tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json implies"):
        models.load(folder)
