"""Classes and functions with arguments that nobody means: they work, or raise the library's errors.

``test_properties.py`` does the same for the ops, and ``test_errors.py`` for options by their types.
"""

import dataclasses
import inspect
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy import models, parallel
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError, UnslothCupyError
from unsloth_cupy.finetune.run.settings import Settings
from unsloth_cupy.finetune.run.trainer import Trainer
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.quantized.int8 import Int8
from unsloth_cupy.ops.quantized.mxfp4 import Mxfp4
from unsloth_cupy.ops.quantized.nf4 import Nf4
from unsloth_cupy.ops.quantized.ternary import Ternary

from ..harness.sampling import Sample
from ..models.peers import SIZES

CALLS = 40  # of a target in a run; all of them with --sample all
CONFIG = {**SIZES, "model_type": "llama"}
SECONDS = np.timedelta64(3, "s")  # an integer, says NumPy


class Lying:
    """Has the attributes of an array, and none of its methods."""

    shape, ndim, dtype = (2, 3), 2, np.dtype("float32")


def values() -> list[Any]:
    return [
        object(), None, "x", "", "\x00", b"x", True, -1, 0, 2, 7, 2**45, 2**63, 2**70,
        -(10**60), 10**400, 1e308, 2.5, float("nan"), float("inf"), 1j, [], [[]], ["x"], (), (2, 3),
        (None, None), {}, {1: 2}, {"w": 1}, {"w": np.ones(3)}, set(), np.ones((2, 3), np.float32),
        np.ones(0, np.float32), np.ones((2, 3), np.int64), np.array(["x"]), np.array([None]),
        np.array(1.0), SECONDS, np.datetime64("2020"), np.float64("nan"), np.int64(5), int,
        np.dtype("float32"), "float32", "object", iter([1]), memoryview(b"ab"), ..., Lying(),
    ]  # fmt: skip


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def adamw() -> uc.AdamW:
    return uc.AdamW({"w": normal(3, 4)})


def cache() -> uc.KVCache:
    made = uc.KVCache(1, 2, 8, 1, 4, dtype="float32")
    made.append(0, normal(2, 3, 1, 4), normal(2, 3, 1, 4))
    return made


def pages() -> uc.PagedKVCache:
    made = uc.PagedKVCache(1, 8, 4, 1, 4, dtype="float32")
    made.allocate(5)
    return made


def model() -> models.Transformer:
    return models.create(CONFIG, seed=0)


ONE, KEYS, TOKENS = parallel.SingleCommunicator(), normal(2, 2, 1, 4), np.array([[1, 2, 3]])
NF4, INT8 = uc.nf4_quantize(normal(4, 64)), uc.int8_weight(normal(4, 8))
MXFP4 = uc.mxfp4_quantize(normal(4, 64))
TERNARY = uc.ternary_quantize(normal(4, 32))
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "truncate": True}  # fmt: skip
LONG = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 4}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 4, "rope_theta": 1e4}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}


def tables(**scaling: Any) -> Any:
    return uc.rope_tables(8, 8, scaling=scaling)


def restored(kind: Any, /, **state: Any) -> Any:
    return kind.from_state(state)


def config(**changes: Any) -> Any:
    return parse({**CONFIG, "sliding_window": 4, "use_sliding_window": True, **changes})


def of(make: Callable[[], Any], method: str) -> Callable[..., Any]:
    """Return a function that calls a method of a new object."""

    def call(**arguments: Any) -> Any:
        return getattr(make(), method)(**arguments)

    return call


def defaults(function: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Return a function and arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p.default for p in parameters if p.default is not p.empty}
    return function, named | given


