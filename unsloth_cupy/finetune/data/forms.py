"""The forms of training rows: detects the form by the columns, and converts a row to a Content.

    form                                                             target tokens
    {"text": "..."}                                                  all
    {"prompt": "...", "completion": "..."}                           the completion
    {"instruction": "...", "input": "...", "output": "..."}          the output, as a chat
    {"question": "...", "answer": "..."}                             the answer, as a chat
    {"messages": [{"role": "user", "content": "..."}, ...]}          the assistant's messages
    {"conversations": [{"from": "human", "value": "..."}, ...]}      the assistant's messages

Rows for another method raise an error that names the method.  ``preferences`` reads pairs and rated
answers.
"""

import functools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

from ...errors import ConfigError
from ..naming import named
from .messages import MEDIA, check_plain, checked_messages, shown, text_of
from .rows import LABELLED, PROMPTS, RATED, RELATED, methods_of
from .rows import PAIRS as PREFERENCES

CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog")
# A row uses the first name of each tuple that it has; published files may have several.
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "inputs", "input", "user")
ANSWERS = ("output", "completion", "response", "solution", "answer", "targets", "assistant")
USUAL = {"instruction": "output", "prompt": "completion", "problem": "solution", "input": "output",
         "inputs": "targets", "user": "assistant"}  # fmt: skip
TEXTS = ("text", "content")
CONTEXTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
REFERENCES = ("ground_truth", "reference", "reference_answer", "target", "final_answer")
PAIRS = (
    *(("anchor", "positive"), ("sentence1", "sentence2"), ("premise", "hypothesis")),
    *(("query", "positive"), ("query", "pos"), ("query", "passage"), ("query", "document")),
)
SEVERAL = ("completions", "responses", "answers")
LABELS, SCORES = ("label", "labels", "kto_tag"), ("score", "scores", "reward", "rewards")
WEIGHTS = (
    *("weight", "weights", "sample_weight", "loss_weight", "loss_mask", "assistant_masks"),
    "completion_mask",
)
TOKENS = ("input_ids", "labels", "attention_mask")
# Columns that change the meaning of a row: sft refuses rows with one of them.
MEANING = {"chosen", "rejected", "margin", *LABELS, *SCORES, *WEIGHTS, *MEDIA, *TOKENS}
TRAINS = "the method sft trains next-token prediction on texts"
SIDES = ("chosen", "rejected")
# The repr of messages in Python.
PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|from|content|value)'\s*:")
RAW = ("completion", "chosen", "rejected")  # after a text prompt: plain text, not a chat
WRITE = (
    "messages; conversations; instruction and output; prompt and completion; question and answer;"
    " text"
)
RESERVED = ("messages", "tools", "add_generation_prompt", "now", "strftime_now")  # in templates
INDEX = re.compile(r"(Unnamed: \d+)?")  # the index column of pandas, without a name or renamed
LONGEST_NAME = 40  # characters; longer column names match no known name
NAMES = 12  # maximum column names in a message


class Form(NamedTuple):
    """The form of rows with certain columns: the columns of the file by role."""

    name: str  # in the summary of a file
    kind: str  # "chat", "pair", "text"
    columns: dict[str, str]  # role: name of the column
    unused: tuple[str, ...]


class Refusal(NamedTuple):
    """Why rows with certain columns are refused, and the column to ignore to accept them."""

    why: str
    column: str = ""


class Content(NamedTuple):
    """The content of a row: a chat, or a prompt (may be empty) and its answer."""

    form: Form
    messages: list[dict[str, Any]]
    prompt: str
    answer: str
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rejected: Any = None  # the other answer of a pair: text, or the whole chat
    desirable: bool | None = None  # the rating of an answer
    value: Any = None  # margin of a pair, label of a text, or columns for reward functions


