"""Mixtures whose stacks of experts stay quantized while adapters learn: 4 bits, and MXFP4."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from unsloth_cupy import AdamW, CheckpointConfig, Int8, Mxfp4, Nf4, mxfp4_quantize
from unsloth_cupy.errors import ConfigError, GradientError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.models import Transformer, create, load, merge, quantize
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.models.quantizer import STACKED
from unsloth_cupy.ops.quantized.weight import Quantized, held_arrays
from unsloth_cupy.parallel import SingleCommunicator, Zero3

from .peers import MIXTURES, SIZES

FOLDER = Path(__file__).parent.parent / "golden" / "models" / "gpt_oss_mxfp4"
IDS = np.random.default_rng(0).integers(3, 97, (2, 12))
LABELS = ("mixtral", "gpt_oss", "qwen2_moe")


def stacks_of(model: Transformer) -> dict[str, Quantized]:
    return {n: a for n, a in model.parameters.items() if isinstance(a, Quantized) and a.ndim == 3}


def dense_twin(model: Transformer) -> Transformer:
    """Return the same model, adapter included, with its weights dequantized."""
    arrays = {
        name: value.dequantize("float32") if isinstance(value, Quantized) else value
        for name, value in model.parameters.items()
    }
    twin = Transformer(model.config, arrays, model.texts)
    twin.adapter = model.adapter
    return twin


def adapted(model: Transformer) -> Transformer:
    """Add an adapter of all layers that changes what the model computes."""
    model.add_adapter(2, alpha=3)
    rng = np.random.default_rng(1)
    for array in model.adapter.parameters.values():
        array[...] = 0.2 * rng.standard_normal(array.shape)
    return model


def raw(folder: Path) -> dict[str, np.ndarray | list[int]]:
    """Return the bytes of a file's codes, and the shapes of its other tensors."""
    with safe_open(folder / "model.safetensors", "np") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        coded = {n for n, part in parts.items() if part.get_dtype() == "U8"}
        return {n: file.get_tensor(n) if n in coded else p.get_shape() for n, p in parts.items()}


@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("label", LABELS)
def test_experts_learn_as_the_dense_twin_does(label: str, kind: str) -> None:
    """Loss and gradients of adapters are those of the dequantized model; no weight changes."""
    model = create(SIZES | MIXTURES[label], seed=0)
    report = quantize(model, kind, least=256)
    sizes = {row.name: row.after for row in report.rows if not row.reason}
    stacks = stacks_of(model)
    assert len(stacks) == 2 * sum(model.config.experts.sparse)
    assert {type(stack) for stack in stacks.values()} == {Int8 if kind == "int8" else Nf4}
    assert all(sizes[name] == stack.nbytes for name, stack in stacks.items())
    assert not any(name.endswith(("_bias", ".gate.weight", ".router.weight")) for name in sizes)
    with pytest.raises(GradientError, match="is quantized and frozen; call add_adapter"):
        model.loss_and_gradients(IDS, IDS)
    before = {name: stack.dequantize() for name, stack in stacks.items()}
    loss, gradients = adapted(model).loss_and_gradients(IDS, IDS)
    twin = dense_twin(model)
    expected_loss, expected = twin.loss_and_gradients(IDS, IDS)
    assert abs(loss - expected_loss) < 1e-5
    assert gradients.keys() == expected.keys() == model.adapter.parameters.keys()
    for name, gradient in gradients.items():
        error = np.linalg.norm(gradient - expected[name])
        assert error < 1e-4 * np.linalg.norm(expected[name]), name
    again, kept = model.loss_and_gradients(IDS, IDS, checkpoint=CheckpointConfig())
    assert again == loss
    assert all(np.array_equal(kept[name], gradient) for name, gradient in gradients.items())
    AdamW(model.trainable, lr=1e-2).step(gradients)
    assert model.loss(IDS, IDS) < loss
    for name, stack in stacks_of(model).items():
        np.testing.assert_array_equal(stack.dequantize(), before[name])
    assert np.abs(model.logits(IDS) - twin.logits(IDS)).max() < 1e-4


