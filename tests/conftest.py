"""Fixtures and markers that every test may use.

A run of the whole suite takes one dtype of each case of an emulated kernel, another after the next
commit; a run of some files, or of ``--sample all``, takes all.
"""

import gc
import locale
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from .sample import Sample, commits

if "PYTEST_XDIST_WORKER" in os.environ:  # before NumPy: as many processes as cores share them
    for library in ("OPENBLAS", "MKL"):  # torch asks MKL; our own threads stay as they are
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

FOLDER = Path(__file__).parent / "golden"
WHOLE = 3000  # tests: more are the suite
TOPICS = 16  # of 79
FEW = 4  # cases of a class, which every run takes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose its sample: see sample.py."""
    parser.addoption("--sample", choices=("some", "all"), default="some")
    parser.addoption("--day", type=int, help="number of the sample; that of commits by default")


def pytest_configure(config: pytest.Config) -> None:
    """Choose it, for the processes of xdist too: they are told the options."""
    if (encoding := locale.getpreferredencoding(False).lower()) not in ("utf-8", "utf8"):
        cure = "set PYTHONUTF8=1"
        raise pytest.UsageError(f"tests read and write UTF-8, not {encoding}; {cure}")
    from unsloth_cupy.compiled.cache import prepare  # it imports NumPy

    prepare()  # before tests import CuPy, which fails where it cannot write to the user's home
    if config.option.day is None:
        config.option.day = commits()
    Sample.day, Sample.all = config.option.day, config.option.sample == "all"
    if not os.environ.get("UNSLOTH_CUPY_FULL_RUNS"):
        shorten_the_default_text()


def shorten_the_default_text() -> None:
    """Leave a tenth of Python's documentation: what a run does is tested, not how much it reads."""
    from pydoc_data import topics

    topics.topics = dict(islice(topics.topics.items(), TOPICS))


def pytest_collection_finish() -> None:
    """Leave what is alive by now, modules and tests, out of what the garbage collector walks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_report_header() -> str:
    """Name the sample."""
    return "sample: all" if Sample.all else f"sample: --day {Sample.day}"


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """Undo after every test what it changed: none may depend on what ran before it."""
    from .undo import undoing  # it imports NumPy

    with undoing():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test of a Parity class that names ``case`` the cases of its class."""
    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.label)


def emulates_a_case(item: pytest.Item) -> bool:
    """Say whether a test is that of a Parity class: it runs a case in each dtype."""
    named = getattr(item, "originalname", "") == "test_emulated_kernels"
    return named and getattr(item, "cls", None) is not None


def sampled(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Return one emulated test of each case, its dtypes in turn, in whatever order tests come.

    Of the cases of a class that has many, every second one: six runs take each in every dtype.
    """
    emulated = sorted(filter(emulates_a_case, items), key=lambda item: item.nodeid)
    classes: dict[type, dict[str, list[pytest.Item]]] = {}
    for item in emulated:
        cases = classes.setdefault(item.cls, {})
        cases.setdefault(item.callspec.params["case"].label, []).append(item)
    found = []
    for cases in classes.values():
        step = 2 if len(cases) > FEW else 1
        for n, dtypes in enumerate(cases.values()):
            if (n + day) % step == 0:
                found.append(dtypes[(day + n) % len(dtypes)])
    return found


def skip_what_needs_a_gpu(items: list[pytest.Item]) -> None:
    """Skip what has the marker: a keyword may be the id of a case, or the name of a folder."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a sample of the emulated kernels; skip what needs a GPU where there is none."""
    import importlib.util

    if adrift := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address names a test, another in each process: {adrift}")
    if len(items) > WHOLE and not Sample.all:
        today = {*sampled(items, Sample.day)}
        left = [item for item in items if emulates_a_case(item) and item not in today]
        config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]

    has_gpu = False
    if importlib.util.find_spec("cupy"):
        import cupy

        has_gpu = cupy.cuda.is_available()
    if not has_gpu:
        skip_what_needs_a_gpu(items)
