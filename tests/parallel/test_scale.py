"""Ranks planned before there are any: memory, bytes, time, and a replay of all of them."""

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.profiling import scale
from unsloth_cupy.profiling.scale import ScalePlan, plan_ranks
from unsloth_cupy.profiling.stage_plan import Layout

from ..models.peers import CONFIGS, SIZES

LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4}


def planned(layout: Layout, config: Any = None, **changes: Any) -> ScalePlan:
    options: dict[str, Any] = {
        "batch": 2, "tokens": 16, "dtype": "bfloat16", "microbatches": 4, "rate": 1e-3,
        "interconnect": (2.0, 1.0),
    }  # fmt: skip
    return plan_ranks(LLAMA if config is None else config, layout, **options | changes)


def test_one_rank_is_planned_as_one_device_is() -> None:
    alone = planned(Layout())
    whole = plan_memory(LLAMA, batch=2, tokens=16, dtype="bfloat16", accumulate=4)
    for part in ("weights", "optimizer", "master", "activations", "logits"):
        assert getattr(alone.stages[0].memory, part) == getattr(whole, part), part
    assert alone.stages[0].sent == {}


@pytest.mark.parametrize("microbatches", [1, 4, 9])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 2), Layout(1, 4, 1), Layout(2, 2, 3, 1), Layout(4, 2, 1, node=2),
        Layout(2, 1, 3, 3), Layout(2, 2, 2, 1, context=2), Layout(1, 1, 2, 3, context=3),
    ],
)  # fmt: skip
def test_a_replay_of_all_ranks_holds_what_is_planned(layout: Layout, microbatches: int) -> None:
    plan = planned(layout, microbatches=microbatches)
    seen = plan.replay()
    wanted = [
        plan.stages[stage].memory.total
        for _ in range(layout.data)
        for stage in range(layout.pipeline)
        for _ in range(layout.tensor * layout.context)
    ]
    assert seen.peaks == wanted
    assert max(seen.seconds) == pytest.approx(plan.seconds)


def test_microbatches_that_are_not_run_take_what_others_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = planned(Layout(2, 3, 1), microbatches=11)
    monkeypatch.setattr(scale, "SPARE", 20)
    all_run = planned(Layout(2, 3, 1), microbatches=11)
    assert [len(stage.held) for stage in few.stages] == [10] * 3
    assert [len(stage.held) for stage in all_run.stages] == [22] * 3
    assert few.replay().peaks == all_run.replay().peaks
    assert [s.memory.total for s in few.stages] == [s.memory.total for s in all_run.stages]


def test_bytes_are_those_of_the_collectives() -> None:
    """Two sums of hidden states in a layer each way, of which a rank sends 2 (n - 1) / n."""
    plan = planned(Layout(2, 2, 4), device="cpu")
    one = 2 * 16 * 32 * 2  # rows, tokens, hidden, bytes
    norms = plan.stages[1].sent["all_reduce"]
    rows = 2 * 16 * 4  # float32 numbers of a loss, by row
    assert plan.stages[0].sent["all_reduce"] == (5 * one, 4 * one)  # an embedding, two layers
    assert norms[1] == 4 * one
    assert norms[0] == 4 * one + 3 * rows + one  # the loss sums its gradient there
    assert plan.stages[0].passes == one
    learned = plan.stages[0].memory.optimizer // 8  # two float32 numbers of each weight
    assert abs(plan.stages[0].gradients - 2 * 3 / 4 * 4 * learned) <= 3 * 4  # uneven parts


def test_zero_divides_averages_and_masters() -> None:
    plain, zero = (planned(Layout(1, 1, 8, each)).stages[0].memory for each in (0, 1))
    for name in ("optimizer", "master"):
        assert 7 < getattr(plain, name) / getattr(zero, name) < 9, name
    assert plain.weights == zero.weights


def test_zero_3_divides_all_but_a_block() -> None:
    """And sends each weight twice in a microbatch, and its gradient once, (n - 1) / n of each."""
    plain, zero = (planned(Layout(1, 1, 8, each), device="cpu").stages[0] for each in (0, 3))
    for name in ("weights", "optimizer", "master"):
        assert 7 < getattr(plain.memory, name) / getattr(zero.memory, name) < 9, name
    sent, size = zero.shared["data"], 7 / 8 * plain.memory.weights
    inside = 1 - (2 * 97 * 32 + 32) * 2 / plain.memory.weights  # embedding and head: once
    for call, times in (("all_gather", 1 + inside), ("reduce_scatter", 1)):
        assert sum(sent[call]) == pytest.approx(times * size, rel=0.02), call  # parts are filled up
    assert zero.gradients == 0
    with pytest.raises(ConfigError, match="would gather the weights of a stage for each"):
        planned(Layout(1, 2, 2, 3))


def test_contexts_hold_their_tokens_alone() -> None:
    """Keys and values go around, and on the way back with their gradients, which come home."""
    options: dict[str, Any] = {"tokens": 64, "device": "cpu", "checkpoint_every": None}
    one, two, odd = (planned(Layout(context=c), **options).stages[0] for c in (1, 2, 4))
    assert two.memory.activations < 0.55 * one.memory.activations
    assert odd.memory.activations < 0.55 * two.memory.activations
    block = 2 * 32 * 4 * 8 * 2  # rows, tokens, heads of keys, dim, bytes
    # in each layer k and v, twice; their gradients in float32, in two turns
    assert sum(two.shared["context"]["exchange"]) == 4 * (2 + 2 + 2 * 2 * 2) * block
    assert two.operations[0] == one.operations[0] / 2


@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2 tied", "bitnet"])
def test_families_are_planned_on_ranks(name: str) -> None:
    for layout in (Layout(4, 2, 2), Layout(4, 1, 2, 3)):  # more ranks than heads of keys
        plan = planned(layout, SIZES | CONFIGS[name])
        assert max(plan.replay().peaks) == max(stage.memory.total for stage in plan.stages)


def test_thousands_of_ranks_meet() -> None:
    plan = planned(Layout(4, 4, 128, 1), microbatches=2)
    seen = plan.replay()
    assert len(seen.seconds) == 2048
    assert max(seen.peaks) == max(stage.memory.total for stage in plan.stages)
    assert plan.table.bubble == pytest.approx(3 / 5)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a multiple of 3 ranks"):
        planned(Layout(3))
    with pytest.raises(ConfigError, match="4 layers are not enough for 5 stages"):
        planned(Layout(1, 5))
    with pytest.raises(ConfigError, match="is not a grid"):
        planned(Layout(1, 0))
    with pytest.raises(ConfigError, match="is not positive"):
        planned(Layout(), rate=0.0)


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    command = [
        "plan", str(path), "--tensor-parallel", "2", "--pipeline-parallel", "4",
        "--data-parallel", "4", "--zero", "1", "--interconnect", "900,50", "--accumulate", "8",
        "--rate", "400", "--plot", str(tmp_path / "schedule.svg"),
    ]  # fmt: skip
    done = click.testing.CliRunner().invoke(group, command)
    assert done.exit_code == 0, done.output
    for said in ("stage 3", "between nodes", "in a node", "replayed: 32 ranks", "as planned"):
        assert said in done.output, done.output
    assert done.output.count("|") >= 8
    assert "<svg" in (tmp_path / "schedule.svg").read_text()
    command[-2:] = ["--lora", "4"]
    done = click.testing.CliRunner().invoke(group, command)
    assert "leave others out" in done.output
