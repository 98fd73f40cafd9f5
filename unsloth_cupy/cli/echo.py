"""Prints to a terminal; what models, texts and other people's files bring along stays readable."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ..errors import printable

MARKS = "«»"  # around what a terminal shows in colour


def echo(text: object = "", **options: Any) -> None:
    """Print a text by ``click.echo``, its control characters escaped."""
    click.echo(printable(str(text)), **options)


def echo_marked(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print a text in pieces, the marked ones in colour, or between marks without a terminal."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for text, marked in pieces:
        shown = printable(text)
        if marked:
            shown = click.style(shown, fg="green") if colour else shown.join(MARKS)
        click.echo(shown, nl=False)
    click.echo()


def echo_next(*commands: Sequence[object]) -> None:
    """Print to standard error which commands may follow, ready to copy."""
    lines = [shlex.join(map(str, words)) for words in commands]
    if not lines:
        return
    echo("\n".join(["next:", *(f"  {line}" for line in lines)]), err=True)
