"""The network: parameters, rotary tables, and the forward pass from tokens to logits."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..core import arrays
from ..core.call import is_integer
from ..core.dtypes import FLOAT32, Array, Stored
from ..core.replay import fixed_order
from ..errors import ConfigError, DTypeError, RangeError, ShapeError
from ..inference.kv_cache import KVCache
from ..inference.paged_kv_cache import PagedKVCache
from ..inference.paged_rows import PagedRows
from ..ops.linear.linear import linear
from ..parallel.communicator import Communicator
from ..parallel.zero3 import Parts
from ..placement import on_gpu_of_attribute, to_device_of
from ..training.tape import Tape
from ..training.variable import Var
from .adapters.adapter import Adapter, Seeds
from .adapters.many import ByRows
from .adapters.through import file_weights
from .any_library import to_torch
from .configs.config import CORRECTION, Config
from .configs.draft_heads import is_of_head
from .configs.names import PROJECTION
from .folders.quantized_weights import trainable
from .graphs import Graphs
from .invariant import check_invariant, without_padding
from .layers.attending import absorbs, attend_of, chunks_of, latents_of, project_of, whole_of
from .layers.block import blocks, embedded, inputs_of_layers, rope_rows, with_positions
from .layers.call import Attention, Call, Gather, Keys, Mixtures, Recurrence, no_states
from .layers.context import Context, own_tokens, token_numbers
from .layers.head import logits_of
from .layers.norms import join
from .layers.positions import Angles, check, places
from .objective import Reached, TrainingStep, start_of_backward
from .ranks.division import Division
from .summary import Summary


@on_gpu_of_attribute("table")
class Network(Summary):
    """The blocks of a transformer between its embedding and its head.

    Attributes
    ----------
    config : Config
        Sizes and settings of the model.
    parameters : dict of str to array
        Parameters by name.  You may replace them or change them in place: every call reads them
        again.
    adapter : Adapter or None
        Low-rank weights added to linear layers; with an adapter the parameters are frozen.
    chunked_mlp : bool or None
        Whether MLPs and experts are computed in chunks of tokens, and again in backward: see
        ``training.chunks.chunk_of``.  None, initially: in recomputed blocks and without a tape, if
        a batch has more tokens than one chunk (128 MiB of an inner array).
    invariant : bool
        Whether the bits of a text's hidden states, logits and ``log_probs`` depend on this text
        alone: not on the batch, padding, packing, or earlier contents of a cache.  Initially False.
        Losses and gradients may still differ in rounding, except the gradients of adapters: see
        ``by_rows``.
    division : Division or None
        The part of the model that this rank stores, if ranks divide it.  Config and parameters
        are then this rank's, and all ranks must make the same calls.
    context : Communicator or None
        Ranks that divide the tokens of each row.  All of them pass whole rows to ``loss`` and
        ``loss_and_gradients``, which return this rank's term of a sum over ranks.
    context_attention : str
        Attention with a context: "ring" passes keys and values from rank to rank; with "ulysses"
        each rank computes some of the heads.
    parts : Parts or None
        The parts of parameters that ``load(folder, parts=comm)`` reads, until a Zero3 takes over
        the model.
    mtp_weight : float
        Weight of the loss of draft heads (multi-token prediction), which ``loss`` adds: the mean
        over heads of their cross entropies.  0, initially: draft heads are not trained.
    gather : callable or None
        Function that gathers the whole parameters of one block from the parts of all ranks.
    """

    texts: Mapping[str, Mapping[str, Any]]  # JSON files of the folder: config.json and others
    folder: Path | None = None  # from which load read the model
    # (name of the call) returns the model with the weights as its file stores them
    stored: Callable[[str], Any] | None = None
    words: Path | None = None  # folder or file of the tokenizer
    step = TrainingStep()  # of the model on a tape
    noise: Callable[..., Any] | None = None  # changes embeddings in a training step
    # number of the first token in the batch of all data ranks, from which dropout and noise draw
    first_token = 0
    # receives the ``Routed`` of each layer in a pass, and the number of layers with experts before
    seen: Callable[[Sequence[Any], int], None] | None = None
    reached: Reached | None = None  # results of the last stage of a pipeline, before the head
    drafts: Any = None  # how many drafts the last ``generate(draft=)`` proposed and accepted
    filled: Any = None  # (), tokens of a row before the padding of a graph: see ``graphs``

    def __init__(self, config: Config, parameters: dict[str, Array]) -> None:
        self.config, self.parameters = config, parameters
        self.adapter: Adapter | None = None
        self.division: Division | None = None
        self.context: Communicator | None = None
        self.context_attention = "ring"
        self.parts: Parts | None = None
        self.gather: Gather | None = None
        self.chunked_mlp: bool | None = None
        self.invariant = False
        self.mtp_weight = 0.0
        self._make_tables()

    def _make_tables(self) -> None:
        """Create the tables of the rotary embeddings."""
        # An empty array: the embedding table may be replaced, and would stay in memory.
        like = arrays.empty((0,), FLOAT32, like=self.table)
        ropes = sorted(self.config.ropes.items())
        self.tables = {kind: rope_rows(rope, like) for kind, rope in ropes}
        for tables in self.tables.values():
            tables(1)  # raises for an invalid rope_scaling now instead of in the first call

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without tables and graphs, which are created again."""
        return {n: value for n, value in self.__dict__.items() if n not in ("tables", "graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_tables()

    @property
    def table(self) -> Array:
        """The embedding table, (vocab, hidden); another weight on a rank without embedding."""
        values = [*self.parameters.values()]
        first = next((value for value in values if not isinstance(value, Stored)), values[0])
        table: Any = self.parameters.get("model.embed_tokens.weight", first)
        return table.value if type(table) is Var else table

    @property
    def trainable(self) -> dict[str, Array]:
        """The parameters with gradients: those of the adapter, or all without an adapter.

        Parameters of draft heads are trainable only with an ``mtp_weight``.
        """
        if self.adapter is not None:
            return self.adapter.parameters
        every, unused = trainable(self.parameters), self.config.unused
        if self.config.draft_heads and not self.mtp_weight:
            unused = unused | {name for name in every if is_of_head(self.config, name)}
        return {n: value for n, value in every.items() if n not in unused}

    @property
    def dtype(self) -> Any:
        """The dtype of hidden states, keys and values."""
        stages = None if self.division is None else self.division.stages
        return self.table.dtype if stages is None else stages.dtype

    def narrowed(self, dtype: Any) -> dict[str, Any]:
        """Return the parameters that are rounded to ``dtype`` if the model computes in it.

        Others stay float32: see ``Config.widened``.  So do those that no loss reads, such as draft
        heads that are not trained; beside an adapter, the whole base is rounded.
        """
        widened = self.config.widened
        every = self.trainable if self.adapter is None else self.parameters
        return {n: each for n, each in every.items() if dtype not in widened(n)}

    @property
    def slices(self) -> Division | None:
        """The division, if ranks store slices of the same weights."""
        return self.division if self.division is not None and self.division.comm.size > 1 else None

    @property
    def expert_ranks(self) -> Communicator | None:
        """The ranks that store different experts; None if there is one."""
        return None if self.division is None else self.division.experts

    @property
    def cache_sizes(self) -> dict[str, int | None]:
        """The arguments ``kv_heads``, ``dim`` and ``latent`` of a KVCache or PagedKVCache.

        With latent attention, one row per token serves all heads: ``kv_lora_rank`` numbers and the
        rotated part of the key.  A cache with latent=None and the model's own ``kv_heads`` and
        ``dim`` stores whole heads instead.  Ranks that divide heads store every row.
        """
        config = self.config
        if config.latent is None or not absorbs(self.adapter):
            return {"kv_heads": config.kv_heads, "dim": config.dim, "latent": None}
        rank, index = config.latent.rank, config.indexer
        dim = rank + config.latent.rotated + (0 if index is None else index.dim)
        return {"kv_heads": 1, "dim": dim, "latent": rank}

    def on_tape(
        self, parameters: Mapping[str, Any], step: TrainingStep, reached: Reached | None = None
    ) -> Self:
        """Return a shallow copy of this model for one step; parameters are Vars of a tape."""
        model = object.__new__(type(self))
        model.__dict__ |= self.__dict__
        model.parameters, model.step, model.reached = {**parameters}, step, reached
        return model

    @cached_property
    def graphs(self) -> Graphs:
        """The CUDA graphs of calls with ``graph=True``; ``graphs.clear()`` frees their memory."""
        return Graphs()

    def passes(self, function: Any, step: TrainingStep) -> tuple[Any, dict[str, Array]]:
        """Run forward and backward of a step; return the value and the gradients by name."""
        tape, scaler = Tape(), step.scaler
        watched = {name: tape.watch(array) for name, array in self.trainable.items()}
        quiet: Any = {} if scaler is None else {"over": "ignore", "invalid": "ignore"}
        with np.errstate(**quiet):
            loss = function(self.on_tape({**self.parameters, **watched}, step))
            dloss, value = start_of_backward(loss, scaler)
            gradients = tape.gradients(loss, [*watched.values()], dloss, release=True)
        return value, dict(zip(watched, gradients, strict=True))

    def hidden(self, parameters: Mapping[str, Any], tokens: Array, **arguments: Any) -> Any:
        """Return the normalised output of the last block, (batch, tokens, hidden).

        Parameters are arrays or Vars of a tape; ``call`` documents further arguments.  The output
        of packed texts is one row, (1, tokens, hidden).  With a context it has this rank's tokens.
        """
        if self.reached is not None:
            if arguments.get("routes") is not self.reached.routes:
                problem = "routes are not the routes of the batch, which all stages use"
                raise ConfigError(f"Transformer: {problem}; pass them with its tokens")
            return self.reached.hidden
        if self.division is not None and self.division.stages is not None:
            cure = "models.ranks.stages.ModelStage runs them together with the other ranks"
            raise ConfigError(f"Transformer: this rank does not store all blocks; {cure}")
        with self.ordered():
            run = partial(self._hidden, parameters)
            if self.invariant:
                return without_padding(run, tokens, **{"mask": None, **arguments})
            return run(tokens, **arguments)

    def _hidden(self, parameters: Mapping[str, Any], tokens: Array, **arguments: Any) -> Any:
        """Return the normalised output of the last block."""
        if self.seen is not None and arguments.get("routers") is None:
            arguments["routers"] = list[Any]()
        call = self.call(parameters, tokens, **arguments)
        context, rows = call.context, in_rows(tokens, arguments.get("offsets"))
        own = own_tokens(context, rows)
        branch = embedded(self.config, parameters, own, self.slices)
        if self.config.embedding_norm is not None:
            whole = call._replace(parameters=self.entered(parameters))
            branch = with_positions(whole, own, branch)
        if self.noise is not None:
            branch = self.noise(branch, token_numbers(context, rows, self.first_token), context)
        inputs = inputs_of_layers(self.config, parameters, own, branch)
        branch, stream = blocks(call, branch, self.step.checkpoint, inputs=inputs)
        self.report_routes(call)
        x = join(call, "model.", self.config.norms.last, branch, stream)[0]
        return linear(x, parameters[PROJECTION]) if self.config.projected else x

    def call(
        self,
        parameters: Mapping[str, Any],
        tokens: Array,
        mask: Array | None = None,
        cache: KVCache | PagedKVCache | None = None,
        offsets: Array | None = None,
        sequences: Sequence[int] | None = None,
        context: Context | None = None,
        routers: list[Any] | None = None,
        routes: Array | None = None,
    ) -> Call:
        """Check the arguments, and return the inputs that all blocks of a call share.

        Each layer with experts adds its ``Routed`` to the list ``routers``.  ``routes`` are experts
        of an earlier pass, which the routers use again.
        """
        seed = self.step.seed
        rows = check(tokens, mask, cache, offsets, self.step.checkpoint, sequences)
        self.check_cache(cache)
        if not isinstance(seed, Seeds | None) and not is_integer(seed):
            raise ConfigError(f"Transformer: seed={seed!r}; pass an integer, 0 or more")
        if self.chunked_mlp and isinstance(self.adapter, ByRows):
            cure = "leave it out, or make a batch of one adapter: set_adapter(name)"
            problem = "each row of the batch has its own adapter, which a chunk of rows may mix"
            raise ConfigError(f"chunked_mlp: {problem}; {cure}")
        if self.invariant:
            divided = self.division is not None or context is not None
            check_invariant(self.config, divided, rows, mask)
        where = places(Angles(self.tables, self.config.ropes), tokens, mask, rows, offsets)
        if routes is not None:
            routes = self._checked(routes, tokens, where.offsets, context)
        if not self.config.causal:
            self._check_encoder(rows, context)
        if context is not None and self.config.sinks:
            problem = f"the attention of a {self.config.model_type} has sinks"
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            raise ConfigError(f"Transformer: {problem}, which ranks do not divide; {cure}")
        if context is not None and (self.config.chunk or self.config.indexer):
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            problem = "ranks do not divide the tokens of chunked or sparse attention"
            raise ConfigError(f"Transformer: {problem}; {cure}")
        if self.config.recurrent:
            self.check_recurrent(rows, context)
        where = where if context is None else context.places(where)
        used = self.used(parameters, seed)
        attend, of_chunks = attend_of(rows, where.mask, where.offsets, context), None
        if (size := self.config.chunk) is not None:
            of_chunks = chunks_of(size, attend, rows, where.mask, where.offsets, tokens)
        attention = Attention(
            attend, where.tables, where.positions,
            Keys(None, latents_of(rows), cached=cache is not None, padding=where.mask),
            whole_of(self.adapter), of_chunks,
        )  # fmt: skip
        stacks = {} if self.adapter is None else self.adapter.used_stacks()
        project = project_of(
            self.config, self.adapter, seed, self.division, in_rows(tokens, offsets), offsets,
            context, self.first_token,
        )  # fmt: skip
        return Call(
            self.config, used, project, attention,
            Mixtures(stacks, routers, routes, self.expert_ranks),
            Recurrence(getattr(rows, "recurrent", no_states), mask, where.offsets),
            False if isinstance(self.adapter, ByRows) else self.chunked_mlp,
            self.slices, self.gather, context,
        )  # fmt: skip

    def report_routes(self, call: Call, before: int = 0) -> None:
        """Pass the routes of a call to ``seen``; ``before`` blocks come before this call's."""
        if self.seen is None or not call.experts.routers:
            return
        routed, context = call.experts.routers, call.context
        experts: Any = self.config.experts
        if self.filled is not None:  # padding goes to no expert: to the number after the last one
            real = self.real_columns(routed[0].experts[..., 0])[:, None]
            routed = [
                each._replace(experts=np.where(real, each.experts, experts.choices))
                for each in routed
            ]
        if context is not None:  # drop the padding that fills up rows
            real = to_device_of(context.order < context.length, routed[0].experts)
            routed = [each._replace(experts=each.experts[:, real]) for each in routed]
        self.seen(routed, sum(experts.sparse[:before]))

    def real_columns(self, rows: Array) -> Array:
        """Return which tokens of each row (rows, tokens) are before the padding of a graph."""
        real: Array = np.arange(rows.shape[1], like=rows) < self.filled
        return real

    def _checked(self, routes: Any, tokens: Array, offsets: Any, context: Any) -> Array:
        """Raise unless routes fit tokens and config; return this rank's, (rows, tokens, ...)."""
        experts = self.config.experts
        if experts is None:
            problem = f"a {self.config.model_type} has no experts"
            raise ConfigError(f"Transformer: {problem}; leave routes out")
        shape = (*tokens.shape, sum(experts.sparse), experts.k)
        if tuple(routes.shape) != shape:
            axes = "(batch, tokens, layers with experts, k)"
            problem = f"Transformer: routes are {tuple(routes.shape)}, not {axes} = {shape}"
            raise ShapeError(problem, expected=shape, actual=tuple(routes.shape))
        if routes.dtype.kind != "i":
            raise DTypeError(f"Transformer: routes are {routes.dtype}; they must be integers")
        limit = experts.choices + bool(experts.chosen)  # see ``Routed``
        if isinstance(routes, np.ndarray) and routes.size and routes.max() >= limit:
            numbers, count = range(experts.choices), experts.choices
            problem = f"routes contain expert {routes.max()}, and there are {count} experts"
            raise RangeError(f"Transformer: {problem}", expected=numbers, actual=int(routes.max()))
        return own_tokens(context, routes if offsets is None else routes.reshape(1, -1, *shape[2:]))

    def check_cache(self, cache: Any) -> None:
        """Raise unless a cache, if there is one, has this model's layers and form of keys."""
        if cache is not None and len(cache.keys) != self.config.layers:
            layers = f"{len(cache.keys)} layers, and the model {self.config.layers}"
            problem = f"Transformer: the cache has {layers}; make one for this model"
            raise ShapeError(problem, expected=self.config.layers, actual=len(cache.keys))
        if cache is not None and cache.latent not in (None, self.cache_sizes["latent"]):
            cure = f"make it with {self.cache_sizes}"
            raise ConfigError(f"Transformer: the cache has latent={cache.latent}; {cure}")

    def _check_encoder(self, rows: Any, context: Context | None) -> None:
        """Raise a ConfigError for a cache, or for ranks that divide tokens."""
        kind = self.config.model_type
        if rows is not None:
            problem = f"a {kind} without a causal mask has no cache"
            raise ConfigError(f"Transformer: {problem}; pass whole texts")
        if context is not None:
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            raise ConfigError(f"Transformer: ranks do not divide the tokens of a {kind}; {cure}")

    def check_recurrent(self, rows: Any, context: Context | None) -> None:
        """Raise a ConfigError if cache or context do not support recurrent layers."""
        kind = f"layers of a {self.config.model_type} that have no attention"
        rule = self.config.delta
        if context is not None and rule is None:
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            raise ConfigError(f"Transformer: ranks do not divide the tokens of {kind}; {cure}")
        if context is not None and rule is not None and rule.key_heads % context.comm.size:
            ranks, cure = context.comm.size, "use fewer ranks, or divide the batch, not its tokens"
            problem = f"{ranks} ranks do not divide the {rule.key_heads} heads of {kind}"
            raise ConfigError(f"Transformer: {problem}; {cure}")
        if isinstance(rows, PagedRows):
            problem = f"a PagedKVCache does not store the states of {kind}"
            raise ConfigError(f"Transformer: {problem}; use a KVCache")

    def in_order(self, invariant: bool | None) -> Self:
        """Return this model, or a shallow copy with another ``invariant``; None: no change."""
        if not isinstance(invariant, bool | None):
            raise ConfigError(f"invariant={invariant!r}: pass True or False, or None")
        if invariant is None or invariant == self.invariant:
            return self
        model = self.on_tape(self.parameters, self.step, self.reached)
        model.invariant = invariant
        return model

    def ordered(self) -> AbstractContextManager[None]:
        """Return a context in which an invariant model fixes the order of sums.

        With an adapter, backward fixes it too: rows of several adapters pass the base together.
        """
        return fixed_order(self.invariant, gradients=self.adapter is not None)

    def entered(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters with whole weights outside of the blocks, and with the adapter's."""
        if self.parts is not None:
            cure = "create a Zero3(model, comm), which gathers them"
            problem = "each rank stores only parts of this model's weights"
            raise ConfigError(f"Transformer: {problem}; {cure}")
        if self.gather is not None:
            outside = {name: value for name, value in parameters.items() if ".layers." not in name}
            parameters = {**parameters, **self.gather(outside)}
        if self.adapter is None:
            return parameters
        return self.adapter.outside(self.adapter.file_weights(parameters))

    def used(self, parameters: Mapping[str, Any], seed: int | None) -> Mapping[str, Any]:
        """Return the parameters of the blocks and of the adapter, prepared for backward."""
        if self.adapter is not None:
            parameters = {**self.adapter.parameters, **self.adapter.file_weights(parameters)}
        if self.division is None:
            return parameters
        if self.adapter is not None and self.adapter.dropout and seed is not None:
            cure = "leave seed out"
            raise ConfigError(f"Transformer: dropout is not supported in a divided model; {cure}")
        return self.division.used(parameters)

    def settled(self) -> Self:
        """Return a copy of this model that has the weights of its adapter's file, without adapter.

        The weights are rounded once here instead of in every call.  A model whose adapter is not
        trained through a file's types is returned unchanged.
        """
        adapter = self.adapter
        if adapter is None or not adapter.through:
            return self
        model = self.on_tape(file_weights(adapter, self.parameters), self.step, self.reached)
        model.adapter = None
        return model

    def to_torch(self) -> Any:
        """Return a model of transformers over the same memory; nothing is copied.

        Classes of transformers have no draft heads: those stay in this model.

        Raises
        ------
        ConfigError
            The model has an adapter, which would be lost; or a weight is quantized or divided.
        """
        if self.division is not None:
            cure = "save(folder) writes the whole model"
            raise ConfigError(f"to_torch: ranks divide the model; {cure}")
        if self.adapter is not None:
            cure = "call merge_adapter() first, or set adapter = None"
            raise ConfigError(f"to_torch: the model has an adapter, which would be lost; {cure}")
        experts = self.config.experts
        if experts is not None and (experts.transposed or experts.zero):
            how = "transposed" if experts.transposed else "with zero experts"
            problem = f"transformers stores the experts of a {self.config.model_type} {how}"
            cure = "save(folder) writes that layout, and from_pretrained loads it"
            raise ConfigError(f"to_torch: {problem}; {cure}")
        frozen = next((n for n, w in self.parameters.items() if isinstance(w, Stored)), None)
        if frozen is not None:
            cure = "save(folder) writes what transformers loads, and dequantize() returns an array"
            raise ConfigError(f"to_torch: {frozen} is quantized, not a tensor; {cure}")
        arrays = {n: a for n, a in self.parameters.items() if not is_of_head(self.config, n)}
        if self.config.experts is not None and self.config.experts.correction_row:
            arrays = {n: a[None] if n.endswith(CORRECTION) else a for n, a in arrays.items()}
        return to_torch(self.texts["config.json"], self.texts, arrays)

    @property
    def head(self) -> str:
        """The name of the head: see ``load``."""
        return self.config.head

    def next_logits(self, parameters: Mapping[str, Any], x: Array) -> Array:
        """Return the logits of a language model from normalised hidden states."""
        with self.ordered():
            logits: Array = logits_of(self.config, parameters, x, self.slices)
        # All ranks have the same rows, but their last bits may differ, as expert ranks sort them
        # among other ranks' rows: rank 0's are used, so that all ranks choose the same tokens.
        return logits if self.expert_ranks is None else self.expert_ranks.broadcast(logits)


def in_rows(tokens: Array, offsets: Any) -> Array:
    """Return tokens as (rows, tokens); packed texts are one row."""
    return tokens if offsets is None else tokens.reshape(1, -1)  # (1, batch * tokens)
