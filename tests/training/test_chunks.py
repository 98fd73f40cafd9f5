"""Functions of rows that are computed in chunks, and again on the way back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, Var, checkpoint
from unsloth_cupy.errors import GradientError
from unsloth_cupy.ops.elements.arithmetic import multiply, scale
from unsloth_cupy.ops.linear.linear import linear
from unsloth_cupy.training import chunks, tape
from unsloth_cupy.training.chunks import chunk_of, in_chunks

RNG = np.random.default_rng(0)
X, FACTORS = RNG.standard_normal((3, 7, 4)), RNG.standard_normal((3, 7, 1))
WEIGHT, BACK = RNG.standard_normal((5, 4)), RNG.standard_normal((4, 5))


def function(parameters: Mapping[str, Any], part: slice, rows: Sequence[Any]) -> Any:
    """Return a small MLP of x, times the factors and the numbers of the rows."""
    x, factors = rows
    inner = linear(x, parameters["weight"])
    y = linear(multiply(inner, inner), parameters["back"])
    numbers = np.arange(part.start, part.stop)[None, :, None]
    return y * np.broadcast_to(numbers, y.shape).astype(float) * factors


def whole(parameters: Mapping[str, Any], part: slice, rows: Sequence[Any]) -> Any:
    x, factors = rows
    flat = [each.reshape(1, 21, each.shape[-1]) for each in (x, factors)]
    return function(parameters, slice(0, 21), flat).reshape(3, 7, 4)


def differentiated(watched: str, compute: Any) -> list[Any]:
    """Return the result, then the gradients of the arguments whose letters are ``watched``."""
    record = Tape()
    arrays = {"x": X, "f": FACTORS, "w": WEIGHT, "b": BACK}
    used: dict[str, Any] = {n: record.watch(a) if n in watched else a for n, a in arrays.items()}
    y = compute({"weight": used["w"], "back": used["b"], "other": X}, (used["x"], used["f"]))
    if not watched:
        return [y]
    gradients = record.gradients(y, [used[n] for n in watched], np.ones(y.shape))
    return [y.value, *gradients]


@pytest.mark.parametrize("size", [1, 4, 21, 100])
@pytest.mark.parametrize("watched", ["", "x", "w", "xb", "f", "xfwb"])
def test_chunks_compute_what_the_whole_function_does(watched: str, size: int) -> None:
    expected = differentiated(watched, lambda p, rows: whole(p, slice(0, 21), rows))
    actual = differentiated(watched, lambda p, rows: in_chunks(function, rows, p, size))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unread", [False, True])
def test_the_second_call_of_a_checkpoint_computes_no_unread_result(
    unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward calls the function once for each chunk, and forward once."""
    calls: list[slice] = []

    def counted(parameters: Any, part: slice, rows: Any) -> Any:
        calls.append(part)
        return function(parameters, part, rows)

    def part_of_a_model(parameters: Any, rows: Any) -> Any:
        return in_chunks(counted, rows, parameters, 8, unread=unread)

    expected = differentiated("xfwb", lambda p, rows: in_chunks(function, rows, p, 8))
    actual = differentiated("xfwb", lambda p, rows: checkpoint(part_of_a_model, p, rows))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(calls) == 3 * (2 if unread else 3)


def test_no_inner_array_has_all_rows() -> None:
    largest: list[int] = []

    def noted(op: Any, values: Any, result: Any) -> None:
        results = result if type(result) is tuple else (result,)
        largest.extend(each.size for each in results if each is not None)

    token = tape.watch_results.set(noted)
    try:
        differentiated("xw", lambda p, rows: in_chunks(function, rows, p, 2))
    finally:
        tape.watch_results.reset(token)
    assert max(largest) <= max(2 * 5, WEIGHT.size)


def test_sums_of_16_bit_gradients_are_float32() -> None:
    """1 + 2048 * 2**-11 would stay 1 in float16."""
    x = np.full((2049, 1), 2.0**-11, np.float16)
    x[0] = 1
    record = Tape()
    weight = record.watch(np.ones((1, 1), np.float16))
    y = in_chunks(lambda p, part, rows: linear(rows[0], p["weight"]), [x], {"weight": weight}, 1)
    (actual,) = record.gradients(y, [weight], np.ones(y.shape, np.float16))
    assert (actual.dtype, float(actual[0, 0])) == (np.float16, 2)


def test_arguments_are_of_one_tape() -> None:
    one, other = Tape().watch(X), Tape().watch(WEIGHT)
    with pytest.raises(GradientError, match="in_chunks: arguments are on two tapes"):
        in_chunks(function, (one, FACTORS), {"weight": other, "back": BACK}, 4)


@pytest.mark.parametrize(
    ("requested", "rows", "expected"),
    [
        (None, 64, None), (None, 65, 64), (False, 1000, None), (True, 32, None), (True, 33, 32),
        (True, 400, 50), (True, 1000, 64),
    ],
)  # fmt: skip
def test_the_rows_of_a_chunk(
    requested: bool | None, rows: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows of 100 float32 values are as many bytes as an inner array may have."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 * 400)
    assert chunk_of(requested, np.zeros((1, rows, 8), np.float32), (), 100) == expected


def test_a_plain_tape_stores_whole_arrays_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """There chunks would cost further products; the second call of a checkpoint has them anyway."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 * 800)
    sizes: list[int | None] = []

    def noted(x: Var) -> Any:
        sizes.append(chunk_of(None, x, [x], 100))
        return scale(x, factor=2.0)

    record = Tape()
    x = record.watch(np.zeros((70, 8)))
    noted(x)
    y = checkpoint(noted, x)
    record.gradients(y, [x], np.ones((70, 8)))
    assert sizes == [None, 64, 64]
