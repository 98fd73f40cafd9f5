"""Methods that train a head: what they save is transformers' model, and predicts as trained."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Settings, Trainer, read_data
from unsloth_cupy.finetune.data.labelled import labelled_of
from unsloth_cupy.finetune.data.labels import labels_of as labels_in
from unsloth_cupy.finetune.data.records import Record, Records
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.models import create, load

from ..cli.test_cli import assert_one_clear_error, run
from ..golden import generate_methods as golden
from .test_methods import model_times, write


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    model_times(1.0, folder / "model")
    write(folder / "pairs.jsonl", golden.pairs())
    return folder


def trained(
    home: Path, out: Path, method: str, data: Path, *, lora: Any = None, **more: Any
) -> Any:
    settings = {"eval": data, "lr": 1e-2, "steps": 3, "batch": 6, "tokens": 20} | more
    return Trainer(home / "model", data, Settings(method=method, out=out, **settings), lora=lora)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [None, Lora(2)])
def test_a_reward_model_is_that_of_transformers(lora: Any, home: Path, tmp_path: Path) -> None:
    """Saved with its head, also beside an adapter; each reward is that of the end of a text."""
    transformers = pytest.importorskip("transformers", reason="which reads the model")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    made = trained(home, tmp_path / "run", "reward", home / "pairs.jsonl", lora=lora).train()
    texts = [p["prompt"] + p["chosen"] + "</s>" for p in golden.pairs()]
    model = load(made.folder / "model")
    ours = [each["reward"] for each in model.predict(texts)]
    line = made.files.lines()[-1]
    others = [p["prompt"] + p["rejected"] + "</s>" for p in golden.pairs()]
    margins = [a - b["reward"] for a, b in zip(ours, model.predict(others), strict=True)]
    assert line["held_out_margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    if lora is not None:
        peft = pytest.importorskip("peft", reason="which reads the adapter")
        base = transformers.AutoModelForSequenceClassification.from_pretrained(
            home / "model", num_labels=1, dtype=torch.float32
        )
        theirs = peft.PeftModel.from_pretrained(base, made.folder / "model")
    else:
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
            made.folder / "model", dtype=torch.float32
        )
        assert theirs.config.id2label == {0: "reward"}
    with torch.no_grad():
        for text, expected in zip(texts, ours, strict=True):
            tokens = torch.tensor([golden.tokenizer().encode(text).ids])
            assert theirs(tokens).logits.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_what_does_not_fit_a_head_is_one_error(home: Path, tmp_path: Path) -> None:
    words = ("finetune", home / "model", "--data", home / "pairs.jsonl", "--tokens", 20)
    done = run(*words, "--method", "dpo", "--lora", 2, "--steps", 1, "--out", tmp_path / "adapter")
    assert done.exit_code == 0, done.output
    adapted = ("finetune", tmp_path / "adapter", *words[2:], "--method", "reward")
    cure = "has adapters without the head of --method reward; merge it first: unsloth-cupy merge"
    assert_one_clear_error(run(*adapted, "--out", tmp_path / "run"), cure)
    sampled = run(*words, "--method", "reward", "--sample-prompt", "w1", "--out", tmp_path / "run")
    assert_one_clear_error(sampled, "needs a language model, which --method reward does not train")
    settings = Settings(method="reward", steps=1, out=tmp_path / "run", tokens=20)
    in_memory = Trainer(load(home / "model"), home / "pairs.jsonl", settings)
    with pytest.raises(
        ConfigError, match=r"another head than the model's \(causal_lm\); load it with"
    ):
        in_memory.train()
    wrong = golden.scored()
    wrong[1]["margin"] = "much"
    data = write(tmp_path / "wrong.jsonl", wrong)
    with pytest.raises(ConfigError, match=r"wrong.jsonl:2: margin is much; write a number"):
        trained(home, tmp_path / "run", "reward", data).train()
    with pytest.raises(ConfigError, match=r"predict: .*causal_lm"):
        load(home / "model").predict(["w1"])
    assert not (tmp_path / "run").exists()


def test_a_label_that_is_too_large_is_at_fault_not_the_model(home: Path, tmp_path: Path) -> None:
    rows = [{"text": f"w{n}", "label": 1e30 * n} for n in range(40)]
    data = write(tmp_path / "large.jsonl", rows)
    settings = Settings(method="classify", steps=1, out=tmp_path / "run", tokens=20)
    with np.errstate(all="ignore"), pytest.raises(ConfigError) as raised:
        Trainer(home / "model", data, settings).train()
    assert "use smaller numbers in the data, or copy the model again" in str(raised.value)


def test_a_run_says_how_its_head_is_used(home: Path, tmp_path: Path) -> None:
    words = ("finetune", home / "model", "--data", home / "pairs.jsonl", "--tokens", 20)
    done = run(*words, "--method", "reward", "--steps", 2, "--lora", 2, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert f'models.load("{tmp_path}/run/model"); print(model.predict(["a text"]))' in done.output
    assert "generate" not in done.output
    assert "evaluation reward mean" in done.output
    values = json.loads((tmp_path / "run/model/config.json").read_text())
    assert values["id2label"] == {"0": "reward"}


def labels_of(problem: str) -> list[Any]:
    """Return a label for each prompt of the golden pairs."""
    return {
        "single_label_classification": ["ham", "spam", "egg", "ham", "spam", "ham"],
        "multi_label_classification": [["a"], [], ["b", "a"], ["c"], ["a", "b", "c"], ["b"]],
        "regression": [0.5, -1.0, 2.0, 3.5, 0.0, 1.0],
    }[problem]


def labelled(folder: Path, problem: str) -> Path:
    texts = [pair["prompt"] for pair in golden.pairs()]
    rows = [{"text": t, "label": v} for t, v in zip(texts, labels_of(problem), strict=True)]
    return write(folder / f"{problem}.jsonl", rows)


PROBLEMS = ["single_label_classification", "multi_label_classification", "regression"]
NAMES = {"single_label_classification": ["egg", "ham", "spam"],
         "multi_label_classification": ["a", "b", "c"], "regression": ["value"]}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_first_step_is_that_of_transformers(problem: str, home: Path, tmp_path: Path) -> None:
    """Loss, gradient and measures; and the model that is saved has its labels' names there."""
    transformers = pytest.importorskip("transformers", reason="which computes the loss")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    data, names, values = labelled(tmp_path, problem), NAMES[problem], labels_of(problem)
    load(home / "model", head="sequence_classification", labels=len(names), seed=3).save(
        tmp_path / "first"
    )
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "first", dtype=torch.float32, problem_type=problem
    )
    rows = [golden.tokenizer().encode(pair["prompt"]).ids for pair in golden.pairs()]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    if problem == "regression":
        labels = torch.tensor(values)
    elif problem.startswith("multi"):
        labels = torch.tensor([[float(name in each) for name in names] for each in values])
    else:
        labels = torch.tensor([names.index(each) for each in values])
    result = theirs(tokens, attention_mask=(tokens > 0).long(), labels=labels)
    result.loss.backward()
    norm = sum(float((p.grad.double() ** 2).sum()) for p in theirs.parameters()) ** 0.5
    for pack in (True, False):
        run = trained(
            home, tmp_path / f"{pack}", "classify", data, pack=pack, seed=3, steps=1
        ).train()
        first, line, last = run.files.lines()
        assert line["loss"] == pytest.approx(float(result.loss), rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        z = result.logits.detach().numpy()
        if problem == "regression":
            error = np.abs(z[:, 0] - labels.numpy()).mean()
            for each in (line["error"], first["held_out_error"]):
                assert each == pytest.approx(error, rel=1e-5)
            continue
        actual = labels.numpy() > 0 if z.shape == labels.shape else np.eye(3)[labels] > 0
        guessed = z > 0 if z.shape == labels.shape else np.eye(3)[z.argmax(1)] > 0
        right = (actual == guessed).all(1).mean()
        pair = actual.T, guessed.T
        f1 = [2 * (a & g).sum() / (a.sum() + g.sum()) for a, g in zip(*pair, strict=True)]
        assert line["accuracy"] == first["held_out_accuracy"] == pytest.approx(right)
        assert line["f1"] == pytest.approx(np.mean(f1))
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(run.folder / "model")
    assert [*saved.config.id2label.values()] == names
    assert saved.config.problem_type == problem
    (said,) = load(run.folder / "model").predict([golden.pairs()[0]["prompt"]])
    with torch.no_grad():
        z = saved(tokens[:1], attention_mask=(tokens[:1] > 0).long()).logits[0].float()
    expected = {"r": z, "s": z.softmax(0), "m": z.sigmoid()}[problem[0]]
    assert [*said] == names
    np.testing.assert_allclose([*said.values()], expected, rtol=1e-5, atol=1e-6)
    (measured,) = json.loads(run_evaluate(tmp_path / "False", data))
    assert measured["texts"] == 6
    for name in ("loss", *(("error",) if problem == "regression" else ("accuracy", "f1"))):
        assert measured[name] == pytest.approx(last[f"held_out_{name}"], rel=1e-5)


def run_evaluate(folder: Path, data: Path, *more: Any) -> str:
    done = run("evaluate", folder, "--data", data, "--quiet", "--json", *more)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([3, 10, 2, 3], ["2", "3", "10"]),
        ([True, False, True, False], ["false", "true"]),
        (["b", "a", 1, "a"], ["1", "a", "b"]),
        ([[1], [10, 2], [], [1]], ["1", "2", "10"]),
        ([[1], [0, 1], [], [0]], ["0", "1"]),
        ([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1]], ["0", "1", "2"]),
        ([[True, False], [False, True], [1.0, 0.0], ["0", "1"]], ["0", "1"]),
        (["[1, 0]", "[0, 1]", "[0, 0]", "[1, 1]"], ["0", "1"]),
        ([1, 2.5, 3.0, 4.0], None),
        ([0.5, 2.5, 3.0, 4.0], ["value"]),
    ],
)
def test_labels_of_every_form(labels: Any, names: Any, home: Path, tmp_path: Path) -> None:
    rows = [{"Sentence": f"w{n} w2", "id": n, "label": each} for n, each in enumerate(labels)]
    made = trained(home, tmp_path / "run", "classify", write(tmp_path / "a.jsonl", rows), steps=1)
    if names is None:
        problem = r"a.jsonl:\d: the label is a .*, but a .* at .*; write all labels in the same"
        with pytest.raises(ConfigError, match=problem):
            made.train()
        return
    assert [*made.train().model.texts["config.json"]["id2label"].values()] == names


