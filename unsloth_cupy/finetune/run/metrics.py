"""Measures of the tokens that a model predicts.

perplexity        exp(mean loss in nats)
token accuracy    fraction of labels that are the most likely token (of ties, the lowest id)
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
MOST = 700.0  # nats; exp of more overflows a float


class Counts(NamedTuple):
    """Sums over the labels of a batch; NaN if the objective computed no hidden states."""

    right: float = math.nan
    entropy: float = math.nan


def perplexity(loss: float) -> float:
    """Return exp(loss); a loss above 700 nats counts as 700, because exp would overflow."""
    return math.exp(min(loss, MOST))


class Watch:
    """Stores the hidden states that an objective computes, for the counts of a batch."""

    def __init__(self, model: "Transformer") -> None:
        self.model: Any = model
        self.hidden: Any = None

    @property
    def view(self) -> Any:
        """A view of the model that stores its hidden states here.

        This object stores no view: a reference cycle would keep the hidden states in memory.
        """
        view = object.__new__(type(self.model))
        view.__dict__ |= self.model.__dict__ | {"hidden": self._hidden}
        return view

    def _hidden(self, *arguments: Any, **options: Any) -> Any:
        self.hidden = self.model.hidden(*arguments, **options)
        return self.hidden

    def counts(self, batch: Mapping[str, Any]) -> Counts:
        """Return the sums over the labels of a batch; logits are computed in chunks."""
        if self.hidden is None:
            return Counts()
        model, offsets = self.model, batch.get("offsets")
        labels = next_labels(batch["tokens"], batch["labels"], offsets).reshape(-1)
        targets = labels != IGNORE
        rows, labels = self.hidden.reshape(-1, model.config.hidden)[targets], labels[targets]
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
    """Return the measures of a log line besides the mean loss of ``count`` labels."""
    result = {"perplexity": perplexity(loss)} if of_next_token else {}
    if not math.isnan(counts.right):
        result |= {"token_accuracy": counts.right / count, "entropy": counts.entropy / count}
    return result
