"""Ranks planned before there are any: memory, bytes, time, and a replay of all of them."""

import json
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.memory import stage_plan
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.planned_ranks import PlannedRanks
from unsloth_cupy.memory.stage_plan import Layout
from unsloth_cupy.models.parse import parse
from unsloth_cupy.parallel._shards import Cut
from unsloth_cupy.profiling import scale
from unsloth_cupy.profiling.scale import ScalePlan, plan_ranks

from ..harness.sampling import Sample
from ..models.peers import CONFIGS, SIZES

LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4}


ADAPTED = (  # inputs and outputs of the linear layers of a block, in one of two ranks
    (32, 16), (32, 16), (32, 16), (16, 32), (32, 24), (32, 24), (24, 32),
)  # fmt: skip


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
    assert alone.stages[0].sent("tensor") == {}


INTERLEAVED = {"schedule": "interleaved"}
LORA = {"rank": 4, "quantization": "nf4"}
GRIDS: tuple[tuple[Layout, dict[str, Any]], ...] = (
    (Layout(2, 1, 2), {}),
    (Layout(1, 4, 1), {}),
    (Layout(2, 2, 3, 1), {}),
    (Layout(4, 2, 1, node=2), {}),
    (Layout(2, 1, 3, 3), {}),
    (Layout(2, 2, 2, 1, context=2), {}),
    (Layout(1, 1, 2, 3, context=3), {}),
    (Layout(2, 1, 2, context=2), {"context_attention": "ulysses"}),
    (Layout(1, 2, 2), INTERLEAVED),
    (Layout(2, 2, 2, 1), INTERLEAVED | {"rank": 4}),
    (Layout(1, 3, 1), {"schedule": "gpipe"}),
    (Layout(2, 2, 2), LORA | {"quantization": "int8"}),
    (Layout(1, 1, 2, 3), LORA),
)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4, 10])
@pytest.mark.parametrize(("layout", "options"), GRIDS)
def test_a_replay_of_all_ranks_holds_what_is_planned(
    layout: Layout, options: dict[str, Any], microbatches: int
) -> None:
    plan = planned(layout, microbatches=microbatches, **options)
    seen = plan.replay()
    expected = [
        plan.stages[stage].memory.total
        for _ in range(layout.data)
        for stage in range(layout.pipeline)
        for _ in range(layout.tensor * layout.context)
    ]
    assert seen.peaks == expected
    assert max(seen.seconds) == pytest.approx(plan.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_microbatches_that_are_not_run_take_what_others_take(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    layout = Layout(2, 2, 1)
    few = planned(layout, microbatches=14, **options)
    monkeypatch.setattr(stage_plan, "SPARE", 20)
    monkeypatch.setattr(stage_plan, "ROUNDS", 20)
    all_run = planned(layout, microbatches=14, **options)
    for one, every in zip(few.stages, all_run.stages, strict=True):
        assert len(one.held) < len(every.held) == len(few.schedule[0])
        of_all = scale.extend_steps(one.held, few.schedule[0], 2)
        assert of_all == every.held
        assert one.memory.total == every.memory.total
        assert (one.calls, one.products, one.after) == (every.calls, every.products, every.after)
    assert few.replay() == all_run.replay()


def test_chunks_send_and_multiply_what_their_blocks_do() -> None:
    """Together as much as a stage of one chunk; each message of hidden states is as large."""
    whole, parts = (planned(Layout(2, 2, 2), **options) for options in ({}, INTERLEAVED))
    for one, other in zip(whole.stages, parts.stages, strict=True):
        assert one.sent("tensor") == other.sent("tensor")
        assert len(other.products) == 2
        np.testing.assert_allclose(np.sum(one.products, 0), np.sum(other.products, 0))
        assert (one.passes, one.gradients) == (other.passes, other.gradients)
    # the first stage sends forward twice and back once, of the last one forward once, back twice
    assert (whole.messages, parts.messages) == (4, 12)
    assert parts.table.bubble == pytest.approx(1 / (2 * 4 + 1))


def test_adapters_alone_learn() -> None:
    """No gradient of a weight below them: neither held, nor summed, nor multiplied."""
    options: Any = {"device": "cpu"}
    every, few = (planned(Layout(2, 1, 2), **options, rank=rank) for rank in (None, 4))
    one, other = every.stages[0], few.stages[0]
    blocks = 4 * (4 * 32 * 32 + 3 * 32 * 48) / 2  # weights of a rank, in four layers
    head, rows = 97 * 32 / 2, 2 * 16
    scores = 4 * 2 * 2 * 8 * 16 * 17 / 2 * 4  # rows, heads, dim, pairs of tokens, layers
    head += 32 / 2  # of 97 words this rank has 49
    assert one.products[0] == (
        2 * rows * (blocks + head) + scores,
        4 * rows * (blocks + head) + 2.5 * scores,
    )
    more = other.products[0][0] - one.products[0][0]
    assert other.products[0][1] == 2 * rows * (blocks + head) + 2 * more + 2.5 * scores
    learned = 4 * sum(a + b for a, b in ADAPTED) * 4  # layers, and the rank
    assert more == 2 * rows * learned
    assert other.memory.optimizer == 2 * 4 * learned
    assert other.gradients == 4 * learned  # two ranks: half of them each way


def test_quantized_weights_are_divided_as_codes() -> None:
    """Half a byte of each value and a scale of 64: a rank of two holds half of what one has."""
    options: Any = {"rank": 4, "device": "cpu", "dtype": "float32"}
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    dense, codes = (planned(Layout(2), config, **options, quantization=k) for k in (None, "nf4"))
    values = 4 * (4 * 64 * 128 + 3 * 64 * 128) // 2
    blocks = values // 64
    saved = dense.stages[0].memory.weights - codes.stages[0].memory.weights
    assert saved == 4 * values - values // 2 - 4 * blocks


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_plan_memory_is_of_the_rank_that_holds_most(number: int) -> None:
    """Options and grids take turns: a run has all of them, and three days each pair."""
    options: dict[str, Any] = ({}, {"rank": 4}, {"checkpoint_every": 1})[number]
    grids = ((2, 1), (1, 2), (2, 4))
    sizes = {"batch": 2, "tokens": 32, "dtype": "bfloat16", **options}
    whole = plan_memory(LLAMA, **sizes)
    for tensor, pipeline in Sample.one_in(3, grids[number:] + grids[:number]):
        every = planned(Layout(tensor, pipeline), microbatches=6, **sizes)
        actual = plan_memory(
            LLAMA, **sizes, accumulate=6, tensor_parallel=tensor, pipeline_parallel=pipeline
        )
        assert actual.total == max(stage.memory.total for stage in every.stages)
        assert actual.weights < whole.weights
    with pytest.raises(ConfigError, match=r"tensor_parallel=2.*pass 'adamw'"):
        plan_memory(LLAMA, **sizes, tensor_parallel=2, optimizer="none")
    with pytest.raises(ConfigError, match="pipeline_parallel=0; pass 1 or more"):
        plan_memory(LLAMA, **sizes, pipeline_parallel=0)


@pytest.mark.slow
def test_a_gpu_has_the_next_block_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That Zero3 gathers while one is computed; not so a host, nor a model of one block."""
    config = LLAMA | {"num_hidden_layers": 1}
    for settings, blocks in ((LLAMA, 1), (config, 0)):
        ahead = planned(Layout(1, 1, 2, 3), settings).stages[0].memory
        monkeypatch.setattr(
            PlannedRanks, "ahead", property(lambda _: False, lambda *_: None), raising=False
        )
        without = planned(Layout(1, 1, 2, 3), settings).stages[0].memory
        monkeypatch.undo()
        assert ahead.weights == without.weights
        assert (ahead.total > without.total) == bool(blocks)


def test_bytes_are_those_of_the_collectives() -> None:
    """Two sums of hidden states in a layer each way, of which a rank sends 2 (n - 1) / n."""
    plan = planned(Layout(2, 2, 4), device="cpu")
    one = 2 * 16 * 32 * 2  # rows, tokens, hidden, bytes
    norms = plan.stages[1].sent("tensor")["all_reduce"]
    rows = 2 * 16 * 4  # float32 numbers of a loss, by row
    assert plan.stages[0].sent("tensor")["all_reduce"] == (
        5 * one,
        4 * one,
    )  # an embedding, two layers
    assert norms[1] == 4 * one
    assert norms[0] == 4 * one + 3 * rows + one  # the loss sums its gradient there
    assert plan.stages[0].passes == one
    learned = plan.stages[0].memory.optimizer // 8  # two float32 numbers of each weight
    assert plan.stages[0].gradients == 3 * 4 * learned  # small sums go whole to the other ranks


def test_zero_divides_averages_and_masters() -> None:
    plain, zero = (planned(Layout(1, 1, 8, each)).stages[0].memory for each in (0, 1))
    for name in ("optimizer", "master"):
        assert 7 < getattr(plain, name) / getattr(zero, name) < 9, name
    assert plain.weights == zero.weights


@pytest.mark.slow
def test_zero_3_divides_all_but_a_block() -> None:
    """And sends each weight twice in a microbatch, and its gradient once: its part, to 7 others."""
    plain, zero = (planned(Layout(1, 1, 8, each), device="cpu").stages[0] for each in (0, 3))
    for name in ("weights", "optimizer", "master"):
        assert 7 < getattr(plain.memory, name) / getattr(zero.memory, name) < 9, name
    sent, shapes = zero.sent("data"), parse(LLAMA).shapes()
    bytes_of = {n: Cut.of(s, 8).length * (2 if len(s) > 1 else 4) for n, s in shapes.items()}
    inside = sum(size for name, size in bytes_of.items() if ".layers." in name)
    every = sum(bytes_of.values())  # of a rank's parts; embedding and head are gathered once
    assert sum(sent["all_gather"]) == 7 * (every + inside)
    assert sum(sent["reduce_scatter"]) == 7 * every
    assert zero.gradients == 0
    with pytest.raises(ConfigError, match="would gather the weights of a stage for each"):
        planned(Layout(1, 2, 2, 3))


@pytest.mark.slow
def test_contexts_hold_their_tokens_alone() -> None:
    """Keys and values go around, and on the way back with their gradients, which come home."""
    options: dict[str, Any] = {"tokens": 64, "device": "cpu", "checkpoint_every": None}
    one, two, odd = (planned(Layout(context=c), **options).stages[0] for c in (1, 2, 4))
    assert two.memory.activations < 0.55 * one.memory.activations
    assert odd.memory.activations < 0.55 * two.memory.activations
    block = 2 * 32 * 4 * 8 * 2  # rows, tokens, heads of keys, dim, bytes
    # in each layer k and v, twice; their gradients in float32, in two turns
    assert sum(two.sent("context")["exchange"]) == 4 * (2 + 2 + 2 * 2 * 2) * block
    assert two.products[0][0] == one.products[0][0] / 2
    heads = planned(Layout(context=2), **options, context_attention="ulysses").stages[0]
    # q, k, v and out in each layer, half of the rank's own each way
    assert sum(heads.sent("context")["all_to_all"]) == 2 * 4 * 4 * block // 2
    with pytest.raises(ShapeError, match=r"4 heads.*are not a multiple of 3 ranks; use 1, 2, 4"):
        planned(Layout(context=3), context_attention="ulysses")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2 tied", "bitnet"])
def test_families_are_planned_on_ranks(name: str) -> None:
    for layout in (Layout(4, 2, 2), Layout(4, 1, 2, 3)):  # more ranks than heads of keys
        plan = planned(layout, SIZES | CONFIGS[name])
        assert max(plan.replay().peaks) == max(stage.memory.total for stage in plan.stages)


@pytest.mark.slow
def test_thousands_of_ranks_meet() -> None:
    plan = planned(Layout(4, 4, 128, 1), microbatches=2)
    seen = plan.replay()
    assert len(seen.seconds) == 2048
    assert max(seen.peaks) == max(stage.memory.total for stage in plan.stages)
    assert plan.table.bubble == pytest.approx(3 / 5)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not divide among 3 ranks"):
        planned(Layout(3))
    with pytest.raises(ConfigError, match="4 layers are not enough for 5 stages"):
        planned(Layout(1, 5))
    with pytest.raises(ConfigError, match="is not a grid"):
        planned(Layout(1, 0))
    with pytest.raises(ConfigError, match="is not positive"):
        planned(Layout(), rate=0.0)


@pytest.mark.slow
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
    command[-2:] = ["--lora", "4", "--quantize", "int8"]
    command += ["--pipeline-parallel", "2", "--pipeline-schedule", "interleaved"]
    done = click.testing.CliRunner().invoke(group, [*command, "--accumulate", "5"])
    assert "as interleaved asks; give --accumulate 6" in done.output, done.output
    done = click.testing.CliRunner().invoke(group, [*command, "--chunks", "3"])
    assert "4 layers are not enough for 2 stages of 3 chunks each" in done.output, done.output
    done = click.testing.CliRunner().invoke(group, command)
    assert done.exit_code == 0, done.output
    for said in ("lora 4, quantized to int8, interleaved", "replayed: 16 ranks", "as planned"):
        assert said in " ".join(done.output.split()), done.output
    done = click.testing.CliRunner().invoke(group, [*command, "--pipeline-parallel", "1"])
    assert (
        "--pipeline-schedule interleaved is not for one stage; give --pipeline-parallel 2"
        in done.output
    )
    done = click.testing.CliRunner().invoke(group, [*command, "--optimizer", "none"])
    assert "leave --optimizer out" in done.output