def test_a_classifier_keeps_its_labels(home: Path, tmp_path: Path) -> None:
    """Trained further on some of them, by all weights or by adapters, its outputs stay."""
    data = labelled(tmp_path, "single_label_classification")
    first = trained(home, tmp_path / "run", "classify", data, lora=Lora(2)).train()
    rows = [{"text": "w1 w2 w3 w4", "label": "spam"}, {"text": "w2 w3", "label": "ham"}]
    some = write(tmp_path / "some.jsonl", rows)
    settings = {"method": "classify", "tokens": 20, "steps": 1, "eval": some}
    again = Trainer(first.folder, some, Settings(**settings, out=tmp_path / "again")).train()
    assert [*again.model.predict(["w1"])[0]] == ["egg", "ham", "spam"]
    assert [*load(tmp_path / "again" / "model").predict(["w1"])[0]] == ["egg", "ham", "spam"]
    other = write(tmp_path / "other.jsonl", golden.labelled())
    with pytest.raises(ConfigError, match="the model has the labels egg, ham, spam, but not a"):
        Trainer(first.folder, other, Settings(**settings, out=tmp_path / "no")).train()
    (line,) = json.loads(run_evaluate(tmp_path / "again", some))
    assert line["texts"] == 2
    number = labelled(tmp_path, "regression")
    assert_one_clear_error(run("evaluate", tmp_path / "again", "--data", number), "outputs; pass")
    done = run("evaluate", tmp_path / "again", "--data", some, "--method", "sft")
    assert_one_clear_error(done, "needs the head causal")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "w1"}, "has the columns text, but no label; write text and la"),
        ({"label": "a"}, "has the columns label, but no text"),
        ({"text": "w1", "label": None}, "label is null; write label as a name, an integer"),
        ({"text": "w1", "label": {}}, "label is {}; write"),
        ({"text": "w1", "label": [0.5]}, r"label is 0\.5; write"),
        ({"text": "", "label": "a"}, "text is empty"),
        ({"premise": "w1", "hypothesis": "w2", "label": 1}, "holds two texts .*join them in the"),
        ({"text": "w1", "label": "a", "weight": 2}, "holds weight beside text and label; remove"),
        ({"messages": [], "label": "a"}, "write messages as text"),
        ([1], "is \\[1\\], not an object"),
    ],
)
def test_rows_without_a_label_are_refused(row: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "w1", "label": "a"}, row])
    with pytest.raises(ConfigError, match=f"a.jsonl:2: .*{said}"):
        read_data(path, method="classify")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([[1], [0], [1]], "labels are lists of a single 0 or 1, either a vector or a class name"),
        ([[1, 0, 0], [0, 1], [1, 1]], "the label 1, 0, 0 repeats a number; write class names, or"),
        ([[1, 0, 0], [0, 2, 0], [1, 1, 1]], "the label 1, 0, 0 repeats a number; write"),
        (["[1 0 0]", "[0 1 0]", "[0 0 1]"], r"label is \[1 0 0\]; write label as a name, an"),
        (["['a']", "['b']", "[]"], r"label is \['a'\]; write label as a name, .* JSON list"),
        ([[1, 0], [0, 1], [1, 1]], "vectors have 2 entries, but the model has 3 labels; use an"),
    ],
)
def test_labels_that_may_be_vectors_or_names_are_refused(
    labels: Any, said: str, home: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"w{n} w2", "label": each} for n, each in enumerate(labels)]
    known = {"id2label": {"0": "a", "1": "b", "2": "c"}} if "model" in said else None
    path = write(tmp_path / "a.jsonl", rows)

    def read() -> None:
        records = read_data(path, method="classify")
        assert isinstance(records, Records)
        labels_in([*records.train, *records.held_out], records.place, known)

    with pytest.raises(ConfigError, match=said):
        read()