SHAPE = {"layers": 1, "batch": 2, "capacity": 8, "kv_heads": 1, "dim": 4, "dtype": "float32"}
TARGETS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "KVCache": defaults(uc.KVCache, **SHAPE),
    "KVCache.append": (of(cache, "append"), {"layer": 0, "k": KEYS, "v": KEYS}),
    "KVCache.attend": (of(cache, "attend"), {"layer": 0, "q": KEYS, "k": KEYS, "v": KEYS}),
    "KVCache.mask": (of(cache, "mask"), {"layer": 0, "queries": 2}),
    "KVCache.attended_keys": (
        of(cache, "attended_keys"), {"layer": 0, "queries": 2, "window": 2}
    ),
    "KVCache.held": (of(cache, "held"), {"layer": 0, "queries": 2, "every": normal(2, 3)}),
    "KVCache.reads_codes": (of(cache, "reads_codes"), {"layer": 0, "new": 1, "window": None}),
    "KVCache.check_room": (of(cache, "check_room"), {"new": 1, "layer": 0}),
    "KVCache.reorder": (of(cache, "reorder"), {"index": np.array([1, 0])}),
    "PagedKVCache": defaults(
        uc.PagedKVCache, layers=1, pages=4, page=2, kv_heads=1, dim=4, dtype="float32"
    ),
    "PagedKVCache.allocate": (of(pages, "allocate"), {"tokens": 3}),
    "PagedKVCache.append": (
        of(pages, "append"), {"layer": 0, "sequences": [0], "k": KEYS[:1], "v": KEYS[:1]},
    ),
    "PagedKVCache.page_table": (of(pages, "page_table"), {"sequences": [0]}),
    "PagedKVCache.fork": (of(pages, "fork"), {"sequence": 0}),
    "AdamW": defaults(uc.AdamW, parameters={"w": normal(3, 4)}),
    "AdamW.step": (
        of(adamw, "step"),
        {"gradients": {"w": normal(3, 4)}, "lr": 0.1, "factor": 1.0, "finite": True},
    ),
    "AdamW.load_state": (of(adamw, "load_state"), {"state": adamw().state()}),
    **{
        made.__name__: defaults(made, parameters={"w": normal(3, 4)})
        for made in (uc.Muon, uc.Adafactor, uc.Lion, uc.ScheduleFreeAdamW)
    },
    "LossScaler": defaults(uc.LossScaler),
    "MixedPrecisionConfig": defaults(uc.MixedPrecisionConfig),
    "TrainingConfig": defaults(
        uc.TrainingConfig, mixed_precision=uc.MixedPrecisionConfig(),
        checkpoint=uc.CheckpointConfig(),
    ),
    "CheckpointConfig": defaults(uc.CheckpointConfig),
    "memory_reduction_factor": (uc.CheckpointConfig().memory_reduction_factor, {"layers": 2}),
    "estimate_training_memory": (
        uc.estimate_training_memory,
        {"model_params": 9, "batch_size": 1, "seq_len": 4, "dtype": "float32"},
    ),
    "plan_memory": defaults(uc.plan_memory, config=CONFIG, batch=1, tokens=4, dtype="float32"),
    "format_bytes": (uc.format_bytes, {"count": 5}),
    "clip_gradients": (uc.clip_gradients, {"gradients": {"w": normal(3)}, "max_norm": 1.0}),
    "cosine_schedule": (
        uc.cosine_schedule, {"step": 1, "lr": 1e-3, "warmup": 1, "steps": 4, "minimum": 0.0},
    ),
    "rope_tables": defaults(uc.rope_tables, length=4, dim=8),
    **{f"rope {kind['rope_type']}": (tables, kind) for kind in (YARN, LONG, LLAMA3, DYNAMIC)},
    **{f"config {kind}": (partial(config, model_type=kind), {
        name: None for name in (
            "max_window_layers", "layer_types", "rope_parameters", "rope_scaling", "head_dim",
            "eos_token_id", "max_position_embeddings", "original_max_position_embeddings",
            "quantization_config", "hidden_act", "partial_rotary_factor", "rms_norm_eps",
        )}) for kind in ("llama", "qwen3", "gemma2", "phi3", "bitnet")},
    "AttentionConfig": defaults(uc.AttentionConfig),
    "AttentionConfig.resolve": defaults(uc.AttentionConfig().resolve, device=(90, 232448)),
    "MultiHeadAttention": defaults(uc.MultiHeadAttention, hidden=8, heads=2, seed=0),
    "MultiHeadAttention.load": (
        of(lambda: uc.MultiHeadAttention(8, 2, seed=0), "load"), {"weights": {}, "prefix": ""},
    ),
    "memory_pool": (uc.memory_pool, {"limit": None, "device": None}),
    "reshape": (uc.reshape, {"x": normal(2, 3), "shape": (3, 2)}),
    "broadcast_to": (uc.broadcast_to, {"x": normal(2, 3), "shape": (2, 3)}),
    "Nf4": (Nf4, {**NF4.held(), **NF4.facts()}),
    "Int8": (Int8, {**INT8.held(), **INT8.facts()}),
    "Mxfp4": (Mxfp4, {**MXFP4.held(), **MXFP4.facts()}),
    "Ternary": defaults(Ternary, **TERNARY.held(), shape=(4, 32)),
    "Ternary.unpack": defaults(
        Ternary.unpack, data=TERNARY.pack("planes"), layout="planes", shape=(4, 32)
    ),
    **{
        f"{type(weight).__name__}.from_state": (
            partial(restored, type(weight)), weight.state(),
        )
        for weight in (NF4, INT8, MXFP4, TERNARY)
    },
    "Tape.gradients": (of(uc.Tape, "gradients"), {"of": normal(3), "wrt": [normal(3)]}),
    "SingleCommunicator.split": (ONE.split, {"color": 0}),
    **{
        f"SingleCommunicator.{name}": (getattr(ONE, name), {"x": normal(4), **more})
        for name, more in {
            "all_reduce": {"op": "sum"}, "all_gather": {"axis": 0}, "reduce_scatter": {"axis": 0},
            "broadcast": {"root": 0}, "send": {"to": 0}, "all_to_all": {"divided": 0, "joined": 1},
            "exchange": {"to": 0, "out": normal(4), "source": 0},
        }.items()
    },
    "SocketCommunicator": (  # others would be waited for
        partial(parallel.SocketCommunicator, size=1),
        {"rank": 0, "address": "127.0.0.1", "port": 0, "timeout": 1.0, "checked": False},
    ),
    "ring_order": (parallel.ring_order, {"tokens": 4, "comm": ONE, "causal": True}),
    "shard": (parallel.shard, {"x": normal(4, 2), "axis": 0, "comm": ONE}),
    "grid": defaults(parallel.grid, comm=ONE),
    "pipeline_schedule": defaults(parallel.pipeline_schedule, stages=2, microbatches=2),
    "run_pipeline": (
        parallel.run_pipeline,
        {"stage": None, "schedule": [[]], "microbatches": [], "comm": ONE},
    ),
    **{
        name: (getattr(parallel, name), {key: None, "comm": ONE})
        for name, key in (("DataParallel", "model"), ("Zero1", "optimizer"), ("Zero3", "model"))
    },
    "create": defaults(models.create, config=CONFIG, seed=0),
    "quantize": (models.quantize, {"model": None, "kind": "nf4"}),
    "loss": (model().loss, {"tokens": TOKENS, "labels": TOKENS, "mask": None, "count": None}),
    "generate": defaults(model().generate, tokens=TOKENS, max_new_tokens=2),
    "Trainer": defaults(Trainer),
    "Settings": (
        Settings,
        {f.name: f.default for f in dataclasses.fields(Settings)},
    ),
}  # fmt: skip


