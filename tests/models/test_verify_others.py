"""Files and folders that other programs write, in their layouts: right ones are not accused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError

from .exported import make
from .peers import CONFIGS

pytest.importorskip("gguf", reason="needs the extra `gguf`")
from .planted import planted
from .test_gguf_mixtures import MIXTURES
from .test_verify import FAMILIES, KEY, PROMPTS, TEMPLATE, chat_folder

# Keys that llama.cpp's converter writes, besides those of an export.
CONVERTER = {
    "general.size_label": "34K",
    "general.basename": "tiny",
    "general.license": "apache-2.0",
    "general.tags": ["text-generation"],
    "general.languages": ["en"],
    "general.base_model.count": 1,
    "general.base_model.0.name": "Tiny",
    "general.sampling.temp": 0.6,
    "ARCH.vocab_size": 97,
    f"{KEY}padding_token_id": 0,
    f"{KEY}add_eos_token": False,
}
# Unsloth runs that converter and a quantizer on a merged folder.
UNSLOTH = CONVERTER | {
    "general.quantized_by": "Unsloth",
    "general.repo_url": "https://huggingface.co/unsloth",
    "quantize.imatrix.file": "imatrix_unsloth.dat",
    "quantize.imatrix.entries_count": 7,
}
WITHOUT = ("general.name", "general.type")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "granite"])
def test_files_of_llama_cpp(family: str, kind: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", FAMILIES[family])
    models.export_gguf(folder, tmp_path / "m.gguf", kind=kind)
    for name, more in (("converter", CONVERTER), ("unsloth", UNSLOTH)):
        keys = {**more, **dict.fromkeys(WITHOUT)}
        file = planted(tmp_path / "m.gguf", tmp_path / f"{name}.gguf", keys)
        result = models.verify(file, folder, prompts=PROMPTS)
        assert result.same, result


def test_a_template_that_unsloth_changed(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", FAMILIES["llama"])
    models.export_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    changes = {"tokenizer.chat_template": TEMPLATE.replace("[{{ m.role }}]", "{{ m.role }}")}
    file = planted(tmp_path / "m.gguf", tmp_path / "f.gguf", UNSLOTH | changes)
    result = models.verify(file, folder, prompts=PROMPTS)
    assert result.stage == "template"
    assert "is not the one of the trained model" in str(result.cause)


def test_vectors_that_are_matrices_with_one_row(tmp_path: Path) -> None:
    """llama.cpp's converter writes the correction of an Ernie router as (1, experts)."""
    make(tmp_path / "m", MIXTURES["ernie4_5-moe"])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    tensors = {f"blk.{n}.exp_probs_b.bias": lambda array: array[None] for n in (1, 2)}
    file = planted(tmp_path / "m.gguf", tmp_path / "f.gguf", tensors=tensors)
    result = models.verify(file, tmp_path / "m", prompts=PROMPTS)
    assert result.exact, result
    tokens = np.array([[3, 5, 7, 9]])
    actual, expected = (models.load(path).logits(tokens) for path in (file, tmp_path / "m"))
    np.testing.assert_array_equal(actual, expected)


def test_a_hybrid_without_experts_has_the_size_of_shared_ones(tmp_path: Path) -> None:
    """llama.cpp's converter writes this key for any Granite hybrid."""
    config = MIXTURES["granitehybrid that rotates"]
    make(tmp_path / "m", config)
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    keys = {"ARCH.expert_shared_feed_forward_length": 40}
    file = planted(tmp_path / "m.gguf", tmp_path / "f.gguf", keys)
    result = models.verify(file, tmp_path / "m", prompts=PROMPTS)
    assert result.same, result


def test_windows_of_the_converter_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """A file of gemma3 has no pattern of windows, so llama.cpp assumes 5 of 6 layers."""
    usual = CONFIGS["gemma3"] | {"query_pre_attn_scalar": 16, "num_hidden_layers": 6}
    usual |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    for layers, same in (
        (usual, True),
        (usual | {"layer_types": usual["layer_types"][::-1]}, False),
    ):
        folder = chat_folder(tmp_path / str(same), layers)
        file = folder.with_suffix(".gguf")
        models.export_gguf(folder, file, kind="f32")
        key = "ARCH.attention.sliding_window_pattern"
        file = planted(file, tmp_path / f"{same}.f.gguf", {key: None})
        assert models.verify(file, folder, prompts=PROMPTS).same == same


# ---- mlx-lm -------------------------------------------------------------------------------------
def test_a_file_of_mlx(tmp_path: Path) -> None:
    """mlx-lm writes no template, and equal scores in place of merges."""
    folder = chat_folder(tmp_path / "m", FAMILIES["llama"])
    models.export_gguf(folder, tmp_path / "m.gguf", kind="f16")
    keys: dict[str, Any] = {
        "general.name": "llama",
        "general.type": None,
        "tokenizer.chat_template": None,
    }
    file = planted(tmp_path / "m.gguf", tmp_path / "f.gguf", keys)
    result = models.verify(file, folder, prompts=PROMPTS)
    assert (result.stage, result.same) == ("template", False)
    assert "no chat template, so llama.cpp uses ChatML" in str(result.cause)
    shutil.copytree(folder, tmp_path / "base")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    result = models.verify(file, tmp_path / "base", prompts=PROMPTS)
    assert result.same, result


def of_mlx(folder: Path, out: Path, bits: int, **config: Any) -> Path:
    """Write a folder as mlx-lm quantizes one: codes in 32-bit integers, scales and biases."""
    shutil.copytree(folder, out)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim < 2:
            tensors[name] = weight
            continue
        groups = weight.reshape(len(weight), -1, 64)
        least = groups.min(axis=-1, keepdims=True)
        scale = (groups.max(axis=-1, keepdims=True) - least) / ((1 << bits) - 1)
        codes = np.rint((groups - least) / scale).astype(np.uint32)
        codes = codes.reshape(len(weight), -1, 32 // bits) << np.arange(0, 32, bits, np.uint32)
        tensors[name] = np.bitwise_or.reduce(codes, axis=-1)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.scales"] = scale[..., 0].astype(np.float16)
        tensors[f"{stem}.biases"] = least[..., 0].astype(np.float16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "mlx"})
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | config))
    return out


@pytest.mark.parametrize("both", [False, True])
def test_folders_that_mlx_quantized_are_refused(both: bool, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", FAMILIES["wide"])
    facts = {"group_size": 64, "bits": 4}
    config = {"quantization": facts, **({"quantization_config": facts} if both else {})}
    out = of_mlx(folder, tmp_path / "x", 4, **config)
    for target, against in ((out, folder), (folder, out)):
        with pytest.raises(ConfigError, match=r"mlx-lm .* 4 bits.*mlx_lm\.convert --dequantize"):
            models.verify(target, against)


def test_a_folder_that_mlx_fused_is_read(tmp_path: Path) -> None:
    """Plain weights have the names of Hugging Face."""
    folder = chat_folder(tmp_path / "m", FAMILIES["llama"])
    shutil.copytree(folder, tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "x" / "model.safetensors", metadata={"format": "mlx"})
    assert models.verify(tmp_path / "x", folder, prompts=PROMPTS).exact
