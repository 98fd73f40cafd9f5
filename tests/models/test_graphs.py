"""Steps of training as CUDA graphs: the numbers of steps without, on a machine that replays them.

Launches of the stand-in write what depends on all that they read (``machine.runs``): a number of
the host that a graph repeats, though the next step has another one, leads to other gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, LossScaler, explain, find_nan
from unsloth_cupy.finetune.run.routing import Routing
from unsloth_cupy.models import create, graphs, quantize
from unsloth_cupy.models.objective import TrainingStep, next_token
from unsloth_cupy.ops.common import spans
from unsloth_cupy.ops.linear import dropout as plain
from unsloth_cupy.ops.linear import lora as lora_layer
from unsloth_cupy.placement import to_device_of
from unsloth_cupy.training import offload

from ..code.programs.costs import traced
from ..machines.stand_in import Machine, gpu
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES

STEPS = 5
LLAMA = SIZES | {"head_dim": 16} | CONFIGS["llama"]
KINDS = {
    "llama": LLAMA,
    "gemma2": SIZES | {"head_dim": 16} | CONFIGS["gemma2"],
    "mixtral": SIZES | MIXTURES["mixtral"],
    "deepseek_v2": SIZES | MIXTURES["deepseek_v2"],
    "qwen3_5": SIZES | RELATIVES["qwen3_5_text"],
}
LORA = {"rank": 2}


def batch(machine: Machine, step: int, width: int = 24) -> tuple[Any, Any, int]:
    """Return tokens, labels of which other ones count in every step, and a number of labels."""
    draw = np.random.default_rng(step)
    tokens, labels = draw.integers(3, 97, (2, 2, width))
    labels[:, : step + 1] = -100
    return machine.place(tokens), machine.place(labels), 30 + step


def made(machine: Machine, config: Any, dtype: str, lora: Any, quantized: str | None) -> Any:
    machine.strict, machine.runs = False, True
    model = create(config, seed=0, dtype=dtype, device="cuda")
    if quantized is not None:
        quantize(model, quantized)
    if lora is not None:
        model.add_adapter(**lora)
    return model


def learn(model: Any, step: int) -> None:
    """Change the trained arrays in place, as an optimizer does."""
    for array in model.trainable.values():
        array.values[...] += np.asarray(0.01 * (step + 1), array.dtype)


def held(loss: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step, which the next one may overwrite."""
    return {"loss": float(loss), **{name: g.values.copy() for name, g in gradients.items()}}


def on_device(machine: Machine) -> Callable[..., Any]:
    """Return ``dropped_rows`` that gets each seed in an array of the GPU.

    A launch of the stand-in writes other numbers for a number of the host than for an array of it;
    that the kernel drops the same elements is what ``tests/ops/test_dropout.py`` shows.
    """

    def dropped_rows(
        rows: Any, dropout: float, seed: Any, key: Any = None, out: Any = None, numbers: Any = None
    ) -> Any:
        if dropout and key is None:
            key = machine.place(np.array(seed, np.uint64).view(np.int64))
        return plain.dropped_rows(rows, dropout, None, key, out, numbers)

    return dropped_rows


def graphs_of(model: Any) -> list[Any]:
    return [each.captured.graph for each in model.graphs.by_form.values() if each.captured.graph]


