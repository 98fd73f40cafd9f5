"""The step of generation that a GPU captures, where there is none and where there is one."""

from functools import partial

import numpy as np
import pytest

from unsloth_cupy import KVCache
from unsloth_cupy.models import create
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.generation import next_logits
from unsloth_cupy.models.generation.step import Step
from unsloth_cupy.training.find_nan import NonFiniteError

from ..machines.stand_in import HostReadError, gpu
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
    monkeypatch.setattr(next_logits, "_steps_on_device", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)


@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 4}, {"repetition_penalty": 1.3}], ids=str)
def test_a_step_goes_on_before_the_host_has_its_tokens(more, monkeypatch):
    """Rows end at different tokens: the same tokens as where the host chooses each."""
    model = create(config("llama"), seed=0)
    free = model.generate(PROMPT, max_new_tokens=8, stop=(), **more)
    options = {"max_new_tokens": 12, "stop": [int(free[0, 9]), int(free[1, 13])], **more}
    expected = model.generate(PROMPT, **options)
    begun = []
    monkeypatch.setattr(next_logits, "_steps_on_device", lambda *_: True)
    placed = lambda step, n: begun.append(np.shape(n)) or np.asarray(n, np.int64)  # noqa: E731
    monkeypatch.setattr(Step, "_placed", placed)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)
    if not more:
        assert expected.shape[1] < free.shape[1] + 4, "all rows end early"
        assert begun.count((2, 1)) == 4, "zeros, positions, rows, and the tokens after the prompt"


def test_nan_ends_it_on_a_device_too(monkeypatch):
    model = create(config("llama"), seed=0)
    monkeypatch.setattr(next_logits, "_steps_on_device", lambda *_: True)
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
    monkeypatch.setattr(next_logits, "_steps_on_device", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, max_new_tokens=8, stop=()), expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_logits_are_those_of_the_cache(sinks, dtype):
    model = create(SIZES | {"model_type": "llama"}, seed=0)
    caches = [
        KVCache(3, 2, 64, 2, 8, dtype=dtype, window=[5, None, 3], sinks=sinks) for _ in range(2)
    ]
    mask = np.ones((2, 7), np.int8)
    mask[0, :3] = 0
    for cache in caches:
        model.logits(PROMPT, mask=mask, cache=cache)
    step = Step(model, caches[1], mask == 1, 20)
    for token in range(3, 12):
        new = np.full((2, 1), token)
        expected = model.logits(new, cache=caches[0])[:, 0]
        np.testing.assert_allclose(step(new), expected, atol=1e-5)
    assert caches[1].length == caches[0].length


@pytest.mark.parametrize("padded", [False, True])
def test_keys_and_values_in_eight_bits(padded, monkeypatch):
    """Windows wrap around: steps on a device make the tokens that calls of the model make."""
    model = create(config("mistral"), seed=0)
    mask = np.ones((2, 7), bool)
    mask[1, 4:] = not padded
    options = {"mask": mask, "max_new_tokens": 12, "stop": (), "cache_dtype": "int8"}
    made = []
    monkeypatch.setattr(
        next_logits, "KVCache", lambda *a, **b: made.append(KVCache(*a, **b)) or made[-1]
    )
    expected = model.generate(PROMPT, **options)
    monkeypatch.setattr(next_logits, "_steps_on_device", lambda *_: True)
    np.testing.assert_array_equal(model.generate(PROMPT, **options), expected)
    assert [str(cache.dtype) for cache in made] == ["int8"] * 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS if kind != "phi3"), ("mistral", "int8")],  # it packs
)
def test_no_value_is_read_and_none_is_sent(kind, dtype, padded):
    """What lies between two tokens could be captured: it is launches alone."""
    with gpu() as machine:
        machine.strict = False
        wide = {"head_dim": 16} if dtype == "int8" else {}
        if "kv_lora_rank" in config(kind):  # a kernel takes rows of multiples of 8
            wide = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
        elif config(kind).get("head_dim", 8) % 8 or "global_head_dim" in config(kind):
            wide = {key: 16 for key in ("head_dim", "global_head_dim") if key in config(kind)}
        model = create(config(kind) | wide, seed=0)
        model.parameters = {name: machine.place(a) for name, a in model.parameters.items()}
        sizes = model.config
        windows = [sizes.window_of(layer) for layer in range(sizes.layers)]
        cache = KVCache(
            *(sizes.layers, 2, 16),
            **model.cache_sizes,
            dtype=dtype,
            like=model.table,
            window=windows,
        )
        real = np.ones((2, 7), bool)
        real[1, :3] = not padded
        rows = {
            kind: tuple(
                machine.array((16, size), "float32")
                for size in (*[rope.dim // 2] * 2, *[1] * rope.whole)
            )
            for kind, rope in sizes.ropes.items()
        }
        model.tables = {
            kind: partial(lambda made, length: made, made) for kind, made in rows.items()
        }
        cache.filled = [7] * sizes.layers
        step = Step(model, cache, real, 16)
        machine.strict = True
        step.run()
        machine.launches.clear()
        step.run()
        kernels = [launch.kernel for launch in machine.launches]
        appends = ["kv_append_", "rope_append_"] if dtype == "float32" else ["kv_append_int8_"]
        added = sum(map(kernels.count, appends))
        attention = "attention_decode" if sizes.latent is None else "latent_attention"
        assert added == kernels.count(attention) == sizes.layers
        with pytest.raises(HostReadError):
            step.starts.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_is_one_graph(padded):
    """From the third step on a launch of the graph; the tokens are those of the CPU."""
    import cupy

    model = create(config("mistral") | {"head_dim": 8}, seed=0)
    mask = np.ones((2, 7), bool)
    mask[1, 4:] = not padded
    options = {"max_new_tokens": 12, "stop": ()}
    expected = model.generate(PROMPT, mask=mask, **options)
    there = create(config("mistral") | {"head_dim": 8}, seed=0, device="cuda")
    made = []

    class Watched(Step):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(next_logits, "Step", Watched)
        actual = there.generate(cupy.asarray(PROMPT), mask=cupy.asarray(mask), **options)
    np.testing.assert_array_equal(actual.get(), expected)
    assert made[0].graph is not None
