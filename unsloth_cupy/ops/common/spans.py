"""Hooks for profilers: routes of their own, and spans around kernel work that is not an op."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from ...core.op import OPS

NOTHING: AbstractContextManager[Any] = nullcontext()
watchers: tuple[Any, ...] = ()  # profilers, whose span(name, like, bytes) is a context manager


class Owner:
    """A target that owns no array: with it among the targets, calls have routes of their own."""

    def owns(self, array: Any) -> bool:
        """Return False."""
        return False


def forget_routes(marker: Any) -> None:
    """Drop the routes of calls that ran while ``marker`` was among the targets."""
    for op in OPS.values():
        for key in [key for key in list(op.routes) if marker in key[0]]:
            op.routes.pop(key, None)


def span(name: str, like: Any, moved: Callable[[], int]) -> AbstractContextManager[Any]:
    """Return a context for work on the device of ``like``: one span of each watcher.

    ``moved`` returns the bytes that the work moves; without watchers it is not called.
    """
    if not watchers:
        return NOTHING
    stack, count = ExitStack(), moved()
    for watcher in watchers:
        stack.enter_context(watcher.span(name, like, count))
    return stack
