"""Callbacks of a run, with the events and arguments of transformers' ``TrainerCallback``.

    class Until(Callback):
        def on_evaluate(self, args, state, control, metrics, **more):
            if metrics["eval_loss"] < 2:
                control.should_training_stop = True

A callback of transformers itself works too, such as its ``EarlyStoppingCallback``.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError
from ..methods.registry import MEASURES

LOGS = {"loss": "loss", "gradient_norm": "grad_norm", "lr": "learning_rate", **MEASURES}
METRICS = {
    "held_out_loss": "eval_loss", "perplexity": "eval_perplexity",
    "token_accuracy": "eval_token_accuracy", "entropy": "eval_entropy",
    **{f"held_out_{name}": f"eval_{other}" for name, other in MEASURES.items()},
}  # fmt: skip
METRIC = {f"{kind}rewards/{name}": f"{kind}{new}" for kind in ("", "eval_") for name, new in (
    ("accuracies", "accuracy"), ("margins", "margin"))}  # fmt: skip


@dataclasses.dataclass
class Control:
    """Requests of callbacks; all flags except the first are reset after the request is handled.

    Attributes
    ----------
    should_training_stop : bool
        End the run after this step: the model is saved, and the run is finished.
    should_epoch_stop : bool
        The same as ``should_training_stop``, because a batch may span two epochs.
    should_save, should_evaluate, should_log : bool
        Write a checkpoint, evaluate, or write a line of the log, after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


@dataclasses.dataclass
class State:
    """The progress of a run.

    Attributes
    ----------
    global_step, max_steps : int
        Steps so far, and in total.
    epoch : float
        Passes through the data so far.
    log_history : list of dict
        The ``logs`` of all calls of ``on_log`` in this process.
    best_metric, best_global_step
        The lowest evaluation loss, and its step; None before an evaluation.  In ``on_evaluate``
        they do not include the present evaluation, as in transformers.
    logging_steps, eval_steps, save_steps, train_batch_size, num_train_epochs
        The same values as in ``args``.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    run_name: str = ""
    output_dir: str = ""
    logging_steps: int = 1
    eval_steps: int = 1
    save_steps: int = 1
    train_batch_size: int = 1
    num_train_epochs: int | None = None
    best_model_checkpoint: str | None = None
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None


class Callback:
    """Handles the events of a run, on rank 0.  Each method does nothing: override it.

    ``args`` are the settings, also by the names of ``TrainingArguments``; ``state`` is the progress
    of the run; flags in ``control`` are requests; ``more`` has ``model``, ``optimizer`` and
    ``processing_class`` (the tokenizer).
    """

    def on_init_end(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the end of the preparation: model and data are ready."""

    def on_train_begin(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the start of training, also in a resumed run."""

    def on_train_end(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the end of training, at its last step or by an error."""

    def on_epoch_begin(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the start of a pass through the data, with the next step."""

    def on_epoch_end(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the end of a pass through the data, within the last step."""

    def on_step_begin(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the start of a step."""

    def on_substep_end(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the gradients of a batch other than the step's last."""

    def on_pre_optimizer_step(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the gradients of a step before the optimizer; they are finite."""

    def on_optimizer_step(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the update of the weights."""

    def on_step_end(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the end of a step."""

    def on_log(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle ``logs`` of a step or an evaluation, and ``line``, the whole line of the log."""

    def on_evaluate(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle the ``metrics`` of an evaluation: eval_loss, eval_perplexity, ..."""

    def on_save(self, args: Any, state: State, control: Control, **more: Any) -> Any:
        """Handle a written checkpoint."""


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


def checked(callbacks: Iterable[Any]) -> list[Any]:
    """Return callbacks, with classes instantiated; raise a ConfigError for other objects."""
    values: Any = callbacks
    if not isinstance(values, list | tuple):
        raise ConfigError(f"Trainer(callbacks={values!r}): pass a list of callbacks")
    each = [callback() if isinstance(callback, type) else callback for callback in values]
    for callback in each:
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            cure = f"subclass Callback, and define one of {', '.join(EVENTS)}"
            raise ConfigError(f"Trainer(callbacks=[{callback!r}]) handles no event; {cure}")
    return each


class Callbacks:
    """Calls the callbacks of a loop, and collects their requests."""

    def __init__(self, callbacks: list[Any], loop: Any, name: str) -> None:
        self.callbacks, self.loop, self.control = callbacks, loop, Control()
        self.args = dataclasses.replace(loop.plan, out=str(loop.run.folder))
        same = "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"
        self.state = State(
            max_steps=loop.plan.steps, run_name=name, output_dir=str(loop.run.folder),
            **{each: getattr(self.args, each) for each in same},
        )  # fmt: skip
        if callbacks:
            self._update()

    def _update(self) -> None:
        loop, state = self.loop, self.state
        state.global_step = loop.step
        accumulate = loop.plan.accumulate
        start = loop.step - loop.step % loop.method.updates(accumulate)
        first = loop.method.first(start, accumulate)
        state.epoch = loop.training_data.batches.epoch(first)

    def call(self, event: str, **more: Any) -> None:
        """Call a method of all callbacks; a callback may return a new control."""
        if not (self.callbacks and self.loop.ranks.first):
            return
        self._update()
        if event == "on_train_begin":  # a resumed run may have evaluations
            self._compare()
        loop = self.loop
        more |= {"model": loop.model, "optimizer": loop.optimizer}
        more |= {"processing_class": loop.tokenizer}
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                self.control = method(self.args, self.state, self.control, **more) or (self.control)

    def logged(self, line: Mapping[str, Any]) -> None:
        """Call ``on_log`` with a line of the log, by the names of transformers."""
        if not (self.callbacks and self.loop.ranks.first):
            return
        self._update()
        names = METRICS if "held_out_loss" in line else LOGS
        of_head = self.loop.method.head is not None  # its measures are not rewards
        logs = {
            METRIC.get(new, new) if of_head else new: line[old]
            for old, new in names.items()
            if line.get(old) is not None
        }
        logs["epoch"] = self.state.epoch
        self.state.log_history.append(logs | {"step": line["step"]})
        self.call("on_log", logs=dict(logs), line=dict(line))
        if "held_out_loss" in line:
            self.call("on_evaluate", metrics=dict(logs))
            self._compare()

    def _compare(self) -> None:
        """Set the best evaluation from the log."""
        best = self.loop.run.best() or {}
        self.state.best_metric = best.get("held_out_loss")
        self.state.best_global_step = best.get("step")

    def epochs(self, before: float) -> None:
        """Call ``on_epoch_end`` for each pass through the data that ended since ``before``."""
        if self.callbacks and self.loop.ranks.first:
            self._update()
            for _ in range(int(self.state.epoch) - int(before)):
                self.call("on_epoch_end")
                if self.loop.step < self.loop.plan.steps:
                    self.call("on_epoch_begin")

    def take(self) -> Control:
        """Return the requests of this step, equal on all ranks, and reset the flags of one step."""
        if not self.callbacks:
            return self.control
        names = [field.name for field in dataclasses.fields(Control)]
        own = "".join("01"[bool(getattr(self.control, name))] for name in names)
        flags = Control(*(flag == "1" for flag in self.loop.ranks.broadcast(own)))
        ends = flags.should_training_stop or flags.should_epoch_stop
        self.control = Control(should_training_stop=ends)
        return dataclasses.replace(flags, should_training_stop=ends)
