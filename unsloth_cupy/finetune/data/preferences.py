"""Rows of preference data: pairs of answers to one question, and rated answers.

    {"prompt": "...", "chosen": "...", "rejected": "..."}            two texts, or lists of messages
    {"chosen": [...], "rejected": [...]}                             the prompt is the common prefix
    {"conversations": [...], "chosen": {...}, "rejected": {...}}     the last message of a chat
    {"prompt": "...", "chosen": "...", "rejected": "...", "margin": 1.5}    only for --method reward
    {"prompt": "...", "completion": "...", "label": true}            a rated answer

The question may use the same columns as in sft rows: instruction, question, system, tools, ...
"""

import math
from collections.abc import Collection
from typing import Any, NoReturn

from ...errors import ConfigError
from .forms import (
    CHATS,
    QUESTIONS,
    SIDES,
    Content,
    check_object,
    content_of,
    listed,
    normal,
    parsed,
)
from .messages import checked_messages, shown, text_of

RATINGS = ("label", "labels", "kto_tag")
RATED: dict[Any, bool] = {  # tables hold text only
    True: True, False: False, "true": True, "false": False, "1": True, "0": False,
}  # fmt: skip
WRITE = "write prompt, chosen and rejected"


def pair_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a pair: the chosen answer, with the other one as ``rejected``.

    Raises
    ------
    ConfigError
        The row is no pair, an answer is empty, or a value is invalid; the message has the column.
    """
    row, known = _columns(values, ignore)
    if missing := [side for side in SIDES if row.get(known.get(side, "")) in (None, "", [])]:
        there = [known[side] for side in SIDES if side in known and side not in missing]
        absent = [side for side in missing if side not in known]
        has = f"has the columns {listed(row)}"
        has = f"has {listed(there)} but no {missing[0]}" if there else has
        other = "" if there or not known.keys() & {*RATINGS} else ", or choose the method kto"
        _wrong(has if absent else f"{missing[0]} is empty", WRITE + other)
    names = [known[side] for side in SIDES]
    sides = [_side(row.pop(name), name) for name in names]
    if len({type(side) for side in sides}) > 1:
        _wrong(f"{names[0]} and {names[1]}: one is text, one is messages", "write both alike")
    prompts = [known[each] for each in (*CHATS, *QUESTIONS) if known.get(each) in row]
    chosen, rejected = sides
    is_text = isinstance(chosen, str)
    if is_text and not prompts:
        if chosen == rejected:
            _wrong(f"{names[0]} and {names[1]} are equal", "remove the line")
        row["prompt"] = _shared(*sides)
        sides = [side[len(row["prompt"]) :] for side in sides]
    elif not is_text and any(side[0]["role"] != "assistant" for side in sides):
        _whole_chats(row, prompts, sides, names)
    elif prompts:
        _as_prompt(row, prompts, sides)
    contents = [
        content_of(row | {side: answer}, ignore, answers=(side,))
        for side, answer in zip(SIDES, sides, strict=True)
    ]
    first, second = map(_last_alone, contents)
    rejected = second.messages or second.answer
    name = first.form.name.replace("chosen", "chosen/rejected")
    unused = tuple(each for each in first.form.unused if each in values)
    return first._replace(form=first.form._replace(name=name, unused=unused), rejected=rejected)


def rated_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a row: a rated answer, or a pair, which is two rated answers.

    Raises
    ------
    ConfigError
        The row is neither, or a value is invalid; the message has the column.
    """
    row, known = _columns(values, ignore)
    if {*SIDES} <= known.keys():
        return pair_of(values, ignore)
    name = next((known[each] for each in RATINGS if each in known), None)
    if name is None:
        cure = "write prompt, completion and label, which is true or false"
        _wrong(f"has the columns {listed(row)}, but no label", cure)
    value = row.pop(name)
    key = value.lower() if isinstance(value, str) else value
    if isinstance(key, list | dict) or key not in RATED:
        cure = "write true (desirable) or false"
        _wrong(f"{name} is {shown(value)}", cure)
    content = _last_alone(content_of(row, ignore))
    if not (content.messages or content.prompt):
        _wrong("holds a text without a question", "write prompt, completion and label")
    form = content.form._replace(name=f"{content.form.name}/{normal(name)}")
    return content._replace(form=form, desirable=RATED[key])


