"""The training loop: steps, evaluations, checkpoints, and how it stops and goes on.

Step ``n`` takes batch ``n`` and the rate of ``n``, whatever ran before in this process; so a run
that goes on from a checkpoint ends with the bits of one that never stopped.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._typing import Array
from ..checkpoint import CheckpointConfig
from ..errors import ConfigError
from ..faults import check_errors
from ..gradients import measure_gradients
from ..ops.cast import accumulate_, cast
from ..optimizer import AdamW
from ..precision import MixedPrecisionConfig, compute_copies
from ..schedules import cosine_schedule
from .machine import peak_memory
from .progress import Progress
from .run_folder import RunFolder, written_beside
from .text import IGNORE, Batches

if TYPE_CHECKING:
    from ..models import Transformer

BETAS = (0.9, 0.95)  # the second moment of so short a run must forget faster than by 0.999
LAST_RATE = 0.1  # share of the learning rate at the end
WARMUP_SHARE = 0.05
SCALER = ("value", "good", "skipped")  # all the state that a LossScaler has


class Plan(NamedTuple):
    """How to train."""

    steps: int
    lr: float
    weight_decay: float
    max_norm: float
    seed: int
    evaluate_every: int
    save_every: int
    dtype: str = "float32"
    lora: int | None = None
    accumulate: int = 1
    checkpoint_every: int | None = None


class Interrupted(Exception):  # noqa: N818 -- a request, no error
    """Ctrl-C came; the state is saved."""


class Trainer:
    """A model, its optimizer and how far they have come."""

    def __init__(
        self,
        run: RunFolder,
        model: "Transformer",
        tokenizer: Any,
        batches: Batches,
        held_out: list[tuple[Array, Array]],
        plan: Plan,
    ) -> None:
        self.run, self.model, self.tokenizer = run, model, tokenizer
        self.batches, self.held_out, self.plan = batches, held_out, plan
        self.masters = dict(model.trainable)
        self.optimizer = AdamW(
            self.masters, lr=plan.lr, betas=BETAS, weight_decay=plan.weight_decay
        )
        self.copies = compute_copies(model.parameters, plan.dtype)
        if model.adapter is None:
            self.optimizer.keep_copies(self.copies)
        model.parameters = model.parameters | self.copies  # an adapter's own stay float32
        every = plan.checkpoint_every
        self.checkpoint = None if every is None else CheckpointConfig(checkpoint_every=every)
        self.scaler = MixedPrecisionConfig(plan.dtype).scaler()
        self.step, self.seconds = 0, 0.0

    def train(self, baseline: float) -> None:
        """Run the steps that are left; the log and the checkpoints tell of them."""
        self.run.trim(self.step if self.step else -1)
        started = time.perf_counter() - self.seconds
        with stop_request() as stop, Progress(self.step, self.plan.steps) as progress:
            if self.step == 0:
                self._evaluate(progress, baseline)
            while self.step < self.plan.steps:
                self._one_step(progress)
                last = self.step == self.plan.steps
                self.seconds = time.perf_counter() - started
                if last or self.step % self.plan.evaluate_every == 0:
                    self._evaluate(progress, baseline)
                if stop.is_set() or (self.step % self.plan.save_every == 0 and not last):
                    self.seconds = time.perf_counter() - started
                    self.save()
                if stop.is_set():
                    raise Interrupted
        self.seconds = time.perf_counter() - started

    def _one_step(self, progress: Progress) -> None:
        started = time.perf_counter()
        scaler, parts = self.scaler, self.plan.accumulate
        loss, count, gradients = self._gradients()
        check_errors()  # a loss that was read has been waited for
        found = measure_gradients(gradients, self.plan.max_norm * parts, scaler=scaler)  # of sums
        norm, finite = float(found.norm) / parts, bool(found.finite)
        scale_may_shrink = scaler.dynamic and scaler.value > scaler.minimum
        if not (math.isfinite(loss) and (finite or scale_may_shrink)):
            kept = self.run.newest_checkpoint()
            raise ConfigError(
                f"step {self.step + 1}: the loss is {loss:g} and the norm of its gradient {norm:g};"
                f" try a smaller --lr than {self.plan.lr:g}"
                + (f" (the last good state is {kept})" if kept else "")
            )
        rate = cosine_schedule(
            self.step + 1,  # step 0 of a schedule has the rate 0
            lr=self.plan.lr,
            warmup=math.ceil(self.plan.steps * WARMUP_SHARE),
            steps=self.plan.steps,
            minimum=LAST_RATE,
        )
        self.optimizer.step(gradients, lr=rate, finite=found.finite, factor=found.factor / parts)
        scaler.update(found.finite)
        self.step += 1
        seconds = time.perf_counter() - started
        line = {
            "step": self.step,
            "loss": loss,
            "lr": rate,
            "gradient_norm": norm if finite else None,
            "tokens_per_second": round(count / seconds, 1),
            "memory_bytes": peak_memory(),
            "seconds": round(seconds, 4),
        }
        if scaler.dynamic:
            line |= {"loss_scale": scaler.value, "skipped_steps": scaler.skipped}
        self.run.append(line)
        progress.step(line)

    def _gradients(self) -> tuple[float, int, dict[str, Array]]:
        """Return the mean loss of a step's batches, their tokens, and the sums of gradients."""
        parts = self.plan.accumulate
        loss, count, sums = 0.0, 0, {}
        for part in range(parts):
            rows = self.batches.at(self.step * parts + part)
            with np.errstate(over="ignore", invalid="ignore"):  # the scaler deals with overflows
                one, gradients = self.model.loss_and_gradients(
                    rows, rows, scaler=self.scaler, checkpoint=self.checkpoint
                )
            loss, count = loss + float(one) / parts, count + rows.size
            if parts == 1:
                return loss, count, gradients
            for name, gradient in gradients.items():
                if part == 0:
                    sums[name] = cast(gradient, dtype="float32")
                else:
                    accumulate_(sums[name], gradient)
        return loss, count, sums

    def _evaluate(self, progress: Progress, baseline: float) -> None:
        """Log the loss on the held-out text, in nats per token."""
        total, count = 0.0, 0
        for rows, labels in self.held_out:
            asked = int((labels[:, 1:] != IGNORE).sum())
            total += float(self.model.loss(rows, labels)) * asked
            count += asked
        line = {
            "step": self.step,
            "held_out_loss": total / count,
            "held_out_tokens": count,
            "unigram_baseline": baseline,
        }
        self.run.append(line)
        progress.evaluated(line)

    def save(self) -> Path:
        """Write a checkpoint of this step, then remove the older ones."""
        from safetensors.numpy import save_file

        path = self.run.folder / f"checkpoint-{self.step:08d}"
        if not path.exists():
            with written_beside(path) as partial:
                self.save_model(partial)
                save_file(self.optimizer.state(), partial / "optimizer.safetensors")
                state = {
                    "step": self.step,
                    "seed": self.plan.seed,
                    "seconds": self.seconds,
                    "scaler": {name: getattr(self.scaler, name) for name in SCALER},
                }
                (partial / "trainer.json").write_text(json.dumps(state) + "\n")
        self.run.drop_checkpoints(before=path.name)
        return path

    def save_model(self, folder: Path) -> None:
        """Write the master weights, or the adapter, and the tokenizer as a Hugging Face folder."""
        if self.model.adapter is not None:
            self.model.save_adapter(folder)
        else:
            self.model.parameters = self.masters
            self.model.save(folder)
            self.model.parameters = self.masters | self.copies
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def resume(self, checkpoint: Path) -> None:
        """Take up optimizer and step; the model was loaded from the same checkpoint."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            state = json.loads((checkpoint / "trainer.json").read_text())
            self.optimizer.load_state(load_file(checkpoint / "optimizer.safetensors"))
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            for name in SCALER:
                setattr(self.scaler, name, state["scaler"][name])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(
                f"{checkpoint} cannot be resumed from: {error}; delete it to start over"
            ) from None


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C sets; the second one ends the program at once."""
    stop = threading.Event()

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
