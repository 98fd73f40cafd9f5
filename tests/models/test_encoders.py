"""Encoders: BERT, ModernBERT and both EmbeddingGemmas, against what transformers computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.losses import contrastive
from unsloth_cupy.models import load
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator

from ..golden.golden import ModelCase, model_case
from ..harness.tracked import tracked
from .test_golden import in_file

ROOT = Path(__file__).parent.parent / "golden" / "encoders"
FAMILIES = [path.parent.name for path in tracked("tests/golden/encoders/*/config.json")]


def case_of(family: str) -> tuple[ModelCase, Any]:
    return model_case(ROOT / family), load(ROOT / family, dtype="float32")


@pytest.mark.parametrize("other", ["", "other_"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_embeddings(family: str, other: str) -> None:
    case, model = case_of(family)
    tokens, mask = (case.data[f"{other}{name}"] for name in ("input_ids", "attention_mask"))
    real = mask == 1
    states = model.hidden(model.entered(model.parameters), tokens, mask=mask)
    assert np.abs(states - case.data[f"{other}states"])[real].max() < 1e-4
    for pooling in ("mean", "cls", "last"):
        actual = model.embeddings(tokens, mask=mask, pooling=pooling)
        expected = case.data[f"{other}embeddings_{pooling}"]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5, err_msg=pooling)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str) -> None:
    case, model = case_of(family)
    data = case.data

    def loss(model: Any) -> Any:
        vectors = [
            model.embeddings(data[f"{each}input_ids"], mask=data[f"{each}attention_mask"])
            for each in ("", "other_")
        ]
        return contrastive(*vectors, scale=float(data["scale"]))

    value, gradients = model.value_and_gradients(loss)
    assert abs(value - data["loss"]) < 1e-5
    own = in_file(model, gradients)
    vanishing = {n for n, norm in data.items() if n.startswith("gradnorm/") and norm < 1e-7}
    assert vanishing == {
        n for n in data if n.startswith("gradnorm/") and n.endswith("self.key.bias")
    }
    kept = {name: array for name, array in data.items() if name not in vanishing}
    assert replace(case, data=kept).compare_gradients(own) < 1e-4
    for name in vanishing:
        assert np.linalg.norm(own[name.removeprefix("gradnorm/")]) < 1e-6
    assert not any("pooler" in name for name in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_has_the_names_of_the_file(family: str, tmp_path: Path) -> None:
    case, model = case_of(family)
    model.save(tmp_path)
    expected, actual = (
        load_file(folder / "model.safetensors") for folder in (ROOT / family, tmp_path)
    )
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)
    again, tokens = load(tmp_path), case.data["input_ids"]
    np.testing.assert_array_equal(again.embeddings(tokens), model.embeddings(tokens))
    transformers = pytest.importorskip("transformers", reason="reads the folder")
    import torch

    peer = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        states = peer(torch.tensor(tokens)).last_hidden_state.numpy()
    own = model.hidden(model.entered(model.parameters), tokens)
    np.testing.assert_allclose(own, states, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_and_padding(family: str) -> None:
    case, model = case_of(family)
    tokens = case.data["input_ids"][:2]
    expected = model.embeddings(tokens)
    offsets = np.array([0, tokens.shape[1], tokens.size])
    packed = model.embeddings(tokens.reshape(1, -1), offsets=offsets)
    np.testing.assert_allclose(packed, expected, rtol=0, atol=1e-6)
    left = np.concatenate([np.zeros((2, 3), tokens.dtype), tokens], axis=1)
    mask = np.arange(left.shape[1])[None] >= np.array([[3], [3]])
    np.testing.assert_allclose(model.embeddings(left, mask=mask), expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_quantized_weights(family: str, tmp_path: Path) -> None:
    """An adapter has transformers' names, so that peft reads it."""
    case, model = case_of(family)
    tokens = case.data["input_ids"]
    model.add_adapter(2, seed=0)
    rng = np.random.default_rng(0)
    for array in model.adapter.parameters.values():
        array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
    expected = model.embeddings(tokens)
    model.save_adapter(tmp_path)
    read = load(ROOT / family, lora=tmp_path, dtype="float32")
    np.testing.assert_array_equal(read.embeddings(tokens), expected)
    read.merge_adapter()
    np.testing.assert_allclose(read.embeddings(tokens), expected, rtol=0, atol=1e-5)
    quantized = load(ROOT / family, dtype="float32")
    models.quantize(quantized, "nf4", least=0)
    assert any(isinstance(each, Quantized) for each in quantized.parameters.values())
    quantized.add_adapter(2, seed=0)
    value, gradients = quantized.value_and_gradients(
        lambda model: contrastive(*[model.embeddings(tokens)] * 2)
    )
    assert np.isfinite(value)
    assert all(np.isfinite(each).all() for each in gradients.values())
    transformers = pytest.importorskip("transformers", reason="reads the folder")
    peft = pytest.importorskip("peft", reason="reads the adapter")
    import torch

    peer = transformers.AutoModel.from_pretrained(ROOT / family)
    peer = peft.PeftModel.from_pretrained(peer, tmp_path)
    with torch.no_grad():
        states = peer(input_ids=torch.tensor(tokens)).last_hidden_state.mean(dim=1)
    states = torch.nn.functional.normalize(states, dim=-1).numpy()
    np.testing.assert_allclose(expected, states, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_encoder_does_not_do_is_refused(family: str) -> None:
    case, model = case_of(family)
    tokens, two = case.data["input_ids"], SingleCommunicator()
    with pytest.raises(ConfigError, match="is an encoder; pass a language model"):
        model.generate(tokens, max_new_tokens=2)
    with pytest.raises(
        ConfigError, match="is an encoder, and architectures names the head of a la"
    ):
        load(ROOT / family, head="causal_lm")
    two.size = 2
    with pytest.raises(ConfigError, match="ranks do not divide"):
        load(ROOT / family, communicator=two)
    model.context = two
    with pytest.raises(ConfigError, match="ranks do not divide the tokens of a"):
        model.embeddings(tokens)


def test_rows_beyond_the_table_of_positions() -> None:
    model = load(ROOT / "bert", dtype="float32")
    with pytest.raises(
        ConfigError, match="65 tokens, and the table has 64 positions; cut the text"
    ):
        model.embeddings(np.ones((1, 65), np.int64))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder is true"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention=True: not read"),
        ("modernbert", {"layer_types": ["conv"] * 4}, "layer_types must be a list .* 'sliding_a"),
        ("embedding_gemma", {"architectures": ["Gemma3ForCausalLM"]}, "head of a language model"),
        ("embedding_gemma2", {"sliding_window_pattern": 0, "layer_types": None}, "must be 1 or "),
        ("embedding_gemma2", {"embedding_dim": 0}, "embedding_dim is 0; it must be an integer"),
    ],
)
def test_configs_that_are_refused(family: str, change: dict[str, Any], message: str) -> None:
    config = json.loads((ROOT / family / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        parse(config | change)


def test_keys_of_embedding_gemma2(tmp_path: Path) -> None:
    """Sizes of full layers in both forms; inside of a model of images, whose adapter says so."""
    config = json.loads((ROOT / "embedding_gemma2" / "config.json").read_text())
    expected = parse(config)
    assert (expected.window, expected.layer_inputs, expected.state) == (6, (0, 8), 32)
    assert [expected.heads_of(layer) for layer in range(2)] == [(2, 16), (1, 24)]
    released = {k: v for k, v in config.items() if k not in ("layer_types", "per_layer_config")}
    released |= {"global_head_dim": 24, "sliding_window_pattern": 2}
    assert parse(released) == expected
    assert parse({**released, "num_global_key_value_heads": 2}).full_heads == (2, 24)
    outer = {"model_type": "embedding_gemma2", "architectures": ["EmbeddingGemma2Model"]}
    model = models.create(outer | {"text_config": config}, seed=0)
    assert replace(model.config, body="") == expected
    model.add_adapter(2, targets=["q_proj"])
    model.save_adapter(tmp_path / "a")
    names = {*load_file(tmp_path / "a" / "adapter_model.safetensors")}
    prefix = "base_model.model.language_model.layers.0.self_attn.q_proj."
    assert {f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"} <= names
    model.adapter = None
    model.save(tmp_path / "m")
    saved = {*load_file(tmp_path / "m" / "model.safetensors")}
    assert saved == {*load_file(ROOT / "embedding_gemma2" / "model.safetensors")}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == (
        "embedding_gemma2_text"
    )


def test_older_keys_of_modernbert() -> None:
    """One theta for each kind of layer, and every n-th layer with full attention."""
    config = json.loads((ROOT / "modernbert" / "config.json").read_text())
    expected = parse(config)
    assert (expected.window, expected.ropes["sliding_attention"].base) == (3, 10_000.0)
    older = {k: v for k, v in config.items() if k not in ("layer_types", "rope_parameters")}
    older |= {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    assert parse(older | {"global_attn_every_n_layers": 3}) == expected
    changed = parse(older | {"global_rope_theta": 5e4, "local_rope_theta": 7e3})
    assert {kind: rope.base for kind, rope in changed.ropes.items()} == {
        "full_attention": 5e4,
        "sliding_attention": 7e3,
    }


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("bert", {"problem_type": "single_label_classification"}),
        ("modernbert", {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
        ("modernbert", {"attention_bias": True, "mlp_bias": True, "local_attention": 6}),
    ],
)
def test_classifiers(kind: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Logits, loss and gradients of transformers' class, and a new head of a bare encoder."""
    transformers = pytest.importorskip("transformers", reason="computes the references")
    import torch

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 97}
    own = {**sizes, "num_attention_heads": 4, "num_labels": 3, **change}
    own |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **own)
    torch.manual_seed(0)
    peer = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    peer.save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m")
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(3, 97, (4, 9)), np.array([0, 2, 1, 1])
    mask = np.arange(9) < np.array([[9], [5], [7], [9]])
    out = peer(torch.tensor(tokens), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    logits = model.logits(tokens, mask=mask)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), rtol=0, atol=1e-5)
    loss, gradients = model.loss_and_gradients(tokens, labels, mask=mask)
    assert abs(loss - out.loss.item()) < 1e-5
    out.loss.backward()
    expected = {n: p.grad.numpy() for n, p in peer.named_parameters() if p.grad is not None}
    actual = in_file(model, gradients)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith("self.key.bias"):  # 0, but for rounding
            error = np.linalg.norm(actual[name] - gradient)
            assert error < 1e-4 * np.linalg.norm(gradient) + 1e-7, name
    real = np.concatenate([row[each] for row, each in zip(tokens, mask, strict=True)])
    packed = model.logits(real[None], offsets=np.append(0, mask.sum(axis=1).cumsum()))
    np.testing.assert_allclose(packed, logits, rtol=0, atol=1e-5)
    model.save(tmp_path / "again")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, peer.state_dict()[name]), name
    bare = load(tmp_path / "m", head="none")
    assert bare.embeddings(tokens).shape == (4, 32)
    bare.save(tmp_path / "bare")
    new = load(tmp_path / "bare", head="sequence_classification", labels=2)
    assert new.logits(tokens).shape == (4, 2)
