"""Latent attention: caches, packing, adapters, plans of memory, and what is refused."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import KVCache, Nf4, PagedKVCache, mean
from unsloth_cupy.errors import ConfigError, DTypeError
from unsloth_cupy.models import create, export_gguf, load
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.generation import decoding
from unsloth_cupy.models.parse import parse

from .peers import MIXTURES, RELATIVES, SIZES, class_of

ALONE = {  # the others are of test_hybrids, as no pages hold their states
    name for name, family in FAMILIES.items() if family.latent and family.delta is None
}
CONFIGS = {
    name: SIZES | config
    for name, config in (RELATIVES | MIXTURES).items()
    if config["model_type"] in ALONE
}
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))
V3 = CONFIGS["deepseek_v3"]


def test_every_family_has_a_case():
    kinds = {config["model_type"] for config in CONFIGS.values()}
    assert kinds == ALONE


@pytest.mark.parametrize("label", CONFIGS)
def test_packed_texts_and_caches(label):
    """Packed texts do not see each other; tokens of caches are those of whole passes."""
    model = create(CONFIGS[label], seed=0)
    texts, offsets = np.split(TOKENS.reshape(-1), [5, 14]), np.array([0, 5, 14, 24])
    packed = model.logits(TOKENS.reshape(1, -1), offsets=offsets)[0]
    alone = np.concatenate([model.logits(text[None])[0] for text in texts])
    np.testing.assert_allclose(packed, alone, atol=2e-5 * np.abs(alone).max(), rtol=0)
    whole = TOKENS
    for _ in range(4):
        following = model.logits(whole)[:, -1].argmax(axis=-1)
        whole = np.concatenate([whole, following[:, None]], axis=1)
    heads = {"kv_heads": model.config.kv_heads, "dim": model.config.dim}
    caches = [
        PagedKVCache(model.config.layers, 12, 4, **sizes, dtype="float32")
        for sizes in (model.cache_sizes, heads)
    ]
    if model.config.indexer is not None:  # whose keys whole heads do not store
        for options in ({"cache": caches.pop()}, {"cache_dtype": "int8"}):
            with pytest.raises(ConfigError, match=r"in latent rows; (use a cache with|leave out)"):
                model.generate(TOKENS, max_new_tokens=4, **options)
    for cache in (None, *caches):
        made = model.generate(TOKENS, max_new_tokens=4, stop=(), cache=cache)
        np.testing.assert_array_equal(made, whole)
    if model.config.indexer is None:
        made = model.generate(TOKENS, max_new_tokens=4, stop=(), cache_dtype="int8")
        assert made.shape == (2, 16)


@pytest.mark.parametrize("label", CONFIGS)
def test_a_cache_holds_one_row_of_a_token(label):
    """Tokens one by one, some at a time and after padding have the logits of a whole pass."""
    model = create(CONFIGS[label], seed=0)
    sizes: Any = model.cache_sizes
    dim = 12 + 6 + (0 if model.config.indexer is None else model.config.indexer.dim)
    assert sizes == {"kv_heads": 1, "dim": dim, "latent": 12}
    mask = np.ones((2, 12), bool)
    mask[1, :3] = False
    expected = model.logits(TOKENS, mask=mask)
    near = 2e-5 * np.abs(expected).max()
    cache = KVCache(model.config.layers, 2, 16, **sizes, dtype="float32")
    assert sum(array.nbytes for array in cache.stored) == model.config.layers * 2 * 16 * dim * 4
    steps = (slice(0, 5), slice(5, 6), slice(6, 10), slice(10, 12))
    parts = [model.logits(TOKENS[:, s], mask=mask[:, : s.stop], cache=cache) for s in steps]
    actual = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(actual[mask], expected[mask], atol=near, rtol=0)
    cache.reset()
    with pytest.raises(DTypeError, match=r"KVCache\.append: k is not an array but Var"):
        model.value_and_gradients(lambda m: mean(m.logits(TOKENS, cache=cache)))
    wrong = KVCache(model.config.layers, 2, 16, 1, 18, latent=8, dtype="float32")
    with pytest.raises(ConfigError, match="the cache has latent=8; make it with"):
        model.logits(TOKENS, cache=wrong)


@pytest.mark.parametrize("alike", [True, False])
def test_rows_with_adapters_of_their_own(alike):
    """They share the rows of a cache, unless the layer that is absorbed differs between them."""
    model = create(CONFIGS["youtu"], seed=0)
    for number, name in enumerate(("one", "other")):
        targets = ["q_b_proj", "o_proj"] + ["kv_b_proj"] * (not alike)
        model.add_adapter(2, seed=number, name=name, targets=targets)
        for array in model.adapter.parameters.values():
            array[...] += 0.1 * np.random.default_rng(number).standard_normal(array.shape)
    expected = []
    for row, name in enumerate(("one", "other")):
        model.set_adapter(name)
        expected.append(model.generate(TOKENS[row : row + 1], max_new_tokens=5, stop=())[0])
    rows = model.by_rows(["one", "other"])
    assert rows.cache_sizes["latent"] == (12 if alike else None)
    np.testing.assert_array_equal(rows.generate(TOKENS, max_new_tokens=5, stop=()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("label", CONFIGS)
def test_tokens_are_those_of_transformers(label, tmp_path):
    torch = pytest.importorskip("torch", reason="torch computes the references")
    peers = pytest.importorskip("transformers", reason="transformers computes the references")
    model = create(CONFIGS[label], seed=0)
    model.save(tmp_path)
    known = peers.AutoConfig.from_pretrained(tmp_path)
    peer = class_of(known).from_pretrained(tmp_path, dtype=torch.float32)
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    prompt = torch.from_numpy(TOKENS)
    expected = peer.generate(prompt, **options, do_sample=False, pad_token_id=0).numpy()
    cache = PagedKVCache(model.config.layers, 20, 4, **model.cache_sizes, dtype="float32")
    for each in (None, cache):
        np.testing.assert_array_equal(model.generate(TOKENS, **options, cache=each), expected)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "bias", "nf4", "nf4 lora"])
def test_adapted_and_quantized_layers_are_absorbed(kind, steps, monkeypatch, tmp_path):
    """Or expanded, where an adapter adds a bias: tokens are those of whole passes."""
    sizes = {"kv_lora_rank": 64, "hidden_size": 64} if "nf4" in kind else {}
    model = create(CONFIGS["youtu"] | sizes, seed=0)
    if "nf4" in kind:
        model.save(tmp_path)
        model = load(tmp_path, quantize="nf4")
        assert isinstance(model.parameters["model.layers.0.self_attn.kv_b_proj.weight"], Nf4)
    if kind != "nf4":
        model.add_adapter(3, seed=1, dora=kind == "dora")
        rng = np.random.default_rng(0)
        for array in model.adapter.parameters.values():
            array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
    if kind == "bias":
        name = "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_B.bias"
        model.adapter.parameters[name] = rng.standard_normal(4 * (20 + 14), np.float32)
    assert (model.cache_sizes["latent"] is None) == (kind == "bias")
    monkeypatch.setattr(decoding, "captures", lambda *_: steps)
    whole = TOKENS
    for _ in range(5):
        following = model.logits(whole)[:, -1].argmax(axis=-1)
        whole = np.concatenate([whole, following[:, None]], axis=1)
    made = model.generate(TOKENS, max_new_tokens=5, stop=())
    np.testing.assert_array_equal(made, whole)


def test_adapters(tmp_path):
    """All projections have one; saved, read and merged they compute the same."""
    model = create(V3, seed=0)
    model.save(tmp_path / "m")
    model.add_adapter(3, seed=1, dora=False)
    modules = {name.rpartition(".")[2] for name in model.adapter.scales if "self_attn" in name}
    assert modules == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    rng = np.random.default_rng(0)
    for array in model.adapter.parameters.values():
        array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
    expected = model.logits(TOKENS)
    model.save_adapter(tmp_path / "a")
    read = load(tmp_path / "m", lora=tmp_path / "a")
    np.testing.assert_array_equal(read.logits(TOKENS), expected)
    read.merge_adapter()
    near = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(read.logits(TOKENS), expected, atol=near, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not num_attention_heads=4"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5; it must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax: not read"),
        ({"model_type": "deepseek_v2", "topk_method": "best"}, "choose from greedy, group_lim"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True: not read"),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "dense or sparse, 3 times"),
    ],
)
def test_what_is_not_known_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(V3 | change)


def test_what_is_not_supported_is_refused_with_a_cure(tmp_path):
    model = create(CONFIGS["youtu"], seed=0)
    model.save(tmp_path)
    with pytest.raises(ConfigError, match="GGUF has no names for a youtu"):
        export_gguf(model, tmp_path / "x.gguf")
