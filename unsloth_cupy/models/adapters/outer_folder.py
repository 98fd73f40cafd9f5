"""Read heads and tables, the weights outside of the blocks, from an adapter's folder."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import FLOATS, Array
from ...errors import ConfigError
from ...files import of_one_save, read_json
from ..configs.config import Config
from ..configs.heads import LABELS, NONE, SEQUENCE, TOKEN, head_of
from ..configs.names import HEAD, SCORE, TABLE, parameter_name
from ..folders.checkpoint_files import opened
from ..folders.lazy_parameter import StoredTensor
from .adapter import CONFIG, PREFIX, module_of
from .adapter_base import WEIGHTS, read_settings
from .outer_weights import (
    LOW_RANK,
    OUTER,
    TIED,
    TOKENS,
    check_outer,
    inner_modules,
    listed_modules,
    listed_tokens,
    low_rank,
    rows_name,
)

UNTIE = "store the base with its own lm_head.weight and tie_word_embeddings false, and load that"
# Tables of the base, which peft also writes after the vocabulary has grown.
BASE_TABLE = re.compile(
    re.escape(PREFIX) + r"(?:.*\.)?(embed_tokens|lm_head)\."
    r"((?:(?:token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.)?)weight"
)
COPY = "modules_to_save."  # a copy of the trained table, which the file also has under its own name


def implied_head(lora: Path, base: Path, labels: int | None) -> tuple[str | None, int | None]:
    """Return the head that an adapter requires and its number of labels; None: the base's."""
    return of_one_save(lora, CONFIG, lambda: _implied_head(lora, base, labels))


def _implied_head(lora: Path, base: Path, labels: int | None) -> tuple[str | None, int | None]:
    heads = {"SEQ_CLS": SEQUENCE, "TOKEN_CLS": TOKEN, "FEATURE_EXTRACTION": NONE}
    if not (lora / CONFIG).is_file() or not (base / "config.json").is_file():
        return None, labels
    head = heads.get(str(read_settings(lora).get("task_type")))
    if head is None or head_of(read_json(base / "config.json")) == head:
        return None, labels
    if labels is None and head != NONE and (lora / WEIGHTS).is_file():
        with opened(lora / WEIGHTS) as file:
            name = PREFIX + SCORE
            labels = file.get_slice(name).get_shape()[0] if name in file.keys() else None  # noqa: SIM118
    return head, labels


