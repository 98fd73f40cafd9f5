"""Products of ternary rows: exact integers times scales."""

from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.ops.quantized._planes import planes_of
from unsloth_cupy.ops.quantized.ternary_scores import ternary_scores_forward

from ..harness.parity import Case, KernelParity, emulator

# The public names, as other people's programs call them.
PUBLIC = ("ternary_scores(q, k)",)


def case(label: str, q: int, k: int, columns: int, *, per_row: bool = True) -> Case:
    """Return a case of random codes."""
    made = lambda rows: lambda rng: planes_of(rng.integers(-1, 2, (rows, columns)).astype(np.int8))  # noqa: E731
    scale = lambda rows: lambda rng: rng.random(rows if per_row else 1) + 0.5  # noqa: E731
    arrays: dict[str, Any] = {"q": made(q), "k": made(k)}
    return Case(label, arrays={**arrays, "q_scale": scale(q), "k_scale": scale(k)})


class TestTernaryScores(KernelParity):
    op = "ternary_scores_forward"
    sizes = tuple({"q_rows": n, "k_rows": 512, "signs": 2, "bytes": 512} for n in (1, 256))
    cases = (
        case("odd", 3, 5, 77),
        case("one scale", 2, 70, 64, per_row=False),
        case("all of a tile", 16, 64, 256),
        case("several tiles", 70, 133, 300),
        case("long rows", 17, 3, 1500),
    )
    test_gradient_matches_finite_differences = None  # integers have none


class TestEmptyAxes(KernelParity):
    op = "ternary_scores_forward"
    cases = (case("no rows", 0, 3, 40), case("no keys", 2, 0, 40), case("no columns", 2, 3, 0))
    test_gradient_matches_finite_differences = None


def matrix(rows: int, columns: int, *, per: str = "row", seed: int = 0) -> uc.Ternary:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
    scale = rng.random((rows, 1) if per == "row" else ()).astype(np.float32)
    return uc.Ternary.from_codes(codes, scale)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_exact_integers_times_scales(per: str) -> None:
    q, k = matrix(5, 333, per=per), matrix(9, 333, per=per, seed=1)
    integers = q.codes.astype(np.int64) @ k.codes.T.astype(np.int64)
    product = np.broadcast_to(q.scale * k.scales.T, integers.shape).astype(np.float32)
    plain = uc.ternary_scores(q, k)
    with emulator():
        actual = uc.ternary_scores(q, k)
    np.testing.assert_array_equal(plain, integers.astype(np.float32) * product)
    np.testing.assert_array_equal(actual, plain)
    assert actual.dtype == np.float32


def test_planes_off_alignment_and_without_scales() -> None:
    q, k = matrix(3, 96), matrix(4, 96, seed=1)
    room = np.empty(q.planes.size + 1, np.uint8)
    room[1:] = q.planes.ravel()
    one = np.ones(1, np.float32)
    with emulator():
        actual = ternary_scores_forward(room[1:].reshape(q.planes.shape), k.planes, one, one)
    np.testing.assert_array_equal(actual, q.codes.astype(int) @ k.codes.T.astype(int))


def test_wrong_calls() -> None:
    q = matrix(3, 96)
    with pytest.raises(DTypeError, match="k is ndarray, not a Ternary"):
        uc.ternary_scores(q, np.ones((3, 96)))
    with pytest.raises(ShapeError, match=r"q is \(3, 96\) and k is \(3, 95\)"):
        uc.ternary_scores(q, matrix(3, 95))
    grouped = uc.ternary_quantize(np.ones((3, 96)), per="group", group=32)
    with pytest.raises(ConfigError, match="q has a scale for 32 columns; quantize it per='row'"):
        uc.ternary_scores(grouped, q)
