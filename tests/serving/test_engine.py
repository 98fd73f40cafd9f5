"""The engine: tokens are those of each row alone, whatever runs beside it, and no page is lost."""

import itertools
import math
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from unsloth_cupy import Engine, KVCache
from unsloth_cupy.errors import ConfigError, DeviceMemoryError
from unsloth_cupy.finetune.run.ranks import Ranks
from unsloth_cupy.inference.packed_rows import PackedRows
from unsloth_cupy.inference.page_pools import PagePools
from unsloth_cupy.models import create, load
from unsloth_cupy.models.generation import decoding
from unsloth_cupy.parallel import grid
from unsloth_cupy.serving import drawing, requests, scheduler
from unsloth_cupy.training import captured

from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from ..models.peers import CONFIGS, MIXTURES, RELATIVES, SIZES
from ..parallel.threads import by_threads

FAMILIES = {
    "full": {"model_type": "llama"},
    "windows": {"model_type": "mistral", "sliding_window": 6},
    "some windows": {**CONFIGS["gemma2"], "sliding_window": 6},
    "latent": RELATIVES["youtu"],
    "states": RELATIVES["qwen3_5_text"],
    "states beside pages": RELATIVES["falcon_h1"],
    "states alone": RELATIVES["mamba2"],
    "scans alone": RELATIVES["mamba"],
    "scans and experts": MIXTURES["jamba"],
    "short convolutions": RELATIVES["lfm2"],
    "experts and sinks": MIXTURES["gpt_oss"],
    "chunks": MIXTURES["llama4_text"],
    "captured chunks": MIXTURES["llama4_text"],
    "chunks alone": {**MIXTURES["llama4_text"], "no_rope_layers": [1, 1, 1]},
    "chosen keys": MIXTURES["deepseek_v32"],
    "a choice that layers share": MIXTURES["glm_moe_dsa"],
    "longrope": CONFIGS["phi3 longrope"],
    "dynamic": CONFIGS["llama dynamic"],
    "codes": {"model_type": "llama"},
    "captured": {"model_type": "llama"},
    "invariant": {"model_type": "llama"},
}
SCHEDULES = 1000  # in all runs of as many days as there are TURNS
TURNS = 50
assert math.gcd(TURNS, len(FAMILIES)) == 1, "every run has schedules of all families"
CASES = [(number, [*FAMILIES][number % len(FAMILIES)]) for number in range(SCHEDULES)]


def model_of(kind):
    return create({**SIZES, **FAMILIES[kind]}, seed=0, invariant=kind == "invariant")


MODELS = {}


@pytest.fixture
def model(kind):
    """Return the model of a kind, made once."""
    if kind not in MODELS:
        MODELS[kind] = model_of(kind)
    return MODELS[kind]


def alone(model, prompt, options, number):
    """Return the tokens of one row and their log-probabilities: a whole pass for each token."""
    draws = np.random.default_rng([options["seed"], number])
    row, log_probs, cache = [*prompt], [], None
    if "dynamic" in str(model.config.ropes):  # keys stay as they were stored, as in transformers
        config = model.config
        cache = KVCache(config.layers, 1, 64, config.kv_heads, config.dim, dtype="float32")
    while len(row) < len(prompt) + options["max_new_tokens"]:
        new = row if cache is None else row[cache.length :]
        logits = model.logits(np.array([new]), cache=cache)[0, -1].astype(np.float64)
        temperature = options["temperature"]
        shifted = logits / (temperature or 1.0)
        top = shifted.max()
        log_probs.append(shifted - top - np.log(np.exp(shifted - top).sum()))
        penalty = options.get("repetition_penalty")
        if penalty is not None:
            used = [*set(row)]
            logits[used] = np.where(
                logits[used] < 0, logits[used] * penalty, logits[used] / penalty
            )
        if temperature == 0:
            token = int(logits.argmax())
        else:
            order = np.arange(len(logits))
            if options["top_k"] is not None:
                order = np.argsort(-logits, kind="stable")[: options["top_k"]]
            weights = np.exp((logits[order] - logits.max()) / temperature).cumsum()
            place = np.searchsorted(weights, draws.random() * weights[-1], side="right")
            token = int(order[min(place, len(order) - 1)])
        log_probs[-1] = log_probs[-1][token]
        row.append(token)
        if token in options["stop"]:
            break
    return row[len(prompt) :], log_probs


