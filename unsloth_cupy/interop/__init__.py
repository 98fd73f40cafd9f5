"""Support for arrays of torch and JAX.

Each library is registered here by name; its module is imported when its first array is passed.
"""

import importlib
from typing import Any

from ..core import names as _names
from ..core.frameworks import FRAMEWORKS as _FRAMEWORKS
from ..core.frameworks import Framework as _Framework


def _register(name: str, module: str, run: Any = None, takes_integers: bool = False) -> None:
    """Register a library without importing it; ``module`` has adopt, give_back and stream."""

    def lazy(function: str) -> Any:
        def call(*arguments: Any) -> Any:
            return getattr(importlib.import_module(module, __name__), function)(*arguments)

        return call

    adopt, give_back, stream = map(lazy, ("adopt", "give_back", "stream"))
    _FRAMEWORKS[name] = _Framework(adopt, give_back, stream, run, takes_integers)


def _torch(op: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """Run an op on tensors of torch."""
    from . import torch

    return torch.run(op, arrays, options)


def _jax(op: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """Run an op on arrays of JAX."""
    from . import jax

    return jax.run(op, arrays, options)


_register("torch", "._torch_memory", _torch)
_register("jax", "._jax_arrays", _jax, takes_integers=True)

_names.publish(__name__, {name: name for name in ("huggingface", "jax", "torch")})
