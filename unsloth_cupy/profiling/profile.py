"""Times all calls of ops inside a ``with`` block.

with profile() as seen:
loss, gradients = model.loss_and_gradients(tokens, labels)
print(seen.table())
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core import gpu
from ..core.call import check_options
from ..core.stand_in import is_planned
from ..core.target import Run, target_of
from ..errors import ConfigError
from ..files import atomic_path, path_of
from ..ops.common.counters import LEGACY
from ..ops.quantized.weight import held_arrays
from ..pictures import FORMATS, INK, SOFT, save_picture
from .explanation import aligned
from .explanation import time as written
from .kernels import Forms
from .records import PHASES, Ended, Open, Record, layer_of, phase_of, rate
from .watch import watching

COLOURS = dict(zip(PHASES, ("#3b6fb6", "#d1495b", "#5a9a68"), strict=True))


class Profile:
    """The timed calls of a block, as ``profile`` yields them.

    Attributes
    ----------
    records : list of Record
        One record per call of an op, in the order in which calls ended.
    """

    def __init__(self, parameters: Mapping[str, Any], nvtx: bool) -> None:
        named = ((layer_of(name), array) for name, array in held_arrays(parameters))
        self.names = {id(array): layer for layer, array in named}
        self.nvtx = gpu.cupy().cuda.nvtx if nvtx else None
        self.here = threading.local()  # running calls and latest layer of each thread
        self.began = time.perf_counter()
        self.ended: list[Ended] = []
        self.timed: list[Record] = []
        self.forms = Forms()

    @property
    def records(self) -> list[Record]:
        """The calls so far; on a GPU, the host waits until they end."""
        if len(self.timed) != len(self.ended):
            self.timed = [each.timed() for each in self.ended]
        return self.timed

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Wrap ``run`` to time a call, or to mark that its definition ran."""
        from ..bench.timing import counts

        name = op.__name__

        def definition(arrays: list[Any], options: dict[str, Any]) -> Any:
            self.here.calls[-1].ran_as = "definition"
            return run(arrays, options)

        def call(arrays: list[Any], options: dict[str, Any]) -> Any:
            if any(map(is_planned, arrays)):  # nothing is computed
                return run(arrays, options)
            operands = dict(zip(op.names, arrays, strict=True))
            with self.opened(name, arrays) as opened:
                result = run(arrays, options)
            self.enter(opened, name, self.layer(arrays), counts(op, operands, options, result))
            if opened.begin is not None and opened.ran_as == "kernel":
                self.forms.enter(name, operands, options)
            return result

        return call if why is None else definition

    @contextmanager
    def span(self, name: str, like: Any, moved: int) -> Iterator[None]:
        """Time work outside ops; ops inside the block count their own bytes."""
        if is_planned(like):
            yield
            return
        with self.opened(name, [like]) as opened:
            yield
        opened.ran_as = "definition" if target_of(like) is None else "kernel"
        self.enter(opened, name, "", (0 if opened.inside else moved, 0))

    @contextmanager
    def opened(self, name: str, arrays: list[Any]) -> Iterator[Open]:
        """Time a call that runs inside a ``with`` block."""
        calls = self.here.__dict__.setdefault("calls", [])
        if self.nvtx is not None:
            self.nvtx.RangePush(name)
        opened = Open(event(arrays))
        calls.append(opened)
        try:
            yield opened
        finally:
            opened.seconds = time.perf_counter() - opened.start
            opened.end = None if opened.begin is None else event(arrays)
            calls.pop()
            if self.nvtx is not None:
                self.nvtx.RangePop()

    def enter(self, opened: Open, name: str, layer: str, counted: tuple[int, int]) -> None:
        """Store a finished call, also in the call that contains it."""
        start, seconds = opened.start - self.began, opened.seconds
        place = phase_of(name), layer, opened.ran_as
        record = Record(name, *place, start, seconds, seconds, *counted, threading.get_ident())
        events = None if opened.end is None else (opened.begin, opened.end)
        ended = Ended(record, events, opened.inside)
        for outer in self.here.calls[-1:]:
            outer.inside.append(ended)
        self.ended.append(ended)

    def layer(self, arrays: list[Any]) -> str:
        """Return the layer of the parameter that this or an earlier call used last."""
        layer = next((self.names[id(a)] for a in arrays if id(a) in self.names), None)
        if layer is not None:
            self.here.layer = layer
        return str(getattr(self.here, "layer", ""))

    def grouped(self, *fields: str) -> dict[tuple[str, ...], list[Record]]:
        """Group the records by the values of fields; the longest group comes first."""
        groups: dict[tuple[str, ...], list[Record]] = {}
        for record in self.records:
            groups.setdefault(tuple(getattr(record, name) for name in fields), []).append(record)
        return dict(sorted(groups.items(), key=lambda pair: -sum(r.own for r in pair[1])))

    def table(self) -> str:
        """Return a table of times and rates by phase and op, and by layer if layers are known.

        The time of an op excludes the ops that it calls.
        """
        if not self.records:
            return "no op was called"
        whole = sum(record.own for record in self.records) or 1.0
        titles = ["phase", "op", "runs as", "calls", "time", "share", "GB/s", "TFLOP/s"]
        rows: list[list[Any]] = []
        for (phase, op), records in self.grouped("phase", "op").items():
            own = sum(record.own for record in records)
            ran_as = "/".join(sorted({record.ran_as for record in records}))
            rates = [rate(sum(r.moved for r in records), own, 1e9)]
            rates += [rate(sum(r.operations for r in records), own, 1e12)]
            rows.append([phase, op, ran_as, len(records), written(own), f"{own / whole:.1%}"])
            rows[-1] += rates
        rows.sort(key=lambda row: PHASES.index(row[0]))
        lines = [*aligned([titles, *rows]), f"all calls: {written(whole)}"]
        if self.names:
            layers = [
                [layer or "-", phase, len(records), written(sum(r.own for r in records))]
                for (layer, phase), records in self.grouped("layer", "phase").items()
            ]
            lines += ["", *aligned([["layer", "phase", "calls", "time"], *layers])]
        return "\n".join(lines)

    def kernels(self) -> str:
        """Return a table of the kernels that ran on a GPU; "" if there is none.

        Columns: grid, block, shared memory per block (static and dynamic), registers per thread,
        and occupancy (resident share of the threads of an SM).  Arrays are assumed to be aligned
        to 16 bytes.
        """
        return self.forms.table()

    def report(self) -> str:
        """Return both tables as text, with a final line break."""
        return "\n\n".join(filter(None, [self.table(), self.kernels()])) + "\n"

    def save_trace(self, file: Any) -> None:
        """Write the calls as JSON for Chrome and Perfetto, atomically."""
        events = [
            {
                "name": record.op,
                "cat": record.phase,
                "ph": "X",
                "ts": record.start * 1e6,
                "dur": record.seconds * 1e6,
                "pid": os.getpid(),
                "tid": record.thread,
                "args": {
                    "runs as": record.ran_as,
                    "layer": record.layer,
                    "bytes": record.moved,
                    "operations": record.operations,
                },
            }
            for record in self.records
        ]
        with atomic_path(path_of("save_trace", file), "save_trace") as partial:
            text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
            partial.write_text(text, encoding="utf-8")

    def plot(self, file: Any) -> None:
        """Plot the time by op as PNG, PDF or SVG, by the suffix of the file."""
        path = path_of("plot", file)
        if path.suffix[1:].lower() not in FORMATS:
            raise ConfigError(f"plot({str(file)!r}): the suffix is not one of {', '.join(FORMATS)}")
        from matplotlib.figure import Figure

        rows = [*self.grouped("phase", "op").items()][:20][::-1]
        figure = Figure(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        times = [sum(record.own for record in records) * 1e3 for _, records in rows]
        names, colours = [op for (_, op), _ in rows], [COLOURS[phase] for (phase, _), _ in rows]
        axes.barh(range(len(rows)), times, color=colours)
        axes.set_yticks(range(len(rows)), names)
        axes.set_xlabel("ms", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=SOFT)
        save_picture(figure, path, "plot")


@contextmanager
@check_options
def profile(
    *, nvtx: bool = False, parameters: Mapping[str, Any] | None = None
) -> Iterator[Profile]:
    """Time all calls of ops inside a ``with`` block, on all threads.

    On a GPU, times are measured between device events; on NumPy arrays, they are wall time.  Calls
    outside the block have no overhead.

    Parameters
    ----------
    nvtx : bool
        Mark each call as an NVTX range for Nsight; needs CuPy.
    parameters : {name: array}, optional
        Parameters of a model, to report times by layer.

    Returns
    -------
    seen : Profile
        ``table()`` and ``kernels()`` return text, ``save_trace(file)`` writes JSON for Perfetto,
        ``plot(file)`` writes a picture, and ``records`` holds the numbers.

    Raises
    ------
    ConfigError
        ``nvtx`` is set, but CuPy is not installed.
    """
    try:
        seen = Profile(parameters or {}, nvtx)
    except ImportError as error:
        cure = "install unsloth-cupy[cuda12] or [cuda13], or leave it out"
        raise ConfigError(f"profile(nvtx=True): NVTX comes with CuPy; {cure}") from error
    with watching(seen):
        yield seen


def event(arrays: list[Any]) -> Any:
    """Record an event on the GPU of the arrays; None on the host or during graph capture."""
    on_gpu = next((array for array in arrays if gpu.is_cupys(array.__class__)), None)
    if on_gpu is None:
        return None
    with gpu.device_of(on_gpu):
        cuda = gpu.cupy().cuda
        stream = cuda.get_current_stream().ptr
        if stream > LEGACY and cuda.runtime.streamIsCapturing(stream):
            return None
        recorded = cuda.Event()
        recorded.record()
    return recorded


def until_exit(write: Callable[[str], Any]) -> None:
    """Start a profile, and write its report when the program ends."""
    block = profile()
    seen = block.__enter__()
    atexit.register(lambda: write(seen.report()))
    atexit.register(block.__exit__, None, None, None)


if os.environ.get("UNSLOTH_CUPY_PROFILE") == "1":
    until_exit(sys.stderr.write)
