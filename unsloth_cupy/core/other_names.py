"""Names of other libraries, and the names here that mean the same.

The names are those of torch, transformers, TRL, peft, Unsloth, flash-attn, llama.cpp and vLLM:
options, attributes of packages and objects, and commands.  Error messages in Python and on the
command line suggest the names here: see ``names``.
"""

from collections.abc import Mapping, Sequence

# An option of another library: options here, of which a message names the first that the call has.
OTHER_NAMES: Mapping[str, Sequence[str]] = {
    # arrays
    "query": ["q"], "key": ["k"], "value": ["v"], "input": ["x", "tokens", "logits"],
    "hidden_states": ["x"], "input_ids": ["tokens"], "attn_mask": ["mask"],
    "attention_mask": ["mask"], "key_padding_mask": ["mask"], "attn_bias": ["bias"],
    "target": ["labels"], "targets": ["labels"], "position_ids": ["positions"],
    "cu_seqlens": ["offsets"], "cu_seqlens_q": ["q_offsets"], "cu_seqlens_k": ["k_offsets"],
    "max_seqlen_q": ["max_queries"], "max_seqlen_k": ["max_keys"], "block_table": ["page_table"],
    "cache_seqlens": ["lengths"], "kv_cache": ["cache"], "past_key_values": ["cache"],
    "grad": ["dy"], "grad_output": ["dy"], "grad_outputs": ["dy"],
    # options of ops
    "is_causal": ["causal"], "dropout_p": ["dropout"], "softmax_scale": ["scale"],
    "sm_scale": ["scale"], "scaling": ["scale"], "window_size": ["window"],
    "sliding_window": ["window"], "logits_soft_cap": ["softcap"], "logit_softcapping": ["softcap"],
    "alibi_slopes": ["alibi"], "epsilon": ["eps"], "variance_epsilon": ["eps"],
    "ignore_index": ["ignore"], "label_smoothing": ["smoothing"], "approx": ["approximate"],
    "rope_base": ["base"], "theta": ["base"], "blocksize": ["block"], "quant_type": ["kind"],
    "double_quant": ["double"], "compress_statistics": ["double"],
    # sizes
    "num_heads": ["heads"], "n_heads": ["heads"], "embed_dim": ["hidden"], "hidden_dim": ["hidden"],
    "num_kv_heads": ["kv_heads"], "num_key_value_heads": ["kv_heads"], "head_dim": ["dim"],
    "hidden_size": ["hidden"], "num_hidden_layers": ["layers"], "num_layers": ["layers"],
    "n_layers": ["layers"], "vocab_size": ["vocab", "vocabulary"], "batch_size": ["batch"],
    "max_batch_size": ["batch"], "seq_len": ["tokens"], "seqlen": ["tokens"],
    "page_size": ["page"], "block_size": ["page", "block"], "num_blocks": ["pages"],
    # data
    "dataset": ["data", "text"], "train_dataset": ["data"], "data": ["text"], "text": ["data"],
    "train_file": ["data", "text"], "data_files": ["data"], "dataset_name": ["data", "text"],
    "dataset_path": ["data"], "eval_dataset": ["evaluate", "eval"], "evaluate": ["eval"],
    "eval_file": ["eval"], "validation_file": ["eval"], "eval_data": ["evaluate", "eval"],
    "remove_columns": ["ignore"], "test_size": ["evaluate", "eval"],
    # training
    "args": ["settings"], "config": ["settings"], "training_args": ["settings"],
    "compute_loss": ["objective"], "compute_loss_func": ["objective"], "loss_fn": ["objective"],
    "learning_rate": ["lr"], "max_lr": ["lr"], "max_seq_length": ["tokens"],
    "max_length": ["tokens", "max_new_tokens", "capacity"], "max_seq_len": ["tokens", "capacity"],
    "max_prompt_length": ["tokens"], "cutoff_len": ["tokens"], "num_epochs": ["epochs"],
    "num_train_epochs": ["epochs"], "max_steps": ["steps"], "iters": ["steps"],
    "num_training_steps": ["steps"], "total_steps": ["steps"], "num_warmup_steps": ["warmup"],
    "per_device_train_batch_size": ["batch"], "per_device_eval_batch_size": ["batch"],
    "micro_batch_size": ["batch"], "gradient_accumulation_steps": ["accumulate"],
    "grad_accum": ["accumulate"], "warmup_ratio": ["warmup"], "warmup_steps": ["warmup"],
    "lr_scheduler_type": ["decay"], "lr_scheduler": ["decay"], "schedule": ["pipeline_schedule"],
    "min_lr": ["minimum"], "optim": ["optimizer"], "params": ["parameters"],
    "eval_steps": ["evaluate_every"], "eval_strategy": ["evaluate_every"],
    "save_steps": ["save_every"], "save_strategy": ["save_every"], "logging_steps": ["log_every"],
    "output_dir": ["out"], "output": ["out", "file"], "run_name": ["out"],
    "max_grad_norm": ["max_norm"], "clip_grad": ["max_norm"],
    "gradient_checkpointing": ["recompute_every"],
    "use_gradient_checkpointing": ["recompute_every"], "neftune_noise_alpha": ["neftune"],
    "early_stopping_patience": ["patience"], "early_stopping_threshold": ["min_delta"],
    "load_best_model_at_end": ["keep_best"], "packing": ["pack"], "bf16": ["dtype"],
    "fp16": ["dtype"], "precision": ["dtype"], "torch_dtype": ["dtype"],
    "random_state": ["seed"], "random_seed": ["seed"], "loss_type": ["loss"],
    "ref_model": ["reference"], "teacher_model": ["teacher"], "reward_funcs": ["reward"],
    "num_generations": ["samples"], "max_completion_length": ["max_new_tokens"],
    "center_rewards_coefficient": ["center"], "scale_rewards": ["scale"], "id2label": ["labels"],
    "simpo_gamma": ["gamma"], "cpo_alpha": ["nll"], "rpo_alpha": ["nll"],
    # adapters
    "r": ["rank", "lora"], "lora_r": ["lora", "rank"], "lora_rank": ["lora", "rank"],
    "lora_alpha": ["alpha"], "lora_dropout": ["dropout"], "use_rslora": ["rslora"],
    "use_dora": ["dora"], "lora_target_modules": ["lora_targets", "targets"],
    "target_modules": ["lora_targets", "targets"], "lora_targets": ["targets"],
    "modules_to_save": ["modules"], "adapter_names": ["names"],
    "peft_config": ["lora"], "lora_config": ["lora"],
    # models and files
    "model_name": ["folder", "model"], "model_id": ["folder", "model"],
    "model_path": ["folder", "model"], "model_name_or_path": ["folder", "model"],
    "pretrained_model_name_or_path": ["folder"], "adapter": ["lora"], "device_map": ["device"],
    "load_in_4bit": ["quantize"], "load_in_8bit": ["quantize"],
    "quantization_config": ["quantize", "quantization"], "quantization_method": ["kind", "type"],
    "quantization_type": ["kind", "type"], "quantization": ["quantize", "kind", "type"],
    "outtype": ["kind", "type"], "type": ["kind"], "kind": ["type"],
    "save_directory": ["folder", "file"], "outfile": ["file"], "filename": ["file"],
    "save_method": ["dtype"], "pad_to_multiple_of": ["multiple"], "bits": ["kind", "state_bits"],
    # generation
    "max_tokens": ["max_new_tokens"], "min_tokens": ["min_new_tokens"], "n_predict":
    ["max_new_tokens"], "temp": ["temperature"], "do_sample": ["temperature"],
    "eos_token_id": ["stop"], "stop_token_ids": ["stop"], "stop_strings": ["stop"],
    "num_return_sequences": ["samples"], "repeat_penalty": ["repetition_penalty"],
    "prompts": ["tokens"],
}  # fmt: skip

