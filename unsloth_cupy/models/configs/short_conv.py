"""Layers with a short convolution, between two gates, in place of attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RELEASED = {  # keys of released LFM2 models, and transformers' names
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
    "rms_norm_eps": "norm_eps",
}
LFM: Mapping[str, Any] = {
    **{"norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "layer_types": None},
    **{"num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True},
    **{"full_attn_idxs": None, "max_position_embeddings": 128_000},
}
LFM_FACTS: Mapping[str, Any] = {  # keys of released models that transformers does not read
    **dict.fromkeys(("block_dim", "block_norm_eps", "block_use_swiglu", "use_pos_enc"), ...),
    **dict.fromkeys(("block_mlp_init_scale", "block_out_init_scale", "theta", "num_heads"), ...),
    **dict.fromkeys(("block_use_xavier_init", "conv_use_xavier_init"), ...),
    **dict.fromkeys(("conv_dim", "conv_dim_out"), ...),
}


@dataclass(frozen=True)
class ShortConv:
    """Layers with a short convolution.

    taps    of the convolution
    bias    whether the convolution and both projections have a bias
    """

    taps: int
    bias: bool

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        shapes: dict[str, tuple[int, ...]] = {
            "conv": (hidden, 1, self.taps),
            "in_proj": (3 * hidden, hidden),
            "out_proj": (hidden, hidden),
        }
        for name, shape in shapes.items():
            yield f"{name}.weight", shape
            if self.bias:
                yield f"{name}.bias", shape[:1]
