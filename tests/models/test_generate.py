"""Generation: what must hold whatever the model says."""

import dataclasses
import functools
import gc
import itertools
import weakref

import numpy as np
import pytest

from unsloth_cupy import KVCache, NonFiniteError
from unsloth_cupy.errors import ConfigError, DTypeError, FrameworkError, RangeError, ShapeError
from unsloth_cupy.models import create
from unsloth_cupy.models.generation import decoding
from unsloth_cupy.serving import drawing
from unsloth_cupy.serving.options import Options

from .peers import SIZES

CONFIG = {**SIZES, "model_type": "mistral", "sliding_window": 6}
PROMPT = np.random.default_rng(0).integers(3, 97, (2, 7))


@pytest.fixture(scope="module")
def model():
    return create(CONFIG, seed=0)


def naive_greedy(model, row, new):
    """Feed everything anew for every token."""
    for _ in range(new):
        row = np.append(row, model.logits(row[None])[0, -1].argmax())
    return row


def test_cached_equals_uncached(model):
    made = model.generate(PROMPT, max_new_tokens=12, stop=())
    for row, prompt in zip(made, PROMPT, strict=True):
        np.testing.assert_array_equal(row, naive_greedy(model, prompt, 12))


@pytest.mark.parametrize("penalty", [None, 3.0])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, side, penalty):
    mask = np.ones((2, 7), bool)
    mask[1, slice(None, 3) if side == "left" else slice(-3, None)] = False
    options = {"max_new_tokens": 9, "stop": (), "repetition_penalty": penalty}
    made = model.generate(PROMPT, mask=mask, **options)
    alone = model.generate(PROMPT[1][mask[1]][None], **options)
    np.testing.assert_array_equal(made[1, 7:], alone[0, 4:])
    np.testing.assert_array_equal(made[:, :7], PROMPT)


def test_a_broken_weight_is_no_text():
    broken = create(CONFIG, seed=0)
    broken.parameters["model.norm.weight"][0] = np.nan
    with pytest.raises(NonFiniteError, match="the logits of new token 0 contain NaN"):
        broken.generate(PROMPT, max_new_tokens=3)


def test_draws_repeat_and_ignore_the_other_rows(model):
    options = {
        "max_new_tokens": 10, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02,
        "repetition_penalty": 1.2, "stop": (),
    }  # fmt: skip
    both = model.generate(PROMPT, seed=3, **options)
    np.testing.assert_array_equal(both, model.generate(PROMPT, seed=3, **options))
    np.testing.assert_array_equal(both[:1], model.generate(PROMPT[:1], seed=3, **options))
    changed = np.stack([PROMPT[0], PROMPT[0]])
    np.testing.assert_array_equal(both[0], model.generate(changed, seed=3, **options)[0])
    assert (both != model.generate(PROMPT, seed=4, **options)).any()


def test_draws_without_a_seed_differ(model):
    options = {"max_new_tokens": 12, "temperature": 2.0, "stop": ()}
    texts = [model.generate(PROMPT, **options) for _ in range(3)]
    assert len({each.tobytes() for each in texts}) == 3  # 97 tokens, 24 draws
    np.testing.assert_array_equal(texts[0][:, :7], PROMPT)
    draws = [[*model.stream(PROMPT, **options)] for _ in range(2)]
    assert np.array(draws[0]).tobytes() != np.array(draws[1]).tobytes()
    with pytest.raises(ConfigError, match="seed=-1 must be an integer of 0 or more, or None"):
        model.generate(PROMPT, seed=-1, **options)


def test_ranks_that_divide_a_model_need_a_seed():
    divided = create(CONFIG, seed=0)
    divided.division = object()
    with pytest.raises(ConfigError, match="ranks draw the same tokens; pass seed="):
        divided.generate(PROMPT, max_new_tokens=1, temperature=1.0)


