"""Names of transformers' ``TrainingArguments``, by which its callbacks read settings."""

import dataclasses
from typing import Any

NAMES = {
    "output_dir": "out", "max_steps": "steps", "num_train_epochs": "epochs",
    "learning_rate": "lr", "lr_scheduler_type": "decay", "warmup_steps": "warmup",
    "optim": "optimizer", "max_grad_norm": "max_norm", "train_batch_size": "batch",
    "per_device_train_batch_size": "batch", "per_device_eval_batch_size": "batch",
    "eval_batch_size": "batch", "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "checkpoint", "logging_steps": "log_every",
    "eval_steps": "evaluate_every", "save_steps": "save_every",
    "load_best_model_at_end": "keeps_best", "run_name": "out",
}  # fmt: skip
FIXED = {
    "logging_strategy": "steps", "eval_strategy": "steps", "save_strategy": "steps",
    "logging_first_step": False, "eval_delay": 0, "eval_on_start": True, "do_train": True,
    "do_eval": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    "save_total_limit": 1, "disable_tqdm": True, "process_index": 0, "local_process_index": 0,
    "should_save": True, "should_log": True,
}  # fmt: skip


class Arguments:
    """Read-only access to settings by the names of ``TrainingArguments``."""

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return getattr(self, NAMES[name])
        if name in FIXED:
            return FIXED[name]
        if name in ("bf16", "fp16"):
            own: Any = self
            return own.dtype == {"bf16": "bfloat16", "fp16": "float16"}[name]
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, by their own names and by the names of ``TrainingArguments``."""
        own: Any = self
        arguments = {name: getattr(self, name) for name in (*NAMES, *FIXED, "bf16", "fp16")}
        return arguments | dataclasses.asdict(own)
