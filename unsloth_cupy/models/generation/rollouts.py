"""Rollouts: sampled completions of prompts, and their log-probabilities."""

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
from ..configs.heads import CAUSAL, require_head
from ..generate import sample
from ..network import Network
from .next_logits import CachedLogits, check_pages, on_device_of


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
    check_pages(model.config, options.cache, None, len(rows))
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int64)
    real = np.zeros(tokens.shape, bool)
    for row, (to, is_real) in zip(rows, zip(tokens, real, strict=True), strict=True):
        to[width - len(row) :], is_real[width - len(row) :] = row, True
    ends = options.ends(model.config.end_tokens, model.config.vocab)
    routes: list[Array] = []
    steps = list(sample(model, tokens, real, ends, options, samples, routes))
    new = np.stack([to_numpy(token) for token, _ in steps], axis=1)
    log_probs = np.stack([to_numpy(each) for _, each in steps], axis=1)
    ended = np.isin(new, ends).cumsum(axis=1)
    sampled = ended - np.isin(new, ends) == 0  # up to and including the first end token
    new[~sampled] = log_probs[~sampled] = 0
    tokens, real = (np.repeat(array, samples, axis=0) for array in (tokens, real))
    mask = np.zeros((len(tokens), width + new.shape[1]), bool)
    mask[:, width - 1 : -1] = sampled
    of_next = np.zeros(mask.shape, log_probs.dtype)
    of_next[:, width - 1 : -1] = log_probs
    results = [np.concatenate([tokens, new], axis=1), np.concatenate([real, sampled], axis=1)]
    results += [mask, of_next]
    if routes:
        known = np.concatenate(routes, axis=1)
        chosen = np.full((*mask.shape, *known.shape[2:]), -1, np.int32)
        chosen[:, : known.shape[1]] = known
        chosen[~results[1]] = -1
        results.append(chosen)
    return Rollouts(*(to_device_of(each, model.table) for each in results))


def planned_rollouts(model: Network, prompts: int, samples: int, length: int, new: int) -> None:
    """Allocate planned arrays as rollouts do in their largest steps.

    These are the step of the prompts, with ``length`` tokens each, and the last of ``new`` tokens.
    """
    rows, place = prompts * samples, model.table
    tokens = np.zeros((rows, length), np.int64)
    like = on_device_of(tokens, place)
    logits = CachedLogits(model, like, rows, length + new, samples=samples, notes=True)
    arrays = _planned_draw(logits(tokens, tokens == 0))
    if new > 1:
        last = logits.of_last()
        del arrays  # arrays of the previous step are freed after the logits of this one
        _planned_draw(last)


def _planned_draw(planned_logits: Any) -> tuple[Any, ...]:
    """Allocate planned arrays as a draw does; return those that are alive in the next step."""
    logits, (rows, vocab), of = wide(planned_logits), planned_logits.shape, planned_logits.of
    np.isnan(logits).any(axis=-1)
    if isinstance(planned_logits, np.ndarray):  # row by row: tokens, their logits, weights and sums
        arrays = [of((vocab,), np.float64) for _ in range(4)]
        del arrays
        chosen = of((rows,), np.int64)
    else:
        options = SimpleNamespace(temperature=1.0, top_k=None, top_p=None, min_p=None)
        chosen = draw_all(logits, options, of((rows, 1), np.float64))
    floats = planned_logits.astype(np.promote_types(planned_logits.dtype, FLOAT32), copy=False)
    of_logits(floats, chosen, 1.0)
    return planned_logits, logits


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
