"""A packed batch of each method has the loss, the measures and the gradients of a padded one.

Both are compared with a padded batch in float64.  Log-probabilities of other models are float32,
rounded from float64: some losses are so steep that other bits of them would matter.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.finetune import Lora
from unsloth_cupy.finetune.methods.policy_methods import Policy
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run import reference
from unsloth_cupy.finetune.run.executor import Executor
from unsloth_cupy.finetune.run.loop import Loop

from ..harness.sampling import Sample
from ..harness.whole_models import allowed_error, in_float64, judge_gradients
from . import test_heads as heads
from . import test_methods as methods
from . import test_policies as policies

VOCABULARY = 256  # whose words have log-probabilities of about -log(256)
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
    """Return a list that gets loss, measures and gradients of each step, and of rows in float64.

    Answers are as if other models had drawn them: all ratios and divergences count.
    """
    seen, whole, drawn = list[Any](), Loop._gradients, Policy.drawn
    compute = reference.compute

    def step_of(loop: Loop) -> Any:
        loss, real, sums = whole(loop)
        copies = {name: np.array(each) for name, each in sums.items()}
        numbers = {name: each for name, each in loop.measured.items() if each is not None}
        return real, {"loss": loss, **numbers}, copies

    def gradients(self: Loop) -> Any:
        seen.append(step_of(self))
        real, numbers, sums = seen[-1]
        if self.plan.pack is False and not self.executor.pads:
            measured, models = self.measured, (self.model, *self.method.other_models)
            with in_float64(*models), monkeypatch.context() as patch:
                own = lambda self, numbers: self.checkpoints.answers[: len(numbers)]  # noqa: E731
                patch.setattr(Loop, "_drawn", own)  # the answers stay those of float32
                seen.append(step_of(self))
            self.measured = measured
        return numbers["loss"], real, sums

    def exactly(model: Any, *arguments: Any) -> None:
        with in_float64(model):
            compute(model, *arguments)

    def by_others(self: Any, *batches: Any) -> Any:
        shares = {"reference": np.float32(1.02), "base": np.float32(0.97)}
        return [
            each._replace(beside={n: a * shares.get(n, 1) for n, a in each.beside.items()})
            for each in drawn(self, *batches)
        ]

    monkeypatch.setattr(Loop, "_gradients", gradients)
    monkeypatch.setattr(reference, "compute", exactly)
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So are batches with the padding of CUDA graphs, packed or not."""
    given: dict[str, Any] = {"method": method, **settings}
    if METHODS[method].is_on_policy:
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
    monkeypatch.setattr(Executor, "pads", True)
    for pack in (True, *Sample.one_in(2, [False])):
        trainer(where, tmp_path / f"padded-{pack}", pack=pack, **given).train()
    packed, plain, exact, *padded = steps
    assert {gradient.dtype for gradient in exact[2].values()} == {np.dtype(float)}
    for name, gradient in exact[2].items():
        assert np.abs(gradient).max() > 0 or name.endswith(".lora_A.weight"), name
    sizes = ([*each[1].values()] for each in (plain, exact))
    allowed = allowed_error(*sizes, terms=math.log(VOCABULARY))
    for count, numbers, gradients in (packed, *padded):
        judge_gradients(gradients, plain[2], exact[2])
        assert count == plain[0]
        assert numbers == pytest.approx(exact[1], rel=0, abs=allowed)
    first, other = (run.files.lines()[0] for run in runs)
    first.pop("perplexity", 0), other.pop("perplexity", 0)  # the exponential of the loss
    assert first == pytest.approx(other, rel=0, abs=2 * allowed)  # an error of each