def check_pages(scheduler):
    """No page has an owner but the tree of prefixes."""
    for number, pool in enumerate(scheduler.cache.pools):
        assert not pool.tables
        in_tree = 0 if scheduler.tree is None else scheduler.tree.unused(number)
        assert sum(pool.uses) == in_tree == len(pool.uses) - len(pool.free_pages)


@pytest.mark.filterwarnings("ignore:.*fills the")  # 8 positions, then other angles
@pytest.mark.parametrize(("number", "kind"), Sample.one_in(TURNS, CASES))
def test_rows_are_those_of_each_alone(number, kind, model, monkeypatch):
    """Random arrivals, lengths, forks, cancels; few pages, so that rows are set back."""
    if kind.startswith("captured"):  # the path of a GPU, on the host
        monkeypatch.setattr(decoding, "captures", lambda *_: True)
    rng = np.random.default_rng(number)
    page = int(rng.integers(1, 6))
    longest = -(-40 // page)
    engine = Engine(
        model,
        rows=int(rng.integers(1, 6)),
        pages=longest + int(rng.integers(0, 2 * longest)),
        page=page,
        chunk=int(rng.integers(1, 12)),
        cache_dtype="int8" if kind == "codes" else None,
    )
    begin = rng.integers(3, 97, 12).tolist()
    todo, requests = int(rng.integers(2, 6)), []
    events, cancelled = [], []
    while todo or engine.waiting or engine.running:
        if todo and (rng.random() < 0.3 or not (engine.waiting or engine.running)):
            todo -= 1
            prompt = begin[: rng.integers(1, 13)] + rng.integers(3, 97, rng.integers(0, 9)).tolist()
            options = {
                "max_new_tokens": int(rng.integers(1, 17)),
                "temperature": float(rng.choice([0.0, 0.8])),
                "top_k": None,
                "seed": int(rng.integers(100)),
                "stop": rng.integers(3, 97, rng.integers(0, 4)).tolist(),
                "repetition_penalty": None if rng.random() < 0.7 else 1.3,
            }
            if options["temperature"] and rng.random() < 0.5:
                options["top_k"] = 7
            if options["temperature"] == 0:
                options |= {"seed": None}
            request = engine.submit(
                prompt,
                **options,
                samples=int(rng.integers(1, 4)),
                first=int(rng.integers(3)),
                log_probs=True,
            )
            requests.append((request, options))
        if requests and rng.random() < 0.03:
            cancelled.append(requests[int(rng.integers(len(requests)))][0])
            engine.cancel(cancelled[-1])
        events += engine.step()
    events += engine.step()
    assert engine.free_pages == len(engine.cache.uses)
    check_pages(engine._scheduler)
    told = {}
    for event in events:
        told.setdefault((event.request.number, event.sample), []).extend(event.tokens)
    for request, options in requests:
        for index, sample in enumerate(request.samples):
            assert told[request.number, index] == sample.tokens
            assert sample.finish is not None
            if kind == "codes":
                continue  # no whole pass rounds keys: see the next test
            seeded = {**options, "seed": options["seed"] or 0}
            row = request.options.first + index
            expected, log_probs = alone(model, request.prompt, seeded, row)
            if sample.finish == "cancelled":
                assert request in cancelled
                expected = expected[: len(sample.tokens)]
            assert sample.tokens == expected
            np.testing.assert_allclose(
                sample.log_probs, log_probs[: len(expected)], atol=1e-5, rtol=0
            )
            if kind == "invariant" and sample.tokens:
                text = np.array([[*request.prompt, *sample.tokens]])
                more = {"temperature": options["temperature"] or 1.0}
                whole = model.log_probs(text, text, **more).log_probs[0]
                start = len(request.prompt) - 1
                np.testing.assert_array_equal(sample.log_probs, whole[start:-1][: len(expected)])


@pytest.mark.parametrize("kind", ["codes", "chunks"])
def test_codes_do_not_depend_on_pieces(kind, model):
    """In a cache of codes the tokens of a row are the same in any chunks, alone or set back."""
    results = []
    prompts = [[*range(3, 3 + n)] for n in (11, 2, 7)]
    for rows, pages, chunk in ((3, 60, 100), (1, 12, 3), (3, 14, 5)):
        with Engine(
            model, rows=rows, pages=pages, page=3, chunk=chunk, cache_dtype="int8"
        ) as engine:
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=12, stop=(), temperature=1.0, seed=1)
            results.append([r.samples[0].tokens for r in engine.run()])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", ["some windows", "chunks"])