@pytest.mark.parametrize("several", [False, True])
def test_a_label_is_stored_as_its_class(several: bool) -> None:
    """An integer of any size is a class; a text like a list, which is not JSON, is none."""

    def stored(label: Any) -> Any:
        row = {"text": "w1", "label": [label, "a"] if several else label}
        actual = labelled_of(row).value
        return actual[0] if several else actual

    for label in (0, -1, 7, 2**53 + 1, -(2**53) - 1, 10**400, -(10**400)):
        assert stored(label) == (str(label) if several else label)
    for label in (" b ", "[", "]", "[b", "b]", "1", "true"):
        assert stored(label) == label.strip()
    assert [stored(True), stored(False)] == ["true", "false"]
    for label in (math.inf, -math.inf, math.nan, "", " ", "[b]", " [b] c] ", None, {"b": 1}):
        with pytest.raises(ConfigError, match=r"^label is .*; write label as a name, an integer"):
            stored(label)


@pytest.mark.parametrize(
    ("known", "labels", "expected"),
    [
        ({"id2label": {"0": "b", "1": "a"}}, ["a", "b"], ("b", "a")),
        ({"id2label": {"0": "b", "1": "a", "2": "c"}}, ["a"], ("b", "a", "c")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, [1, 0, 1], ("0", "1")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_2"}}, ["LABEL_2"], ("LABEL_0", "LABEL_2")),
        ({"id2label": {}, "num_labels": 3}, [0, 2], ("0", "1", "2")),
        ({"num_labels": 2}, ["y", "x"], ("x", "y")),
        ({"num_labels": 3}, ["y", "x"], "the model has the labels 0, 1, 2, but not x; use a model"),
        ({"id2label": {"0": "b", "1": "a"}}, ["a", "c", "d"], "has the labels b, a, but not c; us"),
        ({"id2label": {"0": "b", "1": "a"}}, ["c", "d"], "has the labels b, a, but not c; us"),
        (None, ["b", "a", "a"], ("a", "b")),
        (None, [10, 9, -1], ("-1", "9", "10")),
        (None, [10, 9, "x"], ("10", "9", "x")),
        (None, ["1.5", "2"], "regression"), (None, ["1.0", "2"], ("1.0", "2")),
        (None, ["inf", "2"], ("2", "inf")), (None, [1.0, 2.5], "regression"),
        (None, [1.0, 2.0], "regression"), (None, ["1.5", "x"], ("1.5", "x")),
    ],
)  # fmt: skip
def test_classes_are_those_of_the_model_or_in_order(known: Any, labels: Any, expected: Any) -> None:
    records = [Record(n, [], "", "w1", value=each) for n, each in enumerate(labels, 1)]
    if isinstance(expected, str) and " " in expected:
        with pytest.raises(ConfigError, match=expected):
            labels_in(records, str, known)
        return
    actual = labels_in(records, str, known)
    if expected == "regression":
        assert actual == (expected, (), (), False)
        assert [actual.number(each) for each in labels] == [float(each) for each in labels]
    else:
        assert (actual.names, actual.problem) == (expected, "single_label_classification")
        numbers = [actual.number(each) for each in labels]
        assert numbers == [expected.index(str(each)) for each in labels]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", "a"], "1: all rows have the label a; add"), ([["a"], ["a"]], None),
        ([[], []], "1: all rows have no label; add"), ([[], ["a"]], None),
        ([1.5, "a"], "2: the label is a class here, but a number at 1; write all"),
        ([["a"], "a", ["b"]], "1: the label is a list here, but a class at 2; write"),
        ([["1", "1"], ["2"]], "1: the label 1, 1 repeats a number; write class names, or vect"),
        ([["a", "a"], ["b"]], None), ([["2"], ["0", "0", "1"]], "2: the label 0, 0, 1 repeats"),
        ([["1"], ["0"]], "1: labels are lists of a single 0 or 1, either a vector or"),
        ([["1", "0"], ["0", "1", "0"]], "2: the label 0, 1, 0 repeats a number"),
    ],
)  # fmt: skip
def test_labels_that_say_too_little_are_named(labels: Any, said: str | None) -> None:
    records = [Record(n, [], "", "w1", value=each) for n, each in enumerate(labels, 1)]
    if said is None:
        names = {name for each in labels for name in each}
        assert labels_in(records, str, None).names == tuple(sorted(names))
        return
    with pytest.raises(ConfigError, match=f"^{said}"):
        labels_in(records, str, None)


