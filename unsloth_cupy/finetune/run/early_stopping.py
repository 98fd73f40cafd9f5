"""Early stopping: when a run ends before its last step, and the reason in its log."""

import math
from typing import TYPE_CHECKING

from ..listener import announce
from .run_folder import STOPPED, RunFolder

if TYPE_CHECKING:
    from .settings import Plan


def is_past_best(run: RunFolder, plan: "Plan") -> bool:
    """Return whether the last ``patience`` evaluations had no lower loss."""
    if plan.patience is None:
        return False
    best, waited = math.inf, 0
    for line in run.lines():
        if "held_out_loss" in line:
            loss = line["held_out_loss"]
            waited = 0 if best - loss > plan.min_delta else waited + 1
            best = min(best, loss)
    return waited >= plan.patience


def log_reason(run: RunFolder, plan: "Plan", step: int) -> None:
    """Log and announce why the run ends after a step, and which step its model has."""
    reason = "requested by a callback"
    if is_past_best(run, plan):
        what = "no lower evaluation loss"
        what += f" (by {plan.min_delta:g})" * bool(plan.min_delta)
        reason = f"{what} in {plan.patience} evaluation{'s' * (plan.patience != 1)}"
    text = f"stopped at step {step}: {reason}"
    if plan.keeps_best and (best := run.best()) is not None:
        text += (
            f"; the best step is {best['step']} ({best['held_out_loss']:.3f}), whose model is saved"
        )
    if run.stopped != text:  # else the run was killed before it saved its model
        run.append({"step": step, STOPPED: text})
    announce(text)
