"""Time of a token after few and after many others, which is constant with a sliding window."""

import itertools
import statistics
import time

import numpy as np

from unsloth_cupy.models import create

CONFIG = {
    "model_type": "mistral",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
}
ROUNDS = 50


class Token:
    """Time of a token after this many generated ones, with a sliding window of 64."""

    unit, version = "us", "1"
    params = (64, 1024)
    param_names = ("generated",)
    timeout = 300

    def setup(self, generated: int) -> None:
        """Generate the tokens before the timed ones."""
        model = create(CONFIG, seed=0)
        prompt = np.arange(3, 19)[None]
        self.tokens = model.stream(prompt, max_new_tokens=generated + 8 * ROUNDS, stop=())
        self.kept = [*itertools.islice(self.tokens, generated)]

    def track_microseconds(self, generated: int) -> float:
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            next(self.tokens)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6
