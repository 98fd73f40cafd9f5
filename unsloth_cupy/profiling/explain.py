"""Explains what a call does on a GPU, by running it on arrays without elements.

    print(explain(attention, q, k, v, causal=True, device="h200"))
    print(explain(model.loss_and_gradients, tokens, labels, device="rtx4090"))

The launch code of the ops runs as on a GPU, but on planned arrays, which have only a shape and a
dtype.  A recorder stores the kernels, launches and allocations.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from ..core import gpu
from ..core.stand_in import is_planned
from ..core.target import Limits, Run
from ..errors import ConfigError
from ..memory.planned import Planned, PlannedOnHost, recording_in
from ..ops.common.tensor_map import BYTES
from .cards import Card, card_here, card_of
from .explanation import Explanation, Launch, Step
from .shapes import Shape, arrays_of, placed, twin_of
from .watch import dtype_of, watching


def explain(
    function: Callable[..., Any], *args: Any, device: Any = None, **options: Any
) -> Explanation:
    """Explain a call: its kernel or definition and why, launches, bytes, operations, roofline.

    Nothing is computed: the call runs on arrays without elements, and its launches are recorded.
    If an op repeats equal steps in a loop, such as chunks of rows, only one step is recorded.  The
    floor is the roofline model's lower bound on the time: the larger of ``bytes / bandwidth``,
    where each array is moved once, and ``operations / rate`` of the matrix products.  The values of
    masks and lengths are unknown, so no position counts as masked.

    Parameters
    ----------
    function : callable
        An op, a function made of ops, or a method of a model.
    *args, **options
        Arguments of the call: arrays of any library, or ``shape(sizes, dtype)`` as placeholders.
    device : str or mapping, optional
        Name of a card ("h200", "rtx4090"), an architecture ("sm_86"), or a mapping or NamedTuple
        with ``architecture`` and optionally ``processors``, ``bandwidth`` in GB/s, ``products``
        (16-bit matrix products) and ``products32`` (float32) in TFLOP/s.  The default is the device
        of the arrays.

    Returns
    -------
    explanation : Explanation
        ``print`` shows a table; ``steps``, ``floor``, ``ops`` hold the numbers.

    Raises
    ------
    ConfigError
        The device is unknown, shapes are passed without a device, or function is not callable.
    ShapeError, DTypeError
        The call itself raises the error.
    """
    if not callable(function):
        raise ConfigError(f"explain({function!r}): function is not callable; pass an op")
    owner = getattr(function, "__self__", None)
    arrays = [
        *arrays_of(args),
        *arrays_of(options),
        *(() if owner is None else arrays_of(vars(owner))),
    ]
    card = _card_of_arrays(arrays) if device is None else card_of(device)
    kind: Any = PlannedOnHost if card is None else Planned
    recorder = Recorder(card)
    machine = None if card is None else Described(card.limits)
    with recording(recorder), watching(recorder, machine), recording_in(recorder):
        twin: Any = None if owner is None else twin_of(owner, kind)
        if twin is not None:
            function = getattr(twin, function.__name__)
        recorder.begin()
        function(*placed(args, kind), **placed(options, kind))
    graph = twin.graphs.told if options.get("graph") and hasattr(twin, "graphs") else ""
    outside = (*recorder.outside, *recorder.launches)
    return Explanation(card, tuple(recorder.steps), outside, graph, tuple(recorder.copies))


class HasLaunches(Protocol):
    """An object that stores launches."""

    launches: list[Launch]


class Described:
    """A target for a GPU described by its limits: owns planned arrays, and records launches.

    ``maps`` is whether compiler and driver support tensor maps.
    """

    def __init__(self, limits: Limits, *, maps: bool = True) -> None:
        self.known = limits, maps
        if maps:
            self.tensor_map = lambda box, array: np.void(bytes(BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and other.known == self.known

    def __hash__(self) -> int:
        return hash(self.known)

    def owns(self, array: Any) -> bool:
        """Return whether an array is a planned GPU array."""
        return array.__class__ is Planned

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Return a function that records a launch of the kernel."""
        file = re.findall(r'^#include "([^"]+\.cu)"', source, re.M)[-1]
        constants = dict(re.findall(r"^constexpr \w+ (\w+) = ([^;]+);", source, re.M))
        constants |= dict(re.findall(r"^using (\w+) = ([^;]+);", source, re.M))

        def launch(grid: Any, block: Any, args: Any, shared: int) -> None:
            recorder = _recorder.get()
            if recorder is not None:
                sizes = tuple(map(int, grid)), tuple(map(int, block))
                recorder.launches.append(
                    Launch(
                        name,
                        file,
                        constants,
                        *sizes,
                        int(shared),
                        source,
                        self.known[0].architecture,
                    )
                )

        return launch

    def limits(self, array: Any) -> Limits:
        """Return the limits of the card."""
        return self.known[0]

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new planned array."""
        return like.of(shape, dtype)


class Recorder:
    """Records calls of ops: one step per call that is not inside a call of another op."""

    def __init__(self, card: Card | None) -> None:
        self.card = card
        self.steps: list[Step] = []
        self.launches: list[Launch] = []  # launches of the running call
        self.outside: list[Launch] = []  # launches outside ops, such as an optimizer step
        self.sizes: list[int] = []  # bytes of all allocated arrays
        self.defined: list[str] = []  # why definitions ran in the running call
        self.depth = 0  # 1 inside a call, else 0
        self.copies: list[tuple[int, int]] = []  # steps before a copy to the host, and its bytes
        self.host = 0

    def offload(self, moved: Any) -> None:
        """Record an array that a checkpoint copies to the host."""
        self.copies.append((len(self.steps), moved.size))

    def take(self, size: int) -> int:
        """Record an allocated array of ``size`` bytes; return its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def give_back(self, number: int) -> None:
        """Do nothing when an array is freed."""

    def begin(self) -> None:
        """Discard all records before the call."""
        self.steps, self.launches, self.outside, self.sizes, self.copies = [], [], [], [], []

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Wrap ``run`` to record a call, or the definition inside a call."""

        def definition(arrays: list[Any], options: dict[str, Any]) -> Any:
            if self.depth == 1:
                self.defined.append(str(why))
            return run(arrays, options)

        def call(arrays: list[Any], options: dict[str, Any]) -> Any:
            if self.depth:
                return run(arrays, options)
            operands = dict(zip(op.names, arrays, strict=True))
            self.outside += self.launches
            before, self.launches, self.defined = len(self.sizes), [], []
            self.depth = 1
            try:
                result = run(arrays, options)
            finally:
                self.depth = 0
            self.steps.append(self.step(op, operands, options, result, self.sizes[before:]))
            self.launches = []
            return result

        return call if why is None else definition

    def step(
        self, op: Any, operands: dict[str, Any], options: Any, result: Any, sizes: list[int]
    ) -> Step:
        """Return the step of a finished call; ``sizes`` are the bytes of the allocated arrays."""
        from ..bench.timing import counts

        arrays = {name: a for name, a in operands.items() if hasattr(a, "nbytes")}
        moved, count = counts(op, operands, options, result)
        dtype = dtype_of(op, list(operands.values()))
        floor, bound = self.floor(moved, count, dtype, op.__module__.split(".")[2:3])
        arguments = [f"{n}{tuple(a.shape)} {a.dtype}" for n, a in arrays.items()]
        arguments += [f"{n}={value}" for n, value in options.items() if _is_shown(value)]
        why = self.defined[0] if self.defined else "its launch supports these arrays and options"
        return Step(
            op=op.__name__,
            arguments=", ".join(arguments),
            kernel=not self.defined,
            why=why,
            launches=tuple(self.launches),
            arrays=len(sizes),
            allocated_bytes=sum(sizes),
            moved=moved,
            operations=count,
            floor=floor,
            bound=bound,
        )

    def floor(self, moved: int, count: int, dtype: Any, family: Any) -> tuple[float | None, str]:
        """Return the roofline time of a call in seconds, and its bound: "memory" or "products"."""
        card = self.card
        if card is None or card.bandwidth is None:
            return None, ""
        memory_time, rate = moved / card.bandwidth / 1e9, card.rate(dtype, "".join(family))
        if count and rate is None:
            return None, ""
        product_time = count / rate / 1e12 if count and rate else 0.0
        bound = "products" if product_time > memory_time else "memory"
        return max(memory_time, product_time), bound


_recorder: ContextVar[HasLaunches | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: HasLaunches) -> Iterator[None]:
    """Record launches on a ``Described`` target inside a ``with`` block."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def _is_shown(value: Any) -> bool:
    """Return whether to show an option: it is not None, False or an array."""
    return value is not None and value is not False and not hasattr(value, "nbytes")


def _card_of_arrays(arrays: list[Any]) -> Card | None:
    """Return the GPU of the arrays; None for the host."""
    for array in arrays:
        if gpu.is_cupys(array.__class__):
            return card_here(gpu.number(array))
        place = str(getattr(array, "device", ""))
        if "cuda" in place:
            return card_here(int(place.partition(":")[2] or 0))
    if any(isinstance(array, Shape) or is_planned(array) for array in arrays):
        if gpu.count():
            return card_here(0)
        cure = 'pass the name of a GPU, as device="h200"'
        raise ConfigError(f"explain(shape(...)): a shape has no device; {cure}")
    return None
