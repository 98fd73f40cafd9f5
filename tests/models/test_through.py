"""Adapters that are trained through the quantizer of the file that they are merged into."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, linear, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.models.adapters.into import CHOICES, IN_FOLDERS, Into
from unsloth_cupy.models.adapters.through import through_linear, through_stack
from unsloth_cupy.ops.linear.lora import dropped_rows
from unsloth_cupy.ops.linear.lora_merge import lora_sum
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.training.tape import Tape

from ..machines.stand_in import gpu
from .exported import make, read
from .peers import MIXTURES, RELATIVES, SIZES

# rows of whole blocks of 256, but for those of down_proj, which have a type of smaller blocks
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = np.random.default_rng(3).integers(3, 97, (2, 12))
KINDS = [kind for kind in CHOICES if kind != "mxfp4"]
FEW = ("nf4", "int8", "ternary", "q4_0", "q8_0", "q4_k")
MXFP4 = Path(__file__).parent.parent / "golden" / "models" / "gpt_oss_mxfp4"


def learned(model: models.Transformer) -> models.Transformer:
    """Let the adapter of a model change what it computes."""
    draw = np.random.default_rng(1)
    for name, array in model.trainable.items():
        if "lora_B" in name:
            array[...] = 0.05 * draw.standard_normal(array.shape)
    return model


def through(folder: Path, kind: str, quantize: str | None = None, **options: Any) -> Any:
    """Return a model with an adapter for a kind of file, both saved."""
    make(folder / "base", LLAMA, dtype="bfloat16")
    model = models.load(folder / "base", dtype="float32", quantize=quantize)
    model.add_adapter(4, base=str(folder / "base"), merge_into=kind, **options)
    learned(model).save_adapter(folder / "adapter")
    return model


def merged(folder: Path, kind: str) -> tuple[Any, models.Transformer]:
    """Return the report of the file that the adapter was trained for, and its model."""
    if kind in IN_FOLDERS:
        report: Any = models.merge(folder / "adapter", folder / "merged")
        return report, models.load(folder / "merged", dtype="float32")
    report = models.export_gguf(folder / "adapter", folder / "m.gguf", tokenizer=folder / "base")
    return report, models.load(folder / "m.gguf", dtype="float32")


def dense(weight: Any) -> Any:
    return weight.dequantize("float32") if isinstance(weight, Quantized) else weight


def used(model: models.Transformer) -> dict[str, Any]:
    """Return what products multiply by, layer by layer: x is the identity."""
    adapter, result = model.adapter, {}
    fixed = adapter.file_weights(model.parameters)
    for name, weight in fixed.items():
        module = name.removesuffix(".weight")
        result[name] = dense(weight)
        if module in adapter.scales:
            eye = np.eye(weight.shape[1], dtype=np.float32)
            held = {**fixed, **adapter.parameters}
            result[name] = adapter.linears(held, [module], eye, None)[0].T
    return result


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("kind", FEW)
def test_the_file_holds_the_weights_that_were_used(
    kind: str, quantize: str | None, tmp_path: Path
) -> None:
    """In equal bits: weights, loss and generated tokens; a merge says that all is kept."""
    _holds(kind, quantize, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp4", "int8"])
def test_bitsandbytes_reads_those_very_weights(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="bitsandbytes is made of it")
    functional = pytest.importorskip("bitsandbytes", reason="whose folder it is").functional
    from safetensors.torch import load_file

    expected = used(through(tmp_path, kind))
    merged(tmp_path, kind)
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    for name in (name for name in expected if name.endswith("proj.weight")):
        parts = {n.removeprefix(f"{name}."): each for n, each in tensors.items() if name in n}
        if kind == "int8":
            sizes = tensors[f"{name.removesuffix('weight')}SCB"].float() / 127
            actual = tensors[name].float() * sizes[:, None]
        else:
            state = functional.QuantState.from_dict(
                {n: each for n, each in parts.items() if n != name}, device=torch.device("cpu")
            )
            state.dtype = torch.float32
            actual = functional.dequantize_4bit(tensors[name], state)
        np.testing.assert_array_equal(actual.numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k"])
def test_gguf_reads_those_very_weights(kind: str, tmp_path: Path) -> None:
    expected = used(through(tmp_path, kind, "nf4"))
    merged(tmp_path, kind)
    tensors = read(tmp_path / "m.gguf")[1]
    names = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for module, stored in names.items():
        actual = tensors[f"blk.0.{stored}.weight"]
        np.testing.assert_array_equal(actual, expected[f"model.layers.0.{module}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FEW])
def test_files_of_all_other_kinds(kind: str, tmp_path: Path) -> None:
    _holds(kind, None, tmp_path)


def _holds(kind: str, quantize: str | None, folder: Path) -> None:
    model = through(folder, kind, quantize)
    expected = used(model)
    report, actual = merged(folder, kind)
    assert actual.adapter is None
    assert report.kept.share == 1.0
    assert len(report.kept.layers) == 7
    changed = 0
    for name, weight in actual.parameters.items():
        np.testing.assert_array_equal(dense(weight), expected[name], err_msg=name)
        changed += not np.array_equal(dense(weight), dense(model.parameters[name]))
    assert changed >= 7
    again = models.load(folder / "adapter", dtype="float32")
    loss = model.loss(IDS, IDS)
    for other in (again, actual, model.settled()):
        assert other.loss(IDS, IDS) == loss
        assert other.generate(IDS[:, :4], max_new_tokens=3).tolist() == (
            model.generate(IDS[:, :4], max_new_tokens=3).tolist()
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.merge_adapter(requantize=True).share == 1.0
    for name, weight in actual.parameters.items():
        np.testing.assert_array_equal(dense(weight), dense(model.parameters[name]))


def test_the_adapter_alone_is_not_the_model(tmp_path: Path) -> None:
    """adapter_config.json says so, and who adds it to unrounded weights is told or refused."""
    model = through(tmp_path, "q4_0", "nf4")
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    assert settings["merge_into"] == {
        "kind": "q4_0", "quantize": "nf4", "dtype": "bfloat16", "read": "float32",
        "base": settings["merge_into"]["base"], "version": 1,
    }  # fmt: skip
    model.adapter.into.active = False
    plain = model.loss(IDS, IDS)
    model.adapter.into.active = True
    assert abs(model.loss(IDS, IDS) - plain) > 1e-3
    with pytest.raises(ConfigError, match=r"trained through q4_0, but llama\.cpp would add"):
        models.export_adapter_gguf(tmp_path / "adapter", tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="through q4_0 of GGUF; unsloth-cupy export writes"):
        models.merge(tmp_path / "adapter", tmp_path / "m")
    with pytest.raises(ConfigError, match="with nf4 weights of its base; leave quantize out"):
        models.load(tmp_path / "adapter", quantize="int8")
    with pytest.raises(ConfigError, match="trained through q4_0, which ranks would cut"):
        models.load(tmp_path / "adapter", communicator=SingleCommunicator())
    ranks = models.load(tmp_path / "base", communicator=SingleCommunicator())
    ranks.add_adapter(2)
    with pytest.raises(ConfigError, match="on a model that is whole"):
        ranks.train_through("nf4")
    for facts, problem in (({"version": 2}, "version 2, not 1"), ({"dtype": 3}, "copy the adap")):
        wrong = {**settings, "merge_into": settings["merge_into"] | facts}
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=problem):
            models.load(tmp_path / "adapter")


def test_a_weight_that_is_made_in_parts_is_kept_for_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, names, of_sum = through(tmp_path, "q4_k_m"), list[str](), Into.of_sum
    assert model.adapter.into.names == {"q4_k", "q4_k_m"}

    def counted(self: Any, name: str, *given: Any) -> Any:
        names.append(name)
        return of_sum(self, name, *given)

    monkeypatch.setattr(Into, "of_sum", counted)
    model.loss_and_gradients(IDS, IDS)
    assert len(names) == len({*names}) == 7


def test_another_base_is_refused(tmp_path: Path) -> None:
    """One of the same shapes: its sum with the adapter is not what the run computed with."""
    through(tmp_path, "nf4")
    other = models.load(tmp_path / "base")
    other.parameters["model.layers.0.mlp.up_proj.weight"][0, 0] *= 1.5
    other.save(tmp_path / "other")
    problem = "trained through nf4 with other weights than .*other has; pass its own base"
    with pytest.raises(ConfigError, match=problem):
        models.merge(tmp_path / "adapter", tmp_path / "m", base=tmp_path / "other")
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(tmp_path / "adapter", tmp_path / "m.gguf", base=tmp_path / "other")
    with pytest.raises(ConfigError, match=problem):
        models.load(tmp_path / "other", lora=tmp_path / "adapter", dtype="float32")
    with pytest.raises(ConfigError, match=problem):
        models.load(tmp_path / "other", dtype="float32").load_adapter(tmp_path / "adapter", "x")
    (tmp_path / "base").rename(tmp_path / "moved")
    assert models.merge(tmp_path / "adapter", tmp_path / "m", base=tmp_path / "moved").layers == 7


def test_other_files_have_the_rounded_numbers(tmp_path: Path) -> None:
    """A dense folder or file of such an adapter is the model too, as far as its dtype holds it."""
    model = through(tmp_path, "q4_0")
    report = models.merge(tmp_path / "adapter", tmp_path / "dense", dtype="float32")
    models.export_gguf(
        tmp_path / "adapter", tmp_path / "d.gguf", kind="f32", tokenizer=tmp_path / "base"
    )
    models.export_gguf(model, tmp_path / "own.gguf", tokenizer=tmp_path / "base")
    expected = used(model)
    assert report.kept.share == 1.0
    names = [name for name in expected if name.endswith("_proj.weight")]
    for path in ("dense", "d.gguf", "own.gguf"):
        actual = models.load(tmp_path / path, dtype="float32")
        for name in names:
            np.testing.assert_array_equal(actual.parameters[name].astype("float32"), expected[name])
    model.merge_adapter()
    for name in names:
        np.testing.assert_array_equal(model.parameters[name], expected[name])


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_go_straight_through(dropout: float, dtype: str) -> None:
    """dx is of the rounded weight, da and db those of one that is not; in evaluation no dropout."""
    draw = np.random.default_rng(0)
    x, w, a, b, bias, dy = (
        draw.standard_normal(shape).astype(dtype)
        for shape in ((2, 5, 12), (8, 12), (3, 12), (8, 3), (8,), (2, 5, 8))
    )
    made: list[Any] = []
    numbers = draw.permutation(20)[:10].reshape(2, 5)

    def make(*parts: Any) -> Any:
        made.append(np.round(lora_sum(*parts) * 2) / 2)
        return made[-1]

    def run(dropout: float) -> tuple[Any, ...]:
        tape = Tape()
        operands = [tape.watch(each) for each in (x, a, b, bias)]
        seed = 5 if dropout else None
        y = through_linear(
            operands[0],
            w,
            *operands[1:],
            scale=0.5,
            make=make,
            dropout=dropout,
            seed=seed,
            numbers=numbers,
        )
        return y.value, tape.gradients(y, operands, dy)

    y, (dx, da, db, dbias) = run(dropout)
    q = np.round((w + 0.5 * b @ a) * 2) / 2
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(made[0], q, **close)
    rows, dys, read = x.reshape(10, 12), dy.reshape(10, 8), x.reshape(10, 12)
    mask = np.ones_like(rows)
    if dropout:
        plain = run(0.0)
        np.testing.assert_array_equal(plain[0], linear(x, made[-1], bias))
        mask = dropped_rows(np.ones((20, 12), dtype), dropout, 5)[numbers.reshape(-1)]
        read = rows * mask
    expected = rows @ q.T + bias + 0.5 * (read - rows) @ a.T @ b.T
    np.testing.assert_allclose(y.reshape(10, 8), expected, **close)
    up = 0.5 * dys @ b
    np.testing.assert_allclose(dx.reshape(10, 12), dys @ q + (up @ a) * (mask - 1), **close)
    np.testing.assert_allclose(da, up.T @ read, **close)
    np.testing.assert_allclose(db, 0.5 * dys.T @ (read @ a.T), **close)
    np.testing.assert_allclose(dbias, dys.sum(0), **close)
    assert len(made) == 2 + 2 * bool(dropout)  # made again in the backward pass, kept nowhere


@pytest.mark.parametrize("kind", ["nf4", "q8_0"])
def test_a_step_changes_what_the_next_uses(kind: str, tmp_path: Path) -> None:
    """Adapters change in place; checkpoints of activations give the same bits."""
    model = through(tmp_path, kind)
    loss, gradients = model.loss_and_gradients(IDS, IDS)
    again = model.loss_and_gradients(IDS, IDS, checkpoint=CheckpointConfig())
    assert again[0] == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(again[1][name], gradient)
        assert gradient.any(), name
    for name, gradient in gradients.items():
        model.trainable[name][...] -= 0.05 * gradient / np.abs(gradient).max()
    after = model.loss(IDS, IDS)
    assert after < loss
    model.save_adapter(tmp_path / "adapter")
    assert merged(tmp_path, kind)[1].loss(IDS, IDS) == after


@pytest.mark.parametrize(
    ("label", "kind"), [("gpt_oss", "mxfp4"), ("mixtral", "nf4"), ("qwen2_moe", "fp4")]
)
def test_stacks_of_experts(label: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    if label == "qwen2_moe":
        sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = models.create(SIZES | MIXTURES[label] | sizes, seed=0, dtype="bfloat16")
    model.save(tmp_path / "base")
    model = models.load(tmp_path / "base", dtype="float32")
    model.add_adapter(2, base=str(tmp_path / "base"), merge_into=kind)
    learned(model).save_adapter(tmp_path / "adapter")
    loss, gradients = model.loss_and_gradients(IDS, IDS)
    assert all(gradient.any() for name, gradient in gradients.items() if "lora_B" in name)
    report, actual = merged(tmp_path, kind)
    assert report.kept.share == 1.0
    stacks = [
        name for name in model.adapter.stacks if isinstance(actual.parameters[name], Quantized)
    ]
    assert stacks
    expected = model.settled().parameters
    for name, weight in actual.parameters.items():
        np.testing.assert_array_equal(dense(weight), dense(expected[name]), err_msg=name)
    assert actual.loss(IDS, IDS) == pytest.approx(loss, rel=1e-5)  # by another op of experts


def test_gradients_of_stacks() -> None:
    draw = np.random.default_rng(0)
    x, w, a, b, bias, dy = (
        draw.standard_normal(shape)
        for shape in ((7, 12), (3, 8, 12), (3, 2, 12), (3, 8, 2), (3, 8), (7, 8))
    )
    offsets, tape = np.array([0, 3, 3, 7]), Tape()
    operands = [tape.watch(each) for each in (x, a, b)]
    y = through_stack(
        operands[0], w, *operands[1:], offsets, bias, scale=0.5,
        make=lambda *parts: np.round(lora_sum(*parts) * 2) / 2,
    )  # fmt: skip
    dx, da, db = tape.gradients(y, operands, dy)
    q = np.round((w + 0.5 * b @ a) * 2) / 2
    for expert, rows in enumerate((slice(0, 3), slice(3, 3), slice(3, 7))):
        np.testing.assert_allclose(y.value[rows], x[rows] @ q[expert].T + bias[expert])
        np.testing.assert_allclose(dx[rows], dy[rows] @ q[expert])
        up = 0.5 * dy[rows] @ b[expert]
        np.testing.assert_allclose(da[expert], up.T @ x[rows])
        np.testing.assert_allclose(db[expert], 0.5 * dy[rows].T @ (x[rows] @ a[expert].T))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8", "ternary", "q4_0", "q4_k"])
def test_on_arrays_of_cupy(kind: str, dtype: str) -> None:
    """A step, on the stand-in, whose functions of CuPy have CuPy's own rules."""
    with gpu(devices=2) as machine:
        machine.strict = False
        model = models.create(
            SIZES | LLAMA | {"hidden_size": 256 if kind == "q4_k" else 64}, seed=0,
            device="cuda", dtype=dtype,
        )  # fmt: skip
        model.add_adapter(2, merge_into=kind)
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 48)))
        for _ in range(2):  # the second replays what the first has recorded
            loss, gradients = model.loss_and_gradients(tokens, tokens)
        assert loss.shape == ()
        assert {n: g.shape for n, g in gradients.items()} == {
            n: a.shape for n, a in model.trainable.items()
        }
        assert model.generate(tokens[:, :4], max_new_tokens=3).shape == (2, 7)
        model.merge_adapter(requantize=True)


