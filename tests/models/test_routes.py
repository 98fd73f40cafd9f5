"""Router replay: what sampled is what trains, and gradients flow through the given experts."""

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, Engine, KVCache, Var
from unsloth_cupy.errors import ConfigError, DTypeError, RangeError, ShapeError
from unsloth_cupy.models import create
from unsloth_cupy.models.configs.config import Experts
from unsloth_cupy.models.layers.experts_layer import routes_of
from unsloth_cupy.training.tape import Tape

from .peers import MIXTURES, SIZES

PROMPTS = [[5, 6, 7, 8, 9], [12], [13, 14]]
LABELS = ("qwen3_moe", "gpt_oss", "phimoe", "deepseek_v3", "glm4_moe")
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 12))


def model_of(label):
    return create(SIZES | MIXTURES[label], seed=0)


@pytest.mark.parametrize("label", LABELS)
def test_what_sampled_is_what_trains(label):
    """Other routers than those that drew change nothing but the weights of the experts."""
    model = model_of(label)
    drawn = model.rollouts(PROMPTS, samples=2, max_new_tokens=5, seed=1, stop=())
    experts = model.config.experts
    assert drawn.routes.shape == (*drawn.tokens.shape, sum(experts.sparse), experts.k)
    known = drawn.real.copy()
    known[:, -1] = False  # the last token did not go through the model
    assert ((drawn.routes >= 0) == known[..., None, None]).all()
    plain = {"tokens": drawn.tokens, "labels": drawn.tokens, "mask": drawn.real}
    for routes in (None, drawn.routes):
        actual = model.log_probs(**plain, routes=routes).log_probs
        np.testing.assert_allclose(
            np.where(drawn.mask, actual, 0), drawn.log_probs, atol=2e-5, rtol=0
        )
    loss, gradients = model.loss_and_gradients(**plain)
    again, replayed = model.loss_and_gradients(**plain, routes=drawn.routes)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        most = 1e-5 * np.abs(gradient).max() + 1e-9
        np.testing.assert_allclose(replayed[name], gradient, atol=most, rtol=0, err_msg=name)
    for name, weight in model.parameters.items():
        if name.endswith("gate.weight") or name.endswith("router.weight"):
            noise = np.random.default_rng(1).normal(0, 3, weight.shape)
            model.parameters[name] = weight + noise.astype(weight.dtype)
    free, held = [], []
    for routes, seen in ((None, free), (drawn.routes, held)):
        model.hidden(model.parameters, drawn.tokens, mask=drawn.real, routes=routes, routers=seen)
    chosen = [np.stack([each.experts for each in seen], axis=2) for seen in (free, held)]
    assert (np.sort(chosen[0]) != np.sort(chosen[1])).any()
    np.testing.assert_array_equal(chosen[1][known], drawn.routes[known])
    np.testing.assert_array_equal(chosen[1][~drawn.real], chosen[0][~drawn.real])


