"""All checks that need a GPU, within a time limit: ``python -m tests.code.hardware --all FOLDER``.

First come the tests marked ``gpu``: primitives, then one test of each kind and dtype, then the
rest; then tests that broke their process run again under compute-sanitizer; then ops and their
peers are timed.  Several processes share the GPU, as compilation takes CPU time, but not while ops
are timed.

Each result is written to FOLDER/results.jsonl at once and shown in report.md, so that an
interrupted run keeps its results.  With the same folder, a session continues: tests that passed are
not run again unless the kernels or the library have changed; then tests that failed before come
first.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import IO, Any

from .fixtures import FILE, ROOT, Fixture, digest, read, write
from .primitives import PRIMITIVES, launch

Line = dict[str, Any]

START = 120  # seconds for a process to collect the tests
SECONDS = 60  # for one test, including compilation, which takes a second or two
BREAKS = 3  # after this many broken processes, other tests of the same kind are left out
QUIET = 300  # seconds for the times of one op
LOOKS = 4  # tests to run under compute-sanitizer, which is slow
LIBRARY = ("numpy", "scipy", "ml_dtypes", "safetensors", "cupy")
NEEDS = {
    "tests": (*LIBRARY, "pytest"),
    "times": (*LIBRARY, "click", "rich"),
    "peers": ("torch",),
}
DONE = ("passed", "skipped")
DTYPES = ("float16", "bfloat16", "float32")
HERE = "tests/code/hardware/test_hardware.py::test_on_a_gpu"  # primitives
BENCH = (sys.executable, "-m", "unsloth_cupy", "bench")
ATTENTION = (sys.executable, "-m", "tests.code.hardware.attention")
FIRST = ("attention", "cross_entropy", "rms_norm", "swiglu", "rope_qk", "linear_cross_entropy")
OPTIONS = ("-m", "gpu", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider")  # of pytest
ENVIRONMENT = os.environ | {
    "PYTEST_ADDOPTS": "",  # not those of a surrounding run of pytest, whose plugins are not loaded
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no other installed plugins
    "OMP_NUM_THREADS": "1",  # as there is a process for each core
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX takes three quarters of the GPU otherwise
}


def state() -> str:
    """Return a hash of the kernels and the library, for which results are valid."""
    files = [*(ROOT / "kernels_cu").rglob("*.cu*"), *(ROOT / "unsloth_cupy").rglob("*.py")]
    return hashlib.sha256(b"".join(f.read_bytes() for f in sorted(files))).hexdigest()[:12]


def in_order(names: Sequence[str], failed: Container[str], before: Container[str]) -> list[str]:
    """Return tests, the most informative first: primitives, then one of each kind and dtype.

    Tests that failed in an earlier state of the library come first, those that failed in this state
    last.
    """
    seen: set[tuple[str, str]] = set()

    def rank(name: str) -> int:
        kind, _, parameters = name.partition("[")
        dtype = next((d for d in DTYPES if d in parameters.rstrip("]").split("-")), "")
        later = (kind, dtype) in seen
        seen.add((kind, dtype))
        return 3 if name in failed else 0 if kind == HERE or name in before else 1 + later

    ranks = {name: rank(name) for name in names}
    return sorted(names, key=ranks.__getitem__)  # stable: it keeps the order within a rank


class Results:
    """The results by name, written to a folder as they come."""

    def __init__(self, folder: Path, now: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.now, self.shown = folder, now, 0.0
        self.lines: dict[str, Line] = {}
        self.failed_before: set[str] = set()  # in another state of the library
        self.lock = threading.Lock()
        self.file = folder / "results.jsonl"
        for text in self.file.read_text().splitlines() if self.file.exists() else ():
            with contextlib.suppress(ValueError):  # an incomplete line
                line = json.loads(text)
                if line["state"] == now:
                    self.lines[line["name"]] = line
                elif line["outcome"] not in DONE:
                    self.failed_before.add(line["name"])

    def add(self, name: str, outcome: str, seconds: float = 0, said: str = "", **more: Any) -> None:
        """Add one result; rewrite the report at most every 5 seconds."""
        line = {"name": name, "outcome": outcome, "seconds": round(seconds, 2), "said": said}
        with self.lock:
            self.lines[name] = line | more | {"state": self.now}
            with self.file.open("a") as file:  # \n comes first, as the last line may be incomplete
                file.write(f"\n{json.dumps(self.lines[name])}")
            if outcome not in DONE:
                print(f"{name}: {outcome}: {said.splitlines()[0] if said else ''}", flush=True)
            if time.monotonic() > self.shown + 5:
                self.show()

    def show(self) -> None:
        """Write report.md."""
        beside = self.folder / "report.md.partial"
        beside.write_text(report(self.lines), encoding="utf-8")
        beside.replace(self.folder / "report.md")
        self.shown = time.monotonic()

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Return the names that have neither passed nor been skipped."""
        return [n for n in names if self.lines.get(n, {}).get("outcome") not in DONE]


