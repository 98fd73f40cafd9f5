"""settings.json, and the comparison that decides whether a run may be resumed."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.call import is_number
from ...core.names import RENAMED
from ...errors import ConfigError
from ...files import read_json
from ...models.gguf.opening import source_of
from ..data.iterables import NAME
from ..data.records import Records
from ..data.text import Text
from ..methods.method import FOLDERS
from ..naming import named
from .new_model import SIZES
from .settings import Settings

OTHERS = {"python-docs": "Python's documentation", NAME: "an iterable of rows"}  # not files
# If the longest row has more than 1.5 times the 99th percentile, the default length is the 99th
# percentile: 1.5 times the length needs 1.5 times the memory, an outlier perhaps 100 times.
OUTLIER = 1.5
MORE = ("steps", "epochs", "evaluate_every")  # settings that may change when a run is finished
# not compared: they describe a text that has changed, belong to the earlier run, or change no bit
ABOUT = ("text_file", "text_bytes", "outlier", "recompute_every", "keep", "offload", "save_every")


def stored_settings(
    settings: Settings, text: Text | Records, source: Path | None, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of settings.json: all settings that a resumed run must share."""
    path, plan = text.path, settings.decided(new=source is None)
    fields = dataclasses.fields(Settings)
    result = {
        "model": None if source is None else str(source_of(source).resolve()),
        "text": text.name,
        "text_file": None if path is None else str(path.resolve()),
        "text_bytes": text.size,
        "text_sha256": text.digest,
        **{
            each.name: getattr(plan, each.name)
            for each in fields
            if each.metadata.get("kept", True)
        },
        "keeps_best": plan.keeps_best,
        "quantize": settings.quantize,
    }
    folders = ((name, getattr(settings, name)) for name in (*FOLDERS, "new_tokens"))
    result |= {name: None if path is None else str(Path(path).resolve()) for name, path in folders}
    if isinstance(text, Records):
        result["pack"] = settings.pack is not False
    if source is None:
        result |= {name: getattr(settings, name) or size for name, size in SIZES.items()}
    if isinstance(text, Records):
        result["tokens"] = settings.tokens  # None: the data determine the length
        result["outlier"] = OUTLIER
    if settings.steps is None and (settings.epochs is not None or source is not None):
        every = settings.evaluate_every
        result |= {"steps": None, "epochs": settings.epochs, "evaluate_every": every}
    return result | {"base": base}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, ended: bool) -> list[str]:
    """Return in words how the settings of two runs differ; ``ended`` allows more steps or epochs.

    Settings that an earlier version did not write count as equal.
    """
    now = json.loads(json.dumps(now))
    changed = [key for key in now if key in before and before[key] != now[key]]
    if ended and any(_more(before.get(key), now.get(key)) for key in ("steps", "epochs")):
        changed = [key for key in changed if key not in MORE]
    result = []
    for key in changed:
        if key in ABOUT:
            continue
        if key == "text_sha256" and before.get("text_file") == now.get("text_file"):
            then, size = (each.get("text_bytes") or 0 for each in (before, now))
            name = now.get("text_file") or OTHERS.get(now["text"], now["text"])
            sizes = f"{then:,} bytes then, {size:,} now" if then != size else f"{size:,} bytes both"
            result.append(f"another text: {name} has changed since ({sizes})")
        elif key == "text_sha256":
            then = before.get("text_file") or before.get("text")
            result.append(f"another text: {then} (now {now.get('text_file') or now['text']})")
        elif key == "base":
            result += _other_files(before[key] or {}, now[key] or {})
        elif key != "text" or "text_sha256" not in changed:
            result.append(f"{key} {before[key]} (now {now[key]})")
    return result


def own_settings(
    settings: Settings, now: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of an earlier run that replace defaults of the present settings.

    These are settings that have their defaults now and differ from the earlier run.  The dtype is
    always included, because its default depends on the device; the method never, because the data
    are already read for it.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(Settings)}
    for name in ("method", "base", "eval"):  # base and eval have other values in settings.json
        del defaults[name]
    if settings.steps is not None or settings.epochs is not None:
        for name in MORE:
            del defaults[name]
    return {
        name: value
        for name, value in before.items()
        if name in defaults
        and (value != now.get(name) or name == "dtype")
        and getattr(settings, name) == defaults[name]
    }


def requests_more(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether more steps or epochs are requested than an earlier run had."""
    return any(_more(before.get(key), now.get(key)) for key in ("steps", "epochs"))


def _more(before: Any, now: Any) -> bool:
    """Return whether both numbers are set and the second is larger."""
    return before is not None and now is not None and now > before


def _other_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words which files of a base model are changed, new or missing."""
    if (memory := "the model" in before) != ("the model" in now) and before and now:
        then, other = ("a model in memory", "a folder")[:: 1 if memory else -1]
        return [f"another base model: {then} (now {other})"]
    result = []
    for name in sorted({*before, *now}):
        digests = [each.get(name, {}).get("sha256") for each in (before, now)]
        if digests[0] != digests[1]:
            state = "is new" if digests[0] is None else "is gone" if digests[1] is None else "has"
            state += " changed since" if state == "has" else ""
            what = (
                name
                if name.startswith(("reward ", "environment ", "new tokens"))
                else f"another base model: {name}"
            )
            result.append(f"{what} {state}")
    return result


def read_settings(path: Any) -> dict[str, Any]:
    """Return the settings of a run from settings.json; raise a ConfigError if it is broken."""
    problem = f"{path} is broken; name a new folder with {named('out')}"
    try:
        settings = read_json(path)
    except ConfigError:
        raise ConfigError(problem) from None
    base = settings.get("base") or {}
    files = isinstance(base, dict) and all(isinstance(each, dict) for each in base.values())
    settings = {RENAMED.get(key, key): value for key, value in settings.items()}
    for name in ("offload", "chunked_mlp"):
        if settings.get(name) is False:  # the default of earlier versions, now None
            del settings[name]
    numbers = (settings.get(key) for key in (*MORE, "text_bytes", "outlier"))
    if not files or not all(number is None or is_number(number) for number in numbers):
        raise ConfigError(problem)
    return settings
