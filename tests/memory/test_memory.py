"""The planned memory of a step equals the memory that it uses."""

import functools
import gc
import math
import re
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    CheckpointConfig,
    MemoryPlan,
    attention_forward,
    compute_copies,
    cross_entropy,
    measure_gradients,
    memory_pool,
    models,
)
from unsloth_cupy.errors import ConfigError, ShapeError, UnslothCupyError
from unsloth_cupy.finetune.run.executor import noisy, planned_with_noise
from unsloth_cupy.machine import format_bytes
from unsloth_cupy.memory import plan as memory_plan
from unsloth_cupy.memory.estimate import (
    MemoryEstimate,
    estimate_attention_memory,
    estimate_flash_attention_memory,
    estimate_forward_memory,
    estimate_training_memory,
)
from unsloth_cupy.memory.ledger import Ledger
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.planned import Planned, PlannedOnHost, recording_in
from unsloth_cupy.memory.planned_functions import reshaped
from unsloth_cupy.memory.planned_model import new_adapter
from unsloth_cupy.models import create
from unsloth_cupy.models.objective import next_token
from unsloth_cupy.models.optimizers import OPTIMIZERS, of_tables, optimizer_of
from unsloth_cupy.ops.common import threads
from unsloth_cupy.ops.losses._head import CHUNK_BYTES
from unsloth_cupy.training import offload as training_offload
from unsloth_cupy.training import tape
from unsloth_cupy.training.gradients import sum_gradients

from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from ..models import peers

GIB = 2**30
SMALL = {
    "model_type": "llama", "vocab_size": 500, "hidden_size": 96, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
# beside these arrays Python's own objects, which a pool counts now and then alone, are few
SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "head_dim": 32}
LLAMA = SMALL | SIZES
GEMMA = LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 32}
PHI = LLAMA | {"model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": False}
BATCH, TOKENS = 4, 256


def training(
    config: dict[str, Any],
    *,
    dtype: str = "float32",
    optimizer: str = "adamw",
    state_bits: int = 32,
    rank: int | None = None,
    recompute_every: int | None = None,
    accumulate: int = 1,
    chunked_mlp: bool = False,
    batch: int = BATCH,
    objective: Any = next_token,
    **adapter: Any,
) -> Callable[[], None]:
    """Return a function that makes a training step."""
    model = models.create(config, seed=0, dtype="float32")
    model.chunked_mlp = chunked_mlp
    if rank is not None:
        model.add_adapter(rank, **adapter)
    steps = optimizer_of(optimizer, model, state_bits=state_bits)
    copies = compute_copies(model.parameters, dtype)
    if rank is None:
        steps.keep_copies(copies)
    model.parameters = model.parameters | copies
    parts = None if recompute_every is None else CheckpointConfig(True, recompute_every)
    rows = np.random.default_rng(0).integers(0, 500, (batch, TOKENS))

    def passes() -> Iterator[Any]:
        for _ in range(accumulate):
            function = functools.partial(objective, tokens=rows, labels=rows, count=1)
            yield model.value_and_gradients(function, checkpoint=parts)

    def step() -> None:
        _, gradients = sum_gradients(passes(), accumulate)
        norms = measure_gradients(gradients, 0.1)
        assert norms.factor < 1, "gradients are clipped, which takes a copy"
        steps.step(gradients, finite=norms.finite, factor=norms.factor)

    return step


