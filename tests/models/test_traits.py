"""Traits of few families: head sizes by layer, chunks, sparse attention, k by layer."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import CheckpointConfig, PagedKVCache
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.run.routing import Routing
from unsloth_cupy.models import create, load
from unsloth_cupy.models.layers.attending import chunk_offsets
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.ranks.pipeline_stages import Stages
from unsloth_cupy.parallel.communicator import SingleCommunicator
from unsloth_cupy.serving.engine import Engine

from .peers import MIXTURES, RELATIVES, SIZES

TOKENS = np.random.default_rng(0).integers(3, 97, (2, 20))
SHARED, DENSE = RELATIVES["gemma4_text shared"], RELATIVES["gemma4_text"]


def test_both_forms_of_head_sizes_are_one_config() -> None:
    """The released keys, and per_layer_config as transformers writes it."""
    listed = {str(n): {"head_dim": 20} for n in (0, 2, 4)}
    released = {key: value for key, value in SHARED.items() if key != "global_head_dim"}
    assert parse(SIZES | released | {"per_layer_config": listed}) == parse(SIZES | SHARED)
    config = parse(SIZES | DENSE)
    assert [config.heads_of(layer) for layer in range(3)] == [(4, 16), (4, 16), (2, 12)]
    assert (config.kv_heads, config.dim) == (4, 16)  # of caches
    assert [config.projections_of(layer) for layer in range(3)] == ["qkv", "qkv", "qk"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "head_dim=8 in layer 0; only layers of"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "per_layer_config=.*: not read"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3 of 3; a layer of each type"),
        ({"use_bidirectional_attention": "all"}, "only causal models are supported"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "num_global_key_value_heads is"),
    ],
)
def test_what_layers_cannot_have_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SIZES | DENSE | change)


def test_unused_keys_and_values_of_released_files_are_left_out(tmp_path: Path) -> None:
    model = create(SIZES | SHARED, seed=0)
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {
        f"model.layers.4.self_attn.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in {"k_proj": (40, 32), "v_proj": (40, 32), "k_norm": (20,)}.items()
    }
    save_file(tensors | unused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(load(tmp_path).logits(TOKENS), model.logits(TOKENS))
    save_file(
        tensors | {"model.layers.1.self_attn.x_proj.weight": np.zeros((4, 4), np.float32)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"x_proj\.weight' is not part of the gemma4_text"):
        load(tmp_path)


@pytest.mark.parametrize(
    "label",
    [
        *("gemma4_text", "gemma4_text shared", "llama4_text", "deepseek_v32", "glm_moe_dsa"),
        *("bailing_hybrid", "longcat_flash", "jamba", "mamba"),
    ],
)
def test_tokens_of_an_engine_are_those_of_generate(label: str) -> None:
    """With heads of several sizes by layer, with chunks, and with a choice of keys."""
    model = create(SIZES | (RELATIVES | MIXTURES)[label], seed=0)
    expected = model.generate(TOKENS, max_new_tokens=9, min_new_tokens=9)[:, 20:]
    with Engine(model, rows=2, page=4, chunk=11) as engine:
        options = {"max_new_tokens": 9, "min_new_tokens": 9}
        requests = [engine.submit(row.tolist(), **options) for row in TOKENS]
        engine.run()
    actual = [request.samples[0].tokens for request in requests]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("page", [4, 6])
def test_chunks_in_pages(page: int) -> None:
    """Rows of several lengths continue in pages; tokens are those of whole passes."""
    model = create(SIZES | MIXTURES["llama4_text"], seed=0)
    config = model.config
    sizes = config.layers, 30, page, config.kv_heads, config.dim
    cache = PagedKVCache(*sizes, dtype="float32")
    rows = [cache.allocate(n) for n in (4, 9)]
    for row, start in zip(rows, (4, 9), strict=True):
        model.logits(TOKENS[:1, :start], cache=cache, sequences=[row])
    actual = model.logits(TOKENS[:, 9:14], cache=cache, sequences=rows)
    for row, start in enumerate((4, 9)):
        whole = np.concatenate([TOKENS[0, :start], TOKENS[row, 9:14]])
        expected = model.logits(whole[None])[0, start:]
        np.testing.assert_allclose(actual[row], expected, atol=2e-5, rtol=0)
    cache = PagedKVCache(*sizes, dtype="float32")
    expected = model.generate(TOKENS, max_new_tokens=9, stop=())
    actual = model.generate(TOKENS, max_new_tokens=9, stop=(), cache=cache)
    np.testing.assert_array_equal(actual, expected)


def test_an_indexer_needs_latent_rows() -> None:
    model = create(SIZES | MIXTURES["deepseek_v32"], seed=0)
    with pytest.raises(ConfigError, match=r"^Engine: the indexer .* leave out cache_dtype"):
        Engine(model, rows=2, cache_dtype="int8")


def test_a_pipeline_does_not_divide_layers_with_one_choice() -> None:
    config = parse(SIZES | MIXTURES["glm_moe_dsa"])
    comm: Any = SingleCommunicator()
    comm.size = 3
    with pytest.raises(ConfigError, match=r"^Stages: layer 1 .* uses the choice of layer 0"):
        Stages(config, comm)


def test_the_indexer_is_not_trained() -> None:
    model = create(SIZES | MIXTURES["deepseek_v32"], seed=0)
    frozen = model.parameters.keys() - model.trainable.keys()
    assert {name for name in frozen if "indexer" not in name} == {
        f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)
    }
    assert len([name for name in frozen if "indexer" in name]) == 15
    model.add_adapter(2)
    assert not any("indexer" in name for name in model.trainable)


def test_a_query_sees_its_chunk_only() -> None:
    """A change of a token changes the logits of its chunk, in a model with such layers alone."""
    config = SIZES | MIXTURES["llama4_text"] | {"num_hidden_layers": 2, "no_rope_layers": [1, 1]}
    model = create(config, seed=0)
    other = TOKENS.copy()
    other[:, 7] = 3 + (other[:, 7] - 2) % 94
    change = np.abs(model.logits(TOKENS) - model.logits(other)).max(axis=(0, 2))
    differ = change > 1e-4  # products of other rows of an expert differ in bits
    assert [*np.flatnonzero(differ)] == [7, 8, 9, 10, 11]  # chunks of 6
    text, offsets = TOKENS[:1], np.array([0, 5, 5, 20])
    starts = chunk_offsets(6, text, offsets)
    assert [*starts[:5]] == [0, 5, 11, 17, 20]
    assert set(starts[5:]) == {20}


def test_k_may_differ_by_layer() -> None:
    """moe_topk is a list; routes of an earlier pass are replayed with each layer's own number."""
    config = parse(SIZES | MIXTURES["hunyuan_v1_moe"])
    assert [config.experts.k_of(layer) for layer in range(3)] == [2, 3, 2]
    assert parse(SIZES | MIXTURES["hunyuan_v1_moe"] | {"moe_topk": [2, 2, 2]}).experts.chosen == ()
    model = create(SIZES | MIXTURES["hunyuan_v1_moe"], seed=0)
    routed: list[Any] = []
    model.seen = lambda each, before: routed.extend(each)
    expected = model.logits(TOKENS)
    del model.seen
    routes = np.stack([each.experts for each in routed], axis=2)
    assert (routes[:, :, (0, 2), 2] == config.experts.count).all()  # none
    np.testing.assert_array_equal(model.logits(TOKENS, routes=routes), expected)
    with pytest.raises(ConfigError, match="must list 3 numbers, one a layer"):
        parse(SIZES | MIXTURES["hunyuan_v1_moe"] | {"moe_topk": [2, 0, 2]})


