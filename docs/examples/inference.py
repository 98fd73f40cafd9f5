"""Save and load a model folder, then continue a batch of prompts of unequal length."""

import tempfile

import numpy as np

from unsloth_cupy import models

config = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

with tempfile.TemporaryDirectory() as folder:
    models.create(config, seed=0).save(folder)
    model = models.load(folder)

prompts = np.array([[5, 17, 42, 8], [0, 0, 23, 4]])  # the second prompt is padded on the left
mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
tokens = model.generate(prompts, mask=mask, max_new_tokens=8, stop=())
print(tokens[:, 4:])

alone = model.generate(prompts[1:, 2:], max_new_tokens=8, stop=())
print("the padding has no effect:", (alone[0, 2:] == tokens[1, 4:]).all())