# Options of other libraries that have no counterpart here, with the reason.
ABSENT: Mapping[str, str] = {
    "split": "pass the file or the rows of that split",
    "streaming": "files are read in parts where they are large; pass the file",
    "tokenizer": "the tokenizer of the model's folder is used",
    "processing_class": "the tokenizer of the model's folder is used",
    "data_collator": "the library builds the batches; pass rows with messages or texts",
    "formatting_func": "pass rows with messages, texts, or prompts and answers",
    "dataset_text_field": "the column is recognized by its name; ignore= leaves others out",
    "trust_remote_code": "code in a model's folder never runs",
    "enable_gqa": "the shapes of q and k determine the groups of heads",
    "use_cache": "generation always has a cache",
    "num_beams": "each token is sampled, or the most likely one; leave it out",
    "resume_from_checkpoint": "the same call again resumes the run in its folder",
    "push_to_hub": "nothing is uploaded; pass the saved folder to huggingface_hub",
    "trainable_token_indices": "pass tokens= to add_adapter, or trained_tokens= to Settings",
    "requires_grad": "watch arrays on a Tape",
}

_MODEL = "call models.load(folder)"
_RUN = "call Trainer(model, data, Settings(...)).train()"
_SETTINGS = "pass Settings(...) to Trainer"

