"""The step of generation that a GPU captures, where there is none and where there is one."""

import numpy as np
import pytest

from unsloth_cupy.models import create
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.generation import decoding
from unsloth_cupy.placement import to_device_of
from unsloth_cupy.serving.work import Work
from unsloth_cupy.training.find_nan import NonFiniteError

from ..machines.stand_in import gpu
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES

PROMPT = np.random.default_rng(0).integers(3, 97, (2, 7))
OTHERS = ("llama4_text", "llama4_text plain", "mistral4", "gemma4_text experts")
KINDS = [
    *OTHERS,
    "llama",
    "mistral",
    "gemma2",
    "qwen3",
    "phi3",
    "olmo2",
    *(k for k, each in RELATIVES.items() if not FAMILIES[each["model_type"]].recurrent),
]


def config(kind):
    if kind in RELATIVES or kind in OTHERS:
        return SIZES | (RELATIVES | MIXTURES)[kind]
    named = {name: value for name, value in CONFIGS.items() if value["model_type"] == kind}
    return SIZES | {"sliding_window": 6} | next(iter(named.values()))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_generates_what_the_cache_generates(kind, padded, monkeypatch):
    """Windows wrap around, rows are padded: the same tokens."""
    model = create(config(kind), seed=0)
    mask = np.ones((2, 7), bool)
    mask[1, 4:] = not padded
    options = {"mask": mask, "max_new_tokens": 12, "stop": ()}
    expected = model.generate(PROMPT, **options)
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)


@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 4}, {"repetition_penalty": 1.3}], ids=str)
def test_a_step_goes_on_before_the_host_has_its_tokens(more, monkeypatch):
    """Rows end at different tokens: the same tokens as where the host chooses each."""
    model = create(config("llama"), seed=0)
    free = model.generate(PROMPT, max_new_tokens=8, stop=(), **more)
    options = {"max_new_tokens": 12, "stop": [int(free[0, 9]), int(free[1, 13])], **more}
    expected = model.generate(PROMPT, **options)
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)
    assert bool(more) or expected.shape[1] < free.shape[1] + 4, "all rows end early"


@pytest.mark.parametrize("more", [0, 1])
def test_rows_below_the_length_of_other_angles_are_captured(more, monkeypatch):
    model = create(SIZES | CONFIGS["phi3 longrope"], seed=0)
    original = next(rope.original for rope in model.config.ropes.values())
    options = {"max_new_tokens": original - 7 + more, "stop": ()}
    expected, played = model.generate(PROMPT, **options), []
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    plain = decoding.Decoding._played
    monkeypatch.setattr(
        decoding.Decoding, "_played", lambda *args: played.append(args) or plain(*args)
    )
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)
    assert bool(played) == (not more)


def test_nan_ends_it_on_a_device_too(monkeypatch):
    model = create(config("llama"), seed=0)
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    tokens = model.stream(PROMPT, max_new_tokens=8, stop=())
    next(tokens), next(tokens)
    model.parameters["model.norm.weight"][0] = np.nan
    next(tokens)  # it was chosen before
    with pytest.raises(NonFiniteError, match="logits of new token 3 contain NaN"):
        next(tokens)


