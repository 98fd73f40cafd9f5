"""Generation of a batch: rows that begin together, computed as an engine computes its rows.

    for tokens in stream(model, tokens, mask, options): ...      one new token of each row

Rows are computed until they end, each with its own pages and its own random numbers.
"""

import copy
import secrets
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import KINDS, Array
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ...inference.paged_kv_cache import PagedKVCache
from ...inference.paged_rows import PagedRows
from ...placement import to_device_of, to_numpy
from ...serving.options import Options
from ...serving.requests import Request, Row
from ...serving.scheduler import Scheduler
from ...training.find_nan import NonFiniteError
from ..adapters.many import ByRows
from ..configs.config import Config
from ..configs.heads import CAUSAL, require_head
from ..layers.positions import check
from ..network import Network
from .decoding import Decoding, by_reach, cache_form, most_in_window, switch_of
from .draft import Drafts, Generation, check_drafts, drafted

PAGE = 64  # tokens per page in a cache for one call


def stream(model: Network, tokens: Array, mask: Array | None, options: Options) -> Iterator[Array]:
    """Check all arguments, then return an iterator over the new tokens: (batch,) each.

    The iterator uses the adapter that is active now, even if another one is activated later.
    """
    require_head(options.CALL, model.config, CAUSAL)
    ends = options.ends(model.config.end_tokens, model.config.vocab)
    check(tokens, mask)
    if tokens.dtype not in KINDS["int"]:
        problem = f"tokens is {tokens.dtype}; it must be int32 or int64"
        raise DTypeError(f"{options.CALL}: {problem}")
    if options.temperature and options.seed is None and model.division is not None:
        raise ConfigError(f"{options.CALL}: ranks draw the same tokens; pass seed= to all of them")
    check_pages(model, options.cache, options.sequences, len(tokens))
    prompt = to_numpy(tokens)
    real = np.ones(prompt.shape, bool) if mask is None else to_numpy(mask) != 0
    if not real.any(axis=1).all():
        row = int(np.argmin(real.any(axis=1)))
        raise ConfigError(f"generate: row {row} has no real token; begin it with one")
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
    if options.draft is not None:
        check_drafts(model)
        model.drafts = Drafts()
        rows = Generation(copy.copy(model), prompt, real, ends, options, model.drafts)
        return drafted(rows, tokens)
    prompts = [row[own] for row, own in zip(prompt, real, strict=True)]
    batch = batch_of(copy.copy(model), prompts, ends, options)
    for each in batch.rows:  # as in transformers
        each.behind = longest - most - len(each.tokens)
    return _columns(batch, model.config, tokens)


def _columns(batch: "Batch", config: Config, like: Array) -> Iterator[Array]:
    """Yield the new tokens of rows, (batch,) each on the device of ``like``; pads follow ends."""
    pad = config.pad_token
    if pad is None:
        pad = config.end_tokens[0] if config.end_tokens else 0
    samples = [row.sample for row in batch.rows]
    try:
        for place in range(max((row.options.max_new_tokens for row in batch.rows), default=0)):
            while any(each.finish is None and len(each.tokens) <= place for each in samples):
                batch.step()
            if all(len(each.tokens) <= place for each in samples):
                return
            new = [each.tokens[place] if len(each.tokens) > place else pad for each in samples]
            yield to_device_of(np.array(new, like.dtype), like)
    finally:
        batch.close()


