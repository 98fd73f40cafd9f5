"""Memory that is planned is the memory that is spent."""

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy._planned import Planned
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory import (
    MemoryEstimate,
    estimate_attention_memory,
    estimate_flash_attention_memory,
    estimate_forward_memory,
    estimate_training_memory,
    format_bytes,
    plan_memory,
)
from unsloth_cupy.ops._head import CHUNK_BYTES
from unsloth_cupy.tape import Tape

GIB = 2**30
SMALL = {
    "model_type": "llama", "vocab_size": 500, "hidden_size": 96, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
LARGER = SMALL | {"hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 5}
NORMED = SMALL | {"model_type": "gemma2", "query_pre_attn_scalar": 16}
FUSED = SMALL | {"model_type": "phi3", "pad_token_id": 0}


def kept_by_tape(config: dict[str, Any], batch: int, tokens: int, dtype: str) -> int:
    """What a forward pass on a tape leaves allocated, as Python's allocator counts it."""
    model = models.create(config, seed=0, dtype=dtype)
    rows = np.zeros((batch, tokens), np.int64)
    model.loss(rows, rows)  # tables and plans are made once
    gc.collect()
    tracemalloc.start()
    try:
        tape = Tape()
        watched = {name: tape.watch(array) for name, array in model.parameters.items()}
        loss = model.losses(watched, model.hidden(watched, rows), rows, rows)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        del loss
        return kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("config", [SMALL, LARGER, NORMED, FUSED], ids=lambda c: c["model_type"])
def test_activations_are_what_the_tape_keeps(config: dict[str, Any], dtype: str) -> None:
    planned = plan_memory(config, batch=3, tokens=96, dtype=dtype).activations
    measured = kept_by_tape(config, 3, 96, dtype)
    assert planned == pytest.approx(measured, rel=0.03)  # labels and Python's objects


def test_logits_are_at_most_a_chunk() -> None:
    few = plan_memory(SMALL, batch=2, tokens=8, dtype="bfloat16")
    many = plan_memory(SMALL, batch=2**20, tokens=8, dtype="bfloat16")
    sums = 4 * 500 * 96
    assert few.logits == 2 * 8 * 500 * (4 + 2) + sums
    assert CHUNK_BYTES - 500 * 6 < many.logits - sums <= CHUNK_BYTES


def test_the_other_parts_follow_from_the_weights() -> None:
    weights = sum(p.size for p in models.create(SMALL, seed=0).parameters.values())
    full = plan_memory(SMALL, batch=1, tokens=8, dtype="float32")
    assert (full.weights, full.gradients) == (4 * weights, 4 * weights)
    assert (full.optimizer, full.master) == (8 * weights, 0)
    half = plan_memory(SMALL, batch=1, tokens=8, dtype="bfloat16")
    assert (half.weights, half.gradients) == (2 * weights, 2 * weights)
    assert (half.optimizer, half.master) == (8 * weights, 4 * weights)
    alone = plan_memory(SMALL, batch=1, tokens=8, dtype="bfloat16", optimizer="none")
    assert (alone.optimizer, alone.master) == (0, 0)
    assert alone.total == sum((alone.weights, alone.gradients, alone.activations, alone.logits))


def test_planning_a_large_model_takes_no_memory() -> None:
    large = SMALL | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    tracemalloc.start()
    try:
        estimate = plan_memory(large, batch=1, tokens=2048, dtype="bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert estimate.weights == 2 * 70_553_706_496  # Llama 3.1 70B
    assert peak < 2**24


def test_planned_arrays_have_shapes_and_no_elements() -> None:
    array = Planned.of((1000, 1000), "float32")
    assert array.shape == (1000, 1000)
    assert array.strides == (0, 0)


def test_estimates_without_a_config() -> None:
    assert estimate_forward_memory(4, 2048, 4096, 32, 4) == GIB
    assert estimate_attention_memory(4, 2048, 4096, 32) == 2.5 * GIB
    assert estimate_flash_attention_memory(4, 2048, 4096, 32) == GIB // 2 + 4 * 2048 * 32 * 4
    estimate = estimate_training_memory(7_000_000_000, 4, 2048, "bfloat16")
    assert isinstance(estimate, MemoryEstimate)
    assert (estimate.weights, estimate.master) == (14_000_000_000, 28_000_000_000)
    assert estimate.total > 7_000_000_000 * 16


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (2**52, "4096.00 TiB"),
    ],
)
def test_bytes_have_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int8"}, "choose from float16, bfloat16, float32"),
        ({"dtype": "float64"}, "choose from"),
        ({"optimizer": "sgd"}, "choose from adamw, none"),
        ({"batch": 0}, "batch=0"),
        ({"tokens": -1}, "tokens=-1"),
    ],
)
def test_wrong_options_are_named(change: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"batch": 1, "tokens": 8, "dtype": "float32"} | change
    with pytest.raises(ConfigError, match=said):
        plan_memory(SMALL, **options)
    with pytest.raises(ConfigError, match="pass sizes"):
        estimate_training_memory(0, 1, 1)
