"""The keys of config.json that transformers' class of each model type reads, and their defaults.

    keys_of("llama")["hidden_act"]        "silu"; None if the default is null or absent

``python -m tests.models.class_keys`` writes the table.  Every type reads the keys of row ``all``.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    """Return the parsed table: keys and defaults by model type."""
    rows: dict[str, dict[str, Any]] = {}
    for line in TABLE.replace("\n ", " ").splitlines():
        kind, _, keys = line.partition(": ")
        pairs = (each.partition("=") for each in keys.split())
        rows[kind] = {key: json.loads(value or "null") for key, _, value in pairs}
    return rows


def keys_of(kind: Any) -> Mapping[str, Any] | None:
    """Return the keys that the class of a model type reads; None for a type without a row."""
    known = isinstance(kind, str) and kind in _rows()
    return {**_rows()["all"], **_rows()[kind]} if known else None


def own_keys(kind: str) -> Mapping[str, Any]:
    """Return the keys in the row of a class, without those of row ``all``."""
    return _rows()[kind]


VERSION = "5.24.0"
TABLE = """\
all: architectures attention_chunk_size attention_dropout=0.0 attention_scaling attn_implementation
 base_model_pp_plan base_model_tp_plan bos_token_id cache_dir chain_hidden_post_norm
 chunk_size_feed_forward=0 classifier_dropout commit_message compile_config config config_class
 create_compatible_mapping default_rope_type default_theta device_map device_mesh disable_mmap
 disk_offload_folder distributed_config dtype embed_dim eos_token_id=2 experts_implementation fget
 first_k_dense_replace force_download fusion_config get get_config_class gguf_file
 gradient_checkpointing head_dim hf_quantizer hidden_dropout hidden_size=4096 id2label
 ignore_keys_at_rope_validation ignore_mismatched_sizes init_kwargs init_std initializer_factor
 initializer_range=0.02 is_causal is_encoder_decoder=false is_heterogeneous is_quantized
 kv_sharing_modes label2id layer_types local_files_only logits_mup_width_multiplier
 max_position_embeddings=2048 max_seq_len_cached mlp_layer_types model_type mtp_hidden_states_first
 mtp_layer_types mtp_mlp_layer_types mtp_per_layer_config name_or_path num_attention_heads=32
 num_heads num_hidden_layers=32 num_key_value_heads num_labels num_mtp_layers number_of_conv_states
 optional original_inv_freq original_max_position_embeddings original_max_seq_len output_attentions
 output_hidden_states=false pad_token_id partial_rotary_factor per_layer_config
 pretrained_model_name_or_path problem_type proxies quant_method quantization_config register_buffer
 repo_id return_dict=true return_unused_kwargs revision rms_norm_eps=1e-06 rope_parameters
 rope_scaling rope_theta=10000.0 rope_type sanitize_kernel_mapping sep_token_id sharded_metadata
 sliding_window sub_configs sub_configs_defaults subfolder tie_last_hidden_states
 tie_word_embeddings=false token token_classification_bias torch_dtype transformers_version
 transformers_weights trust_remote_code unpadded_vocab_size vocab_size=32000 weight_mapping
 weights_only
apertus: attention_bias=false hidden_act="xielu" intermediate_size=14336
 max_position_embeddings=65536 rms_norm_eps=1e-05 rope_theta=12000000.0 use_cache=true
 vocab_size=131072
arcee: attention_bias=false eos_token_id=128001 hidden_act="relu2" hidden_size=2560
 intermediate_size=18432 max_position_embeddings=4096 mlp_bias=false rms_norm_eps=1e-05
 use_cache=true
aya_vision: adapter_layer_norm_eps=1e-06 downsample_factor=2 image_token_id image_token_index=255036
 text_config tie_word_embeddings=true vision_config vision_feature_layer=-1
 vision_feature_select_strategy="full"
bailing_hybrid: attention_bias=false eos_token_id=156895 first_k_dense_replace=2 head_dim=128
 hidden_act="silu" hidden_size=2560 intermediate_size=6144 kda_lower_bound=-5.0 kda_safe_gate=true
 kv_lora_rank=512 layer_group_size=6 linear_conv_kernel_dim linear_head_dim linear_num_heads
 max_position_embeddings=262144 model_max_length moe_intermediate_size=768 moe_renormalize
 mtp_loss_scaling_factor=0.0 n_group=8 n_shared_experts=1 norm_topk_prob=true num_expert_group
 num_experts num_experts_per_tok=8 num_experts_per_token num_hidden_layers=42 num_key_value_heads=32
 num_local_experts=512 num_mtp_layers=1 num_nextn_predict_layers num_shared_experts
 output_router_logits=false pretraining_tp=1 q_lora_rank qk_nope_head_dim=128 qk_rope_head_dim=64
 routed_scaling_factor=2.5 short_conv_kernel_size=4 topk_group=4 use_cache=true v_head_dim=128
 vocab_size=157184
bamba: attention_bias=false attn_layer_indices hidden_act="silu" intermediate_size=14336
 layers_block_type mamba_chunk_size=256 mamba_conv_bias=true mamba_d_conv=4 mamba_d_head="auto"
 mamba_d_state=256 mamba_expand=2 mamba_n_groups=1 mamba_n_heads=128 mamba_proj_bias=false
 max_position_embeddings=262144 mlp_bias=false num_key_value_heads=8 num_logits_to_keep=1
 rms_norm_eps=1e-05 time_step_limit use_cache=true vocab_size=128000 z_loss_coefficient=0.0
bert: add_cross_attention=false attention_dropout attention_probs_dropout_prob=0.1 embedding_size
 eos_token_id hidden_act="gelu" hidden_dropout_prob=0.1 hidden_size=768 intermediate_size=3072
 is_decoder=false layer_norm_eps=1e-12 max_position_embeddings=512 num_attention_heads=12
 num_hidden_layers=12 rms_norm_eps rope_theta tie_word_embeddings=true type_vocab_size=2
 use_cache=true vocab_size=30522
