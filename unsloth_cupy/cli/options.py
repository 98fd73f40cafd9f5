"""Types of the command-line options, and the function that declares an option."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..finetune.run.reporters import REPORTERS
from ..finetune.run.settings import Settings, kind_of
from ..finetune.run.training_config import read_training_config
from ..machine import tables_as_json
from ..models.layers.context import KINDS as CONTEXTS
from ..models.quantizer import CHOICES as QUANTIZED
from ..parallel.schedule import KINDS as SCHEDULES
from ..pictures import FORMATS

FILE = click.Path(path_type=Path)
MODEL_FILES = ("config.json", "adapter_config.json", "settings.json")  # the last: a run folder
BASE = "Folder of the adapter's base model, if the base model was moved."
QUANTIZE = click.Choice(QUANTIZED, case_sensitive=False)
SCHEDULE = click.Choice([*SCHEDULES])
ZERO = click.Choice(["0", "1", "3"])
ATTENTION = click.Choice([*CONTEXTS])


class Integer(click.IntRange):
    """An integer in a range."""

    name = "integer"  # in the message for other text


class Number(click.FloatRange):
    """A finite number in a range; unlike ``click.FloatRange``, not nan or inf."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail with a message if it is not finite or out of range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


class Words(click.ParamType):  # type: ignore[type-arg]
    """UTF-8 text; ``nonempty``: at least one character."""

    name = "text"

    def __init__(self, *, nonempty: bool = False) -> None:
        self.nonempty = nonempty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, or fail with the byte that is not UTF-8."""
        if self.nonempty and not value:
            self.fail("it is empty; write at least one character.", param, ctx)
        try:
            return utf8(os.fsencode(value))
        except ConfigError as error:
            self.fail(f"it {error}", param, ctx)


def utf8(data: bytes) -> str:
    """Return bytes decoded as UTF-8, or raise a ConfigError that names the invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ConfigError(
            f"is not UTF-8: {wrong}; convert it, for example with iconv -t utf-8"
        ) from None


class NewFile(click.Path):
    """A file to write, checked before a long command starts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail if no file can be written there."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.is_dir():
            self.fail(f"{path} is a folder; name a file.", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a folder; make it, or name another file.", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} cannot be written to; name another file.", param, ctx)
        return path


class NewPicture(NewFile):
    """A picture file to write; the suffix determines the format."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with the supported file name suffixes."""
        path: Path = super().convert(value, param, ctx)
        if path.suffix[1:].lower() not in FORMATS:
            ends = ", ".join(f".{each}" for each in FORMATS)
            self.fail(f"{path} is not a picture; end its name with one of {ends}.", param, ctx)
        import_module("matplotlib")  # if it is missing, fail now too
        return path


