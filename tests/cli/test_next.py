"""Each command ends with the commands that may follow, which run as they are printed."""

import json
import shlex
from pathlib import Path

import click.testing
import pytest

from unsloth_cupy import models

from .test_cli import run

pytest.importorskip("gguf", reason="needs the extra `gguf`")

SMALL = ("--steps", 2, "--batch", 2, "--tokens", 32, "--evaluate-every", 2)
NEW = (*SMALL, "--vocabulary", 300, "--layers", 1, "--hidden", 32)


def follow(result: click.testing.Result) -> list[list[str]]:
    """Return the words of the commands that a command prints at its end."""
    assert result.exit_code == 0, result.output
    lines = result.stderr.partition("next:\n")[2].splitlines()
    return [shlex.split(line) for line in lines if line.startswith("  ")]


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
    assert ask == ["unsloth-cupy", "generate", str(out), "--chat"]
    assert run(*ask[1:], "What is 3?", "--max-new-tokens", 2).exit_code == 0
    assert merge == ["unsloth-cupy", "merge", str(out), f"{out}-merged"]
    (export_merged,) = follow(run(*merge[1:]))
    assert export_merged[2:4] == [f"{out}-merged", f"{out}-merged.gguf"]
    create, start = follow(run(*export[1:]))
    assert create == ["ollama", "create", "my-chat", "-f", str(tmp_path / "my chat.Modelfile")]
    assert start == ["ollama", "run", "my-chat"]
    assert run(*export_merged[1:]).exit_code == 0, "another file beside the first"
    Path(f"{out}-merged.gguf").unlink()
    assert follow(run(*export_merged[1:-1])) == [["llama-cli", "-m", f"{out}-merged.gguf"]]
    vocabulary = json.loads((base / "model" / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    ends = ids["<|endoftext|>"], ids["<|im_end|>"]
    for folder in (base / "model", out / "model", Path(f"{out}-merged")):
        assert models.load(folder).config.end_tokens == ends
