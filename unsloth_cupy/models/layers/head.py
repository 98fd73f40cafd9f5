"""The output head: logits from hidden states, scaled or capped in some models."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous
from ...core.dtypes import FLOAT32, Array
from ...ops.common.gemm import gemm
from ...ops.elements.arithmetic import scale
from ...ops.elements.cast import cast
from ...ops.linear.embedding import embedding
from ...ops.linear.linear import linear
from ...ops.norms.layer_norm import layer_norm
from ...parallel.taped import taped, value_of
from ...parallel.tensor import all_gather
from ...training.tape import Gradients, add_up
from ...training.variable import Var
from ..configs.config import POOLER, Config
from ..configs.heads import (
    CAUSAL,
    SEQUENCE,
    TOKEN,
    check_real,
    lengths,
    require_head,
    sequence_scores,
    tokens_of_texts,
)
from ..configs.names import SCORE, SCORE_BIAS
from ..ranks.division import Division, entered
from .elements import gelu

BIAS = "lm_head.bias"
ALIGNED = 8  # number of 16-bit values in one access of 16 bytes


def head_weight(config: Config, parameters: Mapping[str, Any]) -> Any:
    """Return the weight of the output head, which some models share with the embedding."""
    return parameters["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def scaled_input(config: Config, x: Any) -> Any:
    """Return hidden states times the factor of the logits: logits are linear in hidden states."""
    return x if config.logit_scale == 1 else scale(x, factor=config.logit_scale)


def inputs_of_losses(config: Config, parameters: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
    """Return (x, weight) such that the logits before the cap are x weight^T.

    A bias becomes a column of the weight, and x gets a column of ones.  Columns of zeros follow up
    to a multiple of ALIGNED.
    """
    x, weight = scaled_input(config, x), head_weight(config, parameters)
    bias = parameters.get(BIAS)
    if bias is None:
        return x, weight
    values = [value_of(each) for each in (x, weight, bias)]
    hidden, (states, rows, column) = x.shape[-1], values
    more = -(hidden + 1) % ALIGNED
    tail, zeros = (np.zeros_like(each, shape=(*each.shape[:-1], more)) for each in (states, rows))
    ones = np.ones_like(states, shape=(*states.shape[:-1], 1))
    column = column[:, None].astype(rows.dtype, copy=False)
    wide_x = np.concatenate((states, ones, tail), axis=-1)
    wide_weight = np.concatenate((rows, column, zeros), axis=-1)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        parts = {"weight": dy[:, :hidden], "bias": dy[:, hidden].astype(values[2].dtype)}
        return {name: contiguous(part) for name, part in parts.items() if name in wanted}

    return (
        taped("loss", wide_x, lambda dy, wanted: {"x": contiguous(dy[..., :hidden])}, x=x),
        taped("loss", wide_weight, back, weight=weight, bias=bias),
    )


def exact_logits(config: Config, parameters: Mapping[str, Any], x: Any) -> Any:
    """Return the logits before the cap, as the losses of a language model compute them.

    They are float32 or wider, even for 16-bit hidden states.
    """
    x, weight = inputs_of_losses(config, parameters, x)
    wide = np.promote_types(x.dtype, FLOAT32)
    logits = gemm(x.reshape(-1, x.shape[-1]), weight.T, dtype=wide)  # (batch * tokens, vocab)
    return logits.reshape(*x.shape[:-1], logits.shape[-1])  # (batch, tokens, vocab)


def capped(config: Config, logits: Array) -> Array:
    """Return cap tanh(logits / cap); the logits if the config has no cap."""
    cap = config.logit_softcap
    return logits if cap is None else (_tanh(logits, cap) * cap).astype(logits.dtype, copy=False)


def logits_of(
    config: Config, parameters: Mapping[str, Any], x: Any, division: Division | None = None
) -> Any:
    """Return the logits of normalised hidden states: of all tokens of the vocabulary, or labels.

    If ranks divide the vocabulary, their logits are gathered.
    """
    if config.head != CAUSAL:
        require_head("logits", config, CAUSAL, TOKEN, SEQUENCE)
        return linear(x, parameters[SCORE], parameters.get(SCORE_BIAS))
    x = entered(division, scaled_input(config, x))
    logits: Any = linear(x, head_weight(config, parameters), parameters.get(BIAS))
    if division is not None:
        logits = all_gather(logits, -1, division.comm)
    cap = config.logit_softcap
    if cap is None:
        return logits
    if type(logits) is not Var:
        return capped(config, logits)
    y = Var(capped(config, logits.value), logits.tape)
    logits.tape.note(CapRecord({"x": logits.value}, {"x": logits.index}, {"y": y.index}, cap))
    return y


def scores_of_texts(
    config: Config, parameters: Mapping[str, Any], x: Any, mask: Any, offsets: Any
) -> Any:
    """Return a classifier's logits of texts from normalised hidden states: (texts, labels)."""
    if config.classifier == "score":
        return sequence_scores(parameters, x, mask, offsets)
    rows = encoder_rows(config, parameters, x, mask, offsets)
    return linear(rows, parameters[SCORE], parameters[SCORE_BIAS])


