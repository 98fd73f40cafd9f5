"""Files of other people: what they hold reaches no terminal as a command, and holds no reader."""

import json
import os
import shutil
import signal
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError, printable
from unsloth_cupy.finetune.data.tokenizer import load_tokenizer
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.machine import console
from unsloth_cupy.parallel._peers import Peers

from .test_cli import GOLDEN, LLAMA, assert_one_clear_error, run

EVIL = "\x1b[31m\x1b]0;title\x07\x9b2J\x85\u202e\u2066\u2028\r\b\x7f"
ESCAPED = r"\x1b"
SECONDS, MEMORY = 2.0, 200 << 20

# ---- control characters ------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    shutil.copytree(LLAMA, folder)
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", folder)
    return folder


def changed(folder: Path, name: str, **values: Any) -> Path:
    """Write other values into a JSON file of a copy of the model's folder."""
    path = model_folder(folder) / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))
    return folder


def says(folder: Path) -> Path:
    """A model whose every token is written as control characters."""
    vocabulary = json.loads((LLAMA / "config.json").read_text())["vocab_size"]
    words = {f"{EVIL}{number}": number for number in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": f"{EVIL}0"}
    empty = dict.fromkeys(("normalizer", "post_processor", "decoder"))
    empty["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    path = model_folder(folder) / "tokenizer.json"
    path.write_text(json.dumps({**tokenizer, **empty, "model": model}))
    return folder


def lines(path: Path, *values: Any) -> Path:
    path.write_text("\n".join([json.dumps(value) for value in values] + [""]))
    return path


def with_tensor(folder: Path) -> Path:
    path = model_folder(folder) / "model.safetensors"
    save_file({**load_file(path), EVIL: np.ones(1, np.float32)}, path)
    return folder


def with_index(folder: Path, file: str) -> Path:
    index = {"weight_map": {"model.norm.weight": file}}
    (model_folder(folder) / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def adapter(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(LLAMA)} | values
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def old_run(folder: Path, **settings: Any) -> Path:
    (folder / "checkpoint-00000001").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"steps": 2} | settings))
    return folder


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


