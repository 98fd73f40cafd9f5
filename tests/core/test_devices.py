"""Arrays on a GPU that is not current, and streams without an order, on a stand-in for CuPy."""

import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unsloth_cupy
from unsloth_cupy import (
    Adafactor,
    AdamW,
    Autocast,
    CheckpointConfig,
    KVCache,
    Lion,
    LoraLayer,
    LossScaler,
    MultiHeadAttention,
    Muon,
    PagedKVCache,
    ScheduleFreeAdamW,
    Tape,
    attention_layer,
    attention_layer_backward,
    cast,
    check_errors,
    checkpoint,
    clip_gradients,
    compute_copies,
    cross_entropy,
    find_nan,
    int8_linear,
    int8_weight,
    linear,
    lora_linears,
    measure_gradients,
    memory_pool,
    models,
    multiply,
    mxfp4_quantize,
    nf4_linear,
    nf4_quantize,
    placement,
    rms_norm,
    rope_tables,
    ternary_linear,
    ternary_quantize,
    to_device,
    to_host,
)
from unsloth_cupy.bench.cases import draw, forward_ops
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, DeviceError, DeviceMemoryError, FrameworkError
from unsloth_cupy.models.generation.decoding import Decoding
from unsloth_cupy.serving.work import Work
from unsloth_cupy.training.captured import Captured, Place
from unsloth_cupy.training.gradients import sum_gradients

from ..machines.stand_in import Array, Machine, gpu
from ..machines.stand_in_devices import UnorderedError, WrongDeviceError
from ..models.peers import SIZES
from .test_launches import LAUNCHED, SMALL, call_of

FAR = 1  # the GPU that holds the arrays, while 0 is current
CONFIG = SIZES | {"model_type": "llama", "sliding_window": 6}


def far(machine: Machine) -> Callable[..., Any]:
    """Return a function that places arrays on the GPU that is not current."""
    return lambda values: machine.place(np.asarray(values), device=FAR)


def arrays_of(results: Any) -> list[Any]:
    """Return the arrays among results."""
    if isinstance(results, dict):
        results = [*results.values()]
    if isinstance(results, list | tuple):
        return [array for each in results for array in arrays_of(each)]
    return [results] if isinstance(results, Array) else []


def assert_far(results: Any) -> None:
    """Assert that arrays are on the GPU of the operands."""
    assert arrays_of(results)
    assert {array.device.id for array in arrays_of(results)} == {FAR}


# ---- ops ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAUNCHED)
def test_ops_run_where_their_arrays_are(name: str) -> None:
    """A launch is planned, recorded and replayed on either GPU."""
    with gpu(devices=2) as machine:
        there = call_of(name, far(machine), np.dtype("float16"), optional=True)
        here = call_of(name, machine.place, np.dtype("float16"), optional=True)
        for _ in range(3):
            machine.launches.clear()
            assert_far(there())
            assert machine.launches, "its definition ran"
            assert {array.device.id for array in arrays_of(here())} == {0}
        assert machine.gpus.current == 0


OURS = forward_ops()


@pytest.mark.parametrize("name", [name for name in OURS if name != "embedding"])
def test_definitions_run_where_their_arrays_are(name: str) -> None:
    """Embedding's backward sums by a sparse matrix of CuPy's, which the stand-in lacks."""
    with gpu(devices=2) as machine:
        machine.strict = False
        forward = draw(OPS[name], SMALL).cast(np.float64)
        assert_far(forward.mapped(far(machine)).run())
        if OPS[name].backward is not None:
            outputs = forward.mapped(np.copy).run()
            back = forward.backward(outputs, forward.seeds(outputs, every=False))
            assert_far(back.mapped(far(machine)).run())


# ---- all else that takes arrays ------------------------------------------------------------------
def optimizes(place: Callable[..., Any]) -> Any:
    optimizer = AdamW({"a": place(np.ones((9, 600), np.float32)), "b": place(np.ones(3, "f"))})
    copies = {"a": place(np.ones((9, 600), np.float16))}
    optimizer.keep_copies(copies)
    gradients = {n: place(np.ones(p.shape, "f")) for n, p in optimizer.parameters.items()}
    measured = measure_gradients(gradients, 1.0)
    for _ in range(3):
        optimizer.step(gradients, finite=measured.finite, factor=measured.factor)
        optimizer.step(gradients, factor=0.5)
    assert optimizer.steps >= 0
    optimizer.load_state(optimizer.state())
    return optimizer.state(), measured


