"""Tokens and whole modules of an adapter, in peft's files; vocabularies that grow."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import AdamW, CheckpointConfig, losses
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create, load, merge
from unsloth_cupy.models.adapters.outer_weights import inner_modules
from unsloth_cupy.models.layers.head import head_weight
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator, Zero3

from ..conftest import FOLDER
from ..golden.golden import op_cases
from .peers import SIZES

LOSSES = FOLDER / "losses"
CASES = {case.name: case for case in op_cases(LOSSES, "tokens")}
ADAPTERS = [name for name, case in CASES.items() if "adapter" in case.params]
RESIZED = [name for name, case in CASES.items() if "vocab" in case.params]
TOKENS = np.random.default_rng(0).integers(3, 64, (4, 9))
IDS = [11, 19, 35, 46]
PREFIX = "base_model.model."
ROWS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
quiet = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing.:FutureWarning",  # in peft
    "ignore:Model has .tie_word_embeddings=True.:UserWarning",
    "ignore:Setting .save_embedding_layers.:UserWarning",
)


def adapted(base: str = "untied", dtype: str = "float32", **options: Any) -> Transformer:
    """Return a model with an adapter whose tensors have been moved."""
    model = load(LOSSES / "tokens" / base, dtype=dtype)
    model.add_adapter(2, **{"targets": ["q_proj", "down_proj"], "alpha": 3} | options)
    rng = np.random.default_rng(1)
    for array in model.trainable.values():
        array[...] = array + 0.3 * rng.standard_normal(array.shape)
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_values_gradients_and_merges_are_those_of_peft(
    name: str, dtype: str, tmp_path: Path
) -> None:
    case = CASES[name]
    base, folder = (LOSSES / case.params[each] for each in ("base", "adapter"))
    tokens, mask, labels = (case.inputs[n] for n in ("input_ids", "attention_mask", "labels"))
    model = load(base, dtype=dtype, lora=folder)
    for each in (model, None):
        if each is None:
            model.save_adapter(tmp_path / "again")
            each = load(base, dtype=dtype, lora=tmp_path / "again")  # noqa: PLW2901
        logits = each.logits(tokens, mask=mask) * mask[..., None]
        np.testing.assert_allclose(logits, case.outputs["logits"], atol=1e-4)
    assert (
        load_file(folder / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "again" / "adapter_model.safetensors").keys()
    )
    step = CheckpointConfig() if "tied" in name else None
    loss, gradients = model.loss_and_gradients(tokens, labels, mask=mask, checkpoint=step)
    assert abs(float(loss) - float(case.outputs["loss"])) < 1e-5
    assert gradients.keys() == case.grads.keys()
    for own, expected in case.grads.items():
        error = np.linalg.norm(gradients[own] - expected)
        assert error <= 1e-4 * max(np.linalg.norm(expected), 1e-30), own
    expected = model.logits(tokens)
    model.merge_adapter()
    np.testing.assert_allclose(model.table, case.outputs["merged_table"], atol=1e-6)
    head = head_weight(model.config, model.parameters)
    np.testing.assert_allclose(head, case.outputs["merged_head"], atol=1e-6)
    np.testing.assert_allclose(model.logits(tokens), expected, atol=1e-4)
    merge(folder, tmp_path / "merged", base=base, dtype=dtype)
    np.testing.assert_allclose(load(tmp_path / "merged").logits(tokens), expected, atol=1e-4)


@quiet
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("untied", {"tokens": IDS}),
        ("untied", {"tokens": {"embed_tokens": IDS, "lm_head": IDS[::-1]}}),
        ("untied", {"modules": ["lm_head", "embed_tokens"]}),
        ("tied", {"tokens": range(5, 9)}),
        ("tied", {"modules": ["embed_tokens"]}),
        ("untied", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
        ("tied", {"targets": ["q_proj", "embed_tokens"]}),
    ],
)
def test_peft_reads_what_is_saved(base: str, options: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="which reads the folder")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    model = adapted(base, **options)
    model.save_adapter(tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        LOSSES / "tokens" / base, dtype=torch.float32
    )
    peer = peft.PeftModel.from_pretrained(whole, tmp_path)
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=1e-4)


def randomly(peer: Any) -> None:
    """Move the trained weights of a model of peft."""
    import torch

    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if weight.requires_grad:
                draw = torch.Generator().manual_seed(len(name))
                weight[...] = weight + 0.3 * torch.randn(weight.shape, generator=draw)


@quiet
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    "modules",
    [["model.norm"], ["norm", "embed_tokens"], ["up_proj"], ["layers.1.mlp", "lm_head"]],
    ids=str,
)
def test_any_module_that_peft_saves_whole(
    modules: list[str], quantized: bool, tmp_path: Path
) -> None:
    """Its values, gradients and merges are those of peft, whatever the base has in its place."""
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    base, tokens = LOSSES / "tokens" / "untied", torch.from_numpy(TOKENS)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if quantized:  # what is left of the base is in nf4 here, and what it stands for there
        load(base, quantize="nf4", dtype="float32").save(tmp_path / "nf4")
        base = tmp_path / "nf4"
        dense = {n: weight_of(each) for n, each in load(base).parameters.items()}
        whole.load_state_dict({n: torch.from_numpy(each) for n, each in dense.items()})
    options = {"target_modules": ["q_proj"], "modules_to_save": modules, "r": 2}
    peer = peft.get_peft_model(whole, peft.LoraConfig(**options)).eval()
    randomly(peer)
    peer.save_pretrained(tmp_path / "adapter")
    output = peer(tokens, labels=tokens)
    output.loss.backward()
    expected = output.logits.detach().numpy()
    model = load(base, dtype="float32", lora=tmp_path / "adapter")
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=2e-4)
    _, gradients = model.loss_and_gradients(TOKENS, TOKENS)
    grads = {
        n.replace("modules_to_save.default.", "").replace("default.", ""): each.grad.numpy()
        for n, each in peer.named_parameters()
        if each.grad is not None
    }
    assert gradients.keys() == grads.keys()
    for name, gradient in grads.items():
        error = np.linalg.norm(gradients[name] - gradient)
        assert error <= 1e-4 * np.linalg.norm(gradient), name
    greedy = model.generate(TOKENS, max_new_tokens=3, stop=())
    model.save_adapter(tmp_path / "again")
    merge(tmp_path / "again", tmp_path / "merged", base=base, dtype="float32")
    model.merge_adapter()
    again = load(base, dtype="float32", lora=tmp_path / "again")
    for each in (model, load(tmp_path / "merged"), again):
        np.testing.assert_allclose(each.logits(TOKENS), expected, atol=2e-4)
    np.testing.assert_array_equal(greedy, model.generate(TOKENS, max_new_tokens=3, stop=()))


def weight_of(value: Any) -> Any:
    return value.dequantize() if isinstance(value, Quantized) else value


@quiet
@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"trainable_token_indices": {"embed_tokens": IDS, "lm_head": [3]}},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "up_proj"]},
    ],
    ids=str,
)
def test_a_head_that_peft_trained_apart_is_no_longer_tied(options: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    base, tokens = LOSSES / "tokens" / "tied", torch.from_numpy(TOKENS)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"target_modules": ["q_proj"], "lora_alpha": 3} | options
    peer = peft.get_peft_model(whole, peft.LoraConfig(r=2, **settings))
    randomly(peer)
    with torch.no_grad():
        expected = peer(tokens).logits.numpy()
    peer.save_pretrained(tmp_path / "adapter")
    model = load(base, dtype="float32", lora=tmp_path / "adapter")
    assert not model.config.tied
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=1e-4)
    merge(tmp_path / "adapter", tmp_path / "merged", base=base, dtype="float32")
    model.merge_adapter()
    model.save(tmp_path / "saved")
    for folder in ("merged", "saved"):
        again = load(tmp_path / folder)
        assert not again.config.tied
        np.testing.assert_allclose(again.logits(TOKENS), expected, atol=1e-4)


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_the_table_is_neither_copied_nor_changed(base: str) -> None:
    values = SIZES | {"model_type": "llama", "vocab_size": 20_000, "num_hidden_layers": 1}
    model = create(values | {"tie_word_embeddings": base == "tied"}, seed=0)
    ids = [*IDS, 19_999]
    tokens = {"embed_tokens": ids} | ({} if base == "tied" else {"lm_head": ids})
    model.add_adapter(2, tokens=tokens)
    table, size = model.table.copy(), model.table.nbytes
    optimizer = AdamW(model.trainable, weight_decay=0.1)
    state = sum(array.nbytes for array in optimizer.state().values() if hasattr(array, "nbytes"))
    assert state < size / 10
    rows = np.array([[5, 11, 19_999, 19]])
    model.loss_and_gradients(rows, rows)
    tracemalloc.start()
    try:
        _, gradients = model.loss_and_gradients(rows, rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2
    assert gradients[ROWS].shape == (5, 32)
    assert gradients[ROWS].any(axis=1)[[0, 4]].all()
    optimizer.step(gradients)
    np.testing.assert_array_equal(model.table, table)
    before = model.base.logits(rows)
    model.adapter = None
    np.testing.assert_array_equal(model.logits(rows), before)


TARGETS = ["q_proj", "embed_tokens"]


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_low_rank_tables_have_gradients_of_differences(base: str, tmp_path: Path) -> None:
    targets = [*TARGETS, "lm_head"] if base == "untied" else TARGETS
    model = adapted(base, "float64", targets=targets)
    labels = np.where(TOKENS % 7 == 3, -100, TOKENS)
    for function in (
        lambda model: model.loss(TOKENS, labels),
        lambda model: model.log_probs(TOKENS, labels).entropy.mean(),
        lambda model: model.logits(TOKENS).mean(),
    ):
        _, gradients = model.value_and_gradients(function)
        for name, array in model.trainable.items():
            if ".layers." in name:
                continue
            where = (1, 0) if array.shape[0] == 2 else (int(labels[0, 2]) % 32, 1)
            values = []
            for sign in (1, -1):
                array[where] += sign * 1e-3
                values.append(float(function(model)))
                array[where] -= sign * 1e-3
            slope = (values[0] - values[1]) / 2e-3
            assert gradients[name][where] == pytest.approx(slope, rel=1e-4, abs=1e-7), name
    expected = model.logits(TOKENS)
    model.save_adapter(tmp_path / "adapter")
    again = load(LOSSES / "tokens" / base, dtype="float64", lora=tmp_path / "adapter")
    np.testing.assert_allclose(again.logits(TOKENS), expected, atol=1e-6)
    again.merge_adapter()
    np.testing.assert_allclose(again.logits(TOKENS), expected, atol=1e-6)


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_every_way_through_the_model_hears_the_rows(base: str) -> None:
    model = adapted(base, tokens=IDS, modules=[] if base == "tied" else ["lm_head"])
    tokens, labels = TOKENS.copy(), np.where(TOKENS % 7 == 3, -100, TOKENS)
    tokens[:, 2] = 19
    reference = model.base.log_probs(tokens, labels).log_probs
    merged = adapted(base, tokens=IDS, modules=[] if base == "tied" else ["lm_head"])
    merged.merge_adapter()
    for name in ("log_probs", "entropy"):
        actual, expected = (getattr(m.log_probs(tokens, labels), name) for m in (model, merged))
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    options: Any = {"max_new_tokens": 6, "stop": ()}
    actual, expected = (m.generate(tokens[:, :4], **options) for m in (model, merged))
    np.testing.assert_array_equal(actual, expected)
    offsets = np.array([0, 9, 20, 36])
    assert (
        abs(
            model.loss(tokens, labels, offsets=offsets)
            - merged.loss(tokens, labels, offsets=offsets)
        )
        < 1e-5
    )
    hidden = np.ones(labels.shape, bool)
    hidden[:, -1] = False

    def preference(each: Any) -> Any:
        log_probs = each.log_probs(tokens, labels).log_probs
        return losses.preference(log_probs, hidden, reference) + each.logits(tokens).mean()

    value, gradients = model.value_and_gradients(preference)
    name, step = ROWS, 1e-3
    array, where = model.trainable[name], (1, 3)
    values = []
    for sign in (1, -1):
        array[where] += sign * step
        values.append(float(preference(model)))
        array[where] -= sign * step
    slope = (values[0] - values[1]) / (2 * step)
    assert abs(float(value) - float(preference(model))) < 1e-5
    assert gradients[name][where] == pytest.approx(slope, rel=2e-2, abs=1e-3)  # of float32 sums


def test_a_scaled_and_capped_model_in_16_bits_hears_them_too() -> None:
    values = SIZES | {"model_type": "gemma2", "query_pre_attn_scalar": 8, "head_dim": 8}
    values |= {"final_logit_softcapping": 5.0}
    tokens = TOKENS.copy()
    wide, narrow = (create(values, seed=0, dtype=kind) for kind in ("float32", "bfloat16"))
    for model in (wide, narrow):
        model.add_adapter(2, tokens=IDS)
        model.trainable[ROWS][...] *= 1.5
        tokens[:, 3] = 35
    assert narrow.trainable[ROWS].dtype == np.float32
    (loss, expected), (rounded, actual) = (
        m.loss_and_gradients(tokens, tokens) for m in (wide, narrow)
    )
    assert rounded == pytest.approx(float(loss), rel=0.05)  # of bfloat16
    error = np.linalg.norm(actual[ROWS] - expected[ROWS]) / np.linalg.norm(expected[ROWS])
    assert error < 0.1


def test_zero3_gathers_the_table_under_the_rows() -> None:
    plain, divided = (adapted("tied", tokens=IDS) for _ in range(2))
    ranks = Zero3(divided, SingleCommunicator())
    loss, expected = plain.loss_and_gradients(TOKENS, TOKENS)
    value, actual = ranks.loss_and_gradients(TOKENS, TOKENS)
    assert float(value) == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(actual[ROWS], expected[ROWS], atol=1e-6)
    with pytest.raises(ConfigError, match=r"resize: ranks divide .* before the model is divided"):
        divided.resize(80)
    divided.adapter = None
    with pytest.raises(ConfigError, match=r"add_adapter\(tokens=\): ranks divide"):
        divided.add_adapter(2, tokens=IDS)
    with pytest.raises(ConfigError, match=r"add_adapter\(targets=\): ranks divide"):
        divided.add_adapter(2, targets=TARGETS)
    with pytest.raises(ConfigError, match=r"trains model\.embed_tokens, of which ranks store part"):
        load(
            LOSSES / "tokens" / "tied", lora=LOSSES / "tokens" / "rows_tied",
            communicator=SingleCommunicator(),
        )  # fmt: skip


@pytest.mark.parametrize("name", RESIZED)
def test_a_vocabulary_grows_as_in_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = load(LOSSES / case.params["base"], dtype="float32")
    tied = model.config.tied
    model.resize(case.params["vocab"], multiple=case.params.get("multiple", 1))
    size = len(case.outputs["table"])
    assert model.config.vocab == size
    assert ("lm_head.weight" in model.parameters) != tied
    assert model.logits(case.inputs["input_ids"]).shape[-1] == size
    for actual, expected in (
        (model.table, case.outputs["table"]),
        (head_weight(model.config, model.parameters), case.outputs["head"]),
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-4)  # theirs are drawn about the mean
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == size
    again = load(tmp_path)
    assert again.config.tied == tied
    tokens = np.array([[1, 5, size - 1]])
    np.testing.assert_array_equal(again.logits(tokens), model.logits(tokens))
    again.add_adapter(2, tokens=[size - 1])
    with pytest.raises(ConfigError, match=r"rows or tables of its own; call merge_adapter\(\)"):
        again.resize(size + 1)
    again.merge_adapter()
    again.resize(50)
    np.testing.assert_array_equal(again.table, model.table[:50])
    with pytest.raises(ConfigError, match="token 2 ends texts or pads them; pass 3 or more"):
        again.resize(2)


def test_convolutions_of_an_older_transformers_have_a_cure() -> None:
    """It had q_conv1d, k_conv1d and v_conv1d of hybrids; today they are one module."""
    config = parse(SIZES | {"model_type": "olmo_hybrid"})
    for listed in ("q_conv1d", "model.layers.0.linear_attn.v_conv1d"):
        with pytest.raises(ConfigError, match="now a part of conv1d; merge the adapter with"):
            inner_modules("f", config, {"modules_to_save": [listed]})
    assert inner_modules("f", config, {"modules_to_save": ["conv1d"]}) != set()
    with pytest.raises(ConfigError, match="no module of this model ends with it; pass the model"):
        inner_modules("f", config, {"modules_to_save": ["conv"]})


HEAD = f"{PREFIX}lm_head.weight"


@pytest.mark.parametrize(
    ("base", "name", "settings", "change", "message"),
    [
        ("untied", "rows_untied", {}, {ROWS: lambda rows: None}, "tokens_delta is missing"),
        ("untied", "rows_untied", {}, {ROWS: lambda rows: rows[:3]}, r"it must be floats, \(4"),
        ("untied", "rows_untied", {"modules_to_save": ["norm"]}, {}, "norm.weight is missing"),
        ("untied", "rows_untied", {"modules_to_save": ["pooler"]}, {}, "no module of this model"),
        ("untied", "rows_untied", {"modules_to_save": ["embed_tokens"]}, {}, "some of its rows"),
        ("untied", "rows_untied", {"peft_type": "VERA"}, {}, "'VERA'; it must be LORA: merge the"),
        ("tied", "tied_table_tied", {}, {HEAD: lambda rows: rows * 2}, "lm_head is not equal to"),
        *(
            ("untied", "rows_untied", {"trainable_token_indices": listed}, {}, message)
            for listed, message in (
                ([3, 3, 4, 5], "token 3 is listed twice"),
                ([3, 4, 5, 64], r"token 64 is outside .* resize\(vocab\)"),
                ({"norm": [3]}, "'norm' is not a table of tokens"),
            )
        ),
    ],
)
def test_files_that_contradict_themselves(
    base: str, name: str, settings: Any, change: Any, message: str, tmp_path: Path
) -> None:
    source, folder = LOSSES / "tokens" / name, tmp_path / "adapter"
    shutil.copytree(source, folder)
    values = json.loads((source / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = load_file(source / "adapter_model.safetensors")
    tensors |= {own: function(tensors[own]) for own, function in change.items()}
    kept = {own: array for own, array in tensors.items() if array is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(LOSSES / "tokens" / base, lora=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 5}, "5 is not a list of token ids"),
        ({"tokens": [1.5]}, "not a list of token ids"),
        ({"tokens": "ab"}, "not a list of token ids"),
        ({"tokens": [1, 1]}, "token 1 is listed twice"),
        ({"tokens": [64]}, "token 64 is outside the vocabulary of 64"),
        ({"tokens": [1], "modules": ["embed_tokens"]}, "trained whole, and also some of its rows"),
        ({"modules": ["score"]}, "only classifiers have it: load the folder with head="),
        ({"modules": "lm_head"}, "pass a list of embed_tokens, lm_head, score"),
        ({"modules": ["lm_head"], "base": "tied"}, "it is tied to embed_tokens: name embed_tokens"),
        ({"targets": ["lm_head"], "base": "tied"}, "it is tied to embed_tokens: name embed_tokens"),
        ({"targets": ["lm_head"], "modules": ["lm_head"]}, "also in modules or tokens; choose one"),
        ({"targets": TARGETS, "dropout": 0.1}, "embed_tokens supports neither DoRA nor dropout"),
    ],
)
def test_what_an_adapter_cannot_train(options: dict[str, Any], message: str) -> None:
    model = load(LOSSES / "tokens" / options.pop("base", "untied"))
    with pytest.raises(ConfigError, match=message):
        model.add_adapter(2, **options)
    with pytest.raises(ConfigError, match=r"resize\(0, multiple=1\)"):
        model.resize(0)


@quiet
@pytest.mark.parametrize(
    ("base", "options"),
    [
        *(
            (base, options)
            for base in ("tied", "untied")
            for options in (
                {},
                {"trainable_token_indices": [68, 3]},
                {"modules_to_save": ["lm_head", "embed_tokens"]},
            )
        ),
        ("tied", {"modules_to_save": ["lm_head"]}),
        ("tied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("tied", {"target_modules": ["q_proj", "lm_head"]}),
    ],
    ids=str,
)
def test_a_vocabulary_that_grew_for_an_adapter_comes_with_it(
    base: str, options: Any, tmp_path: Path
) -> None:
    """Beside the adapter, peft writes the base's tables if config.json there has other sizes."""
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    folder, tokens = LOSSES / "tokens" / base, np.where(TOKENS % 5 == 0, 68, TOKENS)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.resize_token_embeddings(70)
    with torch.no_grad():
        alone = whole(torch.from_numpy(tokens)).logits.numpy()
    options = {"target_modules": ["q_proj"]} | options
    peer = peft.get_peft_model(whole, peft.LoraConfig(r=2, **options))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (each for each in peer.parameters() if each.requires_grad):
            weight[...] = weight + 0.3 * torch.randn(weight.shape, generator=draw)
        expected = peer(torch.from_numpy(tokens)).logits.numpy()
    peer.save_pretrained(tmp_path / "adapter")
    model = load(folder, dtype="float32", lora=tmp_path / "adapter")
    assert model.config.vocab == 70
    np.testing.assert_allclose(model.logits(tokens), expected, atol=1e-4)
    np.testing.assert_allclose(model.base.logits(tokens), alone, atol=1e-4)
    merge(tmp_path / "adapter", tmp_path / "merged", base=folder, dtype="float32")
    model.merge_adapter()
    model.save(tmp_path / "saved")
    for again in (load(tmp_path / "merged"), load(tmp_path / "saved")):
        np.testing.assert_allclose(again.logits(tokens), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("tied", {"tokens": [64, 3]}),
        ("tied", {"modules": ["embed_tokens"]}),
        ("tied", {"targets": ["q_proj", "embed_tokens"]}),
        ("untied", {}),
        ("untied", {"tokens": {"embed_tokens": [64, 3], "lm_head": [64]}}),
        ("untied", {"modules": ["lm_head"]}),
        ("untied", {"targets": ["embed_tokens", "lm_head"]}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
def test_an_adapter_of_a_vocabulary_that_grew_is_whole(
    base: str, options: Any, tmp_path: Path
) -> None:
    """Its file holds the tables, for this library, for peft, and when it is saved again."""
    folder, tokens = LOSSES / "tokens" / base, np.where(TOKENS % 5 == 0, 64, TOKENS)
    model = load(folder, dtype="float32")
    model.resize(65)
    model.add_adapter(2, **options)
    draw = np.random.default_rng(0)
    for array in model.trainable.values():
        array[...] = array + 0.3 * draw.standard_normal(array.shape)
    expected = model.logits(tokens)
    model.save_adapter(tmp_path / "first")
    load(folder, dtype="float32", lora=tmp_path / "first").save_adapter(tmp_path / "second")
    again = load(folder, dtype="float32", lora=tmp_path / "second")
    np.testing.assert_array_equal(again.logits(tokens), expected)
    report = merge(tmp_path / "second", tmp_path / "merged", base=folder, dtype="float32")
    assert "images" not in str(report)
    np.testing.assert_allclose(load(tmp_path / "merged").logits(tokens), expected, atol=1e-4)
    peft = pytest.importorskip("peft", reason="which reads the file")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.resize_token_embeddings(65, mean_resizing=False)
    peer = peft.PeftModel.from_pretrained(whole, tmp_path / "second")
    with torch.no_grad():
        actual = peer(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_rows_under_low_rank_weights_of_a_tied_head_are_refused(tmp_path: Path) -> None:
    """peft adds these to the changed rows, which a head with a table of its own would lack."""
    folder = LOSSES / "tokens" / "tied"
    adapted("tied", tokens=[3]).save_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    pair = {"A": np.ones((2, 32), np.float32), "B": np.ones((64, 2), np.float32)}
    tensors |= {f"{PREFIX}lm_head.lora_{part}.weight": each for part, each in pair.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="lm_head has low-rank weights, and is tied to a table"):
        load(folder, lora=tmp_path)


@quiet
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_one_table_of_two_that_grew_is_refused(target: str, tmp_path: Path) -> None:
    """peft writes the table that it trains, and loses the rows of the other."""
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    folder = LOSSES / "tokens" / "untied"
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.resize_token_embeddings(70)
    whole.save_pretrained(tmp_path / "resized")
    peer = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=["q_proj", target]))
    peer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=rf"{target}.*weight of 70 rows, the base 64; peft"):
        load(folder, lora=tmp_path / "adapter")
    model = load(tmp_path / "resized", dtype="float32", lora=tmp_path / "adapter")
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=1e-4)


def test_no_tokens_are_none(tmp_path: Path) -> None:
    """Ranks that divide a model refuse tokens, and not an empty list or dict of them."""
    create(SIZES | {"model_type": "llama"}, seed=0).save(tmp_path)
    for empty in ((), {}, np.array([], np.int64)):
        model = load(tmp_path, communicator=SingleCommunicator())
        model.add_adapter(2, tokens=empty, modules=[])
        assert not model.adapter.outer
    model = load(tmp_path, communicator=SingleCommunicator())
    with pytest.raises(ConfigError, match=r"add_adapter\(tokens=\): ranks divide"):
        model.add_adapter(2, tokens={"embed_tokens": [3]})
