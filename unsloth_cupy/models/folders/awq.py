"""Weights of AWQ: qweight (inputs, outputs / 8), qzeros, scales."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from .foreign import ANY, HOW, Weight, scaled, unpacked

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 columns is in the i-th lowest 4 bits of an int32
BACKENDS = (  # kernels for this format; the format of llm-awq differs
    *("auto", "autoawq", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm"),
    *("gemm_triton", "torch_awq", "torch_fused_awq"),
)
KEYS: Mapping[str, Any] = {
    **HOW,
    **dict.fromkeys(("bits", "w_bit"), (4,)),
    **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM")),
    "zero_point": (True,),
    "backend": BACKENDS,
    **dict.fromkeys(("q_group_size", "modules_to_not_convert", "do_fuse"), ANY),
    **dict.fromkeys(("fuse_max_seq_len", "modules_to_fuse"), ANY),
}


def reader(weight: Weight) -> "partial[Array]":
    """Return the function that computes the dense weight from its tensors."""
    outputs, inputs = weight.shape
    groups = weight.parts["scales"].shape[0]
    places = weight.places(1, groups, weight.values_of("group_size", "q_group_size", default=128))
    weight.check("scales", (groups, outputs))
    weight.check("qweight", (inputs, outputs // 8))
    weight.check("qzeros", (groups, outputs // 8))
    return partial(_of_awq, outputs=outputs, columns=places, label="4 bits")


def _of_awq(state: Mapping[str, Array], *, outputs: int, columns: Array, label: str) -> Array:
    """Return the dense weight; each int32 holds 8 columns in the order ``ORDER``."""
    back = np.argsort(ORDER)

    def ordered(packed: Array) -> Array:
        codes = unpacked(packed, 4, outputs)
        codes = codes.reshape(len(codes), -1, 8)[:, :, back]  # (rows, outputs / 8, 8)
        return codes.reshape(len(codes), -1)  # (rows, outputs)

    codes, zeros = ordered(state["weight"]), ordered(state["qzeros"])
    return scaled(codes.T, state["scales"].T, zeros.T, np.arange(outputs), columns)
