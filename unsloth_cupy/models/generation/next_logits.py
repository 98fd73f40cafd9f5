"""Next-token logits for generation: a cache makes each token go through the model only once.

next_logits = CachedLogits(model, like, batch, most)
logits = next_logits(tokens, real)              after the prompts, padded on the left
logits = next_logits(tokens, real)              after the prompts and one more token, and so on
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...core.replay import fixed_order
from ...errors import ConfigError
from ...inference.kv_cache import KVCache
from ...inference.paged_kv_cache import PagedKVCache
from ...inference.paged_rows import PagedRows
from ...placement import on_gpu_of_attribute, to_device_of, to_numpy
from ..adapters.many import ByRows
from ..configs.config import Config
from ..layers.head import exact_logits
from ..network import Network
from ..ranks.pipeline_stages import Stages
from ..ranks.stages import pipeline_logits
from .step import Arriving, Step

PAGE = 64  # tokens of a page of a cache that is made for one call


@on_gpu_of_attribute("model.table")
class CachedLogits:
    """Computes next-token logits with a new KVCache, for rows of at most ``most`` tokens.

    The rows of a batch are ``samples`` copies of each prompt, which goes through the model once.
    ``begins`` says that the last call computed all tokens, and ``routes`` the experts that the
    routers of a mixture chose in it, if it ``notes`` them.
    """

    def __init__(
        self,
        model: Network,
        like: Array,
        batch: int,
        most: int,
        dtype: Any = None,
        greedy: bool = False,
        samples: int = 1,
        notes: bool = False,
    ) -> None:
        self.of_prompts = model.settled()
        self.model = model = of_samples(self.of_prompts, samples)
        self.like, self.most, self.greedy = like, most, greedy
        config, stages = model.config, stages_of(model)
        in_rank = [
            config.attends(layer) and (stages is None or stages.holds(layer))
            for layer in range(config.layers)
        ]
        # codes have one scale for a row, which does not fit both parts of a latent one
        heads = {"kv_heads": config.kv_heads, "dim": config.dim}
        self.form: dict[str, Any] = {
            **(model.cache_sizes if dtype is None else heads),
            "dtype": model.dtype if dtype is None else dtype,
            "like": model.table,
            "window": [config.window_of(i) if here else 1 for i, here in enumerate(in_rank)],
        }
        self.samples = samples
        self.cache = self._new_cache(batch)
        self.switch = _switch(config)
        self.notes = notes and config.experts is not None
        self.begins = True
        self.noted: Any = None  # on the device
        self.step: Step | None = None
        self.arriving: Arriving | None = None  # the tokens of a step that has begun

    def __call__(self, tokens: Array, real: Array) -> Array:
        """Return the logits after the last token, (batch, vocab); tokens (batch, tokens) on host.

        ``real`` has the shape of tokens, and is False at padding.
        """
        if self.cache.length and int(real.sum(axis=1).max(initial=0)) == self.switch:
            self.cache.reset()  # every rotary angle changes: the cached keys are invalid
            self.samples = 1  # rows of a prompt differ by now
        self.begins = not self.cache.length
        new = tokens if self.begins else tokens[:, -1:]
        if (step := self._step(real)) is not None:
            logits = step(new)
            self.noted = None if step.routes is None else step.routes[:, None]
            return logits
        mask = None if self.cache.length or real.all() else on_device_of(real, self.like)
        tokens = on_device_of(new, self.like)
        if self.cache.length or self.samples == 1:
            return self._last(self.model, tokens, mask, self.cache)
        return self._once(tokens, mask)

    def of_last(self) -> Array:
        """Return the logits of the last step, with planned arrays: caches are full before it."""
        self.cache.filled = [self.most - 1 for _ in self.cache.filled]
        real = np.ones((self.cache.shape[0], self.most), bool)
        step = self._step(real)
        return self(real.astype(np.int64), real) if step is None else step.run()

    def _new_cache(self, rows: int) -> KVCache:
        return KVCache(self.model.config.layers, rows, self.most, **self.form)

    def _once(self, tokens: Array, mask: Array | None) -> Array:
        """Return the logits after the prompts, each of which ``samples`` rows repeat."""
        mask = None if mask is None else mask[:: self.samples]
        count = len(tokens) // self.samples
        own = self._new_cache(count)
        logits = self._last(self.of_prompts, tokens[:: self.samples], mask, own)
        self.cache.repeat(own, self.samples)
        self.noted = None if self.noted is None else np.repeat(self.noted, self.samples, axis=0)
        return np.repeat(logits, self.samples, axis=0)

    def _last(self, model: Network, tokens: Array, mask: Array | None, cache: KVCache) -> Array:
        """Return the logits after the last of these tokens."""
        routers = list[Any]() if self.notes else None
        logits = last_logits(model, tokens, mask=mask, cache=cache, routers=routers)
        if routers is not None:
            self.noted = np.stack([each.experts for each in routers], axis=2)
        return logits

    def routes(self) -> Array | None:
        """Return the experts of the tokens of the last call, (batch, tokens, layers, k) on host."""
        return None if self.noted is None else to_numpy(self.noted)

    def most_likely(self, tokens: Array, real: Array, last: bool) -> Array | None:
        """Return the most likely next tokens, (batch,) on the host; -1 for logits with a NaN.

        None where only the logits say it.  Unless these tokens are the last, the GPU begins the
        step after them before the host has them.
        """
        step = self._step(real) if self.greedy else None
        if step is None:
            return None
        if self.arriving is None:
            step(tokens[:, -1:])
            self.arriving = step.arriving()
        now, self.arriving = self.arriving, None
        if not last:
            step(None)
            self.arriving = step.arriving()
        return now.wait()

    def _step(self, real: Array) -> Step | None:
        """Return the step on the device, which follows the prompts; None without one."""
        if self.cache.length and self.step is None and _steps_on_device(self.model, self.most):
            kinds = self.greedy, self.notes
            self.step = Step(self.model, self.cache, real[:, :-1], self.most, *kinds)
        return self.step


@on_gpu_of_attribute("model.table")
class PagedLogits:
    """Computes next-token logits with a PagedKVCache.

    Its sequences hold no padding, so padded prompts go through the model one by one.  The rows of a
    batch are ``samples`` copies of each prompt, which share its pages.
    """

    def __init__(
        self,
        model: Network,
        like: Array,
        cache: PagedKVCache,
        sequences: list[int],
        samples: int = 1,
    ) -> None:
        self.of_prompts, self.like, self.samples = model.settled(), like, samples
        self.model, self.past_prompts = of_samples(self.of_prompts, samples), False
        self.cache, self.sequences = cache, sequences
        if isinstance(model.adapter, ByRows):
            model.adapter.check(len(sequences))

    def __call__(self, tokens: Array, real: Array) -> Array:
        """Return the logits after the last token, (batch, vocab); tokens (batch, tokens) on host.

        ``real`` has the shape of tokens, and is False at padding.
        """
        if self.past_prompts or (real.all() and self.samples == 1):
            new, self.past_prompts = tokens[:, -1:] if self.past_prompts else tokens, True
            return self._last(self.model, new, self.sequences)
        self.past_prompts, first = True, slice(None, None, self.samples)
        rows = zip(tokens[first], real[first], self.sequences, strict=True)
        logits_by_row = [
            self._last(of_row(self.of_prompts, index), row[is_real][None], [sequence])
            for index, (row, is_real, sequence) in enumerate(rows)
        ]
        forks = [each for n in self.sequences for each in (n, *self._forks(n))]
        self.sequences[:] = forks
        logits: Array = np.repeat(np.concatenate(logits_by_row), self.samples, axis=0)
        return logits

    def _forks(self, sequence: int) -> list[int]:
        """Return the other sequences that begin with a prompt."""
        return [self.cache.fork(sequence) for _ in range(self.samples - 1)]

    def _last(self, model: Network, tokens: Array, sequences: Sequence[int]) -> Array:
        """Return the logits after the last of these tokens, which are on the host."""
        new = on_device_of(tokens, self.like)
        return last_logits(model, new, cache=self.cache, sequences=sequences)


def of_row(model: Network, index: int) -> Network:
    """Return a model for one row of a batch, whose rows may have adapters of their own."""
    rows = model.adapter
    if isinstance(rows, ByRows):
        model = copy.copy(model)
        model.adapter = rows.row(index)
    return model


def of_samples(model: Network, samples: int) -> Network:
    """Return a model for ``samples`` rows of each prompt, which have the adapter of the prompt."""
    rows = model.adapter
    if isinstance(rows, ByRows) and samples > 1:
        model = copy.copy(model)
        model.adapter = ByRows(rows.adapters, [name for name in rows.rows for _ in range(samples)])
    return model


def last_logits(model: Network, tokens: Array, **options: Any) -> Array:
    """Return the logits after the last token of each row: (batch, vocab).

    Those of an invariant model are ``exact_logits``, before the cap.
    """
    stages = stages_of(model)
    if stages is not None:
        return pipeline_logits(model, stages, tokens, **options)
    parameters = model.entered(model.parameters)
    x = model.hidden(parameters, tokens, **options)[:, -1:]
    if model.invariant:
        with fixed_order():
            exact: Array = exact_logits(model.config, parameters, x)[:, 0]
            return exact
    logits: Array = model.next_logits(parameters, x)[:, 0]
    return logits


def stages_of(model: Network) -> Stages | None:
    """Return which blocks this rank holds; None without pipeline parallelism."""
    return None if model.division is None else model.division.stages


def check_pages(config: Config, cache: Any, sequences: Any, batch: int) -> None:
    """Raise unless generation can continue in the paged cache, if there is one."""
    if not isinstance(cache, PagedKVCache | None):
        cure = "pass a PagedKVCache; without one, generate creates a KVCache"
        raise ConfigError(f"generate: cache is a {type(cache).__name__}; {cure}")
    if cache is None:
        if sequences is not None:
            cure = f"sequences={sequences!r} are those of a PagedKVCache; pass it as cache"
            raise ConfigError(f"generate: {cure}")
        return
    if (switch := _switch(config)) is not None:
        raise ConfigError(
            f"generate: from {switch} tokens on the angles of this model change for all positions,"
            " which a PagedKVCache does not support; leave cache out"
        )
    if sequences is not None:
        PagedRows("generate", cache, sequences, batch)


@contextmanager
def paged(
    model: Network, like: Array, real: Array, options: Any, samples: int = 1
) -> Iterator[PagedLogits]:
    """Yield next-token logits in new sequences of the cache of options, which are free at the end.

    ``real`` (rows, tokens) is False at the padding of prompts, of which ``samples`` rows have one.
    Without a cache one is made, with as many pages as the rows can fill.
    """
    prompts, cache = real[::samples].sum(axis=1), options.cache
    ends = prompts + max(options.max_new_tokens - 1, 0)  # the last new token has no keys there
    if cache is None:
        own = -(-ends // PAGE)
        shared = prompts // PAGE if samples > 1 else own
        pages, config = int((shared + samples * (own - shared)).sum()), model.config
        sizes = config.layers, pages, PAGE, config.kv_heads, config.dim
        dtype = options.cache_dtype or model.dtype
        cache = PagedKVCache(*sizes, dtype=dtype, like=model.table)
    sequences: list[int] = []
    try:
        for tokens in prompts if samples > 1 else ends:
            sequences.append(cache.allocate(int(tokens)))
        yield PagedLogits(model, like, cache, sequences, samples)
    finally:
        for sequence in sequences:
            cache.free(sequence)


def _switch(config: Config) -> int | None:
    """Return the length from which longrope uses other angles for all positions, or None."""
    ropes = (rope for rope in config.ropes.values() if rope.original is not None)
    originals = (r.original for r in ropes if (r.scaling or {}).get("rope_type") == "longrope")
    return next((original + 1 for original in originals if original is not None), None)


def _steps_on_device(model: Network, most: int) -> bool:
    """Return whether one Step can generate up to ``most`` tokens.

    It needs a GPU, rotary angles that do not change up to that length, and weights that stay whole
    in memory, which those gathered block by block do not.
    """
    if stages_of(model) is not None or model.gather is not None or model.config.recurrent:
        return False
    ropes = model.config.ropes.values()
    fixed = all(rope.original is None or most <= rope.original for rope in ropes)
    return fixed and not isinstance(model.table, np.ndarray)


def on_device_of(array: Array, like: Any) -> Any:
    """Return a NumPy array copied to the device of ``like``."""
    return to_device_of(np.ascontiguousarray(array), like)
