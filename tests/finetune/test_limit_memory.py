"""``finetune --limit-memory``: what does not fit is known before training, and kept to in it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from unsloth_cupy import DeviceMemoryError, machine, plan_memory
from unsloth_cupy.cli.options import Size
from unsloth_cupy.finetune.run import limit, preparation
from unsloth_cupy.finetune.run.limit import Memory, Sizes, checked_plan
from unsloth_cupy.finetune.run.results import difference
from unsloth_cupy.finetune.run.settings import Plan, Settings
from unsloth_cupy.memory.ledger import MemoryPlan
from unsloth_cupy.models.parse import parse

from ..cli.test_cli import assert_one_clear_error, run
from ..memory.test_memory import SIZES, SMALL

MIB = 2**20
LLAMA = SMALL | SIZES | {"num_hidden_layers": 2}
GEMMA = LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 32}
PLAN = Settings(steps=3).decided(new=True)
TRAIN = ("finetune", "--steps", 4, "--layers", 2, "--evaluate-every", 4)


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsloth_cupy.finetune.data.text.HELD_OUT_CHARACTERS", 1000)


known: dict[str, MemoryPlan] = {}


@pytest.fixture(autouse=True)
def _plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests ask for 71 different plans, for most of them several times."""

    def plan_once(config: Any, **options: Any) -> MemoryPlan:
        key = repr((config, options))
        if key not in known:
            known[key] = plan_memory(config, **options)
        return known[key]

    monkeypatch.setattr(limit, "plan_memory", plan_once)


def sizes(**changes: Any) -> Sizes:
    facts = {"config": parse(LLAMA), "batch": 4, "tokens": 128, "device": None, "exists": True}
    return Sizes(**(facts | changes))


def test_the_adapter_of_the_model_is_planned_not_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one has the settings of the run; another rank is tried without it."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(limit, "plan_memory", lambda config, **options: asked.update(options))
    plan = Settings(steps=3, lora=4).decided(new=False)
    own: Any = object()
    sizes(adapter=own).planned(plan)
    assert asked["adapter"] is own
    assert "rank" not in asked
    sizes().planned(plan)
    assert (asked["rank"], asked["adapter"].settings["r"]) == (None, 4)
    asked.clear()
    sizes().planned(plan, lora=8)
    assert (asked["rank"], asked["adapter"]) == (8, None)
    asked.clear()
    sizes().planned(PLAN)
    assert asked["adapter"] is None
    passes: Any = [{"tokens": 1}]
    for changes in ({}, {"dtype": "bfloat16"}, {"batch": 1}, {"tokens": 9}, {"accumulate": 2}):
        sizes(inputs=passes).planned(PLAN, **changes)
        fixed = not {*changes} & {"batch", "tokens", "accumulate"}
        assert asked["inputs"] == (passes if fixed else ())


@pytest.mark.slow
def test_a_limit_that_is_too_small_names_the_layer_the_bytes_and_the_cures() -> None:
    plan = plan_memory(LLAMA, batch=4, tokens=128, dtype="float32", device="cpu")
    limit = int(0.8 * plan.total)
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(sizes(), PLAN, limit)
    assert (error.value.required, error.value.available) == (plan.total, limit)
    first = plan.beyond(limit)
    assert first is not None
    assert "layer " in str(first)
    message = str(error.value)
    for said in (
        f"{first} is the first op that does not fit",
        "activations",
        "recompute_every=1 saves",
    ):
        assert said in message
    assert "and fits" in message


@pytest.mark.slow
def test_cures_are_named_together_where_none_is_enough() -> None:
    with pytest.raises(DeviceMemoryError, match=r"lora=8, \S.* saves .* MiB"):
        checked_plan(sizes(), PLAN, 5 * MIB)
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(sizes(exists=False), replace(PLAN, recompute_every=1), 5 * MIB)
    assert "lora" not in str(error.value)
    assert "recompute_every" not in str(error.value)