UNFIT = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", EVIL]]}
WORDS = {  # words of a command, made in a folder
    "info": lambda _: ["info", EVIL],
    "check": lambda _: ["check", EVIL],
    "bench": lambda _: ["bench", EVIL],
    "bench, picture": lambda at: ["bench", "relu2", "--plot", at / EVIL / "a.png"],
    "no command": lambda _: [EVIL],
    "no option": lambda _: [f"--{EVIL}"],
    "no device": lambda _: ["generate", LLAMA, "--device", EVIL],
    "no size": lambda _: ["finetune", "--limit-memory", EVIL],
    "no number": lambda _: ["finetune", "--steps", EVIL],
    "no folder": lambda at: ["generate", at / EVIL],
    "no config": lambda at: ["plan", at / EVIL],
    "plan": lambda at: ["plan", model_folder(at / EVIL)],
    "plan, model": lambda at: ["plan", changed(at / "m", "config.json", model_type=EVIL)],
    "plan, activation": lambda at: ["plan", changed(at / "m", "config.json", hidden_act=EVIL)],
    "plan, key": lambda at: ["plan", changed(at / "m", "config.json", **{EVIL: 1})],
    "plan, value": lambda at: ["plan", changed(at / "m", "config.json", other=EVIL)],
    "plan, picture": lambda at: ["plan", LLAMA, "--plot", at / EVIL / "a.png"],
    "precompile": lambda at: [
        "precompile", changed(at / EVIL, "config.json", hidden_size=EVIL), "--arch", "sm_90",
    ],
    "explain, op": lambda _: ["explain", EVIL],
    "explain": lambda at: ["explain", changed(at / EVIL, "config.json", hidden_act=EVIL)],
    "explain, card": lambda at: ["explain", "relu2", "--device", written(at / f"{EVIL}.json", "[")],
    "evaluate": lambda at: ["evaluate", at / EVIL, "--data", at / "a.txt"],
    "evaluate, data": lambda at: ["evaluate", says(at / "m"), "--data", at / f"{EVIL}.txt"],
    "teach": lambda at: ["teach", at / EVIL, "--data", at / "a.jsonl"],
    "data, pairs": lambda at: [
        "data", "--method", "dpo", written(at / "p.jsonl", json.dumps({EVIL: 1})),
    ],
    "export": lambda at: ["export", changed(at / EVIL, "config.json", model_type=EVIL), at / "f"],
    "merge": lambda at: ["merge", changed(at / EVIL, "config.json", model_type=EVIL), at / "f"],
    "merge, adapter": lambda at: [
        "merge", adapter(at / "m", base_model_name_or_path=EVIL), at / "f",
    ],
    "verify": lambda at: ["verify", at / EVIL, "--against", LLAMA],
    "verify, prompts": lambda at: [
        "verify", LLAMA, "--against", LLAMA, "--prompts", at / f"{EVIL}.jsonl",
    ],
    "serve": lambda at: ["serve", at / EVIL],
    "serve, adapter": lambda at: ["serve", says(at / "m"), "--adapter", f"a={at / EVIL}"],
    "merge, out": lambda at: ["merge", LLAMA, at / EVIL],
    "export, file": lambda at: ["export", LLAMA, at / EVIL / "f.gguf"],
    "export, tokens": lambda at: [
        "export", changed(at / "m", "tokenizer.json", model={"type": EVIL}), at / "f.gguf",
    ],
    "generate, tokens": lambda at: ["generate", says(at / "m"), "Hi", "--max-new-tokens", 2],
    "generate, prompt": lambda at: ["generate", says(at / "m"), EVIL],
    "generate, tensor": lambda at: ["generate", with_tensor(at / "m"), "Hi"],
    "generate, index": lambda at: ["generate", with_index(at / "m", f"../{EVIL}"), "Hi"],
    "generate, file": lambda at: ["generate", with_index(at / "m", f"{EVIL}.safetensors"), "Hi"],
    "plan, adapter": lambda at: ["plan", adapter(at / "m", peft_type=EVIL)],
    "plan, base": lambda at: ["plan", adapter(at / "m", base_model_name_or_path=EVIL)],
    "generate, end": lambda at: [
        "generate", changed(at / "m", "generation_config.json", eos_token_id=EVIL), "Hi",
    ],
    "generate, template": lambda at: [
        "generate", "--chat", changed(at / "m", "tokenizer_config.json", chat_template=
        f"{{{{ raise_exception({EVIL!r}) }}}}"), "Hi",
    ],
    "generate, broken template": lambda at: [
        "generate", "--chat",
        changed(at / "m", "tokenizer_config.json", chat_template="{% " + EVIL), "Hi",
    ],
    "generate, tokenizer": lambda at: [
        "generate", changed(at / "m", "tokenizer.json", model=UNFIT), "Hi"
    ],
    "data": lambda at: ["data", lines(at / "a.jsonl", *({"text": n + EVIL} for n in "abc"))],
    "data, column": lambda at: [
        "data", lines(at / "a.jsonl", *({"text": n, EVIL: 1} for n in "abc")),
    ],
    "data, name": lambda at: ["data", written(at / f"{EVIL}.csv", '{"text": "a"}')],
    "data, folder": lambda at: ["data", changed(at / EVIL, "state.json", _data_files=[EVIL])],
    "data, JSON": lambda at: ["data", written(at / "a.json", EVIL)],
    "finetune, tokens": lambda at: [
        "finetune", says(at / "m"), "--text", written(at / "a.txt", "some words " * 40),
        "--steps", 1, "--tokens", 4, "--out", at / EVIL,
    ],
    "finetune, text": lambda at: ["finetune", "--text", written(at / f"{EVIL}.txt", " ")],
    "finetune, role": lambda at: [
        "finetune", "--text", lines(at / "a.jsonl", {"messages": [{"role": EVIL, "content": ""}]}),
    ],
    "finetune, key": lambda at: ["finetune", "--text", lines(at / "a.jsonl", {EVIL: EVIL})],
    "finetune, file": lambda at: ["finetune", "--text", lines(at / f"{EVIL}.jsonl", 1)],
    "finetune, template": lambda at: [
        "finetune", changed(at / "m", "tokenizer_config.json", chat_template=
        "{{ raise_exception(messages[0].content) }}"), "--out", at / "run", "--text",
        lines(at / "a.jsonl", *({"messages": [{"role": "user", "content": f"{EVIL}{n}"},
        {"role": "assistant", "content": "!"}]} for n in range(3))),
    ],
    "finetune, config": lambda at: [
        "finetune", "--config", written(at / "c.json", json.dumps({EVIL: 1})),
    ],
    "finetune, value": lambda at: [
        "finetune", "--config",
        written(at / "c.json", json.dumps({"mixed_precision": {"compute_dtype": EVIL}})),
    ],
    "finetune, run": lambda at: [
        "finetune", "--text", LONG, "--out", old_run(at / EVIL, dtype=EVIL), "--steps", 2,
    ],
}  # fmt: skip
LONG = GOLDEN / "tokenizer" / "text.txt"


