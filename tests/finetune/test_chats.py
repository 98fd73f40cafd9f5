"""What is learned of chats, by templates as models have them."""

import importlib.util
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.chat import (
    ANSWERS,
    Chat,
    LeftOut,
    Lesson,
    _leading,
    _longest,
    _outside,
    _with_calls,
    common,
    left_out_by,
)
from unsloth_cupy.finetune.data.records import Record, read_records
from unsloth_cupy.finetune.data.spans import encoded
from unsloth_cupy.finetune.data.tokenizer import load_tokenizer, train_tokenizer
from unsloth_cupy.finetune.data.training_data import Shape, from_records
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run.data_report import inspect_data
from unsloth_cupy.finetune.run.run_folder import model_without_weights
from unsloth_cupy.models.text.chat import Chat as Template
from unsloth_cupy.models.text.tokenizer import Tokenizer

from ..cli.test_cli import LLAMA

BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BEGIN
)
THINKS = (  # the last answer has its reasoning, be it empty; earlier ones have none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + BEGIN
)
THINKING = THINKS.replace(BEGIN, BEGIN.replace("{% endif", "<think>\n{% endif"))
ENDED = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
ENDED_BY_ANSWER = CHATML.replace(
    "{% endif %}", "{% elif messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}"
)
SEPARATED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' if not loop.last else eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
BRACKETS = (  # a question ends by a mark, behind which an answer begins without a header
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
ALWAYS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}<|start|>assistant<|stop|>\n\n"
)
DISTILLED = (  # asked to think, it does not write what was thought
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
CALLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "({{ c.function.arguments | tojson }})</call>{% endfor %}<|im_end|>\n{% endfor %}" + BEGIN
)
NO_HEADER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}" + BEGIN
)

# Templates that are written in other ways than most.
USERS_END = (  # the beginning of an answer belongs to the question
    "{% for m in messages %}{% if m.role == 'user' %}<_user>{{ m.content }}<_bot>{% else %}"
    "{{ m.content }}<_end>{% endif %}{% endfor %}"
)
NEXT_ENDS = (  # the tag of the next message ends an answer; a last answer has thoughts
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{% if loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% else %}</think>{% endif %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>"
    "{% endif %}"
)
SPACED = (  # the request for an answer has other spaces than the answer
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}    <bot>    "
    "<no>  {{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}  <bot>  <no>"
    "{% endif %}"
)
IN_TAG = (  # the request ends with another tag than the one that an answer begins with
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<bot><|text|>"
    "{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot><|think|>"
    "{% endif %}"
)
NOT_LAST = (  # the last answer has spaces where earlier ones have a mark
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<bot>{% else %}"
    "{{ m.content }} {{ ' ' if loop.last else eos_token }}{% endif %}{% endfor %}"
)
TURNS = (  # what begins a turn stands behind the last one too, in another role
    "{{ bos_token }}{% for m in messages %}<turn><{{ m.role }}>{% if m.role == 'assistant' %}"
    "<say>{{ m.content }}<said>{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    "<turn><assistant>{% if add_generation_prompt %}<say>{% endif %}"
)
TALK = (  # turns begin with words, and one is always asked for
    "{{ bos_token }}{% for m in messages %}From: {{ m.role }}\n\n {{ m.content }} <step> "
    "{% endfor %}From: assistant\nTo: user\n\n "
)
LATE = (  # an answer ends as the next message begins, and nothing begins one behind another
    "{% for m in messages %}{{ '<end>\n' if not loop.first }}<turn>{{ m.role }}\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<end>\n{% if messages[-1].role != 'assistant' %}"
    "<turn>assistant\n{% endif %}{% endif %}"
)
REQUESTED = (  # a request to the model follows, whoever spoke last
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<system>Write actions."
    "<end>{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def folder(path: Path, template: str, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    values = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def learned(lessons: list[Lesson]) -> list[str]:
    """Return what is learned, in the order of messages."""
    places = [(turn, text[span.start : span.stop])
              for text, spans, turns in lessons
              for turn, span in zip(turns, spans, strict=True)]  # fmt: skip
    return [text for _, text in sorted(places)]


ASKED = chat("Who?", "The dog.", "Sure?", "Very.")


@pytest.mark.parametrize(
    ("template", "texts", "said"),
    [
        (CHATML, 1, ["The dog.<|im_end|>\n", "Very.<|im_end|>\n"]),
        (THINKS, 2, ["<think>\n\n</think>\n\nThe dog.<|im_end|>\n",
                     "<think>\n\n</think>\n\nVery.<|im_end|>\n"]),
        (THINKING, 2, ["\n</think>\n\nThe dog.<|im_end|>\n", "\n</think>\n\nVery.<|im_end|>\n"]),
        (ENDED, 1, ["The dog.<|im_end|>\n", "Very.<|im_end|>\n</s>"]),
        (ENDED_BY_ANSWER, 1, ["The dog.<|im_end|>\n", "Very.<|im_end|>\n</s>"]),
        (SEPARATED, 2, ["The dog.</s>", "Very.</s>"]),
        (DEFAULT, 1, ["The dog.<|im_end|>\n", "Very.<|im_end|>\n"]),
        (BRACKETS, 1, [" The dog.</s>", " Very.</s>"]),
        (ALWAYS, 1, ["The dog.<|eot|>", "Very.<|eot|>"]),
        (DISTILLED, 1, ["The dog.</s>", "Very.</s>"]),
        (NO_HEADER, 1, [" The dog.\n", " Very.\n"]),
        (PARTS, 1, ["The dog.</s>", "Very.</s>"]),
        (MARKED, 1, ["The dog.<|im_end|>", "Very.<|im_end|>"]),
        (USERS_END, 1, ["The dog.<_end>", "Very.<_end>"]),
        (NEXT_ENDS, 2, ["</think>The dog.", "</think>Very."]),
        (SPACED, 1, ["The dog.<end>", "Very.<end>"]),
        (IN_TAG, 1, ["<|text|>The dog.<end>", "<|text|>Very.<end>"]),
        (NOT_LAST, 1, ["The dog. ", "Very. "]),
        (REQUESTED, 1, ["The dog.<end>", "Very.<end>"]),
        (TURNS, 1, ["The dog.<said><end>", "Very.<said><end>"]),
        (TALK, 1, ["The dog. <step>", "Very. <step>"]),
        (LATE, 1, ["The dog.", "Very."]),
    ],
    ids=["chatml", "thinks", "thinking", "ended", "ended by answer", "separated", "default",
         "brackets", "always", "distilled", "no header", "parts", "marked", "questions have it",
         "next ends", "spaced", "in tag", "not last", "requested", "turns", "talk", "late"],
)  # fmt: skip
def test_every_answer_is_learned(
    template: str, texts: int, said: list[str], tmp_path: Path
) -> None:
    lessons = Chat(folder(tmp_path, template)).spans(ASKED)
    assert (len(lessons), learned(lessons)) == (texts, said)


@pytest.mark.parametrize("content", ["<think> no", "  The dog.  ", "</s>", "<", "T", "Who?", "0"])
@pytest.mark.parametrize("template", [THINKS, ENDED, BRACKETS, ALWAYS, DISTILLED, NO_HEADER])
def test_headers_stay_out_whatever_is_answered(template: str, content: str, tmp_path: Path) -> None:
    actual = learned(Chat(folder(tmp_path, template)).spans(chat("Who?", content, "<", content)))
    for answer in actual:
        assert answer.startswith("<think>\n\n") or answer.lstrip().startswith(content.strip())
        assert content.strip() in answer
        assert "ssistant" not in answer


def test_a_chat_that_the_assistant_begins(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "Hello."}, *chat("Who?", "The dog.")]
    actual = Chat(folder(tmp_path, DEFAULT)).spans(messages)
    assert learned(actual) == ["Hello.<|im_end|>\n", "The dog.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (CHATML, "The dog.<|im_end|>\n", "It is.<|im_end|>\n"),
        (BRACKETS, " The dog.</s>", " It is.</s>"),
        (ALWAYS, "The dog.<|eot|>", "It is.<|eot|>"),
        (TURNS, "The dog.<said><end>", "It is.<said><end>"),
        (LATE, "The dog.", "It is."),
        (MARKED, "The dog.<|im_end|>", "It is.<|im_end|>"),
    ],
    ids=["chatml", "brackets", "always", "turns", "late", "marked"],
)
def test_two_answers_in_a_row(template: str, first: str, second: str, tmp_path: Path) -> None:
    messages = [*chat("Who?", "The dog."), {"role": "assistant", "content": "It is."}]
    known = Chat(folder(tmp_path, template))
    for more, expected in (([], []), (chat("Sure?", "Very."), [first.replace("The dog", "Very")])):
        assert learned(known.spans([*messages, *more])) == [first, second, *expected]


