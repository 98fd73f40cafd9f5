"""The group of all commands, and the messages with which errors end a command."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from .._version import __version__
from ..errors import UnslothCupyError, printable
from ..finetune.naming import naming
from ..finetune.ranks import prints_errors
from .bench import bench
from .check import check
from .evaluate import evaluate
from .explain import explain
from .export import export
from .finetune import finetune
from .generate import generate
from .info import info
from .missing import missing
from .options import as_flags
from .plan import plan
from .precompile import precompile


@contextmanager
def _printable() -> Iterator[None]:
    """Escape control characters in click's messages, which repeat words of the command."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = printable(error.message)
        raise


class Commands(click.Group):
    """Commands that end with one message, its cure and the exit status 1 if an error is raised."""

    @_printable()
    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the words before the command."""
        return super().make_context(*args, **options)

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
            if prints_errors(parallel=any("-parallel" in word for word in sys.argv)):
                raise
            raise SystemExit(error.exit_code) from None
        except UnslothCupyError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.ClickException(missing(error)) from error
        except BrokenPipeError:
            raise  # click ends quietly when the reader of a pipe is gone
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            cure = "check that the disk has room and that you may write there"
            raise click.ClickException(f"{where}{error.strerror or error}; {cure}") from error
        except MemoryError as error:
            cure = "try a smaller --batch, fewer --tokens or a smaller model"
            raise click.ClickException(f"out of memory ({error}); {cure}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="unsloth-cupy")
def group() -> None:
    """Train transformers with NumPy and CUDA, generate text, plan memory in advance."""


for command in (
    info,
    check,
    bench,
    finetune,
    evaluate,
    generate,
    plan,
    precompile,
    explain,
    export,
):
    group.add_command(command)
