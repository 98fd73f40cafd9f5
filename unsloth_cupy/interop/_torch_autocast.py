"""The dtypes that torch's autocast gives the arrays of an op; weights are cast once a region.

torch keeps what it casts of weights until the outermost ``with torch.autocast`` ends, and lets
nobody else in.  So a tensor of one element is cast by torch: as long as that lives, the region
goes on.
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
    """A weight in autocast's dtype, and which weight that was."""

    weight: Any
    version: int  # of its values
    cast: Any


casts: dict[Any, Cast] = {}  # of the region that goes on
region: Callable[[], Any] = types.NoneType  # what lives as long, or None


def autocast(
    op: Op[..., Any], tensors: Sequence[Any], device: str, *, once: bool = False
) -> Sequence[Any]:
    """Return the op's arrays in the dtypes that autocast, where it is on, gives them.

    What multiplies matrices takes autocast's; what the op wants in float32 takes that; all
    others take the widest that they meet.  Parameters of norms and tables may stay float32.
    ``once`` says that weights are to be cast once in a region.
    """
    pairs = [*zip(op.contract.inputs, tensors, strict=True)]
    given = [(o, t) for o, t in pairs if not (t is None or isinstance(t, Stored))]
    floats = [t.dtype for o, t in given if o.kind in LEADING]
    if not floats or not torch.is_autocast_enabled(device):
        return tensors
    dtype = functools.reduce(torch.promote_types, floats)
    if dtype is not torch.float64:
        dtype = torch.float32 if op.facts.get("autocast") == "float32" else dtype
        dtype = torch.get_autocast_dtype(device) if is_product(op) else dtype
    fits: dict[str, Any] = dict.fromkeys(LEADING, (dtype,))
    fits |= dict.fromkeys(("param", "table"), (dtype, torch.float32))
    moved = {o.name for o, t in given if o.kind in fits and t.dtype not in fits[o.kind]}
    cast = _cast_once if once and torch.is_autocast_cache_enabled() else torch.Tensor.to
    return [cast(t, dtype) if o.name in moved else t for o, t in pairs]


def _cast_once(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in autocast's dtype; of weights, by torch's rule for them, it is kept."""
    weight = tensor.requires_grad and tensor.is_leaf and tensor._base is None
    low = torch.get_autocast_dtype(tensor.device.type)
    if not weight or tensor.dtype is not torch.float32 or dtype is not low:
        return tensor.to(dtype)
    if region() is None:
        _begin(tensor.device)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = id(tensor), dtype, modes
    kept = casts.get(key)
    if kept is None or kept.version != tensor._version:
        kept = casts[key] = Cast(tensor, tensor._version, tensor.to(dtype))
    return kept.cast


def _begin(device: torch.device) -> None:
    """Let torch cast a weight, and forget all casts when it forgets that one."""
    global region  # noqa: PLW0603  # one for all threads, as torch's own casts are
    with torch.inference_mode(False), torch.enable_grad():
        weight: Any = torch.zeros(1, 1, device=device, requires_grad=True)
        product: Any = torch.nn.functional.linear(weight, weight)
        seen = product.grad_fn._saved_self
    casts.clear()
    region = weakref.ref(seen, lambda _: casts.clear())