FIRST = (  # a default system text, written in front of the first message
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind."
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BEGIN
)
ASKS = (  # it takes no messages without a question
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('no question') }}{% endif %}"
)


@pytest.mark.parametrize("template", [FIRST, ASKS + CHATML, ASKS + MARKED, CHATML + ASKS])
def test_an_answer_before_any_question(template: str, tmp_path: Path) -> None:
    """It is learned in the whole chat if the template does not write it alone."""
    messages = [{"role": "assistant", "content": "Hello."}, *chat("Who?", "The dog.")]
    known = Chat(folder(tmp_path, template))
    lessons = known.spans(messages)
    assert [each.rstrip() for each in learned(lessons)] == [
        "Hello.<|im_end|>", "The dog.<|im_end|>",
    ]  # fmt: skip
    assert len(lessons) == 1
    with pytest.raises(ConfigError, match="no question"):
        Chat(folder(tmp_path, ASKS + CHATML)).spans(messages[:1])


def test_what_follows_the_last_answer_is_left_out(tmp_path: Path) -> None:
    messages = chat("Who?", "The dog.", "Sure?")
    (lesson,) = Chat(folder(tmp_path, CHATML)).spans(messages)
    assert lesson.text.endswith("The dog.<|im_end|>\n")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_by_any_name_is_kept(key: str, tmp_path: Path) -> None:
    messages = chat("Who?", "The dog.", "Sure?", "Very.")
    for message in messages[1::2]:
        message[key] = f"Hm, {message['content']}"
    actual = learned(Chat(folder(tmp_path, THINKS)).spans(messages))
    assert actual == ["<think>\nHm, The dog.\n</think>\n\nThe dog.<|im_end|>\n",
                      "<think>\nHm, Very.\n</think>\n\nVery.<|im_end|>\n"]  # fmt: skip


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_by_which_the_template_reads_it(
    key: str, name: str, tmp_path: Path
) -> None:
    """Words of comments, texts and options are not names."""
    others = "{# reasoning_content, reasoning, thinking #}{{ 'reasoning: thinking' if thinking }}"
    messages = [*chat("Who?"), {"role": "assistant", "content": "", key: "Hm."}]
    read = THINKS.replace("m.reasoning_content", f"m['{name}']")
    for template in (others + THINKS.replace("reasoning_content", name), others + read):
        ((text, spans, _),) = Chat(folder(tmp_path, template)).spans(messages)
        assert text[spans[0].start :] == "<think>\nHm.\n</think>\n\n<|im_end|>\n"
        asked = Tokenizer.of(None, Template(tmp_path)).chat(messages, answer=False)
        assert "<think>\nHm.\n</think>" in asked
    with pytest.raises(ConfigError, match=r"omits the reasoning of messages\[1\], its only"):
        Chat(folder(tmp_path, others + CHATML)).spans(messages)


