"""The kernel that drops elements of rows, by a seed of the host or of the device."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.ops.linear.dropout import dropped_rows, noise

from ..harness.parity import Case, KernelCompared, _shifted

SEED = 2**64 - 3


class TestDropout(KernelCompared):
    """The bits of the definition."""

    op = "lora_linear_forward"
    cases = (
        Case("odd columns", shape=(5, 7)),
        Case("accesses of 16 bytes", shape=(3, 264)),
        Case("two values of an access", shape=(3, 10), key="int64"),
        Case("off alignment", shape=(2, 64), shift=1, key="int64"),
        Case("a key of 32 bits", shape=(2, 36), key="int32"),
        Case("in place", shape=(4, 16), over=True),
        Case("some rows of more", shape=(4, 16), key="int64", numbers=[1, 2, 5, 6]),
        Case("numbers of 32 bits", shape=(2, 36), numbers=[7, 0], kind="int32"),
        Case("a number beyond 32 bits", shape=(2, 36), numbers=[2**32 + 3, 2]),
    )

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        rows = np.random.default_rng(0).standard_normal(case.both["shape"]).astype(dtype)
        kind, numbers = case.both.get("key"), case.both.get("numbers")
        bits = np.array(-3, kind or "int64")
        if numbers is None:
            expected, own = dropped_rows(rows, 0.4, SEED), None
        else:
            numbers = np.array(numbers, case.both.get("kind", "int64"))
            places, own = numbers.astype("uint32"), place(numbers)
            every = np.zeros((8, rows.shape[1]), dtype)
            every[places] = rows
            expected = dropped_rows(every, 0.4, SEED)[places]
        there = place(_shifted(rows) if case.both.get("shift") else rows.copy())
        key = None if kind is None else place(bits)
        with running():
            out = there if case.both.get("over") else None
            actual = dropped_rows(there, 0.4, None if kind else SEED, key, out, own)
        assert (actual is there) == case.both.get("over", False)
        got = actual if isinstance(actual, np.ndarray) else actual.get()
        np.testing.assert_array_equal(
            got.view(f"u{rows.itemsize}"), expected.view(f"u{rows.itemsize}")
        )
        assert 0 < np.count_nonzero(expected) < expected.size


class TestNoise(KernelCompared):
    """The bits of the definition."""

    op = "lora_linear_forward"
    cases = (
        Case("odd columns", shape=(2, 5, 7)),
        Case("accesses of 16 bytes", shape=(1, 3, 264), sizes=True),
        Case("two values of an access", shape=(2, 3, 10), sizes=True),
        Case("several tiles of a row", shape=(1, 1, 2056)),
        Case("the last texts of more", shape=(2, 3, 16), first=6, sizes=True),
    )

    def compare(self, case: Case, dtype: Any, place: Any, running: Any) -> None:
        x, key = np.zeros(case.both["shape"], dtype), np.array(-3)
        sizes = np.linspace(0.1, 0.3, x.shape[1], dtype=np.float32)
        sizes = sizes if case.both.get("sizes") else None
        first, numbers = case.both.get("first", 0), None
        every = np.zeros((len(x) + first // x.shape[1], *x.shape[1:]), dtype)
        expected = noise(every, 0.2, key, sizes)[first // x.shape[1] :]
        with running():
            there = None if sizes is None else place(sizes)
            if first:
                numbers = place(np.arange(first, first + x[..., 0].size))
            actual = noise(place(x), 0.2, place(key), there, numbers)
        got = actual if isinstance(actual, np.ndarray) else actual.get()
        np.testing.assert_array_equal(got.view(f"u{x.itemsize}"), expected.view(f"u{x.itemsize}"))
        most = 0.2 if sizes is None else sizes[:, None]
        shares = expected.astype(np.float32) / most
        assert np.abs(shares).max() <= 1.01
        assert np.ptp(shares) > 1.5


@pytest.mark.parametrize("dora", [False, True])
def test_parts_of_a_batch_drop_what_the_batch_drops(dora: bool) -> None:
    rng = np.random.default_rng(0)
    x, dy, weight, a, b = (rng.standard_normal(s) for s in ((6, 8), (6, 5), (5, 8), (2, 8), (5, 2)))
    options: dict[str, Any] = {"dropout": 0.4, "seed": 7}
    options["magnitude"] = np.abs(rng.standard_normal(5)) if dora else None

    def results(rows: Any, numbers: Any) -> tuple[Any, ...]:
        tape = uc.Tape()
        held = tape.watch(x[rows]), tape.watch(a)
        y = uc.lora_linear(held[0], weight, held[1], b, numbers=numbers, **options)
        return y.value, *tape.gradients(y, held, dy[rows])

    parts = np.array([0, 5, 1]), np.array([4, 2, 3])
    whole, one, two = results(slice(6), None), *(results(part, part) for part in parts)
    for number in (0, 1):
        actual = np.concatenate([one[number], two[number]])
        expected = whole[number][np.concatenate(parts)]
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
    np.testing.assert_allclose(one[2] + two[2], whole[2], rtol=1e-12)
    with pytest.raises(ShapeError, match=r"numbers"):
        results(slice(2), parts[0])
    with pytest.raises(DTypeError, match=r"numbers is float64; it must be int"):
        results(slice(3), parts[0] * 1.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_array_is_the_seed_of_its_bits(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, weight, a, b = (
        rng.standard_normal(s).astype(dtype) for s in ((6, 8), (5, 8), (2, 8), (5, 2))
    )
    key = np.array(SEED, np.uint64).view(np.int64)

    def run(seed: Any) -> list[np.ndarray]:
        tape = uc.Tape()
        watched = [tape.watch(array) for array in (x, a, b)]
        draw = {"seed" if isinstance(seed, int) else "key": seed}
        y = uc.lora_linear(watched[0], weight, *watched[1:], dropout=0.5, **draw)
        return [y.value, *tape.gradients(y, watched, np.ones_like(y.value))]

    for actual, expected in zip(run(key), run(SEED), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not np.array_equal(run(key)[0], run(np.array(key + 1))[0])


def test_a_key_that_is_none() -> None:
    x, weight, a, b = (np.ones(shape) for shape in [(2, 5), (3, 5), (1, 5), (3, 1)])
    with pytest.raises(DTypeError, match=r"lora_linear: key is float64; it must be int"):
        uc.lora_linear(x, weight, a, b, dropout=0.5, key=np.array(1.0))
    with pytest.raises(ConfigError, match=r"lora_linear: seed=-1 must be in"):
        uc.lora_linear(x, weight, a, b, dropout=0.5, seed=-1)
