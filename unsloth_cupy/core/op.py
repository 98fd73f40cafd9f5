"""An op: a NumPy definition, a kernel launch and a backward op, connected by names.

    @op("x(*rows), y(*rows) -> z(*rows)")
    def add(x, y): return x + y                      the definition, in NumPy

    @add.require
    def _check(call, y): ...                         raises before anything runs
    @add.kernel(strided=("x",))
    def _launch(x, y): ...                           launches the CUDA kernel; if it returns
                                                     NotImplemented, the definition runs

    @add.gradient
    def add_backward(dz): return dz, dz              an op, with a kernel of its own

A definition computes in float32 or float64: 16-bit arguments are widened before it runs, and its
results are rounded once, to the dtypes of the signature, after it returns.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from ..errors import ConfigError, DTypeError, RangeError
from . import gpu, target
from .arrays import between_elements, common, contiguous, native, rounded
from .call import bind, check_whole, compile_call, option_of
from .dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, NOT_ARRAYS, Stored
from .frameworks import run_adopted
from .replay import Run, replaying
from .signature import Bound, backward_of, check, explain, parse
from .stand_in import is_planned
from .target import target_of

P = ParamSpec("P")
R = TypeVar("R")

INTEGER = np.int64()  # has the shape and dtype of a Python int
KEPT_ROUTES = 4096  # routes per op, then all are dropped: in decoding each token has a new shape
OPS: dict[str, "Op[..., Any]"] = {}


class Traced:
    """An argument that wraps an array, ``value``, and runs ops itself: see ``Op.plan``."""

    __slots__ = ()
    value: Any
    run_op: Callable[["Op[..., Any]", list[Any], dict[str, Any]], Any]  # self is one of the arrays


class Op(Generic[P, R]):
    """A function with a NumPy definition and, if one is registered, a kernel launch."""

    __name__: str
    called: str
    __call__: Callable[P, R]

    def __init__(
        self, signature: str, definition: Callable[P, R], widen: bool = True, **facts: Any
    ) -> None:
        functools.update_wrapper(self, definition)
        self.facts = facts  # what benchmarks, plans and frameworks need: see ``op``
        # the name in messages
        self.called = self.__name__.removesuffix("_forward").replace("_over_", "_")
        self.signature, self.definition, self.widen = signature, definition, widen
        self.contract = parse(signature, facts.get("bound"))
        self.names = tuple(operand.name for operand in self.contract.inputs)
        parameters = inspect.signature(definition).parameters
        self.positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
        self.options = frozenset(parameters) - frozenset(self.names)
        # integer options, which must fit in 64 bits; a seed may be any integer
        kinds = {name: option_of(parameters[name]) for name in sorted(self.options - {"seed"})}
        self.whole = [name for name, option in kinds.items() if option and option.kind is int]
        if tuple(parameters)[: len(self.names)] != self.names:
            raise TypeError(f"{self.__name__}: parameters {[*parameters]} are not {signature!r}")
        self.compute = bind(self, definition)
        self.launch: Run | None = None
        self.strided: Sequence[str] = ()  # arrays that the launch gets with their own strides
        self.checks: list[Run] = []
        self.backward: Op[..., Any] | None = None
        self.routes: dict[Any, Run] = {}  # functions that run calls, by the forms of the arrays
        call, self.key = compile_call(self)
        # a class of its own, as Python calls ``__call__`` of the class, not of the object
        self.__class__ = type("Op", (Op,), {"__call__": call})
        OPS[self.__name__] = self

    def __reduce__(self) -> Any:
        """Pickle and copy by name: a process has one op of each name."""
        return op_named, (self.__name__,)

    def __repr__(self) -> str:
        return f"<op {self.__name__}: {self.signature}>"

    def call(self, arrays: Sequence[Any], options: dict[str, Any]) -> R:
        """Call the op with one array for every name of the signature."""
        function: Any = self
        return function(**dict(zip(self.names, arrays, strict=True)), **options)

    def kernel(self, launch: Any = None, *, strided: Sequence[str] = ()) -> Callable[..., Any]:
        """Register the launch (see ``bind``); it gets contiguous arrays, except ``strided``."""
        if launch is None:
            return functools.partial(self.kernel, strided=strided)
        self.launch, self.strided = bind(self, launch, strided), strided
        return launch

    def require(self, check: Callable[..., None]) -> Callable[..., None]:
        """Register a check that runs before a call; it may read only what the key of a replay has.

        A replay skips it.
        """
        self.checks.append(bind(self, check))
        return check

    @overload
    def gradient(self, definition: Callable[..., Any]) -> "Op[..., Any]": ...

    @overload
    def gradient(self, *, widen: bool) -> "Callable[[Callable[..., Any]], Op[..., Any]]": ...

    def gradient(self, definition: Any = None, *, widen: bool = True) -> Any:
        """Register the backward op, whose parameters are connected by name: see ``backward_of``.

        Its options are options of the forward op, or ``wanted``: a set with the names of the inputs
        whose gradients are requested, or None for all.  It may return None for other gradients.
        ``**options`` stands for all keywords of the forward op.
        """
        if definition is None:
            return functools.partial(self.gradient, widen=widen)
        signature, forward = inspect.signature(definition), inspect.signature(self.definition)
        own = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
        if len(own) < len(signature.parameters):
            keywords = [p for p in forward.parameters.values() if p.kind is p.KEYWORD_ONLY]
            own |= {p.name: p for p in keywords if p.name not in own}
        options = [p for name, p in own.items() if name in {*self.options, "wanted"}]
        operands = [p for p in own.values() if p not in options]
        definition.__signature__ = signature.replace(parameters=[*operands, *options])
        names = {p.name: "None" in str(p.annotation) for p in operands}
        try:
            contract = backward_of(self.contract, names, self.positional)
        except TypeError as error:
            raise TypeError(f"{definition.__name__}: {self.__name__} has {error}") from error
        bound = {"bound": contract.derived} if contract.derived else {}
        self.backward = Op(str(contract), definition, widen, **bound)
        if "wanted" in own:
            self.backward.require(_check_of_wanted(self.names))
        return self.backward

    def library_of(self, arrays: Sequence[Any]) -> str:
        """Return the one library of all arrays; raise if libraries or devices differ."""
        return common(self.called, self.names, arrays)

    def plan(self, arrays: Sequence[Any]) -> Run:
        """Return a function that runs calls of this form; store it for arrays of NumPy and CuPy."""
        for array in arrays:
            if isinstance(array, Traced):
                return functools.partial(array.run_op, self)
        library = self.library_of(arrays)
        if not native(arrays):
            return functools.partial(run_adopted, library, self)
        if len(self.routes) >= KEPT_ROUTES:
            self.routes.clear()
        run = target.watch(self, arrays, self._prepare(library, arrays), False)
        self.routes[self.key(*arrays)] = run = self._checking_homes(arrays, run)
        return run

    def _checking_homes(self, arrays: Sequence[Any], run: Run) -> Run:
        """Return ``run`` with a check of the libraries of quantized weights, which no key has."""
        homes = [(i, type(a.home)) for i, a in enumerate(arrays) if isinstance(a, Stored)]

        def checked(arrays: list[Any], options: dict[str, Any]) -> Any:
            if any(type(arrays[index].home) is not kind for index, kind in homes):
                return self._prepare(self.library_of(arrays), arrays)(arrays, options)
            return run(arrays, options)

        return checked if homes else run

    def _prepare(self, library: str, arrays: Sequence[Any], launch: bool = True) -> Run:
        """Check the forms of the arrays; return the function to run, launch or definition."""
        forms = [INTEGER if type(array) is int else array for array in arrays]
        bound = check(self.called, self.contract, forms)
        present = {i: form for i, form in enumerate(forms) if form is not None}
        inputs, host = self.contract.inputs, library == "numpy"
        # values of integers are checked on the host alone: to read them would synchronize a GPU
        read = [i for i, f in present.items() if host and inputs[i].below and not is_planned(f)]
        limits = {i: bound.sizes[str(inputs[i].below)] for i in read}
        ranges = [functools.partial(self._check_range, *pair) for pair in limits.items()]
        lead = next((form for form in present.values() if form is not INTEGER), None)
        owned = target_of(lead) is not None
        checks: list[Run] = [*ranges, *[self._check_whole] * bool(self.whole), *self.checks]
        # kernels get no empty axis: the definition returns empty results or zeros
        full = all(0 not in form.shape for form in present.values())
        kernel = launch and self.launch and full and bound.dtype in KERNEL_DTYPES
        if not (kernel and owned):
            every = [self._check_places] * owned + checks
            computed = run = self._definition(bound, present, every, type(lead))
            if not host:
                make: Any = lambda: computed  # noqa: E731
                # such a definition only allocates and multiplies, so it is replayed as a launch is
                if (
                    owned
                    and self.facts.get("products")
                    and not any(isinstance(a, Stored) for a in arrays)
                ):
                    places, lying = self._check_places, self.facts.get("lying")
                    make = functools.partial(replaying, computed, places, make, host, lying)
                run = gpu.on_one_device(self, make)
            return target.watch(self, arrays, run, True)
        defined = functools.partial(self._prepare, library, launch=False)
        launches = self._launch(present, checks)
        make = functools.partial(replaying, launches, self._check_places, defined, host)
        return make() if host else gpu.on_one_device(self, make)

    def _launch(self, present: Mapping[int, Any], checks: Sequence[Run]) -> Run:
        """Return a function that makes arrays contiguous, except strided ones, and launches."""
        launch: Any = self.launch
        dense = [i for i in present if self.widen and self.names[i] not in self.strided]

        def run(arrays: list[Any], options: dict[str, Any]) -> Any:
            for each in checks:
                each(arrays, options)
            for index in dense:
                arrays[index] = contiguous(arrays[index])
            return launch(arrays, options)

        return run

    def _definition(
        self, bound: Bound, present: Mapping[int, Any], checks: Sequence[Run], kind: type[Any]
    ) -> Run:
        """Return a function that computes in float32 or wider and rounds the results once."""
        compute: Run = self.compute
        moves = not self.widen and "sizes" in self.facts  # an op such as reshape computes nothing
        if kind is np.ndarray and not moves:  # infinity and NaN do not warn, as on a GPU
            compute = np.errstate(all="ignore")(compute)
        narrow = {i for i, form in present.items() if self.widen and form.dtype in FLOATS[:2]}

        def run(arrays: list[Any], options: dict[str, Any]) -> Any:
            for each in checks:
                each(arrays, options)
            if narrow:
                arrays = [a.astype(FLOAT32) if i in narrow else a for i, a in enumerate(arrays)]
            result = compute(arrays, options)
            results = result if result.__class__ is tuple else (result,)
            # the usual results need no rounding; zip without strict= saves 0.1 us a call
            for array, dtype in zip(results, bound.outputs):  # noqa: B905
                if array is not None and (array.__class__ is not kind or array.dtype is not dtype):
                    break
            else:
                return result
            results = tuple(map(rounded, results, bound.outputs))
            return results if result.__class__ is tuple else results[0]

        return run

    def _check_places(self, arrays: Sequence[Any], _: Any) -> None:
        """Raise DTypeError for an array that is not aligned to its element size."""
        for name, array in zip(self.names, arrays, strict=True):
            if not isinstance(array, NOT_ARRAYS) and between_elements(array):
                problem = f"{name} is not aligned to its element size; pass {name}.copy()"
                raise DTypeError(explain(self.called, problem, self.contract.inputs, arrays))

    def _check_whole(self, _: Sequence[Any], options: dict[str, Any]) -> None:
        """Raise ConfigError for an integer option beyond 64 bits."""
        check_whole(self.called, {name: options[name] for name in self.whole})

    def _check_range(self, index: int, limit: int, arrays: Sequence[Any], _: Any) -> None:
        """Raise RangeError if a value of the array with this index is not in 0 .. limit - 1."""
        values = np.asarray(arrays[index])
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = values[(values < 0) | (values >= limit)].flat[0]
            name, below = self.contract.inputs[index].name, self.contract.inputs[index].below
            problem = f"{name} holds {bad}; it must be in 0 .. {limit - 1}, the {below} axis"
            problem = explain(self.called, problem, self.contract.inputs, arrays)
            raise RangeError(problem, expected=range(limit), actual=int(bad))


def _check_of_wanted(names: Sequence[str]) -> Callable[..., None]:
    """Return the check that an option ``wanted`` is None or a set of names of inputs."""
    known = frozenset(names)

    def check_wanted(call: str, wanted: Any) -> None:
        if wanted is not None and not (isinstance(wanted, Set) and wanted <= known):
            cure = f"pass a set of names among {', '.join(names)}, or None for all gradients"
            raise ConfigError(f"{call}: wanted={wanted!r}; {cure}")

    return check_wanted


def op_named(name: str) -> Op[..., Any]:
    """Return the op with this name; unpickling an op calls this function."""
    return OPS[name]


def op(signature: str, *, widen: bool = True, **facts: Any) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a NumPy definition into an op.

    ``widen=False`` is for an op that only moves values or changes its arrays: definition and launch
    get the arrays as they are, neither widened nor made contiguous.

    The facts of an op:

    ``no_gradient``
        The reason why the op has no gradient.
    ``constant``
        True if gradients do not flow through the results.
    ``sizes``
        Sizes of axes that no operand has, from the shape of the first operand and the options.
    ``bound``
        Sizes of axes that no operand has, from the sizes of other axes.
    ``autocast``
        float32 if autocast casts the arguments of the op to float32.
    ``traffic``
        Bytes moved, from the arrays; without it each array moves once.
    ``operations``
        Operations of the matrix products.
    ``products``
        True if the definition on a GPU only allocates and calls ``gemm``: it is then recorded and
        replayed, as a launch is.
    ``lying``
        What ``products`` depends on besides the layouts of the arrays.
    ``torch``
        The function that computes the same in torch.
    """
    return lambda definition: Op(signature, definition, widen, **facts)
