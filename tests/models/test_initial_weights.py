"""Adapters that begin with a part of the base, which peft takes out of it: PiSSA and OLoRA."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError

from .exported import make

TOKENS = np.arange(3, 15)[None]


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with:UserWarning")  # in peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
@pytest.mark.parametrize(
    ("kind", "options"),
    [("pissa", {}), ("olora", {"use_rslora": True}), ("pissa", {"use_dora": True})],
    ids=str,
)
def test_parts_of_the_base_that_an_adapter_began_with(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """peft takes them out of the base again whenever it loads the folder."""
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    make(tmp_path / "base", "llama")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, init_lora_weights=kind, target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.mlp.down_proj": 2}, alpha_pattern={"q_proj": 7},
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config)
    draw = np.random.default_rng(1)
    with torch.no_grad():
        for name, array in theirs.named_parameters():
            if "lora_" in name:
                array.add_(torch.from_numpy(draw.normal(0, 0.1, array.shape)).float())
    theirs.save_pretrained(tmp_path / "adapter")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    with torch.no_grad():
        expected = again(torch.from_numpy(TOKENS)).logits.numpy()
    model = models.load(tmp_path / "base", lora=tmp_path / "adapter")
    np.testing.assert_allclose(
        model.logits(TOKENS), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )
    models.merge(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    merged = models.load(tmp_path / "merged").logits(TOKENS)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    model.save_adapter(tmp_path / "plain")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    back = peft.PeftModel.from_pretrained(back, tmp_path / "plain")
    with torch.no_grad():
        actual = back(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    with pytest.raises(ConfigError, match=rf"{kind} takes a part of .*: its weight is quantized"):
        models.load(tmp_path / "base", lora=tmp_path / "adapter", quantize="nf4")
