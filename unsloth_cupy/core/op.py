"""An op: its NumPy definition, its kernel launch and its backward, joined by name.

    @op("x(*rows), y(*rows) -> z(*rows)")
    def add(x, y): return x + y                      the definition, in NumPy

    @add.require
    def _check(call, y): ...                         what raises before anything runs
    @add.kernel(strided=("x",))
    def _launch(x, y): ...                           how its CUDA kernel is launched; where it
                                                     returns NotImplemented, the definition runs

    @add.gradient
    def add_backward(dz): return dz, dz              itself an op, with a kernel of its own

A definition computes in float32 or float64: 16-bit arguments are widened before it runs and
results are rounded once, to the dtypes that the signature names, after it returns.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from ..errors import DTypeError, RangeError
from . import gpu, target
from .arrays import between_elements, common, native, packed, rounded
from .call import bind, compile_call
from .dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, NOT_ARRAYS
from .frameworks import elsewhere
from .replay import Run, replaying
from .signature import Bound, backward_of, check, explain, parse
from .stand_in import is_planned
from .target import target_of

P = ParamSpec("P")
R = TypeVar("R")

INTEGER = np.int64()  # has the form of a Python int
KEPT_ROUTES = 4096  # per op; decoding meets a new shape with every token
OPS: dict[str, "Op[..., Any]"] = {}


class Traced:
    """An argument that stands for an array, its ``value``, and runs ops itself: see ``Op.plan``."""

    __slots__ = ()
    value: Any
    run_op: Callable[["Op[..., Any]", list[Any], dict[str, Any]], Any]  # arrays of which it is one


class Op(Generic[P, R]):
    """A function whose body is its definition and whose launch is its speed."""

    __name__: str
    called: str
    __call__: Callable[P, R]

    def __init__(
        self, signature: str, definition: Callable[P, R], widen: bool = True, **facts: Any
    ) -> None:
        functools.update_wrapper(self, definition)
        self.facts = facts  # what tables ask: see ``op``
        self.called = self.__name__.removesuffix("_forward").replace("_over_", "_")  # in messages
        self.signature, self.definition, self.widen = signature, definition, widen
        self.contract = parse(signature)
        self.names = tuple(operand.name for operand in self.contract.inputs)
        parameters = inspect.signature(definition).parameters
        self.positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
        self.options = frozenset(parameters) - frozenset(self.names)
        if tuple(parameters)[: len(self.names)] != self.names:
            raise TypeError(f"{self.__name__}: parameters {[*parameters]} are not {signature!r}")
        self.compute = bind(self, definition)
        self.launch: Run | None = None
        self.strided: Sequence[str] = ()  # arrays that the launch gets as they lie
        self.checks: list[Run] = []
        self.backward: Op[..., Any] | None = None
        self.routes: dict[Any, Run] = {}  # how to run a call, by the forms of its arrays
        call, self.key = compile_call(self)
        self.__class__ = type("Op", (Op,), {"__call__": call})  # calls ask the class
        OPS[self.__name__] = self

    def __reduce__(self) -> Any:
        """Pickle and copy by name: an op is one, wherever it is loaded."""
        return op_named, (self.__name__,)

    def __repr__(self) -> str:
        return f"<op {self.__name__}: {self.signature}>"

    def call(self, arrays: Sequence[Any], options: dict[str, Any]) -> R:
        """Call with one array for every name of the signature."""
        function: Any = self
        return function(**dict(zip(self.names, arrays, strict=True)), **options)

    def kernel(self, launch: Any = None, *, strided: Sequence[str] = ()) -> Callable[..., Any]:
        """Register the launch, of packed arrays but for those that it takes strided: see bind."""
        if launch is None:
            return functools.partial(self.kernel, strided=strided)
        self.launch, self.strided = bind(self, launch, strided), strided
        return launch

    def require(self, check: Callable[..., None]) -> Callable[..., None]:
        """Register a check before definition and launch, of what the key of a replay says."""
        self.checks.append(bind(self, check))
        return check

    @overload
    def gradient(self, definition: Callable[..., Any]) -> "Op[..., Any]": ...

    @overload
    def gradient(self, *, widen: bool) -> "Callable[[Callable[..., Any]], Op[..., Any]]": ...

    def gradient(self, definition: Any = None, *, widen: bool = True) -> Any:
        """Register the backward op, wired by the names of its parameters: see ``backward_of``.

        Its options are among the forward's; or ``wanted``, the names of the inputs whose gradients
        are asked for, None for all: it may return None for the others.  ``**options`` stands for
        all keywords of the forward op.
        """
        if definition is None:
            return functools.partial(self.gradient, widen=widen)
        signature, theirs = inspect.signature(definition), inspect.signature(self.definition)
        own = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
        if len(own) < len(signature.parameters):
            keywords = [p for p in theirs.parameters.values() if p.kind is p.KEYWORD_ONLY]
            own |= {p.name: p for p in keywords if p.name not in own}
        options = [p for name, p in own.items() if name in {*self.options, "wanted"}]
        operands = [p for p in own.values() if p not in options]
        definition.__signature__ = signature.replace(parameters=[*operands, *options])
        names = {p.name: "None" in str(p.annotation) for p in operands}
        try:
            contract = backward_of(self.contract, names, self.positional)
        except TypeError as error:
            raise TypeError(f"{definition.__name__}: {self.__name__} has {error}") from error
        self.backward = Op(str(contract), definition, widen)
        return self.backward

    def library_of(self, arrays: Sequence[Any]) -> str:
        """Return the library of all arrays of a call; raise where they share none, or no device."""
        return common(self.called, self.names, arrays)

    def plan(self, arrays: Sequence[Any]) -> Run:
        """Return how to run calls like this one; keep it where NumPy or CuPy holds the arrays."""
        for array in arrays:
            if isinstance(array, Traced):
                return functools.partial(array.run_op, self)
        library = self.library_of(arrays)
        if not native(arrays):
            return functools.partial(elsewhere, library, self)
        if len(self.routes) >= KEPT_ROUTES:
            self.routes.clear()
        run = target.watch(self, arrays, self._prepare(library, arrays), False)
        self.routes[self.key(*arrays)] = run
        return run

    def _prepare(self, library: str, arrays: Sequence[Any], launch: bool = True) -> Run:
        """Check the forms, then return what runs: the launch or the definition."""
        forms = [INTEGER if type(array) is int else array for array in arrays]
        bound = check(self.called, self.contract, forms)
        given = {i: form for i, form in enumerate(forms) if form is not None}
        inputs, host = self.contract.inputs, library == "numpy"
        read = [i for i, f in given.items() if host and inputs[i].below and not is_planned(f)]
        limits = {i: bound.sizes[str(inputs[i].below)] for i in read}  # a GPU would stall
        ranges = [functools.partial(self._check_range, *pair) for pair in limits.items()]
        lead = next((form for form in given.values() if form is not INTEGER), None)
        owned = target_of(lead) is not None
        checks: list[Run] = [*ranges, *self.checks]
        full = all(0 not in form.shape for form in given.values())  # kernels meet no empty axis
        kernel = launch and self.launch and full and bound.dtype in KERNEL_DTYPES
        if not (kernel and owned):
            every = [self._check_places] * owned + checks
            run = self._definition(bound, given, every, type(lead))
            run = target.watch(self, arrays, run, True)
            return run if host else gpu.on_one_device(self, lambda: run)
        defined = functools.partial(self._prepare, library, launch=False)
        made = functools.partial(
            replaying, self._launch(given, checks), self._check_places, defined, host
        )
        return made() if host else gpu.on_one_device(self, made)

    def _launch(self, given: Mapping[int, Any], checks: Sequence[Run]) -> Run:
        """Return what launches the kernel, of packed arrays but for those that it takes strided."""
        launch: Any = self.launch
        pack = [i for i in given if self.widen and self.names[i] not in self.strided]

        def run(arrays: list[Any], options: dict[str, Any]) -> Any:
            for each in checks:
                each(arrays, options)
            for index in pack:
                arrays[index] = packed(arrays[index])
            return launch(arrays, options)

        return run

    def _definition(
        self, bound: Bound, given: Mapping[int, Any], checks: Sequence[Run], kind: type[Any]
    ) -> Run:
        """Return what computes in float32 at least, and rounds the results once."""
        compute = self.compute
        narrow = {i for i, form in given.items() if self.widen and form.dtype in FLOATS[:2]}

        def run(arrays: list[Any], options: dict[str, Any]) -> Any:
            for each in checks:
                each(arrays, options)
            if narrow:
                arrays = [a.astype(FLOAT32) if i in narrow else a for i, a in enumerate(arrays)]
            result = compute(arrays, options)
            results = result if result.__class__ is tuple else (result,)
            for array, dtype in zip(results, bound.outputs):  # noqa: B905 -- 0.1 us a call
                if array.__class__ is not kind or array.dtype is not dtype:
                    break
            else:
                return result
            results = tuple(map(rounded, results, bound.outputs))
            return results if result.__class__ is tuple else results[0]

        return run

    def _check_places(self, arrays: Sequence[Any], _: Any) -> None:
        for name, array in zip(self.names, arrays, strict=True):
            if not isinstance(array, NOT_ARRAYS) and between_elements(array):
                problem = f"{name} lies between two elements of its dtype; pass {name}.copy()"
                raise DTypeError(explain(self.called, problem, self.contract.inputs, arrays))

    def _check_range(self, index: int, limit: int, arrays: Sequence[Any], _: Any) -> None:
        values = np.asarray(arrays[index])
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = values[(values < 0) | (values >= limit)].flat[0]
            name, below = self.contract.inputs[index].name, self.contract.inputs[index].below
            problem = f"{name} holds {bad}; it must be in 0 .. {limit - 1}, the {below} axis"
            problem = explain(self.called, problem, self.contract.inputs, arrays)
            raise RangeError(problem, expected=range(limit), actual=int(bad))


def op_named(name: str) -> Op[..., Any]:
    """Return an op: what a pickle of one calls."""
    return OPS[name]


def op(signature: str, *, widen: bool = True, **facts: Any) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a NumPy definition into an op.

    ``widen=False`` where it only moves values or changes its arrays: definition and launch get
    them as they lie, neither widened nor packed.  Facts are why it has ``no_gradient``; that its
    results are ``constant`` to gradients; the ``sizes`` of axes that no operand has, by the shape
    of the first and the options; the dtype that ``autocast`` gives it, where that is float32; bytes
    of ``traffic`` by the arrays, where not each moves once; ``operations`` of products; and how
    ``torch`` computes the same.
    """
    return lambda definition: Op(signature, definition, widen, **facts)
