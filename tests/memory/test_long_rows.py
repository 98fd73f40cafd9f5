"""Plans of long rows: chunked MLPs and experts, adapters, quantized weights and offload."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, plan_memory
from unsloth_cupy.models import create, quantize
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.training import chunks, offload

from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from .test_memory import SMALL

DENSE = SMALL | {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 1024}
DENSE |= {"vocab_size": 128}
GATED = DENSE | {"model_type": "gemma2", "query_pre_attn_scalar": 16}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 256, "decoder_sparse_step": 1,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "all weights": (DENSE, None, {}),
    "LoRA": (DENSE, None, {"rank": 8}),
    "LoRA, geglu": (GATED, None, {"rank": 8}),
    "DoRA": (DENSE, None, {"rank": 8, "dora": True}),
    "dropout": (DENSE, None, {"rank": 8, "dropout": 0.1}),
    "nf4, LoRA": (DENSE, "nf4", {"rank": 8}),
    "nf4, DoRA": (DENSE, "nf4", {"rank": 8, "dora": True}),
    "experts, LoRA": (EXPERTS, None, {"rank": 8}),
    "experts, nf4, LoRA": (EXPERTS, "nf4", {"rank": 8}),
    "experts, LoRA of attention": (EXPERTS, "nf4", {"rank": 8, "targets": ("q_proj", "o_proj")}),
}
WAYS = [(name, moved, every) for name in CASES for moved in (False, True) for every in (1, 2)]


@pytest.mark.parametrize(("name", "moved", "every"), Sample.one_in(6, WAYS))
def test_rows_beyond_a_chunk_are_planned_as_they_are(
    name: str, moved: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of the GPU and the bytes of the host are as planned, on a stand-in that counts."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**19)  # 256 rows
    config, kind, adapter = CASES[name]
    alike: dict[str, Any] = {}
    if adapter:
        model = create(config, seed=0, dtype="bfloat16")
        model.add_adapter(**adapter)
        alike = {"adapter": model.adapter}
    planned, whole = (
        plan_memory(
            config, batch=1, tokens=2048, dtype="bfloat16", optimizer="none", quantization=kind,
            recompute_every=every, offload=moved, chunked_mlp=chunked, **alike,
        )
        for chunked in (None, False)
    )  # fmt: skip
    assert planned.total < whole.total
    with gpu("90", devices=1) as machine:
        machine.strict = False
        model = create(config, seed=0, dtype="bfloat16", device="cuda")
        if kind is not None:
            quantize(model, kind)
        if adapter:
            model.add_adapter(**adapter)
        rows = machine.place(np.ones((1, 2048), np.int64))
        parts = CheckpointConfig(recompute_every=every, offload=moved)
        seed = 0 if "dropout" in adapter else None
        step = partial(model.loss_and_gradients, rows, rows, checkpoint=parts, seed=seed)
        before = machine.held
        step()  # which makes the rotary tables, as a plan does
        machine.peak = machine.held
        copied = offload.moved["to_host"]
        step()
        peak, copied = machine.peak - before, offload.moved["to_host"] - copied
    assert planned.total - planned.weights == pytest.approx(peak, rel=0.03)  # what plans promise
    assert planned.host == copied


LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "swiglu_limit": 7.0,
}  # fmt: skip
QLORA: dict[str, Any] = {
    "batch": 1, "dtype": "bfloat16", "rank": 32, "recompute_every": 1, "offload": True,
}  # fmt: skip
GIB = 2**30


@pytest.fixture
def _as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs the kernels of Hopper, whose backward has float32 sums of dq."""
    monkeypatch.setattr(_hopper, "requested", True)


@pytest.mark.usefixtures("_as_on_an_h200")
@pytest.mark.parametrize(
    ("config", "kind", "tokens", "memory"),
    [
        (LLAMA_8B, "nf4", 80_000, 24), (LLAMA_8B, "nf4", 350_000, 80),
        (GPT_OSS, "mxfp4", 500_000, 80),
    ],
)  # fmt: skip
def test_rows_that_fit_a_card_by_the_plan(
    config: dict[str, Any], kind: str, tokens: int, memory: int
) -> None:
    assert plan_memory(config, tokens=tokens, quantization=kind, **QLORA).total < memory * GIB


GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "tuning.md").read_text()
GROWING = re.findall(r"^\| .*? \| (activations|workspace|host) \| ([\d,]+) \|$", GUIDE, re.M)


@pytest.mark.usefixtures("_as_on_an_h200")
def test_the_list_of_what_grows_with_tokens_is_that_of_the_plan() -> None:
    """Bytes per token, of Llama 3.1 8B: docs/guide/tuning.md."""
    lengths = 2**17, 2**18
    short, long = (plan_memory(LLAMA_8B, tokens=n, quantization="nf4", **QLORA) for n in lengths)
    assert len(GROWING) > 8
    listed: dict[str, int] = {}
    for part, size in GROWING:
        listed[part] = listed.get(part, 0) + int(size.replace(",", ""))
    actual = {part: (long.at_peak[part] - size) / 2**17 for part, size in short.at_peak.items()}
    actual["host"] = (long.host - short.host) / 2**17
    assert {part: size for part, size in actual.items() if size} == listed
