"""Gather the whole parameters of a divided model in rank 0, to save them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...core.dtypes import Stored
from ...errors import ConfigError
from ...placement import to_numpy
from .division import Division


def whole_parameters(
    parameters: Mapping[str, Any], division: Division | None
) -> Iterator[dict[str, Any]]:
    """Yield the whole parameters once, in rank 0 only; all ranks must iterate.

    Other ranks wait until rank 0 has used them, so that its file exists when they continue.
    """
    if division is None:
        yield dict(parameters)
        return
    frozen = next((name for name, value in parameters.items() if isinstance(value, Stored)), None)
    if frozen is not None:
        cure = "save_adapter(folder) writes the trained adapter"
        raise ConfigError(f"save: {frozen} is quantized and divided among ranks; {cure}")
    first, stages = division.first, division.stages
    whole: dict[str, Any] = {}
    for stage, name, shape, dtype in _listed(parameters, division):
        in_stage = stages is None or stage == stages.comm.rank
        array = division.gathered(name, parameters[name]) if in_stage else None
        if name in whole or not first:
            continue
        if stages is not None and stage and stages.comm.rank == 0:
            array = stages.comm.receive(np.empty(shape, dtype), stage)
        elif stages is not None and stage and in_stage:
            stages.comm.send(to_numpy(array), 0)
        whole[name] = to_numpy(array) if array is not None else None
    if first and (stages is None or stages.first):
        yield whole
    for group in (*division.groups, *([] if stages is None else [stages.comm])):
        group.barrier()


def _listed(
    parameters: Mapping[str, Any], division: Division
) -> list[tuple[int, str, list[int], str]]:
    """Return (stage, name, whole shape, dtype) of the parameters in all stages, each name once."""
    stages = division.stages
    rank = 0 if stages is None else stages.comm.rank
    own = [
        (rank, name, [*division.whole_shape(name, array.shape)], array.dtype.name)
        for name, array in parameters.items()
    ]
    if stages is None:
        return own
    text = "".join(json.dumps(each) + "\n" for each in own)
    all_lines = stages.comm.all_gather(np.frombuffer(text.encode(), np.uint8))
    listed, seen = [], set()
    for line in bytes(all_lines).decode().splitlines():
        stage, name, shape, dtype = json.loads(line)
        if name not in seen:  # the first and the last stage may share the embedding
            seen.add(name)
            listed.append((stage, name, shape, dtype))
    return listed
