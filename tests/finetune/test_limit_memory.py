"""``finetune --limit-memory``: what does not fit is known before training, and kept to in it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, DeviceMemoryError, machine, plan_memory
from unsloth_cupy.cli.options import Size, as_flags
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.naming import naming
from unsloth_cupy.finetune.run import limit, preparation
from unsloth_cupy.finetune.run.limit import Memory, Sizes, checked_plan, tokens_of, with_savings
from unsloth_cupy.finetune.run.results import difference, speed_of
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
def test_chunked_mlps_are_a_cure_for_every_model_and_with_adapters() -> None:
    *single, together, _ = cures(PLAN).split("; ")
    assert any(cure.startswith("chunked_mlp=True saves") for cure in single)
    assert "lora=8" in together
    assert "lora" in cures(replace(PLAN, chunked_mlp=True))
    assert "chunked_mlp" in cures(replace(PLAN, lora=8))
    assert "chunked_mlp" in cures(PLAN, config=parse(GEMMA))


@pytest.mark.parametrize("given", [{}, {"chunked_mlp": False}, {"offload": False}])
@pytest.mark.parametrize("every", [None, 1])
def test_savings_are_used_where_a_step_does_not_fit_without(
    given: dict[str, Any], every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first change that fits of chunks, offload and both, of those that are not settings."""
    facts, plan = sizes(device="cuda", tokens=512), replace(PLAN, recompute_every=every, **given)
    options = [{"chunked_mlp": True}, {"offload": True}, {"chunked_mlp": True, "offload": True}]
    options = [each for each in options if not each.keys() & given.keys()]
    if every is None:
        options = [each for each in options if "offload" not in each]
    totals = [facts.planned(plan, **each).total for each in ({}, *options)]
    for memory in (*totals, min(totals) - 1):
        monkeypatch.setattr(limit, "device_memory", lambda _, memory=memory: (memory, memory))
        fitting = [n for n, total in zip(({}, *options), totals, strict=True) if total <= memory]
        assert with_savings(facts, plan) == replace(plan, **(fitting[0] if fitting else {}))


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
    assert "of 931.32 GiB are free now" in messages[0]
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
        (15_530_896, 15_534_820, "plan 0.03 % too low"),
        (1_020_000, 1_000_000, "plan 2.00 % too high"),
        (99_999, 100_000, "equal"),
    ],
)
def test_the_difference_of_a_plan_has_no_sign(planned: int, measured: int, expected: str) -> None:
    assert difference(planned, measured) == expected


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([50.0, 5000.0], "2,525 tokens/s, not counting padding"),
        (
            [None, 100.0, 50.0],
            "75 tokens/s, not counting padding and 1 slower step that measured memory",
        ),
        (
            [None, None, 100.0, 50.0],
            "75 tokens/s, not counting padding and 2 slower steps that measured memory",
        ),
        ([None, None], ""),
    ],
)
def test_the_speed_names_the_steps_that_it_leaves_out(
    speeds: list[float | None], expected: str
) -> None:
    assert speed_of([{"seconds": 4.0, "tokens_per_second": each} for each in speeds]) == expected


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


# ---- rules, with plans whose totals are given ----------------------------------------------------
class Planned:
    """The properties of a run, whose plans save given bytes for each changed setting."""

    def __init__(self, saves: dict[str, int], total: int = 1000, **more: Any) -> None:
        facts = {"device": None, "batch": 4, "tokens": 128, "exists": True, "adapter": None}
        vars(self).update(facts | {"config": None, "beside": 1, "whole": True} | more)
        self.saves, self.total = saves, total

    def planned(self, plan: Plan, **changes: Any) -> Any:
        on = {**changes, **({"offload": True} if plan.offload else {})}
        total = self.total - sum(self.saves.get(name, 0) for name in on)
        first = SimpleNamespace(total=total, held={"weights": 5, "inputs": 7, "none": 0})
        moments = {0: "layer 3"}
        return SimpleNamespace(
            total=total, host=total * ("offload" in on), moments=moments, peak=0,
            beyond=lambda limit: first if total > limit else None,
        )  # fmt: skip


def cures_of(saves: dict[str, int], most: int, plan: Plan = PLAN, **more: Any) -> list[str]:
    each: Any = Planned(saves, **more)
    said = limit._cures(each, plan, each.planned(plan), most)
    return said.split("; ") if said else []


ALL = {"recompute_every": 500, "offload": 400, "dtype": 300, "batch": 200, "tokens": 100,
       "state_bits": 50, "chunked_mlp": 40, "lora": 30}  # fmt: skip
