"""Evaluations: a file or share of one's own, metrics, early stopping, and the best model."""

import dataclasses
import gc
import json
import math
import re
import shutil
import weakref
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Run, Settings, Trainer, evaluate
from unsloth_cupy.finetune.data.records import Record, Records
from unsloth_cupy.finetune.data.text import Text
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run import evaluation, metrics, samples
from unsloth_cupy.finetune.run.evaluation import Evaluation
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.models import Transformer, load
from unsloth_cupy.models.configs.heads import CAUSAL, NONE, SEQUENCE

from ..cli.test_cli import assert_one_clear_error, numbers, run, weights
from ..conftest import FOLDER
from .test_lora import StopsAfter

SIZE: dict[str, Any] = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}
FALLS_AND_RISES = {"steps": 12, "lr": 0.02, "evaluate_every": 2}  # on ``other``: at step 2


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.jsonl"
    rows = [{"prompt": f"{i} and {i + 1}", "completion": f" make {2 * i + 1}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that the model at first finds likelier with every step, and then less likely."""
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("dna 7 ekam 9.\n\n" * 9)
    return path


@pytest.fixture(scope="session")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base")
    return Trainer(None, text, Settings(**SIZE, steps=20, out=out)).train().files.model


def trained(data: Path, out: Path, evaluate: Any = None, model: Any = None, **settings: Any) -> Run:
    size = SIZE if model is None else {"batch": 2, "tokens": 16}
    return Trainer(
        model, data, Settings(**size | {"out": out} | settings), evaluate=evaluate
    ).train()


def held_out(made: Run) -> list[float]:
    return [line["held_out_loss"] for line in made.files.lines() if "held_out_loss" in line]


@pytest.mark.parametrize("folder", ["llama", "gemma2", "qwen3"])
def test_metrics_are_those_of_whole_logits(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with logits that are capped, and labels that do not count."""
    model = load(FOLDER / "models" / folder, dtype="float32")
    monkeypatch.setattr(metrics, "CHUNK", 3 * model.config.vocab)
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.config.vocab, (2, 9))
    labels = np.where(random.random(tokens.shape) < 0.3, -100, tokens)
    logits = model.logits(tokens).astype(np.float64)[:, :-1]
    labels[:, 1:6] = logits.argmax(-1)[:, :5]  # some predictions are right
    watch = metrics.Watch(model)
    loss = watch.view.loss(tokens, labels, count=1)
    actual = watch.counts({"tokens": tokens, "labels": labels})
    chosen, kept = labels[:, 1:], labels[:, 1:] != -100
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)[kept].sum()
    expected = -np.log(np.take_along_axis(p, chosen.clip(0)[..., None], -1)[..., 0])[kept].sum()
    assert actual.right == (logits.argmax(-1) == chosen)[kept].sum() >= 10
    assert abs(actual.entropy - entropy) < 1e-5 * entropy
    assert abs(loss - expected) < 1e-5 * expected


def test_hidden_states_live_no_longer_than_what_counts_them(base: Path) -> None:
    """A cycle would keep them until the garbage collector runs: the next step would hold them."""
    watch = metrics.Watch(load(base))
    tokens = np.arange(3, 9)[None]
    gc.disable()
    try:
        watch.view.loss(tokens, tokens, count=1)
        hidden = weakref.ref(watch.hidden)
        assert hidden() is not None
        del watch
        assert hidden() is None
    finally:
        gc.enable()


def test_a_packed_text_is_counted_as_it_is_alone(base: Path) -> None:
    model = load(base)
    texts = [np.arange(3, 3 + n) for n in (4, 1, 6)]
    watch = metrics.Watch(model)
    packed = np.concatenate(texts)[None]
    watch.view.loss(packed, packed, offsets=np.cumsum([0, *map(len, texts)]), count=1)
    offsets = np.cumsum([0, *map(len, texts)])
    actual = watch.counts({"tokens": packed, "labels": packed, "offsets": offsets})
    expected = np.zeros(2)
    for alone in texts:
        watch.view.loss(alone[None], alone[None], count=1)
        expected += watch.counts({"tokens": alone[None], "labels": alone[None]})
    assert actual.right == expected[0]
    assert abs(actual.entropy - expected[1]) < 1e-5 * expected[1]


def test_the_log_holds_the_metrics(text: Path, tmp_path: Path) -> None:
    made = trained(text, tmp_path / "run", steps=2, evaluate_every=1)
    for line in made.files.lines():
        if "held_out_loss" in line:
            assert line["perplexity"] == math.exp(line["held_out_loss"])
            assert 0 <= line["token_accuracy"] <= 1
            assert 0 < line["entropy"] <= math.log(300)

    def other(model: Transformer, **batch: Any) -> Any:
        return model.loss(**batch) * 2

    settings = Settings(**SIZE, steps=1, out=tmp_path / "other")
    done = Trainer(None, text, settings, objective=other).train()
    first, usual = done.files.lines()[0], made.files.lines()[0]
    assert "perplexity" not in first, "the loss is another"
    assert first["token_accuracy"] == usual["token_accuracy"]


@pytest.mark.parametrize("kind", ["text", "lines"])
def test_a_file_of_ones_own_is_evaluated_and_all_of_the_data_is_learned(
    kind: str, text: Path, lines: Path, tmp_path: Path
) -> None:
    data = text if kind == "text" else lines
    held = tmp_path / f"held{data.suffix}"
    row = json.dumps({"prompt": "7 and 8", "completion": " make 15"})
    held.write_text("7 and 8 make 15." * 9 if kind == "text" else f'{row}\n{row}\n{row[:-2]}!"}}\n')
    usual = trained(data, tmp_path / "usual", steps=1)
    made = trained(data, tmp_path / "own", held, steps=1)
    assert usual.loop is not None
    assert made.loop is not None
    assert made.loop.training_data.learned > usual.loop.training_data.learned
    tokens = made.files.lines()[0]["held_out_tokens"]
    (alone,) = evaluate(made.model, held, tokens=16, batch=2)
    assert alone.tokens == tokens
    assert alone.loss == held_out(made)[-1]
    settings = json.loads(made.files.settings.read_text())
    assert settings["eval"] == str(held)
    held.write_text(held.read_text().replace("7", "9"))
    with pytest.raises(ConfigError, match="holds a run with eval_sha256"):
        trained(data, tmp_path / "own", held, steps=1)


@pytest.mark.parametrize("kind", ["text", "lines"])
def test_a_share_is_held_out(kind: str, text: Path, lines: Path, tmp_path: Path) -> None:
    data = text if kind == "text" else lines
    counts = []
    for share in (0.1, 0.5):
        made = trained(data, tmp_path / f"{share}", share, steps=1)
        assert made.loop is not None
        learned = made.loop.training_data.learned
        counts.append(made.loop.training_data.held_out_tokens / learned)
    assert counts[0] < 0.2
    assert 0.7 < counts[1] < 1.3


def test_rows_of_ones_own_file_are_named_in_it(base: Path, lines: Path, tmp_path: Path) -> None:
    """Not by the lines of the data; and what of them is cut or dropped is said."""
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    refuses = "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(refuses)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "a", "completion": "b"}, {"messages": asked}, {"messages": asked, "id": 1}]
    rows[2]["tools"] = [{"type": "function", "function": {"name": "add"}}]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"own\.jsonl:3: .* omits tools"):
        trained(lines, tmp_path / "run", file, folder, steps=1)
    rows[2:] = [{"prompt": "a " * 20, "completion": "b"}, {"prompt": "a", "completion": "b " * 20}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("finetune", folder, "--data", lines, "--eval", file, "--tokens", 16, "--steps", 1,
               "--out", tmp_path / "run")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (
        f"evaluation data: {file}: 4 rows, 3 with prompt/completion, 1 with messages" in done.stderr
    )
    assert "; evaluation data: 1 dropped, 2 truncated" in done.stderr
    file.write_text(json.dumps(rows[2]) + "\n")  # one row will do
    done = run("finetune", folder, "--data", lines, "--eval", file, "--tokens", 8)
    assert_one_clear_error(done, f"--eval {file}: no evaluation text reaches its answer")


def test_files_that_do_not_fit_each_other(text: Path, lines: Path, tmp_path: Path) -> None:
    for data, held in ((text, lines), (lines, text)):
        with pytest.raises(ConfigError) as error:
            trained(data, tmp_path / "run", held)
        assert f"{lines} has rows, and {text} is running text" in str(error.value)
    for wrong in (0.0, 1.0, 2, -0.5):
        with pytest.raises(
            ConfigError, match=r"eval=.*: pass a file, or a fraction between 0 and 1"
        ):
            trained(text, tmp_path / "run", wrong)
    with pytest.raises(ConfigError, match=r"nothing\.txt: No such file"):
        trained(text, tmp_path / "run", "nothing.txt")
    result = run("finetune", "--text", text, "--out", tmp_path / "run", "--eval", "1.5")
    assert_one_clear_error(result, "--eval 1.5: pass a file, or a fraction between 0 and 1")


def test_the_best_model_is_kept_and_loaded_at_the_end(
    text: Path, other: Path, tmp_path: Path
) -> None:
    made = trained(text, tmp_path / "run", other, keep_best=True, **FALLS_AND_RISES)
    losses = held_out(made)
    assert made.best is not None
    assert made.best["held_out_loss"] == min(losses) < losses[-1]
    (alone,) = evaluate(made.model, other, tokens=16, batch=2)
    assert alone.loss == min(losses)
    assert weights(tmp_path / "run") == (made.files.best_model / "model.safetensors").read_bytes()
    again = trained(text, tmp_path / "run", other, keep_best=True, **FALLS_AND_RISES)
    assert again.best == made.best
    tokens = np.array([[1, 2, 3]])
    assert (again.model.logits(tokens) == made.model.logits(tokens)).all()
    last = trained(text, tmp_path / "last", other, **FALLS_AND_RISES)
    assert weights(tmp_path / "last") != weights(tmp_path / "run"), "without it the last is kept"
    assert not last.files.best_model.exists()


def test_early_stopping(text: Path, other: Path, tmp_path: Path) -> None:
    made = trained(text, tmp_path / "run", other, patience=2, **FALLS_AND_RISES)
    losses = held_out(made)
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 7
    assert made.best is not None
    assert made.best["step"] == 2 * best
    assert made.loop is not None
    assert made.loop.step == 2 * (best + 2)
    assert made.files.finished
    all_of_it = trained(
        text, tmp_path / "large", other, patience=2, min_delta=1e9, **FALLS_AND_RISES
    )
    assert len(held_out(all_of_it)) == 1 + 2, "no loss is so much lower"
    end = f"; the saved model is from step {2 * best}, which has the lowest evaluation loss"
    end += f" ({min(losses):.3f})"
    stop = f"stopped at step {2 * (best + 2)}: no lower evaluation loss in 2 evaluations{end}"
    assert made.stopped == stop
    again = trained(text, tmp_path / "run", other, patience=2, **FALLS_AND_RISES)
    assert again.loop is None
    assert again.stopped == stop, "its log has it"
    assert all_of_it.stopped is not None
    assert ": no lower evaluation loss (by 1e+09) in 2 evaluations; " in all_of_it.stopped
    more = FALLS_AND_RISES | {"steps": 20}
    assert trained(text, tmp_path / "run", other, keep_best=True, **more).stopped is None


def test_the_table_of_a_run_begins_with_its_best_step(
    text: Path, other: Path, base: Path, tmp_path: Path
) -> None:
    """It has the reason of its end, and losses before and after of a model that existed."""
    sizes = ("--batch", 2, "--tokens", 16, "--steps", 12, "--evaluate-every", 2)
    words = ("--text", text, "--eval", other, "--lr", 0.02, "--patience", 2, *sizes)
    new = ("--layers", 1, "--hidden", 32, "--vocabulary", 300)
    for out, more in (("new", new), ("old", (base,))):
        done = run("finetune", *more, *words, "--out", tmp_path / out)
        assert done.exit_code == 0, done.output
        files = RunFolder(tmp_path / out)
        best, first = files.best(), files.lines()[0]
        assert best is not None
        place = f"{best['step']} of {files.lines()[-1]['step']} (evaluation loss"
        rows = [line for line in done.stdout.splitlines() if line.startswith(("│", "|"))]
        assert re.search(
            rf"best step +.* {re.escape(place)} {best['held_out_loss']:.3f}\) ", rows[0]
        )
        table = re.sub(r"[\s│]+", " ", done.stdout)
        assert files.stopped in table
        again = run("finetune", *more, *words, "--out", tmp_path / out).stdout
        assert files.stopped in re.sub(r"[\s│]+", " ", again)
        change = f"evaluation loss {first['held_out_loss']:.3f} -> {best['held_out_loss']:.3f} nats"
        assert (change in table) == (out == "old")
        assert ("unigram baseline" in done.output) == (out == "new")


@pytest.mark.parametrize("after", [3, 5, 8])
def test_a_stopped_run_with_patience_goes_on_in_equal_bits(
    after: int, text: Path, other: Path, tmp_path: Path
) -> None:
    """Its best model and metric too, which later steps do not improve."""
    settings = {"patience": 2, "save_every": 3, **FALLS_AND_RISES}
    whole = trained(text, tmp_path / "whole", other, **settings)
    stop = Stop()
    trainer = Trainer(
        None, text, Settings(**SIZE, **settings, out=tmp_path / "run"),
        evaluate=other, listener=StopsAfter(stop, after),
    )  # fmt: skip
    last = whole.files.lines()[-1]["step"]
    if after < last:
        with pytest.raises(Interrupted):
            trainer.train(stop)
    ended = trained(text, tmp_path / "run", other, **settings)
    assert ended.best == whole.best
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize("broken", ["_keep_if_best", "_log"])
def test_a_run_that_dies_while_it_keeps_the_best_goes_on_in_equal_bits(
    broken: str, text: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"keep_best": True, "save_every": 3, **FALLS_AND_RISES}
    whole = trained(text, tmp_path / "whole", other, **settings)
    method = getattr(Loop, broken)

    def dies(self: Loop, *arguments: Any) -> None:
        if self.step == 2 and (broken == "_keep_if_best" or "held_out_loss" in arguments[0]):
            raise OSError("died")
        method(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, broken, dies)
        with pytest.raises(OSError, match="died"):
            trained(text, tmp_path / "run", other, **settings)
    ended = trained(text, tmp_path / "run", other, **settings)
    assert ended.best == whole.best
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_adapters_end_with_their_best_too(
    base: Path, text: Path, other: Path, tmp_path: Path
) -> None:
    settings = {"keep_best": True, **FALLS_AND_RISES, "lr": 0.2}
    model = load(base)
    each = Settings(batch=2, tokens=16, **settings, out=tmp_path / "run")
    made = Trainer(model, text, each, lora=Lora(4), evaluate=other).train()
    losses = held_out(made)
    assert made.best is not None
    assert min(losses) < losses[-1]
    (alone,) = evaluate(made.model, other, tokens=16, batch=2)
    (saved,) = evaluate(made.folder, other, tokens=16, batch=2)
    assert made.model is model
    assert alone.loss == saved.loss == min(losses)


def test_prompts_are_continued_at_each_evaluation(
    base: Path, text: Path, lines: Path, tmp_path: Path
) -> None:
    prompts = ["7 and 8", "1"]
    out = tmp_path / "run"
    result = run(
        "finetune", base, "--text", text, "--out", out, "--steps", 2, "--batch", 2, "--tokens", 16,
        "--evaluate-every", 1, "--sample-prompt", prompts[0], "--sample-prompt", prompts[1],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [
        (step, prompt) for step in range(3) for prompt in prompts
    ]
    assert "sample '7 and 8' -> " in result.stderr
    model = load(out / "model")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
    tokens = tokenizer.encode(prompts[0]).ids
    more = model.generate(np.array([tokens]), max_new_tokens=60)[0][len(tokens) :]
    ends = model.config.end_tokens
    assert samples[-2]["text"] == tokenizer.decode([t for t in more.tolist() if t not in ends])
    with pytest.raises(ConfigError, match=r"sample_prompt=.* positions; give another one"):
        trained(text, tmp_path / "long", sample_prompt=["7 " * 40_000], steps=1)
    with pytest.raises(ConfigError, match=r"sample_prompt='7'\): sample_prompt must be a list"):
        trained(text, tmp_path / "long", sample_prompt="7", steps=1)


def test_the_command_evaluates_each_source(
    base: Path, text: Path, lines: Path, tmp_path: Path
) -> None:
    first, second, both = evaluate(base, [text, lines], tokens=16)
    assert both.source == "all"
    assert both.tokens == first.tokens + second.tokens
    total = first.loss * first.tokens + second.loss * second.tokens
    assert abs(both.loss - total / both.tokens) < 1e-12
    assert both.perplexity == math.exp(both.loss)
    result = run("evaluate", "--data", text, lines, base, "--tokens", 16)
    assert result.exit_code == 0, result.output
    for each in (first, second, both):
        assert f"{each.loss:.4f}" in result.output
        assert f"{each.token_accuracy:.2%}" in result.output
    assert f"{lines}: 60 rows with prompt/completion" in result.stderr
    assert "evaluating on 60 completions (" in result.stderr
    (one := tmp_path / "one.jsonl").write_text(lines.read_text().splitlines()[50])
    (only,) = evaluate(base, one)
    assert 0 < only.tokens < second.tokens
    (none := tmp_path / "none.jsonl").touch()
    assert_one_clear_error(run("evaluate", base, "--data", none), "is empty; add a line")
    other = run("evaluate", base, "--data", tmp_path / "none.txt")
    assert_one_clear_error(other, "none.txt: No such file")
    copied = tmp_path / "no-tokenizer"
    shutil.copytree(base, copied)
    (copied / "tokenizer.json").unlink()
    assert_one_clear_error(run("evaluate", copied, "--data", text), "tokenizer.json")
    with pytest.raises(ConfigError, match="name at least one file"):
        evaluate(base, [])


# ---- rules of an evaluation ---------------------------------------------------------------------
def record(line: int) -> Record:
    return Record(line, [], "", f"text {line}")


def records(*lines: int, held_out: tuple[int, ...] = (), **more: Any) -> Records:
    train, other = ([*map(record, each)] for each in (lines, held_out))
    return Records(Path("a.jsonl"), "a", "digest", 9, train, other, **more)


def test_evaluation_data_are_a_share_or_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()
    monkeypatch.setattr(evaluation, "announce", heard.append)
    own, other = records(3, 1, held_out=(2,), method="dpo"), records(5, held_out=(4,), note="noted")
    assert evaluation.held_out_of(own, None) == (own, {})
    data, facts = evaluation.held_out_of(own, other)
    assert isinstance(data, Records)
    assert [each.line for each in data.train] == [1, 2, 3]
    assert [each.line for each in data.held_out] == [-4, -5], "lines of the other file"
    assert data.evaluated is other
    assert facts == {"eval": str(Path("a.jsonl").resolve()), "eval_sha256": "digest"}
    assert heard == ["evaluation data: noted"]
    unnamed = evaluation.held_out_of(own, other._replace(path=None))[1]
    assert unnamed == {"eval": None, "eval_sha256": "digest"}
    data, facts = evaluation.held_out_of(records(*range(1, 41)), 0.25)
    assert isinstance(data, Records)
    assert (len(data.held_out), facts) == (10, {"eval": 0.25})
    words = Text("b", Path("b.txt"), lambda: BytesIO(b"a b"), 3, 2, "b", "other", "noted")
    data, facts = evaluation.held_out_of(words, words._replace(path=Path("c.txt")))
    assert isinstance(data, Text)
    assert (data.held_out, data.cut, data.note, data.path) == ("a b", 3, "", Path("b.txt"))
    assert facts["eval_sha256"] == "other"
    for one, two in ((words, own), (own, words)):
        with pytest.raises(ConfigError, match=r"a\.jsonl has rows, and b\.txt is running text"):
            evaluation.held_out_of(one, two)
    assert evaluation.whole(words) == words._replace(held_out="a b", note="")
    every = evaluation.whole(own)
    assert isinstance(every, Records)
    assert every.train == every.held_out
    assert [each.line for each in every.train] == [1, 2, 3]


def test_sources_of_an_evaluation(tmp_path: Path) -> None:
    own, row = records(1), [{"prompt": "a", "completion": "b"}]
    assert evaluation._sources(own) == [own]
    assert evaluation._sources(row) == [row]
    assert evaluation._sources("a.txt") == [Path("a.txt")]
    assert evaluation._sources(tmp_path) == [tmp_path]
    assert evaluation._sources(("a.txt", tmp_path)) == [Path("a.txt"), tmp_path]
    for empty in ([], ()):
        with pytest.raises(ConfigError, match=r"evaluate\(data=\[\]\): name at least one file"):
            evaluation._sources(empty)


@pytest.mark.parametrize(
    ("head", "names", "method"),
    [
        (CAUSAL, None, "sft"), (NONE, None, "embed"), (SEQUENCE, {"0": "reward"}, "reward"),
        (SEQUENCE, {"0": "a", "1": "b"}, "classify"), (SEQUENCE, None, "classify"),
        (SEQUENCE, {"0": "reward", "1": "b"}, "classify"),
    ],
)  # fmt: skip
def test_a_model_is_evaluated_by_the_method_of_its_head(
    head: str, names: Any, method: str, tmp_path: Path
) -> None:
    model: Any = SimpleNamespace(head=head, texts={"config.json": {"id2label": names}})
    assert evaluation.method_of(model) == method
    chosen = evaluation.of_itself(method, model, tmp_path)
    assert chosen.head in (None, head)
    wrong = "sft" if head != CAUSAL else "classify"
    with pytest.raises(ConfigError, match=f"method={wrong} needs the head .* has {head}; "):
        evaluation.of_itself(wrong, model, tmp_path)
    for name, said in (
        (
            "dpo",
            "method=dpo compares the model with another one, which only training loads; measure"
            " it in training: finetune method=dpo eval=FILE; or choose simpo, cpo or orpo, which",
        ),
        ("kto", "compares the model with"), ("distill", "or choose sft, which reads the same rows"),
        ("grpo", "method=grpo needs rewards; finetune method=grpo eval=FILE measures"),
        ("rloo", "method=rloo needs .*; "),
        ("other", "choose from sft"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            evaluation.of_itself(name, model, tmp_path)


def test_an_evaluation_has_means_over_all_labels() -> None:
    plain: Any = SimpleNamespace(sums=0)
    parts = [np.array([3.0, 6.0, 1.0, 3.0]), np.array([1.0, 2.0, 1.0, 1.0])]
    actual = evaluation._evaluation("a", parts, plain)
    assert actual == Evaluation("a", 4, 2.0, math.exp(2.0), 0.5, 1.0)
    assert evaluation._evaluation("a", [np.zeros(4)], plain).loss == 0
    reward = METHODS["reward"]
    sums = [np.array([2.0, 1.0, 30.0, 2.0, *np.arange(reward.sums)]) for _ in range(2)]
    actual = evaluation._evaluation("a", sums, reward)
    assert (actual.tokens, actual.loss, actual.perplexity) == (60, 0.5, None)
    total = reward.joined([np.arange(reward.sums)] * 2)
    assert actual.measures == {"pairs": 4} | reward.measures(total)
    empty = np.array([0.0, 0.0, 0.0, 0.0, *np.zeros(reward.sums)])
    assert evaluation._evaluation("a", [empty], reward).loss == 0


@pytest.mark.parametrize("vocab", [8, 9])
def test_batches_of_an_evaluation_are_padded_by_a_token_of_the_model(
    vocab: int, base: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows are as long as asked for, or as 2048 and the positions allow."""
    shapes = list[Any]()

    def stops(data: Any, tokenizer: Any, config: Any, shape: Any, *_: Any) -> None:
        shapes.append(shape)
        raise KeyError

    monkeypatch.setattr(evaluation, "from_records", stops)
    model = load(base)
    for pad, tokens, expected in ((None, 7, 0), (vocab, 7, 0), (vocab - 1, None, vocab - 1)):
        model.config = dataclasses.replace(model.config, pad_token=pad, vocab=vocab, positions=50)
        with pytest.raises(KeyError):
            evaluate(model, lines, tokens=tokens, batch=3)
        assert shapes[-1][:4] == (3, tokens or 50, True, expected)


def test_rows_are_those_that_the_head_was_trained_on(
    base: Path, text: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(base)
    model.config = dataclasses.replace(model.config, labels=2)

    def reads(*_: Any) -> None:
        raise KeyError("reads")

    monkeypatch.setattr(evaluation, "from_records", reads)
    for names, summary, said in (
        (("a",), "1 class", f"{lines} has 1 class, but the model has 2 outputs; pass rows with"),
        (("a",), "", f"{lines} has pairs, but the model has 2 outputs; pass rows with"),
        (("a", "b"), "2 classes", "reads"), ((), "", "reads"),
    ):  # fmt: skip
        own = SimpleNamespace(names=names, summary=summary)
        chosen = SimpleNamespace(fitted=lambda *_, own=own: own, sums=1)
        monkeypatch.setattr(evaluation, "of_itself", lambda *_, chosen=chosen: chosen)
        with pytest.raises(KeyError if said == "reads" else ConfigError, match=re.escape(said)):
            evaluate(model, lines)
        with pytest.raises(
            ConfigError, match=f"{text} is running text, which only sft reads; pass"
        ):
            evaluate(model, text)


def test_an_evaluation_names_device_and_origin(
    base: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, model = list[str](), load(base)
    monkeypatch.setattr(evaluation, "announce", heard.append)
    monkeypatch.setattr(evaluation.models, "load", lambda *_, **__: model)
    monkeypatch.setattr(evaluation, "resolve_device", lambda _: (None, "the GPU is too old"))
    for origin in ("", "from a file"):
        model.origin = origin
        evaluate(base, text, tokens=16)
        assert heard[0] == "the GPU is too old"
        assert heard[1].startswith("evaluating on ")
        assert heard[2:] == [origin] * bool(origin)
        heard.clear()
    evaluate(model, text, tokens=16)
    assert heard == []
    model.folder = None
    with pytest.raises(
        ConfigError, match="evaluate: the model has no folder, and no tokenizer; lo"
    ):
        evaluate(model, text)


def test_measures_of_tokens() -> None:
    counts = metrics.Counts(3.0, 2.0)
    assert metrics.measures(2.0, counts, 4, of_next_token=True) == {
        "perplexity": math.exp(2.0), "token_accuracy": 0.75, "entropy": 0.5,
    }  # fmt: skip
    assert metrics.measures(2.0, counts, 4, of_next_token=False) == {
        "token_accuracy": 0.75, "entropy": 0.5,
    }  # fmt: skip
    assert metrics.measures(1e9, metrics.Counts(), 4, of_next_token=True) == {
        "perplexity": math.exp(700.0)
    }
    model: Any = SimpleNamespace(config=None)
    assert all(map(math.isnan, metrics.Watch(model).counts({})))


@pytest.mark.parametrize(
    ("chats", "prompt", "fits"), [(False, 0, False), (False, 1, True), (False, 9, True),
                                  (False, 10, False), (True, 1, True), (True, 10, False)]
)  # fmt: skip
def test_prompts_leave_a_position(chats: bool, prompt: int, fits: bool) -> None:
    seen = list[Any]()

    def encode(text: str, **options: Any) -> Any:
        seen.append((text, options))
        return SimpleNamespace(ids=[1] * prompt)

    chat = SimpleNamespace(asked=lambda talk: f"asked {talk[0]['content']}")
    loop = SimpleNamespace(
        tokenizer=SimpleNamespace(encode=encode), chat=chat if chats else None,
        model=SimpleNamespace(config=SimpleNamespace(positions=10)),
        plan=SimpleNamespace(sample_prompt=["hello"], method="sft"),
        ranks=SimpleNamespace(whole=True), method=SimpleNamespace(head=None),
    )  # fmt: skip
    if fits:
        samples.check_prompts(loop)
        assert samples.prompt_tokens(loop, "hello") == [1] * prompt
    else:
        said = f"sample_prompt=hello has {prompt} tokens, and the model 10 positions; give another"
        with pytest.raises(ConfigError, match=said):
            samples.check_prompts(loop)
    options = {"add_special_tokens": False}
    assert seen[0] == (("asked hello", options) if chats else ("hello", {}))
    for values, said in (
        (
            {"ranks": SimpleNamespace(whole=False)},
            "sample_prompt is not supported when ranks split",
        ),
        ({"method": SimpleNamespace(head=CAUSAL)}, "sample_prompt needs a language model, which m"),
    ):
        each = SimpleNamespace(**vars(loop) | values)
        with pytest.raises(ConfigError, match=said):
            samples.check_prompts(each)
        each.plan = SimpleNamespace(sample_prompt=[], method="sft")
        samples.check_prompts(each)


def test_samples_are_of_the_first_rank() -> None:
    written, asked = list[Any](), list[Any]()

    def stream(tokens: Any, *, max_new_tokens: int) -> Any:
        asked.append((tokens.tolist(), max_new_tokens))
        return iter([np.array([5]), np.array([2]), np.array([6])])

    def loop(first: bool, positions: int) -> Any:
        config = SimpleNamespace(positions=positions, end_tokens=(2,))
        return SimpleNamespace(
            tokenizer=SimpleNamespace(encode=lambda _: SimpleNamespace(ids=[1, 3]), decode=str),
            model=SimpleNamespace(config=config, stream=stream, table=np.zeros(1)), chat=None,
            plan=SimpleNamespace(sample_prompt=["hello"]), ranks=SimpleNamespace(first=first),
            step=4, run=SimpleNamespace(append_sample=written.append),
            listener=SimpleNamespace(sampled=lambda *given: written.append(given)),
        )  # fmt: skip

    samples.write_samples(loop(False, 99))
    assert written == []
    samples.write_samples(loop(True, 99))
    assert written == [{"step": 4, "prompt": "hello", "text": "[5, 6]"}, (4, "hello", "[5, 6]")]
    samples.write_samples(loop(True, 10))
    assert asked == [([[1, 3]], 60), ([[1, 3]], 8)]
