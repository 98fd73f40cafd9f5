"""The tests that every op passes: its gradient, its rounding, its kernels.

    class TestSwiglu(Parity):
        op = "swiglu"
        cases = [Case("odd", rows=[3], inner=13), Case("empty", rows=[0], inner=4)]

``Parity`` tests a definition: its gradient against finite differences, at most one rounding, any
strides.  ``KernelParity`` adds that the kernels, forward and backward, on the CPU and on a GPU,
agree with the definition:

    |kernel - exact| <= 2 * max|plain - exact| + 4 * eps(dtype) * max|exact|

where exact is the definition in float64 and plain the definition in the dtype of the case.  A few
numbers that many are summed to may be right by luck: of these in float32 plain is the worst of some
runs on inputs that differ by one rounding, so that the rule is that of the sizes summed.
"""

import functools
import importlib
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import unsloth_cupy  # noqa: F401  every op registers itself
from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import BFLOAT16, DIFFERENTIABLE, KERNEL_DTYPES, allowed
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.signature import Operand, shape_of
from unsloth_cupy.core.target import using
from unsloth_cupy.ops.attention import _hopper

from .tracked import tracked

EPS = {
    "bool": 0.0,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
FEW, NEARBY = 32, 4  # numbers that may be right by luck; runs on inputs one rounding away
SIGNS = {"class_weights": 1} | dict.fromkeys(
    ("log_probs", "old", "sampler", "reference", "log_sum_squares"), -1
)  # of operands that have one
EPS |= {"int8": 0.0, "uint8": 0.0, "int32": 0.0}  # codes and numbers must equal the definition's
Arrays = dict[str, np.ndarray | None]


class Case:
    """One call of an op: sizes of axes, optional operands to pass, special arrays, options.

    ``given`` names the optional operands to pass.  ``arrays`` maps an operand to an array or to
    ``lambda rng: array``; other operands are random.  The op's signature says which of the other
    keywords are options and which are sizes of axes.  With ``gaps``, float arrays of several axes,
    and gradients, are slices of wider arrays.
    """

    def __init__(
        self,
        label: str,
        *,
        given: Sequence[str] = (),
        arrays: dict[str, Any] | None = None,
        gaps: bool = False,
        **sizes_and_options: Any,
    ) -> None:
        self.label, self.given, self.arrays, self.gaps = label, given, arrays or {}, gaps
        self.both = sizes_and_options

    def draw(self, op: Op, dtype: Any) -> Call:
        """Return a call with read-only arrays; floats of the dtype hold values of float16."""
        rng = np.random.default_rng(0)
        drawn: Arrays = dict.fromkeys(op.names)
        for operand in op.contract.inputs:
            if operand.name in self.arrays:
                source = self.arrays[operand.name]
                array = np.asarray(source(rng) if callable(source) else source)
            elif operand.optional and operand.name not in self.given:
                continue
            else:
                array = self._random(operand, rng)
            if array.dtype.kind == "f":
                array = array.astype(np.float16).astype(allowed(operand.kind, np.dtype(dtype))[0])
                array = _between_gaps(array) if self.gaps else array
            array.flags.writeable = False
            drawn[operand.name] = array
        options = {name: value for name, value in self.both.items() if name in op.options}
        return Call(op, drawn, options)

    def _random(self, operand: Operand, rng: np.random.Generator) -> np.ndarray:
        shape = shape_of(operand, self.both)
        assert shape is not None, f"{self.label}: give a size to every axis of {operand}"
        if operand.kind == "bool":
            return rng.random(shape) < 0.7
        if operand.kind == "code":
            return rng.integers(-127, 128, shape, np.int8)
        if operand.kind == "int":
            return rng.integers(0, self.both[operand.below or ""], shape)
        values = rng.standard_normal(shape)
        sign = SIGNS.get(operand.name)
        return values if sign is None else sign * np.abs(values)


class Parity:
    """Tests of a definition: subclass with ``op``, the name of a forward op, and ``cases``.

    One class of an op may also list the ``sizes`` of axes and the ``options`` with which
    variants.py calls the op, where its signature does not determine them, and in ``apart`` optional
    arrays with which no kernel takes all options together.
    """

    op: str
    cases: Sequence[Case]
    sizes: Sequence[dict[str, Any]]
    options: Sequence[dict[str, Any]]
    apart: Sequence[str]

    def test_gradient_matches_finite_differences(self, case: Case) -> None:
        """Each differentiable input's gradient, along one random direction, through all outputs."""
        op = OPS[self.op]
        assert op.backward is not None, f"{self.op} has no gradient: set this test to None"
        judge_gradient(case.draw(op, np.float64))

    @pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
    def test_rounds_once(self, case: Case, dtype: Any) -> None:
        """In 16 bits, the error of a definition is at most one rounding."""
        call = case.draw(OPS[self.op], dtype)
        exact = outputs_of(call.cast(np.float64))
        for name, plain in outputs_of(call).items():
            assert _error(plain, exact[name]) <= EPS[dtype.name] * _size(exact[name]), name

    def test_any_strides(self, case: Case) -> None:
        """Reversed and Fortran-ordered arrays: a different order of sums is as accurate."""
        call = case.draw(OPS[self.op], np.float32)
        exact, plain = outputs_of(call.cast(np.float64)), outputs_of(call)
        for view in (_reversed, _fortran):
            within_rule(plain, exact, outputs_of(call.mapped(view)))


other_target: Callable[..., Any] | None = None  # a class of targets to use instead of Emulator


def judge_gradient(call: Call, least: float = 1e-300) -> None:
    """Raise if a gradient of a float64 call differs from the slope along a random direction.

    The error is relative to the size of the slope, or to ``least`` if that is larger: finite
    differences of a loss near 1 do not resolve smaller slopes.
    """
    op = call.op
    rng = np.random.default_rng(1)
    forward = outputs_of(call)
    seeds = _seeds(op, forward, rng)

    def loss(**moved: np.ndarray) -> float:
        outputs = outputs_of(call._replace(arrays=call.arrays | moved))
        return sum(
            float((seed * outputs[name[1:]])[np.isfinite(outputs[name[1:]])].sum())
            for name, seed in seeds.items()  # isfinite: the lse of a row without keys is -inf
        )

    gradients = outputs_of(call.backward(forward, seeds))
    for operand in op.contract.inputs:
        name, value = operand.name, call.arrays[operand.name]
        if value is None or operand.kind not in DIFFERENTIABLE:
            continue
        gradient = gradients["d" + name]
        assert (gradient.dtype, gradient.shape) == (value.dtype, value.shape), name
        direction = np.where(np.isfinite(value), rng.standard_normal(value.shape), 0)
        slopes = []
        for step in (1e-4, 1e-5, 1e-6):  # truncation shrinks with the step, rounding grows
            ahead, behind = (loss(**{name: value + s * step * direction}) for s in (1, -1))
            slopes.append((ahead - behind) / (2 * step))
        slopes.append((100 * slopes[2] - slopes[1]) / 99)  # truncation is proportional to step**2
        exact = float((gradient * direction).sum())
        size = np.abs(gradient * direction).sum()
        errors = [abs(slope - exact) / max(size, least) if size else abs(slope) for slope in slopes]
        assert min(errors) < 1e-7, f"{name}: {errors}"


def emulator(**machine: Any) -> AbstractContextManager[None]:
    """Return a ``with`` block whose ops run their kernels on the CPU; skip if there is no g++."""
    from ..machines.cuda_on_cpu import Emulator, missing

    if (reason := missing()) is not None:
        pytest.skip(reason)
    return using((other_target or Emulator)(**machine))


@contextmanager
def general_attention() -> Iterator[None]:
    """Let attention run the kernels that all architectures have, on Hopper too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hopper, "requested", False)
        yield


def on_schedules(*seeds: int, **machine: Any) -> Callable[[Callable[[], Arrays]], Arrays]:
    """Return a function that runs others in the emulator, each on the next of these schedules."""
    turns = itertools.cycle(seeds)

    def run(function: Callable[[], Arrays]) -> Arrays:
        with emulator(seed=next(turns), **machine):
            return function()

    return run


class KernelParity(Parity):
    """Parity of an op that has a kernel, as may its backward op.

    ``sides`` lists which of the two are tested.  ``machine`` has arguments of the emulator:
    ``{"clusters": False}`` is a GPU before sm_90.  Calls are made within ``context()``, which may
    return an ``AttentionConfig(...).use()``.
    """

    sides: Sequence[str] = ("forward", "backward")
    machine: dict[str, Any] = {}  # noqa: RUF012
    context: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    @pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        """The kernels, run on the CPU, agree with the definition; two runs are bitwise equal."""
        _compare_kernels(OPS[self.op], case, dtype, self._emulated, np.asarray, self.sides)

    def _emulated(self, function: Callable[[], Arrays]) -> Arrays:
        with self.context(), emulator(**self.machine):
            return function()

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
    def test_gpu_kernels(self, case: Case, dtype: Any) -> None:
        """The same on a GPU."""
        with self.context():
            _compare_kernels(OPS[self.op], case, dtype, _as_it_is, on_gpu, self.sides)

    @pytest.mark.gpu
    def test_gpu_kernels_off_alignment(self) -> None:
        """The same on a GPU, with arrays at addresses that wide accesses must not use."""
        op, case, dtype = OPS[self.op], self.cases[0], KERNEL_DTYPES[0]
        shifted = lambda array: on_gpu(_shifted(array))  # noqa: E731
        with self.context():
            _compare_kernels(op, case, dtype, _as_it_is, shifted, self.sides)


class KernelInPlace(KernelParity):
    """KernelParity of an op that overwrites its arguments, and therefore has no gradient.

    The arguments are copied before each call, with their strides and alignment.
    """

    test_gradient_matches_finite_differences = None
    test_any_strides = None


class KernelAlone(KernelParity):
    """Tests of a kernel that the definition cannot judge: it raises, or the rule is too wide."""

    cases = ()
    test_gradient_matches_finite_differences = None
    test_rounds_once = None
    test_any_strides = None
    test_gpu_kernels = None
    test_gpu_kernels_off_alignment = None

    def prove(self, case: Case, dtype: Any) -> None:
        """Raise unless the kernels, which ops run within ``emulator()``, do what the class says."""
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        """The kernels, run on the CPU, do what the class says."""
        self.prove(case, dtype)


class KernelCompared(KernelAlone):
    """KernelAlone whose calls are the same in the emulator and on a GPU."""

    def compare(
        self,
        case: Case,
        dtype: Any,
        place: Callable[[Any], Any],
        running: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Raise unless kernels, called within ``running()`` on arrays of ``place``, are right."""
        raise NotImplementedError

    def prove(self, case: Case, dtype: Any) -> None:
        """As ``compare`` says."""
        self.compare(case, dtype, np.asarray, emulator)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
    def test_on_a_gpu(self, case: Case, dtype: Any) -> None:
        """The same on a GPU."""
        self.compare(case, dtype, on_gpu, nullcontext)


@functools.cache
def proofs() -> tuple[Any, ...]:
    """Return the Parity classes of ``tests/ops``: those with the name of an op."""
    names = [f"tests.ops.{path.stem}" for path in tracked("tests/ops/test_*.py")]
    modules = [importlib.import_module(name) for name in names]
    values = [value for module in modules for value in vars(module).values()]
    return tuple(each for each in values if isinstance(each, type) and hasattr(each, "op"))


def dtypes(proof: type[Any]) -> tuple[Any, ...]:
    """Return the dtypes in which a class tests its kernels."""
    marks = {mark.args[0]: mark.args[1] for mark in proof.test_emulated_kernels.pytestmark}
    return tuple(marks["dtype"])


def on_gpu(array: np.ndarray) -> Any:
    """Return a CuPy array with the values, strides and offset in memory of a NumPy array."""
    import cupy

    array = np.asarray(array)
    root = array if array.base is None else array.base
    memory = cupy.asarray(root.ravel(order="K")).data
    start = memory + (array.ctypes.data - root.ctypes.data) if array.size else memory
    return cupy.ndarray(array.shape, array.dtype, start, array.strides)


def _as_it_is(function: Callable[[], Arrays]) -> Arrays:
    return function()


def _compare_kernels(
    op: Op,
    case: Case,
    dtype: Any,
    run: Callable[[Callable[[], Arrays]], Arrays],
    place: Callable[[np.ndarray], Any],
    sides: Sequence[str] = KernelParity.sides,
) -> None:
    judge_kernels(case.draw(op, dtype), run, place, sides, case.gaps)


def judge_kernels(
    call: Call,
    run: Callable[[Callable[[], Arrays]], Arrays],
    place: Callable[[np.ndarray], Any],
    sides: Sequence[str] = KernelParity.sides,
    gaps: bool = False,
) -> None:
    """Raise if kernels of a call or its backward op are inaccurate or differ between two runs."""
    op, wide, there = call.op, call.cast(np.float64), call.mapped(place)
    exact = outputs_of(wide)
    plain = outputs_of(call)
    if "forward" in sides:
        first, second = (run(lambda: outputs_of(there)) for _ in range(2))
        within_rule(worst_nearby(call, exact), exact, first)
        _equal_bits(first, second)
    if "backward" not in sides or op.backward is None or op.backward.launch is None:
        return
    seeds = _seeds(op, plain, np.random.default_rng(1))
    wide_seeds = {name: seed.astype(np.float64) for name, seed in seeds.items()}
    seeds_there = {name: _between_gaps(a) if gaps else a for name, a in seeds.items()}
    wide, call, there = (
        wide.backward(exact, wide_seeds),
        call.backward(plain, seeds),
        there.backward(*({n: place(a) for n, a in each.items()} for each in (plain, seeds_there))),
    )
    exact = outputs_of(wide)
    first, second = (run(lambda: outputs_of(there)) for _ in range(2))
    within_rule(worst_nearby(call, exact), exact, first)
    _equal_bits(first, second)


def worst_nearby(call: Call, exact: Arrays) -> Arrays:
    """Return results of a call: of few float32 numbers, the worst of inputs one rounding away."""
    plain = outputs_of(call)
    few = [n for n, a in plain.items() if 0 < a.size <= FEW and a.dtype == np.float32]
    for number in range(NEARBY * bool(few)):
        rng = np.random.default_rng(number)
        other = outputs_of(call.mapped(functools.partial(_one_rounding_away, rng)))
        for name in few:
            plain[name] = max(plain[name], other[name], key=lambda a: _error(a, exact[name]))
    return plain


def _one_rounding_away(rng: np.random.Generator, array: Any) -> Any:
    """Return float32 numbers, each moved up or down by one rounding; other arrays as they are."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        return array
    toward = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
    return np.where(np.isfinite(array) & (array != 0), np.nextafter(array, toward), array)


def within_rule(plain: Arrays, exact: Arrays, kernel: Arrays) -> None:
    """Raise if a kernel's error exceeds the bound that the module's docstring gives."""
    for name, array in kernel.items():
        actual, expected = np.asarray(array.get() if hasattr(array, "get") else array), exact[name]
        assert actual.dtype == plain[name].dtype, name
        eps = EPS[actual.dtype.name]
        budget = 2 * _error(plain[name], expected) + 4 * eps * _size(expected)
        assert _error(actual, expected) <= budget, f"{name}: {_worst(actual, expected, budget)}"


def _equal_bits(first: Arrays, second: Arrays) -> None:
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), f"{name} differs between two runs"


def outputs_of(call: Call) -> Arrays:
    """Return the results by name, including the arrays that an in-place op changes."""
    if not call.op.__name__.endswith("_"):
        return call.run()
    call = call.mapped(_copied)
    kept = {o.name for o in call.op.contract.inputs if o.kind == "int"}
    changed = {n: a for n, a in call.arrays.items() if n not in kept and a is not None}
    return call.run() | changed


def launched(name: str, *arrays: Any, **more: Any) -> Any:
    """Launch an op's kernels without checking the arguments; return the results."""
    op = OPS[name]
    options = {key: value for key, value in more.items() if key in op.options}
    by_name = {key: array for key, array in more.items() if key not in op.options}
    return Call(op, dict(zip(op.names, arrays, strict=False)) | by_name, options).launched()


def _copied(array: Any) -> Any:
    """Return a copy with the same strides and the same address modulo 16 bytes."""
    extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    if not array.size or min(array.strides, default=0) < 0:
        return array.copy()
    size = extent + array.itemsize + 16
    if isinstance(array, np.ndarray):
        room: Any = np.zeros(size, np.uint8)
        start = (array.ctypes.data - room.ctypes.data) % 16
        copy: Any = np.ndarray(array.shape, array.dtype, room, start, array.strides)
    else:
        import cupy

        room = cupy.zeros(size, np.uint8)
        start = room.data + (array.data.ptr - room.data.ptr) % 16
        copy = cupy.ndarray(array.shape, array.dtype, start, array.strides)
    copy[...] = array
    return copy


def _seeds(op: Op, outputs: Arrays, rng: np.random.Generator) -> Arrays:
    """Return a random gradient for every output whose gradient the backward op takes."""
    present = [o for o in op.contract.outputs if "d" + o.name in op.backward.names]
    present = [o for o in present if o.name in outputs]  # optional outputs may be absent
    return {
        "d" + o.name: rng.standard_normal(outputs[o.name].shape).astype(outputs[o.name].dtype)
        for o in present
    }


def _error(actual: Any, exact: Any) -> float:
    """Return the largest difference; infinities must be equal, and nothing may be NaN."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    assert not np.isnan(actual).any(), _first(np.isnan(actual), "NaN")
    assert not np.isnan(exact).any()
    finite = np.isfinite(exact)
    assert (actual[~finite] == exact[~finite]).all(), _first(
        ~finite & (actual != exact), "not the expected infinity"
    )
    error = np.subtract(actual, exact, where=finite, out=np.zeros(exact.shape))
    return float(np.abs(error).max(initial=0))


def _first(wrong: np.ndarray, what: str) -> str:
    """Return a message: how many elements are wrong, and the index of the first."""
    at = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(wrong)))
    return f"{wrong.sum()} of {wrong.size} are {what}, the first at {at}"


def _worst(actual: Any, exact: Any, budget: float) -> str:
    """Return a message: how many elements exceed the budget, and which one is the worst."""
    actual, exact = np.atleast_1d(np.asarray(actual, np.float64), np.asarray(exact, np.float64))
    off = np.subtract(actual, exact, where=np.isfinite(exact), out=np.zeros(exact.shape))
    at = tuple(map(int, np.unravel_index(np.abs(off).argmax(), off.shape)))
    first = _first(np.abs(off) > budget, f"off by more than {budget:.3g}")
    return f"{first}; the worst at {at} is {actual[at]:.9g}, not {exact[at]:.9g}"


def _shifted(array: np.ndarray) -> np.ndarray:
    room = np.empty(array.size + 1, array.dtype)
    room[1:] = array.ravel()
    return room[1:].reshape(array.shape)


def sparse(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return zeros, possibly terabytes, whose pages take no memory until they are written."""
    dtype = np.dtype(dtype)
    size, no_reserve = math.prod(shape) * dtype.itemsize, 0x4000
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"this machine cannot map {size >> 30} GiB: {error}")
    return np.ndarray(shape, dtype, memory)