def normal(name: str) -> str:
    """Return a column name in the spelling of this module: "System Prompt" is system_prompt."""
    return re.sub(r"[\s-]+", "_", name.strip().lower()) if len(name) <= LONGEST_NAME else name


def is_header(cells: Sequence[str]) -> bool:
    """Return whether cells are column names of a known form, as in the first line of a table."""
    cells = [cell for cell in cells if not INDEX.fullmatch(cell)]
    names = {normal(cell) for cell in cells}
    if len(cells) < 2 or not all(re.fullmatch(r"[\w -]{1,40}", cell) for cell in cells):
        return False
    pair = names & {*QUESTIONS} and names & {*ANSWERS, *LABELS, *REFERENCES}
    text = names & {*TEXTS, *CHATS} and names & {*LABELS, "id"}
    return bool(pair or text or {"chosen", "rejected"} <= names)


def content_of(
    values: Any, ignore: Collection[str] = (), answers: tuple[str, ...] = ANSWERS
) -> Content:
    """Return the content of a row; ``answers`` names the columns that may answer a question.

    Raises
    ------
    ConfigError
        The row has no known form or the form of another method, or a value is invalid; the message
        names the column and the cure.
    """
    check_object(values, 'write {"text": "..."} or another form')
    if ignore:
        values = {name: value for name, value in values.items() if name not in ignore}
    some = tuple(name for name, value in values.items() if value is not None)
    if blank := {name for name in some if normal(name) in MEANING and values[name] in _BLANK}:
        some = tuple(name for name in some if name not in blank)
    form = _form(some, answers) or _form(tuple(values), answers)
    if isinstance(form, Refusal):
        leave = f", or skip the column with {named(ignore=form.column)}" if form.column else ""
        raise ConfigError(form.why + leave)
    if form is None:
        keys = ", ".join(map(repr, values)) or "(none)"
        _wrong(f"has the columns {shown(keys)}", f"write one of these forms: {WRITE}")
    row = {role: values[name] for role, name in form.columns.items()}
    unused = tuple(name for name in values if name not in form.columns.values())
    form = form._replace(unused=unused)
    if form.kind == "text":
        return Content(form, [], "", text_of(row["text"], form.columns["text"]))
    tools, options = _tools(row, form), _object(row.get("options"), form.columns.get("options"))
    if form.kind == "chat":
        messages = parsed(row["chat"])
        chat = checked_messages(messages, form.columns["chat"])
        form = form._replace(name=form.name + (" (ShareGPT)" if "from" in messages[0] else ""))
        return Content(form, _with_system(row, form, chat), "", "", tools, options)
    return _pair(row, form, tools, options)


def check_object(values: Any, cure: str) -> None:
    """Raise a ConfigError for a row that is not an object."""
    if isinstance(values, dict):
        return
    if isinstance(values, list) and values and isinstance(values[0], dict):
        cure = "rename a file that is one list of rows to end in .json"
        if {"role", "from"} & values[0].keys():
            cure = 'write a chat as {"messages": [...]}'
    _wrong(f"is {shown(values)}, not an object", cure)


_BLANK: tuple[Any, ...] = ("", [], {})


