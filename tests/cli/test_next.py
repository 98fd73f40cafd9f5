"""Each command ends with the commands that may follow, which run as they are printed."""

import json
import re
import shlex
import shutil
from pathlib import Path

import click.testing
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.chat import Chat

from .test_cli import assert_one_clear_error, run

pytest.importorskip("gguf", reason="needs the extra `gguf`")

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, TOKENIZER = GOLDEN / "models" / "llama", GOLDEN / "tokenizer" / "tokenizer.json"
SMALL = ("--steps", 2, "--batch", 2, "--tokens", 32, "--evaluate-every", 2)
NEW = (*SMALL, "--vocabulary", 300, "--layers", 1, "--hidden", 32)


def follow(result: click.testing.Result) -> list[list[str]]:
    """Return the words of the commands that a command prints at its end."""
    assert result.exit_code == 0, result.output
    lines = result.stderr.partition("next:\n")[2].splitlines()
    return [shlex.split(line) for line in lines if line.startswith("  ")]


@pytest.mark.parametrize(
    ("golden", "head", "options", "words"),
    [
        ("models/llama", "sequence_classification", "", "is 'sequence_classification'"),
        ("models/llama", "none", "--chat", "the head of this model is 'none'"),
        ("encoders/bert", None, "", "generate: this bert is an encoder; pass a language model"),
        ("models/llama", None, "--draft mtp", "this llama has no draft head"),
        ("models/llama", None, "--draft mtp --temperature 1", "must be None: draft heads are for"),
        ("models/deepseek_v32", None, "--cache-dtype int8", "stores its keys in latent rows"),
    ],
)
def test_a_refusal_to_generate_comes_before_the_prompt_is_printed(
    golden: str, head: str | None, options: str, words: str, tmp_path: Path
) -> None:
    labels = 2 if head == "sequence_classification" else None
    model = models.load(GOLDEN / golden, head=head, labels=labels)
    model.save(tmp_path)
    shutil.copy(TOKENIZER, tmp_path)
    result = run("generate", tmp_path, "Hi", *options.split())
    assert_one_clear_error(result, words)
    assert not result.stdout
    if options.endswith("int8"):  # as at the call of a model, not at its first piece
        model.tokenizer = models.Tokenizer(tmp_path)
        with pytest.raises(ConfigError, match=f"^stream_text: .*{words}"):
            model.stream_text("Hi", cache_dtype="int8")


def test_the_answers_of_a_pair_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    shown = run("data", path, "--method", "dpo").stdout
    assert shown.index("pairs.jsonl:1, chosen\n0?") < shown.index("pairs.jsonl:1, rejected\n0?")
    report = json.loads(run("data", path, "--method", "dpo", "--json").stdout)
    assert [each["side"] for each in report["examples"]][:2] == ["chosen", "rejected"]


@pytest.mark.slow
def test_from_chats_to_a_file(tmp_path: Path) -> None:
    """The chat's own token ends a text in each folder and file on the way."""
    rows = (
        [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"It is {n}."},
        ]
        for n in range(40)
    )
    file, base, out = tmp_path / "chat.jsonl", tmp_path / "base", tmp_path / "my chat"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    full = run("finetune", "--text", file, *NEW, "--out", base)
    assert [words[1] for words in follow(full)] == ["generate", "export"]
    done = run("finetune", base, "--text", file, *SMALL, "--lora", 4, "--out", out)
    ask, merge, export = follow(done)
    shown = done.stdout.partition("answer to the first evaluation prompt")[2]
    number = re.search(r"What is (\d+)\?", shown)
    assert number is not None
    question = Chat(out / "model").text([{"role": "user", "content": number[0]}], answer=True)
    assert shown.index(question) < shown.index("--- answer"), "set apart, with its marks"
    assert ask == ["unsloth-cupy", "generate", str(out), "--chat"]
    assert run(*ask[1:], "What is 3?", "--max-new-tokens", 2).exit_code == 0
    assert merge == ["unsloth-cupy", "merge", str(out), f"{out}-merged"]
    ask_merged, export_merged = follow(run(*merge[1:]))
    assert ask_merged == ["unsloth-cupy", "generate", f"{out}-merged", "--chat"]
    assert export_merged[2:4] == [f"{out}-merged", f"{out}-merged.gguf"]
    create, start, verify = follow(run(*export[1:]))
    assert create == ["ollama", "create", "my-chat", "-f", str(tmp_path / "my chat.Modelfile")]
    assert start == ["ollama", "run", "my-chat"]
    assert verify == ["unsloth-cupy", "verify", f"{out}.gguf", "--against", str(out)]
    same = run(*verify[1:])
    assert same.exit_code == 0, same.output
    assert run(*export_merged[1:]).exit_code == 0, "another file beside the first"
    Path(f"{out}-merged.gguf").unlink()
    start, _ = follow(run(*export_merged[1:-1]))
    assert start == ["llama-cli", "-m", f"{out}-merged.gguf"]
    vocabulary = json.loads((base / "model" / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    ends = ids["<|endoftext|>"], ids["<|im_end|>"]
    for folder in (base / "model", out / "model", Path(f"{out}-merged")):
        assert models.load(folder).config.end_tokens == ends


@pytest.mark.parametrize("method", ["sft", "classify"])
def test_a_file_that_is_held_out_is_evaluated_next(method: str, tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | {"vocab_size": 1024}
    models.create(config, seed=0).save(tmp_path / "base")
    shutil.copy(TOKENIZER, tmp_path / "base")
    rows = [{"text": f"{n} is a number", "label": n % 2} for n in range(20)]
    for name in ("rows", "held"):
        text = "".join(json.dumps(row if method != "sft" else {"text": row["text"]}) + "\n"
                       for row in rows)  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text(text)
    held, out = tmp_path / "held.jsonl", tmp_path / "run"
    done = run(
        "finetune", tmp_path / "base", "--text", tmp_path / "rows.jsonl", "--eval", held, *SMALL,
        "--method", method, "--out", out,
    )  # fmt: skip
    (words,) = (words for words in follow(done) if words[1] == "evaluate")
    assert words[1:] == ["evaluate", str(out), "--data", str(held)]
    assert run(*words[1:]).exit_code == 0


def test_a_mixture_that_no_file_can_hold_is_named_before_training(tmp_path: Path) -> None:
    config = json.loads((MODEL.parent / "qwen3_moe" / "config.json").read_text())
    for normalizes in (True, False):
        folder = tmp_path / str(normalizes)
        models.create(config | {"norm_topk_prob": normalizes, "vocab_size": 1024}, seed=0).save(
            folder
        )
        shutil.copy(TOKENIZER, folder)
        (tmp_path / "text.txt").write_text("a text of some words. " * 99)
        done = run("finetune", folder, "--text", tmp_path / "text.txt", *SMALL, "--out",
                   tmp_path / f"run-{normalizes}")  # fmt: skip
        why = "cannot be exported to GGUF for llama.cpp: llama.cpp's qwen3moe chooses experts"
        before = done.stderr.partition("step 0")[0]
        assert (why in before and "(norm_topk_prob)" in before) != normalizes
        assert ("export" in {words[1] for words in follow(done)}) == normalizes
