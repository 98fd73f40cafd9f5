"""Pack short questions and answers into one row, without padding; the loss covers answers only."""

import numpy as np

from unsloth_cupy import AdamW, models

STEPS, IGNORE = 60, -100
config = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
END = 10
model = models.create(config, seed=0)
optimizer = AdamW(model.parameters, lr=0.01, weight_decay=0.0)
rng = np.random.default_rng(0)


def sample():
    """Return the tokens and labels of some digits, their maximum as the answer, and END."""
    digits = rng.integers(0, 10, rng.integers(1, 6))
    return [*digits, 11, digits.max(), END], [*[IGNORE] * (len(digits) + 1), digits.max(), END]


for step in range(STEPS):
    tokens, labels, offsets = [], [], [0]
    for _ in range(32):
        text, text_labels = sample()
        tokens, labels = tokens + text, labels + text_labels
        offsets.append(len(tokens))
    loss, gradients = model.loss_and_gradients(
        np.array([tokens]), np.array([labels]), offsets=np.array(offsets)
    )
    optimizer.step(gradients)
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.3f}  {len(tokens)} tokens of 32 texts, no padding")
print(f"step {STEPS}  loss {loss:.3f}")

answer = model.generate(np.array([[3, 8, 5, 11]]), max_new_tokens=2, stop=END)[0, 4:]
print("the largest of 3, 8, 5 is", answer[0])