@pytest.mark.parametrize("rows", [False, True])
def test_an_adapter_takes_part(rows, monkeypatch):
    model = create(config("llama"), seed=0)
    every = {"tokens": range(97)} if rows else {"modules": ["embed_tokens"]}
    model.add_adapter(2, **every)
    for name, array in model.adapter.parameters.items():
        array[...] = np.random.default_rng(len(name)).standard_normal(array.shape)
    expected = model.generate(PROMPT, max_new_tokens=8, stop=())
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, max_new_tokens=8, stop=()), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_keys_and_values_in_eight_bits(padded, monkeypatch):
    """Windows wrap around: steps on a device make the tokens that calls of the model make."""
    model = create(config("mistral"), seed=0)
    mask = np.ones((2, 7), bool)
    mask[1, 4:] = not padded
    options = {"mask": mask, "max_new_tokens": 12, "stop": (), "cache_dtype": "int8"}
    made, pools = [], decoding.page_pools
    monkeypatch.setattr(decoding, "page_pools", lambda *a: made.append(pools(*a)) or made[-1])
    expected = model.generate(PROMPT, **options)
    monkeypatch.setattr(decoding, "captures", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)
    assert [str(cache.first.keys.dtype) for cache in made] == ["int8"] * 2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, None) for kind in KINDS if kind != "phi3"), ("mistral", "int8")],  # it packs
)
def test_no_value_is_read_and_none_is_sent(kind, dtype, monkeypatch):
    """What lies between two tokens could be captured: it is launches alone."""
    with gpu(devices=1) as machine:
        machine.strict = False
        wide = {"head_dim": 16} if dtype == "int8" else {}
        if "kv_lora_rank" in config(kind):  # a kernel takes rows of multiples of 8
            wide = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
        elif config(kind).get("head_dim", 8) % 8 or "global_head_dim" in config(kind):
            wide = {key: 16 for key in ("head_dim", "global_head_dim") if key in config(kind)}
        model = create(config(kind) | wide, seed=0, device="cuda")
        ran = []

        class Strict:
            """As what captures: nothing is read from the device or sent there."""

            graph = None

            def __init__(self, _):
                pass

            def __call__(self, work):
                machine.launches.clear()
                machine.strict = bool(ran)  # the first call makes the tables
                ran.append(work())
                machine.strict = False
                return ran[-1]

        monkeypatch.setattr(decoding, "Captured", Strict)
        step = decoding.Decoding(model, rows=2, pages=2, page=16, cache_dtype=dtype)
        assert step.captures
        rows = [step.cache.begin([]) for _ in range(2)]
        step.cache.extend(rows, [7, 4])
        for length in (8, 9):
            work = [Work(row, np.zeros(1, np.int64), length, n, "") for n, row in enumerate(rows)]
            step(work, greedy=True)
        kernels = [launch.kernel for launch in machine.launches]
        appends = ["kv_append_paged_", "rope_append_"] if dtype is None else ["kv_append_int8_"]
        added = sum(map(kernels.count, appends))
        attention = "attention_decode" if model.config.latent is None else "latent_attention"
        assert added == kernels.count(attention) == model.config.layers
        assert len(ran) == 2


def test_a_graph_of_more_rows_takes_the_place_of_a_new_one():
    """For the first steps; one with more than twice the rows does not."""
    with gpu("90", devices=1) as machine:
        machine.strict = False
        model = create(SIZES | {"model_type": "llama", "head_dim": 16}, seed=0, device="cuda")
        step = decoding.Decoding(model, rows=8, pages=99, page=4)
        rows = [step.cache.begin([]) for _ in range(8)]
        new = [Work(row, np.zeros(1, np.int64), 1, n, "") for n, row in enumerate(rows)]
        for count, times in ((8, 3), (5, decoding.PATIENCE), (3, 1)):
            for _ in range(times):
                assert len(step(new[:count]).logits) == count
        launched = {form[0]: graph.graph for form, (*_, graph) in step.graphs.items()}
        assert launched[8].launched == 2 + decoding.PATIENCE
        assert [*launched] == [8, 3]
        for _ in range(3):
            step(new[:5])
        assert {form[0] for form in step.graphs} == {8, 5, 3}


def of_several(kind, **options):
    """Return a model in 16 bits with adapters in 32 bits, of which none is active."""
    own = SIZES | {"model_type": "llama", "head_dim": 16} | MIXTURES.get(kind, {})
    model = create(own, seed=0, dtype="bfloat16", **options)
    for number, name in enumerate(("a", "b", "dora")):
        model.add_adapter(
            2, name=name, seed=number, dora=name == "dora", targets=["q_proj", "k_proj"]
        )
        for array in model.adapter.parameters.values():
            draw = np.random.default_rng(number).standard_normal(array.shape)
            array[...] += to_device_of(draw.astype(array.dtype), array)
    model.set_adapter(None)
    return model


def begun(model, rows=8, notes=False):
    """Return a computation of steps, and its work for rows of 0 tokens."""
    sizes = {"rows": rows, "pages": 99, "page": 4, "adapters": {**model.adapters}}
    step = decoding.Decoding(model, notes=notes, **sizes)
    sequences = [step.cache.begin([]) for _ in range(rows)]
    return step, lambda names, token=5: [
        Work(sequence, np.array([token + n]), 1, n, name)
        for n, (sequence, name) in enumerate(zip(sequences, names, strict=False))
    ]


ORDERS = [("a", "b"), ("a", "a"), (None, "a"), ("a", "b", "b", "dora"), ("a", "") * 2]


