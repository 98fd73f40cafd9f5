"""The next-token loss: labels shifted by one, their mean loss, and its gradient on a tape."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import arrays
from ..core.call import is_number
from ..core.dtypes import FLOAT32, Array
from ..errors import ConfigError, DTypeError, ShapeError, naming
from ..ops.linear.linear import linear
from ..ops.losses.linear_cross_entropy import linear_cross_entropy
from ..ops.losses.linear_cross_entropy_gradients import linear_cross_entropy_gradients
from ..parallel.vocabulary import vocab_parallel_linear_cross_entropy
from ..placement import full_like
from ..training.loss_scaler import LossScaler
from ..training.tape import Gradients, Tape, add_up, take_gradients
from ..training.variable import Var
from .config import Config
from .division import Division

IGNORE = -100  # the label of a token that does not count
LOSSES = (  # functions that check labels
    *("linear_cross_entropy", "linear_cross_entropy_gradients"),
    "vocab_parallel_linear_cross_entropy",
)


def next_labels(tokens: Array, labels: Array, offsets: Array | None) -> Array:
    """Return the label that each token predicts: the next one, or IGNORE at its text's end."""
    arrays.framework_of(labels, "Transformer: labels")  # raises for None and for a number
    arrays.common("Transformer", ("tokens", "labels"), (tokens, labels))
    if labels.shape != tokens.shape:
        problem = f"Transformer: labels are {labels.shape}, tokens {tokens.shape}; make them equal"
        raise ShapeError(problem, expected=tuple(tokens.shape), actual=tuple(labels.shape))
    if labels.dtype.kind != "i":
        raise DTypeError(f"Transformer: labels are {labels.dtype}; they must be int32 or int64")
    if offsets is not None:  # a packed text may continue in the next row
        labels = labels.reshape(1, -1)
    shifted: Array = full_like(labels, IGNORE)
    shifted[:, :-1] = labels[:, 1:]
    if offsets is not None and shifted.size:
        shifted[0, offsets[1:] - 1] = IGNORE
    return shifted


def count_labels(shifted: Array) -> Any:
    """Return how many labels count, at least 1, without synchronising a GPU."""
    return (shifted != IGNORE).sum().clip(1)


class LossRecord(NamedTuple):
    """A tape entry of a loss computed together with its gradients: logits are computed once."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    gradients: dict[str, Any]  # of the inputs, for a gradient of 1 of the loss

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the stored gradients to those of these inputs."""
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), self.gradients[name])


def head_weight(config: Config, parameters: Mapping[str, Any]) -> Any:
    """Return the weight of the output head, which some models share with the embedding."""
    return parameters["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def logits_of(
    config: Config, parameters: Mapping[str, Any], x: Array, division: Division | None = None
) -> Array:
    """Return the logits of normalised hidden states, for the whole vocabulary."""
    logits, cap = linear(x, head_weight(config, parameters)), config.logit_softcap
    if division is not None:
        logits = division.comm.all_gather(logits, -1)
    if cap is None:
        return logits
    float_logits = logits if logits.dtype.itemsize > 2 else logits.astype(FLOAT32)
    return (np.tanh(float_logits / cap) * cap).astype(logits.dtype, copy=False)


@naming("Transformer", *LOSSES)
def losses_of(config: Config, x: Any, head: Any, shifted: Array, division: Division | None) -> Any:
    """Return the loss of every label, from normalised hidden states and the head's weight."""
    options: dict[str, Any] = {"ignore": IGNORE, "softcap": config.logit_softcap}
    if division is None:
        return linear_cross_entropy(x, head, shifted, **options)
    return vocab_parallel_linear_cross_entropy(
        x, head, shifted, config.vocab, comm=division.comm, **options
    )


@naming("Transformer", *LOSSES)
def loss_on_tape(
    config: Config,
    parameters: Mapping[str, Any],
    x: Var,
    shifted: Array,
    count: Any,
    scaler: LossScaler | None,
    division: Division | None = None,
) -> tuple[Var, Any]:
    """Return (Var to differentiate, loss): the sum of losses / count; the Var's is scaled.

    The gradient of a mean does not depend on the losses, so loss and gradients are computed in one
    pass, which saves one matrix product.
    """
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise ConfigError(f"loss_and_gradients(scaler={scaler!r}): pass a LossScaler, or None")
    if not hasattr(count, "dtype") and not (is_number(count) and count > 0):
        raise ConfigError(f"loss_and_gradients(count={count!r}): pass how many labels, 1 or more")
    tape, head = x.tape, head_weight(config, parameters)
    values = {"x": x.value, "weight": getattr(head, "value", head)}
    sum_type = np.promote_types(x.dtype, FLOAT32)
    dloss = (np.ones_like(x.value, sum_type, shape=shifted.shape) / count).astype(sum_type)
    dloss = dloss if scaler is None else scaler.scale(dloss)
    inputs = {name: var.index for name, var in (("x", x), ("weight", head)) if type(var) is Var}
    if division is None:
        losses, dx, dweight = tape.run(
            linear_cross_entropy_gradients,
            [*values.values(), shifted, dloss],
            {"ignore": IGNORE, "softcap": config.logit_softcap, "wanted": frozenset(inputs)},
        )
    else:  # no op does both passes across ranks: a separate tape does
        own = Tape()
        own_values = {n: own.watch(value) if n in inputs else value for n, value in values.items()}
        losses_var = losses_of(config, own_values["x"], own_values["weight"], shifted, division)
        token = take_gradients.set(None)  # callbacks of the whole step must not see these
        try:
            own_gradients = own.gradients(losses_var, [own_values[name] for name in inputs], dloss)
        finally:
            take_gradients.reset(token)
        by_name = dict(zip(inputs, own_gradients, strict=True))
        losses, dx, dweight = losses_var.value, by_name.get("x"), by_name.get("weight")
    root = Var(full_like(losses, 0, shape=()), tape)  # only its place on the tape is used
    tape.note(LossRecord(values, inputs, {"loss": root.index}, {"x": dx, "weight": dweight}))
    return root, losses.sum(dtype=np.float64) / count