SWITCHED = CHATML.replace(
    "{% endif %}", "{% if quiet is defined and quiet %}<no>\n{% endif %}{% endif %}"
).replace("{{ m.content }}", "{{ '<no>\n' if quiet and m.role == 'assistant' }}{{ m.content }}")


def test_a_template_gets_the_options_of_a_chat(tmp_path: Path) -> None:
    """What it writes by them is asked, not answered."""
    known = Chat(folder(tmp_path, SWITCHED))
    for options, asked in (({"quiet": True}, "<no>\n"), ({"quiet": False}, ""), (None, "")):
        (lesson,) = known.spans(ASKED, None, options)
        assert learned([lesson]) == ["The dog.<|im_end|>\n", "Very.<|im_end|>\n"]
        assert f"<|im_start|>assistant\n{asked}The dog." in lesson.text
        assert known.asked(ASKED[:1], None, options).endswith(f"<|im_start|>assistant\n{asked}")
    assert not known.left_out
    known.spans(ASKED, None, {"loud": 1})
    assert known.left_out == {LeftOut("the chat_template_kwargs loud of ", "chats"): 1}


def test_a_prompt_is_as_a_question_of_a_day_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for template in (CHATML, ALWAYS, NO_HEADER):
        known = Chat(folder(tmp_path, "{{ strftime_now('%d %b %Y') }}" + template))
        for day in ((2031, 5, 6), (2032, 7, 8)):
            monkeypatch.setattr("unsloth_cupy.models.text.chat.datetime", stopped(*day))
            texts.append(known.asked(ASKED[:3]))
        assert texts[-2] == texts[-1]
        assert texts[-1][11:] == known.question(ASKED[:3])[11:]
        assert texts[-1].startswith("26 Jul 2024")
        (lesson,) = known.spans(ASKED)
        assert lesson.text.startswith(texts[-1])


def test_a_prompt_with_what_a_template_does_not_write(tmp_path: Path) -> None:
    quiet = CHATML.replace("in messages", "in messages if m.role != 'system'")
    known = Chat(folder(tmp_path, quiet))
    messages = [{"role": "system", "content": "Be kind."}, *chat("Who?")]
    known.asked([messages[0], messages[1] | {"name": "Eve", "mood": "glad"}])
    assert {each.said(n) for each, n in known.left_out.items()} == {
        "the template omits 1 messages with the role system",
        "the template omits the key name of 1 messages",
        "the template omits the key mood of 1 messages",
    }
    with pytest.raises(ConfigError, match="omits tools"):
        known.asked(messages, TestTools.TOOLS)
    calls = TestTools.messages('{"a": 1}')[:3]
    asked = Chat(folder(tmp_path, CALLS)).asked(calls, TestTools.TOOLS)
    assert asked.count('"a": 1') == 1


def test_the_next_question_ends_an_answer_without_its_thoughts(tmp_path: Path) -> None:
    messages = chat("Who?", "The dog.")
    messages[1]["reasoning_content"] = "Hm."
    ((text, spans, _),) = Chat(folder(tmp_path, NEXT_ENDS)).spans(messages)
    assert text[spans[0].start :] == "Hm.</think>The dog.<|user|>"