bitnet: attention_bias=false eos_token_id=128001 hidden_act="relu2" hidden_size=2560
 intermediate_size=6912 num_attention_heads=20 num_hidden_layers=30 num_key_value_heads=5
 rms_norm_eps=1e-05 rope_theta=500000.0 use_cache=true vocab_size=128256
cohere: attention_bias=false eos_token_id=255001 hidden_act="silu" hidden_size=8192
 intermediate_size=22528 layer_norm_eps=1e-05 logit_scale=0.0625 max_position_embeddings=8192
 num_attention_heads=64 num_hidden_layers=40 rms_norm_eps rope_theta=500000.0
 tie_word_embeddings=true use_cache=true use_qk_norm=false vocab_size=256000
cohere2: attention_bias=false eos_token_id=255001 hidden_act="silu" hidden_size=8192
 intermediate_size=22528 layer_norm_eps=1e-05 logit_scale=0.0625 max_position_embeddings=8192
 num_attention_heads=64 num_hidden_layers=40 rms_norm_eps sliding_window=4096 sliding_window_pattern
 tie_word_embeddings=true use_cache=true vocab_size=256000
cohere2_vision: alignment_intermediate_size=36864 downsample_factor=2 image_token_id text_config
 tie_word_embeddings=true vision_config
deepseek_v2: attention_bias=false first_k_dense_replace=0 hidden_act="silu" intermediate_size=11008
 kv_lora_rank=512 mlp_bias=false moe_intermediate_size=1407 n_group n_routed_experts=64
 n_shared_experts=2 norm_topk_prob=false num_experts num_experts_per_tok output_router_logits=false
 pretraining_tp=1 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64
 routed_scaling_factor=1.0 topk_group topk_method="greedy" use_cache=true v_head_dim=128
 vocab_size=102400
deepseek_v3: attention_bias=false eos_token_id=1 first_k_dense_replace=3 hidden_act="silu"
 hidden_size=7168 intermediate_size=18432 kv_lora_rank=512 max_position_embeddings=4096
 moe_intermediate_size=2048 n_group=8 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=true
 num_attention_heads=128 num_experts_per_tok=8 num_hidden_layers=61 num_key_value_heads=128
 num_local_experts num_mtp_layers=1 num_nextn_predict_layers output_router_logits=false
 pretraining_tp=1 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64 rope_interleave=true
 routed_scaling_factor=2.5 topk_group=4 use_cache=true v_head_dim=128 vocab_size=129280
deepseek_v32: attention_bias=false eos_token_id=1 first_k_dense_replace=3 head_dim=64
 hidden_act="silu" hidden_size=7168 index_head_dim=128 index_n_heads=64 index_topk=2048
 intermediate_size=18432 kv_lora_rank=512 max_position_embeddings=163840 mlp_bias=false
 moe_intermediate_size=2048 n_group=8 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=true
 num_attention_heads=128 num_experts num_experts_per_tok=8 num_hidden_layers=61
 num_key_value_heads=128 num_local_experts output_router_logits=false q_lora_rank=1536
 qk_nope_head_dim=128 qk_rope_head_dim=64 routed_scaling_factor=2.5 topk_group=4 use_cache=true
 v_head_dim=128 vocab_size=129280
dots1: attention_bias=false eos_token_id first_k_dense_replace=0 hidden_act="silu" hidden_size=4608
 intermediate_size=10944 max_window_layers=62 moe_intermediate_size=1408 n_group=1 n_routed_experts
 n_shared_experts norm_topk_prob=false num_experts_per_tok num_hidden_layers=62
 num_key_value_heads=32 num_local_experts output_router_logits=false routed_scaling_factor=1.0
 sliding_window=4096 topk_group=1 use_cache=true vocab_size=152064
embedding_gemma2: audio_config audio_token_id boa_token_id boi_token_id eoa_token_index=258883
 eoi_token_id image_token_id text_config video_token_id vision_config
embedding_gemma2_text: attention_bias=false embedding_dim=768 eos_token_id=1 global_head_dim
 head_dim=256 hidden_activation="gelu_pytorch_tanh" hidden_size=512 hidden_size_per_layer_input=512
 intermediate_size=2048 max_position_embeddings=262144 num_attention_heads=4
 num_global_key_value_heads num_hidden_layers=24 num_key_value_heads=2 sliding_window=512
 sliding_window_pattern tie_word_embeddings vocab_size=262144
ernie4_5: attention_dropout head_dim=128 hidden_act="silu" hidden_size=1024 intermediate_size=3072
 max_position_embeddings=131072 num_attention_heads=16 num_hidden_layers=18 num_key_value_heads=2
 rms_norm_eps=1e-05 rope_theta=500000.0 tie_word_embeddings=true use_bias=false use_cache=true
 vocab_size=103424
ernie4_5_moe: attention_dropout hidden_act="silu" hidden_size=2560 intermediate_size=12288
 max_position_embeddings=131072 moe_intermediate_size=1536 moe_k=6 moe_layer_end_index=-1
 moe_layer_interval=1 moe_layer_start_index=1 moe_norm_min=1e-12 moe_num_experts=64
 moe_num_shared_experts=2 num_attention_heads=20 num_experts num_experts_per_tok
 num_hidden_layers=28 num_key_value_heads=4 output_router_logits=false rms_norm_eps=1e-05
 rope_theta=500000.0 router_aux_loss_coef=0.001 tie_word_embeddings=true use_bias=false
 use_cache=true vocab_size=103424
exaone4: hidden_act="silu" intermediate_size=16384 num_key_value_heads=32 rms_norm_eps=1e-05
 sliding_window=4096 sliding_window_pattern=4 use_cache=true vocab_size=102400
exaone_moe: eos_token_id=53 first_k_dense_replace=1 hidden_act="silu" intermediate_size=16384
 moe_intermediate_size=1024 n_group=1 norm_topk_prob=true num_experts=64 num_experts_per_tok=8
 num_key_value_heads=32 num_shared_experts=1 output_router_logits=false rms_norm_eps=1e-05
 routed_scaling_factor=2.5 sliding_window=4096 sliding_window_pattern=4 topk_group=1 use_cache=true
 vocab_size=102400
