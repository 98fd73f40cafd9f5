"""Write the table of model families in docs/guide/models.md from the registries of the library.

    python docs/families.py

A family trains, with and without adapters, if it is in ``FAMILIES``: the tests run a step of each.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unsloth_cupy.models.configs.families import FAMILIES  # noqa: E402
from unsloth_cupy.models.gguf._families import ARCHITECTURES  # noqa: E402
from unsloth_cupy.models.quantizer import KINDS  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
PATCHED = ROOT / "tests" / "interop" / "families.py"  # its import needs torch


def patched() -> set[str]:
    """Return the families of transformers of which the tests compare patched models."""
    tables = [
        node.value
        for node in ast.parse(PATCHED.read_text()).body
        if isinstance(node, ast.AnnAssign)
    ]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def table() -> str:
    """Return a row for each family: what works, and the architecture of its GGUF file."""
    rows = ["| `model_type` | train | LoRA | nf4 | GGUF | patch |", "|---|---|---|---|---|---|"]
    compared = patched()
    for name, family in sorted(FAMILIES.items()):
        quantized = family.experts is None or KINDS["nf4"].stacks
        file = f"`{ARCHITECTURES[name].name}`" if name in ARCHITECTURES else "no"
        cells = ["yes", "yes", "yes" if quantized else "no", file]
        cells.append("yes" if name in compared else "not compared")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def page() -> str:
    """Return the page with the table of today."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
