"""The processes of reward functions: started once, and again if one had to be stopped."""

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
SECONDS = 60.0  # in which a call must end
START = 600.0  # seconds in which a file runs, which may load a model


def fingerprint(path: Path) -> str:
    """Return what tells one content of a file from another."""
    return hashlib.sha256(regular(path).read_bytes()).hexdigest()


class LateError(Exception):
    """A process has not replied in time."""


class EndedError(Exception):
    """A process has ended; the text says how."""


class Worker:
    """A process that calls a function of a file."""

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
        """Whether it can be called."""
        return self.end.alive and self.process.poll() is None

    @cached_property
    def takes(self) -> Any:
        """What its function takes, as ``reward_process.taken`` returns it.

        Raises
        ------
        ConfigError
            The file cannot be run, or has no such function.
        """
        try:
            reply = self.reply(START)
        except LateError:
            reply = f"has not run to its end in {START:g} s; let it do less"
        except EndedError as error:
            reply = f"{error} when it was run; mend it"
        if isinstance(reply, str):
            self.end()
            raise ConfigError(f"{self.path} {reply}")
        return reply

    def send(self, value: Any) -> None:
        """Send a request."""
        with suppress(OSError):  # it has ended, which the reply tells
            self.stdin.write(json.dumps(value) + "\n")
            self.stdin.flush()

    def reply(self, seconds: float) -> Any:
        """Return the reply to a request; a process that gives none is stopped.

        Raises
        ------
        LateError, EndedError
            There is none.
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
    """Return how a process ended: by a signal (its number or 128 + that), or a code."""
    try:
        return f"by {signal.Signals(-code if code < 0 else code - 128).name}"
    except ValueError:  # Windows has exit codes of 32 bits
        return f"with {code}"


def _read(stream: Any, replies: "queue.SimpleQueue[Any]") -> None:
    """Put the replies of a process into a queue; None when it has ended."""
    with stream, suppress(OSError, ValueError):
        for line in stream:
            replies.put(json.loads(line))
    replies.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    """Stop a process and all that it has started."""
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
    """Return the process of a function, which waits for a call; it is started if there is none."""
    worker = _WORKERS.get((path, digest, name))
    if worker is None or not worker.alive:
        worker = _WORKERS[path, digest, name] = Worker(path, digest, name)
    worker.takes  # noqa: B018 -- the file has run
    return worker


@contextmanager
def ending_workers() -> Iterator[None]:
    """Stop the processes of all functions at the end; those that are called again start again."""
    try:
        yield
    finally:
        for worker in _WORKERS.values():
            worker.end()
        _WORKERS.clear()
