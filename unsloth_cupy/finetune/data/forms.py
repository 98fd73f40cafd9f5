"""The forms of training data: which one a row has by its columns, and what a model reads of it.

    {"text": "..."}                                                  all of it is learned
    {"prompt": "...", "completion": "..."}                           the completion is learned
    {"instruction": "...", "input": "...", "output": "..."}          the output, as in a chat
    {"question": "...", "answer": "..."}                             the answer, as in a chat
    {"messages": [{"role": "user", "content": "..."}, ...]}          what the assistant says
    {"conversations": [{"from": "human", "value": "..."}, ...]}      what the assistant says

Rows that are for other methods are told by name; ``preferences`` reads pairs and rated answers.
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
# The first of each that a row has counts: a published file may have several.
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
# Columns that change what the others mean: with one of them a row is not learned as it is.
MEANING = {"chosen", "rejected", "margin", *LABELS, *SCORES, *WEIGHTS, *MEDIA, *TOKENS}
LEARNS = "finetune learns the next token of texts"
SIDES = ("chosen", "rejected")
# Messages as Python prints them.
PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|from|content|value)'\s*:")
RAW = ("completion", "chosen", "rejected")  # behind a prompt in text: not a chat
WRITE = (
    "messages; conversations; instruction and output; prompt and completion; question and answer;"
    " text"
)
RESERVED = ("messages", "tools", "add_generation_prompt", "now", "strftime_now")  # to a template
INDEX = re.compile(r"(Unnamed: \d+)?")  # a column of numbers of rows, as pandas writes and names it
LONGEST_NAME = 40  # characters of a column that may be a known one
NAMES = 12  # of columns in a message


class Form(NamedTuple):
    """The form of rows with certain columns: the names that they have in the file, by role."""

    name: str  # for the account of a file
    kind: str  # "chat", "pair", "text"
    columns: dict[str, str]  # the role of a column: its name
    unused: tuple[str, ...]


class Refusal(NamedTuple):
    """Why rows with certain columns are not learned, and the column without which they may be."""

    why: str
    column: str = ""


class Content(NamedTuple):
    """What a row holds: a chat, or a prompt (perhaps empty) and the answer to it."""

    form: Form
    messages: list[dict[str, Any]]
    prompt: str
    answer: str
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rejected: Any = None  # the other answer of a pair: text, or the whole chat
    desirable: bool | None = None  # of an answer that is rated
    value: Any = None  # the margin of a pair, the label of a text, what rewards know of a prompt


def normal(name: str) -> str:
    """Return a column's name in the spelling of this module: Instruction is instruction."""
    return re.sub(r"[\s-]+", "_", name.strip().lower()) if len(name) <= LONGEST_NAME else name


def is_header(cells: Sequence[str]) -> bool:
    """Return whether words are the names of columns that make a form, as a table begins."""
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
    """Return what a row holds; ``answers`` are the columns that may be the answer to a question.

    Raises
    ------
    ConfigError
        It has no form, or the form of another method, or a value is wrong; the message has the
        column and the cure.
    """
    check_object(values, 'write {"text": "..."} or another form')
    if ignore:
        values = {name: value for name, value in values.items() if name not in ignore}
    some = tuple(name for name, value in values.items() if value is not None)
    if blank := {name for name in some if normal(name) in MEANING and values[name] in _BLANK}:
        some = tuple(name for name in some if name not in blank)
    form = _form(some, answers) or _form(tuple(values), answers)
    if isinstance(form, Refusal):
        leave = f", or leave columns out by {named(ignore=form.column)}" if form.column else ""
        raise ConfigError(form.why + leave)
    if form is None:
        keys = ", ".join(map(repr, values)) or "nothing"
        _wrong(f"holds {shown(keys)}", f"write one of these forms: {WRITE}")
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
    """Raise a ConfigError for a row that is no object."""
    if isinstance(values, dict):
        return
    if isinstance(values, list) and values and isinstance(values[0], dict):
        cure = "let the name of a file that is one list of rows end in .json"
        if {"role", "from"} & values[0].keys():
            cure = 'write a chat as {"messages": [...]}'
    _wrong(f"is {shown(values)}, not an object", cure)


_BLANK: tuple[Any, ...] = ("", [], {})


def _pair(row: Any, form: Form, tools: Any, options: Any) -> Content:
    """Return the content of a question and its answer: texts, or lists of messages."""
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
        # the completion alone is learned
        before = [m | {"weight": 0} if m["role"] == "assistant" else m for m in before]
        chat = _with_system(row, form, before + after)
        form = form._replace(name=f"{form.name} of messages")
        return Content(form, chat, "", "", tools, options)
    if raw:
        if extra := [names[each] for each in ("system", "tools", "options") if row.get(each)]:
            _wrong(f"has {extra[0]} beside prompt and completion", "write messages in their place")
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
    """Return earlier turns of a chat, written as a list of [question, answer]."""
    turns: list[dict[str, Any]] = []
    pairs = parsed(pairs) or []
    if not (isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)):
        _wrong(f"{name} is {shown(pairs)}", 'write it as [["question", "answer"], ...]')
    for place, pair in enumerate(pairs):
        for role, value in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": text_of(value, f"{name}[{place}]")})
    return turns


