"""Counts operations of the matrix products of a pipeline stage, for each chunk of its blocks."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..models.adapters.adapter import PREFIX
from ..models.configs.config import Config
from ..models.configs.heads import CAUSAL
from ..models.configs.names import is_stack
from ..models.ranks.division import Division
from ..models.ranks.pipeline_stages import EMBEDDING, HEAD
from ..parallel.communicator import part


def products(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    adapter: Mapping[str, Any],
    division: Division | None,
    rows: tuple[int, int],
    own: int,
    again: bool,
) -> list[tuple[float, float]]:
    """Return the operations of each chunk in a microbatch, forward and backward.

    The backward pass has one product for the gradient of the input, and one for that of the weight
    if the weight is trained: with an adapter, only the adapter is.

    Parameters
    ----------
    config : Config
        Of the model.
    shapes : dict of str to tuple
        Of this rank's weights.
    adapter : dict of str to array
        This rank's part of an adapter; empty where all weights learn.
    division : Division or None
    rows : (int, int)
        Rows of a microbatch, and tokens in each.
    own : int
        Tokens of each row that this rank has.
    again : bool
        Whether blocks run a second time in the backward pass.
    """
    stages = None if division is None else division.stages
    heads = (config if division is None else division.config).heads
    batch, tokens = rows
    share, experts = 1.0, config.experts
    if experts is not None:  # other ranks send as many tokens as go to them
        ranks = None if division is None else division.experts
        held = experts.count if ranks is None else part(experts.count, ranks).stop
        share = experts.k / held
    result = []
    for chunk in range(1 if stages is None else stages.chunks):
        layers: Iterable[int] = range(config.layers) if stages is None else stages.layers[chunk]
        here = _used(shapes, chunk, stages, share)
        added = _used({n: array.shape for n, array in adapter.items()}, chunk, stages, share)
        ends = stages is None or stages.ends_with(chunk)
        writes = ends and config.head == CAUSAL  # other heads have few outputs of a text
        head = shapes[EMBEDDING if config.tied else HEAD] if writes else (0,)
        loss = 2.0 * batch * own * math.prod(head)
        blocks, adapters = (2.0 * batch * own * each for each in (here, added))
        scores = 4.0 * batch * heads * config.dim * _seen(config, layers, tokens) * own / tokens
        times = 1 if adapter else 2
        back = times * (blocks + loss) + 2 * adapters + 2.5 * scores
        once = blocks + adapters + scores
        result.append((float(once + loss), float(back + once * again)))
    return result


def _used(shapes: Mapping[str, tuple[int, ...]], chunk: int, stages: Any, share: float) -> float:
    """Return the elements of the matrices of a chunk by which a token is multiplied.

    ``share`` is that of this rank's experts: k of them.
    """
    elements = 0.0
    for name, shape in shapes.items():
        matrix = len(shape) == 2 and name not in (EMBEDDING, HEAD) and not name.endswith("_bias")
        here = stages is None or chunk in stages.chunk_of(name.removeprefix(PREFIX))
        if not here or not (matrix or is_stack(name)):
            continue
        elements += math.prod(shape) * (share if ".experts." in name else 1)
    return elements


def _seen(config: Config, layers: Iterable[int], tokens: int) -> int:
    """Return the number of keys that all queries of a row see, in all layers."""
    windows = (config.window_of(layer) or tokens for layer in layers)
    return sum(min(query + 1, window) for window in windows for query in range(tokens))
