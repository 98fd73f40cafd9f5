"""Methods that learn from rewards of their own answers: GRPO and RLOO.

A step draws answers to its prompts by the model as it is, rewards them, and makes those likelier
that are better than the others of their prompt.  All of it depends only on the model, the prompts
and the number of the batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..errors import ConfigError
from ..losses import advantages, policy
from ..machine import format_bytes
from ..models.loss import IGNORE
from ..models.parse import parse
from ..placement import to_numpy
from .method import PROMPTS, Method, answers, gathered, placed, stacked, starts_of, value_of
from .naming import named
from .preference_methods import RATES
from .rewards import GIVEN, Reward, rewards_of, scores
from .text import Batch, Example
from .turns import end_tokens

SAMPLES, NEW = 8, 256  # answers to a prompt, and tokens of an answer at most
CLIP = 0.2
RANKS = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")


@dataclasses.dataclass(frozen=True)
class Policy(Method):
    """Learns from rewards of answers that it draws: ``losses.policy``.

    Attributes
    ----------
    rewards : tuple of Reward
        The functions whose weighted sum is the reward.
    text : Records
        The prompts, with what the rewards know of them.
    """

    reads: tuple[str, ...] = (PROMPTS,)
    unit: str = "prompts"
    rates: tuple[float, float] | None = RATES
    sums: int = 5
    draws: bool = True
    rewards: tuple[Reward, ...] = ()
    text: Any = None
    new: int = NEW

    @property
    def samples(self) -> int:
        """The number of answers to a prompt."""
        return int(self.given.get("samples", SAMPLES))

    @property
    def temperature(self) -> float:
        """That of drawing, by which the log-probabilities of training are too."""
        return float(self.given.get("temperature", 1.0))

    @property
    def invariant(self) -> bool:
        """Whether the log-probabilities of drawing and of training have the same bits."""
        return bool(self.given.get("invariant"))

    @property
    def loss(self) -> dict[str, Any]:
        """The options of the loss."""
        return {"kind": self.given["kind"], "beta": self.given.get("beta", 0.0)}

    def bound(self, settings: Any) -> Self:
        """Return this method with the values of settings."""
        given = self.options(settings)
        rewards = rewards_of(given.pop("reward", ()))
        return dataclasses.replace(self, given=given, rewards=rewards)

    def check(self, settings: Any) -> None:
        """Raise without a reward, and for settings that its own answers do not go with."""
        method = named(method=settings.method)
        if not self.rewards:
            cure = f"give {named('reward')}, FILE.py:FUNCTION"
            raise ConfigError(f"{method} has nothing to learn from; {cure}")
        ranks = [name for name in RANKS if (getattr(settings, name) or 1) > 1]
        if ranks:
            cure = f"leave {named(*ranks)} out"
            raise ConfigError(f"{method} draws its answers in one process; {cure}")
        for name in ("neftune", "lora_dropout"):
            if getattr(settings, name):
                problem = f"{method} draws its answers without {named(name)}"
                raise ConfigError(f"{problem}, so it learns without; leave it out")
        if self.loss["beta"] and settings.lora is None:
            problem = f"{named('beta')} of {method} compares with the model before the run"
            raise ConfigError(f"{problem}, which adapters keep; add {named('lora')}")

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method with its prompts, and the most tokens of an answer to them."""
        every = (record for part in (text.train, text.held_out) for record in part)
        columns = dict.fromkeys((*GIVEN, *(name for record in every for name in record.value)))
        for reward in self.rewards:
            reward.given(columns)
        new = self.given.get("max_new_tokens") or max(1, min(NEW, parse(config).positions // 2))
        return dataclasses.replace(self, text=text, new=new)

    @property
    def said(self) -> str:
        """What rewards the answers."""
        each = (f"{r.weight:g} x {r.name}" if r.weight != 1 else r.name for r in self.rewards)
        return f"rewarded by {', '.join(each)}"

    def account(self, loop: Any) -> str:
        """Return in words what a pass draws, and the bytes of the keys and values of it."""
        config, rows = loop.model.config, loop.plan.batch * self.samples
        tokens = loop.training_data.largest[1]
        windows = (config.window_of(layer) or tokens for layer in range(config.layers))
        each = 2 * config.kv_heads * config.dim * loop.model.dtype.itemsize
        cache = format_bytes(rows * each * sum(min(window, tokens) for window in windows))
        few = f"{rows:,} answers of {self.new:,} tokens at most"
        return f"a pass draws {few}, whose keys and values take {cache}"

    def record(self, number: float) -> Any:
        """Return a prompt by its number: those that are held out come last."""
        train, place = self.text.train, int(number)
        return train[place] if place < len(train) else self.text.held_out[place - len(train)]

    def answered(self, loop: Any, batch: Batch, samples: int, **options: Any) -> Any:
        """Return prompts of a batch, the answers drawn to them, and the rewards of these.

        Returns
        -------
        prompts : list of (tokens,) arrays
        drawn : Rollouts
        rewards : (answers, functions) float64
        """
        real, numbers = batch.beside["real"], batch.beside["value"][:, 0]
        prompts = [row[own] for row, own in zip(batch.tokens, real, strict=True)]
        ends = None
        if loop.chat is not None:
            ends = end_tokens(loop.chat, loop.tokenizer, loop.model.config)
        drawn = loop.model.rollouts(
            prompts, samples=samples, max_new_tokens=self.new, stop=ends,
            invariant=self.invariant, **options,
        )  # fmt: skip
        stops = {*(loop.model.config.end_tokens if ends is None else ends)}
        records = [self.record(number) for number in np.repeat(numbers, samples)]
        own = drawn.completions()
        texts = [loop.tokenizer.decode(each[: len(each) - (each[-1] in stops)]) for each in own]
        columns: dict[str, list[Any]] = {
            "prompts": [record.messages or record.prompt for record in records],
            "completions": [
                [{"role": "assistant", "content": text}] if record.messages else text
                for record, text in zip(records, texts, strict=True)
            ],
            "completion_ids": own,
        }
        names = dict.fromkeys(name for record in records for name in record.value)
        columns |= {name: [record.value.get(name) for record in records] for name in names}
        where = [self.text.place(record.line) for record in records]
        return prompts, drawn, scores(self.rewards, columns, where.__getitem__)

    def drawn(self, loop: Any, batch: Batch, number: int) -> Batch:
        """Return the answers that the model draws to the prompts of a batch, with their gains."""
        draw = np.random.default_rng([loop.plan.seed, number])
        seed, temperature = int(draw.integers(2**63)), self.temperature
        prompts, found, rewards = self.answered(
            loop, batch, self.samples, temperature=temperature, seed=seed
        )
        kind = "rloo" if self.loss["kind"] == "rloo" else "grpo"
        weights = np.array([each.weight for each in self.rewards])
        gains = advantages(rewards, self.samples, kind=kind, weights=weights)
        known, mask = to_numpy(found.log_probs), to_numpy(found.mask)
        texts = []
        for row, answer in enumerate(found.completions()):
            prompt = prompts[row // self.samples]
            labels = np.append(np.full(len(prompt), IGNORE), answer)
            old = np.append(np.zeros(len(prompt), FLOAT32), known[row][mask[row]])
            tokens = np.append(prompt, answer)
            texts.append(Example(tokens, labels, 0, reference=old, value=float(gains[row])))
        shape = loop.training_data.batches.shape._replace(pack=loop.plan.pack is not False)
        drawn: Batch = shape.batch_of(texts)
        beside = {**drawn.beside, "rewards": rewards}
        if self.loss["beta"]:
            arrays = placed(super().inputs(drawn), loop.model.table)
            options: dict[str, Any] = {"temperature": temperature, "invariant": self.invariant}
            before = loop.model.base.log_probs(**arrays, **options).log_probs
            rows = np.append(FLOAT32.type(0), to_numpy(before).reshape(-1)[:-1])
            beside["base"] = rows.reshape(drawn.tokens.shape)  # of a token, not of the place before
        return drawn._replace(beside=beside)

    def evaluated(self, loop: Any) -> dict[str, Any]:
        """Return the line of an evaluation: the rewards of the likeliest answers.

        The loss is minus their mean, of which the loss of a step estimates the slope.
        """
        rewards, lengths = [], []
        for batch in loop.training_data.held_out:
            _, drawn, each = self.answered(loop, batch, 1, top_k=1, seed=0)
            rewards.append(each)
            lengths += [*map(len, drawn.completions())]
        measured = self._rewards(np.concatenate(rewards))
        if measured["reward"] is None:
            raise ConfigError("no reward judges an answer to a held-out prompt; give one that does")
        measured |= {"length": float(np.mean(lengths))}
        line = {"held_out_loss": -measured["reward"], "held_out_prompts": len(lengths)}
        return line | {f"held_out_{name}": value for name, value in measured.items()}

    def _rewards(self, rewards: Array) -> dict[str, Any]:
        """Return the mean reward, and of several functions the mean of each."""
        known = ~np.isnan(rewards)
        each = zip(rewards.T, known.T, strict=True)
        means = [float(r[k].mean()) if k.any() else None for r, k in each]
        total = np.where(known, rewards, 0) @ np.array([each.weight for each in self.rewards])
        judged = known.any(axis=1)
        result = {"reward": float(total[judged].mean()) if judged.any() else None}
        if len(means) > 1:
            result |= {f"reward_{r.name}": m for r, m in zip(self.rewards, means, strict=True)}
        return result

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return drawn answers, and where in them their tokens are."""
        starts = starts_of(batch)
        order = range(len(starts) - 1)
        arrays = answers(batch, order, reference=True)
        arrays["old"] = arrays.pop("reference")
        gains = batch.beside["value"].reshape(-1)[starts[:-1]]
        arrays["gains"] = gains.astype(FLOAT32)
        if self.loss["beta"]:
            base = batch.beside.get("base", batch.beside["reference"])
            arrays |= answers(batch._replace(beside={"reference": base}), order, reference=True)
        return super().inputs(batch) | arrays

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return what the loss divides by: tokens, texts, or texts of the largest length."""
        texts = sum(batch.label_count for batch in batches)
        tokens = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
        of_kind = {"dapo": tokens, "dr_grpo": texts * self.new}
        return {"count": max(1, of_kind.get(self.loss["kind"], texts))}

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return the mean rewards of a step."""
        return self._rewards(np.concatenate([batch.beside["rewards"] for batch in batches]))

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the loss of answers."""
        texts = {name: batch.get(name) for name in ("tokens", "labels", "offsets")}
        options: dict[str, Any] = {"temperature": self.temperature, "invariant": self.invariant}
        found = model.log_probs(**texts, **options)
        rows, mask = gathered(found.log_probs, batch["places"]), batch["mask"]
        old, reference, gains = batch["old"], batch.get("reference"), batch["gains"]
        loss = policy(
            rows, mask, gains, old=old, reference=reference, count=batch["count"], **self.loss
        )
        if (sink := batch.get("sink")) is not None:
            entropy = value_of(found.entropy).sum()
            sink.append(self._sums(value_of(rows), mask, old, reference, gains, entropy))
        return loss

    def _sums(
        self, rows: Array, mask: Array, old: Array, reference: Any, gains: Array, entropy: Any
    ) -> Array:
        """Return texts, tokens, entropy, ratios that are clipped, and the divergence."""
        d, gain = np.where(mask, rows - old, 0), gains[:, None]
        counted: Any = mask
        if self.loss["kind"] == "rloo":  # one ratio of a text
            d, counted = d.sum(axis=1, keepdims=True), mask.any(axis=1, keepdims=True)
        ratio = np.exp(d)
        out = ((ratio > 1 + CLIP) & (gain > 0)) | ((ratio < 1 - CLIP) & (gain < 0))
        q = 0 * rows if reference is None else np.where(mask, reference - rows, 0)
        sums = [len(rows), mask.sum(), entropy, (out & counted).sum(), (np.exp(q) - q - 1).sum()]
        return stacked(sums, rows)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return rewards, divergence, entropy, the share of ratios that are clipped, and length."""
        texts, tokens, entropy, clipped, divergence = map(float, sums)
        ratios = texts if self.loss["kind"] == "rloo" else tokens
        each = {"kl": divergence / max(tokens, 1)} if self.loss["beta"] else {}
        each |= {"entropy": entropy / max(tokens, 1), "clipped": clipped / max(ratios, 1)}
        return {**constants, **each, "length": tokens / max(texts, 1)}

    def full(self, batch: int, tokens: int) -> dict[str, Any]:
        """Return the inputs of answers that fill their rows."""
        return super().full(batch * self.samples, tokens)
