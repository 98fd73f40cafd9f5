"""The bytes that a call must move, and the operations of its matrix products."""

from collections.abc import Mapping
from typing import Any

from ..bench.cases import Call
from ..bench.timing import operations, traffic


def counts(op: Any, operands: Mapping[str, Any], options: Any, result: Any) -> tuple[int, int]:
    """Return bytes and operations of a call; an array updated in place is moved twice."""
    results = result if type(result) is tuple else (result,)
    pairs = zip(op.contract.outputs, results, strict=True)
    outputs = {operand.name: array for operand, array in pairs if array is not None}
    arrays = {name: a for name, a in operands.items() if hasattr(a, "nbytes")}
    call = Call(op, arrays, options)
    moved = traffic(call, outputs)
    if not moved and op.__name__.endswith("_") and "traffic" not in op.facts:
        moved = sum(a.nbytes for a in (*arrays.values(), *outputs.values()))
    return moved, operations(call, outputs)
