"""A process that runs tests by request, one at a time: ``session`` uses several of them.

It collects the tests of its command line, writes their names as one line of JSON, and then reads
names of tests from its input; for each it writes one line.  After an error that makes its GPU
context unusable it reports that and exits, as all later tests of the process would fail.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from . import kept_cases

LINES, CHARACTERS = 8, 160  # the most lines of an error message, and characters in a line


class RunByName:
    """A plugin of pytest that runs the tests whose names it reads."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self.requests, self.answers = requests, answers
        self.reports: list[Any] = []
        self.errors: dict[str, str] = {}
        self.warned: list[str] = []

    def say(self, **about: Any) -> None:
        print(json.dumps(about), file=self.answers, flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = message_of(report)

    def pytest_internalerror(self, excrepr: Any) -> None:
        print(str(excrepr).splitlines()[-1], file=sys.stderr)  # standard output goes nowhere

    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> None:
        if call.excinfo is not None and (folder := os.environ.get(kept_cases.FOLDER)):
            kept_cases.keep(Path(folder), item.nodeid, call.excinfo.value)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self.warned.append(f"{warning_message.category.__name__}: {warning_message.message}"[:200])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.say(tests=[*items], errors=self.errors)
        for line in self.requests:
            self.reports, self.warned = [], []
            began = time.monotonic()
            item = items[line.rstrip("\n")]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            reports = {report.outcome: report for report in self.reports}
            outcome = next(name for name in ("failed", "skipped", "passed") if name in reports)
            message = message_of(reports[outcome])
            if problem := lost():
                outcome, message = "failed", f"{message}\n{problem}".strip()
            seconds = round(time.monotonic() - began, 2)
            more = {"warned": self.warned} if self.warned else {}
            self.say(outcome=outcome, seconds=seconds, said=message, lost=bool(problem), **more)
            if problem:
                os._exit(1)  # without cleanup, which would use the lost context
        return True


def message_of(report: Any) -> str:
    """Return the first lines of a report's error, the reason of a skip, or what a test recorded."""
    if report.passed:
        return ", ".join(f"{name} {value}" for name, value in report.user_properties)
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2])
    lines = report.longreprtext.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join(line[:CHARACTERS] for line in (errors or lines[-LINES:])[:LINES])


def lost() -> str:
    """Return CUDA's error if this process can run no more kernels; otherwise ""."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.is_available():
        return ""
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Keep standard input and output for the session; tests get /dev/null instead."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    faulthandler.register(signal.SIGUSR1, os.dup(2), all_threads=False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    sys.exit(pytest.main(sys.argv[1:], plugins=[RunByName(requests, answers)]))


if __name__ == "__main__":
    main()
