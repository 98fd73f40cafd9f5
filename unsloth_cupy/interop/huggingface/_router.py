"""Routers of mixtures of experts: one matrix, then ``route``.

The options of ``route`` are determined by trials of all combinations on a CPU, with a random matrix
and random corrections; the combination that agrees is tried on the device.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch import linear, route
from ._changes import Changes, own_forward
from ._trials import Refused, draw, near

GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # attributes, or the second argument
STATICS = "moe_statics"  # a module that has the correction instead
SCORES = ("softmax", "softmax_of_k", "sigmoid", "sqrt_softplus")
SHIFTS = (0.0, -3.0)  # added to corrections: with -3 all corrected scores are below 0
ROWS = 64  # rows of a trial
HALF = torch.bfloat16


class Precision(NamedTuple):
    """The dtypes of a router."""

    wide: bool  # the product is computed in float32
    exact: bool  # under autocast, too
    logits: bool  # logits are float32, else they have the dtype of the rows
    weights: bool  # weights are float32, else they have the dtype of the rows


def is_router(module: nn.Module) -> bool:
    """Return whether a module is named a router and chooses the top k experts."""
    return "Router" in type(module).__name__ and isinstance(getattr(module, "top_k", None), int)


def take(changes: Changes, module: Any) -> None:
    """Make a router compute with ``route``; raise Refused if no formula gives the same."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise Refused("it has more than one matrix")
    if not own_forward(module):
        raise Refused("another library replaced its forward")
    if others := {*_arguments(module)} - {*CORRECTIONS}:
        raise Refused(f"its forward also reads {', '.join(sorted(others))}")
    trials = [Trial(module, shift) for shift in SHIFTS]
    options = _options(module, trials)
    mode = module.training
    try:
        module.training = True
        with torch.random.fork_rng([]):
            trained = trials[0].run()
    finally:
        module.training = mode
    if not near(trained, trials[0].expected, torch.float32):
        raise Refused("it does something else in training")
    last = Trial(module, device=weight.device)
    changes.forward(module, _forward(_precision(trials[0]), **options))
    actual, expected = (torch.cat(_whole(each)) for each in (last.run(), last.expected))
    if not near(actual, expected, torch.float32):  # weights may differ as much as logits may
        raise Refused("a trial on its device gives other results")


def _arguments(module: Any) -> list[str]:
    """Return the names of a router's arguments besides its rows."""
    return [*inspect.signature(type(module).forward).parameters][2:]


class Trial:
    """A router with random weights, and rows of which half have only small scores."""

    def __init__(self, module: Any, shift: float = 0.0, device: Any = "cpu") -> None:
        named = itertools.chain(module.named_parameters(), module.named_buffers())
        tensors = {name: draw(*each.shape) for name, each in named}
        tensors["weight"][:, 0] = 1.0
        self.x = draw(ROWS, tensors["weight"].shape[1])
        self.x[ROWS // 2 :, 0] = -12.0
        arguments = [draw(len(tensors["weight"])) + shift for _ in _arguments(module)]
        shifted = {n: t + shift * n.endswith(CORRECTIONS) for n, t in tensors.items()}
        self.module, self.tensors = module, {n: t.to(device) for n, t in shifted.items()}
        self.x, *self.arguments = (each.to(device) for each in (self.x, *arguments))
        self.expected = self.run()

    def correction(self) -> torch.Tensor | None:
        """Return the correction, which is added to scores for the choice; None without one."""
        own = [each for name, each in self.tensors.items() if name.endswith(CORRECTIONS)]
        return next((each.flatten() for each in (*self.arguments, *own)), None)

    def run(self, rows: torch.dtype | None = None, tensors: torch.dtype | None = None) -> Any:
        """Return logits, weights and experts for rows and parameters in these dtypes."""
        own = {name: each.to(tensors) for name, each in self.tensors.items()}
        args = self.x.to(rows), *self.arguments
        results = torch.func.functional_call(self.module, own, args)
        if not isinstance(results, tuple) or len(results) != 3:
            raise Refused("it does not return logits, weights and experts")
        return results


def _whole(result: Any) -> Any:
    """Return the logits, and the weights of all experts (0 if not chosen), in one order."""
    logits, weights, chosen = result
    return logits, torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))


def _options(module: Any, trials: list[Trial]) -> dict[str, Any]:
    """Return the options with which ``route`` gives the weights of all trials."""
    numbers = [n for n in vars(module).values() if type(n) in (int, float)]
    scales = dict.fromkeys([1.0, *map(float, numbers), 1 / module.top_k])
    for options in _combinations(module):
        if options["corrected"] and trials[0].correction() is None:
            continue
        corrected, pairs = options.pop("corrected"), []
        for trial in trials:
            logits, weights = _whole(trial.expected)
            bias = trial.correction() if corrected else None
            routes = route(logits, k=module.top_k, bias=bias, **options)
            plain = _whole((logits, routes.weights, routes.experts.long()))[1]
            pairs.append((plain, weights))
        for scale in scales:
            if all(near(plain * scale, weights, torch.float32) for plain, weights in pairs):
                return {"corrected": corrected, "k": module.top_k, "scale": scale, **options}
    raise Refused("no formula known gives the same")


def _combinations(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the options of ``route`` to try, without the scale."""
    pairs = [tuple(getattr(module, name, None) for name in names) for names in GROUPS]
    groups = [pair for pair in pairs if isinstance(pair[0], int) and pair[0] > 1]
    for (count, top), corrected, scores, normalize in itertools.product(
        [*groups, (None, None)], (True, False), SCORES, (True, False)
    ):
        if scores == "softmax_of_k" and (corrected or not normalize or count):
            continue
        yield {
            "scores": scores, "normalize": normalize, "groups": count, "top_groups": top,
            "corrected": corrected,
        }  # fmt: skip


def _forward(precision: Precision, corrected: bool, **options: Any) -> Callable[..., Any]:
    """Return the forward of a router."""
    wide, exact, wide_logits, wide_weights = precision

    def routed(self: Any, rows: Any, corrections: Any) -> Any:
        x, weight, bias = (
            rows.reshape(-1, rows.shape[-1]),
            self.weight,
            self._parameters.get("bias"),
        )
        if wide:
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        logits = linear(x, weight, bias)
        logits = logits.float() if wide_logits else logits.to(rows.dtype)
        correction = None
        if corrected:
            owner = getattr(self, STATICS, self)
            own = (getattr(owner, name, None) for name in CORRECTIONS)
            correction = next(each for each in (*corrections, *own) if each is not None)
            correction = correction.flatten().float()
        scored = logits.float() if wide_weights else logits
        chosen, weights = route(scored, bias=correction, **options)
        return logits, weights.to(torch.float32 if wide_weights else rows.dtype), chosen.long()

    def forward(self: Any, hidden_states: Any, *corrections: Any) -> Any:
        if not exact:
            return routed(self, hidden_states, corrections)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return routed(self, hidden_states, corrections)

    return forward


def _precision(trial: Trial) -> Precision:
    """Return the dtypes of a router, from its results for 16-bit rows and parameters."""
    try:
        narrow = trial.run(HALF, HALF)
    except RuntimeError:  # the router's weights must be float32
        narrow = trial.run(HALF)
    with torch.autocast("cpu", HALF):
        cast = trial.run()[0]
    logits, weights, _ = narrow
    rounded = [torch.equal(each, each.to(HALF).to(each.dtype)) for each in (logits, cast)]
    kinds = (each.dtype is torch.float32 for each in (logits, weights))
    return Precision(not rounded[0], not rounded[1], *kinds)
