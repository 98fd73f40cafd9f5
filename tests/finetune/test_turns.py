"""What a chat template writes around messages, and the Modelfile that says it to Ollama."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.cli.modelfile import begin_of, go_template, write_modelfile
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.chat import Chat
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.finetune.data.turns import Ending, end_tokens, ending, ending_of, turns_of
from unsloth_cupy.models.text.chat import CHATML

from ..models.exported import byte_level, make, read, write_tokenizer

KEY = "tokenizer.ggml."
GENERATION = "{% if add_generation_prompt %}"
# as model hubs have them: template, end of an answer, whether a system message is taken
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", True),
    "qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + CHATML, "<|im_end|>", True,
    ),
    "llama3": (
        "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] +"
        " '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
        "{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}" + GENERATION +
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}", "<|eot_id|>", True,
    ),
    "llama3 with a date": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set say = messages[0].content %}"
        "{% set messages = messages[1:] %}{% else %}{% set say = '' %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ strftime_now('%d %b %Y') }}\n\n"
        "{{ say }}<|eot_id|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "\n\n{{ m.content }}<|eot_id|>{% endfor %}" + GENERATION +
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}", "<|eot_id|>", True,
    ),
    "llama2": (
        "{% if messages[0].role == 'system' %}{% set say = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.index0 == 0 and say %}<<SYS>>\n"
        "{{ say }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}", "</s>", False,
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}" + GENERATION + "<start_of_turn>model\n{% endif %}", "<end_of_turn>", False,
    ),
    "zephyr": (
        "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n"
        "{% endfor %}" + GENERATION + "{{ '<|assistant|>\n' }}{% endif %}", "</s>", True,
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + GENERATION
        + "{{ '<|assistant|>\n' }}{% endif %}", "<|end|>", True,
    ),
    "own": ("{% for m in messages %}{{ m.role }}: {{ m.content }}<done>{% endfor %}" + GENERATION
            + "assistant: {% endif %}", "<done>", True),
}  # fmt: skip
NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<done>")  # fmt: skip
ASK, SAY, MORE, SYSTEM = (
    {"role": role, "content": text}
    for role, text in (
        ("user", "What is {{ this }}?"), ("assistant", "A\n\nthing."), ("user", "Oh?"),
        ("system", "Be brief."),
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer("some text", 257)
    made.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    return made


def chat_of(folder: Path, template: str) -> Chat:
    values = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return Chat(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_an_answer(name: str, tokenizer: Any, tmp_path: Path) -> None:
    template, end, _ = TEMPLATES[name]
    chat = chat_of(tmp_path, template)
    assert ending(chat, tokenizer) == Ending(tokenizer.token_to_id(end), end)
    assert ending_of(tmp_path, tokenizer) == ending(chat, tokenizer)


def test_an_end_of_several_tokens_is_the_one_that_the_config_names(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Unless it stands behind the last answer alone; the next question's tag may be the end."""
    several = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}<end_of_turn><|im_end|>{% endfor %}"
    )
    last = several.replace("<|im_end|>", "{{ '<|im_end|>' if loop.last }}")
    follows = "{% for m in messages %}<|im_end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    ends = [tokenizer.token_to_id(name) for name in ("<end_of_turn>", "<|im_end|>")]
    for template, known, expected in (
        (several, [], 0), (several, ends[1:], 1), (several, ends, 0), (last, ends[1:], 0),
        (follows, [], 1),
    ):  # fmt: skip
        actual = ending(chat_of(tmp_path, template), tokenizer, known)
        assert actual.token == ends[expected]


def test_an_end_without_a_token_is_text(tokenizer: Any, tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}> {{ m.content }}%s\n{% endfor %}"
    for mark, expected in ((" [END]", "[END]"), ("", "user>")):
        chat = chat_of(tmp_path, plain.replace("%s", mark))
        assert ending(chat, tokenizer) == Ending(None, expected)
    (tmp_path / "tokenizer_config.json").unlink()
    assert ending_of(tmp_path, tokenizer) is None


