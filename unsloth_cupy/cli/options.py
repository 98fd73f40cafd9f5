"""Options of the commands: a name, a kind, one line of help."""

import math
import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..finetune.training_config import read_training_config
from ..models.context import KINDS as CONTEXTS
from ..models.quantized import KINDS
from ..parallel.schedule import KINDS as SCHEDULES
from ..pictures import FORMATS

FILE = click.Path(path_type=Path)
QUANTIZE = click.Choice([*KINDS])
SCHEDULE = click.Choice([*SCHEDULES])
ZERO = click.Choice(["0", "1", "3"])
ATTENTION = click.Choice([*CONTEXTS])


class Number(click.FloatRange):
    """A finite number in a range; click alone would let nan and inf pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail with what it must be."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


class Words(click.ParamType):  # type: ignore[type-arg]
    """Text in UTF-8, of at least one character if it is said so."""

    name = "text"

    def __init__(self, *, some: bool = False) -> None:
        self.some = some

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, or fail with the byte that is not part of one."""
        if self.some and not value:
            self.fail("it is empty; write at least one character.", param, ctx)
        try:
            return utf8(os.fsencode(value))
        except ConfigError as error:
            self.fail(f"it {error}", param, ctx)


def utf8(data: bytes) -> str:
    """Return the text that bytes spell, or raise a ConfigError with the byte that does not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ConfigError(
            f"is not UTF-8: {wrong}; convert it, for example with iconv -t utf-8"
        ) from None


class NewFile(click.Path):
    """A file to write: where it cannot be, the command says so before it works for minutes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with why no file can be written there."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.is_dir():
            self.fail(f"{path} is a folder; name a file.", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a folder; make it, or name another file.", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} cannot be written to; name another file.", param, ctx)
        return path


class NewPicture(NewFile):
    """A picture to write, in a format that its name ends with."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with what its name must end with."""
        path: Path = super().convert(value, param, ctx)
        if path.suffix[1:].lower() not in FORMATS:
            ends = ", ".join(f".{each}" for each in FORMATS)
            self.fail(f"{path} is not a picture; end its name with one of {ends}.", param, ctx)
        import_module("matplotlib")  # where it is missing, that is said now too
        return path


class Device(click.ParamType):  # type: ignore[type-arg]  # of newer click alone
    """Where arrays live: None for cpu, else a GPU by the name that ``models.load`` knows."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return None or the name, or fail with what it must be."""
        if value != "cpu" and not re.fullmatch(r"cuda(:\d+)?", value):
            self.fail(f"{value!r} is not a device; choose cpu, cuda or cuda:1.", param, ctx)
        return None if value == "cpu" else value


class ConfigFile(click.Path):
    """A file of a TrainingConfig, which other options go before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the file holds; its numbers become defaults of the other options."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        found = read_training_config(path)
        if ctx is not None:
            ctx.default_map = {**(ctx.default_map or {}), **found.options}
        return found


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes, as 2GiB, 1.5 GB or a number alone."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes, or fail with what it must be."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B?)", str(value), re.I)
        size = 0
        if found is not None:
            power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
            size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
        if size < 1:
            self.fail(f"{value!r} is not a size; write one as 2GiB, 500MiB or 1.5GB.", param, ctx)
        return size


METAVARS: dict[type, str] = {
    click.IntRange: "N",
    Number: "X",
    click.Path: "PATH",
    NewFile: "PATH",
    NewPicture: "PATH",
    ConfigFile: "PATH",
    Device: "NAME",
    Words: "TEXT",
    Size: "SIZE",
}


def option(name: str, kind: Any, text: str, default: Any = None) -> Callable[..., Any]:
    """Return an option that shows its default, if it has one."""
    metavar = METAVARS.get(type(kind))
    shown = default is not None
    return click.option(
        name, type=kind, default=default, show_default=shown, metavar=metavar, help=text,
        is_eager=isinstance(kind, ConfigFile),
    )  # fmt: skip
