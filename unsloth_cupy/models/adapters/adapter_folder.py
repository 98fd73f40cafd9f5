"""Load adapters from peft folders; every file, setting and tensor is checked before use."""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...core.call import is_integer, is_number
from ...core.dtypes import FLOAT32, FLOATS, Array, allowed
from ...errors import ConfigError, shortened
from ...files import missing_folder_advice, of_one_save, path_of
from ..configs.config import Config
from ..configs.names import TABLE, parameter_name
from ..folders.checkpoint_files import opened
from ..folders.initial_weights import INITIAL, initial_pairs, joined, plain_settings
from .adapter import (
    BIAS,
    CONFIG,
    DOWN,
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    MAGNITUDE,
    PARTS,
    PREFIX,
    UP,
    Adapter,
    linear_layers,
    module_of,
)
from .adapter_base import MERGE, WEIGHTS, read_settings
from .adapter_experts import of_stacks
from .adapter_patterns import by_pattern, targeted
from .adapter_stacks import Stack, listed_stacks, named_alone, pattern_name
from .into import MERGE_INTO, through_listed
from .mlx_folder import is_of_mlx, read_mlx
from .outer_folder import outer_tensors, tables_of

# Settings of adapter features that are not supported: each must be absent or have no effect.
UNUSED = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
NO_WEIGHTS = {  # methods of peft that change inputs or outputs of layers, not weights
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING"),
    *("PROMPT_TUNING", "P_TUNING"),
}
PICKLE = "adapter_model.bin"
# Initializations that subtract the initial product from the base weights; INITIAL can be computed
# again.
RESIDUAL = ("corda", "loftq", "lora_ga", "olora", "pissa")
PLAIN = ("eva", "gaussian", "mica", "orthogonal")  # initializations that leave the base unchanged
KNOWN = {  # other settings: each is read, or does not affect the weights
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config"),
    *("ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha"),
    *("lora_bias", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
    *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "target_parameters", "task_type"),
    *("trainable_token_indices", "use_dora", "use_rslora", MERGE_INTO, *UNUSED),
}


def read_adapter(
    folder: str | PathLike[str],
    config: Config,
    dtype: np.dtype[Any],
    place: Callable[[Array], Array] = lambda array: array,
    weights: Callable[[str], Any] | None = None,
) -> Adapter:
    """Return the adapter of a folder; each tensor is checked against the model's config.

    Tensors whose dtype cannot be combined with the model's become float32, which always can.
    ``weights`` returns a weight of the base by its name: an adapter that was initialized from the
    weights (PiSSA, OLoRA) becomes one of twice the rank for the unchanged base.

    Raises
    ------
    ConfigError
        A file is missing or broken, describes an adapter other than LoRA, or is for another model.
    """
    path = path_of("load(lora=)", folder)
    if not path.is_dir():
        cure = missing_folder_advice(path, f"pass one that holds {CONFIG}")
        raise ConfigError(f"load(lora={str(path)!r}) is not a folder; {cure}")
    settings, tensors = of_one_save(path, CONFIG, lambda: _read(path, config))
    settings, tensors = of_stacks(path / CONFIG, config, settings, tensors)
    initial = settings.get("init_lora_weights")
    known = linear_layers(config, routers=True)
    stacks = listed_stacks(path / CONFIG, config, settings, known)
    known |= tables_of(config)
    known |= {module: stack.sizes for module, stack in stacks.items()}
    outer = outer_tensors(path, settings, tensors, config)
    stored = _layers_of(path / WEIGHTS, tensors, known, config)
    if absent := next((module for module in stacks if module not in stored), None):
        parameter = stacks[absent].parameter
        problem = f"target_parameters names {parameter}, and {absent}.{DOWN} is missing"
        raise ConfigError(f"{path / WEIGHTS}: {problem}; copy the adapter again")
    layers = [layer for module, layer in stored.items() if module not in stacks]
    used = {*targeted(path / CONFIG, settings, layers), *stacks}
    used |= {layer for layer in layers if named_alone(settings, f"{layer}.weight")}
    if not used:
        problem = "target_modules names no layer whose tensors are in the file"
        raise ConfigError(f"{path / CONFIG}: {problem}; correct it")
    if unused := [layer for layer in stored.values() if layer not in used]:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        warnings.warn(
            f"{path / CONFIG}: the file has tensors of {unused[0]}{more}, which target_modules does"
            " not include: they are not used, as in peft",
            stacklevel=3,
        )
    stored = {module: layer for module, layer in stored.items() if layer in used}
    parameters = {own: _fitting(array, dtype) for own, array in outer.values()}
    for module, layer in stored.items():
        for name in [name for name in tensors if name.startswith(f"{PREFIX}{layer}.lora_")]:
            own_name = PREFIX + module + name.removeprefix(PREFIX + layer)
            parameters[own_name] = _fitting(tensors.pop(name), dtype)
    _check_all_shapes(path, settings, stored, stacks, known, parameters)
    _check_dropout(path / CONFIG, settings, parameters)
    placed = {name: place(parameters[name]) for name in sorted(parameters)}
    stored |= {module_of(own): module_of(name) for name, (own, _) in outer.items()}
    adapter = Adapter(
        settings, placed, stored=stored, others=tensors, path=path / CONFIG, stacks=stacks
    )
    adapter = adapter if initial not in INITIAL else _plain(path, adapter, weights)
    return through_listed(str(path / CONFIG), config, adapter)