def scored_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a row: a pair with an optional margin.

    Raises
    ------
    ConfigError
        As ``pair_of``; or the margin is not a number.
    """
    row, known = _columns(values, ignore)
    name = known.get("margin")
    if name is None:
        return pair_of(values, ignore)
    content = pair_of({each: value for each, value in row.items() if each != name}, ignore)
    form = content.form._replace(name=f"{content.form.name}/margin")
    return content._replace(form=form, value=number_of(row[name], name))


def number_of(value: Any, name: str) -> float:
    """Return a finite number, perhaps written as text; raise a ConfigError for other values."""
    try:
        number = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        _wrong(f"{name} is {shown(value)}", "write a number")
    return number


def _columns(values: Any, ignore: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a row without the ignored columns, and its column names by normalized name."""
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    return row, {normal(name): name for name, value in row.items() if value is not None}


def _side(value: Any, name: str) -> Any:
    """Return an answer: text, or a list of checked messages."""
    value = parsed(value)
    value = [value] if isinstance(value, dict) else value
    return checked_messages(value, name) if isinstance(value, list) else text_of(value, name)


def _shared(chosen: str, rejected: str) -> str:
    """Return the common prefix of two texts, without a trailing space."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    # if one text is a prefix of the other, its last character counts as the answer
    most = min(len(each.rstrip()) for each in (chosen, rejected)) - 1
    stop = min(next((n for n, (a, b) in pairs if a != b), most), most)
    return chosen[: stop - (stop > 0 and chosen[stop - 1] == " ")]


def _whole_chats(row: Any, prompts: list[str], sides: list[Any], names: list[str]) -> None:
    """Split two chats with a common prefix into the prompt of the row and two answers."""
    chosen, rejected = sides
    pairs = enumerate(zip(chosen, rejected, strict=False))
    stop = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)) - 1)
    shared = chosen[:stop]
    for name, side in zip(names, (chosen[stop:], rejected[stop:]), strict=True):
        if not shared or all(message["role"] != "assistant" for message in side):
            _wrong(
                f"{name} has no answer after the shared messages", "begin both with one question"
            )
    for name in prompts:
        value, question = parsed(row.pop(name)), shared[-1]["content"]
        if isinstance(value, str) and value.strip() != str(question).strip():
            _wrong(
                f"{name} differs from the question in {names[0]}", "remove it, or make both equal"
            )
    row["prompt"], sides[:] = shared, [chosen[stop:], rejected[stop:]]


def _as_prompt(row: Any, prompts: list[str], sides: list[Any]) -> None:
    """Convert the question or the answers to messages if the other side is messages."""
    chat = next((name for name in prompts if normal(name) in CHATS), prompts[0])
    value = parsed(row[chat])
    is_text = all(isinstance(side, str) for side in sides)
    if isinstance(value, list) and is_text:
        sides[:] = [[{"role": "assistant", "content": side}] for side in sides]
    elif isinstance(value, str) and not is_text:
        value = [{"role": "user", "content": value}]
    if isinstance(value, list):
        del row[chat]
        row["prompt"] = value


def _last_alone(content: Content) -> Content:
    """Return a chat whose only targets are the answers after the last question."""
    messages = content.messages
    if any("weight" in message for message in messages):
        return content
    last = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
    weighted = [
        m | {"weight": 0} if n < last and m["role"] == "assistant" else m
        for n, m in enumerate(messages)
    ]
    return content._replace(messages=weighted)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
