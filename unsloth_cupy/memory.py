"""Memory by formulas, for those who have no config: ``plan_memory`` counts, given one.

Training holds the weights, a gradient for each, the optimizer's averages, a float32 master of
16-bit weights, what the tape keeps of the forward pass for the backward one, and the logits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._dtypes import FLOAT32, FLOATS
from .errors import ConfigError

AVERAGES = 2  # that AdamW keeps of every weight, in float32
PARTS = ("weights", "gradients", "optimizer", "master", "activations", "logits")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training needs, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    master: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part) for part in PARTS)


def estimate_training_memory(
    model_params: int, batch_size: int, seq_len: int, dtype: Any = "float32"
) -> MemoryEstimate:
    """Estimate what training with AdamW holds when only the number of weights is known.

    Weights, gradients, averages and master follow from the number.  For activations and logits
    the model is taken to be a Llama of the usual proportions: ``layers = hidden / 128``,
    ``weights = 12 * layers * hidden**2``, 18 arrays of the hidden size kept per layer, 32,000
    tokens in the vocabulary.  ``plan_memory`` counts instead, given a config.
    """
    if min(model_params, batch_size, seq_len) < 1:
        sizes = f"({model_params}, {batch_size}, {seq_len})"
        raise ConfigError(f"estimate_training_memory{sizes}: pass sizes of 1 or more")
    kind, rows = dtype_of("estimate_training_memory", dtype), batch_size * seq_len
    hidden = (model_params * 128 / 12) ** (1 / 3)
    narrow = kind.itemsize < FLOAT32.itemsize
    return MemoryEstimate(
        weights=model_params * kind.itemsize,
        gradients=model_params * kind.itemsize,
        optimizer=model_params * AVERAGES * FLOAT32.itemsize,
        master=model_params * FLOAT32.itemsize * narrow,
        activations=int(rows * hidden * (hidden / 128) * 18) * kind.itemsize,
        logits=rows * 32_000 * FLOAT32.itemsize,
    )


def estimate_forward_memory(
    batch_size: int,
    seq_len: int,
    hidden_size: int,
    num_layers: int,
    checkpoint_every: int = 1,
    dtype: Any = "float32",
) -> int:
    """Return the bytes of the hidden states that are kept, one for every so many layers.

    ``batch_size * seq_len * hidden_size * itemsize * ceil(num_layers / checkpoint_every)``
    """
    kept = -(-num_layers // checkpoint_every)
    itemsize = dtype_of("estimate_forward_memory", dtype).itemsize
    return batch_size * seq_len * hidden_size * itemsize * kept


def estimate_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of a whole score matrix for every head.

    ``(4 * seq_len * hidden_size + num_heads * seq_len**2) * batch_size * itemsize``
    """
    itemsize = dtype_of("estimate_attention_memory", dtype).itemsize
    return (4 * seq_len * hidden_size + num_heads * seq_len**2) * batch_size * itemsize


def estimate_flash_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of one float32 lse for every row of scores.

    ``(4 * hidden_size * itemsize + 4 * num_heads) * batch_size * seq_len``
    """
    itemsize = dtype_of("estimate_flash_attention_memory", dtype).itemsize
    return (4 * hidden_size * itemsize + 4 * num_heads) * batch_size * seq_len


def format_bytes(count: float) -> str:
    """Return a number of bytes with its binary unit: ``format_bytes(3 << 29)`` is 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"


def dtype_of(call: str, given: Any) -> np.dtype[Any]:
    """Return a dtype that training computes in; raise ConfigError for another."""
    known = {dtype.name: dtype for dtype in FLOATS[:3]}
    name = given if isinstance(given, str) else np.dtype(given).name
    if name not in known:
        raise ConfigError(f"{call}: dtype={name!r}; choose from {', '.join(known)}")
    return known[name]
