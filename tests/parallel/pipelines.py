"""Pipelines of small layers, in each schedule, and of models equal one device."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import CheckpointConfig, Tape, cross_entropy, linear, reshape
from unsloth_cupy.models import load
from unsloth_cupy.models.objective import TrainingStep, next_token
from unsloth_cupy.models.ranks.stages import (
    ModelStage,
    pipeline_gradients,
    pipeline_loss,
    schedule_of,
)
from unsloth_cupy.parallel import Communicator, Step, grid, pipeline_schedule, run_pipeline

from .ranks import close

CASES = (("gpipe", 3, 1), ("1f1b", 5, 1), ("1f1b", 1, 1), ("interleaved", 12, 2))


class Layers:
    """A stage of one linear layer in each chunk."""

    def __init__(self, weights: list[Any], comm: Communicator) -> None:
        self.weights, self.last = weights, len(weights) * comm.size - 1
        self.comm, self.kept, self.sums = comm, {}, [np.zeros_like(w) for w in weights]

    def like(self, microbatch: Any) -> Any:
        return np.empty_like(microbatch)

    def forward(self, step: Step, microbatch: Any, x: Any) -> Any:
        tape = Tape()
        x, w = (tape.watch(a) for a in (microbatch if x is None else x, self.weights[step.chunk]))
        y = linear(x, w)
        last = step.chunk * self.comm.size + self.comm.rank == self.last
        y = (y * y).sum() if last else y
        self.kept[step.microbatch, step.chunk] = tape, x, w, y
        return y.value

    def backward(self, step: Step, dy: Any) -> Any:
        tape, x, w, y = self.kept.pop((step.microbatch, step.chunk))
        dx, dw = tape.gradients(y, [x, w], dy)
        self.sums[step.chunk] += dw
        return dx


def small_layers(comm: Communicator) -> None:
    for kind, count, chunks in CASES:
        rng = np.random.default_rng(0)
        weights = 0.5 * rng.standard_normal((comm.size * chunks, 4, 4), np.float32)
        microbatches = [rng.standard_normal((2, 4), np.float32) for _ in range(count)]
        tape, expected = Tape(), 0
        watched = [tape.watch(w) for w in weights]
        for x in microbatches:
            for w in watched:
                x = linear(x, w)  # noqa: PLW2901
            expected = (x * x).sum() + expected
        gradients = tape.gradients(expected, watched)
        stage = Layers([*weights[comm.rank :: comm.size]], comm)
        schedule = pipeline_schedule(comm.size, count, kind, chunks=chunks)
        losses = run_pipeline(stage, schedule, microbatches, comm)
        if comm.rank == comm.size - 1:
            assert len(losses) == count
            close(sum(losses), expected.value)
        for actual, gradient in zip(stage.sums, gradients[comm.rank :: comm.size], strict=True):
            close(actual, gradient)


def written(model: Any, whole: Any, rng: np.random.Generator) -> None:
    """All ranks generate the tokens of one device, greedy or sampled, for any prompts."""
    prompts, mask = rng.integers(3, 97, (3, 5)), np.ones((3, 5), int)
    mask[1, :2] = 0
    for options in ({"mask": mask}, {"temperature": 2.0, "seed": 5, "min_new_tokens": 3}):
        actual, expected = (
            m.generate(prompts, max_new_tokens=4, **options) for m in (model, whole)
        )
        np.testing.assert_array_equal(actual, expected)


def margin(model: Any, tokens: Any, labels: Any, count: int) -> Any:
    """Return an objective of pairs: by how much the first row is less likely than the second."""
    losses = cross_entropy(model.logits(tokens)[:, :-1], labels[:, 1:]).sum(axis=1)
    return cross_entropy(reshape(losses, shape=(1, 2)), np.zeros(1, int)).sum() / count


def models(comm: Communicator, folder: Path, out: Path, lora: Path | None = None) -> None:
    """Pipeline stages equal one device; with 4 ranks, two ranks divide the weights of a stage."""
    place = grid(comm, pipeline=2, tensor=comm.size // 2)
    whole = load(folder, lora=lora)
    model = load(folder, communicator=place.tensor, pipeline=place.pipeline, lora=lora)
    assert model.parameters.keys() < whole.parameters.keys()
    if lora is None:
        fresh = load(folder, communicator=place.tensor, pipeline=place.pipeline)
        fresh.add_adapter(2, seed=1)
        assert {name.split(".layers.")[1][0] for name in fresh.trainable} == {
            str(layer) for layers in fresh.division.stages.layers for layer in layers
        }
    rng = np.random.default_rng(3)
    batches = [{"tokens": rng.integers(3, 97, (2, size))} for size in (7, 7, 5)]
    count = sum(each["tokens"].shape[0] * (each["tokens"].shape[1] - 1) for each in batches)
    batches = [each | {"labels": each["tokens"], "count": count} for each in batches]
    for objective in (next_token, margin):
        step = TrainingStep(CheckpointConfig(enabled=objective is margin))
        expected = [whole.value_and_gradients(partial(objective, **each)) for each in batches]
        stage = ModelStage(model, model.trainable, step, objective)
        schedule = schedule_of(stage.stages, len(batches))
        loss, sums = pipeline_gradients(stage, schedule, batches)
        close(loss, sum(loss for loss, _ in expected))
        assert sums.keys() == model.trainable.keys()
        for name, gradient in sums.items():
            total = np.sum([gradients[name] for _, gradients in expected], axis=0)
            # a bias of keys moves the scores of a query nearly alike: its gradient is a small rest
            relative = 1e-4 if name.endswith("k_proj.bias") else 1e-5
            close(model.division.gathered(name, gradient), total, relative)
        stage = ModelStage(model, model.trainable, step, objective)
        close(pipeline_loss(stage, batches[0]), objective(whole, **batches[0]))
    written(model, whole, rng)
    (model.save if lora is None else model.save_adapter)(out)
    again = load(folder if lora else out, lora=out if lora else None)
    named = again.trainable
    assert named.keys() == whole.trainable.keys()
    for name, array in whole.trainable.items():
        np.testing.assert_array_equal(named[name], array, name)
    if lora is None:  # adapters are drawn as on one device, on the layers of this stage
        for each in (whole, model):
            each.add_adapter(2, seed=0)
        held, every = model.adapter.parameters, whole.adapter.parameters
        assert held
        assert held.keys() < every.keys()
        for name, array in held.items():
            np.testing.assert_array_equal(model.division.gathered(name, array), every[name], name)


def narrow(folder: Path, comm: Communicator) -> None:
    """Hidden states have 16 bits, even if a stage has only float32 norms besides codes."""
    whole, model = load(folder, quantize="int8"), load(folder, quantize="int8", pipeline=comm)
    assert model.table.dtype == (np.float32 if comm.rank else whole.table.dtype)
    tokens = np.random.default_rng(4).integers(3, 97, (2, 5))
    stage = ModelStage(model, {}, TrainingStep())
    batch = {"tokens": tokens, "labels": tokens}
    close(pipeline_loss(stage, batch), whole.loss(**batch), 2**-8)
    assert model.generate(tokens, max_new_tokens=2, stop=()).shape == (2, 7)