def test_integers_of_any_size_are_classes() -> None:
    labels = [10**400, -(2**60), 3, -(10**400)]
    records = [Record(n, [], "", "w1", value=each) for n, each in enumerate(labels)]
    actual = labels_in(records, str, None)
    assert actual.names == tuple(map(str, sorted(labels)))
    assert [actual.number(each) for each in labels] == [3, 1, 2, 0]


def test_vectors_are_the_lists_of_the_classes_that_they_mark(tmp_path: Path) -> None:
    """With the names of a classifier, the order of its outputs."""
    draws = np.random.default_rng(0)
    known = {"id2label": {"0": "c", "1": "a", "2": "b"}}
    names = [*known["id2label"].values()]
    vectors = (draws.random((20, 3)) < 0.5).astype(int)
    lists = [[n for n, mark in zip(names, each, strict=True) if mark] for each in vectors]
    actual, expected = (
        labels_in([Record(n, [], "", "", value=v) for n, v in enumerate(values)], str, known)
        for values in (vectors.astype(str).tolist(), lists)
    )
    assert actual == expected._replace(vector=True)
    for vector, each in zip(vectors, lists, strict=True):
        number = actual.number([*map(str, vector)])
        assert number == expected.number(each)
        assert actual.vectors()[int(number)] == (vector > 0).tolist()


