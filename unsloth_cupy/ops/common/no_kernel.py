"""Why a launch has no kernel for a call; ``explain`` and a warning show the reason."""

from contextvars import ContextVar
from typing import Any

_reason: ContextVar[str] = ContextVar("reason", default="")


def no_kernel(reason: str) -> Any:
    """Store the reason and return NotImplemented, which a launch returns if no kernel fits."""
    _reason.set(reason)
    return NotImplemented


def reason_of() -> str:
    """Return the reason of the last such launch and clear it; empty if there is none."""
    reason = _reason.get()
    _reason.set("")
    return reason
