"""All checks that need a GPU, within a time limit: ``python -m tests.code.hardware FOLDER``.

    first      the environment, the rates of the GPU, and the primitives
    tests      the tests marked ``gpu``: one of each kind and dtype, then the rest; several
               processes share the GPU, as compilation takes CPU time
    peers      whole steps of training beside other libraries: see ``programs.beside_peers``
    times      the ops, those of changed kernels first, after several processes have compiled them
    checks     the time that the host takes for a call, with nothing beside it; then all kernels
               under compute-sanitizer, large arrays, many launches: see ``checks``
    ops        the other comparisons of ``programs.beside_peers``

Each result is written to FOLDER/results.jsonl at once and shown in report.md, so that an
interrupted run keeps its results.  With the same folder, a session continues: what passed is not
run again unless the kernels or the library have changed; then tests that failed before come first.
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from itertools import takewhile
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any

from ...harness.tracked import tracked
from . import kept_cases
from .fixtures import FILE, ROOT, Fixture, digest, read, write
from .primitives import PRIMITIVES, launch
from .processes import end, end_all, finished, start

Line = dict[str, Any]

START = 120  # seconds for a process to collect the tests
SECONDS = 60  # for one test, including compilation, which takes a second or two
BREAKS = 3  # after this many broken processes, other tests of the same kind are left out
QUIET = 90  # seconds for a step of the checks
QUIET_OP = 300  # for the times of one op
CALM = 10  # for other processes to leave the GPU
LIBRARY = ("numpy", "scipy", "ml_dtypes", "safetensors", "cupy")
NEEDS = {
    "tests": (*LIBRARY, "pytest"),
    "times": (*LIBRARY, "click", "rich"),
    "peers": ("torch",),
}
DONE = ("passed", "skipped")
DTYPES = ("float16", "bfloat16", "float32")
HERE = "tests/code/hardware/test_hardware.py::test_on_a_gpu"  # primitives
COMPILED = "test_what_bench_asks_for_compiles_and_can_be_launched"
ALONE = "test_a_small_call_takes_the_host_little_more_than_cupys_add"
STEPS = ("first", "tests", "peers", "times", "checks", "ops")
BENCH = (sys.executable, "-m", "unsloth_cupy", "bench")
CHECKS = (sys.executable, "-m", "tests.code.hardware.checks")
BESIDE = (sys.executable, "-m", "tests.code.programs.beside_peers")
PEERS = 240  # seconds for whole steps beside other libraries, of 15 minutes in all
FIRST = ("cross_entropy", "rms_norm", "swiglu", "rope_qk", "linear_cross_entropy")
LAST = "attention_forward"  # with a grid of shapes, for which other ops would wait a minute
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


def marked() -> list[str]:
    """Return the files with tests marked ``gpu``, a tenth of all tests."""
    files = [*tracked("tests/**/test_*.py")]
    return [str(f) for f in files if re.search(r"mark\.gpu|harness\.parity", f.read_text("utf-8"))]


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
    passed = [f"{n}: {line['said']}" for n, line in tried.items() if line["outcome"] == "passed"]
    text += ["", "## Measured", "", *(words for words in passed if not words.endswith(": "))]
    text += ["", "## Warnings", "", *(f"{n} x {words}" for words, n in warned.most_common(20))]
    slowest = sorted(tried, key=lambda name: -tried[name]["seconds"])[:10]
    text += ["", "## Slowest", "", *(f"{tried[name]['seconds']:.1f} s {name}" for name in slowest)]
    return "\n".join([*text, ""])


class Worker:
    """A process of ``worker``, which runs one test after another until it breaks."""

    def __init__(self, root: Path, paths: Sequence[str], cases: Path | None = None) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by end()
        command = [sys.executable, "-m", "tests.code.hardware.worker", *paths, *OPTIONS]
        own: Any = {"cwd": root, "env": ENVIRONMENT, "text": True, "stderr": self.errors}
        own["env"] |= {kept_cases.FOLDER: str(cases)} if cases else {}
        self.process = start(command, stdin=PIPE, stdout=PIPE, **own)

    def answer(self, seconds: float) -> Line:
        """Return the next line; without one, the outcome is "hung" or "crashed"."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.send_signal(signal.SIGUSR1)  # it prints its stack
            time.sleep(0.3)
            end(self.process)

        timer = threading.Timer(seconds, stop)
        timer.start()
        text = self.process.stdout.readline()
        timer.cancel()
        timer.join()
        if text and not late.is_set():
            line: Line = json.loads(text)
            return line
        status, hung = end(self.process), late.is_set()
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
        end(self.process)
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

    def stop(self, *_: Any) -> None:
        """End the session now: what runs is killed, and is not a failure."""
        self.end = 0
        end_all()

    def rates(self) -> None:
        """Say clocks, and the rates of a copy and of a product; where these fail, stop here."""
        query = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.limit"
        smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        clocks = finished(smi, 20)[1].splitlines() if shutil.which(smi[0]) else ["no nvidia-smi"]
        rates: Any = {"cwd": self.root, "env": ENVIRONMENT}
        status, text = finished([*CHECKS, "--rates"], min(QUIET, self.left()), **rates)
        outcome = "hung" if status is None else "failed" if status else "passed"
        self.results.add("rates", outcome, 0, "\n".join([*text.splitlines()[-4:], *clocks]))
        if outcome != "passed":
            self.stop()

    def quiet(self) -> None:
        """Wait until no process computes on the GPU, as it would share the time of the next one."""
        smi = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
        until, own = time.monotonic() + min(CALM, self.left()), f"{os.getpid()},"
        while True:
            lines = finished(smi, 20)[1].splitlines() if shutil.which(smi[0]) else []
            others = [line for line in lines if line and not line.startswith(own)]
            if not others or time.monotonic() > until:
                break
            time.sleep(0.5)
        if others:
            self.results.add("quiet", "failed", 0, "\n".join(["others use the GPU", *others]))
        else:
            self.results.add("quiet", "passed")

    def beside(self, step: str, *options: str, seconds: float = math.inf) -> None:
        """Compare with other libraries for some seconds; a later call continues."""
        self.quiet()
        out, begun = self.results.folder / "beside", time.monotonic()
        limit = min(seconds, self.left())
        words = [*BESIDE, "--out", out, "--seconds", int(limit), *options]
        own: Any = {"cwd": self.root, "env": ENVIRONMENT}
        status, text = finished(words, limit + CALM, **own)
        outcome = "hung" if status is None else "failed" if status else "passed"
        said = "\n".join(text.splitlines()[-8:])
        self.results.add(step, outcome, time.monotonic() - begun, said)

    def tests(
        self, *paths: str, chosen: Callable[[str], bool] = lambda name: True, again: bool = False
    ) -> None:
        """Run chosen tests under these paths in several processes, each one after another.

        Those that passed are left out, unless they are to run ``again``.
        """
        cases = self.results.folder / "cases"
        first = Worker(self.root, paths, cases)
        collected = first.answer(min(START, self.left()))
        for path, error in collected.get("errors", {}).items():
            self.results.add(path, "failed", 0, f"its tests are not collected: {error}")
        if "said" in collected and self.left():
            self.results.add("collecting", collected["outcome"], 0, collected["said"])
        names = [name for name in collected.get("tests", ()) if chosen(name)]
        names = names if again else self.results.waiting(names)
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
                    worker = Worker(self.root, files, cases)
                    line = worker.answer(min(START, self.left()))
                if "said" not in line:
                    line = worker.ask(name, min(SECONDS, self.left()))
                if line["outcome"] in ("hung", "crashed") and not self.left():
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

    def times(
        self,
        ops: Sequence[str],
        *options: str,
        what: str = "time",
        command: Sequence[Any] = (),
        quiet: float = QUIET_OP,
        process_of: Callable[[str], str] = str,
    ) -> None:
        """Run steps of a program, one process at a time; one that ends it is left out of the next.

        `what` is the first word of the names of the results.  Steps in succession run in one
        process if ``process_of`` says the same of them.  Only a program that does not even begin
        twice ends this.
        """
        waiting = self.results.waiting([f"{what} {op}" for op in ops])
        waiting = [name.partition(" ")[2] for name in waiting]
        numbers, idle = self.results.folder / f"{what}.json", 0
        while waiting and self.left() and idle < 2:
            mine = process_of(waiting[0])
            batch = [*takewhile(lambda op: process_of(op) == mine, waiting)]  # noqa: B023
            numbers.unlink(missing_ok=True)
            with tempfile.TemporaryFile() as errors:
                files: Any = {"stdout": DEVNULL, "stderr": errors, "env": ENVIRONMENT}
                program = [*(command or BENCH), *batch, "--json", numbers, *options]
                process = start(program, cwd=self.root, **files)
                count, outcome = self._watched(process, len(batch), numbers, what, quiet)
                end(process)
                waiting = waiting[count:]
                if outcome and count < len(batch):
                    text = "\n".join(tail(errors))
                    self.results.add(f"{what} {waiting.pop(0)}", outcome, 0, text)
            idle = 0 if numbers.exists() else idle + 1

    def _watched(
        self, process: Any, ops: int, numbers: Path, what: str, quiet: float
    ) -> tuple[int, str]:
        """Return the number of finished steps, and failed, hung, or "" if time was over."""
        count, last = 0, time.monotonic()
        while self.left():
            ended = process.poll() is not None
            written = json.loads(numbers.read_text()) if numbers.exists() else {"ops": []}
            for op in written["ops"][count:]:
                said = written.get("said", {}).get(op, "")
                self.results.add(f"{what} {op}", "passed", time.monotonic() - last, said)
                last = time.monotonic()
            count = len(written["ops"])
            if ended:
                return count, "failed"
            if count < ops and time.monotonic() > last + quiet:
                return count, "hung"
            time.sleep(0.1)
        return count, ""


