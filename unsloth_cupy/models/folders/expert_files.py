"""Parameters with another form in files, such as experts, and the tensors they are written as.

model.layers.0.mlp.experts.gate_up_proj                  (experts, 2 inner, hidden) in memory
model.layers.0.mlp.experts.7.up_proj.weight              (inner, hidden), one for each expert
model.layers.0.mlp.experts.gate_up_proj                  (experts, hidden, 2 inner) in gpt-oss,
                                                         columns alternate between gate and up
model.layers.0.mlp.experts.gate_up_proj_blocks, _scales  its rows, (2 inner, hidden), in MXFP4
model.layers.0.linear_attn.q_conv1d.weight               rows of conv1d.weight, as k_ and v_conv1d
model.layers.0.self_attn.A_log                           forget_gate.A_log in kimi_linear
model.layers.0.attention.dense.weight                    self_attn.o_proj.weight in bailing_hybrid
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
from ..configs.draft_heads import copies, in_files, with_blocks
from ..configs.names import (
    BACKBONE,
    BARE,
    EMBEDDINGS,
    LABELLED,
    TABLE,
    TEXT,
    is_stack,
    stored_name,
)
from ..quantizer import KINDS
from .quantized_weights import packed_stacks

PACKED = ("_blocks", "_scales")


class Place(NamedTuple):
    """A tensor of a file that is a parameter in another form, or a part of one.

    ``part`` counts gate and up of the first expert, then of the next.  ``in_turns``: rows of the
    stack alternate between gate and up.  ``turned``: the file has (experts, in, out).
    """

    parameter: str
    shape: tuple[int, ...]  # in the file
    part: int = 0
    parts: int = 1
    in_turns: bool = False
    turned: bool = False
    packed: bool = False
    row: bool = False  # the file has a matrix of one row
    empty: bool = False  # of a zero expert: transformers has a matrix, which computes nothing
    rows: slice | None = None  # the rows of the parameter that the tensor holds
    renamed: bool = False  # the tensor has another name, and is otherwise the parameter

    def of(self, array: Array) -> Array:
        """Return the tensor for the file, from the whole parameter."""
        if self.rows is not None:
            return array[self.rows]
        if self.empty:
            return np.zeros_like(array, shape=self.shape)
        if self.parts > 1:
            whole: Array = array.reshape(self.parts, *self.shape)  # (parts, rows, in)
            return whole[self.part]
        if self.in_turns:
            halves = array.reshape(len(array), 2, -1, *array.shape[2:])  # (experts, 2, inner, ...)
            array = halves.swapaxes(1, 2).reshape(array.shape)  # (experts, inner * 2, ...)
        if self.row:
            return array[None]
        return array.swapaxes(1, 2) if self.turned else array

    def experts(self, packed: Array) -> Array:
        """Return the bytes of all experts with gate before up, from a file's bytes."""
        if not self.in_turns:
            return packed
        return np.concatenate([packed[:, ::2], packed[:, 1::2]], axis=1)

    def expert(self, one: Array) -> Array:
        """Return the matrix of an expert, from a file's matrix."""
        one = one.T if self.turned else one
        return np.concatenate([one[::2], one[1::2]]) if self.in_turns else one


