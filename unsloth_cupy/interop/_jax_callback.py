"""What XLA calls back: an op on its buffers.

Written once for each op and the arrays that are there.  For ``swiglu`` it is

    def call(gate, up):
        y = op(gate, up)
        return y,

    def run(context, results, gate, up):
        if gate.__dlpack_device__()[0] != 1:
            return on_gpu(context, results, (gate, up))
        y, = call(gate.__array__(), up.__array__())
        results[0].__array__()[...] = y
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.call import write
from ..core.dtypes import Stored
from ..core.op import Op
from ._jax_gpu import OnGpu
from ._wiring import SEED, may_be_number

SOURCE = """
def call({names}):
    {found} = op({passed})
    return {returned}

def run(_context, _results, {names}):
    if {lead}.__dlpack_device__()[0] != 1:
        return on_gpu(_context, _results, ({tupled}))
    {returned} = call({arrays})
    {written}
"""


def on_buffers(
    op: Op[..., Any], names: tuple[str, ...], fixed: Mapping[str, Any], outputs: tuple[str, ...]
) -> Callable[..., None]:
    """Return the callback of a call, which writes these outputs into XLA's buffers."""
    scope: dict[str, Any] = {"op": op, "number": _number, "fixed": fixed}
    numbers = {operand.name for operand in op.contract.inputs if may_be_number(operand)}
    passed = dict.fromkeys(op.names[: op.positional], "None")
    passed |= {name: f"number({name})" if name in numbers else name for name in names}
    passed |= {name: f"fixed[{name!r}]" for name in fixed}
    if SEED in names:
        passed[SEED] = f"int({SEED}) % 2**64"
    given = [passed.pop(name) for name in op.names[: op.positional]]
    given += [f"{name}={value}" for name, value in passed.items()]
    writes = [f"_results[{i}].__array__()[...] = _{name}" for i, name in enumerate(outputs)]
    source = SOURCE.format(
        names=", ".join(names),
        lead=names[0],
        tupled="".join(f"{name}, " for name in names),
        arrays=", ".join(f"{name}.__array__()" for name in names),
        found=", ".join(f"_{output.name}" for output in op.contract.outputs),
        passed=", ".join(given),
        returned="".join(f"_{name}, " for name in outputs),
        written="\n    ".join(writes),
    )
    write(f"callback of {op.__name__} in JAX", source, scope)
    scope["on_gpu"] = OnGpu(scope["call"])
    run: Callable[..., None] = scope["run"]
    return run


def holds_weight(run: Any) -> bool:
    """Say whether a callback holds a quantized weight."""
    fixed = run.__globals__.get("fixed", {})
    return any(isinstance(value, Stored) for value in fixed.values())


def _number(array: Any) -> Any:
    """Return an integer for an array of the host that holds one."""
    return array if array.ndim or not isinstance(array, np.ndarray) else int(array)
