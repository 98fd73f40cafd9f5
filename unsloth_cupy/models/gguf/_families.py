"""The architectures of llama.cpp, and their differences from a model.

An architecture of llama.cpp has its activation, norms and biases built in; a file cannot change
them.  A difference for all inputs raises an error; a difference for some inputs becomes a note.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...ops.position.rope_tables import RULES
from ..configs.config import CHUNKED, FULL, INNER_EPS, MLP, SLIDING, Config, Experts, Latent, Rope
from ..configs.families import ENCODERS, FAMILIES
from ..configs.keys import COMMON
from ..configs.parse_layers import ACTIVATIONS
from . import MODULES

NORMALIZED = {
    True: "with weights that sum to 1",
    False: "with weights that are not normalized",
    None: "with weights as the file says",
}
LEAST = 1e-3  # time_step_min of all released Nemotron-H models; no key of a file has it
# Numbers of layers, or (layers, vocabulary), by which llama.cpp recognizes a DeepSeek model whose
# queries have no low rank.
LITE, LITE_TOO = (26, 27), (48, 128256)
# Of Llama 4: positions of a chunk; queries that grow with the position; the number of experts of
# models without norms of queries and keys.
CHUNK, GROWTH, UNNORMED = 8192, (0.1, 8192), 128
LIKE = {"deepseek32": "glm-dsa"}  # whose tensor names the package gguf has for the other one
HADAMARD = 64  # least size of the matrix by which llama.cpp rotates the heads of an indexer
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # yarn: llama.cpp ignores these keys of a file


@dataclass(frozen=True)
class Mixtures:
    """The mixtures of experts that an architecture supports.

    normalize   whether the weights of a token's experts sum to 1; None: a key of the file says so
    shared      how a file stores the size of the shared expert: "sized", "counted" (as a multiple
                of the other experts' size), "same" (not at all: it has the size of the others), or
                None if there is no shared expert
    dense       layers without experts: None, "leading" (the first ones), "stepped" (the first ones,
                and all but every n-th), "every" (all but every n-th), "single" (layers without an
                MLP), or "periodic" (any: the tensors of a file show them)
    own_size    whether experts and dense layers have different inner sizes
    """

    scores: str = "softmax"
    normalize: bool | None = True
    shared: str | None = None
    shared_gate: bool = False
    dense: str | None = None
    corrected: bool = False
    groups: bool = False
    scale: bool = False
    unscaled: bool = False  # no key of a file scales the sum of experts
    clamped: bool = False
    own_size: bool = True
    gating: bool = False  # a key of the file may name the scores
    optional: bool = False  # models without experts have the same architecture
    fused: bool = False  # gate and up are one tensor


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    output      whether the head is the embedding table ("tied"), a separate tensor ("own"), or
                "either"
    deep        number of layers of the 27B model, whose scores are scaled by hidden / heads instead
                of the head dimension
    rotates     layers that rotate queries and keys: "all", "fourth" (all but every fourth),
                "sliding" (layers with a window), "chunked" (layers with chunks: all but every
                fourth), "none", or "either" (a key says all or none)
    fourth      whether every fourth layer has full attention
    windows_of  number of layers of the models with windows; other models have none
    head_norms  number of layers from which on norms of heads are optional
    """

    name: str
    interleaved: bool = False  # rotary pairs are adjacent: rows of q and k are reordered
    any_head: bool = True  # the head dimension need not be hidden / heads
    biases: bool = False  # the output projection and the MLP may have biases
    windows: bool = False
    output: str = "either"
    scalings: tuple[str, ...] = ("default", "linear", "dynamic", "yarn")
    deep: int | None = None
    needs_biases: bool = False  # of the output projection and the MLP
    head_norms: int | None = None
    rotates: str = "all"
    fourth: bool = False
    windows_of: int | None = None
    experts: Mixtures | None = None
    absorbed: bool = True  # latent attention has one KV head, and values are a part of its keys
    fixed: tuple[float, float, float] | None = None  # scale_emb, scale_depth, dim_model_base
    doubled: bool = True  # layers with the recurrence of Mamba have twice the model's channels
    listed: bool = False  # attention.head_count_kv is 0 in layers without attention
    folds: bool = False  # the factors of a model are multiplied into its weights
    tiled: bool = False  # value heads have another order in a file
    truncates: bool = True  # yarn rounds the limits of its columns
    sized: bool = False  # sizes, KV heads and rotation have keys for each type of layers
    words: str = "llama"  # the kind of a tokenizer over characters
    # properties of the family, which ``_as_family`` adds
    activation: str = "silu"
    softcap: bool = False
    partial: bool = False  # a part of a head may be rotated
    scales: bool = False  # keys have factors of embedding, residual sums, scores and logits
    logit_scale: bool = False
    temperature: bool = False  # scores may grow with the position
    latent: bool = False
    delta: bool = False  # there are layers with a delta rule
    indexer: bool = False  # sparse attention
    scaled_scores: bool = True  # scores are divided by the root of the head dimension

    @property
    def xielu(self) -> bool:
        """Whether the activation has parameters, which are keys of a file."""
        return self.activation == "xielu"


EVERY = {**FAMILIES, **ENCODERS}
PLAIN = Architecture.scalings
LLAMA = Architecture(
    "llama", interleaved=True, biases=True, scalings=(*PLAIN, "llama3", "longrope")
)
OF_GRANITE: Mapping[str, Any] = {
    **dict.fromkeys(("interleaved", "biases"), True),
    "scalings": (*PLAIN, "llama3", "longrope"),
}
NEXT = Mixtures(shared="sized")
SIGMOID = Mixtures(
    "sigmoid",
    normalize=None,
    shared="counted",
    dense="leading",
    corrected=True,
    groups=True,
    gating=True,
)
OF_DEEPSEEK = Mixtures(normalize=None, shared="counted", dense="leading", gating=True)
DEEPSEEK = Architecture("deepseek2", interleaved=True, scalings=("default", "yarn"))
NEMOTRON = Architecture("nemotron_h", biases=True, rotates="none", doubled=False, listed=True)
ROWS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", any_head=False),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", output="tied"),
    "gemma2": Architecture("gemma2", windows=True, output="tied", deep=46),
    "gemma3_text": Architecture("gemma3", windows=True, deep=62),
    "gemma4_text": Architecture(
        "gemma4",
        windows=True,
        sized=True,
        words="gemma4",
        scalings=("default", "proportional"),
        experts=Mixtures(optional=True, fused=True),
    ),
    "bert": Architecture("bert", any_head=False, biases=True, needs_biases=True, rotates="none"),
    "modernbert": Architecture("modern-bert", any_head=False, windows=True, scalings=("default",)),
    "phi3": Architecture("phi3", any_head=False, scalings=(*PLAIN, "longrope")),
    "olmo2": Architecture("olmo2", any_head=False, output="own"),
    "olmo3": Architecture("olmo2", any_head=False, output="own", windows=True, fourth=True),
    "olmo": Architecture("olmo", interleaved=True, any_head=False),
    "smollm3": Architecture("smollm3", interleaved=True, rotates="fourth"),
    "granite": Architecture("granite", **OF_GRANITE, rotates="either"),
    "cohere": Architecture(
        "command-r",
        interleaved=True,
        any_head=False,
        output="tied",
        head_norms=64,
    ),
    "cohere2": Architecture(
        "cohere2",
        interleaved=True,
        any_head=False,
        output="tied",
        windows=True,
        fourth=True,
        rotates="sliding",
    ),
    "glm4": Architecture("glm4", interleaved=True),
    "ernie4_5": Architecture("ernie4_5", interleaved=True),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "seed_oss": Architecture("seed_oss"),
    "exaone4": Architecture(
        "exaone4",
        any_head=False,
        windows=True,
        fourth=True,
        rotates="sliding",
        windows_of=64,
        scalings=(*PLAIN, "llama3"),
    ),
    "arcee": Architecture("arcee", interleaved=True, scalings=(*PLAIN, "llama3")),
    "starcoder2": Architecture("starcoder2", any_head=False, biases=True, needs_biases=True),
    "stablelm": Architecture("stablelm", any_head=False, output="own"),
    "nemotron": Architecture("nemotron", any_head=False, biases=True, output="own"),
    "ministral": LLAMA,
    "ministral3": Architecture(
        "mistral3", interleaved=True, scalings=(*PLAIN, "llama3", "longrope")
    ),
    "apertus": Architecture(
        "apertus",
        biases=True,
        output="own",
        scalings=(*PLAIN, "llama3", "longrope"),
    ),
    "phi": Architecture(
        "phi2",
        any_head=False,
        biases=True,
        needs_biases=True,
        output="own",
    ),
    "jais2": Architecture("jais2", biases=True, needs_biases=True),
    "bitnet": Architecture("bitnet", any_head=False, output="tied"),
    "mixtral": replace(LLAMA, experts=Mixtures(own_size=False)),
    "qwen2_moe": Architecture(
        "qwen2moe",
        any_head=False,
        output="own",
        experts=Mixtures(normalize=False, shared="sized"),
    ),
    "qwen3_moe": Architecture("qwen3moe", experts=Mixtures()),
    "olmoe": Architecture(
        "olmoe", any_head=False, output="own", experts=Mixtures(normalize=False, own_size=False)
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        biases=True,
        windows=True,
        output="own",
        truncates=False,
        experts=Mixtures("softmax_of_k", clamped=True),
    ),
    "granitemoe": Architecture(
        "granitemoe", **OF_GRANITE, experts=Mixtures("softmax_of_k", own_size=False)
    ),
    "granitemoeshared": Architecture(
        "granitemoe",
        **OF_GRANITE,
        experts=Mixtures("softmax_of_k", shared="sized", own_size=False),
    ),
    "dots1": Architecture("dots1", experts=SIGMOID),
    "exaone_moe": Architecture(
        "exaone-moe",
        windows=True,
        fourth=True,
        rotates="sliding",
        experts=replace(SIGMOID, shared="sized"),
    ),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", experts=Mixtures(shared="sized")),
    "phimoe": Architecture(
        "phimoe",
        any_head=False,
        biases=True,
        output="own",
        scalings=(*PLAIN, "longrope"),
        experts=Mixtures(own_size=False),
    ),
    "glm4_moe": Architecture("glm4moe", experts=SIGMOID),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        interleaved=True,
        experts=Mixtures(shared="sized", dense="stepped", corrected=True),
    ),
    "llama4_text": Architecture(
        "llama4",
        interleaved=True,
        scalings=(*PLAIN, "llama3"),
        rotates="chunked",
        experts=Mixtures("sigmoid", normalize=False, shared="same", dense="every"),
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        output="own",
        experts=Mixtures("sigmoid", corrected=True, gating=True),
    ),
    "qwen3_next": Architecture("qwen3next", experts=NEXT),
    "qwen3_5_text": Architecture("qwen35", tiled=True),
    "qwen3_5_moe_text": Architecture("qwen35moe", tiled=True, experts=NEXT),
    "mamba": Architecture("mamba"),
    "mamba2": Architecture("mamba2"),
    "jamba": Architecture(
        "jamba",
        rotates="none",
        listed=True,
        experts=Mixtures(normalize=False, dense="periodic", own_size=False, optional=True),
    ),
    "lfm2": Architecture("lfm2", any_head=False, listed=True),
    "lfm2_moe": Architecture(
        "lfm2moe",
        any_head=False,
        listed=True,
        experts=Mixtures("sigmoid", dense="leading", corrected=True, gating=True, unscaled=True),
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        **OF_GRANITE,
        rotates="either",
        listed=True,
        experts=Mixtures("softmax_of_k", shared="sized", own_size=False, optional=True),
    ),
    "bamba": Architecture(
        "granitehybrid",
        interleaved=True,
        biases=True,
        rotates="either",
        listed=True,
    ),
    "falcon_h1": Architecture("falcon-h1", doubled=False, folds=True),
    "nemotron_h": NEMOTRON,
    "kimi_linear": Architecture(
        "kimi-linear",
        output="own",
        rotates="none",
        listed=True,
        experts=replace(SIGMOID, normalize=True),
    ),
    "minicpm3": Architecture(
        "minicpm3",
        absorbed=False,
        fixed=(12.0, 1.4, 256.0),
        scalings=("default", "longrope"),
    ),
    "deepseek_v2": replace(DEEPSEEK, experts=OF_DEEPSEEK),
    "deepseek_v3": replace(
        DEEPSEEK, experts=replace(OF_DEEPSEEK, scores="sigmoid", corrected=True, groups=True)
    ),
}
ROWS["mistral4"] = Architecture(
    "mistral4",
    interleaved=True,
    scalings=("default", "yarn"),
    experts=replace(OF_DEEPSEEK, groups=True, fused=True),
)
ROWS |= {
    kind: replace(ROWS["deepseek_v3"], name=name)
    for kind, name in (("deepseek_v32", "deepseek32"), ("glm_moe_dsa", "glm-dsa"))
}
ROWS["glm4_moe_lite"] = ROWS["deepseek_v3"]  # the same architecture in llama.cpp
BOTH_WAYS_ROWS = {  # families whose models without a causal mask have another architecture
    "gemma3_text": replace(
        ROWS["gemma3_text"], name="gemma-embedding", scalings=("default",), deep=None
    ),
}
MIXED_ROWS = {  # families whose models with experts have another architecture
    "nemotron_h": replace(
        NEMOTRON,
        name="nemotron_h_moe",
        experts=Mixtures(
            "sigmoid",
            normalize=None,
            shared="sized",
            dense="single",
            corrected=True,
            groups=True,
        ),
    ),
}


