"""The rows of preference data: pairs of answers to one question, and answers that are rated.

    {"prompt": "...", "chosen": "...", "rejected": "..."}            two texts, or lists of messages
    {"chosen": [...], "rejected": [...]}                             what both begin with is asked
    {"conversations": [...], "chosen": {...}, "rejected": {...}}     the last message of a chat
    {"prompt": "...", "chosen": "...", "rejected": "...", "margin": 1.5}    for rewards alone
    {"prompt": "...", "completion": "...", "label": true}            an answer, good or not

The question may have the columns that it has in a row to be learned: instruction, question, system,
tools, ...
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
RATED: dict[Any, bool] = {  # a table holds texts alone
    True: True, False: False, "true": True, "false": False, "1": True, "0": False,
}  # fmt: skip
WRITE = "write prompt, chosen and rejected"


def pair_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return what a row holds: the chosen answer, with the rejected one beside it.

    Raises
    ------
    ConfigError
        It holds no pair, an answer is empty, or a value is wrong; the message has the column.
    """
    row, known = _columns(values, ignore)
    if missing := [side for side in SIDES if row.get(known.get(side, "")) in (None, "", [])]:
        there = [known[side] for side in SIDES if side in known and side not in missing]
        absent = [side for side in missing if side not in known]
        has = f"has {listed(there)} but no {missing[0]}" if there else f"holds {listed(row)}"
        other = "" if there or not known.keys() & {*RATINGS} else ", or choose the method kto"
        _wrong(has if absent else f"{missing[0]} is empty", WRITE + other)
    names = [known[side] for side in SIDES]
    sides = [_side(row.pop(name), name) for name in names]
    if len({type(side) for side in sides}) > 1:
        _wrong(f"{names[0]} and {names[1]} differ: text and messages", "write two of a kind")
    prompts = [known[each] for each in (*CHATS, *QUESTIONS) if known.get(each) in row]
    if isinstance(sides[0], str) and not prompts:
        if sides[0] == sides[1]:
            _wrong(f"{names[0]} and {names[1]} are equal", "remove the line")
        row["prompt"] = _shared(*sides)
        sides = [side[len(row["prompt"]) :] for side in sides]
    elif isinstance(sides[0], list) and sides[0][0]["role"] != "assistant":
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
    """Return what a row holds: an answer and whether it is desirable; or a pair, which is two.

    Raises
    ------
    ConfigError
        It holds neither, or a value is wrong; the message has the column.
    """
    row, known = _columns(values, ignore)
    if {*SIDES} <= known.keys():
        return pair_of(values, ignore)
    name = next((known[each] for each in RATINGS if each in known), None)
    if name is None:
        cure = "write prompt, completion and label, which is true or false"
        _wrong(f"holds {listed(row)}, and no label", cure)
    value = row.pop(name)
    key = value.lower() if isinstance(value, str) else value
    if isinstance(key, list | dict) or key not in RATED:
        cure = "write true, the answer is good, or false"
        _wrong(f"{name} is {shown(value)}", cure)
    content = _last_alone(content_of(row, ignore))
    if not (content.messages or content.prompt):
        _wrong("holds a text without a question", "write prompt, completion and label")
    form = content.form._replace(name=f"{content.form.name}/{normal(name)}")
    return content._replace(form=form, desirable=RATED[key])


def scored_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return what a row holds: a pair, perhaps with a margin.

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
    """Return a finite number, in a table as text; raise a ConfigError for another value."""
    try:
        number = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        _wrong(f"{name} is {shown(value)}", "write a number")
    return number


def _columns(values: Any, ignore: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a row without the columns to ignore, and its columns by their usual names."""
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    return row, {normal(name): name for name, value in row.items() if value is not None}


def _side(value: Any, name: str) -> Any:
    """Return an answer: text, or a list of messages."""
    value = parsed(value)
    value = [value] if isinstance(value, dict) else value
    return checked_messages(value, name) if isinstance(value, list) else text_of(value, name)


def _shared(chosen: str, rejected: str) -> str:
    """Return what two texts begin with, without a space at its end."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    # of a text with which the other begins, the last character is the answer
    most = min(len(each.rstrip()) for each in (chosen, rejected)) - 1
    stop = min(next((n for n, (a, b) in pairs if a != b), most), most)
    return chosen[: stop - (stop > 0 and chosen[stop - 1] == " ")]


def _whole_chats(row: Any, prompts: list[str], sides: list[Any], names: list[str]) -> None:
    """Divide chats that begin with the question into that, the row's prompt, and two answers."""
    chosen, rejected = sides
    pairs = enumerate(zip(chosen, rejected, strict=False))
    stop = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)) - 1)
    shared = chosen[:stop]
    for name, side in zip(names, (chosen[stop:], rejected[stop:]), strict=True):
        if not shared or all(message["role"] != "assistant" for message in side):
            _wrong(f"{name} does not answer what both chats ask", "begin both with one question")
    for name in prompts:
        value, question = parsed(row.pop(name)), shared[-1]["content"]
        if isinstance(value, str) and value.strip() != str(question).strip():
            _wrong(f"{name} is not what {names[0]} asks", f"leave {name} out, or write it in both")
    row["prompt"], sides[:] = shared, [chosen[stop:], rejected[stop:]]


def _as_prompt(row: Any, prompts: list[str], sides: list[Any]) -> None:
    """Let a question that is messages have answers that are messages, and the other way round."""
    chat = next((name for name in prompts if normal(name) in CHATS), prompts[0])
    value = parsed(row[chat])
    if isinstance(value, list) and isinstance(sides[0], str):
        sides[:] = [[{"role": "assistant", "content": side}] for side in sides]
    elif isinstance(value, str) and isinstance(sides[0], list):
        value = [{"role": "user", "content": value}]
    if isinstance(value, list):
        del row[chat]
        row["prompt"] = value


def _last_alone(content: Content) -> Content:
    """Return a chat of which the answers behind the last question alone are learned."""
    messages = content.messages
    if any("weight" in message for message in messages):
        return content
    last = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
    quiet = [
        m | {"weight": 0} if n < last and m["role"] == "assistant" else m
        for n, m in enumerate(messages)
    ]
    return content._replace(messages=quiet)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
