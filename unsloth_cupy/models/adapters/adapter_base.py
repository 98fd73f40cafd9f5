"""Find the base model of an adapter folder, and store the name of a new adapter's base.

The base is a folder, or a name on huggingface.co.  A name is looked up in the folder that the
metadata of adapter_model.safetensors stores, where the adapter was trained, and in the local cache
of models, $HF_HUB_CACHE or $HF_HOME/hub.  Nothing is downloaded.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.call import check_entries
from ...errors import ConfigError
from ...files import missing_folder_advice, present, read_json
from ..folders.checkpoint_files import opened
from ..gguf.opening import folder_of, source_of

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")  # a model on huggingface.co: OWNER/MODEL
CURE = "name the folder of the adapter's base model: --base FOLDER, or load(FOLDER, lora=ADAPTER)"
MERGE = (
    "merge the adapter in peft first, and load the merged folder:"
    " AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(folder)"
)


NAMES = Sequence[str] | None
KINDS: Mapping[str, Any] = {  # types of values in adapter_config.json
    **dict.fromkeys(("base_model_name_or_path", "task_type", "revision", "bias"), str | None),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "inference_mode"), bool | None),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), str | NAMES),
    **dict.fromkeys(("modules_to_save", "target_parameters"), NAMES),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "loftq_config"), Mapping | None),
    "peft_type": str | None, "init_lora_weights": bool | str | None,
    "layers_to_transform": int | Sequence[int] | None,
    "trainable_token_indices": Sequence[int] | Mapping | None,
}  # fmt: skip


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json; values must have the types in ``KINDS``."""
    settings = read_json(folder / ADAPTER)
    check_entries(folder / ADAPTER, settings, KINDS)
    return settings


def base_of(folder: Path, base: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder of an adapter's base model; None for a folder without an adapter.

    ``base``, a folder or a name, replaces the base that the adapter names.

    Raises
    ------
    ConfigError
        The base is not on this machine; or ``base`` is passed for a folder without an adapter.
    """
    if not (folder / ADAPTER).exists():
        if base is not None:
            problem = f"{folder} holds no {ADAPTER}: base={str(base)!r} is for an adapter"
            raise ConfigError(f"{problem}; leave it out")
        return None
    settings = read_settings(folder) if base is None else {}
    listed = settings.get(BASE, settings.get("model"))  # mlx-lm writes "model"
    name = listed if base is None else os.fspath(base)
    named = isinstance(name, str) and name.strip(" ./")
    places = _places(folder, str(name), settings.get("revision")) if named else []
    base_folder = next((place for place in places if _is_model(place)), None)
    if base_folder is None:
        setting = f"{folder / ADAPTER}: {BASE} is {name!r}" if base is None else f"base={name!r}"
        advice = missing_folder_advice(Path(str(name)), CURE)
        raise ConfigError(f"{setting}, which is not a folder here; {advice}")
    return folder_of(base_folder)


def _is_model(path: Path) -> bool:
    """Return whether a path is a folder or a GGUF file."""
    return present(path) and (path.is_dir() or path.suffix.lower() == ".gguf")


def _places(adapter: Path, name: str, revision: Any) -> list[Path]:
    """Return the paths at which a base may be."""
    places = [Path(name), adapter / name]
    if NAME.fullmatch(name):
        try:
            with opened(adapter / WEIGHTS) as tensors:
                entry = (tensors.metadata() or {}).get(f"folder of {name}")
            places += [Path(json.loads(entry))] if entry else []
        except (ConfigError, ValueError, TypeError):
            pass  # reading the adapter later reports the error
        places += cached(name, revision if isinstance(revision, str) else "main")
    return places


def cached(name: str, revision: str = "main") -> list[Path]:
    """Return the folder of a model's revision in the cache of huggingface_hub, if it exists.

    Only names of the form OWNER/MODEL have one.  The cache stores the model as
    models--OWNER--MODEL, in which refs/main holds the name of a folder in snapshots.
    """
    if not NAME.fullmatch(name):
        return []
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = Path(os.environ.get("HF_HOME") or home) / "hub"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or hub
    model = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision  # the revision is a commit
    snapshots = model / "snapshots"
    try:
        inside = commit in {path.name for path in snapshots.glob("*")}
    except OSError:  # a name that the file system refuses
        return []
    return [snapshots / commit] if inside and (snapshots / commit / "config.json").exists() else []


def home_facts(name: Any, folder: Path | None) -> dict[str, str]:
    """Return metadata that maps a model's name on huggingface.co to its local folder."""
    if folder is None or not isinstance(name, str) or not NAME.fullmatch(name):
        return {}
    return {f"folder of {name}": json.dumps(str(folder.resolve()))}  # not all paths are UTF-8


def base_name(config: Mapping[str, Any], folder: Path | None) -> str | None:
    """Return a model's name for its adapters: on huggingface.co if known, else its folder.

    The path of a folder in the local cache contains the name; config.json may store it as
    ``_name_or_path``.
    """
    parts = () if folder is None else folder.absolute().parts
    cached = [each for each in parts[:-2] if each.startswith("models--")]
    if folder is not None and cached and folder.absolute().parent.name == "snapshots":
        return cached[-1].removeprefix("models--").replace("--", "/", 1)
    known = config.get("_name_or_path")
    if (
        isinstance(known, str)
        and "/" in known
        and NAME.fullmatch(known)
        and not present(Path(known))
    ):
        return known
    return None if folder is None else str(source_of(folder).resolve())
