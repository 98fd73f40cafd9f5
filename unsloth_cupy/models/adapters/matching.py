"""Matches regular expressions in a separate process, as those of an adapter are other people's.

Some expressions would run for years.  This file is run as a script that reads one JSON value, the
arguments of ``matches``, and writes its result.  Its argument is a limit in seconds of processor
time.  The system ends it there or, without such a timer, the process that started it does.
"""

import json
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

BYTES = 1 << 28  # limit of memory, on systems that enforce it


def matches(method: str, expressions: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Return for each name [number, group idx or None] of the first expression that matches.

    The items of names that none matches are None.  For an expression that is not valid the result
    is [number, message] instead.  ``method`` is match or fullmatch.
    """
    compiled = []
    for number, expression in enumerate(expressions):
        try:
            compiled.append(getattr(re.compile(expression), method))
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            return [number, str(error) or type(error).__name__]
    pairs: list[Any] = []
    for name in names:
        results = ((number, match(name)) for number, match in enumerate(compiled))
        first = next((each for each in results if each[1]), None)
        pairs.append(first and [first[0], first[1].groupdict().get("idx")])
    return pairs


def main() -> None:
    """Answer the request on standard input."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    except (ImportError, ValueError, OSError):
        pass  # a system without such a limit
    json.dump(matches(*json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
