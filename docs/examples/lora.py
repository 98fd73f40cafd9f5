"""Train a model to count up and an adapter to count down; save it for peft, load and merge it."""

import tempfile
from pathlib import Path

import numpy as np

from unsloth_cupy import AdamW, models

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
rng = np.random.default_rng(0)
prompt = np.array([[9, 8, 7]])


def train(direction):
    """Train all trainable parameters: of the whole model, or of the adapter."""
    optimizer = AdamW(model.trainable, lr=0.02, weight_decay=0.0)
    for step in range(40):
        tokens = (rng.integers(0, 16, (8, 1)) + direction * np.arange(12)) % 16
        loss, gradients = model.loss_and_gradients(tokens, tokens, seed=step)
        optimizer.step(gradients)
    count = sum(array.size for array in model.trainable.values())
    print(f"{count} parameters trained to count by {direction:+}: loss {loss:.3f}")


train(+1)
with tempfile.TemporaryDirectory() as folder:
    base, adapter = Path(folder, "base"), Path(folder, "adapter")
    model.save(base)
    model.add_adapter(rank=4, rslora=True, dropout=0.05)
    train(-1)
    model.save_adapter(adapter)
    base_model = models.load(base)
    model = models.load(base, lora=adapter)

print("base:   ", base_model.generate(prompt, max_new_tokens=6, stop=())[0])
adapted = model.generate(prompt, max_new_tokens=6, stop=())
print("adapter:", adapted[0])
model.merge_adapter()
print("merged: ", model.generate(prompt, max_new_tokens=6, stop=())[0])
assert (adapted[0, 3:] == [6, 5, 4, 3, 2, 1]).all()
