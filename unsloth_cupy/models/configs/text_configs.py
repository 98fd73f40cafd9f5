"""Extract the language model's part of the config.json of a multimodal model."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .class_keys import keys_of, own_keys
from .families import FAMILIES
from .family import Family
from .heads import LABELS, class_of, head_of
from .keys import READ
from .names import BACKBONE, IMAGES, TEXT
from .reading import CUT, without_ignored

# Keys of a multimodal config.json that override the same keys of its text_config.
OUTER_KEYS = ("tie_word_embeddings", "eos_token_id", "pad_token_id", "quantization_config", *LABELS)
# Multimodal types whose text_config alone determines what they compute from text, and the type of
# a text_config without model_type.
OUTER = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "embedding_gemma2": "embedding_gemma2_text",
    "llama4": "llama4_text",
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "vipllava"), "llama"),
    **dict.fromkeys(("video_llava", "idefics3", "smolvlm", "voxtral"), "llama"),
    **dict.fromkeys(("llava_onevision", "internvl", "qwen2_audio", "got_ocr2"), "qwen2"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "qwen2_vl_text"),
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "mistral",
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "cohere2"),
    "glm4v": "glm4v_text",
}
# Types of text_configs that compute the same from text as another type.
SAME = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "glm4v_text": "glm4",
}
# Keys of positions with three parts, which differ in images only; in text they are equal.
ONLY_OF_IMAGES = ("mrope_section", "mrope_interleaved")
# Defaults in the code of these classes that are not fields, so ``class_keys`` does not have them.
WITHOUT_FIELDS = {"glm4v_text": {"partial_rotary_factor": 1.0}}
# Defaults of a text_config that the class of the multimodal model sets.
OF_OUTER: Mapping[str, Mapping[str, Any]] = {
    "voxtral": {
        **{"vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192},
        **{"num_hidden_layers": 30, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e8},
    },
}
# The multimodal classes have their own head, which does not scale or cap logits.
PLAIN_HEAD = {
    "final_logit_softcapping": None,
    **dict.fromkeys(("logit_scale", "logits_scaling", "lm_head_multiplier"), 1.0),
}
OWN_HEAD = ("gemma4", "llama4")  # multimodal classes with the head of the language model
BODIES = {
    **dict.fromkeys(("idefics3", "smolvlm"), "model.text_model."),
    "llama4": "language_model.model.",
}


def body_of(values: Mapping[str, Any]) -> str:
    """Return the prefix of the body's modules: see ``Config.body``."""
    outer = values.get("model_type")
    if outer in ("mamba", "mamba2"):
        return BACKBONE
    whole = isinstance(outer, str) and outer in OUTER
    return BODIES.get(str(outer), IMAGES) if whole else TEXT


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config.json, or the config.json of a text model.

    Raises
    ------
    ConfigError
        The type is not in ``OUTER``: the part alone may not determine the results for text.
    """
    outer = values.get("model_type")
    if not isinstance(outer, str) or (outer not in OUTER and "text_config" not in values):
        return values
    if outer not in OUTER:
        known = ", ".join(sorted(OUTER))
        cure = f"supported text parts: {known}; save the language model alone, if it has one"
        raise ConfigError(f"config: model_type is {outer!r} with a text_config; {cure}")
    flat = {key: each for key, each in values.items() if key not in own_keys(outer)}
    inner = values.get("text_config", flat)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config: text_config is {str(inner)[:CUT]}; it must be a dict")
    model_type = inner.get("model_type")
    kind = OUTER[outer] if model_type is None or model_type == outer else str(model_type)
    same = SAME.get(kind, kind)
    if kind in SAME:
        inner = without_ignored(inner, kind, Family())
    text = {**_assumed(kind), **OF_OUTER.get(outer, {}), **inner, "model_type": same}
    text |= {key: values[key] for key in OUTER_KEYS if values.get(key) is not None}
    if (family := FAMILIES.get(same)) is not None and outer not in OWN_HEAD:
        text |= {key: value for key, value in PLAIN_HEAD.items() if key in family.factors}
    text["architectures"] = [class_of({"model_type": same}, head_of(values))]
    if kind == "glm4v_text" and isinstance(text.get("hidden_size"), int):  # it ignores head_dim
        heads = text.get("num_attention_heads")
        text["head_dim"] = (
            text["hidden_size"] // heads if isinstance(heads, int) and heads else None
        )
    if kind in SAME:
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(text.get(key), Mapping):
                text[key] = _of_text(text[key])
    return text


def _assumed(kind: str) -> dict[str, Any]:
    """Return the defaults of transformers' class of a text_config, for absent keys."""
    keys = keys_of(kind) or {}
    known = {key: value for key, value in keys.items() if key in READ and value is not None}
    return known | WITHOUT_FIELDS.get(kind, {})


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope settings without the keys that only images need."""
    text_only = {key: value for key, value in rope.items() if key not in ONLY_OF_IMAGES}
    return {key: "default" if value == "mrope" else value for key, value in text_only.items()}