def _with_system(row: Any, form: Form, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat that begins with the system message of its own column, if there is one."""
    if row.get("system") in (None, "") or chat[0]["role"] == "system":
        return chat
    text = text_of(row["system"], form.columns["system"])
    return [{"role": "system", "content": text}, *chat]


def _tools(row: Any, form: Form) -> list[Any] | None:
    """Return the tools of a chat: a list of objects, or one in JSON."""
    tools, name = parsed(row.get("tools")), form.columns.get("tools")
    if tools in (None, "", []):
        return None
    if not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        _wrong(f"{name} is {shown(tools)}", 'write it as [{"type": "function", ...}, ...]')
    check_plain(tools, str(name))
    if normal(str(name)) == "functions":  # as OpenAI wrote them before there were tools
        tools = [{"type": "function", "function": each} for each in tools]
    return tools


def _object(value: Any, name: str | None) -> dict[str, Any] | None:
    """Return an object, or one in JSON; None if it is empty."""
    value = parsed(value)
    if value in (None, "", {}):
        return None
    if not isinstance(value, dict):
        _wrong(f"{name} is {shown(value)}", 'write it as an object: {"enable_thinking": false}')
    check_plain(value, str(name))
    if own := [key for key in value if key in RESERVED]:
        _wrong(f"{name} holds {listed(own)}, which the row itself gives", "leave it out")
    return value


def parsed(value: Any) -> Any:
    """Return a value that a table holds as JSON; raise a ConfigError for messages of Python."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            if PYTHON.match(value):
                cure = "write them as JSON, for example with json.dumps"
                _wrong(f"{shown(value)} is messages as Python prints them", cure)
    return value


@functools.lru_cache(1000)
def _form(names: tuple[str, ...], answers: tuple[str, ...]) -> Form | Refusal | None:
    """Return the form of rows with these columns, a reason why they have none, or None."""
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
        why = f"; {LEARNS}, and prompts alone are for the method {methods_of(PROMPTS)}"
        why *= question == "prompt"
        return Refusal(f"has {shown(known[question])} but no {partner}; add {partner}{why}")
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
    """Return why rows with these columns are for another method; None if they are not."""

    def have(*roles: str) -> list[str]:
        return [known[role] for role in roles if role in known]

    pairs = [] if base else [columns for pair in PAIRS if len(columns := have(*pair)) == 2]
    several = have(*SEVERAL) if question and "completion" not in known else []
    is_text = not base or base in TEXTS
    for what, columns, cure in (
        ("tokens", have(*TOKENS) if "input_ids" in known else [], "write the texts themselves"),
        ("images or sounds", have(*MEDIA), "leave these rows out"),
        ("preference pairs", have(*(each for each in SIDES if each not in answers)),
         f"choose the method {methods_of(PREFERENCES)}, or write the chosen answers as"
         " completion or messages"),
        ("pairs for embedding", pairs[0] if pairs else [],
         f"choose the method {methods_of(RELATED)}, or write texts"),
        ("several answers to a question", several, "write the one to learn as completion"),
        ("labels for classification", have(*LABELS) if is_text else [],
         f"choose the method {methods_of(LABELLED)}, or remove the column"),
        ("unpaired preferences", have(*LABELS),
         f"choose the method {methods_of(RATED)}, or keep the good examples, without the column"),
        ("scored texts", have(*SCORES), "keep the rows to learn, without the column"),
        ("weighted rows", have(*WEIGHTS),
         "give messages their weight, 0 or 1, and files theirs as FILE:2"),
        ("margins", have("margin"), "remove the column"),
        ("messages of a chat", have("role") if base == "content" else [],
         'write a chat in each row, as {"messages": [...]}'),
    ):  # fmt: skip
        if columns:
            beside = [
                known[role] for role in (question, base) if role and known[role] not in columns
            ]
            every = [*dict.fromkeys([*beside, *columns])]
            learns = LEARNS if answers is ANSWERS else "a pair is a question and two answers"
            return Refusal(f"holds {what} ({listed(every)}); {learns}: {cure}", columns[-1])
    return None


def _prompts(prompt: str, answer: str) -> str:
    """Return the message about prompts whose answers are for rewards."""
    cure = f"choose the method {methods_of(PROMPTS)}, or write what is to be learned as"
    cure += f" completion, {shown(answer)} does not say it"
    return (
        f"holds prompts with an answer for rewards ({listed((prompt, answer))}); {LEARNS}: {cure}"
    )


def listed(names: Collection[str]) -> str:
    """Return names of columns for a message."""
    some = [shown(name) for name in list(names)[:NAMES]]
    return ", ".join(some) + f" and {len(names) - NAMES} more" * (len(names) > NAMES)


def _wrong(problem: str, cure: str) -> NoReturn:
    raise ConfigError(f"{problem}; {cure}")
