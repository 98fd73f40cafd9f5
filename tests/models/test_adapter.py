"""Adapters of peft: read, computed, trained, merged, written; and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import AdamW, CheckpointConfig, lora_linears
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create, load, merge
from unsloth_cupy.models.adapters import adapter, adapter_folder, joined
from unsloth_cupy.models.adapters.adapter_base import base_of
from unsloth_cupy.models.adapters.matching import matches

from ..golden.golden import op_cases
from .peers import SIZES

ROOT = Path(__file__).parent.parent / "golden"
LLAMA, FOLDER = ROOT / "models" / "llama", ROOT / "ops" / "llama_adapter"
CASE = next(case for case in op_cases(ROOT / "ops", "lora") if case.name == "llama_adapter")
TOKENS, LABELS = CASE.inputs["input_ids"], CASE.inputs["labels"]
quiet = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
CHECKPOINTS = [None, CheckpointConfig(), CheckpointConfig(recompute_every=2)]


@pytest.fixture
def model() -> Transformer:
    return load(LLAMA, dtype="float32", lora=FOLDER)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=["plain", "every block", "every two"])
def test_logits_loss_and_gradients_equal_pefts(model: Transformer, checkpoint: Any) -> None:
    assert np.abs(model.logits(TOKENS) - CASE.outputs["logits"]).max() < 1e-4
    loss, gradients = model.loss_and_gradients(TOKENS, LABELS, checkpoint=checkpoint)
    assert abs(loss - CASE.outputs["loss"]) < 1e-5
    assert gradients.keys() == CASE.grads.keys() == model.trainable.keys()
    for name, expected in CASE.grads.items():
        error = np.linalg.norm(gradients[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-4, name


def test_merged_it_is_a_model_like_any_other(model: Transformer) -> None:
    before = {name: array.copy() for name, array in model.parameters.items()}
    parameters = model.parameters
    model.merge_adapter()
    assert model.adapter is None
    assert np.abs(model.logits(TOKENS) - CASE.outputs["logits"]).max() < 1e-4
    assert model.loss_and_gradients(TOKENS, LABELS)[1].keys() == before.keys()
    assert all((parameters[name] == array).all() for name, array in before.items())


def test_generation_hears_the_adapter(model: Transformer) -> None:
    prompt = TOKENS[:, :4]
    made = model.generate(prompt, max_new_tokens=6, stop=())
    assert (
        made.tolist()
        != load(LLAMA, dtype="float32").generate(prompt, max_new_tokens=6, stop=()).tolist()
    )
    model.merge_adapter()
    assert model.generate(prompt, max_new_tokens=6, stop=()).tolist() == made.tolist()


def test_written_as_it_was_read(model: Transformer, tmp_path: Path) -> None:
    model.save_adapter(tmp_path / "adapter")
    expected = load_file(FOLDER / "adapter_model.safetensors")
    actual = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert actual.keys() == expected.keys()
    assert all((actual[name] == array).all() for name, array in expected.items())
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings == json.loads((FOLDER / "adapter_config.json").read_text())


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_stored_in_another_dtype_than_the_model_it_is_float32(stored: str, tmp_path: Path) -> None:
    dtype = {"bfloat16": BFLOAT16}.get(stored) or np.dtype(stored)
    file = "adapter_model.safetensors"
    rounded = {name: a.astype(dtype) for name, a in load_file(FOLDER / file).items()}
    for folder, tensors in (
        ("adapter", rounded),
        ("wide", {name: a.astype(np.float32) for name, a in rounded.items()}),
    ):
        shutil.copytree(FOLDER, tmp_path / folder)
        save_file(tensors, tmp_path / folder / file)
    model, wide = (load(LLAMA, dtype="float32", lora=tmp_path / n) for n in ("adapter", "wide"))
    np.testing.assert_array_equal(model.logits(TOKENS), wide.logits(TOKENS))
    _, gradients = model.loss_and_gradients(TOKENS, LABELS)
    assert {array.dtype.name for array in gradients.values()} == {"float32"}
    model.merge_adapter()
    assert model.parameters["model.layers.0.self_attn.q_proj.weight"].dtype == np.float32
    narrow = load(LLAMA, dtype="bfloat16", lora=tmp_path / "adapter")
    kept = stored if stored == "bfloat16" else "float32"  # the model's own dtype is left alone
    assert {array.dtype.name for array in narrow.trainable.values()} == {kept}
    assert narrow.logits(TOKENS).dtype == BFLOAT16


def small(model_type: str = "llama") -> Transformer:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return create({"model_type": model_type, **sizes, **heads}, seed=0)


def test_adapters_read_x_together_unless_each_drops_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of q, k and v, and of gate and up; k has none in the second model."""
    tokens, counts = np.arange(24).reshape(2, 12), []

    def counting(x: Any, layers: Any) -> Any:
        counts.append(len(layers))
        return lora_linears(x, layers)

    monkeypatch.setattr(adapter, "lora_linears", counting)
    for targets, expected in ((None, [3, 2]), (("q_proj", "v_proj"), [2]), (("q_proj",), [])):
        model = small()
        model.add_adapter(2, targets=targets, dropout=0.5)
        model.loss_and_gradients(tokens, tokens)
        assert counts == 2 * expected
        counts.clear()
        model.loss_and_gradients(tokens, tokens, seed=0)
        assert counts == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True, "alpha": 3}], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_new_adapter_changes_nothing_until_it_learns(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = small(model_type)
    tokens = np.arange(24).reshape(2, 12)
    plain, frozen = model.logits(tokens), {n: a.copy() for n, a in model.parameters.items()}
    model.add_adapter(4, dropout=0.1, base=str(tmp_path / "base"), **options)
    np.testing.assert_allclose(model.logits(tokens), plain, rtol=1e-4, atol=1e-5)
    optimizer, losses = AdamW(model.trainable, lr=0.01), []
    for step in range(12):
        loss, gradients = model.loss_and_gradients(tokens, tokens, seed=step)
        losses.append(loss)
        optimizer.step(gradients)
    assert losses[-1] < losses[0] - 0.3
    assert all((model.parameters[name] == array).all() for name, array in frozen.items())
    expected = model.logits(tokens)
    with pytest.warns(UserWarning, match="without its adapter"):
        model.save(tmp_path / "base")
    model.save_adapter(tmp_path / "adapter")
    both = load(tmp_path / "base", lora=tmp_path / "adapter")
    alone = load(tmp_path / "adapter")  # which names the folder of its base
    for again in (both, alone):
        np.testing.assert_array_equal(again.logits(tokens), expected)


@quiet
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_peft_reads_what_is_written(dora: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    model = load(LLAMA, dtype="float32")
    model.add_adapter(3, targets=["q_proj", "down_proj"], dora=dora, rslora=True)
    rng = np.random.default_rng(0)
    for name, array in model.trainable.items():
        if not name.endswith("vector"):
            array[...] = rng.standard_normal(array.shape) / 4
    model.save_adapter(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    assert np.abs(model.logits(TOKENS) - logits).max() < 1e-4


def test_a_new_adapter_has_the_defaults_of_its_docstring() -> None:
    """A is uniform in -1 .. 1, divided by the root of the inputs; other seeds draw another."""
    model = small()
    model.add_adapter(3)
    assert model.adapter.settings["lora_alpha"] == 6
    assert model.adapter.settings["inference_mode"] is True  # as peft saves it
    assert {*model.adapter.scales.values()} == {2.0}
    first = {n: a for n, a in model.trainable.items() if n.endswith("lora_A.weight")}
    for name, a in first.items():
        scaled = a * a.shape[1] ** 0.5
        assert -1 <= scaled.min() < -0.8, name
        assert 0.8 < scaled.max() <= 1, name
        assert abs(scaled.mean()) < 4 / (3 * a.size) ** 0.5, name
    model.adapter = None
    model.add_adapter(3, seed=1)
    assert not any((model.trainable[name] == a).any() for name, a in first.items())


def test_a_merge_that_rounds_nothing_measures_nothing(model: Transformer) -> None:
    assert model.merge_adapter().layers == {}


def test_what_an_adapter_learned_is_never_dropped_in_silence(tmp_path: Path) -> None:
    model = load(LLAMA)
    model.add_adapter(2)
    adapter = model.adapter
    with pytest.warns(UserWarning, match=r"without its adapter; save_adapter\(folder\)"):
        model.save(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"has an adapter.* merge_adapter\(\)"):
        model.add_adapter(4)
    assert model.adapter is adapter
    model.merge_adapter()
    with pytest.raises(ConfigError, match=r"there is no adapter; call add_adapter\(rank\)"):
        model.merge_adapter()
    model.save(tmp_path / "base")
    model.add_adapter(4)


@quiet
def test_patterns_of_rank_and_alpha(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose patterns these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    base = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.mlp.down_proj": 32},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    assert np.abs(load(LLAMA, dtype="float32", lora=tmp_path).logits(TOKENS) - logits).max() < 1e-4


@pytest.mark.parametrize("alpha", [0, -6])
def test_any_alpha_is_a_factor(alpha: int, tmp_path: Path) -> None:
    """Also none, and one that takes away what the adapter learned."""
    shutil.copytree(FOLDER, tmp_path / "adapter")
    broken({"lora_alpha": alpha})(tmp_path / "adapter")
    base = load(LLAMA, dtype="float32")
    model = load(LLAMA, dtype="float32", lora=tmp_path / "adapter")
    own = model.adapter.parameters
    for name in model.adapter.scales:
        a, b = (own[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        base.parameters[f"{name}.weight"] += alpha / 4 * b @ a
    assert np.abs(model.logits(TOKENS) - base.logits(TOKENS)).max() < 1e-4


def test_settings_that_are_not_known_are_said(tmp_path: Path) -> None:
    """As of a later peft, whose new kind of LoRA would be read as a plain one in silence."""
    shutil.copytree(FOLDER, tmp_path / "adapter")
    broken({"use_new_lora": True, "another": None})(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"unknown settings, .* without them: use_new_lora$"):
        load(LLAMA, lora=tmp_path / "adapter")


def test_an_adapter_finds_its_base_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was made, then in the cache of models; an explicit base is only what it says."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = small()
    model.texts = {"config.json": {**model.texts["config.json"], "_name_or_path": "org/name.1"}}
    model.save(base)
    model = load(base)
    model.add_adapter(2, seed=1)
    for array in model.trainable.values():
        array[...] += 0.1
    model.save_adapter(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/name.1"
    expected = model.logits(TOKENS % 64)
    np.testing.assert_array_equal(load(folder).logits(TOKENS % 64), expected)
    hub = tmp_path / "home" / "hub"
    snapshot = hub / "models--org--name.1" / "snapshots" / "0a1b"
    shutil.move(base, snapshot)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"is .org/name\.1., which is not a folder here; "):
        load(folder)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0a1b")
    for name, place in (("HF_HUB_CACHE", hub), ("HF_HOME", hub.parent)):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(place))
            again = load(folder)
            np.testing.assert_array_equal(again.logits(TOKENS % 64), expected)
            assert base_of(folder, "org/name.1") == snapshot
    del again.texts["config.json"]["_name_or_path"]
    again.adapter = None
    again.add_adapter(2)
    again.save_adapter(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/name.1"  # the place of the cache says it


def test_a_base_that_has_moved(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    small().save(base)
    model = load(base)
    model.add_adapter(2)
    model.save_adapter(folder)
    assert load(folder).folder == base
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"--base FOLDER, or load\(FOLDER, lora=ADAPTER\)"):
        load(folder)
    assert base_of(folder, tmp_path / "moved") == tmp_path / "moved"
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "../moved"  # from the adapter's own folder
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert load(folder).adapter is not None
    for name in ("nowhere", "org/nowhere"):
        with pytest.raises(ConfigError, match=f"base='{name}', which is not a folder here"):
            base_of(folder, name)
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json: base='x' is for an"):
        base_of(tmp_path / "moved", "x")


def test_dropout_is_drawn_by_seed(model: Transformer) -> None:
    assert model.adapter is not None
    model.adapter.dropout = 0.5
    plain, one, same, two = (
        model.loss_and_gradients(TOKENS, LABELS, seed=seed)[0] for seed in (None, 1, 1, 2)
    )
    assert one == same
    assert len({plain, one, two}) == 3
    again = model.loss_and_gradients(TOKENS, LABELS, seed=1, checkpoint=CheckpointConfig())[0]
    assert again == one


def test_dropout_belongs_to_the_number_of_a_token() -> None:
    """Whatever tokens are computed beside it."""
    model, module = small(), "model.layers.0.self_attn.q_proj"
    model.add_adapter(2, dropout=0.5)
    draw = np.random.default_rng(0)
    held = {n: draw.standard_normal(a.shape).astype("f4") for n, a in model.trainable.items()}
    held |= model.parameters
    x, numbers = draw.standard_normal((2, 3, 32)).astype("f4"), np.int32([[4, 5, 6], [0, 1, 2]])
    (expected,) = model.adapter.linears(held, [module], x, 1, numbers)
    for row in range(2):
        (actual,) = model.adapter.linears(held, [module], x[row, None], 1, numbers[row])
        np.testing.assert_allclose(actual[0], expected[row], rtol=1e-5, atol=1e-5)


@quiet
@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 100}},
        {"alpha_pattern": {r"layers\.1\..*": 30, "q_proj": 3}, "use_rslora": True},
        {"rank_pattern": {r"^model\.layers\.(0|1)\.mlp.*": 2}, "use_rslora": True},
        {"target_modules": r".*layers\.1\..*(q|down)_proj", "use_dora": True},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"exclude_modules": ["layers.0.mlp.down_proj"]},
    ],
    ids=str,
)
@pytest.mark.slow
def test_logits_and_layers_equal_pefts(options: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    base = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    targets = {"target_modules": ["q_proj", "down_proj"]} | options
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **targets)
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    model = load(LLAMA, dtype="float32", lora=tmp_path)
    assert np.abs(model.logits(TOKENS) - logits).max() < 1e-4
    assert model.adapter is not None
    adapted = {n.removeprefix("base_model.model.") for n, m in theirs.named_modules()
               if hasattr(m, "lora_A")}  # fmt: skip
    assert model.adapter.scales.keys() == adapted


def test_layers_that_settings_leave_out_are_not_used(model: Transformer, tmp_path: Path) -> None:
    """As in peft, which does not say it; they are written back."""
    assert model.adapter is not None
    model.adapter.settings |= {"target_modules": ["q_proj"], "exclude_modules": ["0.mlp.up_proj"]}
    model.save_adapter(tmp_path)
    with pytest.warns(UserWarning, match="target_modules does not include: they are not used"):
        part = load(LLAMA, dtype="float32", lora=tmp_path)
    assert part.adapter is not None
    assert {name.rpartition(".")[2] for name in part.adapter.scales} == {"q_proj"}
    assert np.abs(part.logits(TOKENS) - model.logits(TOKENS)).max() > 1e-3
    with pytest.warns(UserWarning, match="does not include"):
        load(LLAMA, lora=tmp_path).save_adapter(tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == model.trainable.keys()


@quiet
@pytest.mark.filterwarnings(
    "ignore:Adapter 'default'.* LoRA tensor.* have invalid shape",  # biases
    "ignore:.lora_bias=True. was passed but",  # which cannot be merged
)
def test_biases_of_peft_are_read_trained_and_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    create(SIZES | {"model_type": "qwen2"}, seed=0).save(tmp_path / "base")
    tokens = TOKENS % 97
    for targets in (["q_proj", "v_proj"], ["q_proj", "up_proj"]):
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        config = peft.LoraConfig(r=2, lora_alpha=3, lora_bias=True, target_modules=targets)
        peer = peft.get_peft_model(whole, config)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in peer.named_parameters():
                if "lora_" in name:
                    weight[...] = 0.3 * torch.randn(weight.shape, generator=draw)
        ids = torch.from_numpy(tokens)
        result = peer(ids, labels=ids)
        result.loss.backward()
        folder = tmp_path / targets[1]
        peer.save_pretrained(folder)
        model = load(tmp_path / "base", lora=folder)
        expected = result.logits.detach().numpy()
        np.testing.assert_allclose(model.logits(tokens), expected, atol=1e-4)
        _, gradients = model.loss_and_gradients(tokens, tokens, checkpoint=CheckpointConfig())
        theirs = {n.replace(".default", ""): p.grad for n, p in peer.named_parameters()}
        assert sum(name.endswith("lora_B.bias") for name in gradients) == 6
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, theirs[name].numpy(), atol=1e-5, err_msg=name)
        model.save_adapter(tmp_path / "again")
        assert (
            model.trainable.keys()
            == load(tmp_path / "base", lora=tmp_path / "again").trainable.keys()
        )
        if targets[1] == "v_proj":
            model.merge_adapter()
            np.testing.assert_allclose(model.logits(tokens), expected, atol=1e-4)
            merge(folder, tmp_path / "merged", base=tmp_path / "base")
            merged = load(tmp_path / "merged").logits(tokens)
            np.testing.assert_allclose(merged, expected, atol=1e-4)
        else:
            problem = r"^merge_adapter: .* has a bias, and the layer has none; use the adapter"
            with pytest.raises(ConfigError, match=problem):
                model.merge_adapter()
            with pytest.raises(ConfigError, match="up_proj has a bias, and"):
                merge(folder, tmp_path / "refused", base=tmp_path / "base")


def broken(change: dict[str, Any], drop: str = "", rename: str = "") -> Any:
    def make(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        tensors = load_file(folder / "adapter_model.safetensors")
        if drop or rename:
            name = next(name for name in tensors if (drop or "q_proj") in name)
            array = tensors.pop(name)
            if rename:
                tensors[rename] = array
            save_file(tensors, folder / "adapter_model.safetensors")

    return make


def test_expressions_are_matched_by_the_first() -> None:
    """As the process does that other people's expressions run in."""
    names = ["a.1.b", "a.2.b", "c"]
    assert matches("match", [r"c|x", r"a\.(?P<idx>\d+)"], names) == [[1, "1"], [1, "2"], [0, None]]
    assert matches("fullmatch", [r"a\.\d"], names) == [None] * 3
    assert matches("match", ["a", "("], names)[0] == 1
    assert "unterminated" in matches("match", ["("], names)[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken({"peft_type": "IA3"}), "peft_type is 'IA3'; it must be LORA"),
        (broken({"peft_type": "VERA"}), "peft_type is 'VERA'; it must be LORA: merge the adapter"),
        (broken({"peft_type": "OFT"}), "peft_type is 'OFT'; it must be LORA: merge the adapter"),
        (broken({"peft_type": "PREFIX_TUNING"}), "be LORA: this type changes no weights; train a"),
        (broken({"init_lora_weights": "loftq"}), "'loftq' changed; convert it in peft"),
        (broken({"bias": "all"}), "bias is 'all', which is not supported"),
        (broken({"modules_to_save": ["lm_head"]}), "lm_head.weight is missing"),
        (broken({"lora_alpha": float("inf")}), "lora_alpha is inf; it must be a number"),
        (broken({"init_lora_weights": "olora", "lora_alpha": -1}), "the scale is -0.25; pass an"),
        (broken({"init_lora_weights": "PiSSA"}), "is 'PiSSA', which is not known; merge the"),
        (broken({"r": 4.0}), "r is 4.0; it must be an integer"),
        (
            broken({}, rename="base_model.model.model.layers.0.self_attn.q_proj.lora_E.weight"),
            "lora_E.weight' is not a known part of LoRA",
        ),
        (broken({"lora_dropout": 2}), "lora_dropout is 2"),
        (broken({"r": float("nan")}), "r is nan"),
        (broken({"alora_invocation_tokens": [1]}), "alora_invocation_tokens is"),
        (broken({"init_lora_weights": "pissa_niter_4"}), "'pissa_niter_4' changed; convert it"),
        (broken({"rank_pattern": "q_proj"}), "rank_pattern is 'q_proj'; it must be an object"),
        (broken({"alpha_pattern": {"q_proj": "8"}}), r"alpha_pattern\['q_proj'\] is '8'"),
        (broken({"alpha_pattern": {"(": 8}}), r"alpha_pattern has the pattern '\(': miss"),
        (broken({"r": 5}), r"lora_A.weight is \(4, .*; it must be \(5, "),
        (broken({"use_dora": True}), "lora_magnitude_vector of .* is missing"),
        (broken({}, drop="lora_B"), "lora_B.weight of .* is missing"),
        (
            broken({"target_modules": ".*"}, rename="base_model.model.lm_head.lora_A.weight"),
            "lora_B.weight of lm_head is missing",
        ),
        (broken({}, rename="base_model.model.lm_head.weight"), "does not fit the base"),
        (broken({"trainable_token_indices": [3]}), "trainable_tokens_delta is missing"),
        (broken({}, rename="q_proj.lora_A.weight"), "not belong to a linear layer"),
        (
            lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
            r"holds only adapter_model.bin; .* weights_only=True\)",
        ),
        (broken({"alpha_pattern": {".*(a+)+$(a+)+x": 8, "(": 8}}), r"has the pattern '\('"),
        (broken({"target_modules": "query"}), "target_modules names no layer whose tensors"),
        (broken({"layers_to_transform": [1], "layers_pattern": 3}), "layers_pattern is 3; it must"),
        (broken({"target_modules": [3]}), "target_modules is .* a text or a list, each a text"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "safetensors is missing"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"1"), "truncated or broken"),
        (shutil.rmtree, "is not a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_folders(make: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(FOLDER, folder)
    make(folder)
    with pytest.raises(ConfigError, match=message):
        load(LLAMA, lora=folder)


@pytest.mark.parametrize(("key", "plain"), adapter_folder.UNUSED.items())
def test_settings_of_features_that_are_not_there(key: str, plain: Any, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(FOLDER, folder)
    for value in (None, plain):
        broken({key: value})(folder)
        load(LLAMA, lora=folder)
    broken({key: "lora_only" if key == "bias" else True})(folder)
    with pytest.raises(ConfigError, match=rf"{key} is .*, which is not supported; merge the"):
        load(LLAMA, lora=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.0}, "rank=2.0"),
        ({"rank": 2, "targets": ["query"]}, "'query'.*pass a list of some of down_proj, gate_proj"),
        ({"rank": 2, "targets": []}, r"targets=\[\]"),
        ({"rank": 2, "targets": "q_proj"}, "targets='q_proj'"),
        ({"rank": 2, "targets": 3}, "targets=3"),
        ({"rank": 2, "alpha": 0}, "alpha=0"),
        ({"rank": 2, "alpha": "8"}, "alpha='8'"),
        ({"rank": 2, "dropout": 1.0}, "dropout=1.0"),
        ({"rank": 2, "dropout": None}, "dropout=None"),
        ({"rank": 2, "seed": -1}, "seed=-1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small().add_adapter(**options)


def test_no_adapter_to_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no adapter"):
        small().save_adapter(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0}, {"rank": "x"}, {"rank": 2, "alpha": -1}, {"rank": 2, "dropout": 1},
        {"rank": 2, "targets": "query"}, {"rank": 2, "targets": ["query"]}, {"rank": 2, "init": ""},
        {"rank": 2, "modules": 3}, {"rank": 2, "modules": ["score"]}, {"rank": 2, "seed": 0.5},
        {"rank": 2, "tokens": [9999]}, {"rank": 2, "merge_into": "q9"},
    ],
    ids=str,
)  # fmt: skip
def test_errors_of_new_adapters_name_the_call(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"^add_adapter[:(]"):
        load(LLAMA).add_adapter(**options)


def test_matrices_of_two_kinds_are_no_rows_of_one() -> None:
    first = np.ones((2, 3), np.float32)
    for other in (first.astype(np.float16), np.ones((2, 4), np.float32)):
        arrays = [first, other]
        assert joined._rows_of_one(arrays) is arrays
    rows = joined._rows_of_one([first, 2 * first])
    assert np.shares_memory(rows[0].base, rows[1].base)
    assert np.array_equal(np.concatenate(rows), [[1, 1, 1]] * 2 + [[2, 2, 2]] * 2)
