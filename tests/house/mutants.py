"""Change code of the package, one place at a time: a test fails, or no test proves that place.

    python -m tests.house.mutants unsloth_cupy/losses tests/losses [--every 5] [--day 3] [-k WORD]

draws one in five mutants of the modules under the first path, runs those tests under the second
that execute the changed line, the fastest first, and prints the mutants that pass them all.  More
paths and options are pytest's.

A mutant has another operator, a larger number, the other branch, or lacks a statement that has an
effect.  pytest collects once, in a copy of the tracked files, and a fork of it judges each mutant:
its functions have the new code, and so has its file, for the processes that a test starts.  What
runs at import alone is not changed, except constants.  Mutants that no test can detect are listed
in ``harmless.toml``, with a reason.
"""

import argparse
import ast
import bisect
import gc
import importlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from ..harness.sampling import commits
from ..harness.tracked import ROOT, tracked

HARMLESS = tomllib.loads(Path(__file__).with_name("harmless.toml").read_text())
SURVIVES = 3  # exit code of a fork whose tests pass
MEASURED, KILLER = Path("measured"), Path("killer")  # what a fork reports
SECONDS = 20  # of processor time of tests for one mutant, as they take without it
EFFECTS = ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult Div, BitAnd BitOr"
OTHER = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
OTHER |= {"FloorDiv": "Mult", "Mod": "Mult", "Pow": "Mult", "MatMult": "Mult", "USub": "UAdd"}

Key = tuple[str, int, int]  # of a function in its file: name, line, first column


class Mutant(NamedTuple):
    """A changed file: what was changed, and its new text and code."""

    file: str
    line: int
    what: str
    text: str
    functions: dict[Key, CodeType]
    constant: str  # the statement of a module that was changed

    def __str__(self) -> str:
        return f"{self.file} {self.what}"

    def apply(self, functions: dict[Key, list[FunctionType]]) -> None:
        """Give the functions of this process their new code, and modules their new constant."""
        for name, code in self.functions.items():
            for function in functions[name]:
                function.__code__ = code
        module = sys.modules[self.file.removesuffix(".py").replace("/", ".")]
        before = {**vars(module)}
        exec(self.constant, vars(module))
        for name in [n for n in before if vars(module)[n] is not before[n]]:
            for each in [*sys.modules.values()]:
                if vars(each).get(name, each) is before[name]:
                    setattr(each, name, vars(module)[name])


def other(operator: ast.AST) -> Any:
    return getattr(ast, OTHER[type(operator).__name__])()


def larger(value: float) -> float:
    """Return another number, or the other of True and False."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value or 1.0


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, Any, ast.AST]]:
    """Yield the changes of a node: what, its field, the other value, and the place."""
    match node:
        case ast.Compare(ops=ops):
            for i, each in enumerate(ops):
                yield node, "ops", [*ops[:i], other(each), *ops[i + 1 :]], node
        case ast.UnaryOp(op=ast.Not()):
            yield node, "operand", ast.UnaryOp(ast.Not(), node.operand), node
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() | ast.UnaryOp():
            if type(node.op).__name__ in OTHER:
                yield node, "op", other(node.op), node
        case ast.If() | ast.IfExp():
            yield node, "test", ast.UnaryOp(ast.Not(), node.test), node.test
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, int | float):
            last = isinstance(node, ast.UnaryOp) and child.value == 1  # reshape has -2 for -1 too
            yield child, "value", 0 if last else larger(child.value), child
    for field, body in ast.iter_fields(node):
        for i, each in enumerate(body if isinstance(body, list) else ()):
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            stored = isinstance(target, ast.Attribute | ast.Subscript)
            if stored or (isinstance(each, EFFECTS) and not text):
                gone = ast.copy_location(ast.Pass(), each)
                yield node, field, [*body[:i], gone, *body[i + 1 :]], each


class Change(NamedTuple):
    """A node's field and its other value, in the node that shows it, at a line, below a name."""

    shown: ast.AST
    node: ast.AST
    field: str
    value: Any
    place: ast.AST
    name: str
    constant: ast.stmt | None

    def __str__(self) -> str:
        old, before = getattr(self.node, self.field), ast.unparse(self.shown)
        setattr(self.node, self.field, self.value)
        change = f"{before} -> {ast.unparse(self.shown)}"
        setattr(self.node, self.field, old)
        if self.field == "test":
            change = f"{ast.unparse(old)} -> {ast.unparse(self.value)}"
        elif isinstance(self.value, list) and isinstance(old[0], ast.stmt):
            change = f"{ast.unparse(self.place)} is removed"
        return f"{self.name}: {' '.join(change.split())}"


