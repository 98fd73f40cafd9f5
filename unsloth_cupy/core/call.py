"""The function that Python calls for an op, written from the op's parameters.

For ``f(x, bias=None, *, eps: float = 1e-6)`` it is, in short,

    def f(self, x=None, bias=None, *more, eps=1e-6):
        if x.__class__ is not ndarray and (door := door_of(x)):
            return door(self, [x, bias], {"eps": eps})   of a library that asks for it
        try:
            run = routes[targets, x.__class__, x.shape, x.dtype, bias and (...)]
        except (AttributeError, KeyError, TypeError):
            run = plan([x, bias])                    a form that was not met before
        if not (eps.__class__ is float and -inf < eps < inf):
            eps = fit("eps", eps)
        return run([x, bias], {"eps": eps})

so that a call whose form is known makes no tuple but its key.  What an option may be is read off
its annotation:

    eps: float                  a finite number
    softcap: float | None       a finite number or None
    chunk: int | None           an integer or None
    interleaved: bool           True or False

Bounds, and options annotated otherwise, are the op's own to check.  ``checked`` holds other
functions and classes to their annotations in the same way.
"""

import functools
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, DTypeError
from . import target
from .frameworks import door_of

F = typing.TypeVar("F", bound=Callable[..., Any])
Parameters = Mapping[str, inspect.Parameter]


class Option(NamedTuple):
    """What one option may be: a bool, an int or a float, or None too."""

    kind: type[Any]
    optional: bool


KINDS: Mapping[type[Any], tuple[str, tuple[type[Any], ...]]] = {
    bool: ("True or False", (bool, np.bool_)),
    int: ("an integer", (int, np.integer)),
    float: ("a finite number", (float, int, np.floating, np.integer)),
}

SOURCE = """
def key({arrays}):
    return targets.targets, {key}

def {name}({parameters}):
    if more:
        too_many()
    if {lead}.__class__ is not ndarray and (door := door_of({lead})):
        return door(self, [{arrays}], {{{options}}})
    try:
        run = routes[targets.targets, {key}]
    except (AttributeError, KeyError, TypeError):
        run = plan([{arrays}])
{checks}
    return run([{arrays}], {{{options}}})
"""


