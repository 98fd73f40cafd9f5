"""Rollouts: the tokens of generate, with the log-probabilities that training computes."""

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create
from unsloth_cupy.models.generation.decoding import Decoding

from .peers import CONFIGS, MIXTURES, SIZES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
OPTIONS = {"samples": 3, "max_new_tokens": 6, "seed": 4}


def padded():
    """Return the prompts of all rows, padded on the left, and where they are real."""
    tokens = np.array([[0] * (7 - len(row)) + row for row in PROMPTS for _ in range(3)])
    return tokens, tokens > 0


@pytest.fixture(scope="module", params=["llama", "windows"])
def model(request):
    kind = {"model_type": "llama"}
    if request.param == "windows":
        kind = {"model_type": "mistral", "sliding_window": 4}
    return create({**SIZES, **kind}, seed=0)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_tokens_are_those_of_generate(model, dtype, monkeypatch):
    """Each prompt goes through the model once, in one call for all."""
    if dtype == "int8":
        model = create({**SIZES, "model_type": "mistral", "sliding_window": 4}, seed=0)
    options = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 40, "cache_dtype": dtype}
    tokens, real = padded()
    expected = model.generate(tokens, mask=real, seed=4, stop=(), **options)
    seen, call = [], Decoding.__call__

    def noted(own, work, *more):
        seen.append([len(each.tokens) for each in work])
        return call(own, work, *more)

    monkeypatch.setattr(Decoding, "__call__", noted)
    actual = model.rollouts(PROMPTS, samples=3, seed=4, stop=(), **options)
    np.testing.assert_array_equal(actual.tokens, expected)
    assert sorted(seen[0]) == [1, 3, 7]
    assert seen[1:] == [[1] * 9] * 5


def test_parts_of_the_prompts_draw_what_all_draw(model):
    whole = model.rollouts(PROMPTS, **OPTIONS, stop=()).completions()
    samples = len(whole) // len(PROMPTS)
    parts = [
        model.rollouts(PROMPTS[n : n + 1], **OPTIONS, stop=(), first=n * samples).completions()
        for n in range(len(PROMPTS))
    ]
    assert [each for part in parts for each in part] == whole
    assert model.rollouts(PROMPTS[1:], **OPTIONS, stop=()).completions() != whole[samples:]


def test_log_probs_are_those_of_training(model):
    actual = model.rollouts(PROMPTS, **OPTIONS, temperature=0.7, top_p=0.9, stop=())
    of_training = model.log_probs(actual.tokens, actual.tokens, mask=actual.real, temperature=0.7)
    expected = np.where(actual.mask, of_training.log_probs, 0)
    np.testing.assert_allclose(actual.log_probs, expected, atol=1e-5)
    assert actual.log_probs.dtype == np.float32
    np.testing.assert_array_equal(actual.mask.sum(axis=1), 6)
    np.testing.assert_array_equal(actual.real[:, :7], padded()[1])


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "llama4_text"])
def test_prompts_of_many_pages(kind, dtype):
    """Those of a window or of chunks are fewer than a prompt's, and codes need them all."""
    family = {"sliding_window": 6, **(CONFIGS | MIXTURES).get(kind, {}), "model_type": kind}
    model = create({**SIZES, **family, "max_position_embeddings": 512}, seed=0)
    prompts = [np.random.default_rng(n).integers(3, 97, n) for n in (200, 64, 3)]
    options = {"samples": 2, "max_new_tokens": 70, "seed": 0, "stop": ()}
    actual = model.rollouts(prompts, **options, cache_dtype=dtype)
    expected = model.log_probs(actual.tokens, actual.tokens, mask=actual.real).log_probs
    most = 2e-5 if dtype is None else 0.5  # codes round keys and values
    np.testing.assert_allclose(np.where(actual.mask, expected, 0), actual.log_probs, atol=most)


def test_a_row_ends_with_its_end_token(model):
    free = model.rollouts(PROMPTS, **OPTIONS, stop=())
    ends = [int(free.tokens[0, 9]), int(free.tokens[4, 7])]
    actual = model.rollouts(PROMPTS, **OPTIONS, stop=ends)
    rows = zip(actual.completions(), free.completions(), strict=True)
    for place, (row, whole) in enumerate(rows):
        length = next((n + 1 for n, token in enumerate(whole) if token in ends), len(whole))
        assert row == whole[:length]
        assert actual.mask[place].sum() == length
        assert not actual.log_probs[place][~actual.mask[place]].any()
        assert actual.real[place].sum() == len(PROMPTS[place // 3]) + length
        assert not actual.tokens[place][~actual.real[place]].any()
    assert len(actual.completions()[4]) == 1
    assert all(type(token) is int for token in actual.completions()[0])


@pytest.mark.parametrize(
    ("prompts", "options", "problem"),
    [
        ([], {}, "prompts is empty"),
        ([[3], []], {}, "prompt 1 is float64 (0,)"),
        ([3, 4], {}, "prompt 0 is int64 ()"),
        ([[3.5]], {}, "prompt 0 is float64"),
        ([[3], [97]], {}, "prompt 1 has a token outside the vocabulary of 97"),
        ([[3], [-1]], {}, "prompt 1 has a token outside"),
        ([[3]], {"samples": 0}, "samples=0 must be 1 or more"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        ([[3]], {"temperature": 0}, "temperature=0 does not sample"),
        ([[3]], {"seed": None}, "seed=None"),
        ([[3]], {"first": -1}, "first=-1 must be 0 or more"),
        ([[3]], {"stop": b"a"}, "rollouts: stop=b'a' must be a token"),
    ],
    ids=str,
)
def test_bad_input_is_one_error(model, prompts, options, problem):
    with pytest.raises(ConfigError) as caught:
        model.rollouts(prompts, **{**OPTIONS, **options})
    assert problem in str(caught.value)