def steps(
    *,
    graph: bool,
    config: Any = LLAMA,
    dtype: str = "bfloat16",
    lora: Any = LORA,
    quantized: str | None = None,
    packed: bool = False,
    padded: bool = False,
    scaled: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return the numbers of some steps, from the third of which on a graph is one launch.

    Dropout has another seed in each.
    """
    scaler, numbers = LossScaler(1024.0) if scaled else None, []
    with gpu("80", devices=1) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_layer, "dropped_rows", on_device(machine))
        model = made(machine, config, dtype, lora, quantized)
        for step in range(STEPS):
            tokens, labels, count = batch(machine, step)
            more = dict(options)
            if packed:
                more["offsets"] = machine.place(np.array([0, 10 + step, 30, 48]))
            if padded:
                more["mask"] = machine.place(np.arange(24) < np.array([[20 - step], [24]]))
            machine.launches.clear(), machine.products.clear()
            loss, gradients = model.loss_and_gradients(
                tokens, labels, count=count, graph=graph, scaler=scaler, seed=90 + step, **more
            )
            numbers.append(held(loss, gradients))
            learn(model, step)
            if scaler is not None:
                scaler.device.factor.values[...] *= 2  # type: ignore[union-attr]
        if graph:
            assert [each.launched for each in graphs_of(model)] == [STEPS - 2], model.graphs.why
            assert not machine.launches
            assert not machine.products
    return numbers


@pytest.mark.parametrize(
    "form",
    [
        *({"config": config} for config in KINDS.values()),
        {"lora": None},
        {"lora": None, "dtype": "float32", "checkpoint": CheckpointConfig()},
        {"quantized": "nf4-double"},
        {"quantized": "int8", "scaled": True},
        {"lora": {"rank": 2, "dora": True}, "packed": True},
        {"lora": {"rank": 2, "modules": ["embed_tokens"]}, "padded": True},
        {"lora": {"rank": 2, "tokens": [3, 96]}},
        {"lora": {"rank": 2, "dropout": 0.4}},
        {"lora": {"rank": 2, "dropout": 0.4, "dora": True}, "checkpoint": CheckpointConfig()},
    ],
    ids=[
        *(
            *KINDS,
            "all",
            "checkpoints",
            "nf4",
            "int8 scaled",
            "dora packed",
            "table padded",
            "rows",
        ),
        *("dropout", "dropout dora checkpoints"),
    ],
)
def test_numbers_are_those_without(form: Any) -> None:
    """Tokens, labels, their number, weights and scale are other ones in every step."""
    expected, actual = steps(graph=False, **form), steps(graph=True, **form)
    for one, other in zip(expected, actual, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)
    assert len({one["loss"] for one in expected}) == STEPS


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", KINDS)
def test_a_graph_offloads(name: str, packed: bool) -> None:
    """A launch repeats the copies to the host and back; they run as late as their events allow."""
    every = 2 if packed else 1
    parts = (CheckpointConfig(recompute_every=every, offload=moved) for moved in (False, True))
    form: dict[str, Any] = {"config": KINDS[name], "packed": packed}
    kept, moved = (steps(graph=True, checkpoint=each, **form) for each in parts)
    for one, other in zip(kept, moved, strict=True):
        for array in one:
            np.testing.assert_array_equal(other[array], one[array], err_msg=array)


def test_graphs_share_the_memory_of_the_host() -> None:
    """Each begins at the first block: graphs of two sizes need the memory of the larger one."""
    with gpu("80", devices=1) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "BLOCK", 1)
        model, moved = made(machine, LLAMA, "bfloat16", LORA, None), list[int]()
        for width in (*[24] * 4, *[12] * 4):
            tokens, labels, count = batch(machine, 0, width)
            parts, before = CheckpointConfig(offload=True), offload.moved["to_host"]
            model.loss_and_gradients(tokens, labels, count=count, graph=True, checkpoint=parts)
            moved.append(offload.moved["to_host"] - before)
        assert len(graphs_of(model)) == 2
        assert moved[0] == moved[1] == moved[2] == moved[3]
        assert moved[4] < moved[5] == moved[6] == moved[7] < moved[0]
        assert sum(size for _, size in model.graphs.place.side.blocks) == moved[0]


def test_an_array_that_is_read_before_its_copy_back_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that joined a capture run as late as their events allow."""
    parts = CheckpointConfig(offload=True)
    expected = steps(graph=False, checkpoint=parts)
    assert differs(steps(graph=True, checkpoint=parts), expected) == set()
    monkeypatch.setattr(offload.Offloaded, "back", offload.Offloaded.fetch)  # without the wait
    assert differs(steps(graph=True, checkpoint=parts), expected) == {*range(2, STEPS)}


def differs(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> set[int]:
    """Return the steps of which a number differs."""
    pairs = enumerate(zip(actual, expected, strict=True))
    return {n for n, (a, e) in pairs if any(not np.array_equal(a[name], e[name]) for name in e)}


def test_sums_that_no_graph_began_are_added_to_as_they_are() -> None:
    """A step whose first pass is watched begins new sums, though the step before had a graph."""
    sums: dict[str, Any]
    with gpu("80", devices=1) as machine:
        model = made(machine, LLAMA, "float32", LORA, None)
        for step in range(STEPS):
            sums = {}
            for number in range(3):
                tokens, labels, _ = batch(machine, number)
                function = partial(next_token, tokens=tokens, labels=labels)
                watched = step == STEPS - 1 and number == 0
                with find_nan(model.parameters) if watched else nullcontext():
                    _, sums = model.graphs(model, model.passes, function, TrainingStep(), sums)
            learned = held(0, sums)
            if step == STEPS - 2:
                expected = learned
        assert [each.launched for each in graphs_of(model)] == [2, 6]
    np.testing.assert_equal(learned, expected)


def scaled_loss(factor: Any, model: Any, **arrays: Any) -> Any:
    return model.loss(**arrays) * factor()


def test_what_a_function_reads_elsewhere_is_frozen() -> None:
    """The machine of these tests notices; partial's keywords are another form instead."""
    losses: dict[str, list[float]] = {}
    for way in ("hidden", "named"):
        for graph in (False, True):
            with gpu("80", devices=1) as machine:
                model, seen, now = made(machine, LLAMA, "float32", LORA, None), [], [0.0]
                factor = lambda: now[0]  # noqa: E731,B023
                for step in range(STEPS):
                    now[0] = 1.0 + step
                    tokens, labels, _ = batch(machine, 0)
                    hidden = partial(scaled_loss, factor, tokens=tokens, labels=labels)
                    named = partial(next_token, tokens=tokens, labels=labels, count=7.5 + step)
                    function = hidden if way == "hidden" else named
                    loss, _ = model.value_and_gradients(function, graph=graph)
                    seen.append(float(loss))
                losses[f"{way} {graph}"] = seen
    assert losses["named True"] == losses["named False"]
    assert losses["hidden True"][:2] == losses["hidden False"][:2]
    assert losses["hidden True"][2:] == [losses["hidden False"][2]] * (STEPS - 2)


def test_a_graph_that_is_not_used_makes_room() -> None:
    """Those in use stay, whatever other forms come; a limit of memory counts as one of graphs."""
    for limit in ({"KEPT": 2}, {"SHARE": 1 << 60}):
        with gpu("80", devices=1) as machine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "IDLE", 9)
            for name, value in limit.items():
                patch.setattr(graphs, name, value)
            model = made(machine, LLAMA, "bfloat16", LORA, None)
            tokens, labels, _ = batch(machine, 0)
            most = limit.get("KEPT", 1)
            checkpoints = [CheckpointConfig(recompute_every=n + 1) for n in range(most + 1)]
            for checkpoint in checkpoints:
                for _ in range(4):
                    run = partial(model.loss_and_gradients, tokens, labels, graph=True)
                    run(checkpoint=checkpoint)
            assert [each.launched for each in graphs_of(model)] == [2] * most
            assert model.graphs.why == f"{most} graphs of other forms are in use"
            for _ in range(3):
                run(checkpoint=checkpoints[most - 1])
                run(checkpoint=checkpoints[most])
            launched = sorted(each.launched for each in graphs_of(model))
            assert launched == ([2, 5] if most > 1 else [5]), "in place of the one without calls"


@pytest.mark.parametrize("change", ["weights", "adapter", "scale", "chunks"])
def test_graphs_of_other_arrays_are_dropped(change: str) -> None:
    with gpu("80", devices=1) as machine:
        model, scaler = made(machine, LLAMA, "float32", None, None), LossScaler(8.0)
        tokens, labels, _ = batch(machine, 0)
        run = partial(model.loss_and_gradients, tokens, labels, graph=True, scaler=scaler)
        for _ in range(3):
            run()
        (before,) = graphs_of(model)
        if change == "weights":
            model.parameters["model.norm.weight"] = model.parameters["model.norm.weight"].copy()
        elif change == "adapter":
            model.add_adapter(2)
        elif change == "scale":
            scaler.value = 16.0
        else:
            model.chunked_mlp = True
        for calls in (0, 0, 1):
            run()
            assert len(graphs_of(model)) == calls
        assert before.launched == 1


def test_sums_of_passes_are_those_without() -> None:
    """The first pass of a step begins the sums, others add to its arrays."""
    numbers: list[list[Any]] = []
    for graph in (False, True):
        with gpu("80", devices=1) as machine:
            model, seen = made(machine, LLAMA, "bfloat16", None, None), []
            if not graph:
                model.graphs.failed = "not now"
            for step in range(STEPS):
                sums: Any = {}
                for number in range(3):
                    tokens, labels, count = batch(machine, 3 * step + number)
                    function = partial(next_token, tokens=tokens, labels=labels, count=count)
                    loss, sums = model.graphs(model, model.passes, function, TrainingStep(), sums)
                    seen.append(float(loss))
                assert {str(each.dtype) for each in sums.values()} == {"float32"}
                seen.append(held(0, sums))
                learn(model, step)
            if graph:
                assert sorted(each.launched for each in graphs_of(model)) == [3, 8]
            numbers.append(seen)
    for one, other in zip(*numbers, strict=True):
        np.testing.assert_equal(other, one)


def sending(model: Any, **arrays: Any) -> Any:
    """A loss that sends an array of the host in each call."""
    to_device_of(np.ones(3), arrays["tokens"])
    return model.loss(**arrays)


class Watcher:
    """Watches spans, as a profile does."""

    def span(self, *_: Any) -> Any:
        return nullcontext()


def refused(how: str) -> str:
    """Return why steps of a kind run as without graphs."""
    with gpu("80", devices=1) as machine:
        config = LLAMA if how != "lengths" else SIZES | CONFIGS["llama dynamic"]
        model = made(machine, config, "float32", LORA, None)
        tokens, labels, _ = batch(machine, 0)
        run = partial(model.loss_and_gradients, tokens, labels, graph=True)
        if how == "find_nan":
            with find_nan(model.parameters):
                run()
        elif how == "profile":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(spans, "watchers", (Watcher(),))
                run()
        elif how == "closure":
            model.value_and_gradients(lambda model: model.loss(tokens, labels), graph=True)
        elif how == "unnamed":
            function = partial(lambda tokens, model: model.loss(tokens, labels), tokens)
            model.value_and_gradients(function, graph=True)
        elif how == "limit":
            import cupy

            cupy.get_default_memory_pool().set_limit(size=1 << 30)
            run()
        elif how == "memory":
            run()
            room, machine.room = machine.room, machine.held + 4096
            original = model.passes

            def passes(*args: Any) -> Any:
                if machine.gpus.stream.ptr == 0:
                    machine.room = room
                return original(*args)

            model.passes = passes
            run()
        elif how == "host":
            function = partial(sending, tokens=tokens, labels=labels)
            for _ in range(4):
                model.value_and_gradients(function, graph=True)
        else:
            run(seed=3, mask=machine.place(np.ones((2, 24), bool)))
        assert not graphs_of(model)
        return str(model.graphs.why)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("find_nan", "find_nan, profile or another tool inspects each call"),
        ("profile", "find_nan, profile or another tool inspects each call"),
        ("closure", "the arrays that the function reads are not known; functools.partial"),
        ("unnamed", "the function is called with Array, which is not hashable; pass arrays"),
        ("limit", "memory is limited"),
        ("memory", "the GPU has no memory for graphs"),
        ("host", "a host array is copied to the GPU"),
        ("lengths", "rotary angles depend on the lengths"),
    ],
)
def test_what_cannot_be_captured_runs_as_without(how: str, why: str) -> None:
    assert refused(how).startswith(why)


