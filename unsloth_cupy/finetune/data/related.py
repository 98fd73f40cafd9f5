"""Rows of related texts: a query, a matching document, and optional negative documents.

{"anchor": "...", "positive": "..."}                      also query and document, question and
{"query": "...", "pos": ["..."], "neg": ["...", "..."]}   answer, sentence1 and sentence2, ...
"""

import re
from collections.abc import Collection
from typing import Any, NoReturn

from ...errors import ConfigError
from .forms import MEANING, PAIRS, Content, Form, check_object, listed, normal, parsed
from .messages import shown, text_of

RELATED = (*PAIRS, ("query", "answer"), ("question", "answer"), ("question", "document"))
NEGATIVE = ("negative", "negatives", "neg")
WRITE = "write anchor and positive, or query and document"


def related_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a row: a query, its document, and its negatives.

    Raises
    ------
    ConfigError
        The row has no such texts, or has a column of another method, which the message names.
    """
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    known = {normal(name): name for name in reversed(row) if row[name] is not None}
    pair = next((each for each in RELATED if {*each} <= known.keys()), None)
    if pair is None:
        _wrong(f"has the columns {listed(row) or '(none)'}", WRITE)
    names = [known[each] for each in pair]
    if more := [known[each] for each in known if each in MEANING]:
        cure = "keep only matching pairs, without the column, or ignore it"
        _wrong(f"holds {listed(more)} beside {listed(names)}", cure)
    if several := [known[each] for each in known if each.startswith(("negative_", "neg_"))]:
        _wrong(f"holds {listed(several)}", "write them as a list in one column, negative")
    negative = next((known[each] for each in NEGATIVE if each in known), None)
    query, document = (_one(row[name], name) for name in names)
    negatives = [] if negative is None else _texts(row[negative], negative)
    columns = (*names, *([negative] if negative else []))
    unused = tuple(name for name in values if name not in columns)
    form = Form("/".join(map(normal, columns)), "pair", {}, unused)
    return Content(form, [], query, document, value=negatives or None)


def _texts(value: Any, name: str) -> list[str]:
    """Return one text or a list of texts as a list."""
    value = parsed(value)
    if isinstance(value, str) and re.fullmatch(r"\[\s*['\"].*['\"]\s*\]", value, re.DOTALL):
        _wrong(f"{name} is {shown(value)}, not a JSON list", f"write {name} with json.dumps")
    return [text_of(each, name) for each in (value if isinstance(value, list) else [value])]


def _one(value: Any, name: str) -> str:
    """Return the text in a column; raise a ConfigError for several texts."""
    texts = _texts(value, name)
    if len(texts) != 1:
        _wrong(f"{name} holds {len(texts)} texts", "write one row per text")
    return texts[0]


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
