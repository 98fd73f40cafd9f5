"""Calls a reward function in a separate process.

This file runs as a script that reads requests and writes replies, one line of JSON each.  The first
request is [path of the file, name of the function, sys.path]; each later request is a call, [number
of answers, {parameter: list}].  What the function prints goes to standard error.
"""

import inspect
import json
import math
import os
import runpy
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any


def taken(function: Any) -> Any:
    """Return (has ``**kwargs``, [(parameter, is required), ...]) of a function.

    If the function cannot be called by keyword, return the reason as text.
    """
    kinds = inspect.Parameter
    try:
        each = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError) as error:
        return str(error)
    if alone := [o.name for o in each if o.kind is kinds.POSITIONAL_ONLY and o.default is o.empty]:
        return f"{alone[0]} is positional-only"
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    names = [(one.name, one.default is kinds.empty) for one in each if one.kind in by_name]
    return any(one.kind is kinds.VAR_KEYWORD for one in each), names


def judged(function: Callable[..., Any], count: int, arguments: Mapping[str, Sequence[Any]]) -> Any:
    """Return {"values": a number or None for each answer}, or {"wrong": (answer, problem)}.

    ``answer`` is None if no single answer causes the problem.
    """
    try:
        values = function(**arguments)
    except (Exception, SystemExit) as error:
        for number in range(count):  # find the answer that raises
            try:
                function(**{name: [each[number]] for name, each in arguments.items()})
            except (Exception, SystemExit) as own:
                return {"wrong": (number, f"raised {type(own).__name__}: {own}")}
        problem = f"raised {type(error).__name__}: {error}, but not for each answer alone"
        return {"wrong": (None, problem)}
    try:
        length = None if isinstance(values, str | bytes | Mapping | Set) else len(values)
    except TypeError:  # also raised by len of an array without axes
        length = None
    if length != count:
        has = repr(values)[:80] if length is None else f"{length} items"
        problem = f"returned {has} for {count} answers; it must return one number per answer"
        return {"wrong": (None, problem)}
    result = list[float | None]()
    for number, value in enumerate(values):
        try:
            result.append(None if value is None else float(value))
        except (TypeError, ValueError, OverflowError):
            return {"wrong": (number, f"returned {repr(value)[:80]}, not a number,")}
        if not math.isfinite(result[-1] or 0):
            return {"wrong": (number, f"returned {result[-1]:g}")}
    return {"values": result}


def main() -> None:
    """Reply to requests until standard input ends."""
    requests = os.fdopen(os.dup(0), encoding="ascii")
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    path, name, places = json.loads(requests.readline())
    sys.path[:] = [str(Path(path).parent), *places]
    try:
        function = runpy.run_path(path, run_name=Path(path).stem).get(name)
    except (Exception, SystemExit) as error:
        reply(f"cannot be run: {type(error).__name__}: {error}; fix it")
        return
    if not callable(function):
        reply(f"has no function {name}; define it, or name another function")
        return
    reply(taken(function))
    for line in requests:
        reply(judged(function, *json.loads(line)))


def guarded() -> None:
    """Fork: the child continues, and the parent kills the process group when the caller ends.

    The child cannot prevent this, whatever it runs: all processes that it started end too.
    """

    def ended(*_: object) -> None:
        child, status = os.waitpid(-1, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status)
        if child:
            os._exit(128 - code if code < 0 else code)

    signal.signal(signal.SIGCHLD, ended)
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return
    gone = select.poll()
    gone.register(0, 0)  # reports only that the writer has closed standard input
    gone.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if hasattr(os, "fork"):
        guarded()
    main()
