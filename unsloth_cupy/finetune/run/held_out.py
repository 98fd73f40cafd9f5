"""Prompts of the evaluation data of a run, for comparisons of its model with a file."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..data.records import Record, split
from ..data.sources import find_data
from ..data.text import Text
from .resume import read_settings

LONGEST = 2000  # characters of a prompt: longer texts take time and show nothing new


def held_out_prompts(run: Path, count: int) -> list[Any]:
    """Return prompts of a run's evaluation data: messages up to the last question, or texts.

    The list is empty if the folder is no run, or its data are elsewhere now.
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
        texts = map(_prompt, data.held_out or data.train)
    return [*islice((each for each in texts if each and len(str(each)) <= LONGEST), count)]


def _prompt(record: Record) -> Any:
    """Return the messages of a record up to the last answer, or its text."""
    if not record.messages:
        return record.prompt or record.answer
    messages = [*record.messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages
