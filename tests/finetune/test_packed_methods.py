"""A packed batch of each method has the loss, the measures and the gradients of a padded one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.finetune import Lora
from unsloth_cupy.finetune.loop import Loop
from unsloth_cupy.finetune.methods import METHODS
from unsloth_cupy.finetune.policy_methods import Policy

from ..harness.sampling import Sample
from ..parallel.ranks import close
from . import test_heads as heads
from . import test_methods as methods
from . import test_policies as policies

home, answering = methods.home, policies.home  # fixtures


def every_loss() -> Iterator[Any]:
    """Yield a method, and settings of some of its losses, or of all."""
    more: dict[str, list[dict[str, Any]]] = {
        "sft": [{}],
        "ipo": [{}],
        "cpo": [{}],
        "orpo": [{}],
        "rloo": [{}],
        "dpo": [{"loss": "sigmoid", "beta": 0.5, "smoothing": 0.1}],
        "simpo": [{"nll": 0.3, "gamma": 1.0}],
        "kto": [{"loss": "kto", "desirable_weight": 1.5}],
        "classify": [{"labels": problem} for problem in heads.PROBLEMS],
        "reward": [{"center": 0.1}],
        "embed": [{"pooling": "last"}, {"negatives": 2}],
        "grpo": [{"loss": "dapo"}],
        "distill": [{"beta": 0.3, "temperature": 0.7}],
    }
    for name, method in METHODS.items():
        kinds = [{"loss": kind} for kind in method.losses if len(method.losses) > 1]
        kinds = Sample.one_in(3, kinds)
        for settings in [*kinds, *more.get(name, [])]:
            yield pytest.param(name, settings, id=f"{name}-{'-'.join(map(str, settings.values()))}")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets loss, measures and gradients of each step.

    Answers are as if other models had drawn them: all ratios and divergences count.
    """
    seen, whole, drawn = list[Any](), Loop._gradients, Policy.drawn

    def gradients(self: Loop) -> Any:
        loss, real, sums = whole(self)
        copies = {name: np.array(each) for name, each in sums.items()}
        seen.append((loss, real, dict(self.measured), copies))
        return loss, real, sums

    def by_others(self: Any, *batches: Any) -> Any:
        shares = {"reference": np.float32(1.02), "base": np.float32(0.97)}
        return [
            each._replace(beside={n: a * shares.get(n, 1) for n, a in each.beside.items()})
            for each in drawn(self, *batches)
        ]

    monkeypatch.setattr(Loop, "_gradients", gradients)
    monkeypatch.setattr(Policy, "drawn", by_others)
    return seen


@pytest.mark.parametrize(("method", "settings"), [*every_loss()])
def test_packed_texts_are_those_of_rows(
    method: str,
    settings: dict[str, Any],
    steps: list[Any],
    home: Path,
    answering: Path,
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"method": method, **settings}
    if METHODS[method].draws:
        given |= {"lora": Lora(2), "beta": 0.1} if method == "grpo" else {}
        trainer, where = policies.trainer, answering
    else:
        trainer, where = methods.trainer, home
        given |= {"batch": 6, "tokens": 20}
        if METHODS[method].compares:
            given["reference"] = home / "model-0.9"
        if (problem := given.pop("labels", None)) is not None:
            given["data"] = heads.labelled(tmp_path, problem)
        if (negatives := given.pop("negatives", None)) is not None:
            rows = heads.related(negatives)
            given["data"] = methods.write(tmp_path / "related.jsonl", rows)
        if method == "sft":
            given["data"] = home / "texts.jsonl"
    runs = [
        trainer(where, tmp_path / name, pack=pack, **given).train()
        for name, pack in (("packed", True), ("rows", False))
    ]
    (loss, real, measures, gradients), (alone, count, *expected) = steps
    assert loss == pytest.approx(alone, rel=2e-6, abs=1e-7)
    assert real == count
    assert measures == pytest.approx(expected[0], rel=2e-6, abs=2e-7)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert np.abs(gradient).max() > 0 or name.endswith(".lora_A.weight"), name
        close(gradients[name], gradient, 5e-6)
    first, other = (run.files.lines()[0] for run in runs)
    assert first == pytest.approx(other, rel=2e-6, abs=2e-7)