falcon_h1: attention_bias=false attention_in_multiplier=1.0 attention_out_multiplier=1.0
 embedding_multiplier=1.0 get_text_config hidden_act="silu" intermediate_size=14336
 key_multiplier=1.0 layers_block_type lm_head_multiplier=1.0 mamba_chunk_size=256
 mamba_conv_bias=true mamba_d_conv=4 mamba_d_head="auto" mamba_d_ssm=1024 mamba_d_state=256
 mamba_expand=2 mamba_n_groups=1 mamba_n_heads=128 mamba_norm_before_gate=true mamba_proj_bias=false
 mamba_rms_norm=false max_position_embeddings=8192 mlp_bias=false mlp_multipliers
 num_key_value_heads=8 num_logits_to_keep=1 projectors_bias=false rms_norm_eps=1e-05
 ssm_in_multiplier=1.0 ssm_multipliers ssm_out_multiplier=1.0 time_step_limit use_cache=true
 vocab_size=128000
flex_olmo: attention_bias=false eos_token_id=100257 hidden_act="silu" intermediate_size=11008
 max_position_embeddings=4096 norm_topk_prob=false num_experts=7 num_experts_per_tok=5
 num_local_experts output_router_logits=false rope_theta=500000.0 router_aux_loss_coef=0.01
 use_cache=true vocab_size=100352
gemma: attention_bias=false eos_token_id=1 head_dim=256 hidden_act="gelu_pytorch_tanh"
 hidden_size=3072 intermediate_size=24576 max_position_embeddings=8192 num_attention_heads=16
 num_hidden_layers=28 num_key_value_heads=16 tie_word_embeddings=true use_bidirectional_attention
 use_cache=true vocab_size=256000
gemma2: attention_bias=false attn_logit_softcapping=50.0 eos_token_id=1 final_logit_softcapping=30.0
 head_dim=256 hidden_activation="gelu_pytorch_tanh" hidden_size=2304 intermediate_size=9216
 max_position_embeddings=8192 num_attention_heads=8 num_hidden_layers=26 num_key_value_heads=4
 query_pre_attn_scalar=256 sliding_window=4096 tie_word_embeddings=true use_bidirectional_attention
 use_cache=true vocab_size=256000
gemma3: boi_token_id boi_token_index=255999 eoi_token_id eoi_token_index=256000 image_token_id
 image_token_index=262144 mm_tokens_per_image=256 text_config tie_word_embeddings=true vision_config
gemma3_text: attention_bias=false attn_logit_softcapping eos_token_id=1 final_logit_softcapping
 head_dim=256 hidden_activation="gelu_pytorch_tanh" hidden_size=2304 image_size
 intermediate_size=9216 layer_norm_eps max_position_embeddings=131072 mm_tokens_per_image
 num_attention_heads=8 num_hidden_layers=26 num_key_value_heads=4 patch_size
 query_pre_attn_scalar=256 rope_local_base_freq rope_theta sliding_window=4096
 sliding_window_pattern text_config tie_word_embeddings=true use_bidirectional_attention=false
 use_cache=true vision_config vocab_size=262208
gemma4: audio_config audio_token_id boa_token_id boi_token_id eoa_token_index=258883 eoi_token_id
 image_token_id text_config tie_word_embeddings=true video_token_id vision_config
gemma4_text: attention_bias=false attention_context_left attention_context_right
 attention_invalid_logits_value attention_k_eq_v=false attention_logit_cap enable_moe_block=false
 eos_token_id=1 final_logit_softcapping get_text_config global_head_dim head_dim=256
 hidden_activation="gelu_pytorch_tanh" hidden_size=2304 hidden_size_per_layer_input=256
 intermediate_size=9216 max_position_embeddings=131072 moe_intermediate_size num_attention_heads=8
 num_experts num_global_key_value_heads num_hidden_layers=30 num_key_value_heads=4
 num_kv_shared_layers=0 patch_size pooling_kernel_size position_embedding_size sliding_window=512
 standardize tie_word_embeddings=true top_k_experts use_bidirectional_attention use_cache=true
 use_clipped_linears use_double_wide_mlp=false vocab_size=262144 vocab_size_per_layer_input=262144
glm: attention_bias=true eos_token_id head_dim=128 hidden_act="silu" intermediate_size=13696
 max_position_embeddings=131072 num_hidden_layers=40 num_key_value_heads=2 rms_norm_eps=1.5625e-07
 use_cache=true vocab_size=151552
glm4: attention_bias=true eos_token_id head_dim=128 hidden_act="silu" intermediate_size=13696
 max_position_embeddings=131072 num_hidden_layers=40 num_key_value_heads=2 rms_norm_eps=1.5625e-07
 use_cache=true vocab_size=151552
glm4_moe: attention_bias=false eos_token_id first_k_dense_replace=1 hidden_act="silu"
 intermediate_size=10944 max_position_embeddings=131072 moe_intermediate_size=1408 n_group=1
 n_routed_experts=128 n_shared_experts=1 norm_topk_prob=true num_attention_heads=96
 num_experts_per_tok=8 num_hidden_layers=46 num_key_value_heads=8 num_local_experts num_mtp_layers=1
 num_nextn_predict_layers output_router_logits=false rms_norm_eps=1e-05 routed_scaling_factor=1.0
 topk_group=1 use_cache=true use_qk_norm=false vocab_size=151552
glm4_moe_lite: attention_bias=false eos_token_id=1 hidden_act="silu" hidden_size=2048
 intermediate_size=10240 kv_lora_rank=512 max_position_embeddings=202752 moe_intermediate_size=1536
 n_group=1 n_routed_experts=64 n_shared_experts=1 norm_topk_prob=true num_attention_heads=20
 num_experts_per_tok=4 num_hidden_layers=47 num_key_value_heads=20 num_local_experts
 output_router_logits=false pretraining_tp=1 q_lora_rank=768 qk_nope_head_dim=192
 qk_rope_head_dim=64 rms_norm_eps=1e-05 rope_interleave=true routed_scaling_factor=1.8 topk_group=1
 use_cache=true v_head_dim=256 vocab_size=154880
