"""``python -m unsloth_cupy``: the command line from a bare checkout."""

from .cli import main

main()
