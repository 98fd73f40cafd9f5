"""Estimates memory by formulas, without a config; ``plan_memory`` counts it exactly from a config.

Training holds the weights, their gradients, the averages of the optimizer, a float32 master copy of
16-bit weights, the activations saved for backward, and the logits.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..core.call import is_number
from ..core.dtypes import FLOAT32, KERNEL_DTYPES, float_dtype
from ..errors import ConfigError

AVERAGES = 2  # float32 averages that AdamW stores per weight
PARTS = ("weights", "gradients", "optimizer", "master", "activations", "logits")


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of training in bytes, by part."""

    weights: int
    gradients: int
    optimizer: int
    master: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts in bytes."""
        return sum(getattr(self, part) for part in PARTS)


def estimate_training_memory(
    model_params: int, batch_size: int, seq_len: int, dtype: Any = "float32"
) -> MemoryEstimate:
    """Estimate the memory of training with AdamW from the number of weights alone.

    The number of weights determines weights, gradients, averages and master copies.  For
    activations and logits, the model is assumed to be a Llama of common proportions: ``layers =
    hidden / 128``, ``weights = 12 * layers * hidden**2``, 18 saved arrays of the hidden size per
    layer, and a vocabulary of 32,000 tokens.  With a config, use ``plan_memory``.
    """
    sizes = {"model_params": model_params, "batch_size": batch_size, "seq_len": seq_len}
    itemsize, model_params, *rows_of = _checked("estimate_training_memory", dtype, **sizes)
    rows, hidden = math.prod(rows_of), (model_params * 128 / 12) ** (1 / 3)
    narrow = itemsize < FLOAT32.itemsize
    return MemoryEstimate(
        weights=model_params * itemsize,
        gradients=model_params * itemsize,
        optimizer=model_params * AVERAGES * FLOAT32.itemsize,
        master=model_params * FLOAT32.itemsize * narrow,
        activations=int(rows * hidden * (hidden / 128) * 18) * itemsize,
        logits=rows * 32_000 * FLOAT32.itemsize,
    )


def estimate_forward_memory(
    batch_size: int,
    seq_len: int,
    hidden_size: int,
    num_layers: int,
    recompute_every: int = 1,
    dtype: Any = "float32",
) -> int:
    """Return the bytes of the saved hidden states: one per ``recompute_every`` layers.

    ``batch_size * seq_len * hidden_size * itemsize * ceil(num_layers / recompute_every)``
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "hidden_size": hidden_size}
    sizes |= {"num_layers": num_layers, "recompute_every": recompute_every}
    *factors, layers, every = _checked("estimate_forward_memory", dtype, **sizes)
    return math.prod(factors) * -(-layers // every)


def estimate_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of the full score matrix of each head.

    ``(4 * seq_len * hidden_size + num_heads * seq_len**2) * batch_size * itemsize``
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "hidden_size": hidden_size}
    values = _checked("estimate_attention_memory", dtype, **sizes, num_heads=num_heads)
    itemsize, batch, tokens, hidden, heads = values
    return (4 * tokens * hidden + heads * tokens**2) * batch * itemsize


def estimate_flash_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of one float32 lse per row of scores.

    ``(4 * hidden_size * itemsize + 4 * num_heads) * batch_size * seq_len``
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "hidden_size": hidden_size}
    values = _checked("estimate_flash_attention_memory", dtype, **sizes, num_heads=num_heads)
    itemsize, batch, tokens, hidden, heads = values
    return (4 * hidden * itemsize + 4 * heads) * batch * tokens


def _checked(call: str, dtype: Any, **sizes: Any) -> list[int]:
    """Return [itemsize, *sizes]; raise a ConfigError for invalid sizes."""
    for name, size in sizes.items():
        if not is_number(size) or not 1 <= size < 2**63 or size % 1:
            cure = "pass sizes of 1 or more, whole numbers below 2**63"
            raise ConfigError(f"{call}({name}={size!r}): {cure}")
    return [float_dtype(call, dtype, KERNEL_DTYPES).itemsize, *map(int, sizes.values())]
