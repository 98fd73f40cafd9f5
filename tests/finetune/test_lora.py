"""``Trainer(lora=Lora(...))``, and models in memory that a run trains in place."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Run, Settings, Trainer
from unsloth_cupy.finetune.listener import Listener
from unsloth_cupy.finetune.lora import check_learns
from unsloth_cupy.finetune.run import new_tokens
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.models import Transformer, create, load, merge, quantize

from ..cli.test_cli import run, weights

SMALL: dict[str, Any] = {"batch": 2, "tokens": 16, "steps": 3, "lr": 0.01}
LORA = Lora(4, alpha=12, dropout=0.25, targets=("q_proj", "up_proj"), rslora=True, dora=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


@pytest.fixture(scope="session")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"layers": 1, "hidden": 32, "vocabulary": 300}
    out = tmp_path_factory.mktemp("base")
    return Trainer(None, text, Settings(**SMALL | size, out=out)).train().files.model


class StopsAfter(Listener):
    def __init__(self, stop: Stop, step: int) -> None:
        self.request, self.last = stop, step

    def step(self, line: dict[str, Any]) -> None:
        self.request.signal = 2 if line["step"] == self.last else None


def trained(model: Any, text: Path, out: Path, lora: Lora | None = None, **settings: Any) -> Run:
    return Trainer(model, text, Settings(**SMALL | {"out": out} | settings), lora=lora).train()


def adapter(folder: Path) -> bytes:
    return (folder / "model" / "adapter_model.safetensors").read_bytes()


def test_every_option_reaches_the_adapter(base: Path, text: Path, tmp_path: Path) -> None:
    """In the names of peft; the fields of the settings and the command's flags say the same."""
    made = trained(base, text, tmp_path / "lora", LORA)
    settings = json.loads((made.files.model / "adapter_config.json").read_text())
    expected = {
        "r": 4, "lora_alpha": 12, "lora_dropout": 0.25, "target_modules": ["q_proj", "up_proj"],
        "use_rslora": True, "use_dora": True,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    Trainer(base, text, Settings(**SMALL, **LORA.settings(), out=tmp_path / "fields")).train()
    flags = ["--lora=4", "--lora-alpha=12", "--lora-dropout=.25", "--lora-targets=q_proj,up_proj"]
    given = [f"--{name}={value}" for name, value in SMALL.items()]
    done = run(
        "finetune", base, "--text", text, "--out", tmp_path / "command", *given, *flags,
        "--rslora", "--dora",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert adapter(tmp_path / "lora") == adapter(tmp_path / "fields")
    assert adapter(tmp_path / "lora") == adapter(tmp_path / "command")


def test_dropout_changes_what_is_learned_and_goes_on_in_equal_bits(
    base: Path, text: Path, tmp_path: Path
) -> None:
    dropping = dataclasses.replace(LORA, dora=False)
    whole = trained(base, text, tmp_path / "whole", dropping)
    without = trained(base, text, tmp_path / "without", dataclasses.replace(dropping, dropout=0.0))
    assert whole.losses[0] == without.losses[0], "B is 0 at first"
    assert whole.losses[2] != without.losses[2]
    stop, settings = Stop(), Settings(**SMALL, out=tmp_path / "run")
    listener = StopsAfter(stop, 2)
    with pytest.raises(Interrupted):
        Trainer(base, text, settings, lora=dropping, listener=listener).train(stop)
    Trainer(base, text, settings, lora=dropping).train()
    assert adapter(tmp_path / "run") == adapter(tmp_path / "whole")


def test_passes_of_a_step_drop_different_elements(base: Path, text: Path, tmp_path: Path) -> None:
    seeds: list[int | None] = []

    def objective(model: Any, **batch: Any) -> Any:
        seeds.append(model.step.seed)
        return model.loss(**batch)

    settings = Settings(**SMALL | {"steps": 2}, accumulate=2, out=tmp_path / "run")
    Trainer(base, text, settings, lora=LORA, objective=objective).train()
    used = [seed for seed in seeds if seed]
    assert len(used) == len({*used}) == 4
    assert max(used) > 2**32, "two of 2**63 numbers are hardly ever equal"
    assert None in seeds, "an evaluation drops nothing"


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("q_proj, down_proj", {"q_proj", "down_proj"}),
        (["o_proj"], {"o_proj"}),
    ],
)
def test_targets(targets: Any, names: set[str], base: Path) -> None:
    model = load(base)
    model.add_adapter(**Lora(2, targets=targets).options(model.config))
    assert model.adapter is not None
    assert {module.rpartition(".")[2] for module in model.adapter.scales} == names


