"""Folders of BitNet whose layers are packed: read, generated from, and written back."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import Ternary, models
from unsloth_cupy.errors import ConfigError

from ..conftest import FOLDER
from ..golden.generate_bitnet import divided

PACKED, ONLINE = FOLDER / "quant" / "bitnet", FOLDER / "quant" / "bitnet-online"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKED, tmp_path / "packed"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equals_transformers(dtype: str) -> None:
    """A row of x that lies at a tie may be rounded to another integer, which float32 lets happen.

    That moves the logits of one token, and of those that see it, by about a hundredth.
    """
    model = models.load(PACKED, dtype=dtype)
    layers = [v for v in model.parameters.values() if isinstance(v, Ternary)]
    assert len(layers) == 2 * 7
    assert {layer.activations for layer in layers} == {"int8"}
    with np.load(PACKED / "golden.npz") as golden:
        tokens, expected, greedy = (golden[key] for key in ("tokens", "logits", "greedy"))
    off = np.abs(model.logits(tokens) - expected).max(axis=-1) / np.abs(expected).max()
    assert (off < 1e-5).mean() > 0.5
    assert off.max() < (0.05 if dtype == "float32" else 1e-5)
    actual = model.generate(greedy[:, :9], max_new_tokens=8, min_new_tokens=8)
    assert np.array_equal(actual, greedy)


def test_is_written_as_it_was_read(tmp_path: Path) -> None:
    models.load(PACKED).save(tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (PACKED, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype, name
        assert array.tobytes() == after[name].tobytes(), name
    settings = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert (
        settings.items()
        >= json.loads((PACKED / "config.json").read_text())["quantization_config"].items()
    )
    assert settings["modules_to_not_convert"] is None


@pytest.mark.parametrize("told", [{"linear_class": "bitlinear"}, {}], ids=["told", "by default"])
def test_scales_of_bitlinear_divide(folder: Path, tmp_path: Path, told: dict[str, str]) -> None:
    """Logits are those of transformers' layers, and files are written as they were read."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", **told}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = divided(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    models.load(folder).save(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert {n: a.tobytes() for n, a in again.items()} == {
        n: a.tobytes() for n, a in tensors.items()
    }
    facts = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert facts["linear_class"] == "bitlinear"

    with np.load(PACKED / "bitlinear.npz") as golden:
        tokens, expected = golden["tokens"], golden["logits"]
    actual = models.load(folder, dtype="float64").logits(tokens)
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_adapters_learn_on_it() -> None:
    """Gradients pass straight through the rounding of activations."""
    model = models.load(PACKED, dtype="float32")
    model.add_adapter(2, seed=0)
    tokens = np.random.default_rng(0).integers(3, 256, (2, 9))
    losses = []
    for _ in range(8):
        loss, gradients = model.loss_and_gradients(tokens, tokens)
        losses.append(float(loss))
        for name, array in model.adapter.parameters.items():
            array[...] = array - 0.05 * gradients[name]
    assert losses[-1] < losses[0] - 0.05


def test_layers_that_are_rounded_at_every_call(tmp_path: Path) -> None:
    """Logits, tokens, loss and gradients are those of transformers; the weights stay dense."""
    model = models.load(ONLINE, dtype="float64")
    with np.load(ONLINE / "golden.npz") as golden:
        data = dict(golden)
    expected, greedy, tokens = data["logits"], data["greedy"], data["tokens"]
    assert np.abs(model.logits(tokens) - expected).max() <= 1e-5 * np.abs(expected).max()
    actual = model.generate(greedy[:, :9], max_new_tokens=8, min_new_tokens=8)
    assert np.array_equal(actual, greedy)
    loss, gradients = model.loss_and_gradients(tokens, tokens)
    assert abs(loss - data["loss"]) <= 1e-5 * loss
    named = {key.removeprefix("grad/"): a for key, a in data.items() if key.startswith("grad/")}
    assert len(named) == 3
    for name, gradient in named.items():
        assert np.abs(gradients[name] - gradient).max() <= 1e-4 * np.abs(gradient).max(), name
    stored = models.load(ONLINE)
    stored.save(tmp_path / "again")
    settings = [json.loads((f / "config.json").read_text()) for f in (ONLINE, tmp_path / "again")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    before, after = (load_file(f / "model.safetensors") for f in (ONLINE, tmp_path / "again"))
    assert before.keys() == after.keys()
    with pytest.raises(ConfigError, match="rounded at every call, as in BitNet"):
        stored.add_adapter(2)


def test_wrong_folders(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    for change, words in (
        ({"linear_class": "linear"}, "has linear_class=linear; only 'autobitlinear' or 'bitlin"),
        (
            {"linear_class": "bitlinear", "quantization_mode": "online"},
            "has linear_class=bitlinear; only 'autobitlinear' is",
        ),
        ({"quantization_mode": "off"}, "quantization_mode=off; only 'offline' or 'online'"),
        (
            {"quantization_mode": "online", "modules_to_not_convert": ["q_proj"]},
            r"modules_to_not_convert=\['q_proj'\]; only None",
        ),
        ({"use_rms_norm": True}, "use_rms_norm=True"),
    ):
        text = json.dumps(config | {"quantization_config": settings | change})
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            models.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    rows, columns = tensors[name].shape
    for change, words in (
        ({name: tensors[name][:-1].copy()}, f"a quantized \\({rows * 4 - 4}, {columns}\\)"),
        ({name: np.full_like(tensors[name], 255)}, "of bitnet is 3; codes -1, 0 and 1 are"),
        ({f"{name}_scale": np.array([np.nan], np.float32)}, "not finite"),
        ({f"{name}_scale": np.ones(2, np.float32)}, r"scale is \(2,\)"),
    ):
        save_file(tensors | change, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"{name}.*{words}"):
            models.load(folder)
    del tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}.*config.json implies"):
        models.load(folder)
