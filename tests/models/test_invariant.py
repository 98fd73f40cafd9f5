"""On-policy to the bit: what is computed of a text does not depend on what is beside it."""

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, KVCache, PagedKVCache, attention, linear, losses
from unsloth_cupy.core.replay import fixed_order
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, load
from unsloth_cupy.models.generation.decoding import Decoding
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.common import fixed_order as products
from unsloth_cupy.serving.work import Work

from ..harness.parity import emulator
from ..machines.stand_in import gpu
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES

RNG = np.random.default_rng(0)
PROMPTS = [[int(n) for n in RNG.integers(3, 97, length)] for length in (40, 1, 7)]
LLAMA = SIZES | {"model_type": "llama", "max_position_embeddings": 256, "hidden_size": 48}
OPTIONS = {"samples": 2, "max_new_tokens": 30, "seed": 3, "stop": ()}
FAMILIES = CONFIGS | RELATIVES | MIXTURES
PARSED = {label: parse(SIZES | config) for label, config in FAMILIES.items()}
REFUSED = {  # families that no order is known for
    label
    for label, config in PARSED.items()
    if config.recurrent
    or config.chunk
    or config.indexer
    or any(rope.original for rope in config.ropes.values())
}
SEVERAL = {  # families with heads of several sizes, which a cache pads
    label
    for label, config in PARSED.items()
    if len({config.heads_of(layer) for layer in range(config.layers)}) > 1
}


def rows_of(drawn):
    """Return the texts of rollouts, and for each token after the first its log-probability, NaN."""
    known = np.where(drawn.mask, drawn.log_probs, np.nan)
    texts = [row[real] for row, real in zip(drawn.tokens, drawn.real, strict=True)]
    return texts, [row[real][:-1] for row, real in zip(known, drawn.real, strict=True)]


def assert_equal(actual, expected):
    """Assert that log-probabilities are equal to the bit where the expected ones are known."""
    known = ~np.isnan(expected)
    assert known.any()
    np.testing.assert_array_equal(np.asarray(actual)[known], expected[known])


