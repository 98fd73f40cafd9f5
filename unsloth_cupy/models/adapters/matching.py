"""Match regular expressions in a separate process, because adapters of other people contain them.

Some expressions would run for years.  This file is run as a script: it reads the arguments of
``matches`` as one JSON value, and writes the result.  Its command-line argument is a limit of
processor time in seconds.  At the limit the operating system ends the process or, without such a
timer, the parent process does.
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

    A name without a match has None.  If an expression is invalid, the result is [number, message]
    instead.  ``method`` is match or fullmatch.
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
    """Read a request from standard input, and write the result to standard output."""
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
