"""Recognition of unknown model types: a known family that computes the same as transformers.

    family, settings = recognised({"model_type": "cwm", ...})

``family`` is a row of ``FAMILIES``, or a variant of one.  ``settings`` is config.json with the
defaults of the type.

A family is recognised if a small model of the type, with random weights, has the tensors of the
family, and the same logits in both implementations.  A family that does not read all keys of
config.json is excluded.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from .config import Config
from .families import FAMILIES
from .family import Family
from .names import parameter_name

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


def recognised(values: Mapping[str, Any], parse_as: Parse) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a model whose type is not in ``FAMILIES``, and all its settings.

    Raises
    ------
    ConfigError
        transformers does not support the type or is not installed, or no family fits.
    """
    kind, known = values.get("model_type"), ", ".join(sorted({*FAMILIES, "gemma3"}))
    problem = f"config: model_type is {kind!r}; choose from {known}"
    if not isinstance(kind, str):
        raise ConfigError(problem)
    if importlib.util.find_spec("transformers") is None:
        cure = "install the extra `peers` (transformers) to compare other types with these"
        raise ConfigError(f"{problem}; {cure}")
    try:
        text = json.dumps(values, sort_keys=True)
    except (TypeError, ValueError):
        raise ConfigError(problem) from None
    result = _recognise(text, parse_as)
    if isinstance(result, str):
        raise ConfigError(f"{problem}; {result}")
    return result


@lru_cache(maxsize=16)
def _recognise(text: str, parse_as: Parse) -> tuple[Family, Mapping[str, Any]] | str:
    """Return the family of a config.json and all settings, or the reason why none fits."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = json.loads(text)
    kind = values.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers does not support it either"
    try:
        whole = _plain(AutoConfig.for_model(kind, **values))
        rows, reason = _readers(whole, parse_as)
        if not rows:
            return f"no known family reads its config.json: {reason}"
        small = AutoConfig.for_model(kind, **_small(whole))
    except Exception as error:
        message = next(iter(str(error).splitlines()), type(error).__name__)
        return f"transformers rejects the config: {message}"
    settings = _plain(small)
    known = [(family, parse_as(settings, family)) for family in rows]
    try:
        parameters, tokens, expected = _computed(small)
    except Exception as error:
        return f"a small model of the type does not run: {type(error).__name__}: {error}"
    shapes = {name: array.shape for name, array in parameters.items()}
    fits = [row for row, config in _varied(known) if config.shapes() == shapes]
    why = "no known family has its tensors"
    for family in fits:
        if _agrees(parse_as(settings, family), parameters, tokens, expected):
            return family, whole
        why = "its logits differ from every known family's with its tensors"
    return why


def _readers(values: Mapping[str, Any], parse_as: Parse) -> tuple[list[Family], str]:
    """Return the families that read a config.json, and the shortest reason of the others."""
    rows, reasons = [], set[str]()
    for family in FAMILIES.values():
        try:
            parse_as(values, family)
            rows.append(family)
        except ConfigError as error:
            reasons.add(str(error).removeprefix("config: ").split(";")[0])
    return rows, min(reasons, key=len, default="")


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
