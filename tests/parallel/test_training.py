"""Training on many devices, in one process: all checks, and what is refused."""

import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, Tape, linear
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.finetune.run.executor import beginning_at, noisy
from unsloth_cupy.models import create
from unsloth_cupy.models.objective import next_token
from unsloth_cupy.parallel import DataParallel, SingleCommunicator, Zero1, Zero3, grid
from unsloth_cupy.parallel.communicator import part
from unsloth_cupy.parallel.zero import divided
from unsloth_cupy.training.tape import take_gradients

from ..models.peers import MIXTURES, SIZES
from .ranks import close
from .threads import by_threads
from .training import all_checks, new_model

COMM = SingleCommunicator()


@pytest.mark.slow
def test_a_process_alone_has_it() -> None:
    all_checks(COMM)


def test_gradients_are_told_when_nothing_is_added_any_more() -> None:
    """The last layer's first; one that is used twice after its first use; one that is not, too."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((3, 3)).astype(np.float32) for n in ("a", "b", "c", "d")}
    x = rng.standard_normal((2, 3)).astype(np.float32)
    heard: list[tuple[str, np.ndarray]] = []

    def run() -> list[np.ndarray]:
        tape = Tape()
        a, b, c, d = (tape.watch(array) for array in weights.values())
        y = linear(linear(linear(linear(x, a), b), a), c)
        return tape.gradients(y, [a, b, c, d], np.ones_like(y.value))

    expected = run()
    names = {id(array): name for name, array in weights.items()}
    token = take_gradients.set(lambda value, grad: heard.append((names[id(value)], grad.copy())))
    try:
        assert run() == [None] * 4
    finally:
        take_gradients.reset(token)
    order = [name for name, _ in heard]
    assert order.index("c") < order.index("b") < order.index("a")
    for name, one in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(dict(heard)[name], one)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_pieces_cover_all_and_are_not_small(ranks: int) -> None:
    sizes = {"a": 100_000, "b": 0, "c": 17, "d": 4096 * 3 + 1, "e": 50_000}
    pieces = divided(sizes, ranks)
    for name, size in sizes.items():
        parts = [piece.where for rank in pieces for piece in rank if piece.name == name]
        assert [i for each in parts for i in range(each.start, each.stop)] == [*range(size)]
        assert all(each.stop - each.start >= min(size, 4096) for each in parts)
        assert all(each.start % 4096 == 0 for each in parts)
    most = max(sum(p.where.stop - p.where.start for p in rank) for rank in pieces)
    assert most <= sum(sizes.values()) / ranks + 2 * 4096


def test_blocks_are_whole_one_at_a_time() -> None:
    """On the way forward and back: when one is gathered, no other is held, but what is outside."""
    model = new_model("dense")
    zero = Zero3(model, COMM)
    held: list[weakref.ref[np.ndarray]] = []
    seen: list[str] = []

    def gather(parameters: dict[str, Any]) -> dict[str, Any]:
        assert not [ref for ref in held if ref() is not None]
        whole = zero.gather(parameters)
        name = next(iter(parameters))
        seen.append(name.split(".")[2] if ".layers." in name else "outside")
        values = (getattr(value, "value", value) for value in whole.values())
        held.extend(map(weakref.ref, values if ".layers." in name else ()))
        return whole

    model.gather = gather
    tokens = np.arange(12).reshape(2, 6)
    zero.loss_and_gradients(tokens, tokens)
    assert seen == ["outside", "0", "1", "1", "0"]


def test_what_makes_no_sense_is_refused() -> None:
    model = new_model("dense")
    Zero3(model, COMM)
    with pytest.raises(ConfigError, match="divides this model already"):
        Zero3(model, COMM)
    with pytest.raises(ConfigError, match="is not a size"):
        DataParallel(model, COMM, bucket_bytes=0)
    square = np.ones((4, 4), np.float32)
    with pytest.raises(ConfigError, match="is not in C order"):
        Zero1(AdamW({"w": square.T}), COMM)
    zero = Zero1(AdamW({"w": square}), COMM)
    with pytest.raises(ConfigError, match=r"names differ in \['v', 'w'\]"):
        zero.step({"v": square})
    with pytest.raises(ShapeError, match=r"has shape \(2, 8\); it must be \(4, 4\)"):
        zero.step({"w": square.reshape(2, 8)})
    with pytest.raises(ShapeError, match=r"Zero1.sums: .* has shape \(16,\)"):
        zero.sums({"w": square.reshape(-1)})
    state = zero.state()
    with pytest.raises(ConfigError, match="names differ"):
        zero.load_state({name: state[name] for name in ("steps", "mean.w")})
    with pytest.raises(ShapeError, match=r"mean\.w has shape \(5, 4\)"):
        zero.load_state(state | {"mean.w": np.ones((5, 4), np.float32)})


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"modules": ["score"]}, {"architectures": ["LlamaForSequenceClassification"]}),
        ({"modules": ["embed_tokens"]}, {}),
        ({"tokens": {"embed_tokens": [3, 5], "lm_head": [5]}}, {}),
        ({"targets": ["q_proj", "embed_tokens", "lm_head"]}, {}),
    ],
)
def test_adapters_of_tables_and_heads_that_ranks_keep_parts_of(
    options: dict[str, Any], config: dict[str, Any]
) -> None:
    """They begin with the whole ones, and learn what one process does."""
    config = SIZES | {"model_type": "llama", "num_labels": 3} | config
    tokens = np.random.default_rng(0).integers(1, 90, (4, 7))
    labels, count = (
        (np.arange(4) % 3, 4) if "score" in options.get("modules", ()) else (tokens, 4 * 6)
    )

    def step(comm: Any) -> Any:
        whole, rows = comm.size == 1, part(4, comm)
        model = create(config, seed=0, parts=None if whole else comm)
        model.add_adapter(2, **options)
        first = {name: array.copy() for name, array in model.trainable.items()}
        for name, array in model.trainable.items():  # else the gradients of A are 0
            array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
        ranks = model if whole else Zero3(model, comm)
        loss, gradients = ranks.loss_and_gradients(tokens[rows], labels[rows], count=count)
        return float(loss), gradients, first

    loss, gradients, first = step(COMM)
    for own in by_threads(2, step):
        assert own[0] == pytest.approx(loss, rel=1e-6)
        assert own[1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(own[2][name], first[name])
            close(own[1][name], gradient)


def test_blocks_are_gathered_one_by_one_without_gradients_too() -> None:
    """As where a loss is held out, or a reference is computed."""
    model, tokens = create(SIZES | {"model_type": "llama"}, seed=0), np.arange(12).reshape(2, 6)
    expected = model.log_probs(tokens, tokens).log_probs
    zero, seen = Zero3(model, COMM), list[set[str]]()

    def gather(parameters: Any) -> Any:
        seen.append({name.split(".")[2] for name in parameters if ".layers." in name})
        return zero.gather(parameters)

    model.gather = gather
    np.testing.assert_array_equal(model.log_probs(tokens, tokens).log_probs, expected)
    assert [each for each in seen if each] == [{"0"}, {"1"}, {"2"}]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_draws_are_of_tokens_whichever_rank_holds_them(kind: str, packed: bool) -> None:
    """Of two data ranks, each of two that divide texts, which they fill up; a shared expert, too.

    Dropout of the adapter and noise of the embeddings are those of one process.
    """
    model = {**MIXTURES["qwen2_moe types"], "num_key_value_heads": 4, "num_hidden_layers": 2}
    model["layer_types"] = model["layer_types"][:2]
    tokens = np.random.default_rng(0).integers(1, 90, (2, 11))
    parts = [tokens[:1], tokens[1:]]
    starts, texts = [0, 11], [None, None, None]
    if packed:
        tokens = tokens.reshape(1, -1)
        parts, starts = [tokens[:, :15], tokens[:, 15:]], [0, 15]
        texts = [np.array(each) for each in ([0, 3, 4, 15, 22], [0, 3, 4, 15], [0, 7])]

    def step(comm: Any) -> Any:
        places = grid(comm, data=2, context=2) if comm.size > 1 else None
        many = create(SIZES | model, seed=0)
        many.add_adapter(2, dropout=0.4, targets=["q_proj", "o_proj", "up_proj", "down_proj"])
        for name, array in many.trainable.items():  # else the gradients of A are 0
            array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
        first, rows, offsets = 0, tokens, texts[0]
        if places is not None:
            many.context, many.context_attention = places.context, kind
            number = places.data.rank
            first, rows, offsets = starts[number], parts[number], texts[1 + number]
        batch = {"tokens": rows, "labels": rows, "offsets": offsets, "count": 18}
        noise = {"noise_key": np.array(9), **batch}
        function = partial(beginning_at, first, noisy, next_token, 50.0, **noise)
        loss, gradients = many.value_and_gradients(function, seed=3)
        plain = many.value_and_gradients(partial(next_token, **batch))[0]
        total = comm.all_reduce(np.array([loss, plain], np.float64))
        return total, {name: comm.all_reduce(each) for name, each in gradients.items()}

    losses, gradients = step(COMM)
    assert abs(losses[0] - losses[1]) > 1e-3
    for own in by_threads(4, step):
        close(own[0], losses)
        for name, gradient in gradients.items():
            close(own[1][name], gradient)


@pytest.mark.parametrize("offsets", [None, [0, 3, 15, 22], [0, 6, 18, 22]], ids=str)
def test_several_adapters_of_texts_that_ranks_divide(offsets: list[int] | None) -> None:
    """Each drops what it drops in one process; a rank may have no token of an adapter."""
    tokens = np.random.default_rng(0).integers(1, 90, (2, 11) if offsets is None else (1, 22))
    packed = None if offsets is None else np.array(offsets)

    def step(comm: Any) -> Any:
        model = create(SIZES | {"model_type": "llama"}, seed=0)
        for number, name in enumerate("ab"):
            model.add_adapter(2, name=name, dropout=0.4)
            for array in model.trainable.values():
                array[...] = np.random.default_rng(number).normal(0, 0.1, array.shape)
        model.context = comm if comm.size > 1 else None
        model = model.by_rows(["a", "b"] if packed is None else ["a", "b", "a"])
        batch = {"labels": tokens, "offsets": packed, "count": 18, "seed": 3}
        loss, gradients = model.loss_and_gradients(tokens, **batch)
        gradients = {name: comm.all_reduce(each) for name, each in gradients.items()}
        return comm.all_reduce(np.array(float(loss))), gradients

    loss, gradients = step(COMM)
    for own in by_threads(2, step):
        close(own[0], loss)
        for name, gradient in gradients.items():
            close(own[1][name], gradient)
