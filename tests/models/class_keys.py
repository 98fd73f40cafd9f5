"""Writes which keys of config.json transformers' class of each model type reads.

    python -m tests.models.class_keys

A class reads the fields of its config, older names of these, and what its modules take from their
config: attributes of ``config``, ``getattr(config, name)`` and ``kwargs`` of ``__post_init__``.
"""

import ast
import functools
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from unsloth_cupy.models.configs import class_keys
from unsloth_cupy.models.configs.families import ENCODERS, FAMILIES
from unsloth_cupy.models.configs.text_configs import OUTER, SAME

FILE = Path(class_keys.__file__)
SHARED = (  # what all models of transformers are built of
    *("cache_utils", "configuration_utils", "masking_utils", "modeling_layers"),
    *("modeling_rope_utils", "modeling_utils", "utils/generic", "utils/output_capturing"),
)
MAPPINGS = ("MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
START = 'TABLE = """'


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(node: ast.AST) -> str:
    """Return the last name of an expression such as ``self.config``."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def names_read(tree: ast.AST, bases: tuple[str, ...]) -> Iterator[Any]:
    """Yield what code takes from objects whose names end so."""

    def takes(base: ast.AST) -> bool:
        return name_of(base).endswith(bases)

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=base, attr=name) if takes(base) and name_of(base) != "kwargs":
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[base, name, *_]):
                if takes(base):
                    yield getattr(name, "value", None)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs")), args=[name, *_]):
                if "kwargs" in bases:
                    yield getattr(name, "value", None)
            case ast.Compare(left=name, comparators=[ast.Name(id="kwargs")]):
                if "kwargs" in bases:
                    yield getattr(name, "value", None)


def reached(tree: ast.Module, starts: set[str]) -> Iterator[ast.stmt]:
    """Yield the classes and functions of a module that some of them refer to."""
    known = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    left, seen = [*(starts & known.keys())], set[str]()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            yield known[name]
            names = {name_of(node) for node in ast.walk(known[name])}
            left += names & known.keys()


def module_of(kind: type) -> Path:
    return Path(str(sys.modules[kind.__module__].__file__))


def of_config(kind: Any) -> dict[str, Any]:
    """Return the keys of a class of configs, with the defaults of its fields."""
    keys: dict[str, Any] = dict.fromkeys({*kind.attribute_map, *kind.attribute_map.values()})
    own = [each for each in kind.__mro__ if ".models." in each.__module__]
    for each in own:
        nodes = (n for n in tree_of(module_of(each)).body if name_of_class(n) == each.__name__)
        keys |= dict.fromkeys(filter(plain, names_read(next(nodes), ("kwargs",))))
    for field in fields(kind):
        keys[field.name] = field.default
    if isinstance(kind.default_theta, float) and "rope_parameters" in keys:
        keys["rope_theta"] = kind.default_theta
    return keys


def name_of_class(node: ast.AST) -> str:
    return node.name if isinstance(node, ast.ClassDef) else ""


def rows() -> dict[str, dict[str, Any]]:
    """Return the keys of each model type, and under ``all`` those that every type has."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    root, base = Path(transformers.__file__).parent, transformers.PreTrainedConfig
    shared = {field.name for field in fields(base)}
    for name in SHARED:
        of_base = name in ("configuration_utils", "modeling_rope_utils")
        bases = ("config", "kwargs", "self") if of_base else ("config",)
        shared |= {*filter(plain, names_read(tree_of(root / f"{name}.py"), bases))}
    methods = {name for name in shared if callable(getattr(base, name, None))}
    result = {"all": dict.fromkeys(shared - methods)}
    for kind in sorted({*FAMILIES, *ENCODERS, *SAME, *OUTER}):
        config = CONFIG_MAPPING[kind]
        keys = result[kind] = of_config(config)
        if kind in OUTER:  # only to tell its keys from those of a text
            continue
        maps = (getattr(modeling_auto, f"{name}_MAPPING_NAMES") for name in MAPPINGS)
        starts = {name for each in maps if (name := each.get(kind))}
        folder = module_of(config)
        path = folder.with_name(folder.name.replace("configuration", "modeling"))
        for node in reached(tree_of(path), starts):
            read = {*filter(plain, names_read(node, ("config",)))}
            keys |= dict.fromkeys(read - keys.keys())
    return result


def table() -> str:
    """Return the text of the table."""
    every, lines = rows(), []
    for kind, keys in every.items():
        words = {
            key: word(key, keys.get(key)) for key in sorted({*keys, *every["all"]}) if plain(key)
        }
        every[kind] = {key: each for key, each in words.items()}
    for key in every["all"]:  # with the default that most types have
        counts = Counter(keys[key] for kind, keys in every.items() if kind not in ("all", *OUTER))
        every["all"][key] = counts.most_common(1)[0][0]
    for kind, keys in every.items():
        same = {} if kind == "all" else every["all"]
        words = [each for key, each in keys.items() if same.get(key) != each]
        words = [each for each in words if each not in same] if kind in OUTER else words
        text = f"{kind}: {' '.join(words)}"
        lines += textwrap.wrap(text, 100, subsequent_indent=" ", break_on_hyphens=False)
    return "\n".join(lines)


def word(key: str, default: Any) -> str:
    """Return a key as the table has it; tokens have no default but the one that ends a text."""
    usable = isinstance(default, bool | int | float | str)
    usable &= key == "eos_token_id" or not key.endswith("_id")
    return f"{key}={json.dumps(default)}" if usable else key


def plain(key: Any) -> bool:
    """Return whether a name can be a key that counts."""
    return isinstance(key, str) and key.isidentifier() and not key.startswith("_")


def written() -> str:
    """Return the module with a new table."""
    import transformers

    before = FILE.read_text(encoding="utf-8").partition(START)[0].splitlines()
    version = f'VERSION = "{transformers.__version__}"'
    kept = [version if line.startswith("VERSION") else line for line in before]
    return "\n".join([*kept, f"{START}\\", table(), '"""', ""])


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
