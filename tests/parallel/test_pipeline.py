"""Schedules of pipelines: in order, without a wait for ever, with the bubbles that are known."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import add, losses
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, network
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.ranks.stages import ModelStage, pipeline_gradients, schedule_of
from unsloth_cupy.parallel import SingleCommunicator, Step, pipeline_schedule, run_pipeline
from unsloth_cupy.parallel.schedule import KINDS, most_held, timetable

from ..models.peers import SIZES
from .pipelines import small_layers
from .threads import by_threads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_schedules_hold_and_wait_as_known(kind, stages, rounds):
    """Bubble and microbatches held, by formula; messages meet in one order of all of them."""
    count, chunks = stages * rounds, 2 if kind == "interleaved" else 1
    schedule = pipeline_schedule(stages, count, kind)
    steps = {Step(m, c, back) for m in range(count) for c in range(chunks) for back in (0, 1)}
    assert all(len(mine) == len(steps) for mine in schedule)
    assert all({*mine} == steps for mine in schedule)
    table = timetable(schedule)
    assert table.bubble == pytest.approx((stages - 1) / (count * chunks + stages - 1))
    assert_all_meet(schedule, table)
    held = {
        "gpipe": [count] * stages,
        "1f1b": [min(stages - stage, count) for stage in range(stages)],
        "interleaved": [
            min(2 * (stages - stage - 1) + stages + 1, 2 * count) for stage in range(stages)
        ],
    }
    assert [most_held(mine) for mine in schedule] == held[kind]


def assert_all_meet(schedule, table):
    """Run all stages, of which who sends waits until the other receives, as on a GPU."""
    events = [
        [event for step, after in zip([None, *mine], messages, strict=True)
         for event in (step, *after) if event is not None]
        for mine, messages in zip(schedule, table.messages, strict=True)
    ]  # fmt: skip
    inputs = {(m.to, m.step) for own in table.messages for after in own for m in after}
    moved = True
    while moved:
        moved = False
        for stage, mine in enumerate(events):
            while mine and isinstance(mine[0], Step):
                assert (stage, mine[0]) not in inputs  # its input is here
                mine.pop(0)
                moved = True
            other = mine and (mine[0].to if mine[0].source == stage else mine[0].source)
            if mine and events[other][:1] == mine[:1]:
                inputs.remove((mine[0].to, mine.pop(0).step))
                events[other].pop(0)
                moved = True
    assert not any(events)


def test_a_process_alone_has_a_pipeline():
    small_layers(SingleCommunicator())


def test_what_makes_no_sense_is_refused():
    for wrong in ((2, 3, "zigzag"), (0, 3), (2, 0), (2, 3, "interleaved")):
        with pytest.raises(ConfigError, match=r"(is|are) not|choose from gpipe"):
            pipeline_schedule(*wrong)
    with pytest.raises(ConfigError, match="does not have chunks"):
        pipeline_schedule(2, 4, "gpipe", chunks=2)
    with pytest.raises(ConfigError, match="has 2 stages and 3 microbatches, not 1 ranks"):
        run_pipeline(None, pipeline_schedule(2, 3), [None] * 3, SingleCommunicator())
    wrong = pipeline_schedule(2, 2)
    wrong[0] = wrong[0][::-1]
    with pytest.raises(ConfigError, match="stage 1 waits for F0 of stage 0, which never"):
        timetable(wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stages_in_16_bits_round_only_what_they_send(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum before the next block, which one process normalises before it rounds it.

    All else has equal bits, those of a preference's gradients too.
    """
    config = SIZES | {"model_type": "llama", "num_hidden_layers": 2}
    rng = np.random.default_rng(0)
    tokens, completion = rng.integers(1, 90, (4, 9)), np.arange(9) > 3
    mask = np.tile(np.append(completion[1:], False), (4, 1))
    batch = {"tokens": tokens, "reference": rng.uniform(-5, -4, (4, 9)).astype(np.float32)}

    def loss(model: Any, tokens: Any, reference: Any) -> Any:
        rows = model.log_probs(tokens, tokens).log_probs
        return losses.preference(rows, mask, reference)

    def of_stage(comm: Any) -> Any:
        model = create(config, seed=0, dtype=dtype, pipeline=comm)
        stage = ModelStage(model, model.trainable, TrainingStep(), loss)
        return pipeline_gradients(stage, schedule_of(stage.stages, 1), [batch])

    def step() -> Any:
        model = create(config, seed=0, dtype=dtype)
        return model.value_and_gradients(partial(loss, **batch))

    def rounded(call: Any, branch: Any, checkpoints: Any, inputs: Any) -> Any:
        before, stream = blocks(call, branch, checkpoints, range(1))
        return blocks(call, add(before, stream), checkpoints, range(1, 2))

    stages, blocks = by_threads(2, of_stage), network.blocks
    alone, _ = step()
    monkeypatch.setattr(network, "blocks", rounded)
    value, gradients = step()
    assert alone != value
    assert [each for each, _ in stages] == [value, value]
    actual = stages[0][1] | stages[1][1]
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(actual[name], gradient.astype(np.float32), name)
