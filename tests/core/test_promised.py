"""What released versions published, and this version still accepts: names, parameters, options.

A released version has a file beside this one, ``promised-VERSION.txt``: a line for each function,
class, method and attribute, and for each option of a command.  Parameters stand in their order,
with ``=`` where they may be left out.  ``python -m tests.core.test_promised`` writes the file of
this version.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

from unsloth_cupy._version import __version__
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core.names import NEEDS, RENAMED

from ..harness.tracked import tracked
from .test_names import PACKAGES, PUBLIC

RECORDS = tracked("tests/core/promised-*.txt")
STARS = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def parameters_of(name: str) -> list[Parameter]:
    function, bound = PUBLIC[name]
    return [*inspect.signature(function).parameters.values()][bound:]


def shown(parameters: list[Parameter]) -> str:
    """Return parameters as a ``def`` has them, without annotations and defaults."""
    parts: list[str] = []
    for each in parameters:
        if each.kind is Parameter.KEYWORD_ONLY and not any(part[0] == "*" for part in parts):
            parts.append("*")
        star = STARS.get(each.kind, "")
        parts.append(star + each.name + "=" * (not star and each.default is not each.empty))
    return ", ".join(parts)


def lines() -> Iterator[str]:
    """Yield what this version publishes."""
    for package in PACKAGES:
        for name in (each for each in dir(package) if each[:2] != "__"):
            full, value = f"{package.__name__}.{name}", getattr(package, name)
            yield f"{full}({shown(parameters_of(full))})" if full in PUBLIC else full
            if isinstance(value, type):
                methods = [each for each in PUBLIC if each.startswith(f"{full}.")]
                yield from (f"{each}({shown(parameters_of(each))})" for each in methods)
                yield from (f"{full}.{each}" for each in attributes(value))
    for command in group.commands.values():
        for option in command.params:
            yield from (f"unsloth-cupy {command.name} {each}" for each in option.opts)


def attributes(kind: type) -> list[str]:
    """Return the public properties of a class, and its fields if it is a dataclass."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    names = {each.name for each in fields}
    names |= {name for name in dir(kind) if isinstance(getattr(kind, name), property)}
    return [name for name in names if name[0] != "_"]


def installed(line: str) -> bool:
    """Return whether the packages that a name needs are installed."""
    words = line.partition("(")[0].split(".")[1:3]
    return not any(word in NEEDS and word not in dir(PACKAGES[0]) for word in words)


def problems(line: str, actual: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a published line that are not true any more."""
    name, bracket, parameters = line.partition("(")
    if name not in actual:
        yield from [f"{name} is missing"] * (renamed(name) not in actual)
        return
    old, new = (parsed(each[:-1]) if bracket else {} for each in (parameters, actual[name]))
    call = name.removeprefix("unsloth_cupy.")
    words = {
        key: RENAMED.get(f"{call}.{key}") or RENAMED.get(key, key) for key in old if key not in new
    }
    places = [key for key, each in new.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    for place, (key, each) in enumerate(old.items()):
        own = words.get(key, key)
        if each.kind in STARS:
            if each.kind not in [other.kind for other in new.values()]:
                yield f"{name}({STARS[each.kind]}{key}) is missing"
        elif own not in new:
            yield f"{name}({key}=...) is missing"
        elif each.default is not each.empty and new[own].default is each.empty:
            yield f"{name}({key}=...) can no longer be left out"
        elif each.kind is Parameter.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [own]:
            yield f"{name}: {key} is no longer argument {place + 1}"
    for key in new.keys() - old.keys() - {*words.values()} if bracket else ():
        if new[key].default is Parameter.empty and new[key].kind not in STARS:
            yield f"{name}({key}=...) must be passed now"


def renamed(name: str) -> str:
    """Return a name or an option of a command with the new word for its last one."""
    head, mark, last = re.fullmatch(r"(.*?)(\.|--|)([\w-]+)", name).groups()
    new = RENAMED.get(last.replace("-", "_"), last)
    return head + mark + (new.replace("_", "-") if mark == "--" else new)


def parsed(parameters: str) -> dict[str, Parameter]:
    function: Callable[..., Any] = eval(f"lambda {parameters.replace('=', '=None')}: None")
    return dict(inspect.signature(function).parameters)


def now() -> dict[str, str]:
    return {name: rest for name, _, rest in (line.partition("(") for line in lines())}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_what_a_version_published_is_still_accepted(record: Path) -> None:
    actual = now()
    published = record.read_text().splitlines()
    assert len(published) > 1000
    assert [each for line in published if installed(line) for each in problems(line, actual)] == []


def test_this_version_is_recorded() -> None:
    assert f"promised-{__version__}" in [record.stem for record in RECORDS]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a.f(x, weight, *, eps=)", None),
        ("a.f(x, *, eps=)", "a.f(weight=...) must be passed now"),
        ("a.f(weight, x)", "a.f: weight is no longer argument 1"),
        ("a.f(x, weight, eps=)", "a.f: eps is no longer argument 3"),
        ("a.f(x, weight, *, bias=)", "a.f(bias=...) is missing"),
        ("a.f(x, weight=)", "a.f(weight=...) can no longer be left out"),
        ("a.f(x, weight, **more)", "a.f(**more) is missing"),
        ("a.f(x, weight, *, threshold=)", None),
        ("a.checkpoint_every", None),
        ("unsloth-cupy f --checkpoint-every", None),
        ("b.checkpoint_every", "b.checkpoint_every is missing"),
        ("a.g(x)", "a.g is missing"),
        ("unsloth-cupy f --eps", "unsloth-cupy f --eps is missing"),
    ],
)
def test_what_is_broken_is_named(line: str, problem: str | None) -> None:
    names = "a.recompute_every", "unsloth-cupy f --recompute-every"
    actual = {"a.f": "x, weight, *, eps=, min_delta=)"} | dict.fromkeys(names, "")
    assert next(problems(line, actual), None) == problem


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in sorted(lines()))
    Path(__file__).with_name(f"promised-{__version__}.txt").write_text(text)