EACH = ["recompute_every=1 saves 500 B", "dtype=bfloat16 saves 300 B",
        "batch=2, accumulate=2 saves 200 B", "tokens=64 saves 100 B", "state_bits=8 saves 50 B",
        "chunked_mlp=True saves 40 B", "lora=8 saves 30 B"]  # fmt: skip


def test_cures_are_those_that_a_run_can_use() -> None:
    """Each that saves, the largest first; all together only if none is enough."""
    one = [f"{cure} and fits" for cure in EACH]
    assert cures_of(ALL, 980) == one
    assert cures_of(ALL, 600) == [*one[:1], *EACH[1:]]
    assert cures_of(ALL, 500) == [*one[:1], *EACH[1:]]
    together = (
        "recompute_every=1, dtype=bfloat16, batch=2, accumulate=2, tokens=64, state_bits=8,"
        " chunked_mlp=True, lora=8 saves 1.19 KiB"
    )
    assert cures_of(ALL, 499) == [*EACH, f"{together} and fits"]
    assert cures_of({"dtype": 30}, 499) == ["dtype=bfloat16 saves 30 B"], "no second name for it"
    assert cures_of({"dtype": 30, "batch": -30}, 10) == ["dtype=bfloat16 saves 30 B"]
    assert cures_of({}, 10) == []
    equal = cures_of({"dtype": 30, "batch": 30}, 980)
    assert [cure.partition("=")[0] for cure in equal] == ["batch", "dtype"], "by their names"
    *_, without_lora = cures_of(ALL, 10, exists=False)
    assert "state_bits=8, chunked_mlp=True saves" in without_lora
    several = cures_of({"dtype": 30, "batch": 20}, 10)
    assert several[2:] == ["dtype=bfloat16, batch=2, accumulate=2 saves 50 B"]
    done = replace(
        PLAN, recompute_every=1, dtype="bfloat16", state_bits=8, chunked_mlp=True, accumulate=3,
        lora=2,
    )  # fmt: skip
    short = {"batch": 1, "tokens": 2}
    assert cures_of(ALL, 980, done, **short) == []
    assert cures_of(ALL, 980, done, batch=2, tokens=3) == [
        "batch=1, accumulate=6 saves 200 B and fits", "tokens=1 saves 100 B and fits",
    ]  # fmt: skip
    assert cures_of(ALL, 980, done, batch=5, tokens=2)[0].startswith("batch=3, accumulate=6 ")
    offload = ["offload=True saves 400 B and fits"]
    assert cures_of(ALL, 980, done, device="cuda:0", **short) == offload
    for other in ({"offload": True}, {"limit_memory": 9}, {"recompute_every": 2}):
        some = cures_of(ALL, 980, replace(done, **other), device="cuda:0", **short)
        assert not any(cure.startswith("offload") for cure in some)
        assert bool(some) == ("recompute_every" in other)
    assert cures_of(ALL, 980, replace(done, state_bits=32, optimizer="lion"), **short) == []
    narrow = cures_of(ALL, 980, replace(done, state_bits=32), **short)
    assert narrow == ["state_bits=8 saves 50 B and fits"]
    plain = replace(done, chunked_mlp=False, lora=None)
    usual = ["chunked_mlp=True saves 40 B and fits", "lora=8 saves 30 B and fits"]
    assert cures_of(ALL, 980, plain, **short) == usual
    assert cures_of(ALL, 980, plain, exists=False, **short) == usual[:1]
    assert cures_of(ALL, 980, plain, adapter=1, **short) == usual[:1]
    assert cures_of(ALL, 980, replace(plain, lora=2), **short) == usual[:1]


def raises(error: Exception, *_: Any) -> None:
    raise error


def test_what_does_not_fit_is_said_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    each: Any = Planned({}, total=3 * MIB, batch=1, tokens=2, exists=False)
    monkeypatch.setattr(limit, "_cures", lambda *_: "a cure")
    with pytest.raises(DeviceMemoryError) as error:
        checked_plan(each, PLAN, 2 * MIB)
    message = str(error.value)
    assert message.startswith(
        "limit_memory 2.00 MiB: a step needs 3.00 MiB at its peak, in layer 3;"
    )
    assert (
        "is the first op that does not fit, by 1.00 MiB (in use: inputs 7 B, weights 5 B). a "
        in message
    )
    assert message.endswith(f"a cure; limit_memory={3 * MIB} would be enough")
    large: Any = Planned({}, total=100 * MIB)
    with pytest.raises(DeviceMemoryError, match=f"limit_memory={102 * MIB} would"):
        checked_plan(large, PLAN, MIB)  # a plan is exact to 2 %
    monkeypatch.setattr(limit, "_cures", lambda *_: "")
    with pytest.raises(DeviceMemoryError, match=r"B\)\. limit_memory="):
        checked_plan(each, PLAN, 2 * MIB)
    assert checked_plan(each, PLAN, 3 * MIB).total == 3 * MIB
    heard = list[str]()
    monkeypatch.setattr(limit, "announce", heard.append)
    low = "a step needs 3.00 MiB, but only 1.00 MiB of 0 B are free now"
    for memory, said in (((None, None), []), ((None, 3 * MIB), []), ((None, MIB), [low]),
                         ((3 * MIB, 3 * MIB), [])):  # fmt: skip
        monkeypatch.setattr(limit, "device_memory", lambda _, memory=memory: memory)
        heard.clear()
        checked_plan(each, PLAN, None)
        assert heard == said


