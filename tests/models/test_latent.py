"""Latent attention: caches, packing, adapters, plans of memory, and what is refused."""

import numpy as np
import pytest

from unsloth_cupy import PagedKVCache
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.models import create, export_gguf, load
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.parse import parse
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.training.adamw import AdamW

from .peers import MIXTURES, RELATIVES, SIZES

CONFIGS = {
    name: SIZES | config
    for name, config in (RELATIVES | MIXTURES).items()
    if FAMILIES[config["model_type"]].latent
}
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))
V3 = CONFIGS["deepseek_v3"]


def test_every_family_has_a_case():
    kinds = {config["model_type"] for config in CONFIGS.values()}
    assert kinds == {name for name, family in FAMILIES.items() if family.latent}


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
    sizes = model.config.layers, 12, 4, model.config.kv_heads, model.config.dim
    for cache in (None, PagedKVCache(*sizes, dtype="float32")):
        made = model.generate(TOKENS, max_new_tokens=4, stop=(), cache=cache)
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


@pytest.mark.parametrize("label", ["youtu", "deepseek_v2"])
def test_a_plan_bounds_memory(label):
    config = CONFIGS[label] | {"hidden_size": 64, "vocab_size": 512}
    ids = np.random.default_rng(0).integers(3, 512, (2, 96))
    plan = plan_memory(config, batch=2, tokens=96, dtype="float32", device="cpu")
    model = create(config, seed=0)
    optimizer = AdamW(model.trainable)

    def step():
        _, gradients = model.loss_and_gradients(ids, ids)
        optimizer.step(gradients, factor=0.5)

    step()
    with memory_pool(held=[*model.parameters.values(), *optimizer.state().values()]) as pool:
        step()
        pool.reset_peak()
        step()
    assert -(2**17) < plan.total - pool.peak < 0.3 * pool.peak
    on_a_gpu = plan_memory(config, batch=2, tokens=96, dtype="bfloat16", device="cuda")
    assert on_a_gpu.total > 0


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
    two = SingleCommunicator()
    two.size = 2
    with pytest.raises(ConfigError, match="ranks do not divide the latent attention of a youtu"):
        load(tmp_path, communicator=two)
    with pytest.raises(ConfigError, match="GGUF has no names for a youtu"):
        export_gguf(model, tmp_path / "x.gguf")