def test_top_k_of_one_is_greedy(model):
    greedy = model.generate(PROMPT, max_new_tokens=8, stop=())
    colds = ({"temperature": 1e-4}, {"temperature": 1e-320})
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}, *colds):
        options = {"temperature": 2.0, "seed": 0} | cut
        made = model.generate(PROMPT, max_new_tokens=8, stop=(), **options)
        np.testing.assert_array_equal(made, greedy)


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 0}])
def test_an_option_that_greedy_choice_does_not_use_is_named(model, option):
    message = f"the most likely token; {next(iter(option))} must be None"
    with pytest.warns(UserWarning, match=message):
        made = model.generate(PROMPT, max_new_tokens=2, stop=(), **option)
    np.testing.assert_array_equal(made, model.generate(PROMPT, max_new_tokens=2, stop=()))


def test_tokens_beyond_the_positions_are_announced():
    model = create(CONFIG | {"max_position_embeddings": 10}, seed=0)
    padded = np.concatenate([PROMPT, PROMPT[:, :2]], axis=1)
    mask = np.broadcast_to(np.arange(9) < 7, padded.shape)
    model.generate(padded, mask=mask, max_new_tokens=3, stop=())  # padding takes no position
    with pytest.warns(UserWarning, match="7 prompt tokens and 4 new tokens exceed the 10 pos"):
        model.generate(PROMPT, max_new_tokens=4, stop=())


def test_draws_follow_the_distribution(model):
    """2,000 rows of one prompt: the shares of the first token are those of the softmax."""
    rows, temperature, top_k = 2000, 1.5, 5
    prompt = PROMPT[:1]
    made = model.generate(
        np.repeat(prompt, rows, axis=0),
        max_new_tokens=1,
        temperature=temperature,
        top_k=top_k,
        seed=0,
    )[:, -1]
    logits = model.logits(prompt)[0, -1].astype(np.float64) / temperature
    best = np.argsort(-logits)[:top_k]
    share = np.exp(logits[best]) / np.exp(logits[best]).sum()
    counted = np.array([(made == token).sum() for token in best])
    assert counted.sum() == rows
    deviation = np.sqrt(rows * share * (1 - share))
    assert (np.abs(counted - rows * share) < 5 * deviation).all()


def test_top_p_keeps_the_fewest_that_reach_it(model):
    logits = model.logits(PROMPT[:1])[0, -1].astype(np.float64)
    share = np.sort(np.exp(logits) / np.exp(logits).sum())[::-1]
    top_p = share[:2].sum() + share[2] / 2
    made = model.generate(
        np.repeat(PROMPT[:1], 500, axis=0), max_new_tokens=1, temperature=1.0, top_p=top_p, seed=1
    )[:, -1]
    assert set(made) == set(np.argsort(-logits)[:3])