def test_inputs_are_offloaded_where_a_step_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, whole = list[str](), [900]
    monkeypatch.setattr(limit, "announce", heard.append)
    monkeypatch.setattr(limit, "device_memory", lambda _: (whole[0], None))
    plan, gpu = replace(PLAN, recompute_every=1), {"device": "cuda:0"}
    saving: Any = Planned(ALL, **gpu)
    assert with_savings(saving, plan) == replace(plan, offload=True)
    assert heard == [
        "using offload=True, because otherwise a step does not fit into the 900 B of the GPU; the"
        " offloaded inputs of blocks need 600 B of host memory"
    ]
    heard.clear()
    other: Any = Planned({"offload": 50}, **gpu)
    host: Any = Planned(ALL)
    for given, settings in (
        (other, plan), (host, plan), (saving, PLAN), (saving, replace(plan, offload=False)),
        (saving, replace(plan, offload=True)), (saving, replace(plan, limit_memory=9)),
        (host, replace(plan, offload=False)),
    ):  # fmt: skip
        assert with_savings(given, settings) == settings
    for whole[0] in (None, 1000):  # type: ignore[assignment]
        assert with_savings(saving, plan) == plan
    assert heard == []
    with_savings(host, replace(plan, offload=True))
    assert heard == ["offload=True has no effect on the CPU: its arrays are in host memory already"]


def test_a_step_that_does_not_fit_a_gpu_names_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a limit of the user, several ranks, a new model or a CPU, which fit does not take."""
    monkeypatch.setattr(limit, "device_memory", lambda _: (900, None))

    def said(most: int | None = None, **more: Any) -> str:
        step: Any = Planned({"batch": 200}, **{"device": "cuda:0", **more})
        with pytest.raises(DeviceMemoryError) as error:
            checked_plan(step, PLAN, most)
        return str(error.value)

    assert "unsloth_cupy.fit() chooses settings that fit; " in said()
    with naming(as_flags):
        assert "--fit chooses settings that fit; " in said()
        for other in ({"most": 900}, {"beside": 2}, {"exists": False}, {"device": None}):
            assert "--fit" not in said(**other)


def test_ranks_of_a_machine_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that divide weights decide nothing by the plan of one device, but check the host."""
    monkeypatch.setattr(limit, "announce", lambda message: None)
    monkeypatch.setattr(limit, "device_memory", lambda device: (900 if device else 2000, None))
    plan = replace(PLAN, recompute_every=1)
    for beside, whole, expected in ((2, True, True), (3, True, None), (2, False, None)):
        rank: Any = Planned(ALL, device="cuda:0", beside=beside, whole=whole)
        assert with_savings(rank, plan).offload is expected  # 600 of 800 or 533 bytes
    wanted = replace(plan, offload=True)
    divided: Any = Planned(ALL, device="cuda:0", beside=3, whole=False)
    with pytest.raises(DeviceMemoryError, match="600 B of host memory in each rank, but"):
        checked_plan(divided, wanted, None)
    assert checked_plan(Planned(ALL, device="cuda:0", beside=2, whole=False), PLAN, None).total  # type: ignore[arg-type]


def test_rows_are_as_long_as_a_model_has_positions() -> None:
    assert [tokens_of(None, 99), tokens_of(None, 9999), tokens_of(99, 99)] == [99, 2048, 99]
    with pytest.warns(UserWarning, match="tokens=100 exceeds the 99 positions that the model"):
        assert tokens_of(100, 99) == 100