def test_thoughts_that_stand_in_a_turn_of_their_own(tmp_path: Path) -> None:
    """The end of a turn stands in the answer too: nothing behind it is left out."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}<|im_end|><|im_start|>final\n{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    ) + BEGIN
    messages = chat("Who?", "The dog.")
    messages[1]["reasoning_content"] = "Hm."
    tokenizer = train_tokenizer("nothing but ASCII", 261, TestTokens.MARKS)
    known = Chat(folder(tmp_path, template))
    ((text, spans, _),) = known.spans(messages)
    ends = [tokenizer.token_to_id("<|im_end|>")]
    tokens, owners = encoded(tokenizer, text, spans, True, ends, known)
    actual = tokenizer.decode(tokens[owners >= 0], skip_special_tokens=False)
    assert actual == "Hm.<|im_end|><|im_start|>final\nThe dog.<|im_end|>"


def _thought(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning": "Hm."}


class TestTools:
    TOOLS = [{"type": "function", "function": {"name": "add"}}]  # noqa: RUF012

    @staticmethod
    def messages(arguments: Any, **more: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = {"role": "assistant", "tool_calls": [call], **more}
        result = {"role": "tool", "content": "3", "tool_call_id": "a"}
        return [*chat("1 + 2?"), asked, result, {"role": "assistant", "content": "Three."}]

    @pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
    @pytest.mark.parametrize("more", [{}, {"content": None}, {"content": ""}])
    def test_calls_are_written_as_the_template_does(
        self, arguments: Any, more: dict[str, Any], tmp_path: Path
    ) -> None:
        messages = self.messages(arguments, **more)
        wants_text = CALLS.replace("arguments | tojson", "arguments + ''")
        wants_null = wants_text.replace("m.content }}", "m.content or '' }}").replace(
            "m.tool_calls or []", "(m.tool_calls if m.content is none else [])"
        )
        for template in (CALLS, wants_text, wants_null, CALLS.replace(" | tojson }})", " }})")):
            lessons = Chat(folder(tmp_path, template)).spans(
                messages, self.TOOLS * ("tools" in template)
            )
            expected = '<call>add({"a": 1})</call><|im_end|>\n'
            assert learned(lessons) == [expected, "Three.<|im_end|>\n"]
            assert lessons[0].text.startswith('tools: [{"type"')

    ACTS = (  # a call begins in another way than words, and ends where its result begins
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "<turn>assistant<act>{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}{{ ', ' ~ c.id if messages[-1].role == 'tool' }})"
        "</act>{% endfor %}{% else %}{{ '<result>' if m.role == 'tool' else '<turn>' ~"
        " m.role ~ ('<answer>' if m.role == 'assistant') }}{{ m.content }}<end>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<turn>assistant<answer>{% endif %}"
    )

    @pytest.mark.parametrize(
        ("template", "call"),
        [
            (CALLS, 'I add.<call>add({"a": 1})</call><|im_end|>\n'),
            (ACTS, '<act>I add.add({"a": 1})</act>'),
            (ACTS.replace("</act>{% endfor %}", "</act>{% endfor %}{% if loop.last %}<call>{% endif"
                          " %}"), '<act>I add.add({"a": 1})</act><call>'),
            (ACTS + "{% if messages[-1].role != 'user' %}<turn>system: act!{% endif %}",
             '<act>I add.add({"a": 1})</act>'),
        ],
        ids=["as words", "result follows", "last alone", "requested"],
    )  # fmt: skip
    @pytest.mark.parametrize("last", [False, True])
    def test_words_beside_a_call(
        self, template: str, call: str, last: bool, tmp_path: Path
    ) -> None:
        messages = self.messages({"a": 1}, content="I add.")[: 2 if last else None]
        messages[1]["tool_calls"][0]["id"] = "a"
        lessons = Chat(folder(tmp_path, template)).spans(messages, self.TOOLS)
        assert learned(lessons)[0] == call

    def test_a_call_ends_with_the_tag_of_its_result(self, tmp_path: Path) -> None:
        """Whether or not the chat has one, and not with that of a question."""
        messages = self.messages({"a": 1})
        messages[1]["tool_calls"][0]["id"] = "a"
        for count in (2, 4):
            (lesson, *_) = Chat(folder(tmp_path, self.ACTS)).spans(messages[:count], self.TOOLS)
            assert lesson.text[lesson.spans[0].stop :].startswith("<result>")

    def test_a_template_that_takes_no_calls_says_why(self, tmp_path: Path) -> None:
        refuses = "{% if messages[1].tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
        with pytest.raises(ConfigError, match="no calls"):
            Chat(folder(tmp_path, refuses + CHATML)).spans(self.messages({"a": 1}))

    def test_what_the_template_leaves_out_is_refused_by_name(self, tmp_path: Path) -> None:
        known = Chat(folder(tmp_path, CHATML))
        with pytest.raises(ConfigError, match=r"omits messages\[1\]\.tool_calls"):
            known.spans(self.messages({"a": 1}))
        for template in (CHATML, NEXT_ENDS, "{% if tools %} {% endif %}" + CHATML):
            with pytest.raises(ConfigError, match="omits tools"):
                Chat(folder(tmp_path, template)).spans(ASKED, self.TOOLS)


class TestWeights:
    def test_an_answer_of_weight_zero_is_not_learned(self, tmp_path: Path) -> None:
        for template in (CHATML, THINKS, MARKED):
            known = Chat(folder(tmp_path, template))
            messages = chat("Who?", "The dog.", "Sure?", "Very.")
            messages[1]["weight"], messages[3]["weight"] = 0, 1
            (lesson,) = known.spans(messages)
            assert "Very." in learned([lesson])[0]
            messages[3]["weight"] = 0
            assert known.spans(messages) == []
            messages[1]["weight"] = 1
            (lesson,) = known.spans(messages)
            assert "The dog." in learned([lesson])[0]
            assert "Very." not in lesson.text

    @pytest.mark.parametrize(("number", "weight"), [(1, 0.5), (1, "1"), (3, -1), (0, 1)])
    def test_other_weights_are_refused(self, number: int, weight: Any) -> None:
        messages = chat("Who?", "The dog.", "Sure?", "Very.")
        messages[number]["weight"] = weight
        with pytest.raises(ConfigError, match=rf"messages\[{number}\]\.weight is "):
            Chat(None).spans(messages)


SHORT = (  # refuses a chat of a question and an answer, but no longer one
    "{% if messages | length == 2 and messages[1].role == 'assistant' %}"
    "{{ raise_exception('too short') }}{% endif %}"
)
TAGGED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SHORT + TAGGED, ["The dog.</s>", "Very.</s>"]),
        (SHORT.replace("== 2", "> 1").replace("[1]", "[-1]") + TAGGED, None),
        ("{% if messages[1].role == 'assistant' and messages[1].content != 'The dog.' %}"
         "{{ raise_exception('unknown') }}{% endif %}" + SHORT + TAGGED, None),
        (SHORT + TAGGED.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}"),
         None),
    ],
    ids=["accepted", "never", "no other answer", "left out"],
)  # fmt: skip
def test_an_answer_that_cannot_be_the_last(
    template: str, said: list[str] | None, tmp_path: Path
) -> None:
    """It is found in the whole chat, unless that is refused, or does not have it."""
    known = Chat(folder(tmp_path, template))
    messages = chat("Who?", "The dog.", "Sure?", "Very.")
    if said is None:
        with pytest.raises(ConfigError, match="too short"):
            known.spans(messages)
        return
    assert learned(known.spans(messages)) == said


class TestTexts:
    """What two texts of a chat have in common, and the tags in them."""

    def test_common_prefixes(self) -> None:
        draws = np.random.default_rng(0)
        for size in (0, 1, 2, 3, 7, 8, 100, 1000):
            for _ in range(20):
                shared = "".join(draws.choice(list("ab"), size))
                one, other = ("".join(draws.choice(list(letters), draws.integers(0, 4)))
                              for letters in ("cd", "ef"))  # fmt: skip
                assert common(shared + one, shared + other) == size
                assert common(shared + one, shared) == size

    @pytest.mark.parametrize(
        ("text", "start", "stop", "before", "after"),
        [
            ("ab<cd>ef", 0, 4, 2, 6), ("ab<cd>ef", 0, 3, 2, 6), ("ab<cd>ef", 0, 2, 2, 2),
            ("ab<cd>ef", 0, 6, 6, 6), ("ab<cd>ef", 3, 4, 4, 4), ("ab[cd]ef", 1, 5, 2, 6),
            ("ab<cd", 0, 4, 4, 4), ("<a><b>", 0, 4, 3, 6), ("a < b and c > d", 0, 5, 2, 13),
            ("ab<cd>ef", 2, 5, 2, 6),
        ],
    )  # fmt: skip
    def test_a_place_in_a_tag(
        self, text: str, start: int, stop: int, before: int, after: int
    ) -> None:
        """Is moved to its beginning or its end, unless the tag has none or begins earlier."""
        assert _outside(text, start, stop) == before
        assert _outside(text, start, stop, after=True) == after

    @pytest.mark.parametrize(
        ("text", "tags", "word"),
        [
            ("<s>[A] <b>\nhello <c>", {"<s>", "[A]", "<b>"}, "hello"),
            ("hello <a>", set(), "hello"),
            ("", set(), ""), ("<a>", {"<a>"}, "a"), ("éé ab-cdé f", set(), "cdé"),
        ],
    )  # fmt: skip
    def test_tags_that_begin_a_text_and_its_longest_word(
        self, text: str, tags: set[str], word: str
    ) -> None:
        assert _leading(text) == tags
        assert _longest(text) == word

    @pytest.mark.parametrize("count", [1, 2, 12_345])
    def test_what_is_left_out_is_counted(self, count: int) -> None:
        kind = LeftOut("the key x of ", "messages")
        assert kind.said(count) == f"the template omits the key x of {count:,} messages"
        of_replies = LeftOut("the reasoning of ", ANSWERS)
        counts = [Counter({kind: count, of_replies: 2}), Counter({kind: 1, of_replies: 1})]
        assert left_out_by(counts) == {kind: count, of_replies: 3}
        assert left_out_by([Counter(), counts[1]]) == {kind: 1, of_replies: 1}
        assert not left_out_by([])

    def test_keys_that_no_template_reads_are_counted(self) -> None:
        """As words, and up to a hundred of them, after which known ones are counted on."""
        known = Chat(None)
        known.source = "{{ m.some_key }}{{ other }}"
        messages = [{"role": "assistant", "content": "a", "some": 1, "some_key": 2, "other": 3,
                     "tool_call_id": "x"}]  # fmt: skip
        known._count(messages * 2, "a", {"key": 1, "other": 2})
        assert known.left_out == {
            LeftOut("the key some of ", "messages"): 2,
            LeftOut("the chat_template_kwargs key of ", "chats"): 1,
        }
        for _ in range(2):
            known._count(
                [{"role": "user", "content": "a"} | {f"k{n}": n for n in range(200)}], "a", {}
            )
        assert len(known.left_out) == 100
        assert {*known.left_out.values()} == {1, 2}
        assert known.left_out[LeftOut("the key k97 of ", "messages")] == 2

    def test_messages_that_a_text_lacks_are_counted(self) -> None:
        """By their longest word, as a template may change spaces; replies are counted elsewhere."""
        known = Chat(None)
        contents = [("system", "be brief"), ("user", None), ("user", "what is it"),
                    ("assistant", "b"), ("tool", "missing words")]  # fmt: skip
        messages = [{"role": role, "content": content} for role, content in contents]
        known._count(messages, "brief what", None)
        assert known.left_out == {LeftOut("", "messages with the role tool"): 1}
        known._count(messages[:1] * 3, "be short", None)
        assert known.left_out[LeftOut("", "messages with the role system")] == 3

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize(
        ("value", "as_object", "as_text"),
        [
            ({"a": "é"}, {"a": "é"}, '{"a": "é"}'), ('{"a": 1}', {"a": 1}, '{"a": 1}'),
            ("[1]", "[1]", "[1]"), ("no JSON", "no JSON", "no JSON"), (None, None, None),
        ],
    )  # fmt: skip
    def test_arguments_of_calls_in_both_forms(
        self, value: Any, as_object: Any, as_text: Any, nested: bool
    ) -> None:
        call = {"name": "f", "arguments": value}
        message = {
            "role": "assistant",
            "tool_calls": [{"function": call, "id": "x"} if nested else call],
        }
        for is_text, expected in ((False, as_object), (True, as_text)):
            for empty in (None, ""):
                actual = _with_calls(message, is_text, empty)
                (changed,) = actual["tool_calls"]
                inner = changed["function"] if nested else changed
                assert inner == {"name": "f", "arguments": expected}
                assert changed.get("id") == ("x" if nested else None)
                assert actual["content"] == empty
                said = _with_calls(message | {"content": "a"}, is_text, empty)
                assert said["content"] == "a"
        assert call["arguments"] == value
        plain = {"role": "assistant", "content": None}
        assert _with_calls(plain, True, "") is plain


class TestTokens:
    MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

    def learned(self, path: Path, template: str, end: str, **more: Any) -> list[str]:
        """Return what is learned, each text as one."""
        tokenizer = train_tokenizer("nothing but ASCII", 261, self.MARKS)
        known, ends = Chat(folder(path, template)), [tokenizer.token_to_id(end)]
        lessons = Record(1, ASKED, "", "", **more).texts(known)
        actual = []
        for text, spans, _ in lessons:
            tokens, owners = encoded(tokenizer, text, spans, True, ends, known)
            actual.append(tokenizer.decode(tokens[owners >= 0], skip_special_tokens=False))
        return actual

    @pytest.mark.parametrize(
        ("template", "end", "expected"),
        [
            (CHATML, "<|im_end|>", ["The dog.<|im_end|>Very.<|im_end|>"]),
            (ENDED, "<|im_end|>", ["The dog.<|im_end|>Very.<|im_end|>"]),
            (ENDED, "</s>", ["The dog.<|im_end|>\nVery.<|im_end|>\n</s>"]),
            (BRACKETS, "</s>", [" The dog.</s> Very.</s>"]),
            (CHATML.replace("<|im_end|>\n", ""), "<|im_start|>",
             ["The dog.<|im_start|>Very.<|im_start|>"]),
            (CHATML.replace("{{ m.content", "<|im_end|>: {{ m.content"), "<|im_end|>",
             ["<|im_end|>: The dog.<|im_end|><|im_end|>: Very.<|im_end|>"]),
            (NOT_LAST, "</s>", ["The dog. </s>Very. </s>"]),
            (REQUESTED.replace("<end>", "<|im_end|>"), "<|im_end|>",
             ["The dog.<|im_end|>Very.<|im_end|>"]),
            (NEXT_ENDS.replace("|user|", "|im_start|"), "<|im_start|>",
             ["</think>Very.<|im_start|>", "</think>The dog.<|im_start|>"]),
        ],
        ids=["once", "not the second", "of the text", "brackets", "of the next question",
             "before the words", "not last", "requested", "next ends"],
    )  # fmt: skip
    def test_an_end_is_learned_where_generation_stops(
        self, template: str, end: str, expected: list[str], tmp_path: Path
    ) -> None:
        assert self.learned(tmp_path, template, end) == expected

    @pytest.mark.parametrize("trim", [False, True])
    def test_offsets_that_leave_spaces_out(self, trim: bool, tmp_path: Path) -> None:
        from tokenizers import processors

        tokenizer = train_tokenizer("the thing is", 270)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path)
        for prompt, answer in (("the\n", " thing  "), ("a  ", "  b"), ("", "  \n "), ("x", "\n\n")):
            ((text, spans, _),) = Record(1, [], prompt, answer).texts(Chat(None))
            tokens, owners = encoded(tokenizer, text, spans, False, [], Chat(None))
            actual = tokenizer.decode(tokens[owners >= 0])
            assert actual == answer


def stopped(*now: int) -> type[datetime]:
    """Return a clock that stands still."""
    clock = type("Clock", (datetime,), {"now": classmethod(lambda cls: datetime(*now))})
    return cast(type[datetime], clock)


def test_a_question_is_asked_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text to learn from has a date that never changes."""

    monkeypatch.setattr("unsloth_cupy.models.text.chat.datetime", stopped(2031, 5, 6, 7, 8))
    known = Chat(folder(tmp_path, "{{ strftime_now('%d %b %Y %H:%M') }}{{ messages[0].content }}"))
    assert known.text(ASKED, answer=True) == known.question(ASKED) == "06 May 2031 07:08Who?"
    assert known.text(ASKED) == "26 Jul 2024 00:00Who?"


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({"extra_special_tokens": {"eot_token": "<|eot|>"}}, {}),
        ({"eot_token": "<|eot|>"}, {}),
        ({"eot_token": {"__type": "AddedToken", "content": "<|eot|>"}}, {}),
        ({}, {"eot_token": "<|eot|>"}),
        ({"eot_token": "<|old|>"}, {"eot_token": {"content": "<|eot|>"}}),
        ({"eot_token": "<|eot|>", "added_tokens_decoder": {}}, {"eot_token": "<|old|>"}),
    ],
)
def test_named_tokens(settings: dict[str, Any], beside: dict[str, Any], tmp_path: Path) -> None:
    path = folder(tmp_path, "{{ messages[0].content }}{{ eot_token }}", **settings)
    (path / "special_tokens_map.json").write_text(json.dumps(beside))
    known = Chat(path)
    assert known.text(ASKED) == "Who?<|eot|>"
    (kept := tmp_path / "kept").mkdir()
    for name, text in known.keep().items():
        (kept / name).write_text(text)
    assert Chat(kept).text(ASKED) == "Who?<|eot|>"


