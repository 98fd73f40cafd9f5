"""Generation: a token after few and after many others, and rollouts of different lengths."""

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


class Lengths:
    """Processor time of rollouts of 32 prompts, which end after 5 to 170 tokens."""

    unit, version = "s", "1"
    timeout = 300

    def setup(self) -> None:
        sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024}
        layers = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
        self.model = create({"model_type": "llama", **sizes, **layers}, seed=0)
        self.prompts = np.random.default_rng(0).integers(3, 1024, (32, 24))
        self.rollouts()

    def rollouts(self) -> None:
        """Let one token in 41 end a row."""
        options = {"samples": 1, "max_new_tokens": 170, "seed": 5, "stop": range(3, 28)}
        self.model.rollouts([*self.prompts], **options)

    def track_seconds(self) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            self.rollouts()
            times.append(time.process_time() - started)
        return statistics.median(times)


if __name__ == "__main__":
    lengths = Lengths()
    lengths.setup()
    print(f"{lengths.track_seconds():.3f} s")
