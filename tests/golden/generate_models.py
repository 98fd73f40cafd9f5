"""Make the golden models of five more families: ``python -m tests.golden.generate_models``.

Needs torch and transformers (versions.json names the ones used).  References are computed in
float32 from weights rounded to bfloat16; each folder stays below 150 KB.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..models.peers import CONFIGS, SIZES
from .golden import SAMPLE_STRIDE

FAMILIES = ("qwen2 window", "gemma", "gemma3", "phi3 longrope", "olmo2")
FULL_GRADIENT = 256  # elements; of larger tensors every SAMPLE_STRIDE-th is kept
NEW, TOKENS, PROMPT, PAD = 16, 20, 8, 5


def generate(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, model.safetensors, golden.npz and facts.json."""
    import torch
    import transformers

    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**SIZES | config)
    model = transformers.AutoModelForCausalLM.from_config(
        known, attn_implementation="eager", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases begin as ones and zeros: too easy
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    rng = np.random.default_rng(0)
    ids = rng.integers(3, known.vocab_size, (2, TOKENS))
    ids[1, :PAD] = 0
    mask = np.ones_like(ids)
    mask[1, :PAD] = 0
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
    labels = np.where(mask == 1, ids, -100)
    labels[0, 7:10] = labels[1, PAD] = -100
    out = model(
        input_ids=torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
        labels=torch.tensor(labels),
        use_cache=False,
    )
    out.loss.backward()
    logits = out.logits.detach().numpy().copy()
    logits[mask == 0] = np.nan
    data: dict[str, Any] = {
        "input_ids": ids.astype(np.int32),
        "attention_mask": mask.astype(np.int8),
        "position_ids": positions.astype(np.int32),
        "labels": labels.astype(np.int32),
        "logits": logits.astype(np.float32),
        "loss": np.float64(out.loss.item()),
    }
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        data[f"gradnorm/{name}"] = np.float64(np.linalg.norm(gradient))
        if gradient.size <= FULL_GRADIENT:
            data[f"grad/{name}"] = gradient.astype(np.float32)
        else:
            data[f"gradsample/{name}"] = gradient.ravel()[::SAMPLE_STRIDE].astype(np.float32)
    prompts = np.stack([ids[0, :PROMPT], np.roll(ids[0, PROMPT : 2 * PROMPT], PAD)])
    shown = np.ones_like(prompts)
    shown[1, :PAD] = prompts[1, :PAD] = 0
    margin = np.inf
    for case, rows in (("generate_single", slice(0, 1)), ("generate_padded", slice(0, 2))):
        made = model.generate(
            torch.tensor(prompts[rows]),
            attention_mask=torch.tensor(shown[rows]),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for scores in made.scores:
            best = scores.topk(2).values
            margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        data[f"{case}/prompt"] = prompts[rows].astype(np.int32)
        data[f"{case}/mask"] = shown[rows].astype(np.int8)
        data[f"{case}/tokens"] = made.sequences[:, PROMPT:].numpy().astype(np.int32)
    np.savez_compressed(folder / "golden.npz", **data)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": out.loss.item(),
        "smallest_greedy_margin": margin,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    for label in FAMILIES:
        name = label.replace(" ", "_")
        generate(Path(__file__).parent / "models" / name, CONFIGS[label])
