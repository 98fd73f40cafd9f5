"""Finds the target characters of a chat: all answers of the assistant, in the template's format.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>
    --------------------------              target

To find an answer, the module renders the messages up to the answer, the messages before it, and the
messages with a placeholder instead of the answer, and compares the three texts.  The common text
before the answer is its header; the common text after it, up to the next header, is its end.

Some templates format the last answer differently from earlier answers, for example with reasoning
that they omit later.  At inference an answer is always the last message, so each answer is a target
in a text that ends with it.  Answers that are formatted in the same way share one text.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...models.text.chat import (
    CONFIG,
    REASONING,
    Message,
    Options,
    Rendered,
    Span,
    Tools,
    placeholder,
    settings_text,
)
from ...models.text.chat import Chat as Template
from .messages import shown
from .tokenizer import SETTINGS

KNOWN = {"role", "content", "tool_calls", "tool_call_id", "weight", *REASONING}  # message keys
MOST_KEYS = 100  # the summary lists at most this many kinds of omissions
MARKS = re.compile(r"\{%[-+]?\s*generation\b")
TAG = re.compile(r"\s*(<[^<>]*>|\[[^\[\]]*\]|\n)")  # the end of a turn in most templates
TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
ENDED = re.compile(rf"(\s*({TAGS.pattern}))+\s*")  # one or more tags and no words
OPEN = re.compile(r"(<[^<>]*|\[[^\[\]]*)$")  # an incomplete tag at the end


Render = Callable[[list[tuple[Sequence[Message], bool]]], list[Rendered]]


class LeftOut(NamedTuple):
    """A kind of content that a template omits: the text before the count, and the counted unit."""

    before: str
    unit: str

    def said(self, count: int) -> str:
        """Return the message for ``count`` omissions."""
        return f"the template omits {self.before}{count:,} {self.unit}"


ANSWERS = "answers"


def left_out_by(texts: Sequence[Counter[LeftOut]]) -> Counter[LeftOut]:
    """Return the omissions in texts with a common question, which counts once."""
    kinds = dict.fromkeys(kind for text in texts for kind in text)
    counts = {kind: [text[kind] for text in texts] for kind in kinds}
    return Counter({k: sum(n) if k.unit == ANSWERS else max(n) for k, n in counts.items()})


class Lesson(NamedTuple):
    """A training text of a chat, its target spans, and the index of the message of each span."""

    text: str
    spans: list[Span]
    turns: list[int]


class Answer(NamedTuple):
    """An answer in the text that ends with it: its target spans, and the end of its content."""

    turn: int
    text: str
    spans: list[Span]
    end: int


class Chat(Template):
    """A chat template that also returns the target characters of a chat.

    Attributes
    ----------
    left_out : Counter of LeftOut
        Omissions of the template: answers without their reasoning or the content beside a call,
        other messages by role, and keys or options that the template does not read.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self.left_out = Counter[LeftOut]()
        if folder is None:
            self.files = {CONFIG: settings_text(SETTINGS)}

    @functools.cached_property
    def marked(self) -> bool:
        """Whether the template marks answers with ``{% generation %}``."""
        return bool(MARKS.search(self.source))

    def asked(
        self, messages: Sequence[Message], tools: Tools = None, options: Options = None
    ) -> str:
        """Return the prompt for an answer to these messages, as ``question`` does.

        It uses the fixed date of training texts, so that a resumed run has equal prompts.

        Raises
        ------
        ConfigError
            As ``spans``.
        """
        render = functools.partial(self.rendered, tools=tools, options=options)
        chat = self._accepted([*map(_unweighted, messages)], render)
        text = self.question(chat, tools=tools, options=options, today=False)
        if tools:
            without = self.question(chat, options=options, today=False)
            self._check_tools(text, without)
        self._count(chat, text, options)
        return text

    def spans(
        self, messages: Sequence[Message], tools: Tools = None, options: Options = None
    ) -> list[Lesson]:
        """Return the training texts of a chat with their target spans, the whole chat first.

        ``{% generation %}`` marks of the template take precedence.  An answer of weight 0 is no
        target, and messages after the last target are omitted.

        Raises
        ------
        ConfigError
            The template refuses the messages, or omits an answer, its ``tool_calls`` or the
            ``tools``; or a weight is neither 0 nor 1.
        """
        turns = _target_turns(messages)
        if not turns:
            return []
        render = functools.partial(self.rendered, tools=tools, options=options)
        chat = self._accepted([*map(_unweighted, messages[: turns[-1] + 1])], render)
        answers, text = self._answers(chat, turns, render)
        if text is not None:
            if tools:
                self._check_tools(text, self.rendered([(chat, False)], options=options)[0].text)
            self._count(chat, text, options)
        lessons: list[Lesson] = []
        for answer in reversed(answers):
            if not any(_added(lesson, answer) for lesson in lessons) and answer.spans:
                turn = [answer.turn] * len(answer.spans)
                lessons.append(Lesson(answer.text, answer.spans, turn))
        return lessons

    def _accepted(self, messages: list[dict[str, Any]], render: Render) -> list[dict[str, Any]]:
        """Return messages in the form that the template accepts; templates differ in two points.

        The arguments of a call are an object or JSON text; absent content is null or empty.
        """
        if not any(each.get("tool_calls") for each in messages):
            return messages
        forms = [
            [_with_calls(each, as_text, empty) for each in messages]
            for as_text in (False, True)
            for empty in (None, "")
        ]
        results = render([(form, False) for form in forms])
        whole = [pair for pair in zip(forms, results, strict=True) if not pair[1].error]
        if not whole:  # show the error for empty content: with null, Python itself may raise
            raise self.refused(results[1].error)
        calls = [call for each in forms[0] for call in _calls(each)]
        written = [repr(each["arguments"]) for each in calls if each.get("arguments")]

        def faults(pair: tuple[list[dict[str, Any]], Rendered]) -> tuple[bool, int, int]:
            """Rank a form: objects in Python syntax, then omitted calls, then texts of None."""
            text = pair[1].text
            python = any(each in text for each in written if each.startswith("{"))
            named = sum(text.count(str(call.get("name"))) for call in calls)
            return python, -named, text.count("None")

        return min(whole, key=faults)[0]

    def _answers(
        self, messages: list[dict[str, Any]], turns: list[int], render: Render
    ) -> tuple[list[Answer], str | None]:
        """Return the answers in these turns, each in the text that ends with it.

        Also return the text of all messages, or None if the template refuses them.
        """
        mark = placeholder(messages)
        requests: list[tuple[Sequence[Message], bool]] = []
        for turn in turns:
            before, own = messages[:turn], messages[turn]
            requests += [(messages[: turn + 1], False), (before, True), (before, False)]
            parts = [{"type": "text", "text": mark}]
            content = parts if isinstance(own.get("content"), list) else mark
            other = {"role": own["role"], "content": content}
            requests += [([*before, other], False)]
            uncalled = {key: value for key, value in own.items() if key != "tool_calls"}
            requests += [([*before, uncalled], False)] * bool(own.get("tool_calls"))
        results = iter(render(requests))
        answers = []
        for turn in turns:
            whole, asked, plain, without = (next(results) for _ in range(4))
            calls = messages[turn].get("tool_calls")
            silent = next(results) if calls else without
            if whole.error:
                answers.append(self._within(turn, messages, render, whole.error))
                continue
            self._check_words(messages[turn], turn, whole.text)
            if calls and silent.text == whole.text:
                raise self._left_out(f"messages[{turn}].tool_calls")
            if whole.text == without.text:
                raise ConfigError(
                    f"the template of {self.where} omits the answer to a question; write prompt and"
                    " completion instead of messages"
                )
            answer = self._placed(messages, turn, whole, asked, plain, without)
            if not self.marked and not ENDED.fullmatch(answer.text, answer.end):
                answer = self._followed(answer, messages, render)
            answers.append(answer if self.marked else self._closed(answer, messages, without.text))
        return answers, None if whole.error else whole.text

    def _check_words(self, message: dict[str, Any], turn: int, text: str) -> None:
        """Count the parts of an answer that its text omits; raise a ConfigError if it omits all."""
        content, calls = message.get("content"), message.get("tool_calls")
        content = content.strip() if isinstance(content, str) else ""
        thoughts = [message[key].strip() for key in REASONING if message.get(key)]
        if any(each not in text for each in thoughts):
            if not content and not calls:
                raise self._left_out(f"the reasoning of messages[{turn}], its only content")
            self.left_out[LeftOut("the reasoning of ", ANSWERS)] += 1
        if calls and content not in text:
            self.left_out[LeftOut("the content beside tool_calls of ", ANSWERS)] += 1
        if _longest(content.rpartition("</think>")[0]) not in text:
            self.left_out[LeftOut("the text before </think> in ", ANSWERS)] += 1

    def _check_tools(self, text: str, without: str) -> None:
        """Raise a ConfigError if a text equals the text without tools."""
        if text.split() == without.split():
            raise self._left_out("tools")

    def _count(self, messages: list[dict[str, Any]], text: str, options: Options) -> None:
        """Count the messages that a text omits, and the keys and options that nothing reads."""
        for message in messages:
            role = message["role"]
            if role != "assistant" and _longest(str(message.get("content") or "")) not in text:
                self.left_out[LeftOut("", f"messages with the role {role}")] += 1
            for key in (each for each in message if each not in KNOWN):
                self._count_unread(key, "the key {} of", "messages")
        for key in options or ():
            self._count_unread(key, "the chat_template_kwargs {} of", "chats")

    def _count_unread(self, key: str, what: str, unit: str) -> None:
        """Count a key that does not occur in the source of the template."""
        kind = LeftOut(f"{what.format(shown(key))} ", unit)
        is_counted = kind in self.left_out or len(self.left_out) < MOST_KEYS
        if is_counted and not re.search(rf"\b{re.escape(key)}\b", self.source):
            self.left_out[kind] += 1

    def _placed(
        self,
        messages: list[dict[str, Any]],
        turn: int,
        whole: Rendered,
        asked: Rendered,
        plain: Rendered,
        other: Rendered,
    ) -> Answer:
        """Locate an answer in the text ``whole``.

        ``asked`` and ``plain`` are the messages before the answer, with and without a generation
        prompt; ``other`` has a placeholder instead of the answer.
        """
        text = whole.text
        header = common(text, other.text)
        tail = min(common(text[::-1], other.text[::-1]), len(text) - header)
        start, stop = header, len(text)
        end = _outside(text, header, stop - tail, after=True)  # the end of the last tag of a call
        tail = stop - end
        if self.marked:
            marks = [each for each in whole.marks if each.stop > max(header, each.start)]
            return Answer(turn, text, marks, end)
        if not asked.error:
            shared, agreed = common(text, plain.text), common(text, asked.text)
            start = header = _outside(text, min(shared, header), header)
            fixed = plain.text == asked.text
            if text.startswith(asked.text):
                start = len(asked.text)
                opens = TAGS.match(text, start, header)
                again = turn > 0 and messages[turn - 1]["role"] == messages[turn]["role"]
                if fixed or (again and opens and opens[0] in _leading(text)):
                    # the template ignores add_generation_prompt
                    start = max(start, len(text[:header].rstrip(" ")))
            else:
                request = asked.text[common(asked.text, plain.text) :]
                began = text[shared : _outside(text, shared, agreed)]
                # after the text that the template adds first, perhaps with other spaces
                words = r"\s*".join(map(re.escape, request.split()))
                forms = (re.escape(request), rf"{words}\s*") if words else ()
                matches = [re.compile(form).finditer(text, shared, header) for form in forms]
                places = next(filter(None, map(list, matches)), [])
                if places:
                    start = places[-1].end()
                elif shared < agreed < header and began.strip():
                    start = shared + len(began)
            if fixed and text[:header].rstrip() == asked.text.rstrip():  # or always adds the prompt
                again = common(text[::-1], asked.text[::-1])
                first = TAG.match(text, end)
                stop -= again if again < tail else tail - (first.end() - end if first else tail)
                stop = _outside(text, end, stop, after=True)
        return Answer(turn, text, [Span(start, max(stop, end))], end)

    def _within(
        self, turn: int, messages: list[dict[str, Any]], render: Render, why: str
    ) -> Answer:
        """Locate an answer in the whole chat: the template refuses a chat that ends with it."""
        other = [*messages]
        other[turn] = {"role": messages[turn]["role"], "content": placeholder(messages)}
        whole, without = render([(messages, False), (other, False)])
        text, start = whole.text, common(whole.text, without.text)
        if whole.error or without.error or start == len(text):
            raise self.refused(why)
        end = len(text) - min(common(text[::-1], without.text[::-1]), len(text) - start)
        if self.marked:
            marks = [each for each in whole.marks if each.stop > start and each.start < end]
            return Answer(turn, text[: marks[-1].stop] if marks else text, marks, end)
        tag = TAG.match(text, end)
        stop = tag.end() if tag else end
        return Answer(turn, text[:stop], [Span(start, stop)], end)

    def _followed(self, answer: Answer, messages: list[dict[str, Any]], render: Render) -> Answer:
        """Extend an answer by the end that the template writes before a following message.

        A template may write no end after the last answer: then the tag of the next message is the
        end, and a model may stop at it.  Words after the end that disappear once a message follows,
        such as a request to the model, do not belong to the answer.
        """
        mark, message = placeholder(messages), messages[answer.turn]
        question: list[dict[str, Any]] = [{"role": "user", "content": mark}]
        results = [
            {"role": "tool", "content": mark, "name": call.get("function", call).get("name")}
            | ({"tool_call_id": call["id"]} if "id" in call else {})
            for call in message.get("tool_calls") or []
        ]
        history, nexts = messages[: answer.turn + 1], [each for each in (results, question) if each]
        after = render([([*history, *each], False) for each in nexts])
        (start, stop), text, end = answer.spans[0], answer.text, answer.end
        own, content = text[start:end], message.get("content")
        if isinstance(content, str) and content.strip() and own.endswith(content.strip()):
            own = content.strip()  # the template may omit reasoning once a question follows
        whole = next((each.text for each in after if mark in each.text), "")
        before, asks, _ = whole.partition(mark)
        tags = TAGS.findall(own)
        if own not in before and tags and own.endswith(tags[-1]):
            own = tags[-1]  # the template may format the call differently once its result follows
        behind = before.rfind(own) + len(own)
        if not asks or behind < len(own):
            return answer
        if text[end:].strip():
            shared = _outside(text, end, end + common(text[end:stop], before[behind:]))
            if not TAG.sub("", text[shared:stop]).strip():
                return answer
            stops = [tag.end() for tag in TAGS.finditer(text, end, shared)]
            line = text.rfind("\n", end, shared) + 1
            return answer._replace(spans=[Span(start, stops[-1] if stops else line or shared)])
        tag = TAG.match(before, behind)
        if tag is None or not tag[1].strip():
            return answer
        spans = [Span(start, end + tag.start(1) - behind)]
        return answer._replace(text=text[:end] + tag[0], spans=spans)

    def _closed(self, answer: Answer, messages: list[dict[str, Any]], other: str) -> Answer:
        """Remove the tags at the end of an answer that begin the next message.

        Such tags also begin the text; in ``other``, which has a placeholder instead of the answer,
        they never follow the content of a message directly.
        """
        words = [message.get("content") for message in messages[: answer.turn]]
        places = [
            other.find(text) + len(text)
            for text in (placeholder(messages), *words)
            if isinstance(text, str) and text in other
        ]
        ends = {tag[1] for place in places if (tag := TAG.match(other, place))}
        (start, stop), text = answer.spans[0], answer.text
        tags = TAGS.finditer(text, answer.end, stop)
        openers = _leading(text) - ends - {self.tokens.get("eos_token")}
        return answer._replace(
            spans=[Span(start, next((tag.start() for tag in tags if tag[0] in openers), stop))]
        )

    def _left_out(self, what: str) -> ConfigError:
        """Return the error for a part of a chat that the template omits."""
        return ConfigError(
            f"the template of {self.where} omits {what}, so the model cannot be trained on it;"
            " remove it, or use a model whose template supports it"
        )


