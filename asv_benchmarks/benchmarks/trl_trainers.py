"""Memory of TRL's trainers: unchanged, with a patched model, and with this library's head.

    cd asv_benchmarks && python -m benchmarks.trl_trainers [HIDDEN]

prints the table of docs/guide/trl.md.  Each figure is that of a process of its own: the peak of the
resident memory (VmHWM) in a run of one step, beyond what it held before, which is the model, a
reference and the libraries.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .huggingface import MIB, THREADS, resident

LAYERS, VOCAB, HIDDEN, ROWS, PROMPT, ANSWER = 4, 32_768, 256, 4, 64, 192
TRAINERS = ("DPO", "KTO", "Reward", "GRPO")
WAYS = ("alone", "patched", "head")


def texts(name: str) -> list[dict[str, Any]]:
    """Return rows of text, each token written as a word."""

    def text(first: int, count: int) -> str:
        return "".join(f" w{(first * 7919 + n * 31) % (VOCAB - 4)}" for n in range(count))

    rows = [
        {"prompt": text(n, PROMPT), "chosen": text(n + 9, ANSWER), "rejected": text(n + 5, ANSWER)}
        for n in range(2 * ROWS)
    ]
    if name == "KTO":
        return [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 > 0}
            for n, row in enumerate(rows)
        ]
    return [{"prompt": row["prompt"]} for row in rows] if name == "GRPO" else rows


def tokenizer() -> Any:
    """Return a tokenizer of words: w0, w1, ..."""
    import tokenizers
    import transformers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCAB - 4))]
    model = tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def length(completions: Any, **_: Any) -> list[float]:
    """Return a reward for each completion."""
    return [float(len(set(each.split()))) for each in completions]


def use_head() -> None:
    """Replace TRL's head by ``linear_log_probs``."""
    import trl.trainer.utils

    from unsloth_cupy import linear_log_probs

    class Head:
        """A head with the call interface of TRL's."""

        @staticmethod
        def apply(x, weight, bias, labels, temperature, chunk, softcap, scale, outputs):
            """Return log-probability, entropy and related values of each row."""
            options = {"temperature": temperature, "softcap": softcap, "scale": scale}
            return tuple(linear_log_probs(x, weight, labels, bias, **options))

    trl.trainer.utils._ChunkedLogProbFunction = Head


def measured(name: str, way: str, hidden: int) -> int:
    """Return the peak memory of a step minus the memory before it, in bytes."""
    import transformers
    import trl
    from datasets import Dataset

    from unsloth_cupy.interop.huggingface import PatchCallback

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4, num_labels=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    kind = "SequenceClassification" if name == "Reward" else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    if name == "GRPO":
        options = {"num_generations": 2, "max_completion_length": ANSWER}
        more = {"reward_funcs": length}
    elif name != "Reward":
        more = {"ref_model": auto.from_config(config)}
    if way == "head":
        use_head()
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(trl, f"{name}Config")(
            folder, per_device_train_batch_size=ROWS, max_steps=1, use_cpu=True, report_to=[],
            logging_steps=1, bf16=False, save_strategy="no", disable_tqdm=True, optim="sgd",
            gradient_checkpointing=False, **options,
        )  # fmt: skip
        trainer = getattr(trl, f"{name}Trainer")(
            auto.from_config(config), args=arguments, train_dataset=Dataset.from_list(texts(name)),
            processing_class=tokenizer(), callbacks=[PatchCallback()] * (way != "alone"), **more,
        )  # fmt: skip
        held = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        trainer.train()
        return resident("VmHWM") - held


def main(hidden: int) -> None:
    """Print the table."""
    print("| trainer | TRL | patched | patched, with this head |\n|---|---|---|---|")
    for name in TRAINERS:
        found = []
        for way in WAYS[: 2 if name == "Reward" else 3]:
            command = [sys.executable, "-m", "benchmarks.trl_trainers", str(hidden), name, way]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True,
                env=os.environ | dict.fromkeys(THREADS, "1"),
            )  # fmt: skip
            found.append(f"{json.loads(done.stdout.splitlines()[-1]) / MIB:.0f} MiB")
        found += ["no such head"] * (len(WAYS) - len(found))
        print(f"| {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else HIDDEN
    if len(sys.argv) > 2:
        print(json.dumps(measured(sys.argv[2], sys.argv[3], size)))
    else:
        main(size)