CUTS = [{}, {"top_k": 5}, {"top_p": 0.4}, {"top_k": 9, "top_p": 0.9}, {"top_p": 1.0, "min_p": 0.3}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_of_part_of_a_vocabulary_and_of_all_rows_are_the_same(cut, monkeypatch):
    """Equal logits too, of which the lowest token comes first."""
    rng = np.random.default_rng(0)
    options = Options(1, temperature=0.8, seed=0, **cut)
    rows = [np.round(rng.standard_normal(97) * scale) for scale in (0.4, 1, 4) for _ in range(40)]
    sort = lambda row, count: np.argsort(-row, kind="stable")[:count]  # noqa: E731

    def draws():
        return [drawing.draw(row, options, 0.05 + place / 130) for place, row in enumerate(rows)]

    monkeypatch.setattr(drawing, "FEW", 3)
    actual = draws()
    monkeypatch.setattr(drawing, "likeliest", sort)
    monkeypatch.setattr(drawing, "FEW", 97)
    assert actual == draws()
    uniform = 0.05 + np.arange(len(rows))[:, None] / 130
    assert drawing.draw_all(np.array(rows), options, uniform).tolist() == actual


def test_stop_pads_and_ends_early(model):
    free = model.generate(PROMPT, max_new_tokens=12, stop=())
    first = int(free[0, 9])
    made = model.generate(PROMPT, max_new_tokens=12, stop=first)
    row = list(free[0, 7:])
    length = row.index(first) + 1
    np.testing.assert_array_equal(made[0, 7 : 7 + length], free[0, 7 : 7 + length])
    assert (made[0, 7 + length :] == SIZES["pad_token_id"]).all()
    alone = model.generate(PROMPT[:1], max_new_tokens=12, stop=[first])
    assert alone.shape == (1, 7 + length)
    later = model.generate(PROMPT[:1], max_new_tokens=12, min_new_tokens=12, stop=[first])
    assert later.shape == (1, 19)
    assert first not in later[0, 7:]


def test_streams_what_generate_returns(model):
    made = model.generate(PROMPT, max_new_tokens=5, stop=())
    steps = list(model.stream(PROMPT, max_new_tokens=5, stop=()))
    np.testing.assert_array_equal(np.stack(steps, axis=1), made[:, 7:])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_keeps_the_dtype_of_tokens(model, dtype):
    assert model.generate(PROMPT.astype(dtype), max_new_tokens=2).dtype == dtype


def test_no_new_tokens(model):
    np.testing.assert_array_equal(model.generate(PROMPT, max_new_tokens=0), PROMPT)


def test_a_users_cache_goes_on_where_it_stopped(model):
    """Chunks through a cache, masks of the chunk or of everything, equal one call."""
    mask = np.array([[1] * 7, [0, 0, 1, 1, 1, 1, 1]], np.int8)
    whole = model.logits(PROMPT, mask=mask)
    for full in (False, True):
        cache = KVCache(3, 2, 7, 2, 8, dtype="float32")
        parts = []
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            shown = mask[:, :stop] if full else mask[:, start:stop]
            parts.append(model.logits(PROMPT[:, start:stop], mask=shown, cache=cache))
        np.testing.assert_allclose(
            np.concatenate(parts, axis=1)[mask == 1], whole[mask == 1], atol=1e-5
        )
        with pytest.raises(RangeError, match="capacity=8"):
            model.logits(PROMPT[:, :1], cache=cache)
        assert cache.length == 7


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_a_cache_with_sinks_streams(kind, padded):
    """A token sees the sinks and its last six, in whatever chunks the tokens come."""
    model = create(SIZES | {"model_type": kind, "sliding_window": 8}, seed=0)
    tokens = np.random.default_rng(1).integers(3, 97, (2, 17))
    shown = np.ones((2, 17), np.int8)
    shown[1, :3] = not padded
    actual = []
    for cuts in ((0, 4, 5, 14, 16, 17), range(18)):
        cache = KVCache(3, 2, 8, 2, 8, dtype="float32", window=6, sinks=2)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            mask = shown[:, start:stop] if padded else None
            parts.append(model.logits(tokens[:, start:stop], mask=mask, cache=cache))
        actual.append(np.concatenate(parts, axis=1)[shown == 1])
        assert cache.length == 17
    np.testing.assert_allclose(*actual, atol=1e-5)


def test_a_cache_with_a_window_is_a_model_with_one(model):
    """The same weights: sliding windows of the config, or of the cache."""
    full = create(CONFIG | {"sliding_window": None}, seed=0)
    cache = KVCache(3, 2, 64, 2, 8, dtype="float32", window=6)
    parts = [full.logits(PROMPT[:, i : i + 1], cache=cache) for i in range(7)]
    whole = full.logits(PROMPT[:, ::-1], cache=cache)
    expected = model.logits(np.concatenate([PROMPT, PROMPT[:, ::-1]], axis=1))
    np.testing.assert_allclose(np.concatenate([*parts, whole], axis=1), expected, atol=1e-5)


def test_sliding_layers_take_bounded_memory(monkeypatch):
    """Two pages hold a window of six, however long the text: it may begin anywhere in a page."""
    made, pools = [], decoding.page_pools
    monkeypatch.setattr(decoding, "page_pools", lambda *a: made.append(pools(*a)) or made[-1])
    model = create(CONFIG | {"max_position_embeddings": 512}, seed=0)
    model.generate(PROMPT, max_new_tokens=200, stop=())
    assert [len(pool.uses) for pool in made[0].pools] == [2 * 2]
    assert made[0].first.free_pages != []


def test_pages_are_free_after_a_call(model, monkeypatch):
    """At once: no cycle of objects waits for Python's collector."""
    made, pools = [], decoding.page_pools

    def noted(*args):
        new = pools(*args)
        made.append(weakref.ref(new.first.keys))
        return new

    monkeypatch.setattr(decoding, "page_pools", noted)
    gc.disable()
    try:
        model.generate(PROMPT, max_new_tokens=4, stop=())
        next(model.stream(PROMPT, max_new_tokens=4, stop=()))
        model.rollouts([*PROMPT], samples=2, max_new_tokens=4, seed=0, stop=())
        assert [keys() for keys in made] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
        ({"temperature": -0.1, "seed": 0}, "temperature"),
        ({"temperature": float("nan"), "seed": 0}, "temperature"),
        ({"temperature": 1.0, "seed": -1}, "seed"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": "0.1"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"repetition_penalty": [1.2]}, "repetition_penalty"),
        ({"cache_dtype": "float16"}, "cache_dtype='float16' must be 'int8', or None"),
        ({"stop": 97}, "stop"),
        ({"stop": "</s>"}, "stop"),
        ({"mask": np.zeros((2, 7), bool)}, "no real token"),
    ],
)
def test_bad_options(model, options, message):
    with pytest.raises(ConfigError, match=message):
        model.generate(PROMPT, **({"max_new_tokens": 3} | options))


