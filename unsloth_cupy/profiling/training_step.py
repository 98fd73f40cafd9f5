"""Explains a training step: forward and backward pass, and the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..memory.ledger import Ledger
from ..memory.plan import CLIPPED
from ..memory.planned import Planned, recording_in
from ..memory.planned_model import planned_training, with_planned_models
from ..models.objective import next_token
from ..models.quantizer import Quantizer
from ..training.checkpoint import CheckpointConfig
from ..training.gradients import measure_gradients
from .explain import explain
from .explanation import Explanation, Step
from .shapes import shape

if TYPE_CHECKING:
    from ..models.adapters.adapter import Adapter
    from ..models.configs.config import Config


def explain_step(
    config: "Config",
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    device: Any,
    optimizer: str = "adamw",
    state_bits: int = 32,
    adapter: "Adapter | None" = None,
    quantization: str | None = None,
    checkpoint: CheckpointConfig | None = None,
    objective: Callable[..., Any] = next_token,
) -> Explanation:
    """Explain a training step with one batch, as ``plan_memory`` plans it.

    The options are those of ``plan_memory``; ``device`` is that of ``explain``, ``adapter`` a
    planned one.
    """
    ledger, moved = Ledger(1), 0
    codes = None if quantization is None else Quantizer("explain", quantization)
    with recording_in(ledger):
        model, steps = planned_training(
            ledger, config, Planned, dtype, optimizer, state_bits, adapter, codes
        )
        model.chunked_mlp = False  # of equal chunks in a loop, only one would be recorded
        loss = with_planned_models(ledger, objective, Planned, dtype)

    def step(**inputs: Any) -> None:
        nonlocal moved
        function = partial(loss, **inputs, count=1)
        _, gradients = model.value_and_gradients(function, checkpoint=checkpoint, graph=True)
        if steps is not None:
            moved = steps.traffic(gradients)
            measure_gradients(gradients, 1.0)
            steps.step(gradients, finite=True, factor=CLIPPED)

    rows = shape((batch, tokens), "int64")
    inputs: Mapping[str, Any] = {"tokens": rows, "labels": rows}
    if hasattr(objective, "full"):
        inputs = objective.full(batch, tokens)
    explanation = explain(step, device=device, **inputs)
    explanation = replace(explanation, graph=model.graphs.told)
    if steps is None:
        return explanation
    bandwidth = None if explanation.card is None else explanation.card.bandwidth
    last = Step(
        op=f"{steps.call}.step",
        arguments=f"{len(steps.parameters)} weights",
        kernel=bool(steps.launchers),
        why="one launch for all weights" if steps.launchers else "passes over each weight",
        launches=explanation.outside,
        arrays=0,
        allocated_bytes=0,
        moved=moved,
        operations=0,
        floor=moved / bandwidth / 1e9 if bandwidth else None,
        bound="memory",
    )
    return replace(explanation, steps=(*explanation.steps, last), outside=())
