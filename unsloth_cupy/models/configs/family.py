"""What a family of models has that its config.json does not state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import Norms, Structure
from .mixtures import Mixture

AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
LAYER = Norms(kind="layer", biases=True)


@dataclass(frozen=True)
class Family(Structure):
    """One model type.  ``defaults`` are the values of keys that a config.json may leave out.

    A property that a string names is the value of that key.  ``windows`` says which layers see
    only a window of keys: none, all, flagged (all if use_sliding_window), the late ones (from
    max_window_layers on), every second one of the early ones, or most (all but every
    sliding_window_pattern-th); with linear all but every full_attention_interval-th have no
    attention.  ``rotates`` says which layers rotate queries and keys: all, those that
    no_rope_layers lists with 1, the sliding ones, these where there is a window, all where
    rope_theta is not null, or position_embedding_type is rope; or none.  ``facts`` are keys that
    say what the family has anyway; ... stands for any value.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"  # none, all, flagged, late, early or most
    eps: str | float = "rms_norm_eps"
    scaled_embedding: bool = False
    query_key_norm: str | None = None
    query_key_if: str | bool = True
    query_key_biases: bool = False
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    head_bias: str | bool = False
    interleaved: str | bool = False
    local: bool = False  # sliding layers keep their positions where rope_scaling stretches others
    of_rope: tuple[str, ...] = ()  # keys of rope_parameters that it alone reads
    partial: bool = False  # partial_rotary_factor also counts where rope_type is default
    rotates: str = "all"  # all, listed, sliding, windowed, by_theta or none
    parallel: str | bool = False
    obeys: tuple[str, ...] = ()  # keys that scale, cap or clip, if it reads them
    facts: Mapping[str, Any] = field(default_factory=dict)
    experts: Mixture | None = None
    delta: str | None = None  # ``Delta.stored`` of layers with a delta rule
    space: Mapping[str, str] | None = None  # keys of layers with a recurrence of Mamba2
    space_beside: bool = False  # beside attention in every layer
    inner: str = "intermediate_size"  # of dense layers
    activation: str = "hidden_act"
    latent: bool = False  # attention with short vectors of keys and values
