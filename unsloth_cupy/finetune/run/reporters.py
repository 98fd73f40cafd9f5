"""Callbacks that log a run to TensorBoard, W&B, trackio or MLflow.

Each uses the package of the tracker, with its environment variables: WANDB_PROJECT, WANDB_MODE,
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR, ...
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .callbacks import Callback

PROJECT = "unsloth-cupy"  # default project; environment variables override it


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return logs with names in the two groups of trackers: train/loss, eval/loss."""
    parts = {
        n: n.replace("eval_", "eval/") if n.startswith("eval_") else f"train/{n}" for n in logs
    }
    return {parts[name]: float(value) for name, value in logs.items()}


def texts(args: Any) -> dict[str, Any]:
    """Return settings as numbers and texts."""
    plain = (bool, int, float, str, type(None))
    each = dataclasses.asdict(args)
    return {n: v if isinstance(v, plain) else str(v) for n, v in each.items()}


class TensorBoardCallback(Callback):
    """Writes event files into the folder ``tensorboard`` of the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Open the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary = Event, Summary
        self.writer = EventFileWriter(os.path.join(state.output_dir, "tensorboard"))

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write the numbers of a line."""
        import time

        each = numbers(more["logs"]).items()
        values = [self.summary.Value(tag=name, simple_value=number) for name, number in each]
        summary = self.summary(value=values)
        self.writer.add_event(
            self.event(step=state.global_step, wall_time=time.time(), summary=summary)
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close the file."""
        self.writer.close()


class WandbCallback(Callback):
    """Logs to Weights & Biases; with WANDB_MODE=offline the run stays on this machine."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin a run."""
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = wandb.init(
            project=project, name=state.run_name, dir=state.output_dir, config=texts(args)
        )

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Log the numbers of a line."""
        self.run.log(numbers(more["logs"]) | {"train/global_step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the run."""
        self.run.finish()


class TrackioCallback(Callback):
    """Logs to trackio, on this machine or in the space TRACKIO_SPACE_ID."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin a run."""
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.run = trackio.init(
            project=project, name=state.run_name, config=texts(args), embed=False,
            space_id=os.environ.get("TRACKIO_SPACE_ID"), resume="allow",
        )  # fmt: skip

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Log the numbers of a line."""
        self.run.log(numbers(more["logs"]), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the run."""
        self.run.finish()


class MlflowCallback(Callback):
    """Logs to MLflow."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin a run."""
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=state.run_name)
        mlflow.log_params({name: str(value)[:500] for name, value in texts(args).items()})

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Log the numbers of a line."""
        self.mlflow.log_metrics(numbers(more["logs"]), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the run."""
        self.mlflow.end_run()


REPORTERS: Mapping[str, type[Callback]] = {
    "tensorboard": TensorBoardCallback,
    "wandb": WandbCallback,
    "trackio": TrackioCallback,
    "mlflow": MlflowCallback,
}


def reporters(names: Any) -> list[Callback]:
    """Return the callbacks for ``report_to``; raise for an unknown name or a missing package."""
    from importlib.util import find_spec

    for name in names:
        if name not in REPORTERS:
            known = ", ".join(REPORTERS)
            raise ConfigError(f"report_to names {name!r}; choose from {known}")
        if find_spec(name) is None:
            extra = f"pip install 'unsloth_cupy[{name}]'"
            raise ConfigError(f"report_to {name} needs the package {name}; install it with {extra}")
    return [REPORTERS[name]() for name in names]
