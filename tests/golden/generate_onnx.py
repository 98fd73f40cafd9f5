"""Make the golden cases of ONNX's Attention: ``python -m tests.golden.generate_onnx``.

Needs onnx 1.23.2.  The inputs and attributes are those of its node tests, drawn with a seed; the
results are its reference implementation's in float64.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER, GROUP = Path(__file__).parent / "ops", "onnx_attention"
NAMES = (
    "3d_gqa_causal",
    "3d_local_window",
    "4d_attn_mask_bool_4d",
    "4d_causal",
    "4d_causal_nonpad_attn_mask_composition",
    "4d_causal_nonpad_batch_prefill",
    "4d_causal_nonpad_negative_offset_structural_empty",
    "4d_causal_padded_kv_bf16",
    "4d_causal_with_past_and_present",
    "4d_diff_heads_mask4d_padded_kv",
    "4d_diff_heads_with_past_and_present",
    "4d_gqa_causal_nonpad_decode_fp16",
    "4d_gqa_softcap",
    "4d_gqa_with_past_and_present_fp16",
    "4d_softcap_neginf_mask_poison",
    "bidirectional_window",
    "causal_boolmask_nan_robustness",
    "local_window_ext_cache_rank3_head_mask",
    "local_window_gqa_rank4_mask",
    "local_window_with_past",
)
UNUSED = ("qk_matmul_output_mode", "softmax_precision")  # of other outputs, and of other dtypes


def cast(array: Any, dtype: Any) -> Any:
    """Return floats in a dtype, and others as they are."""
    return array if array.dtype.kind in "bi" else array.astype(dtype)


def main() -> None:
    """Write ops/onnx_attention.npz and the group's entries of ops/index.json."""
    import onnx
    from onnx.backend.test.case.node import collect_testcases
    from onnx.reference.ops.op_attention import _compute_attention

    np.random.seed(0)  # noqa: NPY002  what the node tests draw from
    cases = {case.name: case for case in collect_testcases("Attention")}
    arrays, entries = {}, []
    for name in NAMES:
        case = cases[f"test_attention_{name}"]
        (node,), (given, _) = case.model.graph.node, case.data_sets[0]
        inputs = dict(zip(filter(None, node.input), given, strict=True))
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {n: value for n, value in attributes.items() if n not in UNUSED}
        wide = {n: cast(array, np.float64) for n, array in inputs.items()}
        y, *_ = _compute_attention(**wide, **attributes)
        dtype = inputs["Q"].dtype.name
        kept = np.float32 if dtype == "bfloat16" else dtype  # a file has no bfloat16
        arrays |= {f"{name}/in/{n}": cast(array, kept) for n, array in inputs.items()}
        arrays[f"{name}/out/Y"] = y
        entries.append({"group": GROUP, "case": name, "reference": "onnx Attention"})
        entries[-1]["params"] = attributes | {"dtype": dtype}
    np.savez_compressed(FOLDER / f"{GROUP}.npz", **arrays)
    index = FOLDER / "index.json"
    others = [e for e in json.loads(index.read_text()) if e["group"] != GROUP]
    index.write_text(json.dumps(others + entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
