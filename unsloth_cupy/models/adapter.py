"""Low-rank adapters of a model, in the files and under the names of peft.

A folder holds adapter_config.json and adapter_model.safetensors.  The tensors of a linear layer
``model.layers.0.self_attn.q_proj`` are named

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight         (rank, inputs)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight         (outputs, rank)
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector (outputs,), DoRA alone
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from .. import LoraLayer, linear, lora_linear, lora_linears, lora_merge
from .._dtypes import FLOAT32, FLOATS, allowed
from .._typing import Array
from ..errors import ConfigError
from ..ops.lora_merge import row_norms
from .config import Config
from .files import opened, read_json, write_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
# What other adapters do, and these do not: each must be absent, or mean nothing.
UNUSED = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
}


class Adapter:
    """What is added to the linear layers of a model.

    Attributes
    ----------
    settings : dict
        As adapter_config.json holds them.
    parameters : dict of str to array
        By the names of peft's file.
    """

    def __init__(self, settings: Mapping[str, Any], parameters: dict[str, Array]) -> None:
        self.settings, self.parameters = dict(settings), parameters
        self.dropout = float(settings.get("lora_dropout") or 0.0)
        modules = [name.removesuffix(DOWN)[:-1] for name in parameters if name.endswith(DOWN)]
        self.scales = {module.removeprefix(PREFIX): self._scale(module) for module in modules}

    def _scale(self, module: str) -> float:
        rank = self.parameters[f"{module}.{DOWN}"].shape[0]
        patterns = self.settings.get("alpha_pattern") or {}
        alpha = _by_pattern(patterns, module, self.settings.get("lora_alpha", 8))
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def linears(
        self, parameters: Mapping[str, Any], modules: Sequence[str], x: Any, seed: int | None
    ) -> list[Any]:
        """Return linear layers of x with what adapters they have; parameters hold both, by name.

        Without dropout the adapters read x together; with it each has its own: ``lora_linears``.
        """
        dropout = self.dropout if seed is not None else 0.0
        mine = {name: self._layer(parameters, name) for name in modules if name in self.scales}
        if len(mine) > 1 and not dropout:
            made = dict(zip(mine, lora_linears(x, [*mine.values()]), strict=True))
        else:
            made = {
                name: lora_linear(
                    x,
                    **layer._asdict(),
                    dropout=dropout,
                    seed=_seed(seed, name) if dropout and seed is not None else None,
                )
                for name, layer in mine.items()
            }
        return [
            made[name]
            if name in made
            else linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
            for name in modules
        ]

    def _layer(self, parameters: Mapping[str, Any], module: str) -> LoraLayer:
        prefix = f"{PREFIX}{module}."
        return LoraLayer(
            parameters[f"{module}.weight"],
            parameters[prefix + DOWN],
            parameters[prefix + UP],
            self.scales[module],
            parameters.get(f"{module}.bias"),
            parameters.get(prefix + MAGNITUDE),
        )

    def merged(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Return the parameters of a model in which the adapter is part of the weights."""
        made = dict(parameters)
        for module, scale in self.scales.items():
            prefix = f"{PREFIX}{module}."
            a, b = self.parameters[prefix + DOWN], self.parameters[prefix + UP]
            made[f"{module}.weight"] = lora_merge(
                parameters[f"{module}.weight"],
                a,
                b,
                scale=scale,
                magnitude=self.parameters.get(prefix + MAGNITUDE),
            )
        return made

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the folder of the adapter, beside its place first."""
        layout = {WEIGHTS: list(self.parameters)}
        write_folder(Path(folder), {CONFIG: self.settings}, self.parameters, layout)


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
) -> Adapter:
    """Return a new adapter that leaves the model as it is: a is drawn, b is zero.

    Parameters
    ----------
    rank : int
        Of each addition.
    alpha : float, optional
        The scale is ``alpha / rank``, for rsLoRA ``alpha / sqrt(rank)``; None: 2 * rank.
    targets : sequence of str, optional
        The last words of the layers' names, as ("q_proj", "v_proj"); None: every linear layer
        of the blocks.
    dropout : float
        Share of its input that an adapter does not see in training.
    rslora, dora : bool
        See ``lora_linear``.
    seed : int
        Equal seeds give equal adapters.
    base : str, optional
        The folder of the model, for those who read the adapter.
    """
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"create_adapter(rank={rank!r}): pass 1 or more")
    known = linear_layers(config)
    words = sorted({name.rpartition(".")[2] for name in known})
    targets = words if targets is None else list(targets)
    if strange := [word for word in targets if word not in words]:
        listed = ", ".join(words)
        raise ConfigError(f"create_adapter(targets={targets}): no {strange[0]!r}; choose {listed}")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    parameters: dict[str, Array] = {}
    for index, (module, (outputs, inputs)) in enumerate(known.items()):
        if module.rpartition(".")[2] not in targets:
            continue
        draw, bound = np.random.default_rng([seed, index]), 1 / math.sqrt(inputs)
        a, weight = draw.uniform(-bound, bound, (rank, inputs)), weights[f"{module}.weight"]
        prefix = f"{PREFIX}{module}."
        parameters[prefix + DOWN] = np.asarray(a.astype(FLOAT32), like=weight)
        parameters[prefix + UP] = np.zeros((outputs, rank), FLOAT32, like=weight)
        if dora:
            down, up = parameters[prefix + DOWN], parameters[prefix + UP]
            wide = weight.astype(np.promote_types(weight.dtype, FLOAT32))
            parameters[prefix + MAGNITUDE] = row_norms(wide, down, up).astype(FLOAT32)
    return Adapter(settings, parameters)


def read_adapter(
    folder: str | PathLike[str],
    config: Config,
    dtype: np.dtype[Any],
    place: Callable[[Array], Array] = lambda array: array,
) -> Adapter:
    """Return the adapter of a folder, each tensor checked against the model it is for.

    Tensors that do not go with the model's dtype become float32, which goes with any.

    Raises
    ------
    ConfigError
        A file is missing or broken, asks for what is not LoRA, or is for another model.
    """
    path = Path(fspath(folder))
    if not path.is_dir():
        raise ConfigError(f"load(lora={str(path)!r}) is no folder; pass one that holds {CONFIG}")
    settings = read_json(path / CONFIG)
    _check(path / CONFIG, settings)
    known = linear_layers(config)
    parameters: dict[str, Array] = {}
    with opened(path / WEIGHTS) as tensors:
        for name in sorted(tensors.keys()):
            array = tensors.get_tensor(name)
            module = name.removeprefix(PREFIX).rpartition(".lora_")[0]
            if not name.startswith(PREFIX) or module not in known:
                raise ConfigError(
                    f"{path / WEIGHTS}: tensor {name!r} belongs to no linear layer of the"
                    f" {config.model_type}'s blocks; pass the model that the adapter is for"
                )
            if array.dtype not in FLOATS:
                raise ConfigError(f"{path / WEIGHTS}: tensor {name!r} is {array.dtype}, no float")
            fits = array.dtype in allowed("param", dtype)
            parameters[name] = array.astype(array.dtype if fits else FLOAT32)
    modules = {name.rpartition(".lora_")[0].removeprefix(PREFIX) for name in parameters}
    if not modules:
        raise ConfigError(f"{path / WEIGHTS} holds no tensor; copy the adapter again")
    for module in sorted(modules):
        _check_shapes(path, settings, module, known[module], parameters)
    return Adapter(settings, {name: place(array) for name, array in parameters.items()})


def linear_layers(config: Config) -> dict[str, tuple[int, int]]:
    """Return the linear layers of the blocks, and the shapes of their weights."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in config.shapes().items()
        if name.startswith("model.layers.") and len(shape) == 2
    }


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {settings.get('peft_type')!r}; it must be LORA")
    for key, nothing in UNUSED.items():
        value = settings.get(key, nothing)
        if value != nothing and value not in (None, [], {}, False):
            raise ConfigError(f"{path}: {key} is {value!r}, which is not supported; it must be off")
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key, 8), int | float) or settings.get(key, 8) <= 0:
            raise ConfigError(f"{path}: {key} is {settings[key]!r}; it must be positive")
    dropout = settings.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"{path}: lora_dropout is {dropout!r}; it must be in 0 .. 1")


def _check_shapes(
    folder: Path,
    settings: Mapping[str, Any],
    module: str,
    shape: tuple[int, int],
    parameters: Mapping[str, Array],
) -> None:
    """Raise unless the tensors of a layer are all there, in shapes that fit its weight."""
    prefix = f"{PREFIX}{module}."
    rank = _by_pattern(settings.get("rank_pattern") or {}, module, settings.get("r", 8))
    wanted: dict[str, tuple[int, ...]] = {DOWN: (rank, shape[1]), UP: (shape[0], rank)}
    if settings.get("use_dora"):
        wanted[MAGNITUDE] = (shape[0],)
    found = {name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
    if found != wanted.keys():
        odd = sorted(found ^ wanted.keys())[0]
        state = "missing" if odd in wanted else "not part of it"
        raise ConfigError(f"{folder / WEIGHTS}: {module} has {odd} {state}; copy the adapter again")
    for part, size in wanted.items():
        if parameters[prefix + part].shape != size:
            given = parameters[prefix + part].shape
            raise ConfigError(f"{folder / WEIGHTS}: {prefix + part} is {given}; it must be {size}")


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _seed(seed: int, module: str) -> int:
    """Return a seed of a layer's own: no two layers of a step drop alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:8], "little")
