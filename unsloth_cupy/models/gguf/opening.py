"""Conversion of a GGUF file to a Hugging Face folder with config.json and tokenizer, no weights.

    folder = folder_of(Path("model.gguf"))

The folder is temporary; ``source_of`` returns its file.  gguf.json in it names the file, but only
for fingerprints: it is never read, as anybody may have written such a file in another folder.
"""

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import missing_folder_advice
from ..configs.config import DenseModule
from ..folders.pooling import pooling_files
from . import MODULES, POOLINGS
from .reading import PART, opened_gguf, parts_of

MARK = "gguf.json"
BESIDE = (  # files beside a GGUF file that replace its own tokenizer and settings
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
_folders: dict[tuple[Any, ...], Path] = {}
_sources: dict[Path, Path] = {}  # GGUF files by folder


def folder_of(path: Path) -> Path:
    """Return the folder of a model: the path, or a temporary folder for a GGUF file.

    The path may be a GGUF file, or a folder that contains one.

    Raises
    ------
    ConfigError
        The file is missing or broken, or has unsupported keys.
    """
    file = gguf_in(path)
    if file is None:
        return path
    states = [each.stat() for each in (file, *_beside(path)) if each.is_file()]
    key = (path.absolute(), *((state.st_size, state.st_mtime_ns) for state in states))
    if key not in _folders:
        home = Path(tempfile.mkdtemp(prefix="unsloth_cupy-gguf-")).resolve()
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        name = PART.sub(r"\1", file.name).removesuffix(".gguf")
        _folders[key] = _written(file, path, home / name)
        _sources[_folders[key]] = file.resolve()
    return _folders[key]


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file at a path, or the only model in a folder; None for other paths."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.exists():
            cure = missing_folder_advice(path, "pass a file that exists")
            raise ConfigError(f"{path} does not exist; {cure}")
        return parts_of(path)[0]
    names = ("config.json", "adapter_config.json", "settings.json")
    if not path.is_dir() or any((path / name).exists() for name in names):
        return None
    files = sorted({parts_of(each)[0] for each in path.glob("*.gguf")})
    if len(files) > 1:
        listed = ", ".join(each.name for each in files[:3])
        raise ConfigError(f"{path} contains {len(files)} models ({listed}); pass one of the files")
    return files[0] if files else None


def source_of(folder: Path) -> Path:
    """Return the GGUF file of a temporary folder; other folders are returned unchanged."""
    return _sources.get(folder.resolve(), folder)


def _beside(path: Path) -> list[Path]:
    """Return the files in a folder that replace the GGUF file's own tokenizer and settings."""
    return [path / name for name in BESIDE if path.is_dir() and (path / name).is_file()]


def _written(file: Path, path: Path, folder: Path) -> Path:
    """Write the files of a temporary folder, and return the folder."""
    opened = opened_gguf(file)
    from ._settings import settings
    from ._vocabulary import tokenizer_files

    config = settings(opened)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    state = file.stat()
    mark = {"file": str(file.resolve()), "bytes": state.st_size, "changed": state.st_mtime_ns}
    texts: dict[str, Any] = {"config.json": config, "generation_config.json": ends, MARK: mark}
    if not (path / "tokenizer.json").is_file():
        whole = opened.values.get("tokenizer.huggingface.json")
        texts |= tokenizer_files(opened)
        texts |= {"tokenizer.json": json.loads(whole)} if isinstance(whole, str) else {}
    folder.mkdir()
    kind = opened.values.get(f"{opened.values.get('general.architecture')}.pooling_type")
    names = {number: name for name, number in POOLINGS.items()}
    pooling = names.get(kind) if isinstance(kind, int) else None
    weights = {path: opened.tensors.get(f"{name}.weight") for path, name in MODULES.items()}
    modules = [
        DenseModule(path, weight.shape[1], weight.shape[0], biased=False, tanh=False)
        for path, weight in weights.items()
        if weight is not None
    ]
    pooling = pooling or ("mean" if modules else None)
    pooled = pooling_files(config["hidden_size"], pooling, modules) if pooling else {}
    for name, text in pooled.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, values in texts.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    for each in _beside(path):
        shutil.copyfile(each, folder / each.name)
    return folder
