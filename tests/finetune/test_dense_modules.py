"""Dense modules of sentence-transformers: read, applied, trained, saved and merged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Settings, Trainer
from unsloth_cupy.losses import contrastive
from unsloth_cupy.models.configs.config import DenseModule
from unsloth_cupy.models.folders.pooling import dense_modules, pooling_files
from unsloth_cupy.parallel import SingleCommunicator

from .test_encoders import TEXTS, data, folder, write

FIRST, SECOND = "2_Dense", "3_Dense"
NAMES = {f"{FIRST}.linear.weight", f"{SECOND}.linear.weight", f"{SECOND}.linear.bias"}
TOKENS = np.array([[1, 4, 5, 6, 2], [1, 7, 8, 2, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def base_of(path: Path, family: str = "embedding_gemma", pooling: str = "mean") -> Path:
    """Write an encoder with two Dense modules: one as EmbeddingGemma's, one with bias and tanh."""
    folder(path, family)
    state = models.load(path).config.state
    modules = (
        DenseModule(FIRST, state, 80, biased=False, tanh=False),
        DenseModule(SECOND, 80, 32, biased=True, tanh=True),
    )
    write(path, dict(pooling_files(state, pooling, modules)))
    random = np.random.default_rng(0)
    for module in modules:
        tensors = {
            name.partition(".")[2]: random.standard_normal(shape).astype(np.float32) / 4
            for name, shape in module.shapes().items()
        }
        save_file(tensors, path / module.path / "model.safetensors")
    return path


def reference(path: Path, rows: Any) -> Any:
    """Return unit vectors after the Dense modules in a folder, in float64."""
    first, second = (load_file(path / each / "model.safetensors") for each in (FIRST, SECOND))
    y = rows.astype(np.float64) @ first["linear.weight"].T
    y = np.tanh(y @ second["linear.weight"].T + second["linear.bias"])
    return y / np.linalg.norm(y, axis=1)[:, None]


def pooled_states(path: Path) -> Any:
    """Return the means of the last hidden states, which the folder without modules.json has."""
    (path / "modules.json").rename(path / "hidden.json")
    model = models.load(path, dtype="float32")
    (path / "hidden.json").rename(path / "modules.json")
    x = model.hidden(model.parameters, TOKENS, mask=MASK).reshape(*TOKENS.shape, -1)
    return (x * MASK[..., None]).sum(axis=1) / MASK.sum(axis=1)[:, None]


def trained(base: Path, out: Path, lora: Lora | None) -> Path:
    """Return the folder of the model of a run."""
    pairs = [{"query": q, "document": d} for q, d in zip(TEXTS, TEXTS[::-1], strict=True)]
    settings = Settings(steps=2, batch=2, tokens=16, lr=0.01, method="embed", out=out)
    run = Trainer(base, data(out.with_suffix(".jsonl"), pairs), settings, lora=lora).train()
    return run.files.model


@pytest.mark.parametrize("family", ["bert", "modernbert", "embedding_gemma", "embedding_gemma2"])
def test_embeddings_and_gradients(family: str, tmp_path: Path) -> None:
    """Beside a definition in float64, padded and packed; gradients beside differences."""
    base = base_of(tmp_path / "m", family)
    expected = reference(base, pooled_states(base))
    model = models.load(base, dtype="float32")
    assert model.parameters.keys() >= NAMES
    actual = model.embeddings(TOKENS, mask=MASK)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    packed = TOKENS[MASK == 1][None]
    actual = model.embeddings(packed, offsets=np.array([0, 5, 9], np.int32))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
    wide = models.load(base, dtype="float64")

    def loss(each: Any) -> Any:
        vectors = each.embeddings(TOKENS, mask=MASK)
        return contrastive(vectors, vectors, scale=3.0)

    _, gradients = wide.value_and_gradients(loss)
    for name in (*sorted(NAMES), next(n for n in gradients if "layers.0" in n)):
        place = np.unravel_index(np.abs(gradients[name]).argmax(), gradients[name].shape)
        values, step = wide.parameters[name], 1e-5
        sides = []
        for sign in (1, -1):
            changed = values.copy()
            changed[place] += sign * step
            wide.parameters[name] = changed
            sides.append(float(loss(wide)))
        wide.parameters[name] = values
        expected = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(gradients[name][place], expected, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_weights(dtype: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "m")
    expected = models.load(base, dtype="float32").embeddings(TOKENS, mask=MASK)
    actual = models.load(base, dtype=dtype).embeddings(TOKENS, mask=MASK)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03)  # eight bits of bfloat16


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "embedding_gemma", "embedding_gemma2"])
def test_vectors_of_sentence_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    """Of a folder as it was written, saved, trained and merged."""
    peers = pytest.importorskip("sentence_transformers", reason="computes the references")
    base = base_of(tmp_path / "m", family, pooling)
    model = models.load(base, dtype="float32")
    model.save(tmp_path / "saved")
    full, low = (trained(base, tmp_path / n, lora) for n, lora in (("f", None), ("a", Lora(2))))
    models.merge(low, tmp_path / "merged")
    for path in (base, tmp_path / "saved", full, tmp_path / "merged"):
        if not (path / "tokenizer.json").exists():
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (path / name).write_bytes((base / name).read_bytes())
        expected = peers.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
        own = models.load(path)
        actual = [own.embeddings(own.tokenizer.encode(text)[None])[0] for text in TEXTS]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5, err_msg=path.name)


