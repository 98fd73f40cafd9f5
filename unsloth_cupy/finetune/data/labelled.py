"""Rows of labelled texts: a text with one class, several classes, or a number.

{"text": "...", "label": "good"}                 one class: a name, an integer, true or false
{"text": "...", "labels": ["short", "funny"]}    any number of classes
{"text": "...", "labels": [1, 0, 1]}             the same as a vector of 0 and 1
{"text": "...", "label": 0.5}                    regression
"""

import math
from collections.abc import Collection
from typing import Any, NoReturn

from ...core.call import is_integer
from ...errors import ConfigError
from .forms import (
    CHATS,
    LABELS,
    MEANING,
    PAIRS,
    TEXTS,
    Content,
    Form,
    check_object,
    listed,
    normal,
    parsed,
)
from .messages import shown, text_of

READ = (*TEXTS, "sentence", "review", "comment", "tweet", "utterance")
NAMES = (*LABELS[:2], "class", "category", "intent", "score")
WRITE = "write text and label"


def labelled_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a row: a text and its label.

    Raises
    ------
    ConfigError
        The row has no text or label, or has a column of another method, which the message names.
    """
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    known = {normal(name): name for name in reversed(row)}
    text = next((known[each] for each in READ if each in known), None)
    label = next((known[each] for each in NAMES if each in known), None)
    for pair in PAIRS:
        if {*pair} <= known.keys():
            both = listed([known[each] for each in pair])
            _wrong(f"holds two texts ({both}) for one label", "join them in the column text")
    if text is None or label is None:
        missing = "text" if text is None else "label"
        chat = next((known[each] for each in CHATS if each in known), None)
        cure = f"write {chat} as text" if chat and text is None else WRITE
        _wrong(f"has the columns {listed(row) or '(none)'}, but no {missing}", cure)
    others = {normal(text), normal(label)}
    if more := [known[each] for each in known if each in MEANING - others - {*NAMES}]:
        leave = "remove the column, or ignore it"
        _wrong(f"holds {listed(more)} beside {text} and {label}", leave)
    unused = tuple(name for name in values if name not in (text, label))
    form = Form(f"{normal(text)}/{normal(label)}", "text", {}, unused)
    content = text_of(row[text], text)
    return Content(form, [], "", content, value=_label(parsed(row[label]), label))


def _label(value: Any, name: str) -> Any:
    """Return a label to store: a number, a name, or a list of names."""
    if isinstance(value, list):
        # a vector of false/true or 0.0/1.0 becomes "0"/"1"; labels.py distinguishes it from names
        marks = all(isinstance(each, bool | float) and each in (0, 1) for each in value)
        return [str(int(each)) if marks else _name(each, name) for each in value]
    if isinstance(value, float) and value - value == 0:  # finite
        return value
    return value if is_integer(value, -math.inf) else _name(value, name)


def _name(value: Any, column: str) -> str:
    """Return the name of a class."""
    if isinstance(value, bool):
        return str(value).lower()
    if is_integer(value, -math.inf):
        return str(int(value))
    text = value.strip() if isinstance(value, str) else ""
    if not text or (text[0] == "[" and text[-1] == "]"):  # a list, but not in JSON
        cure = f"write {column} as a name, an integer, a JSON list of these, or a number"
        _wrong(f"{column} is {shown(value)}", cure)
    return text_of(text, column)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
