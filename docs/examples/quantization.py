"""Quantize a trained model in each kind, and train an adapter on the quantized weights."""

import numpy as np

from unsloth_cupy import AdamW, models

config = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
rng = np.random.default_rng(0)


def train(model, direction, steps):
    """Train all trainable parameters to count in a direction; return the last loss."""
    optimizer = AdamW(model.trainable, lr=0.01, weight_decay=0.0)
    for _ in range(steps):
        tokens = (rng.integers(0, 16, (8, 1)) + direction * np.arange(12)) % 16
        loss, gradients = model.loss_and_gradients(tokens, tokens)
        optimizer.step(gradients)
    return loss


def bytes_of(model):
    """Return the bytes of all parameters."""
    return sum(array.nbytes for array in model.parameters.values())


trained = models.create(config, seed=0)
train(trained, +1, 25)
rows = (np.arange(16)[:, None] + np.arange(12)) % 16
print(f"dense       {bytes_of(trained):7,} bytes, loss {trained.loss(rows, rows):.3f}")
for kind in ("int8", "nf4", "nf4-double", "fp4", "ternary"):
    model = models.create(config, seed=0)
    model.parameters = dict(trained.parameters)
    models.quantize(model, kind)
    print(f"{kind:10}  {bytes_of(model):7,} bytes, loss {model.loss(rows, rows):.3f}")

model = models.create(config, seed=0)
model.parameters = dict(trained.parameters)
models.quantize(model, "nf4")
model.add_adapter(rank=8)
print(f"an adapter on nf4 trained to count down: loss {train(model, -1, 60):.3f}")
print(model.generate(np.array([[9, 8, 7]]), max_new_tokens=6, stop=())[0])
