"""What is wrong is refused by name, before anything is computed, and errors carry their facts."""

import ast
import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unsloth_cupy
from unsloth_cupy import errors, models, parallel
from unsloth_cupy.core.call import option_of
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import (
    ConfigError,
    DeviceMemoryError,
    DTypeError,
    RangeError,
    ShapeError,
    UnslothCupyError,
)

from ..harness.parity import Case, emulator
from ..harness.tracked import ROOT, tracked
from ..models.peers import SIZES

PACKAGE = Path(unsloth_cupy.__file__).parent
CONFIG = {**SIZES, "model_type": "llama"}
ROWS = np.ones((2, 3), np.float32)
WEIGHTS = {"w": ROWS.copy()}

# The arguments that a public class or function needs before its options can be wrong.
NEEDED: dict[str, dict[str, Any]] = {
    "Engine": {"model": None},
    **{
        name: {"parameters": WEIGHTS}
        for name in ("AdamW", "Muon", "Adafactor", "Lion", "ScheduleFreeAdamW")
    },
    "KVCache": dict.fromkeys(("layers", "batch", "capacity", "kv_heads", "dim"), 2)
    | {"dtype": "float32"},
    "PagedKVCache": dict.fromkeys(("layers", "pages", "page", "kv_heads", "dim"), 2)
    | {"dtype": "float32"},
    "MultiHeadAttention": {"hidden": 8, "heads": 2, "seed": 0},
    "clip_gradients": {"gradients": WEIGHTS, "max_norm": 1.0},
    "measure_gradients": {"gradients": WEIGHTS},
    **{name: {"w": ROWS} for name in ("nf4_quantize", "ternary_quantize")},
    "fit": {"config": CONFIG, "device": "rtx4090"},
    "plan_memory": {"config": CONFIG, "batch": 1, "tokens": 2, "dtype": "float32"},
    "Lora": {"rank": 2},
    "models.create": {"config": CONFIG, "seed": 0},
    "models.create_adapter": {"config": None, "weights": {}, "rank": 2},
    **{
        f"{kind}_schedule": {"step": 1, "lr": 1e-3, "warmup": 1, "steps": 4}
        for kind in ("cosine", "linear", "constant", "inverse_sqrt", "polynomial")
    },
    "warmup_stable_decay_schedule": {"step": 1, "lr": 1e-3, "warmup": 1, "steps": 4, "decay": 1},
}
# Sizes of a formula: any whole number from 1 on, 7e9 too.
FORMULAS = ("estimate_", "format_bytes")
FOLDERS = ("load",)  # options are checked behind the folder
RESULTS = ("MemoryEstimate", "MemoryPlan", "MemoryPool", "LoraLayer")  # made by the library itself
WRONG: dict[type, tuple[Any, ...]] = {
    bool: (object(), "x", b"x", 1, 0.0, ROWS),
    int: (object(), "x", b"x", 2.5, True, ROWS, float("nan")),
    float: (object(), "x", b"x", ROWS, float("nan"), 1j, 10**400, float("inf")),
}


def public() -> dict[str, Any]:
    """Return the public classes and functions that are neither ops nor calls of one op's."""
    functions = {name: getattr(unsloth_cupy, name) for name in dir(unsloth_cupy)}
    functions |= {f"models.{name}": getattr(models, name) for name in ("create", "create_adapter")}
    own = {
        name: made
        for name, made in functions.items()
        if callable(made)
        and not name.startswith("_")
        and made not in OPS.values()
        and ".ops." not in made.__module__
        and not name.endswith("Error")
    }
    beside = ("AttentionConfig", "nf4_quantize", "ternary_quantize")  # the ops
    own |= {name: functions[name] for name in beside}
    return own | {"checkpoint": partial(unsloth_cupy.checkpoint, len)}


def wrong_options() -> list[Any]:
    """Return every option of every public class and function, with what it may not be."""
    cases = []
    for name, made in sorted(public().items()):
        if name.startswith(FORMULAS) or name in RESULTS + FOLDERS or "attention_layer" in name:
            continue
        for parameter in inspect.signature(made).parameters.values():
            if option := option_of(parameter):
                values: tuple[Any, ...] = WRONG[option.kind]
                cases.append(
                    pytest.param(name, made, parameter.name, values, id=f"{name}-{parameter.name}")
                )
    return cases


