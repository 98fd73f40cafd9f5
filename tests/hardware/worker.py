"""A process that runs the tests it is told to, one at a time: ``session`` keeps several of them.

It collects the files of its command line, says in one line of JSON what is there, and then reads
names of tests from its input: one line in, one line out.  After an error that leaves its GPU
unusable it says so and ends, as every later test of the process would fail.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from typing import IO, Any

import pytest

LINES, CHARACTERS = 8, 160  # of an error that are told


class Obeying:
    """A plugin of pytest that runs what it is asked to."""

    def __init__(self, asked: IO[str], answers: IO[str]) -> None:
        self.asked, self.answers = asked, answers
        self.reports: list[Any] = []
        self.errors: dict[str, str] = {}
        self.warned: list[str] = []

    def say(self, **about: Any) -> None:
        print(json.dumps(about), file=self.answers, flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = told(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self.warned.append(f"{warning_message.category.__name__}: {warning_message.message}"[:200])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.say(tests=[*items], errors=self.errors)
        for line in self.asked:
            self.reports, self.warned = [], []
            began = time.monotonic()
            item = items[line.rstrip("\n")]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            found = {report.outcome: report for report in self.reports}
            outcome = next(name for name in ("failed", "skipped", "passed") if name in found)
            said = "" if outcome == "passed" else told(found[outcome])
            if problem := lost():
                outcome, said = "failed", f"{said}\n{problem}".strip()
            seconds = round(time.monotonic() - began, 2)
            more = {"warned": self.warned} if self.warned else {}
            self.say(outcome=outcome, seconds=seconds, said=said, lost=bool(problem), **more)
            if problem:
                os._exit(1)  # without the ends of a context that is gone
        return True


def told(report: Any) -> str:
    """Return the first lines of what a report says went wrong."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    lines = report.longreprtext.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join(line[:CHARACTERS] for line in (errors or lines[-LINES:])[:LINES])


def lost() -> str:
    """Return what CUDA says where no later kernel of this process will run; else nothing."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.is_available():
        return ""
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Keep the channels for the session; what tests print or read goes nowhere."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    faulthandler.register(signal.SIGUSR1, os.dup(2), all_threads=False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    sys.exit(pytest.main(sys.argv[1:], plugins=[Obeying(asked, answers)]))


if __name__ == "__main__":
    main()