def optimizes_in_8_bits(place: Callable[..., Any]) -> Any:
    """With a launch, and, for there is a parameter that lies otherwise, by definition."""
    made = []
    for turned in (False, True):
        parameter = place(np.ones((80, 80), np.float32))
        optimizer = AdamW({"a": parameter.T if turned else parameter}, state_bits=8)
        optimizer.step({"a": place(np.ones((80, 80), np.float32))})
        made.append(optimizer.state())
    return made


def optimizes_otherwise(place: Callable[..., Any]) -> Any:
    """By rows, by products, and by averages that come and go."""
    made = []
    for kind in (Adafactor, Lion, Muon, ScheduleFreeAdamW):
        optimizer: Any = kind({"a": place(np.ones((9, 60), np.float32))})
        optimizer.keep_copies({"a": place(np.ones((9, 60), np.float16))})
        for _ in range(2):
            optimizer.step({"a": place(np.ones((9, 60), np.float32))}, factor=0.5)
        assert optimizer.steps >= 0
        optimizer.load_state(optimizer.state())
        made.append(optimizer.state())
    with optimizer.averages():
        made.append(optimizer.state())
    return made


def clips(place: Callable[..., Any]) -> Any:
    results = []
    for dtype in (np.float16, np.float64):  # by a launch, by definition
        gradients = {"a": place(np.ones(5, dtype)), "b": place(np.ones((2, 3), dtype))}
        results += [clip_gradients(gradients, 1.0), measure_gradients(gradients, 1.0)]
        results.append(clip_gradients(max_norm=1.0, gradients=gradients))
    return results


def scales(place: Callable[..., Any]) -> Any:
    results = []
    for dtype in (np.float16, np.float64):
        scaler = LossScaler()
        gradients = {"a": place(np.ones(5, dtype))}
        results.append(scaler.scale(place(np.ones((), dtype))))
        results.append(scaler.unscale(gradients))
        measured = measure_gradients(gradients, scaler=scaler)
        scaler.update(measured.finite)
        assert scaler.value > 0
    return results


def remembers(place: Callable[..., Any]) -> Any:
    like, results = place(np.ones(1, np.float32)), []
    cache = KVCache(2, 2, 12, 1, 8, dtype="float32", like=like, window=[None, 5], sinks=1)
    for tokens in (7, 1, 3):
        real = place(np.ones((2, tokens), bool))
        cache.note(real, tokens)
        for layer in range(2):
            k = place(np.ones((2, tokens, 1, 8), np.float32))
            results += cache.append(layer, k, k)
            mask = cache.mask(layer, tokens)
            results += [] if mask is None else [mask]
    cache.reorder(place(np.array([1, 0])))
    cache.reset()
    return results, cache.lengths, cache.real


def remembers_in_pages(place: Callable[..., Any]) -> Any:
    cache = PagedKVCache(1, 8, 4, 1, 8, dtype="float32", like=place(np.ones(1, np.float32)))
    first = cache.allocate(6)
    k = place(np.ones((1, 6, 1, 8), np.float32))
    results = [cache.append(0, [first], k, k)]
    second = cache.fork(first)
    results.append(cache.append(0, [second], k, k))
    cache.free(first)
    return results, cache.page_table([second]), cache.lengths([second])


def differentiates(place: Callable[..., Any]) -> Any:
    """Sums of gradients, zeros for what is not used, and parts that are computed again."""
    results = []
    for through in (lambda f, *a: f(*a), checkpoint, lambda f, *a: checkpoint(f, *a, offload=True)):
        tape = Tape()
        x, w, unused = (tape.watch(place(np.ones((4, 8), "f"))) for _ in range(3))
        y = x
        for _ in range(3):
            y = through(lambda a, b: multiply(a + b, b), y, w)
        with find_nan():
            results.append(tape.gradients(y, [x, w, unused], place(np.ones((4, 8), "f"))))
    return results