def in_layouts(model, texts, temperature=1.0):
    """Yield log-probabilities of each text by every way in which training can compute them."""
    options = {"temperature": temperature}
    longest = max(map(len, texts))
    for left in (True, False):
        tokens = np.zeros((len(texts), longest + 3), np.int64)
        mask = np.zeros(tokens.shape, bool)
        for row, text in enumerate(texts):
            part = np.s_[-len(text) :] if left else np.s_[: len(text)]
            tokens[row, part], mask[row, part] = text, True
        found = model.log_probs(tokens, tokens, mask=mask, **options).log_probs
        yield [row[own][:-1] for row, own in zip(found, mask, strict=True)]
    packed = np.concatenate(texts)[None]
    offsets = np.cumsum([0, *map(len, texts)])
    found = model.log_probs(packed, packed, offsets=offsets, **options).log_probs[0]
    yield [found[a : b - 1] for a, b in pairwise(offsets)]
    yield [model.log_probs(t[None], t[None], **options).log_probs[0, :-1] for t in texts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_training_has_the_bits_of_sampling(dtype):
    """Padded left and right, packed or alone; unequal prompts, in any batch, any size of pages."""
    model = create(LLAMA, seed=0, dtype=dtype)
    drawn = model.rollouts(PROMPTS, **OPTIONS, temperature=0.7, top_p=0.9, invariant=True)
    texts, expected = rows_of(drawn)
    model.invariant = True
    for found in in_layouts(model, texts, 0.7):
        for actual, own in zip(found, expected, strict=True):
            assert_equal(actual, own)
    for page in (1, 7, 64):
        sizes = model.config.layers, 400, page, model.config.kv_heads, model.config.dim
        cache = PagedKVCache(*sizes, dtype=dtype)
        again = model.rollouts(PROMPTS, **OPTIONS, temperature=0.7, top_p=0.9, cache=cache)
        for one, other in zip(again, drawn, strict=True):
            np.testing.assert_array_equal(one, other)
        assert len(cache.free_pages) == 400
    others = model.in_order(False).log_probs(drawn.tokens, drawn.tokens, mask=drawn.real)
    assert (others.log_probs != drawn.log_probs)[drawn.mask].any()  # else the test shows nothing


@pytest.mark.parametrize("paged", [False, True])
def test_one_token_at_a_time(paged):
    """A cache that takes tokens one by one, or some at once, gives the logits of the whole text."""
    model = create(LLAMA, seed=0, invariant=True)
    text = RNG.integers(3, 97, (1, 150))
    whole = model.logits(text)
    sizes = model.config.layers, model.config.kv_heads, model.config.dim
    for step in (1, 13, 64):
        options = {}
        if paged:
            options["cache"] = PagedKVCache(sizes[0], 40, 5, *sizes[1:], dtype="float32")
            options["sequences"] = [options["cache"].allocate(0)]
        else:
            options["cache"] = KVCache(sizes[0], 1, 200, *sizes[1:], dtype="float32")
        parts = [model.logits(text[:, n : n + step], **options) for n in range(0, 150, step)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted(FAMILIES.keys() - REFUSED - SEVERAL))
def test_every_family_with_an_order(label):
    model = create(SIZES | FAMILIES[label], seed=0, invariant=True)
    drawn = model.rollouts(PROMPTS[1:], samples=2, max_new_tokens=12, seed=0, stop=())
    actual = model.log_probs(drawn.tokens, drawn.tokens, mask=drawn.real).log_probs
    np.testing.assert_array_equal(actual[drawn.mask], drawn.log_probs[drawn.mask])


@pytest.mark.parametrize("how", ["adapter", "nf4", "int8", "chunked", "classes"])
def test_kinds_of_weights(how, tmp_path):
    model = create(LLAMA, seed=0)
    if how in ("nf4", "int8"):
        model.save(tmp_path)
        model = load(tmp_path, quantize=how, invariant=True)
    model.invariant, model.chunked_mlp = True, how == "chunked"
    if how == "adapter":
        model.add_adapter(4, seed=0)
        for array in model.adapter.parameters.values():
            array[...] += 0.1 * RNG.standard_normal(array.shape, np.float32)
    drawn = model.rollouts(PROMPTS, **OPTIONS)
    texts, expected = rows_of(drawn)
    for found in in_layouts(model, texts):
        for actual, own in zip(found, expected, strict=True):
            assert_equal(actual, own)


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_logits_of_classifiers(head, tmp_path):
    create(LLAMA, seed=0).save(tmp_path)
    model = load(tmp_path, head=head, labels=3, invariant=True)
    tokens = RNG.integers(3, 97, (5, 12))
    together = model.logits(tokens)
    for row in range(5):
        np.testing.assert_array_equal(model.logits(tokens[row : row + 1])[0], together[row])


@pytest.mark.parametrize("checkpoint", [None, CheckpointConfig()])
def test_the_ratio_of_a_step_is_one(checkpoint):
    """On a tape too: rho is exactly 1, so no correction changes a bit of loss or gradients."""
    model = create(LLAMA, seed=0, invariant=True)
    drawn = model.rollouts(PROMPTS, **OPTIONS)
    gains = RNG.standard_normal(len(drawn.tokens)).astype(np.float32)
    seen = []

    def loss(model, old, **options):
        now = model.log_probs(drawn.tokens, drawn.tokens, mask=drawn.real).log_probs
        seen.append(np.exp(now.value - drawn.log_probs)[drawn.mask])
        return losses.policy(now, drawn.mask, gains, old=old, **options)

    def step(old, **options):
        return model.value_and_gradients(
            lambda model: loss(model, old, **options), checkpoint=checkpoint
        )

    value, gradients = step(None)
    weights = losses.sampler_ratio(drawn.log_probs, drawn.log_probs, drawn.mask)
    for corrected in (step(drawn.log_probs), step(drawn.log_probs, weights=weights)):
        assert corrected[0] == value
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(corrected[1][name], gradient, err_msg=name)
    assert all((ratio == 1).all() and ratio.size == 6 * 30 for ratio in seen)


def test_backward_is_near_that_of_a_free_order():
    """Gradients are those of the usual products, apart from rounding."""
    model = create(LLAMA, seed=0)
    tokens = RNG.integers(3, 97, (3, 20))
    mask = np.arange(20) >= np.array([[0], [5], [11]])

    def gradients(invariant):
        def mean(model):
            found = model.log_probs(tokens, tokens, mask=mask, invariant=invariant)
            return losses.nll(found.log_probs, mask & (np.arange(20) < 19))

        return model.value_and_gradients(mean)

    (loss, free), (own, fixed) = gradients(False), gradients(True)
    assert abs(own - loss) < 1e-5
    for name, gradient in free.items():
        np.testing.assert_allclose(fixed[name], gradient, atol=2e-5 * np.abs(gradient).max())


def test_greedy_tokens_do_not_depend_on_the_batch():
    model = create(LLAMA, seed=0)
    tokens = np.array([[0] * (40 - len(row)) + row for row in PROMPTS])
    options = {"max_new_tokens": 20, "stop": (), "invariant": True}
    together = model.generate(tokens, mask=tokens > 0, **options)[:, 40:]
    alone = [model.generate(np.array([row]), **options)[0, len(row) :] for row in PROMPTS]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.slow
def test_threads_change_no_bit():
    code = (
        "import numpy as np, hashlib\n"
        "from unsloth_cupy.models import create\n"
        f"model = create({LLAMA}, seed=0, invariant=True)\n"
        f"drawn = model.rollouts({PROMPTS}, samples=3, max_new_tokens=20, seed=0, stop=())\n"
        "print(hashlib.sha256(drawn.log_probs.tobytes()).hexdigest())\n"
    )
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    actual = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **dict.fromkeys(names, count)},
            capture_output=True, text=True, check=True,
        ).stdout
        for count in "124"
    }  # fmt: skip
    assert len(actual) == 1