def _pair(row: Any, form: Form, tools: Any, options: Any) -> Content:
    """Return the content of a row with a question and an answer: texts, or lists of messages."""
    names = form.columns
    request, reply, (question, _, answer) = row["question"], row["answer"], form.name.partition("/")
    raw = question == "prompt" and answer in RAW
    if isinstance(request, list):
        if isinstance(reply, str):
            if normal(names["answer"]) in ("answer", "solution"):
                raise ConfigError(_prompts(names["question"], names["answer"]))
            cure = f'write {names["answer"]} as [{{"role": "assistant", "content": "..."}}]'
            _wrong(f"{names['question']} is a list of messages, {names['answer']} is text", cure)
        before = checked_messages(request, names["question"], answered=False)
        after = checked_messages(reply, names["answer"])
        # only the completion is a target
        before = [m | {"weight": 0} if m["role"] == "assistant" else m for m in before]
        chat = _with_system(row, form, before + after)
        form = form._replace(name=f"{form.name} of messages")
        return Content(form, chat, "", "", tools, options)
    if raw:
        if extra := [names[each] for each in ("system", "tools", "options") if row.get(each)]:
            _wrong(f"has {extra[0]} beside prompt and completion", "write messages instead")
        prompt = text_of(row["question"], names["question"], 0)
        return Content(form, [], prompt, text_of(row["answer"], names["answer"]))
    question = text_of(request, names["question"])
    if row.get("context") not in (None, ""):
        question += "\n\n" + text_of(row["context"], names["context"])
    chat = _history(row.get("history"), names.get("history", ""))
    chat.append({"role": "user", "content": question})
    chat.append({"role": "assistant", "content": text_of(reply, names["answer"])})
    return Content(form, _with_system(row, form, chat), "", "", tools, options)


def _history(pairs: Any, name: str) -> list[dict[str, Any]]:
    """Return the messages of a chat history, a list of [question, answer]."""
    turns: list[dict[str, Any]] = []
    pairs = parsed(pairs) or []
    if not (isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)):
        _wrong(f"{name} is {shown(pairs)}", 'write it as [["question", "answer"], ...]')
    for place, pair in enumerate(pairs):
        for role, value in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": text_of(value, f"{name}[{place}]")})
    return turns


