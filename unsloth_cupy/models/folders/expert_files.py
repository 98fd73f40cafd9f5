"""Parameters that files have in another form, as experts, and the tensors that they are written as.

model.layers.0.mlp.experts.gate_up_proj                  (experts, 2 inner, hidden) in memory
model.layers.0.mlp.experts.7.up_proj.weight              (inner, hidden), one for each expert
model.layers.0.mlp.experts.gate_up_proj                  (experts, hidden, 2 inner) in gpt-oss,
                                                         columns of gate and up in turns
model.layers.0.mlp.experts.gate_up_proj_blocks, _scales  its rows, (2 inner, hidden), in MXFP4
model.layers.0.linear_attn.q_conv1d.weight               rows of conv1d.weight, as k_ and v_conv1d
model.layers.0.self_attn.A_log                           forget_gate.A_log in kimi_linear
model.layers.0.attention_layer_norm.weight               input_layernorm.weight in olmo_hybrid
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...ops.quantized.blocks import BLOCK
from ...ops.quantized.mxfp4 import Mxfp4
from ...ops.quantized.nf4 import Nf4
from ...ops.quantized.weight import Quantized
from ..configs.config import CORRECTION, STACKS, Config, Delta, Experts
from ..configs.names import BACKBONE, EMBEDDINGS, TABLE, TEXT, is_stack
from ..quantizer import KINDS
from .quantized_weights import packed_stacks

PACKED = ("_blocks", "_scales")


class Place(NamedTuple):
    """A tensor of a file: the parameter that it is, or that it is a part of.

    ``part`` counts gate and up of the first expert, then those of the next.  The rows of a stack
    ``in_turns`` are of gate and up; a ``turned`` one is (experts, in, out).
    """

    parameter: str
    shape: tuple[int, ...]  # in the file
    part: int = 0
    parts: int = 1
    in_turns: bool = False
    turned: bool = False
    packed: bool = False
    row: bool = False  # of a matrix
    rows: slice | None = None  # of the parameter; other programs divide them otherwise

    def of(self, array: Array) -> Array:
        """Return the tensor, from the whole parameter."""
        if self.rows is not None:
            return array[self.rows]
        if self.parts > 1:
            whole: Array = array.reshape(self.parts, *self.shape)
            return whole[self.part]
        if self.in_turns:
            halves = array.reshape(len(array), 2, -1, *array.shape[2:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if self.row:
            return array[None]
        return array.swapaxes(1, 2) if self.turned else array

    def experts(self, packed: Array) -> Array:
        """Return the bytes of all experts, from those in a file."""
        if not self.in_turns:
            return packed
        return np.concatenate([packed[:, ::2], packed[:, 1::2]], axis=1)

    def expert(self, one: Array) -> Array:
        """Return the rows of an expert, from those in a file."""
        one = one.T if self.turned else one
        return np.concatenate([one[::2], one[1::2]]) if self.in_turns else one


class Stack(NamedTuple):
    """The tensors of a parameter in files: where each is, in the order of their parts.

    Of those that other programs quantized, ``made`` has a function from files to the dense matrix.
    """

    place: Place
    homes: tuple[tuple[str, str], ...]  # file and name
    made: Mapping[int, Callable[[Mapping[str, Any]], Array]] = {}  # by the part

    def read(
        self, files: Mapping[str, Any], shape: tuple[int, ...], dtype: Any, some: Any, *rest: slice
    ) -> Array:
        """Return the experts of a slice, or with an ellipsis the whole parameter, in a dtype.

        ``rest`` are slices along the other axes; of tensors of another form, one expert at a time
        is read whole.  Those in MXFP4 are read whole, by ``packed``.
        """
        if self.place.rows is not None:
            whole = np.concatenate([files[file].get_tensor(name) for file, name in self.homes])
            parameter: Array = whole.astype(dtype)
            return parameter[some]
        if self.place.row:
            ((file, name),) = self.homes
            row: Array = files[file].get_tensor(name)[0].astype(dtype)
            return row[some]
        experts = range(shape[0])[some if isinstance(some, slice) else slice(None)]
        ends = [range(n)[where] for n, where in zip(shape[1:], rest, strict=False)]
        sizes = (*map(len, ends), *shape[1 + len(ends) :])
        out: Array = np.empty((len(experts), *sizes), dtype)
        place, parts = self.place, self.place.parts // shape[0]
        for target, expert in zip(out, experts, strict=True):
            if place.parts == 1:
                ((file, name),) = self.homes
                target[...] = place.expert(files[file].get_slice(name)[expert])[rest]
                continue
            rows, at = ends[0] if ends else range(shape[1]), 0
            for number in range(parts):
                part, before = expert * parts + number, number * place.shape[0]
                file, name = self.homes[part]
                first = max(rows.start - before, 0)
                stop = max(first, min(rows.stop - before, place.shape[0]))
                where = slice(first, stop), *rest[1:]
                if first < stop:
                    function = self.made.get(part)
                    one = files[file].get_slice(name) if function is None else function(files)
                    target[at : at + stop - first] = one[where]
                at += stop - first
        return out

    def packed(
        self, name: str, files: Mapping[str, Any], dtype: Any, own: slice = slice(None)
    ) -> Mxfp4:
        """Return experts as they are in MXFP4, whose matrices have a dtype; errors name it."""
        read = [files[file].get_slice(stored)[own] for file, stored in self.homes]
        state = {key: self.place.experts(each) for key, each in zip(PACKED, read, strict=True)}
        try:
            return Mxfp4.from_state(state, dtype)
        except ConfigError as error:
            raise ConfigError(f"tensor {name!r}: {error}") from None


def places(config: Config) -> dict[str, Place]:
    """Return the tensors that a file may hold in place of parameters, by their names there."""
    tensors: dict[str, Place] = {}
    experts = config.experts
    for layer in range(config.layers) if experts is not None else ():
        if experts is not None and experts.sparse[layer]:
            prefix = f"model.layers.{layer}."
            outer = BACKBONE + prefix.removeprefix(TEXT) if config.single else prefix
            tensors |= {outer + name: place for name, place in _of_layer(config, experts, prefix)}
    if config.single:
        tensors |= dict(_of_backbone(config))
    if config.delta is not None and config.delta.stored in ("apart", "short"):
        tensors |= dict(_of_convolutions(config, config.delta))
    if config.delta is not None and config.delta.stored == "apart":
        tensors |= dict(_of_olmo(config))
    if config.delta is not None and config.delta.stored == "short":
        tensors |= dict(_of_kimi(config, config.delta))
    return tensors


def _of_backbone(config: Config) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of models whose files have Mamba's names."""
    for name, shape in config.shapes().items():
        if name.startswith(TEXT) and not is_stack(name):
            own = EMBEDDINGS if name == TABLE else name
            yield BACKBONE + own.removeprefix(TEXT), Place(name, shape)