glm4v: image_end_token_id image_start_token_id image_token_id text_config video_end_token_id
 video_start_token_id video_token_id vision_config
glm4v_text: eos_token_id hidden_act="silu" intermediate_size=13696 max_position_embeddings=32768
 num_hidden_layers=40 num_key_value_heads=2 rms_norm_eps=1e-05 tie_word_embeddings use_cache=true
 vocab_size=151552
glm_moe_dsa: attention_bias=false eos_token_id=1 first_k_dense_replace=3 head_dim=64
 hidden_act="silu" hidden_size=6144 index_head_dim=128 index_n_heads=32 index_skip_topk_offset
 index_topk=2048 index_topk_freq index_topk_pattern indexer_types intermediate_size=12288
 kv_lora_rank=512 max_position_embeddings=202752 mlp_bias=false moe_intermediate_size=2048 n_group=1
 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=true num_attention_heads=64 num_experts
 num_experts_per_tok=8 num_hidden_layers=78 num_key_value_heads=64 num_local_experts
 output_router_logits=false q_lora_rank=2048 qk_nope_head_dim=192 qk_rope_head_dim=64
 rms_norm_eps=1e-05 routed_scaling_factor=2.5 topk_group=1 use_cache=true v_head_dim=256
 vocab_size=154880
got_ocr2: image_seq_length=576 image_token_id image_token_index=151859 text_config
 tie_word_embeddings=true vision_config
gpt_oss: attention_bias=true eos_token_id head_dim=64 hidden_act="silu" hidden_size=2880
 intermediate_size=2880 max_position_embeddings=131072 num_attention_heads=64 num_experts
 num_experts_per_tok=4 num_hidden_layers=36 num_key_value_heads=8 num_local_experts=128
 output_router_logits=false rms_norm_eps=1e-05 rope_theta=150000.0 router_aux_loss_coef=0.001
 sliding_window=128 swiglu_alpha=1.702 swiglu_limit=7.0 use_cache=true vocab_size=201088
granite: attention_bias=false attention_multiplier=1.0 embedding_multiplier=1.0 hidden_act="silu"
 intermediate_size=11008 logits_scaling=1.0 mlp_bias=false residual_multiplier=1.0 use_cache=true
granitemoe: attention_bias=false attention_multiplier=1.0 embedding_multiplier=1.0 hidden_act="silu"
 intermediate_size=11008 logits_scaling=1.0 num_experts_per_tok=2 num_local_experts=8
 output_router_logits=false residual_multiplier=1.0 router_aux_loss_coef=0.001 use_cache=true
granitemoehybrid: attention_bias=false attention_multiplier=1.0 embedding_multiplier=1.0
 hidden_act="silu" intermediate_size=11008 layers_block_type logits_scaling=1.0 mamba_chunk_size=256
 mamba_conv_bias=true mamba_d_conv=4 mamba_d_head="auto" mamba_d_state=256 mamba_expand=2
 mamba_n_groups=1 mamba_n_heads=128 mamba_proj_bias=false num_experts_per_tok=2 num_local_experts=8
 output_router_logits=false position_embedding_type residual_multiplier=1.0
 router_aux_loss_coef=0.001 shared_intermediate_size=1024 time_step_limit use_cache=true
granitemoeshared: attention_bias=false attention_multiplier=1.0 embedding_multiplier=1.0
 hidden_act="silu" intermediate_size=11008 logits_scaling=1.0 num_experts_per_tok=2
 num_local_experts=8 output_router_logits=false residual_multiplier=1.0 router_aux_loss_coef=0.001
 shared_intermediate_size=0 use_cache=true
helium: attention_bias=false head_dim=128 hidden_act="silu" hidden_size=2560 intermediate_size=7040
 max_position_embeddings=4096 mlp_bias=false num_attention_heads=20 num_hidden_layers=24
 num_key_value_heads=20 rms_norm_eps=1e-08 rope_theta=100000.0 use_cache=true vocab_size=48000
hunyuan_v1_dense: attention_bias=false eod_token_id hidden_act="silu" intermediate_size=11008
 pretraining_tp=1 rms_norm_eps=1e-05 use_cache=true vocab_size=290943
hunyuan_v1_moe: attention_bias=false eod_token_id hidden_act="silu" intermediate_size=11008
 moe_topk=1 num_experts=1 num_experts_per_tok num_local_experts output_router_logits=false
 pretraining_tp=1 rms_norm_eps=1e-05 use_cache=true vocab_size=290943
idefics3: image_token_id scale_factor=2 text_config use_cache=true vision_config
internvl: downsample_ratio=0.5 image_seq_length=256 image_token_id projector_hidden_act="gelu"
 text_config tie_word_embeddings=true vision_config vision_feature_layer=-1
 vision_feature_select_strategy="default"
jais2: attention_bias=true eos_token_id=150024 hidden_act="relu2" hidden_size=3328
 intermediate_size=26624 layer_norm_eps=1e-05 max_position_embeddings=8192 mlp_bias=true
 num_attention_heads=26 rms_norm_eps use_cache=true vocab_size=150272
jamba: attn_layer_offset=4 attn_layer_period=8 expert_layer_offset=1 expert_layer_period=2
 hidden_act="silu" intermediate_size=14336 layers_block_type layers_num_experts mamba_conv_bias=true
 mamba_d_conv=4 mamba_d_state=16 mamba_dt_rank="auto" mamba_expand=2 mamba_proj_bias=false
 max_position_embeddings=262144 num_experts=16 num_experts_per_tok=2 num_key_value_heads=8
 num_local_experts output_router_logits=false rope_theta router_aux_loss_coef=0.001
 use_associative_scan=true use_cache=true use_mamba_kernels=true use_mambapy=false vocab_size=65536
