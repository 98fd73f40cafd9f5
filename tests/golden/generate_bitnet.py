"""Make two golden models of BitNet, and logits: ``python -m tests.golden.generate_bitnet``.

Needs torch, transformers and accelerate.  The layers of ``models/bitnet`` are rounded by absmean
and packed, as in the folders that Microsoft publishes; transformers loads that and computes in
float32.  The second keeps them dense, for transformers to round at every call, and has gradients.
``bitlinear.npz`` has logits of the first with layers of BitLinear, which divide by their scales.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
NEW, PROMPT, TOKENS = 8, 9, 17
TOLD = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


LEARNED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.norm")


def generate(folder: Path, mode: str) -> None:
    """Write config.json, model.safetensors and golden.npz."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.integrations.bitnet import pack_weights

    source = FOLDER / "models" / "bitnet"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if mode == "online" or not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        scale = value.float().abs().mean().clamp(min=1e-5)
        codes = (value.float() / scale).round().clamp(-1, 1)
        tensors[name] = pack_weights(codes)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16).reshape(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {
        "quantization_config": TOLD | {"quantization_mode": mode}
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.nn.Module.float(model).eval()  # transformers lets no quantized model be cast
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config["vocab_size"], (2, TOKENS))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
        greedy = model.generate(
            torch.tensor(tokens[:, :PROMPT]),
            attention_mask=torch.ones((2, PROMPT), dtype=torch.long),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        ).numpy()
    more = {}
    if mode == "online":
        labels = torch.tensor(tokens)
        loss = model(labels, labels=labels).loss
        loss.backward()
        gradients = {name: model.get_submodule(name).weight.grad.numpy() for name in LEARNED}
        more = {f"grad/{name}.weight": gradient for name, gradient in gradients.items()}
        more["loss"] = np.float64(loss.item())
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.astype(np.int32),
        logits=logits.astype(np.float32),
        greedy=greedy.astype(np.int32),
        **more,
    )


def divided(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a packed model with scales that divide."""
    return {
        name: (1 / value.astype(np.float32)).astype(value.dtype) if "_scale" in name else value
        for name, value in tensors.items()
    }


def generate_bitlinear(folder: Path) -> None:
    """Write bitlinear.npz: logits of layers that divide, in float64."""
    import ml_dtypes  # noqa: F401  # NumPy knows bfloat16
    import torch
    import transformers
    from safetensors.numpy import load_file
    from transformers.integrations import bitnet

    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.dtype = torch.float64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    bitnet.replace_with_bitnet_linear(model, ["lm_head"])
    tensors = {
        name: torch.tensor(value if value.dtype == np.uint8 else value.astype(np.float64))
        for name, value in divided(load_file(folder / "model.safetensors")).items()
    }
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    np.savez_compressed(folder / "bitlinear.npz", tokens=tokens.astype(np.int32), logits=logits)


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    generate(FOLDER / "quant" / "bitnet", "offline")
    generate(FOLDER / "quant" / "bitnet-online", "online")
    generate_bitlinear(FOLDER / "quant" / "bitnet")
