"""A model that ``models.load`` has read is trained as its folder is: new, resumed and finished."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Lora, Run, Settings, Trainer
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.models import Transformer, export_gguf, load

from ..harness.sampling import Sample

TURNS = 4  # days in which every case has its turn
SMALL: dict[str, Any] = {"batch": 2, "tokens": 48, "steps": 2, "lr": 0.01, "decay": "constant"}
SEQUENCE: dict[str, Any] = {"head": "sequence_classification"}
SUMS = [{"prompt": f"{i} and {i + 1}", "completion": f" make {2 * i + 1}."} for i in range(40)]
SIGNS = [{"prompt": f"{i}<x>{i}", "completion": f" make<x>{2 * i}."} for i in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i}!"}]}
    for i in range(20)
]
PAIRS = [{"prompt": f"{i}", "chosen": f" {i}", "rejected": f" {i + 1}"} for i in range(20)]
RATED = [{"prompt": f"{i}", "completion": f" {i}", "label": i % 2 == 0} for i in range(20)]
LABELLED = [{"text": f"{i} and", "label": "ab"[i % 2]} for i in range(20)]
RELATED = [{"anchor": f"{i} and", "positive": f"{i} make"} for i in range(20)]
GRPO = {"method": "grpo", "max_new_tokens": 2, "samples": 2}
# rows, how the model is loaded, rank of new adapters, and settings
CASES: dict[str, tuple[Any, dict[str, Any], int | None, dict[str, Any]]] = {
    "whole": (SUMS, {}, None, {}),
    "adapters": (SUMS, {}, 2, {}),
    "bfloat16": (SUMS, {}, 2, {"dtype": "bfloat16"}),
    "quantized by settings": (SUMS, {}, 2, {"quantize": "nf4"}),
    "quantized as loaded": (SUMS, {"quantize": "nf4"}, 2, {}),
    "of a file to merge into": (SUMS, {}, 2, {"merge_into": "q4_0"}),
    "with new tokens": (SIGNS, {}, 2, {"new_tokens": "signs.txt"}),
    "whole with new tokens": (SIGNS, {}, None, {"new_tokens": "signs.txt"}),
    "of an adapter with tokens": (SIGNS, {"folder": "signs/model"}, None, {}),
    "of an adapter of chats": (CHATS, {"folder": "chats/model"}, None, {}),
    "of GGUF": (SUMS, {"folder": "base.gguf"}, None, {}),
    "dpo": (PAIRS, {}, None, {"method": "dpo"}),
    "dpo of adapters": (PAIRS, {}, 2, {"method": "dpo"}),
    "orpo": (PAIRS, {}, None, {"method": "orpo"}),
    "kto": (RATED, {}, 2, {"method": "kto"}),
    "reward": (PAIRS, SEQUENCE | {"labels": 1}, None, {"method": "reward"}),
    "classify": (LABELLED, SEQUENCE | {"labels": 2}, None, {"method": "classify"}),
    "classify by adapters": (LABELLED, SEQUENCE | {"labels": 2}, 2, {"method": "classify"}),
    "classify on": (LABELLED, {"folder": "labels/model"}, None, {"method": "classify"}),
    "embed": (RELATED, {"head": "none"}, None, {"method": "embed"}),
    "distill": (SUMS, {}, None, {"method": "distill", "teacher": "base/model"}),
    "grpo": (PAIRS[:8], {}, 2, GRPO | {"beta": 0.1}),
}


class StopsAfterOne(Listener):
    def __init__(self, stop: Stop) -> None:
        self.request = stop

    def step(self, line: dict[str, Any]) -> None:
        self.request.signal = 2 if line["step"] == 1 else None


def even(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(each) % 2) for each in completions]


def trained(model: Any, rows: Any, out: Path, rank: int | None = None, **settings: Any) -> Run:
    """Return a finished run."""
    return trainer(model, rows, out, rank, **settings).train()


def trainer(
    model: Any, rows: Any, out: Path, rank: int | None, listener: Any = None, **settings: Any
) -> Trainer:
    if settings.get("method") == "grpo":
        rows = [{"prompt": row["prompt"]} for row in rows]
    return Trainer(
        model, rows, Settings(**SMALL | {"out": out} | settings),
        reward=even if settings.get("method") == "grpo" else None,
        lora=None if rank is None else Lora(rank), listener=listener,
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in-memory")
    size = {"layers": 1, "hidden": 64, "vocabulary": 300}
    base = trained(None, SUMS + CHATS, folder / "base", **size).files.model
    (folder / "signs.txt").write_text("<x>\n")
    trained(base, SIGNS, folder / "signs", 2, new_tokens=folder / "signs.txt")
    trained(base, CHATS, folder / "chats", 2)
    trained(base, LABELLED, folder / "labels", method="classify")
    export_gguf(base, folder / "base.gguf")
    return folder


def bits(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.files.model.glob("*.safetensors")}


@pytest.mark.parametrize("label", Sample.one_in(TURNS, CASES))
def test_it_is_trained_as_its_folder(label: str, home: Path, tmp_path: Path) -> None:
    rows, loading, rank, settings = CASES[label]
    options = {n: home / v if n in ("new_tokens", "teacher") else v for n, v in settings.items()}
    folder = home / loading.get("folder", "base/model")
    how = {name: value for name, value in loading.items() if name != "folder"}

    def model() -> Transformer:
        return load(folder, **how)

    of_folder = options | {name: how[name] for name in ("quantize",) if name in how}
    expected = trained(folder, rows, tmp_path / "folder", rank, **of_folder)
    stop = Stop()
    stopped = trainer(model(), rows, tmp_path / "run", rank, StopsAfterOne(stop), **options)
    with pytest.raises(Interrupted):
        stopped.train(stop)
    resumed = trained(model(), rows, tmp_path / "run", rank, **options)
    assert resumed.losses == expected.losses
    assert bits(resumed) == bits(expected)
    finished = trained(model(), rows, tmp_path / "run", rank, **options)
    assert finished.loop is None
    actual = finished.model.trainable
    assert actual.keys() == resumed.model.trainable.keys()
    for name, array in resumed.model.trainable.items():
        np.testing.assert_array_equal(actual[name], array, name)


def test_the_model_of_a_run_is_trained_further_by_its_own_tokenizer(
    home: Path, tmp_path: Path
) -> None:
    options = {"new_tokens": home / "signs.txt"}
    first = trained(load(home / "base/model"), SIGNS, tmp_path / "first", 2, **options)
    expected = trained(tmp_path / "first", SIGNS, tmp_path / "folder")
    actual = trained(first.model, SIGNS, tmp_path / "memory")
    assert (actual.losses, bits(actual)) == (expected.losses, bits(expected))


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "device": (load, {"device": "cuda"}, "but the model is on cpu; load it with mode"),
    "sizes": (load, {"layers": 2}, "describe a new model"),
    "quantized": (lambda f: load(f, quantize="nf4"), {}, "is quantized, which freezes the weights"),
    "twice": (
        lambda f: load(f, quantize="nf4"),
        {"quantize": "int8", "lora": 2},
        "is quantized already, as nf4; leave quantize out",
    ),
    "head": (load, {"method": "reward"}, "needs another head than the model's"),
    "labels": (
        lambda f: load(f, **SEQUENCE, labels=3),
        {"method": "classify"},
        "the model has the labels 0, 1, 2, but not a",
    ),
}


@pytest.mark.parametrize("label", REFUSED)
def test_what_a_loaded_model_cannot_be_trained_as_is_said(
    label: str, home: Path, tmp_path: Path
) -> None:
    model, settings, said = REFUSED[label]
    rows = {"reward": PAIRS, "classify": LABELLED}.get(settings.get("method", ""), SUMS)
    with pytest.raises(ConfigError, match=said):
        trained(model(home / "base/model"), rows, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_part_of_a_model_is_not_trained_alone(home: Path) -> None:
    model = load(home / "base/model")
    for name in ("division", "parts"):
        setattr(model, name, SimpleNamespace())
        with pytest.raises(ConfigError, match="a model in memory is trained by one process; pass"):
            Trainer(model, SUMS)
        setattr(model, name, None)
    for device in (None, "auto", "cpu"):
        assert Trainer(model, SUMS, Settings(device=device)).settings.device == "cpu"