class Stack(NamedTuple):
    """Where the tensors of a parameter are in files, in the order of their parts.

    For parts that other programs quantized, ``dense`` has a function that computes the dense matrix
    from open files.
    """

    place: Place
    homes: tuple[tuple[str, str], ...]  # file and name
    dense: Mapping[int, Callable[[Mapping[str, Any]], Array]] = {}  # by part

    def read(
        self, files: Mapping[str, Any], shape: tuple[int, ...], dtype: Any, first: Any, *rest: slice
    ) -> Array:
        """Return the experts of the slice ``first``, or all if it is an ellipsis, in a dtype.

        ``rest`` are slices along the other axes.  From tensors of another form, experts are read
        whole, one at a time.  ``packed`` reads MXFP4.
        """
        if self.place.rows is not None:
            whole = np.concatenate([files[file].get_tensor(name) for file, name in self.homes])
            parameter: Array = whole.astype(dtype)
            return parameter[first]
        if self.place.row:
            ((file, name),) = self.homes
            row: Array = files[file].get_tensor(name)[0].astype(dtype)
            return row[first]
        experts = range(shape[0])[first if isinstance(first, slice) else slice(None)]
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
                start = max(rows.start - before, 0)
                stop = max(start, min(rows.stop - before, place.shape[0]))
                where = slice(start, stop), *rest[1:]
                if start < stop:
                    function = self.dense.get(part)
                    one = files[file].get_slice(name) if function is None else function(files)
                    target[at : at + stop - start] = one[where]
                at += stop - start
        return out

    def packed(
        self, name: str, files: Mapping[str, Any], dtype: Any, own: slice = slice(None)
    ) -> Mxfp4:
        """Return experts in MXFP4 as stored; ``dtype`` is for results, ``name`` for errors."""
        read = [files[file].get_slice(stored)[own] for file, stored in self.homes]
        state = {key: self.place.experts(each) for key, each in zip(PACKED, read, strict=True)}
        try:
            return Mxfp4.from_state(state, dtype)
        except ConfigError as error:
            raise ConfigError(f"tensor {name!r}: {error}") from None


def places(config: Config) -> dict[str, Place]:
    """Return the tensors that a file may hold in place of parameters, by stored name."""
    tensors: dict[str, Place] = {}
    blocks = with_blocks(config)
    experts = blocks.experts
    for layer in range(blocks.layers) if experts is not None else ():
        if experts is not None and experts.sparse[layer]:
            prefix = config.prefix_of(layer)
            outer = BACKBONE + prefix.removeprefix(TEXT) if config.single else prefix
            tensors |= {outer + name: place for name, place in _of_layer(config, experts, prefix)}
    if config.single:
        tensors |= dict(_of_backbone(config))
    if config.delta is not None and (config.delta.by_channel or config.delta.stored == "apart"):
        tensors |= dict(_of_convolutions(config, config.delta))
    if config.delta is not None and config.delta.stored == "apart":
        tensors |= dict(_of_olmo(config))
    tensors |= dict(_without_prefix(config, {place.parameter for place in tensors.values()}))
    return dict(_renamed(config, tensors)) if config.in_files else tensors


def _without_prefix(config: Config, others: Collection[str]) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of encoders, and of bodies without a head, which have no prefix."""
    table, labelled = config.names.embeddings, {new: old for old, new in LABELLED.items()}
    if config.causal and config.body not in BARE:
        return
    prefix = "" if config.body in BARE else config.body  # a folder has the language model alone
    for name, shape in config.shapes().items():
        own = prefix + table if name == TABLE else stored_name(name, prefix)
        own = own if config.classifier == "score" else labelled.get(name, own)
        if own != name and name not in others:
            yield own, Place(name, shape)


def _renamed(config: Config, tensors: Mapping[str, Place]) -> Iterator[tuple[str, Place]]:
    """Yield tensors with the names of files: see ``in_files``."""
    others = {place.parameter for place in tensors.values()}
    own = {name: Place(name, shape) for name, shape in config.shapes().items()}
    for name, place in {**own, **tensors}.items():
        stored = name
        for part, new in config.in_files:
            stored = stored.replace(part, new)
        if name in tensors or (stored != name and name not in others):
            yield stored, place


def _of_backbone(config: Config) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of models whose files use Mamba's names."""
    for name, shape in config.shapes().items():
        if name.startswith(TEXT) and not is_stack(name):
            own = EMBEDDINGS if name == TABLE else name
            yield BACKBONE + own.removeprefix(TEXT), Place(name, shape)


