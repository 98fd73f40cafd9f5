"""Recognition of unknown model types: a known family that computes the same as transformers.

    family, settings = recognised({"model_type": "cwm", ...})

``family`` is a row of ``FAMILIES``, or a variant of one.  ``settings`` is config.json with the
defaults of the type.

A family is recognised if a small model of the type, with random weights, has the tensors of the
family, and the same logits in both implementations.  A family that does not read all keys of
config.json is excluded.  If no family is recognised, the error names the nearest one, with the keys
and tensors that differ.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from .config import Config
from .families import FAMILIES
from .family import Family
from .names import parameter_name
from .reading import SHOWN, listed, unread_keys

Parse = Callable[[Mapping[str, Any], Family], Config]
# Layers and tokens of the small model: enough for each kind of layer, and for a sliding window.
# CLOSE is the largest difference of logits, relative to the largest logit, in float32.
MOST_LAYERS, TOKENS, CLOSE = 6, 24, 1e-4
# Upper bounds of the small model's sizes.
SMALL = {
    "vocab_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": MOST_LAYERS,
    "sliding_window": 5,
}
HEADS = 4


class Unknown(NamedTuple):
    """Why no family is recognised; the type's tensors and settings, if transformers has it."""

    reason: str
    tensors: Collection[str] = ()
    settings: Mapping[str, Any] = MappingProxyType({})


def recognised(
    values: Mapping[str, Any], parse_as: Parse, stored: Callable[[], Collection[str]]
) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a model whose type is not in ``FAMILIES``, and all its settings.

    ``stored`` returns the names of the tensors in the model's files, for the error.

    Raises
    ------
    ConfigError
        transformers does not support the type or is not installed, or no family fits.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        known = ", ".join(sorted({*FAMILIES, "gemma3"}))
        raise ConfigError(f"config: model_type is {kind!r}; choose from {known}")
    if importlib.util.find_spec("transformers") is None:
        cure = "install the extra `peers` (transformers), with which more types are recognised"
        result: Any = Unknown(cure)
    else:
        try:
            text = json.dumps(values, sort_keys=True)
        except (TypeError, ValueError):
            raise ConfigError(f"config: model_type {kind!r}: values must be JSON values") from None
        result = _recognise(text, parse_as)
    if not isinstance(result, Unknown):
        known_family, settings = result
        return known_family, settings
    nearest = _nearest({**values, **result.settings}, result.tensors or stored(), parse_as)
    problem = f"config: model_type is {kind!r}, which is not supported"
    raise ConfigError("; ".join(filter(None, (problem, nearest, result.reason))))


def _nearest(values: Mapping[str, Any], tensors: Collection[str], parse_as: Parse) -> str:
    """Return the family with the fewest differing tensors, then keys, and these differences."""
    names = {_without_numbers(own) for own in map(parameter_name, tensors) if own is not None}
    compared, failed = [], list[tuple[int, str]]()
    for kind, family in FAMILIES.items():
        unread = unread_keys(values, family)
        try:
            config = parse_as({k: v for k, v in values.items() if k not in unread}, family)
        except ConfigError as error:
            reason = str(error).removeprefix("config: ").split(";")[0]
            failed.append((len(unread), f"{kind}, but {reason}"))
            continue
        known = {_without_numbers(name) for name in config.shapes()} if names else set[str]()
        differences = [
            f"does not read {listed(unread)}" if unread else "",
            f"has no {_shown(names - known)}" if names - known else "",
            f"needs {_shown(known - names)}" if known - names else "",
        ]
        which = " and ".join(filter(None, differences))
        score = len(names ^ known), len(unread)
        compared.append((score, f"{kind}, which {which}" if which else kind))
    nearest = min(compared or failed, key=lambda each: each[0])[1]
    return f"the nearest known family is {nearest}"


def _without_numbers(name: str) -> str:
    """Return a parameter's name without numbers of layers; files name experts in many ways."""
    return re.sub(r"\.\d+(?=\.)", "", name.partition(".experts.")[0])


def _shown(names: Collection[str]) -> str:
    """Return the first names for a message."""
    first = [name.removeprefix("model.layers.") for name in sorted(names)]
    return ", ".join(first[:SHOWN]) + f" and {len(first) - SHOWN} more" * (len(first) > SHOWN)


