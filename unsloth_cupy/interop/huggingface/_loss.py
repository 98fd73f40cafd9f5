"""Replaces the loss of a language model by a loss without logits, computed in the head's forward.

In training with labels, the head returns zeros with the gradient of the summed loss.  The model's
own forward uses them as logits: it scales or caps them, which leaves zeros, adds the losses of
routers, and calls its loss function.  That function is replaced, and adds the value of the sum:

    loss = (sum + (f(zeros) - f(zeros)) / f'(0)) / labels        f: the scaling and cap of logits

So hooks of the head surround all of its work, and its weight is only read inside its forward.
"""

import functools
import math
import types
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...errors import GradientError
from ..torch import linear_cross_entropy, linear_cross_entropy_gradients
from ._attention import is_eager
from ._changes import Changes, own_forward
from ._trials import Refused, Texts, near

IGNORE, STATE = -100, "_unsloth_cupy_loss"
functorch = torch._C._are_functorch_transforms_active
HOST_BYTES = 2**25  # bytes of logits at a time on a CPU, where smaller products are as fast


class State:
    """Data that head and model exchange during a step."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.labels: Any = None  # shifted labels, which the head reads and clears
        self.total: Any = None  # the sum of the losses, without a gradient
        self.watches = False  # whether to warn of rows without keys that predict labels


class Logits(NamedTuple):
    """The function that a model applies to logits: ``softcap * tanh(scale * x / softcap)``."""

    scale: float
    softcap: float | None

    def __call__(self, x: Any) -> Any:
        cap = self.softcap
        return x * self.scale if cap is None else cap * torch.tanh(x * self.scale / cap)


def take(changes: Changes, model: Any, texts: Texts) -> None:
    """Replace the loss of a model; raise Refused if a trial gives other losses."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not own_forward(head):
        raise Refused(f"its head is {type(head).__name__}, or another library replaced it")
    if head._parameters.get("bias") is not None:
        raise Refused("its head has a bias")
    if not own_forward(model) or "_loss_function" in vars(model):
        raise Refused("another library replaced its forward or its loss")
    body = model.base_model
    with nullcontext() if head in body.modules() else texts.held(model, body):
        _take(changes, model, head, texts)


def _take(changes: Changes, model: Any, head: nn.Linear, texts: Texts) -> None:
    """Replace the loss of a model whose head has been checked."""
    expected = _steps(model, texts)
    logits, state = _probe(changes, model, head, texts), State(head)
    for owner in (model, head):
        changes.set(owner, STATE, state)
    changes.forward(head, _head(logits))
    changes.forward(model, _model(type(model).forward))
    changes.set(model, "_loss_function", types.MethodType(_loss(logits.scale), model))
    vars(model)["training"] = True  # of the outermost module only, so that there is no dropout
    try:
        losses = _steps(model, texts)
    finally:
        vars(model)["training"] = False
    if not near(
        losses, expected, torch.float32 if head.weight.dtype.itemsize > 2 else torch.float16
    ):
        raise Refused("it is not the cross entropy of its logits")
    state.watches = not any("sinks" in each._parameters for each in model.modules())


def _steps(model: Any, texts: Texts) -> list[torch.Tensor]:
    """Return three losses: the mean, the sum divided by 3, and the mean with ``shift_labels``."""
    shifted = pad(texts.labels, (0, 1), value=IGNORE)[:, 1:].roll(1, 0)
    others: list[dict[str, Any]] = [{}, {"num_items_in_batch": 3}, {"shift_labels": shifted}]
    return [texts.run(model, labels=texts.labels, **other).loss for other in others]


def _probe(changes: Changes, model: Any, head: Any, texts: Texts) -> Logits:
    """Return the function that a model applies to logits, measured with a head of known logits."""
    ramp = torch.linspace(-60, 60, head.weight.shape[0], dtype=torch.float64)
    ramp[:4] = torch.tensor([0, 1e-2, 1.0, 1e9])
    count = len(changes)
    changes.forward(head, lambda self, x: ramp.to(x.device).expand(*x.shape[:-1], -1))
    outputs = texts.run(model).logits[0, 0].double().cpu()
    changes.since(count)
    zero, low, one, high = outputs[:4].tolist()
    if zero != 0 or low == 0:
        raise Refused("its logits are not the results of its head")
    if high < 1e6 * one:
        scale = high * math.atanh(low / high) / 1e-2
        logits = Logits(_rounded(scale), _rounded(high))
    else:
        logits = Logits(_rounded(one), None)
    if not near(outputs, logits(ramp), torch.float32):
        raise Refused("it does more with logits than scale and cap them")
    return logits


def _rounded(value: float) -> float:
    """Return a number rounded to seven digits: the precision of float32."""
    return float(f"{value:.7g}")


def _head(logits: Logits) -> Any:
    """Return the forward of the head."""

    def forward(self: Any, x: Any) -> Any:
        state = vars(self)[STATE]
        labels, state.labels = state.labels, None
        if labels is None:
            return linear(x, self.weight)
        x = x if logits.scale == 1 else x * logits.scale
        total = _summed(x, self.weight, labels.to(x.device), logits.softcap)
        state.total = total.detach()
        return (total - state.total).expand(*x.shape[:-1], 1)

    return forward