def keep_fixtures(lines: dict[str, Line], device: str) -> None:
    """Write the primitives that passed to fixtures.json."""
    today = date.today().isoformat()
    passed = [n for n in PRIMITIVES if lines.get(f"{HERE}[{n}]", {}).get("outcome") == "passed"]
    if passed:
        write(read() | {n: Fixture(today, device, digest(launch(n))) for n in passed})


def missing_packages() -> dict[str, list[str]]:
    """Return the packages of NEEDS that are not installed; print what cannot run without them."""
    specs = {name: importlib.util.find_spec(name) for names in NEEDS.values() for name in names}
    lacking = {what: [n for n in names if not specs[n]] for what, names in NEEDS.items()}
    for what, names in lacking.items():
        if names:
            print(f"no {what} without {', '.join(names)}", flush=True)
    return lacking


def everything(folder: Path, minutes: float, steps: Sequence[str] = STEPS) -> None:
    """Run the steps whose packages are installed; print first which packages are missing.

    What SIGTERM ends keeps its results.
    """
    lacking = missing_packages()
    import cupy

    runtime, cores = cupy.cuda.runtime, len(os.sched_getaffinity(0))
    about, version = runtime.getDeviceProperties(0), cupy.cuda.nvrtc.getVersion()
    if not lacking["tests"]:
        from unsloth_cupy.kernel_cache import refusal

        if refused := refusal(10 * about["major"] + about["minor"], cupy.cuda.nvrtc):
            sys.exit(refused)
    workers = max(1, min(cores, about["totalGlobalMem"] >> 32))  # 4 GiB for each
    results = Results(folder, state())
    session = Session(results, minutes * 60, workers)
    device = about["name"].decode()
    parts = [device, f"driver {runtime.driverGetVersion()}", f"CuPy {cupy.__version__}"]
    parts += [f"NVRTC {version}", f"Python {sys.version.split()[0]}", f"{workers} processes"]
    parts += [f"no {what} without {', '.join(names)}" for what, names in lacking.items() if names]
    results.add("machine", "passed", 0, "; ".join([*parts, f"state {results.now}"]))
    for page in (ROOT / "docs").glob("performance.*"):
        if not (folder / page.name).exists():
            shutil.copy(page, folder)
    run: dict[str, Callable[[Session], None]] = {"first": first, "tests": tests, "peers": peers}
    run |= {"times": partial(time_ops, lacking=lacking), "checks": checks, "ops": ops}
    needs = {"times": "times", "peers": "peers", "ops": "peers"}
    chosen = [step for step in STEPS if step in steps and not lacking[needs.get(step, "tests")]]
    before = signal.signal(signal.SIGTERM, session.stop)
    try:
        for step in chosen:
            run[step](session)
        keep_fixtures(results.lines, device)
    finally:
        end_all()
        signal.signal(signal.SIGTERM, before)
        results.show()
        if FILE.exists():
            shutil.copy(FILE, folder)
        print(f"{folder / 'report.md'}; {session.left():.0f} s were left", flush=True)


