"""A decoder-only transformer computed with the ops of this package.

logits = model.logits(tokens)
loss, gradients = model.loss_and_gradients(tokens, labels)
"""

import copy
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
from ..serving.options import Options
from ..training.checkpoint import CheckpointConfig
from ..training.loss_scaler import LossScaler
from .adapters.adapted import Adapted
from .adapters.adapter import Adapter
from .adapters.outer_weights import resized
from .any_library import from_any_library
from .configs.config import Config
from .configs.heads import CAUSAL, NONE, POOLINGS, SEQUENCE, pooled, require_head
from .configs.names import HEAD, TABLE
from .folders.checkpoint_files import SINGLE, Layout, write_folder
from .folders.expert_files import saved_tensors
from .folders.pooling import dense_modules, pooling_of
from .folders.quantized_weights import in_folders, saved_config
from .generation.batch import stream
from .generation.conversations import Conversations
from .generation.decoding import CHUNK, Decoding, free_pages
from .generation.rollouts import Rollouts
from .generation.rollouts import rollouts as sampled
from .generation.streaming import Continuation
from .layers.context import Context, is_left_aligned
from .layers.head import dense_rows, scores_of_texts
from .loss import label_log_probs, mean_loss
from .objective import TrainingStep, next_token
from .ranks.gather import whole_parameters
from .text.chat import Message, Tools
from .text.predicting import predicted
from .text.tokenizer import Tokenizer

SHOWN = frozenset({  # the documented names, which ``dir`` and tab completion list
    "adapter", "adapters", "add_adapter", "base", "by_rows", "cache_sizes", "chunked_mlp",
    "config", "context", "context_attention", "decoder", "delete_adapter", "division", "drafts",
    "dtype", "embeddings", "folder", "gather", "generate", "generate_text", "graphs", "grown",
    "invariant", "load_adapter", "log_probs", "logits", "loss", "loss_and_gradients",
    "merge_adapter", "merged", "mix_adapters", "mtp_weight", "num_parameters", "origin",
    "outdated", "parameters", "parts", "predict", "resize", "rollouts", "save", "save_adapter",
    "set_adapter", "stream", "stream_text", "to_torch", "tokenizer", "train_through",
    "trainable", "value_and_gradients",
})  # fmt: skip