class Batch:
    """The rows of a call in a scheduler of their own."""

    def __init__(self, decoder: Decoding, rows: Sequence[Row], tokens: int) -> None:
        """Let rows of at most ``tokens`` tokens in all begin in the first step."""
        self.rows = rows
        self.scheduler = Scheduler(decoder, rows=len(rows), chunk=tokens, prefixes=False)
        self.scheduler.add(rows)

    def step(self) -> None:
        """Compute a step; raise NonFiniteError if a row's logits contain NaN."""
        for event in self.scheduler.step():
            if event.finish == "error":
                number = len(event.request.samples[event.sample].tokens)
                raise NonFiniteError(
                    f"generate: the logits of new token {number} contain NaN; find_nan names the"
                    " layer, and a new copy of the model repairs a broken weight",
                    "generate", "logits", None,
                )  # fmt: skip

    def run(self) -> None:
        """Compute all rows to their ends."""
        try:
            while self.scheduler.busy:
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Free the pages of rows that have not ended."""
        for request in {row.request: None for row in self.rows}:
            self.scheduler.cancel(request)


def batch_of(
    model: Network,
    prompts: Sequence[Array],
    ends: Array,
    options: Options,
    samples: int = 1,
    log_probs: bool = False,
) -> Batch:
    """Return ``samples`` rows of each prompt, (tokens,) int each on the host.

    With ``log_probs``, rows have the log-probabilities of their tokens, and the experts of a
    mixture.
    """
    lengths, most = [*map(len, prompts)], options.max_new_tokens
    names: Sequence[str | None] = [""] * len(prompts)
    every: Any = {}
    if isinstance(own := model.adapter, ByRows):
        own.check(len(prompts))
        model, names, every = copy.copy(model), own.rows, own.adapters
        model.adapter = None
    rows = list[Row]()
    seed = secrets.randbits(64) if options.seed is None else options.seed
    for place, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        request = Request(prompt.tolist(), options, samples, place)
        for index in range(samples):
            number = place * samples + index
            row = Row(request, index, seed, ends, number=number, adapter=name, log_probs=log_probs)
            if options.sequences is not None:
                row.sequence, row.pinned = options.sequences[number], True
            rows.append(row)
    sizes = sizes_of(model, lengths, samples, most, options.cache_dtype)
    if options.sequences is not None:
        sizes["most"] = None  # the sequences have earlier tokens
    decoder = Decoding(model, **sizes, cache=options.cache, notes=log_probs, adapters=every)
    return Batch(decoder, rows, (sum(lengths) + len(rows) * most) or 1)


def sizes_of(
    model: Network, prompts: Sequence[int], samples: int, new: int, cache_dtype: Any = None
) -> dict[str, Any]:
    """Return the sizes of a ``Decoding`` for ``samples`` rows of prompts of these lengths."""
    ends = [prompt + max(new - 1, 0) for prompt in prompts]  # keys of the last token are not needed
    shared = [prompt // PAGE if samples > 1 else 0 for prompt in prompts]
    pairs = zip(ends, shared, strict=True)
    pages = sum(own + samples * (-(-end // PAGE) - own) for end, own in pairs)
    # pages of a window or chunks store only the last tokens of a prompt, but codes are read there
    rows, chunk = len(prompts) * samples, 0 if cache_dtype is None else sum(prompts)
    form = cache_form(model, cache_dtype)
    if any(by_reach(model, form)[0][0]):
        pages = min(pages, most_in_window(model.config, rows, PAGE, chunk))
    sizes = {"rows": rows, "pages": pages, "page": PAGE, "chunk": chunk}
    return {**sizes, "most": max(ends, default=0) + 1, "cache_dtype": cache_dtype}


def check_pages(model: Network, cache: Any, sequences: Any, batch: int) -> None:
    """Raise unless generation can use the cache and its sequences, if they are passed."""
    if not isinstance(cache, PagedKVCache | None):
        cure = "pass a PagedKVCache; without one, generate creates one"
        raise ConfigError(f"generate: cache is a {type(cache).__name__}; {cure}")
    if cache is None:
        if sequences is not None:
            cure = f"sequences={sequences!r} are sequences of a PagedKVCache; pass one as cache"
            raise ConfigError(f"generate: {cure}")
        return
    config = model.config
    if (switch := switch_of(config)) is not None:
        raise ConfigError(
            f"generate: from {switch} tokens on, the rotary angles of this model change for all"
            " positions, which a PagedKVCache does not support; leave cache out"
        )
    if sequences is not None:
        PagedRows("generate", cache, sequences, batch)
        if len({*sequences}) < len(sequences):
            raise RangeError(f"generate: {[*sequences]} has a sequence twice; fork it")
    model.check_cache(cache)
    if config.recurrent:
        model.check_recurrent(PagedRows("generate", cache, [], 0), None)
    sizes = config.kv_heads, config.dim
    if cache.latent is not None:
        sizes = model.cache_sizes["kv_heads"], model.cache_sizes["dim"]
    if cache.keys.shape[3:] != sizes:
        problem = f"generate: the cache has heads of {cache.keys.shape[3:]}, and the model {sizes}"
        raise ShapeError(
            f"{problem}; make one for this model", expected=sizes, actual=cache.keys.shape[3:]
        )
    if cache.scales is None and cache.keys.dtype != model.dtype:
        problem = f"the cache stores {cache.keys.dtype}, and the model computes {model.dtype}"
        raise DTypeError(f"generate: {problem}; make one with dtype={model.dtype.name!r}, or int8")
