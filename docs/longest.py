"""Write the table of the longest rows by card and model in docs/guide/tuning.md, from memory plans.

    python docs/longest.py

A row is the longest one whose step is planned to fit the whole memory of a card: one row in a
batch, every block recomputed, its inputs on the host, and kernels as on an H200.
"""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unsloth_cupy import plan_memory  # noqa: E402
from unsloth_cupy.memory.largest import Largest  # noqa: E402
from unsloth_cupy.models.configs.few_layers import extrapolated  # noqa: E402
from unsloth_cupy.models.parse import parse  # noqa: E402
from unsloth_cupy.ops.attention import _hopper  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "tuning.md"
BEGIN, END = "<!-- longest rows: begin -->", "<!-- longest rows: end -->"
CARDS = 16, 24, 48, 80, 141  # GiB
STEP, MOST = 128, 2**22  # tokens: rows are multiples of the first, and no longer than the second
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "swiglu_limit": 7.0,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {  # config.json, and the quantization of QLoRA
    "Llama 3.1 8B": (LLAMA_8B, "nf4"),
    "Llama 3.1 70B": (LLAMA_70B, "nf4"),
    "gpt-oss-20b": (GPT_OSS, "mxfp4"),
}
METHODS = "QLoRA", "LoRA", "all weights"
# Unsloth's published rows of QLoRA, in tokens; of gpt-oss-20b, a lower bound.
PUBLISHED = {
    ("Llama 3.1 8B", 24): "78,475", ("Llama 3.1 8B", 80): "342,733",
    ("gpt-oss-20b", 80): "over 500,000",
}  # fmt: skip
CELLS = [(model, method, card) for model in MODELS for method in METHODS for card in CARDS]


@cache
def searched(model: str, method: str) -> Largest:
    """Return the search for the longest row of a model and a method, which caches plans."""
    config, kind = MODELS[model]
    options: dict[str, Any] = {} if method == "all weights" else {"rank": 32}
    options |= {"quantization": kind} if method == "QLoRA" else {}
    plan = partial(
        plan_memory, batch=1, dtype="bfloat16", recompute_every=1, offload=True, **options
    )

    def planned(tokens: int) -> int:
        measure = lambda layers: [plan(layers, tokens=tokens).total]  # noqa: E731
        return round(extrapolated(parse(config), measure)[0])

    return Largest(planned, STEP, MOST)


def longest(model: str, method: str, card: int) -> int:
    """Return the tokens of the longest row that fits; 0 if none does."""
    before, _hopper.requested = _hopper.requested, True
    try:
        return searched(model, method)(card << 30)
    finally:
        _hopper.requested = before


def table() -> str:
    """Return a row for each model and method, with a cell for each card."""
    rows = ["| model | method | " + " | ".join(f"{card} GB" for card in CARDS) + " |"]
    rows.append("|---|---|" + "---|" * len(CARDS))
    for model in MODELS:
        for method in METHODS:
            tokens = [longest(model, method, card) for card in CARDS]
            cells = [f"{each:,}" if each else "-" for each in tokens]
            rows.append(f"| {model} | {method} | {' | '.join(cells)} |")
            if method == "QLoRA":
                cells = [PUBLISHED.get((model, card), "-") for card in CARDS]
                rows.append(f"| | QLoRA, Unsloth | {' | '.join(cells)} |")
    return "\n".join(rows)


def page() -> str:
    """Return the page with the table of today."""
    rows = table()  # which takes minutes: the page is read afterwards
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    return f"{head}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
