"""Names of settings in messages: fields of ``Settings``, or flags of a command.

    named("lora")                        lora
    named(batch=2, accumulate=4)         batch=2, accumulate=4

Inside ``naming(style)``, messages use another style.  Finished messages are not translated, because
a path in a message may look like a setting.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Style = Callable[[Mapping[str, Any]], str]  # formats settings; the value None: only the name


def as_fields(settings: Mapping[str, Any]) -> str:
    """Return settings in the syntax of Python."""
    each = settings.items()
    return ", ".join(name if value is None else f"{name}={value}" for name, value in each)


_style: ContextVar[Style] = ContextVar("style", default=as_fields)


def named(*names: str, **settings: Any) -> str:
    """Return settings for a message: names alone, and names with values."""
    return _style.get()(dict.fromkeys(names) | settings)


@contextmanager
def naming(style: Style) -> Iterator[None]:
    """Name settings in another style inside a ``with`` block."""
    token = _style.set(style)
    try:
        yield
    finally:
        _style.reset(token)
