"""Processes of reward functions: each starts once, and restarts if it had to be stopped."""

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import regular

PROCESS = Path(__file__).with_name("reward_process.py")
SECONDS = 60.0  # default time limit of a call
START = 600.0  # seconds to run the file, which may load a model


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    return hashlib.sha256(regular(path).read_bytes()).hexdigest()


class LateError(Exception):
    """A process did not reply within the time limit."""


class EndedError(Exception):
    """A process ended; the text contains its signal or exit code."""


class Worker:
    """A process that calls a function in a Python file."""

    def __init__(self, path: Path, digest: str, name: str) -> None:
        if fingerprint(path) != digest:
            raise ConfigError(f"{path} has changed since the run began; start the run again")
        self.path, self.replies = path, queue.SimpleQueue[Any]()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-u", str(PROCESS)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, encoding="ascii", start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
        )  # fmt: skip
        self.end = weakref.finalize(self, _end, self.process)
        self.stdin: Any = self.process.stdin
        reading = self.process.stdout, self.replies
        threading.Thread(target=_read, args=reading, daemon=True).start()
        self.send((str(path.resolve()), name, sys.path))

    @property
    def alive(self) -> bool:
        """Whether the process runs and accepts calls."""
        return self.end.alive and self.process.poll() is None

    @cached_property
    def takes(self) -> Any:
        """The parameters of the function, as ``reward_process.taken`` returns them.

        Raises
        ------
        ConfigError
            The file cannot be run, or has no such function.
        """
        try:
            reply = self.reply(START)
        except LateError:
            reply = f"did not finish in {START:g} s when it was run; do less at import"
        except EndedError as error:
            reply = f"{error} when it was run; fix it"
        if isinstance(reply, str):
            self.end()
            raise ConfigError(f"{self.path} {reply}")
        return reply

    def send(self, value: Any) -> None:
        """Send a request."""
        with suppress(OSError):  # the process ended: ``reply`` raises EndedError
            self.stdin.write(json.dumps(value) + "\n")
            self.stdin.flush()

    def reply(self, seconds: float) -> Any:
        """Return the reply to a request; stop a process that does not reply in time.

        Raises
        ------
        LateError, EndedError
            The process did not reply.
        """
        try:
            reply = self.replies.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.end()
            raise LateError from None
        if reply is None:
            code = self.process.wait()
            self.end()
            raise EndedError(f"ended its process {ending(code)}")
        return reply


def ending(code: int) -> str:
    """Return how a process ended: by a signal (code -N or 128 + N), or with an exit code."""
    try:
        return f"by {signal.Signals(-code if code < 0 else code - 128).name}"
    except ValueError:  # Windows has exit codes of 32 bits
        return f"with {code}"


def _read(stream: Any, replies: "queue.SimpleQueue[Any]") -> None:
    """Put the replies of a process into a queue, and None when the process has ended."""
    with stream, suppress(OSError, ValueError):
        for line in stream:
            replies.put(json.loads(line))
    replies.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    """Stop a process and all processes that it started."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    stdin: Any = process.stdin
    with suppress(OSError):
        stdin.close()


_WORKERS = dict[tuple[Path, str, str], Worker]()


def worker_of(path: Path, digest: str, name: str) -> Worker:
    """Return the process of a function, ready for a call; start it if there is none."""
    worker = _WORKERS.get((path, digest, name))
    if worker is None or not worker.alive:
        worker = _WORKERS[path, digest, name] = Worker(path, digest, name)
    worker.takes  # noqa: B018 -- waits until the file has run
    return worker


@contextmanager
def ending_workers() -> Iterator[None]:
    """Stop the processes of all functions at the end of a ``with`` block."""
    try:
        yield
    finally:
        for worker in _WORKERS.values():
            worker.end()
        _WORKERS.clear()