def with_labels(lora: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a base's config.json with the labels of the adapter's config.json, if it has one."""
    if not (lora / "config.json").is_file():
        return config
    own = read_json(lora / "config.json")
    return {**config, **{name: own[name] for name in LABELS if name in own}}


def tables_of(config: Config) -> dict[str, tuple[int, int]]:
    """Return the shapes of the tables that may have low-rank weights, by module name."""
    shapes = {name: shape for name, shape in config.shapes().items() if name in (TABLE, HEAD)}
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items()}


def base_for(
    lora: Path, config: Config, texts: dict[str, Mapping[str, Any]], homes: dict[str, StoredTensor]
) -> Config:
    """Return the config of a base as an adapter's file requires; update ``texts`` and ``homes``.

    The file may hold tables, for example of a grown vocabulary: they replace the base's tables.  A
    head that was trained separately from its table is no longer tied to the table, and starts as
    a copy of it.
    """
    file = lora / WEIGHTS
    settings, shapes = of_one_save(lora, CONFIG, lambda: _settings_and_shapes(lora))
    if settings is None:
        return config
    tokens = listed_tokens(f"{lora / CONFIG}: {TOKENS}", settings.get(TOKENS) or ())
    whole = listed_modules(settings) & {"embed_tokens", "lm_head"}
    changes: dict[str, Any] = {}
    low = any(".layers." not in name and ".lora_" in name for name in shapes)
    rows = whole or low or tokens.get(HEAD, tokens.get(TABLE)) != tokens.get(TABLE)
    if config.tied and TABLE in tokens and LOW_RANK[HEAD][0] in shapes:
        problem = "lm_head has low-rank weights, and is tied to a table with trained rows"
        cure = "peft's own merge also loses these rows: train again without one of the two"
        raise ConfigError(f"{file}: {problem}; {cure}")
    if config.tied and rows and not settings.get(TIED):
        changes["tie_word_embeddings"] = False
        config = replace(config, tied=False)
        homes |= {HEAD: homes[TABLE]} if TABLE in homes else {}
    tables, size = base_tables(shapes, whole), config.vocab
    if changes and tables:  # the head starts as the table, and the file may have either
        tables = {TABLE: tables.get(TABLE, tables.get(HEAD, "")), **tables}
        tables = {HEAD: tables[TABLE], **tables}
    for name in [TABLE] + [HEAD] * (not config.tied):
        stored = tables.get(name)
        shape = tuple(shapes[stored]) if stored else (config.vocab, config.hidden)
        if len(shape) != 2 or shape[1] != config.hidden or (name == HEAD and shape[0] != size):
            problem = f"{file}: {stored or name} is {shape}, and does not fit the base"
            cure = "pass the model that the adapter is for"
            if name == HEAD and len(tables) == 1 and max(shape[0], size) > config.vocab:
                (stored,) = tables.values()
                problem = (
                    f"{file} has {stored} of {max(shape[0], size)} rows, the base {config.vocab}"
                )
                cure = "peft wrote only one of the two grown tables"
                cure += ": save the resized base, and pass that"
            raise ConfigError(f"{problem}; {cure}")
        size = shape[0]
        if stored and name in homes:
            place = str(file.resolve()), stored, shape, homes[name].dtype
            homes[name] = StoredTensor(*place)
    if size != config.vocab:
        changes["vocab_size"] = size
    texts["config.json"] = {**texts["config.json"], **changes}
    return replace(config, vocab=size)


def _settings_and_shapes(lora: Path) -> tuple[Any, dict[str, Any]]:
    """Return an adapter's settings and tensor shapes; None and {} if there is no adapter."""
    if not (lora / CONFIG).is_file() or not (lora / WEIGHTS).is_file():
        return None, {}
    with opened(lora / WEIGHTS) as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return read_settings(lora), shapes


def base_tables(names: Iterable[str], trained: Collection[str]) -> dict[str, str]:
    """Return the tensors of an adapter's file that are tables of the base, by parameter."""
    tables: dict[str, str] = {}
    for stored in names:
        match = BASE_TABLE.fullmatch(stored)
        if match and match[2] != COPY and not (match[2] == "" and match[1] in trained):
            tables.setdefault(OUTER[match[1]][0], stored)
    return tables


def outer_tensors(
    path: Path, settings: Mapping[str, Any], tensors: dict[str, Array], config: Config
) -> dict[str, tuple[str, Array]]:
    """Remove tables and whole modules from ``tensors``; return them with their current names.

    Raises
    ------
    ConfigError
        A tensor is missing, has another shape, or is not in adapter_config.json.
    """
    tokens = listed_tokens(f"{path / CONFIG}: {TOKENS}", settings.get(TOKENS) or ())
    inner = inner_modules(str(path / CONFIG), config, settings)
    modules = listed_modules(settings) & OUTER.keys()
    shapes, tied = config.shapes(), config.tied
    if tied and tokens.get(HEAD) == tokens.get(TABLE):
        tokens.pop(HEAD, None)
    modules -= {"lm_head"} if tied and settings.get(TIED) else set()
    check_outer(str(path / CONFIG), config, tokens, modules)
    expected = {rows_name(name): (len(ids), config.hidden) for name, ids in tokens.items()} | {
        PREFIX + name: shapes[name]
        for name in (*inner, *(name for each in modules for name in OUTER[each]))
        if name in shapes
    }
    arrays: dict[str, tuple[str, Array]] = {}
    for name in [*tensors]:
        module, own = module_of(name), name.removeprefix(PREFIX)
        whole = parameter_name(f"{module}.weight") or ""
        own = PREFIX + whole.removesuffix("weight") + own.removeprefix(f"{module}.")
        if own in expected:
            arrays[name] = own, tensors.pop(name)
    names = {own: name for name, (own, _) in arrays.items()}
    for own, shape in expected.items():
        if own not in names:
            raise ConfigError(f"{path / WEIGHTS}: {own} is missing; copy the adapter again")
        array = arrays[names[own]][1]
        if array.shape != shape or array.dtype not in FLOATS:
            problem = f"{names[own]} is {array.dtype} {array.shape}; it must be floats, {shape}"
            raise ConfigError(f"{path / WEIGHTS}: {problem}")
    if tied and LOW_RANK[HEAD][0] in tensors:
        own_pair = (tensors.get(name, np.empty(0)) for name in LOW_RANK[TABLE])
        pair = zip(LOW_RANK[HEAD], low_rank(TABLE, *own_pair), strict=True)
        if not all(np.array_equal(tensors.pop(name), array) for name, array in pair):
            problem = "lm_head and its table have different lora_A or lora_B"
            raise ConfigError(f"{path / WEIGHTS}: {problem}; {UNTIE}")
    follows = tensors.pop(rows_name(HEAD), None) if tied else None
    if follows is not None and not np.array_equal(follows, arrays[names[rows_name(TABLE)]][1]):
        raise ConfigError(f"{path / WEIGHTS}: rows of lm_head and of its table differ; {UNTIE}")
    bases = {name: tensors.pop(name) for name in [*tensors] if BASE_TABLE.fullmatch(name)}
    copies = base_tables(bases, ())
    if tied and HEAD in copies:
        trained = PREFIX + TABLE in names
        other: Any = bases.get(copies.get(TABLE, ""))
        table = arrays[names[PREFIX + TABLE]][1] if trained else other
        if not np.array_equal(bases[copies[HEAD]], table):
            problem = "lm_head is not equal to embed_tokens, though config.json ties them"
            raise ConfigError(f"{path / WEIGHTS}: {problem}; {UNTIE}")
    return arrays
