"""Chat templates in a process of their own: other people's programs, with limits.

A file by itself, which is run and takes and gives one JSON value in each line: the template, then
lists of arguments.  A list is answered by its texts, by why there are none, or, where a text takes
too long, by the end of the process.

A template runs in jinja2's sandbox, where it can change nothing, read no file and reach no module.
The clock is a thread of C that waits for nobody: it stops one long operation as well as a loop.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from typing import Any, NoReturn

from jinja2 import TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHARACTERS = 1 << 23  # of a text
WORDS = 500  # characters of an error
BYTES = 1 << 29  # of memory, where the system limits it
TODAY = date(2024, 7, 26)  # in templates that ask: texts stay the same when a run goes on


class Generation(ext.Extension):
    """``{% generation %}`` marks what an assistant says; here its text alone matters."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def compiled(source: str) -> Any:
    """Return a template that can do nothing but make text."""

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})  # for no web page

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(source)


def texts_of(template: Any, calls: list[dict[str, Any]]) -> list[str]:
    """Return the text of each set of arguments, or raise as soon as one is too long."""
    texts = []
    for arguments in calls:
        parts, size = [], 0
        for part in template.generate(**arguments):
            parts.append(part)
            size += len(part)
            if size > CHARACTERS:
                raise TemplateError(f"it makes more than {CHARACTERS:,} characters")
        texts.append("".join(parts))
    return texts


def timed(seconds: float, work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns, or why it fails; end the process when the time is up."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            return work(*arguments), ""
        except MemoryError:
            return None, f"it needs more than {BYTES >> 20} MiB of memory"
        except RecursionError:
            return None, "it calls itself too often"
        except Exception as error:  # a template may fail in any way a program can
            return None, str(error)[:WORDS] or "it fails"
        finally:
            faulthandler.cancel_dump_traceback_later()


def main(seconds: float) -> None:
    """Make texts of each line of standard input, in so many seconds for a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who waits for the text
    with suppress(ImportError, ValueError, OSError):  # other systems
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    template, error = timed(seconds, compiled, json.loads(sys.stdin.readline()))
    print(json.dumps([None, error]), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(seconds, texts_of, template, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
