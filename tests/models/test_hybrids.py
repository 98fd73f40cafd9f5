"""Models with delta rules: states in caches, packing, adapters, plans, and what is refused."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from unsloth_cupy import CheckpointConfig, PagedKVCache
from unsloth_cupy.core import op
from unsloth_cupy.errors import ConfigError, RangeError
from unsloth_cupy.inference.kv_cache import KVCache
from unsloth_cupy.models import create, load, quantize
from unsloth_cupy.models.configs.config import Delta
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.training import tape

from ..machines.stand_in import gpu
from .peers import CONFIGS as PLAIN
from .peers import MIXTURES, RELATIVES, SIZES, YARN, make

CONFIGS = {
    name: SIZES | config
    for name, config in (RELATIVES | MIXTURES).items()
    if FAMILIES[config["model_type"]].recurrent
}
MOE = {"layers_block_type": ["moe", "full_attention"]}
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))
DENSE = CONFIGS["qwen3_5_text"]


def near(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


def test_every_family_has_a_case():
    kinds = {config["model_type"] for config in CONFIGS.values()}
    assert kinds == {name for name, family in FAMILIES.items() if family.recurrent}


@pytest.mark.parametrize("label", CONFIGS)
def test_packed_texts_padding_and_caches(label):
    """States begin anew with each text, pass over padding, and go on from a cache."""
    model = create(CONFIGS[label], seed=0)
    texts, offsets = np.split(TOKENS.reshape(-1), [5, 14]), np.array([0, 5, 14, 24])
    packed = model.logits(TOKENS.reshape(1, -1), offsets=offsets)[0]
    near(packed, np.concatenate([model.logits(text[None])[0] for text in texts]))
    mask = np.arange(12) >= np.array([[4], [0]])
    near(model.logits(TOKENS, mask=mask)[0, 4:], model.logits(TOKENS[:1, 4:])[0])
    whole = TOKENS
    for _ in range(4):
        following = model.logits(whole)[:, -1].argmax(axis=-1)
        whole = np.concatenate([whole, following[:, None]], axis=1)
    np.testing.assert_array_equal(model.generate(TOKENS, max_new_tokens=4, stop=()), whole)
    padded = model.generate(TOKENS, mask=mask, max_new_tokens=4, stop=())
    alone = model.generate(TOKENS[:1, 4:], max_new_tokens=4, stop=())
    np.testing.assert_array_equal(padded[0, 4:], alone[0])
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    again, actual = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=CheckpointConfig())
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(actual[name], gradient, err_msg=name)


@pytest.mark.parametrize("label", ["mamba2", "qwen3_next", "kimi_linear", "phi3"])
def test_parts_of_a_projection_are_neither_copied_nor_added(label, monkeypatch):
    """A convolution reads columns where a product wrote them; gradients of parts are one array."""
    real = SimpleNamespace(called=tape.called, add_up=tape.add_up, contiguous=op.contiguous)
    names, added, copied = [""], set(), set()

    def called(op, values, options):
        names.append(op.__name__)
        return real.called(op, values, options)

    def add_up(a, b):
        added.update(names[-1:] if a is not None else [])
        return real.add_up(a, b)

    def contiguous(array):
        copied.update([] if array is None or array.flags.c_contiguous else names[-1:])
        return real.contiguous(array)

    monkeypatch.setattr(tape, "called", called)
    monkeypatch.setattr(tape, "add_up", add_up)
    monkeypatch.setattr(op, "contiguous", contiguous)
    with gpu(devices=1) as machine:
        machine.strict = False
        model = create(CONFIGS.get(label) or SIZES | PLAIN[label], seed=0, device="cuda")
        model.loss_and_gradients(*[machine.place(TOKENS)] * 2)
    assert len(names) > 40
    assert not added & {"columns_backward", "index_backward"}
    assert not copied & {"causal_conv", "causal_conv_backward"}


@pytest.mark.parametrize(
    ("label", "change"),
    [
        ("bamba", {"mamba_proj_bias": True, "time_step_limit": [0.3, 0.9]}),
        ("mamba2", {"use_bias": True, "time_step_limit": [0.1, 0.8]}),
        ("mamba sizes", {"use_bias": True}),
        ("jamba", {"mamba_proj_bias": True}),
        ("nemotron_h", {"use_bias": True, "time_step_min": 0.3}),
        ("falcon_h1 factors", {"mamba_proj_bias": True}),
        *((name, {"conv_bias": True}) for name in ("lfm2", "lfm2_moe", "lfm3")),
    ],
)
def test_whole_texts_alone(label, change, tmp_path):
    """transformers lets padding through a bias, and does not bound the rate of a token alone."""
    torch = pytest.importorskip("torch", reason="torch computes the references")
    pytest.importorskip("transformers", reason="transformers computes the references")
    peer = make(tmp_path, CONFIGS[label] | change)
    with torch.no_grad():
        expected = peer(input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()
    model = load(tmp_path)
    near(model.logits(TOKENS), expected)
    mask = np.arange(12) >= np.array([[4], [0]])
    near(model.logits(TOKENS, mask=mask)[0, 4:], model.logits(TOKENS[:1, 4:])[0])


def new_cache(model, batch=2):
    config = model.config
    windows = [None if config.attends(layer) else 1 for layer in range(config.layers)]
    sizes = config.layers, batch, 16, config.kv_heads, config.dim
    return KVCache(*sizes, dtype="float32", window=windows)


def test_states_follow_the_rows_of_a_cache():
    """Several tokens at once, rows in another order, a reset."""
    model = create(DENSE, seed=0)
    expected = model.logits(TOKENS)
    cache = new_cache(model)
    parts = [model.logits(TOKENS[:, part], cache=cache) for part in np.split(range(12), [5, 6])]
    near(np.concatenate(parts, axis=1), expected)
    cache.reset()
    near(model.logits(TOKENS, cache=cache), expected)
    cache.reset()
    model.logits(TOKENS[:, :7], cache=cache)
    cache.reorder(np.array([1, 0]))
    near(model.logits(TOKENS[::-1, 7:], cache=cache), expected[::-1, 7:])
    with pytest.raises(RangeError, match=r"layer 0 has a state after 12 tokens, none before"):
        cache.truncate(11)
    cache.truncate(12)
    drawn = model.rollouts(TOKENS[:, :6], samples=2, max_new_tokens=3, temperature=1.0, seed=0)
    assert drawn.tokens.shape[0] == 4


@pytest.mark.parametrize(
    ("label", "module", "layers"),
    [
        ("qwen3_5_text", "linear_attn", "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj"),
        (
            "kimi_linear",
            "layers.0.self_attn",
            "q_proj k_proj v_proj b_proj f_a_proj f_b_proj g_a_proj g_b_proj o_proj",
        ),
        (
            "bailing_hybrid",
            "layers.0.self_attn",
            "q_proj k_proj v_proj g_proj b_proj f_proj o_proj",
        ),
        ("granitemoehybrid dense", "mamba", "in_proj out_proj"),
        ("mamba2", "mixer", "in_proj out_proj"),
        ("mamba", "mixer", "in_proj x_proj dt_proj out_proj"),
        ("jamba", "mamba", "in_proj x_proj dt_proj out_proj"),
        ("lfm2", "conv", "in_proj out_proj"),
        ("lfm3", "self_attn", "q_proj k_proj v_proj g_proj o_proj"),
        (
            "nemotron_h",
            "mixer",
            "in_proj out_proj up_proj down_proj q_proj k_proj v_proj o_proj",
        ),
        (
            "nemotron_h latent",
            "mixer",
            "in_proj out_proj fc1_latent_proj fc2_latent_proj q_proj k_proj v_proj o_proj"
            " up_proj down_proj experts base_layer",
        ),
    ],
)
def test_adapters(label, module, layers, tmp_path):
    """All projections of a layer have one; saved, read and merged they compute the same."""
    model = create(CONFIGS[label], seed=0)
    model.save(tmp_path / "m")
    model.add_adapter(3, seed=1)
    names = [name for name in model.adapter.scales if f".{module}." in name]
    assert {name.rpartition(".")[2] for name in names} == {*layers.split()}
    rng = np.random.default_rng(0)
    for array in model.adapter.parameters.values():
        array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
    expected = model.logits(TOKENS)
    model.save_adapter(tmp_path / "a")
    read = load(tmp_path / "m", lora=tmp_path / "a")
    np.testing.assert_array_equal(read.logits(TOKENS), expected)
    read.merge_adapter()
    near(read.logits(TOKENS), expected)


@pytest.mark.parametrize("label", ["mamba", "jamba"])
def test_decays_by_channel_and_state_are_not_quantized(label):
    """They are a matrix, which multiplies nothing."""
    model = create(CONFIGS[label], seed=0)
    quantize(model, "int8", least=0)
    kept = {name for name, value in model.parameters.items() if not isinstance(value, Quantized)}
    assert any(name.endswith("A_log") for name in kept)
    projections = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight")
    assert not any(name.endswith(projections) for name in kept)
    assert np.isfinite(model.loss(TOKENS, TOKENS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not a multiple of"),
        ({"layer_types": ["linear_attention"]}, "layer_types must be a list of num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act also applies to convolutions; it"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    ],
)
def test_what_is_not_known_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(DENSE | change)


def test_the_released_form_of_kimi_linear():
    """Its layers are counted from 1, and its keys have other names than transformers'."""
    config = CONFIGS["kimi_linear released"]
    linear = config["linear_attn_config"]
    parsed = parse(config)
    assert parsed.layer_types == ("linear_attention", "linear_attention", "full_attention")
    assert (parsed.delta.key_heads, parsed.delta.key_dim, parsed.experts.k) == (4, 6, 2)
    assert parsed.experts.sparse == (False, True, True)
    for change, message in (
        ({"kda_layers": [0, 1]}, "linear_attn_config lists 3 of 3 layers; it must list each once"),
        ({"gate": 1}, "linear_attn_config.gate is not read"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(config | {"linear_attn_config": linear | change})


def test_both_forms_of_the_keys_of_ling(tmp_path):
    """Folders that transformers saved name the size of linear heads linear_head_dim."""
    config = CONFIGS["bailing_hybrid"]
    assert parse(config).delta == Delta(4, 4, 6, 6, 3, "whole", bound=-5.0)
    assert parse(config | {"linear_head_dim": 10}).delta.key_dim == 10
    saved = {**config, "head_dim": 6, "linear_head_dim": 6, "linear_num_heads": 4}
    saved |= {"linear_conv_kernel_dim": saved.pop("short_conv_kernel_size")}
    names = {"n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token"}
    released = {names.get(key, key): value for key, value in config.items()}
    assert parse(saved) == parse(released) == parse(config)
    free = parse(CONFIGS["bailing_hybrid released"])
    assert free.delta.bound is None
    assert free.layer_types == ("linear_attention", "full_attention", "linear_attention")
    assert free.experts.sparse == (False, False, True)
    create(config, seed=0).save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = {*file.keys()}
    assert {"model.word_embeddings.weight", "model.layers.1.attention.dense.weight"} <= names
    assert not any("self_attn" in name or "forget_gate" in name for name in names)


@pytest.mark.parametrize(
    ("label", "change", "message"),
    [
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0; it must be a number"),
        ("lfm2", {"full_attn_idxs": [3]}, "full_attn_idxs is .*indices of layers below 3"),
        ("lfm2_moe", {"layer_types": None}, "layer_types must be a list .* 'conv' or 'full_atten"),
        ("lfm3", {"layer_types": ["conv", "x"]}, "layer_types must be a list .* or 'sliding_atten"),
        (
            "jamba",
            {"attn_layer_offset": 3},
            "attn_layer_offset is 3; it must be below attn_layer_p",
        ),
        ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset is -1; it must be below exp"),
        ("jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank is 0"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act also applies to convolutions; it must be si"),
        ("bamba", {"mamba_n_heads": 6}, "mamba_n_heads=6 times mamba_d_head=8 is not 64"),
        ("bamba", {"mamba_d_head": 0}, "mamba_d_head is 0; it must be a positive integer"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads=8 is not a multiple of mamba_n_groups=3"),
        ("bamba", {"time_step_limit": [0.5, 0.1]}, "time_step_limit is .*0 <= least <= most"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices is .*indices of layers below 3"),
        ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act also applies to convolutions; it must be si"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .*it must list 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": 2}, "mlp_multipliers is 2; it must list two numbers"),
        ("nemotron_h", MOE | {"mlp_hidden_act": "gelu"}, "is 'gelu'; without a gate it must be re"),
        ("nemotron_h", {"layers_block_type": ["mpl"]}, "layer_types must be a list .* or 'mlp'"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type is None; it must list"),
    ],
)
def test_what_is_not_known_of_states_is_named(label, change, message):
    with pytest.raises(ConfigError, match=message):
        parse(CONFIGS[label] | change)


def test_older_names_of_layers():
    """Letters of released Nemotron-H, and types of older granites."""
    config = {name: x for name, x in CONFIGS["nemotron_h"].items() if name != "layers_block_type"}
    expected = parse(CONFIGS["nemotron_h"]).layer_types
    assert parse(config | {"hybrid_override_pattern": "M-*M"}).layer_types == expected
    config = CONFIGS["granitemoehybrid"]
    types = {"layer_types": ["mamba", "attention", "mamba"]}
    assert parse(config | types).layer_types == parse(config).layer_types


def test_older_keys_of_lfm2():
    """Of a released folder: block_ff_dim counts, and keys that no class reads change nothing."""
    own = {"block_ff_dim": 96, "tie_embedding": False, "theta": 3.0, "block_dim": 5, "num_heads": 9}
    old = parse(CONFIGS["lfm2"] | own)
    assert (old.inner, old.tied) == (96, False)  # 2 / 3 of 96 times 1.3, rounded up to 16
    assert old.layer_types == ("conv", "full_attention", "conv")
    new = parse(CONFIGS["lfm2"] | {"intermediate_size": 96, "tie_word_embeddings": False})
    assert new == old


def test_names_of_a_backbone(tmp_path):
    """Files and adapters have the names of transformers."""
    model = create(CONFIGS["mamba2"], seed=0)
    model.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert {"backbone.embeddings.weight", "backbone.norm_f.weight"} <= {*file.keys()}
        assert {name.partition(".")[0] for name in file.keys()} == {"backbone", "lm_head"}  # noqa: SIM118
    model.add_adapter(2, seed=0)
    model.save_adapter(tmp_path / "a")
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "np") as file:
        prefixes = {name.rpartition(".layers.")[0] for name in file.keys()}  # noqa: SIM118
    assert prefixes == {"base_model.model.backbone"}
    read = load(tmp_path, lora=tmp_path / "a")
    np.testing.assert_array_equal(read.logits(TOKENS), model.logits(TOKENS))


def test_positions_of_layers_that_do_not_rotate_change_no_scale():
    config = CONFIGS["kimi_linear"]
    stretched = parse(config | {"rope_parameters": YARN | {"mscale_all_dim": 0.7}})
    assert stretched.scale == parse(config).scale


def test_latent_attention_in_no_layer():
    types = {"layer_types": ["linear_attention"] * 3}
    assert not create(CONFIGS["kimi_linear"] | types, seed=0).config.ropes


def test_layers_by_an_interval():
    config = {name: value for name, value in DENSE.items() if name != "layer_types"}
    kinds = parse(config | {"num_hidden_layers": 5, "full_attention_interval": 2}).layer_types
    assert [kind == "full_attention" for kind in kinds] == [False, True, False, True, False]


def test_what_is_not_supported_is_refused_with_a_cure(tmp_path):
    model = create(DENSE, seed=0)
    model.save(tmp_path)
    two = SingleCommunicator()
    two.size = 2
    with pytest.raises(ConfigError, match="ranks do not divide a qwen3_5_text, whose layers have"):
        load(tmp_path, communicator=two)
    config = model.config
    pages = PagedKVCache(config.layers, 12, 4, config.kv_heads, config.dim, dtype="float32")
    with pytest.raises(ConfigError, match="a PagedKVCache does not store the states of layers"):
        model.generate(TOKENS, max_new_tokens=2, cache=pages)
    other = create(CONFIGS["lfm2"], seed=0)
    other.context = two
    with pytest.raises(ConfigError, match="ranks do not divide the tokens of layers of a lfm2"):
        other.loss(TOKENS, TOKENS)
    two.size = 3
    model.context = two
    with pytest.raises(ConfigError, match="3 ranks do not divide the 2 heads of layers of a qwen3"):
        model.loss(TOKENS, TOKENS)


def test_parts_of_a_convolution_with_other_rows_are_refused(tmp_path):
    """Each may have any number of rows; all together must have those of the parameter."""
    create(CONFIGS["olmo_hybrid"], seed=0).save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = next(name for name in tensors if name.endswith("k_conv1d.weight"))
    rows = sum(len(a) for n, a in tensors.items() if re.sub("[qv]_conv", "k_conv", n) == name)
    tensors[name] = np.concatenate([tensors[name], tensors[name][:2]])
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"have {rows + 2} rows; config.json implies {rows}"):
        load(tmp_path)
