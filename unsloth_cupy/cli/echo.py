"""Printing of text from models and files, with control characters escaped."""

import os
import sys
from collections.abc import Iterable

import click

from ..errors import printable

MARKS = "«»"  # around marked text, where there is no colour


def echo_marked(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print pieces of text; marked pieces are green on a terminal, elsewhere between marks."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for text, marked in pieces:
        shown = printable(text)
        if marked:
            shown = click.style(shown, fg="green") if colour else shown.join(MARKS)
        click.echo(shown, nl=False)
    click.echo()