def test_a_saved_folder_names_the_type_of_its_language_model(tmp_path: Path) -> None:
    outer = {"model_type": "gemma4", "text_config": SIZES | SHARED}
    create(outer, seed=0).save(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "gemma4_text"


LONGCAT = SIZES | MIXTURES["longcat_flash"]


def test_layers_of_longcat_are_pairs_of_blocks() -> None:
    """Checkpoints do not cut a pair, whose experts' output is added at its end."""
    config = parse(LONGCAT)
    assert (config.layers, config.experts.sparse) == (4, (True, False) * 2)
    names = {name for name in config.shapes() if name.startswith("model.layers.1.")}
    assert {"model.layers.1.self_attn.1.q_a_proj.weight", "model.layers.1.mlps.0.up_proj.weight",
            "model.layers.1.post_attention_layernorm.1.weight"} <= names  # fmt: skip
    older = {k: v for k, v in LONGCAT.items() if k not in ("num_hidden_layers", "ffn_hidden_size")}
    assert parse(older | {"num_layers": 2}) == config
    with pytest.raises(ConfigError, match="num_layers is None; it must be an integer in 1"):
        parse(older)
    with pytest.raises(ConfigError, match="a router cannot choose 9 experts for a token from 5"):
        parse(LONGCAT | {"moe_topk": 9})
    model = create(LONGCAT, seed=0)
    loss, expected = model.loss_and_gradients(TOKENS, TOKENS)
    for every in (1, 2, 3):
        checkpoint = CheckpointConfig(enabled=True, recompute_every=every)
        again, gradients = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=checkpoint)
        assert again == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


def test_zero_experts_return_their_input(tmp_path: Path) -> None:
    """A layer whose router chooses them alone adds its input, times their weights."""
    config = LONGCAT | {"num_hidden_layers": 2, "routed_scaling_factor": 1.0, "moe_topk": 3}
    model = create(config, seed=0)
    bias = model.parameters["model.layers.0.mlp.router.e_score_correction_bias"]
    bias[5:] = 9.0
    expected = model.logits(TOKENS)
    for name, array in model.parameters.items():
        if ".experts." in name:
            array[...] = 1e3
    np.testing.assert_array_equal(model.logits(TOKENS), expected)
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    zero = {name for name in tensors if ".experts.5." in name}  # transformers has them
    prefix = "model.layers.0.mlp.experts.5."
    assert zero == {f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"}
    assert not any(tensors[name].any() for name in zero)
    released = {n: a for n, a in tensors.items() if not re.search(r"experts\.[567]\.", n)}
    save_file(released, tmp_path / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(load(tmp_path).logits(TOKENS), expected)
    counts = Routing(model)
    with counts.counting():
        model.logits(TOKENS)
    loads = counts.counts(lambda each: each)
    assert loads.shape == (1, 8)
    assert [*np.flatnonzero(loads[0])] == [5, 6, 7]
