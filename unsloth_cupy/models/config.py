"""The ``Config`` of a decoder-only transformer: settings that replace one class per family."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .names import TEXT

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary positions of some layers.

    The first ``dim`` elements of each head are rotated.  ``scaling`` is the argument of
    ``rope_tables``.  In sequences longer than ``original``, the angles of every position depend on
    the length of the sequence (dynamic and longrope); None where they never do.
    """

    dim: int
    base: float
    scaling: Mapping[str, Any] | None = None
    original: int | None = None


@dataclass(frozen=True)
class Norms:
    """Names of the norms around the two branches of a block; None: there is no such norm.

    h = x + after_attention(attention(before_attention(x)))
    y = h + after_mlp(mlp(before_mlp(h)))
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer.

    ``window`` is the number of keys that a query of a sliding layer sees, its own included.
    ``query_key_norm`` is "head" (one weight for every head), "projection" (over all heads) or
    None.  ``fused`` checkpoints store q, k, v in one matrix, and gate, up in another.  With
    ``bit_layers`` all linear layers but the head are ``bit_linear``: weights are rounded at every
    call.  With ``inverse_scales`` the checkpoint's ternary weights are codes / scale, not
    codes * scale.  ``body`` is what transformers' model has before the names of the body's
    modules: another prefix in a model that reads images.  ``head`` is one of ``heads.HEADS``; only
    that of a language model can be ``tied``.
    """

    model_type: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    activation: str  # silu, gelu_tanh, gelu or relu2
    layer_types: tuple[str, ...]
    window: int | None
    ropes: Mapping[str, Rope]  # by layer type
    scale: float
    softcap: float | None
    logit_softcap: float | None
    norms: Norms
    norm_offset: float
    query_key_norm: str | None
    embedding_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    fused: bool
    sub_norms: bool
    tied: bool
    initializer_range: float
    positions: int
    end_tokens: tuple[int, ...] = ()
    pad_token: int | None = None
    bit_layers: bool = False
    inverse_scales: bool = False
    body: str = TEXT
    head: str = "causal_lm"
    labels: int = 0  # outputs of a classifier

    def window_of(self, layer: int) -> int | None:
        """Return how many keys a query of this layer sees, its own included; None: all."""
        return self.window if self.layer_types[layer] == SLIDING else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            for name, shape in self._block_shapes():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (self.hidden,)
        if self.head == "causal_lm" and not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        if self.labels:
            shapes["score.weight"] = (self.labels, self.hidden)
        if self.head == "token_classification":
            shapes["score.bias"] = (self.labels,)
        return shapes

    def _block_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name inside of a block and the shape of each parameter of a block."""
        hidden, inner = self.hidden, self.inner
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        if self.fused:
            yield "self_attn.qkv_proj.weight", (queries + 2 * keys, hidden)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            if not self.fused:
                yield f"self_attn.{name}_proj.weight", (size, hidden)
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (size,)
        yield "self_attn.o_proj.weight", (hidden, queries)
        if self.output_bias:
            yield "self_attn.o_proj.bias", (hidden,)
        if self.query_key_norm:
            all_heads = self.query_key_norm == "projection"
            yield "self_attn.q_norm.weight", (queries if all_heads else self.dim,)
            yield "self_attn.k_norm.weight", (keys if all_heads else self.dim,)
        if self.fused:
            yield "mlp.gate_up_proj.weight", (2 * inner, hidden)
        else:
            yield "mlp.gate_proj.weight", (inner, hidden)
            yield "mlp.up_proj.weight", (inner, hidden)
        yield "mlp.down_proj.weight", (hidden, inner)
        if self.mlp_bias:
            yield "mlp.gate_proj.bias", (inner,)
            yield "mlp.up_proj.bias", (inner,)
            yield "mlp.down_proj.bias", (hidden,)
        if self.sub_norms:
            yield "self_attn.attn_sub_norm.weight", (queries,)
            yield "mlp.ffn_sub_norm.weight", (inner,)
        norms = self.norms
        for norm in (
            norms.before_attention,
            norms.after_attention,
            norms.before_mlp,
            norms.after_mlp,
        ):
            if norm:
                yield f"{norm}.weight", (hidden,)
