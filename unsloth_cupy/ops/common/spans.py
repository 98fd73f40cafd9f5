"""Named spans around kernel work that belongs to no op, for profilers that watch ops."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

NOTHING: AbstractContextManager[Any] = nullcontext()
watchers: tuple[Any, ...] = ()  # objects whose span(name, like, bytes) returns a context manager


def span(name: str, like: Any, moved: Callable[[], int]) -> AbstractContextManager[Any]:
    """Return a context for work on the device of ``like``, in the spans of all watchers.

    ``moved`` returns the bytes that the work moves; it is not called without watchers.
    """
    if not watchers:
        return NOTHING
    stack, count = ExitStack(), moved()
    for watcher in watchers:
        stack.enter_context(watcher.span(name, like, count))
    return stack
