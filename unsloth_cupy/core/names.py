"""Public names: what packages show, names of before, and the words of other libraries.

    publish(__name__, homes)                 names of a package, some imported on first access
    Settings(learning_rate=1e-4)             ArgumentError: learning_rate is named lr here
    unsloth_cupy.SFTTrainer                  UnknownNameError: call Trainer(model, data)

Python's own errors for a call that does not fit, or for a name that is missing, do not know these
words: functions and classes that a package publishes raise the library's errors in their place.
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

# Old name of an option: new one.  Behind the name of a call where other calls have an option so.
RENAMED = {
    "checkpoint_every": "recompute_every",
    "threshold": "min_delta",
    "Tape.gradients.seed": "dy",
    "Trainer.text": "data",
}
NEEDS = {"jax": "jax", "torch": "torch", "huggingface": "torch transformers"}  # of modules
NEEDS["patch"] = NEEDS["huggingface"]
FEW = 16  # options that a message lists
ROOM = __name__.partition(".")[0]


def current_names(
    call: str, options: Mapping[str, Any], known: Iterable[str], passed: Iterable[str] = ()
) -> dict[str, Any]:
    """Return options by the names that are ``known``: an old one becomes the new one, and warns.

    ``passed`` are those that the call has by position.
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
    """Return the error of a call that does not fit a function's parameters; None if it does."""
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    kinds = {parameter.kind for parameter in known.values()}
    places = [name for name, parameter in known.items() if parameter.kind in by_place]
    named = {n: p for n, p in known.items() if p.kind in (*by_place[1:], Parameter.KEYWORD_ONLY)}
    for name in options:
        if name not in named and Parameter.VAR_KEYWORD not in kinds:
            return ArgumentError(f"{call}({name}=...): {_answer(call, name, named)}")
        if name in places[: len(arguments)]:
            return ArgumentError(f"{call}({name}=...): {name} is passed by position, too")
    if len(arguments) > len(places) and Parameter.VAR_POSITIONAL not in kinds:
        others = next((f", {name}=..." for name in named if name not in places), "")
        shown = f"{call}({', '.join(places)}{others})".replace("(, ", "(")
        problem = f"{call}: {len(arguments)} arguments are passed by position, {len(places)} may be"
        return ArgumentError(f"{problem}; call {shown}")
    least = {n: p for n, p in known.items() if n in {*places, *named} and p.default is p.empty}
    if missing := [n for n in least if n not in {*places[: len(arguments)], *options}]:
        for name in options:
            if own := {*OTHER_NAMES.get(name.lower(), ())}.intersection(missing):
                return ArgumentError(f"{call}({name}=...): {name} is named {min(own)} here")
        shown = ", ".join(name if name in places else f"{name}=..." for name in least)
        verb = "is" if len(missing) == 1 else "are"
        return ArgumentError(f"{call}: {', '.join(missing)} {verb} missing; call {call}({shown})")
    return None


def _answer(call: str, name: str, known: Parameters) -> str:
    """Return what an option that a call does not have is named there, or which ones it has."""
    words = (name.lower(), *OTHER_NAMES.get(name.lower(), ()))
    for own in words:
        if own in known:
            return f"{name} is named {own} here"
    for option, parameter in known.items():
        for kind in typing.get_args(parameter.annotation):
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            for own in {field.name for field in fields}.intersection(words):
                answer = f"{name} is named {own} in" if own != name else "it is an option of"
                return f"{answer} {kind.__name__}; pass {option}={kind.__name__}({own}=...)"
    if reason := ABSENT.get(name.lower()):
        return f"there is no such option: {reason}"
    names = difflib.get_close_matches(name, known, 1) or known
    listed = ", ".join(names) or "none" if len(names) <= FEW else f"those of help({call})"
    return f"there is no such option; {call} takes {listed}"


def answering(function: F, *, bound: bool = False) -> F:
    """Return a function that raises ArgumentError where a call does not fit it.

    Options by names of before are taken, with a warning.  The first argument of one that is
    ``bound`` is an object or a class.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
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
                raise
        return call(*args, **renamed)

    vars(call)["answers"] = True
    return typing.cast(F, call)


def _call_of(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return how messages name a method, or the creation of an object."""
    kind = args[0] if isinstance(args[0], type) else type(args[0])
    if function.__name__ in ("__init__", "__new__"):
        return str(getattr(kind, "CALL", kind.__name__))
    return kind.__name__ + f".{function.__name__}" * (function.__name__ != "__call__")