def encoder_rows(
    config: Config, parameters: Mapping[str, Any], x: Any, mask: Any, offsets: Any
) -> Any:
    """Return the input of ``score`` for each text: (texts, hidden).

    BERT: tanh(dense(first state)).  ModernBERT: norm(gelu(dense(p))), where p is the first state or
    the mean of all states.
    """
    real = tokens_of_texts(value_of(x), mask, offsets)  # (texts, tokens)
    check_real("logits", real)
    batch, tokens, hidden = x.shape
    if config.classifier == "pooler" or config.classifier_pooling == "cls":
        first = real.argmax(axis=1)
        if offsets is None:
            first = first + np.arange(batch, like=first) * tokens
        row = embedding(first, x.reshape(-1, hidden))
    else:
        row = _mean(x, real, packed=offsets is not None)
    if config.classifier == "pooler":
        y = linear(row, parameters[f"{POOLER}.weight"], parameters[f"{POOLER}.bias"])
        return _tanh_of(y)
    y = gelu(
        linear(row, parameters["head.dense.weight"], parameters.get("head.dense.bias")),
        approximate=False,
    )
    norm = parameters["head.norm.weight"], parameters.get("head.norm.bias")
    return layer_norm(y, *norm, eps=config.eps)


def dense_rows(config: Config, parameters: Mapping[str, Any], rows: Any) -> Any:
    """Return pooled states after the Dense modules of sentence-transformers, with length 1.

    Products are computed in the dtype of the weights, all else in that of ``rows``.
    """
    wide = value_of(rows).dtype
    for module in config.modules:
        weight, bias = parameters[module.weight], parameters.get(module.bias)
        dtype = value_of(weight).dtype
        x = rows if dtype == wide else cast(rows, dtype)
        y = linear(x, weight, bias)
        y = y if dtype == wide else cast(y, wide)
        rows = _tanh_of(y) if module.tanh else y
    value = value_of(rows)
    length = lengths(value)
    unit = value / length

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {"x": (dy - unit * (unit * dy).sum(axis=1)[:, None]) / length}

    return taped("unit", unit, back, x=rows)


def _tanh_of(y: Any) -> Any:
    """Return tanh(y), with an entry on the tape."""
    value = np.tanh(value_of(y))
    return taped("tanh", value, lambda dy, wanted: {"x": dy * (1 - value * value)}, x=y)


def _mean(x: Any, real: Array, *, packed: bool) -> Any:
    """Return the mean of each text's states; ``packed``: all texts are in one row."""
    value = value_of(x)
    weights = (real / real.sum(axis=1)[:, None]).astype(value.dtype)  # (texts, tokens)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        if packed:
            return {"x": gemm(weights.T, dy, dtype=value.dtype)[None]}
        return {"x": weights[..., None] * dy[:, None]}

    y = gemm(weights, value[0], dtype=value.dtype) if packed else None
    y = gemm(weights[:, None], value, dtype=value.dtype)[:, 0] if y is None else y
    return taped("mean", y, back, x=x)


def _tanh(logits: Array, cap: float) -> Any:
    """Return tanh(logits / cap), in float32 or wider."""
    return np.tanh((logits if logits.dtype.itemsize > 2 else logits.astype(FLOAT32)) / cap)


class CapRecord(NamedTuple):
    """A tape entry of capped logits: y = cap tanh(x / cap)."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    cap: float

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add dx = dy (1 - tanh(x / cap)**2)."""
        dy, index = take["y"], self.inputs["x"]
        dx = dy * (1 - _tanh(self.values["x"], self.cap) ** 2)
        grads[index] = add_up(grads.get(index), dx.astype(dy.dtype, copy=False))
