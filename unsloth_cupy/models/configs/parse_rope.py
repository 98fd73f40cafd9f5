"""Parse the rotary positions of a config.json, in older and newer forms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.call import is_number
from ...errors import ConfigError
from ...ops.position.rope_tables import scaled_frequencies
from .config import FULL, SLIDING, Rope
from .reading import MOST, Reader, refuse_unread

ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
LOCAL = "rope_local_base_freq"  # key of sliding layers' rope_theta, in older configs
GROWING = ("dynamic", "longrope")  # types whose angles depend on the length of the sequence
# Keys of rope_parameters that are known in all families.
OF_ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    *("partial_rotary_factor", "max_position_embeddings", "finetuned"),
    "attn_factor",  # of other programs; ignored, as in transformers
}


def rope_of(read: Reader, kind: str, dim: int) -> Rope:
    """Return the rotary positions of the layers of one type, and the growth of their queries."""
    rope, still = _rope_of(read, kind, dim), "attn_scale" in read.family.defaults
    if rope.growth is None or not (still or read.family.latent):
        return rope
    return replace(rope, whole=True, still=still, ahead=int(still))


def _rope_of(read: Reader, kind: str, dim: int) -> Rope:
    """Return the rotary positions of the layers of one type.

    The newer form is ``rope_parameters``, for all layers or by layer type; the older one is
    ``rope_theta``, ``rope_scaling`` and, in Gemma 3, ``rope_local_base_freq``.
    """
    read = _of_modernbert(read) if "global_rope_theta" in read.defaults else read
    parameters = _parameters(read, kind)
    base = Reader(parameters, read.family).number("rope_theta")
    if base <= 0:
        raise ConfigError("config: rope_theta is 0; it must be positive")
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if (
        "qkv_proj" in read.family.names.qkv
        and "qkv" in read.family.fused
        and name in ("su", "yarn")
    ):  # Phi-3's old names of longrope
        name = "longrope"
    if name not in ("default", "longrope") and parameters.get("short_mscale") is not None:
        raise ConfigError(f"config: short_mscale is for longrope only, and rope_type is {name!r}")
    if name not in ROPES:
        raise ConfigError(f"config: rope_type is {name!r}; choose from {', '.join(ROPES)}")
    share = parameters.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor")
    share = None if read.family.latent else share  # the rotated part of a head has its own size
    alpha = Reader({"alpha": parameters.pop("alpha", None) or 0}, read.family).number("alpha")
    if alpha and name == "dynamic" and dim > 2:  # Hunyuan's form, which ignores the length
        name, base = "default", base * alpha ** (dim / (dim - 2))
    share = _share(read, name, dim, share)
    growth = _growth(read, parameters, share)
    if name == "proportional":  # the whole head has frequencies, most of which are 0
        parameters |= {"rope_type": name, "partial_rotary_factor": share}
        return _checked(Rope(dim, base, parameters, growth=growth))
    if name == "default":
        return _checked(Rope(int(dim * share), base, growth=growth))
    positions = read.size("max_position_embeddings")
    original = positions
    if name != "dynamic":
        reader = Reader({"original": read.get("original_max_position_embeddings")}, read.family)
        original = parameters.get("original_max_position_embeddings", positions)
        original = reader.size("original") if reader.get("original") else original
        if not is_number(original) or not 1 <= original <= MOST:
            problem = f"original_max_position_embeddings is {original!r}"
            raise ConfigError(f"config: {problem}; it must be a number in 1 .. {MOST}")
    parameters |= {"rope_type": name, "original_max_position_embeddings": original}
    if name in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = positions / original
    grows = original if name in GROWING else None
    return _checked(Rope(int(dim * share), base, parameters, grows, growth))


def _of_modernbert(read: Reader) -> Reader:
    """Return a reader in which ModernBERT's older keys have the names that other families use."""
    older = {"global_rope_theta": "rope_theta", LOCAL: LOCAL, "local_rope_theta": LOCAL}
    both = {new: read.get(key) for key, new in older.items() if read.get(key) is not None}
    return Reader({**read.values, **both}, read.family)


