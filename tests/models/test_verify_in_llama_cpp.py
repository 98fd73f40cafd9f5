"""llama.cpp itself has the texts, tokens and log-probabilities of ``verify``'s reader."""

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.models.gguf.as_read import ENDS, GgufAsRead
from unsloth_cupy.models.verifying.verify import verified

from .exported import byte_level, make, write_tokenizer

xllamacpp = pytest.importorskip("xllamacpp", reason="needs the extra `peers`", exc_type=ImportError)
pytest.importorskip("gguf", reason="needs the extra `gguf`")
from .test_gguf_in_llama_cpp import FAMILIES, Loaded  # noqa: E402
from .test_verify import FAMILIES as CHATS  # noqa: E402
from .test_verify import PROMPTS, TEMPLATE, TEMPLATES, chat_folder  # noqa: E402

pytestmark = pytest.mark.slow  # one in seven, each in its turn


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bitnet"])
def test_every_written_family(name: str, tmp_path: Path) -> None:
    make(tmp_path / "m", FAMILIES[name])
    for kind in ("f32", "q8_0"):
        models.export_gguf(tmp_path / "m", tmp_path / f"{kind}.gguf", kind=kind)
        file, prompts = tmp_path / f"{kind}.gguf", ["the inn, the tin", "etain"]
        result = verified(file, tmp_path / "m", prompts, beside=True)
        if "minicpm3" in name and kind == "f32":  # as a note of the export says
            assert result.same or "epsilon" in str(result.cause)
            continue
        # llama.cpp's rounded router may choose other experts
        assert result.same or ("mixed" in name and result.stage == "logits"), result
        assert kind != "f32" or result.same, result
        assert "xllamacpp" in result.compared


@pytest.mark.parametrize("family", CHATS)
def test_chats(family: str, tmp_path: Path) -> None:
    """Texts of the template, without the begin token that the file adds, and their tokens."""
    chat_folder(tmp_path / "m", CHATS[family], TEMPLATES.get(family, TEMPLATE))
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    messages = [{"role": "system", "content": "in"}, {"role": "user", "content": "the"}]
    result = verified(tmp_path / "m.gguf", tmp_path / "m", [*PROMPTS[:2], messages], beside=True)
    assert result.same or result.stage == "end", result


@pytest.mark.parametrize("inner", [False, True])
def test_tokens_at_which_it_stops(inner: bool, tmp_path: Path) -> None:
    """llama.cpp recognizes these texts in any file, and no others that look like an end."""
    others = ["<|eot|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<|eos|>", "<|end_of_turn|>"]
    left_out = {"</s>"} if inner else {"</s>", "<|return|>", "<|flush|>"}
    texts = [*sorted(ENDS - left_out), *others]
    make(tmp_path / "m", {"model_type": "llama"})
    values = byte_level(97)
    entry, start = values["added_tokens"][0], len(values["model"]["vocab"])
    for number, text in enumerate(texts, start):
        values["added_tokens"].append({**entry, "id": number, "content": text})
    write_tokenizer(tmp_path / "m", values, eos_token="</s>")
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    program, expected = Loaded(tmp_path / "m.gguf").server, GgufAsRead(tmp_path / "m.gguf").ends
    for number, text in enumerate(texts, start):
        forced: Any = {"prompt": [5, 6], "n_predict": 2, "temperature": 0.0}
        answer = program.handle_completions(forced | {"logit_bias": [[number, 1e6]]})
        stops = answer["choices"][0]["finish_reason"] == "stop"
        assert stops == (number in expected), text
    assert len(expected) == len(ENDS) - len(left_out) + 1 - inner


def test_the_command_runs_llama_cpp(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", CHATS["llama"])
    models.export_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    words = ["verify", str(tmp_path / "m.gguf"), "--against", str(folder), "--with", "llama.cpp"]
    done = click.testing.CliRunner().invoke(group, [*words, "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    assert values["same"]
    assert "xllamacpp" in values["compared"]
    words[1] = str(folder)
    done = click.testing.CliRunner().invoke(group, words)
    assert (done.exit_code, "reads GGUF files" in done.output) == (2, True)