def test_layers_with_a_window_have_pages_of_its_tokens_alone(kind, model):
    """As many as a cache in order has, and up to a page more for each row."""
    rows, page, window = 3, 4, 6
    own = {"sliding_attention", "chunked_attention"}
    windows = [window if each in own else None for each in model.config.layer_types]
    assert {*windows} == {None, window}
    with Engine(model, rows=rows, pages=60, page=page, chunk=120) as engine:
        engine._scheduler.tree = None
        requests = [engine.submit([*range(3, 43)], max_new_tokens=30, stop=()) for _ in range(rows)]
        whole, own = engine._scheduler.cache.pools
        most = 0
        while engine.waiting or engine.running:
            engine.step()
            most = max(most, len(own.uses) - len(own.free_pages))
        assert most <= rows * (-(-window // page) + 1)
        assert len(whole.keys) == windows.count(None)
        assert len(own.uses) == rows * (-(-window // page) + 1) + 120 // page
        assert len(whole.keys) + len(own.keys) == len(windows)
    for request in requests:
        assert request.samples[0].tokens == alone_greedy(model, request.prompt, 30)


@pytest.mark.parametrize("kind", ["some windows", "chunks"])
def test_equal_prefixes_of_layers_with_a_window_are_computed_once(kind, model):
    """Or again, if their pages in the window were needed for others."""
    prompt = [*range(3, 43)]
    for others in (0, 3):
        with Engine(model, rows=4, pages=60, page=4, chunk=12) as engine:
            engine.submit(prompt, max_new_tokens=2, stop=())
            engine.run()
            for other in range(others):
                engine.submit([90 + other] * 40, max_new_tokens=2, stop=())
            engine.run()
            before = engine.computed_rows
            again = engine.submit([*prompt, 50], max_new_tokens=2, stop=())
            engine.run()
            assert again.samples[0].tokens == alone_greedy(model, again.prompt, 2)
            new = engine.computed_rows - before
            assert new == 2 if not others else 2 < new <= 42


@pytest.mark.filterwarnings("ignore:.*fills the")  # 8 positions, then other angles
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize(
    "kind", ["full", "windows", "some windows", "chunks alone", "longrope", "states beside pages"]
)
def test_few_pages_are_enough(kind, chunk, model):
    """Of any number of pages, each request is refused, or has the tokens of a large engine."""
    rng = np.random.default_rng(0)
    cases = [
        (rng.integers(0, 97, rng.integers(1, 20)).tolist(), int(rng.integers(1, 10)), seed)
        for seed in range(5)
    ]

    def samples(engine, prompt, new, seed):
        options = {"max_new_tokens": new, "temperature": 1.0, "seed": seed, "stop": ()}
        return engine.submit(prompt, samples=1 + seed % 3, **options).samples

    whole = Engine(model, rows=14, pages=200, page=4)
    every = [samples(whole, *case) for case in cases]
    whole.run()
    refused = 0
    for pages in (1, 2, 3, 4, 9):
        engine, pairs = Engine(model, rows=3, pages=pages, page=4, chunk=chunk), []
        for case, own in zip(cases, every, strict=True):
            try:
                pairs.append((samples(engine, *case), own))
            except DeviceMemoryError:
                refused += 1
        steps = 0
        while engine.running or engine.waiting:
            engine.step()
            steps += 1
            assert steps < 2000
        for actual, expected in pairs:
            assert [each.tokens for each in actual] == [each.tokens for each in expected]
        check_pages(engine._scheduler)
    assert 0 < refused < 25


@pytest.mark.parametrize("ahead", [False, True])
def test_no_rectangle(ahead, monkeypatch):
    """At most 1.05 tokens are computed for each one that is kept, at lengths of 1 to 20 times."""
    monkeypatch.setattr(decoding, "captures", lambda *_: ahead)
    model, rng = model_of("full"), np.random.default_rng(0)
    with Engine(model, rows=32, pages=400, page=4, chunk=64) as engine:
        for length in np.exp(rng.uniform(0, np.log(20), 48)).astype(int).tolist():
            prompt = rng.integers(3, 97, 1 + length).tolist()
            engine.submit(prompt, max_new_tokens=2 * length, samples=2, stop=(), temperature=1.0)
        requests = engine.run()
        kept = sum(len(r.prompt) + sum(len(s.tokens) for s in r.samples) for r in requests)
        assert engine.kept_tokens == kept
        assert engine.computed_rows <= 1.05 * kept


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "full"), (1.0, "full"), (0.0, "chunks")])
def test_a_gpu_begins_a_step_before_the_host_has_the_tokens_of_the_last(
    temperature, kind, monkeypatch
):
    """Of a replayed step the host sends its places alone; random numbers go ahead in blocks."""
    monkeypatch.setattr(requests, "BLOCK", 4)
    monkeypatch.setattr(drawing, "BLOCK", 4)
    with gpu("90", devices=1) as machine:
        machine.strict, machine.runs = False, True
        model = create({**SIZES, **FAMILIES[kind], "head_dim": 16}, seed=0, device="cuda")
        events = []

        def noted(owner, name, what):
            plain = getattr(owner, name)
            call = lambda *args: events.append(what) or plain(*args)  # noqa: E731
            monkeypatch.setattr(owner, name, call)

        with Engine(model, rows=2, pages=40, page=4) as engine:
            noted(captured.Captured, "__call__", "step")
            noted(scheduler.Scheduler, "_receive", "tokens")
            for seed in (0, 1):
                more = {"temperature": temperature, "seed": seed} if temperature else {}
                engine.submit([5, 6, 7], max_new_tokens=20, stop=(), **more)
            steps = []
            while engine.waiting or engine.running:
                machine.functions.clear(), machine.launches.clear(), machine.products.clear()
                events.clear()
                engine.step()
                steps.append(
                    ([*events], machine.functions.count("asarray"), len(machine.functions))
                )
                replayed = not (machine.launches or machine.products)
                assert replayed or len(steps) < 4
        (graph,) = (each[-1].graph for each in engine._scheduler.decoder.graphs.values())
        assert graph.launched == 19 - 1, "the second call captures, and launches"
        assert [each[0] for each in steps[3:-1]] == [["step", "tokens"]] * 17
        assert steps[-1][0] == ["tokens"]
        sent = [count for _, count, _ in steps[4:-1]]
        if temperature:
            assert sorted(sent) == [1] * 12 + [2] * 4
        else:
            assert sent == [1] * 16
            assert all(functions == 1 for *_, functions in steps[4:-1]), "the graph draws"


def test_a_gpu_draws_beside_greedy_rows():
    """Rows of both kinds, at different places, with their most likely tokens."""
    with gpu("90", devices=1) as machine:
        machine.strict, machine.runs = False, True
        model = create({**SIZES, **FAMILIES["full"], "head_dim": 16}, seed=0, device="cuda")
        with Engine(model, rows=3, pages=40, page=4) as engine:
            engine.submit([5, 6, 7], max_new_tokens=9, stop=(), top_log_probs=4)
            for _ in range(4):
                engine.step()
            engine.submit([5, 6], max_new_tokens=9, stop=(), temperature=0.7, top_log_probs=3)
            requests = engine.run()
    for request, count in zip(requests, (4, 3), strict=True):
        (sample,) = request.samples
        assert [*map(len, sample.top_log_probs)] == [count] * len(sample.tokens) == [count] * 9


@pytest.mark.parametrize("kind", ["full"])
def test_a_row_that_ended_is_computed_one_step_too_long(kind, model, monkeypatch):
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    with Engine(model, rows=4, pages=99, page=4) as engine:
        rng = np.random.default_rng(0)
        submitted = [
            engine.submit(
                rng.integers(3, 97, 5).tolist(), max_new_tokens=30, temperature=1.0, seed=n,
                stop=[*range(3, 12)],
            )
            for n in range(12)
        ]  # fmt: skip
        engine.run()
        ended = sum(each.samples[0].finish == "stop" for each in submitted)
        assert ended > 8
        # the last token of a row is not computed
        computed = engine.kept_tokens - len(submitted) + ended
        assert engine.computed_rows == computed


def test_equal_prefixes_are_computed_once():
    model, prompt = model_of("full"), [*range(3, 43)]
    with Engine(model, rows=4, pages=60, page=4) as engine:
        engine.submit(prompt, max_new_tokens=2, stop=())
        engine.run()
        before = engine.computed_rows
        other = engine.submit([*prompt, 50], max_new_tokens=2, stop=())
        engine.run()
        assert engine.computed_rows - before == 2  # token 50, and the first new one
        assert other.samples[0].tokens == alone_greedy(model, other.prompt, 2)
        engine.submit([90, *prompt], max_new_tokens=2, stop=())  # no page is equal
        engine.run()
        assert engine.computed_rows - before == 2 + 42


def alone_greedy(model, prompt, new):
    options = {"max_new_tokens": new, "temperature": 0.0, "seed": 0, "stop": ()}
    return alone(model, prompt, options, 0)[0]


@pytest.mark.parametrize("kind", ["full", "captured", "invariant", "some windows"])
def test_the_most_likely_tokens(kind, model, monkeypatch):
    """Those of the whole text; the drawn token has the log-probability that it has alone."""
    if kind == "captured":
        monkeypatch.setattr(decoding, "captures", lambda *_: True)
    drawn = {"max_new_tokens": 9, "stop": (), "log_probs": True}
    with Engine(model, rows=4, pages=60, page=4) as engine:
        rows = [
            engine.submit(
                [5, 6, 7], temperature=temperature, seed=seed, top_log_probs=count, **drawn
            )
            for temperature, seed, count in ((0, None, 5), (0.8, 2, 97), (0.8, 2, 0), (0.8, 2, 2))
        ]
        engine.run()
        for wrong in (-1, 98, 1.5):
            with pytest.raises(ConfigError, match=f"top_log_probs={wrong} must be an integer"):
                engine.submit([5], max_new_tokens=1, top_log_probs=wrong)
    greedy, whole, none, few = (row.samples[0] for row in rows)
    assert none.tokens == whole.tokens == few.tokens
    assert none.top_log_probs == []
    assert [*map(len, few.top_log_probs)] == [2] * 9
    for sample, temperature in ((greedy, 1.0), (whole, 0.8)):
        text = np.array([[5, 6, 7, *sample.tokens]])
        expected = model.logits(text)[0, 2:-1].astype(np.float64) / temperature
        expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
        for token, own, top, row in zip(
            sample.tokens, sample.log_probs, sample.top_log_probs, expected, strict=True
        ):
            order = np.argsort(-row, kind="stable")[: len(top)]
            tokens, values = zip(*top, strict=True)
            np.testing.assert_allclose(values, row[order], atol=1e-5)
            np.testing.assert_allclose(values, row[[*tokens]], atol=1e-5)  # near ones may change
            assert len({*tokens}) == len(top)
            assert dict(top)[token] == own


def test_rows_have_their_adapters():
    model = model_of("full")
    for name in ("a", "b"):
        model.add_adapter(2, seed=1)
        for key, array in model.adapter.parameters.items():
            array[...] = np.random.default_rng(len(key + name) + ord(name)).standard_normal(
                array.shape
            )
        model._adapters[name], model.adapter = model.adapter, None
    prompt, expected = [5, 6, 7], {}
    for name in ("a", "b", None):
        model.set_adapter(name)
        expected[name] = alone_greedy(model, prompt, 6)
    model.set_adapter(None)
    with Engine(model, rows=3, pages=20, page=2) as engine:
        rows = {
            name: engine.submit(prompt, max_new_tokens=6, stop=(), adapter=name)
            for name in ("a", None, "b")
        }
        engine.run()
    assert {name: row.samples[0].tokens for name, row in rows.items()} == expected
    assert len({tuple(each) for each in expected.values()}) == 3


def test_steps_of_several_adapters_are_graphs():
    """Rows that begin in turn are sorted by adapter, so that steps have few orders of adapters."""
    with gpu("90", devices=1) as machine:
        machine.strict, machine.runs = False, True
        model = create({**SIZES, **FAMILIES["full"], "head_dim": 16}, seed=0, device="cuda")
        for name in ("a", "b"):
            model.add_adapter(2, name=name)
        model.set_adapter(None)
        with Engine(model, rows=4, pages=80, page=16) as engine:
            for name in ("b", "a", "b", None):
                engine.submit([5, 6, 7], max_new_tokens=30, stop=(), adapter=name)
            replayed = []
            while engine.waiting or engine.running:
                machine.launches.clear(), machine.products.clear()
                engine.step()
                replayed.append(not (machine.launches or machine.products))
            ((form, (*_, captured)),) = engine._scheduler.decoder.graphs.items()
    assert form[3] == (None, "a", "b", "b")
    first = 1 + decoding.PATIENCE + 2  # prompts, launches one by one, and those of the capture
    assert replayed == [False] * first + [True] * (31 - first)
    assert captured.graph.launched == 29 - decoding.PATIENCE - 1


def test_nan_ends_a_sample():
    model = model_of("full")
    model.parameters["model.norm.weight"][0] = np.nan
    with Engine(model, rows=2, pages=9, page=4) as engine:
        request = engine.submit([3, 4], max_new_tokens=3)
        (event,) = engine.step()
    assert (event.finish, event.tokens, request.samples[0].finish) == ("error", [], "error")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompt": []}, "prompt is float64 (0,)"),
        ({"prompt": [97]}, "outside the vocabulary of 97"),
        ({"prompt": {"input_ids": [3]}}, "prompt has input_ids; pass the token ids alone"),
        ({"samples": 0}, "samples=0 must be 1 or more"),
        ({"first": -1}, "first=-1 must be 0 or more"),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop_texts": [""]}, "stop_texts=['']"),
        ({"stop_texts": "a"}, "stop_texts need the model's tokenizer"),
        ({"constraint": {"regex": "a"}}, "constraint= needs the model's tokenizer"),
        ({"prompt": [[3], [4, 5]]}, "prompt is object (2,)"),
        ({"stop_texts": None}, "stop_texts=None"),
        ({"log_probs": "yes"}, "log_probs='yes' must be True or False"),
        ({"adapter": "x"}, "adapter='x'; there are none; call load_adapter before"),
        ({"adapter": ["x"]}, "adapter=['x']"),
    ],
    ids=str,
)
def test_bad_requests_are_one_line(options, problem):
    with Engine(model_of("full"), rows=2, pages=9, page=4) as engine:
        with pytest.raises(ConfigError) as caught:
            engine.submit(**{"prompt": [3], "max_new_tokens": 2, **options})
        assert problem in str(caught.value)
        assert str(caught.value).startswith("Engine.submit: ")
        assert "\n" not in str(caught.value)
        with pytest.raises(DeviceMemoryError, match="fills 10 pages, and the engine has 9"):
            engine.submit([3] * 20, max_new_tokens=20)
        with pytest.raises(ConfigError, match=r"Engine\.cancel: request is a list"):
            engine.cancel([3])


