"""The tensors of a GGUF file that store a parameter: one for most, several for some.

model.layers.0.mlp.experts.gate_up_proj        blk.0.ffn_gate_exps.weight, blk.0.ffn_up_exps.weight
model.layers.0.linear_attn.in_proj_qkvz.weight blk.0.attn_qkv.weight, blk.0.attn_gate.weight
model.layers.0.self_attn.conv1d.weight         blk.0.ssm_conv1d_q.weight, _k and _v
model.layers.0.self_attn.kv_b_proj.weight      blk.0.attn_k_b.weight (heads, rank, plain), and
                                               blk.0.attn_v_b.weight (heads, value, rank)
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import MODEL_TENSOR

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ..configs.config import LATENT, POOLER, SCALAR, STACKS, Config, Delta, Experts, Latent
from ..configs.names import BACKBONE, stored_name
from ..configs.state_space import StateSpace
from . import MODULES
from ._families import LIKE, Architecture

# names of BitNet's norms and Kimi's gates that the package gguf has
OTHER_NAMES = {
    **{"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"},
    **{"forget_gate.dt_bias": "dt_proj.bias", "forget_gate.": ""},
}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Part(NamedTuple):
    """A tensor of a file: its name, its shape, and a function from the parameter to it."""

    name: str
    shape: tuple[int, ...]
    of: Callable[[Array], Array]
    by_rows: bool = True  # its rows are rows of the parameter, so packed rows can be copied


class Parts(NamedTuple):
    """The tensors that store a parameter, and a function from their arrays to the parameter."""

    tensors: tuple[Part, ...]
    joined: Callable[..., Array]


def as_it_is(array: Array) -> Array:
    return array


def _half(number: int, axis: int, stack: Array) -> Array:
    """Return the gate half (number 0) or the up half (1) of a weight, a stack or biases."""
    return np.split(stack, 2, axis)[number]


def _beside(axis: int, gate: Array, up: Array) -> Array:
    """Return gate and up joined, of weights, stacks or biases."""
    return np.concatenate([gate, up], axis)


def _row(array: Array) -> Array:
    return array.reshape(-1)


def _matrix(array: Array) -> Array:
    return array.reshape(1, -1)


def _keys(latent: Latent, heads: int, array: Array) -> Array:
    """Return the key part of kv_b_proj, transposed: (heads, rank, plain)."""
    by_heads = array.reshape(heads, latent.plain + latent.value, latent.rank)
    return by_heads[:, : latent.plain].swapaxes(1, 2)


def _values(latent: Latent, heads: int, array: Array) -> Array:
    """Return the value part of kv_b_proj: (heads, value, rank)."""
    return array.reshape(heads, latent.plain + latent.value, latent.rank)[:, latent.plain :]


def _keys_and_values(latent: Latent, keys: Array, values: Array) -> Array:
    """Return kv_b_proj, (heads * (plain + value), rank)."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return np.ascontiguousarray(both).reshape(-1, latent.rank)


def _tiled(delta: Delta, axis: int, array: Array, *, back: bool = False) -> Array:
    """Reorder value heads from (key head, value head) order to (value head, key head) order.

    In the parameter, the value heads of a key head are neighbours; in the file, they are apart.
    ``back`` is the inverse.  Value heads are the last rows or columns; queries and keys stay.
    """
    shared = delta.value_heads // delta.key_heads
    counts = (shared, delta.key_heads) if back else (delta.key_heads, shared)
    size = delta.value_heads * (delta.value_dim if array.shape[axis] > delta.value_heads else 1)
    first = np.arange(array.shape[axis] - size)
    last = np.arange(size).reshape(*counts, -1).swapaxes(0, 1).reshape(-1)
    return np.take(array, np.concatenate([first, len(first) + last]), axis)


def _by_heads(delta: Delta, array: Array) -> list[Array]:
    """Return queries, keys, values and gates of an array whose rows are ordered by key head."""
    own = delta.value_heads // delta.key_heads * delta.value_dim
    ends = np.cumsum([delta.key_dim, delta.key_dim, own])
    parts = np.split(array.reshape(delta.key_heads, -1, *array.shape[1:]), ends, axis=1)
    return [np.ascontiguousarray(part).reshape(-1, *array.shape[1:]) for part in parts]


def _qkv(delta: Delta, array: Array) -> Array:
    return np.concatenate(_by_heads(delta, array)[:3])


def _gates(delta: Delta, array: Array) -> Array:
    return _by_heads(delta, array)[3]