def test_labels_that_tell_nothing_are_refused(home: Path, tmp_path: Path) -> None:
    rows = [{"text": "w1", "label": "a"}, {"text": "w2", "label": "a"}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match="all rows have the label a; add another label"):
        trained(home, tmp_path / "run", "classify", path).train()
    with pytest.raises(ConfigError, match="choose the method classify, or remove the column"):
        read_data(path)


def related(negatives: int = 0) -> list[dict[str, Any]]:
    texts = [pair["prompt"] + pair["chosen"] for pair in golden.pairs()]
    return [
        {"anchor": pair["prompt"], "positive": pair["chosen"].strip()}
        | ({"negative": [texts[n - each] for each in range(negatives)]} if negatives else {})
        for n, pair in enumerate(golden.pairs())
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pooling", "temperature", "negatives"), [(None, None, 0), ("last", 0.1, 2)]
)
def test_the_first_step_of_embeddings_is_that_of_torch(
    pooling: Any, temperature: Any, negatives: int, home: Path, tmp_path: Path
) -> None:
    """In-batch cross entropy of cosines, and its measures; what is saved embeds as it does here."""
    transformers = pytest.importorskip("transformers", reason="which computes the states")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    data = write(tmp_path / "related.jsonl", related(negatives))
    theirs = transformers.AutoModel.from_pretrained(home / "model", dtype=torch.float32)

    def vector(model: Any, text: str) -> Any:
        states = model(torch.tensor([golden.tokenizer().encode(text).ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "last" else states.mean(0)
        return pooled / pooled.norm()

    rows = related(negatives)
    queries = torch.stack([vector(theirs, row["anchor"]) for row in rows])
    texts = [row["positive"] for row in rows]
    texts += [text for row in rows for text in row.get("negative", ())]
    documents = torch.stack([vector(theirs, text) for text in texts])
    scores = queries @ documents.T / (temperature or 0.05)
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(rows)))
    loss.backward()
    norm = sum(float((p.grad.double() ** 2).sum()) for p in theirs.parameters()) ** 0.5
    ranks = 1 + (scores > scores.diagonal()[:, None]).sum(1).numpy()
    for pack in (True, False):
        more = {"pooling": pooling, "temperature": temperature, "pack": pack}
        run_of = trained(home, tmp_path / f"{pack}", "embed", data, steps=1, **more).train()
        first, line, last = run_of.files.lines()
        assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["accuracy"] == first["held_out_accuracy"] == pytest.approx((ranks == 1).mean())
        assert line["mrr"] == pytest.approx((1 / ranks).mean())
    saved = transformers.AutoModel.from_pretrained(run_of.folder / "model", dtype=torch.float32)
    ours = load(run_of.folder / "model")
    for text in texts[:3]:
        own = ours.embeddings(golden.tokens(text), pooling=pooling or "mean")
        np.testing.assert_allclose(own[0], vector(saved, text).detach(), rtol=1e-5, atol=1e-6)
    pooled_by = json.loads((run_of.folder / "model/1_Pooling/config.json").read_text())
    assert pooled_by["pooling_mode_lasttoken"] == (pooling == "last")
    (measured,) = json.loads(run_evaluate(run_of.folder, data, "--batch", 6, "--tokens", 20))
    if temperature is None:  # which evaluate has no option for
        assert measured["loss"] == pytest.approx(last["held_out_loss"], rel=1e-5)
    assert measured["mrr"] == pytest.approx(last["held_out_mrr"])


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_embeddings_are_those_of_peft(home: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="which computes the states")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    peft = pytest.importorskip("peft", reason="which reads the adapter")
    data = write(tmp_path / "related.jsonl", related())
    made = trained(home, tmp_path / "run", "embed", data, lora=Lora(2)).train()
    base = transformers.AutoModel.from_pretrained(home / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, made.folder / "model")
    ours = load(made.folder / "model")
    assert ours.head == "none"
    tokens = golden.tokens("w1 w2 w3")
    with torch.no_grad():
        mean = theirs(torch.tensor(tokens)).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(ours.embeddings(tokens)[0], mean / mean.norm(), rtol=1e-5, atol=1e-6)
    plain = load(home / "model").embeddings(tokens)[0]
    assert np.abs(ours.embeddings(tokens)[0] - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"query": "a", "document": "b"}, ["a", "b"]),
        ({"query": "a", "pos": ["b"], "neg": ["c", "d"]}, ["a", "b", "c", "d"]),
        ({"sentence1": "a", "sentence2": "b", "id": 3}, ["a", "b"]),
        ({"Question": "a", "Answer": "b", "negative": "c"}, ["a", "b", "c"]),
    ],
)
def test_related_texts_of_every_form(row: Any, texts: list[str], tmp_path: Path) -> None:
    rows = [row, {"anchor": "e", "positive": "f"}]
    data = read_data(write(tmp_path / "a.jsonl", rows), method="embed")
    (record,) = (each for each in (*data.train, *data.held_out) if each.line == 1)
    assert METHODS["embed"].texts(record) == texts
    assert ("unused column: id" in data.note) == ("id" in row)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"anchor": "a"}, "has the columns anchor; write anchor and positive, or"),
        ({"query": "a", "pos": ["b", "c"]}, "pos holds 2 texts; write one row per text"),
        ({"sentence1": "a", "sentence2": "b", "score": 0.3}, "holds score beside sentence1, sente"),
        ({"anchor": "a", "positive": "b", "negative_1": "c"}, "write them as a list"),
        ({"anchor": "a", "positive": 3}, "positive is 3, not text"),
        ([1], "is \\[1\\], not an object"),
    ],
)
def test_rows_that_are_not_related_are_refused(row: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"anchor": "a", "positive": "b"}, row])
    with pytest.raises(ConfigError, match=f"a.jsonl:2: .*{said}"):
        read_data(path, method="embed")


