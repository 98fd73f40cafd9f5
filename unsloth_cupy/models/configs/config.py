"""The ``Config`` of a decoder-only transformer: settings that replace one class per family."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.dtypes import BFLOAT16, FLOAT32, FLOATS
from .names import TEXT
from .state_space import StateSpace

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MLP = "mlp"  # a layer of that alone
# of the norms inside latent attention, and of the lengths of queries and keys of a delta rule,
# whatever that of the other norms is
INNER_EPS = 1e-6
BUFFERS = ("beta", "eps")  # numbers of xielu that are stored and do not learn
CORRECTION = "e_score_correction_bias"  # of a router's choice: it does not learn by gradients
STACKS, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")  # of experts
LATENT = ("fc1_latent_proj", "fc2_latent_proj")  # before and behind these


@dataclass(frozen=True)
class Rope:
    """Rotary positions of some layers.

    The first ``dim`` elements of each head are rotated.  ``scaling`` is the argument of
    ``rope_tables``.  In sequences longer than ``original``, the angles of every position depend on
    the length of the sequence (dynamic and longrope); None where they never do.  With ``growth``,
    (beta, length), queries at position p are scaled by 1 + beta log(1 + floor(p / length)).
    """

    dim: int
    base: float
    scaling: Mapping[str, Any] | None = None
    original: int | None = None
    growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class Norms:
    """Names of the norms around the two branches of a block; None: there is no such norm.

    h = x + after_attention(attention(before_attention(x)))
    y = h + after_mlp(mlp(before_mlp(h)))

    ``kind`` is "rms" or, with the mean subtracted, "layer".  A norm has ``weights``, to which the
    config's ``norm_offset`` is added, and ``biases``, or not.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    last: str = "norm"  # after all blocks
    kind: str = "rms"
    weights: bool = True
    biases: bool = False


@dataclass(frozen=True)
class Names:
    """Names of modules that families name differently."""

    output: str = "o_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    gate_up: str = "gate_up_proj"  # where one matrix has both
    attention: str = "self_attn"
    recurrent: str = "linear_attn"  # what layers without attention have