def _fused(delta: Delta, qkv: Array, gates: Array) -> Array:
    """Return in_proj_qkvz, whose rows are ordered by key head."""
    keys = delta.key_heads * delta.key_dim
    parts = (*np.split(qkv, [keys, 2 * keys]), gates)
    by_heads = [part.reshape(delta.key_heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(by_heads, axis=1).reshape(-1, *qkv.shape[1:])


def _decay(array: Array) -> Array:
    return -np.exp(array.astype(FLOAT32))


def _log_decay(array: Array) -> Array:
    return np.log(-array.astype(FLOAT32))


def _taps(array: Array) -> Array:
    return array[:, 0]


def _channels(array: Array) -> Array:
    return array[:, None]


def _of_delta(
    delta: Delta, tiled: bool, name: str, layer: int, shape: tuple[int, ...]
) -> Parts | None:
    """Return the tensors of a delta rule's parameter; None for another parameter."""

    def named(tensor: MODEL_TENSOR, end: str = ".weight") -> str:
        return gguf.TENSOR_NAMES[tensor].format(bid=layer) + end

    if name == "conv1d.weight" and delta.stored == "short":
        return _of_convolutions(delta, named)
    if name == "forget_gate.A_log":
        return Parts((Part(named(MODEL_TENSOR.SSM_A, ""), shape, _decay),), _log_decay)
    if name == "in_proj_qkvz.weight":
        gates = delta.value_heads * delta.value_dim
        first = named(MODEL_TENSOR.ATTN_QKV), (shape[0] - gates, shape[1]), partial(_qkv, delta)
        second = named(MODEL_TENSOR.ATTN_GATE), (gates, shape[1]), partial(_gates, delta)
        return Parts((Part(*first), Part(*second)), partial(_fused, delta))
    size = shape
    if name == "conv1d.weight":
        own, size = named(MODEL_TENSOR.SSM_CONV1D), (shape[0], shape[2])
        of, back = (_taps, _channels)
    elif name == "A_log":
        own, of, back = named(MODEL_TENSOR.SSM_A, ""), _decay, _log_decay
    elif name in DELTA:
        own, of, back = named(*DELTA[name]), as_it_is, as_it_is
    else:
        return None
    if not tiled or name == "norm.weight" or delta.value_heads == delta.key_heads:
        return Parts((Part(own, size, of),), back)
    axis = 1 if name == "out_proj.weight" else 0

    def apart(array: Array) -> Array:
        return _tiled(delta, axis, of(array))

    def beside(array: Array) -> Array:
        return back(_tiled(delta, axis, array, back=True))

    return Parts((Part(own, size, apart, by_rows=axis == 0),), beside)


def _of_convolutions(delta: Delta, named: Callable[[MODEL_TENSOR], str]) -> Parts:
    """Return the three tensors of a convolution parameter: for queries, keys and values."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    ends, parts = (0, keys, 2 * keys, 2 * keys + values), list[Part]()
    for (start, stop), name in zip(pairwise(ends), "QKV", strict=True):
        own, shape = named(MODEL_TENSOR[f"SSM_CONV1D_{name}"]), (1, stop - start, 1, delta.taps)
        parts.append(Part(own, shape, partial(_convolution, slice(start, stop)), by_rows=False))
    return Parts(tuple(parts), _convolutions)


def _convolution(rows: slice, array: Array) -> Array:
    return array[None, rows]


def _convolutions(*arrays: Array) -> Array:
    """Return the convolution parameter; some files have fewer axes of length 1."""
    return np.concatenate([each.reshape(-1, 1, each.shape[-1]) for each in arrays])


DELTA: Mapping[str, tuple[Any, ...]] = {  # tensors of a layer with a delta rule, by parameter
    "in_proj_ba.weight": (MODEL_TENSOR.SSM_BETA_ALPHA,),
    "in_proj_qkv.weight": (MODEL_TENSOR.ATTN_QKV,),
    "in_proj_z.weight": (MODEL_TENSOR.ATTN_GATE,),
    "in_proj_b.weight": (MODEL_TENSOR.SSM_BETA,),
    "in_proj_a.weight": (MODEL_TENSOR.SSM_ALPHA,),
    "dt_bias": (MODEL_TENSOR.SSM_DT, ".bias"),
    "norm.weight": (MODEL_TENSOR.SSM_NORM,),
    "out_proj.weight": (MODEL_TENSOR.SSM_OUT,),
}


SPACE: Mapping[str, tuple[Any, ...]] = {  # tensors of a layer with the recurrence of Mamba2
    "in_proj.weight": (MODEL_TENSOR.SSM_IN,),
    "conv1d.weight": (MODEL_TENSOR.SSM_CONV1D,),
    "conv1d.bias": (MODEL_TENSOR.SSM_CONV1D, ".bias"),
    "dt_bias": (MODEL_TENSOR.SSM_DT, ".bias"),
    "A_log": (MODEL_TENSOR.SSM_A, ""),
    "D": (MODEL_TENSOR.SSM_D, ""),
    "norm.weight": (MODEL_TENSOR.SSM_NORM,),
    "out_proj.weight": (MODEL_TENSOR.SSM_OUT,),
}


MAMBA: Mapping[str, tuple[Any, ...]] = {  # tensors of a layer with the recurrence of Mamba
    **{name: each for name, each in SPACE.items() if name not in ("dt_bias", "norm.weight")},
    "x_proj.weight": (MODEL_TENSOR.SSM_X,),
    "dt_proj.weight": (MODEL_TENSOR.SSM_DT,),
    "dt_proj.bias": (MODEL_TENSOR.SSM_DT, ".bias"),
    "dt_layernorm.weight": (MODEL_TENSOR.SSM_DT_NORM,),
    "b_layernorm.weight": (MODEL_TENSOR.SSM_B_NORM,),
    "c_layernorm.weight": (MODEL_TENSOR.SSM_C_NORM,),
}


def _of_mamba(name: str, layer: int, shape: tuple[int, ...]) -> Parts:
    """Return the tensor of a parameter of a layer with the recurrence of Mamba."""
    tensor, *end = MAMBA[name]
    own = gguf.TENSOR_NAMES[tensor].format(bid=layer) + (end[0] if end else ".weight")
    if name == "conv1d.weight":
        return Parts((Part(own, (shape[0], shape[2]), _taps),), _channels)
    of, back = (_decay, _log_decay) if name == "A_log" else (as_it_is, as_it_is)
    return Parts((Part(own, shape, of),), back)


def _of_space(space: StateSpace, name: str, layer: int, shape: tuple[int, ...]) -> Parts:
    """Return the tensors of a Mamba2 parameter; vectors over heads become columns."""
    tensor, *end = SPACE[name]
    own = gguf.TENSOR_NAMES[tensor].format(bid=layer) + (end[0] if end else ".weight")
    of, back, rows = as_it_is, as_it_is, space.groups if name == "norm.weight" else space.heads
    if name == "conv1d.weight":
        return Parts((Part(own, (shape[0], shape[2]), _taps),), _channels)
    if name == "A_log":
        of, back = _decay, _log_decay
    if name in ("A_log", "D", "norm.weight"):
        part = Part(own, (rows, shape[0] // rows), lambda x: of(x).reshape(rows, -1), by_rows=False)
        return Parts((part,), lambda x: _row(back(x)))
    return Parts((Part(own, shape, of),), back)


def _of_experts(
    experts: Experts, fused: bool
) -> Mapping[str, tuple[tuple[MODEL_TENSOR, str], ...]]:
    """Return the tensors of a layer's experts, by the names of parameters in the layer."""
    module, shared = experts.prefix, experts.shared_module
    both: tuple[MODEL_TENSOR, ...] = MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP
    both = (MODEL_TENSOR.FFN_GATE_UP_EXP,) if fused else both
    stacks = both if experts.names is STACKS else both[1:], (MODEL_TENSOR.FFN_DOWN_EXP,)
    names: dict[str, tuple[tuple[MODEL_TENSOR, str], ...]] = {
        f"{module}{experts.router}.{end}": ((MODEL_TENSOR.FFN_GATE_INP, end),)
        for end in ("weight", "bias")
    }
    names["router.scale"] = ((MODEL_TENSOR.FFN_GATE_INP, "scale"),)
    names["router.per_expert_scale"] = ((MODEL_TENSOR.FFN_DOWN_EXP, "scale"),)
    names[experts.correction] = ((MODEL_TENSOR.FFN_EXP_PROBS_B, "bias"),)
    if experts.latent is not None:
        for name, end in zip(LATENT, ("DOWN", "UP"), strict=True):
            names[f"{module}{name}.weight"] = ((MODEL_TENSOR[f"MOE_LATENT_{end}"], "weight"),)
    for stack, tensors in zip(experts.names, stacks, strict=True):
        names[f"{module}experts.{stack}"] = tuple((tensor, "weight") for tensor in tensors)
        names[f"{module}experts.{stack}_bias"] = tuple((tensor, "bias") for tensor in tensors)
    for name in ("gate", "up", "down"):
        tensor = MODEL_TENSOR[f"FFN_{name.upper()}_SHEXP"]
        names[f"{shared}.{name}_proj.weight"] = ((tensor, "weight"),)
    names[f"{module}{experts.shared_in}_gate.weight"] = (
        (MODEL_TENSOR.FFN_GATE_INP_SHEXP, "weight"),
    )
    return names


def has_offset(config: Config, stored: str) -> bool:
    """Return whether a file stores the weight of a norm plus the config's ``norm_offset``."""
    is_weight = stored.endswith("norm.weight") and not stored.endswith("linear_attn.norm.weight")
    return bool(config.norm_offset) and is_weight


def parts_of(call: str, config: Config, known: Architecture) -> Callable[[str], Parts]:
    """Return the function from a parameter's name to its tensors in a file."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    name = LIKE.get(known.name, known.name)
    if name not in numbers:
        cure = "install a newer one: pip install -U gguf"
        raise ConfigError(f"{call}: the installed gguf has no architecture {name}; {cure}")
    table = gguf.get_tensor_name_map(numbers[name], config.layers)
    shapes = config.shapes()
    of_layers: dict[str, tuple[tuple[MODEL_TENSOR, str], ...]] = {
        "self_attn.sinks": ((MODEL_TENSOR.ATTN_SINKS, "weight"),)
    }
    if config.layer_scalar:
        of_layers[SCALAR] = ((MODEL_TENSOR.LAYER_OUT_SCALE, "weight"),)
    if config.experts is not None and known.experts is not None:
        of_layers |= _of_experts(config.experts, known.experts.fused)
    if config.names.gate_up == "input_linear":  # Granite's MLP, or its shared expert
        end, module = "" if config.experts is None else "_SHEXP", config.names.mlp
        gate, up, down = (MODEL_TENSOR[f"FFN_{each}{end}"] for each in ("GATE", "UP", "DOWN"))
        of_layers[f"{module}.{config.names.gate_up}.weight"] = (gate, "weight"), (up, "weight")
        of_layers[f"{module}.{config.names.down}.weight"] = ((down, "weight"),)

    def of(stored: str) -> Parts:
        shape, (layer, inner) = shapes.get(stored, ()), _in_layer(stored)
        latent, module = config.latent, f"{config.names.recurrent}."
        if config.delta is not None and inner.startswith(module):
            own = inner.removeprefix(module)
            parts = _of_delta(config.delta, known.tiled, own, layer, shape)
            if parts is not None:
                return parts
        own = inner.removeprefix(module)
        if config.space is not None and own != inner and own in SPACE:
            return _of_space(config.space, own, layer, shape)
        if config.mamba is not None and own != inner and own in MAMBA:
            return _of_mamba(own, layer, shape)
        if latent and known.absorbed and inner == "self_attn.kv_b_proj.weight":
            keys, values = (
                f"{gguf.TENSOR_NAMES[each].format(bid=layer)}.weight"
                for each in (MODEL_TENSOR.ATTN_K_B, MODEL_TENSOR.ATTN_V_B)
            )
            heads, rank = config.heads, latent.rank
            of_keys, of_values = partial(_keys, latent, heads), partial(_values, latent, heads)
            first = Part(keys, (heads, rank, latent.plain), of_keys, by_rows=False)
            second = Part(values, (heads, latent.value, rank), of_values, by_rows=False)
            return Parts((first, second), partial(_keys_and_values, latent))
        names = [
            f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}.{end}"
            for tensor, end in of_layers.get(inner, ())
        ]
        if len(names) == 2:
            axis = 0 if inner.endswith("_linear.weight") else 1
            halved = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
            tensors = (Part(n, halved, partial(_half, i, axis)) for i, n in enumerate(names))
            return Parts(tuple(tensors), partial(_beside, axis))
        if (dense := MODULES.get(stored.partition(".")[0])) is not None:
            names = [f"{dense}.weight"]
        if stored.startswith(POOLER):
            names = [f"{gguf.TENSOR_NAMES[MODEL_TENSOR.CLS]}.{stored.rpartition('.')[2]}"]
        name = names[0] if names else _name(call, config, table, stored)
        part, back = Part(name, shape, as_it_is), as_it_is
        if names and inner.endswith("_gate.weight"):
            part, back = Part(name, shape[1:], _row, by_rows=False), _matrix
        elif config.conv is not None and own == "conv.weight":
            part, back = Part(name, (shape[0], shape[2]), _taps), _channels
        return Parts((part,), back)

    return of


def _in_layer(stored: str) -> tuple[int, str]:
    """Return a parameter's layer, -1 outside of layers, and its name in the layer."""
    start, _, rest = stored.partition("model.layers.")
    number, _, inner = rest.partition(".")
    return (int(number), inner) if not start and number.isdecimal() else (-1, stored)


def _name(call: str, config: Config, table: gguf.TensorNameMap, stored: str) -> str:
    """Return the tensor's name for a parameter that is stored in one tensor."""
    if not config.causal:  # named as in released files
        stored = stored_name(stored, "")
    stored = stored_name(stored, BACKBONE) if ".mixer." in stored else stored
    for ours, theirs in OTHER_NAMES.items():
        stored = stored.replace(ours, theirs)
    name = table.get_name(stored, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise ConfigError(
            f"{call}: the installed gguf has no name for {stored} of a"
            f" {config.model_type}; install a newer one: pip install -U gguf"
        )
    return name
