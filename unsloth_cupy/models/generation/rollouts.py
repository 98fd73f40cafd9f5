"""Rollouts: samples of prompts, and the log-probabilities by which they were drawn."""

from typing import Any, NamedTuple

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...placement import to_device_of, to_numpy
from ..generate import Options, sample
from ..network import Network


class Rollouts(NamedTuple):
    """Samples of prompts: ``samples`` consecutive rows continue one prompt.

    ``mask`` and ``log_probs`` lie as the results of ``model.log_probs(tokens, tokens, mask=real)``:
    entry t is of the token at t + 1.

    Attributes
    ----------
    tokens : (rows, width) int64
        A prompt, padded on the left, and the tokens that continue it, with the one that ends them.
    real : (rows, width) bool
        Whether a token is not padding.
    mask : (rows, width) bool
        Whether the next token was sampled.
    log_probs : (rows, width) float32
        The log-probability of the next token in softmax(logits / temperature), whatever top_k,
        top_p or min_p left out; 0 where mask is False.
    """

    tokens: Any
    real: Any
    mask: Any
    log_probs: Any

    def completions(self) -> list[list[int]]:
        """Return the sampled tokens of each row, without the prompt."""
        tokens, mask = to_numpy(self.tokens), to_numpy(self.mask)
        rows = zip(tokens[:, 1:], mask[:, :-1], strict=True)
        return [[int(token) for token in row[sampled]] for row, sampled in rows]


def rollouts(model: Network, prompts: Any, samples: int, options: Options) -> Rollouts:
    """Return samples of prompts: see ``Transformer.rollouts``."""
    rows = prompts_of(model, prompts)
    for name, value in (("samples", samples), ("max_new_tokens", options.max_new_tokens)):
        if not is_integer(value, 1):
            raise ConfigError(f"rollouts: {name}={value!r} must be 1 or more")
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int64)
    real = np.zeros(tokens.shape, bool)
    for row, (to, is_real) in zip(rows, zip(tokens, real, strict=True), strict=True):
        to[width - len(row) :], is_real[width - len(row) :] = row, True
    ends = options.end_tokens(model.config)
    made = list(sample(model, tokens, real, ends, options, samples))
    new = np.stack([to_numpy(token) for token, _ in made], axis=1)
    log_probs = np.stack([to_numpy(each) for _, each in made], axis=1)
    ended = np.isin(new, ends).cumsum(axis=1)
    sampled = ended - np.isin(new, ends) == 0  # up to the token that ends the row
    new[~sampled] = log_probs[~sampled] = 0
    tokens, real = (np.repeat(array, samples, axis=0) for array in (tokens, real))
    mask = np.zeros((len(tokens), width + new.shape[1]), bool)
    mask[:, width - 1 : -1] = sampled
    of_next = np.zeros(mask.shape, FLOAT32)
    of_next[:, width - 1 : -1] = log_probs
    results = np.concatenate([tokens, new], axis=1), np.concatenate([real, sampled], axis=1)
    return Rollouts(*(to_device_of(a, model.table) for a in (*results, mask, of_next)))


def prompts_of(model: Network, prompts: Any) -> list[Array]:
    """Return prompts as rows of tokens; raise ConfigError for what is none."""
    rows = [to_numpy(row) if hasattr(row, "dtype") else np.asarray(row) for row in prompts]
    if not rows:
        raise ConfigError("rollouts: there is no prompt; pass one list of tokens for each")
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
