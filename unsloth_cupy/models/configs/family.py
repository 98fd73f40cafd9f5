"""Properties of a model family that config.json does not contain."""

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
    """The properties of one model type.

    A property of type ``str | bool`` or ``str | float`` may name a key of config.json, whose value
    then counts.  ``windows`` chooses the layers in which queries attend to a window of keys, if
    sliding_window is set; layer_types has priority, except with none, all and flagged:

    none        no layer
    all         all layers
    flagged     all layers if use_sliding_window is true
    late        layers from max_window_layers on, if use_sliding_window is true
    early       every second layer before max_window_layers, if use_sliding_window is true
    unrotated   layers without rotation, if use_sliding_window is true
    most        all layers except every sliding_window_pattern-th
    named       all layers, without layer_types
    chunked     no layer; layers with rotation have chunks of attention_chunk_size positions
    linear      no layer; all layers except every full_attention_interval-th have no attention, or
                only every attn_layer_period-th, from attn_layer_offset on, has it
    typed       as layer_types says, which may also list layers without attention

    ``rotates`` chooses the layers that rotate queries and keys:

    all         all layers
    listed      layers with a 1 in no_rope_layers
    sliding     layers with a window
    windowed    layers with a window, or all layers if no layer has one
    by_theta    all layers unless rope_theta is null
    by_type     all layers if position_embedding_type is rope
    none        no layer
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be absent
    windows: str = "none"
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
    local: bool = False  # rope_scaling does not apply to sliding layers
    of_rope: tuple[str, ...] = ()  # keys of rope_parameters that only this family reads
    partial: bool = False  # partial_rotary_factor also applies if rope_type is default
    rotates: str = "all"
    parallel: str | bool = False
    factors: tuple[str, ...] = ()  # keys that scale, cap or clip, which the family applies
    # allowed values of keys that are not read; ``...`` allows any value
    facts: Mapping[str, Any] = field(default_factory=dict)
    experts: Mixture | None = None
    delta: str | None = None  # ``Delta.stored`` of layers with a delta rule
    space: Mapping[str, str] | None = None  # keys of layers with the recurrence of Mamba2
    space_beside: bool = False  # every layer has both this recurrence and attention
    inner: str = "intermediate_size"  # key of the inner size of dense layers
    activation: str = "hidden_act"
    gate_if: str | None = None  # key that says whether heads have a gate: see ``head_gate``
    around_if: str | None = None  # key that says whether norms after branches exist
    norm_bias_if: str | None = None  # key that says whether norms have biases
    encoder: bool = False  # without a causal mask, and without a head of a language model
    # what a classifier computes from states: "score", a product; "pooler", tanh(dense(first)) and
    # then score; "head", norm(act(dense(pooled))) and then score
    classifier: str = "score"
    learned: bool = False  # tables of positions and of token types are added to embeddings
    lightning: bool = False  # some layers have lightning attention
    mamba: Mapping[str, str] | None = None  # keys of layers with the recurrence of Mamba
    mamba_norms: bool = False  # short vectors, b and c of these layers have norms
    conv: bool = False  # some layers have a short convolution in place of attention

    @property
    def recurrent(self) -> bool:
        """Whether some layers may have recurrent states."""
        rules = self.delta, self.space, self.mamba
        return any(rule is not None for rule in rules) or self.conv or self.lightning

    latent: bool = False  # latent attention
    scaled_latents: bool = False  # queries and short vectors have factors: see ``latent_of``
    indexer: str | None = None  # of sparse attention; it rotates "halves" or "pairs"
    scaled_scores: bool = True  # scores are divided by the root of the head dimension
    by_layer: bool = False  # keys of Gemma 4 about single layers: see ``gemma4_config``
    radius: bool = False  # sliding_window is the distance that queries see on both sides
    projected: str | None = None  # key of the length of states after a last projection
