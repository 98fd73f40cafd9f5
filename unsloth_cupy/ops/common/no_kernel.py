"""Why a launch has no kernel for a call: what ``explain`` and a warning then say."""

from contextvars import ContextVar
from typing import Any

_reason: ContextVar[str] = ContextVar("reason", default="")


def no_kernel(reason: str) -> Any:
    """Return NotImplemented, as a launch does for calls that its kernel does not take."""
    _reason.set(reason)
    return NotImplemented


def reason_of() -> str:
    """Return the reason that the last such launch gave, once; empty where it gave none."""
    reason = _reason.get()
    _reason.set("")
    return reason