def test_a_question_has_the_beginning_of_its_answer(tmp_path: Path) -> None:
    """Also where the template writes none, as that is not learned."""
    for template in (CHATML, THINKS, THINKING, ALWAYS, BRACKETS, DISTILLED, NO_HEADER, DEFAULT):
        known = Chat(folder(tmp_path, template))
        (lesson,) = known.spans(ASKED[:2])
        asked = known.question(ASKED[:1])
        assert (
            asked.removesuffix("<think>\n" * (template is DISTILLED))
            == (lesson.text[: lesson.spans[0].start])
        )


BESIDE = [  # words beside calls, results apart, and two answers in a row
    {"role": "user", "content": "ask1"},
    {"role": "assistant", "content": "say1", "tool_calls": [
        {"id": "call00001", "type": "function",
         "function": {"name": "fn_one", "arguments": {"city": "value1"}}},
    ]},
    {"role": "tool", "tool_call_id": "call00001", "name": "fn_one", "content": "result1"},
    {"role": "assistant", "content": "say2"},
    {"role": "user", "content": "ask2"},
    {"role": "assistant", "content": "say3"},
]  # fmt: skip
DOCUMENTED = [{"type": "function", "function": {
    "name": "fn_one", "description": "about it",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}}]  # fmt: skip
OTHERS = re.compile(r"ask\d|result\d|say\d|value\d")


