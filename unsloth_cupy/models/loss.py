"""The loss of the next token: labels moved by one, the mean, and its gradient on a tape."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import arrays
from ..core.call import is_number
from ..core.dtypes import FLOAT32, Array
from ..errors import ConfigError, DTypeError, ShapeError
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


def next_labels(tokens: Array, labels: Array, offsets: Array | None) -> Array:
    """Return what each token is to predict: the label after it, or IGNORE at its text's end."""
    arrays.framework_of(labels, "loss: labels")  # None and a number are none
    arrays.common("loss", ("tokens", "labels"), (tokens, labels))
    if labels.shape != tokens.shape:
        problem = f"loss: labels are {labels.shape}, tokens {tokens.shape}; make equal"
        raise ShapeError(problem, expected=tuple(tokens.shape), actual=tuple(labels.shape))
    if labels.dtype.kind != "i":
        raise DTypeError(f"loss: labels are {labels.dtype}; they must be int32 or int64")
    if offsets is not None:  # rows go on in each other, texts do not
        labels = labels.reshape(1, -1)
    shifted: Array = full_like(labels, IGNORE)
    shifted[:, :-1] = labels[:, 1:]
    if offsets is not None and shifted.size:
        shifted[0, offsets[1:] - 1] = IGNORE
    return shifted


def count_labels(shifted: Array) -> Any:
    """Return how many labels count, at least 1, without asking a GPU."""
    return (shifted != IGNORE).sum().clip(1)


class Found(NamedTuple):
    """A loss on a tape whose gradients were found with it: logits are made once, not twice."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    found: dict[str, Any]  # gradients of the inputs, for a gradient of 1 of the loss

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add what was found to the gradients of these inputs."""
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), self.found[name])


def head_weight(config: Config, parameters: Mapping[str, Any]) -> Any:
    """Return the weight of the output head, which some models share with the embedding."""
    return parameters["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def logits_of(
    config: Config, parameters: Mapping[str, Any], x: Array, division: Division | None = None
) -> Array:
    """Return the logits of normed hidden states, of all words."""
    logits, cap = linear(x, head_weight(config, parameters)), config.logit_softcap
    if division is not None:
        logits = division.comm.all_gather(logits, -1)
    if cap is None:
        return logits
    wide = logits if logits.dtype.itemsize > 2 else logits.astype(FLOAT32)
    return (np.tanh(wide / cap) * cap).astype(logits.dtype, copy=False)


def losses_of(config: Config, x: Any, head: Any, shifted: Array, division: Division | None) -> Any:
    """Return the loss of every label, of normed hidden states and the weight of the head."""
    options: dict[str, Any] = {"ignore": IGNORE, "softcap": config.logit_softcap}
    if division is None:
        return linear_cross_entropy(x, head, shifted, **options)
    return vocab_parallel_linear_cross_entropy(
        x, head, shifted, config.vocab, comm=division.comm, **options
    )


def loss_on_tape(
    config: Config,
    parameters: Mapping[str, Any],
    x: Var,
    shifted: Array,
    count: Any,
    scaler: LossScaler | None,
    division: Division | None = None,
) -> tuple[Var, Any]:
    """Return (Var to differentiate, loss): the sum over labels by count, scaled in the Var.

    The gradient of a mean is known before the losses are, which is what saves a product.
    """
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise ConfigError(f"loss_and_gradients(scaler={scaler!r}): pass a LossScaler, or None")
    if not hasattr(count, "dtype") and not (is_number(count) and count > 0):
        raise ConfigError(f"loss_and_gradients(count={count!r}): pass how many labels, 1 or more")
    tape, head = x.tape, head_weight(config, parameters)
    values = {"x": x.value, "weight": getattr(head, "value", head)}
    wide = np.promote_types(x.dtype, FLOAT32)
    share = (np.ones_like(x.value, wide, shape=shifted.shape) / count).astype(wide)
    share = share if scaler is None else scaler.scale(share)
    inputs = {name: var.index for name, var in (("x", x), ("weight", head)) if type(var) is Var}
    if division is None:
        losses, dx, dweight = tape.run(
            linear_cross_entropy_gradients,
            [*values.values(), shifted, share],
            {"ignore": IGNORE, "softcap": config.logit_softcap, "wanted": frozenset(inputs)},
        )
    else:  # no op makes both passes there: a tape of its own does
        own = Tape()
        given = {n: own.watch(value) if n in inputs else value for n, value in values.items()}
        of_all = losses_of(config, given["x"], given["weight"], shifted, division)
        token = take_gradients.set(None)  # who takes those of the whole step takes none of these
        try:
            found = own.gradients(of_all, [given[name] for name in inputs], share)
        finally:
            take_gradients.reset(token)
        made = dict(zip(inputs, found, strict=True))
        losses, dx, dweight = of_all.value, made.get("x"), made.get("weight")
    of = Var(np.zeros_like(losses, shape=()), tape)  # its place on the tape matters, not its number
    tape.note(Found(values, inputs, {"loss": of.index}, {"x": dx, "weight": dweight}))
    return of, losses.sum(dtype=np.float64) / count