def layers(place: Callable[..., Any]) -> Any:
    x, square = place(np.ones((1, 4, 16), "f")), place(np.ones((16, 16), "f"))
    cos, sin = rope_tables(16, 8, like=x)
    inputs = x, square, square, square, square, cos, sin
    cache = KVCache(1, 1, 9, 2, 8, dtype="float32", like=x, window=3)
    a, b = place(np.ones((2, 16), "f")), place(np.ones((16, 2), "f"))
    layer = LoraLayer(square, a, b, 1.0, None, place(np.ones(16, "f")))
    heads = MultiHeadAttention(16, 2, rope=(cos, sin), seed=0, like=x)
    pages = PagedKVCache(1, 4, 4, 2, 8, dtype="float32", like=x)
    rows = [pages.allocate(0)]
    mask = place(np.ones((4, 8), bool))
    return (
        heads(x),
        heads.parameters,
        attention_layer(*inputs, heads=2),
        [attention_layer(*inputs, heads=2, cache=cache) for _ in range(2)],
        attention_layer(*inputs, heads=2, cache=cache, mask=mask[:, :6]),
        [heads(x, cache=pages, sequences=rows) for _ in range(2)],
        attention_layer_backward(x, *inputs, heads=2),
        lora_linears(x, [layer] * 2),
    )


def casts(place: Callable[..., Any]) -> Any:
    x = place(np.ones((4, 8), np.float32))
    autocast: Any = Autocast("float16")(linear, x, x)
    total = sum_gradients(((place(np.ones(())), {"a": x}) for _ in range(2)), 2)
    return autocast, cast(x, "float16"), compute_copies({"a": x}, "float16"), total[1]


def reports(place: Callable[..., Any]) -> Any:
    logits, labels = place(np.ones((3, 64), np.float16)), place(np.array([1, 2, 3]))
    losses: Any = cross_entropy(logits, labels)
    check_errors()
    return losses


def counts(place: Callable[..., Any]) -> Any:
    x = place(np.ones((4, 8), np.float32))
    with memory_pool(limit=1 << 30, device=FAR) as pool:
        y = rms_norm(x, place(np.ones(8, np.float32)))
    assert pool.by_device.keys() == {f"cuda:{FAR}"}
    return y


def quantizes(place: Callable[..., Any]) -> Any:
    w, x = place(np.ones((32, 64), "f")), place(np.ones((2, 64), "f"))
    makers = mxfp4_quantize, int8_weight, ternary_quantize
    made = [nf4_quantize(w, double=True), *(quantize(w) for quantize in makers)]
    results = [linear(x, weight) for weight in made]
    results += [nf4_linear(x, made[0]), int8_linear(x, made[2]), ternary_linear(x, made[3])]
    results += [weight.dequantize() for weight in made]
    return results, [array for weight in made for array in weight.held().values()]


def models_learn(place: Callable[..., Any]) -> Any:
    model = models.create(CONFIG, seed=0, dtype="float16", device=f"cuda:{FAR}")
    assert_far(model.parameters)
    tokens = place(np.arange(12).reshape(2, 6))
    mask = place(np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]))
    offsets = place(np.array([0, 4, 12]))
    scaler = LossScaler()
    results = [model.logits(tokens), model.loss(tokens, tokens, mask=mask)]
    for options in ({"mask": mask}, {"offsets": offsets}, {"scaler": scaler}):
        results += model.loss_and_gradients(tokens, tokens, **options)
    results += model.loss_and_gradients(tokens, tokens, checkpoint=CheckpointConfig(offload=True))
    model.add_adapter(2, dora=True)
    results += model.loss_and_gradients(tokens, tokens, seed=1)
    assert_far(model.adapter.parameters)  # type: ignore[union-attr]
    model.merge_adapter()
    return results, model.parameters


def models_generate(place: Callable[..., Any]) -> Any:
    """By a cache, and one step at a time into a graph."""
    model = models.create(CONFIG, seed=0, device=f"cuda:{FAR}")
    tokens = place(np.arange(12).reshape(2, 6))
    result = model.generate(tokens, max_new_tokens=5, stop=())
    assert result.shape == (2, 11)
    mask = place(np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]))
    sizes = model.config.layers, 9, 4, model.config.kv_heads, model.config.dim
    pages = PagedKVCache(*sizes, dtype="float32", like=model.table)
    options: Any = {"max_new_tokens": 3, "stop": (), "mask": mask}
    assert model.generate(tokens, cache=pages, **options).shape == (2, 9)
    cuda = sys.modules["cupy"].cuda
    for _ in model.stream(tokens, max_new_tokens=3, stop=()):
        assert cuda.Device().id == 0, "the caller's GPU is current between two tokens"
    return result


