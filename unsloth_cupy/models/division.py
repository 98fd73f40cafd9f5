"""Which part of each parameter a rank holds, where a model is divided among ranks.

Projections into heads and into the inner size are divided by columns, those out of them by rows,
embedding and head by words.  (Shoeybi et al., Megatron-LM, 2019.)

    q_proj, k_proj, v_proj, gate_proj, up_proj      the rows of the weight, and the bias
    o_proj, down_proj                               the columns of the weight
    embed_tokens, lm_head                           words

Heads must divide by the ranks.  Where ranks are more than the heads of keys and values, several
ranks hold the same ones; the vocabulary is divided as evenly as can be, the inner size so by 64 at
a time, where it is a multiple of that: no block of a weight of 4 bits is cut then.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..ops.elements.arithmetic import scale
from ..ops.quantized.bit_linear import bit_linear
from ..ops.quantized.ternary import Ternary
from ..ops.quantized.weight import Quantized
from ..parallel.communicator import Communicator, along, part
from ..parallel.partial import divided_bit_linear, divided_rms_norm, summed_back
from ..parallel.tensor import all_reduce
from ..parallel.ulysses import dividing
from .adapter import DOWN, MAGNITUDE, PREFIX, UP, Adapter
from .config import Config
from .layers import EMBEDDING, Stages, part_of_inner
from .unread import Unread

INPUTS = ("o_proj", "down_proj")  # the layers that end a branch
Cut = tuple[int, list[slice]]  # an axis, and what lies end to end on it


class Division:
    """A model divided among the ranks of a communicator, by heads, inner size and words.

    Attributes
    ----------
    whole : Config
        Of the model.
    config : Config
        Of what this rank computes: its heads, its part of the inner size, and the whole vocabulary.
    comm : Communicator
        The ranks that share the model.
    copies : Communicator or None
        The ranks that hold the same heads of keys and values; None where it is this one alone.
    stages : Stages or None
        The blocks of this rank, where the ranks of a pipeline divide them.
    kept : callable
        Where rows of a parameter by its name lie in what the model has of it: all are there, unless
        a Zero3 keeps a part.

    Raises
    ------
    ConfigError
        Heads do not divide by the ranks, or a part of something would be empty.
    """

    def __init__(self, config: Config, comm: Communicator, stages: Stages | None = None) -> None:
        self.whole, self.comm, self.stages, ranks = config, comm, stages, comm.size
        check_divides(config, ranks)
        self.times = max(1, ranks // config.kv_heads)  # ranks that hold the same keys and values
        inner = part_of_inner(config.inner, comm, comm.rank)
        self.config = replace(
            config,
            heads=config.heads // ranks,
            kv_heads=max(1, config.kv_heads // ranks),
            inner=inner.stop - inner.start,
        )
        self.copies = comm.split(comm.rank // self.times) if self.times > 1 else None
        self.shapes = config.shapes()
        self.kept: Callable[[str, slice], slice] = lambda name, rows: rows

    def holds(self, name: str) -> bool:
        """Say whether this rank has a part of a parameter."""
        return self.stages is None or bool(self.stages.chunk_of(name.removeprefix(PREFIX)))

    def cut(self, name: str, rank: int | None = None) -> Cut | None:
        """Return where a rank's part of a parameter lies; None for what each holds whole."""
        if self.comm.size == 1:
            return None
        module, kind = _split(name)
        rank = self.comm.rank if rank is None else rank
        if module in INPUTS:
            inputs = "q_proj" if module == "o_proj" else "up_proj"
            return (1, self._ranges(inputs, rank)) if kind in ("weight", DOWN) else None
        if kind == DOWN or not (found := self._ranges(module, rank)):
            return None
        return 0, found

    def _ranges(self, module: str, rank: int) -> list[slice]:
        """Return which outputs of a layer, or columns of a norm, a rank holds."""
        whole, ranks = self.whole, self.comm.size
        queries, keys = whole.heads * whole.dim, whole.kv_heads * whole.dim
        each = queries // ranks
        q = slice(rank * each, (rank + 1) * each)
        first = rank // self.times * (keys * self.times // ranks)
        k = slice(first, first + keys * self.times // ranks)
        inner = part_of_inner(whole.inner, self.comm, rank)
        words = part(whole.vocab, self.comm, rank)
        known = {"q_proj": [q], "attn_sub_norm": [q], "k_proj": [k], "v_proj": [k]}
        known |= {"qkv_proj": [q, _moved(k, queries), _moved(k, queries + keys)]}
        known |= {"gate_up_proj": [inner, _moved(inner, whole.inner)]}
        known |= {name: [inner] for name in ("gate_proj", "up_proj", "ffn_sub_norm")}
        known |= {name: [words] for name in ("embed_tokens", "lm_head")}
        if whole.query_key_norm == "projection":
            known |= {"q_norm": [q], "k_norm": [k]}
        return known.get(module, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter."""
        found, whole = self.cut(name), self.shapes[name]
        if found is None:
            return whole
        size = sum(where.stop - where.start for where in found[1])
        return (*whole[: found[0]], size, *whole[found[0] + 1 :])

    def whole_shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a parameter, or of one of an adapter, of which a rank has a part."""
        found = self.cut(name, self.comm.size - 1)
        if found is None:
            return tuple(own)
        axis, ranges = found
        return (*own[:axis], max(where.stop for where in ranges), *own[axis + 1 :])

    def own(self, name: str, array: Any, rows: slice | None = None) -> Any:
        """Return this rank's part of a parameter, an array or a quantized weight.

        ``array`` may be an Unread, of which no more is read than the part, or than some rows of it.
        """
        found = self.cut(name)
        if found is None:
            return array if rows is None and not isinstance(array, Unread) else array[rows or ...]
        axis, ranges = found
        if isinstance(array, Unread) and array.home.kind is not None:
            return self._cut(name, *array.some(axis, ranges), axis)
        if isinstance(array, Quantized):
            return self._cut(name, array, ranges, axis)
        if rows is not None and axis:
            parts = [array[rows, where] for where in ranges]
        else:
            ranges = ranges if rows is None else _within(ranges, rows)
            parts = [array[along(axis, where)] for where in ranges]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis)

    def _cut(self, name: str, weight: Quantized, ranges: Sequence[slice], axis: int) -> Quantized:
        if isinstance(weight, Ternary):
            weight = copy(weight)
            weight.largest = partial(self.comm.all_reduce, op="max") if axis else None
        try:
            return weight.cut(axis, ranges)
        except ConfigError as error:
            raise ConfigError(f"Division: {name}: {error}") from None

    def gathered(self, name: str, own: Array) -> Array:
        """Return a whole parameter; all ranks call it."""
        found = self.cut(name)
        if found is None:
            return own
        axis, _ = found
        cuts = [self.cut(name, rank) for rank in range(self.comm.size)]
        places = [where for cut in cuts if cut for where in cut[1]]
        every, start = self.comm.all_gather(own, axis), 0
        size = max(where.stop for where in places)
        whole = np.empty_like(own, shape=(*own.shape[:axis], size, *own.shape[axis + 1 :]))
        for where in places:
            stop = start + where.stop - where.start
            whole[along(axis, where)] = every[along(axis, slice(start, stop))]
            start = stop
        return whole

    def used(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters as a forward pass takes them: their gradients are then whole."""
        return {name: self._used(name, value) for name, value in parameters.items()}

    def _used(self, name: str, value: Any) -> Any:
        module, kind = _split(name)
        if module in INPUTS:
            if kind == "bias":  # each rank adds its share, before the sum over ranks
                return scale(summed_back(value, self.comm), factor=1 / self.comm.size)
            return summed_back(value, self.comm) if kind == UP else value
        heads = module in ("q_norm", "k_norm") and self.whole.query_key_norm == "head"
        if heads or kind == DOWN:
            return summed_back(value, self.comm)
        if self.copies is not None and module in ("k_proj", "v_proj", "k_norm"):
            return summed_back(value, self.copies)
        if self.copies is not None and module == "qkv_proj":
            rows = self.kept(name, slice(self.config.heads * self.config.dim, None))
            return summed_back(value, self.copies, rows)
        return value

    def shares(self, name: str) -> list[tuple[slice, float]]:
        """Return what each row of a parameter counts here: 1 by how many ranks hold the same."""
        if name == EMBEDDING and self.stages is not None and self.stages.ends is not None:
            return [(slice(None), 0.5)]
        if self.cut(name) is None:
            return [(slice(None), 1 / self.comm.size)]
        if _split(name)[0] == "qkv_proj":
            queries = self.config.heads * self.config.dim
            return [(slice(0, queries), 1.0), (slice(queries, None), 1 / self.times)]
        copied = _split(name)[0] in ("k_proj", "v_proj", "k_norm")
        return [(slice(None), 1 / self.times if copied else 1.0)]

    def norm(self, name: str, x: Any, weight: Any) -> Any:
        """Return a norm over heads or the inner size, which are divided among ranks."""
        return divided_rms_norm(
            x,
            weight,
            self.shapes[name][0],
            comm=self.comm,
            eps=self.config.eps,
            offset=self.config.norm_offset,
            copies=self.times if _split(name)[0] == "k_norm" else 1,
        )


def bits(division: Division | None, name: str, x: Any, weight: Any, bias: Any) -> Any:
    """Return a layer that is rounded at every call, by what all ranks hold of its weight."""
    if division is None or division.comm.size == 1:
        return bit_linear(x, weight, bias=bias)
    return divided_bit_linear(
        x,
        weight,
        bias,
        comm=division.comm,
        size=math.prod(division.shapes[name]),
        shares=division.shares(name),
        inputs=_split(name)[0] in INPUTS,
    )


def entered(division: Division | None, x: Any) -> Any:
    """Return what a branch begins with, which ranks use each in another way."""
    return x if division is None else summed_back(x, division.comm)


def joined(division: Division | None, branch: Any) -> Any:
    """Return the end of a branch, of which each rank has made its part."""
    return branch if division is None else all_reduce(branch, division.comm)


def divided_adapter(adapter: Adapter, division: Division | None) -> Adapter:
    """Return this rank's part of an adapter."""
    if division is None:
        return adapter
    if any(name.endswith(MAGNITUDE) for name in adapter.parameters):
        problem = "the norms of DoRA are over whole rows, and are not divided among ranks"
        raise ConfigError(f"Division: {problem}; use LoRA")
    named = {n: a for n, a in adapter.parameters.items() if division.holds(n)}
    own = {name: division.own(name, array) for name, array in named.items()}
    return Adapter(adapter.settings, own)


def check_divides(config: Config, ranks: int) -> None:
    """Raise a ConfigError unless a model can be divided among so many ranks."""
    heads, kv_heads = config.heads, config.kv_heads
    fits = dividing(heads, kv_heads)
    if ranks not in fits:
        listed = ", ".join(map(str, fits))
        problem = f"{heads} heads, with {kv_heads} of keys, are not a multiple of {ranks} ranks"
        raise ConfigError(f"Division: {problem}; divide the model among {listed}")
    for name, size in (("inner size", config.inner), ("vocabulary", config.vocab)):
        if size < ranks:
            problem = f"the {name} of {size} is not enough for {ranks} ranks"
            raise ConfigError(f"Division: {problem}; use at most {size}")


def _within(ranges: list[slice], rows: slice) -> list[slice]:
    """Return what lies in some rows of ranges that lie end to end."""
    found, before = [], 0
    for where in ranges:
        first, stop = (where.start + max(0, at - before) for at in (rows.start, rows.stop))
        if first < min(stop, where.stop):
            found.append(slice(first, min(stop, where.stop)))
        before += where.stop - where.start
    return found or [slice(0, 0)]


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by)


def _split(name: str) -> tuple[str, str]:
    """Return the layer or norm that a parameter is of, and which one it is there."""
    for kind in (DOWN, UP, MAGNITUDE, "weight", "bias"):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}").rpartition(".")[2], kind
    return name, ""
