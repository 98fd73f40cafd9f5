"""The labels of a data set: single-label, multi-label or regression; and the order of classes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...models.configs.heads import PROBLEMS
from .messages import shown

REGRESSION, SINGLE, MULTI = PROBLEMS
MARKS = {"0", "1"}  # entries of a vector
NAME, SET, NUMBER = "a class", "a list", "a number"
SHOWN = 12  # maximum labels in a message


class Labels(NamedTuple):
    """The labels of a data set.

    Attributes
    ----------
    problem : str
        The ``problem_type`` of config.json.
    names : tuple of str
        The classes, in the order of the outputs; empty for a regression.
    sets : tuple of tuple of str
        The distinct sets of classes of multi-label texts.
    vector : bool
        Whether rows store multi-label classes as a vector of 0 and 1, as in transformers.
    """

    problem: str
    names: tuple[str, ...] = ()
    sets: tuple[tuple[str, ...], ...] = ()
    vector: bool = False

    def number(self, value: Any) -> float:
        """Return a label as a number: the index of its class, or of its set in ``sets``."""
        if self.problem == REGRESSION:
            return float(value)
        if self.problem == MULTI:
            return float(self.sets.index(self.classes(value)))
        return float(self.names.index(str(value)))

    def classes(self, value: Sequence[str]) -> tuple[str, ...]:
        """Return the classes in a list of names, or the classes with a 1 in a vector."""
        if self.vector:
            value = [n for n, mark in zip(self.names, value, strict=True) if mark == "1"]
        return tuple(sorted({*value}))

    def vectors(self) -> list[list[bool]]:
        """Return the sets as rows of booleans, (sets, classes)."""
        return [[name in each for name in self.names] for each in self.sets]


def labels_of(records: Iterable[Any], place: Any, known: Mapping[str, Any] | None) -> Labels:
    """Return the labels of all rows; ``known`` is the config.json of a classifier, if any.

    Raises
    ------
    ConfigError
        The kinds of labels differ, all rows have the same label, the classifier does not have a
        label, or lists of 0 and 1 are ambiguous (vectors or class names).
    """
    first: dict[Any, int] = {}  # the first line of each label
    for record in records:
        value = record.value
        first.setdefault(tuple(value) if isinstance(value, list) else value, record.line)
    kinds = {_kind(value): line for value, line in reversed(first.items())}
    if len(kinds) > 1:
        (kind, line), (other, second), *_ = kinds.items()
        problem = f"the label is {kind} here, but {other} at {place(second)}"
        raise ConfigError(f"{place(line)}: {problem}; write all labels in the same way")
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
            problem = f"vectors have {size} entries, but the model has {len(names)} labels"
            raise ConfigError(f"{place(min(first.values()))}: {problem}; use another model")
    elif len(every) < 1 + (kind == NAME):
        only = f"have the label {names[0]}" if names else "have no label"
        raise ConfigError(f"{place(min(first.values()))}: all rows {only}; add another label")
    if kind != SET:
        return Labels(SINGLE, names)
    labels = Labels(MULTI, names, vector=bool(size))
    return labels._replace(sets=tuple(sorted({labels.classes(value) for value in first})))


def _size(lists: Mapping[Any, int], place: Any) -> int:
    """Return the length of label vectors of 0 and 1; 0 if the lists hold class names.

    Lists of 0 and 1 with one common length above 1 are vectors: as names, "0" and "1" would be the
    only classes.
    """
    sizes = {len(each) for each in lists}
    size = min(sizes)
    if len(sizes) == 1 and {name for each in lists for name in each} <= MARKS:
        if size == 1:
            cure = 'write one class as "label": 0, or no class as []'
            problem = "labels are lists of a single 0 or 1, either a vector or a class name"
            raise ConfigError(f"{place(min(lists.values()))}: {problem}; {cure}")
        return size
    for each, line in lists.items():
        if len({*each}) < len(each) and all(map(_is_integer, each)):
            problem = f"the label {shown(', '.join(each))} repeats a number"
            cure = "write class names, or vectors of 0 and 1 of the same length in all rows"
            raise ConfigError(f"{place(line)}: {problem}; {cure}")
    return 0


def _kind(value: Any) -> str:
    """Return the kind of a label as text."""
    return SET if isinstance(value, tuple) else NUMBER if isinstance(value, float) else NAME


def _are_numbers(values: Iterable[Any]) -> bool:
    """Return whether all labels are numbers in text form, and some have a fraction."""
    try:
        numbers = [float(value) for value in values]
    except (ValueError, OverflowError):
        return False
    return any(number != int(number) for number in numbers if number - number == 0)


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def _order(name: str) -> int:
    return int(name)


def _as_known(names: tuple[str, ...], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a classifier; raise a ConfigError if it lacks one of ``names``."""
    labels = known.get("id2label") or {}
    every = tuple(str(labels.get(str(n), n)) for n in range(len(labels) or known["num_labels"]))
    if all(each == f"LABEL_{n}" for n, each in enumerate(every)):  # default names
        every = tuple(map(str, range(len(every))))
    if other := [name for name in names if name not in every]:
        if not labels and len(names) == len(every):  # a new head without names
            return names
        cure = "use a model without labels of its own, or use its labels in the data"
        has = f"the model has the labels {some(every)}, but not {other[0]}"
        raise ConfigError(f"{has}; {cure}")
    return every


def some(names: Collection[str]) -> str:
    """Return the first labels as text for a message."""
    first = [*names][:SHOWN]
    return ", ".join(map(shown, first)) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