# ---- what is refused ----------------------------------------------------------------------------
@pytest.mark.parametrize("label", sorted(SEVERAL))
def test_heads_of_several_sizes_have_an_order_without_a_cache(label):
    model = create(SIZES | FAMILIES[label], seed=0, invariant=True)
    texts = [np.array(prompt) for prompt in PROMPTS if len(prompt) > 1]
    first, *others = in_layouts(model, texts, 1.0)
    for found in others:
        for actual, expected in zip(found, first, strict=True):
            assert_equal(actual, expected)
    with pytest.raises(ConfigError, match=r"a cache pads the heads of a .*; leave invariant=True"):
        model.rollouts(PROMPTS, **OPTIONS)


@pytest.mark.parametrize("label", sorted(REFUSED))
def test_families_without_an_order(label):
    model = create(SIZES | FAMILIES[label], seed=0, invariant=True)
    with pytest.raises(ConfigError, match=r"^invariant: .*; leave invariant=True out$"):
        model.log_probs(np.array([[5, 6]]), np.array([[5, 6]]))
    with pytest.raises(ConfigError, match=r"^invariant: "):
        model.rollouts(PROMPTS, **OPTIONS)


def test_caches_that_hold_other_keys():
    model = create(LLAMA, seed=0, invariant=True)
    tokens, sizes = np.array([[5, 6, 7]]), (3, 1, 8, 2, model.config.dim)
    for cache in (KVCache(*sizes, dtype="int8"), KVCache(*sizes, dtype="float32", window=4)):
        with pytest.raises(ConfigError, match=r"^invariant: .* leave invariant=True out"):
            model.logits(tokens, cache=cache)
    cache = KVCache(*sizes, dtype="float32")
    with pytest.raises(ConfigError, match="padding moves keys"):
        model.logits(tokens, cache=cache, mask=np.array([[0, 1, 1]]))
    assert not cache.length
    paged = PagedKVCache(3, 4, 4, 2, model.config.dim, dtype="int8")
    with pytest.raises(ConfigError, match="int8 codes"):
        model.logits(tokens, cache=paged, sequences=[paged.allocate(4)])
    with pytest.raises(ConfigError, match="int8 codes"):
        model.rollouts(PROMPTS, **OPTIONS, cache_dtype="int8")
    with pytest.raises(ConfigError, match="invariant=1: pass True or False"):
        model.log_probs(tokens, tokens, invariant=1)


@pytest.mark.parametrize("fault", ["rows beside", "place in the tile", "columns"])
def test_a_blas_without_the_order_is_refused(fault, monkeypatch):
    """One that adds in another order for some rows, or for some numbers of columns."""
    times = np.matmul

    def other(a, b):
        y = times(a, b)
        if fault == "columns":
            return y if b.shape[-1] == 64 else np.nextafter(y, 2 * y)
        zeros = (a == 0).all(axis=-1).sum(axis=-1)[..., None, None]
        wrong = zeros > 0 if fault == "rows beside" else np.arange(8)[:, None] == 7
        return np.where(wrong, np.nextafter(y, 2 * y), y)

    products.check_form.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(products.np, "matmul", other)
        with pytest.raises(ConfigError, match="the BLAS of this NumPy does not keep the order"):
            products.check_form(32, 64, "F", np.dtype("float32"))
    products.check_form(32, 64, "F", np.dtype("float32"))