def measured(config: dict[str, Any], **options: Any) -> tuple[int, list[tuple[str, int]]]:
    """Return the peak of a step, and the peak while each op on a tape runs."""
    training(config, **options, batch=1)()  # what is imported and worked out once is there then
    ops: list[tuple[str, int]] = []
    with memory_pool() as pool:
        step = training(config, **options)
        pool.reset_peak()
        watch: Any = tape.watch_memory
        tape.watch_memory = lambda op: (ops.append((op, pool.peak)), pool.reset_peak())[0]
        try:
            step()
        finally:
            tape.watch_memory = watch
        return max(pool.peak, *(held for _, held in ops)), ops


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"recompute_every": 2},
    "lora": {"rank": 8},
    "accumulate": {"accumulate": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "8-bit": {"state_bits": 8},
    "all": {
        "dtype": "bfloat16", "rank": 8, "recompute_every": 1, "accumulate": 2, "state_bits": 8,
    },
}  # fmt: skip
OTHERS = {name: {"optimizer": name, "dtype": "bfloat16"} for name in [*OPTIMIZERS][1:]}
CHUNKED: dict[str, dict[str, Any]] = {
    "chunked MLP": {"chunked_mlp": True},
    "chunked MLP, most others": {
        "chunked_mlp": True, "dtype": "bfloat16", "recompute_every": 1, "accumulate": 2,
    },
}  # fmt: skip
CASES = [(config, way) for config in (LLAMA, GEMMA) for way in WAYS] + [(PHI, "plain")]
CASES += [(PHI, way) for way in OTHERS]  # fused matrices
CASES += [(LLAMA, way) for way in CHUNKED] + [(PHI, "chunked MLP")]


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan assumes that all threads of attention peak together, which they seldom do."""
    monkeypatch.setattr(threads, "count", lambda: 1)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("config", "way"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else v["model_type"],
)
def test_the_peak_is_as_planned(
    config: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "ALIKE", 1000)  # every pass is planned, and has its moments
    given = (WAYS | CHUNKED | OTHERS)[way]
    options = {"dtype": "float32"} | given
    planned = plan_memory(config, batch=BATCH, tokens=TOKENS, device="cpu", **options)
    peak, ops = measured(config, **given)
    assert planned.total == pytest.approx(peak, rel=0.02)  # what plans promise
    if way in CHUNKED:  # all chunks are alike: the plan has the moments of one
        return
    moments = planned.moments[: len(ops)]
    assert [moment.op for moment in moments] == [op for op, _ in ops]
    for moment, (_, held) in zip(moments, ops, strict=True):
        assert abs(moment.total - held) < 0.02 * planned.total, str(moment)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "more",
    [
        {}, {"dora": True}, {"tokens": range(50)}, {"modules": ["embed_tokens"]},
        {"targets": ("q_proj", "embed_tokens")},
    ],
    ids=["LoRA", "DoRA", "tokens", "table", "low rank"],
)  # fmt: skip
def test_adapters_are_planned_as_they_are(more: dict[str, Any]) -> None:
    """On some layers, with magnitudes, outside of blocks; MLPs without one may go by chunks."""
    adapter: dict[str, Any] = {"rank": 4, "targets": ("q_proj", "v_proj"), **more}
    model = models.create(LLAMA, seed=0)
    model.add_adapter(**adapter)
    planned = plan_memory(
        model.config, batch=BATCH, tokens=TOKENS, dtype="float32", device="cpu",
        adapter=model.adapter, chunked_mlp=True,
    )  # fmt: skip
    peak, _ = measured(LLAMA, **adapter, chunked_mlp=True)
    assert planned.total == pytest.approx(peak, rel=0.02)  # what plans promise
    every = plan_memory(LLAMA, batch=BATCH, tokens=TOKENS, dtype="float32", device="cpu", rank=4)
    assert planned.optimizer < every.optimizer or "modules" in more
    alike = new_adapter(model.config, **adapter)
    shapes = [{n: a.shape for n, a in each.parameters.items()} for each in (alike, model.adapter)]
    assert shapes[0] == shapes[1]


def squares(model: Any, tokens: Any, labels: Any, count: int) -> Any:
    """Return a loss of whole rows, from all logits."""
    losses = cross_entropy(model.logits(tokens)[:, :-1], labels[:, 1:]).sum(axis=1)
    return (losses * losses).sum() * (1 / count)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("more", [{}, {"rank": 4, "recompute_every": 1}], ids=["plain", "all"])
def test_the_objective_that_trains_is_planned(more: dict[str, Any]) -> None:
    """Its logits are whole, and take more than all else."""
    config = LLAMA | {"vocab_size": 8000}
    options: dict[str, Any] = {"batch": BATCH, "tokens": TOKENS, "dtype": "float32"}
    options |= {"device": "cpu", **more}
    planned = plan_memory(config, **options, objective=squares)
    peak, _ = measured(config, **more, objective=squares)
    assert planned.total == pytest.approx(peak, rel=0.02)  # what plans promise
    for stages in (1, 2):
        whole, chunked = (
            plan_memory(config, **options, objective=each, pipeline_parallel=stages).total
            for each in (squares, None)
        )
        assert whole > 1.2 * chunked


@pytest.mark.usefixtures("_one_thread")
def test_noise_on_embeddings_is_planned() -> None:
    """In a model that is little else, where it makes the peak."""
    config = LLAMA | {"vocab_size": 500, "num_hidden_layers": 1, "intermediate_size": 8}
    options: dict[str, Any] = {"batch": BATCH, "tokens": TOKENS, "dtype": "float32"}

    def objective(model: Any, **batch: Any) -> Any:
        return noisy(next_token, 5.0, model, noise_key=np.array(7), **batch)

    peak, ops = measured(config, objective=objective)
    noise = functools.partial(planned_with_noise, next_token)
    planned = plan_memory(config, **options, device="cpu", objective=noise)
    assert planned.total == pytest.approx(peak, rel=0.02)  # what plans promise
    at = next(n for n, moment in enumerate(planned.moments) if moment.op == "add")
    moment, (op, held) = planned.moments[at], ops[at]
    assert op == "add"
    assert moment.total == pytest.approx(held, rel=0.02)  # what plans promise
    assert moment.held["workspace"] >= BATCH * TOKENS * config["hidden_size"] * 4


@pytest.fixture
def _own_threads() -> Iterator[None]:
    """Threads of a test do not stay for the next one."""
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


@pytest.mark.usefixtures("_own_threads")
def test_what_threads_do_side_by_side_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"q": (4, 256, 6, 32), "k": (4, 256, 2, 32), "v": (4, 256, 2, 32)}
    taken: dict[int, int] = {}
    for count in (1, 2):
        monkeypatch.setattr(threads, "count", functools.partial(int, count))
        ledger = Ledger(1)
        with recording_in(ledger):
            made = [PlannedOnHost.of(shape, np.float32) for shape in shapes.values()]
            out, lse = attention_forward(*made, causal=True)
            ledger.note("attention_forward")
        taken[count] = ledger.plan().total - sum(a.nbytes for a in (*made, out, lse))
    block = 4 * 2 * 3 * 16 * 256 * 4  # batch, kv heads, their queries, keys: float32 scores
    assert block < taken[1] < 1.5 * block
    assert 2 * block < taken[2] < 3.5 * block  # and sums of tiles
    arrays = [np.ones(shape, np.float32) for shape in shapes.values()]
    attention_forward(*arrays, causal=True)
    with memory_pool(held=arrays) as pool:
        attention_forward(*arrays, causal=True)
    assert pool.peak < 1.02 * ledger.plan().total


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("more", [{}, {"rank": 4}, {"recompute_every": 1}, {"optimizer": "none"}])
def test_many_passes_are_planned_as_two(
    more: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes after the first use as much as the second, so a plan does not run them all."""
    options: dict[str, Any] = {"batch": 2, "tokens": 64, "dtype": "bfloat16", "device": device}
    few = plan_memory(LLAMA, **options, **more, accumulate=1000)
    monkeypatch.setattr(memory_plan, "ALIKE", 1000)
    many = plan_memory(LLAMA, **options, **more, accumulate=5)
    assert len(few.moments) < len(many.moments)
    for name in (*few.at_peak, "total", "at_peak", "layers", "workspaces"):
        assert getattr(few, name) == getattr(many, name), name


