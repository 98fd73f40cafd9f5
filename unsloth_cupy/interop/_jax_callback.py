"""Generates the callback with which XLA runs an op on its buffers.

A callback is generated once for each op and combination of present arrays.  For ``swiglu`` it is

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
from functools import partial
from typing import Any

import numpy as np

from ..core.call import write
from ..core.op import Op
from ..core.replay import choosing
from ._jax_gpu import OnGpu
from ._wiring import SEED, may_be_number

SOURCE = """
def call({names}):
    {outputs} = op({arguments})
    return {returned}

def run(_context, _results, {names}):
    if {lead}.__dlpack_device__()[0] != 1:
        return on_gpu(_context, _results, ({tupled}))
    {returned} = call({arrays})
    {written}
"""


def on_buffers(
    op: Op[..., Any],
    names: tuple[str, ...],
    fixed: Mapping[str, Any],
    outputs: tuple[str, ...],
    marks: tuple[Any, ...],
) -> Callable[..., None]:
    """Return the callback of a call, which writes these outputs to XLA's buffers.

    ``names`` are the operands in XLA's buffers, ``fixed`` has options and other operands.
    ``marks`` are the ``choices`` of ``core.replay``, which are passed as XLA calls from another
    thread.
    """
    scope: dict[str, Any] = {"op": partial(choosing, marks, op), "number": _number, "fixed": fixed}
    numbers = {operand.name for operand in op.contract.inputs if may_be_number(operand)}
    values = dict.fromkeys(op.names[: op.positional], "None")
    values |= {name: f"number({name})" if name in numbers else name for name in names}
    values |= {name: f"fixed[{name!r}]" for name in fixed}
    if SEED in names:
        values[SEED] = f"int({SEED}) % 2**64"
    arguments = [values.pop(name) for name in op.names[: op.positional]]
    arguments += [f"{name}={value}" for name, value in values.items()]
    writes = [f"_results[{i}].__array__()[...] = _{name}" for i, name in enumerate(outputs)]
    source = SOURCE.format(
        names=", ".join(names),
        lead=names[0],
        tupled="".join(f"{name}, " for name in names),
        arrays=", ".join(f"{name}.__array__()" for name in names),
        outputs=", ".join(f"_{output.name}" for output in op.contract.outputs),
        arguments=", ".join(arguments),
        returned="".join(f"_{name}, " for name in outputs),
        written="\n    ".join(writes),
    )
    write(f"callback of {op.__name__} in JAX", source, scope)
    scope["on_gpu"] = OnGpu(scope["call"])
    run: Callable[..., None] = scope["run"]
    return run


def _number(array: Any) -> Any:
    """Return a NumPy array of shape () as a Python integer, other arrays as they are."""
    return array if array.ndim or not isinstance(array, np.ndarray) else int(array)
