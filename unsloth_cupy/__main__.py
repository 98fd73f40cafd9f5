"""``python -m unsloth_cupy``: the command line, also from a checkout that is not installed."""

from .cli import main

main()
