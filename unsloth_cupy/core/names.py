"""Public names: the names of packages, renamed options, and the names of other libraries.

    publish(__name__, homes)                 names of a package, some imported on first access
    Settings(learning_rate=1e-4)             ArgumentError: learning_rate is named lr here
    unsloth_cupy.SFTTrainer                  UnknownNameError: call Trainer(model, data)

Python's errors for a wrong call or a missing name say nothing about renamed options or other
libraries.  So the functions and classes that a package publishes raise these errors instead.
"""

import builtins
import dataclasses
import difflib
import functools
import importlib
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from inspect import Parameter
from typing import Any

from ..errors import ArgumentError, ConfigError, UnknownNameError, UnslothCupyError
from .other_names import ABSENT, ATTRIBUTES, OTHER_NAMES

F = typing.TypeVar("F", bound=Callable[..., Any])
Parameters = Mapping[str, Parameter]

# Old name of an option: new name.  With the call before it where other calls use the old name.
RENAMED = {
    "checkpoint_every": "recompute_every",
    "threshold": "min_delta",
    "Tape.gradients.seed": "dy",
    "Trainer.text": "data",
}
# Public name: the packages that its module imports.
NEEDS = {"jax": "jax", "torch": "torch", "huggingface": "torch transformers"}
NEEDS["patch"] = NEEDS["huggingface"]
FEW = 16  # a message lists so many options at most, else it names help(...)
PACKAGE = __name__.partition(".")[0]


