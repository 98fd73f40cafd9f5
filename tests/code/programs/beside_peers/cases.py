"""What is compared: the cases in the order of a run, their sizes, contestants and time limits."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

OURS = "unsloth_cupy"
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936}
QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "vocab_size": 151936}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32768}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip


def config(base: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    """Return the config.json of a model; all weights are random."""
    return base | dict(zip(SIZES, sizes, strict=True)) | {"max_position_embeddings": 32768} | others


MODELS = {
    "Qwen3 0.6B": config(QWEN3, 1024, 3072, 28, 16, 8, True),
    "Qwen3 1.7B": config(QWEN3, 2048, 6144, 28, 16, 8, True),
    "Qwen3 4B": config(QWEN3, 2560, 9728, 36, 32, 8, True),
    "Qwen3 8B": config(QWEN3, 4096, 12288, 36, 32, 8, False),
    "Qwen2.5 0.5B": config(QWEN2, 896, 4864, 24, 14, 2, True),
    "Qwen2.5 1.5B": config(QWEN2, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5 3B": config(QWEN2, 2048, 11008, 36, 16, 2, True),
    "Qwen2.5 7B": config(QWEN2, 3584, 18944, 28, 28, 4, False, vocab_size=152064),
    "Llama 495M": config(LLAMA, 2048, 5632, 8, 16, 4, False),
}
TINY = {
    "Qwen3": config(QWEN3, 64, 96, 2, 4, 2, True, vocab_size=256, head_dim=16),
    "Qwen2.5": config(QWEN2, 64, 96, 2, 4, 2, True, vocab_size=256),
    "Llama": config(LLAMA, 64, 96, 2, 4, 2, False, vocab_size=256),
}


class Case(NamedTuple):
    """A case: its name, its kind, the sizes of a call, its contestants, seconds of a process.

    The seconds are a limit: the first process of a kind imports libraries from a cold disk and
    compiles kernels.
    """

    name: str
    kind: str  # op, training or generation
    sizes: dict[str, Any]
    contestants: tuple[str, ...]  # a process each; an op has one process for all
    seconds: float


PLAIN = (OURS, "transformers")
LORA = (OURS, "peft", "peft, liger")
FULL = (*PLAIN, "transformers, liger", f"{OURS}, no graph", "transformers, compiled")


def cases() -> Iterator[Case]:
    """Yield the cases, whole steps first."""
    for quantized in (None, "nf4"):
        for model in ("Qwen3 0.6B", "Qwen3 1.7B", "Qwen3 4B", "Qwen3 8B"):
            name = f"lora {quantized or 'bf16'} {model.removeprefix('Qwen3 ')}"
            sizes = {"model": model, "rows": 2, "tokens": 2048, "micro_batches": 4, "rank": 16}
            yield Case(name, "training", {**sizes, "quantized": quantized}, LORA, 120)
    rows_of = {"Qwen2.5 0.5B": 32, "Qwen2.5 1.5B": 16, "Qwen2.5 3B": 8, "Qwen2.5 7B": 4}
    for model, rows in rows_of.items():
        sizes = {"model": model, "rows": rows, "tokens": 1024}
        yield Case(f"full {model.removeprefix('Qwen2.5 ')}", "training", sizes, FULL[:3], 100)
    llama = {"model": "Llama 495M", "rows": 4, "tokens": 2048}
    yield Case("full 495M", "training", llama, FULL, 90)
    yield Case("full 495M, new lengths", "training", {**llama, "lengths": True}, PLAIN, 90)
    packed = {"model": "Llama 495M", "rows": 1, "tokens": 8192, "documents": 12}
    yield Case("packed 495M", "training", packed, PLAIN, 90)
    for name in OPS:
        yield Case(name, "op", {}, (), 60)
    for batch in (1, 32):
        sizes = {"model": "Llama 495M", "batch": batch, "prompt": 512, "new": 128}
        contestants = (*PLAIN, "transformers, static cache")
        yield Case(f"generate {batch}", "generation", sizes, contestants, 90)


OPS = (  # functions of ``ops``
    "linear_cross_entropy",
    "attention_128",
    "attention_64",
    "experts",
    "nf4_1_row",
    "nf4_4096_rows",
    "decode_attention",
    "log_probs",
    "rms_norm",
    "swiglu",
    "delta_rule",
    "ssd",
    "causal_conv",
)


class Job(NamedTuple):
    """What a process does: a case, and a contestant unless it is an op."""

    case: Case
    contestant: str


def jobs(only: Sequence[str] = ()) -> list[Job]:
    """Return the work: cases whose name begins with a word of ``only``, or all.

    The first two contestants of all cases of a kind come before further ones.
    """
    chosen = [each for each in cases() if not only or each.name.startswith((*only,))]
    every = [
        (each.kind == "generation", each.kind == "op", place > 1, Job(each, contestant))
        for each in chosen
        for place, contestant in enumerate(each.contestants or ("",))
    ]
    return [job for *_, job in sorted(every, key=lambda entry: entry[:3])]


def small(case: Case) -> Case:
    """Return a case with the sizes of a test on a CPU."""
    sizes: dict[str, Any] = dict(case.sizes)
    if case.kind == "op":
        return case
    sizes |= {"rows": min(sizes.get("rows", 1), 2), "tokens": 32, "batch": 1}
    sizes |= {"prompt": 8, "new": 4, "documents": min(sizes.get("documents", 0), 3)}
    return case._replace(sizes={key: sizes[key] for key in case.sizes})


def config_of(model: str, on_gpu: bool) -> dict[str, Any]:
    """Return the config of a model, or of a tiny one of its family."""
    return MODELS[model] if on_gpu else TINY[model.partition(" ")[0]]
