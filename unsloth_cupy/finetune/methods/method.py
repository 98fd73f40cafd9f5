"""A method of training: what it reads, what it minimises, and what it measures.

    loss = method(model, **method.inputs(batch), **method.counts([batch]))

``inputs`` makes the arrays of a loss from a batch of texts, of which ``group`` belong together, as
the two of a pair do; the loss adds sums to a ``sink``, which ``measures`` turns into the numbers of
a line of the log.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...models.objective import IGNORE, next_token
from ...ops.linear.embedding import embedding
from ...placement import full_like, to_device_of
from ...training.variable import Var
from ..data.rows import Format
from ..data.text import Batch
from ..setting import setting

BATCH = {"tokens", "labels", "offsets"}  # entries of a batch that the loss of next tokens takes
FOLDERS = ("reference", "teacher")  # settings that are other models


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Settings that several methods have."""

    beta: float | None = setting(
        "method", "Strength of a preference, or of distill's jsd; of grpo, weight of the divergence"
        " from the model before the run.  [default: 0.1, 0, 0]", least=0,
    )  # fmt: skip
    temperature: float | None = setting(
        "method", "Of the predictions that distill compares, embed's cosines, or the answers that"
        " grpo and rloo sample.  [default: 1, 0.05, 1]", above=0,
    )  # fmt: skip
    reference: str | Path | None = setting(  # noqa: RUF009 -- a field
        "method",
        "Folder of the model to compare with.  [default: the model before the run]",
        kept=False,
    )