def peak_of_a_step(config: dict[str, Any], ids: Any) -> int:
    """Return the most memory of a step of AdamW with a new model, on a CPU."""
    model = models.create(config, seed=0)
    optimizer = AdamW(model.trainable)

    def step() -> None:
        _, gradients = model.loss_and_gradients(ids, ids)
        optimizer.step(gradients, factor=0.5)

    step()
    buffer = np.setbufsize(1024)  # NumPy's own buffer, which is not planned: 3 % of a small model
    with memory_pool(held=[*model.parameters.values(), *optimizer.state().values()]) as pool:
        step()
        pool.reset_peak()
        step()
    np.setbufsize(buffer)
    return pool.peak


@pytest.mark.parametrize(
    ("label", "change"),
    [
        *(
            (label, {})
            for label in ("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe groups", "phimoe")
        ),
        *((label, {}) for label in ("youtu", "deepseek_v2", "qwen3_5_text", "qwen3_next")),
        *((label, {"mamba_expand": 1}) for label in ("bamba", "falcon_h1")),
        *(
            ("kimi_linear", {}),
            ("bailing_hybrid", {}),
            ("longcat_flash", {}),
            ("mamba2", {"expand": 1}),
        ),
    ],
)
def test_experts_latents_and_states_are_planned(label: str, change: dict[str, Any]) -> None:
    """On a CPU, of experts, the worst choice: as many tokens as there are to as few as can be."""
    config = peers.SIZES | (peers.RELATIVES | peers.MIXTURES)[label]
    config |= {"hidden_size": 64, "vocab_size": 512} | change
    ids = np.random.default_rng(0).integers(3, 512, (2, 96))
    plan = plan_memory(config, batch=2, tokens=96, dtype="float32", device="cpu")
    peak = peak_of_a_step(config, ids)
    assert -(2**17) < plan.total - peak < 0.05 * peak
    on_a_gpu = plan_memory(config, batch=2, tokens=96, dtype="bfloat16", device="cuda")
    assert on_a_gpu.total > 0