OPTIONS = [f.name for f in dataclasses.fields(Options) if f.name != "first"]  # of rollouts alone


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_no_such_option_is_shown_as_the_caller_wrote_it(model, name):
    options = {"max_new_tokens": 1, "temperature": 1.0, "seed": 0, name: object()}
    for call in ("generate", "stream"):
        with pytest.raises(ConfigError, match=rf"^{call}\b.*{name}"):
            getattr(model, call)(PROMPT, **options)


def test_the_first_of_two_wrong_options_is_named(model):
    wrong = dict.fromkeys(OPTIONS, object())
    with pytest.raises(ConfigError, match="max_new_tokens"):
        model.generate(PROMPT, **wrong)


@pytest.mark.parametrize(
    ("tokens", "mask", "error"),
    [
        (PROMPT.tolist(), None, DTypeError),
        (None, None, DTypeError),
        (3, None, DTypeError),
        (PROMPT, 1, DTypeError),
        (PROMPT.astype(np.float32), None, DTypeError),
        (PROMPT[0], None, ShapeError),
        (PROMPT + 90, None, RangeError),
        (-PROMPT, None, RangeError),
        (PROMPT, np.ones((2, 8), bool), ShapeError),
        (PROMPT, np.ones((2, 7), np.float32), DTypeError),
    ],
)
def test_bad_tokens(model, tokens, mask, error):
    with pytest.raises(error):
        model.logits(tokens, mask=mask)
    with pytest.raises(error):
        model.generate(tokens, mask=mask, max_new_tokens=1)