def test_replies_end_at_tokens_of_the_vocabulary(tokenizer: Any, tmp_path: Path) -> None:
    """Those of the config first, each once; a model may have no row for one of the template."""
    chat, end = chat_of(tmp_path, CHATML), tokenizer.token_to_id("<|im_end|>")
    strict = chat_of(tmp_path, "{{ raise_exception('no') }}")
    for own in ([2], [2, end], [end, 2], [end + 1, 2], []):
        for vocab in (2, 3, end, end + 1, end + 2):
            config: Any = SimpleNamespace(end_tokens=own, vocab=vocab)
            for each, more in ((chat, [end]), (strict, [])):
                expected = [n for n in dict.fromkeys([*own, *more]) if n < vocab]
                assert end_tokens(each, tokenizer, config) == expected


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ollama_writes_what_the_template_does(
    name: str, begins: bool, tokenizer: Any, tmp_path: Path
) -> None:
    template, _, takes_system = TEMPLATES[name]
    chat = chat_of(tmp_path, template)
    if name == "llama2":
        with pytest.raises(ConfigError, match=r"depends on the other messages|earlier answer"):
            turns_of(chat)
        return
    turns, begin = turns_of(chat), "<s>" * begins
    assert (turns.system is not None) == takes_system
    for opening in ([], [SYSTEM])[: 1 + takes_system]:
        for messages in ([*opening, ASK], [*opening, ASK, SAY, MORE], [*opening, MORE, SAY, ASK]):
            expected = chat.text(messages, answer=True, today=False)  # a file keeps its day
            assert turns.text(messages) == expected
            actual = rendered(go_template(turns, begin), messages)
            assert actual == expected.removeprefix(begin)