def places(node: ast.AST, name: str = "", top: ast.stmt | None = None) -> Iterator[Change]:
    """Yield every change below a node, with the function or constant that it is in."""
    for change in changes(node):
        yield Change(node, *change, name, top)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from places(child, child.name, None)
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            yield from places(child, ast.unparse(target), child)
        elif not isinstance(child, ast.JoinedStr):  # of a message
            yield from places(child, name, top)


def codes(tree: ast.Module, path: str) -> dict[Key, CodeType]:
    """Return the code of the functions of a file."""
    every = [compile(ast.fix_missing_locations(tree), path, "exec")]
    for code in every:
        every += [each for each in code.co_consts if isinstance(each, CodeType)]
    return {key(code): code for code in every}


def key(code: CodeType) -> Key:
    columns = [at for *_, at, _ in code.co_positions() if at is not None]
    return code.co_qualname, code.co_firstlineno, min(columns, default=0)


def mutants(file: str, functions: dict[Key, Any], every: int, day: int) -> Iterator[Mutant]:
    """Yield one in ``every`` mutants of a file that change a function or a constant."""
    tree = ast.parse(Path(file).read_text())
    plain = codes(tree, file)
    for i, change in enumerate(places(tree)):
        if i % every != day % every:
            continue
        what, old, constant = str(change), getattr(change.node, change.field), change.constant
        setattr(change.node, change.field, change.value)
        changed = {k: c for k, c in codes(tree, file).items() if k in functions and c != plain[k]}
        if changed or constant:
            line = ast.unparse(constant) if constant and not changed else ""
            yield Mutant(file, change.place.lineno, what, ast.unparse(tree), changed, line)
        setattr(change.node, change.field, old)


class Test(NamedTuple):
    """A test, its processor time, and the lines that it executes, each a file and a number.

    ``turn`` is its place among the tests of its file that execute a line, the fastest first.
    """

    item: pytest.Item
    seconds: float
    lines: set[tuple[str, int]]
    turn: int = 0


