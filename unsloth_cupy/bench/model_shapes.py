"""Sizes that ops have in models: ``bench`` times them on a GPU, beside two sizes of every op."""

from typing import Any, NamedTuple

from ..core.dtypes import BFLOAT16
from .cases import Scale


class Shape(NamedTuple):
    """A call to time; a name of "" stands for the sizes that every op is timed in."""

    name: str
    scale: Scale
    options: dict[str, Any]
    dtypes: tuple[Any, ...] = (BFLOAT16,)


# of Llama 3.1 8B, but for the vocabulary
LARGE = Scale(tokens=8192, hidden=4096, inner=14336, vocab=32768, heads=32, kv_heads=8, dim=128)
HEADS = f"{LARGE.heads}:{LARGE.kv_heads} heads"
CACHES = [(rows, keys) for rows in (1, 32) for keys in (4096, 32768)]  # rows that are generated

CAUSAL = tuple(
    Shape(
        f"causal, {n} tokens, {HEADS} of {dim}", LARGE._replace(tokens=n, dim=dim), {"causal": True}
    )
    for dim in (64, 128)  # Llama 3.2 1B; 3B and larger
    for n in (8192, 32768)
)
DECODE = tuple(
    Shape(
        f"{rows} x 1 of {keys} keys, {HEADS} of {LARGE.dim}",
        LARGE._replace(tokens=keys, batch=rows, queries=1),
        {},
    )
    for rows, keys in CACHES
)
LATENT = tuple(  # DeepSeek V3
    Shape(
        f"{rows} x 1 of {keys} latents, 128 heads of 576, rank 512",
        Scale(tokens=keys, batch=rows, queries=1, heads=128, dim=576),
        {"rank": 512},
    )
    for rows, keys in CACHES
)
MIXTURES = tuple(  # Qwen3 30B-A3B, Qwen3-Next 80B-A3B
    Shape(
        f"8192 x 2048, {k} of {experts} experts of {inner}",
        LARGE._replace(hidden=2048, inner=inner, experts=experts, k=k),
        {},
    )
    for k, experts, inner in ((8, 128, 768), (10, 512, 512))
)
MATRIX = LARGE._replace(outputs=14336)  # gate or up of Llama 3.1 8B
FEW_ROWS = tuple(
    Shape(f"{rows} x 4096 by 14336 x 4096", MATRIX._replace(few=rows), {}) for rows in (1, 8)
)
VOCABULARIES = tuple(
    Shape(f"8192 rows, vocabulary {vocab}", LARGE._replace(vocab=vocab), {})
    for vocab in (128256, 256000)  # Llama 3, Gemma 2; 32768 is a size of every op
)
SHAPES: dict[str, tuple[Shape, ...]] = {
    "attention_forward": (*CAUSAL, *DECODE),
    "attention_paged_forward": DECODE,
    "attention_paged_int8_forward": DECODE,
    "latent_attention_forward": LATENT,
    "experts_mlp_forward": MIXTURES,
    "nf4_product_": FEW_ROWS,
    "nf4_dequantize_": (Shape("14336 x 4096", MATRIX, {}),),  # once for many rows, such as 4096
    "cross_entropy_forward": VOCABULARIES,
    "linear_cross_entropy_forward": VOCABULARIES,
    "linear_cross_entropy_gradients": VOCABULARIES,
    "linear_log_probs_forward": VOCABULARIES,
}
ONLY = ("latent_attention_forward",)  # the sizes of every op are of no model that has it
