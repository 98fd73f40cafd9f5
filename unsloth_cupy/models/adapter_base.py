"""Find the folder of the base model that an adapter folder belongs to."""

from pathlib import Path

from ..errors import ConfigError
from ..files import missing_folder_advice, read_json

ADAPTER = "adapter_config.json"


def base_of(folder: Path) -> Path | None:
    """Return the folder of an adapter's base model; None for a folder without an adapter."""
    if not (folder / ADAPTER).exists():
        return None
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        cure = "write the folder of the adapter's base model there"
        raise ConfigError(
            f"{folder / ADAPTER}: base_model_name_or_path is {base!r}, which is not a folder here;"
            f" {missing_folder_advice(Path(str(base)), cure)}"
        )
    return Path(base)
