"""The cost of equal bits in sampling and training, and on any number of ranks (``sft``).

    cd asv_benchmarks && python -m benchmarks.invariant [HIDDEN]

prints the table of docs/measurements.md.  Times are CPU time in one thread, of a model that is
invariant and one that is not, which take turns: the median of the ratios of neighbouring calls.
"""

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from unsloth_cupy import losses
from unsloth_cupy.models import create
from unsloth_cupy.models.objective import next_token
from unsloth_cupy.training.gradients import sum_in_halves

LAYERS, PROMPTS, LENGTH, SAMPLES, NEW, VOCAB, HIDDEN, ROUNDS = 4, 4, 64, 4, 32, 32_000, 512, 5
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CALLS = ("rollouts", "log_probs", "step", "sft")


class Invariant:
    """Time of sampling, log-probabilities and a step, with and without ``invariant``."""

    params = ([*CALLS], [False, True])
    param_names = ("call", "invariant")
    version = "1"

    def setup(self, call: str, invariant: bool, hidden: int = 64) -> None:
        config = {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
        self.model = create(config, seed=0, invariant=invariant)
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, VOCAB, LENGTH - n).tolist() for n in range(PROMPTS)]
        self.tokens = rng.integers(0, VOCAB, (PROMPTS * SAMPLES, LENGTH + NEW))
        self.mask = np.arange(LENGTH + NEW) < LENGTH + NEW - 1
        self.mask = np.broadcast_to(self.mask, self.tokens.shape)

    def time_call(self, call: str, invariant: bool) -> None:
        getattr(self, call)()

    def rollouts(self) -> None:
        self.model.rollouts(self.prompts, samples=SAMPLES, max_new_tokens=NEW, seed=0, stop=())

    def log_probs(self) -> None:
        self.model.log_probs(self.tokens, self.tokens)

    def step(self) -> None:
        def loss(model: Any) -> Any:
            return losses.nll(model.log_probs(self.tokens, self.tokens).log_probs, self.mask)

        self.model.value_and_gradients(loss)

    def sft(self) -> None:
        """Compute the gradients of all rows at once, or as ``finetune --invariant`` does."""
        model, count = self.model.in_order(False), self.tokens.size
        batches = self.tokens[:, None] if self.model.invariant else self.tokens[None]
        passes = (
            model.value_and_gradients(partial(next_token, tokens=rows, labels=rows, count=count))
            for rows in batches
        )
        sum_in_halves((gradients for _, gradients in passes), len(batches))


def main(hidden: int) -> None:
    """Print the table."""
    print("| call | usual | invariant, of usual |\n|---|---|---|")
    pair = [Invariant(), Invariant()]
    for invariant, each in enumerate(pair):
        each.setup("", bool(invariant), hidden)
    for call in CALLS:
        ratios, usual = [], []
        for turn in range(ROUNDS + 1):
            times = {}
            for each in pair if turn % 2 else pair[::-1]:
                began = time.process_time()
                each.time_call(call, each.model.invariant)
                times[each] = time.process_time() - began
            usual.append(times[pair[0]])
            ratios.append(times[pair[1]] / times[pair[0]])
        middle = statistics.median(usual[1:])
        print(f"| {call} | {middle:.2f} s | {statistics.median(ratios[1:]):.2f} |", flush=True)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else HIDDEN
    if all(os.environ.get(name) == "1" for name in THREADS):
        main(size)
    else:
        command = [sys.executable, "-m", "benchmarks.invariant", str(size)]
        subprocess.run(command, check=True, env=os.environ | dict.fromkeys(THREADS, "1"))