def test_explain_says_whether_it_is_a_graph() -> None:
    model = create(LLAMA, seed=0)
    tokens = np.zeros((2, 24), np.int64)
    run = partial(explain, model.loss_and_gradients, tokens, tokens, device="h200")
    assert run().graph == ""
    assert "\ngraph: from the third call on" in str(run(graph=True))
    offload = CheckpointConfig(offload=True)
    assert "\ngraph: from the third call on" in str(run(graph=True, checkpoint=offload))
    here = explain(model.loss_and_gradients, tokens, tokens, graph=True)
    assert here.graph == "no graph: its arrays are not on a GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_computes_the_same_bits(lora: Any, dtype: str) -> None:
    import cupy

    numbers = []
    for graph in (False, True):
        model, seen = create(LLAMA, seed=0, dtype=dtype, device="cuda"), []
        if lora is not None:
            model.add_adapter(**lora)
        for step in range(STEPS):
            draw = np.random.default_rng(step)
            tokens, labels = map(cupy.asarray, draw.integers(3, 97, (2, 2, 24)))
            labels[:, : step + 1] = -100
            loss, gradients = model.loss_and_gradients(tokens, labels, count=30 + step, graph=graph)
            seen.append({"loss": float(loss), **{n: g.get() for n, g in gradients.items()}})
            for array in model.trainable.values():
                array[...] = array + 0.01 * (step + 1)
        assert len(graphs_of(model)) == graph
        numbers.append(seen)
    np.testing.assert_equal(numbers[1], numbers[0])


