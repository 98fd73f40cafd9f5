"""The rows of related texts: a query and a document that belongs to it, perhaps some that do not.

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
WRONG = ("negative", "negatives", "neg")
WRITE = "write anchor and positive, or query and document"


def related_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return what a row holds: two texts that belong together, and some that do not.

    Raises
    ------
    ConfigError
        It has no such texts, or a column of another method; the message has the column.
    """
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    known = {normal(name): name for name in reversed(row) if row[name] is not None}
    pair = next((each for each in RELATED if {*each} <= known.keys()), None)
    if pair is None:
        _wrong(f"holds {listed(row) or 'nothing'}", WRITE)
    names = [known[each] for each in pair]
    if more := [known[each] for each in known if each in MEANING]:
        cure = "keep the rows that belong together, without the column, or ignore it"
        _wrong(f"holds {listed(more)} beside {listed(names)}", cure)
    if several := [known[each] for each in known if each.startswith(("negative_", "neg_"))]:
        _wrong(f"holds {listed(several)}", "write them as one list, in a column negative")
    wrong = next((known[each] for each in WRONG if each in known), None)
    query, document = (_one(row[name], name) for name in names)
    others = [] if wrong is None else _texts(row[wrong], wrong)
    used = (*names, *([wrong] if wrong else []))
    unused = tuple(name for name in values if name not in used)
    form = Form("/".join(map(normal, used)), "pair", {}, unused)
    return Content(form, [], query, document, value=others or None)


def _texts(value: Any, name: str) -> list[str]:
    """Return a text, or a list of texts, as a list."""
    value = parsed(value)
    if isinstance(value, str) and re.fullmatch(r"\[\s*['\"].*['\"]\s*\]", value, re.DOTALL):
        _wrong(f"{name} is {shown(value)}, no list in JSON", f"write {name} with json.dumps")
    return [text_of(each, name) for each in (value if isinstance(value, list) else [value])]


def _one(value: Any, name: str) -> str:
    """Return the text in a column; raise a ConfigError for several."""
    texts = _texts(value, name)
    if len(texts) != 1:
        _wrong(f"{name} holds {len(texts)} texts", "write a row for each")
    return texts[0]


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
