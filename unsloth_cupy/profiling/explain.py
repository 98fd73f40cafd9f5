"""What a call would do, learned from a run of it on shapes alone.

    print(explain(attention, q, k, v, causal=True, device="h200"))
    print(explain(model.loss_and_gradients, tokens, labels, device="rtx4090"))

Its launches run as they do where there is a GPU, on arrays that have no elements, and what they ask
of the machine is written down: a kernel to be compiled, its start, an array.
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
from ..memory.planned import Planned, PlannedOnHost, keeping
from ..ops.common.tensor_map import BYTES
from .cards import CARDS, Card, card_here, card_of
from .explanation import Explanation, Launch, Step
from .shapes import Shape, arrays_of, placed, twin_of
from .watch import dtype_of, watching


def explain(
    function: Callable[..., Any], *args: Any, device: Any = None, **options: Any
) -> Explanation:
    """Return what a call does: kernels and why, launches, bytes, operations, floors in time.

    Nothing is computed: the call runs on arrays that have shapes and dtypes and no elements, and
    launches are written down.  Where an op does alike steps in a loop, such as chunks of rows, it
    has one of them.  A floor is the longer of two times: of the bytes that the call must move, each
    array once, at the card's bandwidth, and of its products at the card's rate.  Masks and
    lengths, whose values are not known, are taken to hide nothing.

    Parameters
    ----------
    function : callable
        An op, a function made of ops, or a method of a model.
    *args, **options
        Of the call; arrays of any library, or ``shape(sizes, dtype)`` in their place.
    device : str or mapping, optional
        Name of a card ("h200", "rtx4090"), an architecture ("sm_86"), or a mapping or NamedTuple
        with ``architecture`` and, where known, ``processors``, ``bandwidth`` in GB/s, ``products``
        in TFLOP/s of 16-bit floats and ``products32`` of float32.  By default where the arrays are.

    Returns
    -------
    explanation : Explanation
        ``print`` shows a table; ``steps``, ``floor``, ``ops`` hold the numbers.

    Raises
    ------
    ConfigError
        The device is not known, shapes are given without one, or function is not callable.
    ShapeError, DTypeError
        As the call itself.
    """
    if not callable(function):
        raise ConfigError(f"explain({function!r}): function is not callable; pass an op")
    owner = getattr(function, "__self__", None)
    found = [
        *arrays_of(args),
        *arrays_of(options),
        *(() if owner is None else arrays_of(vars(owner))),
    ]
    card = _here(found) if device is None else card_of(device)
    kind: Any = PlannedOnHost if card is None else Planned
    recorder = Recorder(card)
    machine = None if card is None else Described(card.limits)
    with recording(recorder), watching(recorder, machine), keeping(recorder):
        if owner is not None:
            function = getattr(twin_of(owner, kind), function.__name__)
        recorder.begin()
        function(*placed(args, kind), **placed(options, kind))
    return Explanation(card, tuple(recorder.steps), (*recorder.outside, *recorder.launches))


class HasLaunches(Protocol):
    """What launches are written to."""

    launches: list[Launch]


class Described:
    """The GPU that is spoken of: planned arrays live there, and nothing runs."""

    def __init__(self, limits: Limits, *, maps: bool = True) -> None:
        """Take the limits, and whether compiler and driver know tensor maps."""
        self.known = limits, maps
        if maps:
            self.tensor_map = lambda box, array: np.void(bytes(BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and other.known == self.known

    def __hash__(self) -> int:
        return hash(self.known)

    def owns(self, array: Any) -> bool:
        """Say whether array is a planned array of a GPU."""
        return array.__class__ is Planned

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Return a launch that is written down."""
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
    """What calls of ops ask for: a step for each that no other op makes."""

    def __init__(self, card: Card | None) -> None:
        self.card = card
        self.steps: list[Step] = []
        self.launches: list[Launch] = []
        self.outside: list[Launch] = []  # of no op, such as those of an optimizer
        self.sizes: list[int] = []
        self.defined: list[str] = []  # why, of the calls that are under way
        self.depth = 0

    def take(self, size: int) -> int:
        """Enter an array."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def give_back(self, number: int) -> None:
        """Leave everything as it is."""

    def begin(self) -> None:
        """Leave out what was before the call."""
        self.steps, self.launches, self.outside, self.sizes = [], [], [], []

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Return what runs in place of a call, or of the definition inside of one."""

        def definition(arrays: list[Any], options: dict[str, Any]) -> Any:
            if self.depth == 1:
                self.defined.append(str(why))
            return run(arrays, options)

        def call(arrays: list[Any], options: dict[str, Any]) -> Any:
            if self.depth:
                return run(arrays, options)
            given = dict(zip(op.names, arrays, strict=True))
            self.outside += self.launches
            before, self.launches, self.defined = len(self.sizes), [], []
            self.depth = 1
            try:
                result = run(arrays, options)
            finally:
                self.depth = 0
            self.steps.append(self.step(op, given, options, result, self.sizes[before:]))
            self.launches = []
            return result

        return call if why is None else definition

    def step(
        self, op: Any, given: dict[str, Any], options: Any, result: Any, sizes: list[int]
    ) -> Step:
        """Return what a call has done."""
        from .counts import counts

        arrays = {name: a for name, a in given.items() if hasattr(a, "nbytes")}
        moved, count = counts(op, given, options, result)
        dtype = dtype_of(op, list(given.values()))
        floor, bound = self.floor(moved, count, dtype, op.__module__.split(".")[2:3])
        named = [f"{n}{tuple(a.shape)} {a.dtype}" for n, a in arrays.items()]
        named += [f"{n}={value}" for n, value in options.items() if _says(value)]
        why = self.defined[0] if self.defined else "its launch takes such arrays and options"
        return Step(
            op=op.__name__,
            arguments=", ".join(named),
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
        """Return the seconds that a call takes at least, and what bounds it."""
        card = self.card
        if card is None or card.bandwidth is None:
            return None, ""
        reading, rate = moved / card.bandwidth / 1e9, card.rate(dtype, "".join(family))
        if count and rate is None:
            return None, ""
        multiplying = count / rate / 1e12 if count and rate else 0.0
        return max(reading, multiplying), "products" if multiplying > reading else "memory"


_recorder: ContextVar[HasLaunches | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: HasLaunches) -> Iterator[None]:
    """Write launches of described GPUs down, inside a ``with`` block."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def _says(value: Any) -> bool:
    return value is not None and value is not False and not hasattr(value, "nbytes")


def _here(arrays: list[Any]) -> Card | None:
    """Return the GPU that arrays are on; None for the host."""
    for array in arrays:
        if gpu.is_cupys(array.__class__):
            return card_here(gpu.number(array))
        place = str(getattr(array, "device", ""))
        if "cuda" in place:
            return card_here(int(place.partition(":")[2] or 0))
    if any(isinstance(array, Shape) or is_planned(array) for array in arrays):
        if gpu.count():
            return card_here(0)
        known = ", ".join(CARDS)
        cure = f'pass device="h200", or another of {known}'
        raise ConfigError(f"explain(shape(...)): a shape is on no device; {cure}")
    return None
