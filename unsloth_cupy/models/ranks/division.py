"""Tensor and expert parallelism: the part of each parameter that a rank stores.

Projections into heads and into the inner size are column-parallel; projections out of them are
row-parallel; embedding and head are divided by vocabulary.  (Shoeybi et al., Megatron-LM, 2019.)

    q_proj, k_proj, v_proj, gate_proj, up_proj      part of the rows of the weight and of the bias
    o_proj, down_proj                               part of the columns of the weight
    embed_tokens, lm_head                           part of the vocabulary

    experts.gate_up_proj, experts.down_proj         the same rows, or columns, of every expert

Every rank computes routers whole.  In latent attention, ranks divide q_b_proj (or q_proj) and
kv_b_proj by heads; each rank stores and computes the short vectors whole.

With expert parallelism, a rank stores some of the experts of each layer, and all other parameters.
With both kinds, it stores a part of each of its experts, and a part of the other parameters.

The number of heads must be a multiple of the world size.  With more ranks than KV heads, several
ranks store the same KV head.  The vocabulary is divided as evenly as possible.  So is the inner
size, in units of 64 if it is a multiple of 64, so that no block of a 4-bit weight is cut.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...ops.elements.arithmetic import scale
from ...ops.quantized.bit_linear import bit_linear
from ...ops.quantized.ternary import Ternary
from ...ops.quantized.weight import Quantized
from ...parallel.communicator import Communicator, along, part
from ...parallel.partial import divided_bit_linear, divided_rms_norm, summed_back
from ...parallel.tensor import all_reduce
from ...parallel.ulysses import dividing
from ..adapters.adapter import BIAS, DOWN, MAGNITUDE, PREFIX, UP, Adapter, module_of
from ..adapters.adapter_stacks import Stack
from ..configs.config import STACKS, UNGATED, Config
from ..configs.names import role_of
from ..folders.lazy_parameter import LazyParameter
from .pipeline_stages import EMBEDDING, Stages, part_of_inner

GATE_UP, EXPERTS_DOWN = (f"experts.{name}" for name in STACKS)
OF_EXPERTS = (GATE_UP, EXPERTS_DOWN, f"experts.{UNGATED[0]}")
INPUTS = ("o_proj", "down_proj", EXPERTS_DOWN)  # last layers of branches: ranks divide inputs
SHARED = ("q_a_proj", "kv_a_proj_with_mqa")  # layers of latent attention with whole gradients
Cut = tuple[int, list[slice]]  # an axis, and the slices along it that a rank concatenates


class Division:
    """A model divided among the ranks of a communicator, by heads, inner size and vocabulary.

    Attributes
    ----------
    whole : Config
        Config of the whole model.
    config : Config
        Config of this rank's computation: its heads, its part of the inner size, and the whole
        vocabulary.
    comm : Communicator
        The ranks of tensor parallelism.
    experts : Communicator or None
        The ranks that store different experts, and process different tokens.
    groups : list of Communicator
        ``experts`` and ``comm``, if they have several ranks; each divides another axis.
    balanced : Communicator or None
        The ranks whose tokens count in the router's loss: ``experts``, except in evaluations.
    copies : Communicator or None
        The ranks that store the same KV heads; None if only this rank does.
    stages : Stages or None
        The blocks of this rank, with pipeline parallelism.
    kept : callable
        (name, rows) -> the slice of these rows in the array that the model stores: the same slice,
        unless a Zero3 stores only a part of the rows.

    Raises
    ------
    ConfigError
        The number of heads is not a multiple of the world size, or a rank's part would be empty.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        stages: Stages | None = None,
        experts: Communicator | None = None,
    ) -> None:
        self.experts = None if experts is None or experts.size == 1 else experts
        self.groups = [each for each in (self.experts, comm) if each is not None and each.size > 1]
        self.balanced = self.experts
        if self.experts is not None:
            check_experts(config, self.experts)
        self.whole, self.comm, self.stages, ranks = config, comm, stages, comm.size
        if config.recurrent and (ranks > 1 or stages is not None):
            problem = f"ranks do not divide a {config.model_type}, whose layers have states"
            cure = "divide the batch (DataParallel), or store parts of its weights (Zero3)"
            raise ConfigError(f"Division: {problem}; {cure}")
        by_layer = config.full_heads or config.shared_layers or config.layer_inputs[1]
        if by_layer and (ranks > 1 or stages is not None):
            problem = f"layers of a {config.model_type} share keys, or have heads of other sizes"
            cure = "divide the batch (DataParallel), or store parts of its weights (Zero3)"
            raise ConfigError(f"Division: {problem}, which ranks do not divide; {cure}")
        if config.experts is not None and config.experts.beside and ranks > 1:
            problem = f"experts and MLP of a {config.model_type} have a norm before their sum"
            cure = "use a pipeline, ranks of experts, DataParallel or Zero3"
            raise ConfigError(f"Division: {problem}, which ranks do not divide; {cure}")
        if config.paired and stages is not None:
            cure = "use ranks of experts, tensor parallelism, DataParallel or Zero3"
            problem = f"layers of a {config.model_type} are pairs of blocks, which stages would cut"
            raise ConfigError(f"Division: {problem}; {cure}")
        if not config.causal and (ranks > 1 or stages is not None):
            cure = "divide the batch (DataParallel), or store parts of its weights (Zero3)"
            raise ConfigError(f"Division: ranks do not divide a {config.model_type}; {cure}")
        check_divides(config, ranks)
        self.times = max(1, ranks // config.kv_heads)  # number of ranks that store the same KV head
        mixture = config.experts
        if mixture is not None:
            shared = self._inner(mixture.shared)
            mixture = replace(mixture, inner=self._inner(mixture.inner), shared=shared)
        self.config = replace(
            config,
            heads=config.heads // ranks,
            kv_heads=max(1, config.kv_heads // ranks),
            inner=self._inner(config.inner),
            experts=mixture,
        )
        self.copies = comm.split(comm.rank // self.times) if self.times > 1 else None
        self.shapes = config.shapes()
        self.kept: Callable[[str, slice], slice] = lambda name, rows: rows
        # stacks of experts with an adapter, by module, and the LoRA rank of the adapter
        self.adapted: dict[str, tuple[Stack, int]] = {}

    def _inner(self, size: int) -> int:
        """Return this rank's part of an inner size."""
        own = part_of_inner(size, self.comm, self.comm.rank)
        return own.stop - own.start

    def holds(self, name: str) -> bool:
        """Return whether this rank stores a part of a parameter."""
        return self.stages is None or bool(self.stages.chunk_of(name.removeprefix(PREFIX)))

    @property
    def first(self) -> bool:
        """Whether this is the first rank of each group."""
        return all(group.rank == 0 for group in self.groups)

    def cut(self, name: str, group: Communicator, rank: int | None = None) -> Cut | None:
        """Return the cut of a parameter for a rank of a group; None if all ranks store it whole."""
        module, kind = self._split(name)
        rank = group.rank if rank is None else rank
        if group is self.experts:
            own = part(getattr(self.whole.experts, "count", 0), group, rank)
            return self._of_rank(name, kind, own) if self.of_experts(name) else None
        stacked = int(module in OF_EXPERTS and kind in ("weight", "bias"))
        if module in INPUTS:
            inputs = "heads" if module == "o_proj" else "up_proj"
            ranges = self._ranges(name, inputs, rank)
            return (1 + stacked, ranges) if kind in ("weight", DOWN) else None
        if kind == DOWN or not (ranges := self._ranges(name, module, rank)):
            return None
        adapted = self._adapted(name)
        if adapted is not None and adapted[0].in_turns:
            ranges = [slice(2 * ranges[0].start, 2 * ranges[0].stop)]
        return stacked, ranges

    def cuts(self, name: str) -> list[Cut]:
        """Return the cuts of a parameter for this rank, one for each axis that ranks divide."""
        return [cut for group in self.groups if (cut := self.cut(name, group)) is not None]

    def of_experts(self, name: str) -> bool:
        """Return whether a parameter belongs to experts, which expert ranks divide."""
        return self._split(name)[0] in OF_EXPERTS

    def _of_rank(self, name: str, kind: str, own: slice) -> Cut:
        """Return the cut of experts' parameter for the rank that stores the experts ``own``."""
        size, count = 1, getattr(self.whole.experts, "count", 0)
        if (adapted := self._adapted(name)) is not None:
            size = adapted[1]
        if kind == UP:
            return 1, [slice(own.start + n * count, own.stop + n * count) for n in range(size)]
        return 0, [slice(own.start * size, own.stop * size)]

    def _adapted(self, name: str) -> tuple[Stack, int] | None:
        """Return the stack that a tensor of an adapter belongs to, and the LoRA rank."""
        return self.adapted.get(module_of(name.partition(PREFIX)[2]))

    def _split(self, name: str) -> tuple[str, str]:
        """Return the role of a parameter's module, and the parameter's name in the module."""
        if (adapted := self._adapted(name)) is not None:
            return f"experts.{adapted[0].parameter.rpartition('.')[2]}", name[-len(DOWN) :]
        for own in OF_EXPERTS:
            if name.endswith((f".{own}", f".{own}_bias")):
                return own, "bias" if name.endswith("_bias") else "weight"
        for kind in (DOWN, UP, MAGNITUDE, "weight", "bias"):
            if name.endswith(f".{kind}"):
                return role_of(name.removesuffix(f".{kind}").rpartition(".")[2]), kind
        return ("sinks", "weight") if name.endswith(".sinks") else (name, "")

    def _inner_of(self, name: str) -> int:
        """Return the whole inner size of the MLP, or of the experts, that have a parameter."""
        experts = self.whole.experts
        if experts is not None and f".{experts.shared_in}." in name:
            return experts.shared
        return self.whole.inner if experts is None or ".experts." not in name else experts.inner

    def _ranges(self, name: str, module: str, rank: int) -> list[slice]:
        """Return the outputs of a layer, or columns of a norm, that a rank stores; []: all."""
        whole, ranks = self.whole, self.comm.size
        queries, keys = whole.heads * whole.dim, whole.kv_heads * whole.dim
        count = queries // ranks
        q = slice(rank * count, (rank + 1) * count)
        kv_start = rank // self.times * (keys * self.times // ranks)
        k = slice(kv_start, kv_start + keys * self.times // ranks)
        size = self._inner_of(name)
        inner = part_of_inner(size, self.comm, rank)
        heads = part(whole.heads, self.comm, rank)
        vocab = part(whole.vocab, self.comm, rank)
        by_module = {"q_proj": [q], "heads": [q], "k_proj": [k], "v_proj": [k]}
        if (latent := whole.latent) is not None:
            sizes = {"heads": latent.value, "kv_b_proj": latent.plain + latent.value}
            sizes |= dict.fromkeys(("q_proj", "q_b_proj"), latent.dim)
            by_module = {
                name: [slice(heads.start * dim, heads.stop * dim)] for name, dim in sizes.items()
            }
        by_module["attn_sub_norm"] = by_module["heads"]
        by_module |= {"qkv_proj": [q, _moved(k, queries), _moved(k, queries + keys)]}
        by_module |= {key: [inner, _moved(inner, size)] for key in ("gate_up_proj", GATE_UP)}
        by_module["sinks"] = [heads]
        by_module |= {name: [inner] for name in ("gate_proj", "up_proj", "ffn_sub_norm")}
        by_module |= {name: [vocab] for name in ("embed_tokens", "lm_head")}
        if whole.query_key_norm in ("projection", "heads"):  # ranks divide columns, or heads
            size = whole.dim if whole.query_key_norm == "heads" else 1
            norms = (slice(each.start // size, each.stop // size) for each in (q, k))
            by_module |= dict(zip(("q_norm", "k_norm"), ([each] for each in norms), strict=True))
        return by_module.get(module, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter."""
        shape = [*self.shapes[name]]
        for axis, ranges in self.cuts(name):
            shape[axis] = sum(piece.stop - piece.start for piece in ranges)
        return tuple(shape)

    def whole_shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the whole shape of a parameter from the shape of this rank's part."""
        shape = [*own]
        for group in self.groups:
            if (cut := self.cut(name, group, group.size - 1)) is not None:
                shape[cut[0]] = max(piece.stop for piece in cut[1])
        return tuple(shape)

    def own(self, name: str, array: Any, rows: slice | None = None) -> Any:
        """Return this rank's part of a parameter, an array or a quantized weight.

        From a LazyParameter only the part is read, or only ``rows`` of the part.
        """
        cuts = self.cuts(name)
        if not cuts:
            return array[rows or ...] if rows or isinstance(array, LazyParameter) else array
        if isinstance(array, LazyParameter) and array.home.kind is not None:
            array, places = array.some(*cuts[0])
            cuts[0] = cuts[0][0], [*places]
        if isinstance(array, Quantized):
            for axis, ranges in cuts:
                array = self._cut(name, array, ranges, axis)
            return array
        ends = dict(cuts)
        if rows is not None:
            ends[0] = _within(ends[0], rows) if 0 in ends else [rows]
        every = [ends.get(axis, [slice(None)]) for axis in range(max(ends) + 1)]
        part = _taken(array, every)
        return part if any(len(ranges) > 1 for ranges in every) else part.copy()

    def _cut(self, name: str, weight: Quantized, ranges: Sequence[slice], axis: int) -> Quantized:
        """Return slices of a quantized weight along an axis; errors name the parameter."""
        if isinstance(weight, Ternary):
            weight = copy(weight)
            weight.largest = partial(self.comm.all_reduce, op="max") if axis else None
        try:
            return weight.cut(axis, ranges)
        except ConfigError as error:
            raise ConfigError(f"Division: {name}: {error}") from None

    def gathered(self, name: str, own: Array) -> Array:
        """Return a whole parameter from the parts of all ranks; all ranks must call it."""
        for group in self.groups:
            own = self._gathered(name, own, group)
        return own

    def _gathered(self, name: str, own: Array, group: Communicator) -> Array:
        """Return a parameter gathered from the parts of one group's ranks."""
        cuts = [cut for rank in range(group.size) if (cut := self.cut(name, group, rank))]
        if not cuts:
            return own
        axis, targets = cuts[0][0], [target for _, ranges in cuts for target in ranges]
        parts, start = group.all_gather(own, axis), 0
        size = max(target.stop for target in targets)
        whole = np.empty_like(own, shape=(*own.shape[:axis], size, *own.shape[axis + 1 :]))
        for target in targets:
            stop = start + target.stop - target.start
            whole[along(axis, target)] = parts[along(axis, slice(start, stop))]
            start = stop
        return whole

    def used(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters for a forward pass; backward sums shared gradients over ranks."""
        if self.comm.size == 1:
            return {**parameters}
        return {name: self._used(name, value) for name, value in parameters.items()}

    def _used(self, name: str, value: Any) -> Any:
        """Return one parameter; backward sums its gradient over the ranks that share it."""
        module, kind = self._split(name)
        if module in INPUTS:
            if kind == "bias":  # each rank adds its share, before the sum over ranks
                return scale(summed_back(value, self.comm), factor=1 / self.comm.size)
            return summed_back(value, self.comm) if kind == UP else value
        per_head = module in ("q_norm", "k_norm") and self.whole.query_key_norm == "head"
        chooses = self.whole.experts is not None and module in self.whole.experts.routers
        if per_head or chooses or (kind == DOWN and module not in SHARED) or ".act_fn." in name:
            return summed_back(value, self.comm)
        if self.copies is not None and module in ("k_proj", "v_proj", "k_norm"):
            return summed_back(value, self.copies)
        if self.copies is not None and module == "qkv_proj":
            rows = self.kept(name, slice(self.config.heads * self.config.dim, None))
            return summed_back(value, self.copies, rows)
        return value

    def ends(self, name: str) -> bool:
        """Return whether a parameter belongs to a branch's last layer, whose inputs are divided."""
        return self._split(name)[0] in INPUTS

    def shares(self, name: str) -> list[tuple[slice, float]]:
        """Return rows and their factor in sums over ranks: 1 / number of ranks with these rows."""
        whole = [group for group in self.groups if self.cut(name, group) is None]
        share = 1 / math.prod(group.size for group in whole)
        if name == EMBEDDING and self.stages is not None and self.stages.ends is not None:
            share /= 2  # the first and the last stage store it
        module = self._split(name)[0]
        if self.comm in whole or module not in ("qkv_proj", "k_proj", "v_proj", "k_norm"):
            return [(slice(None), share)]
        queries = self.config.heads * self.config.dim if module == "qkv_proj" else 0
        return [(slice(0, queries), share), (slice(queries, None), share / self.times)]

    def norm(self, name: str, x: Any, weight: Any) -> Any:
        """Return an RMS norm over an axis that ranks divide: heads or the inner size."""
        return divided_rms_norm(
            x,
            weight,
            self.shapes[name][0],
            comm=self.comm,
            eps=self.config.eps,
            offset=self.config.norm_offset,
            copies=self.times if self._split(name)[0] == "k_norm" else 1,
        )


def bits(division: Division | None, name: str, x: Any, weight: Any, bias: Any) -> Any:
    """Return the output of a ``bit_linear``, scaled by the scale of the whole weight."""
    if division is None or division.comm.size == 1:
        return bit_linear(x, weight, bias=bias)
    return divided_bit_linear(
        x,
        weight,
        bias,
        comm=division.comm,
        size=math.prod(division.shapes[name]),
        shares=division.shares(name),
        inputs=division.ends(name),
    )


def entered(division: Division | None, x: Any) -> Any:
    """Return the input x of a branch; backward sums its gradient over ranks."""
    return x if division is None else summed_back(x, division.comm)


def joined(division: Division | None, branch: Any) -> Any:
    """Return the output of a branch: the sum of the terms of all ranks."""
    return branch if division is None else all_reduce(branch, division.comm)


def divided_adapter(adapter: Adapter, division: Division | None) -> Adapter:
    """Return this rank's part of an adapter."""
    if division is None:
        return adapter
    if any(name.endswith(MAGNITUDE) for name in adapter.parameters):
        problem = "DoRA needs norms of whole rows, and ranks divide rows"
        raise ConfigError(f"Division: {problem}; use LoRA")
    if adapter.into is not None:
        problem = f"the adapter is trained through {adapter.into.kind}, which ranks would cut"
        raise ConfigError(f"Division: {problem}; divide the batch or its tokens, or merge it")
    if adapter.initial:
        problem = "the adapter was initialized from the weights, which ranks divide"
        raise ConfigError(f"Division: {problem}; save the adapter, and load the saved one")
    if any(name.endswith(f".{BIAS}") for name in adapter.parameters):
        raise ConfigError("Division: the adapter has biases (lora_bias); load the model whole")
    tables = [name for name in adapter.outer if division._split(name)[0] != "score"]
    if tables:
        problem = f"the adapter trains {module_of(tables[0])}, of which ranks store parts"
        cure = "load the model whole, or divide it by parts (Zero3) or the batch alone"
        raise ConfigError(f"Division: {problem}; {cure}")
    for adapted in adapter.stacks.values():
        stack = adapted.stack
        own_rank = len(adapter.parameters[adapted.down]) // stack.shape[0]
        if division.adapted.setdefault(stack.module, (stack, own_rank)) != (stack, own_rank):
            problem = f"{stack.module} had an adapter of another stack, or of another LoRA rank"
            raise ConfigError(f"Division: {problem}; load the model again, with one adapter")
    stored = {n: a for n, a in adapter.parameters.items() if division.holds(n)}
    own = adapter.holding({name: division.own(name, array) for name, array in stored.items()})
    for name, adapted in adapter.stacks.items():
        count, outputs, inputs = division.shape(name)
        stack = adapted.stack._replace(shape=(count, outputs, inputs))
        own.stacks = own.stacks | {name: adapted._replace(stack=stack)}
    return own


@contextmanager
def apart(division: Division | None) -> Iterator[None]:
    """Return a context in which the router's loss counts only the rank's own tokens."""
    if division is None:
        yield
        return
    before, division.balanced = division.balanced, None
    try:
        yield
    finally:
        division.balanced = before


def check_experts(config: Config, comm: Communicator) -> None:
    """Raise a ConfigError unless ranks can divide the experts of a model."""
    cure = "divide the batch (data parallelism)"
    problem = ""
    if config.experts is None:
        problem = f"a {config.model_type} has no experts for {comm.size} ranks"
    elif config.experts.count < comm.size:
        problem = f"{config.experts.count} experts are not enough for {comm.size} ranks"
        cure = f"use at most {config.experts.count}"
    if problem:
        raise ConfigError(f"Division: {problem}; {cure}")


def check_divides(config: Config, ranks: int) -> None:
    """Raise a ConfigError unless a model can be divided among this number of ranks."""
    heads, kv_heads = config.heads, config.kv_heads
    fits = dividing(heads, kv_heads)
    if ranks not in fits:
        listed = ", ".join(map(str, fits))
        problem = f"{ranks} ranks cannot divide {heads} heads and {kv_heads} KV heads"
        raise ConfigError(f"Division: {problem}; use {listed} ranks")
    if config.query_key_norm == "modules" and ranks > 1:
        problem = "each head of queries and keys has a norm of its own, which ranks do not divide"
        raise ConfigError(f"Division: {problem}; use a pipeline, or Zero3")
    sizes = {"inner size": config.inner, "vocabulary": config.vocab}
    if config.experts is not None:
        sizes["inner size of an expert"] = config.experts.inner
    for name, size in sizes.items():
        if size < ranks:
            problem = f"the {name} of {size} is not enough for {ranks} ranks"
            raise ConfigError(f"Division: {problem}; use at most {size}")


def _taken(array: Any, ends: Sequence[list[slice]], *key: slice) -> Any:
    """Return slices of an array along its first axes; slices of one axis are concatenated."""
    if not ends:
        return array[key]
    parts = [_taken(array, ends[1:], *key, piece) for piece in ends[0]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, len(key))


def _within(ranges: list[slice], rows: slice) -> list[slice]:
    """Return the slices of an array that are ``rows`` of the concatenated ranges."""
    slices, before = [], 0
    for piece in ranges:
        first, stop = (piece.start + max(0, row - before) for row in (rows.start, rows.stop))
        if first < min(stop, piece.stop):
            slices.append(slice(first, min(stop, piece.stop)))
        before += piece.stop - piece.start
    return slices or [slice(0, 0)]


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
