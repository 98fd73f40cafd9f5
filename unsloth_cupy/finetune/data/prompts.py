"""The rows of prompts: a question without an answer, and columns for the functions that reward one.

    {"prompt": "3 1 =", "answer": "1 3"}                              text, or a list of messages
    {"question": "What is 2 + 2?", "answer": "4"}                     asked as in a chat
    {"messages": [{"role": "user", "content": "..."}], "answer": "4"}

The question may have the columns that it has in a row to be learned: instruction, system, tools,
...; all others are for the rewards.
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

ARGUMENTS = ("prompts", "completions", "completion_ids")  # of a reward, beside columns
ASKS = {*CHATS, *QUESTIONS, *CONTEXTS, *SYSTEMS, "tools", "functions", "history",
        "chat_template_kwargs"}  # fmt: skip
SAID = "completion"  # the column that a row to be learned would have
WRITE = "write prompt, and columns for the rewards, as answer"


def prompt_of(values: Any, ignore: Collection[str] = ()) -> Content:
    """Return what a row holds: a question, and what rewards know of it.

    Raises
    ------
    ConfigError
        It holds no question, or one that is answered, or a value is wrong; the message has the
        column.
    """
    check_object(values, WRITE)
    row = {name: value for name, value in values.items() if name not in ignore}
    columns = {name: value for name, value in row.items() if value is not None}
    columns = {name: value for name, value in columns.items() if normal(name) in ASKS}
    known = {normal(name): name for name in reversed(columns)}
    name = next((known[each] for each in (*CHATS, *QUESTIONS) if each in known), None)
    if name is None:
        _wrong(f"holds {listed(row) or 'nothing'}", WRITE)
    if taken := [name for name in row if name in ARGUMENTS]:
        _wrong(f"holds {listed(taken)}, which rewards get of the answers", "name it in another way")
    # as a row to be learned, whose answer then leaves it
    value, answer = parsed(columns[name]), [{"role": "assistant", "content": "-"}]
    if normal(name) in CHATS:
        columns[name] = [*value, *answer] if isinstance(value, list) else value
    else:
        columns[SAID] = answer if isinstance(value, list) else "-"
    content = content_of(columns)
    messages = [
        {key: each for key, each in message.items() if key != "weight"}
        for message in content.messages[:-1]
    ]
    if content.messages and messages[-1]["role"] == "assistant":
        _wrong(f"{name} ends with an answer", "end it with the question")
    used = {*content.form.columns.values()} - {SAID}
    beside = {name: value for name, value in row.items() if name not in used}
    form = content.form._replace(name=content.form.name.replace(f"/{SAID}", ""), unused=())
    return content._replace(form=form, messages=messages, answer="", value=beside)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
