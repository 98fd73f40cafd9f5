"""Mixtures of experts whose blocks, or tokens, ranks divide equal one device."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.lora import check_learns
from unsloth_cupy.finetune.run.executor import Executor
from unsloth_cupy.finetune.run.ranks import Ranks
from unsloth_cupy.finetune.run.routing import Routing
from unsloth_cupy.models import create, load
from unsloth_cupy.models.objective import Reached, TrainingStep, next_token
from unsloth_cupy.models.ranks.stages import ModelStage, pipeline_gradients, schedule_of
from unsloth_cupy.parallel import DataParallel, SingleCommunicator, Zero3, grid

from ..models.peers import MIXTURES, SIZES
from . import pipelines
from .models import filled
from .ranks import close
from .test_experts import NAMES, PAIRS, QUICK
from .threads import by_threads


@pytest.mark.parametrize("name", [each for each in NAMES if each.values[0] != PAIRS])
def test_stages_of_experts(name: str, tmp_path: Path) -> None:
    """Losses, the router's among them, gradients, tokens, files and adapters of two stages."""
    filled(SIZES | MIXTURES[name], tmp_path / "model")
    whole = load(tmp_path / "model")
    whole.add_adapter(3, seed=1)
    for array in whole.trainable.values():
        array[...] += 0.1 * np.random.default_rng(2).standard_normal(array.shape, np.float32)
    whole.save_adapter(tmp_path / "lora")

    def work(comm: Any) -> None:
        pipelines.models(comm, tmp_path / "model", tmp_path / "saved")
        if comm.size == 2:
            pipelines.models(comm, tmp_path / "model", tmp_path / "again", tmp_path / "lora")

    for ranks in (2, 4) if name == QUICK[0] else (2,):  # of 4, two divide the inside of experts
        by_threads(ranks, work)


def batches(config: Any) -> list[dict[str, Any]]:
    """Return batches with padding, of packed texts, and with given experts."""
    rng, experts = np.random.default_rng(5), config.experts
    tokens, mask = rng.integers(3, SIZES["vocab_size"], (4, 2, 9)), np.ones((2, 9), bool)
    mask[1, :4] = False
    shape = *tokens[3].shape, sum(experts.sparse), experts.count
    routes = rng.permuted(np.broadcast_to(np.arange(experts.count), shape), axis=-1)
    more: list[dict[str, Any]] = [
        {"mask": mask},
        {"offsets": np.array([0, 5, 12, 18])},
        {"routes": routes[..., : experts.k].astype(np.int32)},
        {},
    ]
    return [
        {"tokens": each, "labels": each, "count": 64} | how
        for each, how in zip(tokens, more, strict=True)
    ]


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 1), (2, 2)])
def test_stages_take_padding_packed_texts_and_routes(
    ranks: int, chunks: int, tmp_path: Path
) -> None:
    """Of any number of layers with experts in a chunk, none too; each expert is counted once."""
    settings = {"num_hidden_layers": 5, "mlp_only_layers": [0, 3], "decoder_sparse_step": 1}
    filled(SIZES | MIXTURES["qwen3_moe"] | settings, tmp_path)

    def work(comm: Any) -> None:
        whole, model = load(tmp_path), load(tmp_path, pipeline=comm, chunks=chunks)
        counted = [Routing(each) for each in (whole, model)]
        given = batches(whole.config)
        with counted[0].counting(), counted[1].counting():
            expected = [whole.value_and_gradients(partial(next_token, **each)) for each in given]
            stage = ModelStage(model, model.trainable, TrainingStep())
            loss, sums = pipeline_gradients(stage, schedule_of(stage.stages, len(given)), given)
        close(loss, sum(value for value, _ in expected))
        for name, gradient in sums.items():
            close(gradient, np.sum([each[name] for _, each in expected], axis=0))
        tokens = counted[0].counts(lambda own: own), counted[1].counts(comm.all_reduce)
        np.testing.assert_array_equal(*tokens)
        assert counted[0].line(1) == counted[1].line(1)
        for each in given:
            one = {name: array for name, array in each.items() if name != "count"}
            for found in zip(*(m.log_probs(**one) for m in (whole, model)), strict=True):
                close(*found)

    by_threads(ranks, work)


def test_routes_that_other_stages_have_not_seen_are_refused() -> None:
    model = create(SIZES | MIXTURES["mixtral"], seed=0)
    hidden, routes = np.zeros((1, 4, SIZES["hidden_size"]), np.float32), np.zeros((1, 4, 3, 2), int)
    last = model.on_tape(model.parameters, model.step, Reached(hidden, routes))
    tokens = np.arange(4)[None]
    assert last.hidden(last.parameters, tokens, routes=routes) is hidden
    for other in (None, routes.copy()):
        with pytest.raises(ConfigError, match="not the routes of the batch, which all stages use"):
            last.hidden(last.parameters, tokens, routes=other)


