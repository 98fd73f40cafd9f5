"""Casts the arrays of an op as torch's autocast would; weights once in each autocast region.

torch caches its casts of weights until the outermost ``with torch.autocast`` (a region) ends, and
its cache is not accessible.  So this module lets torch cast a tensor with one element: the region
lasts as long as that cast is alive.
"""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.dtypes import LEADING, Stored
from ..core.op import Op
from ._wiring import is_product


class Cast(NamedTuple):
    """A weight, and its cast to autocast's dtype."""

    weight: Any
    version: int  # torch's version of the weight's values at the time of the cast
    cast: Any


casts: dict[Any, Cast] = {}  # in the current region
region: Callable[[], Any] = types.NoneType  # returns an object during a region, None after it


def autocast(
    op: Op[..., Any], tensors: Sequence[Any], device: str, *, once: bool = False
) -> Sequence[Any]:
    """Return the op's arrays in autocast's dtypes, if autocast is on.

    Matrix products use autocast's dtype, ops that declare float32 use float32, and all others the
    widest dtype of their operands.  Parameters of norms and tables may stay float32.  With ``once``
    weights are cast only once in a region.
    """
    pairs = [*zip(op.contract.inputs, tensors, strict=True)]
    dense = [(o, t) for o, t in pairs if not (t is None or isinstance(t, Stored))]
    floats = [t.dtype for o, t in dense if o.kind in LEADING]
    if not floats or not torch.is_autocast_enabled(device):
        return tensors
    dtype = functools.reduce(torch.promote_types, floats)
    if dtype is not torch.float64:
        dtype = torch.float32 if op.facts.get("autocast") == "float32" else dtype
        dtype = torch.get_autocast_dtype(device) if is_product(op) else dtype
    allowed: dict[str, Any] = dict.fromkeys(LEADING, (dtype,))
    allowed |= dict.fromkeys(("param", "table"), (dtype, torch.float32))
    moved = {o.name for o, t in dense if o.kind in allowed and t.dtype not in allowed[o.kind]}
    cast = _cast_once if once and torch.is_autocast_cache_enabled() else torch.Tensor.to
    return [cast(t, dtype) if o.name in moved else t for o, t in pairs]


def _cast_once(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor cast to a dtype; casts of weights are cached by the rules of torch."""
    weight = tensor.requires_grad and tensor.is_leaf and tensor._base is None
    low = torch.get_autocast_dtype(tensor.device.type)
    if not weight or tensor.dtype is not torch.float32 or dtype is not low:
        return tensor.to(dtype)
    if region() is None:
        _begin(tensor.device)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = id(tensor), dtype, modes
    known = casts.get(key)
    if known is None or known.version != tensor._version:  # the weight has changed since the cast
        known = casts[key] = Cast(tensor, tensor._version, tensor.to(dtype))
    return known.cast


def _begin(device: torch.device) -> None:
    """Start a region: let torch cast a weight, and clear ``casts`` when torch drops that cast."""
    global region  # noqa: PLW0603  # one for all threads, as torch's cache
    with torch.inference_mode(False), torch.enable_grad():
        weight: Any = torch.zeros(1, 1, device=device, requires_grad=True)
        product: Any = torch.nn.functional.linear(weight, weight)
        cast = product.grad_fn._saved_self
    casts.clear()
    region = weakref.ref(cast, lambda _: casts.clear())