@pytest.mark.parametrize("place", WORDS)
def test_no_control_character_reaches_the_terminal(place: str, tmp_path: Path) -> None:
    """Of names, messages and texts in files, folders and words of the command."""
    words: Callable[[Path], list[Any]] = WORDS[place]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = run(*words(tmp_path)).output
    actual += "".join(str(each.message) for each in caught)
    assert printable(actual) == actual
    assert ESCAPED in actual, "the place is one that is printed"


def test_every_command_is_walked() -> None:
    assert {place.partition(",")[0] for place in WORDS} >= {*group.commands}


def test_messages_of_other_ranks_are_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    rank: Any = SimpleNamespace(rank=1, failing=False, _send_to_all=lambda *_: None)
    Peers._fail(rank, ConfigError, OSError(EVIL), None)
    actual = capsys.readouterr().err
    assert printable(actual) == actual
    assert ESCAPED in actual


def test_errors_and_tables_escape_and_keep_lines() -> None:
    assert str(ConfigError(f"a\n\tb{EVIL}")) == "a\n\tb" + printable(EVIL)
    assert printable("a\r\n\tö€😀\u200d\ud800") == "a\\r\n\tö€😀\u200d\\ud800"
    seen = console(markup=False)
    with seen.capture() as captured:
        seen.print(EVIL)
    actual = captured.get()
    assert printable(actual) == actual


