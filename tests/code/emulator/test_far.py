"""Arrays of more than 2^31 elements: every kernel's offsets have 64 bits.

Memory that nobody touches costs nothing, and only the last blocks of a grid run.
"""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import embedding, rms_norm_backward, rms_norm_forward
from unsloth_cupy.core.target import Limits
from unsloth_cupy.ops.norms import _norm

from ...harness.parity import compare_far, emulator, sparse

ROW = {"hidden": 1024, "columns": 1024, "vocab": 1024}


@pytest.mark.slow
@pytest.mark.parametrize(
    "op",
    [
        "add",
        "multiply",
        "multiply_backward",
        "scale",
        "swiglu",
        "swiglu_backward",
        "geglu",
        "geglu_backward",
        "relu2",
        "relu2_backward",
        "softmax",
        "softmax_backward",
        "rms_norm_forward",
        "layer_norm_forward",
        "cross_entropy_forward",
        "cross_entropy_backward",
    ],
)
def test_the_last_rows(op: str) -> None:
    options = {"factor": 2.0} if op == "scale" else {}
    arrays = {"labels": np.array([5, 0, 1023])} if op.startswith("cross") else {}
    compare_far(op, 1024, arrays=arrays, **ROW, **options)


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_the_last_rows_of_clusters(op: str) -> None:
    compare_far(op, 16392, columns=16392)


def test_the_last_tokens_turn() -> None:
    compare_far("rope", 8 * 128, tokens=1, heads=8, dim=128, length=1, half=64)


@pytest.mark.parametrize("op", ["rms_norm_backward", "layer_norm_backward"])
def test_the_last_rows_backward(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU so wide that its blocks walk one step each; only what they write to dx."""
    wide = Limits(90, 48 << 10, 1 << 22)
    monkeypatch.setattr(_norm, "limits", lambda like: wide)
    monkeypatch.setattr(_norm, "column_sums", lambda *args: None)
    compare_far(op, 64, hidden=64)


def test_rows_far_apart_are_read_where_they_lie() -> None:
    """Three rows in an array of 2^33 bytes and more: no copy of it could be made."""
    rng = np.random.default_rng(0)
    wide, step = sparse((3, 2**31 + 64), np.float16), slice(2**31 - 64, 2**31)
    wide[:, step] = rng.standard_normal((3, 64))
    x, weight = wide[:, step], np.ones(64, np.float16)
    dy = rng.standard_normal((3, 64)).astype(np.float16)
    results: list[Any] = []
    for array in (x, x.copy()):
        with emulator():
            y, h, rstd = rms_norm_forward(array, weight)
            results.append((y, rstd, *rms_norm_backward(dy, None, h, weight, None, None, rstd)[:2]))
    assert np.shares_memory(h, results[1][0]) is False
    for far, near in zip(*results, strict=True):
        np.testing.assert_array_equal(far, near)


def test_embedding_looks_up_the_last_tokens() -> None:
    weight = sparse((2**21 + 3, 1024), np.float16)
    weight[-3:] = np.arange(3 * 1024).reshape(3, 1024) % 2048
    tokens = np.array([2**21 + 2, 2**21, 2**21 + 1])
    with emulator():
        np.testing.assert_array_equal(embedding(tokens, weight), weight[tokens])
