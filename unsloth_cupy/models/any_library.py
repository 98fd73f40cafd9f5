"""Arrays of torch, JAX and others as arguments of a model; a model as a model of transformers."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from ..core.arrays import common, native
from ..core.dtypes import Array
from ..core.frameworks import DLPACK, FRAMEWORKS, Framework, adopt_all
from ..ops.losses.linear_log_probs import LogProbs
from ..training.variable import Var
from .configs.heads import head_of

CLASSES = {  # tables of classes in transformers, by head
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "none": "MODEL_MAPPING",
}
ARRAYS = ("tokens", "labels", "mask", "offsets", "routes")
P = ParamSpec("P")
R = TypeVar("R")


def from_any_library(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method accept arrays of torch, JAX and others without a copy.

    Results are returned as arrays of the tokens' library.  Gradients stay arrays of the parameters'
    library.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        bound = signature.bind(*arguments, **options)
        arrays = {name: bound.arguments.get(name) for name in ARRAYS}
        if native([*arrays.values()]):
            return method(*arguments, **options)
        library = common("Transformer", [*arrays], [*arrays.values()])
        framework = FRAMEWORKS.get(library, DLPACK)
        # NumPy arrays may accompany arrays of JAX; the others decide the library and the stream
        operand = next(a for a in arrays.values() if not isinstance(a, int | np.ndarray | None))
        with framework.stream(operand):
            inputs = adopt_all(framework, "Transformer", arrays, arrays.values())
            known = bound.arguments.keys()
            bound.arguments |= {k: a for k, a in zip(arrays, inputs, strict=True) if k in known}
            result: Any = method(*bound.args, **bound.kwargs)
            if isinstance(result, Iterator):
                return cast(R, _resumed(result, framework, operand))
            if isinstance(result, LogProbs):
                return cast(R, LogProbs(*(_back(each, framework, operand) for each in result)))
            if isinstance(result, tuple):  # a loss, and gradients by name
                return cast(R, (_back(result[0], framework, operand), *result[1:]))
            return cast(R, _back(result, framework, operand))

    return call


def _back(result: Any, framework: Framework, operand: Any) -> Any:
    """Return a result as an array of the library of operand; a Var is returned unchanged."""
    if type(result) is Var:
        return result
    return framework.give_back(np.asarray(result) if np.isscalar(result) else result, operand)


def _resumed(results: Iterator[Any], framework: Framework, operand: Any) -> Iterator[Any]:
    """Yield results as arrays of the library of operand, computed on that library's stream."""
    while True:
        with framework.stream(operand):
            try:
                result = _back(next(results), framework, operand)
            except StopIteration:
                return
        yield result


def to_torch(config: Mapping[str, Any], texts: Mapping[str, Any], arrays: dict[str, Array]) -> Any:
    """Return the transformers model of a config.json; it shares the memory of these arrays."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging

    from .. import interop  # noqa: F401  # registers torch in FRAMEWORKS

    values = {**config}
    parsed = AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = getattr(modeling_auto, CLASSES[head_of(config)])[type(parsed)]
    to_tensor = FRAMEWORKS["torch"].give_back
    state = {name: to_tensor(array, None) for name, array in arrays.items()}
    dtype, shows_bar = next(iter(state.values())).dtype, logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(None, config=parsed, state_dict=state, dtype=dtype)
    finally:
        if shows_bar:
            logging.enable_progress_bar()
    for key, value in texts.get("generation_config.json", {}).items():
        setattr(model.generation_config, key, value)
    return model
