"""Prints to a terminal; what models, texts and other people's files bring along stays readable."""

from typing import Any

import click

from ..errors import printable


def echo(text: object = "", **options: Any) -> None:
    """Print a text by ``click.echo``, its control characters escaped."""
    click.echo(printable(str(text)), **options)