kimi_linear: attention_bias=false eos_token_id=163586 hidden_act="silu" hidden_size=2304
 intermediate_size=9216 kv_lora_rank=512 linear_attn_config linear_conv_kernel_dim=4
 linear_head_dim=128 linear_num_heads=32 max_position_embeddings=1048576 model_max_length
 moe_intermediate_size=1024 moe_renormalize n_group=1 n_shared_experts=1 norm_topk_prob=true
 num_expert_group num_experts num_experts_per_tok=8 num_experts_per_token num_hidden_layers=27
 num_key_value_heads=32 num_local_experts=256 num_shared_experts output_router_logits=false
 pretraining_tp=1 q_lora_rank qk_nope_head_dim=128 qk_rope_head_dim=64 rms_norm_eps=1e-05 rope_theta
 routed_scaling_factor=2.446 topk_group=1 use_cache=true v_head_dim=128 vocab_size=163840
lfm2: attention_dropout block_auto_adjust_ff_dim=true block_ff_dim block_ffn_dim_multiplier=1.0
 block_multiple_of=256 conv_L_cache=3 conv_bias=false full_attn_idxs hidden_size=2560
 intermediate_size=12288 max_position_embeddings=128000 norm_eps=1e-05 num_key_value_heads=8
 rms_norm_eps rope_theta=1000000.0 tie_embedding tie_word_embeddings=true use_cache=true
 vocab_size=65536
lfm2_moe: attention_dropout conv_L_cache=3 conv_bias=false hidden_size=2048 intermediate_size=7168
 max_position_embeddings=128000 moe_intermediate_size=1792 norm_eps=1e-05 norm_topk_prob=true
 num_dense_layers=2 num_experts=32 num_experts_per_tok=4 num_key_value_heads=8
 output_router_logits=false rms_norm_eps rope_theta=1000000.0 routed_scaling_factor=1.0
 tie_embedding tie_word_embeddings=true use_cache=true use_expert_bias=true vocab_size=65536
lfm3: attention_bias=false conv_L_cache=7 conv_bias=false eos_token_id=124900 head_dim=128
 hidden_size=2048 intermediate_size=7680 max_position_embeddings=128000 norm_eps=1e-05
 num_attention_heads=16 num_hidden_layers=24 num_key_value_heads=4 rms_norm_eps rope_theta=1000000.0
 sliding_window=256 tie_word_embeddings=true use_attention_gate=true use_cache=true
 use_sandwich_norm=true vocab_size=128000
llama: attention_bias=false hidden_act="silu" intermediate_size=11008 mlp_bias=false
 pretraining_tp=1 use_cache=true
llama4: boi_token_id boi_token_index=200080 eoi_token_id eoi_token_index=200081 image_token_id
 image_token_index=200092 text_config vision_config
llama4_text: attention_bias=false attention_chunk_size=8192 attn_scale=0.1
 attn_temperature_tuning=true floor_scale=8192 head_dim=128 hidden_act="silu" hidden_size=5120
 image_size interleave_moe_layer_step=1 intermediate_size=8192 intermediate_size_mlp=16384
 max_position_embeddings=131072 moe_layers no_rope_layer_interval=4 no_rope_layers
 num_attention_heads=40 num_channels num_experts_per_tok=1 num_hidden_layers=48
 num_key_value_heads=8 num_local_experts=16 output_router_logits=false patch_size
 pixel_shuffle_ratio projector_dropout projector_input_dim projector_output_dim rms_norm_eps=1e-05
 rope_theta=500000.0 router_aux_loss_coef=0.001 router_jitter_noise=0.0 text_config use_cache=true
 use_qk_norm=true vocab_size=202048
llava: image_seq_length=576 image_token_id image_token_index=32000 multimodal_projector_bias=true
 projector_hidden_act="gelu" text_config vision_config vision_feature_layer=-2
 vision_feature_select_strategy="default"
llava_next: image_grid_pinpoints image_seq_length=576 image_token_id image_token_index=32000
 multimodal_projector_bias=true projector_hidden_act="gelu" text_config vision_config
 vision_feature_layer=-2 vision_feature_select_strategy="default"
llava_next_video: image_grid_pinpoints image_seq_length=576 image_token_id image_token_index=32001
 multimodal_projector_bias=true projector_hidden_act="gelu" spatial_pool_mode="average"
 spatial_pool_stride=2 text_config video_seq_length=288 video_token_id video_token_index=32000
 vision_config vision_feature_layer=-2 vision_feature_select_strategy="default"
llava_onevision: image_grid_pinpoints image_token_id image_token_index=151646
 multimodal_projector_bias=true projector_hidden_act="gelu" text_config video_token_id
 video_token_index=151647 vision_aspect_ratio="anyres_max_9" vision_config vision_feature_layer=-1
 vision_feature_select_strategy="full"
longcat_flash: attention_bias=false expert_ffn_hidden_size=2048 ffn_hidden_size=12288 head_dim=64
 hidden_act="silu" hidden_size=6144 intermediate_size kv_lora_rank=512
 max_position_embeddings=131072 moe_intermediate_size moe_topk=12 n_routed_experts=512
 num_attention_heads=64 num_experts_per_tok num_hidden_layers num_layers=28 num_local_experts
 output_router_logits=false q_lora_rank=1536 qk_head_dim qk_nope_head_dim=128 qk_rope_head_dim=64
 rms_norm_eps=1e-05 rope_theta=10000000.0 routed_scaling_factor=6.0 router_bias use_cache=true
 v_head_dim=128 vocab_size=131072 zero_expert_num=256
