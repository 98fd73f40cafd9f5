"""What GPUs have confirmed: a day, a device and a digest of launch and result per primitive."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .primitives import PRIMITIVES, Launch, Tile, launch

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = Path(__file__).with_name("fixtures.json")


class Fixture(NamedTuple):
    """One primitive that a GPU ran as plain arithmetic says."""

    date: str
    device: str
    digest: str


def digest(made: Launch) -> str:
    """Return a hash of a launch: its shape, its arguments, what they must become."""
    described = [made.file, made.kernel, made.grid, made.block, made.shared]
    total = hashlib.sha256(repr(described).encode())
    for arg in (*made.args, *made.expected.values()):
        tile = arg if isinstance(arg, Tile) else Tile(np.asarray(arg), ())
        total.update(repr(tile[1:]).encode() + np.ascontiguousarray(tile.array).tobytes())
    return total.hexdigest()[:16]


def read() -> dict[str, Fixture]:
    """Return the fixtures by primitive."""
    if not FILE.exists():
        return {}
    return {name: Fixture(**fields) for name, fields in json.loads(FILE.read_text()).items()}


def write(fixtures: dict[str, Fixture]) -> None:
    """Keep fixtures, in the order of the primitives."""
    order = sorted(fixtures, key=list(PRIMITIVES).index)
    kept = {name: fixtures[name]._asdict() for name in order}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


def table() -> str:
    """Return every primitive in Markdown: when a GPU confirmed it, or that none did."""
    fixtures = read()
    lines = ["| primitive | from sm | confirmed on a GPU |", "|---|---|---|"]
    for name, (capability, _) in PRIMITIVES.items():
        kept = fixtures.get(name)
        current = kept is not None and kept.digest == digest(launch(name))
        said = f"{kept.date}, {kept.device}" if kept and current else "unconfirmed"
        lines.append(f"| {name} | {capability} | {said} |")
    return "\n".join(lines)
