"""The training loop: steps, evaluations, checkpoints, stopping and resuming.

Step ``n`` takes batch ``n`` and the learning rate of ``n``, whatever ran before in this process; so
a run resumed from a checkpoint ends with the same bits as one that never stopped.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dtypes import Array
from ..files import check_room
from ..machine import peak_memory
from ..models.objective import TrainingStep
from ..ops.common.faults import check_errors
from ..ops.quantized.weight import held_arrays
from ..parallel.zero import Zero1
from ..placement import to_device_of
from ..training.find_nan import NonFiniteError, find_nan
from ..training.optimizer import AdamW
from ..training.schedules import cosine_schedule
from .engine import Engine
from .interrupt import Interrupted, Stop
from .limit import Memory
from .progress import Progress
from .ranks import Ranks, alone
from .run_folder import RunFolder
from .saving import Saving
from .settings import Settings
from .text import Batch, TrainingData

if TYPE_CHECKING:
    from ..models import Transformer

BETAS = (0.9, 0.95)  # a run is short: the second moment must decay faster than by 0.999
LAST_RATE = 0.1  # learning rate at the end, as a share of the highest
WARMUP_SHARE = 0.05  # of the steps


class Trainer(Saving):
    """Trains a model: its optimizer, data, settings, and the number of steps done."""

    def __init__(
        self,
        run: RunFolder,
        model: "Transformer",
        tokenizer: Any,
        training_data: TrainingData,
        plan: Settings,
        files: Mapping[str, str],
        memory: Memory,
        *,
        find_nan: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.memory, self.ranks = memory, alone() if ranks is None else ranks
        self.run, self.model, self.tokenizer, self.files = run, model, tokenizer, files
        self.training_data, self.plan, self.find_nan = training_data, plan, find_nan
        self.engine = Engine(self.ranks, model)
        self.masters = dict(model.trainable)
        optimizer = AdamW(
            self.masters, lr=plan.lr, betas=BETAS, weight_decay=plan.weight_decay,
            state_bits=plan.state_bits,
        )  # fmt: skip
        self.copies = self.engine.copies(plan.dtype)
        if model.adapter is None:
            optimizer.keep_copies(self.copies)
        model.parameters = model.parameters | self.copies  # the adapter's parameters stay float32
        model.chunked_mlp = plan.chunked_mlp
        self.optimizer = self.engine.optimizer(optimizer)
        if isinstance(self.optimizer, Zero1):  # it holds only this rank's part of the masters
            self.masters = {}
        self.scaler, self.stop = plan.precision.scaler(), Stop()
        self.step, self.seconds = 0, 0.0
        self.begun = -1  # step of the checkpoint; later lines of the log are removed. -1: all
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # context of a step
        self.unproven: str | None = None  # newest checkpoint, until a step from it has succeeded

    def train(self, stop: Stop) -> None:
        """Run the remaining steps, and write the log and the checkpoints.

        Raises
        ------
        Interrupted
            The run was requested to stop; if the log has a line, the last complete step is saved.
        ConfigError
            The disk has no room for the checkpoints.
        """
        self.stop, steps, ranks = stop, self.plan.steps, self.ranks
        if ranks.first:
            self.run.trim(self.begun)
        started = time.perf_counter() - self.seconds
        learned, states = self._learned(), self._own().state()
        weights, averages = (sum(a.nbytes for a in s.values()) for s in (learned, states))
        parts = ranks.alike.size if ranks.zero else 1
        needed = parts * ((2 - bool(self.step)) * (weights + averages) + weights)
        check_room(self.run.folder, needed, "the run, with two checkpoints,")
        arrays = (self.model.parameters, learned, states)
        held = [array for named in arrays for _, array in held_arrays(named)]
        with (
            Progress(self.step, steps) as progress,
            self.memory.watched(held),
            np.errstate(over="ignore", invalid="ignore"),  # losses and gradients are checked
        ):
            try:
                self._evaluate_if_due(progress)
                while self.step < steps:
                    ranks.agree(stop)
                    with self.around():
                        self._one_step(progress)
                    self.seconds = time.perf_counter() - started
                    self._evaluate_if_due(progress)
                    self.seconds = time.perf_counter() - started
                    if self.step % self.plan.save_every == 0 or self.step == steps:
                        self.save()
            except Interrupted:
                if ranks.broadcast(bool(self.run.lines())):
                    self.save()
                raise

    def _evaluate_if_due(self, progress: Progress) -> None:
        """Evaluate if it is time, unless the log already has the loss of this step."""
        due = self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps
        if due and not self.ranks.broadcast(self.run.evaluated(self.step)):
            with self.stop.interruptible_block(f"the held-out loss after step {self.step}"):
                self._evaluate(progress)

    def _one_step(self, progress: Progress) -> None:
        """Run a step and log it; raise if loss or gradients are not finite."""
        started, scaler = time.perf_counter(), self.scaler
        slowed = self.memory.begin_step()
        with self.stop.interruptible_block(f"step {self.step + 1}"):
            loss, count, gradients = self._gradients()
            check_errors()  # reading the loss has waited for the GPU: errors are known now
        self.stop.uninterruptible(f"the update of step {self.step + 1}")
        measure = self.engine.measured(gradients, self.plan.max_norm, scaler)
        norm, finite = float(measure.norm), bool(measure.finite)
        if not (math.isfinite(loss) and (finite or self._scale_may_shrink)):
            self._stop(f"the loss is {loss:g} and the norm of its gradient {norm:g}")
        rate = cosine_schedule(
            self.step + 1,  # step 0 of a schedule has the rate 0
            lr=self.plan.lr,
            warmup=math.ceil(self.plan.steps * WARMUP_SHARE),
            steps=self.plan.steps,
            minimum=LAST_RATE,
        )
        self.optimizer.step(gradients, lr=rate, finite=measure.finite, factor=measure.factor)
        scaler.update(measure.finite)
        self.step += 1
        if self.unproven and self.ranks.first:  # its weights gave a finite loss
            self.run.drop_checkpoints(before=self.unproven)
        self.unproven = None
        seconds = time.perf_counter() - started
        line = {
            "step": self.step,
            "loss": loss,
            "lr": rate,
            "gradient_norm": norm if finite else None,
            "tokens_per_second": None if slowed else round(count / seconds, 1),
            "memory_bytes": peak_memory(),
            "seconds": round(seconds, 4),
        }
        if scaler.dynamic:
            line |= {"loss_scale": scaler.value, "skipped_steps": scaler.skipped}
        self._log(line | self.memory.end_step())
        progress.step(line)

    def _log(self, line: dict[str, Any]) -> None:
        """Append a line to the log, on rank 0."""
        if self.ranks.first:
            self.run.append(line)

    def _gradients(self) -> tuple[float, int, dict[str, Array]]:
        """Return the mean loss of a step's batches, their number of tokens, and the gradients."""
        first = self.step * self.plan.accumulate
        numbers = range(first, first + self.plan.accumulate)
        batches = [self.training_data.batches.at(number) for number in numbers]
        count = max(1, sum(batch.label_count for batch in batches))

        own = [self._placed(self.ranks.rows(batch), count) for batch in batches]
        pairs = self.engine.gradients(own, TrainingStep(self.plan.checkpoint, self.scaler))

        def passes() -> Iterator[tuple[Any, dict[str, Array]]]:
            for number in numbers:
                self.stop.check()
                with self._watched(number):
                    each = next(pairs, None)
                if each is None:  # a pipeline runs all batches in its first pass
                    return
                yield each

        loss, sums = self.engine.summed(passes(), len(batches))
        return loss, sum(batch.real for batch in batches), sums

    def _evaluate(self, progress: Progress) -> None:
        """Log the loss on the held-out text, in nats per token."""
        batches = self.training_data.held_out
        placed = [self._placed(batch, max(1, batch.label_count)) for batch in batches]
        losses = self.engine.held_out(placed)
        total, count = 0.0, 0
        for number, (batch, loss) in enumerate(zip(batches, losses, strict=True)):
            if not math.isfinite(loss):
                with self._watched(number, held_out=True):
                    next(self.engine.gradients([placed[number]], TrainingStep()))
                self._stop(f"the held-out loss is {loss:g}", after=True)
            total, count = total + loss * batch.label_count, count + batch.label_count
        line = {
            "step": self.step,
            "held_out_loss": total / count,
            "held_out_tokens": count,
            "unigram_baseline": self.training_data.baseline,
        }
        self._log(line)
        progress.evaluated(line)

    def _placed(self, batch: Batch, count: int) -> dict[str, Any]:
        """Return what the objective takes: arrays on the model's device, and a number of labels."""
        arrays = {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}
        table = self.model.table
        placed = {n: a if a is None else to_device_of(a, table) for n, a in arrays.items()}
        return placed | {"count": count}

    @property
    def _scale_may_shrink(self) -> bool:
        """Whether the loss scaler handles a gradient that is not finite, by a smaller scale."""
        return self.scaler.dynamic and self.scaler.value > self.scaler.minimum

    @contextmanager
    def _watched(self, batch: int, *, held_out: bool = False) -> Iterator[None]:
        """With --find-nan, stop at the first value that is not finite in a ``with`` block."""
        if not self.find_nan:
            yield
            return
        named = self.model.parameters | self.model.trainable
        try:
            with find_nan(named, gradients=not self._scale_may_shrink):
                yield
        except NonFiniteError as error:
            name = f"batch {batch} ({self.training_data.batches.where(batch)})"
            name = f"held-out batch {batch}" if held_out else name
            self._stop(f"{name}: {error}", after=held_out)