def _share(read: Reader, name: str, dim: int, share: Any) -> float:
    """Return which share of a head's elements are rotated; ``share`` is the value of the key."""
    if share is None and read.get("rotary_dim") is not None:
        share = read.size("rotary_dim") / dim
    share = share or 1
    if name == "default" and not read.family.partial:
        share = 1  # the family's class in transformers ignores the key for this type
    if (
        type(share) not in (int, float)
        or not 0 < share <= 1
        or (name != "proportional" and int(dim * share) % 2)
    ):
        raise ConfigError(
            f"config: partial_rotary_factor={share!r} times head_dim={dim} must be an even number"
            " of elements; choose a share in (0, 1] and an even head_dim"
        )
    return float(share)


def _parameters(read: Reader, kind: str) -> dict[str, Any]:
    """Return the settings of rotary positions for the layers of one type."""
    scaling = read.get("rope_scaling") or {}
    by_type = read.family.local or LOCAL in read.family.defaults
    newer = (read.values.get if scaling else read.not_null)("rope_parameters") or {}
    if not isinstance(newer, Mapping) or not isinstance(scaling, Mapping):
        raise ConfigError("config: rope_parameters and rope_scaling must be dicts")
    assumed = read.values.get("rope_parameters") is None and newer
    if assumed and read.values.get("rope_theta") not in (None, newer.get("rope_theta")):
        cure = "put both into rope_parameters"
        raise ConfigError(f"config: rope_theta is present without rope_scaling; {cure}")
    nested, both = by_type and (FULL in newer or SLIDING in newer), (FULL, SLIDING)
    dicts = nested and all(isinstance(newer.get(name) or {}, Mapping) for name in both)
    if (nested or (newer and read.family.local)) and not dicts:
        raise ConfigError("config: rope_parameters must contain a dict for each layer type")
    theta = read.get(LOCAL) if kind == SLIDING and LOCAL in read.family.defaults else None
    local = theta is not None or (kind == SLIDING and read.family.local)
    parameters = dict(newer.get(kind) or {}) if nested else {} if local else {**newer, **scaling}
    known = {*OF_ROPE, *read.family.factors, *read.family.of_rope}
    unread = {k: v for k, v in parameters.items() if k not in known}
    without = [k for k, v in unread.items() if v is None or v is False]
    refuse_unread({k: v for k, v in unread.items() if k not in without}, "config: rope_parameters")
    parameters.setdefault("rope_theta", read.get("rope_theta") if theta is None else theta)
    return parameters


def _growth(read: Reader, parameters: dict[str, Any], share: float) -> tuple[float, float] | None:
    """Return (beta, length) of queries whose scale grows with their position: see ``Rope``."""
    if "attn_scale" in read.family.defaults:
        tuned = read.get("attn_temperature_tuning")
        return (read.number("attn_scale"), read.size("floor_scale")) if tuned else None
    beta = parameters.pop("llama_4_scaling_beta", None)
    if "llama_4_scaling_beta" not in read.family.factors or not beta:
        return None
    if share != 1 and not read.family.latent:
        raise ConfigError("config: llama_4_scaling_beta requires partial_rotary_factor=1")
    length = parameters.get("original_max_position_embeddings")
    reader = Reader(
        {"llama_4_scaling_beta": beta, "original_max_position_embeddings": length}, read.family
    )
    return reader.number("llama_4_scaling_beta"), reader.size("original_max_position_embeddings")


def _checked(rope: Rope) -> Rope:
    """Return the rope; raise for invalid numbers, including those that only long texts use."""
    try:
        for length in {1, (rope.original or 0) + 1}:
            scaled_frequencies(rope.scaling, length, rope.dim, rope.base)
    except ConfigError as error:
        raise ConfigError(f"config: {error}") from error
    return rope