def _of_convolutions(config: Config, rule: Delta) -> Iterator[tuple[str, Place]]:
    """Yield the convolutions of queries, keys and values, which are one in memory."""
    keys, width = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    ends = (0, keys, 2 * keys, 2 * keys + width)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.{config.names.recurrent}."
        for name, (start, stop) in zip("qkv", pairwise(ends), strict=True):
            shape = (stop - start, 1, rule.taps)
            place = Place(f"{prefix}conv1d.weight", shape, rows=slice(start, stop))
            if not config.attends(layer):
                yield f"{prefix}{name}_conv1d.weight", place


def _of_kimi(config: Config, rule: Delta) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of a kimi_linear that have other names."""
    shapes = dict(rule.shapes(config.hidden))
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {} if config.attends(layer) else shapes.items():
            if name.startswith("forget_gate."):
                module = f"{prefix}{config.names.recurrent}."
                yield module + name.removeprefix("forget_gate."), Place(module + name, shape)
        if config.experts is None or not config.experts.sparse[layer]:
            sizes = (config.inner, config.hidden)
            for name in ("gate", "up", "down"):
                shape = sizes if name != "down" else sizes[::-1]
                place = Place(f"{prefix}mlp.{name}_proj.weight", shape)
                yield f"{prefix}block_sparse_moe.{name}_proj.weight", place


def _of_olmo(config: Config) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of an olmo_hybrid that have other names."""
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        after = f"{prefix}post_attention_layernorm.weight"
        yield f"{prefix}feedforward_layer_norm.weight", Place(after, (config.hidden,))
        if config.attends(layer):
            continue
        before = f"{prefix}input_layernorm.weight"
        yield f"{prefix}attention_layer_norm.weight", Place(before, (config.hidden,))


