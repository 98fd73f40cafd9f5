"""The files with which sentence-transformers names the pooling of a model's states.

modules.json                the modules that a text passes: Transformer, Pooling, Dense, Normalize
1_Pooling/config.json       the pooling: mean, cls or lasttoken
2_Dense/config.json         the sizes and the activation of a Dense module
2_Dense/model.safetensors   its weights: linear.weight, linear.bias
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...core.call import is_integer
from ...errors import ConfigError
from ...files import read_json
from ..configs.config import DenseModule

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
KINDS = TRANSFORMER, POOLED, DENSE, NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"
TANH = {  # classes of torch, and whether they compute tanh
    "torch.nn.modules.linear.Identity": False,
    "torch.nn.modules.activation.Tanh": True,
}
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
        The folder has another pooling, or a module of another kind.
    """
    if folder is None or not (folder / MODULES).is_file():
        return _mode_in(folder / POOLING) if folder and (folder / POOLING).is_file() else None
    paths = [path for kind, path in _modules(folder) if kind == POOLED]
    return _mode_in(folder / paths[-1] / "config.json") if paths else None


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kind and the path of each module in modules.json, in their order."""
    modules: Any = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    pairs = [(str(n.get("type")).rpartition(".")[2], n.get("path") or "") for n in modules]
    if others := sorted({kind for kind, _ in pairs} - {*KINDS}):
        problem = f"{folder / MODULES} has the module {others[0]}, which changes the embeddings"
        raise ConfigError(f"{problem}; pass pooling= for embeddings without it")
    return pairs


def dense_modules(folder: Path | None) -> tuple[DenseModule, ...]:
    """Return the Dense modules that the files of a folder name, in their order.

    Raises
    ------
    ConfigError
        A module has settings that are not supported, or does not fit the one before it.
    """
    if folder is None or not (folder / MODULES).is_file():
        return ()
    modules: Any = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    if not any(str(each.get("type")).endswith(f".{DENSE}") for each in modules):
        return ()  # ``embeddings`` checks the other modules
    pairs = _modules(folder)
    kinds = [kind for kind, _ in pairs]
    first, last = kinds.index(DENSE), len(kinds) - kinds[::-1].index(DENSE)
    if kinds[:first] != [TRANSFORMER, POOLED] or {*kinds[first:last]} != {DENSE}:
        problem = f"{folder / MODULES}: the order of the modules is {', '.join(kinds)}"
        raise ConfigError(f"{problem}; Dense modules must follow {TRANSFORMER} and {POOLED}")
    result = tuple(_dense(folder, path) for _, path in pairs[first:last])
    for before, after in pairwise(result):
        if before.outputs != after.inputs:
            problem = f"{folder / after.path}: in_features is {after.inputs}"
            raise ConfigError(f"{problem}; it must be {before.outputs}, as {before.path} returns")
    return result


def _dense(folder: Path, path: str) -> DenseModule:
    """Return the Dense module in a folder."""
    file = folder / path / "config.json"
    if not re.fullmatch(r"\d+_Dense", path):
        raise ConfigError(f"{folder / MODULES}: the path {path!r} must be like '2_Dense'")
    values = read_json(file)
    sizes: list[Any] = [values.get(key) for key in ("in_features", "out_features")]
    for key, size in zip(("in_features", "out_features"), sizes, strict=True):
        if not is_integer(size, 1):
            raise ConfigError(f"{file}: {key} is {size!r}; it must be an integer, 1 or more")
    name = values.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in TANH:
        problem = f"{file}: activation_function is {name!r}"
        raise ConfigError(f"{problem}; choose one of {', '.join(TANH)}")
    own = "sentence_embedding"
    for key, known in (
        *(("module_input_name", (None, own)), ("module_output_name", (None, own))),
        ("use_residual", (None, False)),
    ):
        if values.get(key) not in known:
            problem = f"{file}: {key}={values[key]!r} is not supported"
            raise ConfigError(f"{problem}; only {key}={known[1]!r} is")
    biased = bool(values.get("bias", True))
    return DenseModule(path, sizes[0], sizes[1], biased, TANH[name])


def module_texts(folder: Path) -> dict[str, Any]:
    """Return the JSON files, by name, that name the modules of a folder."""
    names = [f"{path}/config.json" for kind, path in _modules(folder) if kind in (POOLED, DENSE)]
    modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    return {MODULES: modules, **{name: read_json(folder / name) for name in names}}


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


def pooling_files(
    hidden: int, pooling: str, dense: Sequence[DenseModule] = ()
) -> Mapping[str, str]:
    """Return the files, by name, from which sentence-transformers reads pooling and modules."""
    values: dict[str, Any] = {"word_embedding_dimension": hidden}
    values |= {key: own == pooling for key, (_, own) in MODES.items()}
    paths = {"": TRANSFORMER, "1_Pooling": POOLED, **{each.path: DENSE for each in dense}}
    paths[f"{len(paths)}_{NORMALIZE}"] = NORMALIZE
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(paths.items())
    ]
    files = {MODULES: json.dumps(modules, indent=2), POOLING: json.dumps(values)}
    names = {tanh: name for name, tanh in TANH.items()}
    for each in dense:
        sizes = {"in_features": each.inputs, "out_features": each.outputs}
        own = {**sizes, "bias": each.biased, "activation_function": names[each.tanh]}
        files[f"{each.path}/config.json"] = json.dumps(own)
    return files
