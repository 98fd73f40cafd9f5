"""Draft heads (multi-token prediction): blocks after the last one, which predict a later token.

    x_i = eh_proj [norm(e_{i+1}); norm(h_i)]        e: embeddings, h: normalised states of the model
    y_i = norm(block(x)_i)                          lm_head y_i are logits of token i + 2

A further head computes the same from the y of the head before it and from e_{i+2}.  Parameters have
the names of DeepSeek-V3's files; those of Qwen3-Next have other names in files:

    model.layers.61.enorm.weight            mtp.pre_fc_norm_embedding.weight
    model.layers.61.hnorm.weight            mtp.pre_fc_norm_hidden.weight
    model.layers.61.eh_proj.weight          mtp.fc.weight
    model.layers.61.self_attn. ...          mtp.layers.0.self_attn. ...
    model.layers.61.shared_head.norm.weight mtp.norm.weight
    model.layers.61.embed_tokens.weight     a copy of the model's table, or a table of its own
    model.layers.61.shared_head.head.weight a copy of the model's head, or a head of its own

(DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2.)
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...files import say_once
from .names import HEAD, TABLE

Config = Any  # of config.py, which imports this module

LAYERS, MTP = "layers", "mtp"  # how files name the tensors
KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
FACTS: dict[str, Any] = dict.fromkeys((*KEYS, "num_mtp_layers"), ...)
NORMS = ("enorm", "hnorm", "shared_head.norm")
# tables that a head may have: its name in the head, and the model's table
TABLES = {"embed_tokens.weight": TABLE, "shared_head.head.weight": HEAD}
MOST = 8  # heads of a model whose tensors are recognised
RENAMED = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.embed_tokens.": "embed_tokens.",
    "mtp.layers.0.": "",
}


def count_of(values: Any, layout: str) -> int:
    """Return the number of heads that a config.json names; 0 if they are not read."""
    key = next((key for key in KEYS if values.get(key) is not None), "")
    count = values.get(key, 0) if layout else 0
    most = 1 if layout == MTP else MOST
    if type(count) is not int or not count >= 0:
        raise ConfigError(f"config: {key} is {count!r}; it must be an integer, 0 or more")
    return count if count <= most else 0  # ``found`` names those of files


def pattern_of(layers: int, layout: str) -> str:
    """Return the pattern of the names of all tensors of heads in files."""
    numbers = "|".join(map(str, range(layers, layers + MOST)))
    return {LAYERS: rf"model\.layers\.({numbers})\.", MTP: r"mtp\.", "": ""}[layout]


def prefixes(config: Config) -> list[str]:
    """Return the prefix of each head's parameters."""
    return [f"model.layers.{config.layers + n}." for n in range(config.draft_heads)]


def is_of_head(config: Config, name: str) -> bool:
    """Return whether a parameter, or a module, belongs to a draft head."""
    return config.draft_heads > 0 and name.startswith(tuple(prefixes(config)))


def without_heads(config: Config) -> Config:
    """Return the config of the model without its draft heads, whose tensors are not loaded."""
    unread = pattern_of(config.layers, config.draft) if config.draft else config.left_out
    return replace(config, draft_heads=0, draft_tables=(), draft_copies=(), left_out=unread)


def with_blocks(config: Config) -> Config:
    """Return a config in which the blocks of the heads are further layers.

    They have full attention, rotate queries and keys, and have experts if any other block has.
    """
    new, experts, indexer = config.draft_heads, config.experts, config.indexer
    sparse = experts is not None and any(experts.sparse)
    return replace(
        without_heads(config),
        layers=config.layers + new,
        layer_types=(*config.layer_types, *("full_attention",) * new),
        rotated=(*config.rotated, *(True,) * new) if config.rotated else (),
        indexer=indexer and replace(indexer, shared=(*indexer.shared, *(False,) * new)),
        experts=experts and replace(experts, sparse=(*experts.sparse, *(sparse,) * new)),
    )


