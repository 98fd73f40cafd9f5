"""An op: its NumPy definition, its kernel launch and its backward, joined by name.

    @op("x(*rows), y(*rows) -> z(*rows)")
    def add(x, y): return x + y                      the definition, in NumPy

    @add.kernel
    def _launch(x, y): ...                           how its CUDA kernel is launched; where it
                                                     returns NotImplemented, the definition runs

    @add.gradient("dz(*rows) -> dx(*rows), dy(*rows)")
    def add_backward(dz): return dz, dz              itself an op, with a kernel of its own

A definition computes in float32 or float64: 16-bit arguments are widened before it runs and
results are rounded once, to the dtypes that the signature names, after it returns.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from . import _arrays, _jit, _options, tape
from ._signature import DIFFERENTIABLE, FLOAT32, FLOATS, Form, check, explain, parse, shape_of
from .errors import DTypeError, RangeError
from .interop import exchange

P = ParamSpec("P")
R = TypeVar("R")
Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)

KEPT_PLANS = 4096  # per op; decoding meets a new shape with every token
OPS: dict[str, "Op[..., Any]"] = {}


class Op(Generic[P, R]):
    """A function whose body is its definition and whose launch is its speed."""

    __name__: str

    def __init__(self, signature: str, definition: Callable[P, R], widen: bool = True) -> None:
        functools.update_wrapper(self, definition)
        self.signature, self.definition, self.widen = signature, definition, widen
        self.contract = parse(signature)
        self.names = tuple(operand.name for operand in self.contract.inputs)
        parameters = inspect.signature(definition).parameters
        self.positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
        self.keywords = self.names[self.positional :]
        self.options = frozenset(parameters) - frozenset(self.names)
        if tuple(parameters)[: len(self.names)] != self.names:
            raise TypeError(f"{self.__name__}: parameters {[*parameters]} are not {signature!r}")
        self.launch: Callable[P, R] | None = None
        self.backward: Op[..., Any] | None = None
        self.plans: dict[Any, Run] = {}  # how to run a call, by the forms of its arrays
        OPS[self.__name__] = self

    def __repr__(self) -> str:
        """Show the signature, so that help() does."""
        return f"<op {self.__name__}: {self.signature}>"

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Check the arrays against the signature, then run where they live."""
        if len(args) > self.positional:
            wanted = ", ".join(self.names[: self.positional])
            raise DTypeError(f"{self.__name__} takes ({wanted}); pass other arrays by keyword")
        arrays: list[Any] = [*args]
        for name in self.names[len(args) :]:
            arrays.append(options.pop(name, None))
        try:
            forms = [a if a is None else (a.__class__, a.shape, a.dtype) for a in arrays]
            run = self.plans[_jit.targets, *forms]
        except (AttributeError, KeyError, TypeError):
            run = self._plan(arrays)
        return run(arrays, options)

    def call(self, arrays: Sequence[Any], options: dict[str, Any]) -> R:
        """Call with one array for every name of the signature."""
        given = dict(zip(self.keywords, arrays[self.positional :], strict=True))
        return self(*arrays[: self.positional], **given, **options)

    def kernel(self, launch: Callable[P, R]) -> Callable[P, R]:
        """Register the launch; mypy holds it to the definition's parameters."""
        self.launch = launch
        return launch

    def gradient(self, signature: str) -> "Callable[[Callable[..., Any]], Op[..., Any]]":
        """Register the backward op, wired by name.

        Its inputs are d<output>, inputs and outputs; its outputs are d<input>: one for every
        positional input, of kind none for integers and tables, and one for every
        differentiable keyword input.
        """
        inputs, outputs = self.contract.inputs, self.contract.outputs
        known = {o.name for o in inputs + outputs} | {"d" + o.name for o in outputs}
        wanted = [
            "d" + o.name
            for i, o in enumerate(inputs)
            if i < self.positional or o.kind in DIFFERENTIABLE
        ]

        def register(definition: Callable[..., Any]) -> Op[..., Any]:
            backward: Op[..., Any] = Op(signature, definition)
            found = [o.name for o in backward.contract.outputs]
            if strange := set(backward.names) - known | backward.options - self.options:
                raise TypeError(f"{backward.__name__}: {self.__name__} has no {strange}")
            if found != wanted:
                raise TypeError(f"{backward.__name__} must return {wanted}, not {found}")
            self.backward = backward
            return backward

        return register

    def _plan(self, arrays: Sequence[Any]) -> Run:
        """Return how to run calls like this one; keep it where NumPy or CuPy holds the arrays."""
        if any(type(array) is tape.Var for array in arrays):
            return functools.partial(tape.record, self)
        library = _arrays.common(self.__name__, self.names, arrays)
        if not _arrays.native(arrays):
            return functools.partial(exchange.elsewhere, library, self)
        forms = [_form(array) for array in arrays]
        key = _jit.targets, *(f and (a.__class__, *f) for a, f in zip(arrays, forms, strict=True))
        if key not in self.plans:
            if len(self.plans) >= KEPT_PLANS:
                self.plans.clear()
            self.plans[key] = self._native_plan(library, arrays, forms)
        return self.plans[key]

    def _native_plan(
        self, library: str, arrays: Sequence[Any], forms: Sequence[Form | None], launch: bool = True
    ) -> Run:
        """Check the forms, then return what runs: the launch, the definition, or shapes alone."""
        bound = check(self.__name__, self.contract, forms)
        shapes = [shape_of(operand, bound.sizes) for operand in self.contract.outputs]
        if _arrays.Planned in map(type, arrays) and None not in shapes:
            return functools.partial(_planned, shapes, bound.outputs)
        ranges = [
            (i, bound.sizes[o.below])
            for i, o in enumerate(self.contract.inputs)
            if o.below and forms[i] and library == "numpy"  # reading values would stall a GPU
        ]
        lead = next((a for a in arrays if a is not None and type(a) is not int), None)
        narrow = [i for i, f in enumerate(forms) if f and self.widen and f.dtype in FLOATS[:2]]
        empty = any(f and 0 in f.shape for f in forms)  # kernels meet no empty axis
        launchable = launch and self.launch and bound.dtype in _jit.KERNEL_DTYPES and not empty
        kernel = bool(launchable) and _jit.target_of(lead) is not None
        function: Any = self.launch if kernel else self.definition
        keywords, positional, dtypes = self.keywords, self.positional, bound.outputs
        pack = kernel and self.widen

        def run(arrays: list[Any], options: dict[str, Any]) -> Any:
            if options:
                _options.check(self.definition, options)
            given = arrays, options
            for index, limit in ranges:
                self._check_range(index, limit, arrays)
            if pack:
                arrays = [a if a is None or type(a) is int else _arrays.packed(a) for a in arrays]
            else:
                for index in narrow:
                    arrays[index] = arrays[index].astype(FLOAT32)
            if keywords:
                options = {**options, **dict(zip(keywords, arrays[positional:], strict=True))}
                arrays = arrays[:positional]
            result = function(*arrays, **options)
            if result is NotImplemented:  # there is no kernel for these options
                return self._native_plan(library, given[0], forms, launch=False)(*given)
            results = result if result.__class__ is tuple else (result,)
            for array, dtype in zip(results, dtypes):  # noqa: B905 -- it costs 0.1 us a call
                if array.__class__ is not np.ndarray or array.dtype is not dtype:
                    break
            else:
                return result
            with np.errstate(over="ignore"):  # what float16 cannot hold is inf, as on a GPU
                rounded = tuple(map(_rounded, results, dtypes))
            return rounded if result.__class__ is tuple else rounded[0]

        return run if library == "numpy" else _arrays.on_one_device(self, run)

    def _check_range(self, index: int, limit: int, arrays: Sequence[Any]) -> None:
        values = np.asarray(arrays[index])
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = values[(values < 0) | (values >= limit)].flat[0]
            name, below = self.contract.inputs[index].name, self.contract.inputs[index].below
            problem = f"{name} holds {bad}; it must be in 0 .. {limit - 1}, the {below} axis"
            forms = [_form(array) for array in arrays]
            raise RangeError(explain(self.__name__, problem, self.contract.inputs, forms))


def op(signature: str, *, widen: bool = True) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a NumPy definition into an op.

    ``widen=False`` where it only moves values or changes its arrays: definition and launch get
    them as they lie, neither widened nor packed.
    """
    return functools.partial(Op, signature, widen=widen)


def _form(array: Any) -> Form | None:
    if array is None or type(array) is int:
        return None if array is None else Form((), np.dtype("int64"))
    return Form(array.shape, array.dtype)


def _planned(shapes: Any, dtypes: Any, arrays: Any, options: Any) -> Any:
    made = tuple(map(_arrays.Planned.of, shapes, dtypes))
    return made if len(made) > 1 else made[0]


def _rounded(array: Any, dtype: Any) -> Any:
    if isinstance(array, np.generic):
        return np.asarray(array, dtype)
    return array if array is None else array.astype(dtype, copy=False)