def test_parts_add_up_to_the_peak() -> None:
    plan = plan_memory(LLAMA, batch=2, tokens=64, dtype="bfloat16", recompute_every=1)
    assert isinstance(plan, MemoryPlan)
    assert plan.total == sum(plan.at_peak.values()) == max(m.total for m in plan.moments)
    for name in plan.at_peak:
        assert getattr(plan, name) == max(moment.held[name] for moment in plan.moments), name
    assert plan.total < sum(getattr(plan, name) for name in plan.at_peak)
    assert plan.beyond(plan.total) is None
    assert plan.beyond(plan.total - 1) is plan.moments[plan.peak]
    assert plan.beyond(1) is plan.moments[0]


def test_activations_are_told_by_layer() -> None:
    whole = plan_memory(LLAMA, batch=2, tokens=64, dtype="float32", device="cpu")
    assert whole.layers.keys() == {"embedding", "layer 0", "layer 1", "layer 2", "head"}
    row = 2 * 64 * 256 * 4  # the embedding is layer 0's residual; the last norm reads layer 2's end
    layers = [whole.layers[f"layer {n}"] for n in range(3)]
    assert layers == [layers[1] - row, layers[1], layers[1] + row]
    assert sum(whole.layers.values()) == whole.activations
    less = plan_memory(LLAMA, batch=2, tokens=64, dtype="float32", device="cpu", recompute_every=1)
    kept = 2 * 2 * 64 * 256 * 4  # branch and stream of a block
    assert less.layers["layer 0"] == kept
    assert less.activations < whole.activations
    assert {moment.layer for moment in less.moments} - {"", "head"} == {*less.layers}


def test_chunked_mlps_keep_no_inner_activation() -> None:
    whole, less = (
        plan_memory(LLAMA, batch=2, tokens=64, dtype="float32", device="cpu", chunked_mlp=chunked)
        for chunked in (False, True)
    )
    inner = 3 * 2 * 64 * 640 * 4  # gate, up, and what down reads, of a layer
    assert whole.layers["layer 1"] - less.layers["layer 1"] == inner


def test_logits_are_at_most_a_chunk() -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "tokens": 8}
    few = plan_memory(SMALL, batch=2, **options)
    many = plan_memory(SMALL, batch=2**20, **options)
    sums = 4 * 500 * 96
    slack = 16 * 512  # statistics of rows, and pieces of the pool
    assert 0 <= few.logits - (2 * 8 * 500 * (4 + 2) + sums) <= slack
    assert 0 <= CHUNK_BYTES + slack - (many.logits - sums) <= 500 * 6 + 2 * slack


def test_the_other_parts_follow_from_the_weights() -> None:
    parameters = models.create(SMALL, seed=0).parameters
    weights = sum(p.size for p in parameters.values())
    vectors = sum(p.size for p in parameters.values() if p.ndim == 1)
    tables = sum(parameters[name].size for name in of_tables(parameters))
    options: dict[str, Any] = {"batch": 1, "tokens": 8, "device": "cpu"}
    full = plan_memory(SMALL, dtype="float32", **options)
    assert (full.weights, full.optimizer, full.master) == (4 * weights, 8 * weights, 0)
    half = plan_memory(SMALL, dtype="bfloat16", **options)
    assert half.weights == 2 * weights + 2 * vectors
    assert (half.optimizer, half.master) == (8 * weights, 4 * (weights - vectors))
    alone = plan_memory(SMALL, dtype="bfloat16", optimizer="none", **options)
    assert (alone.weights, alone.optimizer, alone.master) == (2 * weights, 0, 0)
    coded = plan_memory(SMALL, dtype="float32", state_bits=8, **options)
    inner = 8 * (weights - tables)  # tables of tokens and heads keep 32 bits
    assert inner / 4 < coded.optimizer - 8 * tables < inner / 3
    adapted = plan_memory(SMALL, dtype="float32", rank=4, **options)
    learned = adapted.weights - full.weights
    assert (adapted.optimizer, adapted.master) == (2 * learned, 0)
    assert learned <= adapted.gradients < 1.2 * learned  # of rms_norm's frozen weights, too


