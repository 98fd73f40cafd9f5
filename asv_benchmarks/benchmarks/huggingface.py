"""A step of training of a model of transformers, as it is and patched.

    cd asv_benchmarks && python -m benchmarks.huggingface [HIDDEN]

prints the table of docs/guide/huggingface.md.  Each peak is that of a process of its own: the
resident memory of a step (VmHWM) beyond what the model, its gradients and the libraries hold before
it.  Times are those of the processor, in one process where both models take turns, and in one
thread, as threads that wait for each other would count; of the ratios of neighbours the median
counts.
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
ALL = "norm,mlp,embedding,lora,rotary,attention,residual,loss"


def model_of(parts: str, hidden: int) -> Any:
    """Return a model with random parameters, whose parts are patched."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError as error:
        raise NotImplementedError("needs the extra `peers` (transformers)") from error
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if parts:
        from unsloth_cupy.interop.huggingface import patch

        patch(model, parts=parts.split(","))
    return model


def step(model: Any, tokens: int) -> None:
    """Compute a loss and its gradients, which are added to those that are there."""
    import torch

    given = torch.arange(BATCH * tokens).view(BATCH, tokens) * 7 % VOCAB
    model(input_ids=given, labels=given, use_cache=False).loss.backward()


class PatchedStep:
    """Time of a step."""

    params = KINDS
    param_names = ("model",)
    version = "1"

    def setup(self, kind: str) -> None:
        self.model = model_of(ALL if kind == "patched" else "", 64)

    def time_step(self, kind: str) -> None:
        step(self.model, TOKENS)


def resident(key: str) -> int:
    """Return bytes of this process, as Linux counts them."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak(parts: str, hidden: int) -> int:
    """Return the bytes that a step takes in this process beside what is held before it."""
    model = model_of(parts, hidden)
    step(model, 8)  # gradients are there, and so are kernels and threads
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    step(model, TOKENS)
    return resident("VmHWM") - held


def turns(parts: str, hidden: int) -> float:
    """Return the median ratio of the times of a patched and a plain step."""
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
    shown = {"nothing": "", "loss": "loss", "all": ALL}
    alone, whole = os.environ | dict.fromkeys(THREADS, "1"), None
    print("| patched | a step beside what is held | of unpatched | time |\n|---|---|---|---|")
    for label, parts in shown.items():
        command = [sys.executable, "-m", "benchmarks.huggingface", str(hidden), parts]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=alone)
        bytes_, ratio = json.loads(done.stdout.splitlines()[-1])
        whole = whole or bytes_
        share = f"{100 * bytes_ / whole:.0f} %"
        print(f"| {label} | {bytes_ / MIB:.0f} MiB | {share} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else HIDDEN
    if len(sys.argv) > 2:
        print(json.dumps([peak(sys.argv[2], size), turns(sys.argv[2], size)]))
    else:
        main(size)