@pytest.mark.parametrize(("name", "made", "option", "given"), wrong_options())
def test_options_are_what_their_annotations_say(
    name: str, made: Callable[..., Any], option: str, given: tuple[Any, ...]
) -> None:
    for value in given:
        if option == "max_norm" and value is given[-1]:
            continue  # gradients below infinity are measured and left as they are
        with pytest.raises(ConfigError, match=option):
            made(**{**NEEDED.get(name, {}), option: value})


@pytest.mark.parametrize("name", [n for n in dir(unsloth_cupy) if n.startswith("estimate_")])
def test_sizes_of_formulas_are_whole(name: str) -> None:
    formula = getattr(unsloth_cupy, name)
    sizes = [p for p in inspect.signature(formula).parameters if p != "dtype"]
    plain = formula(**dict.fromkeys(sizes, 4))
    assert formula(**dict.fromkeys(sizes, 4.0)) == formula(**dict.fromkeys(sizes, np.int32(4)))
    assert repr(formula(**dict.fromkeys(sizes, 4.0))) == repr(plain)
    for size in sizes:
        for wrong in (1.5, 0, True, "4", None, float("nan"), ROWS):
            with pytest.raises(ConfigError, match=size):
                formula(**dict.fromkeys(sizes, 4) | {size: wrong})


def test_an_adapter_of_a_plan_is_one() -> None:
    for wrong in (1, "x", True, ROWS, [1]):
        with pytest.raises(ConfigError, match="adapter="):
            unsloth_cupy.plan_memory(CONFIG, batch=1, tokens=8, dtype="float32", adapter=wrong)


CHOICES: dict[str, Callable[[Any], Any]] = {
    "kind='nf4'": lambda kind: unsloth_cupy.nf4_quantize(ROWS, kind=kind),
    "method='absmean'": lambda method: unsloth_cupy.ternary_quantize(ROWS, method=method),
    "per='tensor'": lambda per: unsloth_cupy.ternary_quantize(ROWS, per=per),
    "optimizer='adamw'": lambda name: unsloth_cupy.plan_memory(
        CONFIG, batch=1, tokens=2, dtype="float32", optimizer=name
    ),
    "device='cpu'": lambda device: unsloth_cupy.plan_memory(
        CONFIG, batch=1, tokens=2, dtype="float32", device=device
    ),
    "kind='gpipe'": lambda kind: parallel.pipeline_schedule(2, 2, kind),
}


@pytest.mark.parametrize("said", CHOICES)
def test_what_is_chosen_from_is_a_name(said: str) -> None:
    option, right = said.split("=")
    CHOICES[said](right.strip("'"))
    for wrong in ("x", b"x", ROWS, 1, True, None, 2.5, [right.strip("'")], {}, object()):
        with pytest.raises(ConfigError, match=rf"(?s){option}=.*; choose from .*{right[1:-1]}"):
            CHOICES[said](wrong)


def test_options_of_numpy_are_numbers() -> None:
    config = unsloth_cupy.CheckpointConfig(np.bool_(True), recompute_every=np.int64(3))
    assert (config.enabled, type(config.recompute_every)) == (True, int)
    assert type(unsloth_cupy.LossScaler(np.float32(4.0)).value) is float
    for kind in ("int32", "uint8"):
        assert unsloth_cupy.KVCache(1, np.dtype(kind).type(2), 3, 1, 4, dtype="float32").keys[
            0
        ].shape == (2, 3, 1, 4)


NUMBERS = [  # of which a row is one integer: (op, operand)
    (name, operand.name)
    for name, op in OPS.items()
    if op.__module__.startswith("unsloth_cupy.")  # others are defined by tests
    for operand in op.contract.inputs
    if operand.kind == "int" and operand.axes == ("*rows",)
]


