"""What the labels of texts are: classes, several at once, or numbers; and which one is which."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...models.configs.heads import PROBLEMS
from .messages import shown

REGRESSION, SINGLE, MULTI = PROBLEMS
MARKS = {"0", "1"}  # of classes in a vector
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
    vector : bool
        Whether a row has a 0 or a 1 for each class, as transformers takes them.
    """

    problem: str
    names: tuple[str, ...] = ()
    sets: tuple[tuple[str, ...], ...] = ()
    vector: bool = False

    def number(self, value: Any) -> float:
        """Return a label as a number: of a class its place, of several that of their set."""
        if self.problem == REGRESSION:
            return float(value)
        if self.problem == MULTI:
            return float(self.sets.index(self.classes(value)))
        return float(self.names.index(str(value)))

    def classes(self, value: Sequence[str]) -> tuple[str, ...]:
        """Return the classes that a list holds, or that a vector marks by 1."""
        if self.vector:
            value = [n for n, mark in zip(self.names, value, strict=True) if mark == "1"]
        return tuple(sorted({*value}))

    def vectors(self) -> list[list[bool]]:
        """Return for each set which classes are in it."""
        return [[name in each for name in self.names] for each in self.sets]


def labels_of(records: Iterable[Any], place: Any, known: Mapping[str, Any] | None) -> Labels:
    """Return what the labels of all rows are; ``known`` is the config.json of a classifier.

    Raises
    ------
    ConfigError
        Rows differ in kind, all have one label, or one that the classifier does not have; or lists
        of 0 and 1 may be vectors or the names of classes.
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
    size = _size(first, place) if kind == SET else 0
    every = {name for value in first for name in (value if kind == SET else (str(value),))}
    names = tuple(sorted(every, key=_order if all(map(_is_integer, every)) else str))
    if size:
        names = tuple(map(str, range(size)))
    if known is not None:
        names = _as_known(() if size else names, known)
        if size not in (0, len(names)):
            problem = f"vectors have {size} entries, and the model {len(names)} labels"
            raise ConfigError(f"{place(min(first.values()))}: {problem}; name another model")
    elif len(every) < 1 + (kind == NAME):
        only = f"have the label {names[0]}" if names else "have no label"
        raise ConfigError(f"{place(min(first.values()))}: all rows {only}; give rows of two labels")
    if kind != SET:
        return Labels(SINGLE, names)
    labels = Labels(MULTI, names, vector=bool(size))
    return labels._replace(sets=tuple(sorted({labels.classes(value) for value in first})))


def _size(lists: Mapping[Any, int], place: Any) -> int:
    """Return the entries of vectors of 0 and 1, a place for each class; 0: lists hold names.

    Lists of one length above 1 are vectors: as names they would all hold the same two.
    """
    sizes = {len(each) for each in lists}
    size = min(sizes)
    if len(sizes) == 1 and {name for each in lists for name in each} <= MARKS:
        if size == 1:
            cure = 'write a class in each row as "label": 0, and no class as []'
            problem = "labels are lists of one 0 or 1 each, a mark or the name of a class"
            raise ConfigError(f"{place(min(lists.values()))}: {problem}; {cure}")
        return size
    for each, line in lists.items():
        if len({*each}) < len(each) and all(map(_is_integer, each)):
            problem = f"the label {shown(', '.join(each))} holds a number twice"
            cure = "write the names of its classes, or vectors of 0 and 1 of one length everywhere"
            raise ConfigError(f"{place(line)}: {problem}; {cure}")
    return 0


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
    labels = known.get("id2label") or {}
    every = tuple(str(labels.get(str(n), n)) for n in range(len(labels) or known["num_labels"]))
    if all(each == f"LABEL_{n}" for n, each in enumerate(every)):  # without names
        every = tuple(map(str, range(len(every))))
    if other := [name for name in names if name not in every]:
        if not labels and len(names) == len(every):  # a new head, whose outputs have no names yet
            return names
        cure = "name a model without labels of its own, or write its labels"
        has = f"the model has the labels {some(every)}, and none is {other[0]}"
        raise ConfigError(f"{has}; {cure}")
    return every


def some(names: Collection[str]) -> str:
    """Return the first of some labels, in words."""
    first = [*names][:SHOWN]
    return ", ".join(map(shown, first)) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
