"""A model with fewer layers, from which sizes and times of the whole model follow.

Bytes and seconds of a step grow by the same amount with each further period of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .config import Config
from .draft_heads import prefixes

LONGEST_PERIOD = 12  # more than the 8 layers of the longest period among the families


def with_layers(config: Config, count: int) -> Config:
    """Return the config of a model that has only the first ``count`` layers."""
    experts, indexer = config.experts, config.indexer
    names = [
        new + name.removeprefix(old)
        for old, new in zip(prefixes(config), prefixes(replace(config, layers=count)), strict=True)
        for name in config.draft_tables
        if name.startswith(old)
    ]
    return replace(
        config,
        draft_tables=tuple(names),
        layers=count,
        layer_types=config.layer_types[:count],
        rotated=config.rotated[:count],
        indexer=indexer and replace(indexer, shared=indexer.shared[:count]),
        experts=experts
        and replace(experts, sparse=experts.sparse[:count], chosen=experts.chosen[:count]),
    )


def period_of(config: Config) -> tuple[int, int]:
    """Return the number of first layers that differ, and the period of the layers after them."""
    kinds = [
        (kind, config.rotates(layer), *_experts_of(config, layer), _shares(config, layer))
        for layer, kind in enumerate(config.layer_types)
    ]
    pairs = (
        (first, period)
        for period in range(1 + config.paired, LONGEST_PERIOD + 1, 1 + config.paired)
        for first in range(0, LONGEST_PERIOD, 1 + config.paired)
        if kinds[first:-period] == kinds[first + period :]
    )
    return min(pairs, key=sum, default=(0, config.layers))


def _shares(config: Config, layer: int) -> bool:
    """Return whether a layer uses the keys that an earlier layer's indexer has chosen."""
    return config.indexer is not None and config.indexer.shared[layer]


def _experts_of(config: Config, layer: int) -> tuple[bool, int]:
    """Return whether a layer has experts, and how many compute a token."""
    experts = config.experts
    return (False, 0) if experts is None else (experts.sparse[layer], experts.k_of(layer))


def extrapolated(config: Config, measure: Callable[[Config], Sequence[float]]) -> list[float]:
    """Return what ``measure`` would return for a model, from models with fewer layers.

    A period of layers is repeated three and four times.  Fewer are off the line: the first and the
    last layers of a step hold other arrays, and offload also those of the layer before the last.
    """
    first, period = period_of(config)
    few, more = first + 3 * period, first + 4 * period
    if config.layers <= more:
        return [*measure(config)]
    repeats = (config.layers - few) / period
    pairs = zip(measure(with_layers(config, few)), measure(with_layers(config, more)), strict=True)
    return [low + repeats * (high - low) for low, high in pairs]
