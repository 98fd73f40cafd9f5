"""From config.json to Config: both forms of the rotary settings, defaults, and what is wrong."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, quantize
from unsloth_cupy.models.configs.config import FULL, SLIDING
from unsloth_cupy.models.parse import parse

from ..harness.tracked import tracked
from .peers import CONFIGS, LLAMA3, SIZES

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = [path.parent.name for path in tracked("tests/golden/models/*/config.json")]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("label", CONFIGS)
def test_older_form_means_the_same(label):
    """``rope_theta`` and ``rope_scaling`` beside each other, as transformers 4 wrote them."""
    newer = SIZES | CONFIGS[label]
    older = {key: value for key, value in newer.items() if key != "rope_parameters"}
    settings = newer.get("rope_parameters", {})
    if label == "gemma3":
        older["rope_local_base_freq"] = settings[SLIDING]["rope_theta"]
        older["rope_theta"] = settings[FULL]["rope_theta"]
        older["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
        older["sliding_window_pattern"] = 2
        del older["layer_types"]
    elif settings:
        older["rope_theta"] = settings["rope_theta"]
        kept = {k: v for k, v in settings.items() if k not in ("rope_theta", "rope_type")}
        kept.pop("partial_rotary_factor", None)
        older["rope_scaling"] = kept | {"type": settings["rope_type"]}
    tokens = np.arange(3, 27)[None]
    logits = [create(config, seed=0).logits(tokens) for config in (newer, older)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_4_leaves_out(family):
    """Defaults of a family stand in for null and absent keys."""
    settings = json.loads((GOLDEN / family / "config.json").read_text())
    config = parse(settings)
    nothing = {key: value for key, value in settings.items() if value is not None}
    assert parse(nothing | {"sliding_window": settings.get("sliding_window")}) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_dropout": 0.1},
        {"per_layer_config": {"0": {"hidden_size": 8}}, "is_encoder_decoder": True},
    ],
    ids=", ".join,
)
def test_keys_that_are_not_read_are_named(keys):
    with pytest.raises(ConfigError, match=".*".join(f"{key}=" for key in sorted(keys))):
        parse(SIZES | {"model_type": "llama"} | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
        {"clip_qkv": 8.0, "no_rope_layers": [1, 0, 1]},
        {"num_hidden_layer": 2},  # one letter is missing
        {"a key of tomorrow": {"of": "any form"}},
        {"neftune_noise_alpha": 0.0, "model_name": "x" * 10_000},
    ],
    ids=", ".join,
)
def test_keys_that_no_class_reads_are_ignored_and_named_once(keys):
    config = SIZES | {"model_type": "llama"}
    with pytest.warns(UserWarning, match=".*".join(f"{key}=" for key in sorted(keys))) as caught:
        actual = parse(config | keys)
    assert len(str(caught[0].message)) < 300
    assert actual == parse(config | keys) == parse(config)


def test_keys_without_an_effect_are_taken():
    keys = {"attention_dropout": 0.0, "embedding_multiplier": 1.0, "clip_qkv": None}
    keys |= {"no_rope_layers": [], "use_cache": False, "torch_dtype": "bfloat16", "_anything": 1}
    config = SIZES | {"model_type": "llama"}
    assert parse(config | keys) == parse(config)


def test_windows():
    def kinds(**given):
        return [t == SLIDING for t in parse(SIZES | {"num_hidden_layers": 8} | given).layer_types]

    assert not any(kinds(model_type="llama", sliding_window=4))
    assert all(kinds(model_type="mistral", sliding_window=4))
    assert not any(kinds(model_type="mistral", sliding_window=None))
    assert not any(kinds(model_type="qwen2", sliding_window=4, max_window_layers=2))
    late = kinds(model_type="qwen2", sliding_window=4, max_window_layers=6, use_sliding_window=True)
    assert late == [False] * 6 + [True] * 2
    assert kinds(model_type="gemma2") == [True, False] * 4
    assert kinds(model_type="gemma3_text") == [True] * 5 + [False] + [True] * 2


def test_gemma3_needs_no_more_than_its_hub_config_says():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    config = parse(outer)
    assert (config.vocab, config.heads, config.kv_heads, config.dim) == (262_208, 8, 4, 256)
    assert config.end_tokens == (1, 106)
    assert config.tied
    assert config.ropes[FULL].base == 1e6
    assert config.ropes[SLIDING].base == 1e4
    assert config.ropes[SLIDING].scaling is None


def test_create():
    model = create(SIZES | {"model_type": "gemma2", "head_dim": 8}, seed=5)
    assert set(model.parameters) == set(model.config.shapes())
    assert not model.parameters["model.norm.weight"].any()
    weight = model.parameters["model.layers.0.mlp.up_proj.weight"]
    assert abs(weight.std() - 0.2) < 0.02
    again = create(SIZES | {"model_type": "gemma2", "head_dim": 8}, seed=5)
    np.testing.assert_array_equal(weight, again.parameters["model.layers.0.mlp.up_proj.weight"])
    other = create(SIZES | {"model_type": "gemma2", "head_dim": 8}, seed=6)
    assert (weight != other.parameters["model.layers.0.mlp.up_proj.weight"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "falcon_mamba"},
            "model_type is 'falcon_mamba', which is not supported; the nearest known",
        ),
        ({"model_type": None}, "choose from apertus, arcee, bailing_hybrid, bamba, bitnet,"),
        ({"model_type": ["llama"]}, "choose from"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0"),
        ({"num_attention_heads": 5}, "hidden_size=32 is not a multiple"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be an integer in 1 .."),
        ({"head_dim": 7}, "even"),
        ({"hidden_act": "mish"}, "choose from silu"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "choose from default, linear"),
        ({"rope_scaling": 3}, "must be dicts"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention=3: not read"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
            "a dict for each layer type",
        ),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "config: .*low_freq_factor"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 3}}, "config: .*short_factor must"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [0.0] * 4}}, "config: .*long_factor must"),
        ({"rope_theta": 1.0}, "config: .*base of the wavelengths is 1.0"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "plain weights"),
        ({"model_type": "gemma2", "layer_types": [FULL]}, "num_hidden_layers=3"),
        ({"model_type": "gemma3", "text_config": 5}, "text_config"),
    ],
)
def test_broken(change, message):
    with pytest.raises(ConfigError, match=message):
        create(SIZES | {"model_type": "llama"} | change, seed=0)


def test_no_dict():
    with pytest.raises(ConfigError, match="must be a dict"):
        create("config.json", seed=0)


def published(model_type, sizes, **others):
    """Spell out vocab, hidden, inner, layers, heads, kv heads."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {"model_type": model_type} | dict(zip(names, sizes, strict=True)) | others


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (published("llama", (128_256, 4096, 14_336, 32, 32, 8)), 8_030_261_248),  # Llama 3.1 8B
        (published("mistral", (32_000, 4096, 14_336, 32, 32, 8)), 7_241_732_096),  # Mistral 7B
        (
            published("qwen2", (151_936, 896, 4864, 24, 14, 2), tie_word_embeddings=True),
            494_032_768,  # Qwen2.5 0.5B
        ),
        (
            published("qwen3", (151_936, 1024, 3072, 28, 16, 8), tie_word_embeddings=True),
            596_049_920,  # Qwen3 0.6B
        ),
        (published("gemma", (256_000, 2048, 16_384, 18, 8, 1)), 2_506_172_416),  # Gemma 2B
        (published("gemma2", (256_000, 2304, 9216, 26, 8, 4)), 2_614_341_888),  # Gemma 2 2B
        (published("gemma3_text", (262_144, 1152, 6912, 26, 4, 1)), 999_885_952),  # Gemma 3 1B
        (published("phi3", (32_064, 3072, 8192, 32, 32, 32)), 3_821_079_552),  # Phi-3 mini
        (published("olmo2", (100_352, 4096, 11_008, 32, 32, 32)), 7_298_617_344),  # OLMo 2 7B
        (
            published("bitnet", (128_256, 2560, 6912, 30, 20, 5), tie_word_embeddings=True),
            2_412_820_480,  # BitNet b1.58 2B
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_published_models(config, parameters):
    assert sum(math.prod(shape) for shape in parse(config).shapes().values()) == parameters


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_window"])
def test_as_many_parameters_as_in_transformers(family: str) -> None:
    """Tied ones once."""
    pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")
    config = transformers.AutoConfig.from_pretrained(GOLDEN / family)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = create(json.loads((GOLDEN / family / "config.json").read_text()), seed=0)
    assert ours.num_parameters() == ours.num_parameters(only_trainable=True)
    assert ours.num_parameters() == theirs.num_parameters()


def test_a_model_says_what_it_is() -> None:
    model = create(SIZES | {"model_type": "llama"}, seed=0, dtype="bfloat16")
    count, text = model.num_parameters(), repr(model)
    for said in ("Transformer llama:", "bfloat16 on cpu", f" {count:,} parameters"):
        assert said in text
    assert f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, " in text
    assert "weights" not in text
    quantize(model, "fp4", least=0)
    assert "fp4 weights" in repr(model)
    assert 0 < model.num_parameters(only_trainable=True) < model.num_parameters() == count
    model.add_adapter(2)
    learned = sum(array.size for array in model.adapter.parameters.values())
    assert model.num_parameters(only_trainable=True) == learned
    assert model.num_parameters() == count + learned
    assert f"adapter: {learned:,} parameters>" in repr(model)
