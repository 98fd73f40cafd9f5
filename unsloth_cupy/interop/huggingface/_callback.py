"""A callback that lets a trainer patch its model."""

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from ._patch import chosen_parts, is_patched, patch
from ._report import Report


class PatchCallback(TrainerCallback):
    """Patch the model of a trainer when the trainer is made, before anything shards or wraps it.

    ``Trainer(model, arguments, callbacks=[PatchCallback()])``; trainers of TRL take it too, and
    have put their adapters on the model by then.  A model that is patched already is left alone,
    and so is the patch after training: ``unpatch(trainer.model)`` undoes it.

    Parameters
    ----------
    parts : iterable of str, optional
        As in ``patch``.

    Attributes
    ----------
    report : Report or None
        What ``patch`` returned; None as long as it was not called.

    Raises
    ------
    ConfigError
        There is no such part.
    """

    def __init__(self, *, parts: Iterable[str] | None = None) -> None:
        self.parts = chosen_parts(parts)
        self.report: Report | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Patch the model of a trainer that was made with this callback."""
        if not is_patched(model):
            self.report = patch(model, parts=self.parts)

    on_train_begin = on_init_end  # where it was added to a trainer, or the model is another
