"""Training with a batch in parts equals that of one device, in 1e-5; ZeRO equals AdamW in bits."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from unsloth_cupy import AdamW, clip_gradients, cross_entropy, measure_gradients, models
from unsloth_cupy.parallel import (
    Communicator,
    DataParallel,
    SingleCommunicator,
    Zero1,
    Zero3,
    grid,
    part,
)

from ..models.peers import MIXTURES, RELATIVES, SIZES
from .ranks import close, few, likelihoods

CONFIG = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ROWS, TOKENS, STEPS = 8, 6, {"dense": 8, "lora": 3}


def new_model(kind: str) -> Any:
    """Return the same model in every rank: whole, or with an adapter on 4-bit weights."""
    model = models.create(CONFIG, seed=1, dtype="float32")
    if kind == "lora":
        models.quantize(model, "nf4")
        model.add_adapter(4, seed=2)
        for array in model.trainable.values():  # else the first gradients of one half are zeros
            array[...] = 0.02 * np.random.default_rng(3).standard_normal(array.shape)
    return model


def batches(steps: int = 1) -> Any:
    """Yield the tokens of each step, and labels of which ranks have different numbers."""
    rng = np.random.default_rng(4)
    for _ in range(steps):
        tokens = rng.integers(0, CONFIG["vocab_size"], (ROWS, TOKENS))
        labels = np.where(rng.random(tokens.shape) < 0.3, -100, tokens)
        labels[0] = -100
        yield tokens, labels


def squares(tokens: Any, model: Any) -> Any:
    """Return a loss of whole rows: the sum of the squares of their losses, over all rows."""
    losses = cross_entropy(model.logits(tokens)[:, :-1], tokens[:, 1:]).sum(axis=1)
    return (losses * losses).sum() * (1 / ROWS)


def parts_equal_the_whole(comm: Communicator) -> None:
    """Losses, all gradients of a step, and parameters after several, with clipped gradients."""
    # eps above what sums in another order differ by, which Adam would make as large as lr
    options: Any = {"lr": 3e-3, "eps": 1e-3}
    own = part(ROWS, comm)
    for kind, most in STEPS.items():
        steps = most if comm.size == 2 else min(most, 3)
        whole, divided, parted = (new_model(kind) for _ in range(3))
        if comm.rank:
            for array in (*divided.trainable.values(), *parted.trainable.values()):
                array[...] = 7  # those of rank 0 count
        data, zero3 = DataParallel(divided, comm), Zero3(parted, comm)
        one, alike, other = (AdamW(m.trainable, **options) for m in (whole, divided, parted))
        zero1 = Zero1(alike, comm)
        for step, (tokens, labels) in enumerate(batches(steps)):
            expected, grads = whole.loss_and_gradients(tokens, labels)
            loss, sums = data.loss_and_gradients(tokens[own], labels[own])
            also, parts = zero3.loss_and_gradients(tokens[own], labels[own])
            close([loss, also], [expected] * 2)
            assert [*sums] == [*grads] == [*parts]
            if step == 0:
                for name, array in zero3.gathered(parts).items():
                    close(array, grads[name])
                    close(sums[name], grads[name])
                value, expected = whole.value_and_gradients(partial(squares, tokens))
                actual, of_data = data.value_and_gradients(partial(squares, tokens[own]))
                also, parts_too = zero3.value_and_gradients(partial(squares, tokens[own]))
                close([actual, also], [value] * 2)
                for name, array in zero3.gathered(parts_too).items():
                    close(array, expected[name])
                    close(of_data[name], expected[name])
            measured, actual = measure_gradients(grads, 0.1), zero3.measure_gradients(parts, 0.1)
            close(actual, measured)
            one.step(grads, factor=measured.factor)
            zero1.step(sums, factor=measured.factor)
            other.step(parts, factor=actual.factor)
        same_training(whole, divided, one, zero1.state())
        close(parted.loss(tokens, labels), whole.loss(tokens, labels))  # block by block
        made = (m.generate(tokens[:1], max_new_tokens=2, stop=()) for m in (parted, whole))
        np.testing.assert_array_equal(*made)
        with zero3.whole():
            same_training(whole, parted, one, zero3.gathered(other.state()))
            close(parted.logits(tokens), whole.logits(tokens))
        same(zero3.divided(zero3.gathered(other.state())), other.state())


def grids_equal_the_whole(comm: Communicator, tensor: int = 2, family: str = "llama") -> None:
    """Weights divided among some ranks, rows among groups of them, and the rest by ZeRO."""
    if comm.size % tensor:
        return
    groups, config = grid(comm, tensor=tensor), CONFIG | {"model_type": family, "pad_token_id": 0}
    own = part(ROWS, groups.data)
    whole, one, three = (
        models.create(config, seed=1, communicator=c) for c in (None, *[groups.tensor] * 2)
    )
    data, zero3 = DataParallel(one, groups.data), Zero3(three, groups.data)
    options: Any = {"lr": 3e-3, "eps": 1e-3}
    optimizers = [AdamW(model.trainable, **options) for model in (whole, one, three)]
    optimizers[1] = Zero1(optimizers[1], groups.data)
    for step, (tokens, labels) in enumerate(batches(2)):
        expected, grads = whole.loss_and_gradients(tokens, labels)
        actual, sums = data.loss_and_gradients(tokens[own], labels[own])
        also, parts = zero3.loss_and_gradients(tokens[own], labels[own])
        close([actual, also], [expected] * 2)
        for name, array in (zero3.gathered(parts) if step == 0 else {}).items():
            close(one.division.gathered(name, sums[name]), grads[name])
            close(three.division.gathered(name, array), grads[name])
        for optimizer, gradients in zip(optimizers, (grads, sums, parts), strict=True):
            optimizer.step(gradients)
    with zero3.whole():
        for model in (one, three):
            for name, array in model.trainable.items():
                close(model.division.gathered(name, array), whole.trainable[name])


def contexts_equal_the_whole(comm: Communicator) -> None:
    """Tokens of each row divided among ranks: inside of texts, windows, uneven lengths."""
    rng, layers = np.random.default_rng(7), {"model_type": "mistral", "sliding_window": 3}
    texts = np.array([0, 3, 4, 4, 15, 22])
    windows, latent = CONFIG | layers, SIZES | RELATIVES["youtu"]
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    states = SIZES | RELATIVES["qwen3_5_text"] | heads
    channels = SIZES | MIXTURES["kimi_linear"] | {"linear_num_heads": 4}
    for config, kind in (
        *((CONFIG, "ring"), (windows, "ring"), (windows, "ulysses")),
        *((latent, "ring"), (latent, "ulysses"), (states, "ring"), (states, "ulysses")),
        (channels, "ring"),
    ):
        divided = kind == "ulysses" or config in (states, channels)
        if divided and config["num_attention_heads"] % comm.size:
            continue
        whole, model = (models.create(config, seed=1) for _ in range(2))
        model.context, model.context_attention = comm, kind
        many = DataParallel(model, comm)
        tokens = rng.integers(0, config["vocab_size"], (2, 11))
        labels = np.where(rng.random(tokens.shape) < 0.3, -100, tokens)
        for offsets in (None, texts):
            expected, grads = whole.loss_and_gradients(tokens, labels, offsets=offsets)
            share, own = model.loss_and_gradients(tokens, labels, offsets=offsets)
            close(model.loss(tokens, labels, offsets=offsets), share)
            close(comm.all_reduce(np.array(share)), expected)
            loss, sums = many.loss_and_gradients(tokens, labels, offsets=offsets)
            close(loss, expected)
            for name, gradient in many.sums(own).items():
                close(gradient, grads[name], few(gradient))
                np.testing.assert_array_equal(sums[name], gradient, name)
            both = (m.log_probs(tokens, labels, offsets=offsets) for m in (model, whole))
            for one, other in zip(*both, strict=True):
                close(one, other)
            likely = partial(likelihoods, tokens=tokens, labels=labels, offsets=offsets)
            expected, grads = whole.value_and_gradients(likely)
            share, own = model.value_and_gradients(likely)
            close(comm.all_reduce(np.array(float(share))), expected)
            for name, gradient in many.sums(own).items():
                close(gradient, grads[name], few(gradient))


def same_training(whole: Any, divided: Any, optimizer: AdamW, state: dict[str, Any]) -> None:
    assert state.keys() == optimizer.state().keys()
    for name, array in optimizer.state().items():
        close(state[name], array, 1e-4 if name.startswith("square") else 1e-5)
    for name in whole.trainable:
        close(divided.trainable[name], whole.trainable[name])


def parts_of_codes_equal_the_whole(comm: Communicator) -> None:
    """8-bit averages of parts have the bits of whole ones, and continue from a whole state."""
    rng, config = np.random.default_rng(6), CONFIG | {"vocab_size": 517}  # parts of many blocks
    model, other = (models.create(config, seed=1, dtype="float32") for _ in range(2))
    many = Zero3(other, comm)
    one, parts = (AdamW(each.trainable, state_bits=8) for each in (model, other))
    shapes = {name: array.shape for name, array in model.trainable.items()}
    drawn = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for sign in (1, -1, 1):  # averages shrink: what stands behind the last one would be larger
        grads = {name: sign * array for name, array in drawn.items()}
        one.step(grads)
        parts.step(many.divided(grads))
        state = many.gathered(parts.state())
        same(state, one.state())
        parts.load_state(many.divided(state))
    same(many.gathered(many.model.parameters), model.parameters)


def buckets_have_equal_bits(comm: Communicator) -> None:
    """For any size; also in 16 bits, where several texts share rows, and of sums of gradients."""
    model = models.create(CONFIG, seed=1, dtype="bfloat16")
    tokens, labels = next(batches())
    own = part(ROWS, comm)
    offsets = np.array([0, 5, 5, len(tokens[own]) * TOKENS])
    results = []
    for size in (1, 9000, 2**25):
        many = DataParallel(model, comm, bucket_bytes=size)
        results.append(many.loss_and_gradients(tokens[own], labels[own], offsets=offsets)[1])
    _, alone = model.loss_and_gradients(
        tokens[own], labels[own], offsets=offsets, count=counted_in_all(labels, offsets, comm)
    )
    results.append(many.sums(alone))
    for other in results[1:]:
        for name, expected in results[0].items():
            np.testing.assert_array_equal(other[name], expected, strict=True)


def counted_in_all(labels: Any, offsets: Any, comm: Communicator) -> int:
    """Return the number of predicted labels, summed over all ranks."""
    total = 0
    for rank in range(comm.size):
        flat = labels[part(ROWS, comm, rank)].reshape(-1)
        starts = {0, 5, len(flat)}
        total += sum(flat[i] != -100 for i in range(len(flat)) if i not in starts)
    return total


def zero_equals_adamw(comm: Communicator) -> None:
    """With the same gradients, in bits: 32-bit and 8-bit averages, masters, and a restart."""
    rng = np.random.default_rng(5)
    shapes = {"a": (130, 70), "norm": (70,), "b": (3, 5000), "c": (4099,), "last": (1,)}
    whole = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    groups = [{"names": ["norm", "last"], "weight_decay": 0.0}, {"names": "b", "lr": 0.002}]
    for bits, masters in ((32, False), (8, True)):
        steps = [{n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}] * 3
        one, other = (
            AdamW({n: a.copy() for n, a in whole.items()}, state_bits=bits, groups=groups)
            for _ in range(2)
        )
        names = [name for name in shapes if name != "norm"] if masters else []
        copies = [{n: np.empty(shapes[n], ml_dtypes.bfloat16) for n in names} for _ in range(2)]
        for optimizer, copy in zip((one, other), copies, strict=True):
            optimizer.keep_copies(copy)
            optimizer.step(steps[0])  # Zero1 goes on from there
        live = dict(other.parameters) | copies[1]
        zero = Zero1(other, comm)
        held = sum(t.mean.size for t in zero.inner.tensors.values())
        assert held <= sum(a.size for a in whole.values()) / comm.size + 2 * 4096
        for grads in steps:
            clip_gradients(grads, 1.0)
            one.step(grads, 0.01, factor=0.5)
            zero.step(grads, 0.01, factor=0.5)
        share = {n: g * (1 + comm.rank) for n, g in steps[1].items()}  # sums of bits
        sums = {n: comm.all_reduce(g) for n, g in share.items()}
        parts = zero.sums(share)
        same(zero.gathered(parts), sums)
        close(zero.measure_gradients(parts, 0.1), measure_gradients(sums, 0.1), 1e-12)
        one.step(sums, 0.01)
        zero.step(parts, 0.01)
        zero.step(steps[0], finite=False)
        assert zero.steps == one.steps == 5
        same(live, one.parameters | copies[0])
        same(zero.masters(), one.parameters)
        same(zero.state(), one.state())
        fresh = AdamW(zero.masters(), state_bits=bits, groups=groups)
        again = Zero1(fresh, SingleCommunicator())
        again.load_state(zero.state())
        again.step(steps[1])
        one.step(steps[1])
        same(again.masters(), one.parameters)


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, strict=True)


def all_checks(comm: Communicator) -> None:
    for check in (
        parts_equal_the_whole,
        grids_equal_the_whole,
        contexts_equal_the_whole,
        parts_of_codes_equal_the_whole,
        buckets_have_equal_bits,
        zero_equals_adamw,
    ):
        check(comm)
