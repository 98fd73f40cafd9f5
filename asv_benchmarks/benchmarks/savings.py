"""Memory and time of each way to save memory: a training step with it, and one without.

    cd asv_benchmarks && python -m benchmarks.savings [LAYERS [SAVING ...]]

prints the tables of docs/guide/tuning.md.  Times are CPU time of all threads, which other programs
affect less than wall-clock time.  Steps with and without alternate, so that other load affects
both; the result is the median of the ratios of neighbouring steps.
"""

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from unsloth_cupy import (
    AdamW,
    CheckpointConfig,
    MixedPrecisionConfig,
    Tape,
    accumulate_,
    cast,
    compute_copies,
    cross_entropy,
    linear,
    linear_cross_entropy,
    measure_gradients,
    memory_pool,
    models,
    swiglu,
    swiglu_mlp,
)

LAYERS, BATCH, TOKENS, ROUNDS = 12, 4, 256, 9
ROWS = 2048  # of a fused op's input
MIB = 2**20
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class Saving(NamedTuple):
    """The settings of a training step that save memory."""

    checkpoint: CheckpointConfig | None = None
    dtype: str = "float32"
    bits: int = 32
    rank: int | None = None
    parts: int = 1
    chunked: bool = False


EACH, FOURTH = CheckpointConfig(), CheckpointConfig(recompute_every=4)
SAVINGS = {
    "nothing": Saving(),
    "recompute_every=1": Saving(EACH),
    "recompute_every=2": Saving(CheckpointConfig(recompute_every=2)),
    "recompute_every=4": Saving(FOURTH),
    "chunked_mlp": Saving(chunked=True),
    "chunked_mlp, recompute_every=1": Saving(EACH, chunked=True),
    "attention kept": Saving(CheckpointConfig(keep=("attention_forward",))),
    "4 accumulated rows": Saving(parts=BATCH),
    "bfloat16": Saving(dtype="bfloat16"),
    "8-bit states": Saving(bits=8),
    "LoRA of rank 8": Saving(rank=8),
    "LoRA, recompute_every=1": Saving(EACH, rank=8),
}


class Training:
    """A model and its optimizer, set up as ``unsloth-cupy finetune`` does."""

    def __init__(self, layers: int, saving: Saving) -> None:
        self.saving = saving
        self.model = models.create(CONFIG | {"num_hidden_layers": layers}, seed=0)
        self.model.chunked_mlp = saving.chunked
        if saving.rank is not None:
            self.model.add_adapter(saving.rank)
        self.optimizer = AdamW(dict(self.model.trainable), state_bits=saving.bits)
        copies = compute_copies(self.model.parameters, saving.dtype)
        if saving.rank is None:
            self.optimizer.keep_copies(copies)
        self.model.parameters = self.model.parameters | copies
        self.scaler = MixedPrecisionConfig(saving.dtype).scaler()
        self.tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (BATCH, TOKENS))

    def step(self) -> None:
        """Compute gradients, clip them, update the weights."""
        sums: dict[str, Any] = {}
        for rows in np.split(self.tokens, self.saving.parts):
            _, gradients = self.model.loss_and_gradients(
                rows, rows, checkpoint=self.saving.checkpoint, scaler=self.scaler
            )
            if self.saving.parts == 1:
                sums = gradients
            for name in gradients if self.saving.parts > 1 else ():
                if name in sums:
                    accumulate_(sums[name], gradients[name])
                else:
                    sums[name] = cast(gradients[name], "float32")
            del gradients
        _, finite, factor = measure_gradients(sums, 1.0, scaler=self.scaler)
        self.optimizer.step(sums, lr=1e-3, finite=finite, factor=factor)
        self.scaler.update(finite)


class Bytes(NamedTuple):
    """Bytes held between two steps, and the peak of a step beyond them."""

    held: int
    step: int


def of_training(layers: int, saving: Saving) -> Bytes:
    """Return the bytes of weights and states, and of a step beyond them."""
    with memory_pool() as pool:
        training = Training(layers, saving)
        training.step()  # allocates what later steps reuse
        gc.collect()
        held = pool.allocated
        pool.reset_peak()
        training.step()
        return Bytes(held, pool.peak - held)


def ratios(plain: Callable[[], Any], other: Callable[[], Any]) -> Iterator[tuple[float, float]]:
    """Yield the CPU seconds of both calls, which take turns in alternating order."""
    plain(), other()
    for turn in range(ROUNDS):
        seconds = {}
        for call in (plain, other)[:: 1 - 2 * (turn % 2)]:
            started = time.process_time()
            call()
            seconds[call] = time.process_time() - started
        yield seconds[plain], seconds[other]


