"""How messages name the settings of a run: as fields of ``Settings``, or as a command's flags.

    named("lora")                        lora
    named(batch=2, accumulate=4)         batch=2, accumulate=4

Inside ``naming(style)`` they are written in another style.  Messages are not translated afterwards:
a path in them may look like a setting.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Style = Callable[[Mapping[str, Any]], str]  # of settings by name; None: only the name is meant


def as_fields(settings: Mapping[str, Any]) -> str:
    """Return settings as they are written in Python."""
    each = settings.items()
    return ", ".join(name if value is None else f"{name}={value}" for name, value in each)


_style: ContextVar[Style] = ContextVar("style", default=as_fields)


def named(*names: str, **settings: Any) -> str:
    """Return settings for a message, with their values or by name alone."""
    return _style.get()(dict.fromkeys(names) | settings)


@contextmanager
def naming(style: Style) -> Iterator[None]:
    """Name settings in another style inside a ``with`` block."""
    token = _style.set(style)
    try:
        yield
    finally:
        _style.reset(token)