def first(session: Session) -> None:
    """Say what the GPU can do, and run the primitives."""
    session.rates()
    session.tests(HERE.partition("::")[0])


def tests(session: Session) -> None:
    """Run all tests but the one that must be alone."""
    session.tests(*marked(), chosen=lambda name: not name.endswith(ALONE))


def peers(session: Session) -> None:
    """Compare whole steps of training with other libraries."""
    session.beside("peers", "--only", "lora", "full", "packed", seconds=PEERS)


def ops(session: Session) -> None:
    """Make the comparisons that are left."""
    session.beside("ops")


def checks(session: Session) -> None:
    """Run the test that must be alone, and check all ops in other ways than tests do."""
    from . import checks

    session.quiet()
    session.tests("tests/core/test_launches.py", chosen=lambda name: name.endswith(ALONE))
    how: Any = {"process_of": checks.process_of, "quiet": QUIET}
    session.times(checks.names(), what="check", command=(*CHECKS, session.results.folder), **how)


def time_ops(session: Session, lacking: dict[str, list[str]]) -> None:
    """Time the ops, beside peers or alone: first those that lack a time of the current kernels.

    Ops on which a model's time depends lead either part.  The kernels of either are compiled
    before, by several processes, as this machine may have none of them.
    """
    from unsloth_cupy.bench.cases import chosen
    from unsloth_cupy.bench.report import confirmed
    from unsloth_cupy.bench.timing import launches

    from ..programs.performance import untimed

    page = session.results.folder / "performance.md"
    every = (*chosen(*FIRST), *chosen())
    ops = dict.fromkeys(op.__name__ for op in every if launches(op) and op.__name__ != LAST)
    owed = {*untimed(confirmed(page)).ops()}
    options = ["--write", str(page), *["--peers"] * (not lacking["peers"])]
    first, known = ([op for op in ops if (op in owed) == which] for which in (True, False))
    for batch in (first, [*known, LAST]):
        if not lacking["tests"]:
            compiled = {f"{COMPILED}[{op}" for op in batch}
            session.tests(
                "tests/core/test_launches.py",
                chosen=lambda name: name.partition("::")[2].partition("-")[0] in compiled,  # noqa: B023
                again=True,
            )
        session.quiet()
        session.times(batch, *options, process_of=lambda op: op if op == LAST else "bench")