def test_texts_of_a_step_are_compared_together(home: Path, tmp_path: Path) -> None:
    rows = related(1)
    del rows[2]["negative"]
    data = write(tmp_path / "some.jsonl", rows)
    with pytest.raises(ConfigError, match=r"has . negatives, and .*:. has .; give all rows the sa"):
        trained(home, tmp_path / "run", "embed", data).train()
    with pytest.raises(ConfigError, match="method=embed compares all texts of a step with each"):
        trained(home, tmp_path / "run", "embed", data, accumulate=2)
    with pytest.raises(ConfigError, match="method=reward does not use pooling; leave it out, or"):
        trained(home, tmp_path / "run", "reward", data, pooling="last")
    with pytest.raises(ConfigError, match="choose the method embed, or write texts"):
        read_data(data)


def test_distill_divides_the_sum_of_divergences_by_a_count() -> None:
    """Parts of a step share one: their losses add up to the mean over all tokens."""
    config = {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1,
    }  # fmt: skip
    model, teacher = (create(config, seed=seed) for seed in (0, 1))
    method = dataclasses.replace(METHODS["distill"], teacher=teacher, loss_options={"kind": "jsd"})
    tokens = np.arange(12).reshape(2, 6) % 11
    whole = method(model, tokens=tokens, labels=tokens, count=10)
    halves = [method(model, tokens=t, labels=t, count=10) for t in (tokens[:1], tokens[1:])]
    assert float(whole) > 0
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-5)
    half = method(model, tokens=tokens, labels=tokens, count=20)
    assert float(half) == pytest.approx(float(whole) / 2, rel=1e-6)
