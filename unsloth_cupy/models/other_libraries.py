"""Methods of a model that take tokens of torch, JAX and others, and the model that torch runs."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from ..core.arrays import common, native
from ..core.dtypes import Array
from ..core.frameworks import DLPACK, FRAMEWORKS, Framework, adopted

ARRAYS = ("tokens", "labels", "mask", "offsets")
P = ParamSpec("P")
R = TypeVar("R")


def from_any_library(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method of a model take arrays of torch, JAX and others: without a copy, and back.

    What it makes of tokens goes back to their library; gradients are the parameters' own.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*given: P.args, **options: P.kwargs) -> R:
        bound = signature.bind(*given, **options)
        arrays = {name: bound.arguments.get(name) for name in ARRAYS}
        if native([*arrays.values()]):
            return method(*given, **options)
        library = common("Transformer", [*arrays], [*arrays.values()])
        there = FRAMEWORKS.get(library, DLPACK)
        operand = next(a for a in arrays.values() if a is not None and type(a) is not int)
        with there.stream(operand):
            taken = adopted(there, "Transformer", arrays, arrays.values())
            known = bound.arguments.keys()
            bound.arguments |= {k: a for k, a in zip(arrays, taken, strict=True) if k in known}
            result: Any = method(*bound.args, **bound.kwargs)
            if isinstance(result, Iterator):
                return cast(R, _resumed(result, there, operand))
            if isinstance(result, tuple):  # a loss, and gradients by name
                return cast(R, (_back(result[0], there, operand), *result[1:]))
            return cast(R, _back(result, there, operand))

    return call


def _back(result: Any, there: Framework, operand: Any) -> Any:
    return there.give_back(np.asarray(result) if np.isscalar(result) else result, operand)


def _resumed(results: Iterator[Any], there: Framework, operand: Any) -> Iterator[Any]:
    """Yield results in the library of operand, each computed on the stream of that library."""
    while True:
        with there.stream(operand):
            try:
                result = _back(next(results), there, operand)
            except StopIteration:
                return
        yield result


def to_torch(config: Mapping[str, Any], texts: Mapping[str, Any], arrays: dict[str, Array]) -> Any:
    """Return a model of transformers of a config.json over the memory of these arrays."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    from .. import interop  # noqa: F401  # enters torch among the frameworks

    values = {**config}
    parsed = AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    back = FRAMEWORKS["torch"].give_back
    state = {name: back(array, None) for name, array in arrays.items()}
    dtype, bar = next(iter(state.values())).dtype, logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(None, config=parsed, state_dict=state, dtype=dtype)
    finally:
        if bar:
            logging.enable_progress_bar()
    for key, value in texts.get("generation_config.json", {}).items():
        setattr(model.generation_config, key, value)
    return model
