"""The next-token loss: labels shifted by one, their mean loss, and its gradient on a tape."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core import arrays
from ..core.call import is_number
from ..core.dtypes import FLOAT32, Array
from ..core.replay import fixed_order
from ..errors import ConfigError, DTypeError, ShapeError, naming
from ..ops.elements.arithmetic import reshape
from ..ops.losses.linear_cross_entropy import linear_cross_entropy
from ..ops.losses.linear_cross_entropy_gradients import linear_cross_entropy_gradients
from ..ops.losses.linear_log_probs import LogProbs, linear_log_probs
from ..parallel.taped import value_of
from ..parallel.vocabulary import (
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from ..placement import full_like, to_device_of, to_numpy
from ..training.tape import Tape, take_gradients
from ..training.variable import Var
from .adapters.many import ByRows
from .configs.config import Config
from .configs.heads import CAUSAL, CLASSIFIERS, require_head
from .label_loss import mean_label_loss
from .layers.block import embedded
from .layers.context import Context, own_tokens, real_tokens
from .layers.draft_head import draft_states, with_tables
from .layers.elements import taken
from .layers.expert_ranks import balance_of
from .layers.experts_layer import router_loss
from .layers.head import inputs_of_losses
from .network import Network
from .objective import IGNORE, LossRecord, as_array
from .ranks.division import Division
from .ranks.stages import pipeline_results

LOSSES = (  # functions that check labels, whose errors get this caller's name
    *("linear_cross_entropy", "linear_cross_entropy_gradients", "linear_log_probs"),
    *("vocab_parallel_linear_cross_entropy", "vocab_parallel_linear_log_probs"),
)


def next_labels(
    tokens: Array, labels: Array, offsets: Array | None, real: Array | None = None
) -> Array:
    """Return the label that each token predicts: the next one, or IGNORE at the end of a text.

    With ``real``, labels at padding are IGNORE, so that the result equals that of packed texts.
    """
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
    if real is not None:
        shifted[real == 0] = IGNORE
    return shifted


@naming("Transformer", *LOSSES)
def losses_of(config: Config, x: Any, head: Any, shifted: Array, division: Division | None) -> Any:
    """Return the loss of every label, from normalised hidden states and the weight of the head."""
    options: dict[str, Any] = {"ignore": IGNORE, "softcap": config.logit_softcap}
    if division is None:
        return linear_cross_entropy(x, head, shifted, **options)
    return vocab_parallel_linear_cross_entropy(
        x, head, shifted, config.vocab, comm=division.comm, **options
    )


@naming("Transformer", *LOSSES)
def mean_loss(
    model: Network,
    tokens: Array,
    labels: Array,
    mask: Array | None,
    offsets: Array | None,
    count: Any,
    routes: Array | None = None,
) -> Any:
    """Return sum(losses) / count: a float32 Var on a tape, otherwise float64.

    ``count`` is by default the number of target tokens, whose labels are not IGNORE.
    """
    number = is_number(count) and count > 0
    kind = getattr(getattr(count, "dtype", None), "kind", "O")
    scalar = kind in "iuf" and count.shape == ()
    if not (count is None or number or scalar):
        raise ConfigError(f"loss(count={count!r}): pass the number of labels, 1 or more")
    if model.head in CLASSIFIERS:
        if routes is not None:
            raise ConfigError("loss: a classifier does not use routes; leave them out")
        return mean_label_loss(model, tokens, labels, mask, offsets, count)
    require_head("loss", model.config, CAUSAL)
    parameters = model.entered(model.parameters)
    context = Context.of(model.context, tokens, mask, offsets, model.context_attention)
    experts, routers = model.config.experts, list[Any]()
    options: dict[str, Any] = {"mask": mask, "offsets": offsets, "routes": routes}
    options |= {"routers": routers} if model.config.balanced else {}
    x = model.hidden(parameters, tokens, context=context, **options)
    shifted = next_labels(tokens, labels, offsets, mask if model.invariant else None)
    labelled = (shifted != IGNORE).sum().clip(1)  # at least 1, without synchronising a GPU
    count = labelled if count is None else count
    balances = list[tuple[Any, Any]]()
    if experts is not None and model.config.balanced:
        comm = None if model.division is None else model.division.balanced
        groups = [*filter(None, (comm, context and context.comm))]
        logits = [each.logits for each in routers]
        for own, real, targets in _routed(model, logits, shifted, offsets, mask, context):
            number = (targets != IGNORE).sum()
            number = (number if comm is None else comm.all_reduce(number)).clip(1)
            if model.reached is None:
                term = router_loss(experts, own, real, groups)
            else:
                term = balance_of(model.reached.sums, experts.k, groups)
            # This call may be a part of a batch of ``count`` labels: weigh it by its own labels.
            balances.append((term, experts.balance * (number / count)))
    drafts = list[Term]()
    if model.mtp_weight and model.config.draft_heads:
        drafts += _draft_terms(model, parameters, x, (tokens, mask, offsets), shifted)
    shifted = own_tokens(context, shifted)
    terms = [Term(*inputs_of_losses(model.config, parameters, x), shifted), *drafts]
    if type(x) is Var:
        return _on_tape(model, terms, count, balances)
    sums = (
        term.factor * losses_of(model.config, *term[:3], model.slices).sum(dtype=np.float64)
        for term in terms
    )
    return _added(sum(sums) / count, balances)


class Term(NamedTuple):
    """The inputs of the losses of all tokens, and the factor of their sum."""

    x: Any  # normalised states
    head: Any  # weight
    shifted: Array  # the label of each state
    factor: float = 1.0


def _draft_terms(
    model: Network,
    parameters: Mapping[str, Any],
    states: Any,
    batch: tuple[Array, Array | None, Array | None],
    shifted: Array,
) -> Iterator[Term]:
    """Yield the term of each draft head, from the model's states.

    The loss of head k = 1, 2, ... at position t is the cross entropy of the label at t + 1 + k.
    Sums are divided by the same count as the sum of next-token losses.
    """
    if (problem := undrafted(model)) is not None:
        raise ConfigError(f"loss: mtp_weight={model.mtp_weight} {problem}")
    tokens, mask, offsets = batch
    config, weight = model.config, model.mtp_weight / model.config.draft_heads
    call = model.call(parameters, tokens, mask=mask, offsets=offsets)
    following = tokens if offsets is None else tokens.reshape(1, -1)
    if model.gather is not None:
        own = {name: parameters[name] for name in config.draft_tables}
        parameters = {**parameters, **model.gather(own)}
    for number in range(config.draft_heads):
        following = np.concatenate([following[:, 1:], following[:, -1:]], axis=1)
        shifted = next_labels(following, shifted, offsets, mask)  # padding predicts nothing
        own_config, own = with_tables(config, number, parameters)
        embeddings = embedded(own_config, own, following)
        states = draft_states(call, number, states, embeddings, model.step.checkpoint)
        yield Term(*inputs_of_losses(own_config, own, states), shifted, weight)


def undrafted(model: Network) -> str | None:
    """Return why a model's draft heads cannot be trained, with a cure; None if they can."""
    cure = "divide the batch (data parallelism), or leave mtp_weight out: heads stay as they are"
    if model.adapter is not None:
        cure = "leave mtp_weight out, or train without an adapter (--full)"
        return f"trains draft heads, which stay frozen beside an adapter; {cure}"
    if model.invariant:
        return "has no sums in a fixed order; leave invariant or mtp_weight out"
    if model.context is not None or model.division is not None or model.reached is not None:
        return (
            f"trains draft heads, which ranks of tensors, blocks, experts or tokens do not; {cure}"
        )
    return None