OPTIONS = [
    {"scores": "softmax", "normalize": True},
    {"scores": "softmax", "normalize": False, "scale": 2.5},
    {"scores": "softmax_of_k"},
    {"scores": "sigmoid", "normalize": True, "groups": 2, "top_groups": 1, "scale": 2.5},
    {"scores": "sigmoid", "normalize": False},
    {"scores": "sqrt_softplus", "normalize": True},
    {"scores": "softmax", "jitter": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_given_experts_are_those_of_finite_differences(options):
    rng = np.random.default_rng(2)
    experts = Experts(6, 2, 4, (True,), "swiglu", **options)
    logits, slopes = rng.normal(size=(1, 5, 6)), rng.normal(size=(1, 5, 2))
    given = np.stack([rng.permutation(6)[:2] for _ in range(5)])[None]  # not the best
    given[0, 4] = -1
    correction = rng.normal(size=6)

    def value(logits):
        return (routes_of(experts, logits, correction, given).weights * slopes).sum()

    tape = Tape()
    var = tape.watch(logits)
    routes = routes_of(experts, var, correction, given)
    assert type(routes.weights) is Var
    np.testing.assert_array_equal(routes.experts[0, :4], given[0, :4])
    own = routes_of(experts, logits, correction)
    np.testing.assert_array_equal(routes.experts[0, 4], own.experts[0, 4])
    np.testing.assert_allclose(routes.weights.value[0, 4], own.weights[0, 4], rtol=1e-12)
    actual = tape.gradients((routes.weights * slopes).sum(), [var])[0]
    expected = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-6
        expected[place] = (value(logits + step) - value(logits - step)) / 2e-6
    np.testing.assert_allclose(actual, expected, atol=1e-8)
    assert np.abs(actual).max() > 1e-3


def test_given_experts_of_packed_texts_in_checkpoints_and_with_a_cache():
    model = model_of("qwen3_moe")
    experts = model.config.experts
    rng = np.random.default_rng(3)
    shape = *TOKENS.shape, sum(experts.sparse), experts.count
    routes = rng.permuted(np.broadcast_to(np.arange(experts.count), shape), axis=-1)
    routes = routes[..., : experts.k].astype(np.int32)
    whole = model.logits(TOKENS, routes=routes)
    assert np.abs(whole - model.logits(TOKENS)).max() > 1e-3
    packed = model.logits(TOKENS, offsets=np.array([0, 12, 24]), routes=routes)
    np.testing.assert_allclose(packed, whole, atol=1e-5)
    plain = model.loss_and_gradients(TOKENS, TOKENS, routes=routes)
    parts = model.loss_and_gradients(TOKENS, TOKENS, routes=routes, checkpoint=CheckpointConfig())
    assert plain[0] == parts[0] == model.loss(TOKENS, TOKENS, routes=routes)
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(parts[1][name], gradient, err_msg=name)
    config = model.config
    cache = KVCache(config.layers, 2, 12, config.kv_heads, config.dim, dtype="float32")
    halves = [
        model.logits(TOKENS[:, part], cache=cache, routes=routes[:, part])
        for part in (slice(7), slice(7, 12))
    ]
    np.testing.assert_allclose(np.concatenate(halves, axis=1), whole, atol=1e-5)


def test_routes_of_torch():
    torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
    model = model_of("qwen3_moe")
    experts = model.config.experts
    routes = np.zeros((*TOKENS.shape, sum(experts.sparse), experts.k), np.int32)
    routes[..., 1] = 1
    expected = model.log_probs(TOKENS, TOKENS, routes=routes).log_probs
    tokens = torch.from_numpy(TOKENS)
    actual = model.log_probs(tokens, tokens, routes=torch.from_numpy(routes)).log_probs
    np.testing.assert_array_equal(actual.numpy(), expected)


def test_routes_that_do_not_fit_are_refused():
    model = model_of("qwen3_moe")
    experts = model.config.experts
    fitting = np.zeros((*TOKENS.shape, sum(experts.sparse), experts.k), np.int64)
    cases = [
        (fitting[:, :-1], ShapeError, "layers with experts, k"),
        (fitting.astype(np.float32), DTypeError, "must be integers"),
        (fitting + experts.count, RangeError, "contain expert"),
    ]
    for routes, error, message in cases:
        for call in (model.loss, model.log_probs, model.loss_and_gradients):
            with pytest.raises(error, match=message):
                call(TOKENS, TOKENS, routes=routes)
    dense = create({**SIZES, "model_type": "llama"}, seed=0)
    with pytest.raises(ConfigError, match="a llama has no experts; leave routes out"):
        dense.logits(TOKENS, routes=fitting)
    assert dense.rollouts(PROMPTS, samples=1, max_new_tokens=1, seed=0).routes is None


@pytest.mark.parametrize("label", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("pages", [60, 14], ids=["all pages", "few pages"])
def test_an_engine_has_experts_of_shared_pages(label, pages):
    """Rows that begin with pages of others have their experts, and so do rows set back."""
    model = model_of(label)
    begin = TOKENS[0].tolist()
    options = {"max_new_tokens": 14, "temperature": 1.0, "stop": ()}
    with Engine(model, rows=4, pages=pages, page=4, chunk=5, routes=True) as engine:
        requests = []
        for seed, end in enumerate(([], [5], [6, 7, 8], [6, 7, 8, 9, 10])):
            requests.append(engine.submit([*begin, *end], samples=2, seed=seed, **options))
            for _ in range(4):
                engine.step()
        assert engine.computed_rows < engine.kept_tokens + sum(len(r.prompt) for r in requests)
        engine.run()
    for request in requests:
        for sample in request.samples:
            whole, seen = np.array([[*request.prompt, *sample.tokens[:-1]]]), []
            model.hidden(model.parameters, whole, routers=seen)
            expected = np.stack([each.experts[0] for each in seen], axis=1)
            np.testing.assert_array_equal(np.stack(sample.routes), expected)
    with Engine(model, rows=4, pages=60, page=4) as engine:
        request = engine.submit(begin, **options)
        engine.run()
    assert request.samples[0].routes == []


def test_routes_begin_again_where_all_angles_change():
    """From some length on longrope turns all positions otherwise: rows go through it anew."""
    model = model_of("phimoe longrope")
    original = next(rope.original for rope in model.config.ropes.values())
    prompt = [*range(3, 3 + original - 2)]
    drawn = model.rollouts([prompt, prompt[1:]], samples=2, max_new_tokens=5, seed=0, stop=())
    seen = []
    whole, real = drawn.tokens[:, :-1], drawn.real[:, :-1]
    model.hidden(model.parameters, whole, mask=real, routers=seen)
    expected = np.stack([each.experts for each in seen], axis=2)
    np.testing.assert_array_equal(drawn.routes[:, :-1][real], expected[real])
    assert (drawn.routes[:, -1] == -1).all()
    now = model.log_probs(drawn.tokens, drawn.tokens, mask=drawn.real).log_probs
    late = drawn.mask & (drawn.real.cumsum(axis=1) > original)  # drawn after that length
    assert late.any()
    np.testing.assert_allclose(drawn.log_probs[late], now[late], atol=2e-5, rtol=0)