def compile_call(op: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function of an op, and the key of a call among its routes."""
    parameters = inspect.signature(op.definition).parameters
    options = [parameters[name] for name in parameters if name not in op.names]
    positional, keywords = op.names[: op.positional], op.names[op.positional :]
    defaults = {f"default_{o.name}": o.default for o in options if o.default is not o.empty}
    given = ["self", *(f"{name}=None" for name in positional), "*more"]
    given += [f"{name}=None" for name in keywords]
    given += [o.name + f"=default_{o.name}" * (o.default is not o.empty) for o in options]
    text = SOURCE.format(
        name=op.__name__,
        lead=next(operand.name for operand in op.contract.inputs if not operand.optional),
        arrays=", ".join(op.names),
        key="".join(_form_of(operand) + ", " for operand in op.contract.inputs),
        parameters=", ".join(given),
        checks="".join(_check_of(o.name, option_of(o)) for o in options),
        options=", ".join(f"{o.name!r}: {o.name}" for o in options),
    )
    scope: dict[str, Any] = {
        **defaults,
        "plan": op.plan,
        "routes": op.routes,
        "targets": target,
        "ndarray": np.ndarray,
        "door_of": door_of,
        "inf": math.inf,
        "fit": functools.partial(coerce_option, op.called, parameters),
        "too_many": functools.partial(_too_many, op.called, ", ".join(positional)),
    }
    write(f"call of {op.__name__}", text, scope)
    return scope[op.__name__], scope["key"]


def write(title: str, source: str, scope: dict[str, Any]) -> None:
    """Define the functions of a source, which see what is in scope; tracebacks show the title."""
    exec(compile(source, f"<{title}>", "exec"), scope)


def bind(op: Any, function: Any, also: Iterable[str] = ()) -> Callable[[Any, Any], Any]:
    """Return what calls a function, of (arrays, options), with those that its parameters name.

    ``call`` is the name of the call in messages, ``**rest`` takes all that is not named.
    """
    places = {"call": repr(op.called)}
    places |= {name: f"arrays[{i}]" for i, name in enumerate(op.names)}
    places |= {name: f"options[{name!r}]" for name in sorted(op.options)}
    parameters = inspect.signature(function).parameters
    named = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    if strange := {*named, *also} - places.keys():
        problem = f"{op.__name__} has no {', '.join(sorted(strange))} among {', '.join(places)}"
        raise TypeError(f"{function.__name__}: {problem}")
    if len(named) < len(parameters):
        named += [name for name in [*places][1:] if name not in named]
    text = ", ".join(f"{name}={places[name]}" for name in named)
    run: Any = eval(f"lambda arrays, options: function({text})", {"function": function})
    return run


def _form_of(operand: Any) -> str:
    """Return the expression of an array's form; only optional ones and integers make a tuple."""
    name = operand.name
    form = f"{name}.__class__, {name}.shape, {name}.dtype"
    if operand.kind == "int":
        return f"{name}.__class__ if {name}.__class__ in (int, None.__class__) else ({form})"
    return f"{name} if {name} is None else ({form})" if operand.optional else form


def _check_of(name: str, option: Option | None) -> str:
    """Return the lines that check an option: nothing for one that is the op's own to check."""
    if option is None:
        return ""
    wrong = f"{name}.__class__ is not {option.kind.__name__}"
    if option.kind is float:
        wrong = f"not ({name}.__class__ is float and -inf < {name} < inf)"
    given = f"{name} is not None and " * option.optional
    return f"    if {given}{wrong}:\n        {name} = fit({name!r}, {name})\n"


def option_of(parameter: inspect.Parameter) -> Option | None:
    """Return what a parameter annotated with one of KINDS, alone or with None, may be."""
    kinds = {parameter.annotation}
    if isinstance(parameter.annotation, types.UnionType):
        kinds = {*typing.get_args(parameter.annotation)}
    optional = types.NoneType in kinds
    kinds.discard(types.NoneType)
    return Option(kinds.pop(), optional) if len(kinds) == 1 and kinds <= KINDS.keys() else None


def checked(made: F) -> F:
    """Check the options of a function or of a class's ``__init__`` by their annotations.

    NumPy's numbers become Python's.

    Raises
    ------
    ConfigError
        From the call: an option is not what its annotation says.
    """
    function: Any = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    signature = inspect.signature(function)
    parameters = signature.parameters
    options_of = {name: option for name, p in parameters.items() if (option := option_of(p))}
    shown = getattr(made, "CALL", made.__qualname__)  # CALL: what a class holds the options of

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            given = signature.bind(*args, **options)
        except TypeError:
            return function(*args, **options)  # Python's own error names the parameter
        for name in [name for name in options_of if name in given.arguments]:
            value = given.arguments[name]
            if value is not None or not options_of[name].optional:
                given.arguments[name] = coerce_option(shown, parameters, name, value)
        return function(*given.args, **given.kwargs)

    if isinstance(made, type):
        made.__init__ = call  # type: ignore[misc]
        return made
    return typing.cast(F, call)


def is_number(value: Any) -> bool:
    """Say whether value is a real number of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any, least: float = 0) -> bool:
    """Say whether value is an integer of Python or NumPy, no bool, and not below the least."""
    return isinstance(value, int | np.integer) and type(value) is not bool and bool(value >= least)


def coerce_option(op: str, parameters: Parameters, name: str, value: Any) -> Any:
    """Return NumPy's number as Python's; raise ConfigError for what does not fit."""
    kind, optional = typing.cast(Option, option_of(parameters[name]))
    words, classes = KINDS[kind]
    boolean = isinstance(value, bool | np.bool_)  # which Python counts among the integers
    fits = isinstance(value, classes) and boolean == (kind is bool)
    if fits and (kind is not float or -math.inf < value < math.inf):
        return value.item() if isinstance(value, np.generic) else value
    words += " or None" * optional
    raise ConfigError(f"{op}({name}={reprlib.repr(value)}): {name} must be {words}")


def _too_many(op: str, wanted: str) -> None:
    raise DTypeError(f"{op} takes ({wanted}); pass other arrays by keyword")