def _of_layer(config: Config, experts: Experts, prefix: str) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of a layer, by their names in it."""
    shapes = experts.stacks(config.hidden)
    for own, shape in shapes.items():
        first = own.removesuffix("_bias").endswith(STACKS[0])
        if experts.transposed and len(shape) == 3:
            turned = shape[0], shape[2], shape[1]
            yield own, Place(prefix + own, turned, in_turns=first, turned=True)
            scales = *shape[:2], shape[2] // BLOCK
            for key, size in zip(PACKED, ((*scales, BLOCK // 2), scales), strict=True):
                yield own + key, Place(prefix + own, size, in_turns=first, packed=True)
        elif experts.transposed and first:
            yield own, Place(prefix + own, shape, in_turns=True)
    for own, names in experts.files.items():
        if "{}" not in names[0]:
            row = experts.correction_row and own.endswith(CORRECTION)
            whole = (1, experts.count) if row else shapes.get(own, ())
            yield names[0], Place(prefix + own, whole, row=row)
            continue
        count, rows, columns = shapes[own]
        of_part = rows // len(names), columns
        for expert in range(count):
            for number, name in enumerate(names):
                at = expert * len(names) + number
                yield name.format(expert), Place(prefix + own, of_part, at, count * len(names))


def file_tensors(
    config: Config, own: Collection[str] = (), packed: Collection[str] = ()
) -> dict[str, dict[str, Place]]:
    """Return the tensors that parameters are written as, by parameter and by their names.

    Parameters in ``own`` are written under their own names, as others are that are not here; those
    in ``packed`` are in MXFP4.
    """
    tensors: dict[str, dict[str, Place]] = {}
    for name, place in places(config).items():
        if place.packed == (place.parameter in packed) and place.parameter not in own:
            tensors.setdefault(place.parameter, {})[name] = place
    if config.delta_norms is not None:  # blocks with attention have the names of others
        for layer in filter(config.attends, range(config.layers)):
            tensors.pop(f"model.layers.{layer}.post_attention_layernorm.weight", None)
    return tensors


def saved_tensors(
    config: Config, parameters: Mapping[str, Any], own: Collection[str]
) -> dict[str, dict[str, Place]]:
    """Return ``file_tensors`` for parameters that may be quantized.

    Raises
    ------
    ConfigError
        Files of this family have no form of such a stack.
    """
    stacks = {n: value for n, value in parameters.items() if is_stack(n)}
    packed = packed_stacks(stacks)
    coded = {n for n, value in stacks.items() if isinstance(value, Quantized)} - packed
    turned = config.experts is not None and config.experts.transposed
    known = packed if turned else {n for n in coded if isinstance(stacks[n], Nf4)}
    if lost := sorted((packed | coded) - known):
        kind = stacks[lost[0]].KIND
        problem = f"files of a {config.model_type} have no experts in {kind}, as {lost[0]} is"
        cure = "save_adapter(folder) writes what was learned, merge(folder, out) the dense sums"
        raise ConfigError(f"save: {problem}; {cure}")
    return file_tensors(config, {*own, *coded}, packed)


def kinds_of_experts(config: Config) -> tuple[str, ...]:
    """Return the kinds of quantized experts that files of a family have, as ``saved_tensors``."""
    turned = config.experts is not None and config.experts.transposed
    stacked = (name for name, kind in KINDS.items() if kind.stack_in_folders)
    return tuple(name for name in stacked if KINDS[name].only_experts == turned)


def in_file(value: Any, tensors: Mapping[str, Place]) -> dict[str, Array]:
    """Return the arrays of the tensors that a parameter is written as."""
    if not getattr(value, "OF_STACKS", False):
        return {name: place.of(value) for name, place in tensors.items()}
    state = value.state()
    ends = {name: next(end for end in PACKED if name.endswith(end)) for name in tensors}
    return {name: place.of(state[f"weight{ends[name]}"]) for name, place in tensors.items()}
