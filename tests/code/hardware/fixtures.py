"""The primitives that GPUs have confirmed: date, device, and a digest of launch and result."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .primitives import PRIMITIVES, Launch, Tile, launch

ROOT = Path(__file__).resolve().parents[3]
FILE = Path(__file__).with_name("fixtures.json")


class Fixture(NamedTuple):
    """A primitive whose result on a GPU was equal to that of plain arithmetic."""

    date: str
    device: str
    digest: str


def digest(primitive: Launch) -> str:
    """Return a hash of a launch: its sizes, its arguments, and the expected results."""
    sizes = [primitive.file, primitive.kernel, primitive.grid, primitive.block, primitive.shared]
    total = hashlib.sha256(repr(sizes).encode())
    for arg in (*primitive.args, *primitive.expected.values()):
        tile = arg if isinstance(arg, Tile) else Tile(np.asarray(arg), ())
        total.update(repr(tile[1:]).encode() + np.ascontiguousarray(tile.array).tobytes())
    return total.hexdigest()[:16]


def read() -> dict[str, Fixture]:
    """Return the fixtures by primitive."""
    if not FILE.exists():
        return {}
    return {name: Fixture(**fields) for name, fields in json.loads(FILE.read_text()).items()}


def write(fixtures: dict[str, Fixture]) -> None:
    """Write fixtures to the file, in the order of the primitives."""
    order = sorted(fixtures, key=list(PRIMITIVES).index)
    kept = {name: fixtures[name]._asdict() for name in order}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


def table() -> str:
    """Return a Markdown table of all primitives: date and GPU of the confirmation, if any."""
    fixtures = read()
    lines = ["| primitive | from sm | confirmed on a GPU |", "|---|---|---|"]
    for name, (capability, _) in PRIMITIVES.items():
        kept = fixtures.get(name)
        current = kept is not None and kept.digest == digest(launch(name))
        status = f"{kept.date}, {kept.device}" if kept and current else "unconfirmed"
        lines.append(f"| {name} | {capability} | {status} |")
    return "\n".join(lines)