def _routed(
    model: Network,
    routers: Sequence[Any],
    shifted: Array,
    offsets: Array | None,
    mask: Array | None,
    context: Context | None,
) -> Iterator[tuple[Sequence[Any], Array | None, Array]]:
    """Yield (router logits, mask of real tokens, labels) for each adapter of rows, or once.

    A router's loss depends on all rows of a batch together.  The rows of each adapter are a batch
    of their own, so that its loss does not depend on the rows of other adapters.
    """
    # The routers of an invariant model get real tokens only, so no mask is needed.
    router_mask = None if model.invariant else mask
    if router_mask is None and model.filled is not None:
        router_mask = np.ones_like(shifted, dtype=bool) & model.real_columns(shifted)
    real, rows = real_tokens(context, router_mask, like=shifted), model.adapter
    if not isinstance(rows, ByRows):
        yield routers, real, shifted
        return
    names = rows.names(offsets)
    names = np.broadcast_to(names if offsets is not None else names[:, None], shifted.shape)
    own = own_tokens(context, names)
    if own.size != math.prod(routers[0].shape[:-1]):  # routers without padding: invariant
        own = own[to_numpy(mask) != 0]
    for name in dict.fromkeys(rows.rows):
        place = to_device_of(np.flatnonzero(own == name), shifted)
        # (1, batch * tokens, experts)
        flat = (reshape(each, shape=(1, -1, each.shape[-1])) for each in routers)
        parts = [taken(each, place, 1) for each in flat]
        of = None if real is None else real.reshape(1, -1)[:, place]
        yield parts, of, shifted[to_device_of(names == name, shifted)]


def _added(loss: Any, balances: Sequence[tuple[Any, Any]]) -> Any:
    """Return the loss plus the losses of routers times their coefficients, in float64."""
    for term, coefficient in balances:
        loss = loss + value_of(term).astype(np.float64) * coefficient
    return loss


