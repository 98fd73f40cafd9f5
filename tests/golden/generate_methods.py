"""Make methods.json: ``python -m tests.golden.generate_methods``; needs TRL (versions in it).

Loss and norm of the gradient of the first step of each method, by TRL's own trainers in float32:
of the model ``models/llama``, pairs of words, and a reference of other weights.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SHARE = {"kto": 1.1}  # weights of the reference as a share of the model's, else 0.9
WORDS = 200  # of the tokenizer, of which each is a token
TRL = {  # the method, TRL's trainer, and its options
    "dpo": ("DPO", {}), "hinge": ("DPO", {"loss_type": ["hinge"]}),
    "ipo": ("DPO", {"loss_type": ["ipo"]}),
    "simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}), "cpo": ("CPO", {}),
    "orpo": ("ORPO", {}), "kto": ("KTO", {"desirable_weight": 1.5}),
    "reward": ("Reward", {"center_rewards_coefficient": 0.1}),
}  # fmt: skip


def tokenizer() -> Any:
    """Return a tokenizer of words: w0, w1, ..."""
    import tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    model = tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>")
    result = tokenizers.Tokenizer(model)
    result.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    result.add_special_tokens(words[:4])
    return result


def pairs() -> list[dict[str, str]]:
    """Return questions with a chosen and a rejected answer, of different lengths."""
    rng = np.random.default_rng(0)

    def text(least: int, most: int) -> str:
        drawn = rng.integers(WORDS, size=int(rng.integers(least, most)))
        return " ".join(f"w{n}" for n in drawn)

    return [
        {"prompt": text(3, 7), "chosen": " " + text(2, 9), "rejected": " " + text(2, 9)}
        for _ in range(6)
    ]


def rated() -> list[dict[str, Any]]:
    """Return an answer to each question, and whether it is good."""
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 3 > 0}
        for number, pair in enumerate(pairs())
    ]


def head(labels: int, hidden: int) -> Any:
    """Return the weight of a head of outputs."""
    return np.sin(np.arange(labels * hidden, dtype=np.float32)).reshape(labels, hidden) / 4


def scored() -> list[dict[str, Any]]:
    """Return the pairs, with margins."""
    return [pair | {"margin": 0.25 * n} for n, pair in enumerate(pairs())]


def labelled() -> list[dict[str, Any]]:
    """Return texts of three classes."""
    texts = [pair["prompt"] + pair["chosen"] for pair in pairs()]
    return [{"text": text, "label": "abc"[n % 3]} for n, text in enumerate(texts)]


def tokens(text: str) -> Any:
    """Return a text as a row of tokens."""
    return np.array([tokenizer().encode(text).ids])


def first_step(name: str) -> dict[str, float]:
    """Return loss and norm of the gradient of a method, by TRL."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    kind, options = TRL[name]
    home: Any = trl
    if kind in ("CPO", "ORPO"):
        home = __import__(f"trl.experimental.{kind.lower()}", fromlist=["x"])
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    of_head = kind == "Reward"
    auto = "SequenceClassification" if of_head else "CausalLM"
    model, reference = (
        getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
            HERE / "models/llama", dtype=torch.float32, **({"num_labels": 1} if of_head else {})
        )
        for _ in range(2)
    )
    with torch.no_grad():
        if of_head:
            model.score.weight.copy_(torch.from_numpy(head(1, model.config.hidden_size)))
        for parameter in reference.parameters():
            parameter.mul_(SHARE.get(name, 0.9))
    rows = {"KTO": rated, "Reward": scored}.get(kind, pairs)()
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(home, f"{kind}Config")(
            folder, per_device_train_batch_size=len(rows), max_steps=1, max_grad_norm=1e9,
            use_cpu=True, report_to=[], logging_steps=1, bf16=False, disable_dropout=True,
            save_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        more = {"ref_model": reference} if kind in ("DPO", "KTO") else {}
        data = Dataset.from_list(rows)
        trainer = getattr(home, f"{kind}Trainer")(
            model, args=config, train_dataset=data, processing_class=words, **more
        )
        trainer.train()
    line = next(line for line in trainer.state.log_history if "loss" in line)
    names = (
        "loss",
        "grad_norm",
        "rewards/margins",
        "rewards/accuracies",
        "kl",
        "accuracy",
        "margin",
    )
    names += ("min_reward", "mean_reward", "max_reward")
    return {each: float(line[each]) for each in names if each in line}


def main() -> None:
    """Write methods.json."""
    names = sys.argv[1:] or [*TRL]
    steps = {name: first_step(name) for name in names}
    versions = {each: version(each) for each in ("trl", "transformers", "torch")}
    values = json.dumps({"versions": versions, "steps": steps}, indent=1) + "\n"
    (HERE / "methods.json").write_text(values)


if __name__ == "__main__":
    main()
