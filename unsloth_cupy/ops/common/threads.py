"""Work shared among threads of the host: NumPy releases Python's GIL while it computes."""

import contextvars
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def count() -> int:
    """Return how many threads to use: OMP_NUM_THREADS, or the cores available to this process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if re.fullmatch("[0-9]{1,9}", setting) and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the helper threads, one fewer than ``count``: the caller works too."""
    return ThreadPoolExecutor(count() - 1, "unsloth_cupy")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no such threads


def each(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call work on every item, in any order, in this and other threads; then return.

    The results are those of a plain loop as long as no two items write to the same memory.
    """
    queue = deque(items)

    def drain() -> None:
        while queue:
            try:
                item = queue.popleft()
            except IndexError:  # another thread took the last one
                return
            work(item)

    helpers = [  # each with a copy of this thread's context, such as np.errstate
        _pool().submit(contextvars.copy_context().run, drain)
        for _ in range(min(count(), len(queue)) - 1)
    ]
    try:
        drain()
    finally:
        queue.clear()
        started = [helper for helper in helpers if not helper.cancel()]
        for helper in started:
            helper.result()
