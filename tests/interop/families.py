"""Tiny random models of transformers, and a training step."""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
NINE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "olmo2": {},
}
SHARED = {  # of 4 layers the last two have the keys and values of the others
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "bitnet": {},
    "bloom": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"sliding_window": 5, "logit_scale": 0.3},
    "diffllama": {},
    "doge": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 5},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "gemma3n_text": SHARED | {"laurel_rank": 8, "altup_num_inputs": 2},
    "gemma4_text": SHARED | {"global_head_dim": 16},
    "glm": {},
    "glm4": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    "granitemoe": {"num_local_experts": 2, "num_experts_per_tok": 1, "logits_scaling": 2.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "kimi_linear": {
        **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "linear_num_heads": 2},
        **{"linear_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {},
    "lfm3": {"sliding_window": 5, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "longcat_flash": {
        **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "moe_topk": 2},
        **{"n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "ministral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 2, "output_router_logits": True},
    "mpt": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {"sliding_window": 5},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"dropout": 0.0},
    "persimmon": {},
    "phi": {},
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_moe": ROUTED,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": 5},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_mem_blocks": 1,
    },
}
LATENT = ROUTED | {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
SPARSE = {"index_topk": 5, "index_head_dim": 16, "index_n_heads": 2}
LOCAL = ROUTED | {"num_local_experts": 4}
N_ROUTED = ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
N_ROUTED |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
MIXTURES: dict[str, dict[str, Any]] = {  # that ask transformers' registry of expert functions
    "afmoe": ROUTED | {"num_dense_layers": 1, "sliding_window": 5},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "bailing_hybrid": LATENT | {"num_local_experts": 4, "layer_types": DELTA["layer_types"]},
    "cohere2_moe": ROUTED | {"sliding_window": 5},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | SPARSE,
    "deepseek_v4": LOCAL | {"n_routed_experts": 4, "sliding_window": 5},
    "dots1": N_ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone_moe": ROUTED | {"sliding_window": 5},
    "flex_olmo": ROUTED,
    "glm4_moe": N_ROUTED,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT | SPARSE,
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL,
    "hunyuan_v1_moe": ROUTED | {"moe_topk": 2},
    "hy_v3": ROUTED | {"first_k_dense_replace": 1},
    "jamba": ROUTED,
    "kolibri1": ROUTED,
    "laguna": ROUTED | {"sliding_window": 5, "shared_expert_intermediate_size": 32},
    "lfm2_moe": ROUTED | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mellum": ROUTED | {"sliding_window": 5},
    "mimo_v2_flash": N_ROUTED | {"sliding_window": 5},
    "minimax": LOCAL,
    "minimax_m2": LOCAL,
    "minimax_m3_vl_text": LOCAL,
    "mixtral": LOCAL,
    "nemotron_h": N_ROUTED,
    "olmoe": ROUTED,
    "phimoe": LOCAL | {"router_jitter_noise": 0.01},
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": ROUTED | DELTA | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": ROUTED | {"norm_topk_prob": True},
    "qwen3_next": ROUTED | DELTA | {"shared_expert_intermediate_size": 32},
    "solar_open": N_ROUTED,
}
HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "mamba2",
    "qwen3_5_text",
    "zamba2",
)
LOOSE = {  # their gradients depend on one number: the difference of two attentions, or a decay
    "lambda_": 2e-5,
    "A_log": 5e-5,
    "dt_bias": 5e-5,
}
Step = dict[str, torch.Tensor]


def model_of(family: str, **options: Any) -> Any:
    """Return a model whose parameters are all random, including those of norms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | (NINE | OTHERS).get(family, {}) | options)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def texts(scene: str) -> dict[str, Any]:
    """Return two texts: padded on the ``left`` or ``right``, ``whole``, or ``packed`` of two."""
    tokens = torch.arange(48).reshape(2, 24) * 7 % 94 + 3
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
    if scene == "packed":
        positions = torch.cat([torch.arange(10), torch.arange(14)])
        return inputs | {"position_ids": positions.expand(2, -1).contiguous()}
    if scene in ("left", "right"):
        padding = slice(7) if scene == "left" else slice(-7, None)
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][0, padding] = 0
        inputs["labels"][0, padding] = -100
        if scene == "left":
            inputs["labels"][0, 7] = -100  # predicted by a padding row, which sees no key
    return inputs


def step(model: Any, scene: str = "left", call: Any = None) -> Step:
    """Return the loss and the gradients of a training step."""
    model.zero_grad()
    loss = (model if call is None else call)(**texts(scene)).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads | {"loss": loss.detach()}


def double(model: Any, scene: str) -> Step:
    """Return the same step in float64."""
    wide = copy.deepcopy(model).double()
    if wide._can_set_experts_implementation():  # torch's grouped product has no float64
        wide.set_experts_implementation("eager")
    return step(wide, scene)


def check(actual: Step, plain: Step, model: Any, scene: str) -> None:
    """Raise if a patched step differs from the plain step of the model, which is unpatched again.

    If a gradient is the small remainder of a sum, its error against float64 may be a few times as
    large as that of the plain step.
    """
    assert actual.keys() == plain.keys()
    exact: Step = {}
    for name, expected in plain.items():
        error = (actual[name] - expected).abs().max()
        size = expected.abs().max()
        if name == "loss":
            assert error <= 1e-6 * max(1.0, float(size)), (scene, float(error))
            continue
        most = next((share for part, share in LOOSE.items() if part in name), 5e-6)
        if error > most * size:
            exact = exact or double(model, scene)
            rest = (expected - exact[name]).abs().max()
            assert error <= 4 * rest, (scene, name, float(error / size), float(rest / size))
