"""The losses of sequence classifiers and token classifiers.

    squared error               (z - y)²
    cross entropy               -log softmax(z)[y]
    binary cross entropy        -y log s(z) - (1 - y) log s(-z)        s(z) = 1 / (1 + exp(-z))

``problem_type`` in config.json chooses the loss; without it, the dtype and shape of the labels do,
by the rules of transformers.
"""

from typing import Any, NamedTuple

import numpy as np

from ..core import arrays
from ..core.dtypes import FLOAT32, Array
from ..errors import ConfigError, DTypeError, RangeError, ShapeError
from ..ops.elements.cast import cast
from ..ops.losses.cross_entropy import cross_entropy
from ..placement import full_like
from ..training.tape import Gradients, add_up
from ..training.variable import Var
from .configs.heads import PROBLEMS, TOKEN
from .objective import IGNORE, LossRecord, as_array

REGRESSION, SINGLE, MULTI = PROBLEMS


def mean_label_loss(
    model: Any, tokens: Array, labels: Array, mask: Any, offsets: Any, count: Any
) -> Any:
    """Return sum(losses) / count: a float32 Var on a tape, otherwise float64.

    ``count`` is by default the number of labels other than IGNORE.
    """
    if model.context is not None:
        problem = f"a {model.config.head} model reads whole rows, and ranks divide them"
        raise ConfigError(f"loss: {problem}; set context = None, and divide the batch instead")
    arrays.framework_of(labels, "Transformer: labels")  # raises for None and for a number
    arrays.common("Transformer", ("tokens", "labels"), (tokens, labels))
    return mean_of_losses(model, model.logits(tokens, mask=mask, offsets=offsets), labels, count)


def mean_of_losses(model: Any, logits: Any, labels: Array, count: Any) -> Any:
    """Return sum(losses) / count from logits: see ``mean_label_loss``."""
    problem = _problem(model, logits, labels)
    _check(problem, logits, labels)
    losses: Any = _losses(problem, logits, labels)
    if count is None:
        count = (labels != IGNORE).sum().clip(1)
    if type(losses) is not Var:
        return losses.sum(dtype=np.float64) / count
    value, scaler = losses.value, model.step.scaler
    loss = value.sum(dtype=np.float64) / count
    root = Var(as_array(loss.astype(value.dtype)), losses.tape)
    dlosses, one = (np.ones_like(value) / count).astype(value.dtype), full_like(root.value, 1)
    if scaler is not None:
        one, dlosses = scaler.scale(one), scaler.scale(dlosses)
    losses.tape.note(
        LossRecord(
            {"losses": value}, {"losses": losses.index}, {"loss": root.index},
            {"losses": dlosses}, one, scaler, loss,
        )
    )  # fmt: skip
    return root


def _problem(model: Any, logits: Any, labels: Array) -> str:
    """Return the problem_type of config.json, or else the one that the labels imply."""
    named = model.texts.get("config.json", {}).get("problem_type")
    whole = labels.dtype.kind == "i"
    if model.config.head == TOKEN:
        return SINGLE
    if named is None and labels.ndim == 2 and model.config.labels == 1:
        raise ConfigError(
            f"loss: labels are {tuple(labels.shape)}, and the head has one output; pass"
            " labels.reshape(-1) for a squared error, or set problem_type in config.json"
        )
    kind = SINGLE if whole else REGRESSION if labels.ndim == 1 else MULTI
    return str(named or kind)


def _check(problem: str, logits: Any, labels: Array) -> None:
    """Raise unless the labels fit the logits and the problem."""
    shape, outputs, kind = tuple(logits.shape), logits.shape[-1], labels.dtype.kind
    if problem == SINGLE:
        expected = shape[:-1]
        if kind != "i":
            dtype = labels.dtype
            raise DTypeError(f"loss: labels are {dtype}; for {problem} pass int32 or int64")
        if outputs == 1:
            cure = "pass floats for a squared error"
            raise ConfigError(f"loss: labels are integers, and the head has one output; {cure}")
    else:
        if kind != "f" and labels.dtype != logits.dtype:
            raise DTypeError(f"loss: labels are {labels.dtype}; for {problem} pass floats")
        expected = shape[:1] if problem == REGRESSION and outputs == 1 else shape
        if outputs == 1 and tuple(labels.shape) == shape:
            expected = shape
    if tuple(labels.shape) != expected:
        text = f"loss: labels are {tuple(labels.shape)}, logits {shape}; for {problem} the labels"
        raise ShapeError(f"{text} must be {expected}", expected=expected, actual=labels.shape)
    if kind == "i" or type(labels) is not np.ndarray:
        return
    floats = labels.astype(np.float64)
    if not np.isfinite(floats).all():
        raise RangeError("loss: labels contain numbers that are not finite; leave those rows out")
    if problem == MULTI and ((floats < 0) | (floats > 1)).any():
        raise RangeError(f"loss: for {problem} the labels must be in 0 .. 1")


def _losses(problem: str, logits: Any, labels: Array) -> Any:
    """Return the loss of each label, in float32 or wider."""
    if problem == SINGLE:
        return cross_entropy(logits, labels, ignore=IGNORE)
    if logits.dtype.itemsize < FLOAT32.itemsize:
        logits = cast(logits, "float32")
    targets = labels.astype(logits.dtype)
    if problem == REGRESSION:
        difference = logits.reshape(*targets.shape) - targets
        return difference * difference
    z = getattr(logits, "value", logits)
    losses = z.clip(0) - z * targets + np.log1p(np.exp(-np.abs(z)))
    if type(logits) is not Var:
        return losses
    result = Var(losses, logits.tape)
    values = {"z": z, "labels": targets}
    logits.tape.note(BinaryRecord(values, {"z": logits.index}, {"loss": result.index}))
    return result


class BinaryRecord(NamedTuple):
    """A tape entry of binary cross entropy: -y log s(z) - (1 - y) log s(-z)."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add dz = dloss (s(z) - y)."""
        z, labels, index = self.values["z"], self.values["labels"], self.inputs["z"]
        sigmoid = np.exp(-np.logaddexp(z.dtype.type(0), -z))
        dz = take["loss"] * (sigmoid - labels)
        grads[index] = add_up(grads.get(index), dz)