@pytest.mark.parametrize("limit", [1, 256 << 10, MIB, 3 * MIB])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("parts", [None, 1])
def test_each_cure_is_named_once_and_saves(limit: int, batch: int, parts: int | None) -> None:
    small = parse(LLAMA | {"num_hidden_layers": 1, "vocab_size": 32})
    facts = sizes(config=small, batch=batch, tokens=2 * batch, exists=False)
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(facts, replace(PLAN, recompute_every=parts), limit)
    cures = str(error.value).partition("). ")[2].split("; ")[:-1]
    named = [cure.partition(" saves ")[0] for cure in cures]
    assert len(set(named)) == len(named)
    assert not any(" saves -" in cure or " saves 0 B" in cure for cure in cures)


def test_a_cure_saves_what_it_says() -> None:
    options: dict[str, Any] = {"batch": 4, "tokens": 128, "dtype": "float32", "device": "cpu"}
    whole = plan_memory(LLAMA, **options).total
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(sizes(), PLAN, whole - 1)
    for switch, change in {
        "recompute_every=1": {"recompute_every": 1},
        "chunked_mlp=True": {"chunked_mlp": True},
        "dtype=bfloat16": {"dtype": "bfloat16"},
        "lora=8": {"rank": 8},
        "state_bits=8": {"state_bits": 8},
    }.items():
        less = plan_memory(LLAMA, **(options | change))
        assert f"{switch} saves {(whole - less.total) / MIB:.2f} MiB and fits" in str(error.value)


def cures(plan: Plan, **changes: Any) -> str:
    """Return what is said of a limit for which all switches together are not enough."""
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(sizes(**changes), plan, 5 * MIB)
    return str(error.value).partition("). ")[2]


@pytest.mark.slow
def test_a_switch_that_is_on_is_no_cure() -> None:
    assert "state_bits" not in cures(replace(PLAN, state_bits=8))
    assert "chunked_mlp" not in cures(replace(PLAN, chunked_mlp=True))


@pytest.mark.slow
def test_chunked_mlps_are_no_cure_where_they_cannot_be() -> None:
    *single, together, _ = cures(PLAN).split("; ")
    assert any(cure.startswith("chunked_mlp=True saves") for cure in single)
    assert "lora=8" in together
    assert "chunked_mlp" not in together, "adapters are on MLPs"
    assert "chunked_mlp" in cures(PLAN, exists=False).split("; ")[-2]
    assert "lora" not in cures(replace(PLAN, chunked_mlp=True))
    assert "chunked_mlp" not in cures(replace(PLAN, lora=8))
    assert "chunked_mlp" not in cures(PLAN, config=parse(GEMMA))


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_the_machine_is_the_limit_where_none_is_given(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    memory = [10**12, 10**12]

    def here(name: str | None) -> tuple[int, int]:
        asked.append(name)
        return memory[0], memory[1]

    monkeypatch.setattr(limit, "device_memory", here)
    messages: list[str] = []
    monkeypatch.setattr(limit, "announce", messages.append)
    plan = checked_plan(sizes(device=device), PLAN, None)
    assert not messages
    memory[1] = plan.total - 1
    checked_plan(sizes(device=device), PLAN, None)
    assert "are free now, of 931.32 GiB" in messages[0]
    memory[0] = plan.total - 1
    with pytest.raises(DeviceMemoryError, match=f"device={device or 'cpu'} has .*: a step") as e:
        checked_plan(sizes(device=device), PLAN, None)
    assert (e.value.required, e.value.available) == (plan.total, plan.total - 1)
    assert "recompute_every=1 saves" in str(e.value)
    assert re.search(r"; limit_memory=\d+ tries anyway$", str(e.value))
    assert asked == [device] * 3
    assert checked_plan(sizes(device=device), PLAN, plan.total) == plan, "a limit goes before"


@pytest.mark.slow
def test_nothing_is_loaded_that_the_machine_has_no_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "device_memory", lambda _: (2**20, 2**20))
    monkeypatch.setattr(preparation.models, "create", None)
    result = run(*TRAIN, "--out", tmp_path / "run")
    assert_one_clear_error(result, "--device cpu has 1.00 MiB: a step needs")
    assert not (tmp_path / "run").exists()


