"""Undo what a test changes in the library and in the process, so that tests are independent.

Nothing is listed here, all is found in the library: caches are those of ``functools``; variables
are names of a module or a class in lower case, as constants are in upper case.
"""

import functools
import importlib
import os
import signal
import sys
import types
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from unsloth_cupy.core.op import OPS
from unsloth_cupy.ops.common import threads

from .tracked import ROOT, tracked

SIGNALS = signal.SIGINT, signal.SIGTERM


class Name(NamedTuple):
    """A name of a module or a class, and its value."""

    owner: Any
    name: str
    value: Any

    def __str__(self) -> str:
        """Return the qualified name."""
        owner = self.owner
        where = f"{owner.__module__}." if isinstance(owner, type) else ""
        return f"{where}{owner.__name__}.{self.name}"


def names() -> tuple[Name, ...]:
    """Return every name in the library's modules and their classes."""
    return _known(len(sys.modules))[0]


def caches() -> dict[str, Any]:
    """Return every cache of the library, by qualified name."""
    return _known(len(sys.modules))[1]


def variables() -> tuple[Name, ...]:
    """Return the names whose values may change: neither constants nor code."""
    return _known(len(sys.modules))[2]


def modules() -> list[str]:
    """Return the names of the library's modules."""
    paths = tracked("unsloth_cupy/**/*.py")
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
    return [".".join(each).removesuffix(".__init__") for each in parts]


@functools.lru_cache(maxsize=4)
def _known(loaded: int) -> tuple[tuple[Name, ...], dict[str, Any], tuple[Name, ...]]:
    """Return names, caches and variables; computed again when more modules are loaded.

    It imports all modules except those that import another library, which takes seconds.
    """
    for name in modules():
        if not name.endswith((".__main__", ".peers")) and ".interop." not in name:
            with suppress(ImportError):  # the command line asks for packages of its own
                importlib.import_module(name)
    owners: list[Any] = []
    for module in [m for name, m in sys.modules.items() if name.startswith("unsloth_cupy")]:
        classes = [v for v in vars(module).values() if isinstance(v, type)]
        owners += [module, *(v for v in classes if v.__module__ == module.__name__)]
    every = [Name(owner, *item) for owner in owners for item in vars(owner).items()]
    own = tuple(n for n in every if not n.name.startswith("__"))
    functions = [n.value for n in own if hasattr(n.value, "cache_clear")]
    caches = {f"{cache.__module__}.{cache.__qualname__}": cache for cache in functions}
    return own, caches, tuple(filter(_changes, own))


def _changes(n: Name) -> bool:
    inside = isinstance(n.owner, type)  # a module may make what it is asked for
    fields = inside and (hasattr(n.owner, "_fields") or hasattr(n.owner, "__dataclass_fields__"))
    code = callable(n.value) or hasattr(n.value, "__get__")
    plain = fields or code or isinstance(n.value, types.ModuleType)
    return n.name.islower() and not plain and n.name not in ("_abc_impl", "_is_protocol")


@functools.cache
def _contains(kind: type[Any]) -> bool:
    return issubclass(kind, MutableMapping | MutableSequence | MutableSet)


def forget() -> None:
    """Empty all caches and the recorded plans of ops, which may be those of a stand-in GPU."""
    if threads._pool.cache_info().currsize:
        threads._pool().shutdown(wait=False)
    for cache in caches().values():
        cache.cache_clear()
    for op in OPS.values():
        op.routes.clear()


def _inside(container: Any) -> Any:
    """Return the identities of a container's items, as arrays cannot be compared by ``==``."""
    if isinstance(container, MutableMapping):
        return {key: id(value) for key, value in container.items()}
    return [*map(id, container)]


def _put_back(container: Any, before: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, MutableSequence) else container.update)(before)


def _restore_modules(modules: dict[str, Any]) -> None:
    """Put replaced or removed modules back into ``sys.modules``; drop stand-ins of CuPy.

    Newly imported modules stay: a library such as torch does not work if some of it is removed.
    """
    for name in {*modules, *sys.modules}:
        now, before = sys.modules.get(name), modules.get(name)
        if name in modules and now is not before:
            sys.modules[name] = before
        elif name not in modules and name.startswith("cupy") and not _imported(now):
            del sys.modules[name]


def _environment() -> dict[str, str]:
    """Return the environment variables, except the one that pytest sets for every test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _imported(module: Any) -> bool:
    return getattr(module, "__spec__", None) is not None


@contextmanager
def isolated() -> Iterator[None]:
    """Undo the changes of a ``with`` block at its end; the block starts with empty caches."""
    forget()  # an import may have filled some caches
    now = [(owner, name, vars(owner)[name]) for owner, name, _ in variables()]
    containers = [OPS, *(value for *_, value in now if _contains(type(value)))]
    copies = [container.copy() for container in containers]
    loaded, environment = sys.modules.copy(), _environment()
    folder, errors = os.getcwd(), np.geterr()
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        yield
    finally:
        for owner, name, value in now:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for container, before in zip(containers, copies, strict=True):
            if _inside(container) != _inside(before):
                _put_back(container, before)
        forget()
        if sys.modules != loaded:
            _restore_modules(loaded)
        for name in _environment().keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment.items() - _environment().items())
        os.chdir(folder)
        np.seterr(**errors)
        for number, handler in handlers:
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