@pytest.mark.parametrize("names", ORDERS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_rows_of_several_adapters_are_one_graph(names, kind, monkeypatch):
    """After some steps a step is one launch of a graph, with the bits of launches one by one."""

    def computed(captured):
        results = []
        with gpu("90", devices=1) as machine:
            machine.strict, machine.runs = False, True
            model = of_several(kind, device="cuda")
            model.set_adapter("b" if "" in names else None)
            step, work = begun(model, notes=kind != "llama")
            for number in range(decoding.PATIENCE + 6):
                machine.launches.clear(), machine.products.clear()
                logits, routes, chosen = step(work(names, number), greedy=True)
                results.append([logits.values.copy(), routes, chosen.values.copy()])
                launched = bool(machine.launches or machine.products)
                assert launched == (not captured or number < decoding.PATIENCE + 2), number
        assert captured == any(graph.graph is not None for *_, graph in step.graphs.values())
        return results

    actual = computed(True)
    monkeypatch.setattr(decoding.Captured, "__call__", lambda self, work: work())
    expected = computed(False)
    np.testing.assert_equal(actual, expected)
    assert len({each[0].tobytes() for each in actual}) == len(actual)


@pytest.mark.parametrize("names", ORDERS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_captured_rows_of_several_adapters_have_the_bits_of_others(names, kind, monkeypatch):
    """Adapters that are rounded once give the numbers of adapters that each step rounds."""
    results = []
    for captured in (True, False):
        monkeypatch.setattr(decoding, "captures", lambda *_, each=captured: each)
        monkeypatch.setattr(decoding, "PATIENCE", 0)
        model = of_several(kind)
        model.set_adapter("b" if "" in names else None)
        step, work = begun(model)
        results.append([step(work(names, number)).logits.copy() for number in range(6)])
        assert bool(step.graphs) == captured
    np.testing.assert_array_equal(*results)


def test_a_graph_with_more_rows_serves_the_adapters_that_it_begins_with():
    """A new order is launched kernel by kernel until it was needed often."""
    with gpu("90", devices=1) as machine:
        machine.strict = False
        step, work = begun(of_several("llama", device="cuda"))
        names = ("a", "a", "b", "b")
        for _ in range(decoding.PATIENCE + 2):
            step(work(names))
        ((form, (*_, captured)),) = step.graphs.items()
        assert form[3] == names
        for others, played in (
            (names[:3], True),
            (names[:2], True),
            (names[:1], False),  # of four times the rows
            (("a", "b"), False),
            (("", ""), False),
        ):
            before = captured.graph.launched
            assert len(step(work(others)).logits) == len(others)
            assert captured.graph.launched == before + played, others
        assert {form[3] for form in step.graphs} == {names, ()}


def test_few_orders_of_adapters_have_graphs(monkeypatch):
    """The least recently used is dropped, with its graphs and its count; others stay."""
    monkeypatch.setattr(decoding, "ORDERS", 3)
    monkeypatch.setattr(decoding, "PATIENCE", 1)
    with gpu("90", devices=1) as machine:
        machine.strict = False
        step, work = begun(of_several("llama", device="cuda"))
        orders = [("a", "b"), ("b", "a"), ("a", None), ("b", None)]
        for names in (("", ""), *orders[:2], orders[0], *orders[2:]):
            for _ in range(3):
                step(work(names))
            assert len(step.orders) <= 3
        kept = {(), orders[2], orders[3]}
        assert {form[3] for form in step.graphs} == {form[3] for form in step.wanted} == kept
        assert {*step.low} == {"a", "b"}


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_is_one_graph(padded, monkeypatch):
    """From the third step on a launch of the graph; the tokens are those of the CPU."""
    import cupy

    model = create(config("mistral") | {"head_dim": 8}, seed=0)
    mask = np.ones((2, 7), bool)
    mask[1, 4:] = not padded
    options = {"max_new_tokens": 12, "stop": ()}
    expected = model.generate(PROMPT, mask=mask, **options)
    there = create(config("mistral") | {"head_dim": 8}, seed=0, device="cuda")
    made, one = [], decoding.Captured
    monkeypatch.setattr(decoding, "Captured", lambda place: made.append(one(place)) or made[-1])
    actual = there.generate(cupy.asarray(PROMPT), mask=cupy.asarray(mask), **options)
    np.testing.assert_array_equal(actual.get(), expected)
    assert made[0].graph is not None
