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
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ..core.call import checked, is_integer, is_number
from ..core.dtypes import FLOAT32, Array
from ..core.gpu import at
from ..errors import ConfigError
from ..machine import check_bytes
from ..ops.linear.linear import linear
from ..ops.linear.lora import lora_linear
from ..ops.linear.lora_linears import LoraLayer, lora_linears
from ..ops.linear.lora_merge import lora_merge, row_norms
from ..ops.quantized.weight import Quantized, held_arrays
from ..placement import placed
from .checkpoint_files import write_folder
from .config import Config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


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
        alpha = by_pattern(patterns, module, self.settings.get("lora_alpha", 8))
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

    def merged(self, parameters: Mapping[str, Any], requantize: bool = False) -> dict[str, Any]:
        """Return the parameters of a model in which the adapter is part of the weights."""
        return {name: self.merge(name, value, requantize) for name, value in parameters.items()}

    def merge(self, name: str, weight: Any, requantize: bool = False) -> Any:
        """Return a weight of which the adapter is part; one that has none is returned as it is.

        Quantized weights become dense either way, or are quantized again.
        """
        module, quantized = name.removesuffix(".weight"), isinstance(weight, Quantized)
        if module not in self.scales or module == name:
            return weight.dequantize() if quantized and not requantize else weight
        prefix = f"{PREFIX}{module}."
        whole = lora_merge(
            weight,
            self.parameters[prefix + DOWN],
            self.parameters[prefix + UP],
            scale=self.scales[module],
            magnitude=self.parameters.get(prefix + MAGNITUDE),
        )
        return weight.requantized(whole) if quantized and requantize else whole

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the folder of the adapter, beside its place first."""
        layout = {WEIGHTS: list(self.parameters)}
        write_folder(folder, {CONFIG: self.settings}, self.parameters, layout)


@checked
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

    Raises
    ------
    ConfigError
        An option makes no sense, or names no linear layer of the blocks.
    """
    _check_options(rank=rank, alpha=alpha, dropout=dropout, seed=seed)
    known = linear_layers(config)
    words = sorted({name.rpartition(".")[2] for name in known})
    chosen: Any = words if targets is None else targets
    listed = isinstance(chosen, Collection) and not isinstance(chosen, str) and len(chosen) > 0
    if not listed or not all(word in words for word in chosen):
        cure = f"pass a list of some of {', '.join(words)}"
        raise ConfigError(f"create_adapter(targets={targets!r}): {cure}")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(chosen),
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    needed = sum(sum(known[name]) for name in known if name.rpartition(".")[2] in chosen)
    home = next(iter(weights.values()), None)
    check_bytes(f"create_adapter(rank={rank})", FLOAT32.itemsize * rank * needed, home)
    parameters: dict[str, Array] = {}
    for index, (module, (outputs, inputs)) in enumerate(known.items()):
        if module.rpartition(".")[2] not in chosen:
            continue
        draw, bound = np.random.default_rng([seed, index]), 1 / math.sqrt(inputs)
        a = draw.uniform(-bound, bound, (rank, inputs))
        weight: Any = weights.get(f"{module}.weight", home)  # another rank may hold it
        prefix = f"{PREFIX}{module}."
        _, near = next(held_arrays({module: weight}))
        parameters[prefix + DOWN] = down = placed(a.astype(FLOAT32), near)
        parameters[prefix + UP] = up = placed(np.zeros((outputs, rank), FLOAT32), near)
        if dora:
            with at(weight):
                wide = weight.astype(np.promote_types(weight.dtype, FLOAT32))
                parameters[prefix + MAGNITUDE] = row_norms(wide, down, up).astype(FLOAT32)
    return Adapter(settings, parameters)


def _check_options(rank: Any, alpha: Any, dropout: Any, seed: Any) -> None:
    for name, value, fine, cure in (
        ("rank", rank, is_integer(rank, 1), "1 or more"),
        ("alpha", alpha, alpha is None or (is_number(alpha) and alpha > 0), "a number above 0"),
        ("dropout", dropout, is_number(dropout) and 0 <= dropout < 1, "a share in 0 .. 1"),
        ("seed", seed, is_integer(seed), "an integer, 0 or more"),
    ):
        if not fine:
            raise ConfigError(f"create_adapter({name}={value!r}): pass {cure}")


def linear_layers(config: Config) -> dict[str, tuple[int, int]]:
    """Return the linear layers of the blocks, and the shapes of their weights."""
    if config.bit_layers:
        problem = "the layers of this model are rounded at every call, and learn themselves"
        raise ConfigError(f"an adapter has no place: {problem}; train its weights")
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in config.shapes().items()
        if name.startswith("model.layers.") and len(shape) == 2
    }


def by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _seed(seed: int, module: str) -> int:
    """Return a seed of a layer's own: no two layers of a step drop alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:8], "little")
