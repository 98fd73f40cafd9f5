"""Preference methods: DPO and its relatives on pairs of answers, KTO on rated answers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...losses import implicit_rewards, kto, nll, preference
from ...losses.preferences import SORTED
from ...models.loss import next_labels
from ...models.objective import IGNORE
from ...placement import to_numpy
from ..data.text import Batch
from ..naming import named
from ..setting import setting
from .method import (
    Method,
    answers,
    averaged,
    every,
    firsts,
    gathered,
    halves,
    in_few_sizes,
    loss_of_none,
    placed,
    real_texts,
    stacked,
    starts_of,
    value_of,
)

RATES = (1e-6, 1e-5)  # learning rates of full fine-tuning and of adapters: small updates suffice
BETA = 0.1  # default of the beta in the loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Settings of the methods that compare answers."""

    smoothing: float | None = setting(
        "method",
        "Label smoothing: assumed fraction of mislabelled pairs (cDPO).  [default: 0]",
        least=0,
        below=1,
        rare=True,
    )
    gamma: float | None = setting(
        "method", "Target margin of simpo.  [default: 0.5]", least=0, rare=True
    )
    nll: float | None = setting(
        "method",
        "cpo and simpo: weight of the next-token loss on chosen texts.  [default: 1 for cpo, 0 for"
        " simpo]",
        least=0,
        rare=True,
    )
    desirable_weight: float | None = setting(
        "method", "kto: weight of desirable answers.  [default: 1]", above=0, rare=True
    )
    undesirable_weight: float | None = setting(
        "method", "kto: weight of undesirable answers.  [default: 1]", above=0, rare=True
    )


@dataclasses.dataclass(frozen=True)
class Preference(Method):
    """Minimizes ``losses.preference`` of the chosen and the rejected answer of each pair.

    Attributes
    ----------
    nll : float
        Weight of the mean negative log-likelihood over the tokens of chosen answers.
    whole : bool
        Whether this mean includes the tokens of the questions.
    """

    group: int = 2
    unit: str = "pairs"
    rates: tuple[float, float] | None = RATES
    sums: int = 7
    nll: float = 0.0
    whole: bool = False

    def bound(self, settings: Any) -> Self:
        """Return a copy of this method that stores the values of the settings."""
        options = self.options(settings)
        weight = options.pop("nll", self.nll)
        return dataclasses.replace(self, loss_options=options, nll=weight)

    def check(self, settings: Any) -> None:
        """Raise an error of the loss for these options: call the loss on a pair of one token."""
        one, kind = np.zeros((2, 1), FLOAT32), self.loss_options["kind"]
        preference(one, one == 0, one if self.compares else None, **self.loss_options)
        if kind in SORTED and (settings.accumulate > 1 or (settings.data_parallel or 1) > 1):
            problem = f"{named(loss=kind)} compares all pairs of a step with each other"
            cure = f"leave {named('accumulate')} and {named('data_parallel')} out"
            raise ConfigError(f"{problem}; {cure}, and give a larger {named('batch')}")

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the preference loss of pairs."""
        if not batch["places"].size:  # a rank without texts
            return loss_of_none(model, batch)
        fields = model.log_probs(batch["tokens"], batch["labels"], offsets=batch.get("offsets"))
        rows, mask, likely = gathered(fields.log_probs, batch["places"]), batch["answer_mask"], None
        options = {**self.loss_options}
        if "weights" in batch:
            options["weights"] = batch["weights"]
        reference = batch.get("reference")
        loss = averaged(preference, rows, mask, reference, count=batch["count"], **options)
        if self.nll:
            count = batch.get("likely_count", 1)
            likely = averaged(nll, fields.log_probs, batch["likely"], count=count)
            loss = loss + likely * self.nll
        if (sink := batch.get("sink")) is not None:
            sink.append(self._sums(value_of(rows), batch, value_of(likely)))
        return loss

    def _sums(self, rows: Array, batch: Mapping[str, Any], likely: Any) -> Array:
        """Return the sums: pairs, correct pairs, rewards and log-probs of both answers, the nll."""
        mask, half, beta = batch["answer_mask"], len(rows) // 2, self.loss_options.get("beta", BETA)
        rewards = implicit_rewards(rows, mask, batch.get("reference"), beta=beta)
        if self.loss_options["kind"] in (
            "simpo",
            "orpo",
        ):  # they use mean log-probabilities
            rewards = rewards / np.maximum(mask.sum(axis=1), 1)
        texts, right = np.where(mask, rows, 0).sum(axis=1), rewards[:half] > rewards[half:]
        of_both = [each[part].sum() for each in (rewards, texts) for part in halves(half)]
        pairs = batch["weights"].sum() if "weights" in batch else half
        return stacked([pairs, right.sum(), *of_both, 0.0 if likely is None else likely], rows)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch, and the indices of its answers: chosen ones first."""
        arrays, starts = super().inputs(batch), starts_of(batch)
        if self.nll:
            likely = batch.labels != IGNORE
            likely = batch.beside["real"].copy() if self.whole else likely
            for start, stop in zip(starts[1::2], starts[2::2], strict=True):  # rejected texts
                likely.reshape(-1)[start:stop] = False
            labels = np.where(likely, batch.tokens, batch.labels)
            predicted = next_labels(batch.tokens, np.where(likely, labels, IGNORE), batch.offsets)
            arrays |= {"labels": labels, "likely": predicted != IGNORE}
        order = [*range(0, len(starts) - 1, 2), *range(1, len(starts), 2)]
        arrays |= answers(batch, order, reference=self.compares)
        return arrays | real_texts(batch, self.group)

    def padded(self, batch: Batch) -> Batch:
        """Return a batch as ``in_few_sizes``; kinds that sort all pairs would sort padding, too."""
        return batch if self.loss_options["kind"] in SORTED else in_few_sizes(batch)

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the number of pairs, and the number of tokens in the nll term."""
        counts = super().counts(batches)
        if self.nll:
            likely = sum(int(self.inputs(batch)["likely"].sum()) for batch in batches)
            counts["likely_count"] = max(1, likely)
        return counts

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return accuracy, margin, rewards and log-probs of both answers, and the nll."""
        pairs, right, won, lost, chosen, rejected, likely = map(float, sums)
        each = {"accuracy": right, "margin": won - lost, "reward_chosen": won}
        each |= {"reward_rejected": lost, "log_prob_chosen": chosen, "log_prob_rejected": rejected}
        means: dict[str, float | None] = {n: v / max(pairs, 1) for n, v in each.items()}
        return means | ({"nll": likely} if self.nll else {})


