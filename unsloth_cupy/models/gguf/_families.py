"""What llama.cpp computes for each family, and where that differs from the model.

An architecture of llama.cpp has its activation, norms and biases built in; a file cannot change
them.  A difference for all inputs raises an error; a difference for some inputs becomes a note.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..config import FULL, SLIDING, Config, Rope

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # yarn: llama.cpp uses these, whatever a file says


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    ``output`` says whether its head is the embedding table ("tied"), a separate tensor ("own") or
    either.  A model with exactly ``deep`` layers is treated as the 27B one, whose scores are scaled
    by hidden / heads instead of the length of a head.
    """

    name: str
    activation: str = "silu"
    interleaved: bool = False  # rotary pairs are adjacent: rows of q and k are reordered
    any_head: bool = True  # the length of a head need not be hidden / heads
    biases: bool = False  # the output projection and the MLP may have biases
    windows: bool = False
    softcap: bool = False
    output: str = "either"
    partial: bool = False  # a part of a head may be rotated
    scalings: tuple[str, ...] = ("default", "linear", "dynamic", "yarn")
    deep: int | None = None


PLAIN = Architecture.scalings
LLAMA = Architecture(
    "llama", interleaved=True, biases=True, scalings=(*PLAIN, "llama3", "longrope")
)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", any_head=False),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", "gelu_tanh", output="tied"),
    "gemma2": Architecture(
        "gemma2", "gelu_tanh", windows=True, softcap=True, output="tied", deep=46
    ),
    "gemma3_text": Architecture("gemma3", "gelu_tanh", windows=True, deep=62),
    "phi3": Architecture("phi3", any_head=False, partial=True, scalings=(*PLAIN, "longrope")),
    "olmo2": Architecture("olmo2", any_head=False, output="own"),
    "bitnet": Architecture("bitnet", "relu2", any_head=False, output="tied"),
}


def architecture(config: Config) -> Architecture:
    """Return the architecture as which llama.cpp runs a model.

    Raises
    ------
    ConfigError
        GGUF has no names for the family, or llama.cpp would compute something else.
    """
    known = ARCHITECTURES.get(config.model_type)
    if known is None:
        names = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"export_gguf: GGUF has no names for a {config.model_type}; the families are {names}"
        )
    for problem in _problems(config, known):
        raise ConfigError(
            f"export_gguf: llama.cpp's {known.name} {problem}; GGUF cannot describe this model"
        )
    return known


def _problems(config: Config, known: Architecture) -> Iterator[str]:
    """Yield the properties of a model that llama.cpp's architecture does not have."""
    if config.activation not in (known.activation, "silu" if known.name == "bitnet" else None):
        yield f"computes {known.activation}, not {config.activation}"
    if not known.any_head and config.heads * config.dim != config.hidden:
        yield f"has heads of length hidden / heads, not {config.heads} of length {config.dim}"
    if (config.output_bias or config.mlp_bias) and not known.biases:
        yield "has no bias in its output projection and its MLP"
    if known.output == "tied" and not config.tied:
        yield "has no head of its own, separate from the embedding"
    if known.softcap and not (config.softcap and config.logit_softcap):
        yield "always caps scores and logits"
    rope, local_rope = ropes(config)
    kind = scaling_of(rope)
    if kind not in known.scalings:
        yield f"does not support rotary positions of type {kind}"
    if rope.dim != config.dim and not known.partial:
        yield f"rotates whole heads, not {rope.dim} of {config.dim}"
    if kind == "yarn" and not (rope.scaling or {}).get("truncate", True):
        yield "rounds yarn's columns (truncate)"
    if known.name == "gemma3" and SLIDING in config.layer_types:
        if local_rope.scaling or kind == "yarn":
            yield "does not stretch the rotary positions of sliding layers"
    elif local_rope != rope:
        yield "has the same rotary positions in all layers"


def warnings_of(config: Config, known: Architecture) -> Iterator[str]:
    """Yield notes on what llama.cpp computes differently for some inputs."""
    rope, _ = ropes(config)
    kind = scaling_of(rope)
    if config.activation == "relu2":
        yield (
            "llama.cpp's bitnet computes SiLU where this model has a squared ReLU: its outputs"
            " differ"
        )
    if SLIDING in config.layer_types and not known.windows:
        yield (
            f"llama.cpp's {known.name} has no sliding layers: beyond {config.window} tokens its"
            " outputs differ"
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
            yield f"llama.cpp does not read {key} of yarn and uses {value:g}"


def ropes(config: Config) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers that see all keys, and of those that see a window."""
    full = config.ropes.get(FULL) or config.ropes[SLIDING]
    return full, config.ropes.get(SLIDING) or full


def scaling_of(rope: Rope) -> str:
    """Return the scaling type of rotary positions, such as yarn."""
    scaling: Any = rope.scaling or {}
    return str(scaling.get("rope_type", "default"))


def score_factor(config: Config, known: Architecture) -> float:
    """Return the factor for the queries' weights that gives scores the scale of the model."""
    length = config.hidden // config.heads if config.layers == known.deep else config.dim
    factor = config.scale * math.sqrt(length)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor
