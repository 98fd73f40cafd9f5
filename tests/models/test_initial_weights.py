"""Adapters that begin with a part of the base, which peft takes out of it: PiSSA and OLoRA."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.parallel import SingleCommunicator

from .exported import byte_level, make, write_tokenizer

TOKENS = np.arange(3, 15)[None]


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with:UserWarning")  # in peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
@pytest.mark.parametrize(
    ("kind", "options"),
    [("pissa", {}), ("olora", {"use_rslora": True}), ("pissa", {"use_dora": True})],
    ids=str,
)
def test_parts_of_the_base_that_an_adapter_began_with(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """peft takes them out of the base again whenever it loads the folder."""
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    make(tmp_path / "base", "llama")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, init_lora_weights=kind, target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.mlp.down_proj": 2}, alpha_pattern={"q_proj": 7},
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config)
    draw = np.random.default_rng(1)
    with torch.no_grad():
        for name, array in theirs.named_parameters():
            if "lora_" in name:
                array.add_(torch.from_numpy(draw.normal(0, 0.1, array.shape)).float())
    theirs.save_pretrained(tmp_path / "adapter")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    with torch.no_grad():
        expected = again(torch.from_numpy(TOKENS)).logits.numpy()
    model = models.load(tmp_path / "base", lora=tmp_path / "adapter")
    np.testing.assert_allclose(
        model.logits(TOKENS), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )
    models.merge(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    merged = models.load(tmp_path / "merged").logits(TOKENS)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    model.save_adapter(tmp_path / "plain")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    back = peft.PeftModel.from_pretrained(back, tmp_path / "plain")
    with torch.no_grad():
        actual = back(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    with pytest.raises(ConfigError, match=rf"{kind} cannot initialize .*: its weight is quantized"):
        models.load(tmp_path / "base", lora=tmp_path / "adapter", quantize="nf4")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
@pytest.mark.parametrize(("kind", "dora"), [("pissa", False), ("olora", False), ("pissa", True)])
def test_beginning_as_peft_does(kind: str, dora: bool, tmp_path: Path) -> None:
    """Gradients differ in signs alone, of vectors whose products do not."""
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose models peft adapts")
    make(tmp_path / "base", "llama")
    targets = ["q_proj", "down_proj"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, init_lora_weights=kind, target_modules=targets, use_dora=dora,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config)
    labels = torch.from_numpy(TOKENS)
    theirs(labels, labels=labels).loss.backward()
    model = models.load(tmp_path / "base")
    model.add_adapter(3, alpha=5, targets=targets, init=kind, dora=dora)
    _, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    names = {name.replace(".default", ""): each for name, each in theirs.named_parameters()}
    for name, gradient in gradients.items():
        expected = np.abs(names[name.replace("vector", "vector.weight")].grad.numpy())
        error = np.abs(np.abs(gradient) - expected).max()
        assert error <= 2e-4 * expected.max(), name


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_a_folder_of_peft_by_hand(kind: str, tmp_path: Path) -> None:
    """The best approximation of rank 3 leaves the weight, and so does the span of 3 columns."""
    make(tmp_path / "base", "llama")
    model = models.load(tmp_path / "base")
    model.add_adapter(3, alpha=5, targets=["up_proj"], base=str(tmp_path / "base"))
    own = model.adapter.parameters
    for name, array in own.items():
        if "lora_B" in name:
            array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
    model.save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    written = {"olora": "OLoRA"}.get(kind, kind)  # in any case, as in peft
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": written}))
    models.merge(tmp_path / "adapter", tmp_path / "merged")
    merged = models.load(tmp_path / "merged").parameters
    for module in model.adapter.scales:
        weight = model.parameters[f"{module}.weight"].astype("f8")
        a, b = (own[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        q, r = np.linalg.qr(weight)
        taken = 5 / 3 * q[:, :3] @ r[:3]
        if kind == "pissa":
            u, sizes, v = np.linalg.svd(weight, full_matrices=False)
            taken = u[:, :3] * sizes[:3] @ v[:3]
        expected = weight - taken + 5 / 3 * b @ a
        np.testing.assert_allclose(merged[f"{module}.weight"], expected, rtol=0, atol=1e-5)
    text = tmp_path / "text.txt"
    text.write_text("the theory in the end is that the inn is thin. " * 60)
    alone = {"communicator": SingleCommunicator(), "lora": tmp_path / "adapter"}
    with pytest.raises(ConfigError, match=f"'{kind}' changed; load it into the whole dense model"):
        models.load(tmp_path / "base", **alone)
    with pytest.raises(ConfigError, match=f"'{kind}' changed; load it into the whole dense model"):
        Trainer(tmp_path / "adapter", text, Settings(steps=1, out=tmp_path / "run")).train()


@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_done_with_them(kind: str, dtype: str, tmp_path: Path) -> None:
    make(tmp_path / "base", "llama", dtype=dtype)
    model = models.load(tmp_path / "base")
    before = model.logits(TOKENS).astype("f4")
    model.add_adapter(3, alpha=5, init=kind)
    near = {"rtol": 0, "atol": (1e-4 if dtype == "float32" else 0.03) * np.abs(before).max()}
    np.testing.assert_allclose(model.logits(TOKENS).astype("f4"), before, **near)
    first = next(name for name in model.trainable if name.endswith("lora_A.weight"))
    assert len(model.trainable[first]) == 3
    optimizer, losses = AdamW(model.trainable, lr=0.01), []
    for _ in range(3):
        loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
        losses.append(float(loss))
        optimizer.step(gradients)
    assert losses[2] < losses[0]
    trained = model.logits(TOKENS).astype("f4")
    assert np.abs(trained - before).max() > 2 * near["atol"]
    np.testing.assert_array_equal(model.base.logits(TOKENS).astype("f4"), before)
    written = model.generate(TOKENS, max_new_tokens=4)
    model.save_adapter(tmp_path / "adapter")
    facts = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (facts["r"], facts["lora_alpha"], facts["init_lora_weights"]) == (6, 10, True)
    again = models.load(tmp_path / "base", lora=tmp_path / "adapter")
    np.testing.assert_allclose(again.logits(TOKENS).astype("f4"), trained, **near)
    np.testing.assert_array_equal(again.generate(TOKENS, max_new_tokens=4), written)
    models.merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    merged = models.load(tmp_path / "merged").logits(TOKENS)
    exact = models.load(tmp_path / "base", lora=tmp_path / "adapter", dtype="float32")
    limit = 1e-4 * np.abs(before).max()  # float32, whatever the dtype of the run
    np.testing.assert_allclose(merged, exact.logits(TOKENS), rtol=0, atol=limit)
    if dtype == "float32":
        model.merge_adapter()
        np.testing.assert_allclose(model.logits(TOKENS), trained, **near)


def test_what_quantization_lost(tmp_path: Path) -> None:
    """LoftQ begins nearer to the dense model than the quantized one is."""
    make(tmp_path / "base", "llama")
    dense = models.load(tmp_path / "base")
    model = models.load(tmp_path / "base", quantize="nf4")
    name = "model.layers.1.mlp.up_proj"
    weight: Any = model.parameters[f"{name}.weight"]
    assert not hasattr(model.parameters["model.layers.1.self_attn.k_proj.weight"], "dequantize")
    lost = dense.parameters[f"{name}.weight"] - weight.dequantize()
    model.add_adapter(4, alpha=3, init="loftq")
    own = model.adapter.parameters
    a, b = (own[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    u, s, v = np.linalg.svd(lost, full_matrices=False)
    np.testing.assert_allclose(0.75 * b @ a, u[:, :4] * s[:4] @ v[:4], atol=1e-5 * s[0])
    assert not model.adapter.initial
    model.save_adapter(tmp_path / "adapter")
    again = models.load(tmp_path / "base", quantize="nf4", lora=tmp_path / "adapter")
    np.testing.assert_array_equal(again.logits(TOKENS), model.logits(TOKENS))
    models.load(tmp_path / "base", quantize="nf4").save(tmp_path / "four")
    four = models.load(tmp_path / "four")
    with pytest.raises(ConfigError, match=r"q_proj.weight is quantized; load a dense folder with"):
        four.add_adapter(4, init="loftq")


def test_what_has_no_such_beginning(tmp_path: Path) -> None:
    make(tmp_path / "base", "llama")
    model = models.load(tmp_path / "base")
    for options, problem in (
        ({"init": "eva"}, "init='eva'"),
        ({"init": "pissa", "targets": ["lm_head"]}, "lm_head, which is outside of the blocks"),
        ({"init": "olora", "rank": 70}, r"the rank is 70, and the weight is \(.*\); lower it"),
        ({"init": "loftq"}, "this model has no quantized weight; load a dense folder"),
        ({"init": "loftq", "dora": True}, "does not support DoRA"),
    ):
        with pytest.raises(ConfigError, match=problem):
            model.add_adapter(**{"rank": 2, **options})
        assert model.adapter is None
    four = models.load(tmp_path / "base", quantize="nf4")
    with pytest.raises(ConfigError, match="its weight is quantized"):
        four.add_adapter(2, init="pissa")
    model.add_adapter(2, init="pissa")
    write_tokenizer(tmp_path / "base", byte_level(model.config.vocab))
    (tmp_path / "text.txt").write_text("the theory in the end is that the inn is thin. " * 60)
    settings = Settings(steps=1, tokens=16, out=tmp_path / "run")
    with pytest.raises(
        ConfigError, match="save it with save_adapter as a plain adapter of twice the"
    ):
        Trainer(model, tmp_path / "text.txt", settings).train()