@pytest.mark.parametrize("kind", STACKED[:3])
def test_four_bits_by_load_and_back(kind: str, tmp_path: Path) -> None:
    """Equal bits by load, by quantize and from what was saved, under bitsandbytes' names."""
    create(SIZES | MIXTURES["qwen3_moe"], seed=0).save(tmp_path / "dense")
    loaded, made = load(tmp_path / "dense", quantize=kind), load(tmp_path / "dense")
    quantize(made, kind)
    assert stacks_of(loaded)
    logits = loaded.logits(IDS)
    np.testing.assert_array_equal(made.logits(IDS), logits)
    loaded.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert stacks_of(again).keys() == stacks_of(loaded).keys()
    np.testing.assert_array_equal(again.logits(IDS), logits)
    names = raw(tmp_path / "saved")
    assert f"{next(iter(stacks_of(loaded)))}.absmax" in names
    facts = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert facts["load_in_4bit"]
    assert not any("_bias" in each for each in facts["llm_int8_skip_modules"])
    again.save(tmp_path / "again")
    assert raw(tmp_path / "again").keys() == names.keys()


def test_merging_four_bits(tmp_path: Path) -> None:
    create(SIZES | MIXTURES["mixtral"], seed=0).save(tmp_path / "dense")
    model = adapted(load(tmp_path / "dense", quantize="nf4"))
    twin = dense_twin(model)
    twin.merge_adapter()
    requantized = Transformer(model.config, dict(model.parameters), model.texts)
    requantized.adapter = model.adapter
    model.merge_adapter()
    for name, array in twin.parameters.items():
        np.testing.assert_allclose(model.parameters[name], array, rtol=0, atol=1e-6)
    requantized.merge_adapter(requantize=True)
    assert stacks_of(requantized).keys() == {n for n in model.parameters if is_stack(n)}


# ---- MXFP4 --------------------------------------------------------------------------------------
def test_a_released_folder_stays_packed_and_is_written_as_it_was(tmp_path: Path) -> None:
    model = load(FOLDER)
    assert [isinstance(stack, Mxfp4) for stack in stacks_of(model).values()] == [True] * 4
    assert {stack.dtype.name for stack in stacks_of(model).values()} == {"bfloat16"}
    model.save(tmp_path)
    before, after = raw(FOLDER), raw(tmp_path)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    entries = [json.loads((f / "config.json").read_text()) for f in (FOLDER, tmp_path)]
    assert entries[0]["quantization_config"] == entries[1]["quantization_config"]


@pytest.mark.parametrize("with_adapter", [False, True])
def test_mxfp4_learns_as_the_dense_twin_does(with_adapter: bool) -> None:
    """Packed experts are frozen; without an adapter, all other parameters learn."""
    model = load(FOLDER, dtype="float32")
    model = adapted(model) if with_adapter else model
    stacks = stacks_of(model)
    loss, gradients = model.loss_and_gradients(IDS, IDS)
    expected_loss, expected = dense_twin(model).loss_and_gradients(IDS, IDS)
    assert abs(loss - expected_loss) < 1e-5
    assert gradients.keys() == model.trainable.keys() == expected.keys() - stacks.keys()
    for name, gradient in gradients.items():
        error = np.linalg.norm(gradient - expected[name])
        assert error < 1e-4 * np.linalg.norm(expected[name]), name
    AdamW(model.trainable, lr=1e-3).step(gradients)
    assert model.loss(IDS, IDS) < loss


def test_merging_mxfp4_writes_dense_tensors(tmp_path: Path) -> None:
    """The rows of gate and up in turns, turned, without an entry of quantization."""
    model = adapted(load(FOLDER, dtype="float32"))
    model.save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", base=FOLDER, dtype="float32")
    again = load(tmp_path / "merged")
    assert not stacks_of(again)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    model.merge_adapter()
    for name, array in model.parameters.items():
        np.testing.assert_allclose(again.parameters[name], array, rtol=1e-6, atol=1e-7)
    merge(FOLDER, tmp_path / "dense", dtype="bfloat16")
    dense, packed = load(tmp_path / "dense"), load(FOLDER)
    np.testing.assert_array_equal(dense.logits(IDS), packed.logits(IDS))


