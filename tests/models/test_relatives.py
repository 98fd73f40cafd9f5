"""Families that are rows of properties: text parts, types recognised by structure, refusals."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create, load
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.configs.text_configs import OUTER
from unsloth_cupy.models.parse import parse

from .peers import MIXTURES, RELATIVES, SIZES

TOKENS = np.random.default_rng(0).integers(3, 97, (2, 20))
TEXT = SIZES | {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 97}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "depth": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
OF_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llama", {}),
    "mistral3": ("mistral", {}),
    # their heads leave logits as they are, whatever the text model would do to them
    "gemma3": ("gemma3_text", {"sliding_window": 5, "final_logit_softcapping": 2.0}),
    "vipllava": ("gemma2", {"sliding_window": 5, "final_logit_softcapping": 2.0}),
    "llava_next": ("granite", {"logits_scaling": 3.0}),
    "idefics3": ("llama", {}),
    "aya_vision": ("cohere2", {"sliding_window": 5, "logit_scale": 0.3}),
    "qwen2_vl": ("qwen2_vl_text", {"rope_parameters": MROPE}),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": MROPE}),
    "glm4v": (
        "glm4v_text",
        {
            "hidden_size": 64,
            "head_dim": 16,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5},
        },
    ),
}


def transformers() -> Any:
    pytest.importorskip("torch", reason="torch computes the references")
    return pytest.importorskip("transformers", reason="transformers computes the references")


def logits(peer: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return peer(input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()


def of_images(kind: str, folder: Path) -> Any:
    """Save a small random model that reads images, and return it."""
    peers = transformers()
    import torch

    base, (text, changes) = peers.AutoConfig.for_model(kind), OF_IMAGES[kind]
    seen = {key: n for key, n in SMALL.items() if hasattr(base.vision_config, key)}
    seen["model_type"] = base.vision_config.model_type
    ids = {name: 96 for name in vars(base) if re.search(r"(image|video|vision).*token_i", name)}
    seen |= {"out_hidden_size": changes.get("hidden_size", 32)} if "out_hidden_size" in seen else {}
    config = peers.AutoConfig.for_model(
        kind, text_config={**TEXT, "model_type": text, **changes}, vision_config=seen, **ids
    )
    torch.manual_seed(0)
    peer = peers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for weight in peer.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    peer.save_pretrained(folder)
    return peer


@pytest.mark.parametrize("kind", OF_IMAGES)
def test_the_text_part_of_a_model_of_images(kind: str, tmp_path: Path) -> None:
    """It computes what the whole model does of text alone, and is saved as a language model."""
    expected = logits(of_images(kind, tmp_path / "whole"))
    model = load(tmp_path / "whole")
    np.testing.assert_allclose(model.logits(TOKENS), expected, rtol=0, atol=1e-4)
    model.save(tmp_path / "text")
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    np.testing.assert_allclose(logits(again), expected, rtol=0, atol=1e-4)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] in FAMILIES


def test_text_parts_of_older_files() -> None:
    """Sizes that classes of transformers 4 assumed, and one that is flat."""
    config = parse({"model_type": "llava", "text_config": {"vocab_size": 32_064}})
    assert (config.hidden, config.inner, config.layers, config.heads) == (4096, 11_008, 32, 32)
    flat = {"model_type": "qwen2_vl", "vision_config": {"depth": 1}, "rope_theta": 1e6}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = parse(SIZES | flat)
    assert (config.model_type, config.qkv_bias) == ("qwen2", True)
    assert config.ropes["full_attention"].base == 1e6
    with pytest.raises(ConfigError, match="'kosmos' with a text_config; supported text parts"):
        parse({"model_type": "kosmos", "text_config": TEXT})
    assert OUTER["gemma3"] == "gemma3_text"


def saved(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of a type that has no row."""
    from .peers import make

    return make(folder, {"model_type": kind, **changes})


def test_a_type_without_a_row_is_compared(tmp_path: Path) -> None:
    """Its small model computes what a structure does; then its own weights do.

    What config.json leaves out has the default values of the type, which no row has.
    """
    transformers()
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    peer = saved("cwm", tmp_path / "m", layer_types=types, sliding_window=5, head_dim=8)
    assert "cwm" not in FAMILIES
    file = tmp_path / "m" / "config.json"
    settings = json.loads(file.read_text())
    assert settings.pop("rope_parameters")["rope_theta"] == 1e6
    file.write_text(json.dumps(settings))
    model = load(tmp_path / "m")
    assert model.config.window_of(1) == 5
    np.testing.assert_allclose(model.logits(TOKENS), logits(peer), rtol=0, atol=1e-4)
    model.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "cwm"