def test_a_container_has_less_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = machine.machine_memory()
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "CGROUPS", (tmp_path / "memory.max", tmp_path / "none"))
    assert machine.machine_memory() == whole
    (tmp_path / "memory.max").write_text("123456\n")
    assert machine.machine_memory() == 123456
    assert machine.device_memory(None)[0] == 123456


def test_what_fits_is_planned() -> None:
    plan = checked_plan(sizes(), PLAN, 2**30)
    assert plan == checked_plan(sizes(), PLAN, None)
    assert (
        plan.total < checked_plan(sizes(device="cuda:0"), replace(PLAN, accumulate=3), None).total
    )


def test_nothing_is_trained_beyond_the_limit(tmp_path: Path) -> None:
    result = run(*TRAIN, "--limit-memory", "6MiB", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "--limit-memory 6.00 MiB: a step needs" in result.output
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("planned", "measured", "expected"),
    [
        (15_530_896, 15_534_820, "plan 0.03 % lower"),
        (1_020_000, 1_000_000, "plan 2.00 % higher"),
        (99_999, 100_000, "equal"),
    ],
)
def test_the_difference_of_a_plan_has_no_sign(planned: int, measured: int, expected: str) -> None:
    assert difference(planned, measured) == expected


@pytest.mark.slow
def test_planned_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    for limited, counted in ((), 2), (("--limit-memory", "1GiB"), 4):
        out = tmp_path / f"run{counted}"
        result = run(*TRAIN, *limited, "--out", out)
        assert result.exit_code == 0, result.output
        assert "peak array memory" in result.output
        assert ", measured " in result.output
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        slowed = [line["step"] for line in lines if line.get("tokens_per_second", 1) is None]
        assert slowed == ([] if limited else [1, 2]), "what is counted is not a speed"
        lines = [line for line in lines if "peak_bytes" in line]
        assert [line["step"] for line in lines] == [*range(1, counted + 1)]
        for line in lines:
            assert line["planned_bytes"] == pytest.approx(line["peak_bytes"], rel=0.02)  # a plan's


@pytest.mark.slow
def test_the_order_of_a_long_text_is_no_part_of_a_step(tmp_path: Path) -> None:
    """It takes 8 bytes a row, twice that while it is drawn: here more than a step."""
    text = tmp_path / "text.txt"
    text.write_text("a tree and a house " * 20_000)
    rows = ("--tokens", "4", "--batch", "32", "--steps", "2", "--vocabulary", "262")
    tiny = ("--layers", "1", "--hidden", "8", "--evaluate-every", "2")
    result = run("finetune", "--text", text, *rows, *tiny, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    for line in [json.loads(line) for line in log if "peak_bytes" in line]:
        assert 0 <= line["peak_bytes"] - line["planned_bytes"] < 100_000  # rows: 8 bytes each


def test_the_limit_is_kept_to_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = plan_memory(SMALL, batch=1, tokens=8, dtype="float32", device="cpu")
    monkeypatch.setattr(preparation, "checked_plan", lambda *_: small)  # a plan that was wrong
    result = run(*TRAIN, "--limit-memory", "12MiB", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "arrays hold 12." in result.output
    assert "raise the limit, or compute in smaller batches" in result.output


def test_a_gpu_is_looked_at_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plan = plan_memory(SMALL, batch=1, tokens=8, dtype="float32")

    class Pool:
        peak = 7

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def reset_peak(self) -> None: ...

    def pool(*args: Any, **_: Any) -> Pool:
        asked.append(args)
        return Pool()

    monkeypatch.setattr("unsloth_cupy.finetune.run.limit.memory_pool", pool)
    for device in ("cuda", "cuda:1"):
        memory = Memory(plan, 100, device)
        with memory.watched([]):
            memory.begin_step()
            assert memory.end_step() == {"planned_bytes": plan.total, "peak_bytes": 7}
    assert asked == [(100, 0), (100, 1)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("64k", 64_000), ("10MiB", 10 * MIB), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "0", "0.4", "-1MiB", "two", "1 parsec", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write one as 2GiB"):
        Size().convert(text, None, None)
