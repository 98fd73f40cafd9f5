"""Rotated keys, and values, where a cache has them: kernel, definition and two ops agree."""

import numpy as np

from unsloth_cupy.ops.attention.rope_append import rope_append_

from ..harness.parity import Case, KernelParity, emulator

SMALL = {"batch": 2, "pages": 2, "heads": 4, "kv_heads": 2, "dim": 16, "length": 40, "half": 8}


class TestRopeAppend(KernelParity):
    op = "rope_append_"
    sizes = ({"pages": 4, "page": 16, "batch": 4, "row_pages": 1},)
    cases = (
        Case("a step", **SMALL, tokens=1, page=9, arrays={"starts": [4, 8]}, given=["positions"]),
        Case("rows apart", **SMALL, tokens=4, page=7, sinks=2, arrays={"starts": [0, 31]}),
        Case("more than the ring", **SMALL, tokens=9, page=5, sinks=1, arrays={"starts": [0, 2]}),
        Case("sinks alone", **SMALL, tokens=4, page=3, sinks=3, arrays={"starts": [1, 0]}),
        Case(
            "part of a head",
            **SMALL | {"half": 3, "dim": 9},
            tokens=2,
            page=8,
            arrays={"starts": np.array([-1, 6], np.int32)},
        ),
        *(
            Case(
                f"pages of {page}",
                **SMALL | {"pages": 9},
                tokens=tokens,
                page=page,
                arrays={"page_table": table, "starts": starts},
                given=["positions"],
            )
            for page, tokens, table, starts in (
                (1, 1, [[8, 0, 6], [2, 7, 4]], [2, 0]),
                (3, 5, np.array([[2, 5, 8], [0, 4, -1]], np.int32), [2, -1]),
                (4, 1, [[3, 9], [6, -1]], np.array([5, 4], np.int32)),  # neither has a page
            )
        ),
    )
    test_gradient_matches_finite_differences = None  # it changes a cache
    test_any_strides = None  # below


def test_slices_of_one_array_are_read_where_they_lie() -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((2, 1, 8 * 16), np.float32)
    q, k, v = (
        whole[..., a * 16 : b * 16].reshape(2, 1, -1, 16) for a, b in ((0, 4), (4, 6), (6, 8))
    )
    cos, sin = rng.standard_normal((2, 40, 8), np.float32)
    starts, positions = np.array([3, 7]), np.array([[2], [39]])
    results = []
    for target in (emulator, None):
        keys, values = np.zeros((2, 2, 9, 2, 16), np.float32)
        for _ in range(1 if target is None else 3):
            if target is None:
                made = rope_append_(q, k, v, cos, sin, keys, values, starts, positions)
            else:
                with target():
                    made = rope_append_(q, k, v, cos, sin, keys, values, starts, positions)
        results.append([made[0], keys, values])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
