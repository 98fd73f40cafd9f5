"""Checkpoint folders: what goes out comes in again, and what is broken says so."""

import json
import os
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.errors import ConfigError, DeviceError
from unsloth_cupy.models import create, load
from unsloth_cupy.models.configs.names import TEXT, parameter_name

from ..harness.parity import EPS
from ..harness.tracked import tracked
from .peers import SIZES

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = [path.parent.name for path in tracked("tests/golden/models/*/config.json")]
CONFIG = {**SIZES, "model_type": "llama"}


@pytest.fixture
def folder(tmp_path):
    create(CONFIG, seed=0).save(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", [name for name in FAMILIES if "mxfp4" not in name])
def test_round_trip(family, tmp_path):
    """Bytes stay; a parameter that transformers keeps in float32 has the same values in that."""
    model = load(GOLDEN / family)
    model.save(tmp_path / "copy")
    before, after = GOLDEN / family, tmp_path / "copy"
    old, new = (load_file(f / "model.safetensors") for f in (before, after))
    multimodal = model.config.body != TEXT  # its language model is saved
    if multimodal:
        old = {parameter_name(name): array for name, array in old.items()}
    left_out = re.compile(model.config.left_out or "$")
    assert not any(array.any() for name, array in new.items() if left_out.match(name))
    old, new = ({n: a for n, a in each.items() if not left_out.match(n)} for each in (old, new))
    assert old.keys() == new.keys()
    for name, stored in old.items():
        array = stored.astype(model.config.dtype_of(name, stored.dtype))
        assert array.dtype == new[name].dtype
        assert array.tobytes() == new[name].tobytes(), name
    if not multimodal:
        assert json.loads((after / "config.json").read_text()) == json.loads(
            (before / "config.json").read_text()
        )
        assert sorted(p.name for p in after.iterdir()) == ["config.json", "model.safetensors"]
        assert not [p for p in tmp_path.iterdir() if p.name != "copy"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(folder, tmp_path, dtype):
    model = load(folder, dtype=dtype)
    assert {a.dtype.name for a in model.parameters.values()} == {dtype}
    tokens = np.arange(3, 9)[None]
    logits = model.logits(tokens)
    assert logits.dtype.name == dtype
    exact = load(folder, dtype="float64").logits(tokens)
    # A dozen roundings of numbers as large as the largest, added up along the way.
    assert np.abs(logits.astype(float) - exact).max() <= 16 * EPS[dtype] * np.abs(exact).max()
    loss, gradients = model.loss_and_gradients(tokens, tokens)
    assert np.isfinite(loss)
    assert {a.dtype.name for a in gradients.values()} == {dtype}
    model.save(tmp_path / "again")
    assert load(tmp_path / "again").table.dtype == model.table.dtype


def test_norms_may_stay_float32(folder):
    def change(tensors):
        for name, array in tensors.items():
            if "norm" not in name:
                tensors[name] = array.astype(ml_dtypes.bfloat16)

    rewrite(folder, change)
    tokens = np.arange(3, 9)[None]
    loss, gradients = load(folder).loss_and_gradients(tokens, tokens)
    assert np.isfinite(loss)
    assert gradients["model.norm.weight"].dtype == np.float32


def test_several_files(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for with_index in (True, False):
        parts = tmp_path / f"parts-{with_index}"
        parts.mkdir()
        shutil.copy(folder / "config.json", parts)
        for file, part in halves.items():
            save_file({name: tensors[name] for name in part}, parts / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        if with_index:
            index = {"metadata": {}, "weight_map": weight_map}
            (parts / "model.safetensors.index.json").write_text(json.dumps(index))
        model = load(parts)
        for name, array in model.parameters.items():
            np.testing.assert_array_equal(array, tensors[name])
        model.save(tmp_path / f"again-{with_index}")
        again = tmp_path / f"again-{with_index}"
        saved = json.loads((again / "model.safetensors.index.json").read_text())
        assert saved["weight_map"] == weight_map
        for file in halves:
            for name, array in load_file(again / file).items():
                np.testing.assert_array_equal(array, tensors[name])
    (tmp_path / "parts-True" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path / "parts-True")


def test_a_single_file_goes_before_an_index_of_others(folder):
    transformers = pytest.importorskip("transformers", reason="a peer")
    pytest.importorskip("torch", reason="a peer")
    tensors = load_file(folder / "model.safetensors")
    older = {name: array * 0 for name, array in tensors.items()}
    save_file(older, folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(older, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    stored = peer.state_dict()["model.norm.weight"].float().numpy()
    np.testing.assert_array_equal(model.parameters["model.norm.weight"].astype(np.float32), stored)
    np.testing.assert_array_equal(
        model.parameters["model.norm.weight"], tensors["model.norm.weight"]
    )


def test_index_names_no_file_elsewhere(folder):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)  # the single file goes first, as in transformers
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="file in this folder"):
        load(folder)


def test_save_replaces_and_keeps_other_files(folder):
    (folder / "tokenizer.json").write_text("{}")
    model = load(folder)
    model.parameters["model.norm.weight"][:] = 2
    model.save(folder)
    assert (folder / "tokenizer.json").exists()
    assert (load(folder).parameters["model.norm.weight"] == 2).all()


def test_a_crash_while_saving_leaves_the_old(folder, monkeypatch):
    model = load(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    model.parameters["model.norm.weight"][:] = 2

    def crash(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        model.save(folder)
    with pytest.raises(KeyboardInterrupt):
        model.save(folder.parent / "new")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_save_refuses_to_mix(folder, tmp_path):
    save_file({"x": np.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other\.safetensors"):
        create(CONFIG, seed=0).save(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        create(CONFIG, seed=0).save(tmp_path / "file")


def test_generation_config_names_the_end_tokens(folder):
    settings = {"eos_token_id": [5, 7], "pad_token_id": 9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load(folder)
    assert model.config.end_tokens == (5, 7)
    assert model.config.pad_token == 9
    model.save(folder.parent / "copy")
    assert load(folder.parent / "copy").config == model.config


def test_gemma3_beside_its_vision_tower(tmp_path):
    """The language model of a multimodal folder loads, and is saved as a language model."""
    tensors = load_file(GOLDEN / "gemma3" / "model.safetensors")
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    expected = load(GOLDEN / "gemma3").parameters
    for number, prefix in enumerate(("language_model.model.", "model.language_model.")):
        folder = tmp_path / f"whole{number}"
        folder.mkdir()
        stored = {prefix + n.removeprefix("model."): a for n, a in tensors.items()}
        stored["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
        save_file(stored, folder / "model.safetensors")
        outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
        outer["eos_token_id"] = [2, 5]
        (folder / "config.json").write_text(json.dumps(outer))
        model = load(folder)
        model.save(tmp_path / f"text{number}")
        for again in (model, load(tmp_path / f"text{number}")):
            assert again.config.end_tokens == (2, 5)
            for name, array in again.parameters.items():
                assert array.tobytes() == expected[name].tobytes()


class TestBroken:
    def refuses(self, folder, match):
        with pytest.raises(ConfigError, match=match):
            load(folder)

    def test_no_folder(self, tmp_path):
        self.refuses(tmp_path / "nowhere", "not a folder; pass one that holds config.json")

    def test_a_name_of_the_hub_says_how_to_download(self, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        said = "hf download org/Some-1.5B --local-dir Some-1.5B, then pass Some-1.5B here"
        self.refuses("org/Some-1.5B", said)
        with pytest.raises(ConfigError, match=said):
            load(folder, lora="org/Some-1.5B")
        (tmp_path / "org").mkdir()
        self.refuses("org/Some-1.5B", "not a folder; pass one")
        for name in ("a/b/c", "/org2/x", "~/models/x"):
            self.refuses(name, "not a folder; pass one")

    def test_an_adapter_whose_base_is_elsewhere(self, folder, tmp_path):
        model = load(folder)
        model.add_adapter(2, base="org/base")
        model.save_adapter(tmp_path / "adapter")
        said = "base_model_name_or_path is 'org/base', which is not a folder here"
        self.refuses(tmp_path / "adapter", rf"adapter_config\.json: {said}")
        assert load(folder, lora=tmp_path / "adapter").adapter is not None

    def test_no_config(self, folder):
        (folder / "config.json").unlink()
        self.refuses(folder, r"config\.json is missing; pass a folder that holds one")

    def test_a_folder_of_folders_names_what_is_in_it(self, folder):
        self.refuses(folder.parent, rf"config\.json is missing; pass {folder}$")

    @pytest.mark.parametrize("text", ["{", "[]", "\x00\xff", ""])
    def test_broken_config(self, folder, text):
        (folder / "config.json").write_text(text)
        self.refuses(folder, r"config\.json")

    def test_only_pickles(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        self.refuses(folder, "never read")

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        self.refuses(folder, "no .*safetensors file")

    @pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.5, 0.9999])
    def test_truncated(self, folder, share):
        path = folder / "model.safetensors"
        os.truncate(path, int(path.stat().st_size * share))
        self.refuses(folder, r"model\.safetensors is truncated")

    def test_missing_tensor(self, folder):
        rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        self.refuses(folder, r"model\.layers\.1\.mlp\.up_proj\.weight.* missing in model")

    def test_missing_tensors(self, folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        self.refuses(folder, r"more are missing in model\.safetensors\.index\.json; copy")

    def test_unexpected_tensor(self, folder):
        rewrite(folder, lambda tensors: tensors.update(strange=np.zeros(2)))
        self.refuses(folder, r"model\.safetensors: tensor 'strange'")

    def test_wrong_shape(self, folder):
        rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(31, "f4")}))
        self.refuses(folder, r"'model\.norm\.weight' has shape \(31,\).*\(32,\)")

    def test_wrong_dtype(self, folder):
        rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, "i1")}))
        self.refuses(folder, "is I8")

    def test_mixed_dtypes(self, folder):
        rewrite(
            folder, lambda tensors: tensors.update({"lm_head.weight": np.zeros((97, 32), "f2")})
        )
        self.refuses(folder, "float16 among float32")
        assert load(folder, dtype="float32").table.dtype == np.float32

    def test_options(self, folder):
        with pytest.raises(ConfigError, match="dtype='int8'"):
            load(folder, dtype="int8")
        with pytest.raises(ConfigError, match="device='gpu'"):
            load(folder, device="gpu")
        with pytest.raises(DeviceError, match="device='cuda:97'"):
            load(folder, device="cuda:97")
        with pytest.raises(ConfigError, match="seed"):
            create(CONFIG, seed=-1)