def current_names(
    call: str, options: Mapping[str, Any], known: Iterable[str], passed: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the options of a call with old names replaced by ``known`` names, after a warning.

    ``passed`` are the names of arguments that the call passes by position.
    """
    result = dict(options)
    for old in [name for name in options if name not in known]:
        new = RENAMED.get(f"{call}.{old}") or RENAMED.get(old, "")
        if new not in known:
            continue
        if new in {*options, *passed}:
            raise ConfigError(f"{call}: {old} is the old name of {new}; pass {new} alone")
        warnings.warn(f"{call}: {old} is named {new} now", FutureWarning, stacklevel=3)
        result[new] = result.pop(old)
    return result


def wrong_call(
    call: str, known: Parameters, arguments: Sized, options: Iterable[str]
) -> ArgumentError | None:
    """Return the error of a call that does not fit the parameters of a function; None if it fits.

    ``known`` are the parameters, ``arguments`` the arguments by position, ``options`` the keywords.
    """
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    kinds = {parameter.kind for parameter in known.values()}
    places = [name for name, parameter in known.items() if parameter.kind in by_place]
    named = {n: p for n, p in known.items() if p.kind in (*by_place[1:], Parameter.KEYWORD_ONLY)}
    for name in options:
        if name not in named and Parameter.VAR_KEYWORD not in kinds:
            return ArgumentError(f"{call}({name}=...): {_cure_of(call, name, named)}")
        if name in places[: len(arguments)]:
            return ArgumentError(f"{call}({name}=...): {name} is passed by position, too")
    if len(arguments) > len(places) and Parameter.VAR_POSITIONAL not in kinds:
        others = next((f", {name}=..." for name in named if name not in places), "")
        shown = f"{call}({', '.join(places)}{others})".replace("(, ", "(")
        problem = f"{call}: {len(arguments)} arguments are passed by position, {len(places)} may be"
        return ArgumentError(f"{problem}; call {shown}")
    required = {n: p for n, p in known.items() if n in {*places, *named} and p.default is p.empty}
    if missing := [n for n in required if n not in {*places[: len(arguments)], *options}]:
        # **options accepts another library's name for a parameter that is missing
        for name in options:
            if own := {*OTHER_NAMES.get(name.lower(), ())}.intersection(missing):
                return ArgumentError(f"{call}({name}=...): {name} is named {min(own)} here")
        shown = ", ".join(name if name in places else f"{name}=..." for name in required)
        verb = "is" if len(missing) == 1 else "are"
        return ArgumentError(f"{call}: {', '.join(missing)} {verb} missing; call {call}({shown})")
    return None


def _cure_of(call: str, name: str, known: Parameters) -> str:
    """Return the name here of an option that a call does not have; else the options it has."""
    names_here = (name.lower(), *OTHER_NAMES.get(name.lower(), ()))
    for own in names_here:
        if own in known:
            return f"{name} is named {own} here"
    for option, parameter in known.items():
        for kind in typing.get_args(parameter.annotation):
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            for own in {field.name for field in fields}.intersection(names_here):
                place = f"{name} is named {own} in" if own != name else "it is an option of"
                return f"{place} {kind.__name__}; pass {option}={kind.__name__}({own}=...)"
    if reason := ABSENT.get(name.lower()):
        return f"there is no such option: {reason}"
    names = difflib.get_close_matches(name, known, 1) or known
    listed = ", ".join(names) or "none" if len(names) <= FEW else f"those of help({call})"
    return f"there is no such option; {call} takes {listed}"


def checking_calls(function: F, *, bound: bool = False) -> F:
    """Return a function that raises ArgumentError for a call that does not fit its parameters.

    An option with its old name works, with a warning.  The first argument of a ``bound`` function
    is an object or a class, which messages leave out.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:  # a call that fits costs nothing more
            return function(*args, **options)
        except TypeError as error:
            if isinstance(error, UnslothCupyError):
                raise
            name = _call_of(function, args) if bound else function.__name__
            known = dict([*inspect.signature(function).parameters.items()][bound:])
            renamed = current_names(name, options, known, [*known][: len(args) - bound])
            if renamed.keys() == options.keys():
                if wrong := wrong_call(name, known, args[bound:], options):
                    raise wrong from None
                raise  # the call fits: a TypeError of the function's own code
        return call(*args, **renamed)

    vars(call)["checks_calls"] = True
    return typing.cast(F, call)


def _call_of(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the name in messages of a method, or of the creation of an object."""
    kind = args[0] if isinstance(args[0], type) else type(args[0])
    if function.__name__ in ("__init__", "__new__"):
        return str(getattr(kind, "CALL", kind.__name__))
    return kind.__name__ + f".{function.__name__}" * (function.__name__ != "__call__")


def checked(value: Any) -> Any:
    """Return a function that checks its calls, or a class after its methods became such ones."""
    if isinstance(value, types.FunctionType) and "checks_calls" not in vars(value):
        home, name = vars(sys.modules[value.__module__]), value.__name__
        call = checking_calls(value)
        if home.get(name) is value:
            home[name] = call  # pickle looks a function up in its module
        return call
    if isinstance(value, type) and not issubclass(value, BaseException):
        if value.__init__ is object.__init__ and value.__new__ is object.__new__:
            setattr(value, "__init__", _without_arguments(value))  # noqa: B010 -- mypy
        for kind in value.__mro__:
            protocol = getattr(kind, "_is_protocol", 0)
            if kind.__module__.partition(".")[0] == PACKAGE and not protocol:
                _check_methods(kind)
    return value


def _without_arguments(kind: type[Any]) -> Callable[..., None]:
    """Return the ``__init__`` of a class without one, for subclasses with several bases, too."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        following = getattr(super(kind, self), "__init__")  # noqa: B009 -- mypy
        if isinstance(following, types.MethodType):
            following(*args, **options)
        elif wrong := wrong_call(kind.__name__, {}, args, options):
            raise wrong

    return __init__


def _check_methods(kind: type) -> None:
    """Make the public methods of a class check calls, and its objects explain missing names."""
    called = ["__init__", "__call__"] + ["__new__"] * issubclass(kind, tuple)
    for name, member in [*vars(kind).items()]:
        if name[0] == "_" and name not in called:
            continue
        wraps = type(member) if isinstance(member, classmethod | staticmethod) else None
        function = member.__func__ if wraps else member
        if isinstance(function, types.FunctionType) and "checks_calls" not in vars(function):
            call = checking_calls(function, bound=wraps is not staticmethod or name == "__new__")
            setattr(kind, name, wraps(call) if wraps else call)
    if not hasattr(kind, "__getattr__"):
        setattr(kind, "__getattr__", _missing_name)  # noqa: B010 -- mypy


def _missing_name(self: Any, name: str) -> Any:
    """Return a renamed attribute, with a warning, or raise an UnknownNameError with the cure."""
    kind = type(self)
    if hasattr(kind, name):  # a property raised AttributeError: raise it again
        return object.__getattribute__(self, name)
    if (new := RENAMED.get(name)) and hasattr(self, new):
        warnings.warn(f"{kind.__name__}.{name} is named {new} now", FutureWarning, stacklevel=2)
        return getattr(self, new)
    raise unknown(kind.__name__, name, self)


def unknown(where: str, name: str, owner: Any) -> UnknownNameError:
    """Return the error for a name that a package or an object does not have."""
    cure = ATTRIBUTES.get(f"{where}.{name}") or ATTRIBUTES.get(name)
    error = UnknownNameError(f"{where} has no {name}" + (f"; {cure}" if cure else ""))
    error.name, error.obj = name, owner  # from these Python suggests a similar name
    return error


class _OtherNames(MetaPathFinder):
    """Raises the error for ``from unsloth_cupy import SFTTrainer``.

    Where a package has no such attribute, Python imports a module of the name, and reports its own
    error if no finder has it.
    """

    def find_spec(self, name: str, *_: object) -> None:
        package, last = name.rpartition(".")[::2]
        if last in ATTRIBUTES and isinstance(sys.modules.get(package), Package):
            raise ModuleNotFoundError(str(unknown(package, last, None)))


sys.meta_path.append(_OtherNames())  # the last finder: Python reaches it if no module has the name


class Package(types.ModuleType):
    """A package whose ``dir()`` lists its public names; some are imported on first access."""

    _own: list[str]
    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise unknown(self.__name__, name, self)
        home = importlib.import_module(f".{self._homes[name]}", self.__name__)
        return home if self._homes[name] == name else checked(getattr(home, name))

    @property
    def _shown(self) -> list[str]:
        """The names whose required packages are installed; to look for them imports nothing."""
        names, find = [*self._own, *self._homes], PathFinder.find_spec
        return [name for name in names if all(map(find, NEEDS.get(name, "").split()))]

    def __dir__(self) -> list[str]:
        return sorted({*self._shown, "__all__", *(name for name in vars(self) if name[:2] == "__")})

    @property
    def __all__(self) -> list[str]:
        """The names without modules, and without builtins, which ``import *`` would replace."""
        names = [name for name in self._shown if self._homes.get(name) != name]
        return [name for name in names if not hasattr(builtins, name)]


def publish(package: str, homes: Mapping[str, str] | None = None) -> None:
    """Make a package list the names that it imports from the library, and the names of ``homes``.

    ``homes`` maps a name to the module from which it is imported on first access; a name that maps
    to itself is that module.
    """
    module = sys.modules[package]
    public = {name: value for name, value in vars(module).items() if name[0] != "_"}
    values = {n: v for n, v in public.items() if not isinstance(v, types.ModuleType)}
    modules = {name: getattr(value, "__module__", PACKAGE) for name, value in values.items()}
    own = [name for name, home in modules.items() if home.partition(".")[0] == PACKAGE]
    vars(module).update({name: checked(values[name]) for name in own})
    vars(module).update(_own=own, _homes=homes or {})
    module.__class__ = Package