def _summed(x: Any, weight: Any, labels: Any, softcap: float | None) -> Any:
    """Return the sum of the losses; if gradients are required, compute them in the same pass."""
    max_bytes = None if x.is_cuda else HOST_BYTES
    records = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if torch.compiler.is_compiling() or functorch() or not records:
        return linear_cross_entropy(x, weight, labels, softcap=softcap, max_bytes=max_bytes).sum()
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
    return Summed.apply(x, weight, labels, softcap, max_bytes)


class Summed(torch.autograd.Function):
    """A sum of losses with gradients from the forward pass, so that logits are computed once."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, labels: Any, softcap: Any, max_bytes: Any) -> Any:
        """Return the sum; save the gradients, which the backward pass scales in place.

        Gradients of a sum may be beyond float16, so the saved gradients are divided by about the
        number of labels.  The divisor is a power of two, so that no digit is lost.
        """
        needs = zip(("x", "weight"), ctx.needs_input_grad, strict=False)
        wanted = frozenset(name for name, need in needs if need)
        counted = (labels != IGNORE).sum().clamp(min=1)
        ctx.divisor = torch.exp2(torch.frexp(counted.float()).exponent.float())
        rows, *ctx.gradients = linear_cross_entropy_gradients(
            *(x, weight, labels, (1 / ctx.divisor).expand(labels.shape)),
            softcap=softcap,
            max_bytes=max_bytes,
            wanted=wanted,
        )
        return rows.sum()

    @staticmethod
    def backward(ctx: Any, dtotal: Any) -> Any:
        """Return the scaled gradients; only once, as they are scaled in place."""
        if ctx.gradients is None:
            cure = "compute the loss again instead of retain_graph=True"
            raise GradientError(f"the gradients of this loss were computed already; {cure}")
        gradients, ctx.gradients = ctx.gradients, None
        factor = dtotal * ctx.divisor
        mantissa, exponent = torch.frexp(factor)
        # the scale of a loss may be beyond float16; its mantissa and two powers of two are not
        half = exponent // 2
        parts = mantissa, torch.exp2(half.float()), torch.exp2((exponent - half).float())
        for each in filter(torch.is_tensor, gradients):
            for part in parts if each.dtype is torch.float16 else (factor,):
                each.mul_(part.to(each.dtype))
        return *gradients, None, None, None


def _model(plain: Any) -> Any:
    """Return the forward of the model; it calls ``plain``, the model's own forward."""

    @functools.wraps(plain)  # trainers read the parameters of forward
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        labels: Any = options.get("labels")
        state = vars(self).get(STATE)
        trains = state is not None and labels is not None and self.training
        if not trains or not _simple(options) or not _is_whole(self, state):
            return plain(self, *args, **options)
        shifted = options.get("shift_labels")
        state.labels = pad(labels, (0, 1), value=IGNORE)[..., 1:] if shifted is None else shifted
        if state.watches:
            _warn(self, state, options.get("attention_mask"))
        try:
            result = plain(self, *args, **options)
        finally:
            state.labels = state.total = None
        result.logits = None
        return result

    return forward


def _warn(model: Any, state: State, mask: Any) -> None:
    """Warn once if a row without a visible key predicts a label where attention was eager."""
    config = (model.get_decoder() or model).config
    if not is_eager(config) or torch.compiler.is_compiling() or functorch():
        return
    if not isinstance(mask, torch.Tensor) or mask.shape != state.labels.shape:
        return
    seen, window = mask.long().cumsum(-1), getattr(config, "sliding_window", None)
    if window:
        seen = seen - pad(seen, (window, 0))[:, : mask.shape[1]]
    state.watches = not bool(((seen == 0).to(state.labels.device) & (state.labels != IGNORE)).any())
    if not state.watches:
        warnings.warn(
            f"patch: padding predicts labels; set these labels to {IGNORE}, and with padding on the"
            " left also the label of a text's first token. Eager attention has gradients through"
            " the mask there, a patched model has none",
            stacklevel=2,
        )


def _simple(options: dict[str, Any]) -> bool:
    """Return whether a call computes the loss of all labels and returns a named result."""
    keep = options.get("logits_to_keep", 0)
    return (
        isinstance(keep, int)
        and keep == 0
        and options.get("return_dict") is not False
        and "ignore_index" not in options
    )


def _is_whole(model: Any, state: State) -> bool:
    """Return whether the model's head is still the patched head, without an adapter around it."""
    head = model.get_output_embeddings()
    same = [*map(id, head.parameters())] == [*map(id, state.head.parameters())]
    return head is state.head or same


def _loss(scale: float) -> Any:
    """Return the loss function of the model; ``scale`` is the factor of its logits."""

    def loss(self: Any, logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
        total = vars(self)[STATE].total
        if total is None:
            plain: Any = LOSS_MAPPING.get(self.loss_type, ForCausalLMLoss)
            return plain(logits=logits, labels=labels, vocab_size=vocab_size, **options)
        count = options.get("num_items_in_batch")
        if count is None:
            shifted = options.get("shift_labels")
            shifted = labels[..., 1:] if shifted is None else shifted
            count = (shifted != IGNORE).sum()
        zero = logits[(0,) * logits.ndim] / scale
        return (total + zero) / (count.to(total.device) if torch.is_tensor(count) else count)

    return loss
