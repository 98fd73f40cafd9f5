"""The keys of Gemma 4 and EmbeddingGemma 2: both forms of head sizes by layer, in terms of one.

global_head_dim, num_global_key_value_heads           released: of layers with full attention
per_layer_config: {"5": {"head_dim": 512, ...}}       transformers: of single layers
"""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .config import FULL, SLIDING
from .reading import MOST_OF, refuse_unread

PERIOD = 6  # of layers; the last of a period has full attention
SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def of_gemma4(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json in its released form, with layer_types.

    Raises
    ------
    ConfigError
        per_layer_config has another key, or sizes that differ among layers of one type; or
        sliding_window_pattern is not a number of layers.
    """
    older = ("rope_theta", "rope_scaling")  # the class of transformers reads rope_parameters alone
    read = {key: value for key, value in values.items() if key not in older}
    layers = values.get("num_hidden_layers", 30)
    listed = read.pop("per_layer_config", None)
    if type(layers) is not int or not 0 < layers <= MOST_OF["num_hidden_layers"]:
        return read  # invalid: the caller raises
    types = read.get("layer_types") if read.get("layer_types") is not None else _types(read, layers)
    if isinstance(types, list) and types:  # as in transformers, whatever config.json says
        read["layer_types"] = types = [*types[:-1], FULL]
    if not read.get("attention_k_eq_v") and defaults["num_global_key_value_heads"] is None:
        read["num_global_key_value_heads"] = None
    if not read.get("enable_moe_block"):
        read["num_experts"] = None
    if read.get("use_bidirectional_attention") == "vision":  # of images only
        read["use_bidirectional_attention"] = None
    if listed is None:
        return read
    read |= dict.fromkeys(SIZES.values())
    of_layers = listed if isinstance(listed, Mapping) else {}
    for layer, kind in enumerate(types if isinstance(types, list) else []):
        own = of_layers.get(str(layer), of_layers.get(layer, of_layers.get(kind))) or {}
        if not isinstance(own, Mapping) or not own.keys() <= SIZES.keys():
            refuse_unread({"per_layer_config": own}, "config")
        for key, other in SIZES.items():
            if own.get(key) is None or own[key] == values.get(key):
                continue
            if kind != FULL or read[other] not in (None, own[key]):
                problem = f"per_layer_config has {key}={own[key]} in layer {layer}"
                cure = f"only layers of type {FULL} may have another one, all of them the same"
                raise ConfigError(f"config: {problem}; {cure}")
            read[other] = own[key]
    read["global_head_dim"] = read["global_head_dim"] or read.get("head_dim", 256)
    return read


def _types(read: Mapping[str, Any], layers: int) -> list[str]:
    """Return the type of each layer: the last of each period has full attention."""
    period = read.get("sliding_window_pattern", PERIOD)
    if type(period) is not int or period < 1:
        raise ConfigError(f"config: sliding_window_pattern is {period!r}; it must be 1 or more")
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]
