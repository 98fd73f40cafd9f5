"""The check of an option whose value is one of several names."""

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError


def check_choice(call: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ConfigError unless the value of an option is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{call}: {name}={value!r}; choose from {', '.join(known)}")
