"""Contrastive training of embeddings: related texts move closer, other texts of a batch apart.

accuracy at 1 = share of queries whose own document is the nearest
mrr           = mean over queries of 1 / (rank of the own document)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...losses import contrastive
from ...models.configs.heads import NONE, POOLINGS
from ...models.folders.pooling import pooling_files
from ...ops.linear.embedding import embedding
from ..data.text import Batch
from ..naming import named
from ..setting import setting
from .method import averaged, stacked, starts_of, value_of
from .scoring_methods import Scoring, texts_of

TEMPERATURE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Settings of the method that trains embeddings."""

    pooling: str | None = setting(
        "method",
        "embed: the embedding of a text is the mean of its hidden states, or the hidden state of"
        " its last or first token (cls).  [default: as the folder's 1_Pooling says, or mean]",
        choices=POOLINGS,
        rare=True,
    )


@dataclasses.dataclass(frozen=True)
class Embed(Scoring):
    """Minimizes ``losses.contrastive`` between the queries and all documents of a batch."""

    losses: tuple[str, ...] = ()
    group: int = 2
    unit: str = "pairs"
    sums: int = 3
    head: str | None = NONE
    example: str = 'model.embeddings(model.tokenizer.encode("a text")[None], pooling="{pooling}")'
    plain: bool = True
    of_folder: str | None = None  # the pooling that the files of the model's folder name

    @property
    def pooling(self) -> str:
        """The pooling of the hidden states of a text into one vector."""
        return str(self.loss_options.get("pooling") or self.of_folder or POOLINGS[0])

    def check(self, settings: Any) -> None:
        """Raise a ConfigError for microbatches: their documents would not be compared."""
        if settings.accumulate > 1 or (settings.data_parallel or 1) > 1:
            problem = f"{named(method='embed')} compares all texts of a step with each other"
            cure = f"leave {named('accumulate')} and {named('data_parallel')} out"
            raise ConfigError(f"{problem}; {cure}, and give a larger {named('batch')}")

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method with the number of negatives per row."""
        first = text.train[0]
        count = len(first.value or ())
        for part in (text.train, text.held_out):
            for record in part:
                if len(record.value or ()) != count:
                    own, other = len(record.value or ()), text.place(first.line)
                    problem = f"has {own} negatives, and {other} has {count}"
                    place = text.place(record.line)
                    cure = "give all rows the same number"
                    raise ConfigError(f"{place}: {problem}; {cure}")
        return dataclasses.replace(self, group=2 + count)

    def texts(self, record: Any) -> list[str]:
        """Return the query of a record, its document, and its negatives."""
        return [record.prompt, record.answer, *(record.value or ())]

    def value(self, record: Any) -> float:
        """Return 0: a record has no label."""
        return 0.0

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch, and the indices of queries and documents, own first."""
        places = np.arange(len(starts_of(batch)) - 1).reshape(-1, self.group)
        documents = np.concatenate([places[:, 1], places[:, 2:].reshape(-1)])
        return super().inputs(batch) | {"queries": places[:, 0].copy(), "documents": documents}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the contrastive loss."""
        vectors = model.embeddings(**texts_of(batch), pooling=self.pooling)
        queries, documents = (embedding(batch[n], vectors) for n in ("queries", "documents"))
        scale = 1 / self.loss_options.get("temperature", TEMPERATURE)
        loss = averaged(contrastive, queries, documents, scale=scale, count=batch["count"])
        if (sink := batch.get("sink")) is not None:
            sink.append(self._sums(value_of(queries), value_of(documents)))
        return loss

    def _sums(self, queries: Array, documents: Array) -> Array:
        """Return the sums: queries, queries ranked 1, and reciprocal ranks."""
        scores, own = queries @ documents.T, (queries * documents[: len(queries)]).sum(axis=1)
        numbers = (
            np.arange(len(documents), like=scores)[None]
            == np.arange(len(queries), like=scores)[:, None]
        )
        ranks = 1 + ((scores > own[:, None]) & ~numbers).sum(axis=1)
        return stacked([len(queries), (ranks == 1).sum(), (1 / ranks).sum()], queries)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return accuracy at 1 and the mean reciprocal rank."""
        count, right, reciprocal = map(float, sums)
        return {"accuracy": right / max(count, 1), "mrr": reciprocal / max(count, 1)}

    def files(self, config: Any) -> dict[str, str]:
        """Return the files from which sentence-transformers reads the pooling."""
        return dict(pooling_files(config.state, self.pooling, config.modules))
