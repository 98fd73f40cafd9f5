"""Memory of ranks, planned before there are any, and the bytes that they will send."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.finetune.run.executor import Executor
from unsloth_cupy.finetune.run.ranks import alone as start_alone
from unsloth_cupy.memory import stage_plan
from unsloth_cupy.memory.ledger import MemoryPlan
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.planned_ranks import PlannedRanks
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models import create
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.optimizers import optimizer_of
from unsloth_cupy.models.parse import parse
from unsloth_cupy.parallel._shards import Cut
from unsloth_cupy.training import offload as training_offload
from unsloth_cupy.training.checkpoint import CheckpointConfig

from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from ..models.peers import CONFIGS, SIZES

LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4}


ADAPTED = (  # inputs and outputs of the linear layers of a block, in one of two ranks
    (32, 16), (32, 16), (32, 16), (16, 32), (32, 24), (32, 24), (24, 32),
)  # fmt: skip


def planned(layout: Layout, config: Any = None, **changes: Any) -> list[MemoryPlan]:
    options = {"batch": 2, "tokens": 16, "dtype": "bfloat16", "microbatches": 4}
    return plan_ranks(LLAMA if config is None else config, layout, **options | changes)


def test_one_rank_is_planned_as_one_device_is() -> None:
    (alone,) = planned(Layout())
    whole = plan_memory(LLAMA, batch=2, tokens=16, dtype="bfloat16", accumulate=4)
    for part in ("weights", "optimizer", "master", "activations", "logits"):
        assert getattr(alone, part) == getattr(whole, part), part


INTERLEAVED = {"schedule": "interleaved"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_microbatches_that_are_not_run_take_what_others_take(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    few = planned(Layout(2, 2), microbatches=14, **options)
    monkeypatch.setattr(stage_plan, "SPARE", 20)
    monkeypatch.setattr(stage_plan, "ROUNDS", 20)
    every = planned(Layout(2, 2), microbatches=14, **options)
    for one, other in zip(few, every, strict=True):
        assert len(one.moments) < len(other.moments)
        assert (one.total, one.at_peak) == (other.total, other.at_peak)


def test_adapters_alone_have_averages() -> None:
    (stage,) = planned(Layout(2, 1, 2), rank=4, device="cpu")
    assert stage.optimizer == 2 * 4 * 4 * 4 * sum(a + b for a, b in ADAPTED)  # two, layers, rank


def test_ranks_offload_their_own_inputs_of_blocks() -> None:
    """Hidden states and residual sums: tensor ranks all of them, stages those of their blocks."""
    row = 2 * 16 * LLAMA["hidden_size"] * 2  # bytes of the hidden states of a microbatch
    whole = plan_memory(
        LLAMA, batch=2, tokens=16, dtype="bfloat16", recompute_every=1, offload=True
    ).host
    assert whole == (2 * LLAMA["num_hidden_layers"] - 1) * row
    moved: dict[str, Any] = {"recompute_every": 1, "offload": True}
    for layout in (Layout(2), Layout(data=2), Layout(data=2, zero=3), Layout(context=2)):
        kept, (rank,) = planned(layout, recompute_every=1)[0], planned(layout, **moved)
        assert rank.host == whole // layout.context, layout
        assert rank.activations < kept.activations
    first, last = planned(Layout(pipeline=2), **moved)
    assert (first.host, last.host) == (2 * 3 * row, 3 * row)  # two microbatches, and one
    with pytest.raises(ConfigError, match=r"plan_ranks\(offload=True\): it moves the inputs"):
        planned(Layout(2), offload=True)


@pytest.mark.parametrize(("stages", "chunks"), Sample.one_in(2, [(2, 2), (4, 2), (2, 4), (4, 4)]))
def test_interleaved_stages_offload_at_most_what_a_run_counts(stages: int, chunks: int) -> None:
    """More than the inputs of one pass, and at most 1 + 1 / chunks times as much."""
    config = LLAMA | {"num_hidden_layers": 64}
    moved: dict[str, Any] = {"recompute_every": 1, "offload": True}
    whole = plan_memory(config, batch=2, tokens=16, dtype="bfloat16", **moved).host
    first, *_ = planned(
        Layout(pipeline=stages), config, schedule="interleaved", chunks=chunks,
        microbatches=2 * stages, **moved,
    )  # fmt: skip
    assert whole < first.host <= (1 + 1 / chunks) * whole


class First(PlannedRanks):
    """Rank 0 of two, on any arrays, whose peer sends as much, or a few bytes more."""

    more = 0

    def _gather_rows(self, call: str, row: Any) -> Any:
        return np.array([row, row + self.more])


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("rank", [None, 4])
def test_data_ranks_with_offload_hold_what_is_planned(
    zero: int, rank: int | None, moved: bool
) -> None:
    """A step of a rank on a stand-in that counts: its GPU to 3 %, and the host to the byte."""
    config = LLAMA | {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}
    tokens, parts = 512, CheckpointConfig(recompute_every=1, offload=moved)
    (plan,) = plan_ranks(
        config, Layout(data=2, zero=zero), batch=2, tokens=tokens, dtype="bfloat16",
        microbatches=1, rank=rank, recompute_every=1, offload=moved,
    )  # fmt: skip
    with gpu("90", devices=1) as machine:
        machine.strict = False
        model = create(config, seed=0, dtype="float32", device="cuda")
        if rank is not None:
            model.add_adapter(rank=rank)
        ranks = First(0, 2, 2, ahead=True)
        run = start_alone()
        run.replicas, run.zero = ranks, zero
        ranks.more = 1024 * (zero == 1)  # parts are multiples of a block
        executor = Executor(run, model)
        optimizer = optimizer_of("adamw", model)
        copies = executor.copies("bfloat16")
        if rank is None:
            optimizer.keep_copies(copies)
        model.parameters = model.parameters | copies
        steps = executor.optimizer(optimizer)
        rows = machine.place(np.ones((2, tokens), np.int64))
        batch = {"tokens": rows, "labels": rows, "count": 1}
        peaks, copied = list[int](), 0
        for _ in range(3):
            before, copied = machine.held, training_offload.moved["to_host"]
            machine.peak = before
            passes = executor.gradients([batch], TrainingStep(parts))
            _, gradients = executor.summed(passes, 1)
            steps.step(gradients, finite=True, factor=0.5)
            del gradients
            peaks.append(machine.peak - before)
        copied = training_offload.moved["to_host"] - copied
    held = plan.weights + plan.optimizer + plan.master
    assert plan.total - held == pytest.approx(peaks[-1], rel=0.03)  # what plans promise
    assert plan.host == copied
    assert bool(copied) == moved


def test_quantized_weights_are_divided_as_codes() -> None:
    """Half a byte of each value and a scale of 64: a rank of two holds half of what one has."""
    options: Any = {"rank": 4, "device": "cpu", "dtype": "float32"}
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    dense, codes = (planned(Layout(2), config, **options, quantization=k)[0] for k in (None, "nf4"))
    values = 4 * (4 * 64 * 128 + 3 * 64 * 128) // 2
    blocks = values // 64
    assert dense.weights - codes.weights == 4 * values - values // 2 - 4 * blocks


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_plan_memory_is_of_the_rank_that_holds_most(number: int) -> None:
    """Options and grids take turns: a run has all of them, and three days each pair."""
    options: dict[str, Any] = ({}, {"rank": 4}, {"recompute_every": 1})[number]
    grids = ((2, 1), (1, 2), (2, 4))
    sizes = {"batch": 2, "tokens": 32, "dtype": "bfloat16", **options}
    whole = plan_memory(LLAMA, **sizes)
    for tensor, pipeline in Sample.one_in(3, grids[number:] + grids[:number]):
        every = planned(Layout(tensor, pipeline), microbatches=6, **sizes)
        actual = plan_memory(
            LLAMA, **sizes, accumulate=6, tensor_parallel=tensor, pipeline_parallel=pipeline
        )
        assert actual.total == max(stage.total for stage in every)
        assert actual.weights < whole.weights
    with pytest.raises(ConfigError, match=r"tensor_parallel=2.*pass 'adamw'"):
        plan_memory(LLAMA, **sizes, tensor_parallel=2, optimizer="none")
    with pytest.raises(ConfigError, match="pipeline_parallel=0; pass at least 1"):
        plan_memory(LLAMA, **sizes, pipeline_parallel=0)


@pytest.mark.slow
def test_a_gpu_has_the_next_block_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That Zero3 gathers while one is computed; not so a host, nor a model of one block."""
    config = LLAMA | {"num_hidden_layers": 1}
    for settings, blocks in ((LLAMA, 1), (config, 0)):
        (ahead,) = planned(Layout(1, 1, 2, 3), settings)
        monkeypatch.setattr(
            PlannedRanks, "ahead", property(lambda _: False, lambda *_: None), raising=False
        )
        (without,) = planned(Layout(1, 1, 2, 3), settings)
        monkeypatch.undo()
        assert ahead.weights == without.weights
        assert (ahead.total > without.total) == bool(blocks)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that a planned rank sends, by name of the call."""
    counts, exchange = Counter[str](), PlannedRanks._exchange

    def counted(self: PlannedRanks, call: str, sends: list[Any], receives: list[Any]) -> None:
        others = (array for rank, array in enumerate(sends) if rank != self.rank)
        counts[call] += sum(array.nbytes for array in others if array is not None)
        exchange(self, call, sends, receives)

    monkeypatch.setattr(PlannedRanks, "_exchange", counted)
    return counts


def test_bytes_are_those_of_the_collectives(sent: Counter[str]) -> None:
    """Two sums of hidden states in a layer each way, of which a rank sends 2 (n - 1) / n."""
    planned(Layout(2), device="cpu", microbatches=1)
    one = 2 * 16 * 32 * 2  # rows, tokens, hidden, bytes
    rows = 2 * 16 * 4  # float32 numbers of a loss, by row
    # an embedding, four layers both ways; the loss, which sums its gradient too
    assert sent["all_reduce"] == (1 + 2 * 4 + 2 * 4) * one + 3 * rows + one


def test_zero_divides_averages_and_masters() -> None:
    plain, zero = (planned(Layout(1, 1, 8, each))[0] for each in (0, 1))
    for name in ("optimizer", "master"):
        assert 7 < getattr(plain, name) / getattr(zero, name) < 9, name
    assert plain.weights == zero.weights


@pytest.mark.slow
def test_zero_3_divides_all_but_a_block(sent: Counter[str]) -> None:
    """And sends each weight twice in a microbatch, and its gradient once: its part, to 7 others."""
    (plain,), (zero,) = (planned(Layout(1, 1, 8, each), device="cpu") for each in (0, 3))
    for name in ("weights", "optimizer", "master"):
        assert 7 < getattr(plain, name) / getattr(zero, name) < 9, name
    with pytest.raises(ConfigError, match="would gather the weights of a stage for each"):
        planned(Layout(1, 2, 2, 3))
    counts = list[Counter[str]]()
    for microbatches in (1, 2):
        sent.clear()
        planned(Layout(1, 1, 8, 3), device="cpu", microbatches=microbatches)
        counts.append(Counter(sent))
    more = counts[1] - counts[0]  # without the step from which Zero3 learns the order
    shapes = parse(LLAMA).shapes()
    bytes_of = {n: Cut.of(s, 8).length * (2 if len(s) > 1 else 4) for n, s in shapes.items()}
    inside = sum(size for name, size in bytes_of.items() if ".layers." in name)
    every = sum(bytes_of.values())  # of a rank's parts; embedding and head are gathered once
    assert (more["all_gather"], more["reduce_scatter"]) == (7 * (every + inside), 7 * every)


@pytest.mark.slow
def test_contexts_hold_their_tokens_alone(sent: Counter[str]) -> None:
    """Keys and values go around, and on the way back with their gradients, which come home."""
    options: dict[str, Any] = {"tokens": 64, "device": "cpu", "microbatches": 1}
    one, two, four = (planned(Layout(context=c), **options)[0] for c in (1, 2, 4))
    assert two.activations < 0.55 * one.activations
    assert four.activations < 0.55 * two.activations
    block = 2 * 32 * 4 * 8 * 2  # rows, tokens, heads of keys, dim, bytes
    for kind, call, blocks in (
        ("ring", "exchange", 2 + 2 + 2 * 2 * 2),  # k and v, twice; float32 gradients, in two turns
        ("ulysses", "all_to_all", 4),  # q, k, v and out both ways, of which half is the rank's own
    ):
        sent.clear()
        planned(Layout(context=2), **options, context_attention=kind)
        assert sent[call] == 4 * blocks * block, kind
    with pytest.raises(ShapeError, match=r"4 heads.*are not a multiple of 3 ranks; use 1, 2, 4"):
        planned(Layout(context=3), context_attention="ulysses")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2 tied", "bitnet"])
def test_families_are_planned_on_ranks(name: str) -> None:
    (whole,) = planned(Layout(), SIZES | CONFIGS[name])
    for layout in (Layout(4, 2, 2), Layout(4, 1, 2, 3)):  # more ranks than heads of keys
        stages = planned(layout, SIZES | CONFIGS[name])
        assert max(stage.weights for stage in stages) < whole.weights


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot divide"):
        planned(Layout(3))
    with pytest.raises(ConfigError, match="4 layers are not enough for 5 stages"):
        planned(Layout(1, 5))
    with pytest.raises(ConfigError, match="is not a grid"):
        planned(Layout(1, 0))
    with pytest.raises(ConfigError, match="9 microbatches"):  # more than are run
        planned(Layout(1, 2), microbatches=9, **INTERLEAVED)


@pytest.mark.slow
def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    command = [
        "plan", str(path), "--tensor-parallel", "2", "--pipeline-parallel", "4",
        "--data-parallel", "4", "--zero", "1", "--accumulate", "8",
        "--plot", str(tmp_path / "step.svg"),
    ]  # fmt: skip
    done = click.testing.CliRunner().invoke(group, command)
    assert done.exit_code == 0, done.output
    for text in ("ranks: tensor 2, context 1, pipeline 4, data 4;", "stage 3", "total per rank"):
        assert text in " ".join(done.output.split()), done.output
    assert "<svg" in (tmp_path / "step.svg").read_text()
    command[-2:] = ["--lora", "4", "--quantize", "int8"]
    command += ["--pipeline-parallel", "2", "--pipeline-schedule", "interleaved"]
    done = click.testing.CliRunner().invoke(group, [*command, "--accumulate", "5"])
    assert "as interleaved requires; give --accumulate 6" in done.output, done.output
    done = click.testing.CliRunner().invoke(group, [*command, "--chunks", "3"])
    assert "4 layers are not enough for 2 stages of 3 chunks each" in done.output, done.output
    done = click.testing.CliRunner().invoke(group, command)
    assert done.exit_code == 0, done.output
    assert "lora 4, quantized to int8, interleaved" in " ".join(done.output.split()), done.output
    done = click.testing.CliRunner().invoke(group, [*command, "--pipeline-parallel", "1"])
    assert (
        "--pipeline-schedule interleaved needs several stages; give --pipeline-parallel 2"
        in done.output
    )
    done = click.testing.CliRunner().invoke(group, [*command, "--optimizer", "none"])
    assert "leave --optimizer none out" in done.output