def test_stacks_that_files_do_not_have(tmp_path: Path) -> None:
    turned = create(SIZES | MIXTURES["gpt_oss"], seed=0)
    quantize(turned, "nf4")
    with pytest.raises(ConfigError, match=r"a gpt_oss cannot store .*\.down_proj in nf4"):
        turned.save(tmp_path / "a")
    other = create(SIZES | MIXTURES["mixtral"] | {"intermediate_size": 64}, seed=0)
    for name, value in other.parameters.items():
        if name.endswith(".experts.down_proj"):
            other.parameters[name] = mxfp4_quantize(value)
    assert np.isfinite(other.loss(IDS, IDS))
    with pytest.raises(ConfigError, match=r"a mixtral cannot store .* in mxfp4"):
        other.save(tmp_path / "b")
    eight = create(SIZES | MIXTURES["mixtral"], seed=0)
    quantize(eight, "int8")
    with pytest.raises(ConfigError, match=r"a mixtral cannot store .* in int8"):
        eight.save(tmp_path / "c")
    assert not any((tmp_path / name).exists() for name in "abc")
    with pytest.raises(ConfigError, match="gate_up_proj is quantized already; leave quantize out"):
        load(FOLDER, quantize="nf4")


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    with safe_open(FOLDER / "model.safetensors", "np") as file:
        name = "model.layers.1.mlp.experts.down_proj_scales"
        scales = file.get_tensor(name)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    place = data.index(scales.tobytes())
    data[place + 5] = 255
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"\.1\.mlp\.experts\.down_proj'.* _scales holds 255"):
        load(tmp_path)


# ---- ranks, memory ------------------------------------------------------------------------------
def test_parts_of_quantized_stacks() -> None:
    """Zero3 keeps flat parts of the codes, and gathers them by block."""
    whole = adapted(load(FOLDER, dtype="float32"))
    loss, gradients = whole.loss_and_gradients(IDS, IDS)
    for model in (load(FOLDER, dtype="float32"), load(FOLDER, dtype="float32", parts=COMM)):
        model.adapter = whole.adapter
        again, parts = Zero3(model, COMM).loss_and_gradients(IDS, IDS)
        assert again == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(parts[name], gradient, err_msg=name)


COMM = SingleCommunicator()


@pytest.mark.parametrize(
    ("label", "kind"), [("mixtral", "nf4"), ("qwen2_moe", "int8"), ("gpt_oss", "mxfp4")]
)
def test_a_plan_bounds_memory(label: str, kind: str) -> None:
    """Of one dense matrix at a time, beside the codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    config = SIZES | MIXTURES[label] | sizes
    ids = np.random.default_rng(0).integers(3, 512, (2, 96))
    options = {"batch": 2, "tokens": 96, "rank": 4, "quantization": kind}
    plan = plan_memory(config, dtype="float32", device="cpu", **options)
    model = create(config, seed=0)
    if kind == "mxfp4":
        for name in [n for n in model.parameters if is_stack(n)]:
            model.parameters[name] = mxfp4_quantize(model.parameters[name])
    else:
        quantize(model, kind)
    model.add_adapter(4)
    optimizer = AdamW(model.trainable)

    def step() -> None:
        _, gradients = model.loss_and_gradients(ids, ids)
        optimizer.step(gradients, factor=0.5)

    step()
    arrays = [a for _, a in held_arrays(model.parameters | model.trainable)]
    with memory_pool(held=[*arrays, *optimizer.state().values()]) as pool:
        step()
        pool.reset_peak()
        step()
    assert -(2**17) < plan.total - pool.peak < 0.3 * pool.peak
    on_a_gpu = plan_memory(config, dtype="bfloat16", device="cuda", **options)
    dense = plan_memory(config, dtype="bfloat16", device="cuda", **options | {"quantization": None})
    assert 0 < on_a_gpu.total < dense.total