def compare_far(name: str, row: int, blocks: int = 8, **sizes_and_options: Any) -> None:
    """Run the last blocks of a kernel on more than 2^31 elements; compare its last three rows.

    Rows have ``row`` elements, and the leading axis has as many rows as that takes.
    """
    op, last = OPS[name], 3
    rows = 2**31 // row + last
    case = Case("far", **{"rows": [last], "axes": [last, row], "batch": last}, **sizes_and_options)
    call = case.draw(op, np.dtype("float16"))

    def has_rows(operand: Operand) -> bool:
        return bool(operand.axes) and operand.axes[0] in ("*rows", "*axes", "batch")

    far = dict(call.arrays)
    for operand in op.contract.inputs:
        few = call.arrays[operand.name]
        if few is not None and has_rows(operand):
            array = far[operand.name] = sparse((rows, *few.shape[1:]), few.dtype)
            array[-last:] = few
            array.flags.writeable = False
    with emulator(last=blocks):
        outputs = outputs_of(call._replace(arrays=far))
    present = [o for o in op.contract.outputs if o.name in outputs]
    ends = {o.name: outputs[o.name][-last:] for o in present if has_rows(o)}
    assert any(
        array.size > 2**31 for array in (*far.values(), *outputs.values()) if array is not None
    )
    within_rule(outputs_of(call), outputs_of(call.cast(np.float64)), ends)


def _between_gaps(array: np.ndarray) -> np.ndarray:
    """Return the same values in an array whose last two axes are slices of longer axes."""
    if array.ndim < 2:
        return array
    longer = [n + 8 if axis >= array.ndim - 2 else n for axis, n in enumerate(array.shape)]
    room = np.full(longer, np.nan, array.dtype)
    view = room[tuple(slice(n) for n in array.shape)]
    view[...] = array
    return view


def _reversed(array: np.ndarray) -> np.ndarray:
    return array[..., ::-1].copy()[..., ::-1] if array.ndim else array


def _fortran(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, order="F")


def _size(exact: Any) -> float:
    return float(np.abs(exact, where=np.isfinite(exact), out=np.zeros(exact.shape)).max(initial=0))