class Judge:
    """A plugin of pytest that runs tests on mutants."""

    def __init__(self, files: list[str], every: int, day: int) -> None:
        self.files, self.every, self.day = files, every, day
        self.kills = Counter[str]()
        self.report = os.fdopen(os.dup(1), "w")  # pytest captures the other

    def print(self, line: str) -> None:
        print(line, file=self.report, flush=True)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, then those of each mutant; print what survives and the share."""
        forked(lambda: MEASURED.write_bytes(pickle.dumps([*map(self.measured, session.items)])))
        measured = zip(session.items, pickle.loads(MEASURED.read_bytes()), strict=True)
        self.tests = [Test(item, *each) for item, each in measured]
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # else that of one mutant is run for another
        functions = self.functions()
        counts = Counter[str]()
        for file in self.files:
            self.print(f"{file}: {dict(counts)} before it")
            for mutant in mutants(file, functions[file], self.every, self.day):
                outcome = self.judged(mutant, functions[file])
                counts[outcome.split(" ")[0]] += 1
                if outcome not in ("killed", "harmless"):
                    self.print(f"{file}:{mutant.line} {mutant.what}: {outcome}")
        drawn = counts.total() - counts["harmless"]
        share = f"{100 * counts['killed'] / max(drawn, 1):.1f} % of {drawn} mutants are killed"
        self.print(f"{share}; {counts['harmless']} others are harmless")
        return True

    def measured(self, item: pytest.Item) -> tuple[float, set[tuple[str, int]]]:
        """Return the time of a test, and the lines that it executes; none if it does not pass."""
        lines = set[tuple[str, int]]()
        inside = {os.path.abspath(file): file for file in self.files}

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            file = inside.get(frame.f_code.co_filename)
            if file is None:
                return None
            lines.update([(file, frame.f_lineno), (file, 0)])
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        start = worked()
        passed = passes(item)
        sys.settrace(None)
        return worked() - start, lines if passed else set()

    def functions(self) -> dict[str, dict[Key, list[FunctionType]]]:
        """Return the functions of every file, of which several may have one code."""
        for file in self.files:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        importlib.import_module("tests.harness.isolation").names()  # else each fork imports all
        gc.unfreeze()
        functions: Any = defaultdict(lambda: defaultdict(list))
        for each in gc.get_objects():
            if type(each) is FunctionType:
                code = each.__code__
                functions[os.path.relpath(code.co_filename)][key(code)].append(each)
        return functions

    def judged(self, mutant: Mutant, functions: dict[Key, list[FunctionType]]) -> str:
        """Return what becomes of a mutant, in a fork of this process."""
        if str(mutant) in HARMLESS:
            return "harmless"
        place = mutant.file, 0 if mutant.constant else mutant.line
        tests = [test for test in self.tests if place in test.lines]
        tests.sort(key=lambda test: test.seconds)
        # the fastest test of each file first: tests of one file execute a line in the same way
        turns = Counter[Any]()
        for number, test in enumerate(tests):
            turns[test.item.path] += 1
            tests[number] = test._replace(turn=turns[test.item.path])
        tests.sort(key=lambda test: (-self.kills[test.item.nodeid], test.turn, test.seconds))
        ends = [*itertools.accumulate(test.seconds for test in tests)]
        tests = tests[: bisect.bisect(ends, SECONDS)]
        if not tests:
            return "unseen, as no test executes it"

        def judge() -> None:
            signal.alarm(30 + int(10 * sum(test.seconds for test in tests)))  # of an endless loop
            Path(mutant.file).write_text(mutant.text)
            mutant.apply(functions)
            for test in tests:
                KILLER.write_text(test.item.nodeid)
                if not passes(test.item):
                    os._exit(0)
            os._exit(SURVIVES)

        plain = Path(mutant.file).read_text()
        status = forked(judge)
        Path(mutant.file).write_text(plain)
        if status == SURVIVES:
            return f"survives {len(tests)} tests"
        self.kills[KILLER.read_text()] += 1
        return "killed"


def worked() -> float:
    """Return the seconds of processor time of this process, and of those that it waited for.

    What else the machine does has no part in it, so it does not choose the tests of a mutant.
    """
    return sum(os.times()[:4])


def forked(work: Callable[[], object]) -> int:
    """Return the exit code of a fork that does some work, and end the processes that it left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, whose threads a fork does not have
        child = os.fork()
    if not child:
        os.setsid()
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def passes(item: pytest.Item) -> bool:
    """Return whether a test passes; what it shares with others is made anew."""
    reports = runtestprotocol(item, log=False)
    return all(report.passed for report in reports)


def main() -> None:
    """Draw mutants and judge them, in a copy of the tracked files."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.mutants", description=__doc__)
    parser.add_argument("path", help="a module, or a folder of modules")
    parser.add_argument("--every", type=int, default=1, help="draw one in so many mutants")
    parser.add_argument("--day", type=int, default=commits(), help="which ones, as of pytest")
    args, options = parser.parse_known_args()
    files = [path.relative_to(ROOT) for path in tracked("unsloth_cupy/**/*.py")]
    chosen = [str(f) for f in files if f.is_relative_to(args.path)]
    with tempfile.TemporaryDirectory() as folder:
        for path in tracked():
            to = Path(folder, path.relative_to(ROOT))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": folder, "UNSLOTH_CUPY_GIT": str(ROOT)}
        sys.path[:] = [folder, *(p for p in sys.path if p and Path(p) != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        judge = Judge(chosen, args.every, args.day)
        pytest.main(["-q", "-p", "no:cacheprovider", f"--day={args.day}", *options], [judge])


if __name__ == "__main__":
    main()
