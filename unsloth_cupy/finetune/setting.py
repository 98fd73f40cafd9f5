"""Settings: fields of a dataclass with help text, group and limits."""

import dataclasses
from typing import Any


def setting(group: str, text: str, default: Any = None, *, kept: bool = True, **limits: Any) -> Any:
    """Return a dataclass field with a group and a help text; a command turns it into an option.

    A ``kept`` setting is stored in settings.json: a run can only be resumed with the same value.
    ``limits`` are ``least``, ``above``, ``below`` and ``choices``; ``rare`` options appear only in
    --help-all.  In the text, {steps} names a setting.
    """
    own = {"group": group, "text": text, "kept": kept, **limits}
    return dataclasses.field(default=default, metadata=own)
