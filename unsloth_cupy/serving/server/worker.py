"""The thread that owns the engine: requests reach it through a queue, and it sends tokens back."""

import asyncio
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ...errors import UnslothCupyError
from ..engine import Engine
from ..requests import Event, Request


class Job:
    """A request of a client: its rows, and the queue of what the worker sends.

    The queue has, in this order: the requests of the engine or an exception; then lists of
    (number of the prompt, event); after an exception nothing more comes.
    """

    def __init__(self, work: Sequence[dict[str, Any]] | Callable[[], Any]) -> None:
        self.work = work
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.requests: list[Request] = []
        self.done = False  # whether the worker has sent everything

    def send(self, item: Any) -> None:
        """Put an item into the queue, from the worker's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class Worker:
    """A thread that steps an engine as long as jobs need it.

    Without an engine it only calls functions, such as those that compute embeddings.
    """

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.jobs: dict[Request, tuple[Job, int]] = {}
        self.failed = False  # whether the thread ended by an error
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Add a job."""
        self.inbox.put(("submit", job))

    def cancel(self, job: Job) -> None:
        """End a job, and free its pages; an ended job stays as it is."""
        self.inbox.put(("cancel", job))

    def stop(self) -> None:
        """End the thread after the present step."""
        self.inbox.put(("stop", None))
        self.thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the engine is in no known state
            self.failed = True
            self._report(error)
            open_jobs = {job for job, _ in self.jobs.values()}
            command = "fail"
            while command != "stop":
                for job in open_jobs:
                    job.send(error)
                    job.done = True
                command, job = self.inbox.get()
                open_jobs = {job} if command == "submit" else set()

    def _serve(self) -> None:
        stepping = False
        while True:
            with suppress(queue.Empty):
                command, job = self.inbox.get(block=not stepping)
                while True:
                    if command == "stop":
                        return
                    stepping |= self._submitted(job) if command == "submit" else self._ended(job)
                    command, job = self.inbox.get_nowait()
            if stepping:
                self._step()
                stepping = bool(self.jobs)

    def _submitted(self, job: Job) -> bool:
        """Start a job; return whether the engine has something to compute."""
        try:
            if callable(job.work):
                job.send(job.work())
                job.done = True
                return False
            for options in job.work:
                job.requests.append(self.engine.submit(**options))  # type: ignore[union-attr]
        except Exception as error:
            self._report(error)
            job.send(error)
            return self._ended(job)
        self.jobs |= {request: (job, place) for place, request in enumerate(job.requests)}
        job.send(job.requests)
        return True

    def _ended(self, job: Job) -> bool:
        """End the rows of a job; return whether the engine has events of them."""
        job.done = True
        for request in job.requests:
            self.jobs.pop(request, None)
            if not request.finished:
                self.engine.cancel(request)  # type: ignore[union-attr]
        return bool(job.requests)

    def _step(self) -> None:
        """Compute a step, and send its tokens; an error ends all jobs."""
        try:
            events = self.engine.step()  # type: ignore[union-attr]
        except Exception as error:
            self._report(error)
            for job in {job: None for job, _ in self.jobs.values()}:
                job.send(error)
                self._ended(job)
            return
        by_job: dict[Job, list[tuple[int, Event]]] = {}
        for event in events:
            if event.request in self.jobs:
                job, place = self.jobs[event.request]
                by_job.setdefault(job, []).append((place, event))
        for request in {event.request: None for event in events if event.request.finished}:
            self.jobs.pop(request, None)
        for job, own in by_job.items():
            job.send(own)
            job.done = all(request.finished for request in job.requests)

    @staticmethod
    def _report(error: Exception) -> None:
        """Print an error that no request explains."""
        if not isinstance(error, UnslothCupyError):
            traceback.print_exception(error, file=sys.stderr)
