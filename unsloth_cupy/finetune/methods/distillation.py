"""Distillation: trains a student on the predictions of a teacher at every target token."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...models.layers.context import Context, own_tokens
from ...models.layers.head import inputs_of_losses
from ...models.loss import next_labels
from ...models.objective import IGNORE
from ...ops.losses.linear_divergence import linear_divergence
from ...ops.losses.linear_top_k_divergence import linear_top_k_divergence
from ...parallel.tensor import all_gather
from ..data.text import Batch
from ..naming import named
from ..setting import setting
from .method import Method, in_few_sizes, loss_of_none


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Settings of distillation."""

    teacher: str | Path | None = setting(  # noqa: RUF009 -- a field
        "method", "distill: folder of the teacher model, or of its stored predictions.", kept=False
    )


@dataclasses.dataclass(frozen=True)
class Distill(Method):
    """Minimizes ``linear_divergence`` between student and teacher at the target tokens.

    Attributes
    ----------
    teacher : Transformer or Config
        The teacher model, or its config before it is loaded.
    taught : Taught, optional
        Stored predictions of the teacher, used instead of the model.
    """

    teacher: Any = None
    taught: Any = None

    def check(self, settings: Any) -> None:
        """Raise a ConfigError if there is no teacher, or if the loss refuses its options."""
        if settings.teacher is None:
            cure = f"give {named('teacher')}, the folder of a model"
            raise ConfigError(f"{named(method='distill')} needs a teacher; {cure}")
        linear_divergence(*(np.zeros((1, 1), FLOAT32) for _ in range(4)), **self.loss_options)

    @property
    def other_models(self) -> Sequence[Any]:
        """The teacher model, if it is not stored predictions."""
        return () if self.teacher is None else (self.teacher,)

    def planned(self, create: Callable[[Any], Any]) -> Self:
        """Return this method with ``create(config)`` as the teacher."""
        teacher = None if self.teacher is None else create(self.teacher)
        return dataclasses.replace(self, teacher=teacher)

    def with_taught(self, taught: Any) -> Self:
        """Return this method with the stored predictions of a teacher.

        Raises
        ------
        ConfigError
            The loss needs the probabilities of the whole vocabulary, not only of the top k.
        """
        if self.loss_options["kind"] != "jsd" or self.loss_options.get("beta"):
            problem = "stores only the most likely tokens, which suffice for the forward divergence"
            cure = f"leave {named('loss')} and {named('beta')} out, or pass the teacher model"
            raise ConfigError(f"{named(teacher=taught.folder)} {problem}; {cure}")
        options = {"temperature": float(taught.facts["temperature"])}
        return dataclasses.replace(self, loss_options=options, taught=taught)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch, with the stored top-k predictions of each next token."""
        arrays = super().inputs(batch)
        if self.taught is None:
            return arrays
        rows = np.append(batch.beside["taught"].reshape(-1)[1:], -1).clip(0)
        shape = batch.tokens.shape if batch.offsets is None else (1, batch.tokens.size)
        best, logs = (each[rows] for each in (self.taught.tokens, self.taught.log_probs))
        size = (*shape, best.shape[1])  # (rows, tokens, top k)
        return arrays | {"best": best.reshape(size).astype(np.int64), "logs": logs.reshape(size)}

    def padded(self, batch: Batch) -> Batch:
        """Return a batch as ``in_few_sizes``."""
        return in_few_sizes(batch)

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the mean divergence at the target tokens."""
        if not batch["tokens"].size:  # a rank without texts
            return loss_of_none(model, batch)
        tokens, offsets = batch["tokens"], batch.get("offsets")
        context = Context.of(model.context, tokens, None, offsets, model.context_attention)
        mask = own_tokens(context, next_labels(tokens, batch["labels"], offsets) != IGNORE)

        def head_inputs(each: Any) -> tuple[Any, Any]:
            parameters = each.entered(each.parameters)
            x = each.hidden(parameters, tokens, offsets=offsets, context=context)
            x, head = inputs_of_losses(each.config, parameters, x)
            whole = each.division is None or each.division.comm.size == 1
            return x, head if whole else all_gather(head, 0, each.division.comm)

        x, head = head_inputs(model)
        options: dict[str, Any] = {"mask": mask, "softcap": model.config.logit_softcap}
        if self.taught is not None:
            best, logs = (own_tokens(context, batch[name]) for name in ("best", "logs"))
            losses = linear_top_k_divergence(x, head, best, logs, **options, **self.loss_options)
        else:
            teacher_x, teacher_head = head_inputs(self.teacher)
            vocab = min(head.shape[0], teacher_head.shape[0])  # either may have padding rows
            losses = linear_divergence(
                x, first(head, vocab), teacher_x, first(teacher_head, vocab), **options,
                teacher_softcap=self.teacher.config.logit_softcap, **self.loss_options,
            )  # fmt: skip
        losses = losses if context is None else context.whole(losses)
        return losses.sum() * (1 / batch["count"])


def first(weight: Any, rows: int) -> Any:
    """Return the first ``rows`` rows of a weight; the weight itself if it has no more."""
    return weight if weight.shape[0] == rows else weight[:rows]
