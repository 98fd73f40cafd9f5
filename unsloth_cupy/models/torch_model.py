"""A ``Transformer`` that shares the weights of a transformers model in memory."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.dtypes import FLOATS, Array, Stored
from ..core.frameworks import FRAMEWORKS
from ..errors import ConfigError, FrameworkError
from .configs.config import CORRECTION, Config
from .configs.draft_heads import without_heads
from .configs.heads import ENDS
from .configs.names import TABLE, is_stack, parameter_name
from .configs.text_configs import text_config
from .folders.quantized_weights import FIXED
from .parse import parse
from .transformer import Transformer


def from_torch(model: Any) -> Transformer:
    """Return a ``Transformer`` that shares the weights of a transformers model in memory.

    Nothing is copied: a change in place shows in both models.  ``parameters[name] = array``
    replaces a weight in one model only.  Layers of bitsandbytes become ``Nf4`` or ``Int8`` weights
    over the same memory.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model whose type and head ``load`` supports.

    Returns
    -------
    model : Transformer

    Raises
    ------
    FrameworkError
        The argument is not a model of transformers, or its weights are on a device that ops cannot
        read.
    ConfigError
        The type is not supported; or the weights do not match the config, because another library
        than bitsandbytes quantized them, or because of adapters: call ``merge_and_unload()`` first.
    """
    if not hasattr(model, "config") or not hasattr(model, "named_parameters"):
        raise FrameworkError(
            f"from_torch: {type(model).__name__} is not a model of transformers; pass a model from"
            " AutoModelForCausalLM.from_pretrained"
        )
    texts = {"config.json": _plain(model.config)}
    if type(model).__name__.endswith(tuple(ENDS)):
        texts["config.json"]["architectures"] = [type(model).__name__]
    if getattr(model, "generation_config", None) is not None:
        texts["generation_config.json"] = _plain(model.generation_config)
    try:
        config = without_heads(parse(texts["config.json"]))  # transformers has no draft heads
    except ConfigError as error:
        raise ConfigError(f"from_torch: {error}") from None
    if config.experts is not None and config.experts.transposed:
        problem = f"the experts of a {config.model_type} have another layout here"
        cure = "save_pretrained(folder) writes them, and load(folder) reads that folder"
        raise ConfigError(f"from_torch: {problem}; {cure}")
    texts["config.json"] = dict(text_config(texts["config.json"]))
    buffers = ((name, value) for name, value in model.named_buffers() if name.endswith(FIXED))
    named = _by_parameter([*model.named_parameters(), *buffers])
    layers = _by_parameter((f"{name}.weight", layer) for name, layer in model.named_modules())
    return Transformer(config, _checked(config, named, layers), texts)


def _plain(config: Any) -> dict[str, Any]:
    """Return a transformers config as a dict, as in config.json."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _by_parameter(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return values by the names of parameters, without the parts that are not loaded."""
    return {own: value for name, value in named if (own := parameter_name(name)) is not None}


def _checked(
    config: Config, named: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Array]:
    """Return arrays over the weights of the model; raise unless they match the config."""
    from .. import interop  # noqa: F401  # registers torch in FRAMEWORKS

    shapes = config.shapes()
    if wrong_names := sorted(named.keys() - shapes.keys()) + sorted(shapes.keys() - named.keys()):
        problem = "does not belong to" if wrong_names[0] in named else "is missing in"
        cure = "merge adapters (merge_and_unload) and pass the model with its head"
        raise ConfigError(f"from_torch: {wrong_names[0]} {problem} a {config.model_type}; {cure}")
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        array: Any = _quantized(name, layers.get(name))
        array = _dense(name, named[name].detach()) if array is None else array
        if tuple(array.shape) == (1, *shape) and name.endswith(CORRECTION):
            array = array[0]
        if is_stack(name) and config.experts is not None and config.experts.zero:
            array = array[: shape[0]]  # zero experts compute nothing
        if tuple(array.shape) != shape:
            raise ConfigError(
                f"from_torch: {name} has the shape {tuple(array.shape)}; its config implies {shape}"
            )
        arrays[name] = array
    dtype = arrays[TABLE].dtype
    arrays_of_layers = [a for n, a in arrays.items() if dtype not in config.widened(n)]
    kinds = sorted({str(a.dtype) for a in arrays_of_layers if not isinstance(a, Stored)})
    if len(kinds) > 1 or dtype not in FLOATS:
        cure = "convert them to one of float32, bfloat16 and float16: model.to(dtype)"
        raise ConfigError(f"from_torch: the weights are {' and '.join(kinds)}; {cure}")
    return {n: a.computed_in(dtype) if isinstance(a, Stored) else a for n, a in arrays.items()}


def _dense(name: str, weight: Any) -> Any:
    """Return an array over the memory of a tensor."""
    try:
        return FRAMEWORKS["torch"].adopt(weight)
    except (TypeError, RuntimeError, BufferError, NotImplementedError) as error:
        cure = "load the weights on a CPU or a GPU first"
        raise FrameworkError(f"from_torch: {name} is on {weight.device}; {cure}") from error


def _quantized(name: str, layer: Any) -> Any:
    """Return the quantized weight of a layer of bitsandbytes; None for other layers."""
    from ..interop.quantized_layers import kind_of, weight_of

    try:
        return None if kind_of(layer) is None else weight_of(layer)
    except ConfigError as error:
        raise ConfigError(f"from_torch: {name}: {error}") from None