class Transformer(Adapted):
    """A language model: parameters by their Hugging Face names, loss, generation and saving.

    Attributes
    ----------
    parameters : dict of str to array or quantized weight
        Parameters by name.  You may replace them or change them in place: every call reads them
        again.
    adapter : Adapter or None
        Low-rank weights added to linear layers; with an adapter the parameters are frozen.
    trainable : dict of str to array
        The trainable parameters: those of the adapter, or without an adapter all parameters that
        are not quantized.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` computes the MLPs, which must be SwiGLU.  Initially False.
    invariant : bool
        Whether ``log_probs`` of training equal those of sampling to the bit: results of a text do
        not depend on the batch, padding, packing or caches.  Initially False.
    origin : str or None
        The quantized formats of the file or folder, if they are dense in memory.  For a mixture of
        experts in a GGUF file, also a note that the file has no coefficient of the router's loss.
    adapters : mapping of str to Adapter, read-only
        The adapters that are stored by name: see ``load_adapter``.
    mtp_weight : float
        Weight of the loss of draft heads (multi-token prediction), which ``loss`` adds: the mean
        over heads of their cross entropies, with the divisor ``count``.  0, initially: draft heads
        are saved as they are, and not trained.
    drafts : Drafts or None
        The numbers of tokens that the draft head proposed in the last ``generate(draft="mtp")``,
        and that the model accepted: ``proposed`` and ``accepted``.
    grown : bool
        Whether ``resize`` changed the tables since they were loaded.  The file of an adapter then
        stores the tables.
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
        raise ArgumentError("Transformer: a model is not callable; call model.logits(tokens)")

    @naming("resize")
    def resize(self, vocab: int, *, multiple: int = 1) -> None:
        """Change the number of rows of the embedding table and of the head, such as for new tokens.

        New rows are the mean of the old rows (Hewitt, Initializing New Word Embeddings, 2021).
        Rows beyond the new number are dropped.  Tied tables stay tied, and config is updated.  The
        parameters become new arrays.

        Parameters
        ----------
        vocab : int
            Least new number of rows.
        multiple : int
            The number of rows is rounded up to a multiple of this: products are fast with 64.

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
        required = [token for token in (*config.end_tokens, *pad) if token < config.vocab]
        if max(required, default=0) >= size:
            problem = f"resize({vocab}): token {max(required)} ends texts or pads them"
            raise ConfigError(f"{problem}; pass {max(required) + 1} or more")
        names = TABLE, HEAD, *self.config.draft_tables
        tables = {n: self.parameters[n] for n in names if n in self.parameters}
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
        """Return the logits of the next token at every position, or the logits of a classifier.

        Parameters
        ----------
        tokens : (batch, tokens) int32 or int64
            Token ids.
        mask : (batch, tokens) bool or int, optional
            1 or True at real tokens, 0 at padding, which may be on the left or on the right.
            Positions count real tokens only.  Logits at padding are undefined.
        cache : KVCache or PagedKVCache, optional
            Keys and values of earlier tokens, which these tokens continue; theirs are appended.
            With a cache, mask may also cover all tokens, (batch, cached + tokens).  A PagedKVCache
            does not support padding.
        sequences : sequence of int, optional
            The sequence of a PagedKVCache that each row continues; they may differ in length.
        offsets : (texts + 1,) int, optional
            Starts of packed texts among all tokens, row after row, and the number of tokens last.
            Each text begins at position 0 and attends only to itself.
        routes : (batch, tokens, layers with experts, k) int, optional
            Experts of each token from an earlier pass, such as ``rollouts``, used instead of the
            router's choice.  -1: the router chooses.

        Returns
        -------
        logits : (batch, tokens, vocab), in the dtype of the parameters
            A token classifier returns (batch, tokens, labels).  A sequence classifier returns
            (batch, labels), or (texts, labels) for packed texts, from the rightmost real token.

        Raises
        ------
        RangeError
            A token is outside the vocabulary, the cache is full, or offsets do not rise from 0 to
            the number of tokens.
        ShapeError, DTypeError
            tokens, mask or offsets have an invalid shape or dtype.
        ConfigError
            offsets are combined with a mask or a cache; or the model has no head.
        """
        parameters, config = self.entered(self.parameters), self.config
        options: Any = {"cache": cache, "sequences": sequences, "routes": routes}
        if config.head == SEQUENCE:
            x = self._whole_rows(parameters, tokens, mask, offsets, **options)
            with self.ordered():
                return scores_of_texts(config, parameters, x, mask, offsets)
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
        """Return the mean negative log probability of the labels, in nats, or a classifier's loss.

        This method shifts the labels of a language model: position t predicts ``labels[:, t + 1]``.
        With ``mtp_weight``, the loss of draft heads is added.

        Parameters
        ----------
        tokens, labels : (batch, tokens) int32 or int64
            Labels are usually the tokens themselves, and -100 where no loss is computed.  Labels of
            a token classifier are not shifted.  A sequence classifier has (batch,) float labels for
            squared error, (batch,) int labels for cross entropy, or (batch, labels) float labels in
            0 .. 1 for binary cross entropy; ``problem_type`` in config.json has priority.
        mask : (batch, tokens) bool or int, optional
            As in ``logits``.  Padding counts in the loss unless its label is -100.
        offsets : (texts + 1,) int, optional
            As in ``logits``.  A text does not predict the first token of the next text.
        count : int, optional
            Divisor of the sum of losses.  If this call computes a part of a batch, pass the number
            of target tokens in the whole batch: the losses of all parts then add up.  None: the
            number of labels other than -100 in this call.
        routes : (batch, tokens, layers with experts, k) int, optional
            As in ``logits``; only for language models.

        Returns
        -------
        loss : float64 scalar, or float32 Var inside ``value_and_gradients``
            0 if all labels are -100.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            The labels do not fit the head.
        ConfigError
            ``count`` is not a positive number; the model has no head; or ranks divide the tokens of
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
        """Return the log-probability and entropy of each label, and further statistics.

        This method shifts the labels: entry t belongs to ``labels[:, t + 1]``, the last entry is 0.

        Parameters
        ----------
        tokens, labels : (batch, tokens) int32 or int64
            Where labels are -100, the results are 0.
        mask : (batch, tokens) bool or int, optional
            As in ``logits``.
        offsets : (texts + 1,) int, optional
            As in ``logits``.  The results of packed texts are one row.
        temperature : float
            Sampling temperature, above 0; it divides the logits.
        routes : (batch, tokens, layers with experts, k) int, optional
            As in ``logits``.
        invariant : bool, optional
            True: the bits of a text's results do not depend on the batch, padding or packing, and
            equal those of ``rollouts(invariant=True)``.  None: the model's own setting.

        Returns
        -------
        result : LogProbs
            Fields of shape (batch, tokens): see ``linear_log_probs``.  Inside
            ``value_and_gradients`` they are Vars; log_probs and entropy have gradients.

        Raises
        ------
        ConfigError
            temperature is not above 0; or the model cannot be invariant, with the reason.
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
        pooling: str | None = None,
    ) -> Array:
        """Return one vector of length 1 for each text, pooled from its last hidden states.

        Dense modules of sentence-transformers in the folder of a model without a head are applied
        to the pooled states: their parameters are ``2_Dense.linear.weight`` and so on.

        Parameters
        ----------
        tokens : (batch, tokens) int32 or int64
        mask : (batch, tokens) bool or int, optional
            As in ``logits``.
        offsets : (texts + 1,) int, optional
            As in ``logits``.  The result has one row for each packed text.
        pooling : str, optional
            mean: the mean over real tokens; last: the state of the rightmost real token; cls: the
            state of the leftmost one.  None: as the files of sentence-transformers in the model's
            folder say (``modules.json``, ``1_Pooling/config.json``), or mean without them.

        Returns
        -------
        embeddings : (batch, hidden) float32, or float64 for float64 parameters
            With Dense modules, (batch, outputs of the last module).
            A Var inside ``value_and_gradients``, for example for ``losses.contrastive``.

        Raises
        ------
        ConfigError
            pooling is unknown, a row has no real token, or the folder names another pooling.
        """
        if self.config.head != NONE and pooling is None and dense_modules(self.folder):
            problem = f"embeddings: the Dense modules in {self.folder} need a model without a head"
            cure = "load the folder with head='none', or pass pooling= for embeddings without them"
            raise ConfigError(f"{problem}; {cure}")
        pooling = pooling_of(self.folder) or POOLINGS[0] if pooling is None else pooling
        parameters, modules = self.entered(self.parameters), self.config.modules
        x = self._whole_rows(parameters, tokens, mask, offsets)
        rows = pooled(x, mask, offsets, pooling, unit=not modules)
        return dense_rows(self.config, parameters, rows) if modules else rows

    def _whole_rows(
        self, parameters: Any, tokens: Array, mask: Any, offsets: Any, **options: Any
    ) -> Any:
        """Return the normalised output of the last block; ranks gather the tokens they divide."""
        ranks, kind = self.context, self.context_attention
        if ranks is not None and mask is not None and is_left_aligned(mask):
            mask = None  # attention is causal: no real token attends to padding after it
        context = Context.of(ranks, tokens, mask, offsets, kind)
        options |= {"mask": mask, "offsets": offsets, "context": context}
        x = self.hidden(parameters, tokens, **options)
        return x if context is None else context.whole(x)

    def predict(self, texts: Sequence[str | Sequence[Message]]) -> list[dict[str, float]]:
        """Return a sequence classifier's output for each text: a number by the name of the label.

        Parameters
        ----------
        texts : sequence of str or of messages
            Texts, which may contain special tokens; or lists of messages, which the chat template
            formats.

        Returns
        -------
        numbers : list of dict
            Probabilities: the softmax of the logits, or their sigmoid if a text may have several
            labels (``problem_type``).  For a regression or a reward model, the logits.

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
            Function of this model on a tape, whose ``logits`` and ``loss`` are Vars; it must return
            a Var of shape ().
        checkpoint : CheckpointConfig, optional
            Gradient checkpointing: the tape stores only the input of each group of blocks, and
            backward computes the blocks again.  Less memory, more time, the same bits.
        scaler : LossScaler, optional
            Scales the gradients, not the value.  Overflow becomes infinite without a warning.
        seed : int, optional
            Seed of the adapter's dropout, which is off without it; pass a new seed in each step.
        graph : bool
            On a GPU, capture the call into a CUDA graph, and launch the graph from the third call
            of the same form on: the same bits in one launch.  The next call overwrites the results.
            function must be a ``functools.partial`` of a function that reads no other data that
            change.  Two calls have the same form if array keywords have equal shapes and dtypes,
            and all other keywords are equal.  Calls that cannot be captured run without a graph;
            ``explain`` returns the reason.

        Returns
        -------
        value : scalar
            In the dtype of the Var; float64 if function returns ``model.loss`` itself.
        gradients : dict of str to array
            One gradient for each name in ``trainable``.

        Raises
        ------
        ConfigError
            An option is invalid.
        GradientError
            function did not return a scalar of this tape, or used an op without a gradient.

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

        See ``loss`` for the arrays and ``count``, and ``value_and_gradients`` for the other
        options.
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
        draft: str | None = None,
    ) -> Array:
        """Return the prompts, each followed by the tokens that the model generates.

        Parameters
        ----------
        tokens : (batch, prompt) int32 or int64
            Prompts, padded on the left or on the right where mask is 0.
        max_new_tokens, min_new_tokens : int
            Maximum and minimum number of tokens to generate.  A warning is given if a row exceeds
            the config's ``max_position_embeddings``.
        mask : (batch, prompt) bool or int, optional
            1 at real tokens, 0 at padding.
        temperature : float
            0: greedy, the most likely token.  Otherwise tokens are sampled from softmax(logits /
            temperature).  At 0 ``top_k``, ``top_p``, ``min_p`` and ``seed`` have no effect, and a
            warning is given if one is passed.
        top_k : int, optional
            Sample from the top_k most likely tokens.
        top_p : float, optional
            In (0, 1]: after top_k, sample from the fewest tokens whose probabilities reach top_p.
        min_p : float, optional
            In [0, 1]: after top_k and top_p, sample from tokens with at least min_p times the
            probability of the most likely token (Nguyen et al., Turning Up the Heat, 2024).
        repetition_penalty : float, optional
            Above 0; applied first.  Logits of tokens that occur in the row, including its prompt,
            are divided by it if positive and multiplied by it if negative (Keskar et al., CTRL,
            2019).  1 has no effect.
        seed : int, optional
            Row i samples from (seed, i), independent of other rows: the same seed gives the same
            tokens.  None: different tokens in each call.  A seed is required if ranks share the
            model.
        stop : int or sequence of int, optional
            Tokens that end a row.  None: the end tokens of the config.  (): no token ends a row, so
            each row gets max_new_tokens tokens.
        cache : PagedKVCache, optional
            Cache for keys and values, in place of a new one.
        sequences : sequence of int, optional
            The sequences in ``cache`` that the rows continue, one per row.  After the call each
            sequence contains its row up to its end, without the last new token.  None: new
            sequences, which are freed at the end.
        cache_dtype : str, optional
            int8: a new cache stores int8 codes, which take half the memory of 16-bit values.
        invariant : bool, optional
            True: the tokens of a row do not depend on other rows, not even where rounding breaks a
            tie.  None: the model's own setting.
        draft : str, optional
            mtp: the model's draft head (multi-token prediction) proposes a token in each step,
            which the model checks in its next pass.  The tokens are the most likely ones of the
            model's own logits, as without it; only for temperature 0.  ``model.drafts`` has the
            numbers of proposed and of accepted tokens.

        Returns
        -------
        tokens : (batch, prompt + new)
            ``new`` is max_new_tokens, or fewer if all rows end earlier.  Rows that end earlier are
            padded with the pad token.

        Raises
        ------
        ConfigError
            An option is invalid, or the model has no draft head.
        DeviceMemoryError
            The cache has fewer free pages than one row fills.
        """
        options = Options(
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
            seed, stop, cache, sequences, cache_dtype, draft=draft,
        )  # fmt: skip
        added = stream(self.in_order(invariant), tokens, mask, options)
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
        environment: Callable[[], Any] | None = None,
        max_turns: int = 8,
        seconds: float | None = None,
    ) -> Rollouts:
        """Return sampled completions of prompts, with their log-probabilities.

        Parameters
        ----------
        prompts : sequence of (tokens,) int
            Lists or arrays of tokens, of any lengths; the model computes each prompt once.
        samples : int
            Number of completions per prompt.
        max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, cache, cache_dtype
            As in ``generate``; temperature must be above 0.  Samples of a prompt share its pages.
        first : int
            Number of the first row.  A row samples from (seed, first + index), so that a call with
            some of the prompts samples the same completions as a call with all of them.
        invariant : bool, optional
            True: the log-probabilities equal those of ``log_probs(invariant=True)`` to the bit.
            None: the model's own setting.
        environment : callable, optional
            ``environment()`` returns an object for each row, with which the model talks in turns:
            see the notes.  ``prompts`` are then lists of messages, and max_new_tokens limits all
            tokens after the prompt of a row.
        max_turns : int
            Maximum number of answers of a row with an environment.
        seconds : float, optional
            Time limit of each call of an environment; None: 60.

        Returns
        -------
        result : Rollouts
            ``tokens``, ``real``, ``mask`` and ``log_probs``, (len(prompts) * samples, width) each,
            for ``log_probs`` and ``losses.policy``; for a mixture of experts also ``routes``.

        Raises
        ------
        ConfigError
            An option or a prompt is invalid.

        Notes
        -----
        An environment may have ``reset(**row)``, which returns a text for the end of the prompt, or
        None.  It has one of two forms:

        - ``step(answer)``, which returns (observation, reward, done).  The observation is the next
          message of the user; rewards of a row are added up.
        - Public methods with docstring and annotations, which are tools that the model may call,
          and ``get_reward()``.  A row ends with an answer without calls.

        Its methods run in threads beside the model.  An environment that raises an exception, or
        that exceeds the time limit, ends its row; ``errors`` has the message.
        """
        if temperature == 0:
            raise ConfigError("rollouts: temperature=0 does not sample; pass one above 0")
        if not is_integer(seed, 0):
            raise ConfigError(f"rollouts: seed={seed!r} must be an integer of 0 or more")
        options = Options(
            max_new_tokens, 0, temperature, top_k, top_p, min_p, None, seed, stop, cache, None,
            cache_dtype, first,
        )  # fmt: skip
        model = self.in_order(invariant)
        if environment is None:
            return sampled(model, prompts, samples, options)
        talks = Conversations(
            model, prompts, samples, options, environment, max_turns=max_turns, seconds=seconds
        )
        return talks.run()

    @from_any_library
    @naming("stream", "generate")
    def stream(
        self, tokens: Array, *, max_new_tokens: int, mask: Array | None = None, **options: Any
    ) -> Iterator[Array]:
        """Yield the new tokens of ``generate`` as they are computed, (batch,) per step."""
        return stream(self, tokens, mask, Options(max_new_tokens, **options))

    @naming("Engine", "generate")
    def decoder(
        self,
        *,
        rows: int,
        pages: int | None,
        page: int,
        chunk: int = CHUNK,
        cache_dtype: str | None = None,
        routes: bool = False,
    ) -> Decoding:
        """Return what an Engine needs: the steps of this model, with a cache of ``pages``."""
        require_head("Engine", self.config, CAUSAL)
        adapters = {**self.adapters}
        if pages is None:
            pages = free_pages(self, rows, page, chunk, cache_dtype, adapters)
        sizes: Any = {"rows": rows, "pages": pages, "page": page, "chunk": chunk, "notes": routes}
        return Decoding(copy.copy(self), **sizes, cache_dtype=cache_dtype, adapters=adapters)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model's folder, None if it has none; you may replace it."""
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
        """Yield the text of ``generate_text`` in pieces, as they are computed."""
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
        """Return the model's completion of a text, or its answer to messages.

        Parameters
        ----------
        prompt : str or sequence of dict
            A text; or messages, each with ``role`` and ``content``, which the chat template of the
            tokenizer formats.
        max_new_tokens : int
            Maximum number of new tokens; fewer if the model has no more positions.
        stop : str or sequence of str
            Strings before which the text ends.  It also ends at an end token of the config.
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
            The model has no tokenizer, an option is invalid, the chat template rejects the
            messages, or the prompt fills all positions.
        """
        rest: Any = {"stop": stop, "tools": tools, **options}
        return "".join(self.stream_text(prompt, max_new_tokens=max_new_tokens, **rest))

    def save(self, folder: str | PathLike[str]) -> None:
        """Write config.json and the parameters, with the file and tensor names of the loaded model.

        After a crash the folder holds the old checkpoint or the new one.  Other files in the folder
        are unchanged.  With an adapter, only the base is written, and a warning is given.

        Before the new files replace the old ones, the logits of a few tokens are compared with the
        model's, both on the host in float32, with one block in memory at a time.

        Raises
        ------
        ConfigError
            The folder is a file, has weights in other files, or cannot be written; the disk is
            full; or the new files give other logits than the model.
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
            layout = self.layout or {SINGLE: list(parameters)}
            texts = self.saved_texts(parameters, self.table.dtype.name)
            experts = saved_tensors(whole, parameters, self.plain)
            check = partial(check_saved, self, parameters)
            write_folder(folder, texts, parameters, layout, experts=experts, check=check)

    def saved_texts(self, parameters: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Return the JSON files of a folder with these parameters; the first is config.json."""
        config = saved_config(self.texts["config.json"], parameters, dtype)
        config |= {"num_labels": self.config.labels} if self.config.labels else {}
        return {**self.texts, "config.json": config}