@lru_cache(maxsize=16)
def _recognise(text: str, parse_as: Parse) -> tuple[Family, Mapping[str, Any]] | Unknown:
    """Return the family of a config.json and all settings, or the reason why none fits."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = json.loads(text)
    kind = values.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return Unknown("transformers has no such type to compare with")
    try:
        whole = _plain(AutoConfig.for_model(kind, **values))
        rows = _readers(whole, parse_as)
        small = AutoConfig.for_model(kind, **_small(whole))
    except Exception as error:
        message = next(iter(str(error).splitlines()), type(error).__name__)
        return Unknown(f"transformers rejects the config: {message}")
    settings = _plain(small)
    try:
        parameters, tokens, expected = _computed(small)
    except Exception as error:
        return Unknown(f"a small model of the type does not run: {type(error).__name__}: {error}")
    known = [(family, parse_as(settings, family)) for family in rows]
    shapes = {name: array.shape for name, array in parameters.items()}
    fits = [row for row, config in _varied(known) if config.shapes() == shapes]
    for family in fits:
        if _agrees(parse_as(settings, family), parameters, tokens, expected):
            return family, whole
    why = "its logits differ from those of every family with its tensors" if fits else ""
    return Unknown(why, shapes.keys(), whole)


def _readers(values: Mapping[str, Any], parse_as: Parse) -> list[Family]:
    """Return the families that read a whole config.json."""
    rows = []
    for family in FAMILIES.values():
        with suppress(ConfigError):
            parse_as(values, family)
            rows.append(family)
    return rows


def _varied(rows: list[tuple[Family, Config]]) -> Iterator[tuple[Family, Config]]:
    """Yield families, then variants of them: with norms of other families, other rotary pairs."""
    yield from rows
    norms = {family.norms for family in FAMILIES.values()}
    for family, config in rows:
        for other in (family.norms, *sorted(norms - {family.norms}, key=repr)):
            for interleaved in (config.interleaved, not config.interleaved):
                varied = replace(family, norms=other, interleaved=interleaved)
                before_mlp = None if config.parallel else other.before_mlp
                own = replace(other, before_mlp=before_mlp)
                yield varied, replace(config, norms=own, interleaved=interleaved)


def _plain(config: Any) -> dict[str, Any]:
    """Return a config of transformers as a dict, as in config.json."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a small model: every kind of layer, few heads of the same length."""
    layers, heads = values.get("num_hidden_layers"), values.get("num_attention_heads")
    small = {key: value for key, value in values.items() if key != "model_type"}
    for key, most in SMALL.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], most)
    for key, value in small.items():
        if isinstance(value, list) and len(value) == layers:
            small[key] = value[: small["num_hidden_layers"]]
    if isinstance(heads, int) and isinstance(small.get("hidden_size"), int) and heads > 0:
        dim = small.get("head_dim") or small["hidden_size"] // heads
        shares = max(1, heads // (small.get("num_key_value_heads") or heads))
        small |= {"num_attention_heads": HEADS, "hidden_size": HEADS * dim}
        if small.get("num_key_value_heads"):
            small["num_key_value_heads"] = HEADS // min(HEADS, 1 << (shares - 1).bit_length())
    for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if small.get(key) is not None:
            small[key] = number
    return small


def _computed(config: Any) -> tuple[dict[str, Array], Array, Array]:
    """Return random weights of a small model by name, tokens, and transformers' logits."""
    import torch
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    state = torch.random.get_rng_state()
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    finally:
        torch.random.set_rng_state(state)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            drawn = spread * torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn + (weight.ndim == 1 and not name.endswith("bias")))
        tokens = torch.randint(config.vocab_size, (2, TOKENS), generator=generator)
        logits = model(input_ids=tokens, use_cache=False).logits
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = set(model.state_dict())
    arrays = {
        own: array.detach().numpy()
        for name, array in named.items()
        if name in stored and (own := parameter_name(name)) is not None
    }
    return arrays, tokens.numpy(), logits.numpy()


def _agrees(
    config: Config, parameters: Mapping[str, Array], tokens: Array, expected: Array
) -> bool:
    """Return whether a ``Transformer`` with this config computes the expected logits."""
    from ..transformer import Transformer

    ordered = {name: parameters[name] for name in config.shapes()}
    actual = Transformer(config, ordered, {}).logits(tokens)
    return bool(np.abs(actual - expected).max() <= CLOSE * max(1.0, np.abs(expected).max()))