OWN_NAMES = Names()
BEFORE = Norms()


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a family's blocks have, whatever its config.json says: of ``Family`` and ``Config``.

    Queries and keys are normalised before the rotation unless ``rotated_first``.  ``fused`` lists
    what a checkpoint stores in one matrix: "qkv", and "mlp" for gate and up.  Without ``gate`` the
    MLP is down(activation(up(x))).  With ``sinks`` each head's attention has the score of a further
    key, without a value.  ``left_out`` are further layers in the files, which only predict several
    tokens at once.
    """

    norms: Norms = BEFORE
    norm_offset: float = 0.0
    rotated_first: bool = False
    fused: tuple[str, ...] = ()
    sub_norms: bool = False
    names: Names = OWN_NAMES
    gate: bool = True
    sinks: bool = False
    left_out: str = ""  # of the names of tensors in files: a pattern
    delta_norms: Norms | None = None  # of blocks with a delta rule, where other than ``norms``
    gated: bool = False  # the output of attention, by what its queries' projection has more
    single: bool = False  # a block has one branch: attention, a recurrence or an MLP
    wide: tuple[str, ...] = ()  # ends of names of parameters that 16 bits do not replace
    wide_in_float16: tuple[str, ...] = ()  # that float16 does not, and bfloat16 does


@dataclass(frozen=True)
class Experts:
    """The layers of a mixture of experts: a router chooses k of ``count`` experts for each token.

    ``inner`` is the inner size of an expert, ``sparse`` says which layers have experts; the others
    are dense.  ``scores``, ``normalize``, ``groups``, ``top_groups`` and ``scale`` are those of
    ``route``; with ``jitter`` the router is ``sparse_mixer``.  With ``corrected`` a bias is
    added for the choice; ``wide`` routers compute in float32.  ``limit`` and ``alpha`` are
    those of ``experts_mlp``.  ``shared`` is the inner size of an expert that every token has, with
    a gate of its own or not.  ``balance`` is the coefficient of the router's loss, 0 if it is off.
    With ``latent`` the experts, but neither router nor shared expert, see vectors of that length.
    ``files`` are the names of tensors in a layer of a released checkpoint where they differ, those
    of stacks with a place for the number of the expert; ``transposed`` stacks are stored as
    (experts, in, out), with the columns of gate and up in turns.
    """

    count: int
    k: int
    inner: int
    sparse: tuple[bool, ...]
    activation: str
    scores: str = "softmax"
    normalize: bool = True
    groups: int | None = None
    top_groups: int | None = None
    scale: float = 1.0
    jitter: float | None = None
    corrected: bool = False
    wide: bool = False
    biases: bool = False
    limit: float | None = None
    alpha: float | None = None
    shared: int = 0
    shared_gate: bool = False
    balance: float = 0.0
    module: str = "mlp"
    router: str = "gate"
    correction_in: str = "gate."  # what is before the name of the correction
    correction_row: bool = False  # files have it as the row of a matrix
    shared_in: str = "shared_experts"
    shared_beside: bool = False  # the shared expert is beside the module of the others
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    latent: int | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two stacks."""
        return UNGATED if self.activation == "relu2" else STACKS

    @property
    def shared_module(self) -> str:
        """The name of the shared expert in a layer."""
        return self.shared_in if self.shared_beside else f"{self.module}.{self.shared_in}"

    @property
    def clamps(self) -> dict[str, float]:
        """The options of a clamped activation."""
        pairs = {"limit": self.limit, "alpha": self.alpha}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def routers(self) -> tuple[str, str]:
        """The names of the modules that weigh experts: the router, the gate of the shared one."""
        return self.router, f"{self.shared_in}_gate"

    @property
    def wide_names(self) -> tuple[str, ...]:
        """The ends of the names of parameters that 16 bits do not replace."""
        router = f".{self.module}.{self.router}.weight"
        return (CORRECTION, router) if self.wide else (CORRECTION,)

    def stacks(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stacks of a layer, by their names in it."""
        width, rows = self.latent or hidden, (1 + (self.names is STACKS)) * self.inner
        sizes = (rows, width), (width, self.inner)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in zip(self.names, sizes, strict=True):
            shapes[f"{self.module}.experts.{name}"] = self.count, outputs, inputs
            if self.biases:
                shapes[f"{self.module}.experts.{name}_bias"] = self.count, outputs
        return shapes


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): keys and values of all heads come from one short vector of a token.

    Queries and keys have ``plain`` elements of a head, then ``rotated`` ones, of which the keys of
    all heads share one vector; values have ``value``.  ``rank`` is the length of the vector of keys
    and values, ``queries`` that of queries; None: they come from the hidden state.  ``biases``
    are those of what makes these vectors.
    """

    queries: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    biases: bool

    @property
    def dim(self) -> int:
        """The elements of a head of queries and keys."""
        return self.plain + self.rotated

    def shapes(self, heads: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters that make queries, keys and values."""
        rows = heads * self.dim
        if self.queries is None:
            yield "q_proj.weight", (rows, hidden)
        else:
            yield "q_a_proj.weight", (self.queries, hidden)
            yield "q_a_layernorm.weight", (self.queries,)
            yield "q_b_proj.weight", (rows, self.queries)
        yield "kv_a_proj_with_mqa.weight", (self.rank + self.rotated, hidden)
        yield "kv_a_layernorm.weight", (self.rank,)
        yield "kv_b_proj.weight", (heads * (self.plain + self.value), self.rank)
        if self.biases:
            yield "kv_a_proj_with_mqa.bias", (self.rank + self.rotated,)
        if self.biases and self.queries is not None:
            yield "q_a_proj.bias", (self.queries,)


@dataclass(frozen=True)
class Delta:
    """Layers with a gated delta rule, after a convolution with ``taps`` taps.

    Queries and keys have ``key_heads`` of ``key_dim``, values ``value_heads`` of ``value_dim``.
    The projections are ``stored`` "fused", head by head in two matrices, "split" in four, or
    "apart", each by itself.  ``short`` ones, each by itself, make the decay of every channel of a
    key, and the gate, of vectors as long as a head.  ``beta`` is at most ``most``; ``eps`` is that
    of the norm behind the rule, None: of all norms.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    stored: str  # fused, split, apart or short
    most: float = 1.0
    eps: float | None = None

    @property
    def projections(self) -> dict[str, int]:
        """The rows of the projections of a token, by their names."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        few = self.value_heads
        if self.stored == "short":
            sizes = {"q": keys, "k": keys, "v": values, "g_a": self.value_dim, "b": few}
            sizes |= {"forget_gate.f_a": self.key_dim}
            return {f"{name}_proj": size for name, size in sizes.items()}
        if self.stored == "apart":
            sizes = {"q": keys, "k": keys, "v": values, "g": values, "b": few, "a": few}
            return {f"{name}_proj": size for name, size in sizes.items()}
        sizes = {"qkv": 2 * keys + values, "z": values, "b": few, "a": few}
        if self.stored == "fused":
            sizes = {"qkvz": 2 * (keys + values), "ba": 2 * few}
        return {f"in_proj_{name}": size for name, size in sizes.items()}

    @property
    def after(self) -> tuple[str, str]:
        """The names of the norm and of the projection behind the rule."""
        apart = self.stored in ("apart", "short")
        return ("o_norm", "o_proj") if apart else ("norm", "out_proj")

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of a layer."""
        values, (norm, output) = self.value_heads * self.value_dim, self.after
        for name, size in self.projections.items():
            yield f"{name}.weight", (size, hidden)
        keys = self.key_heads * self.key_dim
        yield "conv1d.weight", (2 * keys + values, 1, self.taps)
        if self.stored == "short":
            yield "g_b_proj.weight", (values, self.value_dim)
            yield "forget_gate.f_b_proj.weight", (keys, self.key_dim)
            yield "forget_gate.A_log", (1, 1, self.value_heads, 1)
            yield "forget_gate.dt_bias", (keys,)
        else:
            yield from ((name, (self.value_heads,)) for name in ("A_log", "dt_bias"))
        yield f"{norm}.weight", (self.value_dim,)
        yield f"{output}.weight", (hidden, values)


@dataclass(frozen=True, kw_only=True)
class Config(Structure):
    """A decoder-only transformer.

    ``window`` is the number of keys that a query of a sliding layer sees, its own included.
    ``query_key_norm`` is "head" (one weight for every head), "heads" (a row of weights for each),
    "modules" (the same, in a module for each), "projection" (over all heads) or None; it has
    ``query_key_biases`` or not.
    ``rotated`` says which layers rotate queries and keys, ``interleaved`` which pairs: see
    ``rope``.  ``clip`` bounds queries, keys and values.  ``parallel`` blocks compute the MLP from
    the input of attention.  Branches are multiplied by ``residual_scale``, logits by
    ``logit_scale``.  With ``bit_layers`` all linear layers but the head are ``bit_linear``: weights
    are rounded at every call.  With ``inverse_scales`` the checkpoint's ternary weights are codes /
    scale, not codes * scale.  With ``latent`` queries, keys and values are made of short vectors;
    ``dim`` is then the length of heads in caches.  ``experts`` are those of a mixture.
    ``body`` is what transformers' model has before the names of the body's modules: another prefix
    in a model that reads images.  ``head`` is one of ``heads.HEADS``; only that of a language model
    can be ``tied``.
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
    activation: str  # silu, gelu_tanh, gelu, relu2 or xielu
    layer_types: tuple[str, ...]
    window: int | None
    ropes: Mapping[str, Rope]  # by layer type
    scale: float
    softcap: float | None
    logit_softcap: float | None
    query_key_norm: str | None
    embedding_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    initializer_range: float
    positions: int
    end_tokens: tuple[int, ...] = ()
    pad_token: int | None = None
    bit_layers: bool = False
    inverse_scales: bool = False
    body: str = TEXT
    rotated: tuple[bool, ...] = ()  # empty: all layers
    interleaved: bool = False
    query_key_biases: bool = False
    clip: float | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    delta: Delta | None = None  # of the layers of type LINEAR
    space: StateSpace | None = None  # of the layers of type LINEAR, or of all
    gate_scale: float = 1.0  # of an MLP
    down_scale: float = 1.0  # of its output
    attention_scales: tuple[float, float] = (1.0, 1.0)  # of its input and its output

    def rotates(self, layer: int) -> bool:
        """Return whether this layer rotates its queries and keys."""
        return not self.rotated or self.rotated[layer]

    head: str = "causal_lm"
    labels: int = 0  # outputs of a classifier

    def attends(self, layer: int) -> bool:
        """Return whether this layer has attention."""
        return self.layer_types[layer] not in (LINEAR, MLP)

    @property
    def balanced(self) -> bool:
        """Whether a router's loss is added to that of next tokens."""
        return self.experts is not None and self.experts.balance > 0 and any(self.experts.sparse)

    @property
    def recurrent(self) -> bool:
        """Whether some layers have states, which pass from token to token."""
        return self.delta is not None or self.space is not None

    @property
    def beside(self) -> bool:
        """Whether layers have a recurrence beside attention."""
        return self.space is not None and self.space.beside

    def norms_of(self, layer: int) -> Norms:
        """Return the norms of a block."""
        return self.delta_norms or self.norms if not self.attends(layer) else self.norms

    def window_of(self, layer: int) -> int | None:
        """Return how many keys a query of this layer sees, its own included; None: all."""
        return self.window if self.layer_types[layer] == SLIDING else None

    def widened(self, name: str) -> tuple[Any, ...]:
        """Return the dtypes in whose place a parameter has float32.

        As in transformers: 16 bits (``_keep_in_fp32_modules_strict``, or a parameter that its class
        creates in float32), float16 alone (``_keep_in_fp32_modules``), or none.
        """
        experts = () if self.experts is None else self.experts.wide_names
        if name.endswith((*self.wide, *experts)):
            return FLOATS[0], BFLOAT16
        return (FLOATS[0],) if name.endswith(self.wide_in_float16) else ()

    def dtype_of(self, name: str, dtype: Any) -> Any:
        """Return the dtype of a parameter of a model in a dtype."""
        return FLOAT32 if dtype in self.widened(name) else dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            for name, shape in self._block_shapes(layer):
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes |= self._norm_shapes(f"model.{self.norms.last}")
        if self.head == "causal_lm" and not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        if self.head == "causal_lm" and self.head_bias:
            shapes["lm_head.bias"] = (self.vocab,)
        if self.labels:
            shapes["score.weight"] = (self.labels, self.hidden)
        if self.head == "token_classification":
            shapes["score.bias"] = (self.labels,)
        return shapes

    def _norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a norm's parameters."""
        kinds = {"weight": self.norms.weights, "bias": self.norms.biases}
        return {f"{name}.{kind}": (self.hidden,) for kind, there in kinds.items() if there}

    def _block_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name inside of a block and the shape of each parameter of a block."""
        rule = self.delta or self.space
        if rule is not None and (self.beside or self.layer_types[layer] == LINEAR):
            module = self.names.recurrent
            yield from ((f"{module}.{name}", shape) for name, shape in rule.shapes(self.hidden))
        if self.attends(layer):
            yield from self._attention_shapes()
        if not self.single or self.layer_types[layer] == MLP:
            yield from self._feed_forward_shapes(layer)
        if self.activation == "xielu":
            yield from ((f"mlp.act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
            yield from ((f"mlp.act_fn.{name}", ()) for name in BUFFERS)
        if self.sub_norms:
            yield "self_attn.attn_sub_norm.weight", (self.heads * self.dim,)
            yield "mlp.ffn_sub_norm.weight", (self.inner,)
        norms = self.norms_of(layer)
        for norm in (
            norms.before_attention,
            norms.after_attention,
            norms.before_mlp,
            norms.after_mlp,
        ):
            if norm:
                yield from self._norm_shapes(norm).items()

    def _attention_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of attention."""
        names, latent, module = self.names, self.latent, self.names.attention
        queries = self.heads * (self.dim if latent is None else latent.value)
        if latent is None:
            yield from self._projection_shapes()
        else:
            for name, shape in latent.shapes(self.heads, self.hidden):
                yield f"{module}.{name}", shape
        yield f"{module}.{names.output}.weight", (self.hidden, queries)
        if self.output_bias:
            yield f"{module}.{names.output}.bias", (self.hidden,)
        for name, heads in ((names.query_norm, self.heads), (names.key_norm, self.kv_heads)):
            yield from self._query_key_shapes(f"{module}.{name}", heads)
        if self.sinks:
            yield f"{module}.sinks", (self.heads,)

    def _projection_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters that project a token into queries, keys and values."""
        module = self.names.attention
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        if "qkv" in self.fused:
            yield f"{module}.qkv_proj.weight", (queries + 2 * keys, self.hidden)
        for name, size in (("q", queries * (1 + self.gated)), ("k", keys), ("v", keys)):
            if "qkv" not in self.fused:
                yield f"{module}.{name}_proj.weight", (size, self.hidden)
            if self.qkv_bias:
                yield f"{module}.{name}_proj.bias", (size,)

    def _feed_forward_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of the MLP of a block, or of its experts."""
        if self.experts is not None and self.experts.sparse[layer]:
            yield from self._experts_shapes(self.experts)
        else:
            yield from self._mlp_shapes(self.names.mlp, self.inner)

    def _mlp_shapes(self, module: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of a dense MLP."""
        hidden, names = self.hidden, self.names
        projections = {names.gate_up: 2 * inner} if "mlp" in self.fused else {}
        projections |= {"gate_proj": inner} if self.gate and not projections else {}
        projections |= {} if "mlp" in self.fused else {names.up: inner}
        for name, size in projections.items():
            yield f"{module}.{name}.weight", (size, hidden)
        yield f"{module}.{names.down}.weight", (hidden, inner)
        if self.mlp_bias:
            yield from ((f"{module}.{name}.bias", (size,)) for name, size in projections.items())
            yield f"{module}.{names.down}.bias", (hidden,)

    def _experts_shapes(self, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of a router, of its experts and of the shared one."""
        module, count, hidden = experts.module, experts.count, self.hidden
        yield f"{module}.{experts.router}.weight", (count, hidden)
        if experts.biases:
            yield f"{module}.{experts.router}.bias", (count,)
        if experts.corrected:
            yield f"{module}.{experts.correction_in}{CORRECTION}", (count,)
        yield from experts.stacks(hidden).items()
        if (size := experts.latent) is not None:
            for name, rows, columns in zip(LATENT, (size, hidden), (hidden, size), strict=True):
                yield f"{module}.{name}.weight", (rows, columns)
                if self.mlp_bias:
                    yield f"{module}.{name}.bias", (rows,)
        if experts.shared:
            yield from self._mlp_shapes(experts.shared_module, experts.shared)
        if experts.shared_gate:
            yield f"{experts.shared_module}_gate.weight", (1, hidden)

    def _query_key_shapes(self, name: str, heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of a norm of queries or keys."""
        dim = self.dim
        match self.query_key_norm:
            case "modules":
                yield from ((f"{name}.norms.{head}.weight", (dim,)) for head in range(heads))
            case "heads":
                yield f"{name}.weight", (heads, dim)
            case "head" | "projection" as kind:
                yield f"{name}.weight", (dim if kind == "head" else heads * dim,)
        if self.query_key_biases:
            yield f"{name}.bias", (dim,)