@pytest.mark.parametrize(
    ("lora", "settings", "said"),
    [
        (Lora(0), {}, "lora=0: give a whole number of 1 or more"),
        (Lora(4, alpha=0), {}, "lora_alpha=0: give a number above 0"),
        (Lora(4, dropout=1), {}, "lora_dropout=1: give a number of 0 or more, below 1"),
        (Lora(4, targets="mlp"), {}, "lora_targets=mlp: give all, attention, or some of down_proj"),
        (Lora(4, targets=()), {}, "lora_targets=(): give all, attention, or some of down_proj"),
        (None, {"lora_dropout": 0.1}, "lora_dropout=0.1 applies to new adapters only; add lora"),
        (Lora(4), {"lora": 8}, "differ; leave one out"),
        (16, {}, "Trainer(lora=16): pass Lora(16), or None"),
        (Lora(4), {"new_tokens": "nothing.txt"}, "new_tokens=nothing.txt cannot be read: "),
        (Lora(4), {"embedding_lr": 0.1}, "the run trains neither the embedding nor the head"),
    ],
)
def test_wrong_options_are_named(
    lora: Any, settings: dict[str, Any], said: str, base: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(
            base, text, Settings(**SMALL | settings, out=tmp_path / "run"), lora=lora
        ).train()  # fmt: skip
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["whole", "adapters"])
def test_a_model_in_memory_is_trained_as_its_folder_is(
    lora: Lora | None, dtype: str, base: Path, text: Path, tmp_path: Path
) -> None:
    source = base
    if dtype != "float32":
        source = tmp_path / "narrow"
        narrow = load(base, dtype=dtype)
        narrow.save(source)
        (source / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    model = load(source)
    made = trained(model, text, tmp_path / "memory", lora)
    other = trained(source, text, tmp_path / "folder", lora)
    assert made.model is model
    assert made.losses == other.losses
    bits = weights if lora is None else adapter
    assert bits(tmp_path / "memory") == bits(tmp_path / "folder")
    again = trained(load(source), text, tmp_path / "memory", lora)
    tokens = np.array([[1, 2, 3]])
    assert (again.model.logits(tokens) == model.logits(tokens)).all()


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["whole", "adapters"])
def test_a_model_in_memory_goes_on_in_equal_bits(
    lora: Lora | None, base: Path, text: Path, tmp_path: Path
) -> None:
    whole = trained(load(base), text, tmp_path / "whole", lora)
    stop, settings = Stop(), Settings(**SMALL, out=tmp_path / "run")
    with pytest.raises(Interrupted):
        Trainer(
            load(base), text, settings, lora=lora, listener=StopsAfter(stop, 2)
        ).train(stop)  # fmt: skip
    ended = Trainer(load(base), text, settings, lora=lora).train()
    assert ended.losses == whole.losses
    bits = weights if lora is None else adapter
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


@pytest.mark.parametrize("outer", [{"tokens": [3, 40]}, {"modules": ["embed_tokens"]}], ids=str)
def test_rows_and_tables_go_on_in_equal_bits(
    outer: dict[str, Any], base: Path, text: Path, tmp_path: Path
) -> None:
    def model() -> Transformer:
        read = load(base)
        read.add_adapter(2, **outer)
        return read

    before = model()
    whole = trained(before, text, tmp_path / "whole")
    name = next(name for name in before.trainable if "embed_tokens" in name)
    assert (before.trainable[name] != model().trainable[name]).any(axis=1).all()
    stop, settings = Stop(), Settings(**SMALL, out=tmp_path / "run")
    with pytest.raises(Interrupted):
        Trainer(model(), text, settings, listener=StopsAfter(stop, 2)).train(stop)
    ended = Trainer(model(), text, settings).train()
    assert ended.losses == whole.losses
    assert adapter(tmp_path / "run") == adapter(tmp_path / "whole")


def test_a_model_in_memory_may_be_quantized(base: Path, text: Path, tmp_path: Path) -> None:
    model = load(base)
    quantize(model, "nf4", least=0)
    made = trained(model, text, tmp_path / "run", Lora(4))
    assert made.model.adapter is not None
    assert made.best == made.files.lines()[-1]
    again = load(base)
    quantize(again, "nf4", least=0)
    with pytest.raises(ConfigError, match="is quantized, which freezes the weights: add lora"):
        trained(again, text, tmp_path / "frozen")


