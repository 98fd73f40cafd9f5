"""Heads: classifiers of texts and tokens, embeddings, new heads, their files; what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import CheckpointConfig, losses
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError
from unsloth_cupy.models import Transformer, create, from_torch, load, merge, quantize
from unsloth_cupy.parallel import DataParallel, SingleCommunicator, Zero3

from ..conftest import FOLDER
from ..golden.golden import op_cases
from .peers import SIZES

LOSSES = FOLDER / "losses"
CASES = {case.name: case for case in op_cases(LOSSES, "heads")}
TOKENS = np.random.default_rng(0).integers(3, 97, (4, 9))
MASK = np.arange(9) >= np.array([[0], [3], [5], [0]])  # padding on the left
quiet = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # in peft
LLAMA = SIZES | {"model_type": "llama"}


def classifier(kind: str = "Sequence", labels: int = 3, **changes: Any) -> Transformer:
    """Return a new classifier."""
    classes = [f"LlamaFor{kind}Classification"]
    values = LLAMA | {"architectures": classes, "num_labels": labels} | changes
    return create(values, seed=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_transformers_and_trl(name: str, dtype: str) -> None:
    case, (tokens, mask) = (
        CASES[name],
        (CASES[name].inputs[n] for n in ("input_ids", "attention_mask")),
    )
    model, inputs, params = (
        load(LOSSES / case.params["folder"], dtype=dtype),
        case.inputs,
        case.params,
    )
    if "pooling" in params:
        other, other_mask = inputs["other_ids"], inputs["other_mask"]

        def function(model: Any) -> Any:
            pairs = (tokens, mask), (other, other_mask)
            queries, documents = (
                model.embeddings(rows, mask=real, pooling=params["pooling"]) for rows, real in pairs
            )
            return losses.contrastive(queries, documents, scale=params["scale"])

        actual = model.embeddings(tokens, mask=mask, pooling=params["pooling"])
        np.testing.assert_allclose(actual, case.outputs["embeddings"], atol=1e-5)
        value, gradients = model.value_and_gradients(function)
        assert abs(float(function(model)) - float(value)) < 1e-5
    elif "labels" in inputs:
        logits = model.logits(tokens, mask=mask)
        real = mask[..., None] if logits.ndim == 3 else np.ones((len(mask), 1))
        np.testing.assert_allclose(logits * real, case.outputs["logits"], atol=1e-5)
        value, gradients = model.loss_and_gradients(tokens, inputs["labels"], mask=mask)
        assert abs(model.loss(tokens, inputs["labels"], mask=mask) - value) < 1e-6
    else:
        margin = inputs["margin"].astype(dtype) if "margin" in inputs else None
        value, gradients = model.value_and_gradients(
            lambda model: losses.reward(
                model.logits(tokens, mask=mask)[:, 0], margin=margin, center=params["center"]
            )
        )
    assert abs(float(value) - float(case.outputs["loss"])) < 1e-5
    if params["folder"] == "heads/base":  # whose file has other names
        gradients = {own.removeprefix("model."): gradient for own, gradient in gradients.items()}
    assert case.grads.keys() == (gradients.keys() if case.grads else set())  # some have none
    for own, expected in case.grads.items():
        error = np.linalg.norm(gradients[own] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected), own


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_ranks_of_data_and_of_parts_count_labels(kind: str) -> None:
    labels: Any = np.array([0, 2, -100, 1]) if kind == "Sequence" else TOKENS % 3
    plain = classifier(kind)
    loss, expected = plain.loss_and_gradients(TOKENS, labels)
    for divide in (DataParallel, Zero3):
        ranks = divide(classifier(kind), SingleCommunicator())
        value, gradients = ranks.loss_and_gradients(TOKENS, labels)
        assert float(value) == pytest.approx(float(loss), rel=1e-6)
        for name, gradient in gradients.items():
            whole = expected[name].reshape(-1)
            np.testing.assert_allclose(gradient.reshape(-1), whole, atol=1e-6, err_msg=name)
    plain.context = SingleCommunicator()
    with pytest.raises(ConfigError, match="reads whole rows, and ranks divide them"):
        plain.loss(TOKENS, labels)


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_a_packed_batch_equals_its_texts_and_parts_add_up(kind: str) -> None:
    model = classifier(kind)
    sizes = MASK.sum(axis=1)
    offsets = np.concatenate([[0], sizes.cumsum()])
    packed = TOKENS[MASK][None]
    rows = [TOKENS[i, MASK[i]][None] for i in range(4)]
    labels: Any = np.array([0, 2, -100, 1])
    if kind == "Token":
        labels = np.where(TOKENS % 5 == 4, -100, TOKENS % 3)
        parts = [labels[i, MASK[i]][None] for i in range(4)]
        labels = labels[MASK][None]
    else:
        parts = [labels[i : i + 1] for i in range(4)]
    alone = [model.logits(row) for row in rows]
    expected = np.concatenate(alone, axis=1 if kind == "Token" else 0)
    np.testing.assert_allclose(model.logits(packed, offsets=offsets), expected, atol=1e-5)
    loss, gradients = model.loss_and_gradients(packed, labels, offsets=offsets)
    count = int((labels != -100).sum())
    sums = [
        model.loss_and_gradients(row, part, count=count, checkpoint=CheckpointConfig())
        for row, part in zip(rows, parts, strict=True)
    ]
    assert abs(sum(value for value, _ in sums) - loss) < 1e-6
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            sum(each[name] for _, each in sums), gradient, atol=1e-5, err_msg=name
        )


def test_the_rightmost_real_token_has_the_score() -> None:
    model = classifier()
    expected = [model.logits(TOKENS[i, MASK[i]][None])[0] for i in range(4)]
    np.testing.assert_allclose(model.logits(TOKENS, mask=MASK), expected, atol=1e-5)
    right = TOKENS[:, ::-1]  # holes do not hide it: the last real token counts
    mask = MASK[:, ::-1]
    expected = [model.logits(right[i, mask[i]][None])[0] for i in range(4)]
    np.testing.assert_allclose(model.logits(right, mask=mask), expected, atol=1e-5)
    pad = np.where(MASK, TOKENS, model.config.pad_token)
    ends = np.where(np.arange(9) == 8, model.config.pad_token, TOKENS)  # a real one that is the pad
    assert np.isfinite(model.logits(pad, mask=MASK)).all()
    np.testing.assert_allclose(model.logits(ends)[0], model.logits(ends[:1])[0], atol=1e-5)
    vector = model.embeddings(TOKENS, mask=MASK, pooling="last")
    np.testing.assert_allclose(np.linalg.norm(vector, axis=1), 1, rtol=1e-5)


def test_a_new_head_is_drawn_saved_and_read_by_transformers(tmp_path: Path) -> None:
    folder = LOSSES / "tokens" / "tied"
    model = load(folder, head="sequence_classification", labels=3, seed=5, dtype="float32")
    assert model.head == "sequence_classification"
    assert model.parameters["score.weight"].shape == (3, 32)
    again, other = (
        load(folder, head="sequence_classification", labels=3, seed=n, dtype="float32").parameters
        for n in (5, 6)
    )
    np.testing.assert_array_equal(model.parameters["score.weight"], again["score.weight"])
    assert (model.parameters["score.weight"] != other["score.weight"]).all()
    model.save(tmp_path / "saved")
    values = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForSequenceClassification"]
    assert values["num_labels"] == 3
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    back = load(tmp_path / "saved")
    assert back.head == "sequence_classification"
    np.testing.assert_array_equal(back.logits(TOKENS % 64), model.logits(TOKENS % 64))
    transformers = pytest.importorskip("transformers", reason="which reads the folder")
    import torch

    peer = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    assert peer.num_labels == 3
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS % 64)).logits.numpy()
    np.testing.assert_allclose(model.logits(TOKENS % 64), expected, atol=1e-5)
    shared = from_torch(peer)
    assert shared.head == model.head
    np.testing.assert_allclose(shared.logits(TOKENS % 64), expected, atol=1e-5)
    assert type(shared.to_torch()).__name__ == "LlamaForSequenceClassification"


def test_a_folder_changes_its_head_and_keeps_its_names(tmp_path: Path) -> None:
    folder = LOSSES / "heads" / "three_labels"
    shutil.copytree(folder, tmp_path / "named")
    values = json.loads((folder / "config.json").read_text())
    values["id2label"] = {"0": "bad", "1": "fair", "2": "good"}
    (tmp_path / "named" / "config.json").write_text(json.dumps(values))
    model = load(tmp_path / "named", head="sequence_classification", labels=3)
    np.testing.assert_array_equal(
        model.parameters["score.weight"], load(folder).parameters["score.weight"]
    )
    model.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["id2label"] == values["id2label"]
    assert saved["num_labels"] == 3
    for head, labels in (("sequence_classification", 5), ("token_classification", 3)):
        other = load(tmp_path / "named", head=head, labels=labels)
        stored = model.parameters["score.weight"][:labels]
        assert (other.parameters["score.weight"][:3] != stored).any()  # it is new
        assert "problem_type" not in other.texts["config.json"]
        assert ("id2label" in other.texts["config.json"]) == (labels == 3)
        assert ("score.bias" in other.parameters) == (head == "token_classification")
    bare = load(tmp_path / "named", head="none", dtype="float32")
    assert "score.weight" not in bare.parameters
    speaking = load(tmp_path / "named", head="causal_lm", dtype="float32")
    assert speaking.logits(TOKENS % 64).shape == (4, 9, 64)
    bare.save(tmp_path / "bare")
    transformers = pytest.importorskip("transformers", reason="which reads the folder")
    import torch

    peer = transformers.AutoModel.from_pretrained(tmp_path / "bare")
    assert type(peer).__name__ == "LlamaModel"
    with torch.no_grad():
        hidden = peer(torch.from_numpy(TOKENS % 64)).last_hidden_state.numpy()
    expected = hidden[:, -1] / np.linalg.norm(hidden[:, -1], axis=1)[:, None]
    actual = bare.embeddings(TOKENS % 64, pooling="last")
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_quantizing_and_adapters_leave_the_score_alone(tmp_path: Path) -> None:
    model = classifier(labels=40, hidden_size=64)
    score = model.parameters["score.weight"].copy()
    quantize(model, "nf4")
    np.testing.assert_array_equal(model.parameters["score.weight"], score)
    model.save(tmp_path / "nf4")
    values = json.loads((tmp_path / "nf4" / "config.json").read_text())
    assert "score" in values["quantization_config"]["llm_int8_skip_modules"]
    assert load(tmp_path / "nf4").head == "sequence_classification"
    model.add_adapter(2)
    assert not any("score" in name for name in model.trainable)
    model.adapter = None
    model.add_adapter(2, modules=["score"])
    assert model.adapter.settings["task_type"] == "SEQ_CLS"
    gradients = model.loss_and_gradients(TOKENS, np.array([0, 1, 2, 3]))[1]
    assert gradients["base_model.model.score.weight"].any()


@quiet
def test_an_adapter_of_peft_brings_its_head(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose files these are")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    base = LOSSES / "tokens" / "untied"
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, dtype=torch.float32
    )
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    adapted = peft.get_peft_model(whole, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        expected = adapted(torch.from_numpy(TOKENS % 64)).logits.numpy()
    adapted.save_pretrained(tmp_path / "adapter")
    model = load(base, dtype="float32", lora=tmp_path / "adapter")
    assert (model.head, model.config.labels) == ("sequence_classification", 3)
    np.testing.assert_allclose(model.logits(TOKENS % 64), expected, atol=1e-4)
    merge(tmp_path / "adapter", tmp_path / "merged", base=base, dtype="float32")
    np.testing.assert_allclose(load(tmp_path / "merged").logits(TOKENS % 64), expected, atol=1e-4)
    model.save_adapter(tmp_path / "again")
    fresh = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, dtype=torch.float32
    )
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "again")
    with torch.no_grad():
        actual = again(torch.from_numpy(TOKENS % 64)).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_torch_tokens_and_labels_are_taken() -> None:
    torch = pytest.importorskip("torch", reason="whose arrays these are")
    model = classifier()
    labels = np.eye(3, dtype=np.float32)[[0, 1, 2, 1]]
    expected = model.loss(TOKENS, labels)
    actual = model.loss(torch.from_numpy(TOKENS), torch.from_numpy(labels))
    assert abs(float(actual) - expected) < 1e-6
    vectors = model.embeddings(torch.from_numpy(TOKENS))
    assert isinstance(vectors, torch.Tensor)


ROWS = np.array([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("changes", "labels", "kind", "message"),
    [
        ({}, np.ones(4, np.float32), ShapeError, "labels are .4,., logits .4, 3."),
        ({}, np.ones((4, 3), np.int64), ShapeError, r"the labels must be \(4,\)"),
        ({}, ROWS + 1, RangeError, "labels holds 3"),
        ({}, np.full((4, 3), 2.0), RangeError, r"must be in 0 \.\. 1"),
        ({}, np.full((4, 3), np.nan), RangeError, "not finite"),
        ({}, ROWS[:2], ShapeError, r"the labels must be \(4,\)"),
        ({"problem_type": "regression"}, ROWS, DTypeError, "for regression pass floats"),
        ({"problem_type": "single_label_classification"}, ROWS / 2, DTypeError, "pass int32 or"),
        ({"num_labels": 1}, ROWS, ConfigError, "pass floats for a squared error"),
        ({"num_labels": 1}, np.ones((4, 1)), ConfigError, r"labels.reshape\(-1\)"),
    ],
)
def test_labels_that_do_not_fit(changes: Any, labels: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        classifier(**changes).loss(TOKENS, labels)


def test_problem_type_decides() -> None:
    model = classifier(labels=1, problem_type="multi_label_classification")
    z = model.logits(TOKENS)
    expected = np.logaddexp(0, -z).mean()
    assert abs(model.loss(TOKENS, np.ones((4, 1), np.float32)) - expected) < 1e-6
    model = classifier(problem_type="regression")
    y = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    assert abs(model.loss(TOKENS, y) - ((model.logits(TOKENS) - y) ** 2).mean()) < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda f: load(f, head="classification"),
            "choose from causal_lm, sequence_classification",
        ),
        (lambda f: load(f, head="sequence_classification"), "pass labels=, the number of outputs"),
        (
            lambda f: load(f, head="sequence_classification", labels=0),
            "number of outputs, 1 or more",
        ),
        (lambda f: load(f, head="causal_lm", labels=2), "causal_lm has no labels; leave it out"),
        (lambda f: load(f, labels=2), "head is causal_lm; pass head= with it"),
        (lambda f: load(f, seed=-1), r"load\(seed=-1\)"),
        (lambda f: load(f, chunks=2), r"load\(chunks=2\): .* pass pipeline= too"),
        (lambda f: create(LLAMA, seed=0, chunks=2), r"create\(chunks=2\): .* pass pipeline= too"),
        (
            lambda f: load(f, head="none", experts=SingleCommunicator()),
            "expert parallelism needs a language model; divide tensors, blocks or the batch",
        ),
        (lambda f: load(f, head="none").logits(TOKENS % 64), "the head of this model is 'none'"),
        (
            lambda f: load(f, head="none").loss(TOKENS % 64, TOKENS % 64),
            "load the folder with head=",
        ),
        (lambda f: classifier().generate(TOKENS, max_new_tokens=1), "generate: the head of this"),
        (lambda f: classifier().log_probs(TOKENS, TOKENS), "log_probs: the head of this model is"),
        (
            lambda f: classifier().rollouts([[3, 4]], max_new_tokens=1, seed=0),
            r"rollouts: .*; pass a language model, or get labels from logits\(tokens\) or predict",
        ),
        (
            lambda f: classifier().add_adapter(2, merge_into="q8_0"),
            r"language model, and the head is 'sequence_class.*; choose a kind for folders, such",
        ),
        (lambda f: classifier().logits(TOKENS, mask=MASK * 0), "row 0 has no real token"),
        (lambda f: classifier().embeddings(TOKENS, mask=MASK * 0), "row 0 has no real token"),
        (
            lambda f: classifier().embeddings(TOKENS, pooling="max"),
            "pass 'mean' or 'last' or 'cls'",
        ),
        (lambda f: create(LLAMA | {"architectures": ["LlamaForQuestions"]}, seed=0), "unknown"),
        (lambda f: classifier(problem_type="ranking"), "problem_type is 'ranking'; choose from"),
        (lambda f: classifier(labels=0), "num_labels is 0"),
    ],
)
def test_what_is_refused_says_the_cure(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(LOSSES / "tokens" / "untied")
