"""A setting: a field of a dataclass with its meaning, its group and its limits."""

import dataclasses
from typing import Any


def setting(group: str, text: str, default: Any = None, *, kept: bool = True, **limits: Any) -> Any:
    """Return a field with its group and its meaning; a command makes an option of it.

    What is ``kept`` is in settings.json: a run is resumed only with the same value.  An option
    that is ``rare`` is shown by --help-all alone.
    ``limits`` are ``least``, ``above``, ``below`` or ``choices``.  In the text, {steps} names a
    setting.
    """
    own = {"group": group, "text": text, "kept": kept, **limits}
    return dataclasses.field(default=default, metadata=own)