def check_beside(known: Chat) -> None:
    """Judge words beside a call, and two answers in a row, by the words that each message holds.

    Templates may leave words beside a call out, which the account says; refuse roles; or write the
    words behind the results, as Gemma 4's, which is then learned where the call is the last.
    """
    twice = [BESIDE[0], *({"role": "assistant", "content": f"say{n}"} for n in (1, 2)), *BESIDE[4:]]
    for messages, tools in ((BESIDE, DOCUMENTED), (twice, None)):
        known.left_out.clear()
        try:
            lessons = known.spans(messages, tools)
        except ConfigError as error:
            if re.search("rejects the messages: .|omits (messages|tools)", str(error)):
                continue
            raise
        for turn, message in enumerate(messages):
            own = "".join(
                text[span.start : span.stop]
                for text, spans, turns in lessons
                for span, number in zip(spans, turns, strict=True)
                if number == turn
            )
            expected = {message["content"]} if message["role"] == "assistant" else set()
            expected |= {"value1"} if "tool_calls" in message else set()
            quiet = known.left_out[LeftOut("the content beside tool_calls of ", ANSWERS)]
            if quiet and "tool_calls" in message:
                expected.discard(message["content"])
            assert {*OTHERS.findall(own)} == expected
            if not known.marked:  # marks may hold headers, as the template's author wants it
                assert not re.search(r"(user|assistant|<\|im_start\|>|<\|turn>model)\s*$", own)