def test_a_mixture_of_few_layers_without_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layers a kimi_linear, with which it is compared, has none with attention."""
    transformers()
    kinds = {"model_type": "kimi_linear", "num_key_value_heads": 4}
    assert not parse(SIZES | kinds).ropes
    rows: Any = FAMILIES
    monkeypatch.delitem(rows, "flex_olmo")
    settings = {"num_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}
    peer = saved("flex_olmo", tmp_path, num_key_value_heads=4, norm_topk_prob=True, **settings)
    np.testing.assert_allclose(load(tmp_path).logits(TOKENS), logits(peer), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nanochat"}, "is .*, which does not read .*=.* and has no mlp.fc1"),
        ({"model_type": "diffllama"}, "is llama, which does not read lambda_std_dev=0.1 and has"),
        ({"model_type": "exaone", "residual_factor": 2.0}, "is .*, which does not read residual_f"),
        ({"model_type": "no such type"}, "is llama; transformers has no such type"),
        (
            {"model_type": "no such type", "num_hidden_layers": 0},
            "is llama, but num_hidden_layers is 0",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_nearest_family_of_a_type_that_is_refused(config: Any, message: str) -> None:
    transformers()
    with pytest.raises(ConfigError, match=f"supported; the nearest known family {message}"):
        parse(SIZES | config)


def test_tensors_of_files_name_the_nearest_family(tmp_path: Path) -> None:
    """A type that transformers does not have is compared by its files: here, a mixture's."""
    create(SIZES | MIXTURES["qwen3_moe"], seed=0).save(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text()) | {"model_type": "of tomorrow", "sparse_k": 4}
    file.write_text(json.dumps(settings))
    nearest = "the nearest known family is qwen3_moe, which does not read sparse_k=4"
    with pytest.raises(ConfigError, match=f"{nearest}(; transformers|; install|$)"):
        load(tmp_path)


def test_a_structure_with_other_logits_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers()
    computed = Transformer.logits
    changed = SIZES | {"model_type": "exaone", "rope_theta": 901.0}  # which nothing has cached
    monkeypatch.setattr(Transformer, "logits", lambda *a, **o: computed(*a, **o) + 1e-3)
    with pytest.raises(ConfigError, match="its logits differ from those of every"):
        parse(changed)
    monkeypatch.undo()
    assert parse(changed | {"rope_theta": 902.0}).heads == SIZES["num_attention_heads"]


def test_without_transformers_other_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    with pytest.raises(ConfigError, match=r"extra `peers` \(transformers\), with which"):
        parse(SIZES | {"model_type": "cwm"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 0.3}, "capping=0.3: not read"),
        ({"is_causal": False}, "is_causal is False; only causal models are supported"),
        ({"model_type": "cohere2", "rotary_pct": 0.5}, "rotary_pct=0.5: not read"),
        ({"rope_parameters": {"rope_theta": 1e4, "stretch": 2}}, "stretch=2: not read"),
        ({"rope_parameters": {"rope_type": "dynamic", "alpha": 2.0}}, "alpha=2.0: not read"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier is 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must list"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2]}, "no_rope_layers must list"),
        (RELATIVES["olmo3"] | {"sliding_window": None}, "sliding layers; add sliding_window"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 1e4}}, "each layer type"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "an MLP that has no gate has only gelu"),
        ({"model_type": "llama", "hidden_act": "xielu"}, "an MLP that has a gate has not xielu"),
        (
            {"model_type": "apertus", "rope_theta": 5.0},
            "rope_theta is present without rope_scaling",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention=.* not rea"),
        ({"model_type": "gemma", "hidden_activation": "gelu"}, "hidden_activation is 'gelu' and h"),
    ],
)
def test_what_is_not_read_or_contradicts_is_named(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SIZES | {"model_type": "llama", "head_dim": 8} | change)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (RELATIVES["starcoder2"], {"rope_local_base_freq": 77.0}),
        (RELATIVES["hunyuan"], {"partial_rotary_factor": 0.5}),
        (RELATIVES["vaultgemma"], {"hidden_act": "silu"}),
        ({"model_type": "llama"}, {"logit_scale": 0.3, "qk_layernorm": True}),
        (RELATIVES["granite"], {"clip_qkv": 2.0}),
        (MIXTURES["olmoe"], {"moe_intermediate_size": 3}),
    ],
    ids=lambda each: next(iter(each)),
)
@pytest.mark.filterwarnings("ignore:config. .* ignored, as in transformers' class of:UserWarning")
def test_what_a_class_of_transformers_does_not_read_changes_nothing(
    config: Any, change: Any
) -> None:
    assert parse(SIZES | config | change) == parse(SIZES | config)


def test_windows_by_letters() -> None:
    """EXAONE 4: a pattern of local and global layers, the last one always global."""
    sizes = SIZES | {"model_type": "exaone4", "num_hidden_layers": 7}
    config = parse(sizes | {"sliding_window": 5, "sliding_window_pattern": "LLG"})
    assert [config.window_of(layer) for layer in range(7)] == [5, 5, None, 5, 5, None, None]
    assert [config.rotates(layer) for layer in range(7)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert all(map(parse(sizes | {"sliding_window": None}).rotates, range(7)))


def test_numbers_of_an_activation_do_not_learn() -> None:
    model = create(SIZES | {"model_type": "apertus"}, seed=0)
    beta = "model.layers.0.mlp.act_fn.beta"
    assert model.parameters[beta].shape == ()
    assert model.parameters.keys() - model.trainable.keys() == {
        f"model.layers.{layer}.mlp.act_fn.{name}" for layer in range(3) for name in ("beta", "eps")
    }
    values = sum(array.size for array in model.trainable.values())
    assert model.num_parameters() == model.num_parameters(only_trainable=True) == values


def test_a_norm_with_a_row_for_each_head_is_no_linear_layer() -> None:
    model = create(SIZES | RELATIVES["cohere"], seed=0)
    model.add_adapter(2)
    assert not any("norm" in name for name in model.trainable)