def _layers_of(
    file: Path, tensors: Mapping[str, Array], known: Collection[str], config: Config
) -> dict[str, str]:
    """Return the layers whose tensors are in a file, by module name."""
    stored = dict[str, str]()
    for name in sorted(tensors):
        if parameter_name(name.removeprefix(PREFIX)) is None:
            continue  # a tensor of the image encoder
        layer, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        module = parameter_name(layer) or layer
        if not name.startswith(PREFIX) or module not in known:
            raise ConfigError(_problem(file, name, config))
        if f"lora_{part}" not in PARTS:
            problem = f"tensor {name[:200]!r} is not a known part of LoRA"
            raise ConfigError(f"{file}: {problem}; {MERGE}")
        if tensors[name].dtype not in FLOATS:
            problem = f"tensor {name!r} is {tensors[name].dtype}, not a float dtype"
            raise ConfigError(f"{file}: {problem}")
        if stored.setdefault(module, layer) != layer:
            problem = f"{stored[module]} and {layer} are the same layer"
            raise ConfigError(f"{file}: {problem}; copy the adapter again")
    if not stored:
        raise ConfigError(f"{file} holds no tensor; copy the adapter again")
    return stored


def _plain(path: Path, adapter: Adapter, weights: Callable[[str], Any] | None) -> Adapter:
    """Return an adapter for the unchanged base, from one that was initialized from weights."""
    kind, own = adapter.settings["init_lora_weights"], dict(adapter.parameters)
    if weights is None:
        problem = f"the adapter needs the weights that {kind!r} changed"
        cure = "load it into the whole dense model, and save_adapter writes it for the plain base"
        raise ConfigError(f"{path / CONFIG}: {problem}; {cure}")
    pairs = initial_pairs(f"load(lora={str(path)!r})", kind, adapter.scales, own, weights)
    for names, pair in pairs.items():
        own |= dict(zip(names, joined(own[names[0]], own[names[1]], pair), strict=True))
    plain, home = plain_settings(adapter.settings), path / CONFIG
    return Adapter(plain, own, stored=adapter.stored, others=adapter.others, path=home)


def _check_all_shapes(
    path: Path,
    settings: Mapping[str, Any],
    stored: Mapping[str, str],
    stacks: Mapping[str, Stack],
    known: Mapping[str, tuple[int, int]],
    parameters: Mapping[str, Array],
) -> None:
    """Raise unless the tensors of every layer have the rank that the settings imply."""
    names = [pattern_name(settings, stacks, *each) for each in stored.items()]
    ranks = by_pattern(path / CONFIG, settings, "rank_pattern", names, settings.get("r", 8))
    for module, rank in zip(stored, ranks, strict=True):
        count = stacks[module].shape[0] if module in stacks else 1
        _check_shapes(path, settings, module, rank * count, known[module], parameters)


def _check_dropout(path: Path, settings: Mapping[str, Any], names: Collection[str]) -> None:
    """Warn if peft applies dropout to lm_head, which this library does not."""
    if settings.get("lora_dropout") and PREFIX + f"lm_head.{DOWN}" in names:
        warnings.warn(
            f"{path}: peft applies lora_dropout={settings['lora_dropout']} to all layers; here"
            " lm_head has no dropout, so further training differs slightly",
            stacklevel=4,
        )


