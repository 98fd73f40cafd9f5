"""Measures of the tokens that a model predicts.

perplexity        exp(loss), of the mean loss in nats
token accuracy    share of the labels that the model finds likeliest; of equal ones the lowest
entropy           mean of -sum p log p over the vocabulary, in nats
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32
from ...models.layers.head import logits_of
from ...models.loss import next_labels
from ...models.objective import IGNORE

if TYPE_CHECKING:
    from ...models import Transformer

CHUNK = 2**23  # logits computed at a time: 32 MiB in float32
MOST = 700.0  # nats whose perplexity is a float


class Counts(NamedTuple):
    """Sums over the labels of a batch; NaN where the objective computed no hidden states."""

    right: float = math.nan
    entropy: float = math.nan


def perplexity(loss: float) -> float:
    """Return exp(loss), or that of 700 nats for more: a float has no larger one."""
    return math.exp(min(loss, MOST))


class Watch:
    """Keeps the hidden states that an objective computes with a model, to count from them."""

    def __init__(self, model: "Transformer") -> None:
        self.model: Any = model
        self.hidden: Any = None

    @property
    def view(self) -> Any:
        """The model to compute with; this keeps no view, so that no cycle keeps hidden states."""
        view = object.__new__(type(self.model))
        view.__dict__ |= self.model.__dict__ | {"hidden": self._hidden}
        return view

    def _hidden(self, *arguments: Any, **options: Any) -> Any:
        self.hidden = self.model.hidden(*arguments, **options)
        return self.hidden

    def counts(self, batch: Mapping[str, Any]) -> Counts:
        """Return the sums over the labels of the batch; logits exist for a part of it at a time."""
        if self.hidden is None:
            return Counts()
        model, offsets = self.model, batch.get("offsets")
        labels = next_labels(batch["tokens"], batch["labels"], offsets).reshape(-1)
        kept = labels != IGNORE
        rows, labels = self.hidden.reshape(-1, model.config.hidden)[kept], labels[kept]
        parameters = model.entered(model.parameters)
        right, entropy, step = 0, 0.0, max(1, CHUNK // model.config.vocab)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            logits = logits_of(model.config, parameters, part, model.division)
            logits = logits.astype(np.promote_types(logits.dtype, FLOAT32), copy=False)
            right += int((logits.argmax(-1) == labels[start : start + step]).sum())
            logits = logits - logits.max(-1, keepdims=True)
            weights = np.exp(logits)
            total = weights.sum(-1)
            each = np.log(total) - (weights * logits).sum(-1) / total
            entropy += float(each.sum(dtype=np.float64))
        return Counts(right, entropy)


def measures(loss: float, counts: Counts, count: int, *, of_next_token: bool) -> dict[str, float]:
    """Return what a line of the log says beside the mean loss of ``count`` labels."""
    result = {"perplexity": perplexity(loss)} if of_next_token else {}
    if not math.isnan(counts.right):
        result |= {"token_accuracy": counts.right / count, "entropy": counts.entropy / count}
    return result
