"""Draw floors.svg: the packages and modules of ``unsloth_cupy`` ("rooms") and their imports.

    python docs/floors.py

A room is drawn on the floor that tests/house/test_floors.py gives it.  An import is left out if
other imports lead from the one room to the other.
"""

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.house.test_floors import FLOORS, MODULES, PACKAGE, imports  # noqa: E402

WIDE, HIGH, GAP, STEP = 270, 46, 22, 80  # a box's size; between boxes; from floor to floor
LEFT_OUT = ("_version", "__main__", "starting")
INK, SOFT, PAPER = "#22272e", "#8b95a1", "#f4f6f8"
STYLE = f"""
<style>text{{font-family:sans-serif;fill:{INK};text-anchor:middle}}.name{{font-size:14px;font-weight:600}}
.what{{font-size:10px}}rect{{fill:{PAPER};stroke:{SOFT}}}
path{{fill:none;stroke:{SOFT};marker-end:url(#tip)}}</style>
<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6"
orient="auto"><polygon points="0 0,6 3,0 6" fill="{SOFT}"/></marker></defs>
"""


def room_of(module: tuple[str, ...]) -> str:
    """Return the top-level folder or module that a module belongs to."""
    return module[0]


def arrows() -> dict[str, set[str]]:
    """Return the rooms that each room imports, without those that it also reaches via others."""
    direct: dict[str, set[str]] = {}
    for module in MODULES:
        imported = {room_of(other) for other in imports(module)} - {room_of(module), *LEFT_OUT}
        direct.setdefault(room_of(module), set()).update(imported)

    def below(room: str) -> set[str]:
        return direct[room].union(*(below(other) for other in direct[room]))

    return {
        room: {o for o in others if not any(o in below(between) for between in others - {o})}
        for room, others in direct.items()
    }


def about(room: str) -> tuple[str, str]:
    """Return the name of a room, with .py if it is a file, and what its docstring says it holds."""
    front = PACKAGE / room / "__init__.py"
    name = "unsloth_cupy" if room == "__init__" else room if front.exists() else f"{room}.py"
    front = front if front.exists() else PACKAGE / f"{room}.py"
    first = (ast.get_docstring(ast.parse(front.read_text())) or "").split("\n")[0]
    return name, first.partition(":")[0].partition(",")[0].rstrip(".").replace("`", "")


def drawn() -> str:
    """Return the picture as SVG."""
    floors = [[r for r in rooms if r in {m[0] for m in MODULES}] for rooms in FLOORS]
    floors = [[r for r in rooms if r not in LEFT_OUT] for rooms in reversed(floors)]
    floors = [rooms for rooms in floors if rooms]
    width = max(map(len, floors)) * (WIDE + GAP) + GAP
    at: dict[str, tuple[float, float]] = {}
    for row, rooms in enumerate(floors):
        start = (width - len(rooms) * (WIDE + GAP) + GAP) / 2
        at |= {r: (start + i * (WIDE + GAP), GAP + row * STEP) for i, r in enumerate(rooms)}
    paths = []
    lanes = width
    for room, others in sorted(arrows().items()):
        for other in sorted(others & at.keys()) if room in at else ():
            (x, y), (u, v) = at[room], at[other]
            x, u, y = x + WIDE / 2, u + WIDE / 2, y + HIGH
            curve = f"C{x:g} {y + 30:g} {u:g} {v - 30:g} {u:g} {v:g}"
            if v - y > STEP:  # it passes a floor: drawn in its own lane to the right of all boxes
                x, u, turn = x + WIDE / 3, u + WIDE / 3, 6 + (lanes - width) / 3 % 18
                curve = f"V{y + turn:g}H{lanes:g}V{v - turn:g}H{u:g}V{v:g}"
                lanes += 9
            paths.append(f'<path d="M{x:g} {y:g}{curve}"/>')
    size = f"{lanes:g} {len(floors) * STEP}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">',
        STYLE.strip(),
        *paths,
    ]
    for room, (x, y) in at.items():
        name, what = about(room)
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="5"/>')
        lines.append(f'<text class="name" x="{x + WIDE / 2:g}" y="{y + 19:g}">{name}</text>')
        lines.append(
            f'<text class="what" x="{x + WIDE / 2:g}" y="{y + 35:g}">{escape(what)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("floors.svg").write_text(drawn())
