"""When a run ends before its last step, and how it says so; the log determines both."""

import math
from typing import TYPE_CHECKING

from ..listener import announce
from .run_folder import STOPPED, RunFolder

if TYPE_CHECKING:
    from .settings import Plan


def is_past_best(run: RunFolder, plan: "Plan") -> bool:
    """Return whether the held-out loss has not improved for as long as the run has patience."""
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
    """Log and announce why the run ends after a step, and of which step its model is."""
    reason = "a callback requested it"
    if is_past_best(run, plan):
        what = f"no loss lower by {plan.min_delta:g}" if plan.min_delta else "no lower loss"
        reason = f"{what} for {plan.patience} evaluation{'s' * (plan.patience != 1)}"
    text = f"stopped at step {step}: {reason}"
    if plan.keeps_best and (best := run.best()) is not None:
        text += f"; the model is that of step {best['step']} ({best['held_out_loss']:.3f})"
    if run.stopped != text:  # else the run was killed before it saved its model
        run.append({"step": step, STOPPED: text})
    announce(text)
