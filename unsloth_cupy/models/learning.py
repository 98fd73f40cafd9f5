"""The loss of a model and its gradients, for the methods of ``Transformer``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..training.checkpoint import CheckpointConfig
from ..training.loss_scaler import LossScaler
from ..training.tape import Tape
from .context import Context, own_tokens
from .loss import count_labels, head_weight, loss_on_tape, losses_of, next_labels
from .network import Network


def mean_loss(
    model: Network, tokens: Array, labels: Array, mask: Array | None, offsets: Array | None
) -> Any:
    """Return the mean negative log probability of the labels."""
    parameters = model.entered(model.parameters)
    context = Context.of(model.context, tokens, mask, offsets, model.context_attention)
    x = model.hidden(parameters, tokens, mask=mask, offsets=offsets, context=context)
    shifted = next_labels(tokens, labels, offsets)
    own_labels = own_tokens(context, shifted)
    head = head_weight(model.config, parameters)
    losses = losses_of(model.config, x, head, own_labels, model.division)
    return losses.sum(dtype=np.float64) / count_labels(shifted)


def loss_and_gradients(
    model: Network,
    trainable: Mapping[str, Array],
    tokens: Array,
    labels: Array,
    mask: Array | None,
    offsets: Array | None,
    checkpoint: CheckpointConfig | None,
    scaler: LossScaler | None,
    seed: int | None,
    count: Any,
) -> tuple[Any, dict[str, Array]]:
    """Return the loss, and its gradient with respect to each trainable array."""
    quiet: Any = {} if scaler is None else {"over": "ignore", "invalid": "ignore"}
    tape = Tape()
    watched = {name: tape.watch(array) for name, array in trainable.items()}
    parameters = model.entered({**model.parameters, **watched})
    with np.errstate(**quiet):
        context = Context.of(model.context, tokens, mask, offsets, model.context_attention)
        x = model.hidden(
            parameters, tokens, checkpoint, mask=mask, seed=seed, offsets=offsets, context=context
        )
        shifted = next_labels(tokens, labels, offsets)
        n, own = count_labels(shifted) if count is None else count, own_tokens(context, shifted)
        root, loss = loss_on_tape(model.config, parameters, x, own, n, scaler, model.division)
        gradients = tape.gradients(root, [*watched.values()], release=True)
    return loss, dict(zip(watched, gradients, strict=True))