mamba: attention_dropout conv_kernel=4 eos_token_id=0 expand=2 hidden_act="silu" hidden_size=768
 initializer_range=0.1 intermediate_size layer_norm_epsilon=1e-05 max_position_embeddings
 num_attention_heads rescale_prenorm_residual=false residual_in_fp32=true rms_norm_eps rope_theta
 state_size=16 tie_word_embeddings=true time_step_floor=0.0001 time_step_init_scheme="random"
 time_step_max=0.1 time_step_min=0.001 time_step_rank="auto" time_step_scale=1.0
 use_associative_scan=true use_bias=false use_cache=true use_conv_bias=true use_mambapy=false
 vocab_size=50280
mamba2: attention_dropout chunk_size=256 conv_kernel=4 expand=2 head_dim=64 hidden_act="silu"
 initializer_range=0.1 layer_norm_epsilon=1e-05 max_position_embeddings n_groups=8
 num_attention_heads num_heads=128 num_hidden_layers=64 rescale_prenorm_residual=false
 residual_in_fp32=true rms_norm_eps rope_theta state_size=128 time_step_floor=0.0001 time_step_limit
 time_step_max=0.1 time_step_min=0.001 time_step_rank="auto" use_bias=false use_cache=true
 use_conv_bias=true vocab_size=32768
minicpm3: attention_bias=false dim_model_base=256 hidden_act="silu" hidden_size=2560
 initializer_range=0.1 intermediate_size=6400 kv_lora_rank=256 logits_scaling
 max_position_embeddings=32768 mlp_bias=false num_attention_heads=40 num_hidden_layers=62
 num_key_value_heads=40 pretraining_tp=1 q_lora_rank=768 qk_nope_head_dim=64 qk_rope_head_dim=32
 rms_norm_eps=1e-05 scale_depth=1.4 scale_emb=12 tie_word_embeddings=true use_cache=true v_head_dim
 vocab_size=73448
minimax: block_size=256 full_attn_alpha_factor=1 full_attn_beta_factor=1 hidden_act="silu"
 intermediate_size=14336 linear_attn_alpha_factor=1 linear_attn_beta_factor=1
 max_position_embeddings=131072 mlp_alpha_factor=1 mlp_beta_factor=1 num_experts
 num_experts_per_tok=2 num_key_value_heads=8 num_local_experts=8 output_router_logits=false
 rms_norm_eps=1e-05 rope_theta=1000000.0 router_aux_loss_coef=0.001 router_jitter_noise=0.0
 use_cache=true
minimax_m2: eos_token_id=200020 head_dim=128 hidden_act="silu" hidden_size=3072
 intermediate_size=1536 max_position_embeddings=196608 num_attention_heads=48 num_experts
 num_experts_per_tok=8 num_hidden_layers=62 num_key_value_heads=8 num_local_experts=256
 output_router_logits=false rope_theta=5000000.0 rotary_dim router_aux_loss_coef=0.001
 router_jitter_noise=0.0 use_cache=true vocab_size=200064
ministral: hidden_act="silu" intermediate_size=14336 max_position_embeddings=131072
 num_key_value_heads=8 sliding_window=4096 use_cache=true
ministral3: head_dim=128 hidden_act="silu" intermediate_size=14336 max_position_embeddings=262144
 num_hidden_layers=34 num_key_value_heads=8 rms_norm_eps=1e-05 use_cache=true vocab_size=131072
mistral: hidden_act="silu" intermediate_size=14336 max_position_embeddings=131072
 num_key_value_heads=8 sliding_window=4096 use_cache=true
mistral3: image_token_id image_token_index=10 multimodal_projector_bias=false
 projector_hidden_act="gelu" spatial_merge_size=2 text_config tie_word_embeddings=true vision_config
 vision_feature_layer=-1
mistral4: attention_bias=false first_k_dense_replace=0 hidden_act="silu" intermediate_size=12288
 kv_lora_rank=256 max_position_embeddings=1048576 moe_intermediate_size=2048 n_group=1
 n_routed_experts=128 n_shared_experts=1 norm_topk_prob=true num_experts_per_tok=4
 num_hidden_layers=36 num_key_value_heads=32 num_local_experts output_router_logits=false
 pretraining_tp=1 q_lora_rank=1024 qk_nope_head_dim=64 qk_rope_head_dim=64 rope_interleave=true
 routed_scaling_factor=1.0 topk_group=1 use_cache=true v_head_dim=128 vocab_size=131072
mixtral: hidden_act="silu" intermediate_size=14336 max_position_embeddings=131072 num_experts
 num_experts_per_tok=2 num_key_value_heads=8 num_local_experts=8 output_router_logits=false
 rms_norm_eps=1e-05 rope_theta=1000000.0 router_aux_loss_coef=0.001 router_jitter_noise=0.0
 use_cache=true
modernbert: attention_bias=false classifier_activation="gelu" classifier_bias=false
 classifier_dropout=0.0 classifier_pooling="cls" cls_token_id decoder_bias=true
 deterministic_flash_attn=false embedding_dropout=0.0 eos_token_id=50282 global_attn_every_n_layers
 global_rope_theta hidden_activation="gelu" hidden_size=768 initializer_cutoff_factor=2.0
 intermediate_size=1152 local_attention=128 local_rope_theta max_position_embeddings=8192
 mlp_bias=false mlp_dropout=0.0 norm_bias=false norm_eps=1e-05 num_attention_heads=12
 num_hidden_layers=22 rms_norm_eps rope_theta sparse_pred_ignore_index=-100 sparse_prediction=false
 tie_word_embeddings=true vocab_size=50368
nemotron: attention_bias=false eos_token_id=3 hidden_act="relu2" hidden_size=6144
 initializer_range=0.0134 intermediate_size=24576 max_position_embeddings=4096 mlp_bias=false
 norm_eps=1e-05 num_attention_heads=48 rms_norm_eps use_cache=true vocab_size=256000