@pytest.mark.parametrize("lora", [None, Lora(2)])
def test_training(lora: Lora | None, tmp_path: Path) -> None:
    """A full run trains the modules; an adapter's folder has a copy of them."""
    base = base_of(tmp_path / "m")
    before = models.load(base)
    path = trained(base, tmp_path / "run", lora)
    after = models.load(path)
    for name in NAMES:
        module, _, stored = name.partition(".")
        written = load_file(path / module / "model.safetensors")[stored]
        np.testing.assert_array_equal(written, after.parameters[name])
        same = np.array_equal(after.parameters[name], before.parameters[name])
        assert same == (lora is not None), name
    assert dense_modules(path) == before.config.modules
    moved = after.embeddings(TOKENS, mask=MASK) - before.embeddings(TOKENS, mask=MASK)
    assert np.abs(moved).max() > 1e-4


@pytest.mark.parametrize("lora", [None, Lora(2)])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_saved_and_merged(lora: Lora | None, dtype: str | None, tmp_path: Path) -> None:
    base = base_of(tmp_path / "m")
    path = trained(base, tmp_path / "run", lora)
    expected = models.load(path, dtype="float32").embeddings(TOKENS, mask=MASK)
    models.merge(path, tmp_path / "merged", dtype=dtype)
    merged = models.load(tmp_path / "merged")
    merged.save(tmp_path / "saved")
    most = 2e-6 if dtype is None else 0.03
    for each in (merged, models.load(tmp_path / "saved")):
        actual = each.embeddings(TOKENS, mask=MASK)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=most)
    assert not (tmp_path / "saved" / "model.safetensors.index.json").exists()
    names = load_file(tmp_path / "saved" / "model.safetensors")
    assert not any("Dense" in name or name.startswith("linear") for name in names)


def test_saved_twice(tmp_path: Path) -> None:
    """Files of modules replace earlier ones, and other files there stay."""
    model = models.load(base_of(tmp_path / "m"))
    model.save(tmp_path / "saved")
    (tmp_path / "saved" / FIRST / "notes").write_text("own")
    model.parameters[f"{FIRST}.linear.weight"] = -2 * model.parameters[f"{FIRST}.linear.weight"]
    model.save(tmp_path / "saved")
    actual = models.load(tmp_path / "saved").embeddings(TOKENS, mask=MASK)
    np.testing.assert_array_equal(actual, model.embeddings(TOKENS, mask=MASK))
    assert (tmp_path / "saved" / FIRST / "notes").read_text() == "own"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"in_features": 81}, "in_features is 81; it must be 80, as 2_Dense returns"),
        ({"out_features": 0}, "out_features is 0; it must be an integer, 1 or more"),
        ({"out_features": 31}, r"has shape \(32.*\); config.json implies \(31"),
        ({"bias": False}, "'linear.bias' is not part of a Dense module"),
        ({"activation_function": "torch.nn.modules.activation.ReLU"}, "choose one of torch.nn"),
        ({"use_residual": True}, "use_residual=True is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings' is not"),
    ],
)
def test_wrong_settings(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "m")
    file = base / SECOND / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=problem):
        models.load(base)


def test_keys_that_are_absent(tmp_path: Path) -> None:
    """sentence-transformers' defaults are a bias and tanh."""
    base = base_of(tmp_path / "m")
    file = base / SECOND / "config.json"
    values, expected = json.loads(file.read_text()), dense_modules(base)
    for name in ("bias", "activation_function"):
        del values[name]
    file.write_text(json.dumps(values))
    assert dense_modules(base) == expected
    assert expected[1].biased
    assert expected[1].tanh


def test_calls_that_modules_refuse(tmp_path: Path) -> None:
    base = base_of(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"load\(communicator=\): ranks do not divide the Dense"):
        models.load(base, communicator=SingleCommunicator())
    classifier = models.load(base, head="sequence_classification", labels=2)
    with pytest.raises(ConfigError, match=r"the Dense modules in .* need a model without a head"):
        classifier.embeddings(TOKENS, mask=MASK)
    vectors = classifier.embeddings(TOKENS, mask=MASK, pooling="mean")
    assert vectors.shape == (2, classifier.config.state)
    file = base / FIRST / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"in_features": 47}))
    with pytest.raises(ConfigError, match="2_Dense has 47 inputs"):
        models.load(base)


def test_a_model_in_several_files_has_modules_in_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unsloth_cupy.models.ranks.parts.ONE_FILE", 0)  # as of a large model
    base = base_of(tmp_path / "m")
    path = trained(base, tmp_path / "run", None)
    before, after = models.load(base), models.load(path)
    assert after.config.modules == before.config.modules
    for name in NAMES:
        module, _, stored = name.partition(".")
        written = load_file(path / module / "model.safetensors")[stored]
        np.testing.assert_array_equal(written, after.parameters[name])
        assert (after.parameters[name] != before.parameters[name]).any()


def test_wrong_orders_and_files(tmp_path: Path) -> None:
    base = base_of(tmp_path / "m")
    with pytest.raises(ConfigError, match="has no biases and activations in Dense modules"):
        models.export_gguf(base, tmp_path / "m.gguf")
    file = base / "modules.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps([*whole[:2], whole[4], *whole[2:4]]))
    with pytest.raises(ConfigError, match="Dense modules must follow Transformer and Pooling"):
        models.load(base)
    file.write_text(json.dumps(whole))
    (base / SECOND / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"3_Dense/model.safetensors is missing"):
        models.load(base)
