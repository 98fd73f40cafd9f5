"""Adapters of mlx-lm: y = x W + scale (x a) b, a (inputs, rank), b (rank, outputs)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, load, merge

from .peers import SIZES

TOKENS = np.random.default_rng(0).integers(3, 90, (2, 9))
LAYERS = ("model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj")
PARAMETERS = {"rank": 3, "scale": 1.7, "dropout": 0.0}
CONFIG = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": PARAMETERS, "lr": 1e-5}


def written(
    root: Path, kind: str, tied: bool = False, **changes: Any
) -> tuple[Path, dict[str, Any]]:
    """Write a base and an adapter; return its folder and the sums of weights."""
    model = create(SIZES | {"model_type": "llama", "tie_word_embeddings": tied}, seed=0)
    model.save(root / "base")
    rng, tensors, sums = np.random.default_rng(1), {}, dict(model.parameters)
    names = (*LAYERS, "model.embed_tokens") if kind == "table" else LAYERS
    for name in names:
        weight = model.parameters[f"{name}.weight"]
        rows, columns = weight.shape[::-1] if name in LAYERS else weight.shape
        a, b = (rng.standard_normal(shape, np.float32) / 4 for shape in ((rows, 3), (3, columns)))
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        change = np.float32(1.7) * (a @ b)
        total = weight + (change.T if name in LAYERS else change)
        if kind == "dora":
            tensors[f"{name}.m"] = m = 1 + rng.random(columns, np.float32)
            total = total * (m / np.linalg.norm(total, axis=1))[:, None]
        sums[f"{name}.weight"] = total
    (root / "adapter").mkdir()
    save_file(tensors, root / "adapter" / "adapters.safetensors")
    values = CONFIG | {"fine_tune_type": "dora" if kind == "dora" else "lora"} | changes
    values |= {"model": str(root / "base")}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(values))
    return root / "adapter", sums


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "table"])
def test_adapters_of_mlx_are_read(kind: str, tied: bool, tmp_path: Path) -> None:
    adapter, sums = written(tmp_path, kind, tied)
    expected = load(tmp_path / "base")
    expected.parameters |= sums
    model = load(adapter)
    model.save_adapter(tmp_path / "peft")
    merge(adapter, tmp_path / "merged")
    for each in (model, load(tmp_path / "peft"), load(tmp_path / "merged")):
        actual = each.logits(TOKENS)
        np.testing.assert_allclose(actual, expected.logits(TOKENS), atol=1e-4)


def test_a_folder_of_peft_is_one_beside_a_file_of_mlx(tmp_path: Path) -> None:
    adapter, _ = written(tmp_path, "lora")
    model = load(tmp_path / "base")
    model.add_adapter(2, targets=["v_proj"])
    model.save_adapter(tmp_path / "peft")
    (adapter / "adapters.safetensors").rename(tmp_path / "peft" / "adapters.safetensors")
    assert load(tmp_path / "peft").adapter.scales.keys() == model.adapter.scales.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type of mlx-lm is 'full'; .* mlx_lm.fuse"),
        ({"num_layers": 4}, "num_layers of mlx-lm is 4, and the model has 3; pass the model"),
        ({"lora_parameters": {"rank": 3, "alpha": 6}}, "rank=3 and scale=None; they must be"),
        ({"lora_parameters": {"rank": "3", "scale": 2.0}}, "rank='3' and scale=2.0; they must"),
        ({"lora_parameters": {"rank": 5, "scale": 2.0}}, r"is \(3, 32\); it must be \(5, 32\)"),
        ({"lora_parameters": PARAMETERS | {"dropout": 2}}, "lora_dropout is 2; it must be in"),
    ],
)
def test_other_adapters_of_mlx_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    adapter, _ = written(tmp_path, "lora", **changes)
    with pytest.raises(ConfigError, match=message):
        load(adapter)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", (2, 3, 4), r"\(2, 3, 4\) is not of a ma"),
        ("model.layers.0.input_layernorm.weight", (32,), "is not of a matrix with LoRA or DoRA"),
        ("model.layers.0.mlp.pooler.lora_a", (32, 3), "does not belong to a linear layer"),
    ],
)
def test_other_tensors_of_mlx_are_named(
    name: str, shape: Any, message: str, tmp_path: Path
) -> None:
    adapter, _ = written(tmp_path, "lora")
    save_file({name: np.ones(shape, np.float32)}, adapter / "adapters.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(adapter)
