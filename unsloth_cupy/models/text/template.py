"""A script that renders chat templates in a separate process, as other people wrote them.

The script reads one JSON value from each line: the template, then lists of arguments.  It answers
the first line with an error or "", and each other line with a list of [[text, marked places],
error], all in JSON.  If a text takes too long, the process ends instead.

A template runs in jinja2's sandbox, where it cannot change anything, read files or import modules.
The time limit is processor time, so that a busy machine breaks no template.  A timer of the
operating system enforces it, which also stops a single long operation.  Without such a timer, as on
Windows, a C thread of faulthandler enforces wall-clock time.

Other renderers need a process, too: of 10,000 random hostile templates, minijinja 3.1.0 with two
million units of fuel crashed for 46 (lists nested 99,999 deep, 20,000 signs in a row), took more
than 3 s for 370, and up to 1.3 GB.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import accumulate, pairwise
from secrets import token_hex
from typing import Any, NoReturn

from jinja2 import TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHARACTERS = 1 << 23  # most characters of a text
WORDS = 500  # most characters of an error message
BYTES = 1 << 29  # limit of memory, 512 MiB, on systems that enforce it
MARK = f"\ufdd0{token_hex(8)}\ufdd0"  # begin and end of a marked place, which nobody can guess


class Generation(ext.Extension):
    """A tag that renders the assistant's text in ``{% generation %}`` between two ``MARK``."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Return the nodes between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.Output([nodes.TemplateData(MARK)]).set_lineno(line)
        return [mark, *body, mark]


def compiled(source: str) -> Any:
    """Return a compiled template in a sandbox, with the functions that templates use."""

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # without HTML escapes, and without json.dumps's options that are functions
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = fail
    return environment.from_string(source)


def text_of(template: Any, arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a template and its marked places; raise as soon as it is too long."""
    now = datetime.fromisoformat(arguments.pop("now"))
    parts, size = [], 0
    for part in template.generate(**arguments, strftime_now=now.strftime):
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
            raise TemplateError(f"it writes more than {CHARACTERS:,} characters")
    pieces = "".join(parts).split(MARK)
    places = pairwise(accumulate(map(len, pieces), initial=0))
    return "".join(pieces), [*places][1::2]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Return a context in which the process ends after ``seconds`` of work."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def timed(seconds: float, work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return (result, "") or (None, error) of a call; end the process after ``seconds``."""
    with limited(seconds):
        try:
            return work(*arguments), ""
        except MemoryError:
            return None, f"it needs more than {BYTES >> 20} MiB of memory"
        except RecursionError:
            return None, "it calls itself too often"
        except Exception as error:  # a template is a program, and may raise any error
            return None, " ".join(str(error).split())[:WORDS] or "it fails"


def main(seconds: float) -> None:
    """Answer each line of standard input, within ``seconds`` for a text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    if hasattr(signal, "SIGPROF"):  # the timer must end the process, even if the parent ignores it
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(ImportError, ValueError, OSError):  # systems without such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    template, error = timed(seconds, compiled, json.loads(sys.stdin.readline()))
    print(json.dumps(error), flush=True)
    for line in sys.stdin:
        answers = [timed(seconds, text_of, template, each) for each in json.loads(line)]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
