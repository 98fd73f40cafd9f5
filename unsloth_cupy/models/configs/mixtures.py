"""The mixture of experts of each family: keys of config.json, and names of tensors in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .config import CORRECTION, EXPERT_BIAS, STACKS, UNGATED


@dataclass(frozen=True)
class Mixture:
    """The experts of one model type: properties, and keys of config.json that have their values.

    ``layers`` chooses the layers with experts:

    all         all layers
    stepped     every decoder_sparse_step-th layer that is not in mlp_only_layers
    late        all layers after the first ones, which the key ``first`` counts
    numbered    the layers in moe_layers; without it, every interleave_moe_layer_step-th
    between     every moe_layer_interval-th, from moe_layer_start_index to moe_layer_end_index
    periodic    every expert_layer_period-th, from expert_layer_offset on, if there are 2 experts
    listed      the layers that mlp_layer_types lists as sparse; without it, all after the first
    listed or late  the same; without it, as late

    paired      every second layer, from the first one on

    ``grouped`` is whether routers choose groups first, or the key topk_method, which names
    "group_limited_greedy" if they do.  ``Experts`` documents ``files``.
    """

    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    k: tuple[str, ...] = ("num_experts_per_tok",)
    inner: str = "intermediate_size"
    layers: str = "all"
    first: str = "first_k_dense_replace"
    scores: str = "softmax"
    normalize: str | bool = True
    grouped: bool | str = False
    scale: str | None = None
    mixer: bool = False  # the router is ``sparse_mixer``
    correction: str | None = None  # prefix of the name of the choice's bias; None: no bias
    correction_name: str = CORRECTION
    correction_if: str | None = None  # key that says whether there is this bias
    correction_row: bool = False  # files store this bias as a matrix with one row
    wide: bool = False
    biases: bool = False
    clamped: bool = False
    shared: tuple[str, ...] = ()  # keys whose product is the inner size of the shared expert
    shared_gate: bool = False
    shared_in: str = "shared_experts"
    shared_beside: bool = False  # whether the shared expert is outside of ``module``
    optional: bool = False  # some models of the family have no experts: count 0, or no sparse layer
    balanced: bool = True  # transformers adds the router's loss if output_router_logits is true
    module: str = "mlp"
    router: str = "gate"
    latent: str | None = None
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    zero: str | None = None  # key of the number of experts that return their input
    # as in ``Experts``
    narrow: bool = False
    shortcut: bool = False
    beside: bool = False
    before: bool = False
    halves: bool = False
    pairs: bool = False


def _of_files(module: str, *names: str) -> dict[str, tuple[str, ...]]:
    """Return the names in files of each expert's gate, up and down, by the names of stacks."""
    gate, up, down = (f"{module}.experts.{{}}.{name}.weight" for name in names)
    return {f"mlp.experts.{STACKS[0]}": (gate, up), f"mlp.experts.{STACKS[1]}": (down,)}