def published() -> list[Path]:
    """Return the templates of models that a package of others holds."""
    found = importlib.util.find_spec("trl")
    places = found.submodule_search_locations if found else None
    return sorted(Path(places[0], "chat_templates").glob("*.jinja")) if places else []


@pytest.mark.slow
@pytest.mark.skipif(not published(), reason="needs the extra `peers` (trl, for its templates)")
@pytest.mark.parametrize("path", published(), ids=lambda path: path.stem)
def test_published_templates(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is what transformers writes behind the question, or what it says is marked."""
    tools = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="needs the extra `peers`"
    )
    monkeypatch.setattr(tools, "datetime", stopped(2024, 7, 26))
    known = Chat(folder(tmp_path, path.read_text(encoding="utf-8")))
    messages = chat("What?", "A tall tree.", "And that?", "The red fox!", "Why?", "Since 2 < 3.")
    lessons, given = known.spans(messages), messages
    if known.takes_parts:
        given = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]

    def written(count: int, **options: Any) -> tuple[str, list[list[tuple[int, int]]]]:
        options |= {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": path.read_text("utf-8"),
        }
        (text,), marks = tools.render_jinja_template([given[:count]], **options)
        return text, marks

    check_beside(known)
    if known.marked:
        _, marks = written(6, return_assistant_tokens_mask=True)
        if len(lessons) == 1:
            assert [tuple(span) for span in lessons[0].spans] == marks[0]
        return
    assert sorted(turn for lesson in lessons for turn in lesson.turns) == [1, 3, 5]
    for text, spans, turns in lessons:
        for (start, stop), turn in zip(spans, turns, strict=True):
            whole, asked = written(turn + 1)[0], written(turn, add_generation_prompt=True)[0]
            assert messages[turn]["content"] in text[start:stop]
            if whole.startswith(asked):
                assert text[:start] == asked
            assert whole[start:].startswith(text[start:stop])


class TestAccount:
    @staticmethod
    def account(path: Path, rows: list[dict[str, Any]], length: int, template: str) -> str:
        from unsloth_cupy.finetune.data.training_data import _examples, account

        (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        records = read_records(path / "rows.jsonl")
        tokenizer = train_tokenizer("nothing but ASCII", 257)  # a token is a byte
        part = sorted([*records.train, *records.held_out])
        known = Chat(folder(path / "model", template))
        return account(*_examples(records, tokenizer, [0], length, known, part), length)

    def test_it_counts_what_is_learned(self, tmp_path: Path) -> None:
        weighed = chat("Who?", "The dog.", "Sure?", "Very.")
        weighed[1]["weight"] = 0
        rows = [
            {"messages": ASKED},
            {"messages": weighed},
            {"messages": chat("Who?", "A" * 9, "Sure?" * 60, "Lost.")},
            {"messages": chat("Who?" * 99, "Lost.")},
            {"prompt": "a", "completion": "bc"},
            {"text": "abcd"},
        ]
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        actual = self.account(
            tmp_path, rows, 150, template + "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        targets = len("The dog.\nVery.\n" + "Very.\n" + "A" * 9 + "\n" + "bc$" + "bcd$")
        expected = "training on 4 of 7 replies in 4 chats, 1 completions, 1 texts"
        assert actual.startswith(f"{expected} ({targets} of ")
        assert "; 1 dropped, 2 truncated at tokens=150 (answers lost: 2)" in actual
        assert actual.endswith("; 6 replies end without a stop token")

    def test_it_says_what_a_template_leaves_out(self, tmp_path: Path) -> None:
        messages = TestTools.messages({"a": 1}, content="I add.")
        messages[-1]["reasoning"] = "Hm."
        rows = [{"messages": [*chat(asked, "Yes."), *messages]} for asked in ("Is it?", "So?")]
        said = "; the template omits the "
        assert said not in self.account(tmp_path, rows, 500, THINKS.replace(
            "{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}"))  # fmt: skip
        actual = self.account(tmp_path, rows, 500, CALLS.replace(
            "{{ m.content }}", "{{ m.content if not m.tool_calls }}"))  # fmt: skip
        expected = f"{said}content beside tool_calls of 2 answers{said}reasoning of 2 answers"
        assert expected in actual
        quiet = CHATML.replace("in messages", "in messages if m.role != 'system'")
        for row in rows:
            row["messages"] = [{"role": "system", "content": "Be kind."}, *row["messages"][:2]]
        assert "omits" not in self.account(tmp_path, rows, 500, CHATML)
        assert "; the template omits 2 messages with the role system" in self.account(
            tmp_path, rows, 500, quiet
        )

    def test_thoughts_in_the_content_that_a_template_cuts(self, tmp_path: Path) -> None:
        rows = [{"messages": chat(who, "<think>Hmm.</think>The dog.")} for who in ("Who?", "So?")]
        said = "; the template omits the text before </think> in 2 answers"
        assert said in self.account(tmp_path, rows, 500, DISTILLED)
        assert "omits" not in self.account(tmp_path, rows, 500, CHATML)

    def test_what_both_answers_of_a_pair_have_counts_once(self, tmp_path: Path) -> None:
        quiet = CHATML.replace("in messages", "in messages if m.role != 'system'")
        system = {"role": "system", "content": "Be kind."}
        pairs = [
            {"prompt": [system, *chat(f"Who {n}?")], "chosen": [_thought("The dog.")],
             "rejected": [_thought("It is.")], "chat_template_kwargs": {"loud": 1}}
            for n in range(4)
        ]  # fmt: skip
        rated = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0}
            for n, row in enumerate(pairs)
        ]
        prompts = [{"prompt": row["prompt"], "chat_template_kwargs": {"loud": 1}} for row in pairs]
        model = folder(tmp_path / "model", quiet)
        train_tokenizer("nothing but ASCII", 257).save(str(model / "tokenizer.json"))
        (model / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
        for method, rows, thoughts, options in (
            ("dpo", pairs, 2, 1), ("kto", rated, 1, 0), ("kto", pairs, 2, 1),
            ("reward", pairs, 2, 1), ("grpo", prompts, 0, 1),
        ):  # fmt: skip
            (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            records = read_records(tmp_path / "a.jsonl", method=method)
            count = len(records.train)
            said = [f"the template omits {count} messages with the role system"]
            said += [f"the template omits the reasoning of {thoughts * count} answers"] * (
                thoughts > 0
            )
            said += [f"the template omits the chat_template_kwargs loud of {count} chats"] * (
                options
            )
            assert sorted(inspect_data(records, model).left_out) == sorted(said)
            shape = Shape(4, 500, False, 0, METHODS[method])
            config = model_without_weights(model).config
            made = from_records(records, load_tokenizer(model), config, shape, 0, Chat(model))
            assert [each for each in said if f"; {each}" not in made.note] == []

    def test_it_says_that_a_chat_needs_several_texts(self, tmp_path: Path) -> None:
        rows = [{"messages": ASKED}, {"messages": ASKED[:2]}]
        actual = self.account(tmp_path, rows, 500, THINKS)
        assert actual.startswith("training on 3 replies in 2 chats (")
        ended = self.account(tmp_path, rows, 500, CHATML.replace("<|im_end|>", "<|endoftext|>"))
        assert "stop token" not in ended
        assert (
            "; 1 additional texts, because the template formats the last reply of a chat" in actual
        )