def answered(value: Any) -> Any:
    """Return a function that is answering; of a class, its methods become so."""
    if isinstance(value, types.FunctionType) and "answers" not in vars(value):
        home, name, call = vars(sys.modules[value.__module__]), value.__name__, answering(value)
        if home.get(name) is value:
            home[name] = call  # pickle finds it there
        return call
    if isinstance(value, type) and not issubclass(value, BaseException):
        if value.__init__ is object.__init__ and value.__new__ is object.__new__:
            setattr(value, "__init__", _without_arguments(value))  # noqa: B010 -- mypy
        for kind in value.__mro__:
            if kind.__module__.partition(".")[0] == ROOM and not getattr(kind, "_is_protocol", 0):
                _answer_in(kind)
    return value


def _without_arguments(kind: type[Any]) -> Callable[..., None]:
    """Return the ``__init__`` of a class that has none; classes of users may combine others."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        following = getattr(super(kind, self), "__init__")  # noqa: B009 -- mypy
        if isinstance(following, types.MethodType):
            following(*args, **options)
        elif wrong := wrong_call(kind.__name__, {}, args, options):
            raise wrong

    return __init__


def _answer_in(kind: type) -> None:
    """Make the public methods of a class answering, and its objects where they lack a name."""
    called = ["__init__", "__call__"] + ["__new__"] * issubclass(kind, tuple)
    for name, member in [*vars(kind).items()]:
        if name[0] == "_" and name not in called:
            continue
        wraps = type(member) if isinstance(member, classmethod | staticmethod) else None
        function = member.__func__ if wraps else member
        if isinstance(function, types.FunctionType) and "answers" not in vars(function):
            call = answering(function, bound=wraps is not staticmethod or name == "__new__")
            setattr(kind, name, wraps(call) if wraps else call)
    if not hasattr(kind, "__getattr__"):
        setattr(kind, "__getattr__", _lacking)  # noqa: B010 -- mypy


def _lacking(self: Any, name: str) -> Any:
    """Raise an UnknownNameError that says what to call instead."""
    kind = type(self)
    if hasattr(kind, name):
        return object.__getattribute__(self, name)  # a property that lacks something itself
    if (new := RENAMED.get(name)) and hasattr(self, new):
        warnings.warn(f"{kind.__name__}.{name} is named {new} now", FutureWarning, stacklevel=2)
        return getattr(self, new)
    raise unknown(kind.__name__, name, self)


def unknown(where: str, name: str, owner: Any) -> UnknownNameError:
    """Return the error for a name that a package, or an object, does not have."""
    cure = ATTRIBUTES.get(f"{where}.{name}") or ATTRIBUTES.get(name)
    error = UnknownNameError(f"{where} has no {name}" + (f"; {cure}" if cure else ""))
    error.name, error.obj = name, owner  # Python adds what is spelled like it
    return error


class _Others(MetaPathFinder):
    """Answers ``from unsloth_cupy import SFTTrainer``, of which only modules are asked then."""

    def find_spec(self, name: str, *_: object) -> None:
        package, last = name.rpartition(".")[::2]
        if last in ATTRIBUTES and isinstance(sys.modules.get(package), Package):
            raise ModuleNotFoundError(str(unknown(package, last, None)))


sys.meta_path.append(_Others())  # the last finder: it is asked only if no module has the name


class Package(types.ModuleType):
    """A package that shows its public names; some are imported on first access."""

    _own: list[str]
    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise unknown(self.__name__, name, self)
        home = importlib.import_module(f".{self._homes[name]}", self.__name__)
        return home if self._homes[name] == name else answered(getattr(home, name))

    @property
    def _shown(self) -> list[str]:
        """The names of which all that they need is installed."""
        names, find = [*self._own, *self._homes], PathFinder.find_spec
        return [name for name in names if all(map(find, NEEDS.get(name, "").split()))]

    def __dir__(self) -> list[str]:
        return sorted({*self._shown, "__all__", *(name for name in vars(self) if name[:2] == "__")})

    @property
    def __all__(self) -> list[str]:
        """No packages, and no names of Python's own, which ``import *`` would replace."""
        names = [name for name in self._shown if self._homes.get(name) != name]
        return [name for name in names if not hasattr(builtins, name)]


def publish(package: str, homes: Mapping[str, str] | None = None) -> None:
    """Make a package show what it imports of the library itself, and the names of ``homes``.

    Those are imported from these modules on first access; a module that is its own home is shown
    itself.
    """
    module = sys.modules[package]
    named = {name: value for name, value in vars(module).items() if name[0] != "_"}
    there = {n: v for n, v in named.items() if not isinstance(v, types.ModuleType)}
    own = [n for n, v in there.items() if getattr(v, "__module__", ROOM).partition(".")[0] == ROOM]
    vars(module).update({name: answered(there[name]) for name in own})
    vars(module).update(_own=own, _homes=homes or {})
    module.__class__ = Package
