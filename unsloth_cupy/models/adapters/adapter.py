"""Low-rank adapters (LoRA, rsLoRA, DoRA) of a model, in peft's file format and tensor names.

A folder holds adapter_config.json and adapter_model.safetensors.  The adapter tensors of a linear
layer ``model.layers.0.self_attn.q_proj`` are named

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight         (rank, inputs)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight         (outputs, rank)
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector (outputs,), only DoRA

``outer_weights`` has the tensors of trained tokens and of whole modules.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...core.call import check_options, is_integer, is_list, is_number
from ...core.dtypes import FLOAT32, Array
from ...core.gpu import device_of
from ...core.replay import is_fixed
from ...errors import ConfigError
from ...machine import check_bytes
from ...ops.elements.arithmetic import add, scale
from ...ops.linear.linear import linear
from ...ops.linear.lora import lora_linear
from ...ops.linear.lora_linears import LoraLayer, lora_linears
from ...ops.linear.lora_merge import lora_merge, row_norms
from ...ops.quantized.weight import Quantized, held_arrays
from ...parallel.taped import taped, value_of
from ...placement import stream, to_device_of
from ..configs.config import POOLER, Config
from ..configs.draft_heads import is_of_head
from ..configs.heads import CAUSAL, NONE, SEQUENCE, TOKEN
from ..configs.names import ADAPTED, HEAD, INDEXER, TABLE, TEXT, is_norm, is_router, stored_name
from ..folders.checkpoint_files import write_folder
from ..folders.initial_weights import INITIAL, beside, initial_pairs, plain_settings
from .adapter_base import ADAPTER, BASE, WEIGHTS, home_facts
from .adapter_patterns import by_pattern
from .adapter_stacks import (
    Adapted,
    Stack,
    pattern_name,
    stacks_of,
    target_parameters,
    targets_of,
)
from .joined import join_downs
from .kept import Kept
from .outer_weights import (
    LOW_RANK,
    OUTER,
    ROWS,
    TIED,
    TOKENS,
    check_outer,
    listed_tokens,
    low_rank,
    made_of,
    merged,
    new_low_rank,
    new_outer,
    outer_settings,
    replaced,
    rows_name,
)
from .through import file_weight, through_linear

CONFIG = ADAPTER
PREFIX = ADAPTED
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDING_DOWN, EMBEDDING_UP = "lora_embedding_A", "lora_embedding_B"  # scale A^T B^T is added
BIAS = "lora_B.bias"  # (outputs,), only in files of peft; scaled as B is
ADDED = (BIAS, DOWN, UP, MAGNITUDE)  # the tensors of a linear layer
PARTS = (*ADDED, EMBEDDING_DOWN, EMBEDDING_UP, ROWS, "weight", "bias")  # after a module's name
TABLES = ("embed_tokens", "lm_head")
TASKS = {CAUSAL: "CAUSAL_LM", SEQUENCE: "SEQ_CLS", TOKEN: "TOKEN_CLS", NONE: "FEATURE_EXTRACTION"}


class Seeds(NamedTuple):
    """The dropout seeds of the layers for one step, in a GPU array: see ``Adapter.seeds``."""

    modules: Sequence[str]
    array: Any


class Adapter:
    """The low-rank weights that are added to the linear layers of a model.

    Attributes
    ----------
    settings : dict
        The contents of adapter_config.json.
    parameters : dict of str to array
        The adapter tensors, by their names in peft's file for a language model.
    tokens : dict of str to tuple of int
        The tokens whose rows are trained, by the name of the table.
    stored : dict of str to str
        The names of the adapted layers in the file, which differ for a model that reads images.
    others : dict of str to array
        Tensors of the file that belong to other layers; ``save`` writes them unchanged.
    stacks : dict of str to Adapted
        The adapted stacks of experts, by their names.
    base : Path or None
        The folder of the base model, if it is known.
    into : Into or None
        The quantizer of the file that the adapter will be merged into and is trained through.
    initial : dict of str to (array, array)
        A0 and B0 of layers that were initialized from the weight; the constant -B0 A0 is added to
        B A.
    """

    base: Path | None = None
    into: Any = None  # an Into
    initial: Mapping[str, tuple[Array, Array]] = MappingProxyType({})

    def __init__(
        self,
        settings: Mapping[str, Any],
        parameters: dict[str, Array],
        *,
        stored: Mapping[str, str] | None = None,
        others: Mapping[str, Array] | None = None,
        path: str | PathLike[str] = CONFIG,
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:
        self.settings, self.parameters = dict(settings), join_downs(parameters)
        self.dropout = float(settings.get("lora_dropout") or 0.0)
        self.tokens = listed_tokens(f"{path}: {TOKENS}", settings.get(TOKENS) or ())
        self.sent: dict[tuple[Any, ...], Any] = {}  # tokens on GPUs
        downs = {
            module_of(name): name for name in parameters if name.endswith((DOWN, EMBEDDING_DOWN))
        }
        modules = [*downs]
        every = {module_of(name) for name in parameters}
        self.stored = {name: name for name in every} if stored is None else dict(stored)
        self.others = dict(others or {})
        of, alpha = dict(stacks or {}), settings.get("lora_alpha", 8)
        names = [pattern_name(settings, of, n, self.stored[n]) for n in modules]
        alphas = by_pattern(path, settings, "alpha_pattern", names, alpha)
        counts = [of[name].shape[0] if name in of else 1 for name in modules]
        ranks = [
            parameters[name].shape[0] // n for name, n in zip(downs.values(), counts, strict=True)
        ]
        root = math.sqrt if settings.get("use_rslora") else float
        self.scales = {
            name: float(alpha) / root(rank)
            for name, alpha, rank in zip(modules, alphas, ranks, strict=True)
        }
        self.stacks = {
            stack.parameter: Adapted(
                stack, f"{PREFIX}{n}.{DOWN}", f"{PREFIX}{n}.{UP}", self.scales[n]
            )
            for n, stack in of.items()
        }

    def holding(self, parameters: dict[str, Array]) -> "Adapter":
        """Return this adapter with other parameters: a rank's parts, or the whole arrays."""
        adapter = copy(self)
        adapter.parameters = parameters
        return adapter

    def seeds(self, seed: int) -> Array:
        """Return the 64-bit dropout seed of each layer for a step, in the order of ``scales``."""
        return np.array([_seed(seed, module) for module in self.scales], np.uint64).view(np.int64)

    def linears(
        self,
        parameters: Mapping[str, Any],
        modules: Sequence[str],
        x: Any,
        seed: int | Seeds | None,
        numbers: Array | None = None,
        part: slice | None = None,
    ) -> list[Any]:
        """Return the outputs of the linear layers ``modules`` for the input x, with their adapters.

        ``parameters`` holds the weights of the layers and of the adapters, by name.  Without
        dropout one ``lora_linears`` reads x once for all adapters.  With dropout each adapter has
        its own mask, drawn from the number of the token in the batch: see ``token_numbers``.
        ``part`` is the slice of all tokens that x has.
        """
        dropout = self.dropout if seed is not None else 0.0
        if part is not None and numbers is not None:
            numbers = numbers.reshape(-1)[part]
        elif part is not None and dropout:
            numbers = np.arange(part.start, part.stop, dtype=np.int32, like=value_of(x))
        if numbers is not None:
            numbers = numbers.reshape(x.shape[:-1])
        if is_fixed():  # sum the dx of these layers first, as in a batch with several adapters
            x = taped("linears", value_of(x), lambda dx, wanted: {"x": dx}, x=x)
        if self.through:
            return [self._through(parameters, name, x, dropout, seed, numbers) for name in modules]
        adapted = {name: self._layer(parameters, name) for name in modules if name in self.scales}
        if len(adapted) > 1 and not dropout:
            outputs = dict(zip(adapted, lora_linears(x, [*adapted.values()]), strict=True))
        else:
            outputs = {
                name: lora_linear(
                    x,
                    **layer._asdict(),
                    dropout=dropout,
                    **_draw(seed, name) | {"numbers": numbers} if dropout else {},
                )
                for name, layer in adapted.items()
            }
        return [
            outputs[name]
            if name in outputs
            else linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
            for name in modules
        ]

    @property
    def through(self) -> bool:
        """Whether layers compute with the weights of the file that the adapter is merged into."""
        return self.into is not None and self.into.active

    def _through(
        self,
        parameters: Mapping[str, Any],
        module: str,
        x: Any,
        dropout: float,
        seed: int | Seeds | None,
        numbers: Array | None,
    ) -> Any:
        """Return the output of a layer that computes with the weight of the file."""
        name = f"{module}.weight"
        if module not in self.scales:
            return linear(x, parameters[name], parameters.get(f"{module}.bias"))
        layer = self._layer(parameters, module)
        return through_linear(
            x,
            *layer[:3],
            layer.bias,
            scale=layer.scale,
            make=partial(self.into.of_sum, name),
            dropout=dropout,
            seed=None if not dropout or isinstance(seed, Seeds | None) else _seed(seed, module),
            numbers=numbers,
        )

    def file_weights(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters in which weights without an adapter are rounded as in the file."""
        if not self.through:
            return parameters
        return {**parameters, **self.into.fixed(parameters, self._changes)}

    def _changes(self, name: str) -> bool:
        """Return whether the adapter changes, replaces or contains a weight."""
        taken = name in self.tokens or PREFIX + name in self.parameters
        return taken or name.startswith(PREFIX) or self.adds_to(name)

    def used_stacks(self) -> Mapping[str, Adapted]:
        """Return the adapted stacks, with the quantizer if they are trained through it."""
        if not self.through:
            return self.stacks
        return {name: each._replace(into=self.into) for name, each in self.stacks.items()}

    def low_rank(self, name: str) -> tuple[Any, Any]:
        """Return a and b of the change ``scale b a`` of a weight."""
        return low_rank(name, *self.pair(self.parameters, name.removesuffix(".weight")))

    def _layer(self, parameters: Mapping[str, Any], module: str) -> LoraLayer:
        """Return the arrays and the scale of an adapted layer."""
        prefix, bias = f"{PREFIX}{module}.", parameters.get(f"{module}.bias")
        own = parameters.get(prefix + BIAS)
        if own is not None:
            kind = parameters[f"{module}.weight"].dtype
            own = scale(made_of([own], kind, lambda each: each), factor=self.scales[module])
            bias = own if bias is None else add(bias, own)
        return LoraLayer(
            parameters[f"{module}.weight"],
            *self.pair(parameters, module),
            self.scales[module],
            bias,
            parameters.get(prefix + MAGNITUDE),
        )

    def pair(self, parameters: Mapping[str, Any], module: str) -> tuple[Any, Any]:
        """Return A and B of a layer, concatenated with A0 and -B0 if the layer has them."""
        table = f"{module}.weight"
        names = LOW_RANK.get(table, (f"{PREFIX}{module}.{DOWN}", f"{PREFIX}{module}.{UP}"))
        first, second = (parameters[name] for name in names)
        if module not in self.initial:
            return first, second
        a, b = self.initial[module]
        down = made_of([first], first.dtype, lambda own: beside(own, a, 0))
        return down, made_of([second], second.dtype, lambda own: beside(own, -b, 1))

    def begin(self, kind: str, read: Callable[[str], Any]) -> None:
        """Initialize A and B from the weights, which ``read`` returns by name."""
        call = f"create_adapter(init={kind!r})"
        pairs = initial_pairs(call, kind, self.scales, self.parameters, read)
        self.initial = {module_of(names[0]): pair for names, pair in pairs.items()}
        for names, pair in pairs.items():
            self.parameters |= {n: own.copy() for n, own in zip(names, pair, strict=True)}

    @property
    def outer(self) -> list[str]:
        """The names of the tensors of tables, heads and whole modules."""
        return [n for n in self.parameters if ".layers." not in n or not n.endswith(ADDED)]

    def outside(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters with the adapter's tables, rows and whole modules in their places."""
        if not self.outer:
            return parameters
        return replaced(parameters, self.parameters, self.tokens, self.scales, self._places)

    def _places(self, name: str, table: Any) -> Any:
        """Return a table's tokens as an array on its device, copied once for each GPU stream."""
        key, ids = stream(table), np.asarray(self.tokens[name], np.int64)
        if not key:
            return to_device_of(ids, table)
        if (name, *key) not in self.sent:
            self.sent[name, *key] = to_device_of(ids, table)
        return self.sent[name, *key]

    def merged(
        self, parameters: Mapping[str, Any], requantize: bool = False
    ) -> tuple[dict[str, Any], Kept]:
        """Return the parameters with the adapter merged, and how much of it rounding preserves."""
        self.check_merges(parameters)
        kept = Kept()
        merged = {n: self.merge(n, each, requantize, kept) for n, each in parameters.items()}
        return merged, kept

    def check_merges(self, names: Collection[str]) -> None:
        """Raise a ConfigError if the adapter has a bias for a layer without a bias."""
        biases = [module_of(name) for name in self.parameters if name.endswith(f".{BIAS}")]
        if alone := [module for module in biases if f"{module}.bias" not in names]:
            problem = f"merge: the adapter of {alone[0]} has a bias, and the layer has none"
            raise ConfigError(f"{problem}; use the adapter unmerged: load(base, lora=folder)")

    def adds_to(self, name: str) -> bool:
        """Return whether the adapter adds a low-rank product to a weight."""
        first = LOW_RANK.get(name, (f"{PREFIX}{name.removesuffix('weight')}{DOWN}",))[0]
        return name in self.stacks or (first in self.parameters and name not in self.tokens)

    def merge(
        self,
        name: str,
        weight: Any,
        requantize: bool = False,
        kept: Kept | None = None,
        exact: bool = False,
    ) -> Any:
        """Return a weight with its adapter merged; a dense weight without an adapter is unchanged.

        Quantized weights become dense, with or without an adapter.  With ``requantize`` merged
        weights are quantized again, and quantized weights without an adapter are unchanged.
        ``kept`` measures the share of the update that rounding preserves.  With ``exact`` nothing
        is rounded, and the result is float32 or wider.
        """
        outer = merged(name, weight, self.parameters, self.tokens)
        if outer is not None:
            return outer
        own = self.parameters.get(f"{PREFIX}{name.removesuffix('bias')}{BIAS}")
        if own is not None and name.endswith(".bias"):
            wide = weight.astype(np.promote_types(weight.dtype, FLOAT32))
            return (wide + own * self.scales[module_of(name)]).astype(weight.dtype)
        if self.into is not None:
            return file_weight(self, name, weight, requantize, kept, exact)
        module, quantized = name.removesuffix(".weight"), isinstance(weight, Quantized)
        if name in self.stacks:
            return self.stacks[name].merge(weight, self.parameters, requantize, kept, exact)
        if module not in self.scales or module == name:
            return weight.dequantize() if quantized and not requantize else weight
        wide = np.promote_types(weight.dtype, FLOAT32)
        result = lora_merge(
            weight if kept is None and not exact else weight.astype(wide),
            *self.low_rank(name),
            scale=self.scales[module],
            magnitude=self.parameters.get(f"{PREFIX}{module}.{MAGNITUDE}"),
        )
        rounded = result if exact else result.astype(weight.dtype, copy=False)
        if quantized and requantize and not exact:
            rounded = weight.requantized(rounded)
        if kept is not None and rounded is not result:
            kept.measure(name, weight, result, rounded.__getitem__)
        return rounded

    def save(self, folder: str | PathLike[str], tables: Mapping[str, Array] | None = None) -> None:
        """Write the adapter's folder; old files are replaced after all new ones are written.

        ``tables`` are the grown tables, which the base's folder has with fewer rows; peft reads
        them from this folder.
        """
        tensors, own = dict(self.others), dict(self.parameters)
        for name, table in (tables or {}).items():
            ways = (
                (rows_name(name), "token_adapter.base_layer."),
                (LOW_RANK[name][0], "base_layer."),
                (PREFIX + name, "original_module."),
            )
            inner = next((part for changed, part in ways if changed in own), "")
            tensors[f"{PREFIX}{name.removesuffix('weight')}{inner}weight"] = table
        for module in self.initial:
            pair = self.pair(own, module)
            own |= {f"{PREFIX}{module}.{k}": v for k, v in zip((DOWN, UP), pair, strict=True)}
        for name, array in own.items():
            module = module_of(name)
            tensors[name.replace(module, self.stored[module], 1)] = array
        if self.settings.get(TIED) and PREFIX + TABLE in self.parameters:
            tensors[PREFIX + HEAD] = self.parameters[PREFIX + TABLE]  # as peft writes both
        if self.settings.get(TIED) and LOW_RANK[TABLE][0] in self.parameters:
            pair = low_rank(TABLE, *(self.parameters[each] for each in LOW_RANK[TABLE]))
            tensors |= dict(zip(LOW_RANK[HEAD], pair, strict=True))
        home = home_facts(self.settings.get(BASE), self.base)
        settings = plain_settings(self.settings) if self.initial else self.settings
        write_folder(folder, {CONFIG: settings}, tensors, {WEIGHTS: list(tensors)}, home)


@check_options
def create_adapter(
    config: Config,
    weights: Mapping[str, Array],
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    seed: int = 0,
    base: str | None = None,
    tokens: Sequence[int] | Mapping[str, Sequence[int]] = (),
    modules: Sequence[str] = (),
    init: str | None = None,
) -> Adapter:
    """Return a new adapter that leaves the model's outputs unchanged: A is random, B is zero.

    Parameters
    ----------
    rank : int
        Rank of each low-rank update.
    alpha : float, optional
        The scale is ``alpha / rank``, for rsLoRA ``alpha / sqrt(rank)``; None: 2 * rank.
    targets : sequence of str, optional
        The last components of layer names, such as ("q_proj", "v_proj"), and for stacks of
        experts "experts.gate_up_proj" and "experts.down_proj".  None: every linear layer of the
        blocks except routers, and the experts.  embed_tokens (with a tied head) and lm_head are
        allowed too.
    dropout : float
        Share of the adapter's input elements that are set to 0 in training.
    rslora, dora : bool
        See ``lora_linear``.
    seed : int
        Equal seeds give equal adapters.
    base : str, optional
        The base model, stored in adapter_config.json for programs that load it: its folder or its
        name on huggingface.co.  ``add_adapter`` has its own default.
    tokens : sequence of int, optional
        Tokens whose rows of the embedding table, and of a tied head, are trained too: peft's
        ``trainable_token_indices``.  Or a dict of ids by table, embed_tokens and lm_head: an
        untied head is trained for a new token only if lm_head lists the token.
    modules : sequence of str, optional
        Modules that are trained whole: embed_tokens (with a tied head), lm_head, and score, the
        head of a classifier, which is otherwise frozen: peft's ``modules_to_save``.
    init : str, optional
        Initialization of A and B from each weight: "pissa", the largest singular vectors, or
        "olora", the first columns and rows of the QR decomposition.  Weights stay unchanged: the
        initial product B A is subtracted, and ``save_adapter`` writes both products as one of
        twice the rank.  "loftq", only in ``add_adapter``: the best approximation, with this rank,
        to the quantization error; the unquantized weights are read again from the model's dense
        folder.

    Raises
    ------
    ConfigError
        An option is invalid, or names a layer that does not support adapters.
    """
    _check_options(rank=rank, alpha=alpha, dropout=dropout, seed=seed, init=init)
    known = linear_layers(config)
    stored = {name: stored_name(name, config.body) for name in known}
    chosen = _chosen_targets(config, known, targets, alters=dora or dropout > 0, init=init)
    stacked = [name for name in targets_of(config) if name in chosen]
    tables = [name for name in TABLES if name in chosen]
    rows = listed_tokens("create_adapter(tokens=)", tokens)
    if not (is_list(modules) and all(isinstance(each, str) for each in modules)):
        raise ConfigError(f"create_adapter(modules={modules!r}): pass a list of {', '.join(OUTER)}")
    check_outer("create_adapter", config, rows, modules)
    check_outer("create_adapter(targets=)", config, {}, tables)
    if duplicates := [t for t in tables if t in modules or OUTER[t][0] in rows]:
        problem = f"{duplicates[0]} is in targets, and also in modules or tokens"
        raise ConfigError(f"create_adapter: {problem}; choose one")
    settings = {
        "peft_type": "LORA",
        "task_type": TASKS[config.head],
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": dropout,
        "target_modules": _target_modules(sorted({*chosen} - {*stacked}), config.body),
        "exclude_modules": _excluded_modules(config),
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        BASE: base,
    }
    settings |= {"target_parameters": target_parameters(config, stacked)} if stacked else {}
    settings |= outer_settings(config, rows, modules, tables)
    stacks = stacks_of(config, lambda name: name.endswith(tuple(stacked)))
    needed = sum(sum(known[name]) for name in known if name.rpartition(".")[2] in chosen)
    needed += sum(each.shape[0] * sum(each.sizes) for each in stacks.values())
    example = next(iter(weights.values()), None)
    needed = rank * needed + config.hidden * sum(map(len, rows.values()))
    needed += sum(math.prod(weights[n].shape) for m in modules for n in OUTER[m] if n in weights)
    check_bytes(f"create_adapter(rank={rank})", FLOAT32.itemsize * needed, example)
    parameters = new_outer(weights, rows, modules)
    for index, table in enumerate(tables):
        parameters |= new_low_rank(weights, OUTER[table][0], rank, [seed, len(known) + index])
    whole = (PREFIX + name for each in modules for name in OUTER[each])  # of other ranks too
    names = {module_of(name) for name in (*parameters, *whole)}
    outer = {name: stored_name(name, config.body) for name in names}
    outer |= {module: module for module in stacks}
    layers = {module: (*sizes, 1) for module, sizes in known.items()}
    layers |= {module: (*each.sizes, each.shape[0]) for module, each in stacks.items()}
    for index, (module, (outputs, inputs, count)) in enumerate(layers.items()):
        if module not in stacks and module.rpartition(".")[2] not in chosen:
            continue
        draw, bound = np.random.default_rng([seed, index]), 1 / math.sqrt(inputs)
        a = draw.uniform(-bound, bound, (rank * count, inputs))
        weight: Any = weights.get(f"{module}.weight", example)  # another rank may hold this weight
        prefix = f"{PREFIX}{module}."
        _, same_device = next(held_arrays({module: weight}))
        parameters[prefix + DOWN] = down = to_device_of(a.astype(FLOAT32), same_device)
        zeros = np.zeros((outputs, rank * count), FLOAT32)
        parameters[prefix + UP] = up = to_device_of(zeros, same_device)
        if dora:
            with device_of(weight):
                float_weight = weight.astype(np.promote_types(weight.dtype, FLOAT32))
                parameters[prefix + MAGNITUDE] = row_norms(float_weight, down, up).astype(FLOAT32)
    adapter = Adapter(settings, parameters, stored=stored | outer, stacks=stacks)
    if init in INITIAL:
        adapter.begin(str(init), weights.__getitem__)
    return adapter


def _chosen_targets(
    config: Config, known: Collection[str], targets: Any, *, alters: bool, init: str | None
) -> Collection[str]:
    """Return the targets, by default all; ``alters``: there is DoRA or dropout."""
    layers = sorted({name.rpartition(".")[2] for name in known})
    stacks = targets_of(config)
    chosen: Any = [*layers, *stacks] if targets is None else targets
    listed = is_list(chosen) and len(chosen) > 0
    names = (*layers, *stacks, *TABLES)
    if not listed or not all(name in names for name in chosen):
        cure = f"pass a list of some of {', '.join(names)}"
        raise ConfigError(f"create_adapter(targets={targets!r}): {cure}")
    if init is not None and (stacked := [name for name in stacks if name in chosen]):
        problem = f"{stacked[0]} cannot be initialized from a weight"
        cure = f"leave init={init!r} out, or name targets among {', '.join(layers)}"
        raise ConfigError(f"create_adapter(targets={targets!r}): {problem}; {cure}")
    if alters and (stacked := [name for name in stacks if name in chosen]):
        problem = f"{stacked[0]} supports neither DoRA nor dropout, as in peft"
        cure = f"leave those out, or name targets among {', '.join(layers)}"
        raise ConfigError(f"create_adapter(targets={targets!r}): {problem}; {cure}")
    if alters and (tables := [name for name in TABLES if name in chosen]):
        cure = f"{tables[0]} supports neither DoRA nor dropout; leave those out, or the table"
        raise ConfigError(f"create_adapter(targets={targets!r}): {cure}")
    return chosen


def module_of(name: str) -> str:
    """Return the name of the module that an adapter's tensor belongs to."""
    own = name.removeprefix(PREFIX)
    end = next((each for each in PARTS if own.endswith(f".{each}")), "")
    return own.removesuffix(f".{end}")


def _target_modules(names: list[str], prefix: str) -> list[str] | str:
    """Return peft's target_modules: names, or a pattern for names after a body's prefix."""
    if prefix in (TEXT, ""):
        return names
    inside = "|".join(name for name in names if name != "lm_head")
    return rf"{re.escape(prefix)}(.*\.)?({inside})" + "|lm_head" * ("lm_head" in names)


def _excluded_modules(config: Config) -> list[str] | None:
    """Return peft's exclude_modules: BERT's pooler, which is named like layers in blocks."""
    return [POOLER.removeprefix(TEXT)] if config.classifier == "pooler" else None


def _check_options(rank: Any, alpha: Any, dropout: Any, seed: Any, init: Any) -> None:
    """Raise a ConfigError for an invalid option of ``create_adapter``."""
    for name, value, valid, cure in (
        ("rank", rank, is_integer(rank, 1), "1 or more"),
        ("alpha", alpha, alpha is None or (is_number(alpha) and alpha > 0), "a number above 0"),
        ("dropout", dropout, is_number(dropout) and 0 <= dropout < 1, "a share in 0 .. 1"),
        ("seed", seed, is_integer(seed), "an integer, 0 or more"),
        ("init", init, init in (None, *INITIAL, "loftq"), "pissa, olora, loftq or None"),
    ):
        if not valid:
            raise ConfigError(f"create_adapter({name}={value!r}): pass {cure}")


def linear_layers(config: Config, *, routers: bool = False) -> dict[str, tuple[int, int]]:
    """Return the weight shape of each linear layer in the blocks, by the layer's name.

    ``routers`` includes the routers of mixtures, which new adapters do not target.  Draft heads
    stay frozen beside an adapter.
    """
    if config.bit_layers:
        problem = "its linear layers are rounded at every call, as in BitNet"
        raise ConfigError(f"this model cannot have an adapter: {problem}; train its weights")
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in config.shapes().items()
        if name.startswith("model.layers.") and name.endswith(".weight") and len(shape) == 2
        if not is_norm(name) and (routers or not is_router(name)) and INDEXER not in name
        if not is_of_head(config, name)
    }


def _draw(seed: Any, module: str) -> dict[str, Any]:
    """Return the seed of a layer's dropout, as a keyword argument of lora_linear."""
    if isinstance(seed, Seeds):
        return {"key": seed.array[seed.modules.index(module)]}
    return {"seed": _seed(seed, module)}


def _seed(seed: int, module: str) -> int:
    """Return a seed for one layer, so that the layers of a step have different dropout masks."""
    return int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:8], "little")
