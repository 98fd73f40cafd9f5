"""Objectives, the functions that training minimises, and the settings of a step.

    objective(model, **batch) -> loss        a scalar; a Var of shape () if the model is on a tape

An objective computes the loss from ``model.logits`` or ``model.loss``.  Training, evaluation and
the memory plan call the same objective.  In a pipeline it runs in the last stage, and may make one
forward pass, with the batch's tokens, mask and offsets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import Array
from ..errors import GradientError
from ..ops.elements.arithmetic import scale_by
from ..placement import full_like
from ..training.checkpoint import CheckpointConfig
from ..training.loss_scaler import LossScaler
from ..training.tape import Gradients, add_up
from ..training.variable import Var

IGNORE = -100  # the label of a row or a token without a loss
Objective = Callable[..., Any]


def next_token(model: Any, **batch: Any) -> Any:
    """Return the mean next-token loss; the batch contains the arguments of ``loss``."""
    return model.loss(**batch)


class TrainingStep(NamedTuple):
    """Settings of a training step that do not depend on the objective."""

    checkpoint: CheckpointConfig | None = None
    scaler: LossScaler | None = None
    seed: Any = None  # of the adapter's dropout, an int or its Seeds; None: no dropout


class Reached(NamedTuple):
    """Results of the stages of a pipeline, which the head continues from."""

    hidden: Any  # the normalised output of the last block
    routes: Any = None  # experts of an earlier pass that the routers used
    sums: Any = None  # sums of the router's loss: see ``sums_of_balance``


class LossRecord(NamedTuple):
    """A tape entry of a loss that is computed together with its gradients."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    gradients: dict[str, Any]  # of the inputs, for an upstream gradient of 1 times the loss scale
    one: Array  # upstream gradient of a backward pass that begins at this loss
    scaler: LossScaler | None
    loss: Any  # in float64

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the stored gradients, times the upstream gradient, to the gradients of the inputs."""
        dloss, share = take["loss"], None
        if dloss is not self.one:  # the backward pass begins at a function of this loss
            one = self.one if self.scaler is None else self.scaler.scale(self.one)
            share = as_array(dloss / one)
        for name, index in inputs.items():
            gradient = self.gradients[name]
            gradient = gradient if share is None else scale_by(gradient, share)
            grads[index] = add_up(grads.get(index), gradient)


def as_array(number: Any) -> Array:
    """Return a NumPy scalar as an array; arrays are returned unchanged."""
    array: Array = np.asarray(number) if isinstance(number, np.generic) else number
    return array


def start_of_backward(loss: Any, scaler: LossScaler | None) -> tuple[Array, Any]:
    """Return the upstream gradient of a step's loss, 1 times the loss scale, and the loss value."""
    if type(loss) is not Var or loss.shape != ():
        shown = repr(loss) if type(loss) is Var else type(loss).__name__
        cure = "return a Var of shape (), computed from the model that the function receives"
        raise GradientError(f"value_and_gradients: function returned {shown}; {cure}")
    last = loss.tape.entries[-1] if loss.tape.entries else None
    if isinstance(last, LossRecord) and last.outputs["loss"] == loss.index:
        return last.one, last.loss
    one, value = full_like(loss.value, 1), loss.value
    value = value[()] if isinstance(value, np.ndarray) else value
    return one if scaler is None else scaler.scale(one), value
