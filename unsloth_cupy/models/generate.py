"""Generation: tokens that continue prompts, one step at a time through a KV cache.

p = softmax(logits / temperature), restricted in this order to

    top_k     the top_k most likely tokens
    top_p     the fewest tokens whose probabilities reach top_p
    min_p     tokens with at least min_p times the probability of the most likely token

The next token is the one where the cumulative sum of p passes a uniform random number.
"""

import copy
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..core.call import check_options, is_integer, is_number
from ..core.dtypes import FLOAT32, Array
from ..core.gpu import device_of
from ..core.replay import fixed_order
from ..errors import ConfigError
from ..inference.paged_kv_cache import PagedKVCache
from ..ops.losses.linear_log_probs import of_logits
from ..placement import to_device_of, to_numpy
from ..training.find_nan import NonFiniteError
from .configs.config import Config
from .configs.heads import CAUSAL, require_head
from .generation.drawing import draw_all, likeliest, penalise, wide
from .generation.next_logits import (
    CachedLogits,
    PagedLogits,
    check_pages,
    on_device_of,
    paged,
)
from .layers.head import capped
from .layers.positions import check
from .network import Network

# Number of tokens that top_p sorts first; it sorts the vocabulary only if they do not reach top_p.
FEW = 1024

# (tokens, True where not padding) on the host -> logits
NextLogits = Callable[[Array, Array], Array]


