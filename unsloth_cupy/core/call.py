"""Generates the Python function that a call of an op runs, from the op's parameters.

For ``f(x, bias=None, *, eps: float = 1e-6)`` it is, in short,

    def f(self, x=None, bias=None, *more, eps=1e-6):
        if x.__class__ is not ndarray and (handler := handler_of(x)):
            return handler(self, [x, bias], {"eps": eps})   a library that runs the op itself
        try:
            run = routes[targets, x.__class__, x.shape, x.dtype, bias and (...)]
        except (AttributeError, KeyError, TypeError):
            run = plan([x, bias])                    the first call of this form
        if not (eps.__class__ is float and -inf < eps < inf):
            eps = fit("eps", eps)
        return run([x, bias], {"eps": eps})

A call of a known form (classes, shapes, dtypes) creates no tuple except its key.  The annotation
of an option names the values that it accepts:

    eps: float                  a finite number
    softcap: float | None       a finite number or None
    chunk: int | None           an integer or None
    interleaved: bool           True or False

The op itself checks ranges and other options.  ``check_options`` is for functions and classes.
"""

import dataclasses
import functools
import inspect
import linecache
import math
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ConfigError, DTypeError
from . import target
from .frameworks import handler_of
from .names import current_names, wrong_call

F = typing.TypeVar("F", bound=Callable[..., Any])
Parameters = Mapping[str, inspect.Parameter]


class Option(NamedTuple):
    """The type of an option: bool, int or float, and whether it may be None."""

    kind: type[Any]
    optional: bool


KINDS: Mapping[type[Any], tuple[str, tuple[type[Any], ...]]] = {
    bool: ("True or False", (bool, np.bool_)),
    int: ("an integer", (int, np.integer)),
    float: ("a finite number", (float, int, np.floating, np.integer)),
}

NO_NUMBERS = (bool, np.timedelta64)  # subclasses of int and np.integer that are no numbers here

SOURCE = """
def key({arrays}):
    return (targets.targets,{key})

def {name}({parameters}, **unknown):
    if more or unknown:
        refuse(more, unknown)
{required}    if {lead}.__class__ is not ndarray and (handler := handler_of({lead})):
{handed}        return handler(self, [{arrays}], {{{options}}})
    try:
        run = routes[targets.targets,{key}]
    except (AttributeError, KeyError, TypeError):
        run = plan([{arrays}])
{checks}
    return run([{arrays}], {{{options}}})
"""


REQUIRED = "    {1}if {0} is empty:\n        {1}refuse(missing='{0}')\n"


