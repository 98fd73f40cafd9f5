"""Fixtures and hooks of pytest for all tests.

A run of the whole suite takes a sample of the emulated kernels' cases and of the slow tests, and
another one after the next commit; a run of some files, or one with ``--sample all``, takes all.
"""

import gc
import locale
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from .harness.sampling import Sample, commits

# Before NumPy is imported.  xdist runs a process for each core, so one BLAS thread each is enough.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "MKL"):  # torch uses MKL; the library's own threads are unchanged
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# XLA's own code runs once after it is compiled, which takes twice as long with optimizations.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

FOLDER = Path(__file__).parent / "golden"
WHOLE = 3000  # tests: a run of more than these is one of the whole suite
TOPICS = 16  # of the 79 in Python's documentation
TURNS = 24  # days in which the samples contain every test of emulated kernels
SLOW = 7  # days in which they contain every test with the marker ``slow``


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the sample: see sampling.py."""
    parser.addoption("--sample", choices=("some", "all"), default="some")
    parser.addoption("--day", type=int, help="number of the sample; default: number of commits")


def pytest_configure(config: pytest.Config) -> None:
    """Set the sample, in the processes of xdist too: they get the same options."""
    if (encoding := locale.getpreferredencoding(False).lower()) not in ("utf-8", "utf8"):
        cure = "set PYTHONUTF8=1"
        raise pytest.UsageError(f"tests read and write UTF-8, not {encoding}; {cure}")
    from unsloth_cupy.compiled.cache import prepare  # it imports NumPy

    prepare()  # before tests import CuPy, which fails where it cannot write to the user's home
    if config.option.day is None:
        config.option.day = commits()
    Sample.day, Sample.all = config.option.day, config.option.sample == "all"
    if find_spec("hypothesis"):  # only some tests need it
        from hypothesis import settings

        settings.register_profile("any machine", deadline=None)  # a busy one is slow at times
        settings.load_profile("any machine")
    if not os.environ.get("UNSLOTH_CUPY_FULL_RUNS"):
        shorten_the_default_text()


def shorten_the_default_text() -> None:
    """Keep a part of Python's documentation: tests of training runs do not need all of it."""
    from pydoc_data import topics

    topics.topics = dict(islice(topics.topics.items(), TOPICS))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Exclude what collection leaves alive, modules and tests, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_report_header() -> str:
    """Return the line that names the sample."""
    return "sample: all" if Sample.all else f"sample: --day {Sample.day}"


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Undo every test's changes, so that no test depends on those that ran before it."""
    from .harness.isolation import isolated  # it imports NumPy

    with isolated():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each method with a parameter ``case`` by the ``cases`` of its class."""
    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.label)


def emulates_a_case(item: pytest.Item) -> bool:
    """Return whether a test is ``test_emulated_kernels`` of a Parity class: cases x dtypes."""
    named = getattr(item, "originalname", "") == "test_emulated_kernels"
    return named and getattr(item, "cls", None) is not None


def features_of(item: pytest.Item) -> set[object]:
    """Return a test's class and, unless an axis is empty, its dtype, operands and options."""
    from unsloth_cupy.core.op import OPS  # it imports NumPy

    case, dtype = item.callspec.params["case"], item.callspec.params["dtype"]
    known = OPS[item.cls.op].options
    options = {repr((name, value)) for name, value in case.both.items() if name in known}
    sizes = [size for name, size in case.both.items() if name not in known]
    if any(0 in (size if isinstance(size, list | tuple) else [size]) for size in sizes):
        return {item.cls, "empty"}  # it launches nothing
    return {item.cls, str(dtype), case.gaps, *case.given, *case.arrays, *options}


def sampled(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Return few of the emulated tests which together have every feature that any of them has.

    One in ``TURNS`` is among them in any case, another one on the next day, so that each has its
    turn; the others depend on the day too, and none on the order of the tests.
    """
    ops: dict[str, list[pytest.Item]] = {}
    for item in sorted(filter(emulates_a_case, items), key=lambda item: item.nodeid):
        ops.setdefault(item.cls.op, []).append(item)
    chosen = []
    for tests in ops.values():
        first, end = (at * len(tests) // TURNS for at in (day, day + 1))
        start = first % len(tests)
        order = [(item, features_of(item)) for item in tests[start:] + tests[:start]]
        missing = set().union(*(features for _, features in order))
        turn = order[: end - first]
        while turn or missing:
            best = turn.pop() if turn else max(order, key=lambda pair: len(pair[1] & missing))
            missing -= best[1]
            chosen.append(best[0])
    return chosen


def left_out(items: list[pytest.Item], day: int) -> set[pytest.Item]:
    """Return the tests that are not in the sample of a day: emulated kernels, and slow ones."""
    marked = filter(lambda item: item.get_closest_marker("slow"), items)
    slow = sorted(marked, key=lambda item: item.nodeid)
    taken = {*sampled(items, day), *slow[day % SLOW :: SLOW]}
    return {*filter(emulates_a_case, items), *slow} - taken


def skip_what_needs_a_gpu(items: list[pytest.Item]) -> None:
    """Skip tests by their marker; keywords also match ids of cases and names of folders."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of the emulated kernels and slow tests; skip GPU tests without a GPU."""
    import importlib.util

    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"test ids with an address differ between processes: {unstable}")
    if len(items) > WHOLE and not Sample.all:
        left = left_out(items, Sample.day)
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]

    has_gpu = False
    if importlib.util.find_spec("cupy"):
        import cupy

        has_gpu = cupy.cuda.is_available()
    if not has_gpu:
        skip_what_needs_a_gpu(items)
