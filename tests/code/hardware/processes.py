"""Processes that lead a group of their own, so that one that is late ends with all it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

RUNNING: set[Any] = set()


def start(command: Sequence[Any], **options: Any) -> Any:
    """Start a process, in a session of its own."""
    process = subprocess.Popen([*map(str, command)], start_new_session=True, **options)
    RUNNING.add(process)
    return process


def end(process: Any) -> int:
    """Kill a process and its group; return its exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group may outlive the process that led it
    RUNNING.discard(process)
    status: int = process.wait()
    return status


def end_all() -> None:
    """Kill all processes that were started and not ended."""
    for process in [*RUNNING]:
        end(process)


def finished(command: Sequence[Any], seconds: float, **options: Any) -> tuple[int | None, str]:
    """Run a command; return its exit status, or None if it took longer, and what it printed."""
    with tempfile.TemporaryFile() as output:
        process = start(command, stdout=output, stderr=output, **options)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")
