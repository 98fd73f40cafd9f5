"""An op: its NumPy definition, its kernel launch and its backward, joined by name.

    @op("x(*rows), y(*rows) -> z(*rows)")
    def add(x, y): return x + y                      the definition, in NumPy

    @add.kernel
    def _launch(x, y): ...                           how its CUDA kernel is launched

    @add.gradient("dz(*rows) -> dx(*rows), dy(*rows)")
    def add_backward(dz): return dz, dz              itself an op, with a kernel of its own

A definition computes in float32 or float64: 16-bit arguments are widened before it runs and
results are rounded once, to the dtypes that the signature names, after it returns.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from . import _arrays, _jit, tape
from ._signature import DIFFERENTIABLE, FLOAT32, FLOATS, Form, check, explain, parse, shape_of
from .errors import RangeError

P = ParamSpec("P")
R = TypeVar("R")

KEPT_PLANS = 4096  # per op; decoding meets a new shape with every token
NARROW = FLOATS[:2]
OPS: dict[str, "Op[..., Any]"] = {}


class Plan(NamedTuple):
    """What a call with these shapes and dtypes needs; worked out once and kept."""

    kernel: bool
    widen: tuple[int, ...]  # 16-bit operands of a definition
    ranges: tuple[tuple[int, int], ...]  # operand, exclusive limit of its values
    outputs: tuple[np.dtype[Any] | None, ...]
    planned: tuple[tuple[int, ...], ...] | None  # shapes of the outputs, if only those are asked


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
        self.keywords = frozenset(self.names[self.positional :])
        self.options = frozenset(parameters) - frozenset(self.names)
        if tuple(parameters)[: len(self.names)] != self.names:
            raise TypeError(f"{self.__name__}: parameters {[*parameters]} are not {signature!r}")
        self.launch: Callable[P, R] | None = None
        self.backward: Op[..., Any] | None = None
        self.plans: dict[Any, Plan] = {}
        OPS[self.__name__] = self

    def __repr__(self) -> str:
        """Show the signature, so that help() does."""
        return f"<op {self.__name__}: {self.signature}>"

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Check the arrays against the signature, then run where they live."""
        arrays: list[Any] = [*args, *[None] * (len(self.names) - len(args))]
        if options:
            for name in self.names:
                if name in options:
                    arrays[self.names.index(name)] = options.pop(name)
        return self.call(arrays, options)

    def call(self, arrays: list[Any], options: dict[str, Any]) -> R:
        """Run on one array per name of the signature; the first call of a kind makes its plan."""
        try:
            forms = [a if a is None else (a.__class__, a.shape, a.dtype) for a in arrays]
            key = (_jit.targets, *forms)
            plan = self.plans[key]
        except (AttributeError, KeyError, TypeError):
            if any(type(array) is tape.Var for array in arrays):
                return cast(R, tape.record(self, arrays, options))
            if any(isinstance(array, np.generic) for array in arrays):
                return self.call(
                    [np.asarray(a) if isinstance(a, np.generic) else a for a in arrays], options
                )
            library = _arrays.common(self.__name__, self.names, arrays)
            if library not in ("numpy", "cupy"):
                return cast(R, _arrays.elsewhere(library, self.call, arrays, options))
            plan = self._plan(arrays)
            if not any(type(array) is int for array in arrays):
                if len(self.plans) >= KEPT_PLANS:
                    self.plans.clear()
                self.plans[key] = plan
        for index, limit in plan.ranges:
            self._check_range(index, limit, arrays)
        if plan.kernel:
            arrays = [a if a is None or type(a) is int else _arrays.packed(a) for a in arrays]
            return self._apply(cast(Callable[P, R], self.launch), arrays, options)
        for index in plan.widen:
            arrays[index] = arrays[index].astype(FLOAT32)
        result: Any
        if plan.planned is None:
            result = self._apply(self.definition, arrays, options)
        else:
            result = tuple(map(_arrays.Planned.of, plan.planned, plan.outputs))
            result = result if len(result) > 1 else result[0]
        if type(result) is not tuple:
            return cast(R, _rounded(result, plan.outputs[0]))
        return cast(R, tuple(map(_rounded, result, plan.outputs)))

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

    def _apply(self, function: Callable[P, R], arrays: list[Any], options: Any) -> R:
        if self.keywords:
            options = {**dict(zip(self.names, arrays, strict=True)), **options}
            for name in self.names[: self.positional]:
                del options[name]
        return function(*arrays[: self.positional], **options)

    def _plan(self, arrays: Sequence[Any]) -> Plan:
        forms = [_form(array) for array in arrays]
        bound = check(self.__name__, self.contract, forms)
        lead = next(a for a in arrays if a is not None and type(a) is not int)
        _arrays.check_devices(self.__name__, self.names, arrays)
        on_host = isinstance(lead, np.ndarray)
        planned = self._planned(arrays, bound.sizes)
        kernel = planned is None and self.launch is not None and bound.dtype in _jit.KERNEL_DTYPES
        kernel &= all(f is None or 0 not in f.shape for f in forms)  # kernels meet no empty axis
        widen = planned is None and self.widen
        return Plan(
            kernel and _jit.target_of(lead) is not None,
            tuple(i for i, f in enumerate(forms) if f and widen and f.dtype in NARROW),
            tuple(
                (i, bound.sizes[o.below])
                for i, o in enumerate(self.contract.inputs)
                if o.below and forms[i] and on_host  # reading values would stall a GPU
            ),
            bound.outputs,
            planned,
        )

    def _planned(self, arrays: Sequence[Any], sizes: Any) -> tuple[tuple[int, ...], ...] | None:
        """Return the shapes of the outputs of planned arrays, where the signature knows them."""
        if not any(type(array) is _arrays.Planned for array in arrays):
            return None
        shapes = tuple(shape_of(operand, sizes) for operand in self.contract.outputs)
        return None if None in shapes else cast(tuple[tuple[int, ...], ...], shapes)

    def _check_range(self, index: int, limit: int, arrays: Sequence[Any]) -> None:
        values = np.asarray(arrays[index])
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = values[(values < 0) | (values >= limit)].flat[0]
            operand = self.contract.inputs[index]
            where = f"it must be in 0 .. {limit - 1}, the {operand.below} axis"
            problem = f"{operand.name} holds {bad}; {where}"
            forms = [_form(array) for array in arrays]
            raise RangeError(explain(self.__name__, problem, self.contract.inputs, forms))


def op(signature: str, *, widen: bool = True) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a NumPy definition into an op; ``widen=False`` where it only moves values."""
    return functools.partial(Op, signature, widen=widen)


def _form(array: Any) -> Form | None:
    if array is None:
        return None
    if type(array) is int:
        return Form((), np.dtype("int64"))
    return Form(array.shape, array.dtype)


def _rounded(array: Any, dtype: Any) -> Any:
    if array is None:
        return None
    if isinstance(array, np.generic):
        return np.asarray(array, dtype)
    return array if array.dtype == dtype else array.astype(dtype)
