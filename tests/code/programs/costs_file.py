"""Read and write ``costs.toml``, which has two parts, each written by its own program.

``[calls]``    costs of a call    python -m tests.code.programs.costs --write WHY [OP ...]
``[kernels]``  use of an SM       python -m tests.code.programs.budget --write [KERNEL ...]

``python -m tests.code.programs.costs --new`` adds the lines of new ops and kernels to both parts.
"""

import functools
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unsloth_cupy.files import atomic_path

FILE = Path(__file__).with_name("costs.toml")
PARTS = "calls", "kernels"


def texts() -> dict[str, str]:
    """Return the text of each part without its heading."""
    split = re.split(rf"^\[({'|'.join(PARTS)})\]$", FILE.read_text(encoding="utf-8"), flags=re.M)
    return {name: text.strip() for name, text in zip(split[1::2], split[2::2], strict=True)}


def read(part: str) -> dict[str, Any]:
    """Return the values of a part, which its readers share."""
    return dict(_parsed(FILE.read_text(encoding="utf-8"))[part])


@functools.lru_cache(maxsize=1)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def replace(part: str, lines: Iterable[str]) -> None:
    """Replace a part and keep the other byte for byte; a reader never sees a partial file."""
    whole = texts() | {part: "\n".join(lines)}
    with atomic_path(FILE) as partial:
        text = "\n".join(f"[{name}]\n{whole[name]}\n" for name in PARTS)
        partial.write_text(text, encoding="utf-8")


def order(line: tuple[str, Any]) -> list[Any]:
    """Return a sort key: words alphabetically, numbers in them by value."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", line[0])]


def by_architecture(by: dict[str, list[int]]) -> list[str]:
    """Return numbers as the table writes them: equal ones of several architectures once."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for arch in sorted(by, key=int):
        groups.setdefault(tuple(by[arch]), []).append(arch)
    return [f'"{" ".join(archs)}" = {list(values)}' for values, archs in groups.items()]


def reason_lines(reasons: dict[str, str]) -> list[str]:
    """Return reasons as the table writes them."""
    return [f"{name} = {json.dumps(why)}" for name, why in sorted(reasons.items())]
