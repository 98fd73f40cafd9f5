"""On-policy methods, which train on rewards of answers that the model samples: GRPO and RLOO.

A step samples several answers per prompt from the current model, computes their rewards, and raises
the probability of answers with a higher reward than the other answers to the same prompt.  Several
steps may reuse the same answers.  The result depends only on the model, the prompts and the index
of the batch.
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
from ...models.generation.batch import PAGE
from ...models.generation.conversations import Conversations
from ...models.generation.rollouts import planned_rollouts
from ...models.objective import IGNORE
from ...models.parse import parse
from ...models.text.tokenizer import Tokenizer
from ...parallel.communicator import part
from ...placement import to_numpy
from ...serving.options import Options
from ..data.prompts import ARGUMENTS
from ..data.text import Batch, Example
from ..data.turns import end_tokens
from ..listener import announce
from ..naming import named
from ..setting import setting
from .environments import TURNS, Environment, columns_of, environment_of
from .method import (
    Method,
    answers,
    averaged,
    firsts,
    gathered,
    in_few_sizes,
    loss_of_none,
    placed,
    real_texts,
    stacked,
    starts_of,
    value_of,
)
from .preference_methods import RATES
from .reward_models import RewardModel
from .reward_pool import SECONDS
from .rewards import Reward, RewardFunction, rewards_of, scores

SAMPLES, NEW = 8, 256  # default answers per prompt, and default maximum tokens per answer
CLIP = 0.2  # ratios beyond 1 +- CLIP count as clipped in the log


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Settings of the on-policy methods."""

    reward: Sequence[str] = setting(
        "method", "grpo and rloo: reward function FILE.py:FUNCTION, or folder of a reward model."
        "  Append :WEIGHT to set its weight (default 1).  May be repeated.", (),
    )  # fmt: skip
    environment: str | None = setting(
        "method", "grpo and rloo: environment FILE.py:NAME, with which the model talks in several"
        " turns; its rewards are added to those of {reward}.", rare=True,
    )  # fmt: skip
    max_turns: int = setting(
        "method", "grpo and rloo: maximum number of answers in a conversation with {environment}.",
        TURNS, least=1, rare=True,
    )  # fmt: skip
    reward_seconds: float | None = setting(
        "method", "Time limit of one call of a reward function, in seconds.  After a timeout, the"
        " function is called for each answer alone; an answer that times out again gets no reward."
        f"  [default: {SECONDS:g}]",
        above=0, kept=False, rare=True,
    )  # fmt: skip
    samples: int | None = setting(
        "method",
        f"grpo and rloo: number of answers sampled per prompt.  [default: {SAMPLES}]",
        least=2,
    )
    max_new_tokens: int | None = setting(
        "method",
        f"grpo and rloo: maximum number of new tokens per answer.  [default: {NEW}, but at most"
        " half of the model's positions]",
        least=1,
    )
    num_iterations: int | None = setting(
        "method",
        "grpo and rloo: number of optimizer updates that use each sampled answer.  [default: 1]",
        least=1,
        rare=True,
    )
    steps_per_generation: int | None = setting(
        "method", "grpo and rloo: number of batches of prompts whose answers are sampled at once."
        "  [default: {accumulate}]", least=1, rare=True,
    )  # fmt: skip
    invariant: bool = setting(
        "method", "sft: results are bitwise equal on 1, 2, 4, ... data ranks, and for each split of"
        " {batch} times {accumulate}.  grpo and rloo: log-probabilities are bitwise equal in"
        " sampling and training, so all probability ratios are 1 in the first update.  Slower.",
        False, rare=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Policy(Method):
    """Minimizes ``losses.policy`` of sampled answers and their rewards.

    Attributes
    ----------
    rewards : tuple of Reward
        The reward functions and reward models; the weighted sum of their values is the reward.
    text : Records
        The prompts, with the columns that the reward functions read.
    drawn_at_once : int
        Number of batches whose answers are sampled before the next update.
    environment : Environment or None
        What the model talks with; if it judges rows, it is the last of the rewards too.
    """

    unit: str = "prompts"
    rates: tuple[float, float] | None = RATES
    sums: int = 6
    is_on_policy: bool = True
    rewards: tuple[Reward, ...] = ()
    text: Any = None
    max_new_tokens: int = NEW
    drawn_at_once: int = 1
    environment: Environment | None = None
    max_turns: int = TURNS

    @property
    def samples(self) -> int:
        """The number of answers per prompt."""
        return int(self.loss_options.get("samples", SAMPLES))

    @property
    def iterations(self) -> int:
        """The number of optimizer updates per sampled answer."""
        return int(self.loss_options.get("num_iterations", 1))

    @property
    def temperature(self) -> float:
        """The temperature of sampling; training divides logits by it too."""
        return float(self.loss_options.get("temperature", 1.0))

    @property
    def invariant(self) -> bool:
        """Whether sampling and training compute bitwise equal log-probabilities."""
        return bool(self.loss_options.get("invariant"))

    @property
    def loss(self) -> dict[str, Any]:
        """The options of ``losses.policy``."""
        return {"kind": self.loss_options["kind"], "beta": self.loss_options.get("beta", 0.0)}

    @property
    def other_models(self) -> Sequence[Any]:
        """The reward models."""
        models = (getattr(each, "model", None) for each in self.rewards)
        return [model for model in models if model is not None]

    def bound(self, settings: Any) -> Self:
        """Return a copy of this method that stores the values of the settings."""
        options = self.options(settings)
        seconds = options.pop("reward_seconds", SECONDS)
        at_once = options.pop("steps_per_generation", settings.accumulate)
        rewards: tuple[Any, ...] = rewards_of(options.pop("reward", ()), seconds)
        environment = environment_of(options.pop("environment", None))
        rewards += (environment,) if environment is not None and environment.judges else ()
        return dataclasses.replace(
            self, loss_options=options, rewards=rewards, drawn_at_once=at_once,
            environment=environment, max_turns=options.pop("max_turns", TURNS),
        )  # fmt: skip

    def with_models(self, read: Callable[[Any], Any]) -> Self:
        """Return this method with ``read(folder)`` as the model of each reward model."""
        return self._with_reward_models(lambda each: each.with_model(read))

    def planned(self, create: Callable[[Any], Any]) -> Self:
        """Return this method with ``create(config)`` as the model of each reward model."""
        return self._with_reward_models(
            lambda one: dataclasses.replace(one, model=create(one.model))
        )

    def _with_reward_models(self, replace: Callable[[Any], Any]) -> Self:
        """Return this method with ``replace(reward)`` in place of each reward model."""
        each = (replace(one) if hasattr(one, "model") else one for one in self.rewards)
        return dataclasses.replace(self, rewards=tuple(each))

    def check(self, settings: Any) -> None:
        """Raise a ConfigError without a reward, and for settings that conflict with sampling."""
        method = named(method=settings.method)
        if not self.rewards:
            cure = f"give {named('reward')}, FILE.py:FUNCTION or the folder of a reward model,"
            cure += f" or {named('environment')}"
            raise ConfigError(f"{method} needs a reward; {cure}")
        limited = settings.reward_seconds is not None
        if limited and all(type(each) is not RewardFunction for each in self.rewards):
            limit = f"{named('reward_seconds')} limits functions in files"
            problem = f"{limit}, and {named('reward')} names none"
            raise ConfigError(f"{problem}; leave it out")
        super().check(settings)
        for name in ("neftune", "lora_dropout"):
            if getattr(settings, name):
                problem = f"{method} samples its answers without {named(name)}"
                raise ConfigError(f"{problem}, so it must train without it; leave it out")
        if self.loss["beta"] and settings.lora is None:
            problem = f"{named('beta')} of {method} compares with the initial model"
            raise ConfigError(
                f"{problem}, which only adapters leave unchanged; add {named('lora')}"
            )
        if self.drawn_at_once % settings.accumulate:
            both = named(accumulate=settings.accumulate)
            problem = f"{named(steps_per_generation=self.drawn_at_once)} is not a multiple of"
            raise ConfigError(f"{problem} {both}, the batches per update; choose a multiple")

    def check_ranks(self, settings: Any) -> None:
        """Raise a ConfigError for ranks that cannot sample answers independently."""
        for name in ("tensor_parallel", "pipeline_parallel") * (self.environment is not None):
            if (size := getattr(settings, name) or 1) > 1:
                problem = f"does not work with {named('environment')}"
                why = "each rank would run the environments"
                raise ConfigError(f"{named(**{name: size})} {problem}: {why}; leave it out")
        for name in ("zero", "expert_parallel"):
            if (size := getattr(settings, name) or 1) > 1:
                method = named(method=settings.method)
                problem = f"does not work with {method}, whose ranks sample independently"
                cure = f"use {named(zero=1)}, or {named('tensor_parallel')}"
                raise ConfigError(f"{named(**{name: size})} {problem}; {cure} to save memory")

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method with its prompts and the maximum number of tokens per answer."""
        every = [record for part in (text.train, text.held_out) for record in part]
        if self.environment is not None:
            plain = next((record for record in every if not record.messages), None)
            if plain is not None:
                where, what = text.place(plain.line), named("environment")
                cure = "write a list of messages, or a question"
                raise ConfigError(f"{where}: {what} talks in chats, and this is a text; {cure}")
        columns = dict.fromkeys((*ARGUMENTS, *(name for record in every for name in record.value)))
        for reward in self.rewards:
            reward.check(columns)
        return dataclasses.replace(self.sized(config), text=text)

    def sized(self, config: Mapping[str, Any]) -> Self:
        """Return this method with the maximum number of tokens per answer, from config.json."""
        limit = self.loss_options.get("max_new_tokens") or max(
            1, min(NEW, parse(config).positions // 2)
        )
        return dataclasses.replace(self, max_new_tokens=limit)

    @property
    def summary(self) -> str:
        """The rewards and their weights, as text."""
        each = (f"{r.weight:g} x {r.name}" if r.weight != 1 else r.name for r in self.rewards)
        return f"rewarded by {', '.join(each)}"

    def account(self, loop: Any) -> str:
        """Return the size of a sampling pass and of its KV cache, as text."""
        config, rows = loop.model.config, loop.plan.batch * self.samples
        tokens = loop.training_data.largest[1]
        most = -(-tokens // PAGE)
        windows = (config.window_of(layer) for layer in range(config.layers))
        # a window begins anywhere in a page
        pages = sum(most if w is None else min(1 + -(-w // PAGE), most) for w in windows)
        sizes = loop.model.cache_sizes
        stored = sizes["kv_heads"] * sizes["dim"] * (2 if sizes["latent"] is None else 1)
        each = stored * loop.model.dtype.itemsize
        cache = format_bytes(rows * pages * PAGE * each)
        answers = f"{rows:,} answers of at most {self.max_new_tokens:,} tokens"
        return f"each sampling pass generates {answers}, with a KV cache of at most {cache}"

    def updates(self, accumulate: int) -> int:
        """Return the number of updates between two rollouts."""
        return self.drawn_at_once // accumulate * self.iterations

    def first(self, step: int, accumulate: int) -> int:
        """Return the index of the first batch of a step."""
        rollout, place = divmod(step, self.updates(accumulate))
        return rollout * self.drawn_at_once + place * accumulate % self.drawn_at_once

    def steps(self, batches: int, accumulate: int) -> int:
        """Return the number of steps for this number of batches."""
        return -(-batches // self.drawn_at_once) * self.updates(accumulate)

    def drawn_with(self, number: int) -> range:
        """Return the indices of the batches that share a rollout with batch ``number``."""
        first = number - number % self.drawn_at_once
        return range(first, first + self.drawn_at_once)

    def record(self, number: float) -> Any:
        """Return a prompt by its number; training prompts come first, then held-out prompts."""
        train, place = self.text.train, int(number)
        return train[place] if place < len(train) else self.text.held_out[place - len(train)]

    def answered(self, loop: Any, batch: Batch, samples: int, **options: Any) -> Any:
        """Return the sampled answers to the prompts of a batch, and their rewards.

        Returns
        -------
        drawn : Rollouts
        rewards : (answers, functions) float64
        late : int
            Number of answers for which a reward function exceeded its time limit.
        """
        real, numbers = batch.beside["real"], batch.beside["value"][:, 0]
        prompts = [row[own] for row, own in zip(batch.tokens, real, strict=True)]
        ends = None
        if loop.chat is not None:
            ends = end_tokens(loop.chat, loop.tokenizer, loop.model.config)
        stops = {*(loop.model.config.end_tokens if ends is None else ends)}
        records = [self.record(number) for number in np.repeat(numbers, samples)]
        talks: Conversations | None = None
        if self.environment is None:
            drawn = loop.model.rollouts(
                prompts, samples=samples, max_new_tokens=self.max_new_tokens, stop=ends,
                invariant=self.invariant, **options,
            )  # fmt: skip
        else:
            talks = self._talks(loop, records[::samples], samples, ends, **options)
            drawn = talks.run()
            for problem in [problem for problem in drawn.errors or () if problem][:1]:
                announce(f"the environment {self.environment.name}: {problem}")
        own = drawn.completions()
        whole = [each[:-1] if {*each[-1:]} & stops else each for each in own]
        texts = [loop.tokenizer.decode(each) for each in whole]
        columns: dict[str, list[Any]] = {
            "prompts": [record.messages or record.prompt for record in records],
            "completions": [
                [{"role": "assistant", "content": text}] if record.messages else text
                for record, text in zip(records, texts, strict=True)
            ],
            "completion_ids": own,
        }
        if talks is not None:
            columns["completions"] = talks.completions()
        names = dict.fromkeys(name for record in records for name in record.value)
        columns |= {name: [record.value.get(name) for record in records] for name in names}
        where = [self.text.place(record.line) for record in records]
        late = list[int]()
        more: dict[str, Any] = {"tools": [record.tools for record in records], "late": late}
        more |= {} if talks is None else {"earned": drawn.rewards}
        rewards = np.zeros((len(records), len(self.rewards)))
        if loop.ranks.judges:
            rewards = scores(self.rewards, columns, where.__getitem__, **more)
        rewards = loop.ranks.judged(rewards)
        return drawn, rewards, int(loop.ranks.judged(np.array(float(len(late)))))

    def _talks(
        self, loop: Any, records: Sequence[Any], samples: int, ends: Any, **options: Any
    ) -> Conversations:
        """Return conversations about prompts with the environment."""
        own = {"temperature": 1.0, "top_k": None, "first": 0} | options
        environment: Any = self.environment
        return Conversations(
            loop.model.in_order(self.invariant),
            [record.messages for record in records],
            samples,
            Options(self.max_new_tokens, stop=ends, **own),
            environment.create,
            max_turns=self.max_turns,
            seconds=None,
            rows=columns_of(records),
            tokenizer=Tokenizer.of(loop.tokenizer, loop.chat),
            longest=loop.training_data.largest[1],
        )

    def drawn(self, loop: Any, batches: Sequence[Batch], numbers: Sequence[int]) -> list[Batch]:
        """Sample answers to the prompts of batches; return the answers with their advantages.

        Ranks that hold the same weights each sample answers to a share of the prompts, then gather
        the answers of all ranks.  Ranks that divide a model sample the same tokens, and one of
        them computes the rewards.
        """
        results = [self._drawn(loop, *each) for each in zip(batches, numbers, strict=True)]
        tokens = sum(int((batch.labels != IGNORE).sum()) for batch in results) / len(results)
        return [
            batch._replace(facts={**batch.facts, "tokens": np.array(tokens)}) for batch in results
        ]

    def _drawn(self, loop: Any, batch: Batch, number: int) -> Batch:
        """Sample answers to the prompts of one batch."""
        draw, data = np.random.default_rng([loop.plan.seed, number]), loop.ranks.replicas
        seed, share = int(draw.integers(2**63)), part(len(batch.tokens), data)
        beside = {name: each[share] for name, each in batch.beside.items()}
        own = batch._replace(tokens=batch.tokens[share], beside=beside)
        shape = loop.training_data.batches.shape._replace(pack=loop.plan.pack is not False)
        texts, rewards, late = list[Example](), np.zeros((0, len(self.rewards))), 0
        if len(own.tokens):  # a batch with few prompts leaves some ranks without any
            texts, rewards, late = self._texts(loop, own, seed, share.start * self.samples, shape)
        if data.size > 1:
            texts = _gather_texts(texts, data, with_base=bool(self.loss["beta"]))
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
        """Return the answers to prompts, their rewards, and the number of timed-out answers."""
        rollouts, rewards, late = self.answered(
            loop, batch, self.samples, temperature=self.temperature, seed=seed, first=first
        )
        log_probs, mask, real = map(to_numpy, (rollouts.log_probs, rollouts.mask, rollouts.real))
        routes = None if rollouts.routes is None else to_numpy(rollouts.routes)
        texts = []
        for row, all_tokens in enumerate(to_numpy(rollouts.tokens)):
            tokens = all_tokens[real[row]]
            # mask and log-probabilities stand at the token before the sampled one
            sampled = np.append(False, mask[row][real[row]][:-1])
            labels = np.where(sampled, tokens, IGNORE)
            old = np.append(FLOAT32.type(0), log_probs[row][real[row]][:-1])
            own = None if routes is None else routes[row][real[row]]
            texts.append(Example(tokens, labels, 0, reference=old, routes=own))
        if self.loss["beta"]:
            packed = shape.batch_of(texts)
            arrays = placed(super().inputs(packed), loop.model.table)
            options: dict[str, Any] = {"temperature": self.temperature, "invariant": self.invariant}
            base = loop.model.base
            base.context = None  # each rank holds its own texts
            before = base.log_probs(**arrays, **options).log_probs
            rows = np.append(FLOAT32.type(0), to_numpy(before).reshape(-1)[:-1])
            starts = starts_of(packed)  # log-probabilities stand at the predicted token
            texts = [
                text._replace(base=rows[start : start + len(text.tokens)])
                for text, start in zip(texts, starts, strict=False)
            ]
        return texts, rewards, late

    def evaluated(self, loop: Any) -> dict[str, Any]:
        """Return the log line of an evaluation, from the rewards of greedy answers.

        The evaluation loss is minus the mean reward; a training step estimates its gradient.
        """
        rewards, lengths, data = (
            [np.zeros((0, len(self.rewards)))],
            list[int](),
            loop.ranks.replicas,
        )
        for batch in loop.training_data.held_out[data.rank :: data.size]:
            drawn, each, _ = self.answered(loop, batch, 1, top_k=1, seed=0)
            rewards.append(each)
            lengths += [*map(len, drawn.completions())]
        measured = self._rewards(data.all_gather(np.concatenate(rewards)))
        lengths = data.all_gather(np.array(lengths, np.float64))
        if measured["reward"] is None:
            cure = "pass a reward that returns a number for some answer"
            raise ConfigError(f"every reward of the evaluation prompts is None; {cure}")
        measured |= {"length": float(np.mean(lengths))}
        line = {"held_out_loss": -measured["reward"], "held_out_prompts": len(lengths)}
        return line | {f"held_out_{name}": value for name, value in measured.items()}

    def _rewards(self, rewards: Array) -> dict[str, Any]:
        """Return the mean reward; with several rewards, also the mean of each."""
        valid = ~np.isnan(rewards)
        each = zip(rewards.T, valid.T, strict=True)
        means = [float(r[v].mean()) if v.any() else None for r, v in each]
        total = np.where(valid, rewards, 0) @ np.array([each.weight for each in self.rewards])
        judged = valid.any(axis=1)
        result = {"reward": float(total[judged].mean()) if judged.any() else None}
        if len(means) > 1:
            result |= {f"reward_{r.name}": m for r, m in zip(self.rewards, means, strict=True)}
        return result

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of sampled answers, with the indices of their tokens."""
        starts = starts_of(batch)
        order = range(len(starts) - 1)
        arrays = answers(batch, order, reference=True)
        arrays["old"] = arrays.pop("reference")
        arrays["gains"] = firsts(batch, "value").astype(FLOAT32)
        arrays |= real_texts(batch)
        if self.loss["beta"]:
            base = batch.beside.get("base", batch.beside["reference"])
            arrays |= answers(batch._replace(beside={"reference": base}), order, reference=True)
        if "routes" in batch.beside:
            arrays["routes"] = batch.beside["routes"]
        return super().inputs(batch) | arrays

    def padded(self, batch: Batch) -> Batch:
        """Return a batch as ``in_few_sizes``: an answer without tokens adds 0 to the loss."""
        return in_few_sizes(batch)

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the divisor of the loss: tokens, texts, or texts times ``max_new_tokens``.

        The token count of a batch is the mean over the batches of its rollout, as in TRL.
        """
        texts = sum(batch.label_count for batch in batches)
        tokens = sum(float(batch.facts["tokens"]) for batch in batches)
        divisors = {"dapo": tokens, "dr_grpo": texts * self.max_new_tokens}
        return {"count": max(1, divisors.get(self.loss["kind"], texts))}

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return the mean rewards of a step, and the number of timed-out answers if not 0."""
        late = sum(int(batch.facts["late"]) for batch in batches)
        rewards = self._rewards(np.concatenate([batch.facts["rewards"] for batch in batches]))
        return rewards | ({"reward_late": late} if late else {})

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the policy loss of answers."""
        if not batch["places"].size:  # a rank without texts
            return loss_of_none(model, batch)
        own = {name: batch.get(name) for name in ("tokens", "labels", "offsets", "routes")}
        fields = model.log_probs(**own, temperature=self.temperature, invariant=self.invariant)
        rows, mask = gathered(fields.log_probs, batch["places"]), batch["answer_mask"]
        old, reference, gains = batch["old"], batch.get("reference"), batch["gains"]
        options = {"old": old, "reference": reference, "count": batch["count"]}
        loss = averaged(policy, rows, mask, gains, **options, **self.loss)
        if (sink := batch.get("sink")) is not None:
            entropy = value_of(fields.entropy).sum()
            texts = batch["weights"].sum() if "weights" in batch else len(gains)
            sink.append(self._sums(value_of(rows), mask, old, reference, gains, entropy, texts))
        return loss

    def _sums(
        self, rows: Array, mask: Array, old: Array, reference: Any, gains: Array, entropy: Any,
        texts: Any,
    ) -> Array:  # fmt: skip
        """Return the sums: texts, tokens, entropy, clipped ratios, ratios, and KL divergence."""
        d, gain = np.where(mask, rows - old, 0), gains[:, None]
        counted: Any = mask
        if self.loss["kind"] == "rloo":  # one ratio per text
            d, counted = d.sum(axis=1, keepdims=True), mask.any(axis=1, keepdims=True)
        ratio = np.exp(d)
        out = ((ratio > 1 + CLIP) & (gain > 0)) | ((ratio < 1 - CLIP) & (gain < 0))
        q = 0 * rows if reference is None else np.where(mask, reference - rows, 0)
        ratios = (out & counted).sum(), np.where(counted, ratio, 0).sum()
        sums = [texts, mask.sum(), entropy, *ratios, (np.exp(q) - q - 1).sum()]
        return stacked(sums, rows)

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return rewards, KL, entropy, share of clipped ratios, mean ratio, and mean length."""
        texts, tokens, entropy, clipped, ratio, divergence = map(float, sums)
        ratios = texts if self.loss["kind"] == "rloo" else tokens
        each = {"kl": divergence / max(tokens, 1)} if self.loss["beta"] else {}
        each |= {"entropy": entropy / max(tokens, 1), "clipped": clipped / max(ratios, 1)}
        each["ratio"] = ratio / max(ratios, 1)
        return {**constants, **each, "length": tokens / max(texts, 1)}

    def question_length(self, tokens: int) -> int:
        """Return the minimum number of question tokens in a full row of ``tokens`` tokens."""
        return max(1, tokens - self.max_new_tokens)

    def rehearse(self, model: Any, rows: int, tokens: int) -> None:
        """Run the sampling of answers that fill these rows on planned arrays, to plan memory."""
        question, like = self.question_length(tokens), model.table
        planned_rollouts(model, rows // self.samples, self.samples, question, tokens - question)
        for reward in self.rewards:
            if (
                isinstance(reward, RewardModel) and reward.model is not None
            ):  # None: another rank holds it
                reward.rehearse(rows, tokens)
        if self.loss["beta"]:
            texts = as_input(np.zeros((rows, tokens), np.int64), like)
            model.base.log_probs(texts, texts)

    def full(self, batch: int, tokens: int) -> dict[str, Any]:
        """Return the inputs of ``batch`` prompts whose answers fill their rows."""
        return super().full(batch * self.samples, tokens)


def _gather_texts(texts: Sequence[Example], data: Any, *, with_base: bool) -> list[Example]:
    """Gather the answers of all data ranks, in the order of their prompts."""
    routed = [text.routes.shape[1:] for text in texts if text.routes is not None]
    own_size = np.array([[len(text.tokens) for text in texts]], np.int64).T
    sizes = data.all_gather(own_size)[:, 0]
    shape = data.all_gather(np.array([routed[0] if routed else (0, 0)])).max(axis=0)
    kinds: dict[str, Any] = {"tokens": np.int64, "labels": np.int64, "reference": FLOAT32}
    kinds |= {"base": FLOAT32} if with_base else {}
    kinds |= {"routes": np.int32} if shape.any() else {}
    columns = []
    for name, dtype in kinds.items():
        inner = tuple(shape) if name == "routes" else ()
        own = [np.zeros((0, *inner), dtype), *(getattr(text, name) for text in texts)]
        flat = data.all_gather(np.concatenate(own).astype(dtype))
        columns.append(np.split(flat, np.cumsum(sizes)[:-1]))
    each = (dict(zip(kinds, values, strict=True)) for values in zip(*columns, strict=True))
    return [Example(line=0, **values) for values in each]
