"""``unsloth-cupy verify``: compares a file with the trained model, and names the cause."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError, UnslothCupyError
from ..finetune.data.records import Record, split
from ..finetune.data.sources import find_data
from ..finetune.data.text import Text
from ..finetune.run.resume import read_settings
from ..machine import echo
from ..models.verifying.receipt import plain
from ..models.verifying.verify import verified
from .options import BASE, FILE, option
from .prompts import read_prompts

PROMPTS = 20  # of the run's evaluation data
LONGEST = 2000  # characters of a prompt: longer texts take time and show nothing new


class Unreadable(click.ClickException):
    """The error of a target, or of the trained model, that cannot be read."""

    exit_code = 2


@click.command()
@click.argument("target", metavar="TARGET", type=FILE)
@click.option(
    "--against", type=FILE, required=True, metavar="FOLDER",
    help="Folder of the run, the adapter or the model that was trained.",
)  # fmt: skip
@option("--prompts", FILE, "File of prompts: a text or JSON value per line.  [default: 20"
        " evaluation prompts of the run, or two built-in texts]")  # fmt: skip
@option("--base", FILE, BASE)
@click.option(
    "--with", "program", type=click.Choice(["llama.cpp"]),
    help="Also run the prompts in llama.cpp itself (pip install xllamacpp).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    target: Path,
    against: Path,
    prompts: Path | None,
    base: Path | None,
    program: str | None,
    as_json: bool,
) -> None:
    """Compare TARGET with the model that was trained, and name the cause of a difference.

    TARGET is a GGUF file, which is computed as llama.cpp computes it, an Ollama Modelfile, or a
    folder: a merged model or an adapter. Both sides compute the same prompts: text, tokens,
    embedding, each block, logits, the greedy answer, and where it ends. The command prints the
    first of these stages that differs, by how much, whether rounding of the file's types explains
    it, the cause and the cure.

    Exit status: 0 if all stages are the same within rounding, 1 if not, 2 if TARGET cannot be read.
    """
    try:
        asked = [] if prompts is None else [each.content for each in read_prompts(prompts)]
        texts = asked or held_out_prompts(against, PROMPTS) or None
        result = verified(target, against, texts, base, beside=program is not None)
    except (UnslothCupyError, OSError) as error:
        raise Unreadable(str(error)) from error
    echo(json.dumps(plain(result)) if as_json else result)
    if not result.same:
        raise SystemExit(1)


def held_out_prompts(run: Path, count: int) -> list[Any]:
    """Return prompts of a run's evaluation data: messages up to the last question, or texts.

    The list is empty if the folder is not a run, or if its data have been moved.
    """
    if not (run / "settings.json").is_file():
        return []
    values = read_settings(run / "settings.json")
    held, file = values.get("eval"), values.get("text_file")
    path, method = held if isinstance(held, str) else file, values.get("method", "sft")
    if not isinstance(path, str) or not Path(path).exists():
        return []
    try:
        data = find_data(path, tuple(values.get("ignore") or ()), method=method).read()
    except ConfigError:
        return []
    if isinstance(data, Text):
        texts: Iterator[Any] = (part.strip() for part in data.held_out.split("\n\n"))
    else:
        data = split(data, held) if isinstance(held, float) else data
        texts = map(_question, data.held_out or data.train)
    return [*islice((each for each in texts if each and len(str(each)) <= LONGEST), count)]


def _question(record: Record) -> Any:
    """Return the messages of a record up to the last answer, or its text."""
    if not record.messages:
        return record.prompt or record.answer
    messages = [*record.messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages
