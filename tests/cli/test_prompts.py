"""``generate --prompts FILE``: the answers of one command per prompt, in the order of the file."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Engine, models
from unsloth_cupy.cli import generate, prompts
from unsloth_cupy.cli.prompts import read_prompts
from unsloth_cupy.errors import ConfigError, printable

from .test_cli import assert_one_clear_error, run
from .test_conversation import model_of

NEW = ("--max-new-tokens", 12, "--device", "cpu")
GREEDY, SAMPLED = ("--temperature", 0), ("--seed", 3)
TEXTS = ["Who sees", "The dog does.", "Who sees the cat? The dog", "Who sees", "Dög"]
CHAT = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "m"
    model_of(path)
    return path


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(*words: Any, given: str | bytes = "") -> list[dict[str, Any]]:
    result = run("generate", *words, *NEW, given=given)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert f"{sum(row['tokens'] for row in rows)} tokens in" in result.stderr
    return rows


def alone(folder: Path, prompt: str, *options: Any) -> str:
    """Return the answer to one prompt as ``generate_text`` returns it, as the command does."""
    model = models.load(folder)
    values = dict(zip(options[::2], options[1::2], strict=True))
    sampling = {"temperature": 0.0} if values == {"--temperature": 0} else {"temperature": 0.8}
    sampling |= {"seed": values["--seed"]} if "--seed" in values else {}
    return model.generate_text(prompt, max_new_tokens=12, **sampling)


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_one_prompt_at_a_time(
    folder: Path, options: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt i has the seed ``--seed + i``, so equal prompts have answers of their own."""
    monkeypatch.setattr(prompts, "ROWS", rows)
    file = written(
        tmp_path / "p.jsonl", *({"prompt": text, "id": n} for n, text in enumerate(TEXTS))
    )
    actual = answers(folder, "--prompts", file, *options)
    own = [options if options == GREEDY else ("--seed", 3 + n) for n in range(len(TEXTS))]
    expected = [alone(folder, text, *each) for text, each in zip(TEXTS, own, strict=True)]
    assert [row["completion"] for row in actual] == expected
    assert [(row["prompt"], row["id"]) for row in actual] == [*zip(TEXTS, range(5), strict=True)]
    assert {row["finish"] for row in actual} <= {"stop", "length"}
    assert (expected[0] == expected[3]) == (options == GREEDY)
    one = run("generate", folder, TEXTS[1], *NEW, *own[1]).stdout
    assert one == TEXTS[1] + printable(expected[1]) + "\n"
    assert actual[1] == answers(folder, "--prompts", written(file, TEXTS[1]), *own[1])[0] | {
        "id": 1
    }


def test_every_option_reaches_each_prompt(folder: Path, tmp_path: Path) -> None:
    whole = alone(folder, TEXTS[0], *GREEDY)
    stop = next(letter for letter in whole[4:] if letter not in whole[:4] + "\ufffd\0")
    file = written(tmp_path / "p.jsonl", TEXTS[0], TEXTS[1])
    first = answers(folder, "--prompts", file, *GREEDY, "--stop", stop)[0]
    assert first["completion"] == whole[: whole.index(stop)]
    assert (first["finish"], first["tokens"] < 12) == ("stop", True)
    drawn = answers(folder, "--prompts", file, *SAMPLED)
    narrow = answers(folder, "--prompts", file, *SAMPLED, "--min-p", 1)
    assert narrow == answers(folder, "--prompts", file, *GREEDY) != drawn
    assert answers(folder, "--prompts", file, *GREEDY, "--cache-dtype", "int8")


def test_a_text_file_has_a_prompt_per_line(folder: Path, tmp_path: Path) -> None:
    expected = answers(folder, "--prompts", written(tmp_path / "p.jsonl", *TEXTS), *GREEDY)
    plain = "\n".join(TEXTS).encode()
    variants = {
        "unix.txt": plain + b"\n",
        "windows.txt": b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n",
        "blank lines": plain.replace(b"\n", b"\n\n \n"),
        "packed.txt.gz": gzip.compress(plain),
    }
    for name, data in variants.items():
        (tmp_path / name).write_bytes(data)
        assert answers(folder, "--prompts", tmp_path / name, *GREEDY) == expected
        if not name.endswith(".gz"):
            assert answers(folder, "--prompts", "-", *GREEDY, given=data) == expected
    named = written(tmp_path / "p.jsonl", *({"prompt": text} for text in TEXTS)).read_bytes()
    rows = b"\xef\xbb\xbf" + named.replace(b"\n", b"\r\n")
    assert answers(folder, "--prompts", "-", *GREEDY, given=rows) == expected
    (tmp_path / "one.txt").write_bytes(TEXTS[0].encode())
    assert answers(folder, "--prompts", tmp_path / "one.txt", *GREEDY) == expected[:1]


