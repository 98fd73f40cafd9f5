"""Weights of FP8: weight (outputs, inputs) in e4m3, weight_scale_inv or weight_scale."""

from collections.abc import Mapping
from typing import Any

from .foreign import ANY

PARTS = {  # by quant_method
    "fp8": ("weight_scale_inv", "weight_scale"),
    "fbgemm_fp8": ("weight_scale",),
}
KEYS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
        **dict.fromkeys(("activation_scheme", "weight_block_size", "dequantize"), ANY),
        **dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers"), ANY),
    },
    "fbgemm_fp8": dict.fromkeys(("activation_scale_ub", "modules_to_not_convert"), ANY),
}
