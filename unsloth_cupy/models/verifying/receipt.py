"""The receipt of a comparison: one small file, and one key of a GGUF file.

    {"version": "0.2.0", "same": true, "difference": 0.059, "bound": 0.34, ...}

It has the fields of ``Verification``; prompts are not in it.  In a GGUF file the key has a fixed
length, because it is filled in when the tensors are written and compared.
"""

import dataclasses
import json
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...errors import ConfigError
from ...files import atomic_path
from .sides import Side, file_side, folder_side
from .verify import AGAIN, PROMPTS, Verification, compare

KEY = "unsloth_cupy.verified"
BYTES = 1024  # of the value, filled up with spaces
CUT = 200  # most characters of a text in it


def plain(result: Verification | str) -> dict[str, Any]:
    """Return a result, or why there is none, as JSON values; an infinite number is None."""
    if isinstance(result, str):
        return {"version": __version__, "same": None, "cause": result}
    values = dataclasses.asdict(result)
    endless = [n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
    return {"version": __version__} | values | dict.fromkeys(endless)


def checked(trained: Side, path: Path) -> Verification | str:
    """Return the comparison of a new file or folder on two prompts; or why there is none."""
    try:
        own = folder_side("verify", path) if path.is_dir() else file_side(path)
        return compare(trained, own, PROMPTS, again=AGAIN // 16)  # an export is to remain fast
    except ConfigError as error:  # such as a tokenizer without these characters
        return str(error)


def in_words(result: Verification | str) -> str:
    """Return a line for the report of an export or a merge."""
    if isinstance(result, str):
        return f"not verified: {result}"
    return f"verified: {result}" if result.same else f"not as trained: {result}"


def write_receipt(path: Path, result: Verification | str) -> None:
    """Write the receipt as a file."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(plain(result), indent=2) + "\n", encoding="utf-8")


def fill_in(file: Path, result: Verification | str) -> None:
    """Write the receipt into the key of a GGUF file that has ``BYTES`` spaces."""
    short = {n: v[:CUT] if isinstance(v, str) else v for n, v in plain(result).items()}
    while len(value := json.dumps(short).encode("ascii")) > BYTES:  # escapes have 6 characters
        short = {n: v[: len(v) // 2] if isinstance(v, str) else v for n, v in short.items()}
    # a field: its key, the type 8 of a string, the length and the text
    place = KEY.encode() + struct.pack("<IQ", 8, BYTES)
    with file.open("r+b") as out, mmap.mmap(out.fileno(), 0) as data:
        start = data.find(place + b" " * BYTES) + len(place)
        data[start : start + BYTES] = value.ljust(BYTES)
