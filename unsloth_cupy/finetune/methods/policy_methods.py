"""Methods that learn from rewards of their own answers: GRPO and RLOO.

A step draws answers to its prompts by the model as it is, rewards them, and makes those likelier
that are better than the others of their prompt; a few steps may learn from the same answers.  All
of it depends only on the model, the prompts and the number of the batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...losses import advantages, policy
from ...machine import format_bytes
from ...memory.planned import as_input
from ...models.generation.rollouts import planned_rollouts
from ...models.objective import IGNORE
from ...models.parse import parse
from ...parallel.communicator import part
from ...placement import to_numpy
from ..data.prompts import ARGUMENTS
from ..data.text import Batch, Example
from ..data.turns import end_tokens
from ..naming import named
from ..setting import setting
from .method import (
    Method,
    answers,
    gathered,
    loss_of_none,
    placed,
    stacked,
    starts_of,
    value_of,
)
from .preference_methods import RATES
from .reward_models import RewardModel
from .reward_pool import SECONDS
from .rewards import Reward, RewardFunction, rewards_of, scores

SAMPLES, NEW = 8, 256  # answers to a prompt, and tokens of an answer at most
CLIP = 0.2
RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Settings of the methods that sample answers."""

    reward: Sequence[str] = setting(
        "method", "Of grpo and rloo: FILE.py:FUNCTION that rewards answers, or the folder of a"
        " model trained by reward, then :WEIGHT if it is not 1; may be repeated.", (),
    )  # fmt: skip
    reward_seconds: float | None = setting(
        "method", "Seconds in which a call of a reward must end; answers that take longer alone"
        f" are not judged.  [default: {SECONDS:g}]", above=0, kept=False, rare=True,
    )  # fmt: skip
    samples: int | None = setting(
        "method", f"Answers sampled for each prompt.  [default: {SAMPLES}]", least=2
    )
    max_new_tokens: int | None = setting(
        "method", f"Most new tokens of an answer.  [default: {NEW}, or half the positions]", least=1
    )
    num_iterations: int | None = setting(
        "method", "Updates by the same answers.  [default: 1]", least=1, rare=True
    )
    steps_per_generation: int | None = setting(
        "method", "Batches of prompts that are answered before the next update.  [default:"
        " {accumulate}]", least=1, rare=True,
    )  # fmt: skip
    invariant: bool = setting(
        "method", "Of grpo and rloo: sampling and training compute the same bits, so that all"
        " ratios of a first step are 1; slower.", False, rare=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Policy(Method):
    """Learns from rewards of answers that it draws: ``losses.policy``.

    Attributes
    ----------
    rewards : tuple of Reward
        The functions and models whose weighted sum is the reward.
    text : Records
        The prompts, with what the rewards know of them.
    drawn_at_once : int
        Batches whose prompts are answered by the same model.
    """

    unit: str = "prompts"
    rates: tuple[float, float] | None = RATES
    sums: int = 6
    is_on_policy: bool = True
    rewards: tuple[Reward, ...] = ()
    text: Any = None
    max_new_tokens: int = NEW
    drawn_at_once: int = 1

    @property
    def samples(self) -> int:
        """The number of answers to a prompt."""
        return int(self.loss_options.get("samples", SAMPLES))

    @property
    def iterations(self) -> int:
        """How many updates learn from an answer."""
        return int(self.loss_options.get("num_iterations", 1))

    @property
    def temperature(self) -> float:
        """That of drawing, by which the log-probabilities of training are too."""
        return float(self.loss_options.get("temperature", 1.0))

    @property
    def invariant(self) -> bool:
        """Whether the log-probabilities of drawing and of training have the same bits."""
        return bool(self.loss_options.get("invariant"))

    @property
    def loss(self) -> dict[str, Any]:
        """The options of the loss."""
        return {"kind": self.loss_options["kind"], "beta": self.loss_options.get("beta", 0.0)}

    @property
    def other_models(self) -> Sequence[Any]:
        """The models that reward."""
        models = (getattr(each, "model", None) for each in self.rewards)
        return [model for model in models if model is not None]

    def bound(self, settings: Any) -> Self:
        """Return this method with the values of settings."""
        options = self.options(settings)
        seconds = options.pop("reward_seconds", SECONDS)
        at_once = options.pop("steps_per_generation", settings.accumulate)
        rewards = rewards_of(options.pop("reward", ()), seconds)
        return dataclasses.replace(
            self, loss_options=options, rewards=rewards, drawn_at_once=at_once
        )

    def with_models(self, read: Callable[[Any], Any]) -> Self:
        """Return this method with what ``read`` knows of the folders of models that reward."""
        return self._rewarded(lambda each: each.with_model(read))

    def planned(self, create: Callable[[Any], Any]) -> Self:
        """Return this method with models that ``create`` makes of their configs."""
        return self._rewarded(lambda one: dataclasses.replace(one, model=create(one.model)))

    def _rewarded(self, changed: Callable[[Any], Any]) -> Self:
        """Return this method with other models that reward."""
        each = (changed(one) if hasattr(one, "model") else one for one in self.rewards)
        return dataclasses.replace(self, rewards=tuple(each))

    def check(self, settings: Any) -> None:
        """Raise without a reward, and for settings that its own answers do not go with."""
        method = named(method=settings.method)
        if not self.rewards:
            cure = f"give {named('reward')}, FILE.py:FUNCTION or the folder of a reward model"
            raise ConfigError(f"{method} has nothing to learn from; {cure}")
        limited = settings.reward_seconds is not None
        if limited and all(type(each) is not RewardFunction for each in self.rewards):
            of_functions = f"{named('reward_seconds')} is of functions in files"
            problem = f"{of_functions}, and {named('reward')} names none"
            raise ConfigError(f"{problem}; leave it out")
        ranks = [name for name in RANKS if (getattr(settings, name) or 1) > 1]
        if ranks and self.invariant:
            cure = f"use {named('data_parallel')} in place of {named(*ranks)}"
            raise ConfigError(f"{named('invariant')} is for a model that is whole; {cure}")
        for name in ("neftune", "lora_dropout"):
            if getattr(settings, name):
                problem = f"{method} draws its answers without {named(name)}"
                raise ConfigError(f"{problem}, so it learns without; leave it out")
        if self.loss["beta"] and settings.lora is None:
            problem = f"{named('beta')} of {method} compares with the model before the run"
            raise ConfigError(f"{problem}, which adapters keep; add {named('lora')}")
        if self.drawn_at_once % settings.accumulate:
            both = named(accumulate=settings.accumulate)
            problem = f"{named(steps_per_generation=self.drawn_at_once)} is not a multiple of"
            raise ConfigError(f"{problem} {both}, the batches of an update; give one that is")

    def check_ranks(self, settings: Any) -> None:
        """Raise for ranks of which none can draw answers without the others."""
        for name in ("zero", "expert_parallel"):
            if (size := getattr(settings, name) or 1) > 1:
                method = named(method=settings.method)
                problem = f"is not for {method}, whose ranks draw answers on their own"
                cure = f"use {named(zero=1)}, or {named('tensor_parallel')}"
                raise ConfigError(f"{named(**{name: size})} {problem}; {cure} to save memory")

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method with its prompts, and the most tokens of an answer to them."""
        every = (record for part in (text.train, text.held_out) for record in part)
        columns = dict.fromkeys((*ARGUMENTS, *(name for record in every for name in record.value)))
        for reward in self.rewards:
            reward.check(columns)
        return dataclasses.replace(self.sized(config), text=text)

    def sized(self, config: Mapping[str, Any]) -> Self:
        """Return this method with the most tokens of an answer, by the config.json of a model."""
        new = self.loss_options.get("max_new_tokens") or max(
            1, min(NEW, parse(config).positions // 2)
        )
        return dataclasses.replace(self, max_new_tokens=new)

    @property
    def summary(self) -> str:
        """What rewards the answers."""
        each = (f"{r.weight:g} x {r.name}" if r.weight != 1 else r.name for r in self.rewards)
        return f"rewarded by {', '.join(each)}"

    def account(self, loop: Any) -> str:
        """Return in words what a pass draws, and the bytes of the keys and values of it."""
        config, rows = loop.model.config, loop.plan.batch * self.samples
        tokens = loop.training_data.largest[1]
        windows = (config.window_of(layer) or tokens for layer in range(config.layers))
        sizes = loop.model.cache_sizes
        stored = sizes["kv_heads"] * sizes["dim"] * (2 if sizes["latent"] is None else 1)
        each = stored * loop.model.dtype.itemsize
        cache = format_bytes(rows * each * sum(min(window, tokens) for window in windows))
        few = f"{rows:,} answers of {self.max_new_tokens:,} tokens at most"
        return f"a pass draws {few}, whose keys and values take {cache}"

    def updates(self, accumulate: int) -> int:
        """Return the updates between two times at which answers are drawn."""
        return self.drawn_at_once // accumulate * self.iterations

    def first(self, step: int, accumulate: int) -> int:
        """Return the number of the first batch of a step."""
        rollout, place = divmod(step, self.updates(accumulate))
        return rollout * self.drawn_at_once + place * accumulate % self.drawn_at_once

    def steps(self, batches: int, accumulate: int) -> int:
        """Return the number of steps that so many batches make."""
        return -(-batches // self.drawn_at_once) * self.updates(accumulate)

    def drawn_with(self, number: int) -> range:
        """Return the numbers of the batches whose answers are drawn with those of a batch."""
        first = number - number % self.drawn_at_once
        return range(first, first + self.drawn_at_once)

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
        late : int
            How often a function took too long for an answer.
        """
        real, numbers = batch.beside["real"], batch.beside["value"][:, 0]
        prompts = [row[own] for row, own in zip(batch.tokens, real, strict=True)]
        ends = None
        if loop.chat is not None:
            ends = end_tokens(loop.chat, loop.tokenizer, loop.model.config)
        drawn = loop.model.rollouts(
            prompts, samples=samples, max_new_tokens=self.max_new_tokens, stop=ends,
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
        late = list[int]()
        more = {"tools": [record.tools for record in records], "late": late}
        rewards = np.zeros((len(records), len(self.rewards)))
        if loop.ranks.judges:
            rewards = scores(self.rewards, columns, where.__getitem__, **more)
        rewards = loop.ranks.judged(rewards)
        return prompts, drawn, rewards, int(loop.ranks.judged(np.array(float(len(late)))))

    def drawn(self, loop: Any, batches: Sequence[Batch], numbers: Sequence[int]) -> list[Batch]:
        """Return the answers that the model draws to the prompts of batches, with their gains.

        Ranks that hold the same weights answer some of the prompts each, and get the answers of
        all; those that divide a model draw the same tokens, and one of them gets the rewards.
        """
        results = [self._drawn(loop, *each) for each in zip(batches, numbers, strict=True)]
        tokens = sum(int((batch.labels != IGNORE).sum()) for batch in results) / len(results)
        return [
            batch._replace(facts={**batch.facts, "tokens": np.array(tokens)}) for batch in results
        ]

    def _drawn(self, loop: Any, batch: Batch, number: int) -> Batch:
        """Return the answers to the prompts of a batch."""
        draw, data = np.random.default_rng([loop.plan.seed, number]), loop.ranks.replicas
        seed, share = int(draw.integers(2**63)), part(len(batch.tokens), data)
        beside = {name: each[share] for name, each in batch.beside.items()}
        own = batch._replace(tokens=batch.tokens[share], beside=beside)
        shape = loop.training_data.batches.shape._replace(pack=loop.plan.pack is not False)
        texts, rewards, late = list[Example](), np.zeros((0, len(self.rewards))), 0
        if len(own.tokens):  # a batch of few prompts leaves some ranks without
            texts, rewards, late = self._texts(loop, own, seed, share.start * self.samples, shape)
        if data.size > 1:
            texts = _of_all(texts, data, based=bool(self.loss["beta"]))
            rewards, late = data.all_gather(rewards), int(data.all_reduce(np.array(float(late))))
        kind = "rloo" if self.loss["kind"] == "rloo" else "grpo"
        weights = np.array([each.weight for each in self.rewards])
        gains = advantages(rewards, self.samples, kind=kind, weights=weights)
        texts = [t._replace(value=float(g)) for t, g in zip(texts, gains, strict=True)]
        drawn: Batch = shape.batch_of(texts)
        return drawn._replace(facts={"rewards": rewards, "late": np.array(late)})

    def _texts(
        self, loop: Any, batch: Batch, seed: int, first: int, shape: Any
    ) -> tuple[list[Example], Array, int]:
        """Return the answers to prompts, their rewards, and how many took a function too long."""
        prompts, rollouts, rewards, late = self.answered(
            loop, batch, self.samples, temperature=self.temperature, seed=seed, first=first
        )
        known, mask, real = map(to_numpy, (rollouts.log_probs, rollouts.mask, rollouts.real))
        routes = None if rollouts.routes is None else to_numpy(rollouts.routes)
        texts = []
        for row, answer in enumerate(rollouts.completions()):
            prompt = prompts[row // self.samples]
            labels = np.append(np.full(len(prompt), IGNORE), answer)
            old = np.append(np.zeros(len(prompt), FLOAT32), known[row][mask[row]])
            tokens = np.append(prompt, answer)
            own = None if routes is None else routes[row][real[row]]
            texts.append(Example(tokens, labels, 0, reference=old, routes=own))
        if self.loss["beta"]:
            packed = shape.batch_of(texts)
            arrays = placed(super().inputs(packed), loop.model.table)
            options: dict[str, Any] = {"temperature": self.temperature, "invariant": self.invariant}
            base = loop.model.base
            base.context = None  # the texts are of this rank alone
            before = base.log_probs(**arrays, **options).log_probs
            rows = np.append(FLOAT32.type(0), to_numpy(before).reshape(-1)[:-1])
            starts = starts_of(packed)  # of a token, not of the place before
            texts = [
                text._replace(base=rows[start : start + len(text.tokens)])
                for text, start in zip(texts, starts, strict=False)
            ]
        return texts, rewards, late

    def evaluated(self, loop: Any) -> dict[str, Any]:
        """Return the line of an evaluation: the rewards of the likeliest answers.

        The loss is minus their mean, of which the loss of a step estimates the slope.
        """
        rewards, lengths, data = (
            [np.zeros((0, len(self.rewards)))],
            list[int](),
            loop.ranks.replicas,
        )
        for batch in loop.training_data.held_out[data.rank :: data.size]:
            _, drawn, each, _ = self.answered(loop, batch, 1, top_k=1, seed=0)
            rewards.append(each)
            lengths += [*map(len, drawn.completions())]
        measured = self._rewards(data.all_gather(np.concatenate(rewards)))
        lengths = data.all_gather(np.array(lengths, np.float64))
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
        if "routes" in batch.beside:
            arrays["routes"] = batch.beside["routes"]
        return super().inputs(batch) | arrays

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return what the loss divides by: tokens, texts, or texts of the largest length.

        Tokens of a batch are the mean of those that are drawn together, as TRL has it.
        """
        texts = sum(batch.label_count for batch in batches)
        tokens = sum(float(batch.facts["tokens"]) for batch in batches)
        of_kind = {"dapo": tokens, "dr_grpo": texts * self.max_new_tokens}
        return {"count": max(1, of_kind.get(self.loss["kind"], texts))}

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return the mean rewards of a step, and how often one took too long, if it did."""
        late = sum(int(batch.facts["late"]) for batch in batches)
        rewards = self._rewards(np.concatenate([batch.facts["rewards"] for batch in batches]))
        return rewards | ({"reward_late": late} if late else {})

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the loss of answers."""
        if not batch["places"].size:  # a rank without texts
            return loss_of_none(model, batch)
        texts = {name: batch.get(name) for name in ("tokens", "labels", "offsets", "routes")}
        options: dict[str, Any] = {"temperature": self.temperature, "invariant": self.invariant}
        fields = model.log_probs(**texts, **options)
        rows, mask = gathered(fields.log_probs, batch["places"]), batch["said"]
        old, reference, gains = batch["old"], batch.get("reference"), batch["gains"]
        loss = policy(
            rows, mask, gains, old=old, reference=reference, count=batch["count"], **self.loss
        )
        if (sink := batch.get("sink")) is not None:
            entropy = value_of(fields.entropy).sum()
            sink.append(self._sums(value_of(rows), mask, old, reference, gains, entropy))
        return loss

    def _sums(
        self, rows: Array, mask: Array, old: Array, reference: Any, gains: Array, entropy: Any
    ) -> Array:
        """Return texts, tokens, entropy, ratios clipped, ratios summed, and the divergence."""
        d, gain = np.where(mask, rows - old, 0), gains[:, None]
        counted: Any = mask
        if self.loss["kind"] == "rloo":  # one ratio of a text
            d, counted = d.sum(axis=1, keepdims=True), mask.any(axis=1, keepdims=True)
        ratio = np.exp(d)
        out = ((ratio > 1 + CLIP) & (gain > 0)) | ((ratio < 1 - CLIP) & (gain < 0))
        q = 0 * rows if reference is None else np.where(mask, reference - rows, 0)
        ratios = (out & counted).sum(), np.where(counted, ratio, 0).sum()
        sums = [len(rows), mask.sum(), entropy, *ratios, (np.exp(q) - q - 1).sum()]
        return stacked(sums, rows)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return rewards, divergence, entropy, share of ratios clipped, their mean, and length."""
        texts, tokens, entropy, clipped, ratio, divergence = map(float, sums)
        ratios = texts if self.loss["kind"] == "rloo" else tokens
        each = {"kl": divergence / max(tokens, 1)} if self.loss["beta"] else {}
        each |= {"entropy": entropy / max(tokens, 1), "clipped": clipped / max(ratios, 1)}
        each["ratio"] = ratio / max(ratios, 1)
        return {**constants, **each, "length": tokens / max(texts, 1)}

    def question_length(self, tokens: int) -> int:
        """Return how many of the tokens of a full row are a question at least."""
        return max(1, tokens - self.max_new_tokens)

    def rehearse(self, model: Any, rows: int, tokens: int) -> None:
        """Do with planned arrays what holds memory while answers that fill these rows are drawn."""
        asked, like = self.question_length(tokens), model.table
        planned_rollouts(model, rows // self.samples, self.samples, asked, tokens - asked)
        for reward in self.rewards:
            if isinstance(reward, RewardModel) and reward.model is not None:  # else in another rank
                reward.rehearse(rows, tokens)
        if self.loss["beta"]:
            texts = as_input(np.zeros((rows, tokens), np.int64), like)
            model.base.log_probs(texts, texts)

    def full(self, batch: int, tokens: int) -> dict[str, Any]:
        """Return the inputs of answers that fill their rows."""
        return super().full(batch * self.samples, tokens)


def _of_all(texts: Sequence[Example], data: Any, *, based: bool) -> list[Example]:
    """Return the answers of all data ranks, in the order of their prompts."""
    routed = [text.routes.shape[1:] for text in texts if text.routes is not None]
    own_size = np.array([[len(text.tokens) for text in texts]], np.int64).T
    sizes = data.all_gather(own_size)[:, 0]
    shape = data.all_gather(np.array([routed[0] if routed else (0, 0)])).max(axis=0)
    kinds: dict[str, Any] = {"tokens": np.int64, "labels": np.int64, "reference": FLOAT32}
    kinds |= {"base": FLOAT32} if based else {}
    kinds |= {"routes": np.int32} if shape.any() else {}
    columns = []
    for name, dtype in kinds.items():
        inner = tuple(shape) if name == "routes" else ()
        own = [np.zeros((0, *inner), dtype), *(getattr(text, name) for text in texts)]
        flat = data.all_gather(np.concatenate(own).astype(dtype))
        columns.append(np.split(flat, np.cumsum(sizes)[:-1]))
    each = (dict(zip(kinds, values, strict=True)) for values in zip(*columns, strict=True))
    return [Example(line=0, **values) for values in each]
