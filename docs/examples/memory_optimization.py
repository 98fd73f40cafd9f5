"""Plan and measure the peak memory of a training step, with and without checkpoints and chunks."""

import numpy as np

from unsloth_cupy import (
    CheckpointConfig,
    Tape,
    cross_entropy,
    format_bytes,
    linear,
    linear_cross_entropy,
    memory_pool,
    models,
    plan_memory,
)

config = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
model = models.create(config, seed=0)
rng = np.random.default_rng(0)
tokens = rng.integers(0, 64, (4, 128))


def step(every):
    """Return loss, gradients and peak bytes of a step, and compare the peak with the plan."""
    checkpoint = None if every is None else CheckpointConfig(recompute_every=every)
    with memory_pool(held=model.parameters.values()) as pool:
        loss, gradients = model.loss_and_gradients(tokens, tokens, checkpoint=checkpoint)
    plan = plan_memory(
        config, batch=4, tokens=128, dtype="float32", optimizer="none", recompute_every=every,
        device="cpu",
    )  # fmt: skip
    label = "all stored" if every is None else f"input of every {every}"
    print(f"8 blocks, {label:18}", end="")
    print(f"planned {format_bytes(plan.total)}, measured {format_bytes(pool.peak)}")
    assert abs(plan.total - pool.peak) < 0.02 * plan.total, "the promised accuracy of plans"
    return loss, gradients, pool.peak


model.loss_and_gradients(tokens, tokens)  # creates cached arrays, such as rotary tables
plain_loss, plain, plain_peak = step(None)
for every in (1, 2, 4):
    loss, gradients, peak = step(every)
    assert peak < plain_peak
    assert loss == plain_loss
    assert all((gradients[name] == plain[name]).all() for name in plain), "bit-identical"

x, head = rng.standard_normal((256, 32), np.float32), rng.standard_normal((4096, 32), np.float32)
labels = rng.integers(0, 4096, 256)


def head_step(losses_of):
    """Return the gradient of the mean loss with respect to x, and the peak bytes."""
    with memory_pool() as pool:
        tape = Tape()
        watched, weight = tape.watch(x), tape.watch(head)
        losses = losses_of(watched, weight)
        dx, _ = tape.gradients(losses, [watched, weight], np.full(256, 1 / 256, np.float32))
    return dx, pool.peak


full, full_peak = head_step(lambda x, weight: cross_entropy(linear(x, weight), labels))
chunked, chunked_peak = head_step(
    lambda x, weight: linear_cross_entropy(x, weight, labels, max_bytes=1 << 19)
)
np.testing.assert_allclose(chunked, full, rtol=1e-4, atol=1e-7)
print(f"4096 logits of 256 rows     {format_bytes(full_peak)}")
print(f"in chunks of half a MiB     {format_bytes(chunked_peak)}")
assert chunked_peak < full_peak