def attempted(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function; errors that are not the library's propagate."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(**arguments)
        except UnslothCupyError:
            pass
        except TypeError as error:  # of a call without an argument that it needs
            assert "argument" in str(error), error  # noqa: PT017


@pytest.mark.parametrize("name", TARGETS)
def test_errors_are_the_librarys(name: str) -> None:
    function, arguments = TARGETS[name]
    odd = values()
    calls = [{key: value} for key in arguments for value in odd]
    draw = random.Random(f"{name} {Sample.day}")
    pairs = draw.choices(calls, k=2 * CALLS)
    calls += [a | b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    for changed in calls if Sample.all else draw.sample(calls, min(CALLS, len(calls))):
        try:
            attempted(function, arguments | changed)
        except Exception as error:
            error.add_note(f"{name} with {changed!r:.300}")
            raise


class WithDtype:
    dtype = np.dtype("float32")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Nf4(NF4.packed, (4, 64), absmax=np.ones(4, np.int64)), DTypeError),
        (lambda: Nf4(NF4.packed, (4, 64), absmax=np.ones(3, np.float32)), ShapeError),
        (lambda: Int8(INT8.codes, np.ones((4, 1), np.float32)), ShapeError),
        (lambda: Int8(INT8.codes.astype(np.int16), INT8.absmax), DTypeError),
        (lambda: Ternary(TERNARY.planes, 0, (4, 32)), RangeError),
        (lambda: uc.MixedPrecisionConfig(master_dtype=WithDtype()), ConfigError),
        (lambda: uc.TrainingConfig(batch_size=2**40), ConfigError),
        (lambda: uc.LossScaler(SECONDS), ConfigError),
        (lambda: uc.estimate_training_memory(1e308, 1, 1), ConfigError),  # type: ignore[arg-type]
        (lambda: uc.broadcast_to(normal(2), shape=(2**70,)), ShapeError),
        (lambda: parse({**CONFIG, "eos_token_id": 2**40}), ConfigError),
        (lambda: parse({**CONFIG, "head_dim": 2**20}), ConfigError),
        (lambda: parse({**CONFIG, "rope_theta": 1e300}), ConfigError),
        (lambda: tables(**YARN | {"factor": 1e-320}), ConfigError),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_a_weight_of_zeros_has_scales_of_zero() -> None:
    """Only codes that are not 0 need a scale."""
    zeros = np.zeros((2, 2, 8), np.uint8)
    assert not Ternary(zeros, 0.0, (2, 64)).dequantize(np.float32).any()
    zeros[0, 0, 0] = 1
    rows = np.array([[1], [0]], np.float32)
    assert Ternary(zeros, rows, (2, 64)).dequantize(np.float32).sum() == 1
    with pytest.raises(RangeError, match="a scale is 0"):
        Ternary(zeros, rows[::-1], (2, 64))


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda names: uc.AdamW({"w": normal(3, 4)}, whole=names), "whole"),
        (lambda names: uc.AdamW({"w": normal(3, 4)}, groups=[{"names": names}]), "groups"),
        (lambda names: model().add_adapter(4, targets=names), "targets"),
        (lambda names: model().add_adapter(4, modules=names), "modules"),
        (lambda names: model().add_adapter(4, tokens=names), "tokens"),
    ],
    ids=["whole", "groups", "targets", "modules", "tokens"],
)
@pytest.mark.parametrize("value", [np.array(1.0), 5, b"w"], ids=repr)
def test_what_holds_no_others_is_refused_as_a_list(
    call: Callable[[Any], object], option: str, value: Any
) -> None:
    with pytest.raises(UnslothCupyError, match=option):
        call(value)
