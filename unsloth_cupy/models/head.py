"""The output head: logits of hidden states, capped in some models."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..ops.linear.linear import linear
from ..parallel.tensor import all_gather
from ..training.tape import Gradients, add_up
from ..training.variable import Var
from .config import Config
from .division import Division, entered
from .heads import CAUSAL, SEQUENCE, TOKEN, require_head
from .names import SCORE, SCORE_BIAS


def head_weight(config: Config, parameters: Mapping[str, Any]) -> Any:
    """Return the weight of the output head, which some models share with the embedding."""
    return parameters["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def logits_of(
    config: Config, parameters: Mapping[str, Any], x: Any, division: Division | None = None
) -> Any:
    """Return the logits of normalised hidden states: whole, of words or of labels of tokens."""
    if config.head != CAUSAL:
        require_head("logits", config, TOKEN, SEQUENCE)
        return linear(x, parameters[SCORE], parameters.get(SCORE_BIAS))
    logits: Any = linear(entered(division, x), head_weight(config, parameters))
    if division is not None:
        logits = all_gather(logits, -1, division.comm)
    cap = config.logit_softcap
    if cap is None:
        return logits
    if type(logits) is not Var:
        return (_tanh(logits, cap) * cap).astype(logits.dtype, copy=False)
    value = logits.value
    capped = Var((_tanh(value, cap) * cap).astype(value.dtype, copy=False), logits.tape)
    logits.tape.note(CapRecord({"x": value}, {"x": logits.index}, {"y": capped.index}, cap))
    return capped


def _tanh(logits: Array, cap: float) -> Any:
    """Return tanh(logits / cap), in float32 at least."""
    return np.tanh((logits if logits.dtype.itemsize > 2 else logits.astype(FLOAT32)) / cap)


class CapRecord(NamedTuple):
    """A tape entry of logits that are capped: y = cap tanh(x / cap)."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    cap: float

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add dx = dy (1 - tanh(x / cap)**2)."""
        dy, index = take["y"], self.inputs["x"]
        dx = dy * (1 - _tanh(self.values["x"], self.cap) ** 2)
        grads[index] = add_up(grads.get(index), dx.astype(dy.dtype, copy=False))