VARIED = {
    name: SIZES | config
    for name, config in {
        "llama": {"head_dim": 16} | CONFIGS["llama"],
        "gemma2": {"head_dim": 16} | CONFIGS["gemma2"],
        "mixtral": MIXTURES["mixtral"] | {"output_router_logits": True},
        "qwen3_5": RELATIVES["qwen3_5_text"],
        "mamba2": RELATIVES["mamba2"],
    }.items()
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", VARIED)
def test_padding_of_a_graph_changes_no_result(name: str, packed: bool) -> None:
    """Sizes are rounded up, and padding has no label; routers count and balance real tokens."""
    model = create(VARIED[name], seed=0, dtype="float64")
    draw, width = np.random.default_rng(0), 37
    tokens = draw.integers(3, 97, (1 if packed else 2, width))
    labels = np.where(draw.random(tokens.shape) < 0.2, -100, tokens)
    plain: dict[str, Any] = {"tokens": tokens, "labels": labels, "count": 50}
    if packed:
        plain["offsets"] = np.array([0, 11, 12, width])
    else:
        plain["mask"] = np.arange(width) < np.array([[30], [width]])
    shapes = graphs.rounded({n: each.shape for n, each in plain.items() if n != "count"})
    arrays = {n: np.full(shape, 1, plain[n].dtype) for n, shape in shapes.items()}
    graph = graphs.Graph(graphs.Place(), arrays)
    graph.fill({n: plain[n] for n in arrays})
    counted: list[Any] = []

    def results(arguments: dict[str, Any], filled: Any) -> Any:
        routing = Routing(model)
        model.filled = filled
        with routing.counting():
            loss, gradients = model.value_and_gradients(partial(next_token, **arguments))
        counted.append(routing.newest)
        return loss, gradients

    loss, expected = results(plain, None)
    assert arrays["tokens"].shape[1] == 48
    padded_loss, actual = results(plain | arrays, np.asarray(width))
    assert padded_loss == pytest.approx(loss, rel=1e-12)
    for each, gradient in expected.items():
        scale = float(np.abs(gradient).max(initial=0))
        np.testing.assert_allclose(actual[each], gradient, rtol=1e-9, atol=1e-12 * scale + 1e-300)
    if model.config.experts is not None and packed:
        np.testing.assert_array_equal(counted[1], counted[0])


def test_packed_batches_of_many_sizes_are_few_graphs() -> None:
    """Of 24 steps of two sizes, 5 show what repeats: 19 are one launch each."""
    with gpu("80", devices=1) as machine:
        model = made(machine, LLAMA, "bfloat16", LORA, None)
        draw = np.random.default_rng(1)
        for _ in range(24):
            tokens, lengths = int(draw.integers(481, 513)), draw.integers(40, 60, 20).cumsum()
            ends = np.array([0, *lengths[lengths < tokens], tokens])
            row = machine.place(draw.integers(3, 97, (1, tokens)))
            model.loss_and_gradients(row, row, offsets=machine.place(ends), graph=True)
        assert model.graphs.why is None
        assert sum(each.launched for each in graphs_of(model)) == 19


def test_a_graph_costs_the_host_few_instructions() -> None:
    """At most 10,000 opcodes for a step of four layers, of lengths that were seen or are new."""
    with gpu("80", devices=1) as machine:
        config = LLAMA | {"num_hidden_layers": 4}
        model = made(machine, config, "bfloat16", LORA, None)
        machine.runs = False

        def step(width: int) -> int:
            tokens, labels, _ = batch(machine, 1, width)
            return traced(lambda: model.loss_and_gradients(tokens, labels, graph=True))

        eager = step(24)
        for width in (24, 24, 40, 41, 42):
            step(width)
        actual = [step(24), step(39), step(38)]
    assert max(actual) <= 10_000, actual
    assert eager > 50 * max(actual), "the launches of a step without a graph"