def test_chats(folder: Path, tmp_path: Path) -> None:
    """Messages have the chat template, up to the last question; texts have it with --chat."""
    file = tmp_path / "p.jsonl"
    shown = run("generate", folder, "Who?", "--chat", *GREEDY, *NEW).stdout
    answered = {"messages": [*CHAT, {"role": "assistant", "content": "You."}], "id": "\x7fö"}
    plain, text, own = answers(
        folder, "--prompts", written(file, answered, {"prompt": "Who?"}, CHAT), "--chat", *GREEDY
    )
    assert plain["completion"] == text["completion"] == own["completion"]
    assert printable(plain["completion"]) + "\n" == shown
    assert (plain["messages"], plain["id"]) == (answered["messages"], "\x7fö")
    assert text["prompt"] == "Who?"
    assert answers(folder, "--prompts", written(file, answered), *GREEDY) == [plain]
    brief = [{"role": "system", "content": "Be brief."}, *CHAT]
    with_system = answers(
        folder, "--prompts", written(file, CHAT), "--chat", "--system", "Be brief.", *GREEDY
    )
    (same,) = answers(folder, "--prompts", written(file, {"messages": brief}), *GREEDY)
    assert with_system[0]["completion"] == same["completion"] != plain["completion"]
    rows = {"text": "Who?", "user": "Eve"}, {"instruction": "Who?", "input": "Eve", "id": 1}
    asked = read_prompts(written(file, *rows))
    both = [{"role": "user", "content": "Who?\n\nEve"}]
    assert [(each.columns, each.content) for each in asked] == [(rows[0], "Who?"), (rows[1], both)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = read_prompts(written(file, {"messages": CHAT, "tools": tools}))
    assert [(each.content, each.tools) for each in asked] == [(CHAT, tools)]


def test_an_answer_is_written_when_all_earlier_ones_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt begins when another one ends; progress is on standard error."""
    monkeypatch.setattr(prompts, "ROWS", 1)
    monkeypatch.setattr(prompts, "SECONDS_BETWEEN_LINES", 0)
    events, step = list[str](), Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: events.append("step") or step(engine))
    monkeypatch.setattr(
        prompts, "echo", lambda text, err=False: events.append(str(text) if err else "answer")
    )
    file = written(tmp_path / "p.jsonl", *TEXTS)
    run("generate", folder, "--prompts", file, *GREEDY, *NEW)
    assert events.count("answer") == 5
    first, last = events.index("answer"), len(events) - events[::-1].index("answer")
    assert events[first:last].count("step") >= 4 * events[:first].count("step") > 0
    assert "1 of 5 prompts" in events


def test_an_interrupt_leaves_what_is_answered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "p.jsonl", *TEXTS)
    whole = answers(folder, "--prompts", file, *GREEDY)
    monkeypatch.setattr(prompts, "ROWS", 1)
    steps, step = list[None](), Engine.step

    def interrupted(engine: Engine) -> Any:
        steps.append(None)
        if len(steps) > whole[0]["tokens"] + whole[1]["tokens"] + 2:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("generate", folder, "--prompts", file, *GREEDY, *NEW)
    assert result.exit_code == 130
    assert [json.loads(line) for line in result.stdout.splitlines()] == whole[:2]


def test_a_prompt_that_fails_leaves_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has a token with a broken embedding; then one has more tokens than the cache."""
    model, asked = models.load(folder), [TEXTS[0], TEXTS[4], TEXTS[1]]
    file = written(tmp_path / "p.jsonl", *asked)
    whole = answers(folder, "--prompts", file, *GREEDY)
    others = set[int]()
    for text in (TEXTS[0], TEXTS[1]):
        prompt = np.array([model.tokenizer.encode(text)])
        others |= {*model.generate(prompt, max_new_tokens=12)[0].tolist()}
    token = next(each for each in model.tokenizer.encode(TEXTS[4]).tolist() if each not in others)
    model.parameters["model.embed_tokens.weight"][token] = np.nan
    model.save(tmp_path / "m")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / "m" / name).write_bytes((folder / name).read_bytes())
    with np.errstate(invalid="ignore"):
        result = run("generate", tmp_path / "m", "--prompts", file, *GREEDY, *NEW)
    assert result.exit_code == 1
    assert f"{file}:2: the logits of new token 0 contain NaN\n" in result.stderr
    assert "1 of 3 prompts failed; the messages above name them" in result.stderr
    failed = {"completion": "", "tokens": 0, "finish": "error"}
    expected = [whole[0], whole[1] | failed, whole[2]]
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected

    def small(model: Any, rows: int, tokens: int, cache_dtype: Any) -> Engine:
        return Engine(model, rows=rows, pages=60, page=1, cache_dtype=cache_dtype)

    monkeypatch.setattr(prompts, "engine_of", small)
    written(file, TEXTS[0], "Dög " * 30, TEXTS[1])
    result = run("generate", folder, "--prompts", file, *GREEDY, *NEW)
    assert result.exit_code == 1
    assert re.search(r"p\.jsonl:2: .*pages, and the engine has 60", result.stderr)
    expected[1] = {"prompt": "Dög " * 30} | failed
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected


