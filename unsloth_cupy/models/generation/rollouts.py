"""Rollouts: sampled completions of prompts, and their log-probabilities."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.losses.linear_log_probs import of_logits
from ...placement import to_device_of, to_numpy
from ...serving.drawing import draw_all, wide
from ...serving.options import Options
from ...serving.work import Work
from ..configs.config import Experts
from ..configs.heads import CAUSAL, require_head
from ..network import Network
from .batch import batch_of, check_pages, sizes_of
from .decoding import Decoding


class Rollouts(NamedTuple):
    """Sampled completions of prompts: ``samples`` consecutive rows continue one prompt.

    ``mask`` and ``log_probs`` are aligned like ``model.log_probs(tokens, tokens, mask=real)``:
    entry t belongs to the token at t + 1.

    Attributes
    ----------
    tokens : (rows, width) int64
        A prompt, padded on the left, then its completion, including the end token.
    real : (rows, width) bool
        Whether a token is not padding.
    mask : (rows, width) bool
        Whether the next token was sampled.
    log_probs : (rows, width) float32, or float64 for a float64 model
        The log-probability of the next token in softmax(logits / temperature), before top_k, top_p
        and min_p; 0 where mask is False.
    routes : (rows, width, layers with experts, k) int32, or None
        The experts that routers chose for each token, for the argument ``routes`` of losses.  -1 at
        padding, and at the last token of a row, which the model did not compute.  None for dense
        models.
    rewards : (rows,) float64, or None
        With an environment: the sum of the rewards of its steps, or what get_reward returned; NaN
        where there is none.
    turns : (rows,) int, or None
        With an environment: the number of answers.
    errors : list of (str or None), or None
        With an environment: why it ended the row, or None for a row without an error.
    """

    tokens: Any
    real: Any
    mask: Any
    log_probs: Any
    routes: Any = None
    rewards: Any = None
    turns: Any = None
    errors: list[str | None] | None = None

    def completions(self) -> list[list[int]]:
        """Return the sampled tokens of each row, without the prompt and observations."""
        tokens, mask = to_numpy(self.tokens), to_numpy(self.mask)
        rows = zip(tokens[:, 1:], mask[:, :-1], strict=True)
        return [[int(token) for token in row[sampled]] for row, sampled in rows]


def rollouts(model: Network, prompts: Any, samples: int, options: Options) -> Rollouts:
    """Return sampled completions of prompts: see ``Transformer.rollouts``."""
    require_head("rollouts", model.config, CAUSAL)
    rows = prompts_of(model, prompts)
    for name, value in (("samples", samples), ("max_new_tokens", options.max_new_tokens)):
        if not is_integer(value, 1):
            raise ConfigError(f"rollouts: {name}={value!r} must be 1 or more")
    if not is_integer(options.first, 0):
        raise ConfigError(f"rollouts: first={options.first!r} must be 0 or more")
    check_pages(model, options.cache, None, len(rows))
    ends = options.ends(model.config.end_tokens, model.config.vocab)
    batch = batch_of(copy.copy(model), rows, ends, options, samples, log_probs=True)
    batch.run()
    before = max(map(len, rows))
    width = before + max(row.count for row in batch.rows)
    size = len(batch.rows), width
    tokens, real = np.zeros(size, np.int64), np.zeros(size, bool)
    mask, log_probs = np.zeros(size, bool), np.zeros(size, batch.rows[0].sample.log_probs[0].dtype)
    routes: Any = None
    if model.config.experts is not None:
        routes = no_routes(model.config.experts, size)
    for place, row in enumerate(batch.rows):
        start = before - len(row.request.prompt)
        own, new = slice(start, start + len(row.tokens)), slice(before - 1, before - 1 + row.count)
        tokens[place, own], real[place, own] = row.tokens, True
        mask[place, new], log_probs[place, new] = True, row.sample.log_probs
        if routes is not None:
            routes[place, start : own.stop - 1] = np.stack(row.sample.routes)
    results = [tokens, real, mask, log_probs, *([] if routes is None else [routes])]
    return Rollouts(*(to_device_of(each, model.table) for each in results))


def no_routes(experts: Experts, size: tuple[int, int]) -> Array:
    """Return routes of rows without tokens, (rows, width, layers with experts, k)."""
    return np.full((*size, sum(experts.sparse), experts.k), -1, np.int32)


def planned_rollouts(model: Network, prompts: int, samples: int, length: int, new: int) -> None:
    """Allocate planned arrays as rollouts do in their largest steps.

    These are the step of the prompts, with ``length`` tokens each, and the last of ``new`` tokens.
    """
    steps = planned_steps(model, prompts, samples, length, new, notes=True)
    _planned_draw(next(steps))
    if new > 1:
        _planned_draw(next(steps))


def planned_steps(
    model: Network, prompts: int, samples: int, length: int, new: int, notes: bool = False
) -> Iterator[Array]:
    """Yield the logits of the largest steps of planned rows: of the prompts, and of the last."""
    decoder = Decoding(model, **sizes_of(model, [length] * prompts, samples, new), notes=notes)
    cache, tokens = decoder.cache, np.zeros(length, np.int64)
    own = [cache.begin([]) for _ in range(prompts)]
    work = [Work(each, tokens, length, slot, "") for slot, each in enumerate(own)]
    logits = decoder(work).logits
    yield np.repeat(logits, samples, axis=0)
    del logits
    own += [cache.fork(each) for each in own for _ in range(samples - 1)]
    if new > 2:
        cache.extend(own, [new - 2] * len(own))
    size = length + new - 1
    yield decoder([Work(each, tokens[:1], size, slot, "") for slot, each in enumerate(own)]).logits


def _planned_draw(planned_logits: Any) -> None:
    """Allocate planned arrays as a draw does."""
    logits, (rows, vocab), of = wide(planned_logits), planned_logits.shape, planned_logits.of
    if isinstance(planned_logits, np.ndarray):  # row by row: weights and their sums
        arrays = [of((vocab,), np.float64) for _ in range(2)]
        del arrays
        chosen = of((rows,), np.int64)
    else:
        options = SimpleNamespace(temperature=1.0, top_k=None, top_p=None, min_p=None)
        chosen = draw_all(logits, options, of((rows, 1), np.float64))
    del logits
    floats = planned_logits.astype(np.promote_types(planned_logits.dtype, FLOAT32), copy=False)
    of_logits(floats, chosen, 1.0)


def prompts_of(model: Network, prompts: Any) -> list[Array]:
    """Return prompts as arrays of tokens; raise ConfigError for an invalid prompt."""
    rows = [to_numpy(row) if hasattr(row, "dtype") else np.asarray(row) for row in prompts]
    if not rows:
        raise ConfigError("rollouts: prompts is empty; pass a list of tokens for each prompt")
    for place, row in enumerate(rows):
        if row.ndim != 1 or row.dtype.kind not in "iu" or not row.size:
            problem = f"prompt {place} is {row.dtype} {row.shape}"
            raise ConfigError(f"rollouts: {problem}; pass a list of one or more tokens")
        if row.min() < 0 or row.max() >= model.config.vocab:
            raise ConfigError(
                f"rollouts: prompt {place} has a token outside the vocabulary of"
                f" {model.config.vocab}"
            )
    return rows
