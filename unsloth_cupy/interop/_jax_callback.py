"""What XLA calls back: an op on its buffers.

Written once for each op and the arrays that are there.  For ``swiglu`` it is

    def run(context, out, gate, up):
        if gate.__dlpack_device__()[0] != CPU:
            return on_gpu(...)
        y = op(gate.__array__(), up.__array__())
        out[0].__array__()[...] = y
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..core.call import write
from ..core.op import Op
from ._wiring import SEED, may_be_number

SOURCE = """
def run(_context, _results, {names}):
    {found} = op({passed})
    {written}
"""


def on_buffers(
    op: Op[..., Any], names: tuple[str, ...], fixed: Mapping[str, Any], outputs: tuple[str, ...]
) -> Callable[..., None]:
    """Return the callback of a call, which writes these outputs into XLA's buffers."""
    scope: dict[str, Any] = {"op": op, "number": _number, "fixed": fixed}
    numbers = {operand.name for operand in op.contract.inputs if may_be_number(operand)}
    passed = {name: "None" for name in op.names[: op.positional]}
    for name in names:
        array = f"{name}.__array__()"
        passed[name] = f"number({array})" if name in numbers else array
    if SEED in names:
        passed[SEED] = f"int({SEED}.__array__()) % 2**64"
    for name in fixed:
        passed[name] = f"fixed[{name!r}]"
    keywords = [name for name in passed if name not in op.names[: op.positional]]
    given = [passed[name] for name in op.names[: op.positional]]
    given += [f"{name}={passed[name]}" for name in keywords]
    source = SOURCE.format(
        names=", ".join(names),
        found=", ".join(f"_{output.name}" for output in op.contract.outputs),
        passed=", ".join(given),
        written="\n    ".join(
            f"_results[{index}].__array__()[...] = _{name}" for index, name in enumerate(outputs)
        ),
    )
    write(f"callback of {op.__name__} in JAX", source, scope)
    run: Callable[..., None] = scope["run"]
    return run


def _number(array: Any) -> Any:
    return array if array.ndim else int(array)