@dataclasses.dataclass(frozen=True)
class Kto(Method):
    """Minimizes ``losses.kto`` of answers that are rated desirable or undesirable.

    A second text follows each answer: the same question with the answer to another question.  The
    mean divergence of these texts from the reference model is the zero point of the rewards.
    """

    group: int = 2
    unit: str = "answers"
    rates: tuple[float, float] | None = RATES
    sums: int = 4
    constants: tuple[str, ...] = ("k",)

    def bound(self, settings: Any) -> Self:
        """Return this method with the settings; only the loss kto needs the second texts."""
        options = self.options(settings)
        return dataclasses.replace(self, loss_options=options, group=1 + (options["kind"] == "kto"))

    def check(self, settings: Any) -> None:
        """Raise an error of the loss for these options: call the loss on an answer of one token."""
        one = np.zeros((1, 1), FLOAT32)
        options = {n: v for n, v in self.loss_options.items() if n in ("kind", "beta")}
        kto(one, one == 0, one, one[0] == 0, **options)

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the KTO loss of answers."""
        if not batch["places"].size:  # a rank without texts
            return loss_of_none(model, batch)
        fields = model.log_probs(batch["tokens"], batch["labels"], offsets=batch.get("offsets"))
        rows, good = gathered(fields.log_probs, batch["places"]), batch["desirable"]
        options = {n: v for n, v in self.loss_options.items() if n in ("kind", "beta")}
        options |= {"k": batch.get("k", 0.0)} if self.group == 2 else {}
        options |= {"weights": self._weights(good, rows, batch.get("weights"))}
        texts = batch["answer_mask"], batch["reference"]
        loss = averaged(kto, rows, *texts, good, count=batch["count"], **options)
        if (sink := batch.get("sink")) is not None:
            beta = self.loss_options.get("beta", BETA)
            rewards = implicit_rewards(value_of(rows), *texts, beta=beta)
            sums = [good.sum(), np.where(good, rewards, 0).sum()]
            bad = ~good & batch["weights"].astype(bool) if "weights" in batch else ~good
            sums += [bad.sum(), np.where(good, 0, rewards).sum()]
            sink.append(stacked(sums, value_of(rows)))
        return loss

    def _weights(self, good: Array, rows: Any, real: Array | None) -> Any:
        """Return the weight of each answer, 0 for padding; None if all weights are 1."""
        weights = (
            self.loss_options.get("desirable_weight"),
            self.loss_options.get("undesirable_weight"),
        )
        if weights == (None, None):
            return real
        desirable, undesirable = (1.0 if weight is None else weight for weight in weights)
        weights = np.where(good, rows.dtype.type(desirable), rows.dtype.type(undesirable))
        return weights if real is None else weights * real

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch without the second texts."""
        own = self._first_texts(batch)
        good = firsts(own, "desirable")
        arrays = answers(own, range(len(good)), reference=True) | real_texts(own)
        return super().inputs(own) | arrays | {"desirable": good}

    def padded(self, batch: Batch) -> Batch:
        """Return a batch without the second texts, as ``in_few_sizes``."""
        return in_few_sizes(self._first_texts(batch))

    def _first_texts(self, batch: Batch) -> Batch:
        """Return a batch without the second texts."""
        return every(batch, 0) if batch.group == 2 else batch

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return k: the mean divergence of the second texts from the reference, at least 0."""
        total = np.zeros(2)
        for batch in batches if self.group == 2 else ():
            other = every(batch, 1)
            if not other.tokens.size and model.gather is None:
                continue  # with ``gather``, other ranks need the weights of this rank
            own = placed(super().inputs(other), model.table)
            rows = model.log_probs(**own).log_probs.reshape(-1)
            arrays = answers(other, range(len(starts_of(other)) - 1), reference=True)
            ratios = to_numpy(rows)[arrays["places"]] - arrays["reference"]
            total += ratios.sum(where=arrays["answer_mask"], dtype=np.float64), len(ratios)
        divergence, texts = summed(total)
        return {"k": max(0.0, float(divergence / max(texts, 1)))}

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return the margin, the rewards of desirable and undesirable answers, and the KL term."""
        good, good_rewards, bad, bad_rewards = map(float, sums)
        won, lost = good_rewards / good if good else None, bad_rewards / bad if bad else None
        margin = None if won is None or lost is None else won - lost
        each = {"margin": margin, "reward_desirable": won, "reward_undesirable": lost}
        return each | ({"kl": constants["k"]} if self.group == 2 else {})
