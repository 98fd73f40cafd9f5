"""Train a small model to count: loss, gradients, clipping, schedule and AdamW."""

import numpy as np

from unsloth_cupy import AdamW, clip_gradients, cosine_schedule, models

STEPS = 60
config = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
model = models.create(config, seed=0)
optimizer = AdamW(model.parameters, weight_decay=0.0)
rng = np.random.default_rng(0)

for step in range(STEPS):
    starts = rng.integers(0, 16, (8, 1))
    tokens = (starts + np.arange(12)) % 16  # every row counts up and wraps around
    loss, gradients = model.loss_and_gradients(tokens, tokens)
    clip_gradients(gradients, max_norm=1.0)
    optimizer.step(gradients, lr=cosine_schedule(step, lr=0.02, warmup=5, steps=STEPS))
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.3f}")
print(f"step {STEPS}  loss {loss:.3f}")

print("after 3, 4, 5 comes", model.generate(np.array([[3, 4, 5]]), max_new_tokens=6, stop=())[0])