@dataclasses.dataclass(frozen=True)
class Method(Format):
    """Learns the next token of texts; another method changes what it needs.

    Attributes
    ----------
    uses : tuple of str
        Its settings, of those that not all methods have.
    rates : (float, float), optional
        Default learning rates, of a whole model and of adapters.
    largest : int
        How many of its ``sums``, the last ones, are not sums: their maximum counts.
    head : str, optional
        The head that it trains, new if the model has another one; None: the model's own.
    names : tuple of str
        What the outputs of that head are.
    example : str
        Example call of the trained model, if it does not generate text.
    loss_options : dict
        Options of its loss, from the settings.

    All other attributes are those of ``Format``.
    """

    uses: tuple[str, ...] = ()
    rates: tuple[float, float] | None = None
    largest: int = 0
    head: str | None = None
    names: tuple[str, ...] = ()
    example: str = ""
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether its loss compares with the log-probabilities of a reference model."""
        return "reference" in self.uses

    @property
    def other_models(self) -> Sequence[Any]:
        """Other models that its loss computes with."""
        return ()

    def bound(self, settings: Any) -> Self:
        """Return this method with the values of settings."""
        return dataclasses.replace(self, loss_options=self.options(settings))

    def options(self, settings: Any) -> dict[str, Any]:
        """Return the settings of this method that have a value, as its loss names them."""
        chosen = {n: getattr(settings, n) for n in self.uses if n not in FOLDERS}
        if self.losses:
            chosen["kind"] = chosen.pop("loss", None) or self.losses[0]
        return {name: value for name, value in chosen.items() if value not in (None, ())}

    def check(self, settings: Any) -> None:
        """Raise a ConfigError for values that the loss does not take."""

    def check_ranks(self, settings: Any) -> None:
        """Raise a ConfigError for ranks that cannot compute the loss."""

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method, completed from the data and the config.json of the model."""
        return self

    def first(self, step: int, accumulate: int) -> int:
        """Return the number of the first batch of a step, whose batches are ``accumulate``."""
        return step * accumulate

    def steps(self, batches: int, accumulate: int) -> int:
        """Return the number of steps that so many batches make."""
        return -(-batches // accumulate)

    def updates(self, accumulate: int) -> int:
        """Return the number of steps that share one rollout."""
        return 1

    def with_models(self, read: Callable[[Any], Any]) -> Self:
        """Return this method with what ``read`` knows of the folders of models that reward."""
        return self

    def files(self, config: Any) -> dict[str, str]:
        """Return files to write beside the model."""
        return {}

    @property
    def loading(self) -> dict[str, Any]:
        """Options of ``models.load`` that choose the head."""
        return {} if self.head is None else {"head": self.head, "labels": len(self.names) or None}

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with the names of the outputs."""
        if not self.names:
            return dict(config)
        names = {str(number): name for number, name in enumerate(self.names)}
        numbers = {name: number for number, name in enumerate(self.names)}
        return {**config, "id2label": names, "label2id": numbers}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the loss of a batch, whose entries ``inputs`` and ``counts`` return."""
        return next_token(model, **batch)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return what the objective takes of a batch, as arrays of the host."""
        return {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the divisors of sums over batches."""
        return {"count": max(1, sum(batch.label_count for batch in batches))}

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return constants of the objective that depend on all batches of a step.

        ``batches`` are those of this rank; ``summed`` sums over ranks.
        """
        return {}

    def joined(self, parts: Sequence[Array], data: Any = None) -> Array:
        """Return what parts of a step measure together, also over the ranks of ``data``."""
        total, cut = np.zeros(self.sums), self.sums - self.largest
        total[cut:] = -np.inf
        for part in parts:
            total[:cut] += part[:cut]
            total[cut:] = np.maximum(total[cut:], part[cut:])
        if data is not None and data.size > 1 and self.sums:
            total[:cut] = data.all_reduce(total[:cut])
            total[cut:] = data.all_reduce(total[cut:], "max") if self.largest else []
        return total

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return numbers for the log from the sums over the batches of a step."""
        return {}

    def question_length(self, tokens: int) -> int:
        """Return how many of the tokens of a full row are a question at least."""
        return 0

    def full(self, batch: int, tokens: int) -> dict[str, Any]:
        """Return the inputs of full rows, to plan their memory: views of those of one."""
        rows = np.ones((self.group, tokens), np.int64)
        labels = rows.copy()
        labels[:, : self.question_length(tokens)] = IGNORE
        beside: dict[str, Array] = {"desirable": rows > 0, "real": rows > 0}
        beside["value"] = np.zeros(rows.shape)
        beside |= {"reference": np.zeros(rows.shape, FLOAT32), "taught": np.zeros_like(rows)}
        one = self.inputs(Batch(rows, labels, None, 1, rows.size, self.group, beside)).items()
        return {
            name: np.broadcast_to(array[:1], (batch * len(array), *array.shape[1:]))
            for name, array in one
            if array is not None
        }


def loss_of_none(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return 0 on the tape of a rank without texts, which takes part in what others gather."""
    loss = next_token(model, **{name: batch[name] for name in batch.keys() & BATCH})
    return loss * 1.0  # in the dtype of the other ranks' losses


def value_of(array: Any) -> Any:
    """Return the array of a Var."""
    return array.value if type(array) is Var else array


def gathered(log_probs: Any, places: Array) -> Any:
    """Return the entries at these places, counted row after row."""
    return embedding(places, log_probs.reshape(-1, 1)).reshape(places.shape)


def halves(count: int) -> tuple[slice, slice]:
    """Return the first ``count`` rows and the others."""
    return slice(count), slice(count, None)


def stacked(sums: Sequence[Any], like: Array) -> Array:
    """Return numbers and scalars as one array."""
    values: list[Any] = [value_of(each) for each in sums]
    return np.stack(
        [
            each.astype(like.dtype) if hasattr(each, "shape") else full_like(like, each, ())
            for each in values
        ]
    )


def placed(arrays: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return arrays on the device of another, and all else as it is."""
    return {
        name: to_device_of(value, like) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


def starts_of(batch: Batch) -> list[int]:
    """Return where each text begins among all tokens, row after row, and their number."""
    if batch.offsets is not None:
        return [*map(int, batch.offsets)]
    rows, width = batch.tokens.shape
    return [width * row for row in range(rows + 1)]


def every(batch: Batch, start: int) -> Batch:
    """Return every ``group``-th text of a batch, from ``start``."""
    step, beside = batch.group, batch.beside
    arrays = {"tokens": batch.tokens, "labels": batch.labels, **beside}
    starts, offsets = starts_of(batch), None
    if batch.offsets is None:
        chosen = {name: array[start::step] for name, array in arrays.items()}
    else:
        texts = [*zip(starts[start:-1:step], starts[start + 1 :: step], strict=True)]
        where = np.concatenate([np.arange(*text) for text in texts] or [np.arange(0)])
        chosen = {name: array.reshape(1, -1)[:, where] for name, array in arrays.items()}
        offsets = np.cumsum([0, *(stop - begin for begin, stop in texts)])
    tokens, labels = chosen.pop("tokens"), chosen.pop("labels")
    return Batch(tokens, labels, offsets, batch.label_count, batch.real, 1, chosen)


def answers(batch: Batch, order: Sequence[int], *, reference: bool) -> dict[str, Array]:
    """Return where the log-probabilities of answers are, a row for each of these texts.

    ``places`` counts entries row after row; where ``said`` is False it has the last, which is of no
    token.  ``reference`` holds the log-probabilities of the batch at these places.
    """
    starts, labels = starts_of(batch), batch.labels.reshape(-1)
    indices = [
        np.flatnonzero(labels[starts[text] + 1 : starts[text + 1]] != IGNORE) + starts[text]
        for text in order
    ]
    longest = max(map(len, indices), default=0)
    places = np.full((len(indices), longest), max(0, labels.size - 1))
    mask = np.zeros(places.shape, bool)
    for row, own, each in zip(places, mask, indices, strict=True):
        row[: len(each)], own[: len(each)] = each, True
    arrays = {"places": places, "said": mask}
    if reference:  # of a token, which is predicted at the place before it
        known = np.append(batch.beside["reference"].reshape(-1)[1:], np.float32(0))
        arrays["reference"] = known[places] * mask
    return arrays