def test_parts_of_weights_take_routes() -> None:
    whole, parted = (create(SIZES | MIXTURES["mixtral"], seed=0) for _ in range(2))
    given = batches(whole.config)[2]
    expected, gradients = whole.loss_and_gradients(**given)
    zero3 = Zero3(parted, SingleCommunicator())
    loss, parts = zero3.loss_and_gradients(**given)
    close(loss, expected)
    for name, array in zero3.gathered(parts).items():
        close(array, gradients[name])


def test_rollouts_of_stages(tmp_path: Path) -> None:
    """They say the experts of all layers, which all stages then replay."""
    filled(SIZES | MIXTURES["qwen2_moe types"], tmp_path)

    def work(comm: Any) -> None:
        whole, model = load(tmp_path), load(tmp_path, pipeline=comm)
        options: dict[str, Any] = {"samples": 2, "max_new_tokens": 4, "seed": 1, "stop": ()}
        expected, drawn = (m.rollouts([[5, 6, 7], [8]], **options) for m in (whole, model))
        for name in ("tokens", "real", "mask", "log_probs", "routes"):
            close(getattr(drawn, name), getattr(expected, name))
        batch = {"tokens": drawn.tokens, "labels": drawn.tokens, "mask": drawn.real}
        found = model.log_probs(**batch, routes=drawn.routes).log_probs
        close(np.where(drawn.mask, found, 0), drawn.log_probs)
        other = np.where(drawn.routes < 0, -1, 4 - drawn.routes)
        actual, of_one = (m.log_probs(**batch, routes=other).log_probs for m in (model, whole))
        close(actual, of_one)
        assert np.abs(of_one - found).max() > 1e-3

    by_threads(3, work)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_tokens_of_mixtures_are_divided(kind: str, tmp_path: Path) -> None:
    """The router's loss is of all tokens of the ranks, without those that fill up rows."""
    filled(SIZES | MIXTURES["mixtral"] | {"num_key_value_heads": 4}, tmp_path)

    def work(comm: Any) -> None:
        whole, model = load(tmp_path), load(tmp_path)
        model.context, model.context_attention = comm, kind
        counted = [Routing(each) for each in (whole, model)]
        for each in batches(whole.config)[1:]:
            with counted[0].counting(), counted[1].counting():
                expected, gradients = whole.loss_and_gradients(**each)
                loss, actual = DataParallel(model, comm).loss_and_gradients(**each)
            close(loss, expected)
            for name, gradient in gradients.items():
                close(actual[name], gradient)
        tokens = counted[0].counts(lambda own: own), counted[1].counts(comm.all_reduce)
        np.testing.assert_array_equal(*tokens)

    by_threads(2, work)


@pytest.mark.parametrize(
    "axes",
    [{"pipeline": 2}, {"expert": 2}, {"tensor": 2}, {"expert": 2, "tensor": 2, "pipeline": 2}],
    ids=str,
)
def test_ranks_say_which_adapters_learn(axes: dict[str, int], tmp_path: Path) -> None:
    """Layers, experts that no token chose, a gradient of 0 everywhere: as one process does."""
    filled(SIZES | MIXTURES["mixtral"], tmp_path)
    tokens = np.random.default_rng(7).integers(3, SIZES["vocab_size"], (4, 6))
    routes = np.zeros((4, 6, SIZES["num_hidden_layers"], 2), np.int32)
    routes[..., 1] = 1 + (tokens[..., None] == 3)
    whole = load(tmp_path)
    whole.add_adapter(2, seed=1)
    _, every = whole.loss_and_gradients(tokens, tokens, routes=routes)
    expected = check_learns(whole.adapter, every)
    assert "no token of this step chose" in expected
    still = next(n for n in [*every][::-1] if n.endswith("self_attn.q_proj.lora_B.weight"))

    def work(comm: Any) -> None:
        ranks = Ranks(comm, grid(comm, data=1, **axes))
        model = load(tmp_path, **{n: c for n, c in ranks.placing.items() if c is not None})
        model.add_adapter(2, seed=1)
        executor, division = Executor(ranks, model), model.division
        own = {n: division.own(n, every[n]) for n in model.trainable}
        assert (
            executor.adapter_report(model.adapter, {n: 0 * array for n, array in own.items()})
            is None
        )
        assert executor.adapter_report(model.adapter, own) == expected
        if still in own:
            own[still] = 0 * own[still]
        with pytest.raises(ConfigError, match=r"self_attn\.q_proj is 0 everywhere"):
            executor.adapter_report(model.adapter, own)

    by_threads(math.prod(axes.values()), work)
