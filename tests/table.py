"""What ops cost, in one table, ``costs.toml``: two parts, each of a program that leaves the other.

``[calls]``    what a call of an op does            python -m tests.costs --write WHY [OP ...]
``[kernels]``  what a kernel takes of an SM         python -m tests.budget --write [KERNEL ...]

``python -m tests.costs --new`` adds what is new to both.
"""

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unsloth_cupy.files import written_beside

FILE = Path(__file__).with_name("costs.toml")
PARTS = "calls", "kernels"


def texts() -> dict[str, str]:
    """Return the text of each part, under its heading."""
    found = re.split(rf"^\[({'|'.join(PARTS)})\]$", FILE.read_text(encoding="utf-8"), flags=re.M)
    return {name: text.strip() for name, text in zip(found[1::2], found[2::2], strict=True)}


def read(part: str) -> dict[str, Any]:
    """Return what a part holds."""
    return dict(tomllib.loads(FILE.read_text(encoding="utf-8"))[part])


def replace(part: str, lines: Iterable[str]) -> None:
    """Replace a part, and leave the other to the letter; the file is whole at any time."""
    whole = texts() | {part: "\n".join(lines)}
    with written_beside(FILE) as partial:
        text = "\n".join(f"[{name}]\n{whole[name]}\n" for name in PARTS)
        partial.write_text(text, encoding="utf-8")


def order(line: tuple[str, Any]) -> list[Any]:
    """Return what sorts lines by their words, and numbers in them by size."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", line[0])]


def by_architecture(by: dict[str, list[int]]) -> list[str]:
    """Return numbers as the table keeps them: those of several architectures once."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for arch in sorted(by, key=int):
        groups.setdefault(tuple(by[arch]), []).append(arch)
    return [f'"{" ".join(archs)}" = {list(found)}' for found, archs in groups.items()]


def reason_lines(reasons: dict[str, str]) -> list[str]:
    """Return reasons as the table keeps them."""
    return [f"{name} = {json.dumps(why)}" for name, why in sorted(reasons.items())]
