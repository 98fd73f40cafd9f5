"""Measures the error of an op against its definition in float64, on this machine."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import FLOATS, KERNEL_DTYPES
from ..core.gpu import cupy
from ..core.op import Op
from ..placement import to_numpy
from .cases import Call, Scale, draw

SCALE = Scale(tokens=256, hidden=512, inner=768, vocab=2048)
EPS = {
    "bool": 0.0,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "int8": 0.0,
    "uint8": 0.0,
    "int32": 0.0,
}
DEFINITION = "NumPy definition"


class Result(NamedTuple):
    """The worst output of an op in one dtype; errors are relative to max|exact|."""

    op: str
    dtype: str
    where: str
    error: float
    allowed: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the allowed error."""
        return not self.problem and self.error <= self.allowed


def judged(op: Op[..., Any], gpu: str | None) -> Iterator[Result]:
    """Yield the results of an op and of its backward op in every dtype.

    A result is the worse of two calls: without and with all optional arrays.
    """
    drawn = [draw(op, SCALE)]
    if any(operand.optional for operand in op.contract.inputs):
        drawn.append(draw(op, SCALE, optional=True))
    for backward in (False, True) if op.backward is not None else (False,):
        for dtype in KERNEL_DTYPES:
            calls = [call.cast(dtype) for call in drawn]
            if backward:
                calls = [turned(call) for call in calls]
            results = [_judge(call, dtype, gpu) for call in calls]
            yield max(results, key=_severity)


def _severity(result: Result) -> tuple[bool, float]:
    return not result.ok, result.error / result.allowed if result.allowed else result.error


def turned(call: Call) -> Call:
    """Return the call of the backward op, with outputs of the forward definition."""
    outputs = call.mapped(np.copy).run()
    return call.backward(outputs, call.seeds(outputs, every=True))


def _judge(call: Call, dtype: Any, gpu: str | None) -> Result:
    """Run a call, on a GPU if there is a GPU and a kernel; return its error."""
    on_gpu = gpu is not None and call.op.launch is not None
    name, where = call.op.__name__, f"kernel on {gpu}" if on_gpu else DEFINITION
    exact = call.cast(np.float64).mapped(np.copy).run()
    plain = (call if on_gpu else _nudged(call)).mapped(np.copy).run()
    place: Callable[[Any], Any] = np.copy
    if on_gpu:
        place = cupy().asarray
    try:
        if on_gpu and not call.mapped(place).launches():
            where = f"definition on {gpu}"
        actual = {key: to_numpy(array) for key, array in call.mapped(place).run().items()}
    except RuntimeError as error:  # KernelError, and errors of CUDA
        return Result(name, dtype.name, where, np.inf, 0.0, str(error).strip() or repr(error))
    if actual.keys() != exact.keys():
        return Result(name, dtype.name, where, np.inf, 0.0, f"returns {[*actual]}, not {[*exact]}")
    results = []
    for key, array in actual.items():
        largest = float(np.abs(_finite(exact[key])).max(initial=0)) or 1.0
        slack = 2 * _error(plain[key], exact[key]) / largest
        allowed = slack + 4 * EPS[array.dtype.name]
        off = _error(array, exact[key]) / largest
        results.append(Result(name, dtype.name, where, off, allowed))
    return max(results, key=_severity)


def _nudged(call: Call) -> Call:
    """Return the call in float64, with float inputs perturbed by 4 eps of float32."""
    rng = np.random.default_rng(2)

    def nudge(array: Any) -> Any:
        if array.dtype != FLOATS[3]:
            return array
        return array * (1 + 4 * EPS["float32"] * rng.choice((-1, 1), array.shape))

    return call.cast(np.float64).mapped(nudge)


def _finite(array: Any) -> Any:
    return np.where(np.isfinite(array), array, 0)


def _error(computed: Any, exact: Any) -> float:
    """Return the largest difference; inf if shapes, infinities or NaN differ."""
    computed, exact = np.asarray(computed, np.float64), np.asarray(exact, np.float64)
    if computed.shape != exact.shape:
        return np.inf
    infinite = ~np.isfinite(exact)
    if not np.isfinite(computed[~infinite]).all() or (computed[infinite] != exact[infinite]).any():
        return np.inf
    return float(np.abs(_finite(computed) - _finite(exact)).max(initial=0))
