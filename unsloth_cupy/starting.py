"""Makes Ctrl-C during the imports of a command exit with status 130, without a traceback.

The package imports this module first; ``cli.main`` restores Python's handler.
"""

import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130  # 128 + SIGINT, the status of a program that the signal ends


def end(*_: object) -> None:
    """End this process immediately."""
    os._exit(INTERRUPTED)


NAMED = Path(sys.argv[0]).stem == "unsloth-cupy"
AS_MODULE = sys.argv[0] == "-m" and "unsloth_cupy" in sys.orig_argv
# other handlers stay: a shell ignores Ctrl-C for background jobs
if (NAMED or AS_MODULE) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
