"""Prints to a terminal; what models, texts and other people's files bring along stays readable."""

import shlex
from collections.abc import Sequence
from typing import Any

import click

from ..errors import printable


def echo(text: object = "", **options: Any) -> None:
    """Print a text by ``click.echo``, its control characters escaped."""
    click.echo(printable(str(text)), **options)


def echo_next(*commands: Sequence[object]) -> None:
    """Print to standard error which commands may follow, ready to copy."""
    lines = [shlex.join(map(str, words)) for words in commands]
    echo("\n".join(["next:", *(f"  {line}" for line in lines)]), err=True)
