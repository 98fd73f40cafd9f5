"""Lines to learn from: what is read, what is learned of it, how texts share rows, what is wrong."""

import dataclasses
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Settings, Trainer, inspect_data
from unsloth_cupy.finetune.data.chat import Chat, Lesson
from unsloth_cupy.finetune.data.records import Record, Records, read_records
from unsloth_cupy.finetune.data.rows import Format
from unsloth_cupy.finetune.data.text import Batches, TrainingData, split
from unsloth_cupy.finetune.data.tokenizer import load_tokenizer, train_tokenizer
from unsloth_cupy.finetune.data.training_data import (
    Example,
    Examples,
    Packed,
    Shape,
    _examples,
    encoded,
    ends_of,
    from_records,
    from_text,
    sequential_batches,
)
from unsloth_cupy.finetune.listener import hearing
from unsloth_cupy.finetune.run import preparation
from unsloth_cupy.models import create, load
from unsloth_cupy.models.text.chat import CHATML, NEEDED, Span, _request

from ..cli.test_cli import (
    LLAMA,
    assert_one_clear_error,
    killed_and_ended,
    numbers,
    run,
    trained,
    weights,
)

ASK = {"role": "user", "content": "Who sees the cat?"}
SAY = {"role": "assistant", "content": "The dog does."}
LINES: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be short."}, ASK, SAY, ASK, SAY]},
    {"instruction": "Name a bird.", "input": "A black one.", "output": "The raven.", "text": "x"},
    {"instruction": "Name a fish.", "output": "The trout."},
    {"prompt": "The cat sees", "completion": " the dog."},
    {"text": "A horse.", "output": "no instruction, so this is other people's key"},
]
SMALL = (
    "--steps", "24", "--batch", "2", "--tokens", "48", "--layers", "1", "--hidden", "32",
    "--vocabulary", "300", "--evaluate-every", "8", "--save-every", "5", "--lr", "0.01",
)  # fmt: skip


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of every form, none of them twice."""
    draw = random.Random(0)
    nouns = ["cat", "dog", "fish", "bird", "horse"]
    lines: list[Any] = []
    for i in range(30):
        one, other = draw.sample(nouns, 2)
        question, answer = f"Who sees the {one} at {i}?", f"The {other} does."
        asked = {"role": "user", "content": question}
        lines += [
            {"messages": [asked, SAY | {"content": answer}, asked, SAY]},
            {"instruction": question, "output": answer},
            {"prompt": f"{i}: the {one} sees", "completion": f" the {other}."},
            {"text": f"{i}. The {one} sees the {other}."},
        ]
    return write(tmp_path_factory.mktemp("lines") / "animals.jsonl", lines)


@pytest.fixture(scope="session")
def finished(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run("finetune", "--text", file, "--out", folder, *SMALL)
    assert result.exit_code == 0, result.output
    return folder


class TestRecords:
    def test_every_form_is_read(self, tmp_path: Path) -> None:
        records = read_records(write(tmp_path / "lines.jsonl", [*LINES, {"text": "More."}]))
        actual = {r.line: r for r in (*records.train, *records.held_out)}
        assert sorted(actual) == [1, 2, 3, 4, 5, 6]
        assert actual[1] == Record(1, LINES[0]["messages"], "", "")
        asked = [message["content"] for message in actual[2].messages]
        assert asked == ["Name a bird.\n\nA black one.", "The raven."]
        assert [m["content"] for m in actual[3].messages] == ["Name a fish.", "The trout."]
        assert actual[4] == Record(4, [], "The cat sees", " the dog.")
        assert actual[5] == Record(5, [], "", "A horse.")

    def test_a_tenth_is_held_out_and_shares_nothing(self, tmp_path: Path) -> None:
        lines = [{"text": f"Sentence {i}."} for i in range(40)]
        records = read_records(write(tmp_path / "lines.jsonl", lines))
        assert len(records.held_out) == 4
        assert not {r.answer for r in records.held_out} & {r.answer for r in records.train}
        twice = read_records(write(tmp_path / "twice.jsonl", lines * 2))
        assert len(twice.held_out) == 4
        assert len(twice.train) == 72
        assert not {r.answer for r in twice.held_out} & {r.answer for r in twice.train}

    def test_empty_lines_and_a_byte_order_mark_are_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "lines.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
        records = read_records(path)
        assert sorted(r.line for r in (*records.train, *records.held_out)) == [1, 4]

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (b'{"text": "a"', "is not JSON (Expecting ',' delimiter at column 13); write one"),
            (b"[1, 2]", 'is [1, 2], not an object; write {"text"'),
            (b'{"text": "\xff"}', "is not UTF-8: byte 10 is 0xff; convert"),
            (b'{"text": NaN}', "text is NaN, not text; write text as a string"),
            (b'{"text": null}', "text is null, not text"),
            (b'{"text": "  "}', "text is empty; write a text"),
            (b'{"text": "\\ud800"}', "text holds half a character"),
            (b'{"title": "x", "body": "y"}', "has the columns 'title', 'body'; write one of"),
            (b"{}", "has the columns (none); write one of these forms"),
            (b'{"prompt": "x"}', "has prompt but no completion; add completion"),
            (b'{"output": "x"}', "has output but no instruction; add instruction"),
            (b'{"prompt": "x", "completion": ["y"]}', 'completion is ["y"], not text'),
            (b'{"instruction": "x", "input": 3, "output": "y"}', "input is 3, not text"),
            (b'{"messages": "hello"}', "messages is hello; write [{"),
            (b'{"messages": []}', "messages is []"),
            (b'{"messages": ["hello"]}', "messages[0] is hello; write {"),
            (b'{"messages": [{"role": "user"}]}', "messages[0] has no content"),
            (b'{"messages": [{"role": "bot", "content": "x"}]}', "role bot; choose from system"),
            (b'{"messages": [{"role": "user", "content": "x"}]}', "no message has the role ass"),
            (
                b'{"messages": [{"role": "assistant", "content": ""}]}',
                "messages[0].content is empty",
            ),
            (
                b'{"messages": [{"role": "assistant", "content": null}]}',
                "content is null, not text",
            ),
            (b'{"a": ' + b"[" * 99999, "cannot be read as JSON"),
            (b'{"text": ' + b"9" * 9999 + b"}", "cannot be read as JSON"),
        ],
    )
    def test_a_malformed_line_is_named_with_its_cure(
        self, line: bytes, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "lines.jsonl"
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine too"}\n')
        result = run("finetune", "--text", path, "--out", tmp_path / "run", "--steps", 1)
        assert_one_clear_error(result, f"{path}:3: ", said)
        assert not (tmp_path / "run").exists(), "before anything begins"

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([], "is empty"),
            ([{"text": "x"}], "holds one record"),
            ([{"text": "x"}] * 9, "holds only equal lines"),
            ([{"text": "x"}, {"text": "y"}], "too short: all its lines have 1 target token, and"),
        ],
    )
    def test_too_little(self, lines: list[Any], said: str, tmp_path: Path) -> None:
        path = write(tmp_path / "lines.jsonl", lines)
        assert_one_clear_error(run("finetune", "--text", path, "--out", tmp_path / "run"), said)


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MARKED = (  # as templates that say themselves what an assistant speaks
    "{% for m in messages %}\n<|{{ m.role }}|>\n{% if m.role == 'assistant' %}\n"
    "{% generation %}\n{{ m.content + eos_token }}\n{% endgeneration %}\n{% else %}\n"
    "{{ m.content }}\n{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}"
)
THINKS = (  # the last answer alone is written with its thoughts
    "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}(hm){% endif"
    " %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}[{{ m.content }}]{% endfor %}"
)
CHAT = [ASK, SAY, ASK | {"content": "Really?"}, SAY | {"content": "Yes."}]


def folder_with(tmp_path: Path, template: Any, **settings: Any) -> Path:
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values | settings))
    return tmp_path


def learned(lessons: list[Lesson]) -> list[str]:
    """Return what is learned of a chat, in the order of its messages."""
    places = [
        (turn, span, each.text)
        for each in lessons
        for turn, span in zip(each.turns, each.spans, strict=True)
    ]
    return [text[span.start : span.stop] for _, span, text in sorted(places)]


class TestChat:
    def test_without_a_template_it_is_chatml(self) -> None:
        (lesson,) = Chat(None).spans(CHAT[:2])
        assert lesson.text == (
            "<|im_start|>user\nWho sees the cat?<|im_end|>\n"
            "<|im_start|>assistant\nThe dog does.<|im_end|>\n"
        )
        assert learned([lesson]) == ["The dog does.<|im_end|>\n"]

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            (LLAMA3, ["The dog does.<|eot|>", "Yes.<|eot|>"]),
            (MARKED, ["The dog does.</s>\n", "Yes.</s>\n"]),
            (THINKS, ["(hm)The dog does.;", "(hm)Yes.;"]),
            ("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
             ["The dog does.\n", "Yes.\n"]),
            ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA3}],
             ["The dog does.<|eot|>", "Yes.<|eot|>"]),
        ],
        ids=["llama3", "marked", "thinks", "no prompt", "several"],
    )  # fmt: skip
    def test_what_the_assistant_says_is_learned(
        self, template: Any, said: list[str], tmp_path: Path
    ) -> None:
        chat = Chat(folder_with(tmp_path, template))
        assert learned(chat.spans(CHAT)) == said
        assert chat.own

    @pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED, THINKS], ids=str)
    def test_texts_are_those_of_transformers(self, template: str, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer("some text", 257), bos_token="<s>", eos_token="</s>"
        )
        chat = Chat(folder_with(tmp_path, template))
        for messages, answer in ((CHAT, False), (CHAT[:3], True), (CHAT[:1], True)):
            expected = tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=answer, tokenize=False
            )
            assert chat.text(messages, answer=answer) == expected

    def test_a_file_beside_comes_first(self, tmp_path: Path) -> None:
        folder_with(tmp_path, CHATML)
        (tmp_path / "chat_template.jinja").write_text(LLAMA3)
        chat = Chat(tmp_path)
        assert "<|eot|>" in chat.text(CHAT)
        assert chat.keep()["chat_template.jinja"] == LLAMA3

    def test_what_is_kept_reads_the_same(self, tmp_path: Path) -> None:
        chat = Chat(None)
        for name, text in chat.keep().items():
            (tmp_path / name).write_text(text)
        again = Chat(tmp_path)
        assert again.text(CHAT) == chat.text(CHAT)
        assert (again.own, again.keep()) == (chat.own, chat.keep())

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append.__self__.__class__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'system'}) }}",
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            "{% include '/etc/passwd' %}",
            "{% for i in range(10000000) %}x{% endfor %}",
            "{{ 1 // 0 }}",
            "{{ messages[99].content }}",
            "{{ raise_exception('no') }}",
            "{{ messages | tojson(default=range) }}",  # each would be called by json
            "{{ messages | tojson(cls=namespace) }}",
            "{{ messages | tojson(indent=range) }}",
        ],
    )
    def test_a_template_can_do_nothing_but_write(self, template: str, tmp_path: Path) -> None:
        chat = Chat(folder_with(tmp_path, template))
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json rejects the messages"):
            chat.text(CHAT)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
            "{{ ['{0.__globals__}'] | map('format', cycler) | first }}",
            "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
            "{% set f = '{x.__class__}'.format_map %}{{ f({'x': messages}) }}",
            "{{ messages | attr('__class__') }}{{ messages['__class__'] }}",
            "{{ [cycler] | map(attribute='__init__') | map(attribute='__globals__') | first }}",
            "{{ messages | groupby('__class__') | first | first }}",
            "{{ raise_exception.__globals__ }}{{ strftime_now.__self__ }}{{ self.__init__ }}",
            "{{ lipsum.__globals__ }}{{ namespace.__init__ }}{{ joiner.__call__ }}",
        ],
    )
    def test_a_template_sees_no_object_of_python(self, template: str, tmp_path: Path) -> None:
        with suppress(ConfigError):
            actual = Chat(folder_with(tmp_path, template)).text(CHAT)
            assert not re.search("<(class|function|built-in|bound|module)|globals|environ", actual)

    def test_a_template_has_no_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "secret")
        chat = Chat(folder_with(tmp_path, "{{ messages | tojson(indent=1, sort_keys=true) }}"))
        assert chat.text(CHAT[:1]).startswith('[\n {\n  "content"')
        kept = Path(f"/proc/{chat.template.process.pid}/environ")
        if not kept.exists():
            pytest.skip("needs a system that shows the environment of a process")
        assert {pair.partition("=")[0] for pair in kept.read_text().split("\0")} <= {"", *NEEDED}

    @pytest.mark.parametrize(
        ("template", "message"),
        [("{% for %}", "chat template is broken"), (3, "chat_template is not text")],
    )
    def test_broken_templates(self, template: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            Chat(folder_with(tmp_path, template)).text(CHAT)

    @pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs signals")
    @pytest.mark.parametrize(
        ("name", "why"), [("PROF", "takes more than 2 s"), ("SEGV", "crashes")]
    )
    def test_a_process_that_ends_by_a_signal(self, name: str, why: str) -> None:
        program = f"import os, signal; input(); os.kill(os.getpid(), signal.SIG{name})"
        command = [sys.executable, "-S", "-c", program]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            texts, actual = _request(process, [])
        assert not texts
        assert why in actual

    @pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs a timer of work")
    def test_a_busy_machine_breaks_no_template(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only work counts; and the timer works whatever this process does with its signal."""
        monkeypatch.setattr("unsloth_cupy.models.text.chat.SECONDS", 0.3)
        loops = "{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
        chat = Chat(
            folder_with(tmp_path, "{% set r = range(9999 * (messages|length - 1)) %}" + loops)
        )
        kept = signal.signal(signal.SIGPROF, signal.SIG_IGN)
        try:
            process = chat.template.process
        finally:
            signal.signal(signal.SIGPROF, kept)
        process.send_signal(signal.SIGSTOP)
        threading.Timer(0.6, process.send_signal, [signal.SIGCONT]).start()
        assert not chat.text(CHAT[:1])
        with pytest.raises(ConfigError, match=r"takes more than 0\.3 s; write"):
            chat.text(CHAT[:2])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "takes more than"),
            ("{% macro f(n) %}{{ n and f(n - 1) ~ f(n - 1) }}{% endmacro %}{{ f(60) }}",
             "takes more than"),
            ("{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
             "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}", "takes more than"),
            ("{{ 10 ** (10 ** 10) }}", "takes more than"),
            ("{{ 'x' * 10**9 }}", "needs more than 512 MiB"),
            ("{{ 'x' | center(10**9) }}", "needs more than 512 MiB"),
            ("{{ (r | list * 10**5) | length }}", "needs more than 512 MiB"),
            ("{% for i in r %}{{ 'x' * 10**4 }}{% endfor %}", "writes more than 8,388,608 cha"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too often"),
            ("{{ raise_exception('x ' * 10**6) }}", "messages: (x ){250};"),
            ("{{ raise_exception('x' * 10**6) }}", r"messages: x{80}\.{3}x{19};"),
        ],
        ids=str,
    )  # fmt: skip
    def test_a_template_has_limits(
        self, template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of time and memory, in a loop and in one operation, and outside the main thread."""
        if "512 MiB" in message:
            pytest.importorskip("resource", reason="needs a system that limits memory")
        monkeypatch.setattr("unsloth_cupy.models.text.chat.SECONDS", 0.4)
        chat = Chat(folder_with(tmp_path, "{% set r = range(99999) %}" + template))
        with (
            ThreadPoolExecutor() as threads,
            pytest.raises(ConfigError, match=message) as refused,
        ):
            threads.submit(chat.text, CHAT).result()
        assert len(str(refused.value)) < 1000

    @pytest.mark.slow
    def test_a_template_that_was_stopped_begins_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("unsloth_cupy.models.text.chat.SECONDS", 1)
        loops = "{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
        asked = "{% set r = range(99999 * (messages|length - 1)) %}" + loops
        chat = Chat(folder_with(tmp_path, asked))
        assert not chat.text(CHAT[:1])
        with pytest.raises(ConfigError, match="takes more than 1 s; write"):
            chat.text(CHAT[:2])
        assert not chat.text(CHAT[:1])
        process = chat.template.process
        del chat
        assert process.returncode is not None

    @pytest.mark.slow
    def test_a_long_chat_is_asked_for_in_parts(self) -> None:
        chat = CHAT * 20
        lessons = Chat(None).spans(chat)
        assert [each.text for each in lessons] == [Chat(None).text(chat)]
        answers = [m["content"] + "<|im_end|>\n" for m in chat if m["role"] == "assistant"]
        assert learned(lessons) == answers

    def test_a_date_stays_what_it_is(self, tmp_path: Path) -> None:
        """A run that goes on tomorrow must see the same texts."""
        chat = Chat(folder_with(tmp_path, "{{ strftime_now('%d %b %Y') }}"))
        assert chat.text(CHAT) == "26 Jul 2024"

    @pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages | length }}"])
    def test_a_template_that_leaves_out_the_answer(self, template: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="omits the answer to a question"):
            Chat(folder_with(tmp_path, template)).spans(CHAT[:2])

    def test_a_line_that_the_template_refuses_is_named(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "lines.jsonl", [{"messages": m} for m in (CHAT, CHAT[1:], CHAT[:2])]
        )
        chat = Chat(folder_with(tmp_path, STRICT))
        model = create(json.loads((LLAMA / "config.json").read_text()), seed=0)
        tokenizer = train_tokenizer("text", 257)
        records, said = read_records(path), r"lines.jsonl:2: .*roles must take turns"
        with pytest.raises(ConfigError, match=said):
            from_records(records, tokenizer, model.config, Shape(2, 64, True, 0), 0, chat)
        with pytest.raises(ConfigError, match=said):
            preparation.with_tokens(Settings(), records, tokenizer, chat, model.config)
        model.save(tmp_path / "model")
        tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
        (tmp_path / "model" / "chat_template.jinja").write_text(STRICT)
        with pytest.raises(ConfigError, match=said):
            inspect_data(path, tmp_path / "model")


class TestLabels:
    tokenizer = train_tokenizer("nothing but ASCII", 257)  # a token is a byte

    def labels(self, record: Record, ends: list[int], chat: Chat | None = None) -> str:
        chat = chat or Chat(None)
        ((text, spans, _),) = record.texts(chat)
        is_chat = bool(record.messages)
        tokens, owners = encoded(self.tokenizer, text, spans, is_chat, ends, chat)
        labels = np.where(owners < 0, -100, tokens)
        shown = ["_" if n == -100 else "$" if n in ends else self.tokenizer.decode([n])
                 for n in labels.tolist()]  # fmt: skip
        return "".join(shown)

    def test_prompts_are_not_asked_for(self) -> None:
        assert self.labels(Record(1, [], "ask", " tell"), [256]) == "___ tell$"
        assert self.labels(Record(1, [], "", "all"), [256]) == "all$"
        assert self.labels(Record(1, [], "ask", "tell"), []) == "___tell"

    @pytest.mark.slow
    def test_in_a_chat_only_the_assistant_counts(self, tmp_path: Path) -> None:
        record = Record(1, CHAT, "", "")
        actual = self.labels(record, [256])
        assert actual.replace("_", "") == "The dog does.<|im_end|>\nYes.<|im_end|>\n$".replace(
            "_", ""
        )
        own = self.labels(record, [256], Chat(folder_with(tmp_path, LLAMA3)))
        assert own.replace("_", "") == "The dog does.<|eot|>Yes.<|eot|>"  # it ends answers itself

    def test_tokens_that_mark_a_start_are_not_learned(self) -> None:
        from tokenizers import Tokenizer, processors

        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokens, owners = encoded(tokenizer, "abc", [Span(0, 3)], False, [0], Chat(None))
        assert tokens[0] == tokens[-1] == 0
        assert owners.tolist() == [-1, 0, 0, 0, 0]

    def test_a_tokenizer_cuts_nothing_and_fills_nothing_up(self, tmp_path: Path) -> None:
        tokenizer = train_tokenizer("nothing but ASCII", 257)
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=9)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        tokens, _ = encoded(
            load_tokenizer(tmp_path), "a longer text", [Span(0, 13)], False, [], Chat(None)
        )
        assert len(tokens) == 13

    def test_texts_of_which_no_token_is_known_are_left_out(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE({each: n for n, each in enumerate("catdog")}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        asked = [("", "cat dog"), ("xyz", "uvw"), ("", "uvw"), ("cat", " dog")]
        known = [Record(n, [], *each) for n, each in enumerate(asked, 1)]
        actual, long, lost = _examples(
            Records(tmp_path, "", "", 0, known, known), tokenizer, [], 8, Chat(None), known
        )
        assert [example.line for example in actual] == [1, 4]
        assert (long, lost) == (0, 2)

    def test_a_token_across_the_border_is_learned(self) -> None:
        tokenizer = train_tokenizer("The dog. " * 9, 290)
        text = "The dog."
        tokens, owners = encoded(tokenizer, text, [Span(2, 8)], False, [], Chat(None))
        assert tokenizer.decode(tokens[:1]) == "The"
        assert (owners == 0).all()


def examples_of(lengths: list[int]) -> list[Example]:
    draw = np.random.default_rng(0)
    return [
        Example(tokens := draw.integers(1, 90, n), np.where(np.arange(n) < 2, -100, tokens), line)
        for line, n in enumerate(lengths, 1)
    ]


class TestPacking:
    EXAMPLES = examples_of([9, 3, 16, 5, 7, 12, 4, 11, 6, 8] * 3)

    def test_texts_lie_end_to_end_and_keep_their_labels(self) -> None:
        shape = Shape(2, 16, True, 0)
        for step in range(40):
            batch = (packed := Packed(self.EXAMPLES, shape, 3, "file")).at(step)
            assert batch.tokens.shape == batch.labels.shape == (1, batch.real)
            assert batch.offsets is not None
            parts = np.split(batch.tokens.ravel(), batch.offsets[1:-1])
            known = {example.tokens.tobytes() for example in self.EXAMPLES}
            assert known >= {part.tobytes() for part in parts}
            assert 16 < batch.real == sum(len(part) for part in parts) <= 32
            assert batch.label_count == sum(len(part) - 2 for part in parts)
            assert (batch.labels != -100).sum() == batch.label_count
            assert packed.where(step).endswith(" of file")

    @pytest.mark.parametrize("pack", [True, False])
    def test_an_epoch_takes_every_text_once(self, pack: bool) -> None:
        packed = Packed(self.EXAMPLES, Shape(2, 16, pack, 0), 3, "file")
        seen: list[int] = []
        step = 0
        while len(seen) < 2 * len(self.EXAMPLES):
            seen += [example.line for example in packed._examples(step)]
            step += 1
        for epoch in range(2):
            part = seen[epoch * len(self.EXAMPLES) :][: len(self.EXAMPLES)]
            assert sorted(part) == [*range(1, len(self.EXAMPLES) + 1)]
        assert seen[: len(self.EXAMPLES)] != seen[len(self.EXAMPLES) : 2 * len(self.EXAMPLES)]

    def test_batches_depend_on_seed_and_step_alone(self) -> None:
        shape = Shape(2, 16, True, 0)
        first, second = (Packed(self.EXAMPLES, shape, 3, "file") for _ in range(2))
        second.at(70)
        for one, other in zip(first.at(33), second.at(33), strict=True):
            np.testing.assert_array_equal(one, other)
        other = Packed(self.EXAMPLES, shape, 4, "file").at(33)
        assert other.tokens.tobytes() != first.at(33).tokens.tobytes()

    def test_few_texts_are_not_said_twice_in_a_batch(self) -> None:
        batch = Packed(self.EXAMPLES[:2], Shape(8, 16, True, 0), 0, "file").at(0)
        assert batch.real == 12

    @pytest.mark.parametrize("length", [16, 8000])
    @pytest.mark.parametrize("pack", [True, False])
    def test_padding_costs_nothing(self, pack: bool, length: int) -> None:
        """What is computed are the texts: end to end, or in rows as long as the longest of them."""
        shape = Shape(3, length, pack, 0)
        packed = Packed(self.EXAMPLES, shape, 3, "file")
        for batch in [*sequential_batches(self.EXAMPLES, shape), *map(packed.at, range(12))]:
            if batch.offsets is None:
                rows, longest = batch.tokens.shape
                assert rows <= 3
                assert longest <= 16
                assert (batch.labels[:, -1] != -100).any(), "a column that no text reaches"
            else:
                assert batch.tokens.size == batch.real == batch.offsets[-1]
                assert np.diff(batch.offsets).max() <= 16

    @pytest.mark.parametrize("group", [1, 2, 3])
    @pytest.mark.parametrize("shape", [(3, 16), (2, 8000), (50, 16), (3, 19)])
    @pytest.mark.parametrize("pack", [True, False])
    def test_what_is_planned_holds_any_batch(
        self, pack: bool, shape: tuple[int, int], group: int
    ) -> None:
        """And is no larger than the texts: --tokens is the most that a text may have."""
        texts = Examples(np.dtype(np.uint16))
        for example in self.EXAMPLES:
            texts.append(example)
        packed = Packed(texts, Shape(*shape, pack, 0, Format(group=group)), 3, "file")
        groups, longest = texts.largest(packed.shape)
        assert longest == 16
        for batch in map(packed.at, range(12)):
            assert batch.tokens.size <= groups * group * longest
            if not pack:
                assert len(batch.tokens) <= groups * group
        size = sum(len(example.tokens) for example in self.EXAMPLES)
        full = min(shape[0] * group * shape[1], size) if pack else shape[0] * group * longest
        assert groups * group * longest < full + (group * longest if pack else 1)

    @pytest.mark.parametrize("pack", [True, False])
    def test_epochs_are_counted_in_batches(self, pack: bool) -> None:
        packed = Packed(self.EXAMPLES, Shape(2, 16, pack, 0), 3, "file")
        counts = [len(packed._examples(step)) for step in range(50)]
        ends = np.cumsum([0, *counts])
        for step in (0, 1, 7, 49):
            assert packed.epoch(step) == ends[step] / len(self.EXAMPLES)
        for epochs in (0.1, 0.5, 1.0, 1.5, 2.0):
            step = Packed(self.EXAMPLES, packed.shape, 3, "file").count(epochs)
            assert ends[step - 1] < epochs * len(self.EXAMPLES) <= ends[step]

    def test_the_lines_of_a_batch_are_named(self) -> None:
        twenty = ", ".join(map(str, range(7, 27)))
        for count, expected in (
            (1, "line 7 of file"),
            (3, "lines 7, 8, 9 of file"),
            (20, f"lines {twenty} of file"),
            (21, f"lines {twenty}, ... of file"),
        ):
            examples = [Example(np.arange(3), np.arange(3), 7 + n) for n in range(count)]
            shape = Shape(count, 3, False, 0)
            assert Packed(examples, shape, 0, "file").where(0) == expected
            named = Packed(examples, shape, 0, "file", lambda line: f"a:{line}").where(0)
            assert named.partition(",")[0] == "a:7"
            assert named.endswith(", ...") == (count > 20)

    @pytest.mark.parametrize("group", [1, 2, 3])
    @pytest.mark.parametrize("pack", [True, False])
    def test_groups_stay_together(self, pack: bool, group: int) -> None:
        """In shuffled batches and in order, as full as they may be."""
        shape = Shape(2, 16, pack, 0, Format(group=group))
        packed = Packed(self.EXAMPLES, shape, 3, "file")
        parts = [[e.line - 1 for e in packed._examples(step)] for step in range(20)]
        batches = sequential_batches(self.EXAMPLES, shape)
        ends = np.cumsum([0, *(b.real for b in batches)])
        places = np.cumsum([0, *(len(e.tokens) for e in self.EXAMPLES)]).tolist()
        bounds = [places.index(end) for end in ends]
        parts += [[*range(*pair)] for pair in itertools.pairwise(bounds)]
        sizes = [sum(len(self.EXAMPLES[n].tokens) for n in part) for part in parts]
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            assert [n % group for n in part] == [*range(group)] * (len(part) // group)
            firsts = part[::group]
            assert part == [n + place for n in firsts for place in range(group)]
            assert size <= 32 * group if pack else len(part) <= 2 * group
            if number != 19 and number < len(parts) - 1:  # after which others or none follow
                more = parts[number + 1][:group]
                added = sum(len(self.EXAMPLES[n].tokens) for n in more)
                assert size + added > 32 * group if pack else len(part) == 2 * group

    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("pack", [True, False])
    def test_the_largest_steps_are_found(self, pack: bool, accumulate: int) -> None:
        """Those of the largest first batch, and of the largest other, among all batches."""
        packed = Packed(self.EXAMPLES, Shape(3, 16, pack, 0), 3, "file")
        sizes = [packed.at(number).tokens.size for number in range(20 * accumulate)]
        firsts = sizes[::accumulate]
        others = [
            max(sizes[n + 1 : n + accumulate], default=0) for n in range(0, len(sizes), accumulate)
        ]
        expected = [firsts.index(max(firsts))] + [others.index(max(others))] * (accumulate > 1)
        assert packed.largest(20, accumulate) == [*dict.fromkeys(expected)]

    def test_held_out_texts_come_once_and_in_order(self) -> None:
        for pack in (True, False):
            batches = sequential_batches(self.EXAMPLES, Shape(2, 16, pack, 0))
            labels = np.concatenate([b.labels[b.labels != -100] for b in batches])
            expected = np.concatenate([e.labels[e.labels != -100] for e in self.EXAMPLES])
            np.testing.assert_array_equal(labels, expected)
            assert sum(batch.label_count for batch in batches) == len(expected)

    def test_the_loss_is_the_same_packed_or_not(self) -> None:
        model = load(LLAMA, dtype="float64")
        examples = [
            Example(e.tokens % model.config.vocab, np.where(e.labels < 0, -100, e.labels), e.line)
            for e in examples_of([9, 3, 16, 5, 7])
        ]
        losses = []
        for pack in (True, False):
            batches = sequential_batches(examples, Shape(2, 16, pack, 0))
            total = sum(
                float(model.loss(b.tokens, b.labels, offsets=b.offsets)) * b.label_count
                for b in batches
            )
            losses.append(total / sum(b.label_count for b in batches))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)

    def test_long_texts_go_on_and_long_answers_are_cut(self, tmp_path: Path) -> None:
        lines = [
            {"text": "abcdefghij" * 3},
            {"prompt": "ask", "completion": "tell" * 9},
            {"prompt": "question" * 9, "completion": "lost"},
            {"prompt": "held", "completion": "out"},
        ]
        path = write(tmp_path / "lines.jsonl", lines)
        records = read_records(path)
        everything = [*records.train, *records.held_out]
        held = next(r for r in everything if r.prompt == "held")
        records = records._replace(train=[r for r in everything if r != held], held_out=[held])
        model = create(
            json.loads((LLAMA / "config.json").read_text()) | {"vocab_size": 257}, seed=0
        )
        tokenizer, chat = train_tokenizer("text", 257), Chat(None)
        shape = Shape(2, 16, True, 0)
        training_data = from_records(records, tokenizer, model.config, shape, 0, chat)
        packed: Any = training_data.batches
        assert sorted(len(e.tokens) for e in packed.examples) == [15, 16, 16]
        assert training_data.note == (
            "training on 1 of 2 completions, 1 texts (42 of 47 tokens); 1 dropped, 2 truncated at"
            " tokens=16 (answers lost: 1)"
        )
        with pytest.raises(ConfigError, match="reaches its answer within tokens=3; increase"):
            from_records(records, tokenizer, model.config, Shape(2, 3, True, 0), 0, chat)


BYTES = train_tokenizer("nothing but ASCII", 257)  # a token is a byte, and 0 ends a text
CONFIG: Any = SimpleNamespace(end_tokens=[0], vocab=257)


def ids(text: str, most: int = 999) -> list[int]:
    """Return the tokens of a text; "$" is the end of a text."""
    return [n for part in text.split("$") for n in (*BYTES.encode(part).ids, 0)][:-1][:most]


def data_of(
    rows: list[Record],
    length: int,
    learning: Any,
    method: str,
    chat: Chat | None = None,
    **more: Any,
) -> Any:
    """Return the training data of records, which are also the held-out ones."""
    chat = chat or Chat(None)
    files = ((0, "a.jsonl", "a.jsonl:"),)
    whole = Records(None, "a", "", 1000, rows, rows, files, method=method)._replace(**more)
    return from_records(whole, BYTES, CONFIG, Shape(2, length, True, 0, learning), 0, chat)


def tokens_in(data: TrainingData) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of the training examples, and those of them that are targets."""
    return [
        (example.tokens.tolist(), example.labels[example.labels != -100].tolist())
        for example in data.examples[0]
    ]


class Plain(Format):
    """A method with two texts per record."""

    def texts(self, record: Any) -> list[str]:
        return [record.prompt, record.answer]


class TestMethods:
    """What methods train on, of rows that are shorter and longer than the texts."""

    ASKED = ("ab", "abcdef", "a", "abc", "a", "abcdefghi")

    @pytest.mark.parametrize("length", range(3, 14))
    def test_pairs(self, length: int) -> None:
        sides = [("cd", "efgh"), ("g", "hi"), ("bcdefghijk", "b"), ("b", "b"), ("bb", "bb"),
                 ("j", "k")]  # fmt: skip
        rows = [
            Record(n, [], asked, good, rejected=bad)
            for n, (asked, (good, bad)) in enumerate(zip(self.ASKED, sides, strict=True), 1)
        ]
        data = data_of(rows, length, Settings(method="dpo").learning, "dpo")
        texts = [
            (row.prompt, [row.answer, row.rejected]) for row in rows if len(row.prompt) < length
        ]
        expected = [
            (whole := ids(f"{asked}{answer}$", length), whole[len(asked) :])
            for asked, answers in texts
            for answer in answers
        ]
        assert tokens_in(data) == expected
        long = sum(len(a) + max(map(len, answers)) >= length for a, answers in texts)
        dropped, targets = len(rows) - len(texts), sum(len(t) for _, t in expected)
        note = f"training on {len(texts)}" + f" of {len(rows)}" * bool(dropped)
        note += f" pairs ({targets} of {sum(len(t) for t, _ in expected)} tokens)"
        note += f"; {dropped} dropped: the question fills tokens={length}" * bool(dropped)
        note += f"; {long} truncated at tokens={length}" * bool(long)
        note += "; none dropped or truncated" * (not long and not dropped)
        assert data.note == note + f"; equal answers in {2 if length > 3 else 1} pair" + "s" * (
            length > 3
        )
        assert (data.learned, data.held_out_tokens) == (targets, targets)
        assert data.prompt == ids(self.ASKED[0])

    @pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
    @pytest.mark.parametrize("length", [4, 6, 20])
    def test_rated_answers(self, length: int, loss: str) -> None:
        """With kto, each is followed by its question with the answer of the row before."""
        said = ["cd", "ghi", "b", "bcdefghijk", "mnop", "j"]
        pairs = {2: "xyz", 4: "uv"}
        rows = [
            Record(n, [], asked, answer, rejected=pairs.get(n), desirable=n % 3 == 0)
            for n, (asked, answer) in enumerate(zip(self.ASKED, said, strict=True))
        ]
        data = data_of(rows, length, Settings(method="kto", loss=loss).learning, "kto")
        expected, long, good, units = list[Any](), 0, 0, 0
        for n, row in enumerate(rows):
            for side in row.sides:
                units += 1
                if len(row.prompt) >= length:
                    continue
                both = [side.answer, said[n - 1]][: 2 if loss == "kto" else 1]
                long += any(len(row.prompt + answer) >= length for answer in both)
                good += bool(side.desirable)
                for answer in both:
                    whole = ids(f"{row.prompt}{answer}$", length)
                    expected.append((whole, whole[len(row.prompt) :]))
        assert tokens_in(data) == expected
        own = expected[:: 2 if loss == "kto" else 1]
        tokens, targets = (sum(map(len, each)) for each in zip(*own, strict=True))
        dropped, some = units - len(own), f"{len(own)}"
        note = f"training on {some}" + f" of {units}" * bool(dropped)
        note += f" answers, {good} of them desirable ({targets} of {tokens} tokens)"
        note += f"; {dropped} dropped: the question fills tokens={length}" * bool(dropped)
        note += f"; {long} truncated at tokens={length}" * bool(long)
        assert data.note == note + "; none dropped or truncated" * (not long and not dropped)
        assert data.learned == targets

    @pytest.mark.parametrize("length", [2, 3, 4, 9])
    def test_plain_texts(self, length: int) -> None:
        rows = [Record(n, [], "a" * (10 - n), "abcdefghi"[:n], value=n / 2) for n in range(1, 10)]
        data = data_of(rows, length, Plain(sums=1, group=2, plain=True, unit="texts"), "embed")
        texts = [ids(text, length) for row in rows for text in (row.prompt, row.answer)]
        assert tokens_in(data) == [(text, text) for text in texts]
        values = [row.value for row in rows for _ in range(2)]
        assert [example.value for example in data.examples[0]] == values
        size, long = sum(map(len, texts)), min(9, 2 * (9 - length))
        note = f"training on 9 texts ({size} of {size} tokens)"
        note += f"; {long} truncated at tokens={length}" * bool(long)
        assert data.note == note + "; none dropped or truncated" * (not long)
        empty = Record(3, [], "", "a", value=1.0)
        with pytest.raises(ConfigError, match=r"^a.jsonl:3: a text has no tokens; use char"):
            data_of([empty], length, Plain(sums=1, group=2, plain=True), "embed")

    @pytest.mark.parametrize("room", [1, 5, 8, 9])
    def test_prompts_leave_room_for_an_answer(self, room: int) -> None:
        learning: Any = Settings(method="grpo", samples=3).learning
        learning = dataclasses.replace(learning, max_new_tokens=room)
        rows = [Record(n, [], asked, "", value={}) for n, asked in enumerate(self.ASKED)]
        data = data_of(rows, 12, learning, "grpo", held_out=[*rows])
        kept = [(n, asked) for n, asked in enumerate(self.ASKED) if len(asked) + room <= 12]
        assert tokens_in(data) == [(ids(asked), ids(asked)) for _, asked in kept]
        for part, begin in zip(data.examples, (0, len(rows)), strict=True):
            assert [example.value for example in part] == [begin + n for n, _ in kept]
        dropped = len(rows) - len(kept)
        assert data.note.startswith(
            f"sampling answers to {len(kept)}{f' of {len(rows)}' * bool(dropped)} prompts, "
        )
        said = f"; {dropped} dropped: no room for max_new_tokens={room} within tokens=12"
        assert (said in data.note) == bool(dropped)
        assert (f"evaluation data: {dropped} dropped, 0 truncated" in data.note) == bool(dropped)
        assert data.largest[1] == max(len(asked) for _, asked in kept) + room
        assert [len(b.tokens) for b in data.held_out[:1]] == [1]
        assert (data.learned, data.prompt) == (len(kept), ids(kept[0][1]))

    @pytest.mark.parametrize("length", [2, 3, 5, 16])
    def test_texts_and_completions(self, length: int) -> None:
        """A text goes on in the next row, whose first token has no loss; an answer is cut."""
        rows = [Record(1, [], "", "abcdefghijk"), Record(2, [], "abc", "defgh"),
                Record(3, [], "a", "b")]  # fmt: skip
        data = data_of(rows, length, Format(), "sft", held_out=rows[2:])
        running = ids("abcdefghijk$")
        parts = [running[n : n + length] for n in range(0, len(running), length)]
        expected = [(part, part[1:]) for part in parts if len(part) > 1]
        for row in rows[1:]:
            whole = ids(f"{row.prompt}{row.answer}$", length)
            if len(row.prompt) < length:
                expected.append((whole, whole[len(row.prompt) :]))
        assert tokens_in(data) == expected
        targets = sum(len(each) for _, each in expected)
        total = sum(len(each) for each, _ in expected)
        lost, cut = int(length <= 3), (length < 9) + (length < 3)
        note = f"training on {2 - lost}{' of 2' * lost} completions, 1 texts"
        note += f" ({targets} of {total} tokens); "
        some = f"{lost} dropped, {cut} truncated at tokens={length} (answers lost: {lost})"
        some += f"; evaluation data: 0 dropped, {int(length < 3)} truncated" * (length < 3)
        assert data.note == note + (some if cut or lost else "none dropped or truncated")
        held = min(length, 3) - 1
        assert (data.learned, data.held_out_tokens) == (targets, held)
        counts = np.bincount([n for _, each in expected for n in each], minlength=257) + 1
        shares = -np.log(counts / counts.sum())
        assert data.baseline == pytest.approx(shares[ids("b$")[:held]].mean())

    @pytest.mark.parametrize("length", [38, 45, 60, 999])
    def test_chats(self, length: int, tmp_path: Path) -> None:
        """Replies that are cut off are counted, and those that no end token follows."""
        template = "{% for m in messages %}{{ m.role }}:{{ m.content }}!{% endfor %}"
        chat = Chat(folder_with(tmp_path, template))
        chats = [CHAT, CHAT[:2], [ASK, SAY, ASK, SAY | {"weight": 0}]]
        rows = [Record(n, each, "", "") for n, each in enumerate(chats, 1)]
        data = data_of(rows, length, Format(), "sft", chat=chat)
        expected, left, cut = list[Any](), 0, 0
        for messages in (chats[0], chats[1], chats[1]):
            text, targets, own = "", list[int](), 0
            for message in messages:
                text += f"{message['role']}:"
                start, text = len(text), text + f"{message['content']}!"
                if message["role"] == "assistant":
                    targets += ids(text)[start:length]
                    own += start < length
            cut += len(text) > length
            left += own
            if own:
                expected.append((ids(text, length), targets))
        assert tokens_in(data) == expected
        dropped = 3 - len(expected)
        size, total = (sum(len(each[n]) for each in expected) for n in (1, 0))
        note = f"training on {left} of 5 replies in 3 chats ({size} of {total} tokens); "
        note += f"{dropped} dropped, {cut} truncated at tokens={length} (answers lost: {4 - left})"
        if not cut:
            note = note.partition("; ")[0] + "; none dropped or truncated"
        assert data.note == note + "; 4 replies end without a stop token"

    def test_chats_of_several_texts(self, tmp_path: Path) -> None:
        """The last reply has other words: one text for each reply; an end token ends each."""
        chat = Chat(folder_with(tmp_path, THINKS.replace(";", "</s>").replace("</s>", "$")))
        rows = [Record(n, each, "", "") for n, each in enumerate((CHAT, CHAT[:2]), 1)]
        data = data_of(rows, 999, Format(), "sft", chat=chat)
        assert data.note.startswith("training on 3 replies in 2 chats (")
        assert "; 1 additional texts, because the template formats the last rep" in data.note
        assert data.note.endswith("; 3 replies end without a stop token")
        assert len(data.examples[0]) == 3

    @pytest.mark.parametrize("pack", [True, False])
    def test_values_of_examples_lie_beside_their_tokens(self, pack: bool) -> None:
        """And none beside padding; a text without them leaves a batch without."""
        draws = np.random.default_rng(0)
        examples = [
            Example(
                tokens := draws.integers(1, 9, n), tokens, n, n % 2 > 0,
                draws.random(n).astype(np.float32), draws.integers(0, 99, n), n / 2,
                draws.integers(0, 9, (n, 2, 3)), draws.random(n).astype(np.float32),
            )
            for n in (3, 5, 2, 5)
        ]  # fmt: skip
        shape = Shape(4, 9, pack, 7, Format(sums=1, group=2))
        batch = shape.batch_of(examples)
        assert (batch.label_count, batch.real, batch.group) == (2, 15, 2)
        assert {*batch.beside} == {"real", "desirable", "value", "reference", "base", "taught",
                                   "routes"}  # fmt: skip
        real = batch.beside["real"]
        assert real.sum() == 15
        assert {*batch.tokens[~real].tolist()} <= {7}
        for name, fill, kind in (
            ("desirable", True, bool), ("value", 0, float), ("reference", 0, np.float32),
            ("base", 0, np.float32), ("taught", -1, np.int64), ("routes", -1, np.int32),
        ):  # fmt: skip
            array = batch.beside[name]
            assert array.dtype == kind
            own = [getattr(example, name) for example in examples]
            if name in ("desirable", "value"):
                own = [np.full(len(e.tokens), n) for e, n in zip(examples, own, strict=True)]
            np.testing.assert_array_equal(array[real], np.concatenate(own))
            assert (array[~real] == fill).all()
        bare = [each._replace(reference=None, taught=None, routes=None, base=None)
                for each in examples]  # fmt: skip
        assert {*shape.batch_of(bare).beside} == {"real", "desirable", "value"}
        some = [each._replace(base=None, taught=None) for each in examples]
        assert {"reference", "routes"} == {*shape.batch_of(some).beside} - {"real", "desirable",
                                                                             "value"}  # fmt: skip
        plain = shape._replace(method=Format()).batch_of(bare)
        assert (plain.beside, plain.label_count, plain.group) == ({}, 15, 1)

    @pytest.mark.parametrize("kind", [np.uint16, np.uint32])
    def test_examples_are_stored_as_they_are(self, kind: Any) -> None:
        draws = np.random.default_rng(0)
        stored, examples = Examples(np.dtype(kind)), list[Example]()
        assert (stored.most, len(stored)) == (0, 0)
        for n in (3, 0, 5, 1):
            tokens = draws.integers(0, np.iinfo(kind).max + 1, n)
            labels = np.where(draws.random(n) < 0.5, tokens, -100)
            examples.append(Example(tokens, labels, n, n > 2, value=n / 4))
            stored.append(examples[-1])
        stored.reference, stored.taught = draws.random(9), draws.integers(0, 9, 9)
        assert stored.most == max(int(e.tokens.max(initial=0)) for e in examples)
        assert [*stored.lengths()] == [3, 0, 5, 1]
        every = np.concatenate([each.labels for each in examples])
        assert stored.labels().tolist() == every[every != -100].tolist()
        begin = 0
        for n, (actual, expected) in enumerate(zip(stored, examples, strict=True)):
            assert actual[2:4] == expected[2:4]
            assert actual.value == expected.value
            for name in ("tokens", "labels"):
                np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
                assert getattr(actual, name).dtype == np.int64
            part = slice(begin, begin := stored.ends[n + 1])
            np.testing.assert_array_equal(actual.reference, stored.reference[part])
            np.testing.assert_array_equal(actual.taught, stored.taught[part])

    @pytest.mark.parametrize("method", ["sft", "dpo", "classify", "grpo", "kto"])
    def test_progress_ends_at_the_size_of_the_files(self, method: str) -> None:
        """Up to the remainder of a mean size per row."""
        read = list[int]()

        class Counts(Listener):
            def reading(self, what: str, size: int) -> Any:
                assert (what, size) == ("tokenising", 1000)
                return nullcontext(read.append)

        rows = [Record(n, [], "ab", "cd", rejected="ef" if method == "dpo" else None,
                       value={} if method == "grpo" else None, desirable=True)
                for n in range(7)]  # fmt: skip
        learning: Any = Plain(sums=1, group=2, plain=True)
        if method != "classify":
            learning = Settings(method=method).learning
        if method == "grpo":
            learning = dataclasses.replace(learning, max_new_tokens=1)
        with hearing(Counts()):
            data_of(rows, 9, learning, method)
        assert 1000 - 2 * len(rows) < sum(read) <= 1000

    def test_rows_in_which_nothing_is_left_are_refused(self) -> None:
        """Naming what they lack, in the training or in the held-out part, and where."""
        fits, long = Record(1, [], "a", "b"), Record(2, [], "abcdefghi", "b")
        eval_rows: Any = Records(None, "b", "", 9, [], [long], ((0, "b.jsonl", "b.jsonl:"),))
        rewards: Any = dataclasses.replace(
            Settings(method="grpo").learning,
            max_new_tokens=2,  # type: ignore[type-var]
        )
        for learning, parts, said in (
            (Format(), ([long], [fits]), "text=a.jsonl: no training text reaches its answer wit"),
            (Format(), ([fits], [long]), "eval=b.jsonl: no evaluation text reaches its answer wi"),
            (rewards, ([long], [fits]), "no training prompt leaves room for max_new_tokens=2 with"),
        ):
            value = {} if learning is rewards else None
            train, held = ([each._replace(value=value) for each in part] for part in parts)
            more = {"held_out": held, "evaluated": eval_rows}
            with pytest.raises(ConfigError, match=re.escape(said)):
                data_of(train, 8, learning, "sft", **more)

    def test_running_text(self) -> None:
        text = split("a", "".join(chr(97 + n % 26) for n in range(400)))
        shape = Shape(2, 16, False, 0)
        data = from_text(text, BYTES, CONFIG, shape, 3)
        train, held = ids(trained(text)), ids(text.held_out)
        assert (data.learned, data.held_out_tokens) == (len(train), len(held)) == (360, 40)
        assert (data.prompt, data.largest, data.note) == (held[:12], (2, 16), "")
        shares = np.bincount(train, minlength=257) + 1
        expected = -np.log(shares / shares.sum())[held[1:]].mean()
        assert data.baseline == pytest.approx(expected)
        assert sum(batch.label_count for batch in data.held_out) == 39
        np.testing.assert_array_equal(
            data.batches.at(5).tokens,
            Batches(np.array(train), batch=2, length=16, seed=3).at(5).tokens,
        )
        most = max(train)
        for vocab in (most, most + 1):
            config: Any = SimpleNamespace(end_tokens=[0], vocab=vocab)
            with nullcontext() if vocab > most else pytest.raises(ConfigError):
                from_text(text, BYTES, config, shape, 3)

    @pytest.mark.parametrize(("asked", "expected"), [("", 12), ("a", 12), ("ab", 2), ("abc", 3)])
    def test_a_sample_begins_as_a_held_out_text(self, asked: str, expected: int) -> None:
        """With its question, or the first tokens of a text without one."""
        rows = [Record(1, [], asked, "efghijklmnopqrstuvwxyz")]
        assert data_of(rows, 99, Format(), "sft").prompt == ids(asked + rows[0].answer)[:expected]

    def test_of_many_batches_the_first_are_searched(self) -> None:
        packed = Packed([Example(np.arange(3), np.arange(3), 1)], Shape(1, 3, True, 0), 0, "file")
        assert packed.largest(10**6, 3) == [0]
        assert len(packed.starts) == 20_000 // 3 * 3 + 1

    @pytest.mark.parametrize("count", range(5))
    def test_the_least_number_of_targets(self, count: int) -> None:
        row = Record(1, [], "ab", "cdefg"[:count])
        tokens = len(ids(row.answer + "$"))
        if tokens >= 4:
            assert data_of([row], 9, Format(), "sft").learned == tokens
            return
        said = f"a.jsonl is too short: all its lines have {tokens} target token{'s' * (tokens > 1)}"
        with pytest.raises(ConfigError, match=f"{said}, and the minimum is 4; add"):
            data_of([row], 9, Format(), "sft")

    def test_tokens_that_the_model_has_no_row_for_end_nothing(self) -> None:
        chats, texts = ([Record(1, m, "a", "b")] for m in (CHAT, []))
        for vocab in (5, 6, 7):
            config: Any = SimpleNamespace(end_tokens=[0, 5, 6], vocab=vocab)
            for rows in (chats, texts):
                records = Records(None, "", "", 9, rows, rows)
                actual = ends_of(records, BYTES, config, Chat(None))
                assert actual == [n for n in (0, 5, 6) if n < vocab]


class TestFinetune:
    def test_what_a_run_leaves(self, finished: Path) -> None:
        held_out = [line for line in numbers(finished) if "held_out_loss" in line]
        assert [line["step"] for line in held_out] == [0, 8, 16, 24]
        assert held_out[-1]["held_out_loss"] < held_out[0]["held_out_loss"] - 1
        assert json.loads((finished / "settings.json").read_text())["pack"] is True
        settings = json.loads((finished / "model" / "tokenizer_config.json").read_text())
        assert settings["chat_template"] == CHATML
        vocabulary = json.loads((finished / "model" / "tokenizer.json").read_text())
        ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
        generation = json.loads((finished / "model" / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [ids["<|endoftext|>"], ids["<|im_end|>"]]

    @pytest.mark.slow
    def test_equal_bits_after_sigkill(self, finished: Path, file: Path, tmp_path: Path) -> None:
        folder = tmp_path / "killed"
        killed_and_ended(folder, [random.randrange(3, 24)], "--text", file, *SMALL)
        assert weights(folder) == weights(finished)
        assert numbers(folder) == numbers(finished)

    @pytest.mark.slow
    def test_rows_that_are_not_shared_start_from_the_same_loss(
        self, finished: Path, file: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "rows"
        options = (*SMALL, "--no-pack", "--steps", 1, "--out", out)
        assert run("finetune", "--text", file, *options).exit_code == 0
        first, other = numbers(out)[0], numbers(finished)[0]
        assert first["held_out_tokens"] == other["held_out_tokens"]
        assert first["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-5)

    @pytest.mark.slow
    def test_accumulated_batches_are_one_large_batch(self, file: Path, tmp_path: Path) -> None:
        """Packed batches hold unequal numbers of labels: the mean is over all of them."""
        from unsloth_cupy.finetune.run.loop import Loop

        actual = []
        step = Loop._gradients

        def kept(self: Loop) -> Any:
            actual.append((self, result := step(self)))
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loop, "_gradients", kept)
            options = (*SMALL, "--steps", 1, "--accumulate", 3, "--out", tmp_path / "run")
            assert run("finetune", "--text", file, *options).exit_code == 0
        trainer, (loss, count, gradients) = actual[0]
        model: Any = trainer.model
        batches: list[Any] = [trainer.training_data.batches.at(n) for n in range(3)]
        assert len({batch.label_count for batch in batches}) > 1
        assert count == sum(batch.real for batch in batches)
        fresh = create(model.texts["config.json"], seed=0)
        rows, labels = (np.concatenate([getattr(b, n) for b in batches], axis=1)
                        for n in ("tokens", "labels"))  # fmt: skip
        begins = np.cumsum([0, *(batch.tokens.size for batch in batches)])
        offsets = np.concatenate(
            [[0], *(b.offsets[1:] + begin for b, begin in zip(batches, begins, strict=False))]
        )
        whole, expected = fresh.loss_and_gradients(rows, labels, offsets=offsets)
        assert loss == pytest.approx(float(whole), rel=1e-6)
        for name, gradient in expected.items():
            off = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
            assert off < 1e-5, name

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_adapters_in_sixteen_bits_go_on_from_a_run(
        self, dtype: str, finished: Path, file: Path, tmp_path: Path
    ) -> None:
        """All savings at once: the held-out loss is the base's, within 1 %, and then falls."""
        options = ("--text", file, "--batch", 2, "--tokens", 48, "--steps", 6, "--lora", 4)
        more = ("--dtype", dtype, "--recompute-every", 1, "--out", tmp_path / "run")
        result = run("finetune", finished, *options, *more, "--evaluate-every", 6)
        assert result.exit_code == 0, result.output
        base, log = numbers(finished)[-1]["held_out_loss"], numbers(tmp_path / "run")
        assert log[0]["held_out_loss"] == pytest.approx(base, rel=1e-2)  # tuning.md promises it
        assert log[-1]["held_out_loss"] < log[0]["held_out_loss"]
        assert (tmp_path / "run" / "model" / "tokenizer_config.json").is_file()

    @pytest.mark.slow
    def test_generate_puts_a_question_as_it_was_learned(self, finished: Path) -> None:
        options = ("--temperature", 0, "--max-new-tokens", 12)
        asked = run("generate", finished, "Who sees the cat at 3?", "--chat", *options)
        assert asked.exit_code == 0, asked.output
        text = Chat(finished / "model").text(
            [ASK | {"content": "Who sees the cat at 3?"}], answer=True
        )
        whole = run("generate", finished, text, *options)
        assert whole.stdout == text + asked.stdout

    def test_running_text_asks_nothing_of_a_template(self, finished: Path, tmp_path: Path) -> None:
        """Nor of jinja2: a template that is broken stays beside the model as it was."""
        shutil.copytree(finished / "model", tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").write_text("{% broken")
        (tmp_path / "a.txt").write_text("\n\n".join(f"{i} is a number." for i in range(99)))
        options = ("--steps", 1, "--batch", 2, "--tokens", 16, "--out", tmp_path / "run")
        done = run("finetune", tmp_path / "model", "--text", tmp_path / "a.txt", *options)
        assert done.exit_code == 0, done.output
        kept = tmp_path / "run" / "model" / "chat_template.jinja"
        assert kept.read_text() == "{% broken"

    def test_a_vocabulary_without_room_for_marks_is_refused(
        self, file: Path, tmp_path: Path
    ) -> None:
        result = run(
            "finetune", "--text", file, *SMALL, "--vocabulary", 258, "--out", tmp_path / "r"
        )
        assert_one_clear_error(result, "--vocabulary 258 is too small", "need 259 tokens")

    @pytest.mark.parametrize("option", ["--pack", "--no-pack"])
    def test_running_text_is_not_packed(self, option: str, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text " * 99)
        result = run("finetune", "--text", tmp_path / "a.txt", option, "--out", tmp_path / "run")
        assert_one_clear_error(result, "apply only to data in rows")


@pytest.mark.parametrize(
    "kind", ["qlora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "lora"))]
)
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("pack", "accumulate"),
    [
        (None, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((True, 1), (False, 1), (True, 2))
        ),
    ],
)
def test_the_plan_is_of_what_runs(
    pack: bool | None,
    accumulate: int,
    kind: str,
    invariant: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the largest step before the first one, and of every step that is measured: to 3 %.

    With ``invariant`` a limit adds Python objects: a measurement is exact to a hundredth of 6 MB.
    """
    monkeypatch.setattr("unsloth_cupy.finetune.data.text.HELD_OUT_CHARACTERS", 300)
    draw, words = (
        random.Random(0),
        [
            "a",
            "quick",
            "brown",
            "fox",
            "jumps",
            "over",
            "the",
            "lazy",
            "dog",
            "while",
            "we",
            "look",
        ],
    )
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 40))) for _ in range(120)]
    running = tmp_path / "text.txt"
    running.write_text("\n\n".join(texts))
    lines = write(tmp_path / "lines.jsonl", [{"prompt": t[:9], "completion": t[9:]} for t in texts])
    new: dict[str, Any] = {"layers": 2, "hidden": 64, "vocabulary": 300}
    shape: dict[str, Any] = {"batch": 4, "tokens": 96, "evaluate_every": 9}
    made = Trainer(None, running, Settings(steps=1, out=tmp_path / "new", **new, **shape)).train()
    adapters = {"lora": 8, "quantize": "nf4" if kind == "qlora" else None}
    planned: list[int] = []
    kept = preparation.checked_plan
    monkeypatch.setattr(
        preparation, "checked_plan", lambda *a: [p := kept(*a), planned.append(p.total)][0]
    )
    result = Trainer(
        made.files.model,
        running if pack is None else lines,
        Settings(
            steps=7, out=tmp_path / "run", pack=pack, accumulate=accumulate, invariant=invariant,
            limit_memory=2**30 if invariant else None, **shape,
            **(adapters if kind != "full" else {}),
        ),
    ).train()  # fmt: skip
    counted = [line for line in result.files.lines() if "peak_bytes" in line]
    assert {line["step"] for line in counted} >= ({*range(1, 8)} if invariant else {1, 2})
    planned_lines = [line for line in counted if "planned_bytes" in line]
    slack = 60_000 if invariant else 0
    assert {line["step"] for line in planned_lines} >= {1, 2}
    for line in planned_lines:
        expected = pytest.approx(line["peak_bytes"], rel=0.03, abs=slack)  # the promise
        assert line["planned_bytes"] == expected
    (before,) = planned
    peak = max(line["peak_bytes"] for line in counted)
    assert before == pytest.approx(peak, rel=0.03, abs=slack)  # the promise
    assert before == max(line["planned_bytes"] for line in planned_lines)


def test_a_batch_is_as_full_as_it_may_be() -> None:
    """Of 2 rows of 16 tokens each: texts of 16 share one, those of 11 are two in it."""
    for length, expected in ((16, [2, 2]), (11, [2, 2]), (8, [4])):
        examples = [Example(np.arange(length), np.arange(length), 1)] * 4
        batches = sequential_batches(examples, Shape(2, 16, True, 0))
        assert [len(batch.offsets) - 1 for batch in batches] == expected
