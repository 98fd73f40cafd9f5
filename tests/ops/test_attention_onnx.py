"""ONNX's own cases of its Attention, in the words of this library's options.

ONNX counts causal and windows from the first key, or from the end of the past, unless lengths are
given: ``query_start`` says so.  Its masks may be narrower than the keys; the rest is hidden.
"""

import math
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    KVCache,
    attention,
    attention_backward,
    attention_forward,
    attention_paged,
)
from unsloth_cupy.core.dtypes import BFLOAT16

from ..golden.golden import OpCase
from ..harness.parity import emulator, within_rule
from .golden_cases import agree, both_dtypes, golden

GROUP = "onnx_attention"
DTYPES = {"float16": np.dtype("float16"), "bfloat16": BFLOAT16, "float32": np.dtype("float32")}
PAST = "4d_causal_with_past", "local_window_with_past", "4d_gqa_with_past"
PAGED = "4d_causal_nonpad_batch", "4d_causal_nonpad_neg", "4d_gqa_causal_nonpad"
WITH_KERNELS = (
    "4d_causal_nonpad_attn_mask",
    "4d_causal_padded_kv",
    "4d_gqa_causal_nonpad",
    "4d_softcap_neginf",
    "local_window_ext_cache",
)
NAMES = "q", "k", "v", "bias"  # whose gradients are compared


def in_order(array: np.ndarray, heads: int | None) -> np.ndarray:
    """Return (batch, tokens, heads, dim) of what has heads first, or side by side."""
    if heads is not None:
        return array.reshape(*array.shape[:2], heads, -1)
    return array.transpose(0, 2, 1, 3)


def call(case: OpCase, dtype: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return q, k and v, with the past before them, and the options of attention."""
    inputs = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in case.inputs.items()}
    params = case.params
    heads = [params.get(f"{side}_num_heads") for side in ("q", "kv", "kv")]
    q, k, v = (in_order(inputs[name], n) for name, n in zip("QKV", heads, strict=True))
    options: dict[str, Any] = {n: params[n] for n in ("scale", "softcap") if n in params}
    options["causal"] = bool(params.get("is_causal"))
    past = inputs.get("past_key")
    if past is not None:
        before = (in_order(inputs[name], None) for name in ("past_key", "past_value"))
        k, v = (np.concatenate(both, axis=1) for both in zip(before, (k, v), strict=True))
    sides = (params.get(f"{side}_window_size", -1) for side in ("left", "right"))
    options["window"] = tuple(None if n < 0 else n for n in sides)
    if "nonpad_kv_seqlen" in inputs:  # the last query then stands at the last key, as here
        options["key_lengths"] = inputs["nonpad_kv_seqlen"]
    else:
        options["query_start"] = 0 if past is None else past.shape[2]
    if (mask := inputs.get("attn_mask")) is not None:
        hidden = False if mask.dtype == bool else -math.inf
        width = [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[1] - mask.shape[-1])]
        options["mask" if mask.dtype == bool else "bias"] = np.pad(
            mask, width, constant_values=hidden
        )
    return [q, k, v], options


def expected(case: OpCase) -> np.ndarray:
    return in_order(case.outputs["Y"], case.params.get("q_num_heads"))


@both_dtypes
@golden(GROUP, "")
def test_golden(golden: OpCase, dtype: Any) -> None:
    arrays, options = call(golden, dtype)
    agree(attention(*arrays, **options), expected(golden))


@golden(GROUP, *PAST)
def test_past_in_a_cache(golden: OpCase) -> None:
    """The past is what a cache holds, and what ONNX returns as present is what append returns."""
    (q, k, v), options = call(golden, np.float32)
    past = options["query_start"]
    cache = KVCache(1, k.shape[0], k.shape[1], *k.shape[2:], dtype="float32")
    for part in (slice(0, past), slice(past, None)):
        keys, values = cache.append(0, k[:, part], v[:, part])
    np.testing.assert_array_equal(keys, k)
    agree(attention(q, keys, values, **options), expected(golden))


@golden(GROUP, *PAGED)
def test_external_cache_in_pages(golden: OpCase) -> None:
    """A cache of fixed size with lengths is one in pages, in any order."""
    (q, k, v), options = call(golden, np.float32)
    lengths, page = options.pop("key_lengths"), 2
    batch, keys = k.shape[:2]
    count = batch * keys // page
    order = np.random.default_rng(0).permutation(count)
    k_pages, v_pages = (np.empty((count, page, *a.shape[2:]), a.dtype) for a in (k, v))
    for pages, array in ((k_pages, k), (v_pages, v)):
        pages[order] = array.reshape(pages.shape)
    out = attention_paged(q, k_pages, v_pages, order.reshape(batch, -1), lengths, **options)
    agree(out, expected(golden))


@pytest.mark.slow
@golden(GROUP, *WITH_KERNELS)
def test_emulated_kernels(golden: OpCase) -> None:
    """Kernels are as near to ONNX's result as the definition, and to the exact gradients."""
    arrays, options = call(golden, DTYPES[golden.params["dtype"]])
    wide, wide_options = call(golden, np.float64)
    plain, exact = attention_forward(*arrays, **options), attention_forward(*wide, **wide_options)
    with emulator():
        actual = attention_forward(*arrays, **options)
    within_rule(named(plain), named((expected(golden), exact[1])), named(actual))
    dout = np.random.default_rng(0).standard_normal(plain[0].shape).astype(plain[0].dtype)
    with emulator():
        moved = gradients(dout, arrays, plain, options)
    slopes = gradients(dout.astype(np.float64), wide, exact, wide_options)
    within_rule(gradients(dout, arrays, plain, options), slopes, moved)


def named(outputs: Any) -> dict[str, np.ndarray]:
    return dict(zip(("out", "lse"), outputs, strict=True))


def gradients(dout: np.ndarray, arrays: Any, outputs: Any, options: Any) -> dict[str, Any]:
    every = zip(NAMES, attention_backward(dout, *arrays, *outputs, **options), strict=False)
    return {name: array for name, array in every if array is not None}