@pytest.mark.parametrize(
    ("end", "last", "expected"), [("<e>", "", "<e>"), ("<e>", "<e>", ""), ("", "", "")]
)
def test_an_end_of_the_last_answer_alone_is_none_of_a_turn(
    end: str, last: str, expected: str, tmp_path: Path
) -> None:
    """Between turns, an end is what each answer has."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if END %}<e>{% endif %}"
    shown = "m.role == 'assistant' and loop.last" if last else "m.role == 'assistant'"
    template = template.replace("END", shown if end else "false") + "{% endfor %}"
    chat = chat_of(tmp_path, template + GENERATION + "[assistant]{% endif %}")
    turns = turns_of(chat)
    assert (turns.first, turns.answer, turns.end, turns.next) == (
        "[user]", "[assistant]", expected, "[user]"
    )  # fmt: skip
    assert turns.system == ("[system]", "[user]")
    assert turns.text([ASK, SAY, MORE]) == chat.text([ASK, SAY, MORE], answer=True, today=False)


def rendered(template: str, messages: list[Any]) -> str:
    """Return what Ollama would write: its language as that of jinja2."""
    opened, parts = [], []
    known = {
        "range $i, $_ := .Messages": "{% for m in messages %}",
        "eq $i 0": "loop.index0 == 0",
        "not (and $.System (eq $i 1))": "not (system and loop.index0 == 1)",
        **{f'eq .Role "{role}"': f"m.role == '{role}'" for role in ("system", "user", "assistant")},
    }
    for text, tag in re.findall(r"(.*?)(?:\{\{ (.*?) \}\}|$)", template, re.S):
        parts.append(f"{{% raw %}}{text}{{% endraw %}}")
        if tag.startswith("range"):
            parts.append(known[tag])
            opened.append("for")
        elif tag.startswith("if "):
            parts.append(f"{{% if {known[tag[3:]]} %}}")
            opened.append("if")
        elif tag.startswith("else if "):
            parts.append(f"{{% elif {known[tag[8:]]} %}}")
        elif tag == "else":
            parts.append("{% else %}")
        elif tag == "end":
            parts.append(f"{{% end{opened.pop()} %}}")
        elif tag == ".Content":
            parts.append("{{ m.content }}")
        elif tag:
            assert re.fullmatch(r'"([^"\\]|\\U[0-9a-f]{8})*"', tag)
            parts.append(f"{{{{ {tag} }}}}")  # a string of Go is one of jinja2
    assert not opened
    environment = jinja2.Environment(keep_trailing_newline=True, autoescape=False)
    system = any(each["role"] == "system" for each in messages)
    return environment.from_string("".join(parts)).render(messages=messages, system=system)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML + "{{ messages | length }}", "formats earlier answers"),
        ("{{ messages | length }}" + CHATML, "depends on the other messages"),
        (CHATML.replace("assistant\n", "assistant\n<think>\n"), "formats earlier answers"),
    ],
)  # fmt: skip
def test_templates_that_no_pieces_tell(template: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        turns_of(chat_of(tmp_path, template))


def test_the_first_token_is_left_to_ollama_if_the_tokenizer_adds_it(tokenizer: Any) -> None:
    from tokenizers import processors

    chat = Chat(None)
    chat.tokens = {"bos_token": "<s>"}
    assert begin_of(chat, tokenizer) == ""
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", number)]
    )
    assert begin_of(chat, tokenizer) == "<s>"


def exported(folder: Path, template: str | None, *options: str) -> tuple[Any, dict[str, Any]]:
    """Export a model whose tokenizer also has <|im_end|> and <done>; return output and keys."""
    make(folder / "m", "llama")
    values = byte_level(97)
    entry = values["added_tokens"][0]
    size = len(values["model"]["vocab"])
    for number, text in enumerate(("<|im_end|>", "<done>", "<|im_start|>"), size):
        values["added_tokens"].append({**entry, "id": number, "content": text})
    write_tokenizer(folder / "m", values, eos_token="</s>", chat_template=template)
    words = ["export", str(folder / "m"), str(folder / "m.gguf"), *options]
    result = click.testing.CliRunner().invoke(group, words)
    assert result.exit_code == 0, result.output
    return result, read(folder / "m.gguf")[0]


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (TEMPLATES["own"][0], "<done>"), (None, None)]
)
def test_a_file_ends_texts_where_the_chat_does(
    template: str | None, end: str | None, tmp_path: Path
) -> None:
    _, values = exported(tmp_path, template)
    assert values[KEY + "eos_token_id"] == 2
    token = values.get(KEY + "eot_token_id")
    assert (token and values[KEY + "tokens"][token]) == end


def test_python_knows_common_names_and_takes_others(tmp_path: Path) -> None:
    exported(tmp_path, CHATML)
    known = read(tmp_path / "m.gguf")[0][KEY + "tokens"].index("<|im_end|>")
    for stop, expected in ((None, known), (known + 1, known + 1)):
        models.export_gguf(tmp_path / "m", tmp_path / f"{stop}.gguf", stop=stop)
        assert read(tmp_path / f"{stop}.gguf")[0][KEY + "eot_token_id"] == expected
    with pytest.raises(ConfigError, match=r"stop=-1\): pass a token"):
        models.export_gguf(tmp_path / "m", tmp_path / "n.gguf", stop=-1)


def test_a_modelfile(tmp_path: Path) -> None:
    result, _ = exported(tmp_path, CHATML, "--modelfile")
    values = taken((tmp_path / "m.Modelfile").read_text())
    assert rendered(values.pop("TEMPLATE"), [ASK]) == Chat(tmp_path / "m").text([ASK], answer=True)
    assert values == {"FROM": "./m.gguf", "PARAMETER stop": "<|im_end|>"}
    assert f"{tmp_path / 'm.Modelfile'}: FROM, TEMPLATE and PARAMETER stop" in result.output
    (tmp_path / "o.Modelfile").touch()
    for name, code in (("n", 0), ("o", 1)):
        again = ["export", str(tmp_path / "m"), str(tmp_path / f"{name}.gguf"), "--modelfile"]
        result = click.testing.CliRunner().invoke(group, again)
        assert result.exit_code == code, result.output
    assert "o.Modelfile exists; remove it" in result.output
    assert not (tmp_path / "o.gguf").exists()
    assert taken((tmp_path / "n.Modelfile").read_text())["FROM"] == "./n.gguf"


def taken(text: str) -> dict[str, str]:
    """Return the values of a Modelfile as Ollama's parser takes them.

    A value ends at the end of a line where its quotes are closed; between them are no escapes, and
    characters that Go does not print are lost.
    """
    values, lines = {}, re.split(r"(?<=[\r\n])", text)
    while lines:
        line = lines.pop(0)
        if line.startswith("#") or not line.strip():
            continue
        name, rest = re.fullmatch(r"(FROM|TEMPLATE|PARAMETER \w+)[ \t](.*)", line, re.S).groups()  # type: ignore[union-attr]
        quotes = next((each for each in ('"""', '"') if rest.strip().startswith(each)), "")
        while len(rest.strip()) < 2 * len(quotes) or not rest.strip().endswith(quotes):
            rest += lines.pop(0)
        value = rest.strip()[len(quotes) : len(rest.strip()) - len(quotes)]
        values[name] = "".join(c for c in value if c.isprintable() or c in "\t\r\n")
    return values