def _as_family(kind: str, row: Architecture) -> Architecture:
    """Return an architecture with the properties that follow from its family."""
    family = EVERY[kind]
    defaults = {**COMMON, **family.defaults}
    own, factors = str(defaults.get(family.activation, defaults["hidden_act"])), {*family.factors}
    mixture = row.experts
    if mixture is not None and family.experts is not None:
        shared, scaled = family.experts.shared_gate, family.experts.scale is not None
        scaled &= not mixture.unscaled
        mixture = replace(mixture, scale=scaled, shared_gate=shared)
    return replace(
        row,
        activation=ACTIVATIONS.get(own, own),
        softcap="attn_logit_softcapping" in factors,
        partial=family.partial,
        scales="embedding_multiplier" in factors and "residual_multiplier" in factors,
        logit_scale=bool(factors & {"logit_scale", "logits_scaling"}),
        temperature="llama_4_scaling_beta" in factors,
        latent=family.latent,
        delta=family.delta is not None,
        indexer=family.indexer is not None,
        scaled_scores=family.scaled_scores,
        experts=mixture,
    )


ARCHITECTURES = {kind: _as_family(kind, row) for kind, row in ROWS.items()}
MIXED = {kind: _as_family(kind, row) for kind, row in MIXED_ROWS.items()}
BOTH_WAYS = {kind: _as_family(kind, row) for kind, row in BOTH_WAYS_ROWS.items()}


