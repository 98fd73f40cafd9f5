"""The training loop: steps, evaluations, checkpoints, and how it stops and goes on.

Step ``n`` takes batch ``n`` and the rate of ``n``, whatever ran before in this process; so a run
that goes on from a checkpoint ends with the bits of one that never stopped.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..files import check_room, written_beside
from ..machine import peak_memory
from ..models.adapter import Adapter
from ..models.checkpoint_files import write_tensors
from ..ops.common.faults import check_errors
from ..ops.quantized.weight import held_arrays
from ..placement import placed, to_numpy
from ..training.find_nan import NonFiniteError, find_nan, fine
from ..training.gradients import measure_gradients, sum_gradients
from ..training.optimizer import AdamW
from ..training.precision import DTYPES, compute_copies
from ..training.schedules import cosine_schedule
from .interrupt import Interrupted, Stop
from .limit import Memory
from .progress import Progress
from .run_folder import RunFolder
from .settings import Settings
from .text import Batch, Lessons

if TYPE_CHECKING:
    from ..models import Transformer

BETAS = (0.9, 0.95)  # the second moment of so short a run must forget faster than by 0.999
LAST_RATE = 0.1  # share of the learning rate at the end
WARMUP_SHARE = 0.05
SCALER = ("value", "good", "skipped")  # all the state that a LossScaler has


class Trainer:
    """A model, its optimizer and how far they have come."""

    def __init__(
        self,
        run: RunFolder,
        model: "Transformer",
        tokenizer: Any,
        lessons: Lessons,
        plan: Settings,
        files: Mapping[str, str],
        memory: Memory,
        *,
        find_nan: bool = False,
    ) -> None:
        self.memory = memory
        self.run, self.model, self.tokenizer, self.files = run, model, tokenizer, files
        self.lessons, self.plan, self.find_nan = lessons, plan, find_nan
        self.masters = dict(model.trainable)
        self.optimizer = AdamW(
            self.masters, lr=plan.lr, betas=BETAS, weight_decay=plan.weight_decay,
            state_bits=plan.state_bits,
        )  # fmt: skip
        self.copies = compute_copies(model.parameters, plan.dtype)
        if model.adapter is None:
            self.optimizer.keep_copies(self.copies)
        model.parameters = model.parameters | self.copies  # an adapter's own stay float32
        model.chunked_mlp = plan.chunked_mlp
        self.scaler, self.stop = plan.precision.scaler(), Stop()
        self.step, self.seconds = 0, 0.0
        self.begun = -1  # the step up to which the log is this run's
        self.unproven: str | None = None  # the newest checkpoint, while nothing has come of it

    def train(self, stop: Stop) -> None:
        """Run the steps that are left; the log and the checkpoints tell of them.

        Raises
        ------
        Interrupted
            The run was asked to stop; if it has begun, the last whole step is saved.
        ConfigError
            The disk has no room for what will be saved.
        """
        self.stop, steps = stop, self.plan.steps
        self.run.trim(self.begun)
        started = time.perf_counter() - self.seconds
        states = self.optimizer.state()
        weights, averages = (sum(a.nbytes for a in s.values()) for s in (self.masters, states))
        needed = (2 - bool(self.step)) * (weights + averages) + weights
        check_room(self.run.folder, needed, "the run, with two checkpoints,")
        arrays = (self.model.parameters, self.masters, states)
        held = [array for named in arrays for _, array in held_arrays(named)]
        with (
            Progress(self.step, steps) as progress,
            self.memory.watched(held),
            np.errstate(over="ignore", invalid="ignore"),  # what is not finite is looked for
        ):
            try:
                self._evaluate_if_due(progress)
                while self.step < steps:
                    self._one_step(progress)
                    self.seconds = time.perf_counter() - started
                    self._evaluate_if_due(progress)
                    self.seconds = time.perf_counter() - started
                    if self.step % self.plan.save_every == 0 or self.step == steps:
                        self.save()
            except Interrupted:
                if self.run.lines():
                    self.save()
                raise

    def _evaluate_if_due(self, progress: Progress) -> None:
        """Evaluate, unless a run that stopped here has."""
        due = self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps
        if due and not self.run.evaluated(self.step):
            with self.stop.leaving(f"the held-out loss after step {self.step}"):
                self._evaluate(progress)

    def _one_step(self, progress: Progress) -> None:
        started, scaler = time.perf_counter(), self.scaler
        slowed = self.memory.begin_step()
        with self.stop.leaving(f"step {self.step + 1}"):
            loss, count, gradients = self._gradients()
            check_errors()  # a loss that was read has been waited for
        self.stop.finishing(f"the update of step {self.step + 1}")
        found = measure_gradients(gradients, self.plan.max_norm, scaler=scaler)
        norm, finite = float(found.norm), bool(found.finite)
        if not (math.isfinite(loss) and (finite or self._scale_may_shrink)):
            self._stop(f"the loss is {loss:g} and the norm of its gradient {norm:g}")
        rate = cosine_schedule(
            self.step + 1,  # step 0 of a schedule has the rate 0
            lr=self.plan.lr,
            warmup=math.ceil(self.plan.steps * WARMUP_SHARE),
            steps=self.plan.steps,
            minimum=LAST_RATE,
        )
        self.optimizer.step(gradients, lr=rate, finite=found.finite, factor=found.factor)
        scaler.update(found.finite)
        self.step += 1
        if self.unproven:  # its weights gave a loss that is fine: what came before may go
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
        line |= self.memory.end_step()
        self.run.append(line)
        progress.step(line)

    def _gradients(self) -> tuple[float, int, dict[str, Array]]:
        """Return the mean loss of a step's batches, their tokens, and the mean's gradients."""
        first = self.step * self.plan.accumulate
        numbers = range(first, first + self.plan.accumulate)
        batches = [self.lessons.batches.at(number) for number in numbers]
        asked = max(1, sum(batch.asked for batch in batches))

        def passes() -> Iterator[tuple[Any, dict[str, Array]]]:
            for number, batch in zip(numbers, batches, strict=True):
                self.stop.check()
                with self._watched(number):
                    found = self.model.loss_and_gradients(
                        **self._placed(batch), count=asked, scaler=self.scaler,
                        checkpoint=self.plan.checkpoint,
                    )  # fmt: skip
                yield found

        loss, sums = sum_gradients(passes(), len(batches))
        return loss, sum(batch.real for batch in batches), sums

    def _evaluate(self, progress: Progress) -> None:
        """Log the loss on the held-out text, in nats per token."""
        total, count = 0.0, 0
        for number, batch in enumerate(self.lessons.held_out):
            loss = float(self.model.loss(**self._placed(batch)))
            if not math.isfinite(loss):
                with self._watched(number, held_out=True):
                    self.model.loss_and_gradients(**self._placed(batch))
                self._stop(f"the held-out loss is {loss:g}", after=True)
            total, count = total + loss * batch.asked, count + batch.asked
        line = {
            "step": self.step,
            "held_out_loss": total / count,
            "held_out_tokens": count,
            "unigram_baseline": self.lessons.baseline,
        }
        self.run.append(line)
        progress.evaluated(line)

    def _placed(self, batch: Batch) -> dict[str, Any]:
        """Return the arrays of a batch where the model is, by the names of its methods."""
        arrays = {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}
        table = self.model.table
        return {n: a if a is None else placed(a, table) for n, a in arrays.items()}

    @property
    def _scale_may_shrink(self) -> bool:
        """Whether a gradient that is not finite is the scaler's matter."""
        return self.scaler.dynamic and self.scaler.value > self.scaler.minimum

    @contextmanager
    def _watched(self, batch: int, *, held_out: bool = False) -> Iterator[None]:
        """Stop where the first value that is not finite appears, if that was asked for."""
        if not self.find_nan:
            yield
            return
        named = self.model.parameters | self.model.trainable
        try:
            with find_nan(named, gradients=not self._scale_may_shrink):
                yield
        except NonFiniteError as error:
            name = f"batch {batch} ({self.lessons.batches.where(batch)})"
            name = f"held-out batch {batch}" if held_out else name
            self._stop(f"{name}: {error}", after=held_out)

    def _stop(self, problem: str, *, after: bool = False) -> NoReturn:
        """Raise for a value that is not finite, in the next step or after the last one."""
        when = f"after step {self.step}" if after else f"step {self.step + 1}"
        good = [path for path in self.run.checkpoints() if path.name != self.unproven]
        kept = f"; the last good state is {good[-1]}" if good else ""
        cure = f"try a smaller --lr than {self.plan.lr:g}"
        if self.step == 0:  # no step has changed a weight
            cure = "copy the model again" + ", or try --dtype bfloat16" * self.scaler.dynamic
        more = "" if self.find_nan else "; --find-nan names the layer where it begins"
        raise ConfigError(f"{when}: {problem}; {cure}{more}{kept}")

    def save(self) -> Path:
        """Write a checkpoint of this step; the one before it stays until the next step."""
        self.stop.finishing(f"the checkpoint of step {self.step}")
        path = self.run.folder / f"checkpoint-{self.step:08d}"
        broken = [name for name, array in self.masters.items() if not fine(name, array)]
        if broken:
            self._stop(f"the weight {broken[0]} is not finite", after=True)
        if not path.exists():
            with written_beside(path) as partial:
                self.save_model(partial)
                averages = {n: to_numpy(a) for n, a in self.optimizer.state().items()}
                write_tensors(partial / "optimizer.safetensors", averages)
                state = {
                    "step": self.step,
                    "seed": self.plan.seed,
                    "seconds": self.seconds,
                    "scaler": {name: getattr(self.scaler, name) for name in SCALER},
                }
                (partial / "trainer.json").write_text(json.dumps(state) + "\n")
            self.unproven = path.name  # until its weights have given a loss
        return path

    def save_model(self, folder: Path, dtype: str = "float32") -> None:
        """Write the master weights, or the adapter, and the tokenizer as a Hugging Face folder."""
        model, written = self.model, self.masters
        if dtype != "float32":
            written = {name: array.astype(DTYPES[dtype]) for name, array in written.items()}
            broken = [name for name, array in written.items() if not fine(name, array)]
            if broken:
                raise ConfigError(f"{dtype} does not hold {broken[0]}; give another --save-dtype")
        if model.adapter is not None:
            Adapter(model.adapter.settings, written).save(folder)
        else:
            named, model.parameters = model.parameters, written
            model.save(folder)
            model.parameters = named
        self.tokenizer.save(str(folder / "tokenizer.json"))
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def resume(self, checkpoint: Path) -> None:
        """Take up optimizer and step; the model was loaded from the same checkpoint."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            state = json.loads((checkpoint / "trainer.json").read_text())
            averages = load_file(checkpoint / "optimizer.safetensors")
            steps, table = averages.pop("steps"), self.model.table
            there = {name: placed(array, table) for name, array in averages.items()}
            self.optimizer.load_state({"steps": steps, **there})
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            self.begun = self.step
            for name in SCALER:
                setattr(self.scaler, name, state["scaler"][name])
            self.unproven = checkpoint.name
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(
                f"{checkpoint} cannot be resumed from: {error}; delete it to start over"
            ) from None
