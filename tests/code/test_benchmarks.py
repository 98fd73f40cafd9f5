"""Every benchmark runs once with the arrays that its op needs, and has a version."""

import functools
import importlib
import inspect
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from unsloth_cupy.bench.cases import Scale

from ..harness.sampling import Sample
from ..harness.tracked import ROOT, tracked

FOLDER = ROOT / "asv_benchmarks"
BENCHMARKS = tracked("asv_benchmarks/benchmarks/*.py")
MODULES = [path.stem for path in BENCHMARKS if not path.stem.startswith("_")]
SMALLER = {
    **{"NAMES": ["softmax", "attention_forward"]},  # test_costs.py has all
    **{"ROUNDS": 1, "LAYERS": 2, "TOKENS": 64, "ROWS": 128, "SIZE": 128},
    "Scale": functools.partial(Scale, tokens=64, hidden=128, inner=256, vocab=1024),
}
LONG = {("Long", 8192)}  # takes seconds; only asv runs it


def suites() -> Iterator[tuple[str, type]]:
    """Return every class that has a benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in MODULES:
            module = importlib.import_module(f"benchmarks.{name}")
            for label, suite in inspect.getmembers(module, inspect.isclass):
                if suite.__module__ == module.__name__ and methods(suite):
                    yield f"{name}.{label}", suite


def methods(suite: type) -> list[str]:
    """Return the names that asv measures."""
    return [name for name in dir(suite) if name.startswith(("time_", "track_", "peakmem_"))]


SUITES = dict(suites())


def calls() -> Iterator[Any]:
    """Return every suite with each of its combinations of parameters."""
    for label, suite in SUITES.items():
        params = getattr(suite, "params", ())
        axes = [params] if params and not isinstance(params[0], list) else params
        for values in itertools.product(*axes):
            if (suite.__name__, *values) not in LONG:
                yield pytest.param(suite, values, id="-".join(map(str, (label, *values))))


def test_what_each_run_rewrites_is_not_kept() -> None:
    """The docs also run ``asv machine`` first, as asv would otherwise ask on a new machine."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "asv_benchmarks/results/benchmarks.json" in ignored
    assert not tracked("asv_benchmarks/results/benchmarks.json")
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "asv machine --yes\nasv run" in page


def test_exact_costs_have_a_history() -> None:
    """Results of everything that asv tracks, of ten commits at least, without machine paths."""
    kept: Counter[str] = Counter()
    for path in tracked("asv_benchmarks/results/*/*-*.json"):
        text = path.read_text()
        assert "/tmp" not in text, path.name
        assert "/home" not in text, path.name
        results = json.loads(text)["results"]
        kept.update(name for name, (value, *_) in results.items() if value and value[0])
    counted = [f"costs.Costs.{name}" for name in methods(SUITES["costs.Costs"])]
    assert "costs.Costs.track_instructions" in counted
    assert {name: kept[name] for name in counted if kept[name] < 10} == {}


@pytest.mark.parametrize("label", SUITES)
def test_every_benchmark_has_a_version(label: str) -> None:
    """Without one, asv hashes the source and discards old results at every edit."""
    assert isinstance(getattr(SUITES[label], "version", None), str)


@pytest.mark.parametrize(("suite", "values"), Sample.one_in(6, calls()))
def test_runs_once(suite: type, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module = inspect.getmodule(suite)
    for name, least in SMALLER.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, least)
    bench: Any = suite()
    lacking = getattr(module, "uncounted", set)()
    try:
        if hasattr(bench, "setup_cache"):
            values = (bench.setup_cache(), *values)
        else:
            bench.setup(*values)
        for name in methods(suite):
            result = getattr(bench, name)(*values)
            if name in lacking:
                assert math.isnan(result), name
            else:
                assert name.startswith("time_") or result > 0 or "microseconds" in name
    except NotImplementedError as error:  # asv's way to skip
        pytest.skip(str(error))
    finally:
        if hasattr(bench, "teardown"):  # what setup changed, of CuPy for one
            bench.teardown(*values)