def report(lines: dict[str, Line]) -> str:
    """Return the report: counts by file, errors with their tests, warnings, the slowest tests."""
    machine = lines.get("machine", {}).get("said", "")
    tried = {name: line for name, line in lines.items() if name != "machine"}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    errors: dict[str, list[str]] = defaultdict(list)
    warned: Counter[str] = Counter()
    for name, line in tried.items():
        group = name.split("::")[0].split(" ")[0]
        counts[group].update({line["outcome"]: 1, "seconds": round(line["seconds"])})
        warned.update(line.get("warned", ()))
        if line["outcome"] not in DONE:
            errors[f"{line['outcome']}: {line['said']}"].append(name)
    columns = ("passed", "failed", "hung", "crashed", "left out", "skipped", "seconds")
    text = ["# What a GPU said", "", machine, "", f"| | {' | '.join(columns)} |"]
    text += ["|---|" + "--:|" * len(columns)]
    for group, count in sorted(counts.items()):
        text.append(f"| {group} | {' | '.join(str(count[c]) for c in columns)} |")
    for error, names in sorted(errors.items(), key=lambda pair: -len(pair[1])):
        text += ["", f"## {len(names)} x {names[0]}", "", "```text", error, "```", *names[1:6]]
    text += ["", "## Warnings", "", *(f"{n} x {words}" for words, n in warned.most_common(20))]
    slowest = sorted(tried, key=lambda name: -tried[name]["seconds"])[:10]
    text += ["", "## Slowest", "", *(f"{tried[name]['seconds']:.1f} s {name}" for name in slowest)]
    return "\n".join([*text, ""])


