"""Methods that give texts numbers: the outputs of a head, which is trained with the model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..losses import reward
from ..models.heads import SEQUENCE
from ..ops.elements.cast import cast
from .method import PAIRS, SCORED, Method, gathered, stacked, starts_of, value_of
from .text import Batch


@dataclasses.dataclass(frozen=True)
class Scoring(Method):
    """Learns outputs at the last token of each text."""

    head: str | None = SEQUENCE
    used: str = 'model.predict(["a text"])'

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return a batch, of which rows that are padded have a mask."""
        mask = batch.beside["real"] if batch.offsets is None else None
        return super().inputs(batch) | {"mask": mask}

    def outputs(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the outputs of the head, (texts, labels), in float32 or wider."""
        of_texts = {name: batch.get(name) for name in ("tokens", "mask", "offsets")}
        scores = model.logits(**of_texts)
        return cast(scores, "float32") if scores.dtype.itemsize < FLOAT32.itemsize else scores


@dataclasses.dataclass(frozen=True)
class Reward(Scoring):
    """Learns to give the chosen text of a pair more than the rejected one: ``losses.reward``."""

    reads: tuple[str, ...] = (SCORED, PAIRS)
    group: int = 2
    unit: str = "pairs"
    sums: int = 6
    largest: int = 2
    names: tuple[str, ...] = ("reward",)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return a batch, the places of its texts, all chosen ones first, and their margins."""
        starts = starts_of(batch)[:-1]
        order = np.array([*range(0, len(starts), 2), *range(1, len(starts), 2)], np.int64)
        margin = batch.beside["value"].reshape(-1)[starts[::2]]
        return super().inputs(batch) | {"order": order, "margin": margin.astype(FLOAT32)}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the loss of pairs."""
        rewards = gathered(self.outputs(model, batch), batch["order"])
        loss = reward(rewards, margin=batch["margin"], count=batch["count"], **self.given)
        if (sink := batch.get("sink")) is not None:
            sink.append(self._sums(value_of(rewards)))
        return loss

    def _sums(self, rewards: Array) -> Array:
        """Return pairs, right ones, margins, rewards, and the extremes of these."""
        half = len(rewards) // 2
        margins = rewards[:half] - rewards[half:]
        ends = (-rewards.min(), rewards.max()) if half else (-np.inf, -np.inf)
        return stacked([half, (margins > 0).sum(), margins.sum(), rewards.sum(), *ends], rewards)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return accuracy, margin, and mean and extremes of the rewards."""
        pairs, right, margins, rewards, least, most = map(float, sums)
        pairs = max(pairs, 1)
        each = {"accuracy": right / pairs, "margin": margins / pairs, "reward_min": -least}
        return {**each, "reward_mean": rewards / (2 * pairs), "reward_max": most}