def test_what_kernels_take_is_counted_without_a_gpu() -> None:
    """A launch allocates more than the definition, such as attention's sums of rows."""
    plan = plan_memory(LLAMA, batch=2, tokens=256, dtype="bfloat16", device="cuda")
    stats = 2 * 6 * 256 * 2 * 4  # (batch, heads, queries, 2) float32
    backward = next(m for m in plan.moments if m.op == "attention_backward")
    assert backward.held["workspace"] >= stats
    longer = plan_memory(LLAMA, batch=2, tokens=512, dtype="bfloat16", device="cuda")
    taken = [each.workspaces["attention_backward"] for each in (plan, longer)]
    assert taken == [stats, 2 * stats]  # linear in the tokens
    assert "attention_forward" not in plan.workspaces  # it takes nothing beside its results
    assert all(size % 512 == 0 for moment in plan.moments for size in moment.held.values())


def test_a_table_that_is_replaced_is_gone() -> None:
    model = models.create(SMALL, seed=0)
    table = weakref.ref(model.table)
    model.parameters = compute_copies(model.parameters, "float16")
    assert table() is None


def test_no_array_waits_for_the_garbage_collector() -> None:
    """A second plan meets calls that are worked out; the first let go of as much, as early."""
    deep = SMALL | {"num_hidden_layers": 4}
    gc.disable()
    try:
        plans = [
            plan_memory(deep, batch=3, tokens=56, dtype="bfloat16", recompute_every=1)
            for _ in range(2)
        ]
    finally:
        gc.enable()
    assert plans[0] == plans[1]


@pytest.mark.parametrize("rows", [8, 96])
def test_buffers_of_operands_that_numpy_broadcasts_are_planned(rows: int) -> None:
    x, top = np.ones((rows, 300), np.float32), np.ones((rows, 1), np.float32)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    np.subtract(x, top, out=x)
    expected = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    ledger = Ledger(1)
    with recording_in(ledger):
        x, top = (PlannedOnHost.of(array.shape, array.dtype) for array in (x, top))
        np.subtract(x, top, out=x)
    actual = sum(ledger.sizes[2:])
    assert actual == pytest.approx(expected, abs=2048)  # objects of Python count too


@pytest.mark.slow
def test_planning_a_large_model_takes_no_memory() -> None:
    large = SMALL | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    how = {"batch": 1, "tokens": 2048, "dtype": "bfloat16", "device": "cpu"}
    plan = plan_memory(large | {"num_hidden_layers": 80}, **how)
    weights, vectors = 70_553_706_496, 161 * 8192  # Llama 3.1 70B
    assert plan.weights == 2 * weights + 2 * vectors
    tracemalloc.start()  # it makes all that is allocated slow
    try:
        assert plan_memory(large | {"num_hidden_layers": 4}, **how).weights > 2**33
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


