"""The library inside of other people's programs: torch, JAX and others.

Each is entered here by name and imported with its first array.
"""

import importlib
from typing import Any

from ..core.frameworks import FRAMEWORKS, Framework


def _enter(name: str, module: str, door: Any = None) -> None:
    """Enter a framework whose module has adopt, give_back and stream, unimported."""

    def later(function: str) -> Any:
        def call(*given: Any) -> Any:
            return getattr(importlib.import_module(module, __name__), function)(*given)

        return call

    FRAMEWORKS[name] = Framework(later("adopt"), later("give_back"), later("stream"), door)


def _torch(op: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    from . import torch

    return torch.run(op, arrays, options)


def _jax(op: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    from . import jax

    return jax.run(op, arrays, options)


_enter("torch", "._torch_memory", _torch)
_enter("jax", "._jax_arrays", _jax)
for _name in ("tensorflow", "paddle", "mlx"):
    _enter(_name, f"._{_name}")