nemotron_h: attention_bias=false chunk_size=128 conv_kernel=4 expand=2 get_text_config head_dim=128
 hidden_dropout=0.0 hybrid_override_pattern intermediate_size=21504 layer_norm_epsilon=1e-05
 layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_dt_init_floor mamba_dt_limit
 mamba_dt_max mamba_dt_min mamba_expand mamba_head_dim=64 mamba_hidden_act="silu" mamba_n_groups
 mamba_num_heads=128 mamba_proj_bias=false mamba_ssm_cache_dtype="float32"
 max_position_embeddings=4096 mlp_bias=false mlp_hidden_act="relu2" moe_intermediate_size=7688
 moe_latent_size moe_shared_expert_intermediate_size=7688 moe_shared_expert_overlap=true
 mtp_hybrid_override_pattern mtp_layers_block_type n_group=1 n_groups=8 n_routed_experts=8
 n_shared_experts=1 norm_topk_prob=true num_experts_per_tok=2 num_hidden_layers
 num_key_value_heads=8 num_local_experts num_logits_to_keep=1 num_nextn_predict_layers=0
 output_router_logits=false rescale_prenorm_residual=true residual_in_fp32=false rms_norm_eps
 rope_theta routed_scaling_factor=1.0 ssm_state_size=128 time_step_floor=0.0001 time_step_limit
 time_step_max=0.1 time_step_min=0.001 topk_group=1 use_bias=false use_cache=true use_conv_bias=true
 use_mamba_kernels=true vocab_size=131072
olmo: attention_bias=false clip_qkv eos_token_id=50279 hidden_act="silu" intermediate_size=11008
 rms_norm_eps use_cache=true vocab_size=50304
olmo2: attention_bias=false eos_token_id=50279 hidden_act="silu" intermediate_size=11008
 rms_norm_eps=1e-05 use_cache=true vocab_size=50304
olmo3: attention_bias=false eos_token_id=50279 hidden_act="silu" intermediate_size=11008
 rms_norm_eps=1e-05 rope_theta=500000.0 sliding_window=4096 use_cache=true vocab_size=50304
olmo_hybrid: attention_bias=false eos_token_id=100257 hidden_act="silu" hidden_size=3840
 intermediate_size=11008 linear_a_log_max=16.0 linear_a_log_min=0.0 linear_allow_neg_eigval=true
 linear_conv_kernel_dim=4 linear_dt_init_floor=0.0001 linear_dt_max=0.1 linear_dt_min=0.001
 linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
 max_position_embeddings=65536 num_attention_heads=30 use_cache=true vocab_size=100352
olmoe: attention_bias=false clip_qkv eos_token_id=50279 hidden_act="silu" hidden_size=2048
 intermediate_size=2048 max_position_embeddings=4096 norm_topk_prob=false num_attention_heads=16
 num_experts=64 num_experts_per_tok=8 num_hidden_layers=16 num_local_experts
 output_router_logits=false rms_norm_eps=1e-05 router_aux_loss_coef=0.01 use_cache=true
 vocab_size=50304
phi: embd_pdrop=0.0 hidden_act="gelu_new" hidden_size=2048 intermediate_size=8192
 layer_norm_eps=1e-05 num_hidden_layers=24 qk_layernorm=false resid_pdrop=0.0 rms_norm_eps
 use_cache=true vocab_size=51200
phi3: embd_pdrop=0.0 eos_token_id=32000 hidden_act="silu" hidden_size=3072 intermediate_size=8192
 max_position_embeddings=4096 original_max_position_embeddings=4096 resid_pdrop=0.0
 rms_norm_eps=1e-05 use_cache=true vocab_size=32064
phimoe: attention_bias=false hidden_act="silu" input_jitter_noise=0.0 intermediate_size=6400
 lm_head_bias=false max_position_embeddings=131072 num_experts_per_tok=2 num_key_value_heads=8
 num_local_experts=16 output_router_logits=false rms_norm_eps=1e-05 rope_theta=1000000.0
 router_aux_loss_coef=0.001 router_jitter_noise=0.01 use_cache=true vocab_size=32064
qwen2: eos_token_id hidden_act="silu" intermediate_size=22016 max_position_embeddings=32768
 max_window_layers=28 num_key_value_heads=32 sliding_window=4096 use_cache=true
 use_sliding_window=false vocab_size=151936
qwen2_5_vl: image_token_id text_config video_token_id vision_config vision_end_token_id
 vision_start_token_id
qwen2_5_vl_text: eos_token_id=151645 hidden_act="silu" hidden_size=8192 intermediate_size=29568
 max_position_embeddings=32768 max_window_layers=80 num_attention_heads=64 num_hidden_layers=80
 num_key_value_heads=8 rms_norm_eps=1e-05 rope_theta=1000000.0 sliding_window=4096
 tie_word_embeddings use_cache=true use_sliding_window=false vocab_size=152064
qwen2_audio: audio_config audio_token_id audio_token_index=151646 text_config
qwen2_moe: decoder_sparse_step=1 eos_token_id hidden_act="silu" hidden_size=2048
 intermediate_size=5632 max_position_embeddings=32768 max_window_layers=28 mlp_only_layers
 moe_intermediate_size=1408 norm_topk_prob=false num_attention_heads=16 num_experts=60
 num_experts_per_tok=4 num_hidden_layers=24 num_key_value_heads=16 output_router_logits=false
 qkv_bias=true router_aux_loss_coef=0.001 shared_expert_intermediate_size=5632 sliding_window=4096
 use_cache=true use_sliding_window=false vocab_size=151936
qwen2_vl: image_token_id text_config video_token_id vision_config vision_end_token_id
 vision_start_token_id
qwen2_vl_text: eos_token_id=151645 hidden_act="silu" hidden_size=8192 intermediate_size=29568
 max_position_embeddings=32768 max_window_layers=80 num_attention_heads=64 num_hidden_layers=80
 num_key_value_heads=8 rms_norm_eps=1e-05 rope_theta=1000000.0 sliding_window=4096
 tie_word_embeddings use_cache=true use_sliding_window=false vocab_size=152064
qwen3: attention_bias=false eos_token_id head_dim=128 hidden_act="silu" intermediate_size=22016
 max_position_embeddings=32768 max_window_layers=28 num_key_value_heads=32 sliding_window=4096
 use_cache=true use_sliding_window=false vocab_size=151936
