"""The files with which sentence-transformers names the pooling of a model's states.

modules.json                the modules that a text passes: Transformer, Pooling, Normalize
1_Pooling/config.json       the pooling: mean, cls or lasttoken
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import read_json

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
PATHS = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
MODES = {  # older keys of a pooling, their newer names, and the names of this package
    "pooling_mode_cls_token": ("cls", "cls"),
    "pooling_mode_mean_tokens": ("mean", "mean"),
    "pooling_mode_lasttoken": ("lasttoken", "last"),
}


def pooling_of(folder: Path | None) -> str | None:
    """Return the pooling that the files of a folder name: mean, last or cls; None without files.

    Raises
    ------
    ConfigError
        The folder has another pooling, or a module that changes the vectors, such as Dense.
    """
    if folder is None or not (folder / MODULES).is_file():
        return _mode_in(folder / POOLING) if folder and (folder / POOLING).is_file() else None
    modules: Any = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    kinds = {str(each.get("type")).rpartition(".")[2]: each.get("path") or "" for each in modules}
    if others := sorted(kinds.keys() - {*PATHS.values()}):
        problem = f"{folder / MODULES} has the module {others[0]}, which changes the embeddings"
        raise ConfigError(f"{problem}; pass pooling= for embeddings without it")
    return _mode_in(folder / kinds["Pooling"] / "config.json") if "Pooling" in kinds else None


def _mode_in(path: Path) -> str:
    """Return the pooling in the config of a Pooling module."""
    values = read_json(path)
    newer = values.get("pooling_mode")
    modes = [newer] if isinstance(newer, str) else newer
    if modes is None:
        older = {key: names[0] for key, names in MODES.items()}
        flags = [key for key, value in values.items() if key.startswith("pooling_mode_") and value]
        modes = [older.get(key, key) for key in flags] or ["mean"]
    known = dict(MODES.values())
    if len(modes) != 1 or modes[0] not in known:
        problem = f"{path}: the pooling is {', '.join(map(str, modes))}"
        raise ConfigError(f"{problem}; choose one of {', '.join(known)}")
    return known[modes[0]]


def pooling_files(hidden: int, pooling: str) -> Mapping[str, str]:
    """Return the files, by name, from which sentence-transformers reads a pooling."""
    values: dict[str, Any] = {"word_embedding_dimension": hidden}
    values |= {key: own == pooling for key, (_, own) in MODES.items()}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(PATHS.items())
    ]
    return {MODULES: json.dumps(modules, indent=2), POOLING: json.dumps(values)}
