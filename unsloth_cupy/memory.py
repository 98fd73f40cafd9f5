"""Memory that is known before it is spent.

    plan_memory(config, batch=4, tokens=2048, dtype="bfloat16").total

Training holds the weights, a gradient for each, the optimizer's averages, a float32 master of
16-bit weights, what the tape keeps of the forward pass for the backward one, and the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ._dtypes import FLOAT32, FLOATS
from ._planned import Planned
from .errors import ConfigError
from .ops._head import head_bytes
from .tape import Tape

if TYPE_CHECKING:
    from .models.config import Config

OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "none": 0}  # float32 numbers per weight


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
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    config: "Mapping[str, Any] | Config",
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    optimizer: str = "adamw",
) -> MemoryEstimate:
    """Return what a training step holds, from a forward pass on shapes alone.

    The model's own code runs on arrays without elements, and the tape that it fills is counted:
    every array once, however many ops keep it.

    Parameters
    ----------
    config : dict
        Of a Hugging Face config.json, or the ``config`` of a model.
    batch, tokens : int
        Rows of a step and tokens in a row.
    dtype : dtype or its name
        Of the weights and of what is computed with them: float16, bfloat16 or float32.
    optimizer : str
        adamw, or none (a forward and a backward pass only).

    Returns
    -------
    estimate : MemoryEstimate
        In bytes; ``logits`` is what the loss holds at a time: a chunk of them and, for 16-bit
        weights, the float32 sums of the head's gradient.

    Raises
    ------
    ConfigError
        The config or an option makes no sense.
    """
    from .models.parse import parse
    from .models.transformer import Transformer

    kind = _dtype("plan_memory", dtype)
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError(f"plan_memory: optimizer={optimizer!r}; choose from {known}")
    for name, size in (("batch", batch), ("tokens", tokens)):
        if size < 1:
            raise ConfigError(f"plan_memory: {name}={size}; pass 1 or more")
    parsed = parse(config) if isinstance(config, Mapping) else config
    parameters: dict[str, Any] = {
        name: Planned.of(shape, kind) for name, shape in parsed.shapes().items()
    }
    weights = sum(array.size for array in parameters.values())
    model = Transformer(parsed, parameters, {})
    tape = Tape()
    watched = {name: tape.watch(array) for name, array in parameters.items()}
    rows = np.zeros((1, tokens), np.int64)  # every array that is kept has an axis of rows
    model.losses(watched, model.hidden(watched, rows), rows, rows)
    narrow = kind.itemsize < FLOAT32.itemsize
    return MemoryEstimate(
        weights=weights * kind.itemsize,
        gradients=weights * kind.itemsize,
        optimizer=weights * OPTIMIZERS[optimizer] * FLOAT32.itemsize,
        master=weights * FLOAT32.itemsize if narrow and OPTIMIZERS[optimizer] else 0,
        activations=kept_bytes(tape, parameters) * batch,
        logits=head_bytes(batch * tokens, parsed.hidden, parsed.vocab, kind),
    )


def kept_bytes(tape: Tape, parameters: Mapping[str, Any]) -> int:
    """Return the bytes that a tape of planned arrays keeps beside the parameters."""
    kept: dict[int, int] = {}
    same = {id(_owner(array)): 0 for array in parameters.values()}  # these count elsewhere
    for entry in tape.entries:
        for name, value in entry.values.items():
            if type(value) is not Planned:
                continue
            owner = id(_owner(value))
            if _is_argument(entry, name):
                same[owner] = 0
            if owner not in same:
                kept[owner] = max(kept.get(owner, 0), value.nbytes)
    return sum(kept.values())


def _is_argument(entry: Any, output: str) -> bool:
    """Say whether a definition hands back its argument, so that no array is new.

    The norm of one array does: its ``h`` is x itself, unless it was widened and rounded again.
    """
    wide = entry.values.get("h") is not None and entry.values["h"].dtype.itemsize >= 4
    alone = entry.op.__name__ == "rms_norm_forward" and entry.values["residual"] is None
    return output == "h" and alone and wide


def _owner(array: Any) -> Any:
    while array.base is not None:
        array = array.base
    return array


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
    kind, rows = _dtype("estimate_training_memory", dtype), batch_size * seq_len
    hidden = (model_params * 128 / 12) ** (1 / 3)
    narrow = kind.itemsize < FLOAT32.itemsize
    return MemoryEstimate(
        weights=model_params * kind.itemsize,
        gradients=model_params * kind.itemsize,
        optimizer=model_params * OPTIMIZERS["adamw"] * FLOAT32.itemsize,
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
    itemsize = _dtype("estimate_forward_memory", dtype).itemsize
    return batch_size * seq_len * hidden_size * itemsize * kept


def estimate_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of a whole score matrix for every head.

    ``(4 * seq_len * hidden_size + num_heads * seq_len**2) * batch_size * itemsize``
    """
    itemsize = _dtype("estimate_attention_memory", dtype).itemsize
    return (4 * seq_len * hidden_size + num_heads * seq_len**2) * batch_size * itemsize


def estimate_flash_attention_memory(
    batch_size: int, seq_len: int, hidden_size: int, num_heads: int, dtype: Any = "float32"
) -> int:
    """Return the bytes of q, k, v, out and of one float32 lse for every row of scores.

    ``(4 * hidden_size * itemsize + 4 * num_heads) * batch_size * seq_len``
    """
    itemsize = _dtype("estimate_flash_attention_memory", dtype).itemsize
    return (4 * hidden_size * itemsize + 4 * num_heads) * batch_size * seq_len


def format_bytes(count: float) -> str:
    """Return a number of bytes with its binary unit: ``format_bytes(3 << 29)`` is 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"


def _dtype(call: str, given: Any) -> np.dtype[Any]:
    """Return a dtype that training computes in."""
    known = {dtype.name: dtype for dtype in FLOATS[:3]}
    name = given if isinstance(given, str) else np.dtype(given).name
    if name not in known:
        raise ConfigError(f"{call}: dtype={name!r}; choose from {', '.join(known)}")
    return known[name]
