"""The ``Config`` of a decoder-only transformer: settings that replace one class per family."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.dtypes import BFLOAT16, FLOAT32, FLOATS
from .draft_heads import shapes_of_heads
from .lightning import Lightning
from .mamba import Mamba
from .names import INTO_LAYERS, NORM_OF_INPUTS, PROJECTION, TABLE_OF_LAYERS, TEXT
from .short_conv import ShortConv
from .state_space import StateSpace

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"
MLP = "mlp"  # type of a layer that has only an MLP
CONV = "conv"  # type of a layer with a short convolution
WITHOUT_ATTENTION = (LINEAR, CONV, MLP)
# Epsilon of the norms inside latent attention, and of the lengths of a delta rule's queries and
# keys: transformers' classes do not use the config's rms_norm_eps there.
INNER_EPS = 1e-6
SCALAR = "layer_scalar"  # a factor of a block's output that is stored and not trained
BUFFERS = ("beta", "eps")  # constants of xielu that are stored and not trained
CORRECTION = "e_score_correction_bias"  # bias of a router's choice, not trained by gradients
EXPERT_BIAS = "expert_bias"  # the same in lfm2_moe
STACKS, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")  # of experts
OF_BERT = (  # tables of positions and of token types
    *(
        "model.embeddings.position_embeddings.weight",
        "model.embeddings.token_type_embeddings.weight",
    ),
)
POOLER = "model.pooler.dense"
LATENT = ("fc1_latent_proj", "fc2_latent_proj")  # projections before and after latent experts


@dataclass(frozen=True)
class Rope:
    """Rotary positions of the layers of one type.

    The first ``dim`` elements of each head are rotated.  ``scaling`` is the argument of
    ``rope_tables``.  In sequences longer than ``original``, the angles of every position depend on
    the length of the sequence (dynamic and longrope); None: they never do.  With ``growth``, (beta,
    length), queries at position p are scaled by 1 + beta log(1 + floor((p + ahead) / length)).
    ``whole``: also the elements that are not rotated; ``still``: only in layers without rotation.
    """

    dim: int
    base: float
    scaling: Mapping[str, Any] | None = None
    original: int | None = None
    growth: tuple[float, float] | None = None
    ahead: int = 0
    whole: bool = False
    still: bool = False


@dataclass(frozen=True)
class Norms:
    """Names of the norms around the two branches of a block; None for an absent norm.

    h = x + after_attention(attention(before_attention(x)))
    y = h + after_mlp(mlp(before_mlp(h)))

    ``kind`` is "rms", or "layer" if the mean is subtracted.  ``weights`` and ``biases`` are whether
    norms have these parameters.  The config's ``norm_offset`` is added to the weights.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    last: str | None = "norm"  # after all blocks
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
    gate_up: str = "gate_up_proj"  # if one matrix stores both
    attention: str = "self_attn"
    recurrent: str = "linear_attn"  # in layers without attention
    gate: str = "gate_proj"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    qkv: str = "qkv_proj"  # if one matrix stores all three
    embeddings: str = "embed_tokens.weight"  # in files: the embedding table
    inputs: str = ""  # prefix of the modules that compute the inputs of all layers
    own_input: str = ""  # prefix of a layer's modules that add the layer's input

    @property
    def projections(self) -> tuple[str, str, str]:
        """The names of the query, key and value projections."""
        return self.query, self.key, self.value

    @property
    def of_mlp(self) -> str:
        """The prefix of an MLP's modules in a layer."""
        return f"{self.mlp}." if self.mlp else ""


