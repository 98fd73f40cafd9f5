"""Fixtures and hooks of pytest for all tests.

A run takes a sample of the emulated kernels' cases and of the slow tests, and another one after the
next commit; with ``--sample all`` it takes all.
"""

import gc
import locale
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest

from .harness.sampling import SLOW, Emulated, Sample, commits, in_sample

# Before NumPy is imported.  xdist runs a process for each core, so one BLAS thread each is enough.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "MKL"):  # torch uses MKL; the library's own threads are unchanged
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# XLA's own code runs once after it is compiled, which takes twice as long with optimizations.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Else the ranks of tests would leave a key in the user's home.
os.environ.setdefault("UNSLOTH_CUPY_AUTHKEY", "of the tests")

FOLDER = Path(__file__).parent / "golden"
TOPICS = 16  # of the 79 in Python's documentation


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the sample: see sampling.py."""
    parser.addoption("--sample", choices=("some", "all"), default="some")
    parser.addoption("--day", type=int, help="number of the sample; default: number of commits")


def pytest_configure(config: pytest.Config) -> None:
    """Set the sample, in the processes of xdist too: they get the same options."""
    if (encoding := locale.getpreferredencoding(False).lower()) not in ("utf-8", "utf8"):
        cure = "set PYTHONUTF8=1"
        raise pytest.UsageError(f"tests read and write UTF-8, not {encoding}; {cure}")
    from unsloth_cupy.kernel_cache import prepare  # it imports NumPy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a home that cannot be written
        prepare()  # before tests import CuPy, which fails there
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
    if Sample.all:
        return "sample: all"
    parts = f"one slow test in {SLOW} and some emulated cases"
    return f"sample: --day {Sample.day}, with {parts}; --sample all takes all"


@pytest.fixture(autouse=True)
def _isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo every test's changes, so that no test depends on those that ran before it.

    Attention runs its general kernels, which all architectures have, unless a test asks for others.
    A GPU is hidden from the device "auto", unless a test is marked as one for a GPU.
    """
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from .harness.isolation import isolated  # it imports NumPy
    from .harness.parity import general_attention

    with isolated(), general_attention():
        yield


@pytest.fixture(scope="session", autouse=True)
def _silent_runs() -> Iterator[None]:
    """Let a Trainer without a listener print nothing, as one of ``quiet=True``.

    Its pictures and samples take longer than a small run.
    """
    from unsloth_cupy.finetune.listener import Listener
    from unsloth_cupy.finetune.run import trainer

    with mock.patch.object(trainer, "Printer", Listener):
        yield


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Collect no garbage during a test that reaches the limit of recursion.

    There finalizers fail, of objects that earlier tests left, and the test with them.
    """
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each method with a parameter ``case`` by the ``cases`` of its class."""
    if "case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.label)


def emulated(item: pytest.Item) -> Emulated | None:
    """Return the case that a test emulates: ``test_emulated_kernels`` of a Parity class."""
    if getattr(item, "originalname", "") != "test_emulated_kernels" or item.cls is None:
        return None
    return Emulated(item.cls, item.callspec.params["case"], item.callspec.params["dtype"])


def left_out(item: pytest.Item) -> bool:
    """Return whether the sample does not have a test."""
    slow = item.get_closest_marker("slow") is not None
    return not in_sample(item.nodeid, emulated(item), slow, Sample.day)


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
    if not Sample.all and (left := [*filter(left_out, items)]):
        config.hook.pytest_deselected(items=left)
        kept = {*items}.difference(left)
        items[:] = [item for item in items if item in kept]

    has_gpu = False
    if importlib.util.find_spec("cupy"):
        import cupy

        has_gpu = cupy.cuda.is_available()
    if not has_gpu:
        skip_what_needs_a_gpu(items)