# ---- what holds a reader ------------------------------------------------------------------------
@contextmanager
def bounded() -> Iterator[None]:
    """Interrupt what is inside after a while, and fail if it took more memory than allowed."""

    def late(*_: Any) -> None:
        pytest.fail(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 5 * SECONDS)  # the machine may be busy
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def piped(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def endless(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    return path


READ = {  # commands that read a file of a model's folder m
    "config.json": "plan m",
    "generation_config.json": "generate m Hi",
    "model.safetensors": "generate m Hi",
    "tokenizer.json": "generate m Hi",
    "tokenizer_config.json": "generate m Hi",
    "chat_template.jinja": "generate m Hi --chat",
    "adapter_config.json": "plan m",
    "a.txt": "finetune --text m/a.txt",
    "a.jsonl": "finetune --text m/a.jsonl",
    "a.json": "finetune --config m/a.json",
    "a.toml": "finetune --config m/a.toml",
    "card.json": "explain relu2 --device m/card.json",
}


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
@pytest.mark.parametrize("kind", [piped, endless])
@pytest.mark.parametrize("name", READ)
def test_pipes_and_devices_are_no_files(
    name: str, kind: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind(model_folder(tmp_path / "m") / name)
    with bounded():
        result = run(*READ[name].split())
    assert_one_clear_error(result, f"{name} is a pipe or a device")


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 2**31 - 2},
        {"hidden_size": 2**31 - 2, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["generate m Hi", "finetune m --text a.jsonl --out run"])
def test_sizes_that_the_weights_do_not_have_take_no_memory(
    command: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", *({"text": f"the cat {number}"} for number in range(9)))
    changed(tmp_path / "m", "config.json", **{"head_dim": None} | sizes)
    with bounded():
        result = run(*command.split())
    assert_one_clear_error(result, "m")


BOMB = 20 << 20
MANY = {"rope_type": "default"} | dict.fromkeys(map(str, range(20_000)), 1)


@pytest.mark.parametrize(
    ("name", "text", "command", "said"),
    [
        ("a.jsonl", '{"text": "' + "a" * BOMB + '"}', "finetune --text m/a.jsonl", "a.jsonl:1"),
        ("a.jsonl", "[" + "[]," * (BOMB // 3) + "1]", "finetune --text m/a.jsonl", "a.jsonl:1"),
        ("config.json", '{"a": [' + "{}," * (BOMB // 3) + "1]}", "plan m", "config.json"),
        ("tokenizer_config.json", '{"a":"' + "a" * BOMB, "generate m Hi --chat", "MiB"),
        ("a.toml", "[" + "a." * 3000 + "a]", "finetune --config m/a.toml", "a.toml"),
        (
            "a.toml", "mixed_precision.compute_dtype" + ".a" * 5000 + "=1",
            "finetune --config m/a.toml", "a.toml",
        ),
        (
            "config.json",
            json.dumps(json.loads((LLAMA / "config.json").read_text()) | {"rope_scaling": MANY}),
            "plan m", "more",
        ),
    ],
    ids=range(7),
)  # fmt: skip
def test_files_that_swell_are_refused(
    name: str,
    text: str,
    command: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(model_folder(tmp_path / "m") / name, text)
    with bounded():
        result = run(*command.split())
    assert_one_clear_error(result, said)
    assert len(result.stderr) < 2000


PANICS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"decoder": {"type": "Strip", "content": "a", "start": 99999, "stop": 9999}},
    {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
     "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}},
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}},
]  # fmt: skip


def used(folder: Path) -> str:
    tokenizer = load_tokenizer(folder)
    return str(tokenizer.decode(tokenizer.encode("some text, aaaa!").ids))


@pytest.mark.parametrize("values", PANICS, ids=lambda values: next(iter(values)))
def test_a_tokenizer_that_panics_is_broken(values: dict[str, Any], tmp_path: Path) -> None:
    """When it is loaded, encodes or decodes: a panic of Rust is no Exception."""
    folder = changed(tmp_path / "m", "tokenizer.json", **values)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is broken"):
        used(folder)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "3", "[" * 9999, '{"loss": 1}', '{"step": "1"}', '{"step": 1, "loss": "x"}',
        '{"step": 1, "loss": 2.0}', '{"step": 1, "held_out_loss": 2.0}', '{"step": [1]}',
    ],
)  # fmt: skip
def test_a_bad_line_of_a_log_is_named(line: str, tmp_path: Path) -> None:
    written(tmp_path / "log.jsonl", f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ConfigError, match=r"log\.jsonl:2 is broken; remove this line"):
        RunFolder(tmp_path).lines()


def test_a_broken_state_of_a_run_is_named(tmp_path: Path) -> None:
    """Settings of types that no run writes."""
    run_folder = old_run(tmp_path / "run", steps="many", text_bytes=[], base=[3], epochs={})
    result = run("finetune", "--text", LONG, "--out", run_folder, "--steps", 2)
    assert_one_clear_error(result, "run")
