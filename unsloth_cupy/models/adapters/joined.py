"""Store the A of layers with the same input (q, k, v; gate, up) as rows of one matrix on a GPU.

One cast then rounds them all, for the product that reads the input once.  Each A keeps its name and
can be changed in place.
"""

from collections.abc import Sequence
from typing import Any

from ...core.arrays import empty
from ...core.gpu import is_cupys
from ...ops.linear.linears import rows_of_one

GROUPS = (
    [f"self_attn.{n}_proj.lora_A.weight" for n in "qkv"],
    [f"mlp.{n}_proj.lora_A.weight" for n in ("gate", "up")],
)


def join_downs(parameters: dict[str, Any]) -> dict[str, Any]:
    """Move the A of each group into one matrix, if they are GPU arrays."""
    for group in GROUPS:
        layers = {
            name[: -len(part)]: 0 for part in group for name in parameters if name.endswith(part)
        }
        for layer in layers:
            names = [layer + part for part in group if layer + part in parameters]
            arrays = [parameters[name] for name in names]
            if len(arrays) > 1 and all(is_cupys(each.__class__) for each in arrays):
                parameters |= zip(names, _rows_of_one(arrays), strict=True)
    return parameters


def _rows_of_one(arrays: Sequence[Any]) -> Sequence[Any]:
    """Copy matrices into one, and return its rows; unchanged if this is done, or impossible."""
    lead = arrays[0]
    if rows_of_one(arrays) is not None or len({(a.dtype, a.shape[1]) for a in arrays}) > 1:
        return arrays
    whole = empty((sum(len(each) for each in arrays), lead.shape[1]), lead.dtype, like=lead)
    rows, start = list[Any](), 0
    for each in arrays:
        rows.append(whole[start : start + len(each)])
        rows[-1][...] = each
        start += len(each)
    return rows
