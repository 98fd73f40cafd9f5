"""Tool calls: read in the form in which the model's own chat template writes them."""

import json

import pytest

from unsloth_cupy.models.text.chat import Chat
from unsloth_cupy.serving.server.answers import Answer
from unsloth_cupy.serving.tool_calls import form_of

LIST = "{% for t in tools or [] %}{{ t | tojson }}{{ '\n' }}{% endfor %}"
ASKING = "{% if add_generation_prompt %}<|a|>{% endif %}"
TURN = "{% for m in messages %}<|{{ m.role[:1] }}|>"
EACH = "{% for c in m.tool_calls or [] %}"
NAME, GIVEN = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
ITEMS = "{% for k, v in c.function.arguments | items %}"
VALUE = "{{ v if v is string else v | tojson }}"
END = "{% endfor %}<|end|>{% endfor %}"
TEMPLATES = {
    "hermes": LIST + TURN + "{{ m.content }}" + EACH
    + '{{ "\n" }}<tool_call>{{ "\n" }}{"name": "' + NAME + '", "arguments": ' + GIVEN
    + '}{{ "\n" }}</tool_call>' + END + ASKING,
    "tags": LIST + TURN + "{{ m.content }}" + EACH
    + '<tool_call>{{ "\n" }}<function=' + NAME + '>{{ "\n" }}' + ITEMS
    + '<parameter={{ k }}>{{ "\n" }}' + VALUE + '{{ "\n" }}</parameter>{{ "\n" }}{% endfor %}'
    + '</function>{{ "\n" }}</tool_call>' + END + ASKING,
    "keys": LIST + TURN + "{{ m.content }}" + EACH + "<tool_call>" + NAME + '{{ "\n" }}' + ITEMS
    + '<arg_key>{{ k }}</arg_key>{{ "\n" }}<arg_value>' + VALUE + '</arg_value>{{ "\n" }}'
    + "{% endfor %}</tool_call>" + END + ASKING,
    "bare": LIST + TURN + "{% if m.tool_calls and m.tool_calls | length > 1 %}"
    + "{{ raise_exception('one call') }}{% endif %}{{ m.content }}" + EACH
    + '{"name": "' + NAME + '", "parameters": ' + GIVEN + "}" + END + ASKING,
    "list": LIST + TURN + "{% if m.tool_calls %}[TOOL_CALLS] [" + EACH
    + '{"name": "' + NAME + '", "arguments": ' + GIVEN + ', "id": "{{ c.id }}"}'
    + "{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|end|>"
    + "{% endfor %}" + ASKING,
    "sections": LIST + TURN + "{{ m.content }}{% if m.tool_calls %}<calls>" + EACH
    + "<call>function<sep>" + NAME + "{{ '\n' }}```json{{ '\n' }}" + GIVEN
    + "{{ '\n' }}```</call>{{ '\n' if not loop.last }}{% endfor %}</calls>{% endif %}<|end|>"
    + "{% endfor %}" + ASKING,
}  # fmt: skip
PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
]
ARGUMENTS = ({"a": 7, "text": "12"}, {"text": "{x} «é» <b>", "a": -1}, {})


def chat_of(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return Chat(folder)


def written(chat, *calls):
    """Return the text of an answer with calls, as the template writes it."""
    each = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {"name": "add", "arguments": own},
        }
        for number, own in enumerate(calls)
    ]
    ask = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": each}
    text = chat.text([ask, answer], tools=TOOLS)
    return text.partition("<|a|>")[2].removesuffix("<|end|>")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(kind, tmp_path):
    chat = chat_of(tmp_path, TEMPLATES[kind])
    form = form_of(chat)
    for calls in ([ARGUMENTS[0]], [ARGUMENTS[1]], [ARGUMENTS[2]], [*ARGUMENTS]):
        if kind == "bare" and len(calls) > 1:
            continue
        text = written(chat, *calls)
        begin = form.begins(text)
        assert begin >= 0
        read, rest = form.calls(text[begin:], TOOLS)
        assert [(call.name, call.arguments) for call in read] == [("add", own) for own in calls]
        assert rest == ""
        for stop in (begin + len(form.opening) + 1, len(text) - len(form.closing or "</x>") - 3):
            assert form.calls(text[begin:stop], TOOLS) is None


@pytest.mark.parametrize("template", [TURN + "{{ m.content }}{% endfor %}", LIST + TURN + END])
def test_a_template_without_calls_has_no_form(template, tmp_path):
    template = template.replace(END, "{{ m.content }}{% endfor %}")
    assert form_of(chat_of(tmp_path, template)) is None


class Letters:
    """A tokenizer with a token for each character; character 1 is a special token <s>."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join("" if skip_special_tokens and t == 1 else chr(t) for t in tokens)

    def get_added_tokens_decoder(self):
        return {}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("before", ["", "I add. "])
def test_text_before_calls_is_shown_as_it_comes(kind, before, tmp_path):
    chat = chat_of(tmp_path, TEMPLATES[kind])
    form, calls = form_of(chat), ARGUMENTS[:1] if kind == "bare" else ARGUMENTS
    if kind == "bare" and before:
        before = ""  # a call is the whole answer
    text = before + written(chat, *calls)
    answer = Answer(Letters(), [65], [], {0}, form=form, tools=TOOLS)
    shown = [
        answer.push([ord(each)], None, None) for each in text
    ] + [answer.push([0], None, "stop")]  # fmt: skip
    assert "".join(shown).strip() == answer.text.strip() == before.strip()
    assert [json.loads(json.dumps(call.arguments)) for call in answer.calls] == [*calls]
    assert answer.finish == "tool_calls"


def test_what_is_no_call_is_text(tmp_path):
    form = form_of(chat_of(tmp_path, TEMPLATES["hermes"]))
    text = 'Well <tool_call>\n{"name": "add", "argum'
    answer = Answer(Letters(), [65], [], {0}, form=form, tools=TOOLS)
    shown = "".join(answer.push([ord(each)], None, None) for each in text)
    assert shown.strip() == "Well"
    shown += answer.push([ord("e")], None, "length")
    assert (shown, answer.calls, answer.finish) == (text + "e", [], "length")