# ---- kernels ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["llama", "mistral window", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_emulated_kernels(kind, dtype):
    """One token over pages, padded rows and packed texts: the same bits from the kernels."""
    more = {"sliding_window": 4, "model_type": "mistral"} if "window" in kind else {}
    more = MIXTURES["mixtral"] if kind == "mixtral" else more
    config = SIZES | {"model_type": "llama"} | more | {"num_hidden_layers": 1}
    with emulator(check=False):
        model = create(config, seed=0, dtype=dtype, invariant=True)
        drawn = model.rollouts([[5, 6, 7, 8], [9]], samples=2, max_new_tokens=3, seed=1, stop=())
        texts, expected = rows_of(drawn)
        for found in in_layouts(model, texts):
            for actual, own in zip(found, expected, strict=True):
                assert_equal(actual, own)


@pytest.mark.parametrize("left", [None, 4400])
def test_parts_of_many_keys_are_merged_in_one_order(left):
    """A query alone sees other first and last parts than a block that has it beside others."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 4672, 1, 8)).astype(np.float32) for _ in range(3))
    k *= np.linspace(1, 4, 4672, dtype=np.float32)[:, None, None]  # later parts have larger scores
    window = None if left is None else (left, 0)  # that of some of the queries begins at key 256
    with emulator(check=False), fixed_order():
        together = attention(q[:, -20:], k, v, causal=True, window=window)
        for place in (4652, 4655, 4656, 4657, 4671):
            seen = slice(None, place + 1)
            own = q[:, place : place + 1], k[:, seen], v[:, seen]
            alone = attention(*own, causal=True, window=window)
            assert_equal(alone[:, 0], together[:, place - 4652])


SUMS = {  # kernels that add up
    *("attention_decode", "grouped_linear", "grouped_float32", "log_probs_forward", "norm_forward"),
}
WHERE = ("PAGED", "PAGE", "LENGTHS", "STARTS", "using")  # where keys are, and dtypes of indices


def tilings(machine, call):
    """Return what is compiled of the kernels that add up; assert that cuBLAS computes nothing."""
    del machine.launches[:], machine.products[:]
    call()
    assert not machine.products
    found = {}
    for launch in machine.launches:
        if launch.kernel in SUMS:
            lines = launch.source.splitlines()
            kept = [line for line in lines if not any(word in line for word in WHERE)]
            found.setdefault(launch.kernel, set()).add("\n".join(kept))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_do_not_depend_on_the_batch(dtype):
    """On a GPU one kernel with one tiling adds for 1 row or 300, padded, packed or in pages."""
    with gpu("90", devices=1) as machine:
        machine.strict = False
        config = LLAMA | {"hidden_size": 64}  # heads of 16
        model = create(config, seed=0, dtype=dtype, device="cuda", invariant=True)
        actual = []
        for shape in ((1, 1), (1, 300), (5, 20)):
            tokens = machine.place(np.full(shape, 5))
            actual.append(tilings(machine, lambda t=tokens: model.log_probs(t, t)))
        mask = machine.place(np.arange(20) < np.array([[3], [20], [7], [1], [2]]))
        actual.append(tilings(machine, lambda: model.log_probs(tokens, tokens, mask=mask)))
        step = Decoding(model, rows=5, pages=40, page=5)
        rows = [step.cache.begin([]) for _ in range(5)]
        steps = [
            tilings(
                machine,
                lambda n=new: step([Work(r, np.zeros(n, int), 20, 0, "") for r in rows]),
            )
            for new in (20, 1)
        ]
    assert actual[0].keys() >= {"attention_decode", "grouped_float32", "log_probs_forward"}
    for each in actual:
        assert each == actual[0]
    for step in steps:
        assert step["attention_decode"] == actual[0]["attention_decode"]
        assert all(step[name] <= actual[0][name] for name in step)


def test_what_no_kernel_keeps_is_refused():
    with gpu("90") as machine, fixed_order():
        heads = machine.array((1, 4, 2, 20), "float32")
        with pytest.raises(ConfigError, match="no kernel supports heads of 20"):
            attention(heads, heads, heads)
        x = machine.array((2, 8), "float64")
        with pytest.raises(ConfigError, match="no kernel multiplies float64"):
            linear(x, x)