def test_a_prompt_of_all_positions_is_warned_of():
    engine = Engine(model_of("full"), rows=1, pages=99, page=64)
    with pytest.warns(UserWarning, match="the prompt fills the 64 positions"):
        engine.submit([3] * 64, max_new_tokens=5)


def test_an_adapter_that_is_loaded_later_is_refused():
    model = model_of("full")
    with Engine(model, rows=2, pages=9, page=4) as engine:
        model.add_adapter(2, seed=0, name="late")
        with pytest.raises(ConfigError, match="adapter='late'; there are none"):
            engine.submit([3], max_new_tokens=2, adapter="late")


# by place: a function that a step calls, and the families whose rows reach it
PLACES = {
    "attend": (PackedRows, "attend"),
    "extend": (PagePools, "extend"),
    "fork": (PagePools, "fork"),
    "choose": (scheduler, "choose"),
    "log_probs": (scheduler, "of_logits"),
}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["full", "some windows", "states beside pages", "invariant"])
def test_rows_go_on_after_an_exception(kind, place, error, model, monkeypatch):
    """Tokens and log-probabilities are those of steps without one, and no page is lost."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, size).tolist() for size in (3, 25, 9, 14)]

    def started():
        engine = Engine(model, rows=3, pages=60, page=4, chunk=8)
        options = {"max_new_tokens": 7, "temperature": 1.0, "stop": (), "log_probs": True}
        return engine, [
            engine.submit(prompt, samples=1 + seed % 3, seed=seed, **options)
            for seed, prompt in enumerate(prompts)
        ]

    whole, expected = started()
    whole.run()
    engine, actual = started()
    owner, name = PLACES[place]
    inner, calls = getattr(owner, name), itertools.count(1)

    def failing(*arguments, **options):
        if next(calls) in (1, 2, 5, 11):
            raise error
        return inner(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    raised = 0
    while engine.running or engine.waiting:
        try:
            engine.step()
        except error:
            raised += 1
    assert raised >= 3
    for own, other in zip(actual, expected, strict=True):
        for sample, alone in zip(own.samples, other.samples, strict=True):
            assert sample.tokens == alone.tokens
            np.testing.assert_allclose(sample.log_probs, alone.log_probs, atol=1e-5)
    check_pages(engine._scheduler)


def test_an_exception_ends_rows_whose_tokens_are_lost(monkeypatch):
    """A row that was receiving its token, and rows whose angles cannot be computed again."""
    take, calls = requests.Row.take, itertools.count(1)

    def failing(row, token):
        finish = take(row, token)
        if next(calls) == 4:
            raise KeyboardInterrupt
        return finish

    monkeypatch.setattr(requests.Row, "take", failing)
    for kind, ends in (("full", ["length", "error"]), ("dynamic", ["error", "error"])):
        calls = itertools.count(1)
        with Engine(model_of(kind), rows=2, pages=20, page=4) as engine:
            two = [engine.submit([3, 4 + n], max_new_tokens=5, stop=()) for n in range(2)]
            with pytest.raises(KeyboardInterrupt):
                engine.run()
            engine.run()
            assert [each.samples[0].finish for each in two] == ends
            check_pages(engine._scheduler)


def test_threads_share_an_engine():
    model, failures = model_of("full"), []
    engine = Engine(model, rows=3, pages=60, page=4)
    options = {"max_new_tokens": 6, "temperature": 1.0, "stop": ()}

    def ask(number):
        try:
            for seed in range(30):
                own = engine.submit([3 + number, seed], seed=seed, samples=2, **options)
                engine.step()
                if seed % 7 == 0:
                    engine.cancel(own)
                assert engine.free_pages <= 60
            engine.run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    check_pages(engine._scheduler)


@pytest.mark.parametrize("option", ["rows", "pages", "page", "chunk", "cache_dtype"])
def test_bad_engines_are_one_line(option):
    with pytest.raises(ConfigError, match=f"Engine: {option}="):
        Engine(model_of("full"), **{"pages": 9, option: 0})
    with pytest.raises(ConfigError, match="Engine: model is a str"):
        Engine("model")


def test_no_new_tokens():
    with Engine(model_of("full"), rows=2, pages=9, page=4) as engine:
        request = engine.submit([3], max_new_tokens=0)
        (event,) = engine.step()
        assert (event.request, event.finish, event.tokens) == (request, "length", [])


def test_draws_are_those_of_the_host():
    """All rows at once, as a GPU draws them, or one by one: the same tokens."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 97))
    options = SimpleNamespace(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)
    uniform = rng.random((4, 1))
    expected = [drawing.draw(row, options, u) for row, u in zip(logits, uniform[:, 0], strict=True)]
    assert drawing.draw_all(logits, options, uniform).tolist() == expected


