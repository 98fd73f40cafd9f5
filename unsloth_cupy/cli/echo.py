"""Prints to a terminal; what models, texts and other people's files bring along stays readable."""

import os
import sys
from collections.abc import Iterable

import click

from ..errors import printable

MARKS = "«»"  # around what a terminal shows in colour


def echo_marked(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print a text in pieces, the marked ones in colour, or between marks without a terminal."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for text, marked in pieces:
        shown = printable(text)
        if marked:
            shown = click.style(shown, fg="green") if colour else shown.join(MARKS)
        click.echo(shown, nl=False)
    click.echo()
