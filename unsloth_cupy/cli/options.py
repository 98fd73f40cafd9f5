"""Options of the commands: a name, a kind, one line of help."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FILE = click.Path(path_type=Path)


class Number(click.FloatRange):
    """A finite number in a range; click alone would let nan and inf pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail with what it must be."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


class Device(click.ParamType):  # type: ignore[type-arg]  # of newer click alone
    """Where arrays live: None for cpu, else a GPU by the name that ``models.load`` knows."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return None or the name, or fail with what it must be."""
        if value != "cpu" and not re.fullmatch(r"cuda(:\d+)?", value):
            self.fail(f"{value!r} is none; choose cpu, cuda or cuda:1.", param, ctx)
        return None if value == "cpu" else value


METAVARS: dict[type, str] = {click.IntRange: "N", Number: "X", click.Path: "PATH", Device: "NAME"}


def option(name: str, kind: Any, text: str, default: Any = None) -> Callable[..., Any]:
    """Return an option that shows its default, if it has one."""
    metavar = METAVARS.get(type(kind))
    shown = default is not None
    return click.option(
        name, type=kind, default=default, show_default=shown, metavar=metavar, help=text
    )
