"""The JSON files of a model's folder: config.json and generation_config.json."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import complete_moves, read_json
from ..folders.checkpoint_files import tensor_names, with_heads_of
from ..folders.pooling import dense_modules, module_texts
from ..parse import parse
from .config import Config
from .heads import NONE, Choice, chosen
from .reading import token_ids
from .text_configs import text_config

GENERATION = "generation_config.json"


def read_config(
    path: Path, head: str | None = None, labels: int | None = None
) -> tuple[Config, dict[str, Mapping[str, Any]], Choice]:
    """Return the config of a model's folder, its JSON files by name, and the choice of its head.

    Weights are not read.
    """
    complete_moves(path, "config.json")
    source = read_json(path / "config.json")
    choice = chosen(source, head, labels)
    try:
        config = parse(choice.values, partial(tensor_names, path))
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    config = with_heads_of(path, config)
    texts: dict[str, Mapping[str, Any]] = {"config.json": text_config(choice.values)}
    config = with_generation(path, config, texts)
    if config.head == NONE and (modules := dense_modules(path)):
        if modules[0].inputs != config.state:
            problem = f"{modules[0].path} has {modules[0].inputs} inputs"
            raise ConfigError(f"{path}: {problem}; config.json implies {config.state}")
        config = replace(config, modules=modules)
        texts |= module_texts(path)
    return config, texts, choice


def with_generation(path: Path, config: Config, texts: dict[str, Mapping[str, Any]]) -> Config:
    """Return a config with the end and pad tokens of a folder's generation_config.json.

    The file is added to ``texts``.
    """
    if not (path / GENERATION).exists():
        return config
    generation = texts[GENERATION] = read_json(path / GENERATION)
    return replace(
        config,
        end_tokens=token_ids("eos_token_id", generation) or config.end_tokens,
        pad_token=next(iter(token_ids("pad_token_id", generation)), config.pad_token),
    )
