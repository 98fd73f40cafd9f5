"""A decoder-only transformer: the ops put to work.

logits = model.logits(tokens)
loss, gradients = model.loss_and_gradients(tokens, labels)
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..inference.kv_cache import KVCache
from ..inference.paged_kv_cache import PagedKVCache
from ..training.checkpoint import CheckpointConfig
from ..training.loss_scaler import LossScaler
from . import generate as generation
from .adapter import Adapter, create_adapter
from .checkpoint_files import SINGLE, Layout, write_folder
from .config import Config
from .division import divided_adapter
from .learning import loss_and_gradients, mean_loss
from .network import Network
from .other_libraries import from_any_library
from .quantized_weights import saved_config, trainable
from .whole import whole_parameters


class Transformer(Network):
    """A language model: parameters by their Hugging Face names, and what can be done with them.

    Attributes
    ----------
    parameters : dict of str to array or quantized weight
        Replace or change them in place: every call reads them anew.
    adapter : Adapter or None
        What is added to linear layers; the parameters are then frozen.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` is the MLPs, where their activation is SwiGLU; off at first.
    """

    def __init__(
        self,
        config: Config,
        parameters: dict[str, Array],
        texts: Mapping[str, Mapping[str, Any]],
        layout: Layout | None = None,
    ) -> None:
        super().__init__(config, parameters)
        self.texts, self.layout = texts, layout

    @property
    def trainable(self) -> dict[str, Array]:
        """The parameters that have gradients: the adapter's where there is one, else all."""
        return trainable(self.parameters) if self.adapter is None else self.adapter.parameters

    def add_adapter(self, rank: int, **options: Any) -> None:
        """Freeze the parameters and add a new adapter: see ``models.create_adapter``.

        Raises
        ------
        ConfigError
            There is an adapter already, which a new one would replace; or an option makes no
            sense.
        """
        if self.adapter is not None:
            raise ConfigError(
                "add_adapter: the model has an adapter, which a new one would replace; call"
                " merge_adapter() to keep what it learned, or set adapter = None to let it go"
            )
        if self.parts is not None and options.get("dora"):
            problem = "norms are of whole rows, which ranks keep parts of"
            raise ConfigError(f"add_adapter(dora=True): {problem}; use LoRA")
        whole = self.config if self.division is None else self.division.whole
        adapter = create_adapter(whole, self.parameters, rank=rank, **options)
        self.adapter = divided_adapter(adapter, self.division)

    def merge_adapter(self, *, requantize: bool = False) -> None:
        """Make the adapter part of the weights, which are new arrays, and let it go.

        All quantized weights become dense; ``requantize`` quantizes them again, which loses some.
        """
        if self.adapter is not None:
            self.parameters, self.adapter = self.adapter.merged(self.parameters, requantize), None

    @from_any_library
    def logits(
        self,
        tokens: Array,
        *,
        mask: Array | None = None,
        cache: KVCache | PagedKVCache | None = None,
        sequences: Sequence[int] | None = None,
        offsets: Array | None = None,
    ) -> Array:
        """Return the score of every next token, at every position.

        Parameters
        ----------
        tokens : (batch, tokens) int32 or int64
            Token ids.
        mask : (batch, tokens) bool or int, optional
            True or 1 where a token is real, 0 where it is padding, on the left or on the right.
            Positions count real tokens.  Logits at padding mean nothing.
        cache : KVCache or PagedKVCache, optional
            Continue after the tokens that it holds, and add these to it; mask may then also
            cover all tokens, (batch, held + tokens).  In pages there is no padding.
        sequences : sequence of int, optional
            What each row continues in a PagedKVCache; they may hold different numbers of tokens.
        offsets : (texts + 1,) int, optional
            Several texts that share rows: where each one starts among all tokens, row after row,
            and the number of tokens last.  Each begins at position 0, and none sees another.

        Returns
        -------
        logits : (batch, tokens, vocab), in the dtype of the parameters

        Raises
        ------
        RangeError
            A token is outside the vocabulary, the cache is full, or offsets do not rise from 0 to
            the number of tokens.
        ShapeError, DTypeError
            tokens, mask or offsets are not such arrays.
        ConfigError
            There are offsets and a mask, or a cache.
        """
        whole = self.entered(self.parameters)
        given: Any = {"mask": mask, "cache": cache, "offsets": offsets, "sequences": sequences}
        x = self.hidden(whole, tokens, **given)
        return self.head(whole, x).reshape(*tokens.shape, self.config.vocab)

    @from_any_library
    def loss(
        self,
        tokens: Array,
        labels: Array,
        *,
        mask: Array | None = None,
        offsets: Array | None = None,
    ) -> Any:
        """Return the mean negative log probability of the labels, in nats.

        The shift by one token happens here: position t predicts ``labels[:, t + 1]``.

        Parameters
        ----------
        tokens, labels : (batch, tokens) int32 or int64
            Labels are usually the tokens themselves; -100 where a token does not count.
        mask : (batch, tokens) bool or int, optional
            As in ``logits``; padding counts unless its label is -100.
        offsets : (texts + 1,) int, optional
            As in ``logits``; no text predicts the first token of the next one.

        Returns
        -------
        loss : float64 scalar
            0 where no label counts.
        """
        return mean_loss(self, tokens, labels, mask, offsets)

    @from_any_library
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
    ) -> tuple[Any, dict[str, Array]]:
        """Return ``loss`` and its gradient with respect to every ``trainable`` array, by name.

        With a seed, the adapter's dropout is on; each step should have its own.  Where
        ``checkpoint`` is given and enabled, the tape keeps the input of every so many blocks and
        the way back computes them again: less memory, more time, the same bits.  Where ``scaler``
        is given, its scale is in the gradients, not in the loss, and what overflows is silently
        infinite.  ``count`` is what sums are divided by: the labels of a whole batch where this is
        a part of it, so that parts only need to be added; None: the labels that count here.
        """
        options = checkpoint, scaler, seed, count
        return loss_and_gradients(self, self.trainable, tokens, labels, mask, offsets, *options)

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
    ) -> Array:
        """Return the prompts, each followed by the tokens that the model goes on with.

        Parameters
        ----------
        tokens : (batch, prompt) int32 or int64
            Prompts, padded on the left or on the right where mask is 0.
        max_new_tokens, min_new_tokens : int
            How many tokens to add, at most and at least.
        mask : (batch, prompt) bool or int, optional
            1 where a token is real.
        temperature : float
            0: the most likely token.  Otherwise tokens are drawn from softmax(logits /
            temperature), cut to the ``top_k`` most likely ones, then to the fewest whose share
            reaches ``top_p``.
        min_p : float, optional
            In [0, 1]: after that, only tokens of at least min_p times the probability of the most
            likely one are drawn (Nguyen et al., Turning Up the Heat, 2024).
        repetition_penalty : float, optional
            Above 0: first of all, logits of tokens that a row holds, its prompt too, are divided by
            it where they are positive and multiplied where they are negative (Keskar et al., CTRL,
            2019).  1 changes nothing.
        seed : int
            Needed to draw.  Row i of a batch draws from (seed, i), whatever the other rows hold.
        stop : int or sequence of int, optional
            Tokens that end a row.  None: the config's; (): none, so rows run to max_new_tokens.
        cache : PagedKVCache, optional
            Where keys and values are kept, in place of a KVCache of its own.
        sequences : sequence of int, optional
            Of that cache: what each row goes on from, and holds afterwards, the last new token not
            yet.  None: new ones, which are freed at the end.
        cache_dtype : str, optional
            int8: keys and values of its own cache are codes, half of the bytes of 16 bits.

        Returns
        -------
        tokens : (batch, prompt + new)
            new is max_new_tokens, or less where all rows have ended before; a row that ended
            is filled with the pad token.

        Raises
        ------
        ConfigError
            An option makes no sense.
        DeviceMemoryError
            The cache has too few free pages.
        """
        options = generation.Options(
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
            seed, stop, cache, sequences, cache_dtype,
        )  # fmt: skip
        added = generation.stream(self, tokens, mask, options)
        return np.concatenate([tokens, *(token[:, None] for token in added)], axis=1)

    @from_any_library
    def stream(
        self, tokens: Array, *, max_new_tokens: int, mask: Array | None = None, **options: Any
    ) -> Iterator[Array]:
        """Yield what ``generate`` appends, as it is made: (batch,) tokens at a time."""
        return generation.stream(self, tokens, mask, generation.Options(max_new_tokens, **options))

    def save(self, folder: str | PathLike[str]) -> None:
        """Write config.json and the parameters, in the files and under the names they came in.

        A crash leaves the old checkpoint or the new one.  Other files in the folder stay.  Where
        there is an adapter, this is its base alone, and a warning says so.

        Raises
        ------
        ConfigError
            The folder is a file, or holds weights under other names; or the disk is full.
        """
        if self.adapter is not None:
            warnings.warn(
                f"save({str(folder)!r}) writes the base without its adapter; save_adapter(folder)"
                " writes the adapter, and merge_adapter() before save makes it part of the base",
                stacklevel=2,
            )
        for parameters in whole_parameters(self.parameters, self.division):
            config = saved_config(self.texts["config.json"], parameters, self.table.dtype.name)
            layout = self.layout or {SINGLE: list(parameters)}
            write_folder(folder, {**self.texts, "config.json": config}, parameters, layout)

    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Write the adapter alone, as peft does; ``load(base, lora=folder)`` reads it."""
        if self.adapter is None:
            raise ConfigError("save_adapter: there is none; call add_adapter(rank) first")
        for parameters in whole_parameters(self.adapter.parameters, self.division):
            Adapter(self.adapter.settings, parameters).save(folder)
