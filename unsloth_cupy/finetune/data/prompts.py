"""Rows of prompts: a question without an answer, and columns for the reward functions.

    {"prompt": "3 1 =", "answer": "1 3"}                              text, or a list of messages
    {"question": "What is 2 + 2?", "answer": "4"}                     a chat
    {"messages": [{"role": "user", "content": "..."}], "answer": "4"}

The question may use the same columns as in sft rows: instruction, system, tools, ...; reward
functions read all other columns.
"""

from collections.abc import Collection
from typing import Any, NoReturn

from ...errors import ConfigError
from .forms import (
    CHATS,
    CONTEXTS,
    QUESTIONS,
    SYSTEMS,
    Content,
    check_object,
    content_of,
    listed,
    normal,
    parsed,
)

ARGUMENTS = ("prompts", "completions", "completion_ids")  # of reward functions, besides columns
ASKS = {*CHATS, *QUESTIONS, *CONTEXTS, *SYSTEMS, "tools", "functions", "history",
        "chat_template_kwargs"}  # fmt: skip
ANSWER = "completion"  # placeholder column, to read the row as an sft row
WRITE = "write prompt, and columns for the rewards, as answer"


def prompt_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return the content of a row: a question, and the columns for the reward functions.

    Raises
    ------
    ConfigError
        The row has no question, or the chat ends with an answer, or a value is invalid; the message
        has the column.
    """
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    columns = {name: value for name, value in row.items() if value is not None}
    columns = {name: value for name, value in columns.items() if normal(name) in ASKS}
    known = {normal(name): name for name in reversed(columns)}
    name = next((known[each] for each in (*CHATS, *QUESTIONS) if each in known), None)
    if name is None:
        _wrong(f"has the columns {listed(row) or '(none)'}", WRITE)
    if reserved := [name for name in row if name in ARGUMENTS]:
        _wrong(f"has {listed(reserved)}, a parameter of reward functions", "rename the column")
    # read the row as an sft row with a placeholder answer, which is removed below
    value, answer = parsed(columns[name]), [{"role": "assistant", "content": "-"}]
    if value == []:
        _wrong(f"{name} has no message", "end it with the question")
    if normal(name) in CHATS:
        columns[name] = [*value, *answer] if isinstance(value, list) else value
    else:
        columns[ANSWER] = answer if isinstance(value, list) else "-"
    content = content_of(columns)
    messages = [
        {key: each for key, each in message.items() if key != "weight"}
        for message in content.messages[:-1]
    ]
    if content.messages and messages[-1]["role"] == "assistant":
        _wrong(f"{name} ends with an answer", "end it with the question")
    used = {*content.form.columns.values()} - {ANSWER}
    beside = {name: value for name, value in row.items() if name not in used}
    form = content.form._replace(name=content.form.name.replace(f"/{ANSWER}", ""), unused=())
    return content._replace(form=form, messages=messages, answer="", value=beside)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
