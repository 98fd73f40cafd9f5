"""Next-token logits for generation: with a cache, the model computes each token only once.

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
from ...placement import Arriving, on_gpu_of_attribute, to_device_of, to_numpy
from ..adapters.many import ByRows
from ..configs.config import Config
from ..layers.head import exact_logits
from ..network import Network
from ..ranks.pipeline_stages import Stages
from ..ranks.stages import pipeline_logits
from .step import Step

PAGE = 64  # tokens per page in a cache for one call


@on_gpu_of_attribute("model.table")
class CachedLogits:
    """A callable that returns next-token logits, with a new KVCache.

    Rows have at most ``most`` tokens.  A batch has ``samples`` rows for each prompt, which the
    model computes once.  ``begins`` is whether the last call computed all tokens.  If ``notes`` is
    true, ``routes`` returns the experts that routers chose in the last call.
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
        # int8 codes have one scale per row, but the two parts of a latent row differ in scale:
        # an int8 cache stores whole heads.
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
        self.last_routes: Any = None  # on the device
        self.step: Step | None = None
        self.arriving: Arriving | None = None  # the tokens of a step that is already launched

    def __call__(self, tokens: Array, real: Array) -> Array:
        """Return the logits after the last token: (batch, vocab).

        ``tokens`` are (batch, tokens) on the host; ``real`` is False at padding.
        """
        if self.cache.length and int(real.sum(axis=1).max(initial=0)) == self.switch:
            self.cache.reset()  # all rotary angles change: the cached keys are invalid
            self.samples = 1  # rows of the same prompt differ by now
        self.begins = not self.cache.length
        new = tokens if self.begins else tokens[:, -1:]
        if (step := self._step(real)) is not None:
            logits = step(new)
            self.last_routes = None if step.routes is None else step.routes[:, None]
            return logits
        mask = None if self.cache.length or real.all() else on_device_of(real, self.like)
        tokens = on_device_of(new, self.like)
        if self.cache.length or self.samples == 1:
            return self._last(self.model, tokens, mask, self.cache)
        return self._once(tokens, mask)

    def of_last(self) -> Array:
        """Return the logits of the last step in a plan, where the caches are full."""
        self.cache.filled = [self.most - 1 for _ in self.cache.filled]
        real = np.ones((self.cache.shape[0], self.most), bool)
        step = self._step(real)
        return self(real.astype(np.int64), real) if step is None else step.run()

    def _new_cache(self, rows: int) -> KVCache:
        return KVCache(self.model.config.layers, rows, self.most, **self.form)

    def _once(self, tokens: Array, mask: Array | None) -> Array:
        """Compute each prompt once, and repeat logits and cache for its ``samples`` rows."""
        mask = None if mask is None else mask[:: self.samples]
        count = len(tokens) // self.samples
        own = self._new_cache(count)
        logits = self._last(self.of_prompts, tokens[:: self.samples], mask, own)
        self.cache.repeat(own, self.samples)
        if self.last_routes is not None:
            self.last_routes = np.repeat(self.last_routes, self.samples, axis=0)
        return np.repeat(logits, self.samples, axis=0)

    def _last(self, model: Network, tokens: Array, mask: Array | None, cache: KVCache) -> Array:
        """Return the logits after the last of these tokens."""
        routers = list[Any]() if self.notes else None
        logits = last_logits(model, tokens, mask=mask, cache=cache, routers=routers)
        if routers is not None:
            # (batch, tokens, layers, k)
            self.last_routes = np.stack([each.experts for each in routers], axis=2)
        return logits

    def routes(self) -> Array | None:
        """Return the experts of the last call's tokens, (batch, tokens, layers, k) on the host."""
        return None if self.last_routes is None else to_numpy(self.last_routes)

    def most_likely(self, tokens: Array, real: Array, last: bool) -> Array | None:
        """Return the most likely next tokens, (batch,) on the host; -1 for logits with NaN.

        None: the caller must compute the logits.  Unless these tokens are the ``last``, the next
        step is launched before the host has received them.
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
        """Return the ``Step`` on the device, which follows the prompts; None if there is none."""
        if self.cache.length and self.step is None and _steps_on_device(self.model, self.most):
            kinds = self.greedy, self.notes
            self.step = Step(self.model, self.cache, real[:, :-1], self.most, *kinds)
        return self.step


@on_gpu_of_attribute("model.table")
class PagedLogits:
    """A callable that returns next-token logits, with a PagedKVCache.

    Its sequences have no padding, so the model computes padded prompts one by one.  A batch has
    ``samples`` rows for each prompt, which share the pages of the prompt.
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
        """Return the logits after the last token: (batch, vocab).

        ``tokens`` are (batch, tokens) on the host; ``real`` is False at padding.
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
        """Return new sequences that share the pages of a prompt, one for each further sample."""
        return [self.cache.fork(sequence) for _ in range(self.samples - 1)]

    def _last(self, model: Network, tokens: Array, sequences: Sequence[int]) -> Array:
        """Return the logits after the last of these tokens, which are on the host."""
        new = on_device_of(tokens, self.like)
        return last_logits(model, new, cache=self.cache, sequences=sequences)


def of_row(model: Network, index: int) -> Network:
    """Return the model for one row of a batch; it has the adapter of this row."""
    rows = model.adapter
    if isinstance(rows, ByRows):
        model = copy.copy(model)
        model.adapter = rows.row(index)
    return model


def of_samples(model: Network, samples: int) -> Network:
    """Return the model for ``samples`` rows per prompt; they have the adapter of the prompt."""
    rows = model.adapter
    if isinstance(rows, ByRows) and samples > 1:
        model = copy.copy(model)
        model.adapter = ByRows(rows.adapters, [name for name in rows.rows for _ in range(samples)])
    return model


def last_logits(model: Network, tokens: Array, **options: Any) -> Array:
    """Return the logits after the last token of each row: (batch, vocab).

    An invariant model returns ``exact_logits``, before the cap.
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
    """Return the pipeline stages of a model; None without pipeline parallelism."""
    return None if model.division is None else model.division.stages


