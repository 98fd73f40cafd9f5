"""Names of tensors: every form in which files and adapters hold those of one model."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, from_torch, load
from unsloth_cupy.models.adapters import adapter_patterns
from unsloth_cupy.models.adapters.adapter_patterns import by_pattern, targeted
from unsloth_cupy.models.configs.names import parameter_name

from .peers import SIZES

CONFIG = {**SIZES, "model_type": "llama"}
TOKENS = np.arange(3, 19).reshape(2, 8)
WEIGHTS = "model.safetensors"
quiet = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.mlp.up_proj.weight.absmax", "model.layers.0.mlp.up_proj.weight.absmax"),
        ("norm.weight", "model.norm.weight"),
        ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.layers.0.weight", None),
        ("multi_modal_projector.norm.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("encoder.layers.0.weight", "encoder.layers.0.weight"),
        ("embed_tokens", "embed_tokens"),
    ],
)
def test_parameter_of_a_name(stored: str, expected: str | None) -> None:
    assert parameter_name(stored) == expected


def rewritten(folder: Path, rename: Any, **config: Any) -> Path:
    """Save a model, and its tensors under other names; None drops one."""
    model = create(CONFIG | config, seed=0)
    model.save(folder)
    tensors = load_file(folder / WEIGHTS)
    named = {rename(name): array for name, array in tensors.items() if rename(name)}
    save_file(named, folder / WEIGHTS)
    return folder


def test_files_of_a_body_and_of_a_tied_head_alone(tmp_path: Path) -> None:
    expected = create(CONFIG | {"tie_word_embeddings": True}, seed=0).logits(TOKENS)
    for number, rename in enumerate(
        (
            lambda name: name.removeprefix("model."),
            lambda name: name.replace("model.embed_tokens", "lm_head"),
        )
    ):
        folder = rewritten(tmp_path / str(number), rename, tie_word_embeddings=True)
        model = load(folder)
        np.testing.assert_array_equal(model.logits(TOKENS), expected)
        model.save(tmp_path / f"again{number}")
        again = load_file(tmp_path / f"again{number}" / WEIGHTS)
        assert again.keys() == model.parameters.keys()
    body = rewritten(tmp_path / "body", lambda name: name.removeprefix("model."))
    assert load(body).parameters.keys() == create(CONFIG, seed=0).parameters.keys()


def test_a_tied_head_must_equal_its_table(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, str, tie_word_embeddings=True)
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / WEIGHTS)
    expected = load(folder).logits(TOKENS)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r'config.json ties them; write "tie_word_embeddings": f'):
        load(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert (load(folder).logits(TOKENS) != expected).any()


def test_a_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, str)
    tensors = load_file(folder / WEIGHTS)
    tensors["norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"is also in model\.safetensors; keep one"):
        load(folder)


@pytest.mark.parametrize("name", ["." * 100_000, "a.weight" * 20_000, "model.layers." * 9_000])
def test_names_without_end_are_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, str)
    save_file({name: np.zeros(2, np.float32)}, folder / WEIGHTS)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="the name of a tensor has") as caught:
        load(folder)
    assert len(str(caught.value)) < 300
    assert time.perf_counter() - started < 2


def test_a_header_without_end_is_refused_unread(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, str)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 27))
        file.truncate((1 << 27) + 8)
    with pytest.raises(ConfigError, match=r"a header of 128\.00 MiB is larger"):
        load(folder)


LAYERS = [
    f"model.layers.{n}.{part}"
    for n in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
IMAGES = [name.replace("model.", "model.language_model.") for name in LAYERS]
PATTERNS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": r".*\.(q_proj|v_proj)"},
    {"target_modules": r"model\.layers\.1.*"},
    {"target_modules": r"(?i).*LAYERS\.\d+\.mlp\.(?!up)\w+"},
    {"target_modules": r".*language_model.*q_proj"},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.10?\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 10]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [10], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [10], "layers_pattern": ["h", "l.*s"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [10], "layers_pattern": "blocks"},
]
VALUES: list[dict[str, int]] = [
    {"q_proj": 3},
    {"^model.layers.0.self_attn.q_proj": 3, "q_proj": 4},
    {r"layers\.1\.self_attn\.q_proj": 3},
    {r".*\.1\..*": 3, "self_attn.*": 5},
    {"model.layers.10.mlp.down_proj": 3, "layers.[01].mlp.down_proj": 4},
    {"0.self_attn.q_proj": 3, "a|v_proj": 4},
    {r"model\.language_model\.layers.1.+": 7},
    {"proj": 9},
]


@pytest.mark.parametrize("names", [LAYERS, IMAGES], ids=["text", "images"])
def test_patterns_mean_what_they_mean_in_peft(names: list[str]) -> None:
    peft = pytest.importorskip("peft", reason="whose patterns these are")
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
    from peft.utils.other import get_pattern_key

    for settings in PATTERNS:
        config = peft.LoraConfig(**settings)
        expected = []
        for name in names:
            if config.target_modules == "all-linear":
                expected.append(name)
                continue
            found = check_target_module_exists(config, name)
            if found and not isinstance(found, _ExcludedModule):
                expected.append(name)
        assert targeted("file", settings, names) == expected, settings
    for values in VALUES:
        expected = [values.get(get_pattern_key(values, name), 8) for name in names]
        assert by_pattern("file", {"p": values}, "p", names, 8) == expected, values


@pytest.mark.parametrize(
    "pattern", [".*(a+)+$", "(.|.)*x", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x"]
)
def test_a_pattern_that_runs_for_ever_is_refused_in_time(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_patterns, "SECONDS", 0.5)
    names = ["model.layers.0.mlp." + 40 * "a" + "!"]
    for read in (
        lambda: by_pattern("file", {"p": {pattern: 1}}, "p", names, 8),
        lambda: targeted("file", {"target_modules": pattern}, names),
    ):
        started = time.perf_counter()
        with pytest.raises(ConfigError, match="matching takes too long; nested repetitions"):
            read()
        assert time.perf_counter() - started < 10


@pytest.mark.parametrize("pattern", ["(", "[", "a{99999999999}", "(" * 5000 + ")" * 5000, "*"])
def test_a_pattern_that_is_none_says_so(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"file: p has the pattern '.*': .*; correct it"):
        by_pattern("file", {"p": {pattern: 1}}, "p", LAYERS, 8)


def gemma3(folder: Path) -> Any:
    """Save a Gemma 3 with its vision tower, and return it."""
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    text = SIZES | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90,
        boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return transformers.Gemma3ForConditionalGeneration.from_pretrained(folder).eval()


@quiet
@pytest.mark.slow
def test_a_model_with_images_is_shared_and_adapted_under_its_own_names(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose files these are")
    import torch

    whole = gemma3(tmp_path / "base")
    tokens = torch.from_numpy(TOKENS)
    with torch.no_grad():
        plain = whole(tokens).logits.numpy()
        live = from_torch(whole)
        for model in (live, load(tmp_path / "base")):
            np.testing.assert_allclose(model.logits(TOKENS), plain, atol=1e-4)
            text = model.to_torch()
            assert type(text).__name__ == "Gemma3ForCausalLM"
            np.testing.assert_allclose(text(tokens).logits.numpy(), plain, atol=1e-4)
        live.add_adapter(4, targets=["q_proj", "up_proj"])
        rng = np.random.default_rng(0)
        for array in live.trainable.values():
            array[...] = rng.standard_normal(array.shape) / 4
        live.save_adapter(tmp_path / "adapter")
        expected = live.logits(TOKENS)
        assert np.abs(expected - plain).max() > 0.01
        again = load(tmp_path / "base", lora=tmp_path / "adapter")
        np.testing.assert_allclose(again.logits(TOKENS), expected, atol=1e-5)
        theirs = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
        np.testing.assert_allclose(theirs(tokens).logits.numpy(), expected, atol=1e-4)
        assert not [n for n, _ in theirs.named_parameters() if "vision" in n and "lora" in n]


@quiet
@pytest.mark.slow
def test_the_adapter_of_a_vision_tower_is_kept_as_it_was_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose files these are")
    import torch

    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False,
        alpha_pattern={r"^model\.language_model\.layers\.1\..*": 50},
    )  # fmt: skip
    theirs = peft.get_peft_model(gemma3(tmp_path / "base"), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    model = load(tmp_path / "base", lora=tmp_path / "adapter")
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=1e-4)
    model.save_adapter(tmp_path / "again")
    before, after = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("adapter", "again")
    )
    assert any("vision_tower" in name for name in before)
    assert before.keys() == after.keys()
    assert all((after[name] == array).all() for name, array in before.items())