def test_models_in_memory_that_cannot_be_trained(base: Path, text: Path, tmp_path: Path) -> None:
    new: Transformer = create(json.loads((base / "config.json").read_text()), seed=0)
    with pytest.raises(ConfigError, match="the model has no folder, and no tokenizer; save it"):
        trained(new, text, tmp_path / "run")
    adapted = load(base)
    adapted.add_adapter(2)
    with pytest.raises(
        ConfigError, match="the model already has adapters, which are trained further"
    ):
        trained(adapted, text, tmp_path / "run", Lora(4))
    trained(load(base), text, tmp_path / "run", Lora(4))
    changed = load(base)
    changed.parameters["model.norm.weight"] += 1
    with pytest.raises(ConfigError, match="another base model: the model has changed since"):
        trained(changed, text, tmp_path / "run", Lora(4))


def test_adapters_without_a_gradient_are_named() -> None:
    """A step in which nothing has a gradient, as of equal rewards, says nothing."""
    config = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    model = create(config, seed=0)
    model.add_adapter(2, tokens=[3])
    ids = np.random.default_rng(0).integers(4, 97, (2, 9))  # without token 3
    _, gradients = model.loss_and_gradients(ids, ids)
    said = check_learns(model.adapter, gradients)
    assert said == "adapters of 14 layers, all with a gradient"
    assert check_learns(model.adapter, {n: 0 * g for n, g in gradients.items()}) is None
    for name in [n for n in gradients if ".v_proj.lora_B" in n]:
        gradients[name] = 0 * gradients[name]
    where = r"of model\.layers\.0\.self_attn\.v_proj \(and 1 more\) is 0 everywhere"
    with pytest.raises(ConfigError, match=where):
        check_learns(model.adapter, gradients)
    rows = {n: g for n, g in gradients.items() if "lora" not in n}
    assert check_learns(model.adapter, rows) == ""


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    path = tmp_path / "signs.txt"
    path.write_text("<|and|>\n<| make|>\nmake\n")
    return path


