"""The kernel that adds products of low ranks to results."""

import functools
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy.ops.linear import _lora_expand
from unsloth_cupy.ops.linear._lora_expand import add_low_rank_rows, add_low_ranks

from ..harness.parity import Arrays, Case, KernelCompared, _shifted, emulator, within_rule
from ..machines.cuda_on_cpu.traffic import counted

SCALES = (0.5, 2.0, 1.0)


def drawn(rows: int, columns: Any, ranks: Any, dtype: Any, by_rank: bool) -> list[np.ndarray]:
    """Return the ys of one array, the lows of another, and the factors; values of float16."""
    rng = np.random.default_rng(0)
    shapes = [(rows, sum(columns)), (rows, sum(ranks))]
    pairs = zip(columns, ranks, strict=True)
    shapes += [(r, c) if by_rank else (c, r) for c, r in pairs]
    return [rng.standard_normal(shape).astype(np.float16).astype(dtype) for shape in shapes]


def parts(array: Any, sizes: Any) -> list[Any]:
    """Return the columns of each layer."""
    stops = np.cumsum(sizes)
    return [array[..., stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def added(y: Any, low: Any, *factors: Any, by_rank: bool) -> Arrays:
    ranks = [f.shape[0 if by_rank else 1] for f in factors]
    columns = [f.shape[1 if by_rank else 0] for f in factors]
    if by_rank:
        add_low_rank_rows(y, low, *factors)
    else:
        add_low_ranks(parts(y, columns), parts(low, ranks), factors, SCALES[: len(factors)])
    return {"y": y}


class TestLoraExpand(KernelCompared):
    """All products from one launch, in place."""

    op = "lora_up"
    cases = (
        Case("three layers", rows=130, columns=(136, 8, 264), ranks=(16, 3, 8)),
        Case("one, of a high rank", rows=70, columns=(40,), ranks=(70,)),
        Case("odd columns", rows=17, columns=(31, 130), ranks=(1, 16)),
        Case("off alignment", rows=5, columns=(64, 16), ranks=(32, 4), shift=1),
        Case("narrow factors", rows=1, columns=(128,), ranks=(8,), narrow=True),
        Case("rows of a", rows=33, columns=(264,), ranks=(48,), by_rank=True),
        Case("odd rows of a", rows=3, columns=(133,), ranks=(192,), by_rank=True),
        Case("beyond the table", rows=3, columns=(16,), ranks=(193,), launches=0),
    )

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        by_rank, launches = case.both.get("by_rank", False), case.both.get("launches", 1)
        sizes = (case.both[name] for name in ("rows", "columns", "ranks"))
        inputs = drawn(*sizes, dtype, by_rank)
        run = functools.partial(added, by_rank=by_rank)
        plain = run(*(array.copy() for array in inputs))
        exact = run(*(array.astype(np.float64) for array in inputs))
        if not case.both.get("narrow"):
            inputs[2:] = [array.astype(np.float32) for array in inputs[2:]]
        there = [place(_shifted(a) if case.both.get("shift") else a.copy()) for a in inputs]
        load = mock.patch.object(_lora_expand, "load", wraps=_lora_expand.load)
        with running(), load as loaded:
            actual = run(*there)
        assert loaded.call_count == launches * (np.dtype(dtype).itemsize == 2)
        within_rule(plain, exact, actual)


@pytest.mark.slow
@pytest.mark.parametrize("by_rank", [False, True])
def test_y_is_moved_once(by_rank: bool) -> None:
    """Beside it low and the factor; no access leaves part of a sector unused."""
    y, low, factor = drawn(128, (256,), (16,), ml_dtypes.bfloat16, by_rank)
    with counted() as traffic, emulator():
        added(y, low, factor.astype(np.float32), by_rank=by_rank)
    read, written = (traffic.of("global", write=write) for write in (False, True))
    assert read.bytes == y.nbytes + 2 * low.nbytes + 2 * factor.nbytes
    assert written.bytes == y.nbytes
    assert read.efficiency == written.efficiency == 1
