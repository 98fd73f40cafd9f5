"""The reason why a launch has no kernel for a call, which ``explain`` and a warning show."""

from contextvars import ContextVar
from typing import Any

_reason: ContextVar[str] = ContextVar("reason", default="")


def no_kernel(reason: str) -> Any:
    """Store the reason; return NotImplemented, the result of a launch for which no kernel fits."""
    _reason.set(reason)
    return NotImplemented


def reason_of() -> str:
    """Return the reason stored last, or an empty text, and clear it."""
    reason = _reason.get()
    _reason.set("")
    return reason
