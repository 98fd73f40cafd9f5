"""A training step of a transformers model, unpatched and patched.

    cd asv_benchmarks && python -m benchmarks.huggingface [HIDDEN | mixture | images]

prints a table of docs/measurements.md: of a Llama, of a mixture of experts, or of a Qwen2.5-VL with
one image in each row.  Each peak is
measured in a separate process: the resident memory of a step (VmHWM) beyond that of the model, its
gradients and the libraries before it.  Times are CPU time, in one process in which both models take
turns, and in one thread, as CPU time includes threads that wait for each other.  The result is the
median of the ratios of neighbouring steps.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, BATCH, TOKENS, VOCAB, HIDDEN, ROUNDS = 4, 2, 512, 32_768, 512, 5
MIB = 2**20
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
KINDS = ("plain", "patched")
ALL = "norm,mlp,embedding,lora,experts,router,rotary,qk_norm,attention,residual,loss"
MIXTURE, IMAGES = 0, -1  # in place of a hidden size
NAMES = {"mixture": MIXTURE, "images": IMAGES}
IMAGE, SIDE = VOCAB - 1, 16  # the token of images; patches along each side of an image
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


def model_of(parts: str, hidden: int) -> Any:
    """Return a model with random parameters and these parts patched."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
    except ImportError as error:
        raise NotImplementedError("needs the extra `peers` (transformers)") from error
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if hidden == MIXTURE:
        config = Qwen3MoeConfig(
            vocab_size=VOCAB // 16, hidden_size=HIDDEN, num_hidden_layers=2, head_dim=64,
            norm_topk_prob=True, **sizes, **EXPERTS,
        )  # fmt: skip
    elif hidden == IMAGES:
        return patched(of_images(sizes), parts)
    else:
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
            num_hidden_layers=LAYERS, **sizes,
        )  # fmt: skip
    return patched(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), parts)


def of_images(sizes: dict[str, int]) -> Any:
    """Return a Qwen2.5-VL of 4 layers, with a tower of 4 blocks."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    text = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN * 11 // 4,
        "num_hidden_layers": LAYERS, "rope_parameters": rope, **sizes,
    }  # fmt: skip
    tower = {
        "depth": 4, "hidden_size": 256, "intermediate_size": 704, "num_heads": 4,
        "out_hidden_size": HIDDEN, "fullatt_block_indexes": [3],
    }  # fmt: skip
    names = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE - 1}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **names)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")


def patched(model: Any, parts: str) -> Any:
    """Return a model in training, with these parts patched."""
    model.train()
    if parts:
        from unsloth_cupy.interop.huggingface import patch

        patch(model, parts=parts.split(","))
    return model


def step(model: Any, tokens: int) -> None:
    """Compute a loss and add its gradients to the existing ones."""
    import torch

    text = model.config.get_text_config()
    ids = torch.arange(BATCH * tokens).view(BATCH, tokens) * 7 % (text.vocab_size - 2)
    more = {}
    if text is not model.config:
        side = SIDE if tokens > SIDE * SIDE else 2  # patches of 14 x 14; 4 patches are a token
        ids[:, : side * side // 4] = IMAGE
        pixels = torch.linspace(-1, 1, BATCH * side * side * 1176).view(-1, 1176)
        more = {
            "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]] * BATCH),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }  # fmt: skip
    model(input_ids=ids, labels=ids, use_cache=False, **more).loss.backward()


class PatchedStep:
    """Time of a training step."""

    params = KINDS
    param_names = ("model",)
    version = "1"

    def setup(self, kind: str) -> None:
        self.model = model_of(ALL if kind == "patched" else "", 64)

    def time_step(self, kind: str) -> None:
        step(self.model, TOKENS)


def resident(key: str) -> int:
    """Return a memory figure of this process from /proc/self/status, in bytes."""
    match = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def peak(parts: str, hidden: int) -> int:
    """Return the peak memory of a step minus the memory before it, in bytes."""
    model = model_of(parts, hidden)
    step(model, 8)  # allocates gradients, loads kernels and starts threads
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step(model, TOKENS)
    return resident("VmHWM") - held


def turns(parts: str, hidden: int) -> float:
    """Return the median ratio of the times of a patched and a plain step, in alternating order."""
    plain, patched, ratios = model_of("", hidden), model_of(parts, hidden), []
    for turn in range(ROUNDS):
        times = {}
        for model in (plain, patched) if turn % 2 else (patched, plain):
            began = time.process_time()
            step(model, TOKENS)
            times[model] = time.process_time() - began
        ratios.append(times[patched] / times[plain])
    return statistics.median(ratios[1:])


def main(hidden: int) -> None:
    """Print the table."""
    rows = {"nothing": "", "loss": "loss", "all": ALL}
    if hidden == MIXTURE:
        rows = {"nothing": "", "experts and router": "experts,router", "all": ALL}
    one_thread, whole = os.environ | dict.fromkeys(THREADS, "1"), None
    print("| patched | a step beside what is held | of unpatched | time |\n|---|---|---|---|")
    for label, parts in rows.items():
        command = [sys.executable, "-m", "benchmarks.huggingface", str(hidden), parts]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
        bytes_, ratio = json.loads(done.stdout.splitlines()[-1])
        whole = whole or bytes_
        share = f"{100 * bytes_ / whole:.0f} %"
        print(f"| {label} | {bytes_ / MIB:.0f} MiB | {share} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else str(HIDDEN)
    size = NAMES[given] if given in NAMES else int(given)
    if len(sys.argv) > 2:
        print(json.dumps([peak(sys.argv[2], size), turns(sys.argv[2], size)]))
    else:
        main(size)
