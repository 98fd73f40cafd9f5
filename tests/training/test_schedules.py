import pytest

from unsloth_cupy import constant_schedule, cosine_schedule, linear_schedule
from unsloth_cupy.errors import ConfigError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases

SCHEDULES = {
    "schedule_linear": linear_schedule,
    "schedule_cosine": cosine_schedule,
    "schedule_cosine_with_min_lr": cosine_schedule,
    "schedule_constant_with_warmup": constant_schedule,
}
PEERS = [c for c in op_cases(FOLDER / "ops", "training") if c.name in SCHEDULES]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_equals_transformers(peer: OpCase) -> None:
    """Up to the last step: transformers' cosine rises again after it, ours stays."""
    lr, steps = peer.params["lr"], peer.params["training_steps"]
    for step in range(steps + 1):
        rate = SCHEDULES[peer.name](
            step,
            lr=lr,
            warmup=peer.params["warmup_steps"],
            steps=steps,
            minimum=peer.params.get("min_lr", 0.0) / lr,
        )
        assert rate == pytest.approx(peer.outputs["rate"][step], abs=1e-12)


@pytest.mark.parametrize("schedule", [linear_schedule, cosine_schedule, constant_schedule])
def test_the_rate_stays_after_the_last_step(schedule) -> None:
    last = schedule(20, lr=3e-4, warmup=4, steps=20, minimum=0.1)
    assert last == pytest.approx(3e-4 if schedule is constant_schedule else 3e-5)
    assert schedule(1000, lr=3e-4, warmup=4, steps=20, minimum=0.1) == last


@pytest.mark.parametrize("schedule", [linear_schedule, cosine_schedule, constant_schedule])
def test_without_warm_up_and_with_nothing_else(schedule) -> None:
    assert schedule(0, lr=1.0, warmup=0, steps=10) == 1.0
    assert schedule(2, lr=1.0, warmup=4, steps=4) == 0.5
    for steps in (0, 3, 4):  # transformers' cosine gives 1 too, its linear schedule 0
        assert schedule(4, lr=1.0, warmup=4, steps=steps) == 1.0
        last = schedule(5, lr=1.0, warmup=4, steps=steps, minimum=0.1)
        assert last == pytest.approx(1.0 if schedule is constant_schedule else 0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("warmup", -1),
        ("steps", -1),
        ("minimum", 2),
        ("step", "first"),
        ("lr", None),
        ("lr", 10**400),
        ("step", 10**400),
        ("steps", 10**400),
        ("steps", None),
    ],
)
@pytest.mark.parametrize("schedule", [linear_schedule, cosine_schedule, constant_schedule])
def test_bad_numbers_raise(schedule, name: str, value: float) -> None:
    numbers = {"step": 0, "lr": 1.0, "warmup": 4, "steps": 20} | {name: value}
    said = f"{schedule.__name__}(: {name}={value}; pass a number from 0|.*: {name} must be)"
    with pytest.raises(ConfigError, match=f"^{said}"):
        schedule(numbers.pop("step"), **numbers)
