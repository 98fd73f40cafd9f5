"""Methods that train a classification head with the model: classifiers and reward models."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...losses import reward
from ...models.configs.heads import SEQUENCE, head_of
from ...models.configs.heads import labels_of as labels_in
from ...models.label_loss import mean_of_losses
from ...ops.elements.cast import cast
from ..data.labels import MULTI, REGRESSION, SINGLE, Labels, labels_of, some
from ..data.text import Batch
from ..setting import setting
from .method import (
    Method,
    averaged,
    firsts,
    gathered,
    in_few_sizes,
    real_texts,
    stacked,
    starts_of,
    value_of,
)


def texts_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model for the texts of a batch."""
    return {"tokens": batch["tokens"], "mask": batch["real"], "offsets": batch.get("offsets")}


@dataclasses.dataclass(frozen=True)
class Scoring(Method):
    """Trains the outputs of a head at the last token of each text."""

    head: str | None = SEQUENCE
    example: str = 'model.predict(["a text"])'

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch; ``real`` marks the tokens that are not padding."""
        real = batch.beside["real"] if batch.offsets is None else None
        return super().inputs(batch) | {"real": real}

    def outputs(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the outputs of the head, (texts, labels), in float32 or wider."""
        scores = model.logits(**texts_of(batch))
        return cast(scores, "float32") if scores.dtype.itemsize < FLOAT32.itemsize else scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Settings of the method that trains a reward model."""

    center: float | None = setting(
        "method", "reward: weight of a penalty that keeps rewards near 0: the squared sum of the"
        " two rewards of a pair.  For example 0.01.  [default: 0]", least=0, rare=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reward(Scoring):
    """Minimizes ``losses.reward``: the chosen text of a pair gets the higher reward."""

    group: int = 2
    unit: str = "pairs"
    sums: int = 6
    largest: int = 2
    names: tuple[str, ...] = ("reward",)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch, the order of its texts, chosen first, and the margins."""
        starts = starts_of(batch)[:-1]
        order = np.array([*range(0, len(starts), 2), *range(1, len(starts), 2)], np.int64)
        margin = firsts(batch, "value")[::2]
        arrays = {"order": order, "margin": margin.astype(FLOAT32), **real_texts(batch, 2)}
        return super().inputs(batch) | arrays

    def padded(self, batch: Batch) -> Batch:
        """Return a batch as ``in_few_sizes``."""
        return in_few_sizes(batch)

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the reward-model loss of pairs."""
        rewards = gathered(self.outputs(model, batch), batch["order"])
        options = {"margin": batch["margin"], "weights": batch.get("weights")}
        loss = averaged(reward, rewards, count=batch["count"], **options, **self.loss_options)
        if (sink := batch.get("sink")) is not None:
            sink.append(self._sums(value_of(rewards), batch.get("weights")))
        return loss

    def _sums(self, rewards: Array, weights: Array | None) -> Array:
        """Return the sums: pairs, correct pairs, margins, rewards; then -min and max reward."""
        half, low, high = len(rewards) // 2, rewards, rewards
        pairs: Any = half
        if weights is not None:
            real = np.concatenate([weights, weights]) > 0
            low, high = np.where(real, rewards, np.inf), np.where(real, rewards, -np.inf)
            pairs, rewards = weights.sum(), np.where(real, rewards, 0)
        margins = rewards[:half] - rewards[half:]
        ends = (-low.min(), high.max()) if half else (-np.inf, -np.inf)
        return stacked([pairs, (margins > 0).sum(), margins.sum(), rewards.sum(), *ends], rewards)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return accuracy, margin, and the mean, minimum and maximum reward."""
        pairs, right, margins, rewards, least, most = map(float, sums)
        pairs = max(pairs, 1)
        each = {"accuracy": right / pairs, "margin": margins / pairs, "reward_min": -least}
        return {**each, "reward_mean": rewards / (2 * pairs), "reward_max": most}


@dataclasses.dataclass(frozen=True)
class Classify(Scoring):
    """Trains a classifier: one class per text, several classes per text, or a regression.

    Attributes
    ----------
    labels : Labels
        The labels, read from the data.
    """

    unit: str = "texts"
    plain: bool = True
    names: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # until the data are read, as in a plan
    labels: Labels = dataclasses.field(default=Labels(SINGLE))
    sums: int = 8

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method with the labels of the data, or of a model that is a classifier."""
        every = chain(text.train, text.held_out)
        is_classifier = head_of(config) == SEQUENCE and labels_in(config, SEQUENCE) > 1
        labels = labels_of(every, text.place, config if is_classifier else None)
        names = labels.names or ("value",)
        return dataclasses.replace(self, labels=labels, names=names, sums=2 + 3 * len(names))

    @property
    def summary(self) -> str:
        """The number and names of the labels, as text."""
        if self.labels.problem == REGRESSION:
            return "labels are numbers"
        several = ", several at once" * (self.labels.problem == MULTI)
        return f"{len(self.names):,} labels{several}: {some(self.names)}"

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the labels and their problem type."""
        return super().settled(config) | {"problem_type": self.labels.problem}

    def value(self, record: Any) -> float:
        """Return the label of a record as a number."""
        return self.labels.number(record.value)

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the number of texts, times the number of classes if a text may have several."""
        each = len(self.names) if self.labels.problem == MULTI else 1
        return {"count": super().counts(batches)["count"] * each}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch, and the targets of its texts."""
        values = batch.beside["value"].reshape(-1)[starts_of(batch)[:-1]]
        problem = self.labels.problem
        if problem == MULTI:
            targets = np.array(self.labels.vectors(), FLOAT32)[values.astype(np.int64)]
        else:
            targets = values.astype(np.int64 if problem == SINGLE else FLOAT32)
        return super().inputs(batch) | {"targets": targets}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the mean loss of texts."""
        outputs, targets = self.outputs(model, batch), batch["targets"]
        if (sink := batch.get("sink")) is not None:
            sink.append(self._sums(value_of(outputs), targets))
        return mean_of_losses(model, outputs, targets, batch["count"])

    def _sums(self, z: Array, targets: Array) -> Array:
        """Return texts, then correct texts or errors; per class: correct, predicted, actual."""
        if self.labels.problem == REGRESSION:
            return stacked([len(z), np.abs(z[:, 0] - targets).sum(), 0, 0, 0], z)
        if self.labels.problem == MULTI:
            predicted, actual = z > 0, targets > 0
        else:
            places = np.arange(z.shape[1], like=z)
            predicted, actual = z.argmax(axis=1)[:, None] == places, targets[:, None] == places
        right = (predicted == actual).all(axis=1).sum()
        counted = (predicted & actual, predicted, actual)
        each = (n.sum(axis=0).astype(z.dtype) for n in counted)
        return np.concatenate([stacked([len(z), right], z), *each])

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return accuracy and F1, or the mean absolute error."""
        share = float(sums[1] / max(sums[0], 1))
        if self.labels.problem == REGRESSION:
            return {"error": share}
        right, predicted, actual = sums[2:].reshape(3, -1)  # (classes,) each
        present = predicted + actual > 0
        f1 = 2 * right[present] / (predicted + actual)[present]
        return {"accuracy": share, "f1": float(f1.mean()) if len(f1) else None}
