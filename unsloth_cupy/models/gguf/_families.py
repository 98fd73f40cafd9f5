"""What llama.cpp computes for each family, and where that differs from the model.

An architecture of llama.cpp has its activation, norms and biases built in; a file cannot change
them.  A difference for all inputs raises an error; a difference for some inputs becomes a note.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..configs.config import FULL, SLIDING, Config, Rope

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # yarn: llama.cpp uses these, whatever a file says


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    ``output`` says whether its head is the embedding table ("tied"), a separate tensor ("own") or
    either.  A model with exactly ``deep`` layers is treated as the 27B one, whose scores are scaled
    by hidden / heads instead of the length of a head.  ``rotates`` says which layers rotate
    queries and keys: all, all but every fourth, or the sliding ones; ``fourth`` that every fourth
    layer sees all keys.  Models of ``windows_of`` layers have windows, and others none.
    ``head_norms`` are layers from which on norms of the heads are optional.
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
    needs_biases: bool = False  # of the output projection and the MLP
    head_norms: int | None = None
    rotates: str = "all"  # all, fourth or sliding
    fourth: bool = False
    windows_of: int | None = None
    scales: bool = False  # of embedding, residual sums, scores and logits
    logit_scale: bool = False
    temperature: bool = False  # scores may grow with the position
    xielu: bool = False


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
    "olmo3": Architecture("olmo2", any_head=False, output="own", windows=True, fourth=True),
    "olmo": Architecture("olmo", interleaved=True, any_head=False),
    "smollm3": Architecture("smollm3", interleaved=True, rotates="fourth"),
    "granite": Architecture(
        "granite",
        interleaved=True,
        biases=True,
        scales=True,
        logit_scale=True,
        scalings=(*PLAIN, "llama3", "longrope"),
    ),
    "cohere": Architecture(
        "command-r",
        interleaved=True,
        any_head=False,
        output="tied",
        head_norms=64,
        logit_scale=True,
    ),
    "cohere2": Architecture(
        "cohere2",
        interleaved=True,
        any_head=False,
        output="tied",
        windows=True,
        fourth=True,
        rotates="sliding",
        logit_scale=True,
    ),
    "glm4": Architecture("glm4", interleaved=True, partial=True),
    "ernie4_5": Architecture("ernie4_5", interleaved=True),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "seed_oss": Architecture("seed_oss"),
    "exaone4": Architecture(
        "exaone4",
        any_head=False,
        windows=True,
        fourth=True,
        rotates="sliding",
        windows_of=64,
        scalings=(*PLAIN, "llama3"),
    ),
    "arcee": Architecture("arcee", "relu2", interleaved=True, scalings=(*PLAIN, "llama3")),
    "starcoder2": Architecture(
        "starcoder2", "gelu_tanh", any_head=False, biases=True, needs_biases=True
    ),
    "stablelm": Architecture("stablelm", any_head=False, output="own", partial=True),
    "nemotron": Architecture(
        "nemotron", "relu2", any_head=False, biases=True, output="own", partial=True
    ),
    "ministral": LLAMA,
    "ministral3": Architecture(
        "mistral3", interleaved=True, temperature=True, scalings=(*PLAIN, "llama3", "longrope")
    ),
    "apertus": Architecture(
        "apertus",
        "xielu",
        biases=True,
        output="own",
        xielu=True,
        scalings=(*PLAIN, "llama3", "longrope"),
    ),
    "phi": Architecture(
        "phi2",
        "gelu_tanh",
        any_head=False,
        biases=True,
        needs_biases=True,
        output="own",
        partial=True,
    ),
    "jais2": Architecture("jais2", "relu2", biases=True, needs_biases=True),
    "bitnet": Architecture("bitnet", "relu2", any_head=False, output="tied"),
}


def architecture(config: Config) -> Architecture:
    """Return the architecture as which llama.cpp runs a model.

    Raises
    ------
    ConfigError
        GGUF has no names for the family, or llama.cpp would compute something else.
    """
    if config.experts is not None:
        problem = f"the experts of a {config.model_type} are not written to GGUF"
        cure = "save(folder), which convert_hf_to_gguf.py of llama.cpp reads"
        raise ConfigError(f"export_gguf: {problem}; {cure}")
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
    if known.needs_biases and not (config.output_bias and config.mlp_bias):
        yield "has biases in its output projection and its MLP"
    yield from _problems_of_layers(config, known)
    if known.output == "tied" and not config.tied:
        yield "has no head of its own, separate from the embedding"
    if known.softcap and not (config.softcap and config.logit_softcap):
        yield "always caps scores and logits"
    yield from _problems_of_positions(config, known)


def _problems_of_positions(config: Config, known: Architecture) -> Iterator[str]:
    """Yield what llama.cpp does not know of rotary positions."""
    rope, local_rope = ropes(config)
    kind = scaling_of(rope)
    if kind not in known.scalings:
        yield f"does not support rotary positions of type {kind}"
    if rope.dim != config.dim and not known.partial:
        yield f"rotates whole heads, not {rope.dim} of {config.dim}"
    if kind == "yarn" and not (rope.scaling or {}).get("truncate", True):
        yield "rounds yarn's columns (truncate)"
    if known.name == "olmo2" and SLIDING in config.layer_types:
        if local_rope != Rope(rope.dim, rope.base):
            yield "has the same rotary positions, not stretched, in sliding layers"
    elif known.name == "gemma3" and SLIDING in config.layer_types:
        if local_rope.scaling or kind == "yarn":
            yield "does not stretch the rotary positions of sliding layers"
    elif local_rope != rope:
        yield "has the same rotary positions in all layers"


def _problems_of_layers(config: Config, known: Architecture) -> Iterator[str]:
    """Yield what llama.cpp does not know of norms of heads, windows and layers without rotation."""
    optional = config.query_key_norm in ("heads", "modules") or config.query_key_biases
    if optional and (known.head_norms is None or config.layers < known.head_norms):
        yield "has no norms of queries and keys by heads in such a model"
    layers, slides = range(config.layers), [kind == SLIDING for kind in config.layer_types]
    fourth = [(layer + 1) % 4 != 0 for layer in layers]
    if known.windows_of is not None and any(slides) != (config.layers == known.windows_of):
        yield f"has windows in models of {known.windows_of} layers, and only there"
    if known.fourth and any(slides) and slides != fourth:
        yield "has windows in all layers but every fourth"
    if known.name == "cohere2" and not any(slides):
        yield "always has windows"
    rotated = [config.rotates(layer) for layer in layers]
    everywhere = known.rotates == "all" or (known.rotates == "sliding" and not any(slides))
    if rotated != ([True] * config.layers if everywhere else fourth):
        yield "rotates " + ("all layers" if everywhere else "all layers but every fourth")
    if (config.residual_scale != 1 or config.logit_scale != 1) and not known.logit_scale:
        yield "does not scale residual sums or logits"
    if config.clip is not None and known.name != "olmo":
        yield "does not clip queries, keys and values"


def warnings_of(config: Config, known: Architecture) -> Iterator[str]:
    """Yield notes on what llama.cpp computes differently for some inputs."""
    rope, _ = ropes(config)
    kind = scaling_of(rope)
    if config.activation == "relu2" and known.name == "bitnet":
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
    if known.scales:
        return 1.0
    length = config.hidden // config.heads if config.layers == known.deep else config.dim
    factor = config.scale * math.sqrt(length)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor
