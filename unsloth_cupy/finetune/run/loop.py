"""The training loop: steps, evaluations, stopping and resuming.

Step ``n`` uses batch ``n`` and the learning rate of ``n``, whatever ran before in this process.  So
a resumed run ends with the same bits as a run that never stopped.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, NotFiniteError
from ...machine import peak_memory
from ...models.loss import undrafted
from ...models.objective import Objective, TrainingStep, next_token
from ...models.optimizers import of_tables, optimizer_of, undecayed
from ...ops.common.faults import check_errors
from ...ops.quantized.weight import held_arrays
from ...parallel.data import in_halves
from ...placement import to_numpy
from ...training.find_nan import NonFiniteError, find_nan, fine
from ..data.text import Batch, TrainingData, texts_of, without_texts
from ..listener import Listener, announce
from ..methods.method import placed
from ..methods.registry import METHODS
from ..naming import named
from .callbacks import Callbacks
from .checkpoints import Checkpoints
from .executor import Executor
from .interrupt import Interrupted, Stop
from .limit import Memory
from .metrics import Counts, measures
from .ranks import Ranks
from .rates import rate_of
from .routing import Routing
from .run_folder import RunFolder, is_past_best, log_reason
from .samples import check_prompts, write_samples
from .settings import Plan

if TYPE_CHECKING:
    from ...models import Transformer
    from ..data.chat import Chat

LARGEST = 1e15  # limit of labels, so that the sum of their squares is in the range of float32


class Loop:
    """The state of training: model, optimizer, data, settings, and the number of steps so far."""

    def __init__(
        self,
        run: RunFolder,
        model: "Transformer",
        tokenizer: Any,
        training_data: TrainingData,
        plan: Plan,
        files: Mapping[str, str],
        memory: Memory,
        ranks: Ranks,
        objective: Objective = next_token,
        chat: "Chat | None" = None,
    ) -> None:
        self.memory, self.ranks, self.chat = memory, ranks, chat
        self.run, self.model, self.tokenizer = run, model, tokenizer
        self.training_data, self.plan, self.listener = training_data, plan, Listener()
        known = objective is next_token or plan.method != "sft"
        self.executor = Executor(
            ranks, model, objective, known if plan.graph is None else plan.graph, plan.by_text
        )
        self.method: Any = objective if plan.method != "sft" else METHODS["sft"]
        own: Any = self.method
        model.texts = {**model.texts, "config.json": own.settled(model.texts["config.json"])}
        self.routing = Routing(model, plan.router_bias_update_rate)
        model.mtp_weight = plan.mtp_weight
        fixed = {n: a for n, a in model.parameters.items() if n not in model.trainable}
        self.undecayed = [] if plan.decay_all else undecayed(model)
        optimizer = optimizer_of(
            plan.kind, model, lr=plan.lr, weight_decay=plan.weight_decay,
            state_bits=plan.state_bits, undecayed=self.undecayed, embedding_lr=plan.embedding_lr,
        )  # fmt: skip
        self.callbacks = Callbacks([], self, "")
        copies = self.executor.copies(plan.dtype)
        self._check_copies(copies)
        if model.adapter is None:
            optimizer.keep_copies(copies)
        model.parameters = model.parameters | copies  # the adapter's parameters stay float32
        model.chunked_mlp = plan.chunked_mlp
        self.optimizer = self.executor.optimizer(optimizer)
        self.scaler, self.stop = plan.precision.scaler(), Stop()
        self.checkpoints = Checkpoints(
            run, self.executor, self.optimizer, self.scaler, fixed, self.method, plan, tokenizer,
            files,
        )  # fmt: skip
        self.step, self.seconds = 0, 0.0
        self.measured: dict[str, float | None] = {}  # measures of the method in the newest step
        self.step_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.adapter_report: str | None = None  # of ``check_learns``, after the first gradients
        self._settle()

    @property
    def _into(self) -> Any:
        """The quantizer through which the adapter is trained, if any."""
        return None if self.model.adapter is None else self.model.adapter.into

    def _settle(self) -> None:
        """Use the weights of the merged file in products from step ``merge_from`` on."""
        if self._into is not None:
            self._into.active = self.step >= self.plan.merge_from

    def _check_copies(self, copies: Mapping[str, Any]) -> None:
        """Raise a ConfigError if 16-bit copies would change weights that the merge rounds."""
        adapter = self.model.adapter
        if adapter is None or adapter.into is None:
            return
        for name, copy in copies.items():
            weight: Any = self.model.parameters[name]
            used = adapter.adds_to(name) or adapter.into.rounds(name, weight)
            if used and bool((copy.astype(weight.dtype) != weight).any()):
                problem = f"the model's {name} is float32, which {self.plan.dtype} would round"
                what = f"{named('merge_into')} rounds the weights of the model"
                cure = f"give {named(dtype='float32')}"
                raise ConfigError(f"{what}; {problem}; {cure}")

    def train(self, stop: Stop, listener: Listener, callbacks: Callbacks | None = None) -> None:
        """Run the remaining steps; write the log and the checkpoints.

        Raises
        ------
        Interrupted
            The run was stopped; if the log has a line, the last complete step is saved.
        ConfigError
            The disk has no room for the checkpoints.
        """
        self.stop, self.listener, steps, ranks = stop, listener, self.plan.steps, self.ranks
        self.callbacks = callbacks or self.callbacks
        self.callbacks.call("on_init_end")
        resumed = self.step
        if self.run.has_log:
            self.run.trim(self.checkpoints.resumed_step)
        started = time.perf_counter() - self.seconds
        if ranks.first:
            self.checkpoints.check_room(self.step)
        models = self.model, *self.method.other_models
        arrays: tuple[Any, ...] = (*self.checkpoints.part(),)
        arrays += tuple(getattr(each, "parameters", {}) for each in models)
        if self.model.adapter is not None:
            arrays += (self.model.adapter.file_weights(self.model.parameters),)
        held = [array for each in arrays for _, array in held_arrays(each)]
        ropes = (rope for each in models for rope in getattr(each, "tables", {}).values())
        held += [table for rope in ropes for table in rope(1)]  # created with the model
        listener.began(self.step, steps)
        with (
            self._training_events(),
            self.memory.watched(held),
            np.errstate(over="ignore", invalid="ignore"),  # losses and gradients are checked
        ):
            try:
                self._evaluate_if_due()
                control = self.callbacks.take()
                while self.step < steps and not (
                    control.should_training_stop or self._is_past_best()
                ):
                    ranks.agree(stop)
                    epoch = self.callbacks.state.epoch
                    first = self.step == resumed  # later exchanges repeat those of the first step
                    with self.step_context(), ranks.comparing() if first else nullcontext():
                        self._one_step()
                    self.seconds = time.perf_counter() - started
                    control = self.callbacks.take()
                    self._evaluate_if_due(now=control.should_evaluate)
                    self.seconds = time.perf_counter() - started
                    due = self.step % self.plan.save_every == 0 or self.step == steps
                    if due or control.should_save:
                        self.save()
                    self.callbacks.epochs(epoch)
                    ends, control = control.should_training_stop, self.callbacks.take()
                    control.should_training_stop |= ends
                if self.step < steps and ranks.first:
                    log_reason(self.run, self.plan, self.step)
                self.save()
            except Interrupted:
                if ranks.broadcast(bool(self.run.lines())):
                    since = time.perf_counter()
                    self.save()
                    stop.saving = time.perf_counter() - since
                raise

    @contextmanager
    def _training_events(self) -> Iterator[None]:
        """Call the callbacks at the start of training, and at its end, also after an error."""
        self.callbacks.call("on_train_begin")
        self.callbacks.call("on_epoch_begin")
        try:
            yield
        finally:
            self.callbacks.call("on_train_end")

    def _evaluate_if_due(self, *, now: bool = False) -> None:
        """Evaluate if an evaluation is due and the log does not have it yet."""
        due = self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps
        if (due or now) and not self.ranks.broadcast(self.run.evaluated(self.step)):
            with (
                self.checkpoints.averages(),
                self.stop.interruptible_block(
                    f"after step {self.step}, without its evaluation", f"after step {self.step}"
                ),
            ):
                self._evaluate()

    def _is_past_best(self) -> bool:
        """Return on all ranks whether early stopping ends the run."""
        if self.plan.patience is None:
            return False
        return bool(self.ranks.broadcast(self.ranks.first and is_past_best(self.run, self.plan)))

    def _one_step(self) -> None:
        """Run a step and log it; raise if loss or gradients are not finite."""
        started, scaler = time.perf_counter(), self.scaler
        slowed = self.memory.begin_step(self.step)
        self.callbacks.call("on_step_begin")
        before, after = f"after step {self.step}", f"after step {self.step + 1}"
        with self.stop.interruptible_block(before, after):
            loss, count, gradients = self._gradients()
            check_errors()  # reading the loss waited for the GPU, so errors are known now
        self.stop.uninterruptible(after)
        measure = self.executor.measured(gradients, self.plan.max_norm, scaler)
        norm, finite = float(measure.norm), bool(measure.finite)
        if not (math.isfinite(loss) and (finite or self._scale_may_shrink)):
            self._stop(f"the loss is {loss:g} and the norm of its gradient {norm:g}")
        if self.adapter_report is None and self.model.adapter is not None:
            self.adapter_report = self.executor.adapter_report(self.model.adapter, gradients)
            if self.adapter_report and self.model.adapter.stacks:
                announce(self.adapter_report)
        rate = rate_of(self.step + 1, self.plan)
        self.callbacks.call("on_pre_optimizer_step")
        self.optimizer.step(gradients, lr=rate, finite=measure.finite, factor=measure.factor)
        scaler.update(measure.finite)
        self.callbacks.call("on_optimizer_step")
        self.step += 1
        self._settle()
        self.checkpoints.tested()
        seconds = time.perf_counter() - started
        line = {
            "step": self.step,
            "loss": loss,
            **self.measured,
            "lr": rate,
            "gradient_norm": norm if finite else None,
            "tokens_per_second": None if slowed else round(count / seconds, 1),
            "memory_bytes": peak_memory(),
            "seconds": round(seconds, 4),
        }
        if scaler.dynamic:
            line |= {"loss_scale": scaler.value, "skipped_steps": scaler.skipped}
        tokens = self.routing.counts(self.executor.over_all)
        line |= self.routing.measures(tokens)
        if finite:
            self.executor.add(self.routing.bias_updates(tokens))
        line |= self.memory.end_step()
        self.callbacks.call("on_step_end")
        due = self.step % self.plan.log_every == 0 or self.step == self.plan.steps
        if due or self.callbacks.control.should_log:
            self._log(line)
            self.callbacks.logged(line)
        self.listener.step(line)

    def _log(self, line: dict[str, Any]) -> None:
        """Append a line to the log of the run folder, and of its copies."""
        if self.run.has_log:
            self.run.append(line)

    def _gradients(self) -> tuple[float, int, dict[str, Array]]:
        """Return the mean loss of a step, its number of tokens, and its gradients."""
        if self.plan.by_text:
            return self._gradients_by_text()
        first = self.method.first(self.step, self.plan.accumulate)
        numbers = range(first, first + self.plan.accumulate)
        if self.method.is_on_policy:
            batches = self._drawn(numbers)
        else:
            batches = [self.training_data.batches.at(number) for number in numbers]
        rows, sink = [self.ranks.rows(batch) for batch in batches], list[Array]()
        constants = self.method.before(self.model, rows, self.ranks.replicas.all_reduce)
        draws = bool(self.plan.neftune) or self.executor.drops
        # in rows, dropout and noise depend on the padded length: other padding, other numbers
        padded = self.executor.pads and not (draws and self.plan.pack is False)
        padded = padded and self.plan.method != "sft"  # graphs pad next tokens themselves
        rows = [self.method.padded(batch) for batch in rows] if padded else rows
        shared = self._shared(batches, constants, padded=padded)
        shared |= {"sink": sink} if self.method.sums else {}
        own = [self._placed(batch, shared) for batch in rows]
        step = TrainingStep(self.plan.checkpoint, self.scaler, self.plan.seed)
        before = [self.ranks.rows(each, before=True) for each in batches if draws]
        starts = [
            self.method.inputs(each)["tokens"].size if each.tokens.size else 0 for each in before
        ]
        pairs = self.executor.gradients(own, step, numbers, self.plan.neftune, starts)
        with self.routing.counting():
            loss, sums = self.executor.summed(self._passes(pairs, numbers), len(batches))
        measured = self.method.joined([to_numpy(each) for each in sink], self.ranks.replicas)
        if self.executor.stages is not None:
            measured = self.executor.stages.shared(measured)
        self.measured = self.method.measures(measured, **constants)
        return loss, sum(batch.real for batch in batches), sums

    def _gradients_by_text(self) -> tuple[float, int, dict[str, Array]]:
        """Return the results of ``_gradients`` with each text alone, summed in one order."""
        batch = self.training_data.batches.at(self.step)
        texts, shared = texts_of(batch), self._shared([batch], {})
        own = in_halves(len(texts), self.ranks.data)
        places = [self._placed(text, shared) for text in texts[own]]
        step = TrainingStep(self.plan.checkpoint, self.scaler, self.plan.seed)
        numbers = [(self.step << 32) + place for place in range(len(texts))[own]]
        pairs = self.executor.gradients(places, step, numbers, self.plan.neftune)
        with self.routing.counting():
            passes = self._passes(pairs, [self.step] * len(places))
            loss, sums = self.executor.summed_by_text(passes, own, len(texts))
        return loss, batch.real, sums

    def _passes(
        self, pairs: Iterator[tuple[Any, dict[str, Array]]], numbers: Sequence[int]
    ) -> Iterator[tuple[Any, dict[str, Array]]]:
        """Yield the losses and gradients of passes; ``numbers`` are the numbers of their batches.

        Before each pass the run may stop.  A value that is not finite stops it.
        """
        for number in numbers:
            self.stop.check()
            with self._finite(), self._watched(number):
                each = next(pairs, None)
            if each is None:  # a pipeline yields all batches as one pass
                return
            yield each
            if number != numbers[-1]:
                self.callbacks.call("on_substep_end")

    def _drawn(self, numbers: range) -> list[Batch]:
        """Return the answers to batches of prompts, sampled now or in an earlier step."""
        every, answers = self.method.drawn_with(numbers[0]), self.checkpoints.answers
        if self.step % self.method.updates(self.plan.accumulate) == 0:
            answers.clear()
            prompts = [self.training_data.batches.at(number) for number in every]
            with self._finite():
                answers += self.method.drawn(self, prompts, every)
        place = numbers[0] - every[0]
        return answers[place : place + len(numbers)]

    @contextmanager
    def _finite(self, *, after: bool = False) -> Iterator[None]:
        """Stop the run if the ``with`` block raises an error for values that are not finite."""
        try:
            yield
        except (NonFiniteError, NotFiniteError) as error:
            self._stop(str(error), after=after)

    def _evaluated(self) -> dict[str, Any]:
        """Return the numbers of an evaluation; drop the graphs where it needs their memory."""
        if self.method.is_on_policy or self.ranks.replicas.size > 1:  # all ranks evaluate once
            self.model.graphs.clear()
            return self.method.evaluated(self) if self.method.is_on_policy else self._held_out()
        try:
            return self._held_out()
        except MemoryError:
            if not self.model.graphs.by_form:
                raise
        self.model.graphs.clear()
        return self._held_out()

    def _evaluate(self) -> None:
        """Evaluate, and log the evaluation loss and other measures of the method."""
        with self._finite(after=True):
            own = self._evaluated()
        line = {"step": self.step, **own}
        if self.plan.keeps_best:
            self._keep_if_best(line["held_out_loss"])
        self._log(line)
        if (routes := self.routing.line(self.step)) is not None and self.ranks.first:
            self.run.append_routes(routes)
        self.callbacks.logged(line)
        self.listener.evaluated(line)
        write_samples(self)

    def _held_out(self) -> dict[str, Any]:
        """Return the measures of an evaluation; for next tokens, the loss is in nats per token."""
        batches, method, data = self.training_data.held_out, self.method, self.executor.data
        own = batches[data.rank :: data.size]
        if self.executor.together and data.rank >= len(batches) % data.size > 0:
            own = [*own, without_texts(batches[0])]  # equal numbers of batches on all ranks
        constants = method.before(self.model, own, data.all_reduce)
        shared, count = self._shared(batches, constants), sum(b.label_count for b in batches)
        each = [
            self._placed(batch, shared if method.sums else method.counts([batch]))
            for batch in batches
        ]
        total, parts = 0.0, list[Array]()
        for number, (loss, *more) in enumerate(self.executor.held_out(each, method.sums)):
            if not math.isfinite(loss):
                with self._watched(number, held_out=True):
                    next(self.executor.gradients([each[number]], TrainingStep()))
                self._stop(f"the evaluation loss is {loss:g}", after=True)
            total += loss * (1 if method.sums else batches[number].label_count)
            parts.append(np.array(more))
        line: dict[str, Any] = {"held_out_loss": total if method.sums else total / count}
        line |= {f"held_out_{method.unit}": count}
        if self.training_data.baseline is not None:
            line["unigram_baseline"] = self.training_data.baseline
        if method.sums:
            named_sums = method.measures(method.joined(parts), **constants).items()
            line |= {f"held_out_{name}": number for name, number in named_sums}
        else:
            usual = self.executor.objective is next_token
            loss = line["held_out_loss"]
            counts = Counts(*np.sum(parts, axis=0).tolist())
            line |= measures(loss, counts, count, of_next_token=usual)
        return line

    def _keep_if_best(self, loss: float) -> None:
        """Save the model if no earlier evaluation loss was as low.

        The loss is logged later: a run that is killed in between evaluates again, with equal bits.
        """
        best = self.run.best() if self.ranks.first else None
        if self.ranks.broadcast(best is None or loss < best["held_out_loss"]):
            self.stop.uninterruptible(f"after saving the best model (step {self.step})")
            self.checkpoints.write_model(self.run.best_model, self.plan.save_dtype)

    def check(self) -> None:
        """Raise a ConfigError for settings that do not fit the model or the ranks."""
        if self.plan.merge_from >= self.plan.steps:
            problem = f"the run has only {self.plan.steps} steps, so it would have no effect"
            cure = "give fewer, or leave it out"
            raise ConfigError(f"{named(merge_from=self.plan.merge_from)}: {problem}; {cure}")
        if self.plan.neftune and self.executor.stages:
            problem = "is not supported when ranks split the layers"
            raise ConfigError(f"{named('neftune')} {problem}; leave it out")
        check_prompts(self)
        if self.plan.router_bias_update_rate:
            self._check_biases()
        if self.plan.mtp_weight:
            self._check_draft_heads()
        if self.plan.embedding_lr is not None and not of_tables(self.model.trainable):
            problem = "the run trains neither the embedding nor the head"
            cure = f"leave it out, or train embedding rows with {named('new_tokens')}"
            raise ConfigError(f"{named(embedding_lr=self.plan.embedding_lr)}: {problem}; {cure}")

    def _check_draft_heads(self) -> None:
        """Raise a ConfigError unless the run can train draft heads."""
        problem = undrafted(self.model)
        if not self.model.config.draft_heads:
            problem = "trains draft heads, and the model's files have none; leave it out"
        if problem is not None:
            raise ConfigError(f"{named(mtp_weight=self.plan.mtp_weight)} {problem}")

    def _check_biases(self) -> None:
        """Raise a ConfigError unless the routers have biases that a file of the run stores."""
        name, experts = self.model.config.model_type, self.model.config.experts
        if self.model.adapter is not None:
            problem = "changes weights of the model, which the file of an adapter does not store"
        elif experts is None or not experts.corrected:
            why = "it has no experts" if experts is None else "none is in its files"
            problem = f"changes the biases that routers add to choose experts; {name}: {why}"
        else:
            return
        raise ConfigError(f"{named('router_bias_update_rate')} {problem}; leave it out")

    def _placed(self, batch: Batch, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the objective: arrays on the device, and shared values."""
        arrays = self.method.inputs(batch)
        if "filled" in batch.facts:
            arrays["filled"] = batch.facts["filled"]
        return {**placed(arrays, self.model.table), **shared}

    def _shared(
        self, batches: Sequence[Batch], numbers: Mapping[str, Any], *, padded: bool = False
    ) -> dict[str, Any]:
        """Return the divisors and constants of a step's losses; ``before`` returned ``numbers``.

        ``padded``: numbers are arrays on the device, as a CUDA graph repeats numbers of the host.
        """
        shared = self.method.counts(batches)
        shared |= {name: numbers[name] for name in self.method.constants}
        if padded:
            arrays = {name: np.array(each, FLOAT32) for name, each in shared.items()}
            shared = placed(arrays, self.model.table)
        return shared

    @property
    def _scale_may_shrink(self) -> bool:
        """Whether the loss scaler handles gradients that are not finite, with a smaller scale."""
        return self.scaler.dynamic and self.scaler.value > self.scaler.minimum

    @contextmanager
    def _watched(self, batch: int, *, held_out: bool = False) -> Iterator[None]:
        """With ``find_nan``, stop the run at the first value that is not finite."""
        if not self.plan.find_nan:
            yield
            return
        parameters = self.model.parameters | self.model.trainable
        try:
            with find_nan(parameters, gradients=not self._scale_may_shrink):
                yield
        except NonFiniteError as error:
            name = f"batch {batch} ({self.training_data.batches.where(batch)})"
            name = f"evaluation batch {batch}" if held_out else name
            self._stop(f"{name}: {error}", after=held_out)

    def _stop(self, problem: str, *, after: bool = False) -> NoReturn:
        """Raise a ConfigError for a value that is not finite.

        ``after``: in work after this step, such as an evaluation; else in the next step.
        """
        when = f"after step {self.step}" if after else f"step {self.step + 1}"
        good = self.checkpoints.last_good()
        checkpoint = "" if good is None else f"; the last good checkpoint is {good}"
        cure = f"try a smaller {named('lr')} than {self.plan.lr:g}"
        if self.step == 0:  # no step has changed a weight: the model or the data are at fault
            other = f", or try {named(dtype='bfloat16')}"
            cure = self._smaller() + "copy the model again" + other * self.scaler.dynamic
        more = (
            ""
            if self.plan.find_nan
            else f"; use {named('find_nan')} to see the layer where it begins"
        )
        raise ConfigError(f"{when}: {problem}; {cure}{more}{checkpoint}")

    def _smaller(self) -> str:
        """Return advice for very large numbers in the data, to be put before other advice."""
        held = held_arrays(self.model.parameters | self.model.trainable)
        if not all(fine(name, array) for name, array in held):
            return ""
        if self.method.is_on_policy:
            return "use smaller rewards, or "
        batches = map(self.training_data.batches.at, range(self.plan.accumulate))
        values = (np.abs(each.beside.get("value", np.zeros(1))) for each in batches)
        large = any((each > LARGEST).any() for each in values)
        return "use smaller numbers in the data, or " if large else ""

    def save(self) -> Path:
        """Write a checkpoint of this step; the previous one is deleted after the next step."""
        self.stop.uninterruptible(f"after saving the checkpoint of step {self.step}")
        path = self.checkpoints.path(self.step)
        if broken := self.checkpoints.broken():
            self._stop(f"the weight {broken} is not finite", after=True)
        if not self.ranks.broadcast(path.exists()):
            self.checkpoints.write(self.step, self.seconds)
            self.callbacks.call("on_save")
        return path

    def resume(self, checkpoint: Path) -> None:
        """Resume from a checkpoint; the model is already loaded from it."""
        self.step, self.seconds = self.checkpoints.read(checkpoint)
        self._settle()
