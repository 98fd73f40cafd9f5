"""Ctrl-C while a command imports ends it with the status 130, without a traceback.

The package imports this first; ``cli.main`` gives Ctrl-C back to Python.
"""

import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130  # 128 + SIGINT, as of a program that the signal ends


def end(*_: object) -> None:
    """End this process at once."""
    os._exit(INTERRUPTED)


NAMED = Path(sys.argv[0]).stem == "unsloth-cupy"
AS_MODULE = sys.argv[0] == "-m" and "unsloth_cupy" in sys.orig_argv
# another handler: the caller ignores Ctrl-C, as a shell does for what runs in the background
if (NAMED or AS_MODULE) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