def test_new_tokens_are_learned_and_stay(base: Path, signs: Path, tmp_path: Path) -> None:
    """Rows of table and head alone, in equal bits after a stop; then merged and in use."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i}<|and|>{i + 1} make {2 * i + 1}." for i in range(200)))
    settings = {"new_tokens": signs, "save_every": 1, "embedding_lr": 0.05, "weight_decay": 0.0}
    said = list[str]()
    heard = Listener()
    heard.announce = said.append  # type: ignore[method-assign]
    chosen = Settings(**SMALL | settings, out=tmp_path / "whole")
    whole = Trainer(base, text, chosen, lora=Lora(2), listener=heard).train()
    expected = (
        "3 new tokens occur 362 times in the training data, 1 of them do not occur: '<| make|>'"
    )
    assert expected in "\n".join(said)
    stop, chosen = Stop(), dataclasses.replace(chosen, out=tmp_path / "stopped")
    with pytest.raises(Interrupted):
        Trainer(base, text, chosen, lora=Lora(2), listener=StopsAfter(stop, 1)).train(stop)
    trained(base, text, tmp_path / "stopped", Lora(2), **settings)
    assert adapter(tmp_path / "stopped") == adapter(tmp_path / "whole")
    model, before = whole.model, load(base)
    assert model.config.vocab % 64 == 0
    table = before.table
    np.testing.assert_array_equal(model.table[: len(table)], table)
    rows = next(a for n, a in model.trainable.items() if n.endswith("trainable_tokens_delta"))
    ids = [model.tokenizer.encode(sign)[0] for sign in signs.read_text().split("\n")[:-1]]
    assert ids == [*range(len(table), len(table) + 3)]
    assert [*map(len, map(model.tokenizer.encode, ("<|and|>", "<| make|>", "make")))] == [1, 1, 1]
    changed = np.abs(rows - table.mean(axis=0)).max(axis=1)
    assert changed.min() > 0.05  # three steps of this rate: the head's part is of every row
    prompt = model.tokenizer.encode("3<|and|>4")[None]
    merge(tmp_path / "whole" / "model", tmp_path / "merged", base=base)
    merged = load(tmp_path / "merged")
    np.testing.assert_array_equal(merged.tokenizer.encode("3<|and|>4")[None], prompt)
    np.testing.assert_allclose(merged.logits(prompt), model.logits(prompt), atol=1e-5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; write one token per line"),
        (b"a\n\nb\n", "line 2 is empty; remove it"),
        (b"one\ntwo\none\n", "line 3 repeats line 1, 'one'; remove one"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_of_tokens_that_are_wrong(
    content: bytes, said: str, base: Path, text: Path, signs: Path, tmp_path: Path
) -> None:
    signs.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        trained(base, text, tmp_path / "run", Lora(4), new_tokens=signs)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []), ("a", ["a"]), ("a\n", ["a"]), ("a\n\n", ["a", ""]), ("a\r\nb\r\n", ["a", "b"]),
        (" a \nb", [" a ", "b"]), ("\n", [""]), ("a\rb\n", ["a\rb"]),
    ],
)  # fmt: skip
def test_lines_of_a_file_of_tokens(text: str, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "signs.txt").write_bytes(text.encode())
    assert new_tokens.read_lines(tmp_path / "signs.txt") == lines


@pytest.mark.parametrize(
    ("tokens", "rows"), [([3], 99), ([98, 4], 99), ([99], 128), ([127], 128), ([5, 128], 192)]
)
def test_a_table_grows_to_a_multiple_of_64(tokens: list[int], rows: int) -> None:
    config: Any = SimpleNamespace(vocab=99)
    assert new_tokens.rows_with(config, tokens) == rows


@pytest.mark.parametrize("of_rows", [False, True])
def test_new_tokens_are_counted_in_the_training_data(
    of_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_tokens, "COUNTED", 4)
    tokens = np.array([1, 9, 9, 3, 8, 1, 9, 50, 7, 9, 2], np.int32)
    examples = [SimpleNamespace(tokens=tokens.tobytes(), kind=np.int32)] if of_rows else None
    data: Any = SimpleNamespace(examples=examples, batches=SimpleNamespace(tokens=tokens))
    names: Any = SimpleNamespace(id_to_token=lambda token: f"<{token}>")
    parts = [part.tolist() for part in new_tokens.parts_of(data)]
    whole = tokens.tolist()
    assert parts == ([whole] if of_rows else [whole[:4], whole[4:8], whole[8:]])
    for chosen, said in (
        ([9, 3], "2 new tokens occur 5 times in the training data"),
        ([9, 10], "2 new tokens occur 4 times in the training data, 1 of them do not occur:"
         " '<10>'"),
        ([50, *range(60, 65)], "6 new tokens occur 1 times in the training data, 5 of them do not"
         " occur: '<60>', '<61>', '<62>', '<63>', '<64>'"),
        ([*range(60, 66)], "6 new tokens occur 0 times in the training data, 6 of them do not"
         " occur: '<60>', '<61>', '<62>', '<63>', '<64>', ..."),
    ):  # fmt: skip
        assert new_tokens.account(names, chosen, data) == said


def test_tables_have_a_rate_of_their_own(base: Path, text: Path, tmp_path: Path) -> None:
    """In a step of Adam the rate alone says how far a number moves."""
    start, moved = load(base), dict[str, float]()
    settings = {"steps": 1, "lr": 1e-3, "embedding_lr": 1e-5, "weight_decay": 0.0, "warmup": 0}
    model = trained(base, text, tmp_path / "run", decay="constant", **settings).model
    for name, array in model.parameters.items():
        moved[name] = float(np.abs(array - start.parameters[name]).max())
    tables = {name for name in moved if "embed_tokens" in name or "lm_head" in name}
    assert all(5e-6 < moved[name] < 2e-5 for name in tables)
    assert all(5e-4 < moved[name] < 2e-3 for name in moved.keys() - tables)


def test_a_base_in_16_bits_is_in_memory_once(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its float32 weights are freed; those that the computation takes as they are stay."""
    before: dict[str, Any] = {}

    def prepared(run: Any, model: Transformer, *more: Any) -> Loop:
        before.update({name: ref(array) for name, array in model.parameters.items()})
        return Loop(run, model, *more)

    monkeypatch.setattr("unsloth_cupy.finetune.run.preparation.Loop", prepared)
    model = trained(base, text, tmp_path / "run", Lora(2), dtype="bfloat16").model
    actual = {name for name, array in before.items() if array() is not None}
    assert actual == {name for name, each in model.parameters.items() if each.dtype == np.float32}
    assert actual < before.keys()
