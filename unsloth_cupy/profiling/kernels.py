"""The kernels that calls on a GPU have launched, with what they take of an SM.

A profile keeps the form of each call that ran as kernels; its launches are then those that
``explain`` finds for it, and registers are those of the functions that are loaded.
"""

import math
from typing import Any, NamedTuple

from ..compiled.cache import unit
from ..core import gpu
from ..core.op import OPS
from ..machine import format_bytes
from ..memory.planned import Planned, keeping
from ..ops.common.tensor_map import available
from .binary import PROCESSOR, occupancy
from .explain import Described, Recorder, recording
from .explanation import Launch, aligned
from .shapes import placed
from .watch import watching

TITLES = ("kernel", "op", "calls", "grid", "block", "shared", "registers", "occupancy")


class Form:
    """Calls of an op that agree in shapes, dtypes, strides and options."""

    def __init__(self, op: str, arrays: dict[str, Any], options: dict[str, Any]) -> None:
        there = next(a for a in arrays.values() if gpu.is_cupys(a.__class__))
        self.op, self.calls, self.device = op, 1, gpu.number(there)
        self.arrays, self.options = placed(arrays, Planned), placed(options, Planned)
        self.maps = available(there)

    def launches(self) -> list[Launch]:
        """Return what such a call launches, the ops inside of it too."""
        recorder, limits = Recorder(None), gpu.limits_of(self.device)
        with (
            recording(recorder),
            watching(recorder, Described(limits, maps=self.maps)),
            keeping(recorder),
        ):
            OPS[self.op](**self.arrays, **self.options)
        return [launch for step in recorder.steps for launch in step.launches]


class Forms:
    """The forms of calls, each once."""

    def __init__(self) -> None:
        self.known: dict[Any, Form] = {}

    def enter(self, op: str, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Count a call."""
        arrays = {name: array for name, array in given.items() if array is not None}
        key = op, *(_lying(each) for each in (*arrays.items(), *options.items()))
        try:
            self.known[key].calls += 1
        except KeyError:
            self.known[key] = Form(op, arrays, options)

    def table(self) -> str:
        """Return a line for each kernel and how it is launched; empty where none is."""
        found: dict[Any, tuple[Form, Launch]] = {}
        for form in self.known.values():
            for each in form.launches():
                key = form.device, each.kernel, each.source, each.grid, each.block, each.shared
                found.setdefault(key, (form, each))
        rows = [_row(launch, form) for form, launch in found.values()]
        return "\n".join(aligned([TITLES, *rows])) if rows else ""


class Taken(NamedTuple):
    """What a kernel takes of an SM: registers of a thread, static shared memory of a block."""

    registers: int
    shared: int


def taken(launch: Launch, device: int) -> Taken:
    """Return what the loaded function of a launch takes."""
    cupy = gpu.cupy()
    with cupy.cuda.Device(device):
        kept = unit(cupy, launch.source, gpu.compiler_options(launch.source))
        function = cupy.RawModule(**kept).get_function(launch.kernel)
    return Taken(int(function.num_regs), int(function.shared_size_bytes))


def _row(launch: Launch, form: Form) -> list[Any]:
    used, limits = taken(launch, form.device), gpu.limits_of(form.device)
    threads = math.prod(launch.block)
    shared = used.shared + launch.shared
    known = limits.architecture in PROCESSOR
    share = f"{occupancy(limits.architecture, used.registers, shared, threads)}%" if known else "-"
    sizes = [" x ".join(map(str, each)) for each in (launch.grid, launch.block)]
    numbers = [format_bytes(shared), used.registers, share]
    return [launch.kernel, form.op, form.calls, *sizes, *numbers]


def _lying(pair: tuple[str, Any]) -> Any:
    name, value = pair
    if hasattr(value, "shape"):
        return name, value.__class__, value.shape, str(value.dtype), getattr(value, "strides", None)
    return name, repr(value)
