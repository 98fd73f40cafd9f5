import re
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError

from ..code.emulator.test_traffic import global_bytes
from ..harness.parity import Case, KernelAlone, KernelParity, emulator, launched, within_rule
from .golden_cases import agree
from .test_cross_entropy import reported

# The public names, as other people's programs call them.
PUBLIC = (
    "qk_norm_rope(q, k, q_weight, k_weight, cos, sin, positions=None, *, eps=1e-06, "
    "offset=0.0, interleaved=False)",
)

SIZES: dict[str, Any] = {
    **{"batch": 2, "tokens": 3, "heads": 4, "kv_heads": 2},
    **{"dim": 64, "length": 5, "half": 32},
}
ROW = np.array([4, 0, 2])


class TestQKNormRope(KernelParity):
    op = "qk_norm_rope_forward"
    sizes = tuple(
        {"heads": 32, "kv_heads": 8, "dim": dim, "half": dim // 2} for dim in (64, 128, 256)
    )
    cases = (
        Case("tokens in order", **SIZES),
        Case("positions of each row", **SIZES, given=["positions"], eps=0.5, offset=1.0),
        Case(
            "positions for all rows",
            **SIZES | {"heads": 5, "dim": 7, "half": 3},
            arrays={"positions": ROW},
        ),
        Case("neighbours", **SIZES | {"heads": 3}, given=["positions"], interleaved=True),
        Case("part of a head", **SIZES | {"half": 8}),
        Case("neighbours, part", **SIZES | {"half": 2, "dim": 7}, interleaved=True),
        *(Case(f"heads of {n}", **SIZES | {"dim": n, "half": n // 2}) for n in (4, 16, 17, 24)),
        Case("a group of threads half full", **SIZES | {"heads": 1, "dim": 24, "half": 8}),
        Case("slices", **SIZES, given=["positions"], gaps=True),
        Case("no tokens", **SIZES | {"tokens": 0}),
        Case("no pairs", **SIZES | {"half": 0, "dim": 1}),
    )


class TestQKNormRopeWide(KernelParity):
    op = "qk_norm_rope_forward"
    cases = (
        Case("warps walk tokens", **SIZES | {"tokens": 37, "length": 37, "kv_heads": 1}),
        Case("threads walk a head", **SIZES | {"heads": 9, "dim": 402, "half": 201}),
        Case("no kernel", **SIZES | {"tokens": 1, "half": 0, "dim": 520}),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold


def _arrays(dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 4, 8), (2, 3, 2, 8), (8,), (8,)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_equals_the_norm_and_the_turn() -> None:
    arrays = [*_arrays(), *uc.rope_tables(9, 6)]

    def apart(q: Any, k: Any, q_weight: Any, k_weight: Any, *tables: Any) -> dict[str, Any]:
        normed = [uc.rms_norm(x, w, eps=1e-5) for x, w in ((q, q_weight), (k, k_weight))]
        return dict(zip("qk", uc.rope_qk(*normed, *tables, ROW), strict=True))

    actual = uc.qk_norm_rope(*arrays, ROW, eps=1e-5)
    exact = apart(*(array.astype(np.float64) for array in arrays))
    within_rule(apart(*arrays), exact, dict(zip("qk", actual, strict=True)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_transformers(family: str) -> None:
    """The norm and the rotation of a layer of Hugging Face, and their gradients."""
    torch = pytest.importorskip("torch", reason="transformers computes with it")
    pytest.importorskip("transformers", reason="the peer of qk_norm_rope")
    module = __import__(
        f"transformers.models.{family}.modeling_{family}", fromlist=["apply_rotary_pos_emb"]
    )
    (q, k, *weights), (cos, sin) = _arrays(), uc.rope_tables(3, 8)
    make = getattr(module, {"qwen3": "Qwen3RMSNorm", "gemma3": "Gemma3RMSNorm"}[family])
    norms = [make(8, eps=1e-6) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data = torch.from_numpy(weight.copy())
    theirs = [torch.tensor(x, requires_grad=True) for x in (q, k)]
    normed = [norm(x).transpose(1, 2) for norm, x in zip(norms, theirs, strict=True)]
    wide = (torch.from_numpy(np.concatenate([t, t], axis=1))[None] for t in (cos, sin))
    turned = [x.transpose(1, 2) for x in module.apply_rotary_pos_emb(*normed, *wide)]
    seeds = [np.random.default_rng(1).standard_normal(x.shape, np.float32) for x in (q, k)]
    torch.autograd.backward(turned, [torch.from_numpy(seed) for seed in seeds])

    offset = float(family == "gemma3")
    inputs = (q, k, *weights, cos, sin)
    *actual, q_rstd, k_rstd = uc.qk_norm_rope_forward(*inputs, offset=offset)
    for mine, their in zip(actual, turned, strict=True):
        agree(mine, their.detach().numpy())
    back = uc.qk_norm_rope_backward(*seeds, *inputs, None, q_rstd, k_rstd, offset=offset)
    for mine, their in zip(back, [*theirs, *(norm.weight for norm in norms)], strict=False):
        agree(mine, their.grad.numpy())
    assert back[4:] == (None, None, None)


class TestPositionOutsideTheTables(KernelAlone):
    """A GPU's positions are not read by the host: such a token, alone, is NaN and reported."""

    op = "qk_norm_rope_forward"
    cases = (Case("before and behind"),)

    def prove(self, case: Case, dtype: Any) -> None:
        arrays, tables = _arrays(dtype), uc.rope_tables(9, 8)
        with emulator():
            outside = launched(self.op, *arrays, *tables, np.array([9, 1, -1]))
            said = r"^qk_norm_rope: positions holds (9 in row 0|-1 in row 2); it must be in 0 .. 8"
            assert re.search(said, reported())
            inside = launched(self.op, *arrays, *tables, np.array([0, 1, 0]))
            assert reported() == ""
        for actual, expected in zip(outside[:2], inside[:2], strict=True):
            lost = np.isnan(actual.astype(np.float32)).all(axis=(2, 3))
            np.testing.assert_array_equal(lost, [[True, False, True]] * 2)
            np.testing.assert_array_equal(actual[:, 1], expected[:, 1])


def test_wrong_calls() -> None:
    (q, k, *weights), tables = _arrays(), uc.rope_tables(9, 8)
    with pytest.raises(ConfigError, match="eps must be 0 or more"):
        uc.qk_norm_rope(q, k, *weights, *tables, eps=-1.0)
    with pytest.raises(ShapeError, match="k_weight has dim=7; it must be 8"):
        uc.qk_norm_rope(q, k, weights[0], weights[1][:7], *tables)
    with pytest.raises(ShapeError, match="rotates 10 columns"):
        uc.qk_norm_rope(q, k, *weights, *uc.rope_tables(9, 10))
    with pytest.raises(DTypeError, match="q_weight is float64; it must be float32"):
        uc.qk_norm_rope(q, k, weights[0].astype(float), weights[1], *tables)
    with pytest.raises(RangeError, match=r"positions holds 9; it must be in 0 .. 8"):
        uc.qk_norm_rope(q, k, *weights, *tables, np.array([0, 9, 1]))
    with pytest.raises(RangeError, match=r"make tables with rope_tables\(3, 8\)"):
        uc.qk_norm_rope(q, k, *weights, *uc.rope_tables(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_moves_what_its_header_says(dtype: Any) -> None:
    """Beside that, out of L1: weights, once a token forward, once for each round of heads back."""
    rng, tokens = np.random.default_rng(0), 6
    q, k = (rng.standard_normal((1, tokens, heads, 128)).astype(dtype) for heads in (4, 4))
    weights = np.ones((2, 128), dtype)
    tables = [table.astype(dtype) for table in uc.rope_tables(tokens, 128)]
    inputs = (q, k, *weights, *tables, None)
    *turned, q_rstd, k_rstd = uc.qk_norm_rope_forward(*inputs)
    heads = q.nbytes + k.nbytes
    shared = sum(array.nbytes for array in (*tables, q_rstd, k_rstd))
    expected = 2 * heads + shared + tokens * weights.nbytes
    assert global_bytes(lambda: uc.qk_norm_rope_forward(*inputs)) == expected

    rounds, blocks = 4 * q.itemsize // 8, 2  # of 32 lanes a head takes 8 in 16 bits, 16 in 32
    sums = 2 * (2 * blocks * 128 * 4) + weights.nbytes  # written, and read by column_sum
    expected = 3 * heads + shared + rounds * tokens * weights.nbytes + sums
    assert (
        global_bytes(lambda: uc.qk_norm_rope_backward(*turned, *inputs, q_rstd, k_rstd)) == expected
    )