def compile_call(op: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an op's generated function, and the function that computes the key of its routes."""
    parameters = inspect.signature(op.definition).parameters
    options = [parameters[name] for name in parameters if name not in op.names]
    positional, keywords = op.names[: op.positional], op.names[op.positional :]
    defaults = {f"default_{o.name}": o.default for o in options}
    header = ["self", *(f"{name}=None" for name in positional), "*more"]
    header += [f"{name}=None" for name in keywords]
    header += [f"{o.name}=default_{o.name}" for o in options]
    # without a default; True: no annotation whose check refuses a missing option without opcodes
    required = {o.name: option_of(o) is None for o in options if o.default is o.empty}
    text = SOURCE.format(
        name=op.__name__,
        lead=next(operand.name for operand in op.contract.inputs if not operand.optional),
        arrays=", ".join(op.names),
        key="".join(f"\n        {_form_of(operand)}," for operand in op.contract.inputs),
        parameters=", ".join(header),
        checks="".join(_check_of(o.name, option_of(o)) for o in options),
        options=", ".join(f"{o.name!r}: {o.name}" for o in options),
        required="".join(REQUIRED.format(each, "") for each, alone in required.items() if alone),
        handed="".join(REQUIRED.format(o, "    ") for o, alone in required.items() if not alone),
    )
    scope: dict[str, Any] = {
        **defaults,
        "plan": op.plan,
        "routes": op.routes,
        "targets": target,
        "ndarray": np.ndarray,
        "handler_of": handler_of,
        "inf": math.inf,
        "fit": functools.partial(coerce_option, op.called, parameters),
        "empty": inspect.Parameter.empty,
        "refuse": functools.partial(_refuse, op, parameters),
    }
    write(f"call of {op.__name__}", text, scope)
    return scope[op.__name__], scope["key"]


def write(title: str, source: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Define the functions of a source text in a scope, and return the scope.

    The title is their file name in linecache, so tracebacks and debuggers show the source.
    """
    for number in count():  # another text has this title: the next number makes it unique
        file = f"<{title}{number or ''}>"
        entry = (len(source), None, source.splitlines(keepends=True), file)
        if linecache.cache.setdefault(file, entry) == entry:
            exec(compile(source, file, "exec"), scope)
            break
    return scope


def bind(op: Any, function: Any, also: Iterable[str] = ()) -> Callable[[Any, Any], Any]:
    """Return ``run(arrays, options)``, which calls a function with arguments by parameter name.

    A parameter ``call`` gets the name of the op for messages, ``**rest`` all arrays and options
    that no other parameter names.  ``also`` are further names that the op must have.
    """
    places = {"call": repr(op.called)}
    places |= {name: f"arrays[{i}]" for i, name in enumerate(op.names)}
    places |= {name: f"options[{name!r}]" for name in sorted(op.options)}
    parameters = inspect.signature(function).parameters
    named = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    if unknown := {*named, *also} - places.keys():
        problem = f"{op.__name__} has no {', '.join(sorted(unknown))} among {', '.join(places)}"
        raise TypeError(f"{function.__name__}: {problem}")
    if len(named) < len(parameters):
        named += [name for name in [*places][1:] if name not in named]
    text = ", ".join(f"{name}={places[name]}" for name in named)
    title = f"arguments of {function.__name__} in {op.__name__}"
    source = f"def run(arrays, options):\n    return function({text})\n"
    return write(title, source, {"function": function})["run"]


def _form_of(operand: Any) -> str:
    """Return the source of the part of a key that an operand adds.

    Tuples cost time in each call: only optional operands and integers create one.
    """
    name = operand.name
    form = f"{name}.__class__, {name}.shape, {name}.dtype"
    if operand.kind == "int":
        return f"{name}.__class__ if {name}.__class__ in (int, None.__class__) else ({form})"
    return f"{name} if {name} is None else ({form})" if operand.optional else form


def _check_of(name: str, option: Option | None) -> str:
    """Return the source that checks an option; empty if the op checks it itself.

    The class is compared first: that takes fewer opcodes than a call of ``coerce_option``.
    """
    if option is None:
        return ""
    wrong = f"{name}.__class__ is not {option.kind.__name__}"
    if option.kind is float:
        wrong = f"not ({name}.__class__ is float and -inf < {name} < inf)"
    present = f"{name} is not None and " * option.optional
    return f"    if {present}{wrong}:\n        {name} = fit({name!r}, {name})\n"


def option_of(parameter: inspect.Parameter) -> Option | None:
    """Return the Option of a parameter annotated with one of KINDS, alone or with None; or None."""
    kinds = {parameter.annotation}
    if isinstance(parameter.annotation, types.UnionType):
        kinds = {*typing.get_args(parameter.annotation)}
    optional = types.NoneType in kinds
    kinds.discard(types.NoneType)
    return Option(kinds.pop(), optional) if len(kinds) == 1 and kinds <= KINDS.keys() else None


def check_options(wrapped: F) -> F:
    """Decorate a function, or a class's ``__init__``, to check its options by their annotations.

    NumPy scalars become Python numbers.

    Raises
    ------
    ConfigError
        From the call: an option does not match its annotation.
    ArgumentError
        From the call: an option is not known, or an argument is missing.
    """
    function: Any = wrapped.__init__ if isinstance(wrapped, type) else wrapped  # type: ignore[misc]
    signature = inspect.signature(function)
    parameters = signature.parameters
    options_of = {name: option for name, p in parameters.items() if (option := option_of(p))}
    shown = getattr(wrapped, "CALL", wrapped.__qualname__)  # CALL: how messages name the call
    own = "self" in parameters  # the first parameter, which messages leave out

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not options.keys() <= parameters.keys():
            options = current_names(shown, options, parameters)
        try:
            bound = signature.bind(*args, **options)
        except TypeError:
            known = dict([*parameters.items()][own:])
            raise wrong_call(shown, known, args[own:], options) from None  # type: ignore[misc]
        for name in [name for name in options_of if name in bound.arguments]:
            value = bound.arguments[name]
            if value is not None or not options_of[name].optional:
                bound.arguments[name] = coerce_option(shown, parameters, name, value)
        return function(*bound.args, **bound.kwargs)

    vars(call)["checks_calls"] = True
    if isinstance(wrapped, type):
        wrapped.__init__ = call  # type: ignore[misc]
        return wrapped
    return typing.cast(F, call)


def check_fields(values: Any) -> None:
    """Check the fields of a dataclass by their annotations, in its ``__post_init__``.

    NumPy scalars become Python numbers.

    Raises
    ------
    ConfigError
        A field does not match its annotation; the message names it.
    """
    for field in dataclasses.fields(values):
        value, name = getattr(values, field.name), field.name
        if requirement := mismatch(field.type, value):
            call = getattr(values, "CALL", type(values).__name__)
            raise ConfigError(f"{call}({name}={reprlib.repr(value)}): {name} must be {requirement}")
        if isinstance(value, np.generic):
            object.__setattr__(values, name, value.item())


def check_entries(where: object, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise a ConfigError for an entry of a JSON object that does not match its annotation."""
    for name in values.keys() & kinds.keys():
        if requirement := mismatch(kinds[name], values[name]):
            problem = f"{where}: {name} is {reprlib.repr(values[name])}"
            raise ConfigError(f"{problem}; it must be {requirement}: correct the file")


def mismatch(annotation: Any, value: Any) -> str:
    """Return a phrase for what an annotation requires if a value does not match it; else ""."""
    union = isinstance(annotation, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    matches = any(_matches(kind, value) for kind in kinds)
    return "" if matches else " or ".join(map(_words_of, kinds))


def _matches(kind: Any, value: Any) -> bool:
    """Return whether a value has a type: one of KINDS, a class, Sequence[class] or Any."""
    if origin := typing.get_origin(kind):
        listed = isinstance(value, origin) and not isinstance(value, str | bytes)
        return listed and all(_matches(typing.get_args(kind)[0], each) for each in value)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return is_integer(value, -math.inf)
    if kind is float:
        return is_number(value) and -math.inf < value < math.inf
    return kind is Any or isinstance(value, os.PathLike if kind is Path else kind)


def _words_of(kind: Any) -> str:
    """Return a phrase for the values that ``_matches`` accepts, such as "an integer"."""
    if typing.get_origin(kind):
        return "a list, each " + _words_of(typing.get_args(kind)[0])
    others = {types.NoneType: "None", str: "a text", Path: "a path", Mapping: "an object"}
    return KINDS[kind][0] if kind in KINDS else others.get(kind) or kind.__name__


def in_any_case(value: Any, known: Collection[str]) -> Any:
    """Return the known name that equals a text in lower case; else the value itself."""
    return name if isinstance(value, str) and (name := value.lower()) in known else value


def is_number(value: Any) -> bool:
    """Return whether value is a real number: no bool, and no integer too large for a float."""
    real = isinstance(value, numbers.Real) and not isinstance(value, NO_NUMBERS)
    return real and (type(value) is not int or abs(value) <= math.nextafter(math.inf, 0))


def is_list(value: Any) -> bool:
    """Return whether value is a collection of values: no text, and no array without axes."""
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes)
    return listed and getattr(value, "ndim", 1) != 0


def is_integer(value: Any, least: float = 0) -> bool:
    """Return whether value is an integer of Python or NumPy, not a bool, and at least ``least``."""
    whole = isinstance(value, int | np.integer) and type(value) not in NO_NUMBERS
    return whole and bool(value >= least)


def check_whole(call: str, options: Mapping[str, int | None]) -> None:
    """Raise ConfigError for an integer beyond 64 bits, the widest of NumPy and of kernels."""
    for name, value in options.items():
        if value is not None and not -(2**63) <= value < 2**63:
            shown = reprlib.repr(value)
            raise ConfigError(f"{call}({name}={shown}): {name} must be an integer of 64 bits")


def coerce_option(op: str, parameters: Parameters, name: str, value: Any) -> Any:
    """Return the value of an option as a Python number; raise ConfigError if it is invalid."""
    kind, optional = typing.cast(Option, option_of(parameters[name]))
    if value is inspect.Parameter.empty:
        raise ArgumentError(f"{op}: {name} is missing; pass {name}=...")
    words, classes = KINDS[kind]
    boolean = isinstance(value, bool | np.bool_)  # a bool is also an int in Python
    fits = isinstance(value, classes) and boolean == (kind is bool)
    fits = fits and type(value) is not np.timedelta64
    if fits and (kind is not float or (is_number(value) and -math.inf < value < math.inf)):
        value = value.item() if isinstance(value, np.generic) else value
        beyond = kind is float and isinstance(value, int) and not -(2**63) <= value < 2**63
        return float(value) if beyond else value  # NumPy makes an object array of such an integer
    words += " or None" * optional
    raise ConfigError(f"{op}({name}={reprlib.repr(value)}): {name} must be {words}")


def _refuse(
    op: Any, parameters: Parameters, more: Any = (), unknown: Any = (), missing: str = ""
) -> None:
    """Raise for too many arrays by position, for unknown options or for a missing option."""
    if more:
        names = ", ".join(op.names[: op.positional])
        raise DTypeError(f"{op.called} takes ({names}); pass other arrays by keyword")
    if missing:
        raise ArgumentError(f"{op.called}: {missing} is missing; pass {missing}=...")
    raise wrong_call(op.called, parameters, (), unknown)  # type: ignore[misc]