def known_as(call: str, config: Config) -> Architecture:
    """Return the architecture of a model's family, which may lack properties of the model."""
    own = ARCHITECTURES.get(config.model_type)
    if own is None:
        names = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"{call}: GGUF has no names for a {config.model_type}; supported families: {names}"
        )
    if not config.causal:
        return BOTH_WAYS.get(config.model_type, own)
    if own.name == "granitehybrid" and own.scales and config.experts is None and _is_plain(config):
        return ARCHITECTURES["granite"]  # llama.cpp's converter writes the same
    return own if config.experts is None else MIXED.get(config.model_type, own)


def _is_plain(config: Config) -> bool:
    """Return whether all layers have attention."""
    return all(map(config.attends, range(config.layers)))


def architecture(call: str, config: Config) -> Architecture:
    """Return the architecture with which llama.cpp runs a model.

    Raises
    ------
    ConfigError
        llama.cpp does not support the family, or would compute something else.
    """
    known = known_as(call, config)
    for problem in (*_of_modules(config, known), *_problems(config, known)):
        raise ConfigError(
            f"{call}: llama.cpp's {known.name} {problem}; GGUF cannot describe this model"
        )
    return known


def _of_modules(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how Dense modules differ from EmbeddingGemma's, which only llama.cpp's class has."""
    names = [module.path for module in config.modules]
    if names and known.name != "gemma-embedding":
        yield f"has no Dense modules, and this model has {' and '.join(names)}"
    elif names and names != [*MODULES]:
        yield f"has the Dense modules {' and '.join(MODULES)}, not {' and '.join(names)}"
    elif any(module.biased or module.tanh for module in config.modules):
        yield "has no biases and activations in Dense modules"
    elif names and config.modules[-1].outputs != config.hidden:
        yield f"has {config.hidden} outputs of {names[-1]}, not {config.modules[-1].outputs}"


def _problems(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how llama.cpp's architecture differs from a model for all inputs."""
    if config.activation not in (known.activation, "silu" if known.name == "bitnet" else None):
        yield f"computes {known.activation}, not {config.activation}"
    if config.latent is not None:
        yield from _problems_of_latent(config, config.latent, known)
    if known.fixed is not None:
        yield from _problems_of_scales(config, *known.fixed)
    if not known.any_head and config.heads * config.dim != config.hidden:
        yield f"has a head dimension of hidden / heads, not {config.heads} heads of {config.dim}"
    if (config.output_bias or config.mlp_bias) and not known.biases:
        yield "has no bias in its output projection and its MLP"
    if known.needs_biases and not (config.output_bias and config.mlp_bias):
        yield "has biases in its output projection and its MLP"
    yield from _problems_of_layers(config, known)
    yield from _problems_of_sizes(config)
    if known.rotates == "chunked":
        count = 0 if config.experts is None else config.experts.count
        yield from _problems_of_chunks(config, count)
    if config.experts is not None and known.experts is not None:
        yield from _problems_of_experts(config, config.experts, known.experts)
    if config.delta is not None and config.delta.key_dim != config.delta.value_dim:
        yield "has key and value heads of the same dimension in layers with a delta rule"
    yield from _problems_of_states(config, known)
    yield from _problems_of_norms(config, known)
    if known.name == "gpt-oss" and not config.output_bias:
        yield "has biases in its attention"
    if known.output == "tied" and not config.tied:
        yield "has no head that is separate from the embedding"
    if known.softcap and not (config.softcap and config.logit_softcap):
        yield "always caps scores and logits"
    yield from _problems_of_positions(config, known)


def _problems_of_norms(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how norms differ."""
    if known.name == "modern-bert" and config.norms.biases:
        yield "has no biases in its norms (norm_bias)"
    if known.name == "phimoe":
        yield "has RMS norms, where this model has LayerNorm"
    if known.name in ("olmoe", "dots1") and config.kv_heads != config.heads:
        yield f"has as many KV heads as query heads (num_key_value_heads={config.heads})"
    if config.delta is not None and config.eps != INNER_EPS:
        yield (
            f"normalizes queries and keys of its delta rule with rms_norm_eps={config.eps:g},"
            f" where this model always uses {INNER_EPS:g}"
        )


def _problems_of_scales(
    config: Config, embedding: float, depth: float, base: float
) -> Iterator[str]:
    """Yield the factors of a MiniCPM that differ from llama.cpp's built-in factors."""
    factors = (
        ("scale_emb", embedding, config.embedding_scale, embedding),
        ("scale_depth", depth, config.residual_scale, depth / math.sqrt(config.layers)),
        ("dim_model_base", base, config.logit_scale, base / config.hidden),
    )
    for name, setting, own, built_in in factors:
        if not math.isclose(own, built_in, rel_tol=1e-6):
            yield f"has {name}={setting:g}"


def _problems_of_latent(config: Config, latent: Latent, known: Architecture) -> Iterator[str]:
    """Yield how latent attention differs."""
    if known.interleaved and not config.interleaved:
        yield "rotates adjacent pairs (rope_interleave)"
    short = latent.queries is not None
    if known.name in ("deepseek2", "mistral4"):
        size = f"of {config.layers} layers and {config.vocab} tokens"
        lite = config.layers in LITE or (config.layers, config.vocab) == LITE_TOO
        if short == lite:
            yield (
                "has no" if lite else "has"
            ) + f" low-rank queries (q_lora_rank) in a model {size}"
    elif config.indexer is not None and config.indexer.dim % HADAMARD:
        yield f"has indexer heads of a multiple of {HADAMARD} elements (index_head_dim)"
    elif short != (known.name == "minicpm3" or config.indexer is not None):
        yield ("has no" if short else "has") + " low-rank queries (q_lora_rank)"


def _problems_of_positions(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how rotary positions differ."""
    rope, local_rope = ropes(config)
    kind = scaling_of(rope)
    if kind not in known.scalings:
        yield f"does not support rotary positions of type {kind}"
    if rope.dim != (dim := full_heads(config)[1]) and not (known.partial or known.latent):
        yield f"rotates whole heads, not {rope.dim} of {dim}"
    if kind == "yarn" and bool((rope.scaling or {}).get("truncate", True)) != known.truncates:
        yield f"{'rounds' if known.truncates else 'does not round'} yarn's columns (truncate)"
    if kind == "yarn" and known.latent and not _one_mscale(rope):
        yield "has the same mscale for positions and scores (mscale_all_dim)"
    elif kind == "yarn" and known.latent and known.name != "deepseek2" and not _is_one(rope):
        yield "has mscale=1 and mscale_all_dim=1"
    if SLIDING not in config.layer_types:
        return
    if known.name == "olmo2" and local_rope != Rope(rope.dim, rope.base):
        yield "has the same rotary positions, not stretched, in sliding layers"
    if known.name in ("gemma3", "gemma4", "gemma-embedding") and (
        local_rope.scaling or kind == "yarn"
    ):
        yield "does not stretch the rotary positions of sliding layers"


def _one_mscale(rope: Rope) -> bool:
    """Return whether yarn scales only the scores of latent attention, like llama.cpp."""
    scaling = rope.scaling or {}
    factor = RULES["yarn"](scaling, 1, rope.dim, rope.base)[1]
    return bool(scaling.get("mscale_all_dim")) and math.isclose(factor, 1, rel_tol=1e-6)


def _is_one(rope: Rope) -> bool:
    """Return whether yarn's scale of scores has the factor that llama.cpp assumes."""
    return bool((rope.scaling or {}).get("mscale_all_dim") == 1)


def _problems_of_states(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how the recurrence of Mamba or of a delta rule differs."""
    space, types = config.space or config.mamba, enumerate(config.layer_types)
    both = {config.attends(layer) for layer, kind in types if kind != MLP} == {True, False}
    if config.conv is not None and config.conv.bias:
        yield "has no bias in its short convolutions (conv_bias)"
    if (known.listed or known.delta) and not (both or config.conv):
        yield (
            "has layers with attention, and layers with a recurrence in place of attention"
            " (layer_types)"
        )
    if known.name == "kimi-linear" and config.delta and config.delta.value_heads != config.heads:
        yield f"has {config.heads} heads in all layers, not {config.delta.value_heads}"
    if space is None or known.name == "granite":
        return
    if known.doubled and space.inner != 2 * config.hidden:
        yield f"has {2 * config.hidden} channels in its layers, not {space.inner} (expand)"
    out_bias = config.space is not None and config.space.out_bias
    if space.bias or out_bias or not space.conv_bias:
        yield "has a bias in its convolution, and none in its projections"
    if config.space is None:
        return
    space = config.space
    if space.norm == "before":
        yield "has a norm after the gate, not before it (mamba_norm_before_gate)"
    if config.model_type == "nemotron_h" and space.least != LEAST:
        yield f"has no key for time_step_min={space.least:g}; it is read as {LEAST:g}"
    elif config.model_type != "nemotron_h" and (space.least > 0 or space.most is not None):
        yield "does not bound time steps (time_step_limit)"


def _problems_of_layers(config: Config, known: Architecture) -> Iterator[str]:
    """Yield how norms of heads, windows and rotation of layers differ."""
    optional = config.query_key_norm in ("heads", "modules") or config.query_key_biases
    if optional and (known.head_norms is None or config.layers < known.head_norms):
        yield "has no norms of single query and key heads in such a model"
    layers, slides = range(config.layers), [kind == SLIDING for kind in config.layer_types]
    fourth = [(layer + 1) % 4 != 0 for layer in layers]
    if known.windows_of is not None and any(slides) != (config.layers == known.windows_of):
        yield f"has windows only in models with {known.windows_of} layers, and always there"
    if known.fourth and any(slides) and slides != fourth:
        yield "has windows in all layers but every fourth"
    if known.name in ("cohere2", "exaone-moe", "gemma4") and not any(slides):
        yield "always has windows"
    rotated = [config.rotates(layer) for layer in layers]
    everywhere = known.rotates == "all" or (known.rotates == "sliding" and not any(slides))
    stated = known.rotates in ("none", "either")
    if not stated and rotated != ([True] * config.layers if everywhere else fourth):
        yield "rotates " + ("all layers" if everywhere else "all layers but every fourth")
    scaled = config.residual_scale != 1 or config.logit_scale != 1
    if scaled and not (known.logit_scale or known.fixed or known.folds):
        yield "does not scale residual sums or logits"
    if config.clip is not None and known.name != "olmo":
        yield "does not clip queries, keys and values"


def _problems_of_chunks(config: Config, count: int) -> Iterator[str]:
    """Yield how a Llama 4 with this number of experts differs."""
    if config.layers < 4:  # llama.cpp aborts if all layers have chunks, or none
        yield "has 4 layers or more: each fourth has no chunks"
    if config.chunk != CHUNK:
        yield f"has chunks of {CHUNK} positions (attention_chunk_size)"
    if ropes(config)[0].growth != GROWTH:
        scale, length = GROWTH
        yield (
            f"scales queries by positions with attn_scale={scale:g} and floor_scale={length:g}"
            " (attn_temperature_tuning)"
        )
    if (config.query_key_norm is not None) != (count != UNNORMED):
        yield f"has norms of queries and keys unless there are {UNNORMED} experts (use_qk_norm)"


def _problems_of_sizes(config: Config) -> Iterator[str]:
    """Yield how shared keys and values, and the inputs of layers, differ."""
    first, types = config.layers - config.shared_layers, config.layer_types
    last = dict(zip(types[:first], range(first), strict=True))  # the last layer of each type
    # llama.cpp takes the last two layers with keys and values, whatever their types
    if any(last.get(kind) != first - (2 if kind == SLIDING else 1) for kind in {*types[first:]}):
        yield (
            "shares the keys and values of two layers: the last with full attention, after the last"
            " with a window (num_kv_shared_layers, layer_types)"
        )
    rows, size = config.layer_inputs
    if size and rows != config.vocab:
        yield f"has {config.vocab} rows in the table of layers (vocab_size_per_layer_input)"


def _problems_of_experts(config: Config, experts: Experts, known: Mixtures) -> Iterator[str]:
    """Yield how a mixture of experts differs."""
    sums = "softmax_of_k" if experts.scores == "softmax" and experts.normalize else experts.scores
    as_known = "softmax_of_k" if known.scores == "softmax" and known.normalize else known.scores
    if sums != as_known and not (known.normalize is None and experts.scores == known.scores):
        key = " (norm_topk_prob)" * (experts.scores == known.scores)
        yield f"chooses experts by {known.scores}, {NORMALIZED[known.normalize]}{key}"
    elif experts.scores == "sigmoid" and known.normalize not in (None, experts.normalize):
        yield f"has weights of experts {NORMALIZED[known.normalize]}"
    if experts.corrected != known.corrected:
        yield ("has a" if known.corrected else "has no") + " bias for the choice of experts"
    if experts.groups not in (None, 1) and not known.groups:
        yield "does not choose groups of experts first"
    if experts.scale != 1 and not known.scale:
        yield "does not scale the sum of experts"
    if known.clamped and (experts.limit, experts.alpha) != (7.0, 1.702):
        yield "limits gates at 7 and multiplies them by 1.702"
    yield from _problems_of_shared(experts, known)
    if known.dense != "periodic":
        yield from _problems_of_dense(config, experts, known)


def _problems_of_dense(config: Config, experts: Experts, known: Mixtures) -> Iterator[str]:
    """Yield how the choice of layers with experts differs."""
    leading, step = dense_layers(experts)
    layers = range(len(experts.sparse))
    if known.dense == "every":
        if step_of(experts) is None:
            yield "has experts in every n-th layer"
    elif known.dense == "single":
        if config.mlp_bias:
            yield "has no biases in an MLP or in experts"
        if [kind == MLP for kind in config.layer_types] != [*experts.sparse]:
            yield "has experts in all MLP layers"
    elif known.dense is None and not all(experts.sparse):
        yield "has experts in all layers"
    elif known.dense == "leading" and step != 1:
        yield "has experts in all layers after the leading dense ones"
    elif [n >= leading and (n + 1) % step == 0 for n in layers] != [*experts.sparse]:
        yield "has experts in every n-th layer, up to the last"


def _problems_of_shared(experts: Experts, known: Mixtures) -> Iterator[str]:
    """Yield how the shared expert, and the number of experts per token, differ."""
    if experts.chosen:
        yield "has the same number of experts per token in all layers"
    if experts.shared and known.shared is None:
        yield "has no shared expert"
    if known.shared == "counted" and not experts.shared:
        yield "has a shared expert"
    if known.shared == "counted" and experts.shared % experts.inner:
        yield "has a shared expert whose size is a multiple of the other experts' size"
    if known.shared_gate != experts.shared_gate:
        yield f"has {'a' if known.shared_gate else 'no'} gate of its shared expert"


def dense_layers(experts: Experts) -> tuple[int, int]:
    """Return (count, n): the first ``count`` layers are dense; then every n-th has experts."""
    places = [n for n, sparse in enumerate(experts.sparse) if sparse]
    if not places:
        return len(experts.sparse), 1
    step = places[1] - places[0] if len(places) > 1 else 1
    return (places[0], 1) if step == 1 else (max(0, places[0] + 1 - step), step)


def step_of(experts: Experts) -> int | None:
    """Return n if every n-th layer has experts, otherwise None."""
    layers = range(1, len(experts.sparse) + 1)
    return next((n for n in layers if [x % n == 0 for x in layers] == [*experts.sparse]), None)


def warnings_of(config: Config, known: Architecture) -> Iterator[str]:
    """Yield notes about what llama.cpp computes differently."""
    rope, _ = ropes(config)
    kind = scaling_of(rope)
    if config.activation == "relu2" and known.name == "bitnet":
        yield (
            "llama.cpp's bitnet computes SiLU where this model has a squared ReLU: outputs differ"
        )
    if kind == "yarn" and not known.truncates:
        yield "llama.cpp rounds yarn's columns, and this model does not: outputs differ slightly"
    if not config.causal and config.activation == "gelu":
        yield "llama.cpp computes GELU by its approximation with tanh: vectors differ slightly"
    if config.draft_heads:
        yield (
            "draft heads (multi-token prediction) are not in the file: this model writes the same"
            " tokens without them; a folder from merge or save has them"
        )
    if config.balanced:
        yield "GGUF has no coefficient of the router loss: a loaded model trains without it"
    if config.latent is not None and config.eps != INNER_EPS:
        yield (
            f"norms inside latent attention use rms_norm_eps={config.eps:g} in llama.cpp, and"
            f" {INNER_EPS:g} in this model: outputs differ slightly"
        )
    if SLIDING in config.layer_types and not known.windows:
        yield (
            f"llama.cpp's {known.name} has no sliding layers: beyond {config.window} tokens,"
            " outputs differ"
        )
    if config.space is not None and config.space.least > 0:
        yield (
            "llama.cpp does not bound time steps, which are at least"
            f" {config.space.least:g} in this model: outputs may differ slightly"
        )
    if kind == "dynamic":
        yield f"beyond {config.positions} tokens, llama.cpp does not stretch positions (dynamic)"
    if kind == "longrope":
        yield (
            "llama.cpp uses the long rotary factors if its context (n_ctx) is above"
            f" {rope.original} tokens, whatever the length of the text"
        )
    for key, value in BETAS.items():
        if kind == "yarn" and (rope.scaling or {}).get(key) not in (None, value):
            yield f"llama.cpp ignores {key} of yarn and uses {value:g}"


def file_window(config: Config) -> int | None:
    """Return the window in a file: of an encoder, the keys on both sides."""
    return None if config.window is None else config.window * (1 if config.causal else 2)


def full_heads(config: Config) -> tuple[int, int]:
    """Return the number of KV heads and the head dimension of layers with full attention."""
    return config.full_heads or (config.kv_heads, config.dim)


def ropes(config: Config) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers without a window, and of layers with one."""
    named = (config.ropes.get(kind) for kind in (CHUNKED, FULL, SLIDING))
    full = next(filter(None, named), Rope(config.dim, 10_000.0))
    return full, config.ropes.get(SLIDING) or full


def scaling_of(rope: Rope) -> str:
    """Return the scaling type of rotary positions, such as yarn."""
    scaling: Any = rope.scaling or {}
    return str(scaling.get("rope_type", "default"))


def score_factor(config: Config, known: Architecture) -> float:
    """Return the factor of query weights that corrects llama.cpp's scale of scores."""
    if known.scales or known.latent or not known.scaled_scores:
        return 1.0
    length = config.hidden // config.heads if config.layers == known.deep else config.dim
    factor = config.scale * math.sqrt(length)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor


def factor_of(config: Config, known: Architecture, stored: str) -> Any:
    """Return the factor of a parameter in a file: a number, or a column of numbers."""
    *_, module, end = stored.split(".")
    scaled = "q_norm" if config.query_key_norm else "q_proj"
    factor = score_factor(config, known) if module == scaled else 1.0
    if not known.folds:
        return factor
    inputs, outputs = config.attention_scales
    factors: dict[str, Any] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), inputs if end == "weight" else 1.0),
        "o_proj": outputs,
        "gate_proj": config.gate_scale,
        "down_proj": config.down_scale,
        "embed_tokens": config.embedding_scale,
        "lm_head": config.logit_scale,
    }
    if config.space is not None:
        scales = config.space.scales or (1.0,) * len(config.space.sizes)
        rows = np.repeat(scales, config.space.sizes)[:, None] * config.space.scale
        factors |= {"in_proj": rows, "out_proj": config.space.out_scale}
    return factor * factors.get(module, 1.0)


def has_two_tables(config: Config, known: Architecture) -> bool:
    """Return whether a file has a separate head though the model's head is the embedding table."""
    differ = known.folds and config.embedding_scale != config.logit_scale
    return config.tied and (known.output == "own" or differ)
