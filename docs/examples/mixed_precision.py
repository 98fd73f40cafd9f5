"""Train a model in float16: float32 masters, scaled loss, skipped steps and 8-bit AdamW."""

import numpy as np

from unsloth_cupy import (
    AdamW,
    MixedPrecisionConfig,
    compute_copies,
    cosine_schedule,
    measure_gradients,
    models,
)

STEPS = 60
config = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
precision = MixedPrecisionConfig("float16")
model = models.create(config, seed=0)
masters, scaler = model.parameters, precision.scaler()
optimizer = AdamW(masters, weight_decay=0.0, state_bits=8)
copies = compute_copies(masters, precision.compute_dtype)
optimizer.keep_copies(copies)  # every step rewrites them
model.parameters = masters | copies  # norm weights stay float32
rng = np.random.default_rng(0)

for step in range(STEPS):
    tokens = (rng.integers(0, 16, (8, 1)) + np.arange(12)) % 16
    with np.errstate(over="ignore", invalid="ignore"):  # the scaler handles overflows
        loss, gradients = model.loss_and_gradients(tokens, tokens, scaler=scaler)
    _, finite, factor = measure_gradients(gradients, 1.0, scaler=scaler)
    rate = cosine_schedule(step, lr=0.02, warmup=5, steps=STEPS)
    optimizer.step(gradients, lr=rate, finite=finite, factor=factor)
    scaler.update(finite)
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.3f}  scale {scaler.value:.0f}  {scaler.skipped} skipped")
print(f"step {STEPS}  loss {loss:.3f}  scale {scaler.value:.0f}  {scaler.skipped} skipped")
assert optimizer.steps + scaler.skipped == STEPS
assert scaler.skipped
assert loss < 0.5