@pytest.mark.parametrize("kind", ["nf4", "q4_0"])
def test_the_plan_counts_it(kind: str) -> None:
    """A weight that is made for a product is in the plan, and those that stay rounded."""
    config = SIZES | LLAMA
    sizes: dict[str, Any] = {
        "batch": 1,
        "tokens": 8,
        "dtype": "float32",
        "rank": 4,
        "device": "cpu",
    }
    plain = plan_memory(config, **sizes)
    planned = plan_memory(config, **sizes, merge_into=kind)
    assert planned.total > plain.total
    table = config["vocab_size"] * 256 * 4
    assert planned.weights - plain.weights == (0 if kind == "nf4" else 2 * table)
    with pytest.raises(ConfigError, match="pass a rank too"):
        plan_memory(config, **sizes | {"rank": None}, merge_into=kind)
    with pytest.raises(ConfigError, match="leave tensor_parallel and pipeline_parallel out"):
        plan_memory(config, **sizes, merge_into=kind, tensor_parallel=2)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = models.create(SIZES | LLAMA, seed=0)
    for options, problem in (
        ({"merge_into": "q4"}, "merge_into='q4'; choose from nf4"),
        ({"merge_into": "nf4", "dora": True}, "leave dora out, or merge_into"),
        ({"merge_into": "mxfp4"}, "a llama cannot store experts in mxfp4; choose from nf4"),
        (
            {"merge_into": "q4_0", "tokens": [3]},
            "trains rows of embed_tokens, and .* kind for fol",
        ),
        (
            {"merge_into": "q8_0", "modules": ["lm_head"]},
            "trains lm_head.*, and a GGUF file rounds",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            model.add_adapter(4, **options)
        assert model.adapter is None
    mixture = models.create(SIZES | MIXTURES["qwen2_moe"], seed=0)
    with pytest.raises(ConfigError, match="qwen2_moe cannot store experts in int8; choose"):
        mixture.add_adapter(2, merge_into="int8")
    mixture = models.create(SIZES | MIXTURES["gpt_oss"], seed=0)
    with pytest.raises(ConfigError, match="down_proj have 48 values, not whole blocks of 32; leav"):
        mixture.add_adapter(2, merge_into="mxfp4")
    hybrid = models.create(SIZES | RELATIVES["mamba2"], seed=0)
    with pytest.raises(
        ConfigError, match=r"files store .*in_proj.weight as backbone\.layers.*leave"
    ):
        hybrid.add_adapter(2, merge_into="nf4")
    hybrid.adapter = None
    models.quantize(hybrid, "nf4")
    with pytest.raises(
        ConfigError, match=r"save: .*in_proj.weight as backbone\.layers.*the dense m"
    ):
        hybrid.save(tmp_path)
    mixture = models.create(SIZES | MIXTURES["qwen2_moe types"], seed=0)
    with pytest.raises(ConfigError, match=r"add_adapter\('q8_0'\): llama.cpp's qwen2moe"):
        mixture.add_adapter(2, merge_into="q8_0")
    with pytest.raises(ConfigError, match="there is no adapter; call add_adapter"):
        model.train_through("nf4")
    models.quantize(model, "nf4", skip=("down_proj",))
    with pytest.raises(ConfigError, match=r"down_proj.weight is not quantized as load\(quantize="):
        model.add_adapter(4, merge_into="q4_0")
    model = models.create(SIZES | LLAMA, seed=0)
    model.add_adapter(4, merge_into="nf4", tokens=[3])
    with pytest.raises(ConfigError, match="already trained through nf4"):
        model.train_through("q4_0")
    assert np.isfinite(model.loss(IDS, IDS))


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_experts_in_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """Stacks are rounded as the tensors are that the file has of them."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    make(tmp_path / "base", SIZES | MIXTURES["mixtral"] | wide)
    model = models.load(tmp_path / "base")
    model.add_adapter(2, base=str(tmp_path / "base"), merge_into=kind)
    expected = learned(model).logits(IDS)
    model.save_adapter(tmp_path / "adapter")
    _, file = merged(tmp_path, kind)
    np.testing.assert_array_equal(file.logits(IDS), expected)


def test_half_precision_uses_the_weights_of_the_file(tmp_path: Path) -> None:
    model = through(tmp_path, "q4_0")
    wide = model.loss(IDS, IDS)
    narrow = models.load(tmp_path / "adapter", dtype="bfloat16")
    merged(tmp_path, "q4_0")
    file = models.load(tmp_path / "m.gguf", dtype="bfloat16")
    assert narrow.loss(IDS, IDS) == pytest.approx(file.loss(IDS, IDS), rel=1e-5)
    assert narrow.loss(IDS, IDS) == pytest.approx(wide, rel=2e-2)  # what 16 bits lose


def test_beside_other_adapters(tmp_path: Path) -> None:
    """It is set by name, but has no rows of its own in a batch, and no weighted sum."""
    model = through(tmp_path, "q4_0", "nf4")
    loss = model.loss(IDS, IDS)
    model.adapter = None
    model.load_adapter(tmp_path / "adapter", "file")
    model.add_adapter(2, name="plain")
    model.set_adapter("file")
    assert model.loss(IDS, IDS) == loss
    with pytest.raises(ConfigError, match="'file' is trained through q4_0, which rounds weights"):
        model.by_rows(["file", None])
    with pytest.raises(ConfigError, match="'file' is trained through q4_0, whose rounding"):
        model.mix_adapters({"file": 0.5, "plain": 0.5}, "sum")
    other = models.load(tmp_path / "base", dtype="float32")
    with pytest.raises(ConfigError, match="with nf4 weights of its base; use load"):
        other.load_adapter(tmp_path / "adapter", "file")