class TestPlanned:
    """Arrays without elements behave as NumPy's, but for their elements."""

    def test_they_have_no_elements(self) -> None:
        array = Planned.of((1000, 1000, 1000, 1000), "float32")
        assert array.nbytes == 4 * 10**12
        assert array.flags.c_contiguous
        with pytest.raises(ShapeError, match="does not make"):
            array.reshape(3, -1)
        here = PlannedOnHost.of((4, 5), "float32")
        assert not np.shares_memory(here[1:], here[:-1])

    @pytest.mark.parametrize(
        "use",
        [
            lambda x: x[1:, ..., ::2],
            lambda x: x[..., None, 2],
            lambda x: x[np.array([[0, 1], [1, 1]])],
            lambda x: x[:, np.array([0, 1, 1])].copy(),  # NumPy lays its axes out in another order
            lambda x: x.transpose(2, 0, 1).reshape(-1, 3),
            lambda x: x.swapaxes(0, 1).reshape(3, 2, 2, 2),
            lambda x: x.sum(axis=(0, 2), keepdims=True),
            lambda x: (x > 0).any(axis=-1),
            lambda x: x @ x.swapaxes(1, 2),
            lambda x: np.einsum("abc,abc->ac", x, x),
            lambda x: np.where(x > 0, x, 0) * np.float64(2),
            lambda x: 1 / x.astype(np.float16),
            lambda x: np.concatenate([x, x], axis=1),
            lambda x: np.full_like(x, 3, dtype=np.int32, shape=(4, 5)),
            lambda x: np.argsort(x.ravel(), kind="stable").cumsum(),
            lambda x: np.arange(3, 11, like=x),
        ],
    )
    def test_forms_are_numpys(self, use: Callable[[Any], Any]) -> None:
        real = use(np.ones((2, 3, 4), np.float32))
        for kind in (Planned, PlannedOnHost):
            made = use(kind.of((2, 3, 4), np.float32))
            assert type(made) is kind
            assert (made.shape, made.dtype, made.strides) == (real.shape, real.dtype, real.strides)

    def test_an_unknown_function_raises(self) -> None:
        with pytest.raises(TypeError):
            np.linalg.norm(PlannedOnHost.of((2, 3), np.float32))

    def test_views_are_where_numpy_makes_them(self) -> None:
        rng, checked = np.random.default_rng(0), 0
        for _ in range(500):
            x = np.zeros(rng.integers(1, 5, rng.integers(1, 5)), np.float32)
            x = x.transpose(rng.permutation(x.ndim))[..., : 1 + x.shape[-1] // 2]
            x = x[..., : x.shape[-1]]
            expected, left = [], x.size
            while left > 1:
                step = int(rng.choice([n for n in range(2, left + 1) if left % n == 0]))
                expected.append(step)
                left //= step
            actual = reshaped(x.shape, x.strides, expected)
            made = x.reshape(expected)
            assert (actual is not None) == (made.base is not None and np.shares_memory(made, x))
            if actual is not None:
                assert tuple(actual) == made.strides
                checked += 1
        assert 100 < checked < 500


def test_estimates_without_a_config() -> None:
    assert estimate_forward_memory(4, 2048, 4096, 32, 4) == GIB
    assert estimate_attention_memory(4, 2048, 4096, 32) == 2.5 * GIB
    assert estimate_flash_attention_memory(4, 2048, 4096, 32) == GIB // 2 + 4 * 2048 * 32 * 4
    estimate = estimate_training_memory(7_000_000_000, 4, 2048, "bfloat16")
    assert isinstance(estimate, MemoryEstimate)
    assert (estimate.weights, estimate.master) == (14_000_000_000, 28_000_000_000)
    assert estimate.total > 7_000_000_000 * 16


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (2**52, "4096.00 TiB"),
    ],
)
def test_bytes_have_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("sizes", [("batch",), ("batch", "tokens"), ("batch", "rank")])
@pytest.mark.parametrize("heads", [2, 2**31 - 1])
def test_sizes_beyond_all_machines_are_planned_or_named(
    device: str, sizes: tuple[str, ...], heads: int
) -> None:
    config = SMALL | {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 16}
    options: dict[str, Any] = {"batch": 1, "tokens": 8, "dtype": "float32", "device": device}
    with suppress(UnslothCupyError):
        assert plan_memory(config, **(options | dict.fromkeys(sizes, 2**31 - 1))).total > 2**31


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int8"}, "choose from float16, bfloat16, float32"),
        ({"dtype": "float64"}, "choose from"),
        ({"optimizer": "sgd"}, "choose from adamw, muon"),
        ({"optimizer": "lion", "state_bits": 8}, "only AdamW has moments of 8 bits; leave state"),
        (
            {"optimizer": "muon", "tensor_parallel": 2},
            r"optimizer='muon'\): its steps need whole matrices; leave tensor_parallel=2 out",
        ),
        ({"device": "cuda:1"}, "choose from cuda, cpu"),
        ({"state_bits": 4}, "choose 32 or 8"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 2, "adapter": models.Adapter({"r": 2}, {})}, "leave one of them out"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"recompute_every": 0}, "pass 1 or more"),
        ({"batch": 0}, "batch=0"),
        ({"tokens": -1}, "tokens=-1"),
    ],
)
def test_wrong_options_are_named(change: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"batch": 1, "tokens": 8, "dtype": "float32"} | change
    with pytest.raises(ConfigError, match=said):
        plan_memory(SMALL, **options)
    with pytest.raises(ConfigError, match=r"config: is \w+; it must be a dict"):
        plan_memory(None, batch=1, tokens=8, dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "1", None, math.nan, math.inf, [2]], ids=repr)
