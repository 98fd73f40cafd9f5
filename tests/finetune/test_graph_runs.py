"""Runs whose steps a GPU repeats as CUDA graphs: their log is that of runs without."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.models import graphs

from ..machines.stand_in import gpu
from ..models.peers import MIXTURES, SIZES
from ..models.test_graphs import lora_layer, on_device

pytest.importorskip("tokenizers", reason="needs the extra `cli`")
TEXT = "\n\n".join(
    f"{i}. The {['cat', 'dog', 'fish'][i % 3]} sees {i * i} mice" for i in range(400)
)
NEW: dict[str, Any] = {"layers": 1, "hidden": 32, "vocabulary": 300, "tokens": 24, "batch": 2}


def run(
    folder: Path,
    patch: pytest.MonkeyPatch,
    model: Path | None = None,
    text: Path | None = None,
    **settings: Any,
) -> tuple[list[Any], int]:
    """Return a run's log without times, on the stand-in, and the number of launched graphs."""
    made = []
    patch.setattr(graphs, "Graph", lambda *of: made.append(graphs_graph(*of)) or made[-1])
    text = folder / "text.txt" if text is None else text
    if not text.exists():
        text.write_text(TEXT)
    settings = {"steps": 7, "evaluate_every": 7} | settings
    with gpu("80", devices=1) as machine:
        patch.setattr(lora_layer, "dropped_rows", on_device(machine))
        machine.strict, machine.runs = False, True
        chosen = Settings(device="cuda", out=folder / "run", **settings)
        Trainer(model, text, chosen).train()
    lines = map(json.loads, (folder / "run" / "log.jsonl").read_text().splitlines())
    times = {"seconds", "tokens_per_second", "memory_bytes", "planned_bytes", "peak_bytes"}
    log = [{name: line[name] for name in line.keys() - times} for line in lines]
    return log, sum(each.captured.graph.launched for each in made if each.captured.graph)


graphs_graph = graphs.Graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "launched"),
    [
        ({}, 5),
        ({"accumulate": 2, "dtype": "bfloat16"}, 5 + 3),
        ({"dtype": "float16"}, 5),
        ({"neftune": 5.0}, 5),
    ],
    ids=str,
)
def test_a_run_has_the_log_of_one_without(
    settings: Any, launched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates, weights, scale, labels and noise are other ones in every step."""
    logs = []
    for graph, count in ((False, 0), (None, launched)):
        folder = tmp_path / str(graph)
        folder.mkdir()
        log, times = run(folder, monkeypatch, graph=graph, **NEW, **settings)
        assert times == count
        logs.append(log)
    assert logs[1] == logs[0]
    assert len({line["loss"] for line in logs[0] if "loss" in line}) == 7


@pytest.mark.slow
def test_a_run_of_preferences_may_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums, such as the accuracy, come from the graph too."""
    # what the stand-in leaves in arrays of kernels may be above 0
    monkeypatch.setattr("unsloth_cupy.losses._rows.ROUNDED", np.inf)
    pairs = [{"prompt": f"Q {'ab'[i % 2]}:", "chosen": " ?", "rejected": " !"} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "text.txt").write_text(TEXT)
    new = Settings(steps=1, out=tmp_path / "model", **NEW)
    Trainer(data=tmp_path / "text.txt", settings=new).train()
    logs = []
    for graph in (False, True):
        learning: dict[str, Any] = {"method": "dpo", "lora": 2, "pack": False, "batch": 2}
        folder = tmp_path / str(graph)
        folder.mkdir()
        more = {"model": tmp_path / "model" / "model", "text": tmp_path / "pairs.jsonl"}
        log, times = run(folder, monkeypatch, graph=graph, steps=6, **learning, **more)
        assert (times > 0) == graph
        logs.append(log)
    assert logs[1] == logs[0]
    assert {"accuracy", "margin"} <= logs[0][1].keys()


@pytest.mark.slow
def test_a_run_with_dropout_goes_on_with_the_draws_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step draws by its number, before and after the run was left."""
    (tmp_path / "text.txt").write_text(TEXT)
    new = Settings(steps=1, out=tmp_path / "model", **NEW)
    Trainer(data=tmp_path / "text.txt", settings=new).train()
    logs = []
    for graph in (False, True):
        folder = tmp_path / str(graph)
        folder.mkdir()
        more: dict[str, Any] = {"model": tmp_path / "model" / "model", "graph": graph}
        more |= {"lora": 2, "lora_dropout": 0.4, "batch": 2, "tokens": 24, "evaluate_every": 8}
        _, first = run(folder, monkeypatch, **more, steps=4)
        log, times = run(folder, monkeypatch, **more, steps=8)
        assert ((first, times) == (2, 2)) == graph, (first, times)
        logs.append(log)
    assert logs[1] == logs[0]
    assert len({line["loss"] for line in logs[0] if "loss" in line}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, 4])
def test_most_steps_of_packed_answers_are_graphs(
    experts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches have the sizes of their texts, and 12 of 20 steps are launches of graphs."""
    words = [(f"Say {i % 9}:", " cat" * (1 + i * 7 % 3)) for i in range(600)]
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in words]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text.txt").write_text(TEXT)
    config = None
    if experts is not None:
        config = models.create(SIZES | MIXTURES["mixtral"] | {"vocab_size": 300}, seed=0)
    new = Settings(steps=1, out=tmp_path / "model", **NEW)
    Trainer(data=tmp_path / "text.txt", settings=new).train()
    folder = tmp_path / "model" / "model"
    if config is not None:
        config.save(folder.with_name("mixture"))
        shutil.copy(folder / "tokenizer.json", folder.with_name("mixture"))
        folder = folder.with_name("mixture")
    more: dict[str, Any] = {"model": folder, "text": tmp_path / "rows.jsonl", "lora": 2}
    _, launched = run(tmp_path, monkeypatch, steps=20, tokens=64, batch=8, **more)
    assert launched >= 12