class Device(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click
    """A device: None for cpu, else auto or the name of a GPU as in ``models.load``."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return None or the name, or fail with the accepted names."""
        if value not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", value):
            self.fail(f"{value!r} is not a device; choose auto, cpu, cuda or cuda:1.", param, ctx)
        return None if value == "cpu" else value


class ConfigFile(click.Path):
    """A file with a TrainingConfig, which other options override."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the settings in the file; they become defaults of the other options."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        settings = read_training_config(path)
        if ctx is not None:
            ctx.default_map = {**(ctx.default_map or {}), **settings}
        return settings


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 2GiB, 1.5 GB or 1000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes, or fail with examples of a size."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B?)", str(value), re.I)
        size = 0
        if match is not None:
            power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
            size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
        if size < 1:
            self.fail(f"{value!r} is not a size; write one as 2GiB, 500MiB or 1.5GB.", param, ctx)
        return size


class FileOrShare(click.Path):
    """A file, or a share above 0 and below 1."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a number if the text is one, else a path."""
        try:
            return float(value)
        except (TypeError, ValueError):
            return Path(os.fsdecode(super().convert(value, param, ctx)))


class Choice(click.Choice):  # type: ignore[type-arg]
    """A choice of texts or numbers."""

    def __init__(self, choices: Sequence[Any]) -> None:
        super().__init__([*map(str, choices)], case_sensitive=False)
        self.values = {str(each): each for each in choices}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the chosen text or number, or fail with a list of all choices."""
        return self.values[super().convert(str(value), param, ctx)]


KINDS_BY_NAME: dict[str, Any] = {
    "device": Device(),
    "limit_memory": Size(),
    "host_memory": Size(),
    "out": FILE,
    "base": FILE,
    "eval": FileOrShare(),
    "reference": FILE,
    "teacher": FILE,
    "sample_prompt": Words(nonempty=True),
    "reward": Words(nonempty=True),
    "environment": Words(nonempty=True),
    "report_to": click.Choice([*REPORTERS]),
    "lora_targets": Words(nonempty=True),
}  # of settings whose type does not follow from the field
METAVARS: dict[type, str] = {
    Integer: "N",
    Number: "X",
    click.Path: "PATH",
    NewFile: "PATH",
    NewPicture: "PATH",
    ConfigFile: "PATH",
    FileOrShare: "PATH or X",
    Device: "NAME",
    Words: "TEXT",
    Size: "SIZE",
}


def as_flags(settings: Mapping[str, Any]) -> str:
    """Return settings in the syntax of the command line: --tokens 128."""
    words: list[str] = []
    for name, value in settings.items():
        flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
        flag = {"model": "MODEL_FOLDER", "text": "--data"}.get(name, flag)
        shown = str(value)
        if name in ("limit_memory", "host_memory") and isinstance(value, int):
            shown = f"{value >> 20}MiB"
        words += [flag] if value is None or isinstance(value, bool) else [flag, shown]
    return " ".join(words)


def _choose_json(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Print tables as JSON in this command."""
    tables_as_json.set(bool(value))


json_option = click.option(
    "--json", is_flag=True, expose_value=False, is_eager=True, callback=_choose_json,
    help="Print tables as JSON lines, without other text.",
)  # fmt: skip
OTHERS = "other options"  # name of the last help section


class Option(click.Option):
    """An option with a help section (``group``); ``rare``: shown only by ``--help-all``."""

    def __init__(
        self, *names: Any, group: str | None = None, rare: bool = False, **options: Any
    ) -> None:
        super().__init__(*names, **options)
        self.group, self.rare = group, rare


class Grouped(click.Command):
    """A command whose help has a section per group of options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; if some are rare, with the option --help-all."""
        params = super().get_params(ctx)
        rare = any(getattr(each, "rare", False) for each in params)
        return [*params, HELP_ALL] if rare else params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section per group in the order of the options, then options without a group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            shown = ctx.meta.get(HELP_ALL.name) or not getattr(parameter, "rare", False)
            if record is not None and isinstance(parameter, click.Option) and shown:
                groups.setdefault(getattr(parameter, "group", None) or OTHERS, []).append(record)
        for group in sorted(groups, key=OTHERS.__eq__):
            with formatter.section(group.capitalize() if len(groups) > 1 else "Options"):
                formatter.write_dl(groups[group])


def _show_all(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Print the help page with all options."""
    if value and not ctx.resilient_parsing:
        ctx.meta[param.name] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=_show_all,
    help="Show this message with all options and exit.",
)  # fmt: skip


class WithData(Grouped):
    """A command whose option --data accepts several words, up to the folder of a model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write --data before each of its words."""
        words, taking = list[str](), False
        for number, word in enumerate(args):
            if word.startswith("-") and word != "-":
                taking = word.partition("=")[0] in ("--data", "--text")
            elif taking and args[number - 1] not in ("--data", "--text"):
                models = (Path(word) / name for name in MODEL_FILES)
                if any(path.is_file() for path in models):
                    taking = False
                else:
                    words.append("--data")
            words.append(word)
        return super().parse_args(ctx, words)


def data_of(words: Sequence[str]) -> Any:
    """Return the words of --data as an argument of ``read_data``."""
    return None if not words else words[0] if len(words) == 1 else [*words]


def ignore_option(function: Any, group: str | None = None) -> Any:
    """Add the option --ignore to a command, in a section of its help."""
    return click.option(
        "--ignore", multiple=True, metavar="COLUMN", help="Data column to ignore; may be repeated.",
        cls=Option, group=group,
    )(function)  # fmt: skip


def option(
    name: str,
    kind: Any,
    text: str,
    default: Any = None,
    group: str | None = None,
    rare: bool = False,
) -> Callable[..., Any]:
    """Return a click option whose help shows its default."""
    metavar = METAVARS.get(type(kind))
    has_default = default not in (None, ())
    return click.option(
        name, type=kind, default=default, show_default=has_default, metavar=metavar, help=text,
        is_eager=isinstance(kind, ConfigFile), cls=Option, group=group, rare=rare,
        multiple=default == (),
    )  # fmt: skip


def options_of(settings: type[Settings]) -> Callable[..., Any]:
    """Return a decorator that adds an option for each setting with a group."""
    every = [each for each in dataclasses.fields(settings) if "group" in each.metadata]

    def decorated(function: Any) -> Any:
        for each in reversed(every):  # decorators are listed from the last one to the first
            function = _option_of(each, {other.name for other in every})(function)
        return function

    return decorated


def _option_of(setting: "dataclasses.Field[Any]", names: Iterable[str]) -> Callable[..., Any]:
    """Return the option of a setting: its flag, type, default, and help."""
    limits, group = setting.metadata, setting.metadata["group"]
    rare = limits.get("rare", False)
    flag = as_flags({setting.name: None})
    text = limits["text"].format_map({name: as_flags({name: None}) for name in names})
    number, least = kind_of(setting), limits.get("least")
    if number is bool:
        flag += f"/{as_flags({setting.name: False})}" * (setting.default is None)
        return click.option(
            flag, is_flag=True, default=setting.default, help=text, cls=Option, group=group,
            rare=rare,
        )  # fmt: skip
    kind = KINDS_BY_NAME.get(setting.name)
    if "choices" in limits:
        kind = Choice(limits["choices"])
    elif number is int and kind is None:
        kind = Integer(least)
    elif number is float:
        above = limits.get("above")
        kind = Number(least if above is None else above, min_open=above is not None)
    return option(flag, kind, text, setting.default, group, rare)
