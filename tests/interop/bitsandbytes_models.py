"""Tiny models of transformers with layers of bitsandbytes."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from .families import model_of

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}  # blocks of 64 fill rows
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture
def one_layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Disable bitsandbytes' repacking of weights for some CPUs; return the library."""
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    for module in (library.functional, library.nn.modules):
        monkeypatch.setattr(module, "has_avx512bf16", lambda: False)
    return library


def quantized_model(folder: Any, kind: str, family: str = "llama", **options: Any) -> Any:
    """Write a model to a folder, and return it as transformers loads and quantizes it."""
    dtype = options.pop("dtype", torch.float32)
    config = KINDS[kind] | options
    if "load_in_4bit" in config:
        config.setdefault("bnb_4bit_compute_dtype", dtype)
    if not (folder / "config.json").exists():
        model = model_of(family, **SIZES)
        for weight in model.parameters():
            weight.data = (
                weight.data.half().float()
            )  # as bitsandbytes reads what it rounds to 8 bits
        model.save_pretrained(folder)
    settings = BitsAndBytesConfig(**config)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=dtype)
    return model.train()