def test_formulas_name_what_is_no_size(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_params=.*: pass sizes of 1 or more"):
        estimate_training_memory(size, 1, 1)
    with pytest.raises(ConfigError, match=r"recompute_every=.*: pass sizes"):
        estimate_forward_memory(1, 2, 3, 4, recompute_every=size)
    for estimate in (estimate_attention_memory, estimate_flash_attention_memory):
        with pytest.raises(ConfigError, match=r"num_heads=.*: pass sizes"):
            estimate(1, 2, 3, size)


@pytest.mark.parametrize(
    "dtype", [None, "int8", "x", 1, (1, 2, 3), object()], ids=lambda bad: type(bad).__name__
)
def test_formulas_name_what_is_no_dtype(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="choose from float16, bfloat16, float32"):
        estimate_training_memory(1, 1, 1, dtype)


def test_what_is_no_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match="pass a number of bytes"):
        format_bytes("1 GiB")  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("rank", [None, 4])
def test_offloaded_inputs_are_planned_on_both_sides(every: int, rank: int | None) -> None:
    """The peak of the GPU is as planned, on a stand-in that counts; so are bytes of the host."""
    config = SMALL | {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}
    tokens, activations = 512, []
    for offload in (False, True):
        planned = plan_memory(
            config, batch=2, tokens=tokens, dtype="bfloat16", optimizer="none", rank=rank,
            recompute_every=every, offload=offload,
        )  # fmt: skip
        activations.append(planned.activations)
        with gpu("90", devices=1) as machine:
            machine.strict = False
            model = create(config, seed=0, dtype="bfloat16", device="cuda")
            if rank is not None:
                model.add_adapter(rank=rank)
            rows = machine.place(np.ones((2, tokens), np.int64))
            parts = CheckpointConfig(recompute_every=every, offload=offload)
            step = partial(model.loss_and_gradients, rows, rows, checkpoint=parts)
            step()
            before = machine.peak = machine.held
            step()
            peak, moved = machine.peak - before, training_offload.moved["to_host"]
            step()
            moved = training_offload.moved["to_host"] - moved
        used = planned.total - planned.weights
        assert used == pytest.approx(peak, rel=0.03)  # small arrays, which pools round up
        assert planned.host == moved
    assert activations[1] < activations[0]
    with pytest.raises(ConfigError, match="pass recompute_every too"):
        plan_memory(config, batch=2, tokens=8, dtype="bfloat16", offload=True)
    on_host: dict[str, Any] = {"device": "cpu", "recompute_every": 1, "offload": True}
    with pytest.raises(ConfigError, match="in the memory of the host already"):
        plan_memory(config, batch=2, tokens=8, dtype="bfloat16", **on_host)


GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "tuning.md"
SIZE = r"([\d.]+ GiB) \| ([\d.]+ GiB) \| [^|]*"
ROW = rf"^\| (?:no option|`(--[^`]*)`) \| {SIZE}\| {SIZE}\|$"
ROWS = re.findall(ROW, GUIDE.read_text(), re.M)
FIELDS = {"recompute-every": "recompute_every", "state-bits": "state_bits", "lora": "rank"}


@pytest.mark.parametrize("row", Sample.one_in(3, ROWS), ids=lambda row: row[0])
def test_the_table_of_what_fits_is_planned(row: tuple[str, ...]) -> None:
    """Activations and total of two Llamas in docs/guide/tuning.md are those of plans today."""
    assert len(ROWS) > 8
    words, *cells = row
    pairs = re.findall(r"--([a-z-]+)(?: (\d+))?", words)
    options: dict[str, Any] = {
        FIELDS.get(name, name.replace("-", "_")): int(value) if value else True
        for name, value in pairs
    }
    shared = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
    actual = list[str]()
    for numbers in ((2048, 8192, 16, True), (4096, 14336, 32, False)):
        config = shared | {"num_attention_heads": 32, **dict(zip(sizes, numbers, strict=True))}
        planned = plan_memory(config, batch=4, tokens=2048, dtype="bfloat16", **options)
        actual += [f"{planned.activations / GIB:.2f} GiB", f"{planned.total / GIB:.1f} GiB"]
    assert actual == cells
