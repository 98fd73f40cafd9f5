"""What the labels of texts are: classes, several at once, or numbers; and which one is which."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..models.configs.heads import PROBLEMS
from .messages import shown

REGRESSION, SINGLE, MULTI = PROBLEMS
NAME, SET, NUMBER = "a class", "a list", "a number"
SHOWN = 12  # labels in a message


class Labels(NamedTuple):
    """What the labels of a file are.

    Attributes
    ----------
    problem : str
        As in ``problem_type`` of config.json.
    names : tuple of str
        The classes, in the order of the outputs; none of a regression.
    sets : tuple of tuple of str
        The sets of classes that texts have, if they have several.
    """

    problem: str
    names: tuple[str, ...] = ()
    sets: tuple[tuple[str, ...], ...] = ()

    def number(self, value: Any) -> float:
        """Return a label as a number: of a class its place, of several that of their set."""
        if self.problem == REGRESSION:
            return float(value)
        if self.problem == MULTI:
            return float(self.sets.index(tuple(value)))
        return float(self.names.index(str(value)))

    def vectors(self) -> list[list[bool]]:
        """Return for each set which classes are in it."""
        return [[name in each for name in self.names] for each in self.sets]


def labels_of(records: Iterable[Any], place: Any, known: Mapping[str, Any] | None) -> Labels:
    """Return what the labels of all rows are; ``known`` is the config.json of a classifier.

    Raises
    ------
    ConfigError
        Rows differ in kind, all have one label, or one that the classifier does not have.
    """
    first: dict[Any, int] = {}  # of each label, its line
    for record in records:
        value = record.value
        first.setdefault(tuple(value) if isinstance(value, list) else value, record.line)
    kinds = {_kind(value): line for value, line in reversed(first.items())}
    if len(kinds) > 1:
        (kind, line), (other, second), *_ = kinds.items()
        problem = f"the label is {kind}, and {other} at {place(second)}"
        raise ConfigError(f"{place(line)}: {problem}; write all labels in one way")
    (kind,) = kinds
    if kind == NUMBER or (kind == NAME and _are_numbers(first)):
        return Labels(REGRESSION)
    every = {name for value in first for name in (value if kind == SET else (str(value),))}
    names = tuple(sorted(every, key=_order if all(map(_is_integer, every)) else str))
    if known is not None:
        names = _as_known(names, known)
    elif len(every) < 1 + (kind == NAME):
        only = f"have the label {names[0]}" if names else "have no label"
        raise ConfigError(f"{place(min(first.values()))}: all rows {only}; give rows of two labels")
    sets = tuple(sorted(first)) if kind == SET else ()
    return Labels(MULTI if kind == SET else SINGLE, names, sets)


def _kind(value: Any) -> str:
    """Return in words what a label is."""
    return SET if isinstance(value, tuple) else NUMBER if isinstance(value, float) else NAME


def _are_numbers(values: Iterable[Any]) -> bool:
    """Return whether labels are numbers as a table holds them, and not all whole."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return False
    return any(number != int(number) for number in numbers if number - number == 0)


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def _order(name: str) -> int:
    return int(name)


def _as_known(names: tuple[str, ...], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a classifier, among which these are."""
    given = known.get("id2label") or {}
    every = tuple(str(given.get(str(n), n)) for n in range(len(given) or known["num_labels"]))
    if all(each == f"LABEL_{n}" for n, each in enumerate(every)):  # without names
        every = tuple(map(str, range(len(every))))
    if other := [name for name in names if name not in every]:
        cure = "name a model without labels of its own, or write its labels"
        has = f"the model has the labels {some(every)}, and none is {other[0]}"
        raise ConfigError(f"{has}; {cure}")
    return every


def some(names: Collection[str]) -> str:
    """Return the first of some labels, in words."""
    first = [*names][:SHOWN]
    return ", ".join(map(shown, first)) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