qwen3_5: image_token_id text_config video_token_id vision_config vision_end_token_id
 vision_start_token_id
qwen3_5_moe: image_token_id text_config video_token_id vision_config vision_end_token_id
 vision_start_token_id
qwen3_5_moe_text: attention_bias=false eos_token_id full_attention_interval head_dim=256
 hidden_act="silu" hidden_size=2048 linear_conv_kernel_dim=4 linear_key_head_dim=128
 linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
 max_position_embeddings=32768 moe_intermediate_size=512 num_attention_heads=16 num_experts=256
 num_experts_per_tok=8 num_hidden_layers=40 num_key_value_heads=2 output_router_logits=false
 router_aux_loss_coef=0.001 shared_expert_intermediate_size=512 use_cache=true vocab_size=248320
qwen3_5_text: attention_bias=false eos_token_id full_attention_interval head_dim=256
 hidden_act="silu" intermediate_size=12288 linear_conv_kernel_dim=4 linear_key_head_dim=128
 linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
 max_position_embeddings=32768 num_attention_heads=16 num_key_value_heads=4 use_cache=true
 vocab_size=248320
qwen3_moe: attention_bias=false decoder_sparse_step=1 eos_token_id hidden_act="silu"
 hidden_size=2048 intermediate_size=6144 max_position_embeddings=32768 mlp_only_layers
 moe_intermediate_size=768 norm_topk_prob=false num_experts=128 num_experts_per_tok=8
 num_hidden_layers=24 num_key_value_heads=4 num_local_experts output_router_logits=false
 router_aux_loss_coef=0.001 sliding_window=4096 use_cache=true use_sliding_window=false
 vocab_size=151936
qwen3_next: attention_bias=false decoder_sparse_step=1 eos_token_id full_attention_interval
 head_dim=256 hidden_act="silu" hidden_size=2048 intermediate_size=5632 linear_conv_kernel_dim=4
 linear_key_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
 max_position_embeddings=32768 mlp_only_layers moe_intermediate_size=512 norm_topk_prob=true
 num_attention_heads=16 num_experts=512 num_experts_per_tok=10 num_hidden_layers=48
 num_key_value_heads=2 output_router_logits=false router_aux_loss_coef=0.001
 shared_expert_intermediate_size=512 use_cache=true vocab_size=151936
qwen3_vl: image_token_id text_config video_token_id vision_config vision_end_token_id
 vision_start_token_id
qwen3_vl_text: attention_bias=false eos_token_id head_dim=128 hidden_act="silu"
 intermediate_size=22016 max_position_embeddings=128000 num_key_value_heads=32 rope_theta=500000.0
 tie_word_embeddings use_cache=true vocab_size=151936
seed_oss: attention_bias=true attention_dropout=0.1 attention_out_bias=false head_dim=128
 hidden_act="silu" intermediate_size=27648 max_position_embeddings=524288 mlp_bias=false
 num_attention_heads=80 num_hidden_layers=64 num_key_value_heads=8 pretraining_tp=1
 residual_dropout=0.1 use_cache=true vocab_size=155136
smollm3: attention_bias=false eos_token_id=128001 hidden_act="silu" hidden_size=2048
 intermediate_size=11008 max_position_embeddings=32768 mlp_bias=false no_rope_layer_interval=4
 no_rope_layers num_attention_heads=16 num_hidden_layers=36 num_key_value_heads=4
 rope_theta=2000000.0 tie_word_embeddings=true use_cache=true use_sliding_window=false
 vocab_size=128256
smolvlm: image_token_id scale_factor=2 text_config use_cache=true vision_config
stablelm: eos_token_id=0 hidden_act="silu" hidden_dropout=0.0 hidden_size=2560
 intermediate_size=6912 layer_norm_eps=1e-05 max_position_embeddings=4096 num_key_value_heads=32
 qk_layernorm=false rms_norm_eps use_cache=true use_parallel_residual=false use_qkv_bias=false
 vocab_size=50304
starcoder2: embedding_dropout=0.0 eos_token_id=50256 hidden_act="gelu_pytorch_tanh" hidden_size=3072
 initializer_range=0.018042 intermediate_size=12288 max_position_embeddings=4096 norm_epsilon=1e-05
 num_attention_heads=24 num_hidden_layers=30 num_key_value_heads=2 residual_dropout=0.0 rms_norm_eps
 tie_word_embeddings=true use_bias=true use_cache=true vocab_size=49152
vaultgemma: attention_bias=false attn_logit_softcapping=50.0 eos_token_id=1
 final_logit_softcapping=30.0 head_dim=256 hidden_activation="gelu_pytorch_tanh" hidden_size=2304
 intermediate_size=9216 max_position_embeddings=8192 num_attention_heads=8 num_hidden_layers=26
 num_key_value_heads=4 query_pre_attn_scalar=256 sliding_window=4096 tie_word_embeddings=true
 use_cache=true vocab_size=256000
video_llava: image_seq_length=256 image_token_id image_token_index=32000
 multimodal_projector_bias=true projector_hidden_act="gelu" text_config video_seq_length=2056
 video_token_id video_token_index=32001 vision_config vision_feature_layer=-2
 vision_feature_select_strategy="default"
vipllava: image_seq_length=576 image_token_id image_token_index=32000 projector_hidden_act="gelu"
 projector_layernorm_eps=1e-05 text_config vision_config vision_feature_layer vision_feature_layers
voxtral: audio_config audio_token_id projector_hidden_act="gelu" text_config
youtu: attention_bias=false embedding_initializer_range eos_token_id=128001 hidden_act="silu"
 hidden_size=2048 initializer_range intermediate_size=6144 kv_lora_rank=512
 max_position_embeddings=131072 num_attention_heads=16 num_key_value_heads=16 q_lora_rank=1536
 qk_nope_head_dim=128 qk_rope_head_dim=64 rope_interleave=true tie_word_embeddings=true
 use_cache=true v_head_dim=128 vocab_size=128256
"""