ROW = b'{"prompt": "Who sees"}\n'
REFUSED: dict[str, tuple[bytes, tuple[Any, ...], str]] = {
    "empty": (b"", (), "p.jsonl has no prompt; write one per line"),
    "blank": (b"\n \r\n", (), "p.jsonl has no prompt; write one per line"),
    "cut": (ROW + b'{"prompt": "Who', (), "p.jsonl:2: is not JSON .*; write one object per line"),
    "no JSON": (ROW + b"Who sees\n", (), "p.jsonl:2: is not JSON .*; write one object per line"),
    "twice": (b'{"prompt": "a", "prompt": "b"}', (), "p.jsonl:1: .* has the key prompt twice"),
    "bytes": (ROW + b'{"prompt": "D\xf6g"}', (), "p.jsonl:2: is not UTF-8: byte 13 is 0xf6"),
    "number": (ROW + b"\n3\n", (), r'p.jsonl:3: is 3, .*; write \{"prompt": "..."\} or'),
    "no prompt": (ROW + b'{"id": 3}', (), r'p.jsonl:2: has no prompt; write \{"prompt": "..."\}'),
    "empty prompt": (ROW + b'{"prompt": ""}', (), "p.jsonl:2: prompt is empty; write a text, or"),
    "spaces": (b'{"prompt": " \\n"}', (), "p.jsonl:1: prompt is empty; write a text, or remove"),
    "no messages": (b'{"messages": []}', (), "p.jsonl:1: messages has no message; end it with"),
    "answer alone": (b'[{"role": "assistant", "content": "a"}]', (), "p.jsonl:1: messages has no"),
    "role": (b'[{"role": "bot", "content": "a"}]', (), "p.jsonl:1: .* has the role bot; choose"),
    "kind": (b'{"prompt": 3}', (), "p.jsonl:1: prompt is 3, not text; write prompt as a string"),
    "columns": (b'{"prompt": "a", "tokens": 1}', (), "p.jsonl:1: has the column tokens, .*rename"),
    "keywords": (b'{"messages": [{"role": "user", "content": "a"}],'
                 b' "chat_template_kwargs": {"a": 1}}', (), "p.jsonl:1: has chat_template_kwargs"),
    "mixed": (ROW + b'[{"role": "user", "content": "a"}]', (),
              "p.jsonl:1: is a text, and .*p.jsonl:2 has messages; add --chat"),
    "system": (b'[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]',
               ("--chat", "--system", "c"), "p.jsonl:1: has a system message; leave --system out"),
    "system alone": (ROW, ("--system", "c"), "--system requires --chat"),
    "both": (ROW, ("Who?",), "--prompts replaces PROMPT; leave one of them out"),
    "draft": (ROW, ("--draft", "mtp"), "--draft requires a PROMPT; leave it out"),
    "greedy": (ROW, ("--temperature", 0, "--seed", 3), "leave --seed out"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_model_is_loaded(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words, problem = REFUSED[name]
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    (tmp_path / "p.jsonl").write_bytes(data)
    result = run("generate", folder, *words, "--prompts", tmp_path / "p.jsonl", *NEW)
    assert_one_clear_error(result, "Error: ")
    assert re.search(problem, result.output), result.output
    assert not result.stdout


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prompts runs in one process only; give a PROMPT"):
        generate._check_engine({"draft": None}, "--prompts", alone=False)


@pytest.mark.parametrize(
    ("row", "problem"),
    [({"prompt": "Dög " * 200}, "which leaves no room for new tokens; make it shorter"),
     ({"messages": [*CHAT, {"role": "tool", "content": "a"}]}, "template")],
)  # fmt: skip
def test_what_is_refused_before_the_first_answer(
    row: Any, problem: str, folder: Path, tmp_path: Path
) -> None:
    file, own = written(tmp_path / "p.jsonl", TEXTS[0], row), tmp_path / "m"
    shutil.copytree(folder, own)
    refusal = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    (own / "chat_template.jinja").write_text(refusal + (own / "chat_template.jinja").read_text())
    result = run("generate", own, "--chat" if "messages" in row else "--seed=0", "--prompts", file)
    assert_one_clear_error(result, f"{file}:2: ")
    assert problem in result.output
    assert not result.stdout
