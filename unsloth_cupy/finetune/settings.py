"""The settings of a run, and their comparison when it is resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from ..training.checkpoint import CheckpointConfig
from ..training.precision import MixedPrecisionConfig
from .naming import named

if TYPE_CHECKING:
    from .records import Records
    from .text import Text

MORE = ("steps", "epochs", "evaluate_every")  # settings that may change when a run is finished
ABOUT = ("text_file", "text_bytes")  # settings that only describe a text that has changed


class Settings(NamedTuple):
    """Hyperparameters and options of a training run."""

    steps: int
    lr: float
    weight_decay: float
    max_norm: float
    seed: int
    evaluate_every: int
    save_every: int
    dtype: str = "float32"
    lora: int | None = None
    accumulate: int = 1
    checkpoint_every: int | None = None
    state_bits: int = 32
    chunked_mlp: bool = False
    keep: tuple[str, ...] = ()
    offload: bool = False
    loss_scale: float = 65536.0
    dynamic_scaling: bool = True
    quantize: str | None = None

    @property
    def checkpoint(self) -> CheckpointConfig | None:
        """Which blocks are recomputed in the backward pass; None: none."""
        if self.checkpoint_every is None:
            return None
        every, keep = self.checkpoint_every, tuple(self.keep)
        return CheckpointConfig(checkpoint_every=every, keep=keep, offload=self.offload)

    @property
    def precision(self) -> MixedPrecisionConfig:
        """The dtype of the computation, and the loss scale."""
        scale, dynamic = self.loss_scale, self.dynamic_scaling
        return MixedPrecisionConfig(self.dtype, loss_scale=scale, dynamic_scaling=dynamic)


def settings_of(
    plan: Settings,
    text: "Text | Records",
    source: Path | None,
    base: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Return the content of settings.json: all that a resumed run must have in common."""
    path = text.path
    return {
        "model": None if source is None else str(source.resolve()),
        "text": text.name,
        "text_file": None if path is None else str(path.resolve()),
        "text_bytes": text.size,
        "text_sha256": text.digest,
        **plan._asdict(),
        **more,
        "base": base,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, ended: bool) -> list[str]:
    """Return the differences of two runs' settings in words; ``ended`` allows more steps or epochs.

    A setting that an earlier version did not write counts as the same.
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
            name = now.get("text_file") or "Python's documentation"
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


def asks_for_more(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether more steps or epochs are requested than a run had."""
    return any(_more(before.get(key), now.get(key)) for key in ("steps", "epochs"))


def _more(before: Any, now: Any) -> bool:
    """Return whether both numbers are set and the second is larger."""
    return before is not None and now is not None and now > before


def _other_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words which files of a base model have changed, are new or are gone."""
    result = []
    for name in sorted({*before, *now}):
        digests = [each.get(name, {}).get("sha256") for each in (before, now)]
        if digests[0] != digests[1]:
            state = "is new" if digests[0] is None else "is gone" if digests[1] is None else "has"
            state += " changed since" if state == "has" else ""
            result.append(f"another base model: {name} {state}")
    return result


def read_settings(path: Any) -> dict[str, Any]:
    """Return the settings that a run was started with, or raise a ConfigError."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings.keys()
    except (OSError, ValueError, AttributeError):
        raise ConfigError(f"{path} is broken; name a new folder with {named('out')}") from None
    return dict(settings)
