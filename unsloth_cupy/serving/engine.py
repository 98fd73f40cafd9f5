"""The engine: requests that join and leave a batch between its steps.

with Engine(model, rows=64) as engine:
request = engine.submit(prompt, max_new_tokens=100, samples=4, temperature=1.0, seed=0)
engine.run()
request.samples[0].tokens
"""

import itertools
import secrets
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..core.call import is_integer
from ..errors import ConfigError, DeviceMemoryError, naming
from ..inference.paged_kv_cache import PagedKVCache
from ..placement import to_numpy
from .constraint import Grammars
from .options import Options
from .requests import Event, Request, Row
from .scheduler import Scheduler


class Engine:
    """Generation for many prompts at once, each with its own options.

    Rows of all requests are computed together, a token at a time; prompts are computed in chunks
    beside them.  Prompts that begin alike share pages of the KV cache, and the samples of a prompt
    share its computation.  The tokens of a row depend on its prompt, its options and its seed, not
    on other rows; in an invariant model not in one bit.

    Parameters
    ----------
    model : Transformer
        A causal language model.  Later requests share pages of earlier ones: create a new engine
        after its weights change, or after ``load_adapter``.
    rows : int
        Most rows that are computed together.
    pages : int, optional
        Pages of the KV cache.  None: as many as ``rows`` texts of all positions fill, but at most
        four fifths of the free memory.  If only some layers have a window or chunks, these have
        further pages for the windows of ``rows`` texts.
    page : int
        Tokens per page.
    cache_dtype : str, optional
        int8: codes, which take half the memory of 16-bit values.
    chunk : int
        Most tokens of prompts in a step.
    routes : bool
        Whether samples of a mixture have the experts of their tokens.  The host then waits for
        each step.

    Attributes
    ----------
    waiting, running : int
        Number of rows that wait, and of rows that are computed.
    free_pages : int
        Number of pages that no row uses.
    computed_rows : int
        Number of tokens that the model computed.
    kept_tokens : int
        Number of tokens of prompts, each once for all its samples, and of new tokens.

    Raises
    ------
    ConfigError
        A number is invalid, the model has no head for generation, or cannot be invariant.

    Notes
    -----
    If pages run out, the youngest row gives up its pages and is computed again later: its tokens
    and log-probabilities stay.  A model whose layers have recurrent states shares no prefixes, only
    the prompt of the samples of one request.  A model with dynamic rotary angles shares none
    either, and its rows start only if all their tokens have pages.

    Threads may share an engine: one thread at a time adds, cancels or computes.

    Examples
    --------
    >>> from unsloth_cupy import Engine
    >>> from unsloth_cupy.models import create
    >>> model = create(
    ...     {
    ...         "model_type": "llama",
    ...         "vocab_size": 99,
    ...         "hidden_size": 32,
    ...         "intermediate_size": 64,
    ...         "num_hidden_layers": 1,
    ...         "num_attention_heads": 2,
    ...     },
    ...     seed=0,
    ... )
    >>> with Engine(model, rows=4) as engine:
    ...     one = engine.submit([5, 6, 7], max_new_tokens=3, stop=())
    ...     two = engine.submit([8], max_new_tokens=2, samples=2, temperature=1.0, seed=0, stop=())
    ...     requests = engine.run()
    >>> [len(sample.tokens) for request in requests for sample in request.samples]
    [3, 2, 2]
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 64,
        pages: int | None = None,
        page: int = 64,
        cache_dtype: str | None = None,
        chunk: int = 512,
        routes: bool = False,
    ) -> None:
        numbers = {"rows": rows, "pages": pages, "page": page, "chunk": chunk}
        for name, value in numbers.items():
            if not (is_integer(value, 1) or (name == "pages" and value is None)):
                raise ConfigError(f"Engine: {name}={value!r} must be an integer, 1 or more")
        if cache_dtype not in (None, "int8"):
            raise ConfigError(f"Engine: cache_dtype={cache_dtype!r} must be 'int8', or None")
        if not isinstance(routes, bool):
            raise ConfigError(f"Engine: routes={routes!r} must be True or False")
        if not hasattr(model, "decoder"):
            cure = "pass a model that models.load or models.create returned"
            raise ConfigError(f"Engine: model is a {type(model).__name__}; {cure}")
        self.model = model
        decoder = model.decoder(
            rows=rows, pages=pages, page=page, chunk=chunk, cache_dtype=cache_dtype, routes=routes
        )
        self._scheduler = Scheduler(decoder, rows=rows, chunk=chunk)
        self._requests: list[Request] = []
        self._numbers, self._lock = itertools.count(), threading.RLock()
        self._grammars: dict[Any, Grammars] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            self.cancel(request)
        self._requests = []

    @property
    def cache(self) -> PagedKVCache:
        """The pages of layers that read all tokens; without such layers, the pages of all."""
        return self._scheduler.cache.first

    waiting = property(lambda self: self._scheduler.waiting)
    running = property(lambda self: self._scheduler.running)

    @property
    def free_pages(self) -> int:
        """Number of pages that no row uses."""
        with self._lock:
            return self._scheduler.free_pages

    computed_rows = property(lambda self: self._scheduler.computed_rows)
    kept_tokens = property(lambda self: self._scheduler.kept_tokens)

    @naming("Engine.submit", "generate")
    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        samples: int = 1,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        first: int = 0,
        stop: int | Sequence[int] | None = None,
        stop_texts: Sequence[str] = (),
        log_probs: bool = False,
        top_log_probs: int = 0,
        constraint: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Add a prompt; it starts in a later step.

        Parameters
        ----------
        prompt : (tokens,) int
            A list or an array of tokens.
        max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop
            As in ``Transformer.generate``.
        samples : int
            Number of completions.
        seed, first : int
            Sample i draws as row ``first + i`` of ``generate(seed=seed)``.
        stop_texts : sequence of str
            Texts that end a sample; the tokens of the text are part of the sample.
        log_probs : bool
            Whether samples have the log-probabilities of their tokens.
        top_log_probs : int
            Number of most likely tokens at each place that samples have log-probabilities of.
            Above 0, ``log_probs`` is true.
        constraint : mapping, optional
            ``{"json_schema": schema}`` or ``{"regex": text}``: the new tokens are a text of this
            form.  Needs llguidance and the model's tokenizer.
        adapter : str, optional
            Name of an adapter; None: the one that was active when the engine was created.

        Returns
        -------
        request : Request
            ``request.samples`` has the tokens so far, and ``finish`` of each sample.

        Raises
        ------
        ConfigError
            An option or the prompt is invalid.
        DeviceMemoryError
            The engine has fewer pages than one sample may fill.
        """
        decoder = self._scheduler.decoder
        options = Options(
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
            seed, stop, None, None, None, first,
        )  # fmt: skip
        for name, value, least in (("samples", samples, 1), ("first", first, 0)):
            if not is_integer(value, least):
                raise ConfigError(f"generate: {name}={value!r} must be {least} or more")
        if not is_integer(top_log_probs) or top_log_probs > decoder.vocab:
            must = f"be an integer from 0 to {decoder.vocab}"
            raise ConfigError(f"generate: top_log_probs={top_log_probs!r} must {must}")
        tokens = self._tokens(prompt)
        ends = options.ends(self.model.config.end_tokens, decoder.vocab)
        if not isinstance(log_probs, bool):
            raise ConfigError(f"generate: log_probs={log_probs!r} must be True or False")
        one = isinstance(stop_texts, str) or not isinstance(stop_texts, Iterable)
        listed: list[Any] = [stop_texts] if one else [*stop_texts]
        if not all(each and isinstance(each, str) for each in listed):
            raise ConfigError(f"generate: stop_texts={stop_texts!r} must be a list of texts")
        tokenizer = getattr(self.model, "tokenizer", None)
        backend = None if tokenizer is None else tokenizer.backend
        if listed and backend is None:
            cure = 'set model.tokenizer = models.Tokenizer("folder")'
            raise ConfigError(f"generate: stop_texts need the model's tokenizer; {cure}")
        if adapter is not None and adapter not in [*decoder.adapters]:
            names = ", ".join(map(repr, decoder.adapters)) or "none"
            cure = "call load_adapter before you create the engine"
            raise ConfigError(f"generate: adapter={adapter!r}; there are {names}; {cure}")
        if len(tokens) >= (positions := self.model.config.positions):
            warnings.warn(  # no length, so that many prompts are warned of once
                f"Engine.submit: the prompt fills the {positions} positions that the model was"
                " trained for (max_position_embeddings); new tokens are usually of poor quality;"
                " pass a shorter prompt",
                stacklevel=3,
            )
        size = self.cache.keys.shape[2]
        need = -(-(len(tokens) + max(max_new_tokens - 1, 0)) // size)
        if self.cache.frees:  # a window that begins in a page, and the tokens of a step
            reach = self.cache.chunk or max(filter(None, self.cache.windows))
            need = min(need, 1 - (-reach // size) - (-self._scheduler.chunk // size))
        if need > len(self.cache.uses):
            raise DeviceMemoryError(
                f"generate: a sample of {len(tokens)} + {max_new_tokens} tokens fills {need} pages,"
                f" and the engine has {len(self.cache.uses)}; create it with more pages",
                need,
                len(self.cache.uses),
            )
        grammar = None
        if constraint is not None:
            key = tuple(ends.tolist())
            if key not in self._grammars:
                self._grammars[key] = Grammars(backend, decoder.vocab, key)
            grammar = self._grammars[key]
        request = Request(tokens, options, samples, next(self._numbers))
        own = secrets.randbits(64) if seed is None else seed
        rows = [
            Row(
                request,
                index,
                own,
                ends,
                adapter="" if adapter is None else adapter,
                log_probs=log_probs or top_log_probs > 0,
                top=top_log_probs,
                matcher=None if grammar is None else grammar.matcher(constraint),
                allowed=None if grammar is None else grammar.allowed,
                texts=(backend, listed) if listed else None,
            )
            for index in range(samples)
        ]
        with self._lock:
            self._requests.append(request)
            self._scheduler.add(rows)
        return request

    def _tokens(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt, checked."""
        if isinstance(prompt, Mapping):
            cure = "pass the token ids alone: images are not supported yet"
            raise ConfigError(f"generate: prompt has {', '.join(map(str, prompt))}; {cure}")
        try:
            row = to_numpy(prompt) if hasattr(prompt, "dtype") else np.asarray(prompt)
        except ValueError:  # lists of unequal lengths
            row = np.asarray(prompt, object)
        if row.ndim != 1 or row.dtype.kind not in "iu" or not row.size:
            problem = f"prompt is {row.dtype} {row.shape}"
            raise ConfigError(f"generate: {problem}; pass a list of one or more tokens")
        vocab = self._scheduler.decoder.vocab
        if row.min() < 0 or row.max() >= vocab:
            raise ConfigError(f"generate: prompt has a token outside the vocabulary of {vocab}")
        return [int(token) for token in row]

    def step(self) -> list[Event]:
        """Compute one step; return new tokens and ends of samples, in no order of requests.

        A sample whose logits contain NaN, or whose constraint allows no token, ends with "error".
        After an exception, such as KeyboardInterrupt, the next step computes all rows again; their
        tokens stay.
        """
        with self._lock:
            try:
                events = self._scheduler.step()
            except BaseException:
                self._scheduler.restart()
                raise
            if any(event.finish is not None for event in events):
                self._requests = [each for each in self._requests if not each.finished]
        return events

    def run(self) -> list[Request]:
        """Compute all open requests to their ends; return them in the order of ``submit``."""
        requests = self._requests
        while self._scheduler.busy:
            self.step()
        return requests

    def cancel(self, request: Any) -> None:
        """End all samples of a request now; the next step returns their events."""
        if not isinstance(request, Request):
            cure = "pass what submit returned"
            raise ConfigError(f"Engine.cancel: request is a {type(request).__name__}; {cure}")
        with self._lock:
            self._scheduler.cancel(request)
