"""The blocks of a model that each rank of a pipeline stores.

    place = chunk * stages + stage          place p has the p-th part of all blocks

The first place also has the embedding; the last place has the last norm, the head and the loss.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...parallel.communicator import Communicator, SingleCommunicator, part
from ..configs.config import Config

STEP = 64  # unit in which ranks divide an inner size that is a multiple of it: a 4-bit block
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Stages:
    """The blocks of each rank of a pipeline.

    Attributes
    ----------
    comm : Communicator
        The ranks of the pipeline.
    chunks : int
        Number of parts of the blocks in each rank.
    layers : list of range
        The blocks of this rank, by chunk.
    ends : Communicator or None
        The first and the last rank, if both store the embedding because it is also the head.
    dtype : dtype
        Dtype of the hidden states between stages; weights of a stage may have another dtype.

    Raises
    ------
    ConfigError
        There are fewer blocks than parts.
    """

    def __init__(self, config: Config, comm: Communicator, chunks: int = 1) -> None:
        parts = comm.size * chunks
        if config.layers < parts:
            stages = f"{comm.size} stages" + f" of {chunks} chunks each" * (chunks > 1)
            problem = f"{config.layers} layers are not enough for {stages}"
            raise ConfigError(f"Stages: {problem}; use at most {config.layers} in all")
        self.comm, self.chunks, self.count = comm, chunks, config.layers
        all_parts = SingleCommunicator()
        all_parts.size = parts
        every = [part(config.layers, all_parts, place) for place in range(parts)]
        shared = () if config.indexer is None else config.indexer.shared
        for first in (blocks.start for blocks in every if shared and shared[blocks.start]):
            full = max(n for n in range(first) if not shared[n])
            problem = f"layer {first} begins a stage, and uses the choice of layer {full}"
            cure = "use another number of stages, or divide the batch (DataParallel)"
            raise ConfigError(f"Stages: {problem}; {cure}")
        ranges = every[comm.rank :: comm.size]
        self.layers = [range(blocks.start, blocks.stop) for blocks in ranges]
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        outer = comm.split(0 if self.first or self.last else 1)
        self.ends = outer if config.tied and comm.size > 1 and (self.first or self.last) else None
        self.tied = config.tied
        self.dtype: np.dtype[Any] = FLOAT32

    def like(self, array: Array, shape: Sequence[int]) -> Array:
        """Return a new array for hidden states between stages, on the device of ``array``."""
        return np.empty_like(array, self.dtype, shape=shape)

    def shared(self, array: Array) -> Array:
        """Return the last stage's array in all ranks; others pass one of its shape and dtype."""
        last: Array = self.comm.broadcast(array, self.comm.size - 1)
        return last

    def ends_with(self, chunk: int) -> bool:
        """Return whether this chunk of this rank has the last block of the model."""
        return self.last and chunk == self.chunks - 1

    def holds(self, layer: int) -> bool:
        """Return whether this rank has a block."""
        return any(layer in layers for layers in self.layers)

    def chunk_of(self, name: str) -> list[int]:
        """Return the chunks of this rank that use a parameter."""
        number = re.search(r"model\.layers\.(\d+)\.", name)
        if number is not None and int(number[1]) >= self.count:  # a draft head
            return [self.chunks - 1] if self.last else []
        if number is not None:
            return [i for i, layers in enumerate(self.layers) if int(number[1]) in layers]
        chunks = [0] if self.first and name == EMBEDDING else []
        if self.last and (name != EMBEDDING or self.tied):  # the last norm and the head
            chunks.append(self.chunks - 1)
        return chunks


def part_of_inner(inner: int, comm: Communicator, rank: int) -> slice:
    """Return a rank's part of an inner size: parts are as even as possible, in units of STEP."""
    step = STEP if inner % STEP == 0 and inner >= STEP * comm.size else 1
    units = part(inner // step, comm, rank)
    return slice(units.start * step, units.stop * step)
