"""Small calls of every op that frameworks differentiate, with all their options."""

import inspect
from typing import Any

import pytest

from unsloth_cupy.bench import cases
from unsloth_cupy.core.dtypes import DIFFERENTIABLE
from unsloth_cupy.interop._wiring import operators

SCALE = cases.Scale(tokens=16, hidden=16, inner=24, vocab=20, heads=4, kv_heads=2, dim=8)
OPS = [op for op in operators() if op.backward is not None]


def _has_more(op: Any) -> bool:
    """Return whether an op has optional operands for which arrays can be drawn."""
    both = [cases.draw(op, SCALE, optional=optional).arrays for optional in (False, True)]
    return any((a is None) != (b is None) for a, b in zip(*(c.values() for c in both), strict=True))


every_call = pytest.mark.parametrize(
    ("op", "optional"),
    [
        pytest.param(op, optional, id=op.__name__ + "-every-operand" * optional)
        for op in OPS
        for optional in (False, True)[: 1 + _has_more(op)]
    ],
)


def drawn(op: Any, optional: bool) -> tuple[cases.Call, list[str]]:
    """Return a call with all its options, and the names of its arrays that have a gradient."""
    call, parameters = cases.draw(op, SCALE, optional=optional), inspect.signature(op.definition)
    options = {p.name: p.default for p in parameters.parameters.values() if p.name in op.options}
    kinds, back = {o.name: o.kind for o in op.contract.inputs}, op.backward.contract.outputs
    names = [o.name[1:] for o in back if kinds[o.name[1:]] in DIFFERENTIABLE]
    names = [name for name in names if call.arrays[name] is not None]
    return call._replace(options=options | call.options), names
