"""Keys of config.json that transformers' classes read: the table, and what is read by it."""

import dataclasses
import json
from typing import Any

import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.configs import class_keys
from unsloth_cupy.models.configs.draft_heads import without_heads
from unsloth_cupy.models.configs.families import ENCODERS, FAMILIES
from unsloth_cupy.models.configs.keys import NEUTRAL
from unsloth_cupy.models.configs.text_configs import OUTER, SAME
from unsloth_cupy.models.folders.other_weights import KEYS
from unsloth_cupy.models.parse import parse

from . import class_keys as command
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES

OF_FAMILIES = {
    config["model_type"]: SIZES | config
    for config in (*CONFIGS.values(), *RELATIVES.values(), *MIXTURES.values())
}
NEEDED = (
    "layers_block_type",
    "mamba_n_heads",
    "mamba_d_head",
    "num_heads",
    "head_dim",
    "n_groups",
    "num_experts_per_tok",
    "mamba_d_ssm",
    "n_shared_experts",
)  # what fits such small sizes, or has no default
IGNORED = "config.* ignored, as in transformers' class of"


def transformers() -> Any:
    pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    return pytest.importorskip("transformers", reason="needs the extra `peers`")


def test_the_table_is_that_of_transformers() -> None:
    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    installed = transformers().__version__
    if number(installed) < number(class_keys.VERSION):
        pytest.skip(f"the table is of transformers {class_keys.VERSION}, this is {installed}")
    stale = f"the table is not of transformers {installed}: run python -m tests.models.class_keys"
    assert command.table() + "\n" == class_keys.TABLE, stale
    assert {*FAMILIES, *ENCODERS, *SAME, *OUTER, "all"} == {line.partition(":")[0] for line in
            class_keys.TABLE.splitlines() if not line.startswith(" ")}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_key_is_read_ignored_or_refused(kind: str) -> None:
    """A key that the class does not read changes nothing, one that it reads is not passed over."""
    config, family, keys = OF_FAMILIES[kind], FAMILIES[kind], class_keys.keys_of(kind)
    assert keys is not None
    if (experts := family.experts) is not None:  # GGUF files are read as configs with these keys
        assert {experts.count[0], experts.k[0], experts.inner} <= keys.keys()
    expected = parse(config)
    others = {key for each in FAMILIES.values() for key in (*each.defaults, *each.factors)}
    for key in sorted(others - {*keys, *family.facts, *NEUTRAL}):
        with pytest.warns(UserWarning, match=rf"{IGNORED} {kind}"):
            assert parse(config | {key: 3}) == expected, key
    for key in ("neftune_noise_alpha", "model_name", "moe_intermediate_size_of_old"):
        with pytest.warns(UserWarning, match=rf"config: {key}=0.5: ignored"):
            assert parse(config | {key: 0.5}) == expected
    with pytest.raises(ConfigError, match=r"per_layer_config=.*: not read, and may change"):
        parse(config | {"per_layer_config": {"0": {"hidden_size": 8}}})


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(kind: str) -> None:
    """Of a text model, whose sizes must be there, and of the text part of a model of images."""
    peer = transformers()
    sizes = {key: value for key, value in OF_FAMILIES[kind].items() if key in {*SIZES, *NEEDED}}
    sizes |= {"num_key_value_heads": 4} if FAMILIES[kind].latent else {}
    if kind == "lfm2_moe":  # transformers has no default, and fails without the key
        sizes["layer_types"] = OF_FAMILIES[kind]["layer_types"]
    whole = peer.AutoConfig.for_model(kind, **sizes)
    plain = json.loads(whole.to_json_string(use_diff=False))
    if kind in ("ministral3", "mistral4"):  # yarn reads its own factor alone
        for key in ("type", "max_position_embeddings"):
            plain["rope_parameters"].pop(key, None)
    own, expected = parse({"model_type": kind, **sizes}), parse(plain)
    assert own == without_heads(expected)  # transformers counts draft heads, and has none