class Worker:
    """A process of ``worker``, which runs one test after another until it breaks."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by end()
        self.process: Any = subprocess.Popen(
            [sys.executable, "-m", "tests.code.hardware.worker", *paths, *OPTIONS],
            cwd=root,
            env=ENVIRONMENT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def answer(self, seconds: float) -> Line:
        """Return the next line; without one, the outcome is "hung" or "crashed"."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.send_signal(signal.SIGUSR1)  # it prints its stack
            time.sleep(0.3)
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        text = self.process.stdout.readline()
        timer.cancel()
        if text and not late.is_set():
            line: Line = json.loads(text)
            return line
        self.process.kill()
        status, hung = self.process.wait(), late.is_set()
        why = f"no end in {seconds:.0f} s" if hung else f"ended with {status}"
        line = {"outcome": "hung" if hung else "crashed", "lost": True}
        return line | {"said": "\n".join([why, *tail(self.errors)]), "seconds": hung * seconds}

    def ask(self, name: str, seconds: float) -> Line:
        """Run one test and return its result."""
        with contextlib.suppress(BrokenPipeError):  # the process is gone, as answer() will report
            print(name, file=self.process.stdin, flush=True)
        return self.answer(seconds)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def tail(errors: IO[bytes]) -> list[str]:
    """Return the last lines of a process's error output, or the first of a fatal Python error."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    marks = ("Fatal Python error", "Stack (most recent")
    fatal = (at for at, line in enumerate(lines) if line.startswith(marks))
    start = next(fatal, max(0, len(lines) - 8))
    return lines[start : start + 8]


class Session:
    """The steps of a session, which stop when its time is over."""

    def __init__(self, results: Results, seconds: float, workers: int, root: Path = ROOT) -> None:
        self.results, self.workers, self.root = results, workers, root
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds."""
        return max(0.0, self.end - time.monotonic())

    def tests(self, *paths: str) -> None:
        """Run the tests under these paths in several processes, each one test after another."""
        first = Worker(self.root, paths)
        collected = first.answer(min(START, self.left()))
        for path, error in collected.get("errors", {}).items():
            self.results.add(path, "failed", 0, f"its tests are not collected: {error}")
        if "said" in collected and self.left():
            self.results.add("collecting", collected["outcome"], 0, collected["said"])
        names = self.results.waiting(collected.get("tests", ()))
        ordered = in_order(names, self.results.lines, self.results.failed_before)
        files = [*dict.fromkeys(name.split("::")[0] for name in ordered)]
        waiting, lock, broke = iter(ordered), threading.Lock(), Counter[str]()

        def work(worker: Worker | None) -> None:
            while self.left():
                with lock:
                    name = next(waiting, None)
                if name is None:
                    break
                kind, line = name.partition("[")[0], Line()
                if broke[kind] >= BREAKS:
                    self.results.add(name, "left out", 0, f"{BREAKS} like it broke their process")
                    continue
                if worker is None:
                    worker = Worker(self.root, files)
                    line = worker.answer(min(START, self.left()))
                if "said" not in line:
                    line = worker.ask(name, min(SECONDS, self.left()))
                if line["outcome"] == "hung" and not self.left():
                    break  # interrupted by the time limit
                self.results.add(name, **line)
                broke[kind] += line["lost"]
                if line["lost"]:
                    worker.end()
                    worker = None
            if worker is not None:
                worker.end()

        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(work, [first, *[None] * (self.workers - 1)]))

    def closer(self) -> None:
        """Run one test of each kind that broke its process again, under compute-sanitizer."""
        tool, lines = shutil.which("compute-sanitizer"), self.results.lines
        lost = {n.partition("[")[0]: n for n in reversed(lines) if lines[n].get("lost")}
        names = [n for n in lost.values() if f"compute-sanitizer {n}" not in lines]

        def look(name: str) -> None:
            command = [str(tool), "--print-limit", "2", sys.executable, "-m", "pytest", *OPTIONS]
            with tempfile.TemporaryFile() as out, contextlib.suppress(subprocess.TimeoutExpired):
                options: Any = {"cwd": self.root, "env": ENVIRONMENT, "stdout": out, "stderr": out}
                options["timeout"] = min(2 * SECONDS, self.left())
                subprocess.run([*command, name], check=False, **options)
                out.seek(0)
                output = [text.decode() for text in out if text.startswith(b"=========")]
                self.results.add(f"compute-sanitizer {name}", "told", 0, "".join(output[:12]))

        with ThreadPoolExecutor(LOOKS) as pool:
            list(pool.map(look, names[:LOOKS] if tool else ()))

    def times(
        self, ops: Sequence[str], *options: str, what: str = "time", command: Sequence[str] = ()
    ) -> None:
        """Time ops, with one process on the GPU; an op that ends it is left out of the next one.

        With ``command``, that program runs instead of the benchmark; `what` is the first word of
        the names of its results.
        """
        waiting = self.results.waiting([f"{what} {op}" for op in ops])
        waiting = [name.partition(" ")[2] for name in waiting]
        numbers, idle = self.results.folder / f"{what if command else 'bench'}.json", 0
        while waiting and self.left() and idle < 2:
            numbers.unlink(missing_ok=True)
            with tempfile.TemporaryFile() as errors:
                process = subprocess.Popen(
                    [*(command or BENCH), *waiting, "--json", str(numbers), *options],
                    **{"cwd": self.root, "stdout": subprocess.DEVNULL, "stderr": errors},
                )
                count, outcome = self._watched(process, len(waiting), numbers, what)
                process.kill()
                process.wait()
                if outcome and count < len(waiting):
                    error = "\n".join(tail(errors))
                    self.results.add(f"{what} {waiting[count]}", outcome, 0, error)
            if numbers.exists() and '"attention"' in numbers.read_text():  # the known shapes
                shutil.copy(numbers, numbers.with_name("attention.json"))
            idle, waiting = 0 if count else idle + 1, waiting[count + 1 :]

    def _watched(self, process: Any, ops: int, numbers: Path, what: str) -> tuple[int, str]:
        """Return the number of timed ops, and the outcome: failed, hung, or "" if time was over."""
        count, last = 0, time.monotonic()
        while self.left():
            ended = process.poll() is not None
            done = json.loads(numbers.read_text())["ops"] if numbers.exists() else []
            for op in done[count:]:
                self.results.add(f"{what} {op}", "passed", time.monotonic() - last)
                last = time.monotonic()
            count = len(done)
            if ended:
                return count, "failed"
            if count < ops and time.monotonic() > last + QUIET:
                return count, "hung"
            time.sleep(0.1)
        return count, ""


