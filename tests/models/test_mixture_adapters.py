"""Adapters of mixtures: of attention, and of stacks of experts in peft's layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import AdamW, CheckpointConfig
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.lora import Lora
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.models import Transformer, create, load, merge
from unsloth_cupy.models.adapters.adapter_stacks import stacks_of
from unsloth_cupy.models.adapters.kept import Kept
from unsloth_cupy.models.optimizers import optimizer_of
from unsloth_cupy.models.parse import parse

from ..golden.golden import OpCase, op_cases
from .peers import MIXTURES, SIZES, make

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = [*op_cases(GOLDEN / "ops_next", "lora_experts")]
OF_MODELS = [case for case in CASES if case.name.endswith("_adapter")]
IDS = np.random.default_rng(0).integers(3, 97, (2, 12))
STACKS = ("experts.gate_up_proj", "experts.down_proj")
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
MODEL, PROJECTIONS = "model.safetensors", ("gate_proj", "up_proj", "down_proj")


def loaded(case: OpCase) -> Transformer:
    base = GOLDEN / "models" / case.name.removesuffix("_adapter")
    return load(base, dtype="float32", lora=GOLDEN / "ops_next" / case.name)


@pytest.mark.parametrize("golden", OF_MODELS, ids=lambda case: case.name)
class TestGolden:
    def test_logits_loss_and_gradients_equal_pefts(self, golden: OpCase) -> None:
        model, batch = loaded(golden), (golden.inputs["input_ids"], golden.inputs["labels"])
        assert np.abs(model.logits(batch[0]) - golden.outputs["logits"]).max() < 1e-4
        before = {name: array.copy() for name, array in model.parameters.items()}
        for checkpoint in (None, CheckpointConfig()):
            loss, gradients = model.loss_and_gradients(*batch, checkpoint=checkpoint)
            assert abs(loss - golden.outputs["loss"]) < 1e-5
            assert gradients.keys() == golden.grads.keys() == model.trainable.keys()
            for name, expected in golden.grads.items():
                error = np.linalg.norm(gradients[name] - expected)
                assert error < 1e-4 * np.linalg.norm(expected), name
        for name, array in model.parameters.items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)

    def test_written_as_it_was_read(self, golden: OpCase, tmp_path: Path) -> None:
        loaded(golden).save_adapter(tmp_path)
        folder = GOLDEN / "ops_next" / golden.name
        expected, actual = (load_file(each / FILE) for each in (folder, tmp_path))
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array)
        settings = [json.loads((each / SETTINGS).read_text()) for each in (folder, tmp_path)]
        assert settings[0] == settings[1]

    def test_merged_and_generating(self, golden: OpCase) -> None:
        model, tokens = loaded(golden), golden.inputs["input_ids"]
        made = model.generate(tokens[:, :5], max_new_tokens=6, stop=())
        model.merge_adapter()
        assert np.abs(model.logits(tokens) - golden.outputs["logits"]).max() < 1e-4
        np.testing.assert_array_equal(
            model.generate(tokens[:, :5], max_new_tokens=6, stop=()), made
        )

    def test_low_precision(self, golden: OpCase) -> None:
        model = load(
            GOLDEN / "models" / golden.name.removesuffix("_adapter"),
            lora=GOLDEN / "ops_next" / golden.name,
        )
        logits = model.logits(golden.inputs["input_ids"])
        assert logits.dtype.name == "bfloat16"
        error = np.linalg.norm(logits.astype(np.float32) - golden.outputs["logits"])
        assert error < 0.05 * np.linalg.norm(golden.outputs["logits"])


@pytest.mark.parametrize("golden", CASES[:2], ids=lambda case: case.name)
def test_merged_stacks(golden: OpCase) -> None:
    """W + s B A of each expert, for both layouts of a stack."""
    given, turned = golden.inputs, golden.name == "in_out"
    kind = MIXTURES["gpt_oss" if turned else "mixtral"]
    sizes = {"num_local_experts": 6, "hidden_size": 13, "intermediate_size": 11, "head_dim": 8}
    model = create(SIZES | kind | sizes | {"num_hidden_layers": 1}, seed=0, dtype="float64")
    model.add_adapter(2, alpha=5, targets=STACKS)
    for name, adapted in model.adapter.stacks.items():
        key = name.rpartition(".")[2]
        stack, merged = (a[key] for a in (given, {key: golden.outputs[f"merged/{key}"]}))
        if turned:
            stack, merged = stack.swapaxes(1, 2), merged.swapaxes(1, 2)
            if adapted.stack.in_turns:
                order = np.r_[0 : stack.shape[1] : 2, 1 : stack.shape[1] : 2]
                stack, merged = stack[:, order], merged[:, order]
        pair = {adapted.down: given[f"A/{key}"], adapted.up: given[f"B/{key}"]}
        np.testing.assert_allclose(adapted.merge(stack, pair), merged, rtol=0, atol=1e-12)
        for dtype, rounded in ((BFLOAT16, [name]), (np.float32, [])):
            kept = Kept()
            narrow = {each: array.astype(np.float32) for each, array in pair.items()}
            adapted.merge(stack.astype(dtype), narrow, kept=kept)
            assert [*kept.layers] == rounded, "of weights that were rounded"


# ---- new adapters -------------------------------------------------------------------------------
def has_experts(keys: dict[str, Any]) -> bool:
    return parse(SIZES | keys).experts is not None


@pytest.mark.parametrize("label", [name for name, keys in MIXTURES.items() if has_experts(keys)])
def test_new_adapters_count_every_layer_and_every_expert(label: str, tmp_path: Path) -> None:
    """All of them are placed, change nothing at first, and each has a gradient."""
    model = create(SIZES | MIXTURES[label], seed=0)
    config, plain = model.config, model.logits(IDS)
    model.save(tmp_path / "base")
    model.add_adapter(2)
    placed = model.adapter.stacks
    assert [*placed] == [
        f"{config.prefix_of(layer)}{config.experts.prefix}experts.{name}"
        for layer in range(config.layers)
        if config.experts.sparse[layer]
        for name in config.experts.names
    ]
    assert not any(".gate.lora" in name or ".router." in name for name in model.trainable)
    np.testing.assert_allclose(model.logits(IDS), plain, atol=1e-5, rtol=0)
    loss, gradients = model.loss_and_gradients(IDS, IDS)
    still = [n for n, g in gradients.items() if n.endswith("lora_B.weight") and not g.any()]
    assert still == []
    optimizer = AdamW(model.trainable, lr=1e-2)
    for _ in range(3):
        optimizer.step(model.loss_and_gradients(IDS, IDS)[1])
    assert model.loss(IDS, IDS) < loss
    model.save_adapter(tmp_path / "adapter")
    again = load(tmp_path / "base", lora=tmp_path / "adapter")
    np.testing.assert_array_equal(again.logits(IDS), model.logits(IDS))
    model.merge_adapter()
    # merged weights are rounded, and the states of a scan add up what each token rounds
    atol = 5e-5 if config.recurrent else 2e-5
    np.testing.assert_allclose(again.logits(IDS), model.logits(IDS), atol=atol, rtol=0)


@pytest.mark.parametrize("label", ["mixtral", "gpt_oss"])
def test_merge_writes_the_tensors_of_the_base(label: str, tmp_path: Path) -> None:
    model = create(SIZES | MIXTURES[label], seed=0)
    model.save(tmp_path / "base")
    model.add_adapter(2)
    rng = np.random.default_rng(0)
    for array in model.adapter.parameters.values():
        array[...] = 0.2 * rng.standard_normal(array.shape)
    model.save_adapter(tmp_path / "adapter")
    report = merge(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    assert report.layers == len(model.adapter.scales)
    short = merge(
        tmp_path / "adapter", tmp_path / "short", base=tmp_path / "base", dtype="bfloat16"
    )
    assert {*model.adapter.stacks} <= {*short.kept.layers}
    assert 0.98 < short.kept.share < 1.02
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged")]
    sizes = [{name: array.shape for name, array in file.items()} for file in files]
    assert sizes[0] == sizes[1]
    again = load(tmp_path / "merged")
    model.merge_adapter()
    for name, array in model.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array, err_msg=name)


@pytest.mark.parametrize(("label", "wide"), [("mixtral", False), ("deepseek_v3", True)])
def test_routers_of_peft_learn_and_merge(label: str, wide: bool, tmp_path: Path) -> None:
    """peft's "all-linear" names gate.weight among target_parameters; patterns match that name."""
    model = create(SIZES | MIXTURES[label], seed=0)
    model.save(tmp_path / "base")
    assert model.config.experts.wide == wide
    model.add_adapter(4, alpha=2, targets=["o_proj"])
    model.save_adapter(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    settings |= {"target_parameters": ["gate.weight"], "rank_pattern": {"gate.weight": 3}}
    settings |= {"alpha_pattern": {"mlp.gate.weight": 6, "gate": 50}}
    (tmp_path / "adapter" / SETTINGS).write_text(json.dumps(settings))
    tensors, rng = load_file(tmp_path / "adapter" / FILE), np.random.default_rng(0)
    routers = [name for name in model.parameters if name.endswith(".mlp.gate.weight")]
    assert len(routers) == sum(model.config.experts.sparse)
    pairs = {}
    for name in routers:
        count, hidden = model.parameters[name].shape
        pair = (rng.normal(0, 0.3, shape).astype("f4") for shape in ((3, hidden), (count, 3)))
        module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        pairs[name] = dict(zip((f"{module}A.weight", f"{module}B.weight"), pair, strict=True))
        tensors |= pairs[name]
    save_file(tensors, tmp_path / "adapter" / FILE)
    adapted = load(tmp_path / "base", lora=tmp_path / "adapter")
    model.adapter = None
    for name, pair in pairs.items():
        a, b = pair.values()
        model.parameters[name] = model.parameters[name] + 2 * b @ a
    np.testing.assert_allclose(adapted.logits(IDS), model.logits(IDS), rtol=0, atol=1e-4)
    _, expected = model.loss_and_gradients(IDS, IDS)
    _, actual = adapted.loss_and_gradients(IDS, IDS)
    for name, pair in pairs.items():
        (down, a), (up, b) = pair.items()
        for own, exact in ((down, 2 * b.T @ expected[name]), (up, 2 * expected[name] @ a.T)):
            assert np.linalg.norm(actual[own] - exact) < 1e-4 * np.linalg.norm(exact), own
    adapted.save_adapter(tmp_path / "again")
    written = load_file(tmp_path / "again" / FILE)
    for pair in pairs.values():
        for own, array in pair.items():
            np.testing.assert_array_equal(written[own], array)
    merge(tmp_path / "again", tmp_path / "merged", base=tmp_path / "base")
    merged = load(tmp_path / "merged").logits(IDS)
    np.testing.assert_allclose(merged, model.logits(IDS), rtol=0, atol=1e-4)


def of_single_experts(folder: Path, label: str, **changes: Any) -> tuple[Path, Path, Any]:
    """Write a mixture and an adapter with the names of transformers 4; return both, and a model.

    That has the sums W + scale B A, by the names and shapes of the file.
    """
    model = create(SIZES | MIXTURES[label] | {"output_router_logits": False}, seed=0)
    model.save(folder / "base")
    model.add_adapter(3, alpha=5, targets=["q_proj"])
    model.save_adapter(folder / "adapter")
    model.adapter = None
    tensors, weights = (load_file(folder / part) for part in (f"adapter/{FILE}", f"base/{MODEL}"))
    rng = np.random.default_rng(0)
    for name in (name for name in weights if ".experts." in name or ".gate.w" in name):
        outputs, inputs = weights[name].shape
        pair = [rng.normal(0, 0.2, shape).astype("f4") for shape in ((3, inputs), (outputs, 3))]
        weights[name] += 5 / (3**0.5 if changes.get("use_rslora") else 3) * pair[1] @ pair[0]
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {
            f"{layer}.lora_{part}.weight": each for part, each in zip("AB", pair, strict=True)
        }
    save_file(tensors, folder / "adapter" / FILE)
    settings = json.loads((folder / "adapter" / SETTINGS).read_text())
    names = ["q_proj", "gate", *(["w1", "w2", "w3"] if label == "mixtral" else PROJECTIONS)]
    settings |= {"target_modules": names} | changes
    (folder / "adapter" / SETTINGS).write_text(json.dumps(settings))
    (folder / "sums").mkdir()
    save_file(weights, folder / "sums" / MODEL)
    (folder / "sums" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    return folder / "base", folder / "adapter", load(folder / "sums")


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        *(("mixtral", {}), ("mixtral", {"use_rslora": True}), ("qwen3_moe window", {})),
        ("nemotron_h latent", {}),
    ],
    ids=str,
)
def test_adapters_of_single_experts_are_those_of_stacks(
    label: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter, expected = of_single_experts(tmp_path, label, **changes)
    model = load(base, lora=adapter)
    assert {*model.adapter.stacks} == {name for name in model.parameters if ".experts." in name}
    np.testing.assert_allclose(model.logits(IDS), expected.logits(IDS), rtol=0, atol=1e-4)
    merge(adapter, tmp_path / "merged", base=base)
    for name, array in load(tmp_path / "merged").parameters.items():
        np.testing.assert_allclose(array, expected.parameters[name], atol=1e-6, err_msg=name)
    model.save_adapter(tmp_path / "again")
    again = load(base, lora=tmp_path / "again")
    np.testing.assert_array_equal(again.logits(IDS), model.logits(IDS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", ["mixtral", "qwen3_moe window"])
def test_peft_reads_single_experts_as_we_do(label: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch computes the references")
    transformers = pytest.importorskip("transformers", reason="transformers has the models")
    peft = pytest.importorskip("peft", reason="peft computes the references")
    base, adapter, _ = of_single_experts(tmp_path, label)
    model = load(base, lora=adapter)
    model.save_adapter(tmp_path / "again")
    for folder in (adapter, tmp_path / "again"):
        whole = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        with torch.no_grad():
            logits = peft.PeftModel.from_pretrained(whole, folder)(torch.tensor(IDS)).logits
        np.testing.assert_allclose(model.logits(IDS), logits.numpy(), rtol=0, atol=1e-4)


def test_what_single_experts_cannot_say(tmp_path: Path) -> None:
    base, adapter, _ = of_single_experts(tmp_path, "mixtral", lora_dropout=0.1)
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.1 is ignored: stacks of experts"):
        load(base, lora=adapter)
    settings = json.loads((adapter / SETTINGS).read_text()) | {"lora_dropout": 0.0}
    for change in ({"alpha_pattern": {"w1": 9}}, {"rank_pattern": {"block_sparse_moe.gate": 3}}):
        (adapter / SETTINGS).write_text(json.dumps(settings | change))
        with pytest.raises(ConfigError, match="which is now a part of a stack or has another name"):
            load(base, lora=adapter)
    (adapter / SETTINGS).write_text(json.dumps(settings))
    tensors = load_file(adapter / FILE)
    del tensors["base_model.model.model.layers.1.block_sparse_moe.experts.3.w3.lora_B.weight"]
    save_file(tensors, adapter / FILE)
    with pytest.raises(
        ConfigError, match=r"lora_B.weight of expert 3 of .*1\.mlp.*gate_up_proj is"
    ):
        load(base, lora=adapter)


def test_two_single_experts_are_a_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MIXTURES, "mixtral", MIXTURES["mixtral"] | {"num_local_experts": 2})
    base, adapter, expected = of_single_experts(tmp_path, "mixtral")
    actual = load(base, lora=adapter).logits(IDS)
    np.testing.assert_allclose(actual, expected.logits(IDS), rtol=0, atol=1e-4)


def test_patterns_of_attention_stay_beside_single_experts(tmp_path: Path) -> None:
    base, adapter, _ = of_single_experts(tmp_path, "mixtral", alpha_pattern={"q_proj": 9})
    model = load(base, lora=adapter)
    assert {model.adapter.scales[n] for n in model.adapter.scales if "q_proj" in n} == {3.0}


def test_targets() -> None:
    model = create(SIZES | MIXTURES["qwen2_moe types"], seed=0)
    model.add_adapter(2, targets=("q_proj", STACKS[1]))
    names = {name.partition(".layers.0.")[2] for name in model.trainable} - {""}
    assert names == {
        *(f"self_attn.q_proj.lora_{x}.weight" for x in "AB"),
        *(f"mlp.experts.lora_{x}.weight" for x in "AB"),
    }
    settings = model.adapter.settings
    assert settings["target_modules"] == ["q_proj"]
    assert settings["target_parameters"] == ["mlp.experts.down_proj"]
    assert Lora(2, targets="attention").options(model.config)["targets"] == [
        f"{name}_proj" for name in "koqv"
    ]
    with pytest.raises(ConfigError, match=r"up_proj, v_proj, experts\.gate_up_proj"):
        Lora(2, targets="gate").options(model.config)
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj, experts\.down_proj"):
        create(SIZES | MIXTURES["mixtral"], seed=0).add_adapter(2, targets=("up_proj",))


@pytest.mark.parametrize("options", [{"dora": True}, {"dropout": 0.1}])
def test_stacks_have_neither_dora_nor_dropout(options: dict[str, Any]) -> None:
    model = create(SIZES | MIXTURES["mixtral"], seed=0)
    with pytest.raises(ConfigError, match=r"neither DoRA nor dropout, as in peft; .* k_proj"):
        model.add_adapter(2, **options)
    with pytest.raises(ConfigError, match=r"initialized from a weight; leave init='olora'"):
        model.add_adapter(2, init="olora")
    model.add_adapter(2, targets=("q_proj",), **options)
    assert np.isfinite(model.loss_and_gradients(IDS, IDS, seed=0)[0])


def test_muon_takes_no_stacks_for_matrices() -> None:
    """The low-rank weights of all experts stand in one matrix, which is not orthogonalized."""
    model = create(SIZES | MIXTURES["mixtral"], seed=0)
    model.add_adapter(2)
    muon, rest = optimizer_of("muon", model).optimizers
    assert any("q_proj" in name for name in muon.parameters)
    assert not any(".experts." in name for name in muon.parameters)
    assert sum(".experts." in name for name in rest.parameters) == 12


def test_plans_of_adapters() -> None:
    config = SIZES | MIXTURES["mixtral"]
    plans = [
        plan_memory(config, batch=2, tokens=32, dtype="bfloat16", device=device, rank=4)
        for device in ("cpu", "cuda")
    ]
    assert all(plan.total > 0 for plan in plans)


# ---- files of peft ------------------------------------------------------------------------------
@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    model = create(SIZES | MIXTURES["mixtral"], seed=0)
    model.save(tmp_path / "base")
    model.add_adapter(2, targets=("q_proj", *STACKS))
    model.save_adapter(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_parameters": ["mlp.experts.up_proj"]}, "names mlp.experts.up_proj, which is ne"),
        (
            {"target_parameters": ["norm.weight"]},
            "norm.weight, which is neither an expert stack",
        ),
        ({"target_parameters": ["weight"]}, "names model.embed_tokens.weight, which is neither"),
        ({"target_parameters": "mlp"}, "must be a list, each a text"),
        ({"target_parameters": []}, "does not belong to a linear layer"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1, which target_parameters do"),
        ({"use_dora": True}, "use_dora is True, which target_parameters do"),
        ({"init_lora_weights": "pissa"}, "'pissa', which target_parameters do not support"),
        ({"r": 3}, r"lora_A.weight is \(8, 32\); it must be \(12, 32\)"),
    ],
)
def test_what_does_not_fit_is_named(
    folders: tuple[Path, Path], change: dict[str, Any], message: str
) -> None:
    base, adapter = folders
    settings = json.loads((adapter / SETTINGS).read_text())
    (adapter / SETTINGS).write_text(json.dumps(settings | change))
    with pytest.raises(ConfigError, match=message):
        load(base, lora=adapter)


def test_a_missing_stack_is_named(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    tensors = load_file(adapter / FILE)
    kept = {n: a for n, a in tensors.items() if "layers.2.mlp.experts.lora" not in n}
    save_file(kept, adapter / FILE)
    with pytest.raises(ConfigError, match=r"names model\.layers\.2\.mlp\.experts\.down_proj, and"):
        load(base, lora=adapter)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("label", "targets"),
    [
        *(("mixtral", None), ("gpt_oss", None), ("granitemoe", STACKS[:1]), ("phimoe", STACKS[1:])),
        ("nemotron_h latent", ("fc1_latent_proj", "experts.up_proj", STACKS[1])),
    ],
)
def test_peft_reads_what_we_write(label: str, targets: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch computes the references")
    transformers = pytest.importorskip("transformers", reason="transformers has the models")
    peft = pytest.importorskip("peft", reason="peft computes the references")
    make(tmp_path / "base", MIXTURES[label] | {"output_router_logits": False})
    model = load(tmp_path / "base")
    model.add_adapter(3, alpha=7, targets=targets)
    rng = np.random.default_rng(0)
    for array in model.adapter.parameters.values():
        array[...] = 0.2 * rng.standard_normal(array.shape)
    model.save_adapter(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()
    ids = torch.tensor(IDS)
    out = peer(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    assert np.abs(model.logits(IDS) - out.logits.detach().numpy()).max() < 1e-4
    _, gradients = model.loss_and_gradients(IDS, IDS)
    theirs = {n: p.grad for n, p in peer.named_parameters() if p.grad is not None}
    expected = {name.replace(".default", ""): grad.numpy() for name, grad in theirs.items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = np.linalg.norm(gradient - expected[name])
        assert error < 1e-4 * np.linalg.norm(expected[name]), name


def test_stacks_of_some_layers() -> None:
    """Where one stack of a layer is adapted, its module has the outer name."""
    config = create(SIZES | MIXTURES["mixtral"], seed=0).config
    actual = stacks_of(config, lambda name: name.endswith("down_proj") or ".0." in name)
    assert [(module, each.parameter.rpartition(".")[2]) for module, each in actual.items()] == [
        ("model.layers.0.mlp.experts.base_layer", "gate_up_proj"),
        ("model.layers.0.mlp.experts", "down_proj"),
        ("model.layers.1.mlp.experts", "down_proj"),
        ("model.layers.2.mlp.experts", "down_proj"),
    ]