def median_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the median of the second time divided by the first."""
    return statistics.median(second / first for first, second in pairs)


class Step:
    """A step with a saving: MiB beyond weights and states, and its time over a plain step's."""

    version, timeout = "1", 600
    params = tuple(SAVINGS)
    param_names = ("saving",)

    def setup(self, saving: str) -> None:
        self.saving = SAVINGS[saving]

    def track_mebibytes(self, saving: str) -> float:
        return of_training(LAYERS, self.saving).step / MIB

    def track_times_a_plain_step(self, saving: str) -> float:
        plain, other = (Training(LAYERS, each) for each in (SAVINGS["nothing"], self.saving))
        return median_ratio(ratios(plain.step, other.step))


class Fused:
    """A fused op and its unfused equivalent, forward and backward: peak MiB, ratio of times."""

    version, timeout = "1", 600
    params = ("swiglu_mlp", "linear_cross_entropy")
    param_names = ("op",)

    def setup(self, op: str) -> None:
        """Draw the arguments of both."""
        rng = np.random.default_rng(0)
        rows, hidden, inner, vocab = (ROWS, 256, 688, 8192)
        shapes = {
            "swiglu_mlp": [(rows, hidden), (inner, hidden), (inner, hidden), (hidden, inner)],
            "linear_cross_entropy": [(rows, hidden), (vocab, hidden)],
        }
        self.arrays = [rng.standard_normal(shape, np.float32) for shape in shapes[op]]
        self.labels = rng.integers(0, vocab, rows)
        self.both = {"swiglu_mlp": (unfused_mlp, swiglu_mlp)}.get(
            op,
            (
                lambda x, head: cross_entropy(linear(x, head), self.labels),
                lambda x, head: linear_cross_entropy(x, head, self.labels, max_bytes=4 * MIB),
            ),
        )

    def run(self, call: Callable[..., Any]) -> list[Any]:
        """Return the gradients of all arrays."""
        tape = Tape()
        watched = [tape.watch(array) for array in self.arrays]
        y = call(*watched)
        return tape.gradients(y, watched, np.ones(y.shape, np.float32), release=True)

    def bytes(self, call: Callable[..., Any]) -> int:
        """Return the peak bytes of forward and backward beyond arguments and gradients."""
        with memory_pool() as pool:
            grads = self.run(call)
            return pool.peak - sum(grad.nbytes for grad in grads)

    def track_mebibytes(self, op: str) -> float:
        return self.bytes(self.both[1]) / MIB

    def track_times_the_unfused(self, op: str) -> float:
        plain, fused = (functools.partial(self.run, call) for call in self.both)
        return median_ratio(ratios(plain, fused))


def unfused_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """Return the result of swiglu_mlp, computed with its whole inner activations in memory."""
    return linear(swiglu(linear(x, gate), linear(x, up)), down)


def print_steps(layers: int, names: Iterable[str]) -> None:
    """Print a line for each of these savings."""
    print(f"| {layers} layers | held | a step beside it | less | time |\n|---|---|---|---|---|")
    least = of_training(layers, SAVINGS["nothing"])
    plain = Training(layers, SAVINGS["nothing"])
    for name in names:
        held, step = of_training(layers, SAVINGS[name])
        cost = median_ratio(ratios(plain.step, Training(layers, SAVINGS[name]).step))
        less = round(100 * (1 - step / least.step))
        cells = [f"{held / MIB:.1f} MiB", f"{step / MIB:.1f} MiB", f"{less} %"]
        print(f"| {name} | {' | '.join(cells)} | {cost:.2f} |", flush=True)


def print_fused() -> None:
    """Print a line for every fused op."""
    print("| op | unfused | fused | less | time |\n|---|---|---|---|---|")
    for op in Fused.params:
        bench = Fused()
        bench.setup(op)
        whole, fused = (bench.bytes(call) for call in bench.both)
        less = round(100 * (1 - fused / whole))
        cells = [f"{whole / MIB:.1f} MiB", f"{fused / MIB:.1f} MiB", f"{less} %"]
        print(f"| {op} | {' | '.join(cells)} | {bench.track_times_the_unfused(op):.2f} |")


if __name__ == "__main__":
    print_steps(int((sys.argv[1:] or [LAYERS])[0]), sys.argv[2:] or SAVINGS)
    if not sys.argv[2:]:
        print()
        print_fused()
