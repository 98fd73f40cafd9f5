"""Every benchmark runs once with the arrays that its op needs, and has a version."""

import functools
import importlib
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from unsloth_cupy.bench.cases import Scale

from ..harness.sampling import Sample
from ..harness.tracked import ROOT, tracked
from .programs import costs_file

FOLDER = ROOT / "asv_benchmarks"
BENCHMARKS = tracked("asv_benchmarks/benchmarks/*.py")
MODULES = [path.stem for path in BENCHMARKS if not path.stem.startswith("_")]
SMALLER = {
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


def test_costs_and_times_have_a_history() -> None:
    """Results of ten commits at least, one value an op, without machine paths."""
    kept: Counter[str] = Counter()
    for path in tracked("asv_benchmarks/results/*/*-*.json"):
        text = path.read_text()
        assert "/tmp" not in text, path.name
        assert "/home" not in text, path.name
        results = json.loads(text)["results"]
        kept.update(name for name, (values, *_) in results.items() if any(values or ()))
        ops = [len(results[name][1][0]) for name in results if name.startswith("costs.")]
        assert all(count > 60 for count in ops), path.name
    counted = [f"costs.Costs.{name}" for name in methods(SUITES["costs.Costs"])]
    counted += ["ops.Time.time_call", "attention.Shapes.time_attention"]
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
    try:
        if hasattr(bench, "setup_cache"):
            values = (bench.setup_cache(), *values)
        else:
            bench.setup(*values)
        for name in methods(suite):
            result = getattr(bench, name)(*values)
            counted = suite.__name__ == "Costs" and result >= 0
            assert name.startswith("time_") or result > 0 or counted or "microseconds" in name
    except NotImplementedError as error:  # asv's way to skip
        pytest.skip(str(error))
    finally:
        if hasattr(bench, "teardown"):  # what setup changed, of CuPy for one
            bench.teardown(*values)


def test_costs_are_those_of_the_table() -> None:
    """One value an op, of sm_90."""
    suite: Any = SUITES["costs.Costs"]
    bench, ops = suite(), suite.params[0]
    assert sorted(costs_file.read("calls")["ops"]) == ops
    for op in ops:
        bench.setup(op)
        line = costs_file.read("calls")["ops"][op]
        numbers = next(line[key] for key in line if "90" in key.split() and key[0].isdigit())
        assert [bench.track_launches(op), bench.track_allocations(op)] == numbers[:2]
        assert bench.track_instructions(op) == sum(
            next(line[key] for key in line if key.startswith("loops") and "90" in key.split())
        )
    with pytest.raises(NotImplementedError, match="no_such_op"):
        bench.setup("no_such_op")


def test_the_package_that_asv_installs_is_measured() -> None:
    """Not the checkout around the benchmarks, and by one wheel: its own."""
    settings = json.loads((FOLDER / "asv.conf.json").read_text())
    (command,) = settings["build_command"]
    assert "--no-deps" in command
    source = (FOLDER / "benchmarks" / "__init__.py").read_text()
    assert "sys.path.append(" in source
    assert "sys.path.insert(" not in source