@check_options
@dataclass(frozen=True)
class Options:
    """The options of ``Transformer.generate``; its docstring describes them."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: int | Sequence[int] | None = None
    cache: PagedKVCache | None = None
    sequences: Sequence[int] | None = None
    cache_dtype: str | None = None
    first: int = 0  # number of the first row among all prompts, from which it draws
    CALL: ClassVar[str] = "generate"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens"):
            self._require(name, is_integer(getattr(self, name), 0), "be an integer, 0 or more")
        self._require(
            "min_new_tokens",
            self.min_new_tokens <= self.max_new_tokens,
            f"not exceed max_new_tokens={self.max_new_tokens}",
        )
        valid_temperature = is_number(self.temperature) and 0 <= self.temperature < float("inf")
        self._require("temperature", valid_temperature, "be a number, 0 (greedy) or more")
        self._require(
            "top_k", self.top_k is None or is_integer(self.top_k, 1), "be 1 or more, or None"
        )
        valid_top_p = self.top_p is None or (is_number(self.top_p) and 0 < self.top_p <= 1)
        self._require("top_p", valid_top_p, "be in (0, 1], or None")
        valid_min_p = self.min_p is None or (is_number(self.min_p) and 0 <= self.min_p <= 1)
        self._require("min_p", valid_min_p, "be in [0, 1], or None")
        penalty = self.repetition_penalty
        valid_penalty = penalty is None or (is_number(penalty) and 0 < penalty < float("inf"))
        self._require("repetition_penalty", valid_penalty, "be a number above 0, or None")
        int8 = isinstance(self.cache_dtype, str) and self.cache_dtype == "int8"
        supported = self.cache_dtype is None or (int8 and self.cache is None)
        self._require(
            "cache_dtype",
            supported,
            "be 'int8', or None; it must be None with a cache",
        )
        valid_seed = self.seed is None or is_integer(self.seed, 0)
        self._require("seed", valid_seed, "be an integer of 0 or more, or None")

        if self.temperature == 0:
            unused = [
                n for n in ("top_k", "top_p", "min_p", "seed") if getattr(self, n) is not None
            ]
            if unused:
                warnings.warn(
                    f"{self.CALL}: temperature=0 takes the most likely token, so"
                    f" {' and '.join(unused)} change nothing; pass a temperature above 0 to sample",
                    stacklevel=2,
                )

    def _require(self, name: str, valid: bool, must: str) -> None:
        """Raise a ConfigError that says what an option must be, unless it is valid."""
        if not valid:
            raise ConfigError(f"{self.CALL}: {name}={getattr(self, name)!r} must {must}")

    def end_tokens(self, config: Config) -> Array:
        """Return the tokens that end a row."""
        stop = self.stop
        if stop is None:
            return np.array([token for token in config.end_tokens if token < config.vocab], int)
        listed = [*stop] if isinstance(stop, Sequence) else [stop]
        if isinstance(stop, bytes) or not all(is_integer(token, 0) for token in listed):
            raise ConfigError(f"generate: stop={stop!r} must be a token, a list of them, or None")
        if any(token >= config.vocab for token in listed):
            raise ConfigError(
                f"generate: stop={stop!r} is outside the vocabulary of {config.vocab}"
            )
        return np.array(listed, int)


def stream(model: Network, tokens: Array, mask: Array | None, options: Options) -> Iterator[Array]:
    """Check all arguments, then return an iterator over the new tokens: (batch,) each.

    The iterator uses the adapter that is active now, even if another one is activated later.
    """
    model = copy.copy(model)
    require_head(options.CALL, model.config, CAUSAL)
    ends = options.end_tokens(model.config)
    check(tokens, mask)
    if options.temperature and options.seed is None and model.division is not None:
        raise ConfigError(f"{options.CALL}: ranks draw the same tokens; pass seed= to all of them")
    cache, sequences = options.cache, options.sequences
    check_pages(model.config, cache, sequences, len(tokens))
    prompt = to_numpy(tokens)
    real = np.ones(prompt.shape, bool) if mask is None else to_numpy(mask) != 0
    if not real.any(axis=1).all():
        row = int(np.argmin(real.any(axis=1)))
        raise ConfigError(f"generate: row {row} has no real token; begin it with one")
    # Padding moves to the left, so that new tokens follow their prompt without a gap.
    order = np.argsort(real, axis=1, kind="stable")
    prompt, real = (np.take_along_axis(array, order, axis=1) for array in (prompt, real))
    most = options.max_new_tokens
    longest = int(real.sum(axis=1).max(initial=0)) + most
    if longest > model.config.positions:
        warnings.warn(
            f"generate: {longest - most} prompt tokens and {most} new tokens exceed the"
            f" {model.config.positions} positions that the model was trained for"
            " (max_position_embeddings); tokens beyond them are usually of poor quality; pass a"
            " smaller max_new_tokens",
            stacklevel=2,
        )
    if cache is None and not model.invariant:
        sizes = len(prompt), prompt.shape[1] + most
        greedy = options.temperature == 0 and options.repetition_penalty is None
        cached = CachedLogits(model, tokens, *sizes, options.cache_dtype, greedy)
        return _steps(model, tokens, prompt, real, ends, options, cached, cached.most_likely)
    if cache is not None and sequences is not None:
        next_logits: NextLogits = PagedLogits(model, tokens, cache, [*sequences])
        return _steps(model, tokens, prompt, real, ends, options, next_logits)

    def freed_at_the_end() -> Iterator[Array]:
        with paged(model, tokens, real, options) as next_logits:
            yield from _steps(model, tokens, prompt, real, ends, options, next_logits)

    return freed_at_the_end()


def sample(
    model: Network,
    prompt: Array,
    real: Array,
    ends: Array,
    options: Options,
    samples: int,
    routes: list[Array],
) -> Iterator[tuple[Array, Array]]:
    """Yield the new tokens of rollouts, (batch * samples,), and their log-probabilities.

    The model computes each prompt once; prompts are padded on the left, where ``real`` is False.
    Rows that ended continue until all rows end.  The experts of all tokens but the last are added
    to the list ``routes``.
    """
    like, kind = on_device_of(prompt, model.table), options.cache_dtype
    prompt, real = (np.repeat(array, samples, axis=0) for array in (prompt, real))
    drawn: list[Array] = []
    cached: CachedLogits | None = None
    # An invariant model returns logits before the cap; other models cap them already.
    softcap = model.config.logit_softcap if model.invariant else None

    def note(logits: Array, chosen: Array) -> None:
        logits = logits.astype(np.promote_types(logits.dtype, FLOAT32), copy=False)
        with fixed_order(model.invariant):
            drawn.append(of_logits(logits, chosen, options.temperature, softcap))
        if cached is not None and (new := cached.routes()) is not None:
            if cached.begins:
                routes.clear()
            routes.append(new)

    with ExitStack() as pages:
        if model.invariant or options.cache is not None:
            new = paged(model, like, real, options, samples)
            next_logits: NextLogits = pages.enter_context(new)
        else:
            sizes = len(prompt), prompt.shape[1] + options.max_new_tokens
            next_logits = cached = CachedLogits(
                model, like, *sizes, kind, samples=samples, notes=True
            )
        for tokens in _steps(model, like, prompt, real, ends, options, next_logits, note=note):
            yield tokens, drawn.pop()


def _steps(
    model: Network,
    like: Array,
    prompt: Array,
    real: Array,
    ends: Array,
    options: Options,
    next_logits: NextLogits,
    most_likely: Callable[[Array, Array, bool], Array | None] = lambda *_: None,
    note: Callable[[Array, Array], None] = lambda *_: None,
) -> Iterator[Array]:
    """Yield the new tokens, (batch,) each, on the device of ``like``."""
    config, most = model.config, options.max_new_tokens
    batch = len(prompt)
    pad = config.pad_token
    if pad is None:
        pad = config.end_tokens[0] if config.end_tokens else 0
    rows = range(options.first, options.first + batch)
    seed = secrets.randbits(64) if options.seed is None else options.seed
    draws = [np.random.default_rng([seed, row]) for row in rows]
    finished = np.zeros(batch, bool)
    past, seen = prompt, real
    for step in range(most):
        if finished.all():
            return
        allowed = step >= options.min_new_tokens
        chosen = most_likely(past, seen, step + 1 == most) if allowed else None
        if chosen is None:
            computed = next_logits(past, seen)
            logits = capped(config, computed) if model.invariant else computed
            if options.repetition_penalty is not None or not allowed:
                logits = to_numpy(logits)  # penalty and ``ends`` are applied on the host
            with device_of(logits):
                logits = wide(logits)
                if options.repetition_penalty is not None:
                    penalise(logits, past, seen, options.repetition_penalty)
                if not allowed:
                    logits[:, ends] = -np.inf
                drawn = _choose(logits, options, draws)
                note(computed, drawn)
            chosen = to_numpy(drawn)
        if (chosen < 0).any():
            raise NonFiniteError(
                f"generate: the logits of new token {step} contain NaN; find_nan names the layer,"
                " and a new copy of the model repairs a broken weight",
                "generate", "logits", None,
            )  # fmt: skip
        shown_tokens = np.where(finished, pad, chosen).astype(like.dtype)
        yield on_device_of(shown_tokens, like)
        # Rows that ended continue with their chosen token: the pad token may exceed the vocabulary.
        past = np.concatenate([past, chosen[:, None].astype(like.dtype)], axis=1)
        seen = np.concatenate([seen, np.ones((batch, 1), bool)], axis=1)
        finished |= np.isin(chosen, ends)


def _choose(logits: Any, options: Options, draws: Sequence[np.random.Generator]) -> Array:
    """Return one token per row of (batch, vocab) logits, -1 where they hold NaN.

    Row i takes its next random number from ``draws[i]``.  On the host only the likeliest tokens
    are sorted.  A GPU draws all rows at once, and copies one token per row to the host, not logits.
    """
    nan = np.isnan(logits).any(axis=-1)
    if options.temperature == 0:
        chosen = logits.argmax(axis=-1)
    elif isinstance(logits, np.ndarray):
        rows = zip(logits, nan, draws, strict=True)
        drawn = [-1 if bad else _draw(row, options, draw.random()) for row, bad, draw in rows]
        chosen = np.array(drawn, int)
    else:
        uniform = np.array([[draw.random()] for draw in draws])
        chosen = draw_all(logits, options, to_device_of(uniform, logits))
    return np.where(nan, -1, chosen)


def _draw(logits: Array, options: Options, uniform: float) -> int:
    """Return the token at which the cumulative sum of the allowed probabilities passes uniform."""
    order = np.arange(logits.size)
    if options.top_k is not None:
        order = likeliest(logits, options.top_k)
    candidates = logits[order]
    with np.errstate(over="ignore"):  # the quotient overflows to -inf at temperatures near 0
        weights = np.exp((candidates - candidates.max()) / options.temperature)
    if options.top_p is not None:
        share = options.top_p * weights.sum()
        for count in (FEW, order.size):
            first = likeliest(candidates, count)
            cumulative = weights[first].cumsum()
            if cumulative[-1] > share or count >= order.size:
                break
        first = first[: np.searchsorted(cumulative, share) + 1]
        order, weights = order[first], weights[first]
    if options.min_p is not None:
        weights = np.where(weights < options.min_p, 0, weights)
    cumulative = weights.cumsum()
    index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    last = np.searchsorted(cumulative, cumulative[-1])  # tokens after it have probability 0
    return int(order[min(index, last)])