def common(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if b.startswith(a[low:middle], low) else (low, middle - 1)
    return low


def _longest(text: str) -> str:
    """Return the longest word of a text."""
    return max(re.findall(r"\w+", text), key=len, default="")


def _leading(text: str) -> set[str]:
    """Return the tags at the beginning of a text."""
    match = ENDED.match(text)
    return set(TAGS.findall(match[0]) if match else [])


def _outside(text: str, start: int, stop: int, *, after: bool = False) -> int:
    """Return ``stop``, or the start (with ``after`` the end) of the tag that contains ``stop``."""
    opened = OPEN.search(text[start:stop])
    tag = TAG.match(text, start + opened.start()) if opened else None
    return (tag.end() if after else tag.start()) if tag else stop


def _added(lesson: Lesson, answer: Answer) -> bool:
    """Add an answer to a text that formats it and the end of its turn in the same way."""
    if not lesson.text.startswith(answer.text[: answer.end]):
        return False
    shared, stop = common(lesson.text, answer.text), max((s.stop for s in answer.spans), default=0)
    if shared < stop:  # do not end inside a tag
        shared = _outside(answer.text, answer.end, shared)
        if answer.text[shared:stop].strip() and not answer.text[answer.end : shared].strip():
            return False
    spans = [Span(start, min(end, shared)) for start, end in answer.spans if start < shared]
    lesson.spans[:0], lesson.turns[:0] = spans, [answer.turn] * len(spans)
    return True


def _target_turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant messages, except those of weight 0."""
    turns = []
    for number, message in enumerate(messages):
        weight, mine = message.get("weight"), message["role"] == "assistant"
        if weight is not None and (weight not in (0, 1) or (not mine and weight)):
            cure = "write 1 (train on this answer) or 0" if mine else "only answers have a weight"
            raise ConfigError(f"messages[{number}].weight is {json.dumps(weight)}; {cure}")
        if mine and (weight is None or weight):
            turns.append(number)
    return turns


def _unweighted(message: Message) -> dict[str, Any]:
    """Return a message without its weight, as the template reads it."""
    return {key: value for key, value in message.items() if key != "weight"}


def _calls(message: Message) -> list[Any]:
    """Return the objects with name and arguments in the tool calls of a message."""
    return [each.get("function", each) for each in message.get("tool_calls") or []]


def _with_calls(message: dict[str, Any], as_text: bool, empty: str | None) -> dict[str, Any]:
    """Return a message with call arguments as text or object, and ``empty`` as absent content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        inner = call.get("function", call)
        value = inner.get("arguments")
        if as_text and value is not None and not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        elif not as_text and isinstance(value, str):
            try:
                read = json.loads(value)
            except ValueError:
                read = None
            value = read if isinstance(read, dict) else value
        inner = inner | {"arguments": value}
        changed.append(call | {"function": inner} if "function" in call else inner)
    return message | {"content": message.get("content") or empty, "tool_calls": changed}