BY_NAME = _of_files("mlp", "gate_proj", "up_proj", "down_proj")
SPARSE = "block_sparse_moe"
W123 = _of_files(SPARSE, "w1", "w3", "w2")
KEYS: Mapping[str, Any] = {  # defaults of keys that most families read
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_experts": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
NOISE: Mapping[str, Any] = {"router_jitter_noise": 0.0}  # of pretraining; not applied, like dropout
STEPPED: Mapping[str, Any] = {
    **KEYS,
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
MIXTRAL = Mixture(files={**W123, "mlp.gate.weight": (f"{SPARSE}.gate.weight",)})
QWEN3 = Mixture(
    inner="moe_intermediate_size", layers="stepped", normalize="norm_topk_prob", files=BY_NAME
)
QWEN2 = Mixture(
    count=("num_experts", "num_local_experts"),
    inner="moe_intermediate_size",
    layers="stepped",
    normalize="norm_topk_prob",
    shared=("shared_expert_intermediate_size",),
    shared_gate=True,
    shared_in="shared_expert",
    files=BY_NAME,
)
QWEN35 = replace(QWEN2, layers="all", normalize=True)
GPT_OSS = Mixture(
    scores="softmax_of_k", biases=True, clamped=True, router="router", transposed=True
)
OLMOE = Mixture(normalize="norm_topk_prob", files=BY_NAME)
GRANITE = Mixture(
    scores="softmax_of_k",
    module=SPARSE,
    router="router",
    files={
        f"{SPARSE}.experts.{STACKS[0]}": (f"{SPARSE}.input_linear.weight",),
        f"{SPARSE}.experts.{STACKS[1]}": (f"{SPARSE}.output_linear.weight",),
        f"{SPARSE}.router.weight": (f"{SPARSE}.router.layer.weight",),
    },
)
GRANITE_HYBRID = replace(
    GRANITE,
    shared=("shared_intermediate_size",),
    shared_in="shared_mlp",
    shared_beside=True,
    optional=True,
)
GRANITE_SHARED = replace(GRANITE_HYBRID, optional=False)
HUNYUAN = Mixture(
    count=("num_experts", "num_local_experts"),
    k=("moe_topk", "num_experts_per_tok"),
    wide=True,
    shared=("intermediate_size",),
    shared_in="shared_mlp",
    balanced=False,
    router="gate.wg",
    files=BY_NAME,
)
GEMMA4 = Mixture(
    count=("num_experts",),
    k=("top_k_experts",),
    inner="moe_intermediate_size",
    optional=True,
    balanced=False,
    module="",
    router="router.proj",
    beside=True,
)
LLAMA4 = Mixture(
    layers="numbered",
    scores="sigmoid",
    normalize=False,
    shared=("intermediate_size",),
    shared_in="shared_expert",
    balanced=False,
    module="feed_forward",
    router="router",
    transposed=True,
    before=True,
    halves=True,
)
PHIMOE = Mixture(
    mixer=True, router="router", files={**W123, "mlp.router.weight": (f"{SPARSE}.gate.weight",)}
)
GLM4 = Mixture(
    count=("n_routed_experts", "num_local_experts"),
    inner="moe_intermediate_size",
    layers="late",
    scores="sigmoid",
    normalize="norm_topk_prob",
    grouped=True,
    scale="routed_scaling_factor",
    correction="gate.",
    wide=True,
    shared=("moe_intermediate_size", "n_shared_experts"),
    balanced=False,
    files=BY_NAME,
)
MISTRAL4 = replace(GLM4, scores="softmax", correction=None, wide=False, files={}, pairs=True)
DEEPSEEK2 = replace(GLM4, scores="softmax", normalize=False, grouped="topk_method", correction=None)
LISTED = replace(GLM4, layers="listed")
DSA = replace(GLM4, layers="listed or late")
EXAONE = replace(
    LISTED,
    layers="listed or late",
    count=("num_experts", "num_local_experts"),
    shared=("moe_intermediate_size", "num_shared_experts"),
    files={
        **BY_NAME,
        "mlp.gate.e_score_correction_bias": ("mlp.e_score_correction_bias",),
    },
)
NEMOTRON_H = replace(
    LISTED,
    shared=("moe_shared_expert_intermediate_size",),
    optional=True,
    module="mixer",
    latent="moe_latent_size",
    files={f"mixer.experts.{n}": (f"mixer.experts.{{}}.{n}.weight",) for n in UNGATED},
)
LFM2 = Mixture(  # weights are divided by their sum + 1e-6, which no text brings near to 1e-6
    count=("num_experts",),
    inner="moe_intermediate_size",
    layers="late",
    first="num_dense_layers",
    scores="sigmoid",
    normalize="norm_topk_prob",
    scale="routed_scaling_factor",
    correction="",
    correction_name=EXPERT_BIAS,
    correction_if="use_expert_bias",
    balanced=False,
    module="feed_forward",
    files={
        f"feed_forward.experts.{stack}": tuple(
            f"feed_forward.experts.{{}}.{name}.weight" for name in names
        )
        for stack, names in zip(STACKS, (("w1", "w3"), ("w2",)), strict=True)
    },
)
JAMBA = Mixture(
    count=("num_experts", "num_local_experts"),
    layers="periodic",
    normalize=False,
    optional=True,
    module="feed_forward",
    router="router",
    files={
        name.replace("mlp.", "feed_forward."): tuple(
            each.replace("mlp.", "feed_forward.") for each in names
        )
        for name, names in BY_NAME.items()
    },
)
KIMI = replace(
    LISTED,
    count=("num_experts", "num_local_experts"),
    files={
        **W123,
        **{
            f"mlp.{name}": (f"{SPARSE}.{name}",)
            for name in (
                *("gate.weight", "gate.e_score_correction_bias"),
                *(f"shared_experts.{each}_proj.weight" for each in ("gate", "up", "down")),
            )
        },
    },
)
BAILING = replace(LISTED, count=KIMI.count)
LONGCAT = Mixture(
    count=("n_routed_experts",),
    k=("moe_topk",),
    inner="expert_ffn_hidden_size",
    layers="paired",
    normalize=False,
    scale="routed_scaling_factor",
    correction="router.",
    wide=True,
    narrow=True,
    balanced=False,
    router="router.classifier",
    files=BY_NAME,
    zero="zero_expert_num",
    shortcut=True,
)
ERNIE = Mixture(
    count=("moe_num_experts", "num_experts"),
    k=("moe_k", "num_experts_per_tok"),
    inner="moe_intermediate_size",
    layers="between",
    correction="gate.moe_statics.",
    correction_row=True,
    wide=True,
    shared=("moe_intermediate_size", "moe_num_shared_experts"),
    files={
        **BY_NAME,
        "mlp.gate.moe_statics.e_score_correction_bias": (
            "mlp.moe_statics.e_score_correction_bias",
        ),
    },
)
MINIMAX = Mixture(
    scores="sigmoid",
    correction="",
    files={
        **W123,
        "mlp.gate.weight": (f"{SPARSE}.gate.weight",),
        "mlp.e_score_correction_bias": (f"{SPARSE}.e_score_correction_bias",),
    },
)
