"""The network: its parameters, its rotary tables, and the forward pass from tokens to logits."""

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
from ..parallel.communicator import Communicator
from ..parallel.zero3 import Parts
from ..placement import on_gpu_of_attribute, to_device_of
from ..training.tape import Tape
from ..training.variable import Var
from .adapters.adapter import Adapter, Seeds
from .adapters.through import file_weights
from .any_library import to_torch
from .configs.config import CORRECTION, Config
from .folders.quantized_weights import trainable
from .graphs import Graphs
from .invariant import check_invariant, without_padding
from .layers.attending import absorbs, attend_of, latents_of, project_of, whole_of
from .layers.block import blocks, embedded, rope_rows
from .layers.call import Attention, Call, Gather, Mixtures, Recurrence, no_states
from .layers.context import Context, own_tokens, token_numbers
from .layers.head import logits_of
from .layers.mlp_branch import check_chunked
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
        Replace or change them in place: every call reads them again.
    adapter : Adapter or None
        Low-rank weights added to linear layers; the parameters are then frozen.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` computes the MLPs: by chunks of rows, recomputed in backward.  False
        at first.  Calls raise a ConfigError for an MLP with another activation, or with a norm,
        biases, an adapter or BitNet's rounding inside.
    invariant : bool
        Whether the bits of hidden states, logits and ``log_probs`` of a text depend on this text
        alone: not on the batch, padding, packing, or what a cache held.  False at first.  Losses
        and gradients may differ in rounding as ever, but for those of adapters: see ``by_rows``.
    division : Division or None
        Which part of the model this rank holds, if ranks divide it; config and parameters are
        then this rank's, and all ranks must make the same calls.
    context : Communicator or None
        Ranks that divide the tokens of each row: ``loss`` and ``loss_and_gradients`` take whole
        rows in all of them, and return this rank's term of a sum over ranks.
    context_attention : str
        Attention with a context: "ring" passes keys and values around, with "ulysses" each rank
        has some of the heads.
    parts : Parts or None
        The parts of parameters that ``load(folder, parts=comm)`` has read, until a Zero3 takes
        over the model.
    gather : callable or None
        Returns whole parameters from the parts that ranks keep, for one block at a time.
    """

    texts: Mapping[str, Mapping[str, Any]]  # JSON files of its folder: config.json and others
    folder: Path | None = None  # where load read it
    stored: Callable[[str], Any] | None = None  # returns its model as it is stored, for a call
    words: Path | None = None  # where its tokenizer is
    step = TrainingStep()  # of the model on a tape
    noise: Callable[..., Any] | None = None  # changes embeddings in a step of training
    first_token = 0  # its number in the batch of all data ranks, by which dropout and noise draw
    # takes what routers said in a pass, and the number of layers with experts before theirs
    seen: Callable[[Sequence[Any], int], None] | None = None
    reached: Reached | None = None  # what the stages of a pipeline have computed
    filled: Any = None  # (), the tokens of a row before the padding of a graph: see ``graphs``

    def __init__(self, config: Config, parameters: dict[str, Array]) -> None:
        self.config, self.parameters = config, parameters
        self.adapter: Adapter | None = None
        self.division: Division | None = None
        self.context: Communicator | None = None
        self.context_attention = "ring"
        self.parts: Parts | None = None
        self.gather: Gather | None = None
        self.chunked_mlp = self.invariant = False
        self._make_tables()

    def _make_tables(self) -> None:
        """Create the tables of the rotary embeddings."""
        like = arrays.empty((0,), FLOAT32, like=self.table)  # the table itself may be replaced
        ropes = sorted(self.config.ropes.items())
        self.tables = {kind: rope_rows(rope, like) for kind, rope in ropes}
        for tables in self.tables.values():
            tables(1)  # raises for an invalid rope_scaling now, not in the first call

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tables and graphs, which are created again."""
        return {n: value for n, value in self.__dict__.items() if n not in ("tables", "graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_tables()

    @property
    def table(self) -> Array:
        """The embedding table, (vocab, hidden); another weight if this rank has no embedding."""
        values = [*self.parameters.values()]
        first = next((value for value in values if not isinstance(value, Stored)), values[0])
        table: Any = self.parameters.get("model.embed_tokens.weight", first)
        return table.value if type(table) is Var else table

    @property
    def trainable(self) -> dict[str, Array]:
        """The parameters that have gradients: the adapter's if there is one, else all."""
        return trainable(self.parameters) if self.adapter is None else self.adapter.parameters

    @property
    def dtype(self) -> Any:
        """The dtype of hidden states, keys and values."""
        stages = None if self.division is None else self.division.stages
        return self.table.dtype if stages is None else stages.dtype

    def narrowed(self, dtype: Any) -> dict[str, Any]:
        """Return the parameters that have another dtype in a computation in ``dtype``."""
        widened = self.config.widened
        return {n: each for n, each in self.parameters.items() if dtype not in widened(n)}

    @property
    def slices(self) -> Division | None:
        """The division, if ranks hold slices of the same weights."""
        return self.division if self.division is not None and self.division.comm.size > 1 else None

    @property
    def expert_ranks(self) -> Communicator | None:
        """The ranks that hold different experts, if there are several."""
        return None if self.division is None else self.division.experts

    @property
    def cache_sizes(self) -> dict[str, int | None]:
        """The sizes ``kv_heads``, ``dim`` and ``latent`` of a KVCache or PagedKVCache.

        With latent attention one row of a token serves all heads: ``kv_lora_rank`` numbers and the
        rotated part of the key.  A cache with latent=None and the model's own ``kv_heads`` and
        ``dim`` holds whole heads instead.  Ranks that divide heads hold every row.
        """
        config = self.config
        if config.latent is None or not absorbs(self.adapter):
            return {"kv_heads": config.kv_heads, "dim": config.dim, "latent": None}
        rank = config.latent.rank
        return {"kv_heads": 1, "dim": rank + config.latent.rotated, "latent": rank}

    def on_tape(
        self, parameters: Mapping[str, Any], step: TrainingStep, reached: Reached | None = None
    ) -> Self:
        """Return this model with parameters that are Vars of a tape, for one step."""
        model = object.__new__(type(self))
        model.__dict__ |= self.__dict__
        model.parameters, model.step, model.reached = {**parameters}, step, reached
        return model

    @cached_property
    def graphs(self) -> Graphs:
        """The CUDA graphs of calls with ``graph=True``; ``graphs.clear()`` frees their memory."""
        return Graphs()

    def passes(self, function: Any, step: TrainingStep) -> tuple[Any, dict[str, Array]]:
        """Run a step forward and backward; return what ``value_and_gradients`` does."""
        tape, scaler = Tape(), step.scaler
        watched = {name: tape.watch(array) for name, array in self.trainable.items()}
        quiet: Any = {} if scaler is None else {"over": "ignore", "invalid": "ignore"}
        with np.errstate(**quiet):
            loss = function(self.on_tape({**self.parameters, **watched}, step))
            dloss, value = start_of_backward(loss, scaler)
            gradients = tape.gradients(loss, [*watched.values()], dloss, release=True)
        return value, dict(zip(watched, gradients, strict=True))

    def hidden(self, parameters: Mapping[str, Any], tokens: Array, **arguments: Any) -> Any:
        """Return the normalised output of the last block; parameters are arrays or a tape's Vars.

        Further arguments are those of ``call``.  For packed texts the output is one row:
        (1, tokens, hidden).  With a context it holds only this rank's tokens.
        """
        if self.reached is not None:
            if arguments.get("routes") is not self.reached.routes:
                problem = "routes are not those of the batch, which all stages have taken"
                raise ConfigError(f"Transformer: {problem}; pass them with its tokens")
            return self.reached.hidden
        if self.division is not None and self.division.stages is not None:
            cure = "models.ranks.stages.ModelStage runs them with those of other ranks"
            raise ConfigError(f"Transformer: this rank does not hold all blocks; {cure}")
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
        if self.noise is not None:
            branch = self.noise(branch, token_numbers(context, rows, self.first_token), context)
        branch, stream = blocks(call, branch, self.step.checkpoint)
        self.tell(call)
        return join(call, "model.", self.config.norms.last, branch, stream)[0]

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
        """Return the inputs that all blocks of a call share; raise if arguments do not fit.

        What all routers say is added to ``routers``; ``routes`` are experts that they chose before.
        """
        seed = self.step.seed
        rows = check(tokens, mask, cache, offsets, self.step.checkpoint, sequences)
        if cache is not None and len(cache.keys) != self.config.layers:
            layers = f"{len(cache.keys)} layers, and the model {self.config.layers}"
            problem = f"Transformer: the cache has {layers}; make one for this model"
            raise ShapeError(problem, expected=self.config.layers, actual=len(cache.keys))
        if cache is not None and cache.latent not in (None, self.cache_sizes["latent"]):
            cure = f"make it with {self.cache_sizes}"
            raise ConfigError(f"Transformer: the cache has latent={cache.latent}; {cure}")
        if not isinstance(seed, Seeds | None) and not is_integer(seed):
            raise ConfigError(f"Transformer: seed={seed!r}; pass an integer, 0 or more")
        if self.chunked_mlp:
            check_chunked(self.config, self.adapter)
        if self.invariant:
            divided = self.division is not None or context is not None
            check_invariant(self.config, divided, rows, mask)
        where = places(Angles(self.tables, self.config.ropes), tokens, mask, rows, offsets)
        if routes is not None:
            routes = self._checked(routes, tokens, where.offsets, context)
        if context is not None and self.config.sinks:
            problem = f"the attention of a {self.config.model_type} has sinks"
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            raise ConfigError(f"Transformer: {problem}, which ranks do not divide; {cure}")
        if self.config.recurrent:
            self._check_recurrent(rows, context)
        where = where if context is None else context.places(where)
        used = self.used(parameters, seed)
        attention = Attention(
            attend_of(rows, where.mask, where.offsets, context), where.tables, where.positions,
            latents=latents_of(rows), whole=whole_of(self.adapter),
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
            self.chunked_mlp, self.slices, self.gather, context,
        )  # fmt: skip

    def tell(self, call: Call, before: int = 0) -> None:
        """Tell ``seen`` what the routers of a call said, after those of ``before`` blocks."""
        if self.seen is None or not call.experts.routers:
            return
        routed, context = call.experts.routers, call.context
        if self.filled is not None:  # padding goes to no expert: to the number after the last
            real = self.real_columns(routed[0].experts[..., 0])[:, None]
            none: Any = self.config.experts
            routed = [
                each._replace(experts=np.where(real, each.experts, none.count)) for each in routed
            ]
        if context is not None:  # without the tokens that fill up rows
            kept = to_device_of(context.order < context.length, routed[0].experts)
            routed = [each._replace(experts=each.experts[:, kept]) for each in routed]
        experts: Any = self.config.experts
        self.seen(routed, sum(experts.sparse[:before]))

    def real_columns(self, rows: Array) -> Array:
        """Return which tokens of each row (rows, tokens) are before the padding of a graph."""
        real: Array = np.arange(rows.shape[1], like=rows) < self.filled
        return real

    def _checked(self, routes: Any, tokens: Array, offsets: Any, context: Any) -> Array:
        """Return routes as the blocks take them; raise if they do not fit."""
        experts = self.config.experts
        if experts is None:
            problem = f"a {self.config.model_type} has no experts"
            raise ConfigError(f"Transformer: {problem}; leave routes out")
        shape = (*tokens.shape, sum(experts.sparse), experts.k)
        if tuple(routes.shape) != shape:
            problem = f"routes are {tuple(routes.shape)}; of tokens, layers with experts, and k"
            problem = f"Transformer: {problem}, they must be {shape}"
            raise ShapeError(problem, expected=shape, actual=tuple(routes.shape))
        if routes.dtype.kind != "i":
            raise DTypeError(f"Transformer: routes are {routes.dtype}; they must be integers")
        if isinstance(routes, np.ndarray) and routes.size and routes.max() >= experts.count:
            problem = f"routes name expert {routes.max()}, and there are {experts.count}"
            numbers = range(experts.count)
            raise RangeError(f"Transformer: {problem}", expected=numbers, actual=int(routes.max()))
        return own_tokens(context, routes if offsets is None else routes.reshape(1, -1, *shape[2:]))

    def _check_recurrent(self, rows: Any, context: Context | None) -> None:
        """Raise a ConfigError for a call whose layers without attention have no states."""
        kind = f"layers of a {self.config.model_type} that have no attention"
        rule = self.config.delta
        if context is not None and self.config.space is not None:
            cure = "divide the batch, not its tokens: --data-parallel, without --context-parallel"
            raise ConfigError(f"Transformer: ranks do not divide the tokens of {kind}; {cure}")
        if context is not None and rule is not None and rule.key_heads % context.comm.size:
            ranks, cure = context.comm.size, "use fewer, or divide the batch, not its tokens"
            problem = f"{ranks} ranks do not divide the {rule.key_heads} heads of {kind}"
            raise ConfigError(f"Transformer: {problem}; {cure}")
        if isinstance(rows, PagedRows):
            problem = f"a PagedKVCache holds no states of {kind}"
            raise ConfigError(f"Transformer: {problem}; use a KVCache")

    def in_order(self, invariant: bool | None) -> Self:
        """Return this model, or one on its parameters that is ``invariant`` or is not."""
        if not isinstance(invariant, bool | None):
            raise ConfigError(f"invariant={invariant!r}: pass True or False, or None")
        if invariant is None or invariant == self.invariant:
            return self
        model = self.on_tape(self.parameters, self.step, self.reached)
        model.invariant = invariant
        return model

    def ordered(self) -> AbstractContextManager[None]:
        """Return a context in which an invariant model fixes the order of sums.

        So it does in the backward pass of an adapter, as rows of several pass the base together.
        """
        return fixed_order(self.invariant, gradients=self.adapter is not None)

    def entered(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters in which those outside of the blocks are whole, and the adapter's."""
        if self.parts is not None:
            cure = "make a Zero3(model, comm) of it"
            problem = "ranks keep parts of this model's weights, of which none is whole"
            raise ConfigError(f"Transformer: {problem}; {cure}")
        if self.gather is not None:
            outside = {name: value for name, value in parameters.items() if ".layers." not in name}
            parameters = {**parameters, **self.gather(outside)}
        if self.adapter is None:
            return parameters
        return self.adapter.outside(self.adapter.file_weights(parameters))

    def used(self, parameters: Mapping[str, Any], seed: int | None) -> Mapping[str, Any]:
        """Return parameters for the blocks, with those of an adapter, prepared for backward."""
        if self.adapter is not None:
            parameters = {**self.adapter.parameters, **self.adapter.file_weights(parameters)}
        if self.division is None:
            return parameters
        if self.adapter is not None and self.adapter.dropout and seed is not None:
            cure = "leave seed out"
            raise ConfigError(f"Transformer: dropout is not supported in a divided model; {cure}")
        return self.division.used(parameters)

    def settled(self) -> Self:
        """Return this model with the weights of the file that its adapter is trained for.

        They are made once, not in every call.  Other models are returned as they are.
        """
        adapter = self.adapter
        if adapter is None or not adapter.through:
            return self
        model = self.on_tape(file_weights(adapter, self.parameters), self.step, self.reached)
        model.adapter = None
        return model

    def to_torch(self) -> Any:
        """Return a model of transformers over the same memory; nothing is copied.

        Raises
        ------
        ConfigError
            There is an adapter, which would be lost; or a weight is quantized or divided.
        """
        if self.division is not None:
            cure = "save(folder) writes it whole"
            raise ConfigError(f"to_torch: the model is not whole: ranks divide it; {cure}")
        if self.adapter is not None:
            cure = "call merge_adapter() first, or set adapter = None"
            raise ConfigError(f"to_torch: the model has an adapter, which would be lost; {cure}")
        if self.config.experts is not None and self.config.experts.transposed:
            problem = f"transformers has the experts of a {self.config.model_type} otherwise"
            cure = "save(folder) writes them so, which from_pretrained loads"
            raise ConfigError(f"to_torch: {problem}; {cure}")
        frozen = next((n for n, w in self.parameters.items() if isinstance(w, Stored)), None)
        if frozen is not None:
            cure = "save(folder) writes what transformers loads, and dequantize() gives an array"
            raise ConfigError(f"to_torch: {frozen} is quantized, which is not a tensor; {cure}")
        arrays = self.parameters
        if self.config.experts is not None and self.config.experts.correction_row:
            arrays = {n: a[None] if n.endswith(CORRECTION) else a for n, a in arrays.items()}
        return to_torch(self.texts["config.json"], self.texts, arrays)

    @property
    def head(self) -> str:
        """The name of its head: see ``load``."""
        return self.config.head

    def next_logits(self, parameters: Mapping[str, Any], x: Array) -> Array:
        """Return the logits of a language model from normalised hidden states."""
        with self.ordered():
            logits: Array = logits_of(self.config, parameters, x, self.slices)
        # ranks have the same rows, whose last bits may differ by their places among others' rows
        return logits if self.expert_ranks is None else self.expert_ranks.broadcast(logits)


def in_rows(tokens: Array, offsets: Any) -> Array:
    """Return tokens as (rows, tokens); packed texts are one row."""
    return tokens if offsets is None else tokens.reshape(1, -1)
