"""The command line ``unsloth-cupy``: info, check, bench, finetune, generate, plan, export."""

import signal

from ..starting import end
from .missing import missing


def main() -> None:
    """Run the command line, or say in one line what to install for it."""
    try:
        from .commands import group
    except ModuleNotFoundError as error:
        raise SystemExit(f"Error: {missing(error)}") from None
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    group(prog_name="unsloth-cupy")