# Attributes of packages and objects; with the class before the name where its cure differs.
ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys((
        "FastLanguageModel", "FastModel", "FastVisionModel", "AutoModelForCausalLM", "AutoModel",
        "AutoPeftModelForCausalLM", "from_pretrained", "load_model", "LlamaForCausalLM", "LLM",
    ), _MODEL),
    **dict.fromkeys((
        "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    ), "call models.load(folder, head=, labels=)"),
    **dict.fromkeys(("SFTTrainer", "UnslothTrainer", "train", "tune"), _RUN),
    **{
        f"{name}Trainer": f"call Trainer(model, data, Settings(method={name.lower()!r})).train()"
        for name in ("DPO", "KTO", "CPO", "ORPO", "GRPO", "RLOO", "Reward")
    },
    **dict.fromkeys((
        "TrainingArguments", "UnslothTrainingArguments", "SFTConfig", "DPOConfig", "KTOConfig",
        "CPOConfig",
        "ORPOConfig", "GRPOConfig", "RLOOConfig", "RewardConfig",
    ), _SETTINGS),
    **dict.fromkeys(("LoraConfig", "get_peft_model", "PeftModel"), "pass Lora(rank) to Trainer"),
    "AutoTokenizer": "call models.Tokenizer(folder)",
    "load_dataset": "call read_data(data)",
    "TrainerCallback": "subclass finetune.Callback",
    "is_bfloat16_supported": 'pass Settings(device="auto"), which chooses the dtype',
    "scaled_dot_product_attention": "call attention(q, k, v)",
    "flash_attn_func": "call attention(q, k, v)",
    "flash_attn_varlen_func": "call attention_varlen(q, k, v, q_offsets, k_offsets)",
    "RMSNorm": "call rms_norm(x, weight)",
    "LayerNorm": "call layer_norm(x, weight)",
    "CrossEntropyLoss": "call cross_entropy(logits, labels)",
    "Linear": "call linear(x, weight)",
    "Linear4bit": "call nf4_linear(x, weight)",
    "apply_rotary_pos_emb": "call rope_qk(q, k, cos, sin)",
    "liger_rotary_pos_emb": "call rope_qk(q, k, cos, sin)",
    "apply_liger_kernel_to_llama": "call patch(model)",
    "LigerCrossEntropyLoss": "call cross_entropy(logits, labels)",
    "LigerFusedLinearCrossEntropyLoss": "call linear_cross_entropy(x, weight, labels)",
    **dict.fromkeys(("LigerRMSNorm", "LigerFusedAddRMSNorm"), "call rms_norm(x, weight)"),
    "LigerLayerNorm": "call layer_norm(x, weight)",
    "LigerSiLUMulFunction": "call swiglu(gate, up)",
    "LigerGELUMulFunction": "call geglu(gate, up)",
    "LigerTiledSwiGLUMLP": "call swiglu_mlp(x, gate_weight, up_weight, down_weight)",
    "LigerFusedLinearDPOLoss": "call losses.preference(log_probs, mask, reference)",
    "MultipleNegativesRankingLoss": "call losses.contrastive(...)",
    "prepare_model_for_kbit_training": "call models.quantize(model, kind)",
    "train_on_responses_only": "loss is computed on assistant tokens only: leave it out",
    "for_inference": "models have no modes: call Transformer.generate(tokens)",
    "add_weighted_adapter": "call Transformer.mix_adapters(weights, name)",
    "GradScaler": "call LossScaler()",
    "autocast": "call Autocast(dtype)",
    "Adam": "call AdamW(parameters)",
    "generate": "call Transformer.generate(tokens) of models.load(folder)",
    "save_pretrained_gguf": "call models.export_gguf(model, file)",
    "save_pretrained_merged": "call models.merge(adapter, folder)",
    "to_gguf": "call models.export_gguf(model, file)",
    "push_to_hub": "nothing is uploaded; pass the saved folder to huggingface_hub",
    "push_to_hub_gguf": "nothing is uploaded; pass the saved file to huggingface_hub",
    "push_to_hub_merged": "nothing is uploaded; pass the saved folder to huggingface_hub",
    # attributes of a model
    "Transformer.forward": "call Transformer.logits(tokens)",
    "Transformer.eval": "a model has no modes; only Trainer(model, data).train() trains it",
    "Transformer.save_pretrained": "call Transformer.save(folder)",
    "Transformer.save_model": "call Transformer.save(folder)",
    "Transformer.merge_and_unload": "call Transformer.merge_adapter()",
    "Transformer.resize_token_embeddings": "call Transformer.resize(vocab)",
    "Transformer.backward": "call Transformer.loss_and_gradients(tokens, labels)",
    "Transformer.gradient_checkpointing_enable": "pass CheckpointConfig() as checkpoint=",
    "Transformer.quantize": "call models.quantize(model, kind)",
    **dict.fromkeys(
        ("Transformer.named_parameters", "Transformer.state_dict"), "read Transformer.parameters"
    ),
    **dict.fromkeys((
        "Transformer.to", "Transformer.cuda", "Transformer.cpu", "Transformer.half",
        "Transformer.bfloat16", "Transformer.float",
    ), "call models.load(folder, device=, dtype=)"),
    # attributes of other objects
    "Trainer.evaluate_model": "call finetune.evaluate(model, data)",
    "Trainer.save_model": "read finetune.Run.folder: Trainer.train() saves the model there",
    "Trainer.add_callback": "pass Trainer(callbacks=[...])",
    "Var.backward": "call Tape.gradients(of, wrt)",
    "Tape.backward": "call Tape.gradients(of, wrt)",
    "Tape.gradient": "call Tape.gradients(of, wrt)",
    "Var.detach": "read Var.value",
    "Var.numpy": "read Var.value",
    "zero_grad": "gradients are returned, not accumulated: leave it out",
}  # fmt: skip

# A command of another library: the command here, with its options.
OTHER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "fine-tune", "sft", "tune", "fit", "lora"), "finetune"),
    **{name: f"finetune --method {name}" for name in ("dpo", "kto", "orpo", "grpo", "rloo")},
    **dict.fromkeys(("run", "infer", "inference", "complete", "predict"), "generate"),
    "chat": "generate --chat",
    **dict.fromkeys(("convert", "quantize", "gguf", "to-gguf", "save"), "export"),
    **dict.fromkeys(("fuse", "merge-lora", "merge-adapter", "unload"), "merge"),
    **dict.fromkeys(("eval", "test", "perplexity", "ppl"), "evaluate"),
    **dict.fromkeys(("env", "version", "devices", "doctor"), "info"),
    **dict.fromkeys(("memory", "estimate", "vram"), "plan"),
    **dict.fromkeys(("inspect", "dataset"), "data"),
    "benchmark": "bench",
    "compile": "precompile",
    "distill": "teach",
}