def _with_system(row: Any, form: Form, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with the system message of its own column first, if there is one."""
    if row.get("system") in (None, "") or chat[0]["role"] == "system":
        return chat
    text = text_of(row["system"], form.columns["system"])
    return [{"role": "system", "content": text}, *chat]


def _tools(row: Any, form: Form) -> list[Any] | None:
    """Return the tools of a chat: a list of objects, or such a list as JSON."""
    tools, name = parsed(row.get("tools")), form.columns.get("tools")
    if tools in (None, "", []):
        return None
    if not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        _wrong(f"{name} is {shown(tools)}", 'write it as [{"type": "function", ...}, ...]')
    check_plain(tools, str(name))
    if normal(str(name)) == "functions":  # the format of OpenAI before tools
        tools = [{"type": "function", "function": each} for each in tools]
    return tools


def _object(value: Any, name: str | None) -> dict[str, Any] | None:
    """Return an object, perhaps written as JSON; None if it is empty."""
    value = parsed(value)
    if value in (None, "", {}):
        return None
    if not isinstance(value, dict):
        _wrong(f"{name} is {shown(value)}", 'write it as an object: {"enable_thinking": false}')
    check_plain(value, str(name))
    if own := [key for key in value if key in RESERVED]:
        _wrong(f"{name} holds {listed(own)}, which the library sets", "leave it out")
    return value


def parsed(value: Any) -> Any:
    """Parse a cell that holds JSON; raise a ConfigError for messages in Python syntax."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            if PYTHON.match(value):
                cure = "write them as JSON, for example with json.dumps"
                _wrong(f"{shown(value)} is in Python syntax, not JSON", cure)
    return value


@functools.lru_cache(1000)
def _form(names: tuple[str, ...], answers: tuple[str, ...]) -> Form | Refusal | None:
    """Return the form of rows with these columns, a Refusal, or None if no column is known."""
    known = {normal(name): name for name in reversed(names)} | {
        name: name for name in names if name == normal(name)
    }

    def first(roles: Sequence[str]) -> str:
        return next((role for role in roles if role in known), "")

    chat, text = first(CHATS), first(TEXTS)
    question, answer = first(QUESTIONS), first(answers)
    pair = question and answer and not chat
    if other := _other_method(known, chat or (question and answer) or text, question, answers):
        return other
    columns = {"system": first(SYSTEMS), "tools": first(("tools", "functions")),
               "options": first(("chat_template_kwargs",))}  # fmt: skip
    if chat:
        name, kind, more = chat, "chat", {"chat": chat}
    elif pair:
        name, kind = f"{question}/{answer}", "pair"
        others = [context for context in CONTEXTS if context != question]
        more = {"question": question, "answer": answer, "history": first(("history",))}
        more["context"] = "" if question == "prompt" and answer in RAW else first(others)
    elif text:
        name, kind, columns, more = text, "text", {}, {"text": text}
    elif question:
        if reference := first(REFERENCES):
            return Refusal(_prompts(known[question], known[reference]))
        partner = USUAL.get(question, "answer")
        choice = f", or choose the method {methods_of(PROMPTS)}, which trains on prompts alone"
        choice *= question == "prompt"
        return Refusal(f"has {shown(known[question])} but no {partner}; add {partner}{choice}")
    elif answer:
        partner = next((q for q, a in USUAL.items() if a == answer), "question")
        return Refusal(f"has {shown(known[answer])} but no {partner}; add {partner}")
    else:
        return None
    columns = {role: known[column] for role, column in (columns | more).items() if column}
    return Form(name + " (Alpaca)" * (name == "instruction/output"), kind, columns, ())


def _other_method(
    known: dict[str, str], base: str, question: str, answers: tuple[str, ...]
) -> Refusal | None:
    """Return a Refusal for rows of another method; None for other rows."""

    def have(*roles: str) -> list[str]:
        return [known[role] for role in roles if role in known]

    pairs = [] if base else [columns for pair in PAIRS if len(columns := have(*pair)) == 2]
    several = have(*SEVERAL) if question and "completion" not in known else []
    is_text = not base or base in TEXTS
    for what, columns, cure in (
        ("tokens", have(*TOKENS) if "input_ids" in known else [], "write the texts instead"),
        ("images or audio", have(*MEDIA), "remove these rows"),
        ("preference pairs", have(*(each for each in SIDES if each not in answers)),
         f"choose the method {methods_of(PREFERENCES)}, or write the chosen answers as"
         " completion or messages"),
        ("pairs for embedding", pairs[0] if pairs else [],
         f"choose the method {methods_of(RELATED)}, or write texts"),
        ("several answers to a question", several, "write the one to train on as completion"),
        ("labels for classification", have(*LABELS) if is_text else [],
         f"choose the method {methods_of(LABELLED)}, or remove the column"),
        ("unpaired preferences", have(*LABELS),
         f"choose the method {methods_of(RATED)}, or keep only good rows, without the column"),
        ("scored texts", have(*SCORES), "keep only the rows to train on, without the column"),
        ("weighted rows", have(*WEIGHTS),
         "set the weight of messages, 0 or 1, or of files, as FILE:2"),
        ("margins", have("margin"), "remove the column"),
        ("messages of a chat", have("role") if base == "content" else [],
         'write a chat in each row, as {"messages": [...]}'),
    ):  # fmt: skip
        if columns:
            beside = [
                known[role] for role in (question, base) if role and known[role] not in columns
            ]
            every = [*dict.fromkeys([*beside, *columns])]
            trains = TRAINS if answers is ANSWERS else "a pair is a question and two answers"
            return Refusal(f"holds {what} ({listed(every)}), but {trains}; {cure}", columns[-1])
    return None


def _prompts(prompt: str, answer: str) -> str:
    """Return the message for prompts with a reference answer for reward functions."""
    cure = f"choose the method {methods_of(PROMPTS)}, or write the target text as completion"
    cure += f" ({shown(answer)} may be only a reference)"
    return (
        f"holds prompts with an answer for rewards ({listed((prompt, answer))}), but {TRAINS};"
        f" {cure}"
    )


def listed(names: Collection[str]) -> str:
    """Return column names as text for a message."""
    some = [shown(name) for name in list(names)[:NAMES]]
    return ", ".join(some) + f" and {len(names) - NAMES} more" * (len(names) > NAMES)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