@pytest.mark.parametrize("where", [nullcontext, emulator], ids=["definition", "kernel"])
@pytest.mark.parametrize(("name", "operand"), NUMBERS)
def test_a_number_is_no_array_of_integers(
    name: str, operand: str, where: Callable[[], AbstractContextManager[Any]]
) -> None:
    sizes = {"vocab": 5, "hidden": 8, "inputs": 4, "outputs": 3, "rank": 2}
    case = Case("one row", rows=[], **sizes, arrays={operand: np.array(3)})
    call = case.draw(OPS[name], np.float32)
    with where(), pytest.raises(DTypeError, match=f"{operand} is the number 3; pass np.array"):
        call._replace(arrays=call.arrays | {operand: 3})()


@pytest.mark.parametrize("window", [b"x", "xx", b"", 2.5, [1, b"x"], {1, 2}])
def test_windows_are_numbers(window: Any) -> None:
    with pytest.raises(ConfigError, match="window="):
        unsloth_cupy.KVCache(2, 1, 4, 1, 4, dtype="float32", window=window)


HUGE = [2**31, 10**9, 10**12, 2**63, 10**30, pytest.param(10**400, id="beyond-a-float")]


@pytest.mark.parametrize("size", HUGE)
def test_sizes_beyond_the_memory_are_refused_before_they_are_made(size: int) -> None:
    """Whatever the machine has: 2**50 bytes at least."""
    big = max(size, 2**48)
    sizes = [[big if axis == i else 2 for i in range(5)] for axis in range(5)]
    cases: list[Callable[[], Any]] = [
        lambda: unsloth_cupy.rope_tables(big, 64),
        lambda: unsloth_cupy.rope_tables(big, 0),
        lambda: unsloth_cupy.rope_tables(64, 2 * big),
        lambda: unsloth_cupy.KVCache(0, 0, big, 0, 0, dtype="float32"),
        lambda: unsloth_cupy.PagedKVCache(0, 0, big, 0, 0, dtype="float32"),
        *(partial(unsloth_cupy.KVCache, *each, dtype="float32") for each in sizes),
        *(partial(unsloth_cupy.KVCache, *each, dtype="int8", window=2) for each in sizes),
        *(partial(unsloth_cupy.PagedKVCache, *each, dtype="float32") for each in sizes),
        lambda: models.create(CONFIG, seed=0).add_adapter(big),
        lambda: parallel.pipeline_schedule(big, 4),
        lambda: parallel.pipeline_schedule(4, big, "gpipe"),
    ]
    for case in cases:
        with pytest.raises((DeviceMemoryError, ConfigError)) as caught:
            case()
        if isinstance(caught.value, DeviceMemoryError):
            assert caught.value.required > caught.value.available > 0


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"]
)
def test_configs_of_impossible_sizes(key: str, size: int) -> None:
    config = {**CONFIG, key: max(size, 2**40)}
    for made in (
        lambda: models.create(config, seed=0),
        lambda: unsloth_cupy.plan_memory(config, batch=1, tokens=8, dtype="float32"),
    ):
        with pytest.raises(ConfigError, match=key):
            made()


@pytest.mark.parametrize("name", ["batch", "tokens", "accumulate", "rank"])
@pytest.mark.parametrize("size", [0, -1, 2**31, 10**30])
def test_plans_of_impossible_sizes(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=name):
        unsloth_cupy.plan_memory(
            CONFIG, **{"batch": 1, "tokens": 8, "dtype": "float32", name: size}
        )


def test_large_plans_are_made() -> None:
    plan = unsloth_cupy.plan_memory(CONFIG, batch=10**4, tokens=10**5, dtype="bfloat16")
    assert plan.total > 2**40


@pytest.mark.parametrize("given", [5, None, ROWS, b"x", object(), "a\0b"])
def test_paths_that_are_none(given: Any) -> None:
    plain, adapted = (models.create(CONFIG, seed=0) for _ in range(2))
    adapted.add_adapter(2)
    for case in (
        lambda: models.load(given),
        lambda: plain.save(given),
        lambda: adapted.save_adapter(given),
    ):
        with pytest.raises(ConfigError, match="pass"):
            case()


