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
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..core.gpu import device_of
from ..core.replay import fixed_order
from ..errors import ConfigError
from ..ops.losses.linear_log_probs import of_logits
from ..placement import to_device_of, to_numpy
from ..serving.drawing import draw, draw_all, penalise, wide
from ..serving.options import Options
from ..training.find_nan import NonFiniteError
from .configs.heads import CAUSAL, require_head
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

# (tokens, True where not padding) on the host -> logits
NextLogits = Callable[[Array, Array], Array]


def stream(model: Network, tokens: Array, mask: Array | None, options: Options) -> Iterator[Array]:
    """Check all arguments, then return an iterator over the new tokens: (batch,) each.

    The iterator uses the adapter that is active now, even if another one is activated later.
    """
    model = copy.copy(model)
    require_head(options.CALL, model.config, CAUSAL)
    ends = options.ends(model.config.end_tokens, model.config.vocab)
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
        drawn = [-1 if bad else draw(row, options, number.random()) for row, bad, number in rows]
        chosen = np.array(drawn, int)
    else:
        uniform = np.array([[draw.random()] for draw in draws])
        chosen = draw_all(logits, options, to_device_of(uniform, logits))
    return np.where(nan, -1, chosen)