@pytest.fixture(scope="module")
def letters():
    """Return a model of letters, and its tokenizer: token n is the letter n."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `cli`")
    words = {chr(97 + n) if n < 26 else f"<{n}>": n for n in range(96)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"<96>": 96}, "<96>"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    model = create({**SIZES, **FAMILIES["full"]}, seed=0)
    model.tokenizer = SimpleNamespace(backend=backend)
    return model


def test_a_stop_text_ends_a_sample(letters):
    options = {"max_new_tokens": 12, "stop": ()}
    with Engine(letters, rows=2, pages=20, page=4) as engine:
        free = engine.submit([5, 6, 7], **options)
        engine.run()
        text = letters.tokenizer.backend.decode(free.samples[0].tokens)
        end = text[len(text) // 2 : len(text) // 2 + 4]
        stopped = engine.submit([5, 6, 7], **options, stop_texts=[end])
        engine.run()
    (sample,) = stopped.samples
    own = letters.tokenizer.backend.decode(sample.tokens)
    assert sample.finish == "stop"
    assert end in own
    assert end not in letters.tokenizer.backend.decode(sample.tokens[:-1])
    assert text.startswith(own)


def test_a_constraint_chooses_the_text(letters):
    pytest.importorskip("llguidance", reason="needs the extra `constraints`")
    with Engine(letters, rows=3, pages=40, page=4) as engine:
        options = {"max_new_tokens": 9, "stop": 90, "temperature": 1.0, "seed": 1}
        request = engine.submit([5, 6], **options, samples=3, constraint={"regex": "(ab|cd){2,3}"})
        plain = engine.submit([5, 6], **options)
        engine.run()
        with pytest.raises(ConfigError, match=r"Engine.submit: constraint=\{'x': 1\}"):
            engine.submit([5], max_new_tokens=1, constraint={"x": 1})
    for sample in request.samples:
        text = letters.tokenizer.backend.decode([t for t in sample.tokens if t != 90])
        assert re.fullmatch("(ab|cd){2,3}", text)
        assert sample.finish == "stop"
    with Engine(letters, rows=3, pages=40, page=4) as engine:
        alone = engine.submit([5, 6], **options)
        engine.run()
    assert plain.samples[0].tokens == alone.samples[0].tokens


@pytest.mark.parametrize("kind", ["chunks", "chosen keys", "a choice that layers share"])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_that_share_a_model(kind, axis, tmp_path):
    config = {**SIZES, **FAMILIES[kind]}
    model, prompts = create(config, seed=0), [[*range(3, 3 + n)] for n in (11, 2, 7)]
    model.save(tmp_path)
    expected = [alone_greedy(model, prompt, 9) for prompt in prompts]

    def work(comm):
        placing = Ranks(comm, grid(comm, **{"data": 1, axis: 2})).placing
        with Engine(load(tmp_path, **placing), rows=2, pages=20, page=4, chunk=5) as engine:
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=9, stop=())
            return [request.samples[0].tokens for request in engine.run()]

    assert by_threads(2, work) == [expected] * 2