@pytest.mark.parametrize("given", [ROWS, 5, None, object(), "int16", (1, 2)])
def test_dtypes_that_are_none(given: Any) -> None:
    for case in (
        lambda: models.create(CONFIG, seed=0, dtype=given),
        lambda: unsloth_cupy.KVCache(1, 1, 1, 1, 1, dtype=given),
        lambda: unsloth_cupy.PagedKVCache(1, 1, 1, 1, 1, dtype=given),
        lambda: unsloth_cupy.plan_memory(CONFIG, batch=1, tokens=1, dtype=given),
        lambda: unsloth_cupy.MixedPrecisionConfig(compute_dtype=given if given is not None else 0),
        lambda: unsloth_cupy.MixedPrecisionConfig(master_dtype=given if given is not None else 0),
        lambda: unsloth_cupy.Autocast(given if given is not None else 0),
        lambda: unsloth_cupy.cast(ROWS, given),
        lambda: unsloth_cupy.estimate_training_memory(1, 1, 1, given),
        lambda: unsloth_cupy.AttentionConfig().shared_memory_bytes(given),
    ):
        with pytest.raises(ConfigError):
            case()


@pytest.mark.parametrize("option", ["mixed_precision", "checkpoint"])
def test_configs_in_configs(option: str) -> None:
    for value in (5, "x", None, object()):
        with pytest.raises(ConfigError, match=option):
            unsloth_cupy.TrainingConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_pickles_come_back(again: Callable[[Any], Any]) -> None:
    assert all(again(op) is op for op in OPS.values())
    model = models.create(CONFIG, seed=0)
    model.add_adapter(2)
    tokens = np.arange(3, 9)[None]
    np.testing.assert_array_equal(again(model).logits(tokens), model.logits(tokens))
    cache = unsloth_cupy.KVCache(1, 1, 4, 1, 8, dtype="float32")
    cache.append(0, *np.ones((2, 1, 3, 1, 8), np.float32))
    assert again(cache).length == 3
    optimizer = unsloth_cupy.AdamW({"w": ROWS.copy()})
    optimizer.step(WEIGHTS)
    assert again(optimizer).steps == 1
    for made in (unsloth_cupy.TrainingConfig(), unsloth_cupy.AttentionConfig(), model.config):
        assert again(made) == made
    assert again(unsloth_cupy.LossScaler(4.0)).value == 4
    error = again(ShapeError("said", expected=(1,), actual=(2,)))
    assert (str(error), error.expected, error.actual) == ("said", (1,), (2,))
    memory = again(DeviceMemoryError("said", 2, 1))
    assert (memory.required, memory.available) == (2, 1)


class TestFacts:
    def test_shapes(self) -> None:
        with pytest.raises(ShapeError) as caught:
            unsloth_cupy.rms_norm(np.ones((2, 3, 4), np.float32), np.ones(5, np.float32))
        assert (caught.value.expected, caught.value.actual) == ((4,), (5,))
        q = np.ones((2, 3, 4, 8), np.float32)
        with pytest.raises(ShapeError) as caught:
            unsloth_cupy.attention(q, np.ones((2, 5, 2, 7), np.float32), q[:, :, :2])
        assert caught.value.expected == (2, 5, 2, 8)
        assert caught.value.actual == (2, 5, 2, 7)
        with pytest.raises(ShapeError) as caught:
            unsloth_cupy.attention(q, q[:, :, :3], q[:, :, :3])
        assert (caught.value.expected, caught.value.actual) == ("a multiple of 3", 4)

    def test_dtypes(self) -> None:
        with pytest.raises(DTypeError) as caught:
            unsloth_cupy.relu2(np.ones(3, np.int32))
        assert caught.value.actual == np.int32
        assert np.float32 in caught.value.expected

    def test_ranges(self) -> None:
        with pytest.raises(RangeError) as caught:
            unsloth_cupy.embedding(np.array([1, 7]), ROWS)
        assert (caught.value.expected, caught.value.actual) == (range(2), 7)

    def test_every_class_has_them(self) -> None:
        for kind in vars(errors).values():
            if isinstance(kind, type) and issubclass(kind, UnslothCupyError):
                assert {"expected", "actual"} <= vars(kind("said")).keys()

    @pytest.mark.slow
    def test_every_shape_error_tells_its_shapes(self) -> None:
        silent = []
        for path in tracked("unsloth_cupy/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                if called and node.func.id == "ShapeError":
                    keywords = {keyword.arg for keyword in node.keywords}
                    if not {"expected", "actual"} <= keywords:
                        silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        assert not silent