OWN_NAMES = Names()
BEFORE = Norms()


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Properties of a family's blocks that config.json does not change.

    ``Family`` and ``Config`` share them.  Queries and keys are normalised before the rotation
    unless ``rotated_first``.  ``fused`` lists projections that a checkpoint stores in one matrix:
    "qkv", and "mlp" for gate and up.  Without ``gate`` the MLP is down(activation(up(x))).  With
    ``sinks`` the softmax of each head has one more score, which has no value.
    """

    norms: Norms = BEFORE
    norm_offset: float = 0.0
    rotated_first: bool = False
    fused: tuple[str, ...] = ()
    sub_norms: bool = False
    names: Names = OWN_NAMES
    gate: bool = True
    sinks: bool = False
    left_out: str = ""  # pattern of tensor names that are not loaded
    draft: str = ""  # how files name draft heads: see ``draft_heads``; "": they have none
    embedding_norm: str | None = None  # norm of the embeddings
    first_norm: bool = True  # whether the first block has a norm before its attention
    post_norm: bool = False  # norms of sums: x = norm(x + branch(x))
    delta_norms: Norms | None = None  # norms of blocks with a delta rule, if other than ``norms``
    gated: bool = False  # attention's output has a gate, which the query projection also computes
    head_gate: bool = False  # a gate multiplies each head's output: one number, from ``g_proj``
    single: bool = False  # a block has one branch: attention, a recurrence or an MLP
    wide: tuple[str, ...] = ()  # suffixes of parameters that stay float32 in 16-bit models
    wide_in_float16: tuple[str, ...] = ()  # the same in float16 models only
    value_norm: bool = False  # heads of values have an RMS norm without weight
    layer_scalar: bool = False  # a stored number multiplies the output of each block
    in_files: tuple[tuple[str, str], ...] = ()  # parts of parameters' names, and those in files
    paired: bool = False  # two blocks are a layer of the file: see ``longcat_config``


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in each layer a router chooses k of ``count`` experts for each token.

    pairs       whether a group's score is the sum of its two best scores, also for softmax
    beside      whether a layer also has a dense MLP; each branch then has norms of its own, and the
                router reads the normalised residual stream, times a vector; its weights are
                multiplied by a number of each expert
    before      whether the weights multiply the inputs of experts, not their outputs
    halves      whether the columns of transposed stacks are gate, then up
    chosen      k of each layer, if layers differ; ``k`` is then the largest
    zero        number of further experts that the router may choose, whose output is their input
    shortcut    whether a layer also has a dense MLP, and the experts' output, of the same input, is
                added at the end of the next layer
    inner       inner size of an expert
    sparse      for each layer, whether it has experts; other layers are dense
    scores, normalize, groups, top_groups, scale        options of ``route``
    jitter      if not None, the router is ``sparse_mixer``
    corrected   whether a bias is added to the scores for the choice only
    wide        whether the router computes in float32; ``narrow``: its weight has the model's dtype
    limit, alpha        options of ``experts_mlp``
    shared      inner size of an expert that computes every token, 0 for none
    shared_gate whether a gate multiplies the output of the shared expert
    balance     coefficient of the router's loss, 0 if it is off
    latent      length of the vectors that experts compute, which are projections of the hidden
                state; router and shared expert compute the hidden state itself
    files       tensor names in a layer of a released checkpoint, where they differ from
                transformers'; names of experts have a placeholder for the number of the expert
    transposed  whether stacks are stored as (experts, in, out), with columns of gate and up
                alternating
    """

    count: int
    k: int
    inner: int
    sparse: tuple[bool, ...]
    activation: str
    zero: int = 0
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
    correction_in: str = "gate."  # prefix of the correction's name
    correction_name: str = CORRECTION
    correction_row: bool = False  # files store the correction as a matrix with one row
    shared_in: str = "shared_experts"
    shared_beside: bool = False  # whether the shared expert is outside of ``module``
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    latent: int | None = None
    chosen: tuple[int, ...] = ()
    beside: bool = False
    before: bool = False
    halves: bool = False
    pairs: bool = False
    narrow: bool = False
    shortcut: bool = False

    @property
    def choices(self) -> int:
        """The number of experts that the router chooses from."""
        return self.count + self.zero

    @property
    def prefix(self) -> str:
        """The prefix of the experts' names in a layer."""
        return f"{self.module}." if self.module else ""

    def k_of(self, layer: int) -> int:
        """Return the number of experts of each token in a layer."""
        return self.chosen[layer] if self.chosen else self.k

    @property
    def correction(self) -> str:
        """The name of the correction in a layer."""
        return f"{self.prefix}{self.correction_in}{self.correction_name}"

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two stacks."""
        return UNGATED if self.activation == "relu2" else STACKS

    @property
    def shared_module(self) -> str:
        """The module name of the shared expert in a layer."""
        return self.shared_in if self.shared_beside else self.prefix + self.shared_in

    @property
    def clamps(self) -> dict[str, float]:
        """The options of a clamped activation that are set."""
        pairs = {"limit": self.limit, "alpha": self.alpha}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def routers(self) -> tuple[str, str]:
        """The last names of the modules that weigh experts: router and shared expert's gate."""
        return self.router.rpartition(".")[2], f"{self.shared_in}_gate"

    @property
    def wide_names(self) -> tuple[str, ...]:
        """Suffixes of the names of parameters that stay float32 in 16-bit models."""
        router = f".{self.prefix}{self.router}.weight"
        wide = self.wide and not self.narrow
        return (self.correction_name, router) if wide else (self.correction_name,)

    def stacks(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's stacks, by their names in the layer."""
        width, rows = self.latent or hidden, (1 + (self.names is STACKS)) * self.inner
        sizes = (rows, width), (width, self.inner)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in zip(self.names, sizes, strict=True):
            shapes[f"{self.prefix}experts.{name}"] = self.count, outputs, inputs
            if self.biases:
                shapes[f"{self.prefix}experts.{name}_bias"] = self.count, outputs
        return shapes


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): keys and values of all heads come from one short vector per token.

    plain       elements of a query or key head that are not rotated
    rotated     elements of a query or key head that are rotated; all key heads share them
    value       elements of a value head
    rank        length of the short vector of keys and values
    queries     length of the short vector of queries; None: queries come from the hidden state
    biases      whether the projections to short vectors have biases
    scales      factors of queries and of the short vector of keys and values
    """

    queries: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    biases: bool
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def dim(self) -> int:
        """The head dimension of queries and keys."""
        return self.plain + self.rotated

    def shapes(self, heads: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the query, key and value projections."""
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
class Indexer:
    """The choice of keys in sparse attention: see ``layers/indexer.py``.

    keys        number of keys that a query attends to
    shared      for each layer, whether it uses the choice of an earlier one
    """

    heads: int
    dim: int
    keys: int
    interleaved: bool
    shared: tuple[bool, ...]

    def shapes(self, hidden: int, low: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        yield "wq_b.weight", (self.heads * self.dim, low)
        yield "wk.weight", (self.dim, hidden)
        yield "k_norm.weight", (self.dim,)
        yield "k_norm.bias", (self.dim,)
        yield "weights_proj.weight", (self.heads, hidden)


@dataclass(frozen=True)
class Delta:
    """Layers with a gated delta rule, after a convolution with ``taps`` taps.

    Queries and keys have ``key_heads`` heads with ``key_dim`` elements, values ``value_heads``
    heads with ``value_dim``.  ``most`` is the upper bound of beta.  ``eps`` belongs to the norm
    after the rule; None: the eps of all norms.  ``stored`` is how a checkpoint stores projections:

    fused       two matrices, which store their parts head by head
    split       four matrices
    apart       one matrix for each projection
    short       one matrix for each projection; every key channel has a decay, and decay and gate
                are computed from short vectors, as long as a head
    whole       the same with one matrix each for decay and gate

    Logarithms of decays by channel are above ``bound``; None: they have no bound.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    stored: str  # fused, split, apart, short or whole
    most: float = 1.0
    eps: float | None = None
    bound: float | None = None

    @property
    def projections(self) -> dict[str, int]:
        """The number of rows of each input projection, by name."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        few = self.value_heads
        if self.stored == "short":
            sizes = {"q": keys, "k": keys, "v": values, "g_a": self.value_dim, "b": few}
            sizes |= {"forget_gate.f_a": self.key_dim}
            return {f"{name}_proj": size for name, size in sizes.items()}
        if self.stored == "whole":
            sizes = {"q": keys, "k": keys, "v": values, "g": values, "b": few}
            sizes |= {"forget_gate.f": keys}
            return {f"{name}_proj": size for name, size in sizes.items()}
        if self.stored == "apart":
            sizes = {"q": keys, "k": keys, "v": values, "g": values, "b": few, "a": few}
            return {f"{name}_proj": size for name, size in sizes.items()}
        sizes = {"qkv": 2 * keys + values, "z": values, "b": few, "a": few}
        if self.stored == "fused":
            sizes = {"qkvz": 2 * (keys + values), "ba": 2 * few}
        return {f"in_proj_{name}": size for name, size in sizes.items()}

    @property
    def by_channel(self) -> bool:
        """Whether every key channel has a decay, not every head."""
        return self.stored in ("short", "whole")

    @property
    def after(self) -> tuple[str, str]:
        """The names of the norm and of the output projection after the rule."""
        apart = self.stored == "apart" or self.by_channel
        return ("o_norm", "o_proj") if apart else ("norm", "out_proj")

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        values, (norm, output) = self.value_heads * self.value_dim, self.after
        for name, size in self.projections.items():
            yield f"{name}.weight", (size, hidden)
        keys = self.key_heads * self.key_dim
        yield "conv1d.weight", (2 * keys + values, 1, self.taps)
        if self.stored == "short":
            yield "g_b_proj.weight", (values, self.value_dim)
            yield "forget_gate.f_b_proj.weight", (keys, self.key_dim)
        if self.by_channel:
            heads = (self.value_heads,)
            yield "forget_gate.A_log", (1, 1, *heads, 1) if self.stored == "short" else heads
            yield "forget_gate.dt_bias", (keys,)
        else:
            yield from ((name, (self.value_heads,)) for name in ("A_log", "dt_bias"))
        yield f"{norm}.weight", (self.value_dim,)
        yield f"{output}.weight", (hidden, values)


@dataclass(frozen=True)
class DenseModule:
    """A Dense module of sentence-transformers, which changes pooled states: y = f(W x + b).

    Its file is ``PATH/model.safetensors``, with the tensors linear.weight and linear.bias.
    """

    path: str  # the folder, such as 2_Dense
    inputs: int
    outputs: int
    biased: bool
    tanh: bool  # whether f is tanh; else it is the identity

    @property
    def weight(self) -> str:
        """The name of W."""
        return f"{self.path}.linear.weight"

    @property
    def bias(self) -> str:
        """The name of b."""
        return f"{self.path}.linear.bias"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters."""
        bias = {self.bias: (self.outputs,)} if self.biased else {}
        return {self.weight: (self.outputs, self.inputs), **bias}


@dataclass(frozen=True, kw_only=True)
class Config(Structure):
    """The settings of a decoder-only transformer.

    window          number of keys that a query of a sliding layer attends to, including its own
    chunk           in layers of type CHUNKED, queries attend to keys in the same chunk of this many
                    positions
    query_key_norm  "ones" (no weights, only in layers that rotate), "head" (all heads share a
                    weight), "heads" (a matrix with a row per head), "modules" (a module per head),
                    "projection" (a norm over all heads), or None; ``query_key_biases``: whether
                    these norms have biases
    rotated         for each layer, whether queries and keys are rotated; empty: in all layers
    interleaved     which elements are rotated in pairs: see ``rope``
    clip            bound of queries, keys and values
    parallel        whether the MLP of a block has the same input as attention
    residual_scale  factor of every branch
    logit_scale     factor of logits
    bit_layers      whether all linear layers except the head are ``bit_linear``, which rounds
                    weights at every call
    inverse_scales  whether ternary weights in the checkpoint are codes / scale, not codes * scale
    full_heads      (KV heads, head dimension) of layers with full attention, if other than of the
                    others; ``kv_heads`` and ``dim`` are then the larger ones, as in caches
    keys_as_values  whether values of layers with full attention are their keys before the norm
    shared_layers   number of last layers without keys and values of their own: they use those of
                    the last earlier layer of their type
    shared_inner    inner size of the MLP in these layers
    layer_inputs    (tokens, size): each layer has an embedding table of its own, whose rows enter
                    at the end of the block, with a projection of the embeddings; tokens 0: this
                    projection alone; size 0: none
    projected       length of states after a last projection; 0: there is none
    latent          sizes of latent attention; ``dim`` is then the head dimension in caches
    experts         the mixture of experts
    causal          whether queries attend to no later keys; False for encoders, which are no
                    language models
    token_types     rows of the table of token types, of which texts use the first; 0: no table.
                    Models with this table also have a table of positions
    body            prefix of the body's modules in transformers' model; multimodal models have
                    another one
    head            one of ``heads.HEADS``; only the head of a language model can be ``tied``
    draft_heads     number of draft heads: see ``draft_heads.py``
    draft_tables    parameters that are tables of a draft head, other than the model's
    draft_copies    further tensors of files that are equal to the model's tables
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
    causal: bool = True
    token_types: int = 0
    classifier: str = "score"  # see ``Family``
    classifier_pooling: str = "cls"
    classifier_bias: bool = False
    rotated: tuple[bool, ...] = ()
    interleaved: bool = False
    query_key_biases: bool = False
    clip: float | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None  # of latent attention
    delta: Delta | None = None  # in layers of type LINEAR
    space: StateSpace | None = None  # in layers of type LINEAR, or in all
    conv: ShortConv | None = None  # in layers of type CONV
    lightning: Lightning | None = None  # in layers of type LINEAR
    mamba: Mamba | None = None  # in layers of type LINEAR
    gate_scale: float = 1.0  # factor of an MLP's gate
    down_scale: float = 1.0  # factor of an MLP's output
    attention_scales: tuple[float, float] = (1.0, 1.0)  # factors of attention's input and output

    chunk: int | None = None
    full_heads: tuple[int, int] | None = None
    other_heads: tuple[int, int] = (0, 0)  # of the other layers, if there are ``full_heads``
    keys_as_values: bool = False
    shared_layers: int = 0
    shared_inner: int = 0
    layer_inputs: tuple[int, int] = (0, 0)
    projected: int = 0
    modules: tuple[DenseModule, ...] = ()  # between pooling and normalisation
    draft_heads: int = 0
    draft_tables: tuple[str, ...] = ()
    draft_copies: tuple[str, ...] = ()

    @property
    def state(self) -> int:
        """The length of the states that the model returns."""
        return self.projected or self.hidden

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number of KV heads and the head dimension of a layer."""
        if self.full_heads is None:
            return self.kv_heads, self.dim
        return self.full_heads if self.layer_types[layer] == FULL else self.other_heads

    def shares(self, layer: int) -> bool:
        """Return whether a layer uses the keys and values of an earlier one."""
        return layer >= self.layers - self.shared_layers

    def inner_of(self, layer: int) -> int:
        """Return the inner size of a dense layer."""
        return self.shared_inner if self.shared_layers and self.shares(layer) else self.inner

    def projections_of(self, layer: int) -> str:
        """Return the letters of a layer's projections: of queries, keys and values."""
        if self.shared_layers and self.shares(layer):
            return "q"
        return "qk" if self.keys_as_values and self.layer_types[layer] == FULL else "qkv"

    inner_eps: float = INNER_EPS  # llama.cpp uses the eps of all norms

    def rotates(self, layer: int) -> bool:
        """Return whether this layer rotates its queries and keys."""
        return not self.rotated or self.rotated[layer]

    head: str = "causal_lm"
    labels: int = 0  # outputs of a classifier

    def attends(self, layer: int) -> bool:
        """Return whether this layer has attention."""
        return self.layer_types[layer] not in WITHOUT_ATTENTION

    @property
    def balanced(self) -> bool:
        """Whether a router's loss is added to the next-token loss."""
        return self.experts is not None and self.experts.balance > 0 and any(self.experts.sparse)

    @property
    def recurrent(self) -> bool:
        """Whether some layers have recurrent states."""
        return self.rule is not None

    @property
    def rule(self) -> Delta | StateSpace | ShortConv | Lightning | Mamba | None:
        """The sizes of the layers with a recurrence or a convolution."""
        return self.delta or self.space or self.conv or self.lightning or self.mamba

    @property
    def beside(self) -> bool:
        """Whether layers have both a recurrence and attention."""
        return self.space is not None and self.space.beside

    def norms_of(self, layer: int) -> Norms:
        """Return the norms of a block."""
        norms = self.delta_norms or self.norms if not self.attends(layer) else self.norms
        if self.paired:
            names = (f"{name}.{layer % 2}" for name in (norms.before_attention, norms.before_mlp))
            first, second = names
            return replace(norms, before_attention=first, before_mlp=second)
        return norms if layer or self.first_norm else replace(norms, before_attention=None)

    def prefix_of(self, layer: int) -> str:
        """Return the prefix of a block's parameters."""
        return f"model.layers.{layer // 2 if self.paired else layer}."

    def attention_in(self, layer: int) -> str:
        """Return the prefix of attention's modules in a block."""
        return f"{self.names.attention}.{layer % 2}." if self.paired else f"{self.names.attention}."

    def mlp_in(self, layer: int) -> str:
        """Return the prefix of a dense MLP's modules in a block."""
        return f"{self.names.mlp}.{layer % 2}." if self.paired else self.names.of_mlp

    @property
    def unused(self) -> set[str]:
        """The parameters that files have, and that nothing computes with: BERT's pooler."""
        used = self.classifier != "pooler" or self.head == "sequence_classification"
        return set() if used else {f"{POOLER}.weight", f"{POOLER}.bias"}

    def window_of(self, layer: int) -> int | None:
        """Return the number of keys a query of this layer attends to, with its own; None: all."""
        return self.window if self.layer_types[layer] == SLIDING else None

    def widened(self, name: str) -> tuple[Any, ...]:
        """Return the dtypes of a model in which this parameter is float32 instead.

        As in transformers: both 16-bit dtypes (``_keep_in_fp32_modules_strict``, or a parameter
        that the class creates in float32), only float16 (``_keep_in_fp32_modules``), or none.
        """
        experts = () if self.experts is None else self.experts.wide_names
        if name.endswith((*self.wide, *experts)):
            return FLOATS[0], BFLOAT16
        return (FLOATS[0],) if name.endswith(self.wide_in_float16) else ()

    def dtype_of(self, name: str, dtype: Any) -> Any:
        """Return the dtype of a parameter in a model of ``dtype``."""
        return FLOAT32 if dtype in self.widened(name) else dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        tokens, size = self.layer_inputs
        if size:
            every, module = self.layers * size, f"model.{self.names.inputs}"
            shapes |= {TABLE_OF_LAYERS: (tokens, every)} if tokens else {}
            shapes[f"{module}{INTO_LAYERS}.weight"] = every, self.hidden
            shapes[f"{module}{NORM_OF_INPUTS}.weight"] = (size,)
        for name, rows in zip(OF_BERT, (self.positions, self.token_types), strict=True):
            shapes |= {name: (rows, self.hidden)} if self.token_types else {}
        if self.embedding_norm:
            shapes |= self._norm_shapes(f"model.{self.embedding_norm}")
        for layer in range(self.layers):
            for name, shape in self.block_shapes(layer):
                shapes[self.prefix_of(layer) + name] = shape
        shapes |= dict(shapes_of_heads(self))
        shapes |= self._norm_shapes(f"model.{self.norms.last}") if self.norms.last else {}
        shapes |= {PROJECTION: (self.projected, self.hidden)} if self.projected else {}
        shapes |= self._classifier_shapes()
        for dense in self.modules:
            shapes |= dense.shapes()
        if self.head == "causal_lm" and not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        if self.head == "causal_lm" and self.head_bias:
            shapes["lm_head.bias"] = (self.vocab,)
        if self.labels:
            shapes["score.weight"] = (self.labels, self.state)
        if self.head == "token_classification" or (self.labels and self.classifier != "score"):
            shapes["score.bias"] = (self.labels,)
        return shapes

    def _classifier_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what an encoder computes between its states and ``score``."""
        square, row = (self.hidden, self.hidden), (self.hidden,)
        if self.classifier == "pooler":
            return {f"{POOLER}.weight": square, f"{POOLER}.bias": row}
        if self.classifier == "score" or not self.labels:
            return {}
        shapes: dict[str, tuple[int, ...]] = {"head.dense.weight": square}
        shapes |= {"head.dense.bias": row} if self.classifier_bias else {}
        return shapes | self._norm_shapes("head.norm")

    def _norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a norm's parameters."""
        kinds = {"weight": self.norms.weights, "bias": self.norms.biases}
        return {f"{name}.{kind}": (self.hidden,) for kind, there in kinds.items() if there}

    def block_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each parameter of a block; names are relative to it."""
        rule = self.rule
        if rule is not None and (self.beside or self.layer_types[layer] in (LINEAR, CONV)):
            module = self.names.recurrent
            yield from ((f"{module}.{name}", shape) for name, shape in rule.shapes(self.hidden))
        if self.attends(layer):
            yield from self._attention_shapes(layer)
        if not self.single or self.layer_types[layer] == MLP:
            yield from self._feed_forward_shapes(layer)
        if self.activation == "xielu":
            yield from ((f"mlp.act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
            yield from ((f"mlp.act_fn.{name}", ()) for name in BUFFERS)
        if self.sub_norms:
            yield "self_attn.attn_sub_norm.weight", (self.heads * self.dim,)
            yield "mlp.ffn_sub_norm.weight", (self.inner,)
        norms = self.norms_of(layer)
        own: tuple[str | None, ...] = ()
        if self.experts is not None and self.experts.beside:
            own = f"{norms.after_mlp}_1", f"{norms.after_mlp}_2", f"{norms.before_mlp}_2"
        if size := self.layer_inputs[1]:
            module = self.names.own_input
            own += (f"{module}post_per_layer_input_norm",)
            yield f"{module}per_layer_input_gate.weight", (size, self.hidden)
            yield f"{module}per_layer_projection.weight", (self.hidden, size)
        if self.layer_scalar:
            yield SCALAR, (1,)
        for norm in (
            norms.before_attention,
            norms.after_attention,
            norms.before_mlp,
            norms.after_mlp,
            *own,
        ):
            if norm:
                yield from self._norm_shapes(norm).items()

    def _attention_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of attention's parameters."""
        names, latent, module = self.names, self.latent, self.attention_in(layer)[:-1]
        kv_heads, dim = self.heads_of(layer)
        queries = self.heads * (dim if latent is None else latent.value)
        if latent is None:
            yield from self._projection_shapes(layer)
        else:
            for name, shape in latent.shapes(self.heads, self.hidden):
                yield f"{module}.{name}", shape
        indexer = self.indexer
        if latent and latent.queries and indexer is not None and not indexer.shared[layer]:
            for name, shape in indexer.shapes(self.hidden, latent.queries):
                yield f"{module}.indexer.{name}", shape
        yield f"{module}.{names.output}.weight", (self.hidden, queries)
        if self.output_bias:
            yield f"{module}.{names.output}.bias", (self.hidden,)
        both = (names.query_norm, self.heads), (names.key_norm, kv_heads)
        for name, heads in both[: len(self.projections_of(layer))]:
            yield from self._query_key_shapes(f"{module}.{name}", heads, dim)
        if self.sinks:
            yield f"{module}.sinks", (self.heads,)
        if self.head_gate:
            yield f"{module}.g_proj.weight", (self.heads, self.hidden)

    def _projection_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the query, key and value projections."""
        module = self.attention_in(layer)[:-1]
        kv_heads, dim = self.heads_of(layer)
        queries, keys = self.heads * dim, kv_heads * dim
        lengths = {"q": queries * (1 + self.gated), "k": keys, "v": keys}
        letters, names = (
            self.projections_of(layer),
            dict(zip("qkv", self.names.projections, strict=True)),
        )
        sizes = {names[letter]: lengths[letter] for letter in letters}
        if "qkv" in self.fused:
            sizes = {self.names.qkv: queries + 2 * keys}
        for name, size in sizes.items():
            yield f"{module}.{name}.weight", (size, self.hidden)
            if self.qkv_bias:
                yield f"{module}.{name}.bias", (size,)

    def _feed_forward_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a block's MLP, or of its experts."""
        sparse = self.experts is not None and self.experts.sparse[layer]
        if self.experts is not None and sparse:
            yield from self._experts_shapes(self.experts)
        if self.experts is None or not sparse or self.experts.beside or self.experts.shortcut:
            yield from self._mlp_shapes(self.mlp_in(layer), self.inner_of(layer))

    def _mlp_shapes(self, prefix: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a dense MLP."""
        hidden, names = self.hidden, self.names
        projections = {names.gate_up: 2 * inner} if "mlp" in self.fused else {}
        projections |= {names.gate: inner} if self.gate and not projections else {}
        projections |= {} if "mlp" in self.fused else {names.up: inner}
        for name, size in projections.items():
            yield f"{prefix}{name}.weight", (size, hidden)
        yield f"{prefix}{names.down}.weight", (hidden, inner)
        if self.mlp_bias:
            yield from ((f"{prefix}{name}.bias", (size,)) for name, size in projections.items())
            yield f"{prefix}{names.down}.bias", (hidden,)

    def _experts_shapes(self, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a router, its experts and the shared expert."""
        module, count, hidden = experts.prefix, experts.count, self.hidden
        yield f"{module}{experts.router}.weight", (experts.choices, hidden)
        if experts.biases:
            yield f"{module}{experts.router}.bias", (experts.choices,)
        if experts.corrected:
            yield experts.correction, (experts.choices,)
        if experts.beside:
            yield "router.scale", (hidden,)
            yield "router.per_expert_scale", (count,)
        yield from experts.stacks(hidden).items()
        if (size := experts.latent) is not None:
            for name, rows, columns in zip(LATENT, (size, hidden), (hidden, size), strict=True):
                yield f"{module}{name}.weight", (rows, columns)
                if self.mlp_bias:
                    yield f"{module}{name}.bias", (rows,)
        if experts.shared:
            yield from self._mlp_shapes(f"{experts.shared_module}.", experts.shared)
        if experts.shared_gate:
            yield f"{experts.shared_module}_gate.weight", (1, hidden)

    def _query_key_shapes(
        self, name: str, heads: int, dim: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a norm of queries or keys."""
        match self.query_key_norm:
            case "modules":
                yield from ((f"{name}.norms.{head}.weight", (dim,)) for head in range(heads))
            case "heads":
                yield f"{name}.weight", (heads, dim)
            case "head" | "projection" as kind:
                yield f"{name}.weight", (dim if kind == "head" else heads * dim,)
        if self.query_key_biases:
            yield f"{name}.bias", (dim,)
