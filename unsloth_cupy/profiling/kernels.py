"""The table of the kernels launched in a profile, with their registers and occupancy.

A profile stores the form (shapes, dtypes, options) of each call that ran as kernels.  ``explain``
then determines the launches of each form, and the loaded functions report their registers.
"""

import math
from typing import Any, NamedTuple

from ..core import gpu
from ..core.op import OPS
from ..kernel_cache import unit
from ..machine import format_bytes
from ..memory.planned import Planned, recording_in
from ..ops.common.tensor_map import available
from .binary import PROCESSOR, occupancy
from .explain import Described, Recorder, recording
from .explanation import Launch, aligned
from .shapes import placed
from .watch import watching

TITLES = ("kernel", "op", "calls", "grid", "block", "shared", "registers", "occupancy")


class Form:
    """Calls of an op with equal shapes, dtypes, strides and options."""

    def __init__(self, op: str, arrays: dict[str, Any], options: dict[str, Any]) -> None:
        on_gpu = next(a for a in arrays.values() if gpu.is_cupys(a.__class__))
        self.op, self.calls, self.device = op, 1, gpu.number(on_gpu)
        self.arrays, self.options = placed(arrays, Planned), placed(options, Planned)
        self.maps = available(on_gpu)

    def launches(self) -> list[Launch]:
        """Return the launches of such a call, including ops inside it."""
        recorder, limits = Recorder(None), gpu.limits_of(self.device)
        with (
            recording(recorder),
            watching(recorder, Described(limits, maps=self.maps)),
            recording_in(recorder),
        ):
            OPS[self.op](**self.arrays, **self.options)
        return [launch for step in recorder.steps for launch in step.launches]


class Forms:
    """The distinct forms of the calls in a profile."""

    def __init__(self) -> None:
        self.known: dict[Any, Form] = {}

    def enter(self, op: str, operands: dict[str, Any], options: dict[str, Any]) -> None:
        """Count a call."""
        arrays = {name: array for name, array in operands.items() if array is not None}
        key = op, *(_key_of(each) for each in (*arrays.items(), *options.items()))
        try:
            self.known[key].calls += 1
        except KeyError:
            self.known[key] = Form(op, arrays, options)

    def table(self) -> str:
        """Return a table with one line per kernel and launch configuration; "" if there is none."""
        distinct: dict[Any, tuple[Form, Launch]] = {}
        for form in self.known.values():
            for each in form.launches():
                key = form.device, each.kernel, each.source, each.grid, each.block, each.shared
                distinct.setdefault(key, (form, each))
        rows = [_row(launch, form) for form, launch in distinct.values()]
        return "\n".join(aligned([TITLES, *rows])) if rows else ""


class Used(NamedTuple):
    """The resources of a loaded kernel."""

    registers: int  # registers per thread
    shared: int  # bytes of static shared memory per block


def used_by(launch: Launch, device: int) -> Used:
    """Return the resources of the function of a launch, loaded on a GPU."""
    cupy = gpu.cupy()
    with cupy.cuda.Device(device):
        module = unit(cupy, launch.source, gpu.compiler_options(launch.source))
        function = cupy.RawModule(**module).get_function(launch.kernel)
    return Used(int(function.num_regs), int(function.shared_size_bytes))


def _row(launch: Launch, form: Form) -> list[Any]:
    """Return the table cells of a launch."""
    function, limits = used_by(launch, form.device), gpu.limits_of(form.device)
    threads = math.prod(launch.block)
    shared, registers, share = function.shared + launch.shared, function.registers, "-"
    if limits.architecture in PROCESSOR:
        share = f"{occupancy(limits.architecture, registers, shared, threads)}%"
    sizes = [" x ".join(map(str, each)) for each in (launch.grid, launch.block)]
    numbers = [format_bytes(shared), registers, share]
    return [launch.kernel, form.op, form.calls, *sizes, *numbers]


def _key_of(pair: tuple[str, Any]) -> Any:
    """Return a hashable key of an argument; for an array: type, shape, dtype and strides."""
    name, value = pair
    if hasattr(value, "shape"):
        return name, value.__class__, value.shape, str(value.dtype), getattr(value, "strides", None)
    return name, repr(value)