def check_pages(config: Config, cache: Any, sequences: Any, batch: int) -> None:
    """Raise unless generation can use the cache and its sequences, if they are passed."""
    if not isinstance(cache, PagedKVCache | None):
        cure = "pass a PagedKVCache; without one, generate creates a KVCache"
        raise ConfigError(f"generate: cache is a {type(cache).__name__}; {cure}")
    if cache is None:
        if sequences is not None:
            cure = f"sequences={sequences!r} are sequences of a PagedKVCache; pass one as cache"
            raise ConfigError(f"generate: {cure}")
        return
    if (switch := _switch(config)) is not None:
        raise ConfigError(
            f"generate: from {switch} tokens on, the rotary angles of this model change for all"
            " positions, which a PagedKVCache does not support; leave cache out"
        )
    if sequences is not None:
        PagedRows("generate", cache, sequences, batch)


@contextmanager
def paged(
    model: Network, like: Array, real: Array, options: Any, samples: int = 1
) -> Iterator[PagedLogits]:
    """Yield a ``PagedLogits`` with new sequences, which are freed at the end.

    ``real`` (rows, tokens) is False at the padding of prompts; ``samples`` rows have the same
    prompt.  If the options have no cache, one is created, with as many pages as the rows can fill.
    """
    prompts, cache = real[::samples].sum(axis=1), options.cache
    ends = prompts + max(options.max_new_tokens - 1, 0)  # keys of the last token are not needed
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
    """Return the length from which longrope has other angles for all positions, or None."""
    ropes = (rope for rope in config.ropes.values() if rope.original is not None)
    originals = (r.original for r in ropes if (r.scaling or {}).get("rope_type") == "longrope")
    return next((original + 1 for original in originals if original is not None), None)


def _steps_on_device(model: Network, most: int) -> bool:
    """Return whether one ``Step`` can generate up to ``most`` tokens.

    A step needs a GPU, rotary angles that do not change up to that length, and weights that are
    whole in memory, not gathered block by block.
    """
    if stages_of(model) is not None or model.gather is not None:
        return False
    if model.config.recurrent or model.config.indexer is not None:
        return False
    ropes = model.config.ropes.values()
    fixed = all(rope.original is None or most <= rope.original for rope in ropes)
    return fixed and not isinstance(model.table, np.ndarray)


def on_device_of(array: Array, like: Any) -> Any:
    """Copy a NumPy array to the device of ``like``."""
    return to_device_of(np.ascontiguousarray(array), like)
