"""Train a model on a text, load it from its folder, and continue prompts."""

import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from unsloth_cupy import models
from unsloth_cupy.finetune import Settings, Trainer

TEXT = "\n\n".join(f"After {i} comes {i + 1}, before it {i - 1}." for i in range(1, 400))

with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "numbers.txt")
    text.write_text(TEXT)
    settings = Settings(
        steps=120, batch=4, tokens=32, layers=2, hidden=64, vocabulary=300, out=Path(folder, "run")
    )
    run = Trainer(None, text, settings, quiet=True).train()
    model = models.load(run.files.model)
    tokenizer = Tokenizer.from_file(str(run.files.model / "tokenizer.json"))

print(model)
for prompt in ("After 12 ", "After 77 comes"):
    tokens = np.array([tokenizer.encode(prompt).ids])
    print(repr(tokenizer.decode(model.generate(tokens, max_new_tokens=12, stop=())[0])))

tokens = np.array([tokenizer.encode("After").ids])
for seed in range(3):  # the same seed gives the same tokens
    sampled = model.generate(tokens, max_new_tokens=12, temperature=0.8, top_p=0.9, seed=seed)
    print(repr(tokenizer.decode(sampled[0])))