@naming("Transformer", *LOSSES)
def label_log_probs(
    model: Network,
    tokens: Array,
    labels: Array,
    mask: Array | None,
    offsets: Array | None,
    temperature: float,
    routes: Array | None = None,
) -> LogProbs:
    """Return the ``LogProbs`` of the next labels: log-probabilities, entropy and relatives."""
    require_head("log_probs", model.config, CAUSAL)
    stages = None if model.division is None else model.division.stages
    if stages is not None and model.reached is None:
        function = partial(label_log_probs, temperature=temperature)
        batch = {"tokens": tokens, "labels": labels, "mask": mask, "offsets": offsets}
        batch |= {"routes": routes}
        shape = tokens.shape if offsets is None else (1, tokens.size)
        floats = shape, np.promote_types(stages.dtype, FLOAT32)
        # (shape, dtype) of each field: floats, and the flag of the most likely label last
        forms = [floats] * (len(LogProbs._fields) - 1) + [(shape, np.dtype(bool))]
        return LogProbs(*pipeline_results(model, function, batch, forms))
    parameters = model.entered(model.parameters)
    context = Context.of(model.context, tokens, mask, offsets, model.context_attention)
    inputs = {"mask": mask, "offsets": offsets, "routes": routes}
    x = model.hidden(parameters, tokens, context=context, **inputs)
    shifted = next_labels(tokens, labels, offsets, mask if model.invariant else None)
    shifted = own_tokens(context, shifted)
    x, head = inputs_of_losses(model.config, parameters, x)
    options: dict[str, Any] = {
        "ignore": IGNORE, "temperature": temperature, "softcap": model.config.logit_softcap
    }  # fmt: skip
    if model.slices is None:
        with model.ordered():
            fields = linear_log_probs(x, head, shifted, **options)
    else:
        vocab, comm = model.config.vocab, model.slices.comm
        fields = vocab_parallel_linear_log_probs(x, head, shifted, vocab, comm=comm, **options)
    return fields if context is None else LogProbs(*(context.whole(each) for each in fields))


def _on_tape(
    model: Network, terms: Sequence[Term], count: Any, balances: Sequence[tuple[Any, Any]]
) -> Var:
    """Return the sum of factor * sum(losses) / count, with gradients computed in the same pass.

    The upstream gradient of every loss is known, factor / count.  So the forward pass computes the
    gradients too, and the logits are computed once: it saves one matrix product.  ``balances`` are
    (router loss, coefficient) pairs, whose products are added.
    """
    scaler, tape, loss = model.step.scaler, terms[0].x.tape, 0.0
    values, inputs, gradients = dict[str, Any](), dict[str, int](), dict[str, Any]()
    for number, term in enumerate(terms):
        losses, own = _with_gradients(model, term, count)
        loss = loss + term.factor * (losses.sum(dtype=np.float64) / count)
        for name, var in (("x", term.x), ("weight", term.head)):
            key = f"{name}{number or ''}"
            values[key] = value_of(var)
            if type(var) is Var:
                inputs[key], gradients[key] = var.index, own[name]
    loss = _added(loss, balances)
    root = Var(as_array(loss.astype(losses.dtype)), tape)
    one = full_like(root.value, 1)
    # Every rank adds the router's gradient, and ranks sum it up: each contributes its share.
    ranks = 1 if model.slices is None else model.slices.comm.size
    for i, (balance, coefficient) in enumerate(balances):
        if type(balance) is Var:
            share = as_array((one * coefficient / ranks).astype(balance.dtype))
            inputs[f"balance{i}"], values[f"balance{i}"] = balance.index, balance.value
            gradients[f"balance{i}"] = share if scaler is None else scaler.scale(share)
    tape.note(LossRecord(values, inputs, {"loss": root.index}, gradients, one, scaler, loss))
    return root


def _with_gradients(model: Network, term: Term, count: Any) -> tuple[Array, dict[str, Any]]:
    """Return the losses of a term, and the gradients of its sum, by the names of its inputs."""
    config, division, scaler = model.config, model.slices, model.step.scaler
    x, head, shifted, factor = term
    values = {"x": x.value, "weight": getattr(head, "value", head)}
    sum_type = np.promote_types(x.dtype, FLOAT32)
    dloss = (np.ones_like(x.value, sum_type, shape=shifted.shape) / count).astype(sum_type)
    dloss = dloss if factor == 1 else dloss * sum_type.type(factor)
    dloss = dloss if scaler is None else scaler.scale(dloss)
    wanted = [name for name, var in (("x", x), ("weight", head)) if type(var) is Var]
    if division is None:
        with fixed_order(model.invariant and model.adapter is not None):
            losses, dx, dweight = x.tape.run(
                linear_cross_entropy_gradients,
                [*values.values(), shifted, dloss, None],
                {"ignore": IGNORE, "softcap": config.logit_softcap, "wanted": frozenset(wanted)},
            )
        return losses, {"x": dx, "weight": dweight}
    # no op computes loss and gradients across ranks: a separate tape does
    own = Tape()
    own_values = {n: own.watch(value) if n in wanted else value for n, value in values.items()}
    losses_var = losses_of(config, own_values["x"], own_values["weight"], shifted, division)
    token = take_gradients.set(None)  # hide these gradients from callbacks of the whole step
    try:
        own_gradients = own.gradients(losses_var, [own_values[name] for name in wanted], dloss)
    finally:
        take_gradients.reset(token)
    return losses_var.value, dict(zip(wanted, own_gradients, strict=True))