def keep_fixtures(lines: dict[str, Line], device: str) -> None:
    """Write the primitives that passed to fixtures.json."""
    today = date.today().isoformat()
    passed = [n for n in PRIMITIVES if lines.get(f"{HERE}[{n}]", {}).get("outcome") == "passed"]
    if passed:
        write(read() | {n: Fixture(today, device, digest(launch(n))) for n in passed})


def everything(folder: Path, minutes: float, attention_alone: bool = False) -> None:
    """Run all steps whose packages are installed; print first which packages are missing.

    On a Hopper GPU, attention is measured after the tests, or as the only step.
    """
    specs = {name: importlib.util.find_spec(name) for names in NEEDS.values() for name in names}
    lacking = {what: [n for n in names if not specs[n]] for what, names in NEEDS.items()}
    missing = [f"no {what} without {', '.join(names)}" for what, names in lacking.items() if names]
    for line in missing:
        print(line, flush=True)
    import cupy

    runtime, cores = cupy.cuda.runtime, len(os.sched_getaffinity(0))
    about, version = runtime.getDeviceProperties(0), cupy.cuda.nvrtc.getVersion()
    workers = max(1, min(cores, about["totalGlobalMem"] >> 32))  # 4 GiB for each
    results = Results(folder, state())
    session = Session(results, minutes * 60, workers)
    device = about["name"].decode()
    parts = [device, f"driver {runtime.driverGetVersion()}", f"CuPy {cupy.__version__}"]
    parts += [f"NVRTC {version}", f"Python {sys.version.split()[0]}", f"{workers} processes"]
    results.add("machine", "passed", 0, "; ".join([*parts, f"state {results.now}", *missing]))
    try:
        for page in (ROOT / "docs").glob("performance.*"):
            if not (folder / page.name).exists():
                shutil.copy(page, folder)
        if not lacking["tests"] and not attention_alone:
            session.tests("tests")
            keep_fixtures(results.lines, device)
            session.closer()
        if not lacking["times"] and about["major"] == 9:
            from . import attention

            command = [*ATTENTION, str(folder / "performance.md")]
            session.times(attention.names(), what="attention", command=command)
        if not lacking["times"] and not attention_alone:
            from unsloth_cupy.bench.cases import chosen
            from unsloth_cupy.bench.timing import launches

            ops = [op for op in (*chosen(*FIRST), *chosen()) if launches(op)]
            options = ["--write", str(folder / "performance.md")]
            options += [] if lacking["peers"] else ["--peers"]
            session.times([*dict.fromkeys(op.__name__ for op in ops)], *options)
    finally:
        results.show()
        if FILE.exists():
            shutil.copy(FILE, folder)
        print(f"{folder / 'report.md'}; {session.left():.0f} s were left", flush=True)