# Configs as they were released, with smaller sizes: what the text part says, and what is outside.
SHORT = {key: SIZES[key] for key in SIZES if key.startswith(("hidden", "num_"))}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
VL = {
    **SIZES,
    **{"vision_start_token_id": 90, "vision_end_token_id": 91, "vision_token_id": 92},
    **{"image_token_id": 93, "video_token_id": 94, "use_sliding_window": False, "rope_theta": 1e6},
    **{"sliding_window": 32768, "max_window_layers": 80, "rope_scaling": MROPE},
    "vision_config": {"depth": 1, "in_chans": 3},
}
SMOL = {
    **{"model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "_name_or_path": "/fsx"},
    **{"head_dim": 8, "is_llama_config": True, "neftune_noise_alpha": 0.0, "qk_layer_norms": False},
    **{"perceiver_config": {"resampler_depth": 6}, "pixel_shuffle_factor": 3, "rope_scaling": None},
    **{"rope_interleaved": False, "use_resampler": False, "rope_theta": 273768.0},
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}
RELEASED: dict[str, dict[str, Any]] = {
    "qwen2_vl": VL,
    "qwen2_5_vl": VL,
    "smolvlm": {"text_config": SMOL | SHORT, "tie_word_embeddings": False, "scale_factor": 3},
    "idefics3": {"text_config": SHORT | {"model_type": "llama", "pixel_shuffle_factor": 2}},
    "qwen2_audio": {
        **{"ignore_index": -100, "audio_token_index": 90, "vocab_size": 97},
        "text_config": {
            **{"model_type": "qwen2", "intermediate_size": 48, "max_position_embeddings": 8192},
            **{"rms_norm_eps": 1e-05, "rope_theta": 10000, "use_mrope": False, "vocab_size": 97},
        },
    },
    "glm4v": {
        "text_config": {
            **{"model_type": "glm4v_text", "attention_bias": True, **SHORT, "vocab_size": 97},
            **{"image_start_token_id": 95, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
            "rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]},
        },
    },
    "voxtral": {
        **{"hidden_size": 32, "vocab_size": 97, "audio_token_id": 24},
        "text_config": {"model_type": "llama", "head_dim": 8, "rope_theta": 1e8, **SIZES},
    },
    "internvl": {
        **{"image_token_id": 90, "downsample_ratio": 0.5, "tie_word_embeddings": False},
        "text_config": {
            **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **SHORT},
            **{"_attn_implementation_autoset": True, "rope_scaling": None, "rope_theta": 1e6},
        },
    },
    "embedding_gemma2": {"architectures": ["EmbeddingGemma2Model"], "text_config": SHORT},
    "mistral3": {"text_config": {"model_type": "mistral", "head_dim": 8, "rope_theta": 1e9}},
}


@pytest.mark.filterwarnings(f"ignore:{IGNORED}:UserWarning")
@pytest.mark.parametrize("outer", OUTER)
def test_the_text_part_of_a_released_config(outer: str) -> None:
    """It is what transformers makes of it, with the defaults of its classes."""
    peer, released = transformers(), RELEASED.get(outer, {"text_config": SHORT})
    text = peer.AutoConfig.for_model(outer, **json.loads(json.dumps(released))).get_text_config()
    plain = json.loads(text.to_json_string(use_diff=False))
    if text.model_type == "glm4v_text" and "partial_rotary_factor" not in plain["rope_parameters"]:
        plain["partial_rotary_factor"] = 1.0
    tied = {k: v for k, v in plain.items() if k == "tie_word_embeddings"}
    tied |= {k: v for k, v in released.items() if k == "architectures"}
    expected = parse({"model_type": outer, "text_config": plain, **tied})
    actual = parse({"model_type": outer, **released, **tied})
    assert dataclasses.replace(actual, pad_token=expected.pad_token) == expected
    sizes = (plain["hidden_size"], plain["num_hidden_layers"], plain["vocab_size"])
    assert (actual.hidden, actual.layers, actual.vocab) == sizes


def refusal(config: dict[str, Any]) -> str:
    """Return the message of a ConfigError, or an empty text."""
    try:
        parse(config)
    except ConfigError as error:
        return str(error)
    return ""


WRONG: list[Any] = ["x", ["a"], {"a": "b"}, [None], True, -1, 0, 1.5, 2**70, [], {}]


@pytest.mark.filterwarnings(f"ignore:{IGNORED}:UserWarning")
@pytest.mark.parametrize("kind", FAMILIES)
def test_values_of_other_types_are_refused_or_read(kind: str) -> None:
    family, config = FAMILIES[kind], OF_FAMILIES[kind]
    keys = {*config, *family.defaults, *family.facts, "architectures", "quantization_config"}
    for key in sorted(keys):
        for value in WRONG:
            refusal(config | {key: value})


@pytest.mark.parametrize("method", [*KEYS, "bitsandbytes", "bitnet"])
def test_quantization_configs_of_other_types_are_refused_or_read(method: str) -> None:
    keys = {*KEYS.get(method, {}), "linear_class", "load_in_4bit", "quant_method", "other"}
    for key in sorted(keys):
        for value in [*WRONG, "x" * 10_000, ["x" * 10_000], {"x" * 10_000: {"bits": "x"}}]:
            facts = {"quant_method": method, key: value}
            problem = refusal(OF_FAMILIES["llama"] | {"quantization_config": facts})
            assert len(problem) < 500, key
