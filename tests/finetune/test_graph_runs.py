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
        ({"accumulate": 2, "dtype": "bfloat16"}, 5 + 5),
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
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dpo"},
        {"method": "dpo", "pack": False},
        {"method": "simpo", "nll": 0.5},
        {"method": "kto"},
        {"method": "reward"},
        {"method": "grpo", "max_new_tokens": 4, "batch": 2, "samples": 4},
    ],
    ids=str,
)
def test_most_steps_of_other_methods_are_graphs(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches have the sizes of their texts; the log is that of the same padded batches."""
    # what the stand-in leaves in arrays of kernels may be above 0
    monkeypatch.setattr("unsloth_cupy.losses._rows.ROUNDED", np.inf)
    reward = "def even(completions, **more):\n    return [len(each) % 2 for each in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    if settings["method"] == "grpo":
        rows = [{"prompt": f"Q {i % 7}:"} for i in range(120)]
        settings = {**settings, "reward": [f"{tmp_path}/rewards.py:even"]}
    elif settings["method"] == "kto":
        rows = [
            {"prompt": f"Q {i % 7}:", "completion": " ?" * (1 + i % 3), "label": i % 2 == 0}
            for i in range(120)
        ]
    else:
        rows = [
            {"prompt": f"Q {i % 7}:", "chosen": " ?" * (1 + i % 3), "rejected": " !" * (1 + i % 2)}
            for i in range(120)
        ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text.txt").write_text(TEXT)
    new = Settings(steps=1, out=tmp_path / "model", **NEW)
    Trainer(data=tmp_path / "text.txt", settings=new).train()
    logs, counts = [], []
    more: dict[str, Any] = {"model": tmp_path / "model" / "model", "text": tmp_path / "rows.jsonl"}
    more |= {"lora": 2, "batch": 4, "tokens": 24, "steps": 12} | settings
    for name in ("eager", "graphs"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            if name == "eager":
                patch.setattr(graphs.Graphs, "_graph", lambda *_: None)
            log, launched = run(tmp_path / name, patch, **more)
        logs.append(log)
        counts.append(launched)
    assert counts[0] == 0
    assert counts[1] >= 6
    assert logs[1] == logs[0]


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
