"""The method that learns from a teacher: its predictions, at every token that is learned."""

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
from .method import Method, loss_of_none


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Settings of the method that has a teacher."""

    teacher: str | Path | None = setting(  # noqa: RUF009 -- a field
        "method", "Folder of the teacher model.", kept=False
    )


@dataclasses.dataclass(frozen=True)
class Distill(Method):
    """Learns the predictions of a teacher: ``linear_divergence`` at the tokens that are learned.

    Attributes
    ----------
    teacher : Transformer or Config
        The model whose predictions are learned, or what is known of it before it is loaded.
    taught : Taught, optional
        Its stored predictions, in its place.
    """

    teacher: Any = None
    taught: Any = None

    def check(self, settings: Any) -> None:
        """Raise without a teacher, or as the loss does."""
        if settings.teacher is None:
            cure = f"give {named('teacher')}, the folder of a model"
            raise ConfigError(f"{named(method='distill')} has nobody to learn from; {cure}")
        linear_divergence(*(np.zeros((1, 1), FLOAT32) for _ in range(4)), **self.loss_options)

    @property
    def other_models(self) -> Sequence[Any]:
        """The teacher."""
        return () if self.teacher is None else (self.teacher,)

    def planned(self, create: Callable[[Any], Any]) -> Self:
        """Return this method with a teacher that ``create`` makes of its config."""
        teacher = None if self.teacher is None else create(self.teacher)
        return dataclasses.replace(self, teacher=teacher)

    def with_taught(self, taught: Any) -> Self:
        """Return this method with stored predictions.

        Raises
        ------
        ConfigError
            Its divergence needs those of all tokens.
        """
        if self.loss_options["kind"] != "jsd" or self.loss_options.get("beta"):
            problem = "holds the likeliest tokens, and all but the forward divergence need others"
            cure = f"leave {named('loss')} and {named('beta')} out, or give the model itself"
            raise ConfigError(f"{named(teacher=taught.folder)} {problem}; {cure}")
        options = {"temperature": float(taught.facts["temperature"])}
        return dataclasses.replace(self, loss_options=options, taught=taught)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return a batch, with what is stored of the token after each."""
        arrays = super().inputs(batch)
        if self.taught is None:
            return arrays
        rows = np.append(batch.beside["taught"].reshape(-1)[1:], -1).clip(0)
        shape = batch.tokens.shape if batch.offsets is None else (1, batch.tokens.size)
        best, logs = (each[rows] for each in (self.taught.tokens, self.taught.log_probs))
        few = (*shape, best.shape[1])
        return arrays | {"best": best.reshape(few).astype(np.int64), "logs": logs.reshape(few)}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the mean divergence at the tokens that are learned."""
        if not batch["tokens"].size:  # a rank without texts
            return loss_of_none(model, batch)
        tokens, offsets = batch["tokens"], batch.get("offsets")
        context = Context.of(model.context, tokens, None, offsets, model.context_attention)
        learned = own_tokens(context, next_labels(tokens, batch["labels"], offsets) != IGNORE)

        def head_inputs(each: Any) -> tuple[Any, Any]:
            known = each.entered(each.parameters)
            x = each.hidden(known, tokens, offsets=offsets, context=context)
            x, head = inputs_of_losses(each.config, known, x)
            whole = each.division is None or each.division.comm.size == 1
            return x, head if whole else all_gather(head, 0, each.division.comm)

        x, head = head_inputs(model)
        options: dict[str, Any] = {"mask": learned, "softcap": model.config.logit_softcap}
        if self.taught is not None:
            best, logs = (own_tokens(context, batch[name]) for name in ("best", "logs"))
            losses = linear_top_k_divergence(x, head, best, logs, **options, **self.loss_options)
        else:
            by_teacher, of_teacher = head_inputs(self.teacher)
            words = min(head.shape[0], of_teacher.shape[0])  # some rows may be of no token
            losses = linear_divergence(
                x, first(head, words), by_teacher, first(of_teacher, words), **options,
                teacher_softcap=self.teacher.config.logit_softcap, **self.loss_options,
            )  # fmt: skip
        losses = losses if context is None else context.whole(losses)
        return losses.sum() * (1 / batch["count"])


def first(weight: Any, rows: int) -> Any:
    """Return the first rows of a weight; the weight itself if it has no others."""
    return weight if weight.shape[0] == rows else weight[:rows]
