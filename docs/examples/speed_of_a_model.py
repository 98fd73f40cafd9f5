"""Time a step of training and a token of generation, by default of a tiny model on the CPU.

python docs/examples/speed_of_a_model.py --device cuda      a Llama of 495 million parameters
"""

import sys
import time

import numpy as np

from unsloth_cupy import AdamW, models

ON_GPU = sys.argv[1:] == ["--device", "cuda"]
if ON_GPU:
    import cupy as xp

    HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, KV_HEADS = 2048, 5632, 32768, 8, 16, 4
    ROWS, TOKENS, STEPS, NEW = 4, 2048, 10, 128
else:
    xp = np
    HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, KV_HEADS = 64, 128, 256, 2, 2, 1
    ROWS, TOKENS, STEPS, NEW = 2, 32, 2, 8
config = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
where = {"dtype": "bfloat16", "device": "cuda"} if ON_GPU else {}
model = models.create(config, seed=0, **where)
optimizer = AdamW(model.parameters, lr=1e-4)
tokens = xp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TOKENS)))


def train(steps):
    """Run training steps, and wait for the GPU."""
    for _ in range(steps):
        loss, gradients = model.loss_and_gradients(tokens, tokens, graph=ON_GPU)
        optimizer.step(gradients)
    float(loss)


def generate(new):
    """Generate tokens for one prompt."""
    model.generate(tokens[:1, :32], max_new_tokens=new, stop=())


def seconds(function, count):
    """Return the time of a call in seconds."""
    start = time.perf_counter()
    function(count)
    return time.perf_counter() - start


train(3)  # compiles the kernels; the third step captures a CUDA graph
generate(8)
count = sum(array.size for array in model.parameters.values())
print(f"{count:,} parameters, {ROWS} x {TOKENS} tokens")
print(f"a step of training: {seconds(train, STEPS) / STEPS * 1e3:.1f} ms")
duration = seconds(generate, 8 + NEW) - seconds(generate, 8)
print(f"a generated token: {duration / NEW * 1e3:.2f} ms")
