"""What is learned of a chat: every answer of the assistant, in a text that ends like it.

    <|im_start|>user
    What is the tallest mountain?<|im_end|>
    <|im_start|>assistant
    Mount Everest.<|im_end|>
    --------------------------              learned

An answer is compared in texts that the template writes: of the messages up to it, of those before
it, and of the same with a placeholder in its place.  What does not depend on the answer and stands
before the model's turn is its header; what stands after it, up to the next header, is its end.

Some templates write the last answer in another way than earlier ones, for example with reasoning
that they drop later.  The model is asked for an answer when it is the last one, so it is learned in
the text in which it is the last; answers that are written alike share a text.
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..models.text.chat import CONFIG, Message, Rendered, Span, Tools, placeholder, settings_text
from ..models.text.chat import Chat as Template
from .new_model import TOKENIZER

REASONING = ("reasoning_content", "reasoning", "thinking")  # one thing, by the names of templates
MARKS = re.compile(r"\{%[-+]?\s*generation\b")
TAG = re.compile(r"\s*(<[^<>]*>|\[[^\[\]]*\]|\n)")  # the end of a turn, as most templates write it
OPEN = re.compile(r"(<[^<>]*|\[[^\[\]]*)$")  # the beginning of such a tag


class Lesson(NamedTuple):
    """A text of a chat and what is learned of it: the places, and which message each belongs to."""

    text: str
    spans: list[Span]
    turns: list[int]


class Answer(NamedTuple):
    """An answer in the text in which it is the last: its places, and where its own words end."""

    turn: int
    text: str
    spans: list[Span]
    end: int


class Chat(Template):
    """A template that also says which characters of a chat the assistant writes."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        if folder is None:
            self.files = {CONFIG: settings_text(TOKENIZER)}

    @functools.cached_property
    def marked(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return bool(MARKS.search(self.source))

    def spans(self, messages: Sequence[Message], tools: Tools = None) -> list[Lesson]:
        """Return the texts from which the answers of a chat are learned, the whole chat first.

        ``{% generation %}`` marks of the template are obeyed.  An answer of weight 0 is not
        learned, and what follows the last answer that is learned is left out.

        Raises
        ------
        ConfigError
            The template does not take the messages, or leaves an answer, its ``tool_calls`` or the
            ``tools`` out; or a weight is neither 0 nor 1.
        """
        turns = _learned_turns(messages)
        if not turns:
            return []
        said = self._accepted([self._named(each) for each in messages[: turns[-1] + 1]], tools)
        lessons: list[Lesson] = []
        for answer in reversed(self._answers(said, turns, tools)):
            if not any(_added(lesson, answer) for lesson in lessons) and answer.spans:
                turn = [answer.turn] * len(answer.spans)
                lessons.append(Lesson(answer.text, answer.spans, turn))
        return lessons

    def _named(self, message: Message) -> dict[str, Any]:
        """Return a message as the template reads it: without its weight, reasoning by its name."""
        result = {key: value for key, value in message.items() if key != "weight"}
        used = [key for key in REASONING if re.search(rf"\b{key}\b", self.source)]
        given = next((key for key in REASONING if result.get(key)), None)
        if given and used and given not in used:
            result[used[0]] = result.pop(given)
        return result

    def _accepted(self, messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """Return messages in the form that the template takes, as templates differ in two points.

        Arguments of a call are an object or its JSON; an absent content is null or empty.
        """
        if not any(each.get("tool_calls") for each in messages):
            return messages
        forms = [
            [_with_calls(each, as_text, empty) for each in messages]
            for as_text in (False, True)
            for empty in (None, "")
        ]
        results = self.rendered([(form, False) for form in forms], tools)
        whole = [pair for pair in zip(forms, results, strict=True) if not pair[1].error]
        if not whole:
            raise self.refused(results[0].error)
        calls = [call for each in forms[0] for call in _calls(each)]
        written = [repr(each["arguments"]) for each in calls if each.get("arguments")]

        def faults(pair: tuple[list[dict[str, Any]], Rendered]) -> tuple[bool, int, int]:
            """Objects and nulls as Python writes them, and calls that are left out."""
            text = pair[1].text
            python = any(each in text for each in written if each.startswith("{"))
            named = sum(text.count(str(call.get("name"))) for call in calls)
            return python, -named, text.count("None")

        return min(whole, key=faults)[0]

    def _answers(
        self, messages: list[dict[str, Any]], turns: list[int], tools: Tools
    ) -> list[Answer]:
        """Return the answers in these turns, each where it is the last message."""
        mark = placeholder(messages)
        requests: list[tuple[Sequence[Message], bool]] = []
        for turn in turns:
            before, own = messages[:turn], messages[turn]
            requests += [(messages[: turn + 1], False), (before, True), (before, False)]
            parts = [{"type": "text", "text": mark}]
            content = parts if isinstance(own.get("content"), list) else mark
            other = {"role": own["role"], "content": content}
            requests += [([*before, other], False)]
            silent = {key: value for key, value in own.items() if key != "tool_calls"}
            requests += [([*before, silent], False)] * bool(own.get("tool_calls"))
        results = iter(self.rendered(requests, tools))
        answers = []
        for turn in turns:
            whole, asked, plain, without = (next(results) for _ in range(4))
            if whole.error:
                raise self.refused(whole.error)
            if messages[turn].get("tool_calls") and next(results).text == whole.text:
                raise self._left_out(f"messages[{turn}].tool_calls")
            if whole.text == without.text:
                raise ConfigError(
                    f"the template of {self.where} does not write an answer behind its question;"
                    " give prompt and completion instead of messages"
                )
            answer = self._placed(turn, whole, asked, plain, without)
            if answer.end == len(answer.text) and not self.marked:
                answer = self._followed(answer, messages, tools)
            answers.append(answer)
        if tools and self.rendered([(messages, False)])[0].text == answers[-1].text:
            raise self._left_out("tools")
        return answers

    def _placed(
        self, turn: int, whole: Rendered, asked: Rendered, plain: Rendered, other: Rendered
    ) -> Answer:
        """Return where an answer is in the text ``whole``.

        ``asked`` and ``plain`` are the messages before it, with and without the beginning of an
        answer; ``other`` has a placeholder instead of it.
        """
        text = whole.text
        header = common(text, other.text)
        tail = min(common(text[::-1], other.text[::-1]), len(text) - header)
        start, end, stop = header, len(text) - tail, len(text)
        if self.marked:
            return Answer(turn, text, [each for each in whole.marks if each.stop > header], end)
        if not asked.error:
            fixed = plain.text == asked.text
            if text.startswith(asked.text):
                start = len(asked.text)
                if fixed:  # the template does not begin an answer when it is asked to
                    start = max(start, len(text[:header].rstrip(" ")))
            elif common(text, plain.text) < (agreed := common(text, asked.text)) < header:
                start = agreed
            if fixed and text[:header].rstrip() == asked.text.rstrip():  # or always begins one
                again = common(text[::-1], asked.text[::-1])
                first = TAG.match(text, end)
                stop -= again if again < tail else tail - (first.end() - end if first else tail)
        return Answer(turn, text, [Span(start, max(stop, end))], end)

    def _followed(self, answer: Answer, messages: list[dict[str, Any]], tools: Tools) -> Answer:
        """Return an answer with the tag of the next question, by which a model may end its answers.

        The template writes none behind the answer itself.
        """
        asked = [*messages[: answer.turn + 1], {"role": "user", "content": placeholder(messages)}]
        (after,) = self.rendered([(asked, False)], tools)
        tag = (
            TAG.match(after.text, len(answer.text)) if after.text.startswith(answer.text) else None
        )
        return answer._replace(text=answer.text + tag[0].rstrip("\n")) if tag else answer

    def _left_out(self, what: str) -> ConfigError:
        """Return the error for a part of a chat that the template does not write."""
        return ConfigError(
            f"the template of {self.where} does not write {what}, so it cannot be learned; remove"
            " it, or take a model whose template knows it"
        )


def common(a: str, b: str) -> int:
    """Return how many characters two texts share at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if b.startswith(a[low:middle], low) else (low, middle - 1)
    return low


def _added(lesson: Lesson, answer: Answer) -> bool:
    """Add an answer to a text if that writes it and the end of its turn in the same way."""
    if not lesson.text.startswith(answer.text[: answer.end]):
        return False
    shared, stop = common(lesson.text, answer.text), max((s.stop for s in answer.spans), default=0)
    if shared < stop:  # not up to the middle of a tag
        shared = answer.end + len(OPEN.sub("", answer.text[answer.end : shared]))
        if answer.text[shared:stop].strip() and not answer.text[answer.end : shared].strip():
            return False
    spans = [Span(start, min(end, shared)) for start, end in answer.spans if start < shared]
    lesson.spans[:0], lesson.turns[:0] = spans, [answer.turn] * len(spans)
    return True


def _learned_turns(messages: Sequence[Message]) -> list[int]:
    """Return the messages of the assistant without those of weight 0."""
    turns = []
    for number, message in enumerate(messages):
        weight, mine = message.get("weight"), message["role"] == "assistant"
        if weight is not None and (weight not in (0, 1) or (not mine and weight)):
            cure = "1 (an answer is learned) or 0 (it is not)" if mine else "it in answers alone"
            raise ConfigError(f"messages[{number}].weight is {json.dumps(weight)}; write {cure}")
        if mine and (weight is None or weight):
            turns.append(number)
    return turns


def _calls(message: Message) -> list[Any]:
    """Return what holds name and arguments in the calls of a message."""
    return [each.get("function", each) for each in message.get("tool_calls") or []]


def _with_calls(message: dict[str, Any], as_text: bool, empty: str | None) -> dict[str, Any]:
    """Return a message with the arguments of its calls as text or object, and an empty content."""
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