def shapes_of_heads(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the parameters of all heads."""
    if not config.draft_heads:
        return
    whole, hidden = with_blocks(config), config.hidden
    for layer, prefix in enumerate(prefixes(config), config.layers):
        yield from ((f"{prefix}{name}.weight", (hidden,)) for name in NORMS)
        yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden)
        yield from ((prefix + name, shape) for name, shape in whole.block_shapes(layer))
        own = (prefix + name for name in TABLES if prefix + name in config.draft_tables)
        yield from ((name, (config.vocab, hidden)) for name in own)


def copies(config: Config) -> dict[str, list[str]]:
    """Return the tensors of files that are copies of the model's tables, by the table's name."""
    result: dict[str, list[str]] = {}
    for name in config.draft_copies:
        table = next(table for end, table in TABLES.items() if name.endswith(end))
        result.setdefault(TABLE if config.tied else table, []).append(name)
    return result


# ---- names in files -----------------------------------------------------------------------------
def in_memory(config: Config, name: str) -> str:
    """Return the parameter's name for a tensor's name in a file."""
    if config.draft != MTP or not config.draft_heads:
        return name
    prefix = prefixes(config)[0]
    pairs = ((old, new) for old, new in RENAMED.items() if name.startswith(old))
    return next((prefix + new + name.removeprefix(old) for old, new in pairs), name)


def in_files(config: Config, name: str) -> str:
    """Return a tensor's name in files for its name in memory."""
    if config.draft != MTP or not is_of_head(config, name):
        return name
    own = name.removeprefix(prefixes(config)[0])
    return next(old + own.removeprefix(new) for old, new in RENAMED.items() if own.startswith(new))


def found(config: Config, stored: Collection[str]) -> Config:
    """Return a config with the heads that a folder's tensors hold.

    A warning names tensors of heads that are not read.  Without any tensor, config.json counts.
    """
    if not config.draft:
        unread = {name for name in stored if MTP in name and re.match(config.left_out or "$", name)}
        if unread:
            _warn(unread, f"those of a {config.model_type} are not read")
        return config
    if not stored:
        return config
    bare = without_heads(config)
    if config.head != "causal_lm":
        return bare
    pattern = re.compile(bare.left_out)
    names = {name for name in stored if pattern.match(name)}
    if not names:
        return bare
    joints = [f"model.layers.{config.layers + n}.eh_proj." for n in range(MOST)]
    count = sum(any(name.startswith(each) for name in names) for each in joints)
    count = 1 if config.draft == MTP else max(count, 1)
    heads = replace(bare, draft_heads=count, left_out="")
    own = {in_memory(heads, name) for name in names}
    tables = tuple(p + name for p in prefixes(heads) for name in TABLES if p + name in own)
    known = [name for name, _ in shapes_of_heads(replace(heads, draft_tables=tables))]
    missing = next((name for name in known if not _there(name, own)), None)
    modules = tuple(f"{name[: name.rindex('.')]}." for name in known)
    more = next((name for name in sorted(own) if not name.startswith(modules)), None)
    if missing is None and more is None:
        return replace(heads, draft_tables=tables)
    problem = f"{in_files(heads, missing)} is missing" if missing else f"{more} is not known"
    _warn(names, problem)
    return bare


def _warn(names: Collection[str], problem: str) -> None:
    """Warn that these tensors are left out."""
    say_once(
        f"load: {len(names)} tensors of draft heads, such as {min(names)}, are left out, because"
        f" {problem}: the saved model has no draft heads, and generate(draft='mtp') needs them"
    )


def _there(name: str, stored: Collection[str]) -> bool:
    """Return whether files have a parameter: whole, quantized, or as matrices of experts."""
    if name in stored:
        return True
    part = name.removesuffix("weight")
    if ".experts." in name:
        part = name[: name.index(".experts.") + len(".experts.")]
    return any(each.startswith(part) for each in stored)