def _fitting(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array, as float32 if its dtype cannot be combined with the model's."""
    return array.astype(array.dtype if array.dtype in allowed("param", dtype) else FLOAT32)


def _read(path: Path, config: Config) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the settings and the tensors of an adapter's folder."""
    settings = read_settings(path)
    if is_of_mlx(path, settings):
        settings, tensors = read_mlx(path, config, settings)
        _check(path / CONFIG, settings)
        return settings, tensors
    if str(settings.get("init_lora_weights")).lower() == "olora":  # upper or lower case, as in peft
        settings["init_lora_weights"] = "olora"
    _check(path / CONFIG, settings)
    if not (path / WEIGHTS).exists() and (path / PICKLE).exists():
        raise ConfigError(
            f"{path} holds only {PICKLE}; pickled weights can run code and are never read: convert"
            f" it once, in torch, with safetensors.torch.save_file(torch.load({PICKLE!r},"
            f" weights_only=True), {WEIGHTS!r})"
        )
    with opened(path / WEIGHTS) as file:
        return settings, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _problem(file: Path, name: str, config: Config) -> str:
    """Return the message for a tensor of a layer that does not support adapters."""
    problem = f"{file}: tensor {name[:200]!r} does not belong to a linear layer in the blocks"
    problem += f" of a {config.model_type}, nor to a table of this model"
    return f"{problem}; pass the model that the adapter is for"


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a setting of adapter_config.json that is not supported."""
    if (kind := settings.get("peft_type")) != "LORA":
        cure = "this type changes no weights; train a LoRA adapter" if kind in NO_WEIGHTS else MERGE
        raise ConfigError(f"{path}: peft_type is {kind!r}; it must be LORA: {cure}")
    for key, default in UNUSED.items():
        value = settings.get(key, default)
        if value != default and value not in (None, [], {}, False):
            raise ConfigError(f"{path}: {key} is {value!r}, which is not supported; {MERGE}")
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init not in INITIAL:
        if init.startswith(RESIDUAL):
            cure = "in peft: save_pretrained(path_initial_model_for_weight_conversion=...)"
            problem = f"the adapter needs the base weights that {init!r} changed"
            raise ConfigError(f"{path}: {problem}; convert it {cure}")
        if init.lower() not in PLAIN:
            raise ConfigError(f"{path}: init_lora_weights is {init!r}, which is not known; {MERGE}")
    unread = [key for key, value in settings.items() if key not in KNOWN and value]
    if unread:
        problem = "unknown settings, which are ignored as in a version of peft without them"
        warnings.warn(shortened(f"{path}: {problem}: {', '.join(unread)}"), stacklevel=6)
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        _check_number(path, key, settings.get(key, 8))
        for name, value in (settings.get(pattern) or {}).items():
            _check_number(path, f"{pattern}[{name!r}]", value)
    dropout = settings.get("lora_dropout") or 0.0
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ConfigError(f"{path}: lora_dropout is {dropout!r}; it must be in 0 .. 1")


def _check_number(path: Path, key: str, value: Any) -> None:
    """Raise a ConfigError unless a rank is a positive integer, or an alpha a number."""
    if key.startswith("r"):
        if not is_integer(value, 1):
            raise ConfigError(f"{path}: {key} is {value!r}; it must be an integer, 1 or more")
    elif not is_number(value) or not math.isfinite(value):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a number")


def _check_shapes(
    folder: Path,
    settings: Mapping[str, Any],
    module: str,
    rank: int,
    shape: tuple[int, int],
    parameters: Mapping[str, Array],
) -> None:
    """Raise unless all tensors of a layer are there, with shapes that fit its weight."""
    prefix = f"{PREFIX}{module}."
    expected: dict[str, tuple[int, ...]] = {DOWN: (rank, shape[1]), UP: (shape[0], rank)}
    if module == TABLE.removesuffix(".weight"):
        expected = {EMBEDDING_DOWN: (rank, shape[0]), EMBEDDING_UP: (shape[1], rank)}
    both = [key for key in ("lora_bias", "use_dora") if settings.get(key)]
    if both and (".layers." not in module or len(both) > 1):
        which = " and ".join(both)
        raise ConfigError(f"{folder / CONFIG}: {which} of {module} is not supported; {MERGE}")
    if settings.get("lora_bias"):
        expected[BIAS] = (shape[0],)
    if settings.get("use_dora"):
        expected[MAGNITUDE] = (shape[0],)
    present = {n.removeprefix(prefix) for n in parameters if module_of(n) == module}
    if present != expected.keys():
        wrong = sorted(present ^ expected.keys())[0]
        state = "is missing" if wrong in expected else "is not expected by adapter_config.json"
        problem = f"{wrong} of {module} {state}"
        raise ConfigError(f"{folder / WEIGHTS}: {problem}; copy the adapter again")
    for part, size in expected.items():
        if parameters[prefix + part].shape != size:
            actual = parameters[prefix + part].shape
            raise ConfigError(f"{folder / WEIGHTS}: {prefix + part} is {actual}; it must be {size}")