def _of_convolutions(config: Config, rule: Delta) -> Iterator[tuple[str, Place]]:
    """Yield the convolutions of queries, keys and values, which are one parameter in memory."""
    keys, width = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    ends = (0, keys, 2 * keys, 2 * keys + width)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.{config.names.recurrent}."
        for name, (start, stop) in zip("qkv", pairwise(ends), strict=True):
            shape = (stop - start, 1, rule.taps)
            place = Place(f"{prefix}conv1d.weight", shape, rows=slice(start, stop))
            if not config.attends(layer):
                yield f"{prefix}{name}_conv1d.weight", place


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
    """Yield the tensors of a layer, by their names in the layer."""
    shapes = experts.stacks(config.hidden)
    for own, shape in shapes.items():
        first = own.removesuffix("_bias").endswith(STACKS[0])
        if experts.halves and len(shape) == 3:
            yield own, Place(prefix + own, (shape[0], shape[2], shape[1]), turned=True)
        elif experts.transposed and len(shape) == 3:
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


def _of_zero_experts(config: Config) -> Iterator[tuple[str, str, Place]]:
    """Yield (parameter, name in files, place) of transformers' matrices of zero experts."""
    experts = config.experts
    for layer in range(config.layers if experts is not None and experts.zero else 0):
        own = f"{experts.prefix}experts.{experts.names[0]}" if experts is not None else ""
        if experts is None or not experts.sparse[layer]:
            continue
        prefix = config.prefix_of(layer)
        place = Place(prefix + own, (experts.inner, config.hidden), empty=True)
        for expert in range(experts.count, experts.choices):
            for name in experts.files[own]:
                yield prefix + own, prefix + name.format(expert), place


def file_tensors(
    config: Config, own: Collection[str] = (), packed: Collection[str] = ()
) -> dict[str, dict[str, Place]]:
    """Return the tensors that parameters are written as: by parameter, then by stored name.

    Parameters in ``own``, and those absent from the result, are written under their own names;
    parameters in ``packed`` are in MXFP4.
    """
    tensors: dict[str, dict[str, Place]] = {}
    for name, place in places(config).items():
        if place.packed == (place.parameter in packed) and place.parameter not in own:
            tensors.setdefault(place.parameter, {})[name] = place
    for parameter, name, place in _of_zero_experts(config):
        if parameter in tensors:
            tensors[parameter][name] = place
    if config.delta_norms is not None:  # blocks with attention use the usual names
        for layer in filter(config.attends, range(config.layers)):
            tensors.pop(f"model.layers.{layer}.post_attention_layernorm.weight", None)
    return tensors | _of_draft_heads(config, tensors)


def _of_draft_heads(
    config: Config, tensors: Mapping[str, Mapping[str, Place]]
) -> dict[str, dict[str, Place]]:
    """Return the tensors of draft heads that have other names in files, and copies of tables."""
    shapes, forms = config.shapes(), dict[str, dict[str, Place]]()
    for table, names in copies(config).items():
        every = (table, *(in_files(config, name) for name in names))
        forms[table] = {name: Place(table, shapes[table], renamed=True) for name in every}
    for name, shape in shapes.items():
        if in_files(config, name) != name:
            own = tensors.get(name, {name: Place(name, shape, renamed=True)})
            forms[name] = {in_files(config, each): place for each, place in own.items()}
    return forms


def saved_tensors(
    config: Config, parameters: Mapping[str, Any], own: Collection[str]
) -> dict[str, dict[str, Place]]:
    """Return ``file_tensors`` for parameters that may be quantized.

    Raises
    ------
    ConfigError
        Files of this family cannot store such a stack.
    """
    stacks = {n: value for n, value in parameters.items() if is_stack(n)}
    packed = packed_stacks(stacks)
    coded = {n for n, value in stacks.items() if isinstance(value, Quantized)} - packed
    turned = config.experts is not None and config.experts.transposed
    known = packed if turned else {n for n in coded if isinstance(stacks[n], Nf4)}
    if refused := sorted((packed | coded) - known):
        kind = stacks[refused[0]].KIND
        problem = f"files of a {config.model_type} cannot store {refused[0]} in {kind}"
        cure = "save_adapter(folder) writes the adapter, merge(folder, out) the dense weights"
        raise ConfigError(f"save: {problem}; {cure}")
    return file_tensors(config, {*own, *coded}, packed)


def kinds_of_experts(config: Config) -> tuple[str, ...]:
    """Return the kinds of quantized experts that files of a family can store."""
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
