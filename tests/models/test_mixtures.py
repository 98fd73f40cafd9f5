"""Mixtures of experts: their files, routers, caches, and what is refused."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import CheckpointConfig, PagedKVCache
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.models import create, load, quantize
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.layers.experts_layer import sparse_mixer
from unsloth_cupy.models.parse import parse
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.training.tape import Tape

from ..golden.golden import op_cases
from ..harness.whole_models import in_float64
from .peers import MIXTURES, SIZES

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = GOLDEN / "models"
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(3, 97, (2, 12))


def test_every_family_of_mixtures_has_a_case():
    kinds = {config["model_type"] for config in MIXTURES.values()}
    assert kinds == {name for name, family in FAMILIES.items() if family.experts is not None}


@pytest.mark.parametrize("label", MIXTURES)
def test_checkpoints_and_packing(label):
    """Recomputed blocks have equal bits; packed texts do not see each other.

    In float64, so that the norms of jamba's few states, which amplify rounding, differ by none.
    """
    model = create(SIZES | MIXTURES[label], seed=0)
    loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    for config in (CheckpointConfig(), CheckpointConfig(recompute_every=2)):
        again, actual = model.loss_and_gradients(TOKENS, TOKENS, checkpoint=config)
        assert again == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(actual[name], gradient, err_msg=name)
    assert gradients.keys() == model.trainable.keys()
    texts, offsets = np.split(TOKENS.reshape(-1), [5, 14]), np.array([0, 5, 14, 24])
    packed = model.logits(TOKENS.reshape(1, -1), offsets=offsets)[0]
    with in_float64(model):
        exact = model.logits(TOKENS.reshape(1, -1), offsets=offsets)[0]
        alone = [model.logits(text[None])[0] for text in texts]
    np.testing.assert_allclose(exact, np.concatenate(alone), atol=1e-12, rtol=0)
    # BLAS adds in an order that depends on the number of rows: jamba is off by 1.4e-5 of 4.5,
    # as its texts alone are, and other families by up to 4e-6
    np.testing.assert_allclose(packed, exact, atol=3e-5, rtol=0)


@pytest.mark.parametrize("label", ["mixtral", "gpt_oss", "qwen2_moe types", "phimoe"])
def test_caches(label):
    """Tokens of a cache, of a paged one and of whole passes are the same."""
    model = create(SIZES | MIXTURES[label], seed=0)
    whole = TOKENS
    for _ in range(6):
        following = model.logits(whole)[:, -1].argmax(axis=-1)
        whole = np.concatenate([whole, following[:, None]], axis=1)
    sizes = model.config.layers, 12, 4, model.config.kv_heads, model.config.dim
    for cache in (None, PagedKVCache(*sizes, dtype="float32")):
        made = model.generate(TOKENS, max_new_tokens=6, stop=(), cache=cache)
        np.testing.assert_array_equal(made, whole)


def test_log_probs_and_gradients_of_a_function():
    model = create(SIZES | MIXTURES["qwen3_moe"], seed=0)
    value, gradients = model.value_and_gradients(
        lambda m: m.log_probs(TOKENS, TOKENS).log_probs.mean()
    )
    name, step = "model.layers.1.mlp.gate.weight", 1e-2
    weight = model.parameters[name]
    direction = gradients[name] / np.linalg.norm(gradients[name])
    values = []
    for sign in (1, -1):
        model.parameters[name] = weight + np.float32(sign * step) * direction
        values.append(model.log_probs(TOKENS, TOKENS).log_probs.mean())
    slope = (values[0] - values[1]) / (2 * step)
    assert abs(slope - np.linalg.norm(gradients[name])) < 0.02 * abs(slope)
    assert abs(value - np.mean(values)) < 1e-3


def test_sparse_mixer():
    """The router of Phi-MoE, without its noise."""
    cases = op_cases(GOLDEN / "ops_next", "router")
    case = next(case for case in cases if case.name == "sparsemixer")
    tape, given = Tape(), case.inputs
    logits = tape.watch(given["logits"])
    routes = sparse_mixer(logits, case.params["router_jitter_noise"])
    experts, weights = routes.experts, routes.weights
    np.testing.assert_array_equal(np.sort(experts, axis=1), case.outputs["indices"])
    dense = np.zeros_like(given["logits"])
    np.put_along_axis(dense, experts.astype(np.int64), weights.value, axis=1)
    np.testing.assert_allclose(dense, case.outputs["y"], rtol=1e-6, atol=1e-7)
    dweights = np.take_along_axis(given["cotangent"], experts.astype(np.int64), axis=1)
    (dlogits,) = tape.gradients(weights, [logits], dweights)
    np.testing.assert_allclose(dlogits, case.grads["logits"], rtol=1e-5, atol=1e-7)


# ---- files --------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    create(SIZES | MIXTURES["mixtral"], seed=0).save(tmp_path / "m")
    return tmp_path / "m"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_stacks_under_their_own_names(folder, tmp_path):
    """As transformers keeps them: they are written back as they were read."""
    model = load(folder)
    experts = {n: a for n, a in model.parameters.items() if ".mlp." in n}
    assert any(array.ndim == 3 for array in experts.values())

    def stacked(tensors):
        return {n: a for n, a in tensors.items() if "block_sparse_moe" not in n} | experts

    rewrite(folder, stacked)
    again = load(folder)
    for name, array in model.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)
    again.save(tmp_path / "again")
    names = [load_file(f / "model.safetensors").keys() for f in (folder, tmp_path / "again")]
    assert names[0] == names[1]


def test_experts_in_several_files(folder):
    """A stack whose parts are in two files."""
    model, tensors = load(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    again = load(folder)
    for name, array in model.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)


FIRST = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST), rf"'{FIRST}' is missing"),
        (lambda t: t.update({FIRST: t[FIRST][1:]}), r"has shape \(47, 32\); .* \(48, 32\)"),
        (lambda t: t.update({FIRST: t[FIRST].astype(np.int32)}), "is I32; it must be"),
        (lambda t: t.update({FIRST: t[FIRST].astype(np.float16)}), "have several dtypes"),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.gate_up_proj": np.zeros((4, 96, 32), np.float32)}
            ),
            "hold the same parameter; keep one",
        ),
        (lambda t: t.update({FIRST.replace("0.w1", "9.w1"): t[FIRST]}), "is not part of"),
    ],
    ids=["missing", "shape", "integers", "dtypes", "twice", "too many"],
)
def test_broken_stacks_are_named(folder, change, message):
    def changed(tensors):
        change(tensors)

    rewrite(folder, changed)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_routers_stay_float32(stored, tmp_path):
    """Routers and their corrections have 32 bits, however they are stored."""
    create(SIZES | MIXTURES["glm4_moe"], seed=0).save(tmp_path)

    def change(tensors):
        for name, array in tensors.items():
            if "mlp.gate." not in name:
                tensors[name] = array.astype(ml_dtypes.bfloat16)
            elif "correction" in name:
                tensors[name] = RNG.standard_normal(array.shape).astype(stored)
            else:
                tensors[name] = array.astype(stored)

    rewrite(tmp_path, change)
    for dtype in (None, "bfloat16"):
        model = load(tmp_path, dtype=dtype)
        kinds = {n: a.dtype.name for n, a in model.parameters.items()}
        assert {n for n, kind in kinds.items() if kind == "float32"} == {
            f"model.layers.{layer}.mlp.gate.{name}"
            for layer in (1, 2)
            for name in ("weight", "e_score_correction_bias")
        }
        loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
        assert np.isfinite(loss)
        assert gradients["model.layers.1.mlp.gate.weight"].dtype == np.float32


@pytest.mark.parametrize("label", ["glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_new_models_of_16_bits_have_them_too(label):
    model = create(SIZES | MIXTURES[label], seed=0, dtype="bfloat16")
    wide = {n for n, array in model.parameters.items() if array.dtype == np.float32}
    assert wide == {n for n in model.parameters if model.config.widened(n)}
    assert wide
    assert np.isfinite(model.loss(TOKENS, TOKENS))


def test_further_layers_of_files_are_left_out(tmp_path):
    """Those of an ernie4_5_moe that predict several tokens are not read, and named."""
    create(SIZES | MIXTURES["ernie4_5_moe"], seed=0).save(tmp_path)

    def change(tensors):
        tensors["model.mtp_block.0.input_layernorm.weight"] = np.zeros(2, np.float32)

    rewrite(tmp_path, change)
    with pytest.warns(UserWarning, match="1 tensors of draft heads, such as model.mtp_block"):
        assert load(tmp_path).config.layers == 3


# ---- what config.json says ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "change", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "choose 5 experts for a token from 4"),
        ("mixtral", {"hidden_act": "relu2"}, "an MLP that has a gate|must have a gate"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config has"),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "bitsandbytes or gptq or",
        ),
        ("phimoe", {"num_experts_per_tok": 1}, "this router chooses 2 experts"),
        ("glm4_moe groups", {"n_group": 3}, "do not divide 8 experts"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must list layers"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func=softmax: not read"),
        (
            "phimoe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short_mscale": 1.0}},
            "short_mscale is for longrope only",
        ),
    ],
)
def test_what_is_not_known_is_named(label, change, message):
    with pytest.raises(ConfigError, match=message):
        parse(SIZES | MIXTURES[label] | change)


def test_other_names_of_released_files():
    """Both names of a count, and the share of a head that older files give in elements."""
    config = SIZES | MIXTURES["mixtral"]
    other = {**config, "num_experts": config["num_local_experts"]}
    del other["num_local_experts"]
    assert parse(other) == parse(config)
    released = {"experts_per_token": 3, "initial_context_length": 64}
    config = SIZES | MIXTURES["gpt_oss"]
    assert parse(config | released) == parse(config)
    assert parse(SIZES | MIXTURES["minimax_m2"]).ropes["full_attention"].dim == 4
    released = {"attn_type_list": [1, 1, 1], "use_mtp": True, "swa_rope_theta": -1.0}
    released |= {"layernorm_mlp_beta": 1.0, "shared_moe_mode": "sigmoid"}
    config = SIZES | MIXTURES["minimax_m2"]
    assert parse(config | released) == parse(config)
    config = SIZES | MIXTURES["ernie4_5_moe"]
    assert parse(config | {"use_rmsnorm": True, "moe_capacity": [64]}) == parse(config)
    with pytest.raises(ConfigError, match=r"use_rmsnorm=1\.5: not read"):
        parse(config | {"use_rmsnorm": 1.5})


# ---- what is refused, before anything runs ------------------------------------------------------
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda m, f: quantize(m, "ternary"), "ternary does not support the stacks of experts of"),
        (lambda m, f: load(f, quantize="ternary"), "load: ternary does not support"),
        (lambda m, f: load(f, quantize="mxfp4"), "load: kind 'mxfp4' is unknown"),
        (
            lambda m, f: plan_memory(
                SIZES | MIXTURES["mixtral"], batch=1, tokens=8, dtype="float32", rank=2,
                quantization="ternary",
            ),
            "plan_memory: ternary does not support the stacks of",
        ),
    ],
    ids=["quantize", "load", "mxfp4", "plan ternary"],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_a_cure(folder, refused, message):
    with pytest.raises(ConfigError, match=message):
        refused(load(folder), folder)


def test_attention_with_sinks_is_not_divided():
    model = create(SIZES | MIXTURES["gpt_oss types"], seed=0)
    model.context = SingleCommunicator()
    model.context.size = 2
    for kind in ("ring", "ulysses"):
        model.context_attention = kind
        with pytest.raises(ConfigError, match="a gpt_oss has sinks, which ranks do not divide"):
            model.loss(TOKENS, TOKENS)