@pytest.mark.parametrize(
    ("quantize", "lora", "adapter", "stored", "expected"),
    [
        (None, None, None, None, None), ("nf4", 4, None, None, "nf4"),
        ("nf4", None, "own", None, "nf4"), (None, 4, None, "int8", "int8"),
        (None, 4, None, "q8_0", "q8_0"), ("nf4", 4, None, "q8_0", "nf4"),
        ("nf4", 4, None, "int8", "m is quantized already, as int8; leave quantize out"),
        ("nf4", None, None, None, "quantize freezes the weights: add lora, as in lora=16"),
        (None, None, None, "q8_0", "m is quantized, which freezes the weights: add lora"),
    ],
)  # fmt: skip
def test_quantized_weights_are_frozen(
    quantize: Any, lora: Any, adapter: Any, stored: Any, expected: str | None
) -> None:
    if expected is None or " " not in expected:
        assert limit.quantized_kind("m", quantize, lora, adapter, stored) == expected
        return
    with pytest.raises(ConfigError, match=f"^{expected}"):
        limit.quantized_kind("m", quantize, lora, adapter, stored)


def test_the_passes_of_a_step_are_its_first_and_its_largest() -> None:
    batches = [SimpleNamespace(tokens=np.zeros(n), n=n) for n in (3, 1, 2, 9, 8, 4, 7)]
    data: Any = SimpleNamespace(batches=SimpleNamespace(at=batches.__getitem__))
    method: Any = SimpleNamespace(inputs=lambda batch: batch, padded=lambda batch: batch.n)
    for padded, step, accumulate, expected in (
        (True, 0, 1, [3]), (True, 2, 1, [2]), (True, 0, 3, [3, 2]), (True, 1, 3, [9, 8]),
        (False, 2, 2, [8, 4]),
    ):  # fmt: skip
        passes: Any = limit.passes_of(data, step, accumulate, method, padded=padded)
        assert (passes if padded else [batch.n for batch in passes]) == expected


@pytest.mark.parametrize("bytes_of", [None, lambda step: 100 + step])
@pytest.mark.parametrize("maximum", [None, 50])
@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_the_first_steps_and_the_largest_are_measured(
    device: Any, maximum: Any, bytes_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit, all steps; steps on a GPU are not slower for it."""
    events = list[str]()

    class Pool:
        peak = 7

        def __enter__(self) -> None:
            events.append("open")

        def __exit__(self, *_: object) -> None:
            events.append("close")

        def reset_peak(self) -> None:
            events.append("reset")

    monkeypatch.setattr(limit, "memory_pool", lambda *_, **__: Pool())
    planned: Any = SimpleNamespace(total=10)
    memory = Memory(planned, maximum, device, largest=4, bytes_of=bytes_of)
    lines = []
    with memory.watched([]):
        for step in range(6):
            slow = memory.begin_step(step)
            counted = step in (0, 1, 4) or maximum is not None
            assert slow == (counted and (maximum, device) == (None, None))
            lines.append(memory.end_step())
            own = {} if bytes_of is None or step == 4 else {"planned_bytes": 100 + step}
            expected = {"planned_bytes": 10, "peak_bytes": 7} | own
            if step > 1 and step != 4 and bytes_of is not None:
                del expected["planned_bytes"]
            assert lines[-1] == (expected if counted else {})
    usual = ["open", "reset", "reset", "close", "open", "reset", "close"]
    assert events == (usual if maximum is None else ["open", *["reset"] * 6, "close"])
    none = Memory(planned, None, device, counts=False)
    with none.watched([]):
        assert not none.begin_step()
        assert none.end_step() == {}
    assert len(events) in (7, 8)


def test_a_step_with_noise_is_planned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()
    monkeypatch.setattr(limit, "plan_memory", lambda config, **options: asked.update(options))
    noise, plain = replace(PLAN, neftune=5.0), object()
    sizes(objective=plain).planned(PLAN)
    assert asked["objective"] is plain
    assert asked["device"] == "cpu"
    sizes(objective=plain, device="cuda:1").planned(noise)
    assert asked["device"] == "cuda"
    assert asked["objective"].func is limit.planned_with_noise
    assert asked["objective"].args == (plain,)
    assert not hasattr(asked["objective"], "full")
    method = METHODS["dpo"]
    sizes(objective=method).planned(noise)
    assert asked["objective"].full == method.full
    teacher: Any = SimpleNamespace(planned=lambda frozen: (frozen, "planned"))
    sizes(objective=teacher).planned(noise)
    assert asked["objective"].planned("model").args == (("model", "planned"),)
    sizes().planned(replace(PLAN, recompute_every=2))
    assert asked["recompute_every"] == CheckpointConfig(recompute_every=2)
    sizes().planned(PLAN, recompute_every=1)
    assert asked["recompute_every"] == 1
