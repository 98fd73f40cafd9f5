"""A decoder-only transformer computed with the ops of this package.

logits = model.logits(tokens)
loss, gradients = model.loss_and_gradients(tokens, labels)
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import Array
from ..errors import ArgumentError, ConfigError, naming
from ..inference.kv_cache import KVCache
from ..inference.paged_kv_cache import PagedKVCache
from ..ops.losses.linear_log_probs import LogProbs
from ..training.checkpoint import CheckpointConfig
from ..training.loss_scaler import LossScaler
from . import generate as generation
from .adapters.adapted import Adapted
from .adapters.adapter import Adapter
from .adapters.outer_weights import resized
from .any_library import from_any_library
from .configs.config import Config
from .configs.heads import SEQUENCE, pooled, sequence_scores
from .configs.names import HEAD, TABLE
from .folders.checkpoint_files import SINGLE, Layout, write_folder
from .folders.expert_files import saved_tensors
from .folders.quantized_weights import in_folders, saved_config
from .generation.rollouts import Rollouts
from .generation.rollouts import rollouts as sampled
from .generation.streaming import Continuation
from .layers.context import Context, is_left_aligned
from .loss import label_log_probs, mean_loss
from .objective import TrainingStep, next_token
from .ranks.gather import whole_parameters
from .text.chat import Message, Tools
from .text.predicting import predicted
from .text.tokenizer import Tokenizer

SHOWN = frozenset({  # the names that completion offers: those of its documentation
    "adapter", "adapters", "add_adapter", "base", "by_rows", "cache_sizes", "chunked_mlp",
    "config", "context", "context_attention", "delete_adapter", "division", "dtype",
    "embeddings", "folder", "gather", "generate", "generate_text", "graphs", "grown",
    "invariant", "load_adapter", "log_probs", "logits", "loss", "loss_and_gradients",
    "merge_adapter", "merged", "mix_adapters", "num_parameters", "origin", "outdated",
    "parameters", "parts", "predict", "resize", "rollouts", "save", "save_adapter",
    "set_adapter", "stream", "stream_text", "to_torch", "tokenizer", "train_through",
    "trainable", "value_and_gradients",
})  # fmt: skip


class Transformer(Adapted):
    """A language model: parameters by their Hugging Face names, loss, generation and saving.

    Attributes
    ----------
    parameters : dict of str to array or quantized weight
        Replace or change them in place: every call reads them again.
    adapter : Adapter or None
        Low-rank weights added to linear layers; the parameters are then frozen.
    trainable : dict of str to array
        What gradients are of: the adapter's parameters, or without one all that are not quantized.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` computes the MLPs, which must be SwiGLU; False at first.
    invariant : bool
        Whether ``log_probs`` of training are those of sampling to the bit: what is computed of a
        text does not depend on the batch, padding, packing or caches.  False at first.
    origin : str or None
        The formats of the file or folder that it was read from, if they are dense here; of a
        mixture in a GGUF file also that it has no coefficient of the router's loss.
    adapters : mapping of str to Adapter, read-only
        Those that are kept by name: see ``load_adapter``.
    grown : bool
        Whether its tables differ from the folder's, as of new tokens: an adapter's file has them.
    """

    origin: str | None = None

    def __init__(
        self,
        config: Config,
        parameters: dict[str, Array],
        texts: Mapping[str, Mapping[str, Any]],
        layout: Layout | None = None,
    ) -> None:
        super().__init__(config, parameters)
        self.texts, self.layout = texts, layout
        self._adapters: dict[str, Adapter] = {}

    def __dir__(self) -> list[str]:
        return sorted({*SHOWN, *(name for name in super().__dir__() if name[:2] == "__")})

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise an ArgumentError that names ``logits``."""
        raise ArgumentError("Transformer: a model is not called; call model.logits(tokens)")

    @naming("resize")
    def resize(self, vocab: int, *, multiple: int = 1) -> None:
        """Change the number of rows of the embedding table and of the head, as of new tokens.

        The new rows of each are the mean of its old ones (Hewitt, Initializing New Word Embeddings,
        2021), a row beyond the new number is dropped; tied ones stay tied, and config follows.  The
        parameters become new arrays.

        Parameters
        ----------
        vocab : int
            The new number of rows, at least.
        multiple : int
            It is rounded up to a multiple of this: 64 keeps products fast.

        Raises
        ------
        ConfigError
            A number is invalid; an end or pad token would be dropped; an adapter has rows or tables
            of its own; or ranks divide the model.
        """
        if not is_integer(vocab, 1) or not is_integer(multiple, 1):
            raise ConfigError(f"resize({vocab!r}, multiple={multiple!r}): pass integers, 1 or more")
        self._require_whole("resize", "before the model is divided")
        size, config = -(-vocab // multiple) * multiple, self.config
        named = {f"adapter {name!r}": each for name, each in self.adapters.items()}
        every = {"the adapter": self.adapter, **named}
        if own := [which for which, each in every.items() if each is not None and each.outer]:
            problem = f"{own[0]} has rows or tables of its own"
            raise ConfigError(f"resize: {problem}; call merge_adapter() first, or resize before it")
        pad = () if config.pad_token is None else (config.pad_token,)
        kept = [token for token in (*config.end_tokens, *pad) if token < config.vocab]
        if max(kept, default=0) >= size:
            problem = f"resize({vocab}): token {max(kept)} ends texts or pads them"
            raise ConfigError(f"{problem}; pass {max(kept) + 1} or more")
        tables = {n: self.parameters[n] for n in (TABLE, HEAD) if n in self.parameters}
        self.parameters = self.parameters | {n: resized(each, size) for n, each in tables.items()}
        self.config, self.grown = replace(config, vocab=size), self.grown or size != config.vocab
        self.texts = {
            **self.texts,
            "config.json": {**self.texts["config.json"], "vocab_size": size},
        }

    @from_any_library
    def logits(
        self,
        tokens: Array,
        *,
        mask: Array | None = None,
        cache: KVCache | PagedKVCache | None = None,
        sequences: Sequence[int] | None = None,
        offsets: Array | None = None,
        routes: Array | None = None,
    ) -> Array:
        """Return the logits of every next token, at every position; those of a classifier's labels.

        Parameters
        ----------
        tokens : (batch, tokens) int32 or int64
            Token ids.
        mask : (batch, tokens) bool or int, optional
            True or 1 where a token is real, 0 where it is padding, on the left or on the right.
            Positions count real tokens.  Logits at padding are undefined.
        cache : KVCache or PagedKVCache, optional
            Continue after the tokens that it holds, and append these; mask may then also cover
            all tokens, (batch, held + tokens).  A PagedKVCache has no padding.
        sequences : sequence of int, optional
            The sequence of a PagedKVCache that each row continues; they may differ in length.
        offsets : (texts + 1,) int, optional
            Packed texts: where each one starts among all tokens, row after row, and the number of
            tokens last.  Each text begins at position 0 and does not see the others.

        Returns
        -------
        logits : (batch, tokens, vocab), in the dtype of the parameters
            Of a token classifier (batch, tokens, labels); of a sequence classifier (batch, labels),
            at the rightmost real token, of packed texts (texts, labels).

        Raises
        ------
        RangeError
            A token is outside the vocabulary, the cache is full, or offsets do not rise from 0 to
            the number of tokens.
        ShapeError, DTypeError
            tokens, mask or offsets have another shape or dtype.
        ConfigError
            There are offsets together with a mask or a cache; or the model has no head.
        """
        parameters, config = self.entered(self.parameters), self.config
        options: Any = {"cache": cache, "sequences": sequences, "routes": routes}
        if config.head == SEQUENCE:
            x = self._whole_rows(parameters, tokens, mask, offsets, **options)
            with self.ordered():
                return sequence_scores(parameters, x, mask, offsets)
        x = self.hidden(parameters, tokens, mask=mask, offsets=offsets, **options)
        logits = self.next_logits(parameters, x)
        return logits.reshape(*tokens.shape, logits.shape[-1])

    @from_any_library
    def loss(
        self,
        tokens: Array,
        labels: Array,
        *,
        mask: Array | None = None,
        offsets: Array | None = None,
        count: int | None = None,
        routes: Array | None = None,
    ) -> Any:
        """Return the mean negative log probability of the labels, in nats; a classifier's loss.

        The shift by one token happens here: position t predicts ``labels[:, t + 1]``.

        Parameters
        ----------
        tokens, labels : (batch, tokens) int32 or int64
            Labels are usually the tokens themselves; -100 where a label does not count.  Those of a
            token classifier are not shifted.  Those of a sequence classifier choose its loss,
            unless ``problem_type`` in config.json does: (batch,) float: squared error; (batch,)
            int: cross entropy; (batch, labels) float in 0 .. 1: binary cross entropy.
        mask : (batch, tokens) bool or int, optional
            As in ``logits``; padding counts in the loss unless its label is -100.
        offsets : (texts + 1,) int, optional
            As in ``logits``; a text does not predict the first token of the next one.
        count : int, optional
            Divides the sum; pass the labels of the whole batch if this is a part of it, so that
            losses of the parts add up.  None: the labels that count here.
        routes : (batch, tokens, layers with experts, k) int, optional
            As in ``logits``, of a language model.

        Returns
        -------
        loss : float64 scalar, or float32 Var inside ``value_and_gradients``
            0 if no label counts.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            The labels do not fit the head.
        ConfigError
            ``count`` is not a number of labels; the model has no head; or ranks divide the rows of
            a classifier.
        """
        return mean_loss(self, tokens, labels, mask, offsets, count, routes)

    @from_any_library
    def log_probs(
        self,
        tokens: Array,
        labels: Array,
        *,
        mask: Array | None = None,
        offsets: Array | None = None,
        temperature: float = 1.0,
        routes: Array | None = None,
        invariant: bool | None = None,
    ) -> LogProbs:
        """Return the log-probability of each label, with entropy and relatives.

        The shift by one token happens here: entry t is of ``labels[:, t + 1]``, the last is 0.

        Parameters
        ----------
        tokens, labels : (batch, tokens) int32 or int64
            -100 where a label does not count: its results are 0.
        mask : (batch, tokens) bool or int, optional
            As in ``logits``.
        offsets : (texts + 1,) int, optional
            As in ``logits``: the results are then one row, of all texts.
        temperature : float
            Of sampling, above 0; it divides the logits.
        routes : (batch, tokens, layers with experts, k) int, optional
            As in ``logits``.
        invariant : bool, optional
            True: the bits of a text's results do not depend on the batch, padding or packing, and
            are those by which ``rollouts(invariant=True)`` samples.  None: as the model is.

        Returns
        -------
        result : LogProbs
            Fields of shape (batch, tokens): see ``linear_log_probs``.  Inside
            ``value_and_gradients`` they are Vars; log_probs and entropy have gradients.

        Raises
        ------
        ConfigError
            temperature is not above 0; or the model is not invariant: the message says why.
        """
        model = self.in_order(invariant)
        return label_log_probs(model, tokens, labels, mask, offsets, temperature, routes)

    @from_any_library
    def embeddings(
        self,
        tokens: Array,
        *,
        mask: Array | None = None,
        offsets: Array | None = None,
        pooling: str = "mean",
    ) -> Array:
        """Return one vector of length 1 for each text: its last hidden states, pooled.

        Parameters
        ----------
        tokens : (batch, tokens) int32 or int64
        mask : (batch, tokens) bool or int, optional
            As in ``logits``.
        offsets : (texts + 1,) int, optional
            As in ``logits``: the result has a row for each text.
        pooling : str
            mean: over real tokens; last: the state of the rightmost one.

        Returns
        -------
        embeddings : (batch, hidden) float32, or float64 for float64 parameters
            A Var inside ``value_and_gradients``, as ``losses.contrastive`` takes it.

        Raises
        ------
        ConfigError
            pooling is unknown, or a row has no real token.
        """
        x = self._whole_rows(self.entered(self.parameters), tokens, mask, offsets)
        return pooled(x, mask, offsets, pooling)

    def _whole_rows(
        self, parameters: Any, tokens: Array, mask: Any, offsets: Any, **options: Any
    ) -> Any:
        """Return the normalised output of the last block, also of tokens that ranks divide."""
        ranks, kind = self.context, self.context_attention
        if ranks is not None and mask is not None and is_left_aligned(mask):
            mask = None  # no real token sees what comes after it
        context = Context.of(ranks, tokens, mask, offsets, kind)
        options |= {"mask": mask, "offsets": offsets, "context": context}
        x = self.hidden(parameters, tokens, **options)
        return x if context is None else context.whole(x)

    def predict(self, texts: Sequence[str | Sequence[Message]]) -> list[dict[str, float]]:
        """Return what a sequence classifier says of each text: a number by the name of the label.

        Parameters
        ----------
        texts : sequence of str or of messages
            Texts, in which special tokens may be written; or lists of messages, which the chat
            template formats.

        Returns
        -------
        numbers : list of dict
            Probabilities: softmax of the logits, of several labels at once (``problem_type``) their
            sigmoid; of a regression or a reward the logits themselves.

        Raises
        ------
        ConfigError
            The model has another head, or no tokenizer; a text has no tokens, or too many.
        """
        return predicted(self, texts)

    def value_and_gradients(
        self,
        function: Callable[[Any], Any],
        *,
        checkpoint: CheckpointConfig | None = None,
        scaler: LossScaler | None = None,
        seed: int | None = None,
        graph: bool = False,
    ) -> tuple[Any, dict[str, Array]]:
        """Return ``function(model)`` and its gradient with respect to every ``trainable`` array.

        Parameters
        ----------
        function : callable
            Takes this model on a tape, whose ``logits`` and ``loss`` are Vars; returns a Var of
            shape ().
        checkpoint : CheckpointConfig, optional
            If enabled, the tape keeps the input of each group of blocks, and backward computes
            them again: less memory, more time, the same bits.
        scaler : LossScaler, optional
            Scales the gradients, not the value; overflow becomes infinite without a warning.
        seed : int, optional
            Turns the adapter's dropout on; each step should pass a new one.
        graph : bool
            On a GPU, capture the call into a CUDA graph, and launch that from the third call of a
            form on: the same bits, one launch.  The results are then overwritten by the next call.
            function must be a ``functools.partial`` of a function that reads nothing else that
            changes: calls are of one form if its keywords are arrays of equal shapes, and equal
            otherwise.  What cannot be captured runs as without: ``explain`` says why.

        Returns
        -------
        value : scalar
            In the dtype of the Var; float64 if function returns ``model.loss`` itself.
        gradients : {name: array}

        Raises
        ------
        ConfigError
            An option is invalid.
        GradientError
            function returned something else than a scalar of this tape, or used an op that has no
            gradient.

        Examples
        --------
        >>> import numpy as np
        >>> from unsloth_cupy import cross_entropy
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
        >>> tokens = np.arange(12).reshape(2, 6)
        >>> def last_token(model):
        ...     return cross_entropy(model.logits(tokens[:, :-1])[:, -1], tokens[:, -1]).mean()
        >>> loss, gradients = model.value_and_gradients(last_token)
        >>> assert gradients.keys() == model.trainable.keys()
        """
        if scaler is not None and not isinstance(scaler, LossScaler):
            raise ConfigError(f"value_and_gradients(scaler={scaler!r}): pass a LossScaler, or None")
        if not callable(function):
            raise ConfigError(f"value_and_gradients({function!r}): pass a function of a model")
        step = TrainingStep(checkpoint, scaler, seed)
        if graph:
            return self.graphs(self, self.passes, function, step)
        return self.passes(function, step)

    @from_any_library
    @naming("loss_and_gradients", "value_and_gradients", "loss")
    def loss_and_gradients(
        self,
        tokens: Array,
        labels: Array,
        *,
        mask: Array | None = None,
        offsets: Array | None = None,
        checkpoint: CheckpointConfig | None = None,
        scaler: LossScaler | None = None,
        seed: int | None = None,
        count: int | None = None,
        routes: Array | None = None,
        graph: bool = False,
    ) -> tuple[Any, dict[str, Array]]:
        """Return ``loss`` and its gradient with respect to every ``trainable`` array, by name.

        The arrays and ``count`` are those of ``loss``, the other options those of
        ``value_and_gradients``.
        """
        batch = {"tokens": tokens, "labels": labels, "mask": mask, "offsets": offsets}
        function = partial(next_token, **batch, count=count, routes=routes)
        return self.value_and_gradients(
            function, checkpoint=checkpoint, scaler=scaler, seed=seed, graph=graph
        )

    @from_any_library
    def generate(
        self,
        tokens: Array,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        mask: Array | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | Sequence[int] | None = None,
        cache: PagedKVCache | None = None,
        sequences: Sequence[int] | None = None,
        cache_dtype: str | None = None,
        invariant: bool | None = None,
    ) -> Array:
        """Return the prompts, each followed by the tokens that the model generates.

        Parameters
        ----------
        tokens : (batch, prompt) int32 or int64
            Prompts, padded on the left or on the right where mask is 0.
        max_new_tokens, min_new_tokens : int
            How many tokens to add, at most and at least.  A warning says if a row then has more
            tokens than the config's ``max_position_embeddings``.
        mask : (batch, prompt) bool or int, optional
            1 where a token is real.
        temperature : float
            0: the most likely token.  Otherwise tokens are sampled from softmax(logits /
            temperature), restricted to the ``top_k`` most likely ones, then to the fewest whose
            probabilities reach ``top_p``.  At 0 those options and ``seed`` change nothing, which a
            warning says.
        min_p : float, optional
            In [0, 1]: after that, only tokens of at least min_p times the probability of the most
            likely one are sampled (Nguyen et al., Turning Up the Heat, 2024).
        repetition_penalty : float, optional
            Above 0: before all that, logits of tokens that occur in the row, its prompt included,
            are divided by it if positive and multiplied by it if negative (Keskar et al., CTRL,
            2019).  1 changes nothing.
        seed : int, optional
            Row i of a batch samples from (seed, i), whatever other rows do: the same seed draws the
            same tokens.  None: other tokens with each call; ranks that divide a model need one.
        stop : int or sequence of int, optional
            Tokens that end a row.  None: the config's; (): none, so rows run to max_new_tokens.
        cache : PagedKVCache, optional
            Stores keys and values, instead of a new KVCache.
        sequences : sequence of int, optional
            The sequence of that cache that each row continues; afterwards it holds the row without
            its last new token.  None: new sequences, which are freed at the end.
        cache_dtype : str, optional
            int8: a new KVCache stores int8 codes, half of the bytes of 16 bits.
        invariant : bool, optional
            True: tokens of a row do not depend on the other rows, not even in a tie that rounding
            decides.  None: as the model is.

        Returns
        -------
        tokens : (batch, prompt + new)
            new is max_new_tokens, or less if all rows have ended before; a row that ended is
            filled with the pad token.

        Raises
        ------
        ConfigError
            An option is invalid.
        DeviceMemoryError
            The cache has too few free pages.
        """
        options = generation.Options(
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
            seed, stop, cache, sequences, cache_dtype,
        )  # fmt: skip
        added = generation.stream(self.in_order(invariant), tokens, mask, options)
        return np.concatenate([tokens, *(token[:, None] for token in added)], axis=1)

    @naming("rollouts", "generate")
    def rollouts(
        self,
        prompts: Sequence[Any],
        *,
        samples: int = 8,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int,
        stop: int | Sequence[int] | None = None,
        cache: PagedKVCache | None = None,
        cache_dtype: str | None = None,
        first: int = 0,
        invariant: bool | None = None,
    ) -> Rollouts:
        """Return samples of prompts, with the log-probabilities by which they were drawn.

        Parameters
        ----------
        prompts : sequence of (tokens,) int
            Lists or arrays of tokens, of any lengths; each goes through the model once.
        samples : int
            How many continuations of each prompt.
        max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, cache, cache_dtype
            As in ``generate``; temperature must be above 0.  Samples of a prompt share its pages.
        first : int
            The number of the first row: with ``seed`` it determines what a row draws, so that parts
            of the prompts are answered as all of them are.
        invariant : bool, optional
            True: the log-probabilities are those of ``log_probs(invariant=True)`` to the bit.
            None: as the model is.

        Returns
        -------
        result : Rollouts
            ``tokens``, ``real``, ``mask`` and ``log_probs``, (len(prompts) * samples, width) each,
            for ``log_probs`` and ``losses.policy``; of a mixture of experts ``routes``, too.

        Raises
        ------
        ConfigError
            An option or a prompt is invalid.
        """
        if temperature == 0:
            raise ConfigError("rollouts: temperature=0 draws nothing; pass one above 0")
        if not is_integer(seed, 0):
            raise ConfigError(f"rollouts: seed={seed!r} must be an integer of 0 or more")
        options = generation.Options(
            max_new_tokens, 0, temperature, top_k, top_p, min_p, None, seed, stop, cache, None,
            cache_dtype, first,
        )  # fmt: skip
        return sampled(self.in_order(invariant), prompts, samples, options)

    @from_any_library
    @naming("stream", "generate")
    def stream(
        self, tokens: Array, *, max_new_tokens: int, mask: Array | None = None, **options: Any
    ) -> Iterator[Array]:
        """Yield the tokens that ``generate`` appends, as they are computed: (batch,) at a time."""
        return generation.stream(self, tokens, mask, generation.Options(max_new_tokens, **options))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model's folder, or None if there is none; it may be replaced."""
        return None if self.words is None else Tokenizer(self.words)

    @naming("stream_text", "generate_text", "generate")
    def stream_text(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 200,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yield the text that ``generate_text`` returns, in pieces as they are computed."""
        rest: Any = {"stop": stop, "tools": tools, **options}
        return iter(
            Continuation(self, self.tokenizer, prompt, max_new_tokens=max_new_tokens, **rest)
        )

    @naming("generate_text", "stream_text")
    def generate_text(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 200,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
        **options: Any,
    ) -> str:
        """Return the text with which the model goes on after a text, or answers messages.

        Parameters
        ----------
        prompt : str or sequence of dict
            A text; or messages, each with ``role`` and ``content``, which the chat template of the
            tokenizer formats.
        max_new_tokens : int
            How many tokens to add, at most; fewer if the model has no more positions.
        stop : str or sequence of str
            The text ends before the first of these.  It also ends at an end token of the config.
        tools : sequence of dict, optional
            JSON schemas of functions that the model may call, for the chat template.
        **options
            ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``seed``,
            ``min_new_tokens`` and ``cache_dtype`` of ``generate``.

        Returns
        -------
        text : str
            Without the prompt and without special tokens.

        Raises
        ------
        ConfigError
            The model has no tokenizer, an option is invalid, the template does not take the
            messages, or the prompt fills all positions.
        """
        rest: Any = {"stop": stop, "tools": tools, **options}
        return "".join(self.stream_text(prompt, max_new_tokens=max_new_tokens, **rest))

    def save(self, folder: str | PathLike[str]) -> None:
        """Write config.json and the parameters, with the files and names they were loaded from.

        After a crash the folder holds the old checkpoint or the new one.  Other files in it stay.
        An adapter is not written, only its base, and a warning says so.

        Before the new files are in their places, what they compute for a few tokens is compared
        with the model, both on the host and in float32, with one block in memory at a time.

        Raises
        ------
        ConfigError
            The folder is a file, holds weights in other files, or cannot be written; the disk is
            full; or what is written computes other numbers.
        """
        from .adapters.probe import check_saved  # which runs models

        if self.adapter is not None:
            warnings.warn(
                f"save({str(folder)!r}) writes the base without its adapter; save_adapter(folder)"
                " writes the adapter, and merge_adapter() before save makes it part of the base",
                stacklevel=2,
            )
        whole = self.config if self.division is None else self.division.whole
        for each in whole_parameters(self.parameters, self.division):
            parameters = {name: in_folders(name, array) for name, array in each.items()}
            config = saved_config(self.texts["config.json"], parameters, self.table.dtype.name)
            config |= {"num_labels": self.config.labels} if self.config.labels else {}
            layout = self.layout or {SINGLE: list(parameters)}
            texts = {**self.texts, "config.json": config}
            experts = saved_tensors(whole, parameters, self.plain)
            check = partial(check_saved, self, parameters)
            write_folder(folder, texts, parameters, layout, experts=experts, check=check)
