"""Experts that ranks divide, in a grid with tensor and with pipeline ranks, equal one device."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.finetune.run.executor import Executor
from unsloth_cupy.finetune.run.ranks import Ranks
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models import load
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.models.folders.expert_files import Stack
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.ranks.division import Division
from unsloth_cupy.models.ranks.pipeline_stages import Stages
from unsloth_cupy.parallel import SingleCommunicator, grid, part
from unsloth_cupy.training.loss_scaler import LossScaler

from ..models.peers import MIXTURES, SIZES
from .models import filled, gathered
from .ranks import close
from .test_experts import OF_NORMS, PAIRS, WHOLE, batch, drawn, quantized, same_codes
from .threads import by_threads

AXES = ("tensor", "pipeline")
NAMES = [
    pytest.param(name, marks=[] if name == "gpt_oss" else pytest.mark.slow)
    for name in MIXTURES
    if name not in WHOLE
]


def same_training(whole: Any, model: Any, ranks: Ranks) -> None:
    """A step of all rows in two passes, and its gradient norm, is that of one device."""
    executor, one = Executor(ranks, model), LossScaler(1.0, dynamic=False)
    tokens, labels = batch()
    own = part(len(tokens), ranks.data)
    passes = [
        {"tokens": tokens[:, :end], "labels": labels[:, :end], "count": 64} for end in (11, 8)
    ]
    every = [whole.loss_and_gradients(**each) for each in passes]
    mine = [{n: a if n == "count" else a[own] for n, a in each.items()} for each in passes]
    step = TrainingStep(CheckpointConfig(enabled=True))
    loss, sums = executor.summed(executor.gradients(mine, step), len(mine))
    close(loss, sum(loss for loss, _ in every))
    total = {name: sum(each[name] for _, each in every) for name in every[0][1]}
    assert {*sums} == {name for name in total if model.division.holds(name)}
    for name, array in sums.items():
        gathered(model.division, name, array, total[name])
    norm = np.sqrt(sum(np.square(array, dtype=float).sum() for array in total.values()))
    close(executor.measured(sums, 1.0, one).norm, norm)


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", NAMES)
def test_experts_beside_other_axes(name: str, axis: str, adapts: bool, tmp_path: Path) -> None:
    """Loss, gradients and their norm, tokens, files and adapters are those of one device."""
    folder, out, lora = tmp_path / "model", tmp_path / "saved", None
    if (axis == "tensor" and name == OF_NORMS) or (axis == "pipeline" and name == PAIRS):
        pytest.skip("refused by name: see test_experts")
    filled(SIZES | MIXTURES[name], folder)
    if adapts:
        drawn(folder, lora := tmp_path / "lora")

    def work(comm: Any) -> None:
        ranks = Ranks(comm, grid(comm, data=1, expert=2, **{axis: 2}))
        both = [load(folder, lora=lora, **how) for how in ({}, ranks.placing)]
        whole, model = both
        same_training(whole, model, ranks)
        for one, other in zip(*(each.log_probs(*batch()) for each in both), strict=True):
            close(one, other)
        made = (each.generate(batch()[0], max_new_tokens=4, stop=()) for each in both)
        np.testing.assert_array_equal(*made)
        (model.save_adapter if adapts else model.save)(out)
        again = load(folder, lora=out) if adapts else load(out)
        for key, array in whole.trainable.items():
            np.testing.assert_array_equal(again.trainable[key], array, key)

    by_threads(4, work)


def test_grids_cover_all_once() -> None:
    """Each number of a parameter is in one rank, or has equal shares in several."""
    sizes = {"expert": 3, "tensor": 2, "pipeline": 2}
    for name in ("gpt_oss", "mixtral window", "phimoe"):  # biases, tied tables, tables with biases
        config = parse(SIZES | MIXTURES[name] | {"num_attention_heads": 4})
        covered = {key: np.zeros(shape) for key, shape in config.shapes().items()}
        for place in np.ndindex(*sizes.values()):
            expert, tensor, pipeline = (SingleCommunicator() for _ in sizes)
            for comm, rank, size in zip(
                (expert, tensor, pipeline), place, sizes.values(), strict=True
            ):
                comm.rank, comm.size, comm.split = rank, size, lambda color: SingleCommunicator()
            division = Division(config, tensor, Stages(config, pipeline), expert)
            for key, whole in covered.items():
                if not division.holds(key):
                    continue
                own = division.own(key, np.arange(whole.size).reshape(whole.shape))
                assert own.shape == division.shape(key)
                assert division.whole_shape(key, own.shape) == whole.shape
                for rows, share in division.shares(key):
                    np.add.at(whole.reshape(-1), own[rows].reshape(-1), share)
        for key, whole in covered.items():
            np.testing.assert_allclose(whole, 1, err_msg=key)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nf4", "nf4-double", "int8")),
        "mxfp4",
    ],
)
def test_quantized_experts_beside_tensor_ranks(kind: str, tmp_path: Path) -> None:
    """A rank's slices of its experts have the codes of whole stacks; adapters learn on them."""
    sources = quantized(tmp_path, kind)
    drawn(tmp_path / "dense", tmp_path / "lora")

    def work(comm: Any) -> None:
        ranks = Ranks(comm, grid(comm, data=1, expert=2, tensor=2))
        for source, how in sources:
            options = how | {"lora": tmp_path / "lora"}
            whole, model = load(source, **options), load(source, **options, **ranks.placing)
            same_codes(whole, model)
            same_training(whole, model, ranks)

    by_threads(4, work)


def test_a_rank_reads_slices_of_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(SIZES | MIXTURES["mixtral"], tmp_path)
    expert, tensor = SingleCommunicator(), SingleCommunicator()
    expert.size = tensor.size = 2
    read, sizes = Stack.read, list[int]()

    def counted(*arguments: Any) -> Any:
        array = read(*arguments)
        sizes.append(array.size)
        return array

    monkeypatch.setattr(Stack, "read", counted)
    model = load(tmp_path, communicator=tensor, experts=expert)
    assert sum(sizes) == sum(a.size for n, a in model.parameters.items() if is_stack(n))
    assert 4 * sum(sizes) == sum(
        a.size for n, a in load(tmp_path).parameters.items() if is_stack(n)
    )


@pytest.mark.parametrize("axis", AXES)
def test_the_plan_of_experts_beside_other_axes(axis: str) -> None:
    """A rank holds its part of both axes."""
    options = {"batch": 2, "tokens": 16, "dtype": "float32", "microbatches": 2, "device": "cpu"}
    config = SIZES | MIXTURES["mixtral"] | {"num_hidden_layers": 4}
    one, both = (plan_ranks(config, Layout(**{axis: 2}, expert=n), **options)[0] for n in (1, 2))
    stacks = sum(math.prod(s) for n, s in parse(config).shapes().items() if is_stack(n))
    assert one.weights - both.weights == stacks * 4 // 4