CALLS = {
    "logits": lambda model, tokens, mask: model.logits(tokens, mask=mask),
    "loss": lambda model, tokens, mask: model.loss(tokens, tokens, mask=mask),
    "step": lambda model, tokens, mask: model.loss_and_gradients(tokens, tokens, mask=mask)[0],
    "generate": lambda model, tokens, mask: model.generate(tokens, mask=mask, max_new_tokens=3),
    "stream": lambda model, tokens, mask: [*model.stream(tokens, mask=mask, max_new_tokens=2)][1],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_tokens_of_other_libraries(model, library, call):
    there = pytest.importorskip(library, reason="needs the extra `peers`")
    mask = np.ones((2, 7), np.int8)
    mask[1, :3] = 0
    tokens = PROMPT.astype(np.int32)
    made = CALLS[call](model, there.asarray(tokens), there.asarray(mask))
    assert type(made) is type(there.asarray(tokens))
    expected = CALLS[call](model, tokens, mask)
    np.testing.assert_array_equal(np.asarray(made), np.asarray(expected, made.__array__().dtype))
    for arrays in ((tokens, there.asarray(mask)), (there.asarray(tokens), mask)):
        if library == "jax.numpy":  # as its own functions, it takes integers of NumPy
            np.testing.assert_array_equal(np.asarray(CALLS[call](model, *arrays)), made)
            continue
        with pytest.raises(FrameworkError, match="bring these to one"):
            CALLS[call](model, *arrays)


def test_gradients_are_the_parameters_own(model):
    torch = pytest.importorskip("torch", reason="needs the extra `peers`")
    tokens = torch.asarray(PROMPT)
    _, gradients = model.loss_and_gradients(tokens, tokens)
    assert all(isinstance(gradient, np.ndarray) for gradient in gradients.values())
    with pytest.raises(DTypeError, match="tokens is float32; it must be int32 or int64"):
        model.logits(tokens.float())
    with pytest.raises(DTypeError, match="tokens is not an array but list"):
        model.generate(PROMPT.tolist(), max_new_tokens=1)


def test_bad_labels(model):
    with pytest.raises(ShapeError, match="labels"):
        model.loss(PROMPT, PROMPT[:, 1:])
    with pytest.raises(DTypeError, match="labels"):
        model.loss(PROMPT, PROMPT.astype(np.float32))
    with pytest.raises(RangeError):
        model.loss(PROMPT, PROMPT + 90)
    for labels in (None, 3, PROMPT.tolist()):
        with pytest.raises(DTypeError, match="labels is not an array"):
            model.loss(PROMPT, labels)


@pytest.mark.parametrize("option", ["checkpoint", "scaler", "count", "cache"])
@pytest.mark.parametrize("value", ["on", 0, [1]], ids=repr)
def test_bad_options_of_a_step(model, option, value):
    call = (
        model.logits if option == "cache" else functools.partial(model.loss_and_gradients, PROMPT)
    )
    with pytest.raises(ConfigError, match=option):
        call(PROMPT, **{option: value})


def test_no_rows_give_no_logits(model):
    assert model.logits(PROMPT[:0]).shape == (0, 7, 97)
    assert model.logits(PROMPT[:, :0]).shape == (2, 0, 97)


@pytest.mark.parametrize("kind", [bool, np.int8, np.int32, np.int64])
def test_masks_of_every_kind(model, kind):
    mask = np.ones((2, 7), kind)
    mask[1, :2] = 0
    expected = model.logits(PROMPT[1:, 2:])
    np.testing.assert_allclose(model.logits(PROMPT, mask=mask)[1:, 2:], expected, atol=1e-5)


def test_loss_where_no_label_counts(model):
    loss, gradients = model.loss_and_gradients(PROMPT, np.full_like(PROMPT, -100))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_on_a_gpu_are_those_of_the_host(cut):
    there = create(CONFIG, seed=0, device="cuda")
    options = {"samples": 4, "max_new_tokens": 6, "temperature": 0.8, "seed": 3, "stop": (), **cut}
    actual = there.rollouts([[5, 6, 7], [8]], **options)
    expected = create(CONFIG, seed=0).rollouts([[5, 6, 7], [8]], **options)
    np.testing.assert_array_equal(actual.tokens.get(), expected.tokens)
    np.testing.assert_allclose(actual.log_probs.get(), expected.log_probs, atol=1e-4)
