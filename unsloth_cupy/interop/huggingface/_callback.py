"""A callback with which a transformers Trainer patches its model."""

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from ._patch import chosen_parts, is_patched, patch
from ._report import Report


class PatchCallback(TrainerCallback):
    """Patches the model of a trainer when the trainer is created, before sharding and wrapping.

    ``Trainer(model, arguments, callbacks=[PatchCallback()])``; trainers of TRL accept it, too, and
    have added their adapters to the model before.  A model that is already patched is not changed.
    The model stays patched after training: ``unpatch(trainer.model)`` restores it.

    Parameters
    ----------
    parts : iterable of str, optional
        As in ``patch``.

    Attributes
    ----------
    report : Report or None
        The report of ``patch``; None if it has not been called.

    Raises
    ------
    ConfigError
        A part does not exist.
    """

    def __init__(self, *, parts: Iterable[str] | None = None) -> None:
        self.parts = chosen_parts(parts)
        self.report: Report | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Patch the model of a trainer, unless it is patched."""
        if not is_patched(model):
            self.report = patch(model, parts=self.parts)

    on_train_begin = on_init_end  # if the callback was added later, or the model was replaced