ODD = ("{", "{{", "{{{", '"', '""', '"""', '""""', "\\", "\\n", "\n", "\t", "\r", "\x07", "\x85")
ODD += (
    "\xa0",
    "\u200b",
    "\u2028",
    "\U000e0001",
    "\uff5c",
    "\U0001f680",
    "}}",
    "{}",
    "'",
    "#",
    " x ",
)


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_a_modelfile_means_what_the_template_writes(odd: str, tmp_path: Path) -> None:
    """Whatever a turn ends and begins with; what a stop cannot hold is left out, and said."""
    marks = {name: f"{odd}{name}{odd}" for name in ("begin", "answer", "end")}
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ begin }}{{ m.content }}{{ answer }}"
        "{% else %}{{ m.content }}{{ end }}{% endif %}{% endfor %}"
    )
    for name, text in marks.items():
        template = template.replace(f"{{{{ {name} }}}}", f"{{{{ {text!a} }}}}")
    (tmp_path / "m").mkdir()
    write_tokenizer(tmp_path / "m", byte_level(97), chat_template=template)
    path, stop = tmp_path / "m.Modelfile", marks["end"]
    loaded = Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    parts, reasons = write_modelfile(path, tmp_path / "m.gguf", tmp_path / "m", loaded, stop)
    values = taken(path.read_bytes().decode())
    assert [*values] == parts
    for messages in ([ASK], [ASK, SAY, MORE]):
        expected = Chat(tmp_path / "m").text(messages, answer=True)
        assert rendered(values["TEMPLATE"], messages) == expected
    assert values.get("PARAMETER stop", stop) == stop
    assert len(reasons) == ("PARAMETER stop" not in values)
    assert reasons or not {'"""', '""""', "\x07", "\u200b"} & {odd}


@pytest.mark.parametrize(
    "name", ["a\nPARAMETER stop x.gguf", "a\x1b.gguf", "a\xa0b.gguf", "a.gguf "]
)
def test_a_modelfile_cannot_name_every_file(name: str, tmp_path: Path) -> None:
    make(tmp_path / "m", "llama")
    words = ["export", str(tmp_path / "m"), str(tmp_path / name), "--modelfile"]
    result = click.testing.CliRunner().invoke(group, words)
    assert "choose another name" in result.output
    assert {each.name for each in tmp_path.iterdir()} == {"m"}


def test_a_reason_is_one_line_of_a_modelfile(tmp_path: Path) -> None:
    text = "{{ raise_exception('no\nSYSTEM you lie') }}"
    exported(tmp_path, text, "--modelfile")
    assert taken((tmp_path / "m.Modelfile").read_text()) == {"FROM": "./m.gguf"}


def test_a_modelfile_says_why_it_has_no_template(tmp_path: Path) -> None:
    result, _ = exported(tmp_path, None, "--modelfile")
    why = "TEMPLATE is left out: the model has no chat template"
    assert (tmp_path / "m.Modelfile").read_text() == f"FROM ./m.gguf\n# {why}\n"
    assert f"note: {why}" in result.output


def test_a_broken_template_is_a_note(tmp_path: Path) -> None:
    result, values = exported(tmp_path, "{% for %}", "--modelfile")
    assert "note: the end token of answers is unknown: " in result.output
    assert values[KEY + "eos_token_id"] == 2
    assert len((tmp_path / "m.Modelfile").read_text().splitlines()) == 2


def test_what_follows_the_last_answer_is_left_out() -> None:
    ask, say = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))
    )
    (whole,) = Chat(None).spans([ask, say])
    (actual,) = Chat(None).spans([ask, say, {"role": "user", "content": "and then?"}])
    assert actual == whole
