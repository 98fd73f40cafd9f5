"""Environments of on-policy methods: FILE.py:NAME, or a callable of this process.

``NAME()`` returns an object for each answer: see ``Transformer.rollouts``.  Its methods run in
threads of this process.  The rewards of an environment are added to those of reward functions.
"""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import path_of
from ..naming import named
from .reward_pool import fingerprint
from .rewards import FunctionWord, digest_of

TURNS = 8  # default maximum number of answers of a row


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment, which is a reward too: what its rows earned."""

    name: str
    digest: str
    create: Callable[[], Any]
    weight: float = 1.0

    @property
    def judges(self) -> bool:
        """Whether its rows earn rewards; of a function that returns objects it is not known."""
        known = isinstance(self.create, type)
        return not known or hasattr(self.create, "step") or hasattr(self.create, "get_reward")

    def check(self, columns: Mapping[str, Any]) -> None:
        """Accept all columns: ``reset`` takes those that it names."""

    def begin(
        self, columns: Any, place: Any, late: Any = None, *, earned: Array, **more: Any
    ) -> Callable[[], Array]:
        """Return a function that returns the rewards that the environment gave, (answers,)."""
        return lambda: earned


def word_of(environment: Any) -> str:
    """Return an environment as the text of the setting: a callable, or FILE.py:NAME."""
    if callable(environment):
        return FunctionWord(environment)
    if not isinstance(environment, str | PathLike):
        cure = "pass a class, a function that returns an object, or FILE.py:NAME"
        raise ConfigError(f"{named(environment=repr(environment))}: {cure}")
    return fspath(environment)


def environment_of(word: str | None) -> Environment | None:
    """Return the environment of the setting; raise a ConfigError if there is none of this name."""
    if word is None:
        return None
    if isinstance(word, FunctionWord):
        return Environment(str(word), digest_of(word.function), word.function)
    file, separator, name = word.rpartition(":")
    path = path_of("environment", file)
    if not (separator and file and name and path.is_file()):
        shown = named(environment=word)
        raise ConfigError(f"{shown} names nothing in a Python file; write FILE.py:NAME")
    digest = fingerprint(path)
    return Environment(name, digest, _created(path.resolve(), digest, name))


@functools.lru_cache(maxsize=8)  # settings are checked more than once
def _created(path: Path, digest: str, name: str) -> Callable[[], Any]:
    """Run a file; return the callable of this name in it."""
    shown = named(environment=f"{path}:{name}")
    module_name = f"unsloth_cupy_environment_{digest[:12]}"
    spec: Any = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        problem = f"the file raised {type(error).__name__}: {error}"
        raise ConfigError(f"{shown}: {problem}; fix {path}") from error
    finally:
        sys.path.remove(str(path.parent))
    create: Any = getattr(module, name, None)
    if not callable(create):
        raise ConfigError(f"{shown}: the file defines no callable {name}; name a class in it")
    return create


def columns_of(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the arguments of ``reset`` for each record: its columns and its messages."""
    return [{**record.value, "prompt": record.messages} for record in records]
