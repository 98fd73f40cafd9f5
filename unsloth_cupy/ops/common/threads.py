"""Work divided among threads of the host: NumPy releases Python's GIL while it computes."""

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
    """Return the number of threads to use: OMP_NUM_THREADS, or the cores of this process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if re.fullmatch("[0-9]{1,9}", setting) and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the helper threads: one fewer than ``count``, as the calling thread works, too."""
    return ThreadPoolExecutor(count() - 1, "unsloth_cupy")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def each(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call ``work`` on every item, in any order, in this thread and others; wait for all.

    The results equal those of a plain loop if no two items write to the same memory.
    """
    queue = deque(items)

    def drain() -> None:
        while queue:
            try:
                item = queue.popleft()
            except IndexError:  # another thread took the last item after the test
                return
            work(item)

    helpers = [  # each with a copy of this thread's context, which holds np.errstate
        _pool().submit(contextvars.copy_context().run, drain)
        for _ in range(min(count(), len(queue)) - 1)
    ]
    try:
        drain()
    finally:
        queue.clear()  # after an error no thread takes another item
        started = [helper for helper in helpers if not helper.cancel()]
        for helper in started:
            helper.result()
