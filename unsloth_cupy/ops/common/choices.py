"""Options that are one of several names."""

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError


def check_choice(call: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Raise a ConfigError unless an option is one of the names that are known."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{call}: {name}={value!r}; choose from {', '.join(known)}")
