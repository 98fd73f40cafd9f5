"""The command line ``unsloth-cupy``: finetune, generate, merge, export, plan and others."""

import os
import signal
import sys
import warnings

from ..errors import printable
from ..starting import end
from .missing import missing


def main() -> None:
    """Run the command line; if a package is missing, exit with a message that names it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next opened file would get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 -- never closed
    try:
        from .commands import group
    except ModuleNotFoundError as error:
        raise SystemExit(f"Error: {missing(error)}") from None
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # users of a command need the message, and not the line of code that warns
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
    group(prog_name="unsloth-cupy")
