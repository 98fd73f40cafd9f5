import pytest

from unsloth_cupy import (
    constant_schedule,
    cosine_schedule,
    inverse_sqrt_schedule,
    linear_schedule,
    polynomial_schedule,
    warmup_stable_decay_schedule,
)
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


NEW = {
    "constant_with_warmup": constant_schedule,
    "inverse_sqrt": inverse_sqrt_schedule,
    "cosine_with_restarts": cosine_schedule,
    "polynomial": polynomial_schedule,
    "warmup_stable_decay": warmup_stable_decay_schedule,
}
OPTIONS = {
    "timescale": "timescale", "num_cycles": "cycles", "power": "power",
    "num_decay_steps": "decay", "decay_type": "shape", "min_lr_ratio": "minimum",
}  # fmt: skip


PEERS_OF_OPTIONS = [
    case for case in op_cases(FOLDER / "optimizers", "optimizers") if list(case.outputs) == ["rate"]
]


@pytest.mark.parametrize("peer", PEERS_OF_OPTIONS, ids=lambda peer: peer.name)
def test_every_option_is_that_of_transformers(peer: OpCase) -> None:
    name = next(n for n in NEW if peer.name.startswith(f"schedule_{n}"))
    params = {n: peer.params[n] for n in ("lr", "warmup", "steps")}
    params |= {own: peer.params[theirs] for theirs, own in OPTIONS.items() if theirs in peer.params}
    if "lr_end" in peer.params:
        params["minimum"] = peer.params["lr_end"] / params["lr"]
    rates = peer.outputs["rate"]
    assert len(rates) > params["steps"], "it goes on after the last step"
    for step, expected in enumerate(rates):
        assert NEW[name](step, **params) == pytest.approx(expected, abs=1e-9)


def test_inverse_sqrt_has_a_floor_and_needs_no_warm_up() -> None:
    options = {"lr": 2.0, "warmup": 0, "steps": 5}
    assert inverse_sqrt_schedule(0, **options) == 2.0
    assert inverse_sqrt_schedule(30_000, **options) == 1.0
    assert inverse_sqrt_schedule(30_000, **options, minimum=0.75) == 1.5


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (cosine_schedule, {"cycles": 0}, "cycles=0; pass a whole number, 1 or more"),
        (cosine_schedule, {"cycles": 1.5}, "cycles"),
        (polynomial_schedule, {"power": 0}, "power=0; pass a number above 0"),
        (inverse_sqrt_schedule, {"timescale": 0}, "timescale=0; pass a number above 0"),
        (warmup_stable_decay_schedule, {"decay": 17}, "decay=17; pass a whole number from 0 to 16"),
        (warmup_stable_decay_schedule, {"decay": 4, "shape": "sine"}, "shape"),
    ],
)
def test_wrong_options_are_named(schedule, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule(5, lr=1.0, warmup=4, steps=20, **options)


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
    shown = str(value)[:50]  # a long one is cut
    message = f"{schedule.__name__}(: {name}={shown}.*; pass a number from 0|.*: {name} must be)"
    with pytest.raises(ConfigError, match=f"^{message}"):
        schedule(numbers.pop("step"), **numbers)
