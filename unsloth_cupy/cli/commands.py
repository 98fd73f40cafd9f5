"""The group of all commands, and their error messages."""

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from .._version import __version__
from ..core.names import RENAMED
from ..core.other_names import OTHER_COMMANDS, OTHER_NAMES
from ..errors import UnslothCupyError, printable
from ..finetune.naming import naming
from ..finetune.run.ranks import prints_errors
from ..machine import echo
from ..starting import INTERRUPTED
from .bench import bench
from .check import check
from .data import data
from .evaluate import evaluate
from .explain import explain
from .export import export
from .finetune import finetune
from .generate import generate
from .info import info
from .merge import merge
from .missing import missing
from .options import as_flags
from .plan import plan
from .precompile import precompile
from .serve import serve
from .teach import teach
from .verify import verify


@contextmanager
def _printable() -> Iterator[None]:
    """Escape control characters in click's messages, which repeat words of the command line."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = printable(error.message)
        raise


def suggest(error: click.NoSuchOption) -> None:
    """Suggest the option that has this name in other libraries, else similar spellings."""
    own = OTHER_NAMES.get(error.option_name.lstrip("-").replace("-", "_").lower(), ())
    command = None if error.ctx is None else error.ctx.command
    known = {flag for each in (command.params if command else ()) for flag in each.opts}
    spelled = "--" + error.option_name.lstrip("-").replace("_", "-")
    words = spelled, *(as_flags({name: None}) for name in own)
    better = [flag for flag in words if flag in known]
    better += sorted(flag for flag in known if flag.startswith(spelled))
    vars(error)["possibilities"] = better[:1] or error.possibilities


def current_flags(command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the arguments of a command, with renamed options under their present names."""
    known = {flag for each in command.params for flag in each.opts}
    end = words.index("--") if "--" in words else len(words)
    result = [*words]
    for number, word in enumerate(words[:end]):
        old, *value = word.split("=", 1)
        new = as_flags({RENAMED.get(old[2:].replace("-", "_"), ""): None})
        if new in known and old not in known:
            echo(f"{old} is now named {new}", err=True)
            result[number] = "=".join([new, *value])
    return result


class Commands(click.Group):
    """The group of commands; an error ends a command with one message and the exit status 1."""

    @_printable()
    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the arguments before the command."""
        return super().make_context(*args, **options)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments, with renamed options under their present names."""
        word = args[0].replace("_", "-").lower()
        near = difflib.get_close_matches(word, self.commands, 1)
        own = OTHER_COMMANDS.get(word) or next(iter(near), None)
        if args[0] not in self.commands and own:
            ctx.fail(f"No such command {args[0]!r}; use {ctx.command_path} {own}.")
        name, command, words = super().resolve_command(ctx, args)
        return name, command, words if command is None else current_flags(command, words)

    @_printable()
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error that the user can correct prints no traceback."""
        if getattr(sys.stdout, "errors", "") == "strict":  # a terminal may lack a character
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        os.environ["MPLBACKEND"] = "agg"  # a notebook may have set a backend that is missing here
        try:
            with naming(as_flags):
                return super().invoke(ctx)
        except click.UsageError as error:
            if isinstance(error, click.NoSuchOption):
                suggest(error)
            if prints_errors(parallel=any("-parallel" in word for word in sys.argv)):
                raise
            raise SystemExit(error.exit_code) from None
        except UnslothCupyError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.ClickException(missing(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # click ends quietly when the reader of a pipe is gone
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            cure = "check that the disk has room and that you may write there"
            raise click.ClickException(f"{where}{error.strerror or error}; {cure}") from error
        except MemoryError as error:
            cure = "try a smaller --batch, fewer --tokens or a smaller model"
            if ctx.invoked_subcommand == "finetune" and "--fit" not in sys.argv:
                cure = f"on a GPU, --fit chooses settings that fit it; or {cure}"
            raise click.ClickException(f"out of memory ({error}); {cure}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="unsloth-cupy")
def group() -> None:
    """Train transformers with NumPy and CUDA, generate text, and plan memory."""


COMMANDS = (
    *(
        info,
        check,
        bench,
        data,
        teach,
        finetune,
        evaluate,
        generate,
        serve,
        merge,
        export,
        verify,
        plan,
        precompile,
    ),
    explain,
)
for command in COMMANDS:
    group.add_command(command)