def moves(place: Callable[..., Any]) -> Any:
    array = place(np.ones((4, 4), "f"))
    near = to_device(array, "cuda:0")
    assert near.device.id == 0
    return to_device(near, f"cuda:{FAR}"), to_device(to_host(array), f"cuda:{FAR}")


def models_are_saved(place: Callable[..., Any], folder: Path) -> Any:
    model = models.create(CONFIG, seed=0, device=f"cuda:{FAR}")
    model.save(folder / "model")
    model.add_adapter(2)
    model.save_adapter(folder / "adapter")
    again = models.load(folder / "model", device=f"cuda:{FAR}", lora=folder / "adapter")
    assert_far(again.adapter.parameters)  # type: ignore[union-attr]
    return again.parameters


USES = {
    optimizes: "AdamW measure_gradients",
    optimizes_in_8_bits: "AdamW",
    optimizes_otherwise: "Adafactor Lion Muon ScheduleFreeAdamW",
    clips: "clip_gradients measure_gradients",
    scales: "LossScaler",
    remembers: "KVCache",
    remembers_in_pages: "PagedKVCache",
    differentiates: "Tape Var checkpoint find_nan",
    layers: "attention_layer attention_layer_backward lora_linears LoraLayer rope_tables"
    " MultiHeadAttention",
    casts: "Autocast cast compute_copies",
    quantizes: "Nf4 Mxfp4 Int8 Ternary nf4_quantize nf4_linear mxfp4_quantize int8_weight"
    " ternary_quantize",
    reports: "check_errors",
    counts: "memory_pool MemoryPool",
    moves: "to_device to_host",
    models_learn: "CheckpointConfig",
    models_generate: "",
    models_are_saved: "",
}
NO_ARRAYS = {
    *("AttentionConfig", "MemoryEstimate", "MemoryPlan", "MixedPrecisionConfig", "TrainingConfig"),
    *("constant_schedule", "cosine_schedule", "linear_schedule", "format_bytes", "plan_memory"),
    *("inverse_sqrt_schedule", "polynomial_schedule", "warmup_stable_decay_schedule"),
    *("estimate_attention_memory", "estimate_flash_attention_memory", "estimate_forward_memory"),
    *("estimate_training_memory", "DeviceMemoryError", "LogProbs", "NonFiniteError", "Routes"),
    *("explain", "profile", "shape"),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_everything_runs_where_its_arrays_are(use: Callable[..., Any], tmp_path: Path) -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        more = [tmp_path] if len(inspect.signature(use).parameters) > 1 else []
        assert_far(use(far(machine), *more))
        assert machine.gpus.current == 0


def test_every_public_name_is_used_on_another_gpu() -> None:
    """Ops are, and functions that return a part of an op's results."""
    public = {name for name in vars(unsloth_cupy) if not name.startswith("_")}
    public = {n for n in public if callable(vars(unsloth_cupy)[n])}
    results = {n for n in public if n in OPS or f"{n}_forward" in OPS or f"{n}over_" in OPS}
    used = {name for names in USES.values() for name in names.split()}
    assert public - results - used == NO_ARRAYS


def test_arrays_on_two_gpus_raise() -> None:
    """Parameters, gradients, copies and states: nothing is started."""
    with gpu(devices=2) as machine:
        machine.strict = False
        here, there = (machine.place(np.ones((4, 8), "f"), device=n) for n in range(2))
        half = machine.place(np.ones((4, 8), np.float16))
        optimizer, both = AdamW({"a": there}), {"a": here, "b": there}
        machine.launches.clear()
        for call in (
            lambda: AdamW(both),
            lambda: optimizer.step({"a": here}),
            lambda: optimizer.keep_copies({"a": half}),
            lambda: clip_gradients(both, 1.0),
            lambda: measure_gradients(both),
            lambda: LossScaler().unscale(both),
            lambda: KVCache(1, 4, 8, 1, 8, dtype="f", like=there).append(
                0, here[:, None, None], here[:, None, None]
            ),
        ):
            with pytest.raises(FrameworkError, match="CUDA Device 0"):
                call()
        assert not machine.launches


def test_a_scaler_follows_gradients_to_another_gpu() -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        scaler = LossScaler(16.0)
        for device in (0, 1, 0):
            gradients = {"a": machine.place(np.ones(5, np.float16), device=device)}
            actual, finite = scaler.unscale(gradients)
            scaler.update(finite)
            assert {a.device.id for a in (*actual.values(), finite)} == {device}
            assert scaler.value == 16


def test_the_stand_in_notices_another_gpu() -> None:
    """This proves that the tests above can fail."""
    with gpu(devices=2) as machine:
        machine.strict = False
        here, there = (machine.place(np.ones(4, "f"), device=n) for n in range(2))
        for wrong in (
            lambda: there + there,
            lambda: np.zeros_like(there),
            lambda: here + there,
            lambda: np.asarray(np.ones(3), like=there),
            there.get,
            lambda: there.__setitem__(0, 1),
            lambda: there.astype("f2"),
            lambda: float(there[0]),
        ):
            with pytest.raises(WrongDeviceError):
                wrong()
        with sys.modules["cupy"].cuda.Device(1):
            assert (there + there).device.id == 1
        assert there[1:].device.id == 1, "a view is not work"


# ---- streams -------------------------------------------------------------------------------------
def on_streams(machine: Machine, use: Callable[[], Any]) -> None:
    """Use an object on streams that do not wait for each other."""
    cuda = sys.modules["cupy"].cuda
    for stream in (cuda.Stream(non_blocking=True), contextlib.nullcontext(), cuda.Stream()):
        with stream:
            use()


def test_tables_that_are_kept_are_there_for_every_stream() -> None:
    with gpu() as machine:
        machine.strict = False
        arrays = {n: machine.place(np.ones((9, 600), "f2")) for n in "ab"}
        gradients = {n: machine.place(np.ones((9, 600), "f2")) for n in "ab"}
        with sys.modules["cupy"].cuda.Stream():
            optimizers = [AdamW(arrays, state_bits=bits) for bits in (8, 32)]
        scaler = LossScaler()

        def use() -> None:
            norms = measure_gradients(gradients, 1.0, scaler=scaler)
            clip_gradients(gradients, 1.0)
            scaler.scale(machine.place(np.ones((), "f")))
            scaler.unscale(gradients)
            for optimizer in optimizers:
                optimizer.step(gradients, finite=norms.finite, factor=norms.factor)
            scaler.update(norms.finite)
            cross_entropy(gradients["a"], machine.place(np.arange(9)))  # type: ignore[arg-type]

        on_streams(machine, use)


@pytest.mark.slow
def test_a_model_is_there_for_every_stream() -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        with sys.modules["cupy"].cuda.Stream():
            model = models.create(CONFIG, seed=0, device="cuda:0")
        tokens = machine.place(np.arange(12).reshape(2, 6))
        on_streams(machine, lambda: model.loss_and_gradients(tokens, tokens))
        on_streams(machine, lambda: model.generate(tokens, max_new_tokens=4, stop=()))


def test_the_stand_in_notices_streams_that_nothing_orders() -> None:
    with gpu() as machine:
        machine.strict = False
        cuda = sys.modules["cupy"].cuda
        with cuda.Stream() as first:
            x = np.zeros_like(machine.place(np.ones(3)))
        second = cuda.Stream()
        with second, pytest.raises(UnorderedError):
            rms_norm(x.astype("f"), x.astype("f"))
        second.wait_event(first.record())
        with second:
            assert (x + x).shape == (3,)
        with pytest.raises(UnorderedError):
            x.get()
        first.synchronize()
        assert x.get().shape == (3,)


def test_threads_have_streams_of_their_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """If CUDA has a default stream for each thread, its address does not identify it."""
    with gpu() as machine:
        x = machine.array(3, "f")
        assert placement.stream(x) == (90, 0)
        assert placement.stream(np.ones(3)) == ()
        per_thread = SimpleNamespace(ptr=placement.PER_THREAD)
        monkeypatch.setattr(sys.modules["cupy"].cuda, "get_current_stream", lambda: per_thread)
        assert len(placement.stream(x)) == 3


# ---- a step that is captured ---------------------------------------------------------------------
@pytest.mark.parametrize("turn", [0, 1], ids=["the first step", "the captured one"])
def test_a_step_that_does_not_fit_leaves_nothing_behind(turn: int) -> None:
    """No stream that captures, and the next call goes on."""
    with gpu(devices=2) as machine:
        machine.strict = False
        model = models.create(CONFIG, seed=0, device="cuda:1")
        step = Decoding(model, rows=1, pages=4, page=4)
        row, room = step.cache.begin([]), machine.room
        step.cache.extend([row], [3])
        work = [Work(row, np.zeros(1, np.int64), 4, 0, "")]
        for _ in range(turn):
            step(work)
        machine.room = machine.held + 4096
        with pytest.raises(DeviceMemoryError, match="fewer rows or fewer tokens") as caught:
            step(work)
        assert caught.value.required > 0
        machine.room = room
        for _ in range(3):
            step(work)
        ((*_, captured),) = step.graphs.values()
        assert not captured.place.stream.capturing
        assert captured.graph.launched == 2 + turn


def test_a_library_that_is_not_captured_is_called_each_time() -> None:
    with gpu() as machine:
        work, calls = Captured(Place()), []

        def run() -> str:
            calls.append(machine.gpus.stream.capturing)
            if calls[-1]:
                raise NotImplementedError("no capture")
            return "logits"

        assert [work(run) for _ in range(3)] == ["logits"] * 3
        assert calls == [False, True, False, False]
        assert work.why == "no capture"
        assert not work.place.stream.capturing


def test_places_take_the_streams_of_those_that_are_gone() -> None:
    """CuBLAS keeps memory for each stream."""
    with gpu() as machine:
        streams = []
        for _ in range(3):
            place = Place()
            Captured(place)(lambda: streams.append(machine.gpus.stream))
            other = Place()
            Captured(other)(lambda: streams.append(machine.gpus.stream))
            del place, other
        assert len({id(each) for each in streams}) == 2


# ---- devices by name -----------------------------------------------------------------------------
def test_models_are_made_where_they_are_asked_for() -> None:
    assert type(models.create(CONFIG, seed=0, device="cpu").table) is np.ndarray
    with gpu(devices=2) as machine:
        machine.strict = False
        for device, number in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
            assert models.create(CONFIG, seed=0, device=device).table.device.id == number  # type: ignore[attr-defined]
        expected = r"create: device='cuda:2', but CuPy sees 2 GPUs; choose 'cpu' or .*'cuda:1'"
        with pytest.raises(DeviceError, match=expected):
            models.create(CONFIG, seed=0, device="cuda:2")
        bad: Any
        for bad in ("gpu", "cuda:", "cuda:-1", "CPU", 1, np.ones(2), True):
            with pytest.raises(ConfigError, match="choose 'cpu'"):
                models.create(CONFIG, seed=0, device=bad)


def test_a_model_has_to_fit_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host holds one parameter at a time of a model that goes to a GPU, and of its adapter."""
    monkeypatch.setattr("unsloth_cupy.machine.machine_memory", lambda: 4096)
    with pytest.raises(DeviceMemoryError, match="create: the parameters"):
        models.create(CONFIG, seed=0)
    with gpu(devices=2) as machine:
        machine.strict = False
        models.create(CONFIG, seed=0, device="cuda:1").add_adapter(64, seed=0)
        machine.room = 4096
        with pytest.raises(DeviceMemoryError, match="create: the parameters"):
            models.create(CONFIG, seed=0, device="cuda:1")


def test_classes_under_a_marked_one_are_marked() -> None:
    @placement.on_gpu_of_attribute("array")
    class Marked:
        array: Any = None

    class Under(Marked):
        def method(self) -> int:
            return int(sys.modules["cupy"].cuda.Device().id)

    with gpu(devices=2) as machine:
        under = Under()
        under.array = machine.array(1, "f", device=FAR)
        assert under.method() == FAR


def test_a_method_that_yields_cannot_stay_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="is a generator: its caller"):

        @placement.on_gpu_of_attribute("keys")
        class Yields:
            def tokens(self) -> Any:
                yield 1
